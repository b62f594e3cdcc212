"""Files of a small checkpoint: `config.json` beside one file of weights. The module knows no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...core.errors import InvalidCheckpoint, ModelNotFound

WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def find_checkpoint(source: str | Path) -> Path:
    """Returns the directory of a checkpoint, fetched from the hub where `source` is no directory here.

    Raises:
        ModelNotFound: there is none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or path.is_absolute() or source.count("/") != 1 or source.startswith("."):
        raise ModelNotFound(f"no head at {str(source)!r}: there is no such directory")
    try:
        return Path(snapshot_download(source, allow_patterns=["config.json", *WEIGHTS]))
    except Exception as error:  # the hub client's errors and, by its version, httpx's
        reason = str(error).strip().split("\n")[0]
        raise ModelNotFound(
            f"no head {source!r}: it is no directory here, and the hub gave {type(error).__name__}: {reason}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidCheckpoint: there is no such file, or it is no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{str(file)!r} is missing; a head is config.json beside its weights") from error
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{str(file)!r} must be a JSON object, got {type(content).__name__}")
    return content


def read_weights(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Reads the weights of a directory to the CPU; returns the file they were in, too. No code in it is run.

    Raises:
        InvalidCheckpoint: there are none, or the file is broken or holds something else.
    """
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise InvalidCheckpoint(f"{str(folder)!r} has no weights; a head is config.json beside {' or '.join(WEIGHTS)}")
    try:
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError) as error:
        reason = str(error).split("\n")[0]
        raise InvalidCheckpoint(f"{str(file)!r} is truncated or no file of weights: {reason}") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{str(file)!r} must hold tensors by name, got {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise InvalidCheckpoint(f"{str(file)!r}: {key!r} must be a tensor, got {type(value).__name__}")
    return file, content


def write_checkpoint(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`; each file is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{WEIGHTS[0]}.{os.getpid()}"
    save_file(dict(weights), unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / WEIGHTS[0])
    unfinished = folder / f".config.json.{os.getpid()}"
    unfinished.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / "config.json")
