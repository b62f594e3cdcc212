from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import in_turn
from benchmarks.peers.methods import OURS, PACKED, PEERS, Assets, Entry, entries
from benchmarks.peers.protocol import PeerError, Worker
from benchmarks.peers.table import markdown, summarise

SERVED = """
import os, sys
from benchmarks.peers.protocol import serve

def echo(options):
    print("a library that prints")
    os.system("echo a library whose child prints")
    return lambda prompt, count: (prompt[:count], options["rounds"], count)

def fails(options):
    raise ValueError("no such\\n  layer")

def dies(options):
    print("out of memory", file=sys.stderr, flush=True)
    os._exit(3)

serve({"echo": echo, "fails": fails, "dies": dies})
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    started = Worker([sys.executable, "-c", SERVED], tmp_path / "log", threads=1)
    yield started
    started.close()


def test_a_worker_answers_however_much_its_library_prints(worker: Worker, tmp_path: Path) -> None:
    worker.ask(load="one", method="echo", options={"rounds": 1})
    worker.ask(load="other", method="echo", options={"rounds": 2})
    told = worker.ask(run="one", prompt=[5, 6, 7], max_new_tokens=2)
    assert (told["tokens"], told["rounds"], told["committed"]) == ([5, 6], 1, 2)
    assert told["seconds"] >= 0
    assert worker.ask(run="other", prompt=[5], max_new_tokens=1)["rounds"] == 2
    assert (tmp_path / "log").read_text().count("child prints") == 2


def test_a_worker_outlives_what_a_library_cannot_do(worker: Worker) -> None:
    with pytest.raises(PeerError, match="ValueError: no such layer"):
        worker.ask(load="bad", method="fails", options={})
    with pytest.raises(PeerError, match="no method 'unknown'; known: echo, fails, dies"):
        worker.ask(load="bad", method="unknown", options={})
    assert worker.ask(load="one", method="echo", options={"rounds": 1}) == {"ready": True}


def test_a_worker_that_dies_is_quoted(worker: Worker) -> None:
    for _ in range(2):  # a second request meets a closed pipe
        with pytest.raises(PeerError, match="out of memory"):
            worker.ask(load="one", method="dies", options={})


def test_a_missing_environment_is_an_error_of_the_peer(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="not installed"):
        Worker([str(tmp_path / "bin" / "python")], tmp_path / "log", threads=1)


def run(peer: str, prompt: int, seconds: float, *, method: str = "none", count: int = 10, rounds: int = 5) -> dict:
    counts = {"count": count, "rounds": rounds, "committed": count, "same": prompt == 0}
    return {"method": method, "peer": peer, "prompt": prompt, "repeat": 0, "seconds": seconds, **counts}


def row(table: str, method: str, peer: str) -> list[str]:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return next(cells for cells in rows if cells[:2] == [method, peer])


def test_the_table_compares_runs_that_took_turns() -> None:
    runs = [
        *(run(OURS, prompt, seconds) for prompt, seconds in enumerate([1.0, 4.0])),
        *(run("transformers", prompt, seconds, rounds=10) for prompt, seconds in enumerate([3.0, 4.0])),
    ]
    assert summarise(runs)["none", OURS].rate == pytest.approx(20 / 5)
    cells = row(markdown(runs), "none", "transformers")
    # Medians over prompts, 3 and 1 times as fast, not a ratio of sums, which would be 1.4.
    assert cells[2:5] == ["2.9", "4.0", "2.00 (1.50 to 2.50)"]
    assert cells[7:] == ["1.00 / 2.00", "1 of 2", "1 of 2"]


def test_what_failed_once_is_a_row_with_its_error_and_no_figures() -> None:
    runs = [
        run(OURS, 0, 1.0),
        run("economize", 0, 1.0),
        {"method": "none", "peer": "economize", "error": "ValueError: a | b"},
    ]
    table = markdown(runs)
    cells = row(table, "none", "economize")
    assert cells[2] == "failed: ValueError: a / b"
    assert cells[4] == "" and cells[7] == "- / 2.00"
    assert "transformers" not in table  # which was not asked for


def test_every_method_of_a_peer_stands_beside_ours_plain_and_packed(tmp_path: Path) -> None:
    made = list(entries(Assets(tmp_path, exit_layer=2, skip=(1,))))
    for method, peers in PEERS.items():
        assert [entry.peer for entry in made if entry.method == method] == [OURS, PACKED, *peers]
    missing = {entry.method for entry in made if entry.missing}
    assert missing == {"medusa", "eagle3"}  # for want of heads
    assert json.loads(json.dumps([entry.options for entry in made])) == [entry.options for entry in made]
    tree = list(entries(Assets(tmp_path, exit_layer=2, skip=(1,), medusa=tmp_path, medusa_tree=((0,), (0, 0)))))
    given = {entry.peer: entry.options for entry in tree if entry.method == "medusa"}
    assert given["economize, our tree"]["tree"] and given["economize"]["tree"] is None


def test_who_comes_first_goes_round() -> None:
    some = [Entry("none", "a", "none"), Entry("medusa", "a", "medusa"), Entry("none", "b", "none")]
    orders = [[entry.label for entry in in_turn(some, turn)] for turn in range(3)]
    assert orders[0] == ["none / a", "none / b", "medusa / a"]
    assert orders[1] == ["none / b", "none / a", "medusa / a"]
    assert orders[2] == orders[0]
