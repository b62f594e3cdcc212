"""Students against the target they are cut from, losses against hand-computed ones, and what training is good for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from draftwood.core.errors import (
    InvalidCheckpoint,
    InvalidRequest,
    ModelNotFound,
    UnsupportedModel,
    VocabularyMismatch,
)
from draftwood.core.target import Target
from draftwood.core.views import layer_view
from draftwood.decoder import Decoder
from draftwood.training import draft_model_losses
from draftwood.training.data import Document, Sequences, pack, split
from draftwood.training.draft_model import DraftModelRecipe, train_draft_model
from draftwood.training.draft_model_losses import Distillation, divergence
from draftwood.training.features import OnlineFeatures
from draftwood.training.loop import Schedule, held_out
from draftwood.training.student import make_student, spread
from tests.architectures import build
from tests.conftest import VOCABULARY, tiny_model
from tests.study.tiny import tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAST = Schedule(steps=6, batch_size=4, learning_rate=3e-3, seed=3, checkpoint_every=2)


def llama(tied: bool, **settings: Any) -> PreTrainedModel:
    return tiny_model(LlamaConfig(**SIZES | {"tie_word_embeddings": tied} | settings))


def own_text(target: Target, count: int = 60, length: int = 24, seed: int = 0) -> Sequences:
    """Returns greedy texts of the target, of which the first three tokens are given and not learnt."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCABULARY, (count, 3), generator=generator).tolist()
    texts = Decoder(target).generate(prompts, max_new_tokens=length - 3)
    documents = [
        Document([*prompt, *text.tokens], [False] * 3 + [True] * len(text.tokens))
        for prompt, text in zip(prompts, texts, strict=True)
        if len(text.tokens) == length - 3
    ]
    assert len(documents) > count // 2
    return pack(documents, length)


