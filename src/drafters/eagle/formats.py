"""EAGLE heads on disk: every published layout in, two layouts out.

Read are the layout of the authors' repositories (`yuhuili/EAGLE-*` and `EAGLE3-*`), vLLM's plain one-layer Llama
configuration, and vLLM's "speculators" layout; weights as safetensors or `pytorch_model.bin`. Where configuration and
weights disagree on what there is, the weights are right. A key that has no place in the network is an error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import LlamaConfig

from ...core.errors import InvalidCheckpoint, InvalidRequest
from ...core.target import Target
from ..checkpoint_files import WEIGHTS, check_places, find_checkpoint, read_json, read_weights, write_checkpoint
from .config import default_layers, llama_config
from .network import Eagle3Head, EagleHead, Head

LayerIds = Literal["before", "after"]
"""What the layer ids of a checkpoint mean: the states before those blocks (their inputs), or after them."""

LAYER_IDS, MEANING = "eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_is"
_MEANINGS: dict[str, LayerIds] = {"block_input": "before", "block_output": "after"}

# Buffers and copies of the target's weights that some tools save along.
_SPARE = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
_RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0.", "fc_norms.": "fc_norm."}


class _Checkpoint(NamedTuple):
    """A checkpoint as it was read, its keys as the network calls them."""

    file: Path
    config_file: Path
    config: dict[str, Any]
    speculators: bool
    weights: dict[str, Tensor]

    def option(self, name: str, default: Any = None) -> Any:
        """A field of EAGLE's own: at the top, or in `eagle_config`."""
        inner = self.config.get("eagle_config") or {}
        return inner.get(name, self.config.get(name, default))

    def invalid(self, message: str, *, config: bool = False) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"{str(self.config_file if config else self.file)!r}: {message}")


def load_head(
    source: str | Path,
    target: Target,
    *,
    layer_ids: LayerIds | None = None,
    draft_tokens: Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> EagleHead | Eagle3Head:
    """Loads a head that was made for `target`, to its device. It still has to be attached.

    Args:
        source: a directory or hub id.
        target: sizes are checked against it.
        layer_ids: what the file's layer ids mean; None goes by the file and warns where it does not say.
        draft_tokens: the only tokens an EAGLE-1 head drafts; None for what the file says, or all.
        dtype: of the weights; the target's when None.

    Raises:
        ModelNotFound: there is no checkpoint at `source`.
        InvalidCheckpoint: a file is broken, a key is missing, unknown, of the wrong shape or not finite, d2t and t2d
            contradict each other, or a size is not the target's; the message names file and key.
        InvalidRequest: an argument cannot work.
    """
    if layer_ids not in (None, "before", "after"):
        raise InvalidRequest(f"layer_ids must be 'before', 'after' or None, got {layer_ids!r}")
    found = _read(find_checkpoint(source, "head", [("config.json", *WEIGHTS)]))
    dtype = target.dtype if dtype is None else dtype
    third = _is_third(found.weights)
    if third and draft_tokens is not None:
        raise InvalidRequest("draft_tokens is for EAGLE-1 heads; an EAGLE-3 head's LM head has tokens of its own")
    head = _eagle3(found, target, layer_ids) if third else _eagle(found, target, draft_tokens)
    wrong = head.misfit(target)
    if wrong is not None:
        raise found.invalid(wrong, config=True)
    _fill(head.to(dtype), found)
    return head.to(target.device).eval()


def save_head(
    head: EagleHead | Eagle3Head,
    folder: str | Path,
    *,
    layout: Literal["yuhuili", "speculators"] = "yuhuili",
    target_name: str | None = None,
    depth: int = 5,
) -> None:
    """Saves a head as `config.json` and `model.safetensors`; the target's embedding and LM head are never included.

    Args:
        head: the head.
        folder: made if it does not exist.
        layout: `"yuhuili"`, which vLLM and SGLang read as a plain configuration too, or vLLM's `"speculators"`, which
            is for EAGLE-3. Features keep their order; engines that want them in rising order are what
            `draftwood export` is for.
        target_name: the directory or hub id of the target, which the speculators layout names.
        depth: how many tokens servers should draft; only the speculators layout says so.

    Raises:
        InvalidRequest: an unknown layout, or one that has no EAGLE-1.
    """
    if layout not in ("yuhuili", "speculators"):
        raise InvalidRequest(f"layout must be 'yuhuili' or 'speculators', got {layout!r}")
    if layout == "speculators" and not isinstance(head, Eagle3Head):
        raise InvalidRequest("the speculators layout is read for EAGLE-3 alone; save an EAGLE-1 head with 'yuhuili'")
    weights = {key: value.detach().cpu().contiguous() for key, value in head.state_dict().items()}
    if head.draft_tokens is not None:
        ids = head.draft_tokens.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if layout == "yuhuili":
        write_checkpoint(Path(folder), WEIGHTS[0], _layer_fields(head) | _own_fields(head), weights)
        return
    weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": {key: v for key, v in _layer_fields(head).items() if key != "architectures"},
    }
    write_checkpoint(Path(folder), WEIGHTS[0], config | _own_fields(head), weights)


