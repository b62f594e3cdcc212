"""The training loop: AdamW, a cosine schedule, gradient accumulation and clipping, and going on after a stop.

It runs on `accelerate`: on the CPU or one GPU as it is, and in several processes under `accelerate launch` or
`torchrun`. A step reads the same sequences in the same order however many processes share them, so that the weights
are those of one process up to rounding; in one process they are bit for bit a function of data and settings, stopped
or not. The loop knows no method: what is learnt is an `Objective`. Its randomness is the generator that the objective
is given; the global one is neither read nor set.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from draftwood.core.errors import InvalidRequest

from .checkpoint import Record
from .data import Batch, Sequences, mixed_seed
from .processes import make_accelerator

Figures = dict[str, Tensor | float]
"""What is logged beside the loss: means over the same tokens. A tensor, detached, spares a wait for the device."""


class Objective(nn.Module, ABC):
    """What is trained and what it learns: a module that gives its own loss.

    The parameters that require a gradient are trained. What stays as it is, such as the target, is best kept out of
    the parameters (in a closure or a tuple), so that it is neither copied to other processes nor saved.

    Attributes:
        shardable: whether it may be trained with its weights spread over processes (FSDP): if so, nothing but its
            forward reads them. Whoever measures or saves the weights after training needs them whole.
    """

    shardable: bool = False

    @abstractmethod
    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        """Returns the loss of a batch, and figures for the log.

        Args:
            batch: on the device of the training.
            step: the update that this is for, the first being 0.
            generator: for all that is drawn at random; on the CPU.

        Returns:
            The mean over the learnt tokens behind the first of each sequence, in float32 (or float64); and such means
            by name, under the same names in every batch of a step.
        """

    def rate(self, name: str) -> float:
        """Returns the learning rate of the parameter called `name`, as a multiple of the schedule's."""
        return 1.0


