"""Conversations as token ids, and which of the tokens an assistant would have to write.

The chat template is asked, not read: what it adds to a conversation when an answer is added to it is the answer's. So
any template will do that writes a conversation as it wrote its beginning. This module knows no file and no packing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from draftwood.core.errors import InvalidRequest

Message = Mapping[str, Any]
Pieces = list[tuple[list[int], list[bool]]]


def encode_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Sequence[Any] | None = None,
    unfinished: bool = False,
) -> Pieces:
    """Renders and tokenizes a conversation.

    Learnt are the assistant's words and the token that ends its turn: neither how the turn begins nor white space that
    the template puts behind its end, which nobody has to write. A token that holds the end of the prompt and the
    beginning of an answer is not learnt.

    Args:
        messages: with `role` and `content`, and what else the template asks of them, such as `tool_calls`.
        tokenizer: with a chat template; a fast one.
        tools: that the assistant may call, as JSON schemas; for the template.
        unfinished: the last answer breaks off, so that its end is left out.

    Returns:
        Token ids, and for each of them whether it is learnt. One pair for the conversation; or, if the template writes
        an answer differently once others follow it (it drops earlier reasoning, say), a pair for each answer, with
        everything before it and nothing of that learnt.

    Raises:
        InvalidRequest: there is no assistant turn; the template does not take the conversation, or does not begin an
            answer as it ends a prompt; the tokenizer has no template or is a slow one.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest("the tokenizer has no chat template for 'messages'; give 'text' instead")
    if not tokenizer.is_fast:
        raise InvalidRequest(f"{type(tokenizer).__name__} cannot tell which tokens are whose; give 'text'")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise InvalidRequest("no assistant turn, and so nothing to learn; its role is 'assistant'")

    def render(chat: Sequence[Message], prompt: bool) -> str:
        return _render(chat, tokenizer, tools, prompt)

    whole = render(messages, False)
    spans, texts = [], []
    for index in answers:
        before, after = (render(messages[: index + end], not end) for end in (0, 1))
        if not after.startswith(before):
            raise InvalidRequest(
                f"the chat template does not write message {index + 1} behind the prompt it gives for it, so that the "
                "answer's tokens cannot be told; give 'text'"
            )
        spans.append((len(before), len(after)))
        texts.append(after)
    if all(whole.startswith(text) for text in texts):
        texts, parts = [whole], [spans]
    else:
        parts = [[span] for span in spans]
    if unfinished and answers[-1] + 1 == len(messages):
        content = messages[-1]["content"].strip()
        end = texts[-1].rindex(content) + len(content)
        texts[-1] = texts[-1][:end]
        parts[-1][-1] = (parts[-1][-1][0], end)
    return [_encode(text, part, tokenizer) for text, part in zip(texts, parts, strict=True)]


def _render(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] | None, prompt: bool
) -> str:
    chat = [dict(message) for message in messages]
    if not chat:  # a conversation that the assistant opens: templates want at least one message
        return ""
    given: dict[str, Any] = {} if tools is None else {"tools": list(tools)}
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt, **given))
    except (TemplateError, TypeError, ValueError) as error:  # a template may stumble over what a message holds
        raise InvalidRequest(f"the chat template does not take this conversation: {error}") from error


def _encode(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids: list[int] = list(encoded.input_ids)
    places: list[tuple[int, int]] = encoded["offset_mapping"]
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    learnt = [False] * len(ids)
    for start, stop in spans:
        inside = [index for index, (begin, _) in enumerate(places) if start <= begin < stop]
        ends = [index for index in inside if ids[index] in special]
        if ends and not text[places[ends[-1]][1] : stop].strip():
            inside = [index for index in inside if index <= ends[-1]]
        for index in inside:
            learnt[index] = True
    return ids, learnt
