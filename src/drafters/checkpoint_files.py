"""Files of small checkpoints, a `config.json` beside weights: finding, reading and writing them whole.

Nothing in a file is run. The module knows no network and no layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..core.errors import InvalidCheckpoint, ModelNotFound

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""What files of weights are called."""

UNREADABLE = (SafetensorError, UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError)
"""What broken files of weights raise."""


def find_checkpoint(source: str | Path, what: str, fetched: Sequence[Sequence[str]]) -> Path:
    """Returns the directory of a checkpoint, fetched from the hub where `source` is no directory here.

    Args:
        source: a directory or a hub id.
        what: what messages call it, such as "head".
        fetched: patterns of the files to fetch, group by group until there are weights.

    Raises:
        ModelNotFound: there is none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or path.is_absolute() or source.count("/") != 1 or source.startswith("."):
        raise ModelNotFound(f"no {what} at {str(source)!r}: there is no such directory")
    for patterns in fetched:
        try:
            path = Path(snapshot_download(source, allow_patterns=list(patterns)))
        except Exception as error:  # the hub client's errors and, by its version, httpx's
            reason = str(error).strip().partition("\n")[0]
            raise ModelNotFound(
                f"no {what} {source!r}: it is no directory here, and the hub gave {type(error).__name__}: {reason}"
            ) from error
        if any(file.suffix in (".safetensors", ".pt", ".bin") for file in path.iterdir()):
            break
    return path


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InvalidCheckpoint: there is no such file, or it is no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidCheckpoint(f"{str(file)!r} is missing; it belongs beside the weights") from error
    except (OSError, ValueError) as error:
        raise InvalidCheckpoint(f"{str(file)!r} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidCheckpoint(f"{str(file)!r} must be a JSON object, got {type(content).__name__}")
    return content


def check_tensors(file: Path, content: Any) -> Mapping[str, Tensor]:
    """Returns what a file of weights held.

    Raises:
        InvalidCheckpoint: it is something else than tensors by name.
    """
    if not isinstance(content, Mapping):
        raise InvalidCheckpoint(f"{str(file)!r} must hold tensors by name, got {type(content).__name__}")
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise InvalidCheckpoint(f"{str(file)!r}: {key!r} must be a tensor, got {type(value).__name__}")
    return content


def read_weights(folder: Path, what: str) -> tuple[Path, dict[str, Tensor]]:
    """Reads weights to the CPU, from the first of `WEIGHTS` that is there; returns the file, too.

    Args:
        folder: where they are.
        what: what messages call the checkpoint, such as "head".

    Raises:
        InvalidCheckpoint: there is no such file, or it holds something else than tensors of finite numbers by name.
    """
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise InvalidCheckpoint(
            f"{str(folder)!r} has no weights; a {what} is config.json beside {' or '.join(WEIGHTS)}"
        )
    try:
        if file.suffix == ".safetensors":
            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    weights = dict(check_tensors(file, content))
    for key, value in weights.items():
        check_finite(value, f"{str(file)!r}: {key!r}")
    return file, weights


def check_finite(values: Tensor, where: str) -> None:
    """Checks that a tensor holds no NaN and no infinity, as a training that diverged leaves them.

    Args:
        values: any tensor.
        where: file and key, for messages.

    Raises:
        InvalidCheckpoint: it does.
    """
    if not values.is_floating_point() or not values.numel():
        return
    if values.itemsize == 1:  # nothing is computed in eight bits
        values = values.float()
    # Least and greatest are NaN where any number is; this makes no mask as large as the weights.
    if not torch.stack(values.aminmax()).isfinite().all():
        wrong = int((~values.isfinite()).sum())
        raise InvalidCheckpoint(f"{where} must hold finite numbers, got NaN or infinity at {wrong} of {values.numel()}")


def check_places(file: Path, weights: Mapping[str, Tensor], places: Mapping[str, Tensor], what: str) -> None:
    """Checks that weights are those of a network: each has its place, and each place its weight.

    Args:
        file: they were in.
        weights: as they were read.
        places: the network's state.
        what: what messages call the network.

    Raises:
        InvalidCheckpoint: a key is missing, unknown, of another shape or no floating-point numbers.
    """
    unknown, missing = sorted(weights.keys() - places.keys()), sorted(places.keys() - weights.keys())
    if missing:
        raise InvalidCheckpoint(f"{str(file)!r}: no {', '.join(map(repr, missing))}; a {what} needs it")
    if unknown:
        raise InvalidCheckpoint(
            f"{str(file)!r}: unknown key {', '.join(map(repr, unknown))}; a {what} has no place for it"
        )
    for key, value in weights.items():
        if value.shape != places[key].shape:
            raise InvalidCheckpoint(
                f"{str(file)!r}: {key!r} is {list(value.shape)}, expected {list(places[key].shape)}"
            )
        if not value.is_floating_point():
            raise InvalidCheckpoint(f"{str(file)!r}: {key!r} must hold floating-point numbers, got {value.dtype}")


def check_token_ids(tokens: Tensor, vocabulary: int, where: str) -> Tensor:
    """Returns the token ids of a draft vocabulary as int64.

    Args:
        tokens: as they were read.
        vocabulary: number of the target's token ids.
        where: file and key, for messages.

    Raises:
        InvalidCheckpoint: they are no list of distinct ids of the target.
    """
    if tokens.dim() != 1 or tokens.is_floating_point() or not tokens.numel():
        raise InvalidCheckpoint(f"{where} must be a list of token ids, got {list(tokens.shape)} {tokens.dtype}")
    ids = tokens.tolist()
    if min(ids) < 0 or max(ids) >= vocabulary or len({*ids}) < len(ids):
        raise InvalidCheckpoint(
            f"{where} must be distinct ids from 0 to {vocabulary - 1}, got {len({*ids})} distinct ones among "
            f"{len(ids)} from {min(ids)} to {max(ids)}"
        )
    return tokens.to(torch.int64)


def unreadable(file: Path, error: Exception) -> InvalidCheckpoint:
    """Returns the error for a file that raised one of `UNREADABLE`."""
    reason = str(error).strip().partition("\n")[0]
    return InvalidCheckpoint(f"{str(file)!r} is truncated or no file of weights: {type(error).__name__}: {reason}")


def write_checkpoint(folder: Path, name: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes `config.json` and the weights, as safetensors called `name`; each file is there whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / name, lambda partial: save_file(dict(weights), partial, metadata={"format": "pt"}))
    text = json.dumps(config, indent=2) + "\n"
    _replace(folder / "config.json", lambda partial: partial.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside `path`, to the disk, and puts it in its place."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    write(partial)
    with partial.open("rb+") as written:
        os.fsync(written.fileno())
    partial.replace(path)
