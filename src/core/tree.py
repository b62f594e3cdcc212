"""Token trees: the one shape in which every draft reaches the target.

A chain, Medusa's sparse tree, EAGLE-2's dynamic tree, merged n-grams and Lookahead's window are all token
trees. This module knows tokens and parents; it does not know who drafted them or how they will be judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .errors import InvalidRequest

ROOT = -1
_BITS = 63
"""Nodes that have a bit each in a signed number of 64 bits."""


@dataclass(frozen=True, eq=False)
class TokenTree:
    """A batch of token trees, ragged over the rows, parents before children.

    Attributes:
        tokens: [batch, nodes] int64; entries past a row's size are padding.
        parents: [batch, nodes] int64; index of the parent node, or -1 for a child of the last committed token.
        sizes: number of nodes in each row.
        candidate: [batch, nodes] bool, or None when every node is one. A node that is no candidate is scored
            but can never be committed (Lookahead's window).
    """

    tokens: Tensor
    parents: Tensor
    sizes: tuple[int, ...]
    candidate: Tensor | None = None

    @classmethod
    def empty(cls, batch: int) -> TokenTree:
        """Returns `batch` trees without nodes: what plain decoding drafts."""
        none = torch.zeros(batch, 0, dtype=torch.int64)
        return cls(none, none, (0,) * batch)

    @classmethod
    def chain(cls, tokens: Tensor, sizes: Sequence[int] | None = None) -> TokenTree:
        """Returns one chain a row.

        Args:
            tokens: [batch, gamma] int64.
            sizes: chain length of each row; all `gamma` when None.
        """
        batch, gamma = tokens.shape
        parents = torch.arange(-1, gamma - 1, device=tokens.device).expand(batch, gamma)
        return cls(tokens, parents, tuple(sizes) if sizes is not None else (gamma,) * batch)

    @classmethod
    def from_lists(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        candidate: Sequence[Sequence[bool]] | None = None,
    ) -> TokenTree:
        """Builds trees from Python lists, one pair of lists a row.

        Raises:
            InvalidRequest: a row's lists differ in length, or a parent does not come before its child.
        """
        for row, (row_tokens, row_parents) in enumerate(zip(tokens, parents, strict=True)):
            if len(row_tokens) != len(row_parents):
                raise InvalidRequest(f"row {row} has {len(row_tokens)} tokens but {len(row_parents)} parents")
            for node, parent in enumerate(row_parents):
                if not ROOT <= parent < node:
                    raise InvalidRequest(f"row {row}, node {node}: parent must be in [-1, {node}), got {parent}")
        sizes = tuple(len(row_tokens) for row_tokens in tokens)
        width = max(sizes, default=0)
        return cls(
            _pad(tokens, width, 0),
            _pad(parents, width, ROOT),
            sizes,
            None if candidate is None else _pad(candidate, width, 0).bool(),
        )

    @classmethod
    def from_paths(cls, rows: Sequence[Iterable[Sequence[int]]], budget: int | None = None) -> TokenTree:
        """Merges token paths into one prefix tree a row; equal prefixes share nodes.

        Args:
            rows: for each row, paths of token ids in order of preference.
            budget: most nodes in a row; later paths are cut off first. None means no limit.
        """
        all_tokens: list[list[int]] = []
        all_parents: list[list[int]] = []
        for paths in rows:
            tokens: list[int] = []
            parents: list[int] = []
            children: dict[tuple[int, int], int] = {}
            for path in paths:
                parent = ROOT
                for token in path:
                    node = children.get((parent, token))
                    if node is None:
                        if budget is not None and len(tokens) >= budget:
                            break
                        node = children[(parent, token)] = len(tokens)
                        tokens.append(token)
                        parents.append(parent)
                    parent = node
            all_tokens.append(tokens)
            all_parents.append(parents)
        return cls.from_lists(all_tokens, all_parents)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def width(self) -> int:
        """Nodes in the widest row."""
        return self.tokens.shape[1]

    @cached_property
    def valid(self) -> Tensor:
        """[batch, nodes] bool: which entries are nodes and which are padding."""
        sizes = torch.tensor(self.sizes, device=self.tokens.device)
        return torch.arange(self.width, device=self.tokens.device) < sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """[batch, nodes, nodes] bool: entry (i, j) says that j is i or an ancestor of i."""
        if self.parents.device.type == "cpu" and self.width <= _BITS:
            return self._spread_bits()
        return self._closure()

    def _spread_bits(self) -> Tensor:
        """On the host a node's ancestors are gathered in the bits of a number, those of its parent and itself."""
        rows = []
        for parents in self.parents.tolist():
            bits: list[int] = []
            for node, parent in enumerate(parents):
                bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
            rows.append(bits)
        packed = torch.tensor(rows, dtype=torch.int64).reshape(self.batch, self.width, 1)
        return packed >> torch.arange(self.width) & 1 > 0

    def _closure(self) -> Tensor:
        """The closure of "self and parent" by repeated squaring: log2(nodes) small products, any shape of tree."""
        width, device = self.width, self.tokens.device
        reach = torch.eye(width, device=device).expand(self.batch, width, width).clone()
        has_parent = (self.parents >= 0).to(reach.dtype)
        reach.scatter_add_(2, self.parents.clamp(min=0)[:, :, None], has_parent[:, :, None])
        steps = max(width - 1, 1).bit_length()
        for _ in range(steps):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach > 0

    @cached_property
    def depths(self) -> Tensor:
        """[batch, nodes] int64: 1 for a child of the last committed token."""
        return self.ancestors.sum(-1)

    @cached_property
    def height(self) -> int:
        """Depth of the deepest column, padding included, 0 without columns; trees from the host bring it along."""
        return int(self.depths.max()) if self.width else 0

    def to(self, device: torch.device | str) -> TokenTree:
        """Returns the same trees on `device`."""
        if self.tokens.device == torch.device(device):
            return self
        candidate = None if self.candidate is None else self.candidate.to(device)
        moved = TokenTree(self.tokens.to(device), self.parents.to(device), self.sizes, candidate)
        if self.tokens.device.type == "cpu":  # a copy from the device would wait for all that it has been given to do
            moved.__dict__["height"] = self.height
        return moved

    def to_lists(self) -> tuple[list[list[int]], list[list[int]]]:
        """Returns (tokens, parents) as Python lists without padding: one device-to-host copy."""
        both: list[list[list[int]]] = torch.stack([self.tokens, self.parents]).tolist()
        cut = [[row[:size] for row, size in zip(part, self.sizes, strict=True)] for part in both]
        return cut[0], cut[1]


def _pad(rows: Sequence[Sequence[int]] | Sequence[Sequence[bool]], width: int, fill: int) -> Tensor:
    padded = [[*row, *([fill] * (width - len(row)))] for row in rows]
    return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), width)
