"""The training loop on a model of one matrix: schedule, accumulation, clipping and checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.training.data import Batch, Document, Sequences, pack
from draftwood.training.loop import Objective, Schedule, train

SCHEDULE = Schedule(steps=4, batch_size=2, learning_rate=0.1, checkpoint_every=2)


def data() -> Sequences:
    """Sequences of length 4; the first token of a sequence is its number, and learnt tokens differ in number."""
    documents = [Document([i, 1, 2, 3], [True, i % 2 == 0, i % 3 == 0, True]) for i in range(8)]
    return pack(documents, 4)


class Table(Objective):
    """Logits of the next token from this one; `drawn` is whether noise is added."""

    def __init__(self, drawn: bool = True) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 8, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.drawn = drawn
        self.seen: list[Batch] = []

    def forward(self, batch, step, generator):
        self.seen.append(batch)
        tokens, wanted = batch.tokens, batch.learnt[:, 1:]
        noise = torch.rand((), generator=generator, dtype=torch.float64) * self.drawn
        value = nn.functional.cross_entropy(self.table[tokens[:, :-1]][wanted], tokens[:, 1:][wanted])
        return value + noise * self.table.square().sum(), {"noise": float(noise), "entropy": value.detach()}


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
    with pytest.raises(InvalidRequest, match="begun with other schedule and loss"):
        trained(replace(SCHEDULE, steps=5), tmp_path / "whole", about={"scale": 2})


def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    class Broken(Table):
        def forward(self, batch, step, generator):
            return self.table.sum() * math.nan, {}

    with pytest.raises(InvalidRequest, match="gradient of step 1 is nan"):
        trained(SCHEDULE, tmp_path, objective=Broken())


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
