"""EAGLE: what heads learn from, that this is what they meet when they draft, and that the target stays as it is."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import GemmaConfig, GPT2Config, PreTrainedModel

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound, UnsupportedModel
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.decoder import Decoder
from draftwood.drafters.eagle.drafter import Eagle
from draftwood.drafters.eagle.formats import load_head
from draftwood.drafters.eagle.network import Eagle3Head
from draftwood.drafters.eagle.probe import measure_agreement
from draftwood.drafters.medusa.trees import expected_tau, greedy_tree
from draftwood.training.data import Sequences
from draftwood.training.eagle import AnyHead, EagleRecipe, make_head, train_eagle
from draftwood.training.eagle_losses import Evaluation, Weights, feature_names, unroll
from draftwood.training.features import OnlineFeatures
from draftwood.training.loop import Schedule
from tests.conftest import llama_config, tiny_model
from tests.drafters.eagle.heads import sure_target, true_features
from tests.training.test_eagle_losses import marked
from tests.training.test_medusa import FOLLOWS, WORDS, llama, sequences, settings_of, untimed

RECIPES = {
    "eagle": EagleRecipe(held_out=6, depth=3),
    "aligned": EagleRecipe(unroll=2, held_out=6, depth=3),
    "eagle3": EagleRecipe(3, unroll=3, layers=(0, 1, 2), held_out=6, depth=3),
}
FAST = Schedule(steps=4, batch_size=4, accumulate=2, learning_rate=1e-2, seed=3, checkpoint_every=2, clip=0.5)


@cache
def speaker() -> PreTrainedModel:
    """A model that speaks the language of `sequences`, and is never quite sure."""
    model: Any = llama()
    tokens = sequences(120).tokens
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(40):
        loss = F.cross_entropy(model(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()  # type: ignore[no-any-return]


@pytest.fixture
def target() -> Target:
    return Target(speaker())


def figures_of(target: Target, head: AnyHead, steps: int = 3) -> dict[str, float]:
    source = OnlineFeatures(target, feature_names(head))
    return Evaluation(head, source, head_of(target), sequences(), 16, steps, 12)()


@pytest.mark.parametrize("name", RECIPES)
def test_heads_learn_what_follows_and_the_target_stays_as_it_is(target: Target, tmp_path: Path, name: str):
    model, recipe = target.model, RECIPES[name]
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    settings = settings_of(model)
    lines: list[dict[str, Any]] = []
    schedule = Schedule(steps=75, batch_size=16, learning_rate=2e-2, warmup=5, eval_every=25, clip=0.5)
    fresh = figures_of(target, make_head(target, sequences(), recipe))
    train_eagle(target, sequences(120), tmp_path / "head", schedule, recipe, on_step=lines.append, base_model="tiny")
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert settings_of(model) == settings

    start, *measured = [line["evaluation"] for line in lines if "evaluation" in line]
    assert start["step 1 top-1"] < 0.4
    unigram = 2 / WORDS  # no word is learnt twice as often as another
    best = measured[-1]
    for step in range(1, 1 + (recipe.unroll or 1)):
        assert best[f"step {step} top-1"] >= 0.8 > 0.4 > max(fresh[f"step {step} top-1"], unigram)
        assert best[f"step {step} loss"] < measured[0][f"step {step} loss"] < fresh[f"step {step} loss"]
        assert best[f"step {step} acceptance"] > 0.45 > fresh[f"step {step} acceptance"]
    assert len(measured) == 3
    assert 1.8 < best["chain tau"] <= best["expected tau"] <= 4.0

    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert [rates[0] for rates in config["accuracies"]] == [best[f"step {step} top-1"] for step in (1, 2, 3)]
    assert expected_tau(greedy_tree(config["accuracies"], 12), config["accuracies"]) == best["expected tau"]
    assert config["base_model_name_or_path"] == "tiny"
    told = json.loads((tmp_path / "head" / "training.json").read_text())
    assert told["evaluation"] == best and told["schedule"]["steps"] == 75
    assert told["sequences"] == {"training": 114, "held-out": 6, "length": 12}
    assert not (tmp_path / "head.training").exists()
    prompts = [[word, FOLLOWS[word]] for word in range(5)]
    plain = Decoder(target).generate(prompts, max_new_tokens=12)
    drafted = Decoder(target, Eagle(checkpoint=tmp_path / "head")).generate(prompts, max_new_tokens=12)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert sum(one.stats.tau for one in drafted) / 5 > 1.5


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["aligned", "eagle3"])
def test_a_stopped_run_ends_as_an_uninterrupted_one(target: Target, tmp_path: Path, name: str):
    recipe = RECIPES[name]
    whole = train_eagle(target, sequences(), tmp_path / "whole", FAST, recipe)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_eagle(target, sequences(), tmp_path / "stopped", FAST, recipe, on_step=stop)
    assert not (tmp_path / "stopped").exists()
    with pytest.raises(InvalidRequest, match="begun with other loss"):
        train_eagle(target, sequences(), tmp_path / "stopped", FAST, replace(recipe, decay=0.3))
    assert same(whole, train_eagle(target, sequences(), tmp_path / "stopped", FAST, recipe))
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")
    files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir() if file.name != "log.jsonl"}
    assert files == {name: (tmp_path / "stopped" / name).read_bytes() for name in files}
    assert set(files) == {"config.json", "model.safetensors", "training.json"}


def test_cached_features_teach_the_same(target: Target, tmp_path: Path):
    recipe, told = RECIPES["eagle3"], []
    online = train_eagle(target, sequences(), tmp_path / "online", FAST, recipe)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "on_features": lambda done, total: told.append(total)}
    cached = train_eagle(target, sequences(), tmp_path / "cached", FAST, recipe, **options)
    for one, other in zip(online.parameters(), cached.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert {34, 6} <= set(told)


def test_training_goes_on_from_a_saved_head(target: Target, tmp_path: Path):
    recipe = replace(RECIPES["eagle3"], draft_vocabulary=20)
    first = train_eagle(target, sequences(), tmp_path / "first", FAST, recipe)
    lines: list[dict[str, Any]] = []
    once, own = replace(FAST, steps=1), replace(RECIPES["eagle3"], layers=None)
    options: dict[str, Any] = {"init": tmp_path / "first", "on_step": lines.append}
    then = train_eagle(target, sequences(), tmp_path / "then", once, own, **options)
    assert not same(first, then) and isinstance(then, Eagle3Head)
    assert then.feature_names == (0, 1, 2) and then.draft_tokens is not None and len(then.draft_tokens) == 20
    assert lines[0]["step 1 loss"] == pytest.approx(untimed(tmp_path / "first")[-1]["step 1 loss"], rel=0.2)
    for wrong, said in (
        (replace(own, draft_vocabulary=9), "draft_vocabulary=20, not 9"),
        (replace(own, layers=(1, 2)), r"layers=\(0, 1, 2\), not \(1, 2\)"),
        (RECIPES["eagle"], "version=3, not 1"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            train_eagle(target, sequences(), tmp_path / "x", FAST, wrong, init=tmp_path / "first")
    with pytest.raises(ModelNotFound, match="nowhere"):
        train_eagle(target, sequences(), tmp_path / "x", FAST, own, init=tmp_path / "nowhere")
    (tmp_path / "first" / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        train_eagle(target, sequences(), tmp_path / "x", FAST, own, init=tmp_path / "first")


def varied_target() -> Target:
    """Like `sure_target`, its norms' gains all different."""
    model = tiny_model(llama_config(layers=3, heads=4))
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
    return Target(model)


