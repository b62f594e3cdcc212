"""What records come to, added up one at a time, so that no text has to be in memory.

Of each prompt four numbers a drafter are kept, those that an interval over the prompts is drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.stats import RowStats, add_counts
from .agreement import Agreement, worst
from .store import Record

Run = dict[str, Any]
FloatArray = npt.NDArray[np.float64]
Conditions = tuple[Any, ...]
"""The values of `CONDITIONS`, the prompt set, and the category or None for all."""

CONDITIONS = ("target", "dtype", "rule", "temperature", "batch_size", "max_new_tokens", "seed", "chat")


@dataclass
class Side:
    """Runs of one drafter, added up.

    Attributes:
        runs: how many.
        stats: their counts and seconds.
        tried_by_rank: as of `RoundCounts`.
        accepted_by_rank: as of `RoundCounts`.
        passes: as of `RoundCounts`.
    """

    runs: int = 0
    stats: RowStats = field(default_factory=RowStats)
    tried_by_rank: list[int] = field(default_factory=list)
    accepted_by_rank: list[int] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=dict)

    def add(self, run: Run) -> None:
        """Adds a run that went through."""
        self.runs += 1
        counts = (one.name for one in fields(RowStats) if one.name != "seconds")
        self.stats.merge([RowStats(**{name: run[name] for name in counts})])
        for phase in asdict(self.stats.seconds):
            setattr(self.stats.seconds, phase, getattr(self.stats.seconds, phase) + run["seconds"][phase])
        add_counts(self.tried_by_rank, run["tried_by_rank"])
        add_counts(self.accepted_by_rank, run["accepted_by_rank"])
        for width, rounds, seconds in run["passes"]:
            total = self.passes.setdefault(width, [0, 0.0])
            total[0] += rounds
            total[1] += seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prompts were read."""
        return self.stats.seconds.total - self.stats.seconds.prefill


@dataclass
class Tally:
    """A drafter under one set of conditions, and plain decoding on the very same prompts.

    Attributes:
        cells: batches of prompts on which both went through.
        own: the drafter's runs.
        plain: those of plain decoding.
        agreement: the worst of the drafter's texts with plain decoding's; None where none had to agree.
        differing: how many of its texts differ from plain decoding's.
        peak_bytes: the most memory in use; None if unknown.
        errors: what went wrong, each message once, in order.
        by_prompts: by batch of prompts, its repeats and turns together: seconds and tokens of plain decoding,
            seconds and tokens of the drafter.
    """

    cells: int = 0
    own: Side = field(default_factory=Side)
    plain: Side = field(default_factory=Side)
    agreement: Agreement | None = None
    differing: int = 0
    peak_bytes: int | None = None
    errors: dict[str, None] = field(default_factory=dict)
    by_prompts: dict[tuple[str, ...], FloatArray] = field(default_factory=dict)

    def add(self, record: Record, label: str) -> None:
        """Adds what a record says of this drafter."""
        mine, others = _runs(record, label), _runs(record, "none")
        self.errors.update((run["error"], None) for run in mine if "error" in run)
        base, own = ([run for run in runs if not run.get("again")] for runs in (others, mine))
        if not base or len(base) != len(own) or any("error" in run for run in (*base, *own)):
            return
        self.cells += 1
        for side, runs in ((self.plain, base), (self.own, own)):
            for run in runs:
                side.add(run)
        for run in own:
            self._judge([Agreement(**one) for one in run.get("agreement", ())])
            if (peak := run.get("peak_bytes")) is not None:
                self.peak_bytes = max(peak, self.peak_bytes or 0)
        sums = [
            total
            for runs in (base, own)
            for total in (sum(map(decode_seconds, runs)), sum(run["committed"] for run in runs))
        ]
        prompts = tuple(record["prompts"])
        self.by_prompts[prompts] = self.by_prompts.get(prompts, 0.0) + np.array(sums, dtype=np.float64)

    def _judge(self, agreements: Sequence[Agreement]) -> None:
        self.differing += sum(one.verdict != "yes" for one in agreements)
        if agreements:
            self.agreement = worst([*([] if self.agreement is None else [self.agreement]), *agreements])

    @property
    def totals(self) -> FloatArray:
        """[batches of prompts, 4], as of `by_prompts`."""
        return np.array(list(self.by_prompts.values()), dtype=np.float64).reshape(-1, 4)


@dataclass
class Group:
    """All records of one set of conditions, or of one category of them.

    Attributes:
        lossless: whether the rule keeps the target's law.
        tallies: by drafter, in the order of their first appearance.
    """

    lossless: bool = True
    tallies: dict[str, Tally] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Adds a record."""
        self.lossless = self.lossless and record.get("lossless", True)
        for label in dict.fromkeys(record["drafters"]):
            self.tallies.setdefault(label, Tally()).add(record, label)


@dataclass
class Tallies:
    """All records of a study, added up.

    Attributes:
        overall: by conditions.
        by_category: by conditions and category.
        environments: the first and the last; None without records.
        noise: squared logarithms of the ratios of repeated runs of plain decoding.
    """

    overall: dict[Conditions, Group] = field(default_factory=dict)
    by_category: dict[Conditions, Group] = field(default_factory=dict)
    environments: tuple[dict[str, Any], dict[str, Any]] | None = None
    noise: list[float] = field(default_factory=list)
    _differs: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Iterable[Record]) -> Tallies:
        """Adds records up, in one pass."""
        tallies = cls()
        for record in records:
            tallies.add(record)
        return tallies

    def add(self, record: Record) -> None:
        """Adds a record."""
        conditions = (*(record["conditions"][name] for name in CONDITIONS), record["prompt_set"])
        self.overall.setdefault((*conditions, None), Group()).add(record)
        self.by_category.setdefault((*conditions, record["category"]), Group()).add(record)
        found = record["environment"]
        first = self.environments[0] if self.environments else found
        self.environments = first, found
        for name in (*first, *found):
            self._differs[name] = self._differs.get(name, False) or first.get(name) != found.get(name)
        timed = [run for run in _runs(record, "none") if "error" not in run and decode_seconds(run) > 0]
        for again in (run for run in timed if run.get("again")):
            before = next(run for run in timed if run["turn"] == again["turn"])
            self.noise.append(math.log(decode_seconds(again) / decode_seconds(before)) ** 2)

    @property
    def mixed(self) -> list[str]:
        """What is not the same in all environments, the date apart."""
        return [name for name, differs in self._differs.items() if differs and name != "date"]


def decode_seconds(run: Run) -> float:
    """Seconds of a run after its prompts were read."""
    return float(run["seconds"]["total"] - run["seconds"]["prefill"])


def _runs(record: Record, label: str) -> list[Run]:
    return [run for run in record["runs"] if run["drafter"] == label]
