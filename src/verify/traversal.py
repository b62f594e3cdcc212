"""Speculative sampling, leaf to root: a path is accepted as a whole, so that no early mismatch ends it too soon.

Like rejection it knows the law of every node and nothing of the drafter, and commits text of the target's law; on
the same drafts it accepts at least as many tokens: more where candidates were drawn on several levels, just as many
where all were chosen. It reads the distributions of more nodes for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..core.proposal import Proposal, Verdict
from ..core.rule import DraftStyle, RandomSource
from ..core.tree import ROOT
from .rejection import DraftRow, acceptance, judge_rows, residual


class Traversal:
    """Traversal verification (arXiv:2505.12398); on a chain, block verification (Sun et al., arXiv:2403.10444)."""

    lossless = True
    drafts: DraftStyle = "drawn"
    samples = True

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        return judge_rows(_traverse, proposal, logits, sources)


@dataclass(eq=False)
class _Visit:
    """A node on the way from the root to the leaf at hand.

    Attributes:
        row: the row it is in.
        node: its index, or -1.
        share: how much of the target's distribution after the node is on offer below it and at it (the paper's
            P): the probability that the round ends there, given that no leaf before it was accepted. Always 1 at
            the root.
        untried: its children that are still in the tree.
    """

    row: DraftRow
    node: int
    share: float
    untried: Iterator[int]

    @cached_property
    def p(self) -> Tensor:
        """What the next token is drawn from if the round ends here, [vocabulary] float64.

        Read only when needed, as most leaves are rejected without it.
        """
        return self.row.p(self.node)

    def reject(self, q: Tensor) -> None:
        """Takes out a child that was drawn from q."""
        self.p, left = residual(self.p, q, self.share)
        withheld = 1.0 - self.share  # summed first: the share of the root must stay exactly 1
        self.share = left / (left + withheld) if left + withheld > 0.0 else 1.0


def _traverse(row: DraftRow, source: RandomSource) -> tuple[list[int], Tensor]:
    path = [_Visit(row, ROOT, 1.0, iter(row.children[0]))]
    while True:
        visit = path[-1]
        child = next(visit.untried, None)
        if child is not None:
            token, q = row.tokens[child], row.q(child)
            share = acceptance(visit.p, q, token, visit.share)
            if share > 0.0:
                path.append(_Visit(row, child, share, iter(row.children[1 + child])))
            else:
                visit.reject(q)
        elif source.accept(visit.share):
            return [accepted.node for accepted in path[1:]], visit.p
        else:
            path.pop()
            path[-1].reject(row.q(visit.node))
