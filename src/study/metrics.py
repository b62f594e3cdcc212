"""What the records of a study add up to: one row for each drafter under each condition, overall and by category.

Every figure is computed from the same counts for every drafter, plain decoding included: new tokens, seconds and
rounds after the prompt was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from .agreement import Agreement
from .store import Record
from .tally import CONDITIONS, FloatArray, Side, Tallies, Tally
from .theory import break_even_alpha, expected_tokens_of_lengths

RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100_000
"""Prompts drawn, over all resamples, before their ratios are taken."""
CONFIDENCE = 0.95
FEWEST = 5
"""Prompts below which a bootstrap interval would say more about luck than about the drafter."""
NOISY = 0.10
"""Repeated runs of plain decoding that differ by more than this (root mean square) make a study `noisy`."""


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


def rows(records: Iterable[Record] | Tallies, *, by_category: bool = False) -> list[Row]:
    """Sums records up, in the order of their first appearance; plain decoding comes first in each group.

    Args:
        records: of a study, or what they were added up to.
        by_category: one row a category in place of one for all.
    """
    tallies = records if isinstance(records, Tallies) else Tallies.of(records)
    found = []
    for (*conditions, prompt_set, category), group in (tallies.by_category if by_category else tallies.overall).items():
        given = dict(zip(CONDITIONS, conditions, strict=True))
        for label, tally in group.tallies.items():
            row = Row(**given, lossless=group.lossless, prompt_set=prompt_set, category=category, drafter=label)
            found.append(_measured(replace(row, cells=tally.cells, errors=tuple(tally.errors)), tally))
    return found


def _measured(row: Row, tally: Tally) -> Row:
    own, stats = tally.own, tally.own.stats
    if not own.runs:
        return row
    baseline = row.drafter == "none"
    return replace(
        row,
        tokens=stats.committed,
        tokens_per_second=stats.committed / own.decode_seconds if stats.committed else None,
        speedup=(1.0 if stats.committed else None) if baseline else _speedup(tally.totals),
        interval=None if baseline else _interval(tally.totals),
        tau=stats.tau if stats.rounds else None,
        acceptance_by_depth=stats.acceptance_by_depth,
        acceptance_by_rank=[hit / many for hit, many in zip(own.accepted_by_rank, own.tried_by_rank, strict=True)],
        drafted_by_round=stats.drafted / stats.rounds if stats.rounds else None,
        seconds_per_round={phase: value / stats.rounds for phase, value in _phases(own).items()}
        if stats.rounds
        else {},
        seconds_by_width={width: seconds / rounds for width, (rounds, seconds) in sorted(own.passes.items())},
        prefill_seconds=stats.seconds.prefill / own.runs,
        theory=_predict(own, tally.plain),
        agreement=tally.agreement,
        differing=tally.differing,
        peak_bytes=tally.peak_bytes,
    )


def _predict(own: Side, plain: Side) -> Prediction | None:
    stats, seconds = own.stats, own.stats.seconds
    levels = sum(stats.drafted_by_depth)
    if not levels or not plain.stats.rounds:
        return None
    one_pass = plain.stats.seconds.verify / plain.stats.rounds
    reached = [stats.rounds, *stats.accepted_by_depth]
    tried = sum(min(pair) for pair in zip(stats.drafted_by_depth, reached, strict=False))
    alpha, gamma = sum(stats.accepted_by_depth) / tried, levels / stats.rounds
    c, v = seconds.draft / levels / one_pass, seconds.verify / stats.rounds / one_pass
    tokens = expected_tokens_of_lengths(alpha, [count / stats.rounds for count in stats.drafted_by_depth])
    return Prediction(
        alpha, gamma, c, v, tokens, tokens / (gamma * c + v), break_even_alpha(max(round(gamma), 1), c, v)
    )


def _phases(side: Side) -> dict[str, float]:
    """Returns the seconds of decoding by phase; `other` is what no phase covers."""
    seconds = side.stats.seconds
    return {phase: getattr(seconds, phase) for phase in ("draft", "verify", "accept", "commit", "other")}


def _ratio(totals: FloatArray) -> FloatArray:
    """Seconds a token of plain decoding over seconds a token of the drafter, of [..., 4] totals."""
    ratio: FloatArray = (totals[..., 0] / totals[..., 1]) / (totals[..., 2] / totals[..., 3])
    return ratio


def _speedup(totals: FloatArray) -> float | None:
    whole = totals.sum(0)
    return float(_ratio(whole)) if whole.all() else None


def _interval(totals: FloatArray) -> tuple[float, float] | None:
    """The middle 95 % of the speedups of resampled prompts (percentile bootstrap).

    Repeats of a prompt are no new prompts: they stay together.
    """
    totals = totals[(totals > 0).all(1)]  # texts that ended with the prompt's own token took no time
    if len(totals) < FEWEST:
        return None
    source = np.random.default_rng(0)
    # A few at a time, since all samples of thousands of prompts together would take hundreds of megabytes.
    part = max(RESAMPLES_AT_ONCE // len(totals), 1)
    ratios = [
        _ratio(totals[source.integers(len(totals), size=(min(part, RESAMPLES - done), len(totals)))].sum(1))
        for done in range(0, RESAMPLES, part)
    ]
    ends = np.quantile(np.concatenate(ratios), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(ends[0]), float(ends[1])


def noise(records: Iterable[Record] | Tallies) -> float | None:
    """Root mean square difference, relative, of repeated runs of plain decoding; None if nothing was repeated."""
    squares = (records if isinstance(records, Tallies) else Tallies.of(records)).noise
    return math.sqrt(sum(squares) / len(squares)) if squares else None
