"""Tiny random models of every causal language model family that the installed transformers can build small."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 101
MOST_PARAMETERS = 3_000_000

# Every name that a configuration of some family gives to a size, with a value that goes with the others.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 64, "ffn_dim": 64, "ffn_hidden_size": 64, "n_inner": 64, "d_ff": 64, "dff": 64,
    "decoder_ffn_dim": 64, "dim_ff": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "intermediate_size_mlp": 64,
    "expert_ffn_hidden_size": 16, "dense_intermediate_size": 64,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "multi_query_group_num": 2,
    "head_dim": 8, "dim_head": 8, "kv_channels": 8, "global_head_dim": 8, "attention_head_dim": 8,
    "num_global_key_value_heads": 2,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "o_lora_rank": 16,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "zero_expert_num": 1, "first_k_dense_replace": 1, "first_last_layers": 1,
    "sliding_window": 4, "attention_chunk_size": 4, "window_size": 4, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "max_sequence_length": 64, "rotary_dim": 8, "attention_window": 4,
    "hidden_size_per_layer_input": 8, "laurel_rank": 8, "num_kv_shared_layers": 2, "altup_num_inputs": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    "type_vocab_size": 2, "activation_sparsity_pattern": None, "lauret_rank": 8,
}  # fmt: skip

# Families whose sizes hang together in a way of their own.
_MLA = {"num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"), _MLA),
    "dots3_note": _MLA,
    "dots3_note_text": _MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "zaya": {"num_experts_per_tok": 1},
    "kimi_linear": _MLA,
    "longcat_flash": {**_MLA, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 64},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    **{
        family: {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
        for family in ("gemma4_text", "gemma4_unified_text")
    },
    "lfm2_moe": {"layer_types": ["full_attention"] * 4},
    "lfm2": {"layer_types": ["full_attention"] * 4},
}


def families() -> list[str]:
    """Returns the model types of transformers' own list of causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(family: str) -> PretrainedConfig:
    """Returns a configuration of `family` with small sizes."""
    default = AutoConfig.for_model(family)
    text = default.get_text_config(decoder=True)
    known = {**vars(text), **dict.fromkeys(inspect.signature(type(text).__init__).parameters)}
    known |= dict.fromkeys(getattr(type(text), "__dataclass_fields__", {}))
    mapped = set(getattr(text, "attribute_map", {}).values())
    sizes = {name: value for name, value in SMALL.items() if name in known or name in mapped}
    if getattr(text, "is_decoder", None) is False:
        sizes["is_decoder"] = True  # the families that are encoders otherwise
    sizes |= OWN.get(family, {})
    return type(text)(**{name: value for name, value in sizes.items() if value is not None})


def build(family: str, dtype: torch.dtype = torch.float64, **overrides: Any) -> PreTrainedModel:
    """Builds a tiny random model of `family`; the same one every time."""
    import transformers

    config = small_config(family)
    for name, value in overrides.items():
        setattr(config, name, value)
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{family}: {size:,} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()
