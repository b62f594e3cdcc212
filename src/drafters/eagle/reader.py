"""A head at work on a batch of texts: its cache, and what it made of the newest pair of every row.

The cache holds true pairs only, (the target's feature at t, token t + 1). What the head reads of a draft, on outputs of
its own, stays open behind them and is forgotten by the next thing read. The module knows no drafting policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.cache import SlotCache
from ...core.masks import FULL, MaskPlan, tree_masks, tree_positions
from ...core.tree import TokenTree
from .network import Head

_PLAN = MaskPlan((FULL,), window=None, chunk=None, additive=False)


class HeadReader:
    """Runs an attached head row by row beside the text.

    Args:
        head: the head.
        chunk: most columns read in one forward, those of all rows together; bounds the memory of long prompts.

    Attributes:
        cache: one slot for every pair read; `cache.lengths[i]` pairs of row i are in it.
        roots: [rows, width], what the head put out after the newest pair of each row.
    """

    def __init__(self, head: Head, chunk: int) -> None:
        self._head, self._chunk = head, chunk
        self.cache = SlotCache(head.cache_layout)
        self.roots = torch.zeros(0, head.config.hidden_size, dtype=head.dtype, device=head.device)
        self._drafted: list[Tensor] = []

    def extend(self, count: int) -> None:
        """Adds `count` rows that have read nothing."""
        self.cache.extend(count)
        self.roots = torch.cat([self.roots, self.roots.new_zeros(count, self.roots.shape[1])])

    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.cache.select(rows)
        self.roots = self.roots[list(rows)]

    def read_text(self, tokens: Sequence[Sequence[int]], features: Sequence[Tensor], first: int) -> None:
        """Reads the next pairs of the rows from `first` on, in as many forwards as their length asks for.

        Args:
            tokens: for each row the tokens that follow the features.
            features: for each row [pairs, features x target width], what the target made of the tokens before.
            first: the first covered row; all from there on are covered.
        """
        counts = [len(row) for row in tokens]
        chunk = max(self._chunk // len(tokens), 1)
        for start in range(0, max(counts), chunk):
            self._read_chunk(
                [row[start : start + chunk] for row in tokens],
                [row[start : start + chunk] for row in features],
                first,
            )

    def logits(self) -> Tensor:
        """Returns the logits after the newest pair of each row, [rows, draft vocabulary], and begins a draft there."""
        self._drafted = [self.roots[:, None]]
        return self._head.logits(self._drafted[0])[:, 0]

    def read_nodes(self, tree: TokenTree, opened: int) -> Tensor:
        """Reads the nodes of a draft from column `opened` on, each beside what the head put out at its parent.

        Returns:
            [rows, nodes - opened, draft vocabulary], the raw draft logits after each.
        """
        device, rows = self._head.device, tree.batch
        tree = tree.to(device)
        known = torch.cat(self._drafted, 1)  # [rows, 1 + opened, width]
        parents = tree.parents[:, opened:] + 1
        hidden = known[torch.arange(rows, device=device)[:, None], parents]
        lengths = self.cache.lengths
        span = self.cache.open(tree.width - opened, opened=opened)
        positions = tree_positions(lengths, 0, tree, device)
        mask = tree_masks(_PLAN, lengths, 0, tree, positions, span, self._head.dtype, opened)
        output = self._head(tree.tokens[:, opened:], hidden, positions[:, opened:], mask, self.cache)
        self._drafted.append(output)
        return self._head.logits(output)

    def _read_chunk(self, tokens: Sequence[Sequence[int]], features: Sequence[Tensor], first: int) -> None:
        device, counts = self._head.device, [len(row) for row in tokens]
        width, rows = max(counts), len(tokens)
        ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in tokens], device=device)
        padded = torch.nn.utils.rnn.pad_sequence(list(features), batch_first=True)  # [rows, width, joined]
        lengths, empty = self.cache.lengths[first:], TokenTree.empty(rows).to(device)
        span = self.cache.open(width, first)
        positions = tree_positions(lengths, width, empty, device)
        mask = tree_masks(_PLAN, lengths, width, empty, positions, span, self._head.dtype)
        output = self._head(ids, self._head.fuse(padded), positions, mask, self.cache)
        self.cache.advance(counts)
        # A row whose text ended in an earlier chunk keeps what it has.
        fresh = [row for row, count in enumerate(counts) if count]
        ends = [counts[row] - 1 for row in fresh]
        self.roots[[first + row for row in fresh]] = output[fresh, ends]