def logits(model: PreTrainedModel, rows: int = 3) -> Tensor:
    ids = torch.randint(VOCABULARY, (rows, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gpt2", "smollm3", "olmo2", "opt"])
def test_a_student_of_all_layers_is_the_target_and_one_of_some_is_its_view(family: str):
    model = build(family)
    if model is None:
        pytest.skip(f"the installed transformers cannot build {family}")
    target = Target(model.double().eval())
    layers = range(target.layers)
    # Gemma rounds the scale of its embeddings to the type that it is built in.
    close = 1e-5 if family == "gemma" else 0.0
    assert (logits(make_student(target, layers)) - logits(target.model)).abs().max() <= close
    kept = [0, target.layers - 1]
    left_out = [layer for layer in layers if layer not in kept]
    view = layer_view(target, skip_attention=left_out, skip_mlp=left_out)
    assert (logits(make_student(target, kept)) - logits(view.model)).abs().max() <= close


def test_default_layers_are_evenly_spaced():
    assert spread(30, 4) == (0, 10, 19, 29)
    assert spread(30, 2) == (0, 29) and spread(30, 1) == (0,) and spread(3, 3) == (0, 1, 2)


def empty_directions(model: PreTrainedModel, kept: int, uniform_final: bool) -> None:
    """Leaves only `kept` directions of the hidden states in use, and gives every norm gains of its own."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    width, inner, size = 32, 48, 8
    rotation = torch.linalg.qr(noise(width, width)).Q
    keeps = rotation[:, :kept] @ rotation[:, :kept].T
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight @ keeps)
        for block in model.model.layers:
            block.self_attn.o_proj.weight.copy_(keeps @ block.self_attn.o_proj.weight)
            block.mlp.down_proj.weight.copy_(keeps @ block.mlp.down_proj.weight)
            # Of the heads, the second group with its queries; of the neurons, the odd ones.
            block.self_attn.o_proj.weight[:, : 2 * size] = 0
            block.mlp.down_proj.weight[:, range(0, inner, 2)] = 0
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight.copy_(1 + 0.5 * noise(width).tanh())
            for name, parameter in block.named_parameters():
                if name.endswith("bias"):
                    parameter.copy_(noise(len(parameter)))
                if name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.copy_(1 + 0.5 * noise(size).tanh())
        final = model.model.norm.weight
        final.copy_(torch.full_like(final, 1.7) if uniform_final else 1 + 0.5 * noise(width).tanh())
        if not model.config.tie_word_embeddings:
            # What the head reads counts as carried, and has to lie in the same directions.
            model.lm_head.weight.copy_(model.lm_head.weight @ keeps / final)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=False),
        LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-2),
        Qwen2Config(**SIZES, tie_word_embeddings=False),
        Qwen3Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-12),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen3-tied"],
)
def test_a_cut_of_the_width_is_exact_where_the_rest_carries_nothing(config: Any, tmp_path: Path):
    model = tiny_model(config)
    empty_directions(model, 16, uniform_final=config.tie_word_embeddings)
    target = Target(model)
    student = make_student(target, range(4), 16)
    # Their RMSNorm computes in float32, whatever the type.
    assert (logits(student) - logits(model)).abs().max() < 1e-5 * logits(model).std()
    assert student.config.hidden_size == 16 and student.num_parameters() < model.num_parameters() / 2
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(logits(loaded), logits(student))
    # One direction fewer than carries something is no longer exact.
    narrow = make_student(target, range(4), 14)
    assert (logits(narrow) - logits(model)).abs().max() > 1e-2 * logits(model).std()


def test_frequent_tokens_keep_their_embeddings():
    target = Target(llama(tied=True))
    counts = torch.zeros(VOCABULARY)
    counts[40:50] = 1e6
    table: Tensor = target.model.get_input_embeddings().weight.detach()

    def kept(counts: Tensor | None) -> float:
        student = make_student(target, [0], 16, counts)
        own = student.get_input_embeddings().weight.detach()
        return float((own[40:50].square().sum() / table[40:50].square().sum()).detach())

    assert kept(counts) > 0.999 and kept(None) < 0.9  # 10 tokens span fewer than 16 directions


def test_the_losses_against_hand_computed_ones():
    p, q = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5]
    log_p, log_q = torch.tensor([p, q]).double().log(), torch.tensor([q, q]).double().log()
    forward = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    reverse = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert divergence(log_p, log_q, "forward").tolist() == pytest.approx([forward, 0])
    assert divergence(log_p, log_q, "reverse").tolist() == pytest.approx([reverse, 0])
    assert divergence(log_p, log_q, "tv").tolist() == pytest.approx([0.3, 0])


def objective(target: Target, recipe: DraftModelRecipe, student: PreTrainedModel | None = None) -> Distillation:
    student = make_student(target, [0, 2]) if student is None else student
    return Distillation(student, OnlineFeatures(target, ["last"]), target, recipe.loss, recipe.cross_entropy)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", ["forward", "reverse", "tv"])
def test_loss_figures_and_gradients_are_those_of_plain_code(loss: Any, tied: bool, monkeypatch: pytest.MonkeyPatch):
    """Chunks of a few positions, learnt tokens only, and a share of cross-entropy."""
    monkeypatch.setattr(draft_model_losses, "POSITIONS", 7)
    target = Target(llama(tied))
    tokens = torch.randint(VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(2))
    learnt = torch.rand(3, 12, generator=torch.Generator().manual_seed(3)) < 0.6
    own = objective(target, DraftModelRecipe(loss=loss, cross_entropy=0.25))
    value, figures = own(Sequences(tokens, learnt).at(torch.arange(3)), 0, torch.Generator())
    (3 * value).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in own.named_parameters()}

    own.zero_grad()
    with torch.no_grad():
        p = target.model(input_ids=tokens).logits[:, :-1][learnt[:, 1:]].softmax(-1)
    q = own.student(input_ids=tokens).logits[:, :-1][learnt[:, 1:]].softmax(-1)
    labels = tokens[:, 1:][learnt[:, 1:]]
    entropy = -q[torch.arange(len(labels)), labels].log().mean()
    distance = {
        "forward": (p * (p / q).log()).sum(-1),
        "reverse": (q * (q / p).log()).sum(-1),
        "tv": 1 - torch.minimum(p, q).sum(-1),
    }[loss].mean()
    expected = 0.75 * distance + 0.25 * entropy
    assert value.item() == pytest.approx(expected.item())
    assert float(figures["acceptance"]) == pytest.approx(torch.minimum(p, q).sum(-1).mean().item())
    assert float(figures["agreement"]) == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    (3 * expected).backward()
    assert gradients.keys() == {name for name, _ in own.named_parameters()}
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12)
    with torch.no_grad():
        assert float(own(Sequences(tokens, learnt).at(torch.arange(3)), 0, torch.Generator())[0]) == value.item()


def test_the_target_itself_is_a_perfect_student():
    target = Target(llama(tied=True))
    own = objective(target, DraftModelRecipe(), make_student(target, range(4)))
    data = own_text(target, 8)
    value, figures = own(data.at(torch.arange(3)), 0, torch.Generator())
    assert float(value) == pytest.approx(0, abs=1e-12)
    assert float(figures["acceptance"]) == pytest.approx(1) and float(figures["agreement"]) == 1


def sharp(tied: bool = False) -> Target:
    """A target whose distributions are far from flat, with a tokenizer."""
    model = llama(tied)
    head: Any = model.get_output_embeddings()
    head.weight.data.mul_(3)
    model.generation_config.eos_token_id = None
    return Target(model, tiny_tokenizer(chat=False))


def committed(target: Target, student: str | Path | PreTrainedModel) -> float:
    """Returns how many tokens a round commits, on prompts that no training text begins with."""
    decoder = Decoder(target, "draft-model", drafter_options={"model": student, "gamma": 4})
    prompts = torch.randint(3, VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(99)).tolist()
    results = decoder.generate(prompts, max_new_tokens=21)
    return sum(one.stats.committed for one in results) / sum(one.stats.rounds for one in results)


@pytest.mark.parametrize(
    "recipe",
    [
        DraftModelRecipe(layers=1, held_out=0.2),
        DraftModelRecipe(layers=2, width=16, held_out=0.2, loss="reverse"),
        DraftModelRecipe(layers=2, held_out=0.2, loss="tv", gamma=2),
    ],
    ids=["forward", "narrow-reverse", "tv"],
)
def test_training_makes_a_student_draft_well(recipe: DraftModelRecipe, tmp_path: Path):
    target = sharp()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    kept = set(vars(target.model))
    data = own_text(target, 60)
    learnt, held = split(data, 0.2, 0)
    counts = torch.bincount(learnt.tokens.flatten(), minlength=VOCABULARY)
    untrained = make_student(target, recipe.blocks(4), recipe.width, counts)
    first = held_out(objective(target, recipe, untrained), held, 8)()
    lines: list[dict[str, Any]] = []
    schedule = Schedule(steps=60, batch_size=8, learning_rate=1e-2, warmup=3)
    trained = train_draft_model(target, data, tmp_path / "out", schedule, recipe, on_step=lines.append)
    last = lines[-1]["evaluation"]
    assert last["acceptance"] > first["acceptance"] + 0.1 and last["agreement"] > first["agreement"] + 0.1, (
        first,
        last,
    )
    for name, alpha in (("tau", last["acceptance"]), ("greedy tau", last["agreement"])):
        assert last[name] == pytest.approx(sum(alpha**power for power in range(recipe.gamma + 1)))
    tau, tau_before = committed(target, tmp_path / "out"), committed(target, untrained)
    assert tau > tau_before + 0.15, (tau, tau_before)
    assert not trained.training and not any(parameter.requires_grad for parameter in trained.parameters())
    assert target.model.state_dict().keys() == before.keys() and set(vars(target.model)) == kept
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in target.model.parameters())


class Stop(Exception):
    """What a run is stopped with."""


def test_a_stopped_run_goes_on_bit_for_bit_and_features_may_be_cached(tmp_path: Path):
    """Of a target with tied embeddings, which the student's checkpoint holds once."""
    target, recipe = sharp(tied=True), DraftModelRecipe(layers=2, width=16, held_out=3)
    data = own_text(target, 20)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 5:
            raise Stop

    whole = train_draft_model(target, data, tmp_path / "whole", FAST, recipe)
    with pytest.raises(Stop):
        train_draft_model(target, data, tmp_path / "out", FAST, recipe, on_step=stop)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidRequest, match="begun with other loss"):
        train_draft_model(target, data, tmp_path / "out", FAST, replace(recipe, loss="tv"))
    rest: list[dict[str, Any]] = []
    options: dict[str, Any] = {"cache": tmp_path / "cache", "on_step": rest.append}
    done = train_draft_model(target, data, tmp_path / "out", FAST, recipe, **options)
    assert [entry["step"] for entry in rest] == [5, 6]  # the checkpoint was of step 4
    assert all(torch.equal(tensor, done.state_dict()[name]) for name, tensor in whole.state_dict().items())
    settings = json.loads((tmp_path / "out" / "training.json").read_text())
    assert settings["evaluation"] == rest[-1]["evaluation"] and settings["keep_layers"] == [0, 3]
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["held-out", "training"]
    # The cache is what is read: features of zeros teach nothing of the target.
    for shard in (tmp_path / "cache" / "training").glob("shard-*"):
        shard.write_bytes(bytes(shard.stat().st_size))
    other = train_draft_model(target, data, tmp_path / "other", FAST, recipe, cache=tmp_path / "cache")
    assert not all(torch.equal(tensor, done.state_dict()[name]) for name, tensor in other.state_dict().items())


def test_what_is_saved(tmp_path: Path):
    target = sharp(tied=True)
    data = own_text(target, 20)
    one = replace(FAST, steps=1)
    recipe = DraftModelRecipe(keep_layers=(0, 1, 3), width=16, held_out=0)
    lines: list[dict[str, Any]] = []
    options: dict[str, Any] = {"save_dtype": torch.bfloat16, "on_step": lines.append}
    student = train_draft_model(target, data, tmp_path / "out", one, recipe, **options)
    assert student.dtype == torch.bfloat16 and "evaluation" not in lines[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in weights  # a tied embedding is saved once
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["dtype"]) == (3, 16, "bfloat16")
    loaded = Target.from_pretrained(tmp_path / "out")
    assert loaded.tokenizer is not None and loaded.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert torch.equal(logits(loaded.model), logits(student))


def test_a_student_is_trained_further_on_other_data(tmp_path: Path):
    """In a new run with a schedule of its own, which a stop does not change either."""
    target, recipe = sharp(tied=True), DraftModelRecipe(layers=2, width=16, held_out=3)
    train_draft_model(target, own_text(target, 20), tmp_path / "first", FAST, recipe, save_dtype=torch.float32)
    more, again = own_text(target, 40, seed=5), replace(FAST, seed=8, learning_rate=1e-2)
    rest = replace(recipe, layers=None, width=None)

    def further(name: str, recipe: DraftModelRecipe = rest, **options: Any) -> PreTrainedModel:
        schedule = options.pop("schedule", again)
        options = {"init": tmp_path / "first"} | options
        return train_draft_model(target, more, tmp_path / name, schedule, recipe, **options)

    lines: list[dict[str, Any]] = []
    further("measured", recipe=replace(rest, held_out=0), schedule=replace(again, steps=1), held=own_text(target, 9))
    settings = json.loads((tmp_path / "measured" / "training.json").read_text())
    assert settings["sequences"] == {"training": len(more), "held-out": len(own_text(target, 9))}
    assert settings["evaluation"]["agreement"] > 0
    nothing = replace(again, steps=1, learning_rate=1e-12)
    further("same", schedule=nothing, save_dtype=torch.float32, on_step=lines.append)
    found = [load_file(tmp_path / name / "model.safetensors") for name in ("first", "same")]
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=0, atol=1e-9)
    done = further("whole", on_step=lines.append)
    assert lines[-1]["evaluation"]["loss"] < lines[0]["evaluation"]["loss"]
    settings = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert settings["recipe"]["layers"] == 2 and settings["recipe"]["width"] == 16 and settings["init"]

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 5:
            raise Stop

    with pytest.raises(Stop):
        further("stopped", on_step=stop)
    with pytest.raises(InvalidRequest, match="begun with other loss"):
        further("stopped", init=tmp_path / "whole")
    stopped = further("stopped")
    assert all(torch.equal(tensor, stopped.state_dict()[name]) for name, tensor in done.state_dict().items())