def test_a_fresh_head_guesses_what_the_target_guessed_a_token_before():
    target, texts = varied_target(), marked().tokens
    for recipe in (
        EagleRecipe(),
        EagleRecipe(3, layers=(0, 1, 3)),
        EagleRecipe(3, layers=(0, 1, 2), start="block"),
        EagleRecipe(3, layers=(0, 1, 2), start="block", draft_vocabulary=40),
    ):
        head = make_head(target, marked(), recipe)
        features, expected = true_features(head, target, texts)
        with torch.no_grad():
            logits = head.logits(unroll(head, texts, features, 1)[0])
        ids = slice(None) if head.draft_tokens is None else head.draft_tokens
        torch.testing.assert_close(logits, expected[:, :-2, ids], rtol=1e-4, atol=1e-5)


def test_agreement_is_that_of_the_guesses_behind_the_same_token():
    target, texts = varied_target(), marked().tokens
    head = make_head(target, marked(), EagleRecipe(3, layers=(0, 1, 3)))
    guesses = target.model(texts).logits.argmax(-1)
    a_token_before = (guesses[:, :-1] == guesses[:, 1:]).double().mean()
    assert measure_agreement(head, target, texts.tolist()) == pytest.approx(float(a_token_before))


def test_the_last_block_reads_the_normed_feature_as_it_reads_its_own_input():
    target = varied_target()
    head: Any = make_head(target, marked(), EagleRecipe(start="block"))
    x = torch.randn(4, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block, own = target.blocks[-1], head.layers[0]
    decoder: Any = target.decoder
    feature = decoder.norm(x)
    for name in ("q_proj", "k_proj", "v_proj"):
        expected = getattr(block.self_attn, name)(block.input_layernorm(x))
        torch.testing.assert_close(getattr(own.self_attn, name)(feature), expected, rtol=1e-4, atol=1e-5)
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(getattr(own.mlp, name).weight, getattr(block.mlp, name).weight)
    for last in (own.self_attn.o_proj, own.mlp.down_proj):
        assert not last.weight.any()
    seeded = [make_head(target, marked(), EagleRecipe(start="random"), seed=seed) for seed in (1, 1, 2)]
    assert same(seeded[0], seeded[1]) and not same(seeded[0], seeded[2])


@pytest.mark.parametrize("version", [1, 3])
def test_bfloat16_targets_are_trained_for_in_float32(tmp_path: Path, version: int):
    target = Target(copy.deepcopy(speaker()).to(torch.bfloat16))
    recipe = EagleRecipe(version, layers=(0, 1, 2) if version == 3 else None, held_out=6, unroll=2, start="block")
    recipe = replace(recipe, draft_vocabulary=WORDS)
    assert next(make_head(target, sequences(), recipe).parameters()).dtype == torch.float32
    layout: Any = "yuhuili" if version == 1 else "speculators"
    schedule = replace(FAST, steps=15)
    trained = train_eagle(target, sequences(), tmp_path / "head", schedule, recipe, layout=layout)
    assert next(trained.parameters()).dtype == torch.bfloat16
    assert same(trained, load_head(tmp_path / "head", target))
    log = untimed(tmp_path / "head")
    assert sum(line["loss"] for line in log[-3:]) < 0.95 * sum(line["loss"] for line in log[:3]) < 60


FAMILIES: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None),
    "gemma": GemmaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_other_families(tmp_path: Path, family: str):
    target = Target(tiny_model(FAMILIES[family]).float())
    for version in (1, 3):
        recipe, schedule = EagleRecipe(version, unroll=2, held_out=6), replace(FAST, steps=15)
        fresh = figures_of(target, make_head(target, sequences(), recipe))
        head = train_eagle(target, sequences(), tmp_path / str(version), schedule, recipe)
        assert figures_of(target, head)["step 1 loss"] < fresh["step 1 loss"]
        drafted = Decoder(target, Eagle(checkpoint=tmp_path / str(version))).generate([[1, 2]], max_new_tokens=6)
        assert drafted[0].tokens == Decoder(target).generate([[1, 2]], max_new_tokens=6)[0].tokens


