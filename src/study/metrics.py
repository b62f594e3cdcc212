"""What the records of a study add up to: one row for each drafter under each condition, overall and by category.

Every figure is computed from the same counts for every drafter, plain decoding included: new tokens, seconds and
rounds after the prompt was read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.stats import RowStats
from .agreement import Agreement, worst
from .store import Record
from .theory import break_even_alpha, expected_tokens_of_lengths

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST = 5
"""Prompts below which a bootstrap interval would say more about luck than about the drafter."""
NOISY = 0.10
"""Repeated runs of plain decoding that differ by more than this (root mean square) make a study `noisy`."""

Run = dict[str, Any]
FloatArray = npt.NDArray[np.float64]
CONDITIONS = ("target", "dtype", "rule", "temperature", "batch_size", "max_new_tokens", "seed", "chat")


class _Pair(NamedTuple):
    """Plain decoding's runs and a drafter's on the same prompts."""

    base: list[Run]
    own: list[Run]
    prompts: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """What theory makes of a row's acceptance and costs.

    Attributes:
        alpha: accepted drafts over drafts that came to be judged, all depths together.
        gamma: mean depth of a draft.
        c: seconds of a draft level over seconds of plain decoding's pass.
        v: seconds of a verifying pass over the same.
        tokens: expected committed tokens a round, if acceptances are independent.
        speedup: tokens over (gamma c + v).
        break_even: the alpha from which this gamma, c and v would pay; None if none would.
    """

    alpha: float
    gamma: float
    c: float
    v: float
    tokens: float
    speedup: float
    break_even: float | None


@dataclass(frozen=True)
class Row:
    """One drafter under one set of conditions.

    Attributes:
        target: where the target came from.
        dtype: of its weights.
        rule: the acceptance rule.
        lossless: whether that rule keeps the target's law.
        temperature: 0 is greedy.
        batch_size: prompts decoded together.
        max_new_tokens: of each text.
        seed: of the first repeat.
        chat: whether prompts are rendered by the chat template.
        prompt_set: where the prompts came from.
        category: of the prompts; None for all.
        drafter: its name and options.
        cells: measured batches of prompts, turns and repeats together.
        tokens: new tokens, the one that comes with reading the prompt left out, in every figure.
        tokens_per_second: of decoding; None where nothing could be measured.
        speedup: seconds a token of plain decoding over seconds a token of this drafter, totals over the very same
            prompts; for equal texts the ratio of total times.
        interval: of the speedup, by bootstrap over the prompts; None with too few of them to tell.
        tau: mean tokens a round commits, bonus token counted.
        acceptance_by_depth: accepted at depth d, over rounds that got so far and drafted to d.
        acceptance_by_rank: how often the r-th sibling is the accepted one, over nodes that had so many.
        drafted_by_round: mean drafted nodes a round.
        seconds_per_round: mean seconds of a round by phase; in a batch, over the texts that were in it.
        seconds_by_width: mean seconds from the draft's end to the commit, by columns of the widest row.
        prefill_seconds: mean seconds a cell spends on reading prompts.
        theory: what acceptance and costs alone predict; None where nothing was drafted.
        agreement: of the texts with plain decoding's; the worst. None where texts are drawn freely.
        differing: how many texts differ from plain decoding's.
        peak_bytes: most memory in use, of the accelerator or, on a CPU, of the whole process; None if unknown.
        errors: what went wrong, each message once.
    """

    target: str
    dtype: str
    rule: str
    lossless: bool
    temperature: float
    batch_size: int
    max_new_tokens: int
    seed: int
    chat: bool
    prompt_set: str
    category: str | None
    drafter: str
    cells: int = 0
    tokens: int = 0
    tokens_per_second: float | None = None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    tau: float | None = None
    acceptance_by_depth: list[float] = field(default_factory=list)
    acceptance_by_rank: list[float] = field(default_factory=list)
    drafted_by_round: float | None = None
    seconds_per_round: dict[str, float] = field(default_factory=dict)
    seconds_by_width: dict[int, float] = field(default_factory=dict)
    prefill_seconds: float | None = None
    theory: Prediction | None = None
    agreement: Agreement | None = None
    differing: int = 0
    peak_bytes: int | None = None
    errors: tuple[str, ...] = ()

    @property
    def same_text(self) -> str:
        """Whether its texts are plain decoding's: `yes`, `near-tie (margin)`, `no (margin)`, or `-`."""
        if self.agreement is None:
            return "-"
        margin = self.agreement.margin
        return self.agreement.verdict + ("" if margin is None else f" ({margin:.2g})")


