"""What a training run keeps in its directory: a checkpoint to go on from, and a log of its steps.

A run may be killed at any moment: what is there is whole, and of one run. The module knows no loss and no data.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

CHECKPOINT, LOG, TENSORBOARD = "checkpoint.pt", "log.jsonl", "tensorboard"


class Record:
    """Checkpoint and log of one run; the main process writes, all read.

    Args:
        directory: where they are; None keeps nothing.
        setup: what the run is, JSON: a checkpoint of another setup is refused.
        accelerator: of the training.
        tensorboard: also write the log for tensorboard.

    Raises:
        InvalidRequest: tensorboard is asked for without a directory.
        ImportError: tensorboard is not installed.
    """

    def __init__(
        self, directory: Path | None, setup: dict[str, Any], accelerator: Accelerator, *, tensorboard: bool = False
    ) -> None:
        self.directory = directory
        self._setup = json.loads(json.dumps(setup))
        self._writes = directory is not None and accelerator.is_main_process
        # With sharded weights all processes put the whole together, and the main one has it.
        whole = accelerator.distributed_type == DistributedType.FSDP
        self._options = StateDictOptions(
            full_state_dict=whole, cpu_offload=whole, ignore_frozen_params=True, strict=False
        )
        self._log: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._board_wanted = tensorboard
        if tensorboard:
            if directory is None:
                raise InvalidRequest("tensorboard needs a directory to write to")
            _summary_writer()
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        """Takes up the checkpoint, if there is one, and opens the log.

        Returns:
            The steps that are done, and the seconds they took.

        Raises:
            InvalidRequest: the checkpoint is another run's.
            InvalidCheckpoint: it cannot be read.
        """
        if self.directory is None:
            return 0, 0.0
        done = (0, 0.0)
        if (self.directory / CHECKPOINT).exists():
            done = self._load(self.directory / CHECKPOINT, model, optimizer)
        if self._writes:
            _cut_log(self.directory / LOG, done[0])
            # A line at a time reaches the system, so that a killed process has logged its steps.
            self._log = open(self.directory / LOG, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            if self._board_wanted:
                self._board = _summary_writer()(str(self.directory / TENSORBOARD), purge_step=done[0] + 1)
        return done

    def log(self, entry: dict[str, Any]) -> None:
        """Writes the line of one step."""
        if self._log is not None:
            self._log.write(json.dumps(entry) + "\n")
        if self._board is not None:
            flat = entry | {f"evaluation/{name}": value for name, value in entry.get("evaluation", {}).items()}
            for name in flat.keys() - {"step", "evaluation"}:
                self._board.add_scalar(name, flat[name], entry["step"])

    def save(self, done: int, seconds: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the checkpoint, for good once this returns; called in all processes."""
        if self.directory is None:
            return
        weights, state = get_state_dict(model, _bare(optimizer), options=self._options)
        if not self._writes or self._log is None:
            return
        os.fsync(self._log.fileno())  # no checkpoint is ahead of its log
        # The position in the data and the noise follow from the step.
        content = {"setup": self._setup, "step": done, "seconds": seconds, "model": weights, "optimizer": state}
        partial = self.directory / (CHECKPOINT + ".partial")
        with open(partial, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.directory / CHECKPOINT)

    def close(self) -> None:
        """Closes the log."""
        for opened in (self._log, self._board):
            if opened is not None:
                opened.close()

    def _load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, float]:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            begun, step, seconds = content["setup"], int(content["step"]), float(content["seconds"])
            weights, state = content["model"], content["optimizer"]
            if not isinstance(begun, dict):
                raise TypeError(f"'setup' must be an object, got {type(begun).__name__}")
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
            # What torch says of a broken pickle recommends to run whatever is in it.
            reason = "no file of tensors" if isinstance(error, pickle.UnpicklingError) else f"{error!r}"
            raise InvalidCheckpoint(
                f"cannot read the checkpoint {str(path)!r}: {reason}; delete it to begin anew"
            ) from error
        place = str(path.parent)
        if begun != self._setup:
            other = [name for name in self._setup if begun.get(name) != self._setup[name]]
            raise InvalidRequest(
                f"{place!r} holds a run begun with other {' and '.join(other)}: "
                f"{ {name: begun.get(name) for name in other} }; delete it, or give another output"
            )
        own: dict[str, Any] = get_state_dict(model, _bare(optimizer), options=self._options)[0]
        if own and (weights.keys() != own.keys() or any(weights[name].shape != own[name].shape for name in own)):
            raise InvalidRequest(f"{place!r} holds a run of another model; delete it, or give another output")
        set_state_dict(model, _bare(optimizer), model_state_dict=weights, optim_state_dict=state, options=self._options)
        return step, seconds


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _summary_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("tensorboard is not installed; pip install tensorboard, or train without it") from error
    return SummaryWriter


def _cut_log(path: Path, step: int) -> None:
    """Drops what was logged after the checkpoint, and will be logged again; without one everything."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() and step else []
    for number, line in enumerate(lines):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            del lines[number:]
            break
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
