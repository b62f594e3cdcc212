"""The directory that a training run makes: it appears whole, at the end, and until then the run has one beside it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState

from draftwood.core.errors import InvalidRequest

from .checkpoint import LOG, TENSORBOARD

SETTINGS = "training.json"


def new_output(output: str | Path) -> tuple[Path, Path]:
    """Returns the directory to make and the one that checkpoint and log are in until then, `<output>.training`.

    Raises:
        InvalidRequest: the output exists.
    """
    path = Path(output).expanduser()
    if path.exists():
        raise InvalidRequest(f"{str(path)!r} exists; give a directory that does not")
    return path, path.with_name(path.name + ".training")


def publish(
    output: Path, working: Path, write: Callable[[Path], object], settings: dict[str, Any] | None = None
) -> None:
    """Makes the output beside its place, moves it there, and deletes the working directory; called in all processes.

    Args:
        output: the directory to make.
        working: of the run, whose logs are kept.
        write: given a directory, puts the result there; called in the main process.
        settings: what the run was, JSON; kept as `training.json`.
    """
    if PartialState().is_main_process:
        partial = output.with_name(output.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        write(partial)
        shutil.copy(working / LOG, partial / LOG)
        if (working / TENSORBOARD).is_dir():
            shutil.copytree(working / TENSORBOARD, partial / TENSORBOARD)
        if settings is not None:
            (partial / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        for file in partial.rglob("*"):
            if file.is_dir():
                continue
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        partial.rename(output)
        shutil.rmtree(working)
    PartialState().wait_for_everyone()
