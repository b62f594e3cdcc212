"""The training loop: AdamW, a cosine schedule, gradient accumulation and clipping, and going on after a stop.

Plain torch in one process: that keeps a run bit for bit the same function of data and settings, stopped or not, and
small targets need no more. The loop knows no method: what is learnt is the `loss` that it is handed. Its randomness
is one generator, which the loss is given; the global one is neither read nor set.
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest

from .data import Sequences

Loss = Callable[[Tensor, Tensor, int, torch.Generator], tuple[Tensor, dict[str, float]]]
"""Takes tokens and learnt, [batch, length] each, the step and a CPU generator. Gives the mean over the learnt tokens
behind the first of each sequence, and figures for the log, such means too."""

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Attributes:
        steps: updates of the weights.
        batch_size: sequences in a forward.
        accumulate: forwards in a step.
        learning_rate: at its highest; it rises to there in a straight line and falls to 0 on a cosine.
        warmup: steps of the rise.
        weight_decay: of matrices; norms and biases have none.
        clip: the gradient's longest norm.
        seed: of the order of the data and of the loss's generator.
        checkpoint_every: steps from one checkpoint to the next.
    """

    steps: int
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 1e-4
    warmup: int = 0
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("accumulate", 1), ("checkpoint_every", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise InvalidRequest(f"{name} must be >= {least}, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidRequest(f"{name} must be > 0, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < math.inf:
            raise InvalidRequest(f"weight_decay must be >= 0, got {self.weight_decay}")

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, the first being 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2


def train(
    model: nn.Module,
    loss: Loss,
    data: Sequences,
    schedule: Schedule,
    *,
    directory: Path | None = None,
    about: Mapping[str, Any] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Trains the parameters of `model` that require a gradient, in place.

    Args:
        model: what is trained.
        loss: what it learns.
        data: what it learns from.
        schedule: how.
        directory: where the checkpoint and the log are kept, the latter as JSON lines. A directory with a checkpoint is
            gone on with, and the weights are those that an uninterrupted run would have had. None keeps nothing.
        about: settings of the loss, JSON; a run is gone on with only under the same ones.
        on_step: called with each line of the log.

    Raises:
        InvalidRequest: the directory holds a run on other data or with other settings, or the loss is no number.
        InvalidCheckpoint: the checkpoint cannot be read.
    """
    setup = json.loads(json.dumps({"data": data.digest(), "schedule": asdict(schedule), "loss": dict(about or {})}))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = _optimizer(trained, schedule)
    generator = torch.Generator().manual_seed(schedule.seed)
    first = 0
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        first = _resume(directory, setup, model, optimizer, generator)

    for step in range(first, schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        figures = _gradients(loss, data, schedule, step, generator, trained[0].device)
        norm = float(nn.utils.clip_grad_norm_(trained, schedule.clip))
        if not math.isfinite(norm):
            raise InvalidRequest(f"the gradient of step {step + 1} is {norm}; try a smaller learning rate")
        optimizer.step()
        optimizer.zero_grad()
        entry = {"step": step + 1, "learning_rate": schedule.rate(step), "gradient_norm": norm, **figures}
        if directory is not None:
            with open(directory / LOG, "a", encoding="utf-8") as log:
                log.write(json.dumps(entry) + "\n")
            if (step + 1) % schedule.checkpoint_every == 0 or step + 1 == schedule.steps:
                _save(directory, setup, step + 1, model, optimizer, generator)
        if on_step is not None:
            on_step(entry)


def _gradients(
    loss: Loss, data: Sequences, schedule: Schedule, step: int, generator: torch.Generator, device: torch.device
) -> dict[str, float]:
    """Adds up the gradient of the mean over all learnt tokens of a step; returns the means of its figures."""
    size = schedule.batch_size
    start = step * schedule.accumulate * size
    parts = [data.batch(start + index * size, size, schedule.seed) for index in range(schedule.accumulate)]
    # Forwards differ in learnt tokens; equal weights would favour the tokens of those with few.
    counts = [int(learnt[:, 1:].sum()) for _, learnt in parts]
    totals: dict[str, float] = {"loss": 0.0}
    for (tokens, learnt), count in zip(parts, counts, strict=True):
        share = count / sum(counts)
        value, figures = loss(tokens.to(device), learnt.to(device), step, generator)
        (value * share).backward()  # type: ignore[no-untyped-call]
        for name, figure in {"loss": float(value.detach()), **figures}.items():
            totals[name] = totals.get(name, 0.0) + share * figure
    return totals | {"tokens": sum(counts)}


def _optimizer(trained: list[nn.Parameter], schedule: Schedule) -> torch.optim.AdamW:
    if not trained:
        raise InvalidRequest("nothing to train: no parameter requires a gradient")
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    others = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [
        {"params": part, "weight_decay": decay}
        for part, decay in ((matrices, schedule.weight_decay), (others, 0.0))
        if part
    ]
    return torch.optim.AdamW(groups, lr=schedule.learning_rate, betas=(0.9, 0.95))


def _save(
    directory: Path,
    setup: dict[str, Any],
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> None:
    content = {
        "setup": setup,
        "step": step,  # the position in the data follows from it
        "model": {name: part.data for name, part in model.named_parameters() if part.requires_grad},
        "optimizer": optimizer.state_dict(),
        "generator": generator.get_state(),
    }
    partial = directory / (CHECKPOINT + ".partial")
    with open(partial, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(directory / CHECKPOINT)


def _resume(
    directory: Path,
    setup: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> int:
    """Takes up a checkpoint, if there is one; returns the step to go on with."""
    path = directory / CHECKPOINT
    if not path.exists():
        (directory / LOG).unlink(missing_ok=True)
        return 0
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        begun, step, weights = content["setup"], content["step"], content["model"]
        state, noise = content["optimizer"], content["generator"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise InvalidCheckpoint(f"cannot read the checkpoint {str(path)!r}: {error}") from error
    if begun != setup:
        other = [name for name in setup if begun.get(name) != setup[name]]
        raise InvalidRequest(
            f"{str(directory)!r} holds a run begun with other {' and '.join(other)}: "
            f"{ {name: begun.get(name) for name in other} }; delete it, or give another output"
        )
    parameters = {name: part for name, part in model.named_parameters() if part.requires_grad}
    if weights.keys() != parameters.keys() or any(weights[name].shape != parameters[name].shape for name in weights):
        raise InvalidRequest(f"{str(directory)!r} holds a run of another model; delete it, or give another output")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    optimizer.load_state_dict(state)
    generator.set_state(noise)
    _cut_log(directory / LOG, step)
    return int(step)


def _cut_log(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint, and will be logged again."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)[:step] if path.exists() else []
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
