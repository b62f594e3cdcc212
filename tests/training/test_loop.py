"""The training loop on a model of one matrix: schedule, accumulation, clipping and checkpoints."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.training.loop import Objective, Schedule, held_out, train
from tests import forked
from tests.training.table import Table
from tests.training.table import table_data as data

SCHEDULE = Schedule(steps=4, batch_size=2, learning_rate=0.1, checkpoint_every=2)


def trained(schedule: Schedule, directory=None, objective=None, **options):
    objective = objective or Table()
    train(objective, data(), schedule, directory=directory, **options)
    return objective


def quiet() -> Table:
    return Table(drawn=False)


def test_the_learning_rate_rises_and_falls():
    schedule = Schedule(steps=10, warmup=2, learning_rate=4.0)
    assert [schedule.rate(step) for step in (0, 1, 2, 6)] == pytest.approx([2, 4, 4, 2])
    assert schedule.rate(9) == pytest.approx(2 * (1 + math.cos(math.pi * 7 / 8)))


def test_accumulated_forwards_are_one_large_batch():
    lines: list[dict] = []
    large = trained(replace(SCHEDULE, batch_size=6), objective=quiet(), on_step=lines.append)
    small = trained(replace(SCHEDULE, batch_size=2, accumulate=3), objective=quiet(), on_step=lines.append)
    torch.testing.assert_close(large.table, small.table, rtol=0, atol=1e-12)
    assert not torch.equal(large.table, torch.zeros_like(large.table))
    for one, other in zip(lines[:4], lines[4:], strict=True):
        assert one | {"seconds": 0} == pytest.approx(other | {"seconds": 0})


def test_steps_read_on_in_the_order_of_the_data(tmp_path):
    """Also after a stop: the position in the data goes on with the step."""
    schedule = replace(SCHEDULE, accumulate=2)

    def stop(entry):
        if entry["step"] == 2:
            raise KeyboardInterrupt

    first, then = Table(), Table()
    with pytest.raises(KeyboardInterrupt):
        trained(schedule, tmp_path, objective=first, on_step=stop)
    trained(schedule, tmp_path, objective=then)
    order = data().order(0, 4 * 2 * 2, seed=0)
    seen = [*first.seen, *then.seen]
    assert torch.equal(torch.cat([batch.index for batch in seen]), order)
    assert torch.equal(torch.cat([batch.tokens for batch in seen]), data().tokens[order])
    assert torch.equal(torch.cat([batch.learnt for batch in seen]), data().learnt[order])


def test_the_gradient_is_clipped():
    lines: list[dict] = []
    seen = []

    objective = quiet()
    objective.table.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm().item()))
    trained(replace(SCHEDULE, clip=1e-9, steps=1), objective=objective, on_step=lines.append)
    assert lines[0]["gradient_norm"] == pytest.approx(seen[0])
    # Adam's epsilon of 1e-8 shows whether what reached it had a norm of 1e-9.
    clipped = trained(replace(SCHEDULE, clip=1e-9, steps=1), objective=quiet()).table.abs().max().item()
    free = trained(replace(SCHEDULE, clip=1e9, steps=1), objective=quiet()).table.abs().max().item()
    assert free == pytest.approx(0.1, rel=1e-3) and clipped < 0.02


def test_a_run_goes_on_from_its_checkpoint_only(tmp_path):
    whole = trained(SCHEDULE, tmp_path / "whole")
    again = trained(SCHEDULE, tmp_path / "whole")  # nothing is left to do
    assert torch.equal(whole.table, again.table)
    assert (tmp_path / "whole" / "log.jsonl").read_text().count("\n") == 4
    assert torch.equal(whole.frozen, torch.ones(3))
    assert not torch.equal(whole.table, trained(replace(SCHEDULE, seed=1)).table)
    checkpoint = tmp_path / "whole" / "checkpoint.pt"
    content = checkpoint.read_bytes()
    for broken in (b"", b"nonsense", content[: len(content) // 2]):
        checkpoint.write_bytes(broken)
        with pytest.raises(InvalidCheckpoint, match="cannot read the checkpoint"):
            trained(SCHEDULE, tmp_path / "whole")
    checkpoint.write_bytes(content)
    sound = torch.load(checkpoint)
    for broken, message in (
        ([1], "list indices"),
        ({"step": 1}, "'setup'"),
        (sound | {"setup": 1}, "'setup' must be an"),
    ):
        torch.save(broken, checkpoint)
        with pytest.raises(InvalidCheckpoint, match=f"checkpoint.pt': .*{message}.*; delete it to begin anew"):
            trained(SCHEDULE, tmp_path / "whole")
    checkpoint.write_bytes(content)
    with pytest.raises(InvalidRequest, match="begun with other schedule and loss"):
        trained(replace(SCHEDULE, steps=5), tmp_path / "whole", about={"scale": 2})


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    class Broken(Table):
        def forward(self, batch, step, generator):
            return self.table.sum() * math.nan, {}

    with pytest.raises(InvalidRequest, match="gradient of step 1 is nan"):
        trained(SCHEDULE, tmp_path, objective=Broken())


def test_evaluation_is_logged_when_due_and_at_the_end(tmp_path):
    calls: list[float] = []

    def evaluate():
        calls.append(float(objective.table.detach().abs().sum()))
        return {"size": calls[-1]}

    objective = quiet()
    trained(replace(SCHEDULE, steps=5, eval_every=2), tmp_path, objective=objective, evaluate=evaluate)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["step"]: line["evaluation"]["size"] for line in log if "evaluation" in line} == dict(
        zip([0, 2, 4, 5], calls, strict=True)
    )
    assert len({*calls}) == 4 and log[0].keys() == {"step", "tokens", "seconds", "evaluation"} and log[0]["tokens"] == 0
    assert calls[0] == 0 and calls[3] == float(objective.table.detach().abs().sum())
    # When to look and when to save change nothing that is learnt: the run may go on under others.
    trained(replace(SCHEDULE, steps=5, eval_every=1, checkpoint_every=1), tmp_path, objective=quiet())


def test_a_curve_has_one_start_however_often_the_run_is_stopped(tmp_path):
    def stop_at(step):
        def stop(entry):
            if entry["step"] == step:
                raise KeyboardInterrupt

        return stop

    schedule = replace(SCHEDULE, eval_every=3)
    for step in (1, 3):  # before the first checkpoint, and behind it
        with pytest.raises(KeyboardInterrupt):
            trained(schedule, tmp_path, evaluate=lambda: {"x": 1.0}, on_step=stop_at(step))
    trained(schedule, tmp_path, evaluate=lambda: {"x": 1.0})
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2, 3, 4]
    assert [line["step"] for line in log if "evaluation" in line] == [0, 3, 4]
    lines: list[dict] = []
    trained(replace(SCHEDULE, steps=1), evaluate=lambda: {"x": 1.0}, on_step=lines.append)
    assert [line["step"] for line in lines] == [1]  # nothing is measured before the end unless asked for


def test_shards_of_weights_are_for_objectives_that_can():
    sharding = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(InvalidRequest, match="Table needs whole weights in every process, which FSDP"):
        trained(SCHEDULE, accelerator=sharding)
    able = Table()
    able.shardable = True
    with pytest.raises(AttributeError, match="gradient_accumulation_steps"):  # what is looked at next
        trained(SCHEDULE, objective=able, accelerator=sharding)


def test_held_out_figures_are_means_over_all_learnt_tokens():
    objective, every = quiet(), data().at(torch.arange(8))
    with torch.no_grad():
        objective.table.normal_(generator=torch.Generator().manual_seed(1))
    expected, _ = objective(every, 0, torch.Generator())
    assert held_out(objective, data(), 3)()["entropy"] == pytest.approx(expected.item())
    noisy = held_out(Table(), data(), 3, seed=4)
    assert noisy() == noisy()


def test_the_log_counts_tokens_and_seconds(tmp_path):
    def stop(entry):
        if entry["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(replace(SCHEDULE, accumulate=3), tmp_path, on_step=stop)
    trained(replace(SCHEDULE, accumulate=3), tmp_path)
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in log] == [24, 48, 72, 96]
    order = data().order(0, 24, 0).view(4, 6)
    assert [line["learnt"] for line in log] == data().learnt[order, 1:].sum((1, 2)).tolist()
    seconds = [line["seconds"] for line in log]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 20


def test_parameters_may_have_rates_of_their_own():
    class Two(Table):
        def __init__(self):
            super().__init__(drawn=False)
            self.fast = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))

        def rate(self, name):
            return {"table": 1.0, "fast": 4.0}[name]

        def forward(self, batch, step, generator):
            value, figures = super().forward(batch, step, generator)
            return value + self.fast.sum(), figures

    # The first step of Adam is the rate, whatever the gradient is.
    both = trained(replace(SCHEDULE, steps=1, clip=1e9), objective=Two())
    assert both.table.abs().max().item() == pytest.approx(0.1, rel=1e-3)
    assert both.fast.abs().max().item() == pytest.approx(0.4, rel=1e-3)


def test_only_matrices_decay():
    """Adam steps by the rate whatever the gradient is; decay takes its share of the weights besides."""

    class Still(Table):
        def __init__(self):
            super().__init__()
            self.table.data.fill_(1.0)
            self.bias = nn.Parameter(torch.ones(8, dtype=torch.float64))

        def forward(self, batch, step, generator):
            return 0.0 * (self.table.sum() + self.bias.sum()), {}

    still = trained(replace(SCHEDULE, steps=1, weight_decay=0.5), objective=Still())
    assert torch.equal(still.bias, torch.ones_like(still.bias))
    torch.testing.assert_close(still.table, torch.full_like(still.table, 1 - 0.1 * 0.5))


def test_mixed_precision_is_the_accelerators():
    seen: list[torch.dtype] = []

    class Linear(Objective):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, batch, step, generator):
            logits = self.layer(nn.functional.one_hot(batch.tokens[:, :-1] % 4, 4).float())
            seen.append(logits.dtype)
            wanted = batch.learnt[:, 1:]
            return nn.functional.cross_entropy(logits[wanted].float(), batch.tokens[:, 1:][wanted]), {}

    AcceleratorState._reset_state(True)
    try:
        objective, lines = Linear(), []
        mixed = Accelerator(cpu=True, mixed_precision="bf16")
        train(objective, data(), replace(SCHEDULE, steps=20), accelerator=mixed, on_step=lines.append)
        assert set(seen) == {torch.bfloat16} and objective.layer.weight.dtype == torch.float32
        assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
        objective(data().at(torch.arange(2)), 0, torch.Generator())
        assert seen[-1] == torch.float32  # nothing is left on the objective
        accumulating = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        with pytest.raises(InvalidRequest, match="accumulated by the schedule"):
            train(objective, data(), SCHEDULE, accelerator=accumulating)
    finally:
        AcceleratorState._reset_state(True)


def test_tensorboard_is_asked_for_by_name(tmp_path, monkeypatch):
    with pytest.raises(InvalidRequest, match="needs a directory"):
        trained(SCHEDULE, tensorboard=True)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        trained(SCHEDULE, tmp_path, tensorboard=True)

    written = []

    class Writer:
        def __init__(self, place, purge_step):
            written.append((place, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    lines: list[dict] = []
    trained(SCHEDULE, tmp_path, tensorboard=True, evaluate=lambda: {"top-1": 0.5}, on_step=lines.append)
    assert written[0] == (str(tmp_path / "tensorboard"), 1) and written[-1] == "closed"
    assert ("loss", lines[0]["loss"], 1) in written and ("evaluation/top-1", 0.5, 4) in written


def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL from outside, wherever the process is: what is there can be gone on with and gives the same weights."""
    schedule = replace(SCHEDULE, steps=300, checkpoint_every=1)
    process = forked.start(trained, schedule, tmp_path / "killed", output=tmp_path / "told")
    log = tmp_path / "killed" / "log.jsonl"
    until = time.monotonic() + 300  # a busy machine may take a minute to import
    while time.monotonic() < until and (not log.exists() or log.read_text().count("\n") < 20):
        time.sleep(0.01)
    process.kill()
    process.join()
    done = log.read_text().count("\n")
    assert 20 <= done < 300
    steps: list[int] = []
    killed = trained(schedule, tmp_path / "killed", on_step=lambda entry: steps.append(entry["step"]))
    assert steps == list(range(steps[0], 301)) and done - 1 <= steps[0] - 1 <= done
    assert torch.equal(killed.table, trained(schedule).table)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == list(range(1, 301))


def test_nothing_to_train():
    with pytest.raises(InvalidRequest, match="nothing to train"):
        trained(SCHEDULE, objective=Table().requires_grad_(False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"accumulate": 0}, "accumulate must be >= 1"),
        ({"checkpoint_every": 0}, "checkpoint_every must be >= 1"),
        ({"warmup": -1}, "warmup must be >= 0"),
        ({"eval_every": -1}, "eval_every must be >= 0"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"learning_rate": math.nan}, "learning_rate must be > 0"),
        ({"clip": 0.0}, "clip must be > 0"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Schedule(**{"steps": 1, **options})
