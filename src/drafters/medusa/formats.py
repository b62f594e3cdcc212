"""Files of Medusa heads: every layout that is in use is read, two are written.

Read are the authors' own (`medusa_lm_head.pt` or `.safetensors`), full Medusa-2 models and NVIDIA ModelOpt's, whose
heads have a prefix among the model's weights, and vLLM's, older and current. The weights say how many heads and blocks
there are; published configs are wrong about it. The module knows nothing of drafting.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound
from ...core.target import Target
from ..checkpoint_files import (
    UNREADABLE,
    check_finite,
    check_tensors,
    check_token_ids,
    find_checkpoint,
    read_json,
    unreadable,
    write_checkpoint,
)
from .network import MedusaConfig, MedusaHeads, lm_head_rows
from .trees import check_accuracies

Layout = Literal["medusa-1", "vllm"]

_PREFIX = re.compile(r"medusa_heads?\.")
_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
# What is fetched from a hub, group by group, until there are weights.
_FETCHED = (
    ("config.json", "medusa_lm_head.safetensors"),
    ("medusa_lm_head.pt",),
    ("model*.safetensors", "model.safetensors.index.json"),
    ("pytorch_model*.bin", "pytorch_model.bin.index.json"),
)
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)|blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight|lm_heads\.(\d+)\.weight")
_KNOWN = "`0.0.linear.weight`, `0.1.weight`, `blocks.0.layers.0.weight`, `lm_heads.0.weight`, `token_map`"


class Checkpoint(NamedTuple):
    """What is stored of a set of heads.

    Attributes:
        heads: the heads, in the type they are stored in.
        accuracies: accuracies[head][rank] as measured when they were trained, or None.
    """

    heads: MedusaHeads
    accuracies: list[list[float]] | None


def load_heads(source: str | Path, *, width: int, vocabulary: int) -> Checkpoint:
    """Reads heads from a directory or the hub.

    Args:
        source: a directory with a `config.json` and the weights, or a hub id.
        width: of the target's hidden states.
        vocabulary: number of the target's token ids.

    Raises:
        ModelNotFound: there are no such weights.
        InvalidCheckpoint: they are broken, incomplete, or made for a target of another width or vocabulary.
    """
    directory = find_checkpoint(source, "Medusa heads", _FETCHED)
    settings = _read_settings(directory)
    files = _weight_files(directory)
    parts = _Parts.of(_read(file) for file in files)
    config, tokens, state = parts.assemble(width, vocabulary, shared=settings.get("original_lm_head") is True)
    if config.shared and settings.get("vocab_size", vocabulary) != vocabulary:
        raise InvalidCheckpoint(
            f"{directory / 'config.json'}: 'vocab_size' is {settings['vocab_size']}; the target's vocabulary is "
            f"{vocabulary}"
        )
    with torch.device("meta"):
        heads = MedusaHeads(config, tokens)
    heads.load_state_dict(state, assign=True)
    accuracies = settings.get("accuracies")
    if accuracies is not None:
        try:
            accuracies = check_accuracies(accuracies)
        except InvalidRequest as error:
            raise InvalidCheckpoint(f"{directory / 'config.json'}: 'accuracies': {error}") from error
    return Checkpoint(heads, accuracies)


def save_heads(
    heads: MedusaHeads,
    directory: str | Path,
    *,
    layout: Layout = "medusa-1",
    base_model: str = "",
    accuracies: Sequence[Sequence[float]] | None = None,
    target: Target | None = None,
) -> None:
    """Writes heads as safetensors with a `config.json`; a file is there whole or not at all.

    Args:
        heads: the heads.
        directory: made where it does not exist.
        layout: `"medusa-1"`, the authors' own, with `token_map` where the draft vocabulary is reduced and without LM
            heads where they are the target's; or `"vllm"`.
        base_model: name of the target.
        accuracies: accuracies[head][rank], from which a tree is chosen at loading.
        target: where shared heads get their LM head from in vLLM's layout, which holds a copy of it.

    Raises:
        InvalidRequest: an unknown layout, accuracies that are none, or no target where one is needed.
    """
    if layout not in ("medusa-1", "vllm"):
        raise InvalidRequest(f"layout must be 'medusa-1' or 'vllm', got {layout!r}")
    config = heads.config
    settings: dict[str, Any] = {"hidden_size": config.width, "vocab_size": config.vocabulary}
    if layout == "medusa-1":
        name = "medusa_lm_head.safetensors"
        settings |= {"medusa_num_heads": config.heads, "medusa_num_layers": config.layers}
        settings["base_model_name_or_path"] = base_model
        state = head_weights(heads, "{head}.{layer}.linear.{part}", f"{{head}}.{config.layers}.weight")
    else:
        name = "model.safetensors"
        settings |= {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": config.heads}
        settings |= {"num_hidden_layers": config.layers, "truncated_vocab_size": heads.draft_vocabulary}
        settings |= {"medusa_fc_bias": True, "original_lm_head": config.shared, "base_model_name_or_path": base_model}
        state = head_weights(heads, "blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
        if config.shared:
            if target is None:
                raise InvalidRequest("vLLM's layout holds a copy of the target's LM head; pass target=")
            rows = lm_head_rows(target, heads.draft_tokens)
            state["lm_head.weight"] = rows.to(next(iter(state.values()), rows).dtype)
    if accuracies is not None:
        settings["accuracies"] = check_accuracies(accuracies)
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    write_checkpoint(Path(directory).expanduser(), name, settings, stored)


def head_weights(heads: MedusaHeads, block: str, lm_head: str) -> dict[str, Tensor]:
    """Returns the weights by the names that two templates give them, such as `{head}.{layer}.linear.{part}`."""
    state = {}
    for layer, stacked in enumerate(heads.blocks):
        for part, tensor in stacked.named_parameters():
            for head, own in enumerate(tensor):
                state[block.format(head=head, layer=layer, part=part)] = own
    if heads.lm_heads is not None:
        state.update((lm_head.format(head=head), own) for head, own in enumerate(heads.lm_heads))
    if heads.draft_tokens is not None:
        state["token_map"] = heads.draft_tokens
    return state


def _read_settings(directory: Path) -> dict[str, Any]:
    """Returns what `config.json` says, nothing where it is missing."""
    file = directory / "config.json"
    return read_json(file) if file.is_file() else {}


def _weight_files(directory: Path) -> list[Path]:
    """Returns the files that hold heads; of a model in several files those that do."""
    for name in _FILES:
        index = directory / f"{name}.index.json"
        if index.is_file():
            placed = read_json(index).get("weight_map")
            if not isinstance(placed, dict):
                raise InvalidCheckpoint(f"{index} has no 'weight_map'")
            files = sorted({directory / str(placed[key]) for key in _heads_among(placed).values()})
            missing = next((file for file in files if not file.is_file()), None)
            if missing is not None:
                raise InvalidCheckpoint(f"{index} names {missing.name!r}, which is not there")
            return files
        if (directory / name).is_file():
            return [directory / name]
    raise ModelNotFound(f"no Medusa heads in {str(directory)!r}: it holds none of {', '.join(_FILES)}")


def _heads_among(names: Iterable[str]) -> dict[str, str]:
    """Returns for each weight of the heads, by its name without a prefix, its name.

    Where names have a prefix, those without one are the model's.
    """
    names = list(names)
    prefixed = {_PREFIX.sub("", name, count=1): name for name in names if _PREFIX.match(name)}
    if not prefixed:
        return {name: name for name in names}
    return prefixed | ({"token_map": "token_map"} if "token_map" in names else {})


class _Read(NamedTuple):
    """The weights of the heads in one file, by their name without a prefix, and their names in the file."""

    file: Path
    tensors: dict[str, Tensor]
    names: Mapping[str, str]


def _read(file: Path) -> _Read:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                names = _heads_among(opened.keys())
                return _Read(file, {key: opened.get_tensor(name) for key, name in names.items()}, names)
        mapped = zipfile.is_zipfile(file)  # of a whole model, only the heads are then read from the disk
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    state = check_tensors(file, state)
    names = _heads_among(state)
    return _Read(file, {key: state[name].clone() for key, name in names.items()}, names)


class _Parts:
    """The weights of the heads by what they are, whichever layout named them; errors name them as the file does."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int, str], Tensor] = {}  # (head, layer, weight or bias)
        self.lm_heads: dict[int, Tensor] = {}
        self.lm_head: Tensor | None = None
        self.tokens: Tensor | None = None
        self._places: dict[object, int] = {}  # the layer that an LM head's name says it follows
        self._where: dict[object, str] = {}
        self._file = ""

    @classmethod
    def of(cls, read: Iterable[_Read]) -> _Parts:
        """Sorts the weights of all files.

        Raises:
            InvalidCheckpoint: a name that no layout has.
        """
        parts = cls()
        for file, tensors, names in read:
            parts._file = str(file)
            for name, tensor in tensors.items():
                parts._add(name, tensor, f"{file}: key {names[name]!r}")
        return parts

    def _add(self, name: str, tensor: Tensor, where: str) -> None:
        place: object
        if block := _BLOCK.fullmatch(name):
            head, layer, part = (group for group in block.groups() if group is not None)
            place = (int(head), int(layer), part)
            self.blocks[int(head), int(layer), part] = tensor
        elif lm_head := _LM_HEAD.fullmatch(name):
            place = int(lm_head[1] or lm_head[3] or 0)
            self.lm_heads[place] = tensor
            if lm_head[2]:
                self._places[place] = int(lm_head[2])
        elif name == "lm_head.weight":
            place, self.lm_head = name, tensor
        elif name == "token_map":
            place, self.tokens = name, tensor
        else:
            raise InvalidCheckpoint(f"{where} is none of Medusa heads, such as {_KNOWN}")
        if place != "token_map" and not tensor.is_floating_point():
            raise InvalidCheckpoint(f"{where} must hold floating-point numbers, got {tensor.dtype}")
        check_finite(tensor, where)
        if place in self._where:
            raise InvalidCheckpoint(f"{where} is the same as the one at {self._where[place]}")
        self._where[place] = where

    def assemble(
        self, width: int, vocabulary: int, *, shared: bool
    ) -> tuple[MedusaConfig, Tensor | None, dict[str, Tensor]]:
        """Checks that the weights are whole and fit, and stacks them.

        Args:
            width: of the target's hidden states.
            vocabulary: number of the target's token ids.
            shared: whether the LM heads are copies of the target's, not to be read.

        Returns:
            The sizes, the draft tokens and the state of `MedusaHeads`.

        Raises:
            InvalidCheckpoint: they are not.
        """
        indices = {head for head, _, _ in self.blocks} | ({*self.lm_heads} if not (shared and self.blocks) else set())
        if not indices:
            raise InvalidCheckpoint(f"{self._file} holds no Medusa heads; their keys are such as {_KNOWN}")
        heads, layers = max(indices) + 1, max((layer for _, layer, _ in self.blocks), default=-1) + 1
        config = MedusaConfig(heads, layers, width, vocabulary, shared or not self.lm_heads)
        state = self._stacked_blocks(heads, layers, width)
        tokens = self._draft_tokens(vocabulary)
        if self.lm_head is not None:
            self._check_rows("lm_head.weight", self.lm_head, width, vocabulary, tokens)
        if not config.shared:
            rows = [self._rows(head, layers, width, vocabulary, tokens) for head in range(heads)]
            state["lm_heads"] = torch.stack(rows)
        if tokens is not None:
            state["draft_tokens"] = tokens
        return config, tokens, state

    def _stacked_blocks(self, heads: int, layers: int, width: int) -> dict[str, Tensor]:
        biased = any(part == "bias" for _, _, part in self.blocks)  # vLLM's medusa_fc_bias, which may be off
        state: dict[str, Tensor] = {}
        for layer in range(layers):
            for part, shape in (("weight", (width, width)), ("bias", (width,))):
                own = []
                for head in range(heads):
                    tensor = self.blocks.get((head, layer, part))
                    if tensor is None and (part == "weight" or biased):
                        raise InvalidCheckpoint(f"{self._file} has no {part} of block {layer} of head {head}")
                    if tensor is None:
                        tensor = torch.zeros(shape, dtype=state[f"blocks.{layer}.weight"].dtype)
                    if tensor.shape != shape:
                        raise InvalidCheckpoint(
                            f"{self._where[head, layer, part]} has the shape {list(tensor.shape)}; for a target of "
                            f"hidden size {width} it must be {list(shape)}"
                        )
                    own.append(tensor)
                state[f"blocks.{layer}.{part}"] = torch.stack(own)
        return state

    def _draft_tokens(self, vocabulary: int) -> Tensor | None:
        return None if self.tokens is None else check_token_ids(self.tokens, vocabulary, self._where["token_map"])

    def _rows(self, head: int, layers: int, width: int, vocabulary: int, tokens: Tensor | None) -> Tensor:
        if head not in self.lm_heads:
            raise InvalidCheckpoint(f"{self._file} has no LM head of head {head}; others have one")
        if self._places.get(head, layers) != layers:
            raise InvalidCheckpoint(
                f"{self._where[head]} is the LM head behind {self._places[head]} blocks; there are {layers}"
            )
        tensor = self.lm_heads[head]
        self._check_rows(head, tensor, width, vocabulary, tokens)
        return tensor if tokens is None or len(tensor) == len(tokens) else tensor[tokens]

    def _check_rows(self, place: object, tensor: Tensor, width: int, vocabulary: int, tokens: Tensor | None) -> None:
        """An LM head has a row for each draft token or, vLLM allows that, for each of the target's."""
        fitting = {vocabulary} if tokens is None else {vocabulary, len(tokens)}
        if tensor.dim() != 2 or tensor.shape[0] not in fitting or tensor.shape[1] != width:
            reduced = "" if tokens is None else f" (or {len(tokens)} draft tokens)"
            raise InvalidCheckpoint(
                f"{self._where[place]} has the shape {list(tensor.shape)}; for a target of vocabulary {vocabulary}"
                f"{reduced} and hidden size {width} it must be {[max(fitting), width]}"
            )
