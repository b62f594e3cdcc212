"""The target's features for the tokens that a head is trained on: computed as they are needed, or once for all.

What they cost on disk, in bytes a token: 2 in bfloat16 times the width times the number of features. The last hidden
state of SmolLM2-135M (width 576) comes to 1.2 kB, a million tokens to 1.2 GB; the three layers of EAGLE-3 to three
times as much; one feature of a model of width 4096 to 8 kB a token. Past a few million tokens computing is the better
bargain. This module knows no head and no loss.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from draftwood.core.cache import LayoutRecorder
from draftwood.core.checks import whole_number
from draftwood.core.drafter import FeatureName
from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.target import Target

from .data import Batch, Sequences, check_vocabulary
from .fingerprint import fingerprint
from .processes import launched, make_accelerator

MANIFEST = "features.json"
Progress = Callable[[int, int], None]


class FeatureSource(Protocol):
    """Where a recipe gets the target's features from."""

    def __call__(self, batch: Batch) -> dict[FeatureName, Tensor]:
        """Returns the features of a batch by name, [batch, length, width] each, on the batch's device.

        They take part in no gradient. Their type is the source's, not the head's.
        """


class OnlineFeatures:
    """Runs the target on every batch: blocks and final norm, without LM head and without a cache.

    The target runs in its own precision, whatever autocast is on around it.

    Args:
        target: stays as it is, on its own device.
        names: what to capture.

    Raises:
        InvalidRequest: no name, or a block that the target does not have.
    """

    def __init__(self, target: Target, names: Sequence[FeatureName]) -> None:
        self.target = target
        self.names = checked_names(target, names)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> dict[FeatureName, Tensor]:
        tokens = batch.tokens.to(self.target.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with torch.autocast(tokens.device.type, enabled=False):
            # A plain causal mask is the model's own business; the recorder stands in for a cache and keeps nothing.
            _, captured = self.target.call(
                tokens, positions, None, LayoutRecorder(), keep=0, features=frozenset(self.names)
            )
        return {name: captured[name].to(batch.tokens.device) for name in self.names}


class CachedFeatures:
    """Reads features that were computed once from memory-mapped shards.

    Opened with `CachedFeatures(directory)`, made by `CachedFeatures.build`. A batch's `index` says which sequences are
    wanted, so that it has to be a batch of the very data the features were computed from.

    Attributes:
        names: the features, in the order in which they lie side by side.
        widths: of each of them.

    Args:
        directory: where `build` has put them.

    Raises:
        InvalidCheckpoint: the files are not what `build` writes, or it did not finish.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        self.setup = _read_manifest(self.directory)
        self.names: tuple[FeatureName, ...] = tuple(self.setup["names"])
        self.widths: tuple[int, ...] = tuple(self.setup["widths"])
        self._length, self._per_shard = self.setup["length"], self.setup["shard_sequences"]
        dtype, width = _dtype(self.setup["dtype"]), sum(self.widths)
        self._shards = []
        for path, first, stop in _shards(self.directory, self.setup):
            expected = _bytes(self.setup, stop - first)
            if not _is_of(path, expected):
                raise InvalidCheckpoint(
                    f"{str(path)!r} is missing or not of {expected} bytes; build the features again"
                )
            size = expected // dtype.itemsize
            values = torch.from_file(str(path), shared=False, size=size, dtype=dtype)  # mapped, not read
            self._shards.append(values.view(stop - first, self._length, width))

    def __call__(self, batch: Batch) -> dict[FeatureName, Tensor]:
        index = batch.index.cpu()
        if batch.tokens.shape[1] != self._length or not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise InvalidRequest(
                f"{str(self.directory)!r} holds {len(self)} sequences of {self._length} tokens, not sequences "
                f"{index.tolist()} of {batch.tokens.shape[1]}; they are features of other data"
            )
        rows = [self._shards[at // self._per_shard][at % self._per_shard] for at in index.tolist()]
        values = torch.stack(rows).to(batch.tokens.device)
        return dict(zip(self.names, torch.split(values, list(self.widths), -1), strict=True))

    def __len__(self) -> int:
        """The number of sequences."""
        return int(self.setup["sequences"])

    @classmethod
    def build(
        cls,
        target: Target,
        names: Sequence[FeatureName],
        data: Sequences,
        directory: str | Path,
        *,
        batch_size: int = 8,
        shard_tokens: int = 65_536,
        dtype: torch.dtype = torch.bfloat16,
        limit_bytes: int | None = None,
        on_progress: Progress | None = None,
        accelerator: Accelerator | None = None,
    ) -> CachedFeatures:
        """Computes what is not there yet of the features of `data`, and opens them.

        A build that was stopped goes on with the shard it was at; a finished one is only opened.

        Args:
            target: whose features.
            names: which.
            data: all of its sequences, those that are held out in a directory of their own.
            directory: where the shards are kept.
            batch_size: sequences in a forward.
            shard_tokens: tokens in a shard, about.
            dtype: that they are stored in.
            limit_bytes: most bytes on disk. None takes what is free there.
            on_progress: called with the sequences that are done and their number.
            accelerator: of several processes that share the work, each computing shards of its own.

        Raises:
            InvalidRequest: the features are of another model, other data or other settings, or take too many bytes.
            InvalidCheckpoint: the directory's manifest is broken.
        """
        directory = Path(directory).expanduser()
        online = OnlineFeatures(target, names)
        for name, value in (("batch_size", batch_size), ("shard_tokens", shard_tokens)):
            whole_number(name, value)
        widths = [part.shape[-1] for part in online(data.at(torch.arange(1))).values()]
        sequences, length = data.tokens.shape
        setup = {
            "names": list(online.names),
            "widths": widths,
            "dtype": _name(dtype),
            "sequences": sequences,
            "length": length,
            "shard_sequences": max(shard_tokens // length, 1),
            "data": data.digest(),
            "model": fingerprint(target.model),
        }
        main = accelerator is None or accelerator.is_main_process
        if main:
            _claim(directory, setup, limit_bytes)
        if accelerator is not None:
            accelerator.wait_for_everyone()
        rank, processes = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
        for path, first, stop in list(_shards(directory, setup))[rank::processes]:
            if not _is_of(path, _bytes(setup, stop - first)):
                with _whole_file(path) as file:
                    for start in range(first, stop, batch_size):
                        batch = data.at(torch.arange(start, min(start + batch_size, stop)))
                        joined = torch.cat([part.to(dtype) for part in online(batch).values()], -1)
                        file.write(joined.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                        if on_progress is not None:
                            on_progress(min(start + batch_size, stop), sequences)
        if accelerator is not None:
            accelerator.wait_for_everyone()
        return cls(directory)


def feature_sources(
    target: Target,
    names: Sequence[FeatureName],
    learnt: Sequences,
    held: Sequences | None,
    cache: str | Path | None,
    on_progress: Progress | None = None,
) -> tuple[FeatureSource, FeatureSource]:
    """Returns where training data and held-out data have their features from.

    Args:
        target: whose features.
        names: which.
        learnt: what is trained on.
        held: what is measured on, if anything is.
        cache: directory to keep the features in, in the target's type; None computes them as they are needed.
        on_progress: called while they are computed, with sequences done and their number.

    Raises:
        InvalidRequest: the directory holds features of another model or of other data.
        InvalidCheckpoint: it cannot be read.
    """
    online = OnlineFeatures(target, names)
    if cache is None:
        return online, online
    # A launcher's processes share the work.
    accelerator = make_accelerator() if launched() else None

    def build(part: Sequences, name: str) -> FeatureSource:
        place = Path(cache) / name
        return CachedFeatures.build(
            target, names, part, place, dtype=target.dtype, on_progress=on_progress, accelerator=accelerator
        )

    return build(learnt, "training"), online if held is None else build(held, "held-out")


def check_data(data: Sequences, target: Target) -> None:
    """Refuses tokens that the target does not have, and a type that heads cannot be trained in.

    Raises:
        InvalidRequest: either.
    """
    if target.dtype == torch.float16:
        raise InvalidRequest("float16 gradients underflow; load the target as bfloat16 or float32")
    check_vocabulary(data, target.vocabulary_size)


def checked_names(target: Target, names: Sequence[FeatureName]) -> tuple[FeatureName, ...]:
    """Returns the names of features, each once.

    Raises:
        InvalidRequest: there is none, or one that the target does not have.
    """
    for name in names:
        whole = isinstance(name, int) and not isinstance(name, bool) and 0 <= name <= target.layers
        if not whole and name != "last":
            raise InvalidRequest(f"a feature is 'last' or a block from 0 to {target.layers}, got {name!r}")
    if not names:
        raise InvalidRequest("no features are asked for; name at least one, such as 'last'")
    return tuple(dict.fromkeys(names))


def _claim(directory: Path, setup: dict[str, Any], limit_bytes: int | None) -> None:
    """Writes the manifest of a new cache once there is room for it, or compares it with that of an old one."""
    if (directory / MANIFEST).exists():
        found = _read_manifest(directory)
        other = [name for name in setup if found.get(name) != setup[name]]
        if other:
            raise InvalidRequest(
                f"{str(directory)!r} holds features of another {' and '.join(other)}: "
                f"{ {name: found.get(name) for name in other} }, not { {name: setup[name] for name in other} }; "
                "delete it, or give another directory"
            )
        return
    directory.mkdir(parents=True, exist_ok=True)
    needed, each = _bytes(setup, setup["sequences"]), _bytes(setup, 1)
    room = shutil.disk_usage(directory).free if limit_bytes is None else limit_bytes
    if needed > room:
        raise InvalidRequest(
            f"the features of {setup['sequences']} sequences of {setup['length']} tokens take {needed:,} bytes, more "
            f"than the {room:,} there may be; give at most {room // each} sequences, or compute the features online"
        )
    with _whole_file(directory / MANIFEST) as file:
        file.write(json.dumps(setup, indent=1).encode())


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        setup: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes = [setup["sequences"], setup["length"], setup["shard_sequences"], *setup["widths"]]
        sound = len(setup["names"]) == len(setup["widths"]) and all(isinstance(one, int) and one > 0 for one in sizes)
        _dtype(setup["dtype"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidCheckpoint(f"cannot read the manifest of features {str(path)!r}: {error!r}") from error
    if not sound:
        raise InvalidCheckpoint(f"the manifest of features {str(path)!r} is broken: {setup}")
    return setup


def _shards(directory: Path, setup: dict[str, Any]) -> Iterator[tuple[Path, int, int]]:
    """Each shard's file, its first sequence and the one to stop before."""
    count, each = setup["sequences"], setup["shard_sequences"]
    for number in range(math.ceil(count / each)):
        yield directory / f"shard-{number:05}.bin", number * each, min((number + 1) * each, count)


def _bytes(setup: dict[str, Any], sequences: int) -> int:
    return int(sequences * setup["length"] * sum(setup["widths"]) * _dtype(setup["dtype"]).itemsize)


def _is_of(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size


@contextmanager
def _whole_file(path: Path) -> Iterator[Any]:
    """A file that has its name only once it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _name(dtype: torch.dtype) -> str:
    if not dtype.is_floating_point:
        raise InvalidRequest(f"features are stored as floating-point numbers, got {dtype}")
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no type {name!r}")
    return dtype
