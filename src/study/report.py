"""The report of a study: its records, summed up and shown as tables.

This module knows records and rows; it runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from . import metrics
from .metrics import Row
from .store import Record, read_records

if TYPE_CHECKING:
    import pandas


class Report:
    """What a study found.

    Attributes:
        records: one a finished cell, as they are kept in `results.jsonl`.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a study directory, or its `results.jsonl`.

        Raises:
            InvalidRequest: there is none.
            InvalidCheckpoint: a line of it is no record.
        """
        return cls(read_records(Path(path)))

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each drafter and set of conditions."""
        return metrics.rows(self.records)

    @cached_property
    def rows_by_category(self) -> list[Row]:
        """The same, category by category."""
        return metrics.rows(self.records, by_category=True)

    @cached_property
    def noise(self) -> float | None:
        """By how much repeated runs of plain decoding differ, relative; None if nothing was repeated."""
        return metrics.noise(self.records)

    @property
    def noisy(self) -> bool:
        """Whether they differ so much that small differences between drafters mean nothing."""
        return self.noise is not None and self.noise > metrics.NOISY

    def table(self, *, by_category: bool = False) -> Table:
        """Returns a table for `rich.print`; `print(report)` shows it as text."""
        rows = self.rows_by_category if by_category else self.rows
        table = Table(box=None, pad_edge=False, header_style="bold")
        varying = [name for name in _CONDITIONS if len({getattr(row, name) for row in rows}) > 1]
        for name in varying:
            table.add_column(_CONDITIONS[name], overflow="fold")
        table.add_column("drafter", overflow="fold")
        for heading in _HEADINGS:
            table.add_column(heading, justify="right", overflow="fold")
        for row in rows:
            table.add_row(*(_text(getattr(row, name)) for name in varying), row.drafter, *cells(row))
        return table

    def notes(self) -> list[str]:
        """Returns what a reader of the table must know: errors, noise, lossy rules."""
        notes = [f"{row.drafter}: {error}" for row in self.rows for error in row.errors]
        if self.noisy and self.noise is not None:
            notes.append(f"the machine is noisy: repeated plain decoding differs by {self.noise:.0%}")
        unclear = dict.fromkeys(row.drafter for row in self.rows if row.interval and _holds_one(row.interval))
        if unclear:
            notes.append(f"too close to plain decoding to tell: {', '.join(unclear)}")
        lossy = dict.fromkeys(row.rule for row in self.rows if not row.lossless)
        notes += [f"the rule {rule} is lossy: its text is not the target's" for rule in lossy]
        return list(dict.fromkeys(notes))

    def to_json(self) -> dict[str, Any]:
        """Returns rows, rows by category, noise and notes as plain data."""
        return {
            "rows": [asdict(row) | {"same_text": row.same_text} for row in self.rows],
            "rows_by_category": [asdict(row) | {"same_text": row.same_text} for row in self.rows_by_category],
            "noise": self.noise,
            "noisy": self.noisy,
            "notes": self.notes(),
            "environment": self.records[-1]["environment"] if self.records else None,
        }

    def to_pandas(self, *, by_category: bool = False) -> pandas.DataFrame:
        """Returns one line a row; nested figures become columns such as `seconds_per_round.draft`."""
        import pandas

        rows = self.rows_by_category if by_category else self.rows
        return pandas.json_normalize([asdict(row) | {"same_text": row.same_text} for row in rows])

    def save(self, directory: str | Path) -> Path:
        """Writes `report.json` and, where the study itself did not, `results.jsonl`; returns the directory."""
        place = Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        (place / "report.json").write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")
        return place

    def __str__(self) -> str:
        console = Console(file=StringIO(), width=160, force_terminal=False)
        console.print(self.table())
        for note in self.notes():
            console.print(note, markup=False)
        return str(console.file.getvalue())  # type: ignore[attr-defined]


_CONDITIONS = {
    "target": "target",
    "dtype": "dtype",
    "rule": "rule",
    "temperature": "T",
    "batch_size": "batch",
    "prompt_set": "prompts",
    "category": "category",
}
_HEADINGS = ("tokens/s", "speedup", "95 %", "tau", "accepted by depth", "draft ms", "verify ms", "same text")


def cells(row: Row) -> list[str]:
    """Returns a row's figures as texts, in the order of the table's columns."""
    if row.tau is None:
        return [*["-"] * (len(_HEADINGS) - 1), "failed" if row.errors else "-"]
    interval = "" if row.interval is None else "{:.2f}-{:.2f}".format(*row.interval)
    depths = " ".join(f"{rate:.2f}".removeprefix("0") for rate in row.acceptance_by_depth[:6])
    times = [f"{row.seconds_per_round[phase] * 1e3:.1f}" for phase in ("draft", "verify")]
    return [
        _text(row.tokens_per_second),
        f"{row.speedup:.2f}x",
        interval,
        f"{row.tau:.2f}",
        depths,
        *times,
        row.same_text,
    ]


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value.is_integer() else f"{value:.1f}"
    return str(value)


def _holds_one(interval: tuple[float, float]) -> bool:
    return interval[0] <= 1 <= interval[1]