def _read(folder: Path) -> _Checkpoint:
    config_file = folder / "config.json"
    config = read_json(config_file)
    file, weights = read_weights(folder, "head")
    named: dict[str, Tensor] = {}
    third = _is_third(weights)
    for key, value in weights.items():
        name = key.removeprefix("model.")
        for old, new in _RENAMED.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if third and name.startswith("layers.0."):
            name = "midlayer." + name.removeprefix("layers.0.")
        if name.endswith(_SPARE):
            continue
        if name in named:
            raise InvalidCheckpoint(f"{str(file)!r}: {name!r} is there twice under different names")
        named[name] = value
    if not isinstance(config.get("eagle_config") or {}, dict):
        raise InvalidCheckpoint(f"{str(config_file)!r}: eagle_config must be an object, got {config['eagle_config']!r}")
    speculators = "speculators_model_type" in config
    layer = config.get("transformer_layer_config") if speculators else config
    if not isinstance(layer, dict):
        raise InvalidCheckpoint(f"{str(config_file)!r}: transformer_layer_config must be an object, got {layer!r}")
    layers = layer.get("num_hidden_layers", 1)
    if layers != 1:
        raise InvalidCheckpoint(
            f"{str(config_file)!r}: num_hidden_layers is {layers}; heads of one layer are supported"
        )
    if speculators:
        config = layer | config
    return _Checkpoint(file, config_file, config, speculators, named)


def _is_third(weights: Mapping[str, Tensor]) -> bool:
    """Whether a head is EAGLE-3's: by any key that EAGLE-1 has not, so that a missing one is named as EAGLE-3's."""
    plain = {key.removeprefix("model.") for key in weights}
    return "norm.weight" in plain or any(
        key.startswith("midlayer.") or key.endswith(".hidden_norm.weight") for key in plain
    )


def _eagle(found: _Checkpoint, target: Target, draft_tokens: Sequence[int] | Tensor | None) -> EagleHead:
    weights = found.weights
    if found.option("layernorms"):
        raise found.invalid("layernorms is true; EAGLE-1 heads with extra norms are not supported", config=True)
    # The target's own, whose values are frozen in training; only the size can tell that another target is meant.
    embedding = weights.pop("embed_tokens.weight", None)
    lm_head = weights.pop("lm_head.weight", None)
    expected = (target.vocabulary_size, target.config.hidden_size)
    if embedding is not None and tuple(embedding.shape) != expected:
        raise found.invalid(f"'embed_tokens.weight' is {list(embedding.shape)}, the target's is {list(expected)}")
    config = _config(found, "layers.0.")
    own = _draft_tokens(found, config.vocab_size, None)
    if lm_head is not None and config.vocab_size == target.vocabulary_size:  # or the head is refused anyway
        _compare_lm_head(found, target, lm_head, own)
    chosen = own if draft_tokens is None else draft_tokens
    return EagleHead(config, fc_bias="fc.bias" in weights, draft_tokens=chosen)


