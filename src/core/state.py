"""The state of one call: rows of committed text, ragged, and the target's cache. Drafters read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .cache import SlotCache
from .rule import DraftStyle, RandomSource
from .sampling import Pipeline
from .stats import RowStats
from .stopping import Stopper
from .target import Target


@dataclass(eq=False)
class Row:
    """One text being decoded.

    Attributes:
        key: index of the prompt in the call.
        tokens: prompt and committed tokens.
        prompt_length: how many of `tokens` are the prompt.
        max_tokens: length at which the row ends, prompt included.
        pipeline: the logits processors of this row.
        stopper: judges the committed tokens one by one.
        source: the rule's randomness.
        generator: the drafter's randomness.
    """

    key: int
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    pipeline: Pipeline
    stopper: Stopper
    source: RandomSource
    generator: torch.Generator
    stats: RowStats = field(default_factory=RowStats)
    stop_reason: str | None = None

    @property
    def output(self) -> list[int]:
        """The committed tokens after the prompt."""
        return self.tokens[self.prompt_length :]


@dataclass(eq=False)
class DecodeState:
    """What a draft session sees of a call.

    Attributes:
        target: the target model.
        cache: the target's own cache; `cache.lengths[i]` tokens of row i are in it. All but the newest
            committed token of a row are cached between rounds.
        rows: the active rows, aligned with the cache.
        style: the candidates that the rule of this call accepts most of.
    """

    target: Target
    cache: SlotCache
    style: DraftStyle
    rows: list[Row] = field(default_factory=list)

    def room(self, row: int) -> int:
        """Returns the deepest draft of which every token could still be committed, before the bonus token."""
        current = self.rows[row]
        return max(current.max_tokens - len(current.tokens) - 1, 0)
