"""What a call counts: rounds, drafted and accepted tokens by depth, seconds by phase."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass
class Seconds:
    """Wall-clock seconds of a call by phase; `other` is what the engine itself adds (bookkeeping, stopping)."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0
    total: float = 0.0

    @property
    def other(self) -> float:
        """Seconds of the call outside every phase."""
        return self.total - self.prefill - self.draft - self.verify - self.accept - self.commit


@dataclass
class RowStats:
    """Counts of one row. The round that reads the prompt is no draft round and is counted apart.

    Attributes:
        rounds: verified rounds after the prefill.
        committed: tokens those rounds committed, bonus or correction tokens included.
        drafted: candidate nodes drafted.
        drafted_by_depth: rounds in which the tree reached depth d (index d - 1).
        accepted_by_depth: rounds in which a node at depth d was accepted (index d - 1).
        seconds: of the call, shared by all its rows.
    """

    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds: Seconds = field(default_factory=Seconds)

    @property
    def tau(self) -> float:
        """Mean tokens a round commits, the bonus token counted; 1 for plain decoding."""
        return self.committed / self.rounds if self.rounds else 1.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth d (index d - 1): accepted at d, over rounds that accepted d - 1 and drafted to d."""
        reached = [self.rounds, *self.accepted_by_depth]
        rates = []
        for accepted, drafted, before in zip(self.accepted_by_depth, self.drafted_by_depth, reached, strict=False):
            tried = min(drafted, before)
            rates.append(accepted / tried if tried else 0.0)
        return rates

    def add_round(self, drafted: int, depth: int, accepted: int, committed: int) -> None:
        """Counts one round: `drafted` nodes to `depth` levels, a path of `accepted` nodes, `committed` tokens."""
        self.rounds += 1
        self.drafted += drafted
        self.committed += committed
        _count(self.drafted_by_depth, depth)
        _count(self.accepted_by_depth, accepted)

    def merge(self, others: Iterable[RowStats]) -> RowStats:
        """Adds the counts of `others` to these and returns these."""
        for other in others:
            self.rounds += other.rounds
            self.committed += other.committed
            self.drafted += other.drafted
            add_counts(self.drafted_by_depth, other.drafted_by_depth)
            add_counts(self.accepted_by_depth, other.accepted_by_depth)
        return self


def _count(counts: list[int], depth: int) -> None:
    counts.extend([0] * (depth - len(counts)))
    for index in range(depth):
        counts[index] += 1


def add_counts(counts: list[int], more: Sequence[int]) -> None:
    """Adds `more` to `counts`, place by place; the longer of the two says how many places there are."""
    counts.extend([0] * (len(more) - len(counts)))
    for index, value in enumerate(more):
        counts[index] += value
