"""What speculation can gain, from acceptance and cost alone.

Symbols: alpha, the probability that a drafted token is accepted; gamma, tokens drafted a round; c, the cost of one
draft step over one single-token pass of the target; v, the cost of the verifying pass over the same. The papers
take v = 1; on a machine whose passes grow with their width it is not, and the difference decides.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..core.errors import InvalidRequest

LONGEST = 64
"""Longest draft that is tried."""


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected committed tokens a round, bonus token included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Independent acceptances of equal probability (Leviathan et al. 2023, arXiv:2211.17192, eq. 1).

    Raises:
        InvalidRequest: alpha outside [0, 1] or gamma below 0.
    """
    _check(alpha, gamma)
    return gamma + 1.0 if alpha == 1 else (1 - math.pow(alpha, gamma + 1)) / (1 - alpha)


def expected_tokens_of_lengths(alpha: float, reaching: Sequence[float]) -> float:
    """Expected committed tokens a round of drafts whose length varies: 1 + sum over d of reaching[d-1] alpha^d.

    Args:
        alpha: acceptance probability.
        reaching: entry d - 1 is the share of rounds whose draft has a token at depth d. All ones for `gamma` depths
            is `expected_tokens(alpha, gamma)`.
    """
    _check(alpha, 0)
    return 1.0 + sum(share * math.pow(alpha, depth) for depth, share in enumerate(reaching, start=1))


def expected_tokens_by_depth(rates: Sequence[float]) -> float:
    """Expected committed tokens a round of a chain whose token d is accepted with rate d, given the ones before."""
    reached: Iterable[float] = itertools.accumulate(rates, operator.mul)
    return 1.0 + sum(reached)


def speedup(alpha: float, gamma: int, c: float, v: float = 1.0) -> float:
    """Expected speedup over plain decoding: expected tokens over (gamma c + v) (arXiv:2211.17192, theorem 3.8).

    Raises:
        InvalidRequest: a value outside its range.
    """
    check_costs(c, v)
    return expected_tokens(alpha, gamma) / (gamma * c + v)


def check_costs(c: float, v: float) -> None:
    """Refuses costs that no machine has.

    Raises:
        InvalidRequest: c below 0, v not above it, or either not finite.
    """
    if not (0 <= c < math.inf and 0 < v < math.inf):
        raise InvalidRequest(f"c must be >= 0 and v > 0, both finite, got c={c!r}, v={v!r}")


def best_gamma(alpha: float, c: float, v: Callable[[int], float] | None = None) -> int:
    """Returns the draft length of the greatest expected speedup; 0 says: do not draft.

    Args:
        alpha: acceptance probability.
        c: draft cost.
        v: cost of verifying gamma drafted tokens; 1 whatever gamma when None.
    """
    cost = v or (lambda _: 1.0)
    # Ties go to the shorter draft.
    return max(range(LONGEST + 1), key=lambda gamma: (speedup(alpha, gamma, c, cost(gamma) if gamma else 1.0), -gamma))


def break_even_alpha(gamma: int, c: float, v: float = 1.0) -> float | None:
    """Returns the acceptance probability above which drafting pays; None where even certain acceptance does not.

    With v = 1 and gamma = 1 it is c itself.
    """
    _check(0.0, gamma)
    if speedup(1.0, gamma, c, v) < 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle, gamma, c, v) >= 1 else (middle, high)
    return high


@dataclass(frozen=True)
class PlannedTree:
    """A tree shape and what it is expected to commit.

    Attributes:
        parents: parent of each node, -1 for a child of the last committed token; parents come first.
        ranks: which sibling a node is, from 0.
        tokens: expected committed tokens a round, bonus token included.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens: float

    @property
    def depth(self) -> int:
        """Levels of the tree: draft steps a round."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return max(depths)


def expected_tokens_of_tree(parents: Sequence[int], ranks: Sequence[int], acceptance: Sequence[float]) -> float:
    """Expected committed tokens a round of a tree: one, and for each node the chance that its path is accepted.

    Args:
        parents: parent of each node, -1 for the root's children.
        ranks: which sibling each node is.
        acceptance: entry r is the probability that the sibling of rank r is the accepted one (Sequoia,
            arXiv:2402.12374, section 3.1); entries sum to at most 1.
    """
    reached: list[float] = []
    for parent, rank in zip(parents, ranks, strict=True):
        reached.append((reached[parent] if parent >= 0 else 1.0) * acceptance[rank])
    return 1.0 + sum(reached)


def best_tree(acceptance: Sequence[float], nodes: int, depth: int = LONGEST) -> PlannedTree:
    """Returns the tree of `nodes` nodes that commits most, for an acceptance vector by rank.

    A node's worth is the product of its path's acceptances, which falls along every path, so taking the worthiest
    node on offer, again and again, is optimal.

    Raises:
        InvalidRequest: acceptances that are no probabilities or sum to more than 1, or nodes below 0.
    """
    numbers = acceptance and all(
        isinstance(rate, int | float) and not isinstance(rate, bool) and rate >= 0 for rate in acceptance
    )
    if not numbers or sum(acceptance) > 1 + 1e-9:
        raise InvalidRequest(f"acceptance by rank must be probabilities that sum to at most 1, got {list(acceptance)}")
    if nodes < 0:
        raise InvalidRequest(f"nodes must be >= 0, got {nodes}")
    ordered = sorted(range(len(acceptance)), key=lambda rank: -acceptance[rank])
    parents: list[int] = []
    ranks: list[int] = []
    total = 1.0
    # (minus worth, depth, parent, place among the siblings by worth, worth of the parent)
    offers = [(-acceptance[ordered[0]], 1, -1, 0, 1.0)] if depth else []
    while offers and len(parents) < nodes:
        worth, level, parent, place, base = heapq.heappop(offers)
        if worth == 0:
            break
        node = len(parents)
        parents.append(parent)
        ranks.append(ordered[place])
        total -= worth
        if place + 1 < len(ordered):
            heapq.heappush(offers, (-base * acceptance[ordered[place + 1]], level, parent, place + 1, base))
        if level < depth:
            heapq.heappush(offers, (worth * acceptance[ordered[0]], level + 1, node, 0, -worth))
    return PlannedTree(tuple(parents), tuple(ranks), total)


def _check(alpha: float, gamma: int) -> None:
    if not 0 <= alpha <= 1:
        raise InvalidRequest(f"alpha must be in [0, 1], got {alpha!r}")
    if gamma < 0:
        raise InvalidRequest(f"gamma must be >= 0, got {gamma!r}")