def _compare_lm_head(found: _Checkpoint, target: Target, lm_head: Tensor, tokens: Tensor | None) -> None:
    """Warns where an EAGLE-1 file has another LM head than the target's, which is the one that drafts."""
    sizes = [target.vocabulary_size, *([] if tokens is None else [len(tokens)])]
    width = target.config.hidden_size
    if lm_head.dim() != 2 or lm_head.shape[0] not in sizes or lm_head.shape[1] != width:
        expected = " or ".join(str([size, width]) for size in sizes)
        raise found.invalid(f"'lm_head.weight' is {list(lm_head.shape)}, the target's is {expected}")
    if not lm_head.is_floating_point():
        raise found.invalid(f"'lm_head.weight' must hold floating-point numbers, got {lm_head.dtype}")
    theirs: Any = getattr(target.model.get_output_embeddings(), "weight", None)  # type: ignore[no-untyped-call]
    # Of a quantised LM head no number can be compared.
    if type(theirs) is not Parameter or theirs.shape != (sizes[0], width) or not theirs.is_floating_point():
        return
    theirs = theirs.detach().cpu()
    if tokens is not None and lm_head.shape[0] == len(tokens):
        theirs = theirs[tokens]
    if _same(lm_head, theirs):
        return
    pieces = 1 + len(theirs) // 4096  # the whole is gigabytes in float32
    pairs = zip(lm_head.chunk(pieces), theirs.chunk(pieces), strict=True)
    squares = torch.tensor([[(a.float() - b.float()).square().sum(), b.float().square().sum()] for a, b in pairs])
    apart, whole = squares.sum(0).sqrt().tolist()
    difference = apart / whole if whole else math.inf
    if not difference <= max(torch.finfo(kind).eps for kind in (lm_head.dtype, theirs.dtype)):
        warnings.warn(
            f"{str(found.file)!r}: 'lm_head.weight' is not the target's LM head, they differ by {difference:.1%} of "
            "its norm. EAGLE-1 heads draft with the target's; one that was trained with another is accepted less often",
            stacklevel=4,
        )


def _eagle3(found: _Checkpoint, target: Target, layer_ids: LayerIds | None) -> Eagle3Head:
    weights = found.weights
    width = found.option("target_hidden_size") or found.config.get("hidden_size")
    lm_head = weights.get("lm_head.weight")
    rows = None if lm_head is None or lm_head.dim() != 2 else lm_head.shape[0]
    embedding = weights.get("embed_tokens.weight")
    theirs: Any = target.model.get_input_embeddings().weight
    if embedding is not None and _same(embedding, theirs):
        del weights["embed_tokens.weight"]
    config = _config(found, "midlayer.")
    return Eagle3Head(
        config,
        layers=_layers(found, target, layer_ids),
        draft_tokens=_draft_tokens(found, config.vocab_size, rows),
        target_hidden_size=width,
        fc_bias="fc.bias" in weights,
        norm_before_residual=bool(found.option("norm_before_residual", found.speculators)),
        norm_before_fc="input_norm.weight" in weights,
        fc_norm=any(key.startswith("fc_norm.") for key in weights),
        norm_output=bool(found.option("norm_output", False)),
        own_embedding="embed_tokens.weight" in weights,
    )


def _same(embedding: Tensor, theirs: Tensor) -> bool:
    """Whether an embedding is the target's, in whatever precision either is stored."""
    coarser = min(embedding.dtype, theirs.dtype, key=lambda dtype: dtype.itemsize)
    return embedding.shape == theirs.shape and torch.equal(embedding.to(coarser), theirs.detach().cpu().to(coarser))


def _config(found: _Checkpoint, layer: str) -> LlamaConfig:
    """The layer's configuration; whether there are biases is read off the weights."""
    fields = dict(found.config)
    fields["attention_bias"] = f"{layer}self_attn.q_proj.bias" in found.weights
    fields["mlp_bias"] = f"{layer}mlp.gate_proj.bias" in found.weights
    try:
        return llama_config(fields)
    except InvalidRequest as error:
        raise found.invalid(str(error), config=True) from error


