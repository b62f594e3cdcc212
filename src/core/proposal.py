"""What a drafter hands in (Proposal) and what a rule hands back (Verdict)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .tree import TokenTree

if TYPE_CHECKING:
    from .target import Target


@dataclass(frozen=True, eq=False)
class ExitStates:
    """What a drafter that ran the target's own first layers hands over, so that they need not run again.

    Their keys and values must be in the open columns of the target's cache, for every column that is scored.

    Attributes:
        layer: E; blocks 0 to E - 1 have been run.
        hidden: [batch, 1 + nodes, width], what block E - 1 put out for the newest committed token and each node.
        rest: a view of the target (core/views.py) that runs blocks E onwards.
    """

    layer: int
    hidden: Tensor
    rest: Target


@dataclass(frozen=True, eq=False)
class Proposal:
    """A token tree and the law its tokens were drawn by.

    Attributes:
        tree: the drafted tokens.
        law: [batch, nodes, vocabulary] float, or None. Row i is the distribution q that node i was drawn from
            *given its elder siblings* (lower node index, same parent). A node that was chosen (top-k, n-gram,
            argmax) has a one-hot row. None says that every node was chosen; that is lossless whatever the
            drafter did, because nothing but the candidates matters then. A law only buys acceptance.
        exit: where the target's forward may go on from, or None to score the tree from its first layer.
    """

    tree: TokenTree
    law: Tensor | None = None
    exit: ExitStates | None = None

    @classmethod
    def empty(cls, batch: int) -> Proposal:
        """Returns the proposal that drafts nothing."""
        return cls(TokenTree.empty(batch))

    def to(self, device: torch.device) -> Proposal:
        """Returns the same proposal with tree and law on `device`."""
        return replace(self, tree=self.tree.to(device), law=None if self.law is None else self.law.to(device))


@dataclass(frozen=True)
class Verdict:
    """What a rule decided, on the host, ragged over the rows.

    Attributes:
        paths: for each row the accepted nodes, from the root's child downwards.
        tokens: for each row the tokens to commit: those of the path, then one drawn from the target.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
