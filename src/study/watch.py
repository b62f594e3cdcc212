"""A drafter that is watched: which sibling was accepted, and what each round's verification took at which width.

The wrapper notes references while the clock runs and counts afterwards, so that a watched drafter is as fast as it
is by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.drafter import Drafter, DraftSession, FeatureName, Observation
from ..core.proposal import Proposal
from ..core.state import DecodeState
from ..core.target import Target
from ..core.tree import TokenTree


@dataclass
class RoundCounts:
    """What the watched rounds add up to.

    Attributes:
        tried_by_rank: nodes with more than r candidate children at which the path came by (index r).
        accepted_by_rank: how often the child of rank r was accepted there.
        passes: by width, pending token and drafted nodes of the widest row: [rounds, seconds from the draft's end to
            what was committed].
    """

    tried_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=dict)


class Watched(Drafter):
    """Another drafter, watched.

    Args:
        drafter: the one that drafts.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.rounds: list[tuple[float, TokenTree, list[list[int]]]] = []

    @property
    def features(self) -> frozenset[FeatureName]:  # type: ignore[override]
        """Those of the watched drafter."""
        return self.drafter.features

    def copy(self) -> Watched:
        """Returns a watched copy of the drafter, with rounds of its own."""
        return Watched(self.drafter.copy())

    def bind(self, target: Target) -> None:
        self.drafter.bind(target)

    def session(self, state: DecodeState) -> DraftSession:
        return _WatchedSession(self, self.drafter.session(state))

    def counts(self) -> RoundCounts:
        """Returns what has been seen since the last call, and forgets it."""
        rounds, self.rounds = self.rounds, []
        counts = RoundCounts()
        for seconds, tree, paths in rounds:
            total = counts.passes.setdefault(1 + tree.width, [0, 0.0])
            total[0] += 1
            total[1] += seconds
            _count_ranks(counts, tree, paths)
        return counts


class _WatchedSession(DraftSession):
    def __init__(self, log: Watched, session: DraftSession) -> None:
        self._log, self._session = log, session
        self._clock: float | None = None

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        self._session.admit(state, rows)

    def propose(self, state: DecodeState) -> Proposal:
        proposal = self._session.propose(state)
        self._clock = time.perf_counter()
        return proposal

    def observe(self, state: DecodeState, seen: Observation) -> None:
        if self._clock is not None:  # reading a prompt is no drafted round
            self._log.rounds.append((time.perf_counter() - self._clock, seen.proposal.tree, seen.verdict.paths))
            self._clock = None
        self._session.observe(state, seen)

    def retain(self, rows: Sequence[int]) -> None:
        self._session.retain(rows)


def _count_ranks(counts: RoundCounts, tree: TokenTree, paths: Sequence[Sequence[int]]) -> None:
    if not tree.width:
        return
    parents = tree.to_lists()[1]
    candidate = None if tree.candidate is None else tree.candidate.tolist()
    for row, path in enumerate(paths):
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents[row]):
            if candidate is None or candidate[row][node]:
                children.setdefault(parent, []).append(node)
        for parent, accepted in zip((-1, *path), (*path, None), strict=True):
            siblings = children.get(parent, [])
            for ranked in (counts.tried_by_rank, counts.accepted_by_rank):
                ranked.extend([0] * (len(siblings) - len(ranked)))
            for rank, node in enumerate(siblings):
                counts.tried_by_rank[rank] += 1
                counts.accepted_by_rank[rank] += node == accepted