def rows(records: Sequence[Record], *, by_category: bool = False) -> list[Row]:
    """Sums records up, in the order of their first appearance; plain decoding comes first in each group.

    Args:
        records: of a study.
        by_category: one row a category in place of one for all.
    """
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        category = record["category"] if by_category else None
        conditions = (record["conditions"][name] for name in CONDITIONS)
        groups.setdefault((*conditions, record["prompt_set"], category), []).append(record)
    return [row for key, group in groups.items() for row in _group_rows(group, key[-1])]


def _group_rows(records: Sequence[Record], category: str | None) -> list[Row]:
    labels = dict.fromkeys(label for record in records for label in record["drafters"])
    return [_row(records, category, label) for label in labels]


def _row(records: Sequence[Record], category: str | None, label: str) -> Row:
    pairs = [pair for record in records if (pair := _pair(record, label)) is not None]
    runs = [run for pair in pairs for run in pair.own]
    row = Row(
        **{name: records[0]["conditions"][name] for name in CONDITIONS},
        lossless=all(record.get("lossless", True) for record in records),
        prompt_set=records[0]["prompt_set"],
        category=category,
        drafter=label,
        cells=len(pairs),
        errors=tuple(dict.fromkeys(run["error"] for r in records for run in _runs(r, label) if "error" in run)),
    )
    return _measured(row, pairs, runs) if runs else row


def _measured(row: Row, pairs: Sequence[_Pair], runs: Sequence[Run]) -> Row:
    plain = [run for pair in pairs for run in pair.base]
    stats, seconds, decode = _stats(runs), _phases(runs), sum(_decode_seconds(run) for run in runs)
    baseline = row.drafter == "none"
    agreements = [Agreement(**one) for run in runs for one in run.get("agreement", ())]
    peaks = [run["peak_bytes"] for run in runs if run.get("peak_bytes") is not None]
    return replace(
        row,
        tokens=stats.committed,
        tokens_per_second=stats.committed / decode if stats.committed else None,
        speedup=(1.0 if stats.committed else None) if baseline else _speedup(pairs),
        interval=None if baseline else _interval(pairs),
        tau=stats.tau if stats.rounds else None,
        acceptance_by_depth=stats.acceptance_by_depth,
        acceptance_by_rank=_ranks(runs),
        drafted_by_round=stats.drafted / stats.rounds if stats.rounds else None,
        seconds_per_round={phase: value / stats.rounds for phase, value in seconds.items()} if stats.rounds else {},
        seconds_by_width=_widths(runs),
        prefill_seconds=sum(run["seconds"]["prefill"] for run in runs) / len(runs),
        theory=_predict(stats, seconds, _stats(plain), _phases(plain)),
        agreement=worst(agreements) if agreements else None,
        differing=sum(one.verdict != "yes" for one in agreements),
        peak_bytes=max(peaks, default=None),
    )


def _predict(stats: RowStats, seconds: dict[str, float], plain: RowStats, base: dict[str, float]) -> Prediction | None:
    levels = sum(stats.drafted_by_depth)
    if not levels or not plain.rounds:
        return None
    one_pass = base["verify"] / plain.rounds
    reached = [stats.rounds, *stats.accepted_by_depth]
    tried = sum(min(pair) for pair in zip(stats.drafted_by_depth, reached, strict=False))
    alpha, gamma = sum(stats.accepted_by_depth) / tried, levels / stats.rounds
    c, v = seconds["draft"] / levels / one_pass, seconds["verify"] / stats.rounds / one_pass
    tokens = expected_tokens_of_lengths(alpha, [count / stats.rounds for count in stats.drafted_by_depth])
    return Prediction(
        alpha, gamma, c, v, tokens, tokens / (gamma * c + v), break_even_alpha(max(round(gamma), 1), c, v)
    )


