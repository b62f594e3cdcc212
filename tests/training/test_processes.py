"""Two real processes under accelerate's launcher train what one does."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from draftwood.training import processes
from draftwood.training.loop import train
from tests import forked
from tests.training.table import Table, table_data
from tests.training.two_processes import SCHEDULE, launch, make


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The directory in which two processes have done their work."""
    place = tmp_path_factory.mktemp("launched")
    both = forked.start(launch, str(place), output=place / "told")
    both.join(300)
    assert both.exitcode == 0, (place / "told.err").read_text()
    return place


def test_what_two_processes_make_is_there_once_and_whole(launched, tmp_path):
    make(tmp_path)
    assert sorted(path.name for path in (launched / "made").iterdir()) == ["cache", "draft", "heads"]
    for name, weights in (("heads", "medusa_lm_head.safetensors"), ("draft", "model.safetensors")):
        found, expected = launched / "made" / name, tmp_path / name
        assert sorted(file.name for file in found.iterdir()) == sorted(file.name for file in expected.iterdir())
        one, two = load_file(expected / weights), load_file(found / weights)
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-3, atol=1e-4)
        logs = [(place / "log.jsonl").read_text().splitlines() for place in (found, expected)]
        assert [json.loads(line)["step"] for line in logs[0]] == [1, 2, 3, 4] and len(logs[1]) == 4
        told = [json.loads((place / "training.json").read_text())["evaluation"] for place in (found, expected)]
        assert told[0] == pytest.approx(told[1], rel=1e-3)


@pytest.mark.parametrize(
    ("launcher", "device", "on_cpu", "expected"),
    [(True, False, False, True), (True, True, True, False), (False, True, True, True), (False, True, False, False)],
)
def test_where_processes_go(monkeypatch, launcher, device, on_cpu, expected):
    """Without a device launched processes are told that they share a CPU; accelerate would not look."""
    monkeypatch.setattr(processes, "Accelerator", lambda cpu: cpu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: device)
    if launcher:
        monkeypatch.setenv("LOCAL_RANK", "1")
    assert processes.make_accelerator(on_cpu=on_cpu) is expected


def test_two_processes_train_what_one_does(launched):
    tmp_path = launched
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
