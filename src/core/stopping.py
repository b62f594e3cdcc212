"""When a text ends: the committed tokens are judged one by one, so that it ends exactly where plain decoding ends.

A round may commit several tokens; whatever lies behind the first one that ends the text is never kept. The text
keeps the token that ended it (the end-of-sequence token, the one that completes a stop string, and all of it even
if the stop string ends inside), as `generate` of transformers does.

This module does not know models, caches or rounds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import transformers as hf

from .errors import InvalidRequest

StopReason = Literal["eos", "stop_string", "criteria", "length", "time"]
"""Why a text ended; where several hold, the one named first here."""

_KNOWN_CRITERIA: dict[type, StopReason] = {
    hf.EosTokenCriteria: "eos",
    hf.StopStringCriteria: "stop_string",
    hf.MaxLengthCriteria: "length",
    hf.MaxTimeCriteria: "time",
}


class Stopper:
    """The stop conditions of a row. It keeps no text, so that it may judge any number of rows.

    Args:
        eos_token_ids: tokens that end the text.
        max_tokens: length at which the text ends, prompt included.
        stop_strings: strings that end the text as soon as a token completes one; it may begin in the prompt.
        tokenizer: the target's; needed for stop strings.
        criteria: the caller's own `transformers.StoppingCriteria`; each is called after every token with
            `input_ids` [1, length] int64 and scores None.
        max_time: seconds from now after which the next token is the last one.
        device: where `criteria` find `input_ids`.

    Raises:
        InvalidRequest: a value that cannot work.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int] = (),
        *,
        max_tokens: int,
        stop_strings: str | Iterable[str] | None = None,
        tokenizer: Any = None,
        criteria: Iterable[Any] | None = None,
        max_time: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._criteria = _checked_criteria(criteria)
        self._device = device
        self._deadline = None if max_time is None else time.monotonic() + _checked_seconds(max_time)
        strings = _checked_strings(stop_strings)
        if strings and tokenizer is None:
            raise InvalidRequest(f"stop_strings={strings!r} need a tokenizer to compare text with; the target has none")
        self._strings = _StopStrings(strings, tokenizer) if strings else None

    def for_row(self, max_tokens: int) -> Stopper:
        """Returns the same conditions, the deadline included, with another length limit."""
        other = copy.copy(self)
        other._max_tokens = max_tokens
        return other

    def check(self, tokens: Sequence[int], prompt_length: int) -> StopReason | None:
        """Judges a text after one more token.

        Args:
            tokens: prompt and committed tokens, the new one last.
            prompt_length: how many of them are the prompt.

        Returns:
            Why the text ends, or None to go on.
        """
        if len(tokens) <= prompt_length:
            return None
        reasons = self._criteria_met(tokens)
        if tokens[-1] in self._eos:
            reasons.add("eos")
        if self._strings is not None and self._strings.completed(tokens):
            reasons.add("stop_string")
        if len(tokens) >= self._max_tokens:
            reasons.add("length")
        if self._deadline is not None and time.monotonic() > self._deadline:
            reasons.add("time")
        return next((reason for reason in get_args(StopReason) if reason in reasons), None)

    def _criteria_met(self, tokens: Sequence[int]) -> set[StopReason]:
        if not self._criteria:
            return set()
        input_ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        # All are called, as in `generate`: one that counts its calls must not miss any.
        met = [criterion for criterion in self._criteria if torch.as_tensor(criterion(input_ids, None)).any()]
        return {_KNOWN_CRITERIA.get(type(criterion), "criteria") for criterion in met}


class _StopStrings:
    """Looks for stop strings at the end of a text, decoding no more of it than could hold one."""

    def __init__(self, strings: list[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A token is at least one byte. Two more, since a decoder may drop a space before the first.
        self._reach = max(len(string.encode()) for string in strings) + 2

    def completed(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last token completes a stop string: some string occurs once more than without it."""
        start, end = max(len(tokens) - self._reach, 0), len(tokens)
        text = self._decode(tokens[start:])
        # A decoder may garble all of a run of bytes that begins or ends inside a character (of up to four bytes).
        for _ in range(3):
            if start == 0 or not text.startswith(_GARBLED):
                break
            start -= 1
            text = self._decode(tokens[start:])
        found = [string for string in self._strings if string in text]
        if not found:
            return False
        for _ in range(4):
            end -= 1
            before = self._decode(tokens[start:end])
            if not before.endswith(_GARBLED):
                break
        return any(_occurrences(string, text) > _occurrences(string, before) for string in found)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


_GARBLED = "\ufffd"


def _occurrences(string: str, text: str) -> int:
    """Counts also those that overlap."""
    return sum(text.startswith(string, index) for index in range(len(text)))


def _checked_strings(value: str | Iterable[str] | None) -> list[str]:
    if value is not None and not isinstance(value, Iterable):
        raise InvalidRequest(f"stop_strings must be a string or a list of strings, got {value!r}")
    strings = [value] if isinstance(value, str) else list(value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop_strings must be strings of at least one character; got {string!r}")
        if _GARBLED in string:
            raise InvalidRequest(f"stop_strings={string!r}: U+FFFD stands for half a character and cannot be matched")
    return strings


def _checked_criteria(value: Iterable[Any] | None) -> list[Any]:
    criteria = list(value) if isinstance(value, Iterable) else [] if value is None else [value]
    for criterion in criteria:
        if not callable(criterion) or isinstance(criterion, type):
            raise InvalidRequest(f"criteria must be a list of StoppingCriteria; got {criterion!r} in it")
    return criteria


def _checked_seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidRequest(f"max_time must be a number of seconds above 0; got {value!r}")
    return float(value)
