"""The report of a study: its records, summed up and shown as tables, files and a page.

This module knows records and rows; it runs nothing.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.errors import InvalidCheckpoint, InvalidRequest
from . import metrics, plots
from .export import Grid, Section, html_table, latex, markdown, page
from .metrics import Row
from .store import RESULTS, Record, StoredRecords, read_records
from .tally import CONDITIONS, Tallies

if TYPE_CHECKING:
    import pandas

PAGE = "index.html"
_FIELDS = ("category", "prompt_set", "prompts", "environment")


class Report:
    """What a study found.

    Attributes:
        records: one a finished cell, as they are kept in `results.jsonl`; those of a directory stay there and are
            read whenever they are asked for (`list(report.records)` reads them all).
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records if isinstance(records, StoredRecords) else list(records)
        self._tallies = Tallies.of(self.records)

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a study directory, or its `results.jsonl`.

        Raises:
            InvalidRequest: there is none.
            InvalidCheckpoint: a line of it is no record.
        """
        records = read_records(Path(path))
        for number, record in enumerate(records, start=1):
            conditions = record["conditions"]
            known = {*record, *(conditions if isinstance(conditions, dict) else ())}
            if missing := [name for name in (*_FIELDS, *CONDITIONS) if name not in known]:
                raise InvalidCheckpoint(f"{str(path)!r}, line {number}: no record of a study, it lacks {missing[0]!r}")
        return cls(records)

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each drafter and set of conditions."""
        return metrics.rows(self._tallies)

    @cached_property
    def rows_by_category(self) -> list[Row]:
        """The same, category by category."""
        return metrics.rows(self._tallies, by_category=True)

    @cached_property
    def noise(self) -> float | None:
        """By how much repeated runs of plain decoding differ, relative; None if nothing was repeated."""
        return metrics.noise(self._tallies)

    @property
    def noisy(self) -> bool:
        """Whether they differ so much that small differences between drafters mean nothing."""
        return self.noise is not None and self.noise > metrics.NOISY

    def table(self, *, by_category: bool = False) -> Table:
        """Returns a table for `rich.print`; `print(report)` shows it as text."""
        grid = _grid(self.rows_by_category if by_category else self.rows)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, heading in enumerate(grid.headings):
            label = index < grid.labels
            table.add_column(heading, justify="left" if label else "right", overflow="fold", no_wrap=not label)
        for line in grid.lines:
            table.add_row(*map(Text, line))  # else brackets in a label are read as markup
        return table

    def notes(self) -> list[str]:
        """Returns what a reader of the table must know: errors, noise, lossy rules."""
        errors: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            for error in row.errors:
                errors.setdefault((row.drafter, error), []).append(row)
        notes = [f"{self._name(rows)}: {error}" for (_, error), rows in errors.items()]
        if self.noisy and self.noise is not None:
            notes.append(f"the machine is noisy: repeated plain decoding differs by {self.noise:.0%}")
        unclear: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.interval and row.interval[0] <= 1 <= row.interval[1]:
                unclear.setdefault(row.drafter, []).append(row)
        if unclear:
            notes.append(f"too close to plain decoding to tell: {'; '.join(map(self._name, unclear.values()))}")
        if mixed := self._tallies.mixed:
            notes.append(f"measured under different {', '.join(mixed)}: speedups hold, tokens/s are of no one machine")
        lossy = dict.fromkeys(row.rule for row in self.rows if not row.lossless)
        notes += [f"the rule {rule} is lossy: its text is not the target's" for rule in lossy]
        return notes

    def to_json(self) -> dict[str, Any]:
        """Returns rows, rows by category, noise and notes as plain data."""
        return {
            "rows": [_flat(row) for row in self.rows],
            "rows_by_category": [_flat(row) for row in self.rows_by_category],
            "noise": self.noise,
            "noisy": self.noisy,
            "notes": self.notes(),
            "environment": self._tallies.environments[1] if self._tallies.environments else None,
        }

    def to_pandas(self, *, by_category: bool = False) -> pandas.DataFrame:
        """Returns one line a row; nested figures become columns such as `seconds_per_round.draft`."""
        import pandas

        return pandas.json_normalize([_flat(row) for row in (self.rows_by_category if by_category else self.rows)])

    def plots(self) -> list[tuple[str, list[plots.Plot]]]:
        """Returns the figures, set of conditions by set of conditions.

        Raises:
            ImportError: matplotlib is not installed (`pip install 'draftwood[plot]'`).
        """
        return [(_title(rows[0]), list(plots.draw(rows, self._categories(rows[0])))) for rows in self._groups()]

    def save(self, directory: str | Path) -> Path:
        """Writes everything into a directory.

        These are `index.html`, a page that needs no other file; `table.md`, `table.tex` and the figures as SVG and
        PNG, for papers; `report.json`; and `results.jsonl`, unless the study is kept there already. Without
        matplotlib there are no figures.

        Returns:
            The page.

        Raises:
            InvalidRequest: the directory cannot be written, or holds the results of another study.
        """
        place = Path(directory)
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._write(place)
        except OSError as error:
            raise InvalidRequest(f"cannot write the report to {str(place)!r}: {error}") from error
        return place / PAGE

    def _write(self, place: Path) -> None:
        if (place / RESULTS).exists():
            own = self.records.keys if isinstance(self.records, StoredRecords) else [one["key"] for one in self.records]
            if not {*own} <= {*read_records(place).keys}:
                raise InvalidRequest(f"{str(place / RESULTS)!r} holds another study; save this one elsewhere")
        else:
            _put(place / RESULTS, (json.dumps(record).encode() + b"\n" for record in self.records))
        _put(place / "report.json", json.dumps(self.to_json(), indent=1))
        grids = {"table": _grid(self.rows), "table_by_category": _grid(self.rows_by_category)}
        for name, grid in grids.items():
            _put(place / f"{name}.md", markdown(grid))
            _put(place / f"{name}.tex", latex(grid))
        notes = self.notes()
        try:
            drawn = [figures for _, figures in self.plots()]
        except ImportError:
            drawn = [[] for _ in self._groups()]
            notes.append("matplotlib is not installed, so there are no figures: pip install 'draftwood[plot]'")
        sections = []
        for index, (rows, figures) in enumerate(zip(self._groups(), drawn, strict=True), start=1):
            by_category = self._categories(rows[0])
            theory = _theory_grid([*rows, *by_category])
            sections.append(Section(_title(rows[0]), _grid(rows), _grid(by_category), theory, _costs(rows), figures))
            for figure in figures:
                stem = figure.name if len(drawn) == 1 else f"{figure.name}-{index}"
                _put(place / f"{stem}.svg", figure.svg)
                _put(place / f"{stem}.png", figure.png)
        _put(place / PAGE, page("Comparison of drafters", notes, sections, self._facts()))

    def _name(self, rows: Sequence[Row]) -> str:
        """Returns the drafter of these rows, with their conditions unless these are all that it has."""
        name = rows[0].drafter
        if len(rows) == sum(row.drafter == name for row in self.rows):
            return name
        varying = _varying(self.rows)
        given = (", ".join(f"{_CONDITIONS[key]} {_text(getattr(row, key))}" for key in varying) for row in rows)
        return f"{name} ({'; '.join(given)})"

    def _groups(self) -> list[list[Row]]:
        """Returns the rows, one list a set of conditions."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(_title(row), []).append(row)
        return list(groups.values())

    def _categories(self, like: Row) -> list[Row]:
        return [row for row in self.rows_by_category if _title(row) == _title(like)]

    def _facts(self) -> dict[str, str]:
        if self._tallies.environments is None:
            return {}
        first, last = self._tallies.environments
        versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items() if version)
        facts = {
            "date": first["date"] if first["date"] == last["date"] else f"{first['date']} to {last['date']}",
            "machine": f"{last['processor']}, {last['cores']} cores, {last['threads']} threads, {last['machine']}",
            "device": last["device"],
            "versions": versions,
            "commit": str(last["commit"] or "installed"),
        }
        return facts | ({} if self.noise is None else {"noise": f"{self.noise:.1%} between repeats of plain decoding"})

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes())
        return html_table(_grid(self.rows)) + (f"<ul>{notes}</ul>" if notes else "")

    def __str__(self) -> str:
        text = StringIO()
        console = Console(file=text, width=200, force_terminal=False)
        console.print(self.table())
        for note in self.notes():
            console.print(note, markup=False, soft_wrap=True)
        return text.getvalue()


_CONDITIONS = {
    "target": "target",
    "dtype": "dtype",
    "rule": "rule",
    "temperature": "T",
    "batch_size": "batch",
    "max_new_tokens": "new tokens",
    "seed": "seed",
    "chat": "chat",
    "prompt_set": "prompts",
    "category": "category",
}
_HEADINGS = (
    "tokens/s",
    "speedup",
    "95 %",
    "predicted",
    "tau",
    "accepted by depth",
    "draft ms",
    "verify ms",
    "same text",
)
_DEPTHS = 5
"""Depths, or ranks, shown in tables; the figures and the JSON have all."""


def _grid(rows: Sequence[Row]) -> Grid:
    """Returns the table of some rows; conditions that are the same everywhere get no column."""
    varying = _varying(rows)
    headings = [*(_CONDITIONS[name] for name in varying), "drafter", *_HEADINGS]
    lines = [[*(_text(getattr(row, name)) for name in varying), row.drafter, *_figures(row)] for row in rows]
    return Grid(headings, lines, len(varying) + 1)


_THEORY = ("alpha", "gamma", "c", "v", "predicted tau", "tau", "predicted speedup", "speedup", "pays from alpha")


def _theory_grid(rows: Sequence[Row]) -> Grid:
    """Returns what theory says of each row, next to what was measured."""
    lines = []
    for row in rows:
        theory = row.theory
        if theory is not None and row.speedup is not None and row.tau is not None:
            figures = (
                theory.alpha,
                theory.gamma,
                theory.c,
                theory.v,
                theory.tokens,
                row.tau,
                theory.speedup,
                row.speedup,
            )
            pays = "never" if theory.break_even is None else f"{theory.break_even:.2f}"
            lines.append([row.category or "all", row.drafter, *(f"{figure:.3g}" for figure in figures), pays])
    return Grid(["category", "drafter", *_THEORY], lines, 2)


def _costs(rows: Sequence[Row]) -> Grid:
    """Returns what a round and a prompt take, acceptance by rank, and memory."""
    phases = ("draft", "verify", "accept", "commit", "other")
    headings = ["drafter", *(f"{phase} ms" for phase in phases), "drafted", "accepted by rank", "prompt ms", "peak MB"]
    lines = [
        [
            row.drafter,
            *(f"{row.seconds_per_round[phase] * 1e3:.2f}" for phase in phases),
            f"{row.drafted_by_round or 0:.1f}",
            _rates(row.acceptance_by_rank),
            f"{(row.prefill_seconds or 0) * 1e3:.1f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
        ]
        for row in rows
        if row.seconds_per_round
    ]
    return Grid(headings, lines, 1)


def _varying(rows: Sequence[Row]) -> list[str]:
    return [name for name in _CONDITIONS if len({getattr(row, name) for row in rows}) > 1]


def _figures(row: Row) -> list[str]:
    if row.tau is None:
        return [*["-"] * (len(_HEADINGS) - 1), "failed" if row.errors else "-"]
    interval = "" if row.interval is None else "{:.2f}-{:.2f}".format(*row.interval)
    return [
        _text(row.tokens_per_second),
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
        interval,
        "" if row.theory is None else f"{row.theory.speedup:.2f}x",
        f"{row.tau:.2f}",
        _rates(row.acceptance_by_depth),
        *(f"{row.seconds_per_round[phase] * 1e3:.1f}" for phase in ("draft", "verify")),
        row.same_text,
    ]


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}".removeprefix("0") for rate in rates[:_DEPTHS])


def _title(row: Row) -> str:
    lossy, chat = "" if row.lossless else " (lossy)", "chat" if row.chat else "raw"
    return (
        f"{row.target}, {row.dtype}, rule {row.rule}{lossy}, temperature {row.temperature:g}, "
        f"batch {row.batch_size}, {row.max_new_tokens} new tokens, seed {row.seed}, {chat}, prompts {row.prompt_set}"
    )


def _flat(row: Row) -> dict[str, Any]:
    return asdict(row) | {"seconds_by_width": list(row.seconds_by_width.items()), "same_text": row.same_text}


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}" if value.is_integer() else f"{value:.1f}"
    return "-" if value is None else str(value)


def _put(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes a file whole or not at all, whoever else is writing it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # A lone surrogate, which JSON may hold, has no bytes in UTF-8.
    parts = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    try:
        with open(partial, "wb") as file:
            file.writelines([parts] if isinstance(parts, bytes) else parts)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
