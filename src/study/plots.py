"""The figures of a report, drawn with matplotlib from rows; nothing here touches pyplot's global state.

Every figure is small enough to be read on a phone and in a paper's column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO, StringIO
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; black is plain decoding.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A5ACD", "#8B6914")
_MARKERS = "o^sDv"
_PHASES = {"draft": "#E69F00", "verify": "#0072B2", "accept": "#009E73", "commit": "#CC79A7", "other": "#999999"}
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "axes.axisbelow": True,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "svg.hashsalt": "draftwood",
    "legend.frameon": False,
}
_WIDTH = 4.2


class _Paint(Protocol):
    def __call__(self, axes: Axes, rows: Sequence[Row]) -> None: ...


class Plot(NamedTuple):
    """A finished figure.

    Attributes:
        name: of its files.
        title: what it shows.
        note: how to read it.
        svg: the figure as SVG text.
        png: the figure as PNG, 200 dots an inch.
    """

    name: str
    title: str
    note: str
    svg: str
    png: bytes


def draw(rows: Sequence[Row], by_category: Sequence[Row]) -> Iterator[Plot]:
    """Yields the figures of one set of conditions; those without anything to show are left out.

    Args:
        rows: one a drafter.
        by_category: the same, a row for each drafter and category.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    shown = [row for row in rows if row.tau is not None]
    drafted = [row for row in shown if row.drafter != "none"]
    categories = [row for row in by_category if row.speedup is not None and row.drafter != "none"]
    figures: list[tuple[str, str, str, Sequence[Row], _Paint, float]] = [
        (
            "speedup",
            "Speedup over plain decoding",
            "Totals over the same prompts, with 95 % bootstrap intervals. Left of the line is slower than plain.",
            [*drafted, *categories] if len({row.category for row in categories}) > 1 else drafted,
            _speedups,
            0.9 + 0.22 * (len(drafted) + len(categories)) + _legend_height(drafted),
        ),
        (
            "acceptance",
            "Acceptance by depth",
            "Share of drafted tokens accepted at each depth, given that the ones before were.",
            [row for row in drafted if row.acceptance_by_depth],
            _acceptance,
            2.4 + _legend_height(drafted),
        ),
        (
            "rank",
            "Acceptance by rank",
            "How often each sibling is the accepted one, eldest first, where there were so many.",
            [row for row in drafted if len(row.acceptance_by_rank) > 1],
            _acceptance_by_rank,
            2.2 + _legend_height(drafted),
        ),
        (
            "time",
            "Where the time goes",
            "Milliseconds a committed token, by phase.",
            shown,
            _time_split,
            1.3 + 0.3 * sum(1 + _lines(row.drafter, 24).count("\n") / 2 for row in shown),
        ),
        (
            "width",
            "Cost of a verifying pass",
            "Mean time from the draft's end to the commit against the columns of the pass, over plain decoding's.",
            _with_widths(shown),
            _widths,
            2.4 + _legend_height(shown),
        ),
        (
            "theory",
            "Measured against predicted speedup",
            "Predicted from acceptance, draft cost and verify cost alone, acceptances taken as independent.",
            [row for row in drafted if row.theory is not None and row.speedup is not None],
            _against_theory,
            2.8 + _legend_height(drafted),
        ),
    ]
    with matplotlib.rc_context(_STYLE):
        for name, title, note, given, paint, height in figures:
            if given:
                yield _render(name, title, note, partial(paint, rows=given), height)


def _render(name: str, title: str, note: str, paint: Callable[[Axes], None], height: float) -> Plot:
    from matplotlib.figure import Figure

    figure: Figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    paint(figure.add_subplot())
    text, raster = StringIO(), BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(raster, format="png", dpi=200)
    svg = text.getvalue()
    return Plot(name, title, note, svg[svg.index("<svg") :], raster.getvalue())


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """Returns one colour a drafter, in the order of the rows."""
    names = list(dict.fromkeys(row.drafter for row in rows if row.drafter != "none"))
    return {"none": "#000000"} | {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}


