"""Speculative sampling, root to leaf: the children of a node are tried one after another, the rest is sampled.

It knows the law that every node was drawn from, and nothing about how the drafter came to it. Chains, trees drawn
with or without replacement, chosen candidates and mixtures of them are one formula, because row i of the law is
already conditional on the elder siblings of node i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.proposal import Proposal, Verdict
from ..core.rule import DraftStyle, RandomSource
from ..core.tree import ROOT


class Rejection:
    """Multi-round speculative sampling.

    The chain is due to Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318), the tree to
    SpecInfer (arXiv:2305.09781) and, drawn without replacement, to Sequoia (arXiv:2402.12374).
    """

    lossless = True
    drafts: DraftStyle = "drawn"
    samples = True

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        return judge_rows(_walk, proposal, logits, sources)


@dataclass(frozen=True, eq=False)
class DraftRow:
    """One row of a proposal beside the target's logits.

    Attributes:
        tokens: the token of each node, on the host.
        children: entry 1 + node lists the candidate children of a node, eldest first; entry 0 those of the root.
        logits: [1 + nodes, vocabulary] float; row 1 + node is the target's after that node.
        law: [nodes, vocabulary] float, or None; what each node was drawn from.
    """

    tokens: list[int]
    children: list[list[int]]
    logits: Tensor
    law: Tensor | None

    def p(self, node: int) -> Tensor:
        """Returns the target's distribution after `node`, [vocabulary] float64."""
        return probabilities(self.logits[1 + node])

    def q(self, node: int) -> Tensor:
        """Returns the distribution that `node` was drawn from, [vocabulary] float64; a point mass if it was chosen.

        A node whose own probability has underflowed to zero counts as chosen, which is right for any node.
        """
        token = self.tokens[node]
        if self.law is not None:
            weights = _exact(self.law[node])
            if weights[token] > 0:
                return weights / weights.sum()
        point = _exact(torch.zeros_like(self.logits[0]))
        point[token] = 1.0
        return point


Judge = Callable[[DraftRow, RandomSource], tuple[list[int], Tensor]]
"""Returns the accepted path of a row and the weights, [vocabulary], of the token that follows it."""


def judge_rows(judge: Judge, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource]) -> Verdict:
    """Judges each row by itself, then draws the token that ends its round."""
    paths, tokens = [], []
    for row, source in zip(_rows(proposal, logits), sources, strict=True):
        path, weights = judge(row, source)
        paths.append(path)
        tokens.append([*(row.tokens[node] for node in path), source.draw(weights)])
    return Verdict(paths, tokens)


def acceptance(p: Tensor, q: Tensor, token: int, scale: float = 1.0) -> float:
    """Returns min(1, scale p(x) / q(x)) for a token x that was drawn from q.

    Args:
        p: [vocabulary] float64, sums to one.
        q: [vocabulary] float64, sums to one.
        token: x.
        scale: the share of p that is on offer.
    """
    ratio = scale * float(p[token] / q[token])
    return ratio if ratio < 1.0 else float(ratio >= 1.0)  # no probability (NaN) accepts nothing


def residual(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    """Returns what is left of the target once a token drawn from q has been rejected.

    Args:
        p: [vocabulary] float64, sums to one.
        q: [vocabulary] float64, sums to one.
        scale: the share of p that was on offer.

    Returns:
        max(0, scale p - q) normalised, [vocabulary] float64, and its sum before that. Where rounding leaves
        nothing, because q is all but p, the distribution is p.
    """
    left = (scale * p - q).clamp_(min=0.0)
    mass = float(left.sum())
    return (left / mass, mass) if mass > 0.0 else (p, 0.0)


def probabilities(logits: Tensor) -> Tensor:
    """Returns softmax(logits) in float64, [vocabulary]."""
    return torch.softmax(_exact(logits), -1)


def _walk(row: DraftRow, source: RandomSource) -> tuple[list[int], Tensor]:
    path: list[int] = []
    node = ROOT
    while True:
        p = row.p(node)
        for child in row.children[1 + node]:
            token, q = row.tokens[child], row.q(child)
            if source.accept(acceptance(p, q, token)):
                break
            p, _ = residual(p, q)
        else:
            return path, p
        path.append(child)
        node = child


def _rows(proposal: Proposal, logits: Tensor) -> Iterator[DraftRow]:
    tree = proposal.tree
    candidate = None if tree.candidate is None else tree.candidate.tolist()
    for index, (tokens, parents) in enumerate(zip(*tree.to_lists(), strict=True)):
        children: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for node, parent in enumerate(parents):
            if candidate is None or candidate[index][node]:
                children[1 + parent].append(node)
        law = None if proposal.law is None else proposal.law[index]
        yield DraftRow(tokens, children, logits[index], law)


def _exact(values: Tensor) -> Tensor:
    """Returns float64, on the device where that has it (Apple's has not)."""
    return (values.cpu() if values.device.type == "mps" else values).double()
