"""The sampling settings of a request, each checked when it is given.

A setting that cannot work is refused here, with the value received and what would work; nothing is ignored in
silence. This module does not know what the settings do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

import transformers as hf
from torch import Tensor

from .errors import InvalidRequest

Tokens = tuple[int, ...]
_INFINITY = float("inf")


@dataclass(frozen=True)
class _Real:
    """Accepts a number in an interval and returns it as a float."""

    low: float
    high: float = _INFINITY
    ends: str = "[]"
    hint: str = ""

    def __call__(self, name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool) and value != _INFINITY
        above = number and (value >= self.low if self.ends[0] == "[" else value > self.low)
        below = number and (value <= self.high if self.ends[1] == "]" else value < self.high)
        if not (above and below):
            interval = f"{self.ends[0]}{self.low:g}, {self.high:g}{self.ends[1]}"
            raise InvalidRequest(f"{name} must be a number in {interval}{self.hint}; got {value!r}")
        return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"{name} must be a whole number >= 0; got {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False; got {value!r}")
    return value


def _items(name: str, value: Any, what: str) -> list[Any]:
    value = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be {what}; got {value!r}")
    return list(value)


def _tokens(name: str, value: Any) -> Tokens:
    ids = tuple(_items(name, value, "a list of token ids"))
    if not ids or any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise InvalidRequest(f"{name} must be a non-empty list of token ids >= 0; got {value!r}")
    return ids


def _token_or_tokens(name: str, value: Any) -> Tokens:
    return _tokens(name, [value] if isinstance(value, int) else value)


def _sequences(name: str, value: Any) -> tuple[Tokens, ...]:
    return tuple(
        _tokens(f"each entry of {name}", entry) for entry in _items(name, value, "a list of lists of token ids")
    )


def _pair(name: str, value: Any, what: str) -> tuple[Any, Any]:
    pair = _items(name, value, what)
    if len(pair) != 2:
        raise InvalidRequest(f"{name} must be {what}; got {value!r}")
    return pair[0], pair[1]


def _biases(name: str, value: Any) -> tuple[tuple[Tokens, float], ...]:
    pairs = _items(name, value.items() if isinstance(value, dict) else value, "a list of [[token ids], bias]")
    listed = [_pair(f"each entry of {name}", pair, "a pair [[token ids], bias]") for pair in pairs]
    real = _Real(-_INFINITY, ends="[)")
    return tuple((_tokens(f"each key of {name}", ids), real(f"each bias of {name}", bias)) for ids, bias in listed)


def _decay(name: str, value: Any) -> tuple[int, float]:
    start, factor = _pair(name, value, "a pair (start, factor) such as (15, 1.6)")
    return _count(f"start of {name}", start), _Real(0.0, ends="()")(f"factor of {name}", factor)


def _watermark(name: str, value: Any) -> hf.WatermarkingConfig:
    if isinstance(value, dict):
        value = hf.WatermarkingConfig(**value)
    if not isinstance(value, hf.WatermarkingConfig):
        raise InvalidRequest(
            f"{name} must be a transformers.WatermarkingConfig; got {type(value).__name__} "
            "(SynthID keeps one state a row, so that it cannot judge the branches of a tree)"
        )
    config: Any = value
    config.validate()
    return value


_ONE_STATE_A_ROW = (
    hf.AlternatingCodebooksLogitsProcessor,
    hf.ClassifierFreeGuidanceLogitsProcessor,
    hf.PrefixConstrainedLogitsProcessor,
    hf.SynthIDTextWatermarkLogitsProcessor,
    hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)


def _processors(name: str, value: Any) -> tuple[Any, ...]:
    listed = tuple(_items(name, value, "a list of LogitsProcessor"))
    for processor in listed:
        if not callable(processor) or isinstance(processor, type):
            raise InvalidRequest(f"{name} must be a list of LogitsProcessor; got {processor!r} in it")
        if isinstance(processor, _ONE_STATE_A_ROW):
            raise InvalidRequest(
                f"{name}: {type(processor).__name__} depends on the index in the batch or on the order of calls, "
                "which a token tree does not keep; a LogitsProcessor that looks at its arguments alone would work"
            )
    return listed


_FROM_0_TO_1 = _Real(0.0, 1.0, "(]")
_PENALTY = _Real(0.0, ends="()", hint=" (1 is no penalty)")
_CUTOFF = _Real(0.0, 1.0, "[)", " (0 is off)")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; each field as in `transformers.GenerationConfig`.

    A temperature above 0 samples (`do_sample=True` there); 0 is greedy, and then the settings from `top_h` to
    `eta_cutoff` have no effect, as in `generate`. None leaves a setting off. `min_length` counts the prompt.

    `logits_processor` holds the caller's own processors. They are called with `input_ids` [n, length] int64 and
    `scores` [n, vocabulary] float32 as in `generate`, but the n rows are tree nodes: a processor must be a function
    of its arguments. One of the very class that a setting stands for takes that setting's place, as in `generate`.

    Raises:
        InvalidRequest: a value that cannot work.
    """

    temperature: Annotated[float, _Real(0.0, ends="[)", hint=" (0 is greedy)")] = 0.0
    top_h: Annotated[float | None, _FROM_0_TO_1] = None
    top_k: Annotated[int | None, _count] = None
    top_p: Annotated[float | None, _FROM_0_TO_1] = None
    min_p: Annotated[float | None, _Real(0.0, 1.0)] = None
    typical_p: Annotated[float | None, _FROM_0_TO_1] = None
    epsilon_cutoff: Annotated[float | None, _CUTOFF] = None
    eta_cutoff: Annotated[float | None, _CUTOFF] = None
    sequence_bias: Annotated[Any, _biases] = None
    encoder_repetition_penalty: Annotated[float | None, _PENALTY] = None
    repetition_penalty: Annotated[float | None, _PENALTY] = None
    no_repeat_ngram_size: Annotated[int | None, _count] = None
    encoder_no_repeat_ngram_size: Annotated[int | None, _count] = None
    bad_words_ids: Annotated[Any, _sequences] = None
    min_length: Annotated[int | None, _count] = None
    min_new_tokens: Annotated[int | None, _count] = None
    forced_bos_token_id: Annotated[int | None, _count] = None
    forced_eos_token_id: Annotated[Any, _token_or_tokens] = None
    remove_invalid_values: Annotated[bool, _flag] = False
    exponential_decay_length_penalty: Annotated[Any, _decay] = None
    suppress_tokens: Annotated[Any, _tokens] = None
    begin_suppress_tokens: Annotated[Any, _tokens] = None
    watermarking_config: Annotated[Any, _watermark] = None
    renormalize_logits: Annotated[bool, _flag] = False
    logits_processor: Annotated[Any, _processors] = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            value = setting.default if value is None else _checks()[setting.name](setting.name, value)
            object.__setattr__(self, setting.name, value)
        if self.min_length and self.min_new_tokens:
            raise InvalidRequest(
                f"min_length={self.min_length} and min_new_tokens={self.min_new_tokens} both set a least length; "
                "give one of them"
            )
        bos = None if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        for name, forced in {"forced_bos_token_id": bos, "forced_eos_token_id": self.forced_eos_token_id}.items():
            if forced and set(forced) <= set(self.suppress_tokens or ()):
                raise InvalidRequest(f"{name}={list(forced)} is in suppress_tokens, which leaves no token to take")

    @classmethod
    def from_fields(cls, **given: Any) -> SamplingParams:
        """Builds the settings from keyword arguments.

        Raises:
            InvalidRequest: an unknown name, or a value that cannot work.
        """
        known = [setting.name for setting in fields(cls)]
        for name in given:
            if name in _ELSEWHERE:
                raise InvalidRequest(f"{name}={given[name]!r}: {_ELSEWHERE[name]}")
            if name not in known:
                close = difflib.get_close_matches(name, known)
                advice = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
                raise InvalidRequest(f"unknown sampling setting {name!r}; {advice}")
        return cls(**given)


@cache
def _checks() -> dict[str, Callable[[str, Any], Any]]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


_ELSEWHERE = {
    "do_sample": "a temperature above 0 samples and temperature=0 is greedy; leave do_sample out",
    "num_beams": "there is no lossless speculative form of beam search; leave num_beams out",
    "guidance_scale": "classifier-free guidance, a second forward a token, is not supported; leave it out",
    "prefix_allowed_tokens_fn": "its batch index means nothing on a tree; a LogitsProcessor of your own would work",
}
