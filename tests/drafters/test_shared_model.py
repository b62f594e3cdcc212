"""Draft models that use the target's embedding and LM head: what is shared, stored and refused, and the same text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.packing import PackedLinear
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.shared_model import draft_tokens, load_shared, save_shared, share_with_target
from tests.conftest import VOCABULARY, llama_config, tiny_model
from tests.drafters.test_draft_model import PROMPTS, SHAPES, decode, tokens_of

FREQUENT = torch.arange(0, VOCABULARY, 2).flip(0)


@pytest.fixture(scope="module")
def target(tiny_llama: PreTrainedModel) -> Target:
    model = copy.deepcopy(tiny_llama)
    model.get_output_embeddings().weight.data.mul_(4.0)
    return Target(model)


def student(target: Target, tokens: torch.Tensor | None = None, noise: float = 0.0) -> PreTrainedModel:
    """A copy of the target, its blocks somewhat changed, that shares its ends."""
    model = copy.deepcopy(target.model)
    generator = torch.Generator().manual_seed(3)
    for block in model.model.layers:
        for parameter in block.parameters():
            drawn = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data += noise * parameter.data.std() * drawn if parameter.dim() > 1 else 0
    share_with_target(model, target, tokens)
    return model


@pytest.fixture(scope="module")
def saved(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    save_shared(student(target, FREQUENT, 0.15), folder)
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_the_ends_are_the_targets_memory(tiny_llama: PreTrainedModel, tmp_path: Path, packed: bool):
    target = Target(copy.deepcopy(tiny_llama).float(), packed=packed)
    before = [{*vars(module)} for module in target.model.modules()]
    save_shared(student(target), tmp_path)
    drafter = DraftModel(model=tmp_path, gamma=3)
    drafter.bind(target)
    model: Any = drafter.draft.model
    assert model.get_input_embeddings().weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    head = model.get_output_embeddings()._held.module
    assert head.weight.data_ptr() == target.model.get_output_embeddings().weight.data_ptr()
    assert isinstance(head, PackedLinear) == packed == drafter.draft.packed
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear) == packed
    own = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert own != target.model.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert [{*vars(module)} for module in target.model.modules()] == before
    assert all(parameter.requires_grad for parameter in target.model.parameters())


def test_what_is_stored(target: Target, saved: Path):
    weights = load_file(saved / "model.safetensors")
    own = {key for key in target.model.state_dict() if "embed" not in key and "lm_head" not in key}
    assert weights.keys() == own | {"draft_tokens"}
    config = json.loads((saved / "config.json").read_text())
    assert config["shared_with_target"] == ["embedding", "lm_head"]
    assert (config["vocab_size"], config["dtype"]) == (VOCABULARY, "float64")
    loaded = load_shared(saved, target)
    assert draft_tokens(loaded).tolist() == FREQUENT.tolist()
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        expected = student(target, FREQUENT, 0.15)(input_ids=ids).logits
        assert expected.shape[-1] == len(FREQUENT)
        assert torch.equal(loaded(input_ids=ids).logits, expected)
    assert loaded.config.vocab_size == VOCABULARY and loaded.config.pad_token_id == 0


@pytest.mark.parametrize("shape", ["chain", "dynamic"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rule": "coupled", "temperature": 0.8, "top_k": 30, "seed": 5},
        {"repetition_penalty": 1.3, "bad_words_ids": [[4]]},
    ],
    ids=["greedy", "coupled", "processors"],
)
def test_the_text_is_that_of_plain_decoding(target: Target, saved: Path, shape: str, settings: dict[str, Any]):
    done = decode(target, DraftModel(model=saved, **SHAPES[shape]), **settings)
    assert tokens_of(done) == tokens_of(decode(target, "none", **settings))
    assert max(generation.stats.tau for generation in done) > 1.2


def test_drawn_drafts_have_their_law(target: Target):
    """A law that was not the draft's own would not be accepted in full where the draft is the target."""
    whole = student(target, torch.arange(VOCABULARY).flip(0))
    done = decode(target, DraftModel(model=whole, gamma=4), rule="rejection", temperature=0.9, max_new_tokens=11)
    assert [generation.stats.tau for generation in done] == [5.0] * 4


def test_all_blocks_and_all_tokens_are_always_accepted(target: Target, tmp_path: Path):
    save_shared(student(target), tmp_path)
    done = Decoder(target, DraftModel(model=tmp_path, gamma=4)).generate(
        PROMPTS, max_new_tokens=11, eos_token_id=[], batch_size=4
    )
    assert [generation.stats.tau for generation in done] == [5.0] * 4


def test_a_tree_is_no_wider_than_the_draft_vocabulary(target: Target, tmp_path: Path):
    save_shared(student(target, torch.tensor([3, 4])), tmp_path)
    with pytest.raises(InvalidRequest, match="3 children a context are too many: the models share 2 tokens"):
        DraftModel(model=tmp_path, tree=(3,)).bind(target)


def test_another_target_is_refused(target: Target, saved: Path, tiny_gpt2: PreTrainedModel):
    config = llama_config(layers=1, heads=4)
    config.vocab_size = 112
    cases = {
        r"config.json': 'hidden_size' is 32; the target's is 16": tiny_model(llama_config(layers=1, heads=2)),
        r"config.json': 'vocab_size' is 96; the target's is 112": tiny_model(config),
        r"config.json': 'model_type' is 'llama'; the target's is 'gpt2'": tiny_gpt2,
    }
    for message, model in cases.items():
        with pytest.raises(InvalidCheckpoint, match=message):
            DraftModel(model=saved).bind(Target(model))


def test_broken_files_are_refused(target: Target, saved: Path, tmp_path: Path):
    config = json.loads((saved / "config.json").read_text())
    weights = load_file(saved / "model.safetensors")

    def refused(message: str, fields: dict[str, Any], changes: dict[str, torch.Tensor | None]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        kept = {key: value for key, value in (weights | changes).items() if value is not None}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(InvalidCheckpoint, match=message):
            DraftModel(model=tmp_path).bind(target)

    norm = "model.norm.weight"
    refused(r"'shared_with_target' must be .* got \['embedding'\]", {"shared_with_target": ["embedding"]}, {})
    refused("no model can be as .*config.json' says", {"num_attention_heads": 0}, {})
    refused(f"model.safetensors': no '{norm}'; a LlamaForCausalLM needs it", {}, {norm: None})
    refused(f"'{norm}' is \\[31\\], expected \\[32\\]", {}, {norm: torch.ones(31)})
    refused("unknown key 'lm_head.weight'", {}, {"lm_head.weight": torch.ones(2, 2)})
    refused("model.safetensors': 'draft_tokens' must be distinct ids", {}, {"draft_tokens": torch.tensor([1, 1])})
    (tmp_path / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors' is truncated or no file of weights"):
        load_shared(tmp_path, target)
