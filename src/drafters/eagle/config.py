"""Configurations of the heads' Llama layer: from a target's sizes, or from whatever a checkpoint says.

The module knows no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ...core.errors import InvalidRequest
from ...core.target import Target

_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "initializer_range",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "mlp_bias",
)


def llama_config(fields: Mapping[str, Any]) -> LlamaConfig:
    """Returns the configuration of one layer. Older files say `rope_theta` and `rope_scaling`; without either, 10000.

    Args:
        fields: of a config.json. Those that a layer does not have are left out.

    Raises:
        InvalidRequest: a field is missing or has an impossible value.
    """
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    for name in required:
        if not isinstance(fields.get(name), int) or fields[name] < 1:
            raise InvalidRequest(f"{name} must be a whole number >= 1, got {fields.get(name)!r}")
    width, heads, shared = fields["hidden_size"], fields["num_attention_heads"], fields.get("num_key_value_heads")
    # Not every version of transformers checks these itself.
    if width % heads or (shared is not None and (not isinstance(shared, int) or shared < 1 or heads % shared)):
        raise InvalidRequest(
            f"no Llama layer can have hidden_size {width}, num_attention_heads {heads}, num_key_value_heads {shared}: "
            "each must be a multiple of the next"
        )
    known = {name: fields[name] for name in (*required, *_OPTIONAL) if fields.get(name) is not None}
    try:
        config = LlamaConfig(**known, num_hidden_layers=1, attention_bias=bool(fields.get("attention_bias")))
        # transformers looks at these when a layer is built.
        LlamaRotaryEmbedding(config)
        ACT2FN[config.hidden_act]
    except (ValueError, TypeError, LookupError, ArithmeticError, StrictDataclassError) as error:
        raise InvalidRequest(f"no Llama layer can have {known}: {type(error).__name__}: {error}") from error
    return config


def layer_config(target: Target, **changes: Any) -> LlamaConfig:
    """Returns the configuration of a Llama layer of the sizes of one of the target's, whatever family that is.

    Args:
        target: whose sizes and rotary embedding (where it has an ordinary one) are taken.
        **changes: other values for some of the fields, such as `intermediate_size=512`.

    Raises:
        InvalidRequest: the values make no Llama layer.
    """
    theirs = target.config
    heads = changes.get("num_attention_heads", theirs.num_attention_heads)
    shared = getattr(theirs, "num_key_value_heads", None)
    resized = "hidden_size" in changes or "num_attention_heads" in changes
    fields = {
        "vocab_size": target.vocabulary_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": shared if shared and heads % shared == 0 else heads,
        "head_dim": None if resized else getattr(theirs, "head_dim", None),
        "rms_norm_eps": getattr(theirs, "rms_norm_eps", None),
        "max_position_embeddings": target.context_length,
    }
    rope: Any = getattr(theirs, "rope_parameters", None) or {}
    nested = any(isinstance(value, dict) for value in rope.values())  # one a kind of layer
    if isinstance(rope.get("rope_type"), str) and not nested:
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return llama_config(fields | changes)


def default_layers(target: Target) -> tuple[int, int, int]:
    """Returns the blocks whose inputs EAGLE-3 reads unless told otherwise: 2, L // 2 and L - 3."""
    blocks = target.layers
    return min(2, blocks), blocks // 2, max(blocks - 3, 0)