@dataclass(frozen=True)
class Schedule:
    """How to train.

    Attributes:
        steps: updates of the weights.
        batch_size: sequences in a forward, over all processes.
        accumulate: forwards in a step.
        learning_rate: at its highest; it rises to there in a straight line and falls to 0 on a cosine.
        warmup: steps of the rise.
        weight_decay: of matrices; norms and biases have none.
        clip: the gradient's longest norm.
        seed: of the order of the data and of the objective's generator.
        checkpoint_every: steps from one checkpoint to the next; the last step has one too.
        eval_every: steps from one evaluation to the next, the first before any step; 0 evaluates at the end only.
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
    eval_every: int = 0

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "accumulate", "checkpoint_every")
        for name, least in (*((name, 1) for name in positive), ("warmup", 0), ("eval_every", 0)):
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
    objective: Objective,
    data: Sequences,
    schedule: Schedule,
    *,
    directory: Path | None = None,
    about: Mapping[str, Any] | None = None,
    evaluate: Callable[[], Mapping[str, float]] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    accelerator: Accelerator | None = None,
    tensorboard: bool = False,
) -> None:
    """Trains the parameters of `objective` that require a gradient, in place.

    Args:
        objective: what is trained, and the loss. The loop leaves its mode (`train()`, `eval()`) alone.
        data: what it learns from.
        schedule: how.
        directory: where checkpoint and log (JSON lines) are kept; in several processes one that all of them see. A
            directory with a checkpoint is gone on with, and the weights are those that an uninterrupted run would have
            had. None keeps nothing.
        about: settings of the objective, JSON; a run is gone on with only under the same ones.
        evaluate: gives figures of the objective as it then is, for the log; called in every process.
        on_step: called in the main process with each line of the log: step, loss, the objective's figures,
            learning_rate, gradient_norm, learnt (tokens of the step that were learnt), tokens (all that were read since
            the first step), seconds (of training, stops left out), and evaluation where there was one. A line of
            step 0, where there is one, has tokens, seconds and evaluation alone.
        accelerator: of the launcher's settings when None, on the CPU if the objective is there and nobody launched it.
        tensorboard: also writes the figures to `<directory>/tensorboard`.

    Raises:
        InvalidRequest: the directory holds a run on other data or with other settings, the loss is no number, there
            are more processes than sequences in a forward, or they are to share weights of an objective that cannot.
        InvalidCheckpoint: the checkpoint cannot be read.
        ImportError: `tensorboard` is not installed.
    """
    optimizer = _optimizer(objective, schedule)
    on_cpu = all(parameter.device.type == "cpu" for parameter in objective.parameters())
    accelerator = accelerator or make_accelerator(on_cpu=on_cpu)
    _check(accelerator, schedule, objective)
    setup = {"data": data.digest(), "schedule": _decisive(schedule), "loss": dict(about or {})}
    record = Record(directory, setup, accelerator, tensorboard=tensorboard)
    model, optimizer = accelerator.prepare(objective, optimizer)

    def tell(entry: dict[str, Any], measured: bool) -> None:
        if evaluate is not None and measured:
            entry["evaluation"] = dict(evaluate())
        entry["seconds"] = round(before + time.perf_counter() - started, 3)
        record.log(entry)

    try:
        first, before = record.resume(model, optimizer)
        started = time.perf_counter()
        if evaluate is not None and schedule.eval_every and not first:
            begun: dict[str, Any] = {"step": 0, "tokens": 0}
            tell(begun, True)
            if on_step is not None and accelerator.is_main_process:
                on_step(begun)
        for step in range(first, schedule.steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate(step) * group["factor"]
            figures = _gradients(model, data, schedule, step, accelerator)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), schedule.clip))
            if not math.isfinite(norm):
                raise InvalidRequest(f"the gradient of step {step + 1} is {norm}; try a smaller learning rate")
            optimizer.step()
            optimizer.zero_grad()
            done = step + 1
            entry: dict[str, Any] = {
                "step": done,
                "learning_rate": schedule.rate(step),
                "gradient_norm": norm,
                **figures,
            }
            entry["tokens"] = done * schedule.accumulate * schedule.batch_size * data.tokens.shape[1]
            tell(entry, _due(done, schedule.eval_every) or done == schedule.steps)
            if _due(done, schedule.checkpoint_every) or done == schedule.steps:
                record.save(done, entry["seconds"], model, optimizer)
            if on_step is not None and accelerator.is_main_process:
                on_step(entry)
    finally:
        record.close()
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # takes autocast off the objective again


def held_out(
    objective: Objective, data: Sequences, batch_size: int, *, step: int = 0, seed: int = 0
) -> Callable[[], dict[str, float]]:
    """Returns an `evaluate` for `train`: loss and figures of an objective on sequences that it does not learn from.

    Args:
        objective: the one that is trained, in the precision of its weights.
        data: all of it is read.
        batch_size: sequences in a forward.
        step: which step the objective is told, the first being 0; of matter to curricula alone.
        seed: of the objective's generator, which starts anew in each evaluation.
    """

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed)
        device = next(objective.parameters()).device
        totals: dict[str, Tensor | float] = {}
        every = int(data.learnt[:, 1:].sum())
        for start in range(0, len(data), batch_size):
            batch = data.at(torch.arange(start, min(start + batch_size, len(data))))
            share = int(batch.learnt[:, 1:].sum()) / every
            value, figures = objective(batch.to(device), step, generator)
            _add(totals, {"loss": value, **figures}, share)
        return {name: float(total) for name, total in totals.items()}

    return evaluate


def _gradients(
    model: nn.Module, data: Sequences, schedule: Schedule, step: int, accelerator: Accelerator
) -> dict[str, float]:
    """Adds up the gradient of the mean over all learnt tokens of a step; returns the means of its figures.

    Forwards and processes differ in learnt tokens, and equal weights would favour the tokens of those with few. Every
    process knows what all of them read, so that each weighs its own part without asking.
    """
    size, rank, processes = schedule.batch_size, accelerator.process_index, accelerator.num_processes
    start = step * schedule.accumulate * size
    order = data.order(start, schedule.accumulate * size, schedule.seed)
    counts = data.learnt[order, 1:].sum(1)
    learnt = int(counts.sum())
    generator = torch.Generator()
    totals: dict[str, Tensor | float] = {}
    for forward in range(schedule.accumulate):
        own = slice(forward * size + size * rank // processes, forward * size + size * (rank + 1) // processes)
        share = int(counts[own].sum()) / learnt
        generator.manual_seed(mixed_seed(schedule.seed, step, forward, rank))
        last = forward + 1 == schedule.accumulate
        # Processes exchange gradients once a step, and take their mean.
        with accelerator.no_sync(model) if not last else nullcontext():
            value, figures = model(data.at(order[own]).to(accelerator.device), step, generator)
            accelerator.backward(value * (share * processes))
        _add(totals, {"loss": value.detach(), **figures}, share)
    names = list(totals)
    device = accelerator.device
    values = torch.stack([torch.as_tensor(totals[name], dtype=torch.float32, device=device) for name in names])
    if processes > 1:
        values = accelerator.reduce(values, "sum")
    return dict(zip(names, values.tolist(), strict=True)) | {"learnt": learnt}


def _add(totals: dict[str, Tensor | float], figures: Mapping[str, Tensor | float], share: float) -> None:
    for name, figure in figures.items():
        totals[name] = totals.get(name, 0.0) + share * figure


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _decisive(schedule: Schedule) -> dict[str, Any]:
    """What the weights depend on: neither when they are saved nor when they are looked at."""
    return {name: value for name, value in asdict(schedule).items() if name not in ("checkpoint_every", "eval_every")}


def _check(accelerator: Accelerator, schedule: Schedule, objective: Objective) -> None:
    if accelerator.distributed_type == DistributedType.FSDP and not objective.shardable:
        raise InvalidRequest(
            f"{type(objective).__name__} needs whole weights in every process, which FSDP does not give; launch one "
            "process, or several with gradients exchanged (accelerate launch --multi_gpu)"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise InvalidRequest(
            f"gradients are accumulated by the schedule (accumulate={schedule.accumulate}); launch with "
            f"gradient_accumulation_steps=1, got {accelerator.gradient_accumulation_steps}"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise InvalidRequest(f"mixed_precision must be 'no' or 'bf16', got {accelerator.mixed_precision!r}")
    if schedule.batch_size < accelerator.num_processes:
        raise InvalidRequest(
            f"batch_size must be >= {accelerator.num_processes}, a sequence for each process, got {schedule.batch_size}"
        )


def _optimizer(objective: Objective, schedule: Schedule) -> torch.optim.AdamW:
    """Groups of parameters that share a learning rate and a weight decay, in the order of their first ones."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in objective.named_parameters():
        if parameter.requires_grad:
            decay = schedule.weight_decay if parameter.dim() > 1 else 0.0
            groups.setdefault((objective.rate(name), decay), []).append(parameter)
    if not groups:
        raise InvalidRequest("nothing to train: no parameter requires a gradient")
    parts = [{"params": part, "factor": rate, "weight_decay": decay} for (rate, decay), part in groups.items()]
    # Fused, since a step of small heads is else mostly the optimizer's (7 x faster for 2.6 M weights on one core).
    return torch.optim.AdamW(parts, lr=schedule.learning_rate, betas=(0.9, 0.95), fused=True)
