"""Trains in two processes that accelerate's launcher starts, and notes what each of them saw; run by a test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.training.checkpoint import Record
from draftwood.training.draft_model import DraftModelRecipe, train_draft_model
from draftwood.training.loop import Schedule, train
from draftwood.training.medusa import train_medusa
from tests.training.table import Table, table_data
from tests.training.test_medusa import FAST, RECIPE, llama, sequences

SCHEDULE = Schedule(steps=4, batch_size=5, accumulate=2, learning_rate=0.1, checkpoint_every=2)


def sharded() -> tuple[Table, torch.optim.Optimizer]:
    """Returns a table whose rows the processes share, as FSDP does it."""
    table = Table(drawn=False)
    fully_shard(table, mesh=init_device_mesh("cpu", (2,)))
    return table, torch.optim.AdamW([{"params": [table.table], "factor": 1.0}], lr=0.1)


def advance(table: Table, optimizer: torch.optim.Optimizer) -> None:
    table(table_data().at(torch.arange(4)), 0, torch.Generator())[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def keep_shards(place: Path, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights after two updates, and after two with a checkpoint between them."""
    sharding = SimpleNamespace(distributed_type=DistributedType.FSDP, is_main_process=rank == 0)
    first, again = sharded(), sharded()
    for table, optimizer in (first, again):
        if table is first[0]:
            advance(table, optimizer)
        record = Record(place, {}, sharding)
        done = record.resume(table, optimizer)
        record.save(1, 0.0, table, optimizer)
        record.close()
        Accelerator().wait_for_everyone()
        assert done == ((0, 0.0) if table is first[0] else (1, 0.0))
    advance(*first)
    advance(*again)
    return first[0].table.full_tensor().detach(), again[0].table.full_tensor().detach()


def make(place: Path) -> None:
    """Makes heads and a draft model, with the target's features cached."""
    target, cached = Target(llama()), {"cache": place / "cache"}
    train_medusa(target, sequences(), place / "heads", FAST, RECIPE, **cached)
    recipe = DraftModelRecipe(layers=1, held_out=6)
    train_draft_model(target, sequences(), place / "draft", FAST, recipe, **cached)


def work(place: str) -> None:
    """Trains without noise, through a checkpoint; then with noise."""
    out, rank = Path(place), Accelerator().process_index
    quiet = Table(drawn=False)
    train(quiet, table_data(), SCHEDULE, directory=out / "whole", evaluate=lambda: {"rank": 7.0})
    again = Table(drawn=False)
    train(again, table_data(), SCHEDULE, directory=out / "whole")
    noisy = Table()
    called: list[int] = []
    train(noisy, table_data(), SCHEDULE, on_step=lambda entry: called.append(entry["step"]))
    try:
        train(Table(), table_data(), replace(SCHEDULE, batch_size=1))
    except InvalidRequest as error:
        refusal = str(error)
    shards = keep_shards(out / "sharded", rank)
    tables = {"quiet": quiet.table.data, "again": again.table.data, "noisy": noisy.table.data, "shards": shards}
    torch.save(tables, out / f"{rank}.pt")
    notes = {
        "processes": Accelerator().num_processes,
        "seen": [batch.index.tolist() for batch in quiet.seen],
        "noises": noisy.noises,
        "called": called,
        "refusal": refusal,
    }
    (out / f"{rank}.json").write_text(json.dumps(notes))
    make(out / "made")


def launch(place: str) -> None:
    """Starts both processes and waits for them."""
    debug_launcher(work, (place,), num_processes=2)
