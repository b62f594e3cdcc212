"""Trains in two processes that accelerate's launcher starts, and notes what each of them saw; run by a test."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator, debug_launcher

from draftwood.core.errors import InvalidRequest
from draftwood.training.loop import Schedule, train
from tests.training.table import Table, table_data

SCHEDULE = Schedule(steps=4, batch_size=5, accumulate=2, learning_rate=0.1, checkpoint_every=2)


def stop(entry: dict) -> None:
    if entry["step"] == 2:
        raise KeyboardInterrupt


def work(place: str) -> None:
    """Trains without noise, through a checkpoint; then with noise."""
    out, rank = Path(place), Accelerator().process_index
    quiet = Table(drawn=False)
    train(quiet, table_data(), SCHEDULE, directory=out / "whole", evaluate=lambda: {"rank": 7.0})
    train(Table(drawn=False), table_data(), replace(SCHEDULE, steps=2), directory=out / "half")
    again = Table(drawn=False)
    train(again, table_data(), SCHEDULE, directory=out / "whole")
    noisy = Table()
    called: list[int] = []
    train(noisy, table_data(), SCHEDULE, on_step=lambda entry: called.append(entry["step"]))
    try:
        train(Table(), table_data(), replace(SCHEDULE, batch_size=1))
    except InvalidRequest as error:
        refusal = str(error)
    torch.save({"quiet": quiet.table.data, "again": again.table.data, "noisy": noisy.table.data}, out / f"{rank}.pt")
    notes = {
        "processes": Accelerator().num_processes,
        "seen": [batch.index.tolist() for batch in quiet.seen],
        "noises": noisy.noises,
        "called": called,
        "refusal": refusal,
    }
    (out / f"{rank}.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    debug_launcher(work, (sys.argv[1],), num_processes=2)
