"""What a caller asks for: prompts, limits and settings, checked before anything is decoded.

Errors name the value that was given and what would work. The module knows no drafter and no rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from .checks import whole_number
from .errors import InvalidRequest
from .settings import SamplingParams
from .target import Target

Chat = Sequence[Mapping[str, Any]]
Prompt = str | Chat | Sequence[int] | Tensor
"""A text, a chat (messages with role and content), or token ids."""


@dataclass(frozen=True)
class Limits:
    """When a text ends. Each condition is judged token by token, as plain decoding would.

    Attributes:
        max_new_tokens: exact number of new tokens, if nothing ends the text before; None with `max_length`.
        max_length: the same, counted with the prompt.
        eos_token_id: end-of-text ids; None takes the target's own, an empty list switches them off.
        stop_strings: texts that end the output as soon as it contains one; they remain part of it.
        stopping_criteria: a caller's own criteria of transformers.
        max_time: seconds after which the text ends at the next token.
        seed: of all randomness of the text.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria] | None = None
    max_time: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidRequest(f"seed must be an integer, got {self.seed!r}")
        for token in self.eos_ids or ():
            if isinstance(token, bool) or not isinstance(token, int):
                raise InvalidRequest(f"eos_token_id must be a token id or a list of them, got {self.eos_token_id!r}")

    @property
    def eos_ids(self) -> tuple[int, ...] | None:
        """The end-of-text ids given; None to take the target's own."""
        given = self.eos_token_id
        if given is None:
            return None
        return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)


DEFAULT_NEW_TOKENS = 128


def encode(target: Target, prompt: Prompt) -> list[int]:
    """Returns a prompt's token ids.

    Raises:
        InvalidRequest: it is empty, holds ids outside the vocabulary, or needs a tokenizer that is missing.
    """
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise InvalidRequest(f"a prompt is a string, a chat or token ids, got {prompt!r}")
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        tokenizer = target.tokenizer
        if tokenizer is None:
            raise InvalidRequest("the target has no tokenizer; pass token ids, or Target(model, tokenizer)")
        if isinstance(prompt, str):
            ids = tokenizer(_text_of("the prompt", prompt)).input_ids
        else:
            if not getattr(tokenizer, "chat_template", None):
                raise InvalidRequest("the target's tokenizer has no chat template; pass the prompt as a string")
            messages = [_message(message) for message in prompt]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = list(prompt)
    if not ids:
        raise InvalidRequest(f"empty prompt: {prompt!r} has no tokens; at least one is needed")
    size = target.vocabulary_size
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidRequest(f"token ids must be integers, got {token!r}")
        if not 0 <= token < size:
            raise InvalidRequest(f"token id {token} is outside the vocabulary of {size} (0 to {size - 1})")
    return [int(token) for token in ids]


def split_settings(settings: Mapping[str, Any]) -> tuple[Limits, SamplingParams]:
    """Parts a call's settings into limits and sampling.

    Raises:
        InvalidRequest: a name that is neither, or a value that cannot work.
    """
    limits = {name: value for name, value in settings.items() if name in Limits.__dataclass_fields__}
    rest = {name: value for name, value in settings.items() if name not in limits}
    return replace(Limits(), **limits), SamplingParams.from_fields(**rest)


def longest(limits: Limits, prompt: int, context: int | None) -> int:
    """The length, prompt included, at which a text ends."""
    if context is not None and prompt >= context:
        raise InvalidRequest(f"the prompt has {prompt} tokens; the model's context of {context} leaves no room")
    if limits.max_length is not None:
        if limits.max_new_tokens is not None:
            raise InvalidRequest("give max_new_tokens or max_length, not both")
        if whole_number("max_length", limits.max_length) <= prompt:
            raise InvalidRequest(f"max_length {limits.max_length} leaves no room behind a prompt of {prompt} tokens")
        wanted = limits.max_length
    elif limits.max_new_tokens is not None:
        wanted = prompt + whole_number("max_new_tokens", limits.max_new_tokens)
    else:
        wanted = prompt + DEFAULT_NEW_TOKENS if context is None else min(prompt + DEFAULT_NEW_TOKENS, context)
    if context is not None and wanted > context:
        raise InvalidRequest(
            f"{prompt} prompt tokens and {wanted - prompt} new ones exceed the model's context of {context}; "
            f"at most {context - prompt} new tokens fit"
        )
    return wanted


def _text_of(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a string, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is no valid Unicode text: {error}") from error
    return text


def _message(message: Any) -> dict[str, Any]:
    """Checks one message of a chat; what else it holds (tool calls, say) is the template's business."""
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise InvalidRequest(f"a chat is a list of messages with role and content, got {message!r} in it")
    return {**message, "content": _text_of("the content of a message", message["content"])}


def kept(value: Any) -> Any:
    """Returns `value`, as a list if it could be read only once."""
    return list(value) if isinstance(value, Iterator) else value


def as_list(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Tells one prompt from a list of prompts."""
    if isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.dim() == 1):
        return True, [prompts]
    if isinstance(prompts, Tensor) and prompts.dim() == 2:
        return False, list(prompts)
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"a prompt is a string, a chat or token ids, got {type(prompts).__name__}")
    if not prompts:
        raise InvalidRequest("empty prompt: [] has no tokens and holds no prompts")
    if isinstance(prompts[0], (int, Mapping)):
        return True, [prompts]
    return False, list(prompts)
