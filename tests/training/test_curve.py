"""Learning curves, read from the logs of runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwood.core.errors import InvalidRequest
from draftwood.training.curve import Point, join_curves, plot_curves, read_curve

FIGURES = {"head 0 top-1": 0.25, "head 0 loss": 3.0, "step 1 acceptance": 0.5, "expected tau": 1.5}


def write_log(directory: Path, *lines: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def line(step: int, evaluation: dict[str, float] | None = None) -> dict[str, Any]:
    entry = {"step": step, "tokens": 100 * step, "seconds": 2.0 * step, "loss": 1.0}
    return entry if evaluation is None else entry | {"evaluation": evaluation}


def test_what_was_measured_is_read_from_a_run_that_goes_on_too(tmp_path: Path):
    expected = [Point(0, 0.0, FIGURES), Point(200, 4.0, FIGURES)]
    made = write_log(tmp_path / "made", line(0, FIGURES), line(1), line(2, FIGURES))
    assert read_curve(made) == read_curve(made / "log.jsonl") == expected
    running = write_log(tmp_path / "running.training", line(0, FIGURES), line(1), line(2, FIGURES)) / "log.jsonl"
    running.write_text(running.read_text() + '{"step": 3, "eval')
    assert read_curve(tmp_path / "running") == expected
    assert join_curves([expected, expected]) == [*expected, Point(200, 4.0, FIGURES), Point(400, 8.0, FIGURES)]


def test_rates_and_tau_are_drawn_by_run(tmp_path: Path):
    curve = [Point(0, 0.0, FIGURES), Point(2_000_000, 120.0, FIGURES)]
    plot_curves({"run": curve}, tmp_path / "new" / "curve.svg")
    svg = (tmp_path / "new" / "curve.svg").read_text()
    for said in ("head 0 top-1", "expected tau", "million tokens", "minutes", "share of tokens", "tokens a round"):
        assert f">{said}<" in svg
    assert "head 0 loss" not in svg and "step 1 acceptance" not in svg
    draft = [Point(0, 0.0, {"agreement": 0.5, "greedy tau": 2.0})]
    plot_curves({"one": curve, "two": draft}, tmp_path / "two.svg")
    svg = (tmp_path / "two.svg").read_text()
    assert ">head 0 top-1, one<" in svg and ">agreement, two<" in svg and ">greedy tau, two<" in svg
    assert ">agreement, one<" not in svg  # which it has not measured
    plot_curves({"run": curve}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidRequest, match="no log of a training at"):
        read_curve(tmp_path / "nowhere")
    with pytest.raises(InvalidRequest, match="holds no evaluation yet; train with eval_every"):
        read_curve(write_log(tmp_path / "short", line(1)))
    (tmp_path / "other.jsonl").write_text('{"text": "a"}\n{"evaluation": {}}\n')
    with pytest.raises(InvalidRequest, match=r"other\.jsonl, line 2: no log of a training"):
        read_curve(tmp_path / "other.jsonl")
    with pytest.raises(InvalidRequest, match=r"drawn as \.svg, \.png, \.pdf, got"):
        plot_curves({"run": [Point(0, 0.0, FIGURES)]}, tmp_path / "curve.gif")
    with pytest.raises(InvalidRequest, match="nothing that was measured can be drawn: loss"):
        plot_curves({"run": [Point(0, 0.0, {"loss": 1.0})]}, tmp_path / "curve.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"draftwood\[plot\]"):
        plot_curves({"run": [Point(0, 0.0, FIGURES)]}, tmp_path / "curve.svg")