def test_a_block_that_is_no_llamas_cannot_be_started_from():
    target = Target(tiny_model(FAMILIES["gpt2"]).float())
    with pytest.raises(UnsupportedModel, match="not built as a Llama's"):
        make_head(target, sequences(), EagleRecipe(start="block"))


def test_papers_defaults():
    assert EagleRecipe().resolved() == (1, Weights(1.0, 1.0, 0.1, 0.2))
    assert EagleRecipe(3).resolved() == (7, Weights(0.8, 0.0, 1.0, 0.0))
    own = EagleRecipe(unroll=3, decay=0.0, feature_weight=0.0, entropy_weight=2.0, noise=0.0)
    assert own.resolved() == (3, Weights(0.0, 0.0, 2.0, 0.0))
    head = make_head(sure_target(), marked(), EagleRecipe(3))
    assert head.feature_names == (2, 1, 0)  # of three blocks: 2, 3 // 2 and 3 - 3


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"version": 2}, "version must be 1 .* or 3, got 2"),
        ({"unroll": 0}, "unroll must be a whole number >= 1, got 0"),
        ({"unroll": 11}, "training data is to be learnt by step 11"),
        ({"depth": 11}, "held-out data is to be learnt by step 11"),
        ({"draft_vocabulary": 33}, "draft_vocabulary must be <= 32"),
        ({"start": "warm"}, "start must be 'feature', 'block' or 'random', got 'warm'"),
        ({"decay": 1.5}, "decay must be a number in"),
        ({"noise": -1.0}, "noise must be a number in"),
        ({"layers": (1,)}, "layers are for EAGLE-3"),
        ({"version": 3, "layers": ()}, "at least one layer"),
        ({"version": 3, "layers": (1, 3)}, "block 3, the target has 2 blocks"),
        ({"version": 3, "feature_weight": 1.0}, "feature_weight is for EAGLE-1"),
        ({"recompute": "no"}, "recompute must be True or False"),
        ({"held_out": 40}, "1 to 39 can be held out"),
    ],
)
def test_recipes_that_cannot_work(target: Target, tmp_path: Path, recipe: dict[str, Any], said: str):
    with pytest.raises(InvalidRequest, match=said):
        train_eagle(target, sequences(), tmp_path / "x", FAST, EagleRecipe(**{"held_out": 6, **recipe}))
    assert list(tmp_path.iterdir()) == []


def test_data_and_layouts_that_cannot_work(target: Target, tmp_path: Path):
    good = sequences()
    outside = good.tokens.clone()
    outside[3, 4] = 32
    with pytest.raises(InvalidRequest, match="token 32, outside the target's vocabulary of 32"):
        train_eagle(target, Sequences(outside, good.learnt), tmp_path / "x", FAST)
    for layout, recipe in (("speculators", RECIPES["eagle"]), ("gguf", RECIPES["eagle3"])):
        with pytest.raises(InvalidRequest, match="layout must be 'yuhuili'"):
            train_eagle(target, good, tmp_path / "x", FAST, recipe, layout=layout)  # type: ignore[arg-type]
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidRequest, match="there' exists"):
        train_eagle(target, good, tmp_path / "there", FAST)
