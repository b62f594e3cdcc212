"""A student: a smaller model of the target's own family that starts from the target's weights.

Fewer blocks work for every family. A smaller width works for models of the llama kind (RMSNorm before attention and
before a gated MLP, separate projections): the hidden states are projected onto the directions that matter most to the
embeddings, as SliceGPT does with activations (Ashkboos et al., arXiv:2401.15024), and whole attention heads and MLP
neurons are left out.

What a cut of the width keeps exactly: everything, if the dropped directions, heads and neurons carry nothing. RMSNorm
takes its mean over fewer numbers then, which gains and epsilon make up for (not the epsilon of norms on queries and
keys), and the gains move into the matrices behind them. What it approximates: all that the dropped parts carry; and,
with an LM head that is the embedding, the final norm's gains, which can follow the new directions on their diagonal
only (they do exactly where all of them are equal). This module knows no data and no loss.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwood.core.anatomy import find_blocks, find_decoder
from draftwood.core.checks import whole_number
from draftwood.core.errors import InvalidCheckpoint, InvalidRequest, UnsupportedModel, VocabularyMismatch
from draftwood.core.loading import load_model, new_model
from draftwood.core.packing import PackedLinear
from draftwood.core.target import Target
from draftwood.drafters.checkpoint_files import UNREADABLE, check_tensors, unreadable
from draftwood.drafters.shared_model import is_shared, load_shared

_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEARS = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Settings of transformers that have an entry for each block."""


def spread(layers: int, count: int) -> tuple[int, ...]:
    """Returns `count` of `layers` blocks, evenly spaced, the first and the last among them.

    Raises:
        InvalidRequest: there are not so many blocks.
    """
    if whole_number("layers", count) > layers:
        raise InvalidRequest(f"the target has {layers} layers; a student of {count} cannot start from them")
    return tuple(round(index * (layers - 1) / max(count - 1, 1)) for index in range(count))


