"""When a text ends: the committed tokens are judged one by one, so that it ends exactly where plain decoding ends.

A round may commit several tokens; whatever lies behind the first one that ends the text is never kept. The text
keeps the token that ended it: the end-of-sequence token, or the token that completes a stop string, as
`transformers`' `generate` does.

This module does not know models, caches or rounds.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from .errors import InvalidRequest


class Stopper:
    """The stop conditions of a row. It keeps nothing between calls, so that rows may share one.

    Args:
        eos_token_ids: tokens that end the text.
        max_tokens: length at which the text ends, prompt included.
        stop_strings: strings that end the text as soon as a token completes one, even inside the token.
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
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        criteria: Iterable[Any] | None = None,
        max_time: float | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._eos = frozenset(eos_token_ids)
        self._criteria = _checked_criteria(criteria)
        self._device = device
        self._max_tokens = max_tokens
        self._deadline = None if max_time is None else time.monotonic() + _checked_seconds(max_time)
        self._strings = None
        strings = _checked_strings(stop_strings)
        if strings:
            if tokenizer is None:
                raise InvalidRequest(f"stop_strings={strings!r} need the target's tokenizer; pass it to Target")
            self._strings = _StopStrings(strings, tokenizer)

    def for_row(self, max_tokens: int) -> Stopper:
        """Returns the same conditions with another length limit; the tables of the stop strings are shared."""
        other = copy.copy(self)
        other._max_tokens = max_tokens
        return other

    def check(self, tokens: Sequence[int], prompt_length: int) -> str | None:
        """Judges a text after one more token.

        Args:
            tokens: prompt and committed tokens, the new one last.
            prompt_length: how many of them are the prompt.

        Returns:
            `"eos"`, `"stop_string"`, `"criteria"`, `"length"` or `"time"`, the first that holds; None to go on.
        """
        if len(tokens) <= prompt_length:
            return None
        if tokens[-1] in self._eos:
            return "eos"
        if self._strings is not None and self._strings.end(tokens):
            return "stop_string"
        if self._criteria and self._any_criterion(tokens):
            return "criteria"
        if len(tokens) >= self._max_tokens:
            return "length"
        if self._deadline is not None and time.monotonic() > self._deadline:
            return "time"
        return None

    def _any_criterion(self, tokens: Sequence[int]) -> bool:
        input_ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        # All of them are called, as in `generate`: one that counts its calls must not miss any.
        stops = [bool(torch.as_tensor(criterion(input_ids, None)).any()) for criterion in self._criteria]
        return any(stops)


class _StopStrings:
    """Stop strings, judged by Hugging Face's own criterion; only tokens that can complete one reach it."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self._criterion = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:
            raise InvalidRequest(f"stop_strings={strings!r}: {error}") from error
        table = self._criterion.embedding_vec  # per token: positions inside the strings, end overlaps, length
        first = self._criterion.max_valid_positions * self._criterion.num_stop_strings
        self._completing = frozenset((table[:, first:-1] > 0).any(-1).nonzero().flatten().tolist())
        self._window = self._criterion.maximum_token_len

    def end(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last token completes a stop string."""
        if tokens[-1] not in self._completing:
            return False
        return bool(self._criterion(torch.tensor([tokens[-self._window :]], dtype=torch.int64), None).item())


def _checked_strings(value: Any) -> list[str]:
    strings = [value] if isinstance(value, str) else list(value or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InvalidRequest(f"stop_strings must be non-empty strings, got {string!r}")
    return strings


def _checked_criteria(value: Any) -> list[Any]:
    criteria = [value] if callable(value) and not isinstance(value, Iterable) else list(value or ())
    for criterion in criteria:
        if not callable(criterion):
            raise InvalidRequest(f"criteria must be StoppingCriteria, got {criterion!r}")
    return criteria


def _checked_seconds(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidRequest(f"max_time must be a number of seconds above 0, got {value!r}")
    return float(value)