def _draft_tokens(found: _Checkpoint, size: int, rows: int | None) -> Tensor | None:
    """Takes the draft vocabulary out of the weights; d2t holds offsets, target id = i + d2t[i].

    Args:
        found: the checkpoint.
        size: of the target's vocabulary.
        rows: of the head's own LM head; None if it has none.
    """
    offsets, drafted = found.weights.pop("d2t", None), found.weights.pop("t2d", None)
    if offsets is None and drafted is None:
        if rows is not None and rows != size:
            raise found.invalid(f"'lm_head.weight' has {rows} rows for {size} tokens, but there is no 'd2t' or 't2d'")
        return None
    name = "t2d" if offsets is None else "d2t"
    if offsets is None:
        tokens = drafted.flatten().nonzero()[:, 0]  # type: ignore[union-attr]
    else:
        if offsets.dim() != 1 or offsets.is_floating_point():
            raise found.invalid(f"'d2t' must be a list of whole numbers, got {list(offsets.shape)} {offsets.dtype}")
        tokens = torch.arange(len(offsets)) + offsets.long()
    if rows is not None and len(tokens) != rows:
        raise found.invalid(f"{name!r} has {len(tokens)} tokens, 'lm_head.weight' has {rows} rows")
    distinct = len(set(tokens.tolist())) == len(tokens)
    if not len(tokens) or not distinct or int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise found.invalid(f"{name!r} does not name distinct token ids from 0 to vocab_size {size} - 1")
    if offsets is not None and drafted is not None:
        other = drafted.flatten().nonzero()[:, 0]
        single = {*tokens.tolist()} ^ {*other.tolist()}
        if single:
            token = min(single)
            alone = "d2t" if token in tokens else "t2d"
            raise found.invalid(f"'d2t' and 't2d' contradict each other: token {token} is drafted by {alone!r} alone")
    return None if torch.equal(tokens, torch.arange(size)) else tokens


def _layers(found: _Checkpoint, target: Target, layer_ids: LayerIds | None) -> tuple[int, ...]:
    """Returns the blocks whose inputs the head reads; warns where that had to be guessed (vLLM issue 50170)."""
    ids, meaning = found.option(LAYER_IDS), found.option(MEANING)
    if meaning is not None and meaning not in _MEANINGS:
        raise found.invalid(f"{MEANING} must be one of {list(_MEANINGS)}, got {meaning!r}", config=True)
    how = layer_ids or _MEANINGS.get(meaning)
    advice = (
        "a wrong guess drafts next to nothing that is accepted: say layer_ids='before' or 'after', or measure with "
    )
    if ids is None:
        layers: tuple[int, ...] = default_layers(target)
        if how is None:
            _warn(found, f"says nothing of {LAYER_IDS}; reading the inputs of blocks {layers}; {advice}")
        return layers if how != "after" else tuple(layer + 1 for layer in layers)
    if not isinstance(ids, list) or not ids or any(type(layer) is not int for layer in ids):
        raise found.invalid(f"{LAYER_IDS} must be a list of block numbers, got {ids!r}", config=True)
    if how is None:
        _warn(
            found, f"does not say whether {LAYER_IDS} {ids} are states before or after blocks; reading inputs; {advice}"
        )
    layers = tuple(layer + 1 if how == "after" else layer for layer in ids)
    if not all(0 <= layer <= target.layers for layer in layers):
        raise found.invalid(f"{LAYER_IDS} {ids} do not exist in a target of {target.layers} blocks", config=True)
    return layers


def _warn(found: _Checkpoint, message: str) -> None:
    warnings.warn(f"{str(found.config_file)!r} {message}probe_layer_ids", stacklevel=5)


def _fill(head: Head, found: _Checkpoint) -> None:
    """Puts the weights in; every key must have its place and every place its key."""
    weights = found.weights
    for name, module in head.named_modules():
        # Qwen2's layers have biases in front of the attention, none behind it.
        if name.endswith("o_proj") and f"{name}.bias" not in weights:
            module.register_parameter("bias", None)
    check_places(found.file, weights, head.state_dict(), type(head).__name__)
    head.load_state_dict(weights)


def _layer_fields(head: Head) -> dict[str, Any]:
    """A plain Llama configuration of one layer, with the rotary embedding as every reader knows it."""
    config: Any = head.config
    rope = dict(config.rope_parameters)
    fields = {
        "architectures": ["LlamaForCausalLMEagle3" if isinstance(head, Eagle3Head) else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        "tie_word_embeddings": False,
        "dtype": str(head.dtype).removeprefix("torch."),
    }
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = ("hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias")
    return fields | {name: getattr(config, name) for name in (*names, *more)}


def _own_fields(head: EagleHead | Eagle3Head) -> dict[str, Any]:
    """EAGLE's own fields of the configuration."""
    if isinstance(head, EagleHead):
        return {"bias": head.fc.bias is not None}
    return {
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": head.target_width,
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.input_norm is not None,
        "fc_norm": head.fc_norm is not None,
        "norm_output": head.norm_output,
        LAYER_IDS: list(head.feature_names),
        MEANING: "block_input",
    }
