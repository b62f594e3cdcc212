"""Two real processes under accelerate's launcher train what one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftwood.training.loop import train
from tests.training.table import Table, table_data
from tests.training.two_processes import SCHEDULE

ROOT = Path(__file__).parents[2]


def test_two_processes_train_what_one_does(tmp_path):
    command = [sys.executable, "-m", "tests.training.two_processes", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    notes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    weights = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    lines: list[dict] = []
    one = Table(drawn=False)
    train(one, table_data(), SCHEDULE, on_step=lines.append)

    assert [note["processes"] for note in notes] == [2, 2]
    for index, batch in enumerate(one.seen):  # each forward is shared, none read twice
        assert len(notes[0]["seen"][index]) == 2 and len(notes[1]["seen"][index]) == 3
        assert notes[0]["seen"][index] + notes[1]["seen"][index] == batch.index.tolist()
    for process in weights:
        torch.testing.assert_close(process["quiet"], one.table.data, rtol=0, atol=1e-12)
        assert torch.equal(process["again"], process["quiet"])  # from the checkpoint
        assert torch.equal(process["noisy"], weights[0]["noisy"])
        once, twice = process["shards"]  # through a checkpoint of weights that no process holds whole
        assert torch.equal(once, twice) and once.abs().max() > 0.1
    assert one.table.abs().max() > 0.1 and not torch.equal(weights[0]["noisy"], weights[0]["quiet"])
    assert not set(notes[0]["noises"]) & set(notes[1]["noises"])  # each draws for itself
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log.pop(-1)["evaluation"] == {"rank": 7.0}
    for logged, line in zip(log, lines[:-1], strict=True):
        assert logged | {"seconds": 0} == pytest.approx(line | {"seconds": 0}, rel=1e-5)
    assert [note["called"] for note in notes] == [[1, 2, 3, 4], []]
    assert all("batch_size must be >= 2, a sequence for each process, got 1" in note["refusal"] for note in notes)

    resumed = Table(drawn=False)  # a checkpoint knows nothing of the number of processes
    train(resumed, table_data(), SCHEDULE, directory=tmp_path / "whole")
    assert torch.equal(resumed.table.data, weights[0]["quiet"]) and not resumed.seen
