"""A report's tables as Markdown, LaTeX and HTML, and its page: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from typing import NamedTuple

from .plots import Plot


class Grid(NamedTuple):
    """A table of texts; the first `labels` columns name the row, the last of them by its drafter."""

    headings: list[str]
    lines: list[list[str]]
    labels: int


class Section(NamedTuple):
    """What the page says about one set of conditions."""

    title: str
    overall: Grid
    categories: Grid
    theory: Grid
    costs: Grid
    plots: list[Plot]


def markdown(grid: Grid) -> str:
    """Returns the table in GitHub's Markdown."""
    lines = [[_escape_markdown(cell) for cell in line] for line in (grid.headings, *grid.lines)]
    rule = ["---" if column < grid.labels else "---:" for column in range(len(grid.headings))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (lines[0], rule, *lines[1:]))


def latex(grid: Grid) -> str:
    """Returns the table for the booktabs package."""
    columns = "l" * grid.labels + "r" * (len(grid.headings) - grid.labels)
    lines = [" & ".join(map(_escape_latex, line)) + r" \\" for line in (grid.headings, *grid.lines)]
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*body, r"\end{tabular}", ""])


def html_table(grid: Grid) -> str:
    """Returns a bare `<table>`."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ["label"] * (grid.labels - 1) + ["name"] + ["number"] * (len(cells) - grid.labels)
        return "".join(
            f'<{tag} class="{kind}">{html.escape(cell)}</{tag}>' for kind, cell in zip(kinds, cells, strict=True)
        )

    body = "".join(f"<tr>{line(cells, 'td')}</tr>" for cells in grid.lines)
    return f"<table><thead><tr>{line(grid.headings, 'th')}</tr></thead><tbody>{body}</tbody></table>"


def page(title: str, notes: Sequence[str], sections: Sequence[Section], facts: dict[str, str]) -> str:
    """Returns the page.

    Args:
        title: its heading.
        notes: what a reader must know, above everything else.
        sections: one a set of conditions.
        facts: about the machine and the versions.
    """
    warned = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    known = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in facts.items())
    return _PAGE.format(
        title=html.escape(title),
        style=_STYLE,
        notes=f'<ul class="notes">{warned}</ul>' if warned else "",
        sections="".join(map(_section, sections)),
        facts=f"<h2>Measured on</h2><dl>{known}</dl>",
        terms="".join(f"<dt>{name}</dt><dd>{html.escape(meaning)}</dd>" for name, meaning in _TERMS.items()),
    )


def _section(section: Section) -> str:
    figures = "".join(
        f"<figure><figcaption><b>{html.escape(plot.title)}.</b> {html.escape(plot.note)}</figcaption>"
        f'<img alt="{html.escape(plot.title)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(plot.svg.encode()).decode()}"></figure>'
        for plot in section.plots
    )
    return (
        f"<section><h2>{html.escape(section.title)}</h2>"
        f'<div class="wide">{html_table(section.overall)}</div>'
        f'<div class="plots">{figures}</div>'
        f'<details><summary>By category</summary><div class="wide">{html_table(section.categories)}</div></details>'
        "<details><summary>Theory beside measurement</summary>"
        f'<div class="wide">{html_table(section.theory)}</div></details>'
        "<details><summary>Costs of a round, acceptance by rank, memory</summary>"
        f'<div class="wide">{html_table(section.costs)}</div></details></section>'
    )


def _escape_markdown(text: str) -> str:
    # An underscore within a word is no emphasis, and names stay readable in the source.
    return re.sub(r"[\\`*\[\]<>~|]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))


def _escape_latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",  # LaTeX's own font encoding has other characters in the place of these three
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        **{c: f"\\{c}" for c in "&%$#_{}"},
    }
    return "".join(special.get(character, character) for character in text)


_TERMS = {
    "tokens/s": "new tokens a second of decoding; reading the prompt, and the token that comes with it, left out",
    "speedup": "seconds a token of plain decoding over seconds a token of the drafter, on the very same prompts",
    "95 %": "bootstrap interval of the speedup over the prompts",
    "predicted": "speedup that theory gives for this acceptance, draft cost and verify cost",
    "tau": "mean tokens a round commits, the bonus token counted",
    "accepted by depth": "share of tokens accepted at depth 1, 2, ..., given that the ones before were",
    "draft ms, verify ms, ...": "milliseconds a round; in a batch, over the texts that were in it",
    "accepted by rank": "how often the eldest sibling, the second, ... is the accepted one",
    "peak MB": "most memory in use: of the accelerator or, on a CPU, of the whole process, models included",
    "alpha, gamma, c, v": "acceptance probability, mean draft depth, cost of a draft level and of a verifying pass "
    "over a single-token pass; a speedup above 1 needs an alpha above `pays from alpha`",
    "same text": "whether every text is plain decoding's; a near tie parts where the target can hardly tell two "
    "tokens apart; - where texts are drawn freely",
}

_STYLE = """
:root { color-scheme: light; --line: #e2e2e2; --soft: #f6f6f4; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1.2rem; color: #1c1c1c; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; margin: .2rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
.notes { margin: 0; padding: .7rem 1rem .7rem 2rem; background: #fff6dd; border-left: 4px solid #E69F00;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .55rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { text-align: left; background: var(--soft); }
th.number, td.number { text-align: right; }
td.name { min-width: 8.5rem; white-space: normal; overflow-wrap: anywhere; }
tbody tr:hover { background: var(--soft); }
.plots { columns: 2 420px; column-gap: 1rem; margin: 1rem 0; }
figure { break-inside: avoid; margin: 0 0 1rem; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; }
figcaption { font-size: .88rem; margin-bottom: .5rem; }
img { width: 100%; height: auto; display: block; }
summary { cursor: pointer; padding: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; margin: 0; }
dt { font-weight: 600; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 520px) { body { padding: .8rem; } dl { grid-template-columns: 1fr; } dd { margin-bottom: .4rem; } }
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body><h1>{title}</h1>{notes}{sections}{facts}<h2>Terms</h2><dl>{terms}</dl></body></html>
"""
