"""The learning curve of training runs, drawn from their logs: what more tokens, or more minutes, buy.

What is drawn is what was measured on held-out data: rates (top-1 by head or step, or agreement and acceptance of a
draft model) above expected tau, against the tokens that were read and the minutes that training took.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from draftwood.core.errors import InvalidRequest

from .checkpoint import LOG

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
_PANELS = {
    "share of tokens": re.compile(r"agreement|acceptance|.* top-1"),
    "tokens a round": re.compile(r"tau|(greedy|expected) tau"),
}
# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES = ("-", "--", ":", "-.")
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e5e5",
    "svg.fonttype": "none",
    "svg.hashsalt": "draftwood",
    "legend.frameon": False,
}


class Point(NamedTuple):
    """One evaluation.

    Attributes:
        tokens: read until then.
        seconds: of training until then.
        figures: what was measured, by name.
    """

    tokens: int
    seconds: float
    figures: dict[str, float]


def read_curve(log: str | Path) -> list[Point]:
    """Returns the evaluations of a run, which may still go on.

    Args:
        log: the log, or the directory that the run makes.

    Raises:
        InvalidRequest: there is no log, it cannot be read, or nothing was measured.
    """
    given = Path(log).expanduser()
    places = [given, given / LOG, Path(f"{given}.training") / LOG]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise InvalidRequest(f"no log of a training at {str(given)!r}: neither a file nor a directory with {LOG}")
    points, number = [], 0
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):  # noqa: B007 - the error names it
            if line.endswith("\n") and "evaluation" in (entry := json.loads(line)):
                points.append(Point(int(entry["tokens"]), float(entry["seconds"]), dict(entry["evaluation"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path}, line {number}: no log of a training: {error!r}") from error
    if not points:
        raise InvalidRequest(f"{str(path)!r} holds no evaluation yet; train with eval_every > 0")
    return points


def join_curves(curves: Iterable[Sequence[Point]]) -> list[Point]:
    """Returns runs of which each started from what the one before had made, as one."""
    joined: list[Point] = []
    for curve in curves:
        tokens, seconds = (joined[-1].tokens, joined[-1].seconds) if joined else (0, 0.0)
        joined += [Point(tokens + one.tokens, seconds + one.seconds, one.figures) for one in curve]
    return joined


def plot_curves(curves: dict[str, Sequence[Point]], output: str | Path) -> None:
    """Draws curves into a file.

    Args:
        curves: by the name that tells them apart.
        output: an `.svg`, `.png` or `.pdf` file.

    Raises:
        InvalidRequest: another kind of file, or no figure that can be drawn.
        ImportError: matplotlib is not installed (`pip install 'draftwood[plot]'`).
    """
    output = Path(output).expanduser()
    if output.suffix not in FORMATS:
        raise InvalidRequest(f"a learning curve is drawn as {', '.join(FORMATS)}, got {str(output)!r}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib; pip install 'draftwood[plot]'") from error
    named = list(dict.fromkeys(name for curve in curves.values() for point in curve for name in point.figures))
    panels = {label: [name for name in named if known.fullmatch(name)] for label, known in _PANELS.items()}
    rows = [(label, names) for label, names in panels.items() if names]
    if not rows:
        raise InvalidRequest(f"nothing that was measured can be drawn: {', '.join(named) or 'no figures'}")
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 0.6 + 2.4 * len(rows)), layout="constrained")
        grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False)
        for (label, names), (tokens, minutes) in zip(rows, grid, strict=True):
            _draw(tokens, curves, names, lambda point: point.tokens / 1e6)
            _draw(minutes, curves, names, lambda point: point.seconds / 60)
            tokens.set_ylabel(label)
            minutes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
        grid[-1][0].set_xlabel("million tokens")
        grid[-1][1].set_xlabel("minutes")
        output.parent.mkdir(parents=True, exist_ok=True)
        date = {"Date": None} if output.suffix == ".svg" else {}
        figure.savefig(output, dpi=200, metadata=date)


def _draw(axes: Axes, curves: dict[str, Sequence[Point]], names: Sequence[str], at: Any) -> None:
    for number, (run, curve) in enumerate(curves.items()):
        for colour, name in enumerate(names):
            known = [point for point in curve if name in point.figures]
            if not known:
                continue
            axes.plot(
                [at(point) for point in known],
                [point.figures[name] for point in known],
                color=_COLOURS[colour % len(_COLOURS)],
                linestyle=_LINES[number % len(_LINES)],
                marker=".",
                label=name if len(curves) == 1 else f"{name}, {run}",
            )