def _marker(palette: dict[str, str], drafter: str) -> str:
    """Tells drafters of the same colour apart, when there are more of them than colours."""
    return _MARKERS[(max(list(palette).index(drafter) - 1, 0) // len(_COLOURS)) % len(_MARKERS)]


def _speedups(axes: Axes, rows: Sequence[Row]) -> None:
    palette, ticks, labels, y = colours(rows), [], [], 0.0
    for category in dict.fromkeys(row.category for row in rows):
        group = [row for row in rows if row.category == category]
        ticks.append(y + (len(group) - 1) / 2)
        labels.append(category or "all")
        for row in group:
            speed, (low, high) = row.speedup or 0.0, row.interval or (row.speedup or 0.0,) * 2
            axes.plot([low, high], [y, y], color=palette[row.drafter], linewidth=2, alpha=0.5)
            axes.plot(speed, y, _marker(palette, row.drafter), color=palette[row.drafter], markersize=5)
            axes.annotate(f"{speed:.2f}", (high, y), (4, 0), textcoords="offset points", va="center", fontsize=7)
            y += 1
        y += 0.6
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.12)
    axes.set_xlabel("speedup")
    _legend(axes, rows)


def _acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    _rates(axes, rows, [row.acceptance_by_depth for row in rows], "depth")


def _acceptance_by_rank(axes: Axes, rows: Sequence[Row]) -> None:
    _rates(axes, rows, [row.acceptance_by_rank for row in rows], "rank among the siblings")


def _rates(axes: Axes, rows: Sequence[Row], rates: Sequence[Sequence[float]], label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    palette = colours(rows)
    for row, heights in zip(rows, rates, strict=True):
        places = range(1, len(heights) + 1)
        axes.plot(places, heights, _marker(palette, row.drafter) + "-", color=palette[row.drafter], markersize=4)
    axes.set_ylim(0, 1.05)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)
    axes.set_ylabel("acceptance")
    _legend(axes, rows)


def _time_split(axes: Axes, rows: Sequence[Row]) -> None:
    names = [_lines(row.drafter, 24) for row in rows]
    left = [0.0] * len(rows)
    for phase, colour in _PHASES.items():
        widths = [1e3 * row.seconds_per_round[phase] / (row.tau or 1.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=colour, label=phase, height=0.65)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), names, fontsize=7 if _long(rows) else None)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms a token")
    # Fonts differ between here and the reader's browser: the legend gets room to spare.
    axes.figure.legend(fontsize=8, ncols=3, loc="outside upper center")


def _with_widths(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows, if plain decoding is there to measure against and others have wider passes."""
    single = any(row.drafter == "none" and 1 in row.seconds_by_width for row in rows)
    return list(rows) if single and any(max(row.seconds_by_width, default=1) > 1 for row in rows) else []


def _widths(axes: Axes, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    palette = colours(rows)
    single = next(row.seconds_by_width[1] for row in rows if row.drafter == "none")
    for row in rows:
        costs = {width: seconds / single for width, seconds in row.seconds_by_width.items()}
        axes.plot(
            list(costs), list(costs.values()), _marker(palette, row.drafter), color=palette[row.drafter], markersize=4
        )
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("columns (1 + drafted nodes)")
    axes.set_ylabel("time over a single-token pass")
    _legend(axes, rows)


def _against_theory(axes: Axes, rows: Sequence[Row]) -> None:
    palette = colours(rows)
    top = 1.0
    for row in rows:
        predicted, measured = row.theory.speedup if row.theory else 0.0, row.speedup or 0.0
        low, high = row.interval or (measured, measured)
        axes.plot([predicted, predicted], [low, high], color=palette[row.drafter], linewidth=2, alpha=0.5)
        axes.plot(predicted, measured, _marker(palette, row.drafter), color=palette[row.drafter])
        top = max(top, predicted, high)
    axes.plot([0, top * 1.1], [0, top * 1.1], color="black", linewidth=1)
    axes.set_xlim(0, top * 1.1)
    axes.set_ylim(0, top * 1.1)
    axes.set_xlabel("predicted speedup")
    axes.set_ylabel("measured speedup")
    _legend(axes, rows)


def _legend(axes: Axes, rows: Sequence[Row]) -> None:
    """Names the drafters above the axes, where nothing can lie under their names."""
    from matplotlib.lines import Line2D

    drawn, palette = {row.drafter for row in rows}, colours(rows)
    handles = [
        Line2D([], [], color=colour, marker=_marker(palette, name), label=_lines(name))
        for name, colour in palette.items()
        if name in drawn
    ]
    axes.figure.legend(handles=handles, fontsize=8, loc="outside upper center", ncols=_columns(rows))


def _legend_height(rows: Sequence[Row]) -> float:
    """Returns the inches that `_legend` takes."""
    lines = [_lines(name).count("\n") + 1 for name in dict.fromkeys(row.drafter for row in rows)]
    return 0.1 + 0.17 * (-(-len(lines) // 2) if _columns(rows) == 2 else sum(lines))


def _columns(rows: Sequence[Row]) -> int:
    return 1 if _long(rows) else 2


def _lines(name: str, width: int = 34) -> str:
    """Returns a drafter's name over several lines, broken behind marks, so that room is left to draw in."""
    lines = [""]
    for part in re.split(r"(?<=[:,+/=])", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _long(rows: Sequence[Row]) -> bool:
    return max((len(row.drafter) for row in rows), default=0) > 20