def make_student(
    target: Target, layers: Sequence[int], width: int | None = None, counts: Tensor | None = None
) -> PreTrainedModel:
    """Returns a model of the target's class with some of its blocks, all its own weights, in evaluation mode.

    Args:
        target: stays as it is.
        layers: the blocks to start from, in increasing order.
        width: of the hidden states; the target's when None.
        counts: [vocabulary] how often each token occurs, so that the directions of a smaller width are chosen for
            frequent tokens; all count alike when None.

    Returns:
        Float32 weights (float64 for a target in float64), on the target's device.

    Raises:
        InvalidRequest: blocks that the target does not have, or a width that cannot work.
        UnsupportedModel: the target cannot be cut.
    """
    if not layers or any(not 0 <= layer < target.layers for layer in layers) or sorted({*layers}) != [*layers]:
        raise InvalidRequest(
            f"keep_layers must be blocks from 0 to {target.layers - 1} in increasing order, got {list(layers)}"
        )
    config = copy.deepcopy(target.model.config)
    text = config.get_text_config(decoder=True)
    for name in _BY_LAYER:
        if getattr(text, name, None) is not None:
            setattr(text, name, [getattr(text, name)[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    config.__dict__.pop("quantization_config", None)  # the weights are ordinary ones
    narrow = width is not None and width != text.hidden_size
    if narrow:
        _check_kind(target)
        _set_width(text, whole_number("width", width))
    dtype = torch.promote_types(target.dtype, torch.float32)
    student = new_model(config, dtype)
    if narrow:
        with torch.no_grad():
            _project(target, student, layers, counts)
    else:
        _copy(target, student, layers)
    student.generation_config = copy.deepcopy(target.model.generation_config)
    return student.to(target.device).eval()  # type: ignore[no-any-return, arg-type]


def load_student(target: Target, source: str | Path) -> PreTrainedModel:
    """Returns a student that was trained before, to be trained further, in evaluation mode.

    Args:
        target: whose tokens it has to know.
        source: a directory or hub id of a model, or a directory of one that shares with the target.

    Returns:
        Float32 weights (float64 for a target in float64), on the target's device.

    Raises:
        ModelNotFound: there is no model at `source`.
        InvalidCheckpoint: it cannot be read, has another number of tokens than the target, or shares with a target of
            another family or width.
        VocabularyMismatch: its tokens are others.
        UnsupportedModel: it cannot draft.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    if is_shared(source):
        return load_shared(source, target, dtype)
    for file in sorted(Path(source).expanduser().glob("pytorch_model*.bin")):
        try:
            state = torch.load(file, map_location="meta", weights_only=True)
        except UNREADABLE as error:
            raise unreadable(file, error) from error
        check_tensors(file, state)
    student, tokenizer = load_model(source, dtype=dtype)
    size = Target(student, tokenizer).vocabulary_size
    if size != target.vocabulary_size:
        raise InvalidCheckpoint(
            f"{str(Path(source) / 'config.json')!r}: 'vocab_size' is {size}; the target's vocabulary is "
            f"{target.vocabulary_size}"
        )
    if target.tokenizer is not None:
        ours, theirs = target.tokenizer.get_vocab(), tokenizer.get_vocab()
        for token in sorted(ours.keys() | theirs.keys()):
            if ours.get(token) != theirs.get(token):
                raise VocabularyMismatch(
                    f"the student at {str(source)!r} has another vocabulary than the target: {token!r} is token "
                    f"{theirs.get(token)}, not {ours.get(token)}"
                )
    return student.to(target.device).eval()  # type: ignore[no-any-return, arg-type]


def _copy(target: Target, student: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copies every weight, the blocks' to their new numbers."""
    path = next(name for name, module in target.model.named_modules() if module is target.blocks) + "."
    weights: dict[str, Tensor] = {}
    for name, tensor in target.model.state_dict().items():
        if name.startswith(path):
            layer, rest = name.removeprefix(path).split(".", 1)
            if int(layer) not in layers:
                continue
            name = f"{path}{layers.index(int(layer))}.{rest}"
        weights[name] = tensor
    try:
        student.load_state_dict(weights)
    except RuntimeError as error:
        raise UnsupportedModel(
            f"the weights of {type(target.model).__name__} are not those of its configuration (quantised or adapted "
            f"models have others): {error}"
        ) from error


def _set_width(config: Any, width: int) -> None:
    """Sets the sizes of a smaller width: head size and queries a key stay, so that rotary positions do."""
    whole, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    if width > whole:
        raise InvalidRequest(f"width must be at most the target's {whole}, got {width}")
    head_size = getattr(config, "head_dim", None) or whole // heads
    kept = max(1, round(groups * width / whole))
    fewer = kept * (heads // groups)
    if width % fewer:
        near = sorted({max(width // fewer, 1) * fewer, (width // fewer + 1) * fewer})
        raise InvalidRequest(
            f"width {width} leaves {fewer} of the target's {heads} heads of {head_size}, of which it is no multiple; "
            f"try {' or '.join(map(str, near))}"
        )
    config.intermediate_size = max(1, round(config.intermediate_size * width / whole))
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = fewer, kept, head_size
    config.rms_norm_eps = config.rms_norm_eps * whole / width
    config.hidden_size = width


def _project(target: Target, student: PreTrainedModel, layers: Sequence[int], counts: Tensor | None) -> None:
    """Fills a narrow student with the target's weights; see the module's docstring for the method."""
    model: Any = target.model
    source: Any = target.decoder
    into: Any = find_decoder(student)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head.weight is embedding
    gains = source.norm.weight.double().cpu()  # [width]
    tables = [embedding.double().cpu()] + ([] if tied else [head.weight.double().cpu() * gains])
    basis = _directions(tables, student.config.hidden_size, counts)  # [width, kept]
    louder = (basis.shape[0] / basis.shape[1]) ** 0.5  # the mean of the squares is taken over fewer numbers
    student.get_input_embeddings().weight.copy_(tables[0] @ basis)  # type: ignore[operator]
    if tied:
        into.norm.weight.copy_(louder * (basis.square() * gains[:, None]).sum(0))
    else:
        into.norm.weight.fill_(louder)
        new_head: Any = student.get_output_embeddings()  # type: ignore[no-untyped-call]
        new_head.weight.copy_(tables[1] @ basis)
        if head.bias is not None:
            new_head.bias.copy_(head.bias)
    blocks = find_blocks(into, len(layers))
    for layer, block in zip(layers, blocks, strict=True):
        _project_block(target.blocks[layer], block, basis, louder, target.config, student.config)


def _directions(tables: Sequence[Tensor], kept: int, counts: Tensor | None) -> Tensor:
    """The leading principal directions of tables [vocabulary, width], all weighing alike; [width, kept] float64."""
    # Every token counts once more than it occurs, so that those of other texts are not lost.
    weights = torch.ones(len(tables[0])) if counts is None else counts.cpu() + 1
    moments = [table.T @ (table * weights.double()[:, None]) for table in tables]
    moment = sum((moment / moment.trace() for moment in moments), torch.zeros_like(moments[0]))
    vectors: Tensor = torch.linalg.eigh(moment).eigenvectors  # of rising weight
    return vectors.flip(1)[:, :kept]


def _project_block(old: nn.Module, new: nn.Module, basis: Tensor, louder: float, before: Any, after: Any) -> None:
    attention, mlp = _NORMS
    gains = {norm: old.get_parameter(f"{norm}.weight").double().cpu() for norm in _NORMS}

    def reading(name: str, norm: str) -> Tensor:
        return (old.get_parameter(f"{name}.weight").double().cpu() * gains[norm]) @ basis

    def writing(name: str) -> Tensor:
        return basis.T @ old.get_parameter(f"{name}.weight").double().cpu()

    weights = {name: reading(name, attention) for name in _LINEARS[:3]} | {"self_attn.o_proj": writing(_LINEARS[3])}
    weights |= {name: reading(name, mlp) for name in _LINEARS[4:6]} | {"mlp.down_proj": writing(_LINEARS[6])}
    head_size, groups, fewer = after.head_dim, before.num_key_value_heads, after.num_key_value_heads
    queries = before.num_attention_heads // groups * head_size
    values = weights["self_attn.v_proj"].view(groups, -1).norm(dim=1)
    weight_of_group = values * weights["self_attn.o_proj"].T.reshape(groups, -1).norm(dim=1)
    kept = weight_of_group.topk(fewer).indices.sort().values  # groups of heads that share keys and values
    gate, up, down = (weights[name] for name in _LINEARS[4:])
    neurons = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).topk(after.intermediate_size).indices.sort().values
    rows = {name: _spans(kept, head_size) for name in _LINEARS[1:3]} | {_LINEARS[0]: _spans(kept, queries)}
    rows |= dict.fromkeys(_LINEARS[4:6], neurons)
    biases = dict(old.named_parameters())
    for name, weight in weights.items():
        given = biases.get(f"{name}.bias")
        bias = None if given is None else given.double().cpu()
        if name in rows:
            weight, bias = weight[rows[name]], None if bias is None else bias[rows[name]]
        else:
            weight = weight[:, _spans(kept, queries) if name == "self_attn.o_proj" else neurons]
            bias = None if bias is None else bias @ basis
        new.get_parameter(f"{name}.weight").copy_(weight)
        if bias is not None:
            new.get_parameter(f"{name}.bias").copy_(bias)
    for norm in _NORMS:
        new.get_parameter(f"{norm}.weight").fill_(louder)
    for name, parameter in new.named_parameters():
        if name.removesuffix(".weight") in _HEAD_NORMS:
            parameter.copy_(old.get_parameter(name))


def _spans(numbers: Tensor, size: int) -> Tensor:
    """The indices of whole spans of `size`, by their numbers."""
    return (numbers[:, None] * size + torch.arange(size)).flatten()


def _check_kind(target: Target) -> None:
    """Refuses whatever `_project` would cut wrongly: other parts than a llama's, or a norm that is no plain RMSNorm."""
    model: Any = target.model
    decoder: Any = target.decoder
    name = type(model).__name__
    known = {f"{norm}.weight" for norm in (*_NORMS, *_HEAD_NORMS)}
    known |= {f"{linear}.{kind}" for linear in _LINEARS for kind in ("weight", "bias")}
    needed = {f"{part}.weight" for part in (*_NORMS, *_LINEARS)}
    for block in target.blocks:
        found = {part for part, _ in block.named_parameters()}
        if strange := sorted((found - known) | (needed - found)):
            raise UnsupportedModel(f"the width of {name} cannot be cut: it is not built as a llama ({strange[0]})")
    inside = {id(parameter) for parameter in target.blocks.parameters()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings(), getattr(decoder, "norm", None)]
    inside |= {id(parameter) for part in ends if part is not None for parameter in part.parameters()}
    for part, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise UnsupportedModel(f"the width of {name} cannot be cut: it is not built as a llama ({part})")
    if any(
        type(block.get_submodule(part)) not in (nn.Linear, PackedLinear) for block in target.blocks for part in _LINEARS
    ):
        raise UnsupportedModel(f"the width of {name} cannot be cut: its matrices are quantised or adapted")
    for norm in [decoder.norm, *(block.get_submodule(part) for block in target.blocks for part in _NORMS)]:
        weight = norm.weight.detach().float()
        probe = torch.linspace(-1.0, 2.0, len(weight), device=weight.device, dtype=weight.dtype)
        expected = probe * (probe.square().mean() + target.config.rms_norm_eps).rsqrt() * weight
        if not torch.allclose(norm(probe.to(norm.weight.dtype)).float(), expected, rtol=0.02, atol=1e-3):
            raise UnsupportedModel(f"the width of {name} cannot be cut: its {type(norm).__name__} is no plain RMSNorm")
