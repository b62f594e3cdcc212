"""A page that explains speculation: a recorded run, or one made up from alpha, gamma and c, to be stepped through.

One HTML file that needs nothing else and asks for nothing: style, script and data are in it, and its own policy
forbids the network. The files explain.html, explain.css, explain_model.js (the run on a clock) and explain_view.js
(what is drawn of it) are put together here. The module decodes nothing.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from importlib.resources import files
from typing import Any

from ..core.checks import real_number, whole_number
from ..core.errors import InvalidRequest
from .trace import Trace

LONGEST_DRAFT, DEAREST_DRAFT = 16, 2.0
"""Where the sliders of the page end."""


def explain_trace(trace: Trace) -> str:
    """Returns the page of a recorded run.

    Args:
        trace: as `record` makes it and `load_trace` reads it.

    Raises:
        InvalidRequest: the recording is damaged: its rounds do not add up to its texts.
    """
    try:
        _check(trace)
        if trace.get("plain"):
            _check(trace["plain"])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(
            f"the recording is damaged: {type(error).__name__} {error}; record the run again"
        ) from error
    settings, rule = trace["settings"], trace.get("rule")
    if not isinstance(rule, dict) or not {"name", "lossless", "greedy"} <= rule.keys():
        raise InvalidRequest(f"the recording is damaged: it names no rule: {rule!r}")
    named = [str(settings[name]) for name in ("drafter", "model") if settings.get(name)]
    return _page(f"Speculative decoding, step by step{': ' if named else ''}{' on '.join(named)}", {"trace": trace})


def explain_parameters(alpha: float = 0.7, gamma: int = 4, c: float = 0.1) -> str:
    """Returns a page with a made-up run, and sliders for its parameters.

    Args:
        alpha: probability that a drafted token is accepted.
        gamma: tokens drafted a round, at most 16.
        c: cost of a draft step over a pass of the target, at most 2.

    Raises:
        InvalidRequest: a value outside its range.
    """
    parameters = {
        "alpha": real_number("alpha", alpha, 0, 1),
        "gamma": whole_number("gamma", gamma, 0),
        "c": real_number("c", c, 0, DEAREST_DRAFT),
    }
    if gamma > LONGEST_DRAFT:
        raise InvalidRequest(f"gamma must be at most {LONGEST_DRAFT} on the page, got {gamma}")
    return _page("Speculative decoding, step by step", {"parameters": parameters})


def _page(title: str, data: dict[str, Any]) -> str:
    parts = {
        "title": html.escape(title),
        "style": "\n" + _file("explain.css"),
        "script": "\n" + _file("explain_model.js") + _file("explain_view.js"),
        "data": _script_safe(data),
    }
    # In one go: a value that looks like a placeholder stays what it is.
    return re.sub("@(title|style|script|data)@", lambda found: parts[found[1]], _file("explain.html"))


def _script_safe(data: Any) -> str:
    """Returns JSON in ASCII without `<`, `>` and `&`: no text in it can end the script or begin a comment."""
    held = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return held.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _check(run: dict[str, Any]) -> None:
    """Replays the verdicts: they must spell the texts, and every path must be one of its tree."""
    said: dict[int, list[int]] = defaultdict(list)
    before = 0.0
    for number, one in enumerate(run["rounds"]):
        if not before - 1e-6 <= one["at"] <= one["end"] or min(one["seconds"].values()) < -1e-3:
            raise InvalidRequest(f"the recording is damaged: the clock of round {number} runs backwards")
        before = one["end"]
        for entry in one["rows"]:
            said[entry["row"]] += entry["committed"]
            if "tree" in entry and not _leads_down(entry["path"], entry["tree"], entry["committed"]):
                raise InvalidRequest(f"the recording is damaged: round {number} accepts what is no path of its tree")
    for row in run["rows"]:
        if said[row["row"]] != row["tokens"] or len(row["pieces"]) != len(row["tokens"]):
            raise InvalidRequest(f"the recording is damaged: the rounds of text {row['row']} do not add up to it")
    if len({row["row"] for row in run["rows"]}) != len(run["rows"]) or not run["rows"]:
        raise InvalidRequest("the recording is damaged: it holds no text, or one text twice")


def _leads_down(path: list[int], tree: dict[str, Any], committed: list[int]) -> bool:
    sizes = {len(tree[name]) for name in ("tokens", "parents", "candidate", "text", "p")}
    parents = all(-1 <= parent < node for node, parent in enumerate(tree["parents"]))
    steps = [tree["parents"][node] for node in path] == [-1, *path][: len(path)]
    return len(sizes) == 1 and parents and steps and [tree["tokens"][node] for node in path] == committed[: len(path)]
