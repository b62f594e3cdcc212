"""What a drafter hands in (Proposal) and what a rule hands back (Verdict)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .tree import TokenTree


@dataclass(frozen=True, eq=False)
class Proposal:
    """A token tree and the law its tokens were drawn by.

    Attributes:
        tree: the drafted tokens.
        law: [batch, nodes, vocabulary] float, or None. Row i is the distribution q that node i was drawn from
            *given its elder siblings* (lower node index, same parent). A node that was chosen (top-k, n-gram,
            argmax) has a one-hot row. None says that every node was chosen; that is lossless whatever the
            drafter did, because nothing but the candidates matters then. A law only buys acceptance.
    """

    tree: TokenTree
    law: Tensor | None = None

    @classmethod
    def empty(cls, batch: int) -> Proposal:
        """Returns the proposal that drafts nothing."""
        return cls(TokenTree.empty(batch))


@dataclass(frozen=True)
class Verdict:
    """What a rule decided, on the host, ragged over the rows.

    Attributes:
        paths: for each row the accepted nodes, from the root's child downwards.
        tokens: for each row the tokens to commit: those of the path, then one drawn from the target.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
