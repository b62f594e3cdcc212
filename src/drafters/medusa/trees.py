"""Static draft trees: which of each head's guesses are tried behind which.

A node is a path of ranks: (0, 2) is the third guess of head 1 behind the first guess of head 0. The module knows
neither tokens nor networks; a tree is fixed before anything is drafted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...core.checks import real_number, whole_number
from ...core.errors import InvalidRequest
from ...core.tree import ROOT

Path = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]
"""accuracies[head][rank]: how often the head's guess of that rank (0 is its first) is what the target says."""

# The trees that the authors measured for their models (FasterDecoding/Medusa, medusa/model/medusa_choices.py, commit
# 5e98053), each digit a rank and the best nodes first.
PUBLISHED = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 "
        "005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    "vicuna_7b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7 "
        "030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31 "
        "0020 70 14"
    ),
    "vicuna_7b_stage1": (
        "0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 "
        "011 004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51"
    ),
    "vicuna_13b_stage2": (
        "0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12 "
        "0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013 "
        "102 0011 300 1000"
    ),
    "vicuna_13b_stage1": (
        "0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 "
        "13 011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16"
    ),
    "vicuna_33b_stage2": (
        "0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030 "
        "005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102 "
        "22"
    ),
    "vicuna_33b_stage1": (
        "0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 "
        "60 020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021"
    ),
    "zephyr_stage2": (
        "0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011 "
        "004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23"
    ),
}


@dataclass(frozen=True)
class StaticTree:
    """A tree of guesses, level by level, siblings by rank; parents come before children.

    Attributes:
        parents: index of each node's parent, -1 for the guesses of head 0.
        ranks: which guess of its head each node is, 0 for the first.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], nodes: int | None = None) -> StaticTree:
        """Builds a tree from paths of ranks in order of preference; a path brings the paths that lead to it.

        Args:
            paths: such as `[(0,), (1,), (0, 0)]`.
            nodes: most nodes; what is left of the budget goes to the first paths. None keeps all.

        Raises:
            InvalidRequest: no path, or one that is empty or holds something else than ranks.
        """
        kept: dict[Path, None] = {}
        for given in paths:
            path = tuple(whole_number("each rank of a tree's paths", rank, 0) for rank in given)
            if not path:
                raise InvalidRequest("a tree's paths must hold at least one rank each, got an empty one")
            for length in range(1, len(path) + 1):
                if nodes is None or len(kept) < nodes:
                    kept.setdefault(path[:length])
        if not kept:
            raise InvalidRequest("a tree needs at least one path, got none")
        ordered = sorted(kept, key=lambda path: (len(path), path))
        place = {path: node for node, path in enumerate(ordered)} | {(): ROOT}
        return cls(tuple(place[path[:-1]] for path in ordered), tuple(path[-1] for path in ordered))

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The path of ranks to each node."""
        paths: list[Path] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(() if parent == ROOT else paths[parent]), rank))
        return tuple(paths)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """The nodes of each level."""
        depths = [len(path) for path in self.paths]
        starts = [depths.index(depth) for depth in range(1, self.depth + 1)]
        return tuple(range(*ends) for ends in itertools.pairwise([*starts, len(depths)]))

    @cached_property
    def contexts(self) -> tuple[tuple[int, ...], ...]:
        """For each level the nodes of the level before (-1 before the first) that have children there."""
        return tuple(tuple(dict.fromkeys(self.parents[node] for node in level)) for level in self.levels)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """For each level how many guesses of its head are looked at, siblings that are left out among them."""
        return tuple(1 + max(self.ranks[node] for node in level) for level in self.levels)

    @property
    def depth(self) -> int:
        """Number of levels, which is how many heads the tree needs."""
        return len(self.paths[-1]) if self.parents else 0

    def cut(self, depth: int) -> StaticTree:
        """Returns the first `depth` levels; of 0 levels, a tree without nodes."""
        size = sum(len(level) for level in self.levels[:depth])
        return StaticTree(self.parents[:size], self.ranks[:size])


def published_tree(name: str, nodes: int | None = None, depth: int | None = None) -> StaticTree:
    """Returns a tree of the Medusa authors, or the best `nodes` nodes of its first `depth` levels.

    Raises:
        InvalidRequest: no such tree.
    """
    if name not in PUBLISHED:
        raise InvalidRequest(f"no published tree {name!r}; known: {', '.join(PUBLISHED)}")
    paths = ([int(rank) for rank in path] for path in PUBLISHED[name].split() if depth is None or len(path) <= depth)
    return StaticTree.from_paths(paths, nodes)


def expected_tau(tree: StaticTree, accuracies: Accuracies) -> float:
    """Returns how many tokens a round of the tree is expected to commit, the target's own one included.

    One, and for each node the product of the accuracies along its path, as if the heads erred independently
    (arXiv:2401.10774, section 2.3.3). A guess whose accuracy is not listed counts for nothing.
    """
    return 1.0 + sum(_worths(tree, accuracies))


