"""EAGLE heads as the loaders of vLLM and SGLang want them.

Both take a fixed order for granted and leave some parts of a network out. What they would read wrongly, or not at all
and without a word, is put in order here or refused. This is by the sources of vLLM 0.32, which was also run, and of
SGLang 0.5.23, which was not.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...core.errors import InvalidRequest
from ..checkpoint_files import read_json
from .formats import LAYER_IDS, MEANING, save_head
from .network import Eagle3Head, EagleHead

Engine = Literal["vllm", "sglang"]

HOT_TOKENS = "hot_token_ids.pt"
"""The file that SGLang takes the draft vocabulary of an EAGLE-1 head from."""


def save_for_engine(
    head: EagleHead | Eagle3Head, folder: Path, engine: Engine, *, layers: int, target_name: str, depth: int
) -> None:
    """Writes a head for a serving engine; it drafts the same there, but for an EAGLE-1 draft vocabulary in vLLM.

    Args:
        head: stays as it is.
        folder: made if it does not exist.
        engine: which.
        layers: number of the target's blocks.
        target_name: what the engine is told to serve; vLLM's layout of EAGLE-3 names it.
        depth: how many tokens to draft.

    Raises:
        InvalidRequest: the engine has no such network; the message says what it lacks.
    """
    head = copy.deepcopy(head)
    if isinstance(head, Eagle3Head):
        _in_order(head)
    if head.fc.bias is not None and not head.fc.bias.any():
        head.fc.register_parameter("bias", None)
    _refuse(head, engine, layers)
    if engine == "vllm":
        _save_for_vllm(head, folder, target_name, depth)
    else:
        _save_for_sglang(head, folder)


def _save_for_vllm(head: EagleHead | Eagle3Head, folder: Path, target_name: str, depth: int) -> None:
    layer: Any = head.midlayer if isinstance(head, Eagle3Head) else head.layers[0]
    attention = layer.self_attn
    if attention.q_proj.bias is not None and attention.o_proj.bias is None:  # it has all four biases or none
        attention.o_proj.bias = nn.Parameter(torch.zeros_like(attention.o_proj.weight[:, 0]))
    if isinstance(head, Eagle3Head):
        save_head(head, folder, layout="speculators", target_name=target_name, depth=depth)
        config = read_json(folder / "config.json")
        # What vLLM makes of this layout leaves their number out; it would go on with three.
        config["transformer_layer_config"]["num_aux_hidden_states"] = len(head.feature_names)
    else:
        head.draft_tokens = None
        save_head(head, folder)
        config = read_json(folder / "config.json")
        del config["bias"]  # would be taken for the attention's
    _rewrite(folder, config)


def _save_for_sglang(head: EagleHead | Eagle3Head, folder: Path) -> None:
    if isinstance(head, Eagle3Head):
        save_head(head, folder)
        config = read_json(folder / "config.json")
        del config[LAYER_IDS]
        # It counts the states behind blocks, from the one behind the embedding, which is -1.
        ids = [int(name) - 1 for name in head.feature_names]
        config["eagle_config"] = {"use_aux_hidden_state": True, LAYER_IDS: ids}
        config |= {MEANING: "block_output", "num_aux_hidden_states": len(ids), "bias": head.fc.bias is not None}
    else:
        if head.draft_tokens is not None:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(head.draft_tokens.tolist(), folder / HOT_TOKENS)
            head.draft_tokens = None
        if head.fc.bias is None:  # it always has one, and leaves it as random as it was made
            head.fc.bias = nn.Parameter(torch.zeros_like(head.fc.weight[:, 0]))
        save_head(head, folder)
        config = read_json(folder / "config.json")
        config |= {"architectures": ["LlamaForCausalLMEagle"]}
        del config["bias"]  # would be taken for the attention's
    _rewrite(folder, config)


def _in_order(head: Eagle3Head) -> None:
    """Sorts features and draft tokens, and the weights with them; all tokens in order are no draft vocabulary."""
    names, width = [int(name) for name in head.feature_names], head.target_width
    order = sorted(range(len(names)), key=names.__getitem__)
    columns = torch.cat([torch.arange(width) + width * place for place in order]).to(head.device)
    head.feature_names = tuple(names[place] for place in order)
    head.fc.weight = nn.Parameter(head.fc.weight[:, columns])
    if head.input_norm is not None:
        head.input_norm.weight = nn.Parameter(head.input_norm.weight[columns])
    if head.fc_norm is not None:
        head.fc_norm = nn.ModuleList(head.fc_norm[place] for place in order)
    if head.draft_tokens is not None:
        tokens, rows = head.draft_tokens.sort()
        head.lm_head.weight = nn.Parameter(head.lm_head.weight[rows.to(head.device)])
        head.draft_tokens = tokens if len(tokens) < head.config.vocab_size else None


def _refuse(head: EagleHead | Eagle3Head, engine: Engine, layers: int) -> None:
    """Raises for what an engine would leave out without a word."""
    third = head if isinstance(head, Eagle3Head) else None
    biased = {name for name, weight in head.named_parameters() if name.endswith(".bias") and weight.any()}
    biased.discard("fc.bias")
    lacking = []
    if engine == "vllm":
        if head.fc.bias is not None:
            lacking.append("a bias of fc (train a head without one, or serve it with SGLang)")
    else:
        known = () if third else ("q_proj.bias", "k_proj.bias", "v_proj.bias")
        lacking += [f"the bias {name}" for name in sorted(biased) if not name.endswith(known)]
    if third is not None:
        lacking += _lacking_of_third(third, engine, layers)
    if lacking:
        what = "EAGLE-3" if third else "EAGLE-1"
        raise InvalidRequest(f"{engine}'s {what} head has no place for {'; '.join(lacking)}")


def _lacking_of_third(head: Eagle3Head, engine: Engine, layers: int) -> list[str]:
    lacking = []
    names = list(head.feature_names)
    if len(set(names)) < len(names):
        lacking.append(f"the same feature twice, got the inputs of blocks {names}")
    if engine == "sglang":
        if head.norm_before_residual:
            lacking.append("norm_before_residual (vLLM has)")
        if layers in names:
            lacking.append(f"the last block's output, feature {layers}")
        if head.fc.in_features == head.fc.out_features:
            lacking.append("an fc of a single feature, which it skips")
        if head.embed_tokens is not None and head.target_width == head.config.hidden_size:
            lacking.append("an embedding of the head's own where its width is the target's")
    return lacking


def _rewrite(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
