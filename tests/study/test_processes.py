"""A study that several processes share, and that dies under them."""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections import Counter

import pytest
from typer.testing import CliRunner

import draftwood
from draftwood.cli import app
from draftwood.study.environment import launched
from draftwood.study.store import RESULTS
from tests import forked

SETTINGS = {"limit": 4, "max_new_tokens": 4}


def start(target, place, threads):
    arguments = ["compare", str(target), "prompt-lookup", "--out", str(place), "--limit", "4", "--max-new-tokens", "4"]
    output = place / f"told by {threads}"
    return forked.start(forked.command_line, *arguments, "--repeats", "500", output=output, threads=threads)


def test_processes_share_the_cells_and_lose_nothing_when_they_are_killed(tiny_directory, tmp_path):
    results = tmp_path / RESULTS
    both = [start(tiny_directory, tmp_path, threads) for threads in (1, 2)]  # told apart by their threads
    try:
        deadline = time.monotonic() + 600
        while True:
            content = results.read_bytes() if results.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            records = [json.loads(line) for line in whole.splitlines()]
            if {record["environment"]["threads"] for record in records} == {1, 2}:
                break
            assert time.monotonic() < deadline and all(process.is_alive() for process in both)
            time.sleep(0.05)
    finally:
        for process in both:
            process.kill()
            process.join(60)
    content = results.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    with open(results, "ab") as file:  # as if the kill had come in the middle of a line
        file.write(b'{"key": "')
    records = [json.loads(line) for line in whole.splitlines()]
    assert set(Counter(record["key"] for record in records).values()) == {1}, "a cell was run twice"

    repeats = 2 + max(record["repeat"] for record in records)  # some are still to run
    report = draftwood.compare(str(tiny_directory), directory=tmp_path, repeats=repeats, **SETTINGS)
    final = results.read_bytes()
    assert final.startswith(whole) and final.endswith(b"\n")
    keys = Counter(json.loads(line)["key"] for line in final.splitlines())
    assert set(keys.values()) == {1} and len(keys) == 4 * repeats
    assert [row.cells for row in report.rows] == [4 * repeats] * 2
    assert any("measured under different" in note and "threads" in note for note in report.notes())


def test_a_study_needs_no_cell_twice(tiny_directory, tmp_path):
    draftwood.compare(str(tiny_directory), directory=tmp_path, **SETTINGS)
    before = (tmp_path / RESULTS).read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.study.run.Bench", None)
        draftwood.compare(str(tiny_directory), directory=tmp_path, **SETTINGS)
    assert (tmp_path / RESULTS).read_bytes() == before


def test_under_a_launcher_the_first_process_tells_and_a_directory_is_needed(tiny_directory, tmp_path, monkeypatch):
    arguments = ["compare", str(tiny_directory), "--limit", "1", "--max-new-tokens", "2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    alone = CliRunner().invoke(app, arguments)
    assert alone.exit_code == 2 and "2 processes share a study through its directory: give --out" in alone.stderr
    for rank, tells in ((1, False), (0, True)):
        monkeypatch.setenv("RANK", str(rank))
        done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
        assert done.exit_code == 0 and bool(done.stdout) is tells
        assert (tmp_path / "index.html").exists() is tells
        assert (tmp_path / RESULTS).read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_launchers_say_who_a_process_is(monkeypatch, names):
    assert launched() == (0, 1)
    for name, value in zip(names, ("1", "3"), strict=True):
        monkeypatch.setenv(name, value)
    assert launched() == (1, 3)


def test_launchers_can_run_the_package_as_a_module(monkeypatch, capsys):
    """`accelerate launch -m draftwood` and `torchrun -m draftwood` ask for this."""
    monkeypatch.setattr(sys, "argv", ["draftwood", "theory", "--alpha", "0.4", "--c", "0.5"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("draftwood", run_name="__main__")
    assert ended.value.code == 0 and "do not draft" in capsys.readouterr().out