def greedy_tree(accuracies: Accuracies, nodes: int, depth: int | None = None) -> StaticTree:
    """Returns the tree that takes the best node on offer, again and again (arXiv:2401.10774, section 2.3.3).

    A node's worth is the product of the accuracies along its path and never more than its parent's. So the nodes
    taken are the worthiest of all, and no tree of as many nodes is expected to commit more: `optimal_tree` finds none.

    Args:
        accuracies: of the heads, by rank.
        nodes: most nodes; guesses that are never right are left out.
        depth: most levels; one for each head when None.

    Raises:
        InvalidRequest: accuracies that are none, numbers that are not whole or too small, or nothing is ever right.
    """
    table = _ranked(accuracies, nodes, depth)
    # (minus worth, path, place among the siblings by worth, worth of the parent): of equal nodes the shallower first
    offers: list[tuple[float, int, Path, int, float]] = []

    def offer(above: Path, place: int, base: float) -> None:
        if len(above) < len(table) and place < len(table[len(above)]):
            accuracy, rank = table[len(above)][place]
            heapq.heappush(offers, (-base * accuracy, len(above), (*above, rank), place, base))

    offer((), 0, 1.0)
    taken: list[Path] = []
    while offers and len(taken) < nodes:
        worth, _, path, place, base = heapq.heappop(offers)
        taken.append(path)
        offer(path[:-1], place + 1, base)
        offer(path, 0, -worth)
    return StaticTree.from_paths(taken)


def optimal_tree(accuracies: Accuracies, nodes: int, depth: int | None = None) -> StaticTree:
    """Returns a tree of at most `nodes` nodes and `depth` levels that no other is expected to beat.

    By dynamic programming, as Sequoia's (arXiv:2402.12374, section 3.1): what n nodes behind one context of a level
    are worth follows from what fewer are worth one level further. With accuracies that do not depend on the path
    it can only equal `greedy_tree`; it is its check.

    Args:
        accuracies: of the heads, by rank.
        nodes: most nodes.
        depth: most levels; one for each head when None.

    Raises:
        InvalidRequest: as of `greedy_tree`.
    """
    table = _ranked(accuracies, nodes, depth)
    below = [0.0] * (nodes + 1)  # what n nodes behind a node are worth, by n
    shares: list[list[list[int]]] = []  # shares[level][place][n]: nodes of n that go to the sibling and its subtree
    for siblings in reversed(table):
        best, level = [0.0] * (nodes + 1), []
        for accuracy, _ in reversed(siblings):
            gains = [0.0, *(accuracy * (1.0 + below[n]) for n in range(nodes))]
            share = [max(range(n + 1), key=lambda own: gains[own] + best[n - own]) for n in range(nodes + 1)]
            best = [gains[own] + best[n - own] for n, own in enumerate(share)]
            level.append(share)
        shares.append(level[::-1])
        below = best
    shares.reverse()
    taken: list[Path] = []
    contexts: list[tuple[Path, int]] = [((), nodes)]
    while contexts:
        above, left = contexts.pop()
        if len(above) == len(table):
            continue
        for (_, rank), share in zip(table[len(above)], shares[len(above)], strict=True):
            own = share[left]
            left -= own
            if own:
                taken.append((*above, rank))
                contexts.append(((*above, rank), own - 1))
    return StaticTree.from_paths(taken)


def check_accuracies(accuracies: Accuracies) -> list[list[float]]:
    """Returns the accuracies as lists of floats.

    Raises:
        InvalidRequest: a list is missing or empty, a number is no probability, or a head's sum to more than 1.
    """
    if isinstance(accuracies, str) or not isinstance(accuracies, Sequence) or not accuracies:
        raise InvalidRequest(f"accuracies must be one list of numbers a head, got {accuracies!r}")
    checked = []
    for head, rates in enumerate(accuracies):
        if isinstance(rates, str) or not isinstance(rates, Sequence) or not rates:
            raise InvalidRequest(f"accuracies of head {head} must be numbers by rank, got {rates!r}")
        checked.append([real_number(f"an accuracy of head {head}", rate, 0.0, 1.0) for rate in rates])
        if sum(checked[-1]) > 1 + 1e-6:
            raise InvalidRequest(f"accuracies of head {head} must sum to at most 1, got {sum(checked[-1]):g}")
    return checked


def _ranked(accuracies: Accuracies, nodes: int, depth: int | None) -> list[list[tuple[float, int]]]:
    """Checks the arguments; returns for each level the (accuracy, rank) of guesses ever right, best first."""
    whole_number("nodes", nodes)
    levels = len(accuracies) if depth is None else whole_number("depth", depth)
    table = [
        sorted(((rate, rank) for rank, rate in enumerate(rates) if rate > 0.0), key=lambda pair: -pair[0])
        for rates in check_accuracies(accuracies)[:levels]
    ]
    if not table[0]:
        raise InvalidRequest("the first head is never right (accuracies of 0); no tree can be chosen for it")
    return table


def _worths(tree: StaticTree, accuracies: Accuracies) -> list[float]:
    worths: list[float] = []
    for path, parent in zip(tree.paths, tree.parents, strict=True):
        rates = accuracies[len(path) - 1] if len(path) <= len(accuracies) else ()
        rate = rates[path[-1]] if path[-1] < len(rates) else 0.0
        worths.append(rate * (1.0 if parent == ROOT else worths[parent]))
    return worths