def test_students_to_start_from_that_do_not_fit(tmp_path: Path):
    target, data = sharp(), Sequences(torch.ones(40, 8, dtype=torch.int64), torch.ones(40, 8, dtype=torch.bool))
    make_student(target, [0, 3], 16).save_pretrained(tmp_path / "first")
    target.tokenizer.save_pretrained(tmp_path / "first")

    def refused(error: type[Exception], message: str, name: str = "first", **sizes: Any) -> None:
        with pytest.raises(error, match=message):
            train_draft_model(target, data, tmp_path / "out", FAST, DraftModelRecipe(**sizes), init=tmp_path / name)

    refused(InvalidRequest, "has layers=2, not layers=3; leave it out", layers=3)
    refused(InvalidRequest, "has width=16, not width=24", width=24)
    refused(InvalidRequest, r"has its own blocks, not keep_layers=\(0, 3\)", keep_layers=(0, 3))
    refused(ModelNotFound, "no model at .*nowhere", name="nowhere")
    other = tiny_tokenizer(chat=False)
    other.add_tokens(["strange"])
    other.save_pretrained(tmp_path / "first")
    refused(VocabularyMismatch, "'strange' is token")
    tiny_model(LlamaConfig(**SIZES | {"vocab_size": VOCABULARY + 4})).save_pretrained(tmp_path / "large")
    target.tokenizer.save_pretrained(tmp_path / "large")
    refused(InvalidCheckpoint, f"large/config.json': 'vocab_size' is {VOCABULARY + 4}", name="large")
    weights = tmp_path / "large" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(InvalidCheckpoint, "cannot read the weights of .*large", name="large")
    weights.unlink()
    pickled = tmp_path / "large" / "pytorch_model.bin"
    torch.save([1, 2], pickled)
    refused(InvalidCheckpoint, r"pytorch_model\.bin' must hold tensors by name, got list", name="large")
    pickled.write_bytes(b"hello")
    refused(InvalidCheckpoint, r"pytorch_model\.bin' is truncated or no file of weights", name="large")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "layers must be a whole number >= 1"),
        ({"layers": 5}, "the target has 4 layers"),
        ({"keep_layers": (0, 4)}, r"from 0 to 3 in increasing order, got \[0, 4\]"),
        ({"keep_layers": (2, 1)}, "in increasing order"),
        ({"keep_layers": (1, 1)}, "in increasing order"),
        ({"keep_layers": ()}, "in increasing order"),
        ({"width": 0}, "width must be a whole number >= 1"),
        ({"width": 33}, "at most the target's 32"),
        ({"width": 25}, "leaves 4 of the target's 4 heads of 8.*try 24 or 28"),
        ({"loss": "l2"}, "forward, reverse, tv"),
        ({"cross_entropy": 1.5}, "cross_entropy"),
        ({"gamma": 0}, "gamma"),
        ({"held_out": 50}, "can be held out"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], message: str, tmp_path: Path):
    data = Sequences(torch.ones(40, 8, dtype=torch.int64), torch.ones(40, 8, dtype=torch.bool))
    with pytest.raises(InvalidRequest, match=message):
        train_draft_model(Target(llama(tied=False)), data, tmp_path / "out", FAST, DraftModelRecipe(**options))
    assert not list(tmp_path.iterdir())


def test_data_and_output_that_do_not_fit(tmp_path: Path):
    target = Target(llama(tied=False))
    data = Sequences(torch.full((40, 8), VOCABULARY), torch.ones(40, 8, dtype=torch.bool))
    with pytest.raises(InvalidRequest, match=f"token {VOCABULARY}, outside the target's vocabulary of {VOCABULARY}"):
        train_draft_model(target, data, tmp_path / "out", FAST)
    (tmp_path / "out").mkdir()
    with pytest.raises(InvalidRequest, match="exists"):
        train_draft_model(target, data, tmp_path / "out", FAST)


@pytest.mark.parametrize("family", ["gpt2", "gemma", "olmo2", "cohere", "phi3", "mixtral"])
def test_a_width_that_would_be_cut_wrongly_is_refused(family: str):
    model = build(family)
    if model is None:
        pytest.skip(f"the installed transformers cannot build {family}")
    with pytest.raises(UnsupportedModel, match="cannot be cut"):
        make_student(Target(model.float().eval()), [0], 16)