def _pair(record: Record, label: str) -> _Pair | None:
    """Returns the runs of plain decoding and of a drafter on one cell, if both went through."""
    base = [run for run in _runs(record, "none") if not run.get("again")]
    own = [run for run in _runs(record, label) if not run.get("again")]
    whole = base and len(base) == len(own) and not any("error" in run for run in (*base, *own))
    return _Pair(base, own, tuple(record["prompts"])) if whole else None


def _runs(record: Record, label: str) -> list[Run]:
    return [run for run in record["runs"] if run["drafter"] == label]


def _stats(runs: Sequence[Run]) -> RowStats:
    names = ("rounds", "committed", "drafted", "drafted_by_depth", "accepted_by_depth")
    return RowStats().merge(RowStats(**{name: run[name] for name in names}) for run in runs)


def _phases(runs: Sequence[Run]) -> dict[str, float]:
    """Returns the seconds of decoding by phase; `other` is what no phase covers."""
    phases = {phase: sum(run["seconds"][phase] for run in runs) for phase in ("draft", "verify", "accept", "commit")}
    return phases | {"other": sum(map(_decode_seconds, runs)) - sum(phases.values())}


def _ranks(runs: Sequence[Run]) -> list[float]:
    tried, accepted = (
        [sum(ranks) for ranks in itertools.zip_longest(*(run[name] for run in runs), fillvalue=0)]
        for name in ("tried_by_rank", "accepted_by_rank")
    )
    return [hit / many for hit, many in zip(accepted, tried, strict=True)]


def _widths(runs: Sequence[Run]) -> dict[int, float]:
    totals: dict[int, list[float]] = {}
    for width, rounds, seconds in (entry for run in runs for entry in run["passes"]):
        total = totals.setdefault(width, [0, 0.0])
        total[0] += rounds
        total[1] += seconds
    return {width: seconds / rounds for width, (rounds, seconds) in sorted(totals.items())}


def _decode_seconds(run: Run) -> float:
    return float(run["seconds"]["total"] - run["seconds"]["prefill"])


def _totals(pairs: Sequence[_Pair]) -> FloatArray:
    """Returns [cells, 4]: seconds and tokens of plain decoding, seconds and tokens of the drafter."""
    totals = [
        [
            total
            for runs in (pair.base, pair.own)
            for total in (sum(map(_decode_seconds, runs)), sum(run["committed"] for run in runs))
        ]
        for pair in pairs
    ]
    return np.array(totals, dtype=np.float64)


def _ratio(totals: FloatArray) -> FloatArray:
    """Seconds a token of plain decoding over seconds a token of the drafter, of [..., 4] totals."""
    ratio: FloatArray = (totals[..., 0] / totals[..., 1]) / (totals[..., 2] / totals[..., 3])
    return ratio


def _speedup(pairs: Sequence[_Pair]) -> float | None:
    totals = _totals(pairs).sum(0)
    return float(_ratio(totals)) if totals.all() else None


def _interval(pairs: Sequence[_Pair]) -> tuple[float, float] | None:
    """The middle 95 % of the speedups of resampled prompts (percentile bootstrap).

    Repeats of a prompt are no new prompts: they stay together.
    """
    repeats: dict[tuple[str, ...], list[_Pair]] = {}
    for pair in pairs:
        repeats.setdefault(pair.prompts, []).append(pair)
    totals = np.array([_totals(same).sum(0) for same in repeats.values()]).reshape(-1, 4)
    totals = totals[(totals > 0).all(1)]  # texts that ended with the prompt's own token took no time
    if len(totals) < FEWEST:
        return None
    drawn = np.random.default_rng(0).integers(len(totals), size=(RESAMPLES, len(totals)))
    ends = np.quantile(_ratio(totals[drawn].sum(1)), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(ends[0]), float(ends[1])


def noise(records: Sequence[Record]) -> float | None:
    """Root mean square difference, relative, of repeated runs of plain decoding; None if nothing was repeated."""
    logs = []
    for record in records:
        timed = [run for run in _runs(record, "none") if "error" not in run and _decode_seconds(run) > 0]
        for again in (run for run in timed if run.get("again")):
            first = next(run for run in timed if run["turn"] == again["turn"])
            logs.append(math.log(_decode_seconds(again) / _decode_seconds(first)))
    return math.sqrt(sum(log * log for log in logs) / len(logs)) if logs else None
