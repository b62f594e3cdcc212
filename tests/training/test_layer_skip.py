"""LayerSkip's formulas, its losses against views of the model, and what it does for early-exit drafts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.views import layer_view
from draftwood.decoder import Decoder
from draftwood.drafters.early_exit import EarlyExit
from draftwood.training import layer_skip
from draftwood.training.data import Document, Sequences, pack
from draftwood.training.layer_skip import Recipe, dropout_rates, exit_scales, train_layer_skip
from draftwood.training.loop import Schedule
from tests.architectures import build

WORDS = 40
FOLLOWS = torch.randperm(WORDS, generator=torch.Generator().manual_seed(5)).tolist()
"""The whole grammar of the language that is learnt: what follows each word."""

FAST = Schedule(steps=6, batch_size=2, accumulate=2, learning_rate=1e-2, seed=3, checkpoint_every=2)


def language(count: int, length: int = 40, seed: int = 0) -> list[list[int]]:
    """Returns texts of the language; each starts with a word of its own."""
    texts = [[word] for word in torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()]
    for text in texts:
        while len(text) < length:
            text.append(FOLLOWS[text[-1]])
    return texts


def sequences(count: int = 40, length: int = 40) -> Sequences:
    return pack([Document(text, [True] * length) for text in language(count, length)], length)


def llama(layers: int = 6, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Its LM head is its embedding, so that untrained exits repeat the newest token and not what follows it."""
    config = LlamaConfig(
        vocab_size=48,
        num_hidden_layers=layers,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def drafted_tokens(model: PreTrainedModel, exit_layer: int) -> float:
    """Returns the share of the early-exit drafter's tokens that are accepted; the text must be the language's."""
    decoder = Decoder(Target(model), EarlyExit(exit_layer=exit_layer, gamma=4, adaptive=False))
    prompts = language(10, length=4, seed=9)
    results = decoder.generate(prompts, max_new_tokens=20)
    wrong = sum(
        FOLLOWS[before] != token
        for prompt, result in zip(prompts, results, strict=True)
        for before, token in zip([prompt[-1], *result.tokens], result.tokens, strict=False)
        if before < WORDS
    )
    assert wrong <= 10, "the target has not learnt the language"
    drafted = sum(sum(result.stats.drafted_by_depth) for result in results)
    return sum(sum(result.stats.accepted_by_depth) for result in results) / drafted


def test_training_makes_early_exits_draft_well(tmp_path: Path):
    data = sequences(100)
    plain = Recipe(exit_layers=(2,), p_max=0.0, e_scale=0.0)
    first = Schedule(steps=60, batch_size=8, learning_rate=1e-2, warmup=10)
    model = train_layer_skip(llama(), data, tmp_path / "plain", first, plain)
    then = Schedule(steps=30, batch_size=8, learning_rate=3e-3, warmup=5)
    control = train_layer_skip(model, data, tmp_path / "control", then, plain)
    trained = train_layer_skip(model, data, tmp_path / "trained", then, Recipe(exit_layers=(2,), e_scale=0.5))
    before, without, after = (drafted_tokens(one, 2) for one in (model, control, trained))
    assert after >= 0.95
    assert before <= after - 0.3 and without <= after - 0.3, (before, without, after)
    lines = [json.loads(line) for line in (tmp_path / "trained" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 31))
    assert lines[-1]["exit 2"] < lines[0]["exit 2"] - 0.1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in saved.state_dict().items())


def untimed_log(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    assert [line.pop("seconds") for line in lines] == pytest.approx([0, 0, 0, 0, 0, 0], abs=60)
    return lines


class Stop(Exception):
    """What a run is stopped with."""


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path):
    data, model, recipe = sequences(), llama(4), Recipe(p_max=0.5)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 5:
            raise Stop

    whole = train_layer_skip(model, data, tmp_path / "whole", FAST, recipe)
    with pytest.raises(Stop):
        train_layer_skip(model, data, tmp_path / "stopped", FAST, recipe, on_step=stop)
    working = tmp_path / "stopped.training"
    assert not (tmp_path / "stopped").exists() and len((working / "log.jsonl").read_text().splitlines()) == 5
    (working / "checkpoint.pt.partial").write_bytes(b"a killed write")
    rest: list[int] = []
    done = train_layer_skip(
        model, data, tmp_path / "stopped", FAST, recipe, on_step=lambda entry: rest.append(entry["step"])
    )
    assert rest == [5, 6]  # the checkpoint was of step 4
    assert all(torch.equal(tensor, done.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert untimed_log(tmp_path / "stopped") == untimed_log(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped", "whole"]


def test_the_output_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data, model, output = sequences(), llama(4), tmp_path / "out"
    with monkeypatch.context() as patch:

        def fail(self: Any, place: Path) -> None:
            place.mkdir()
            (place / "config.json").write_text("{")
            raise Stop

        patch.setattr(PreTrainedModel, "save_pretrained", fail)
        with pytest.raises(Stop):
            train_layer_skip(model, data, output, FAST)
    assert not output.exists()
    train_layer_skip(model, data, output, FAST, on_step=lambda _: pytest.fail("all steps were done"))
    assert AutoModelForCausalLM.from_pretrained(output).config.num_hidden_layers == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_settings_do_not_go_on(tmp_path: Path):
    def stop(_: dict[str, Any]) -> None:
        raise Stop

    data, model = sequences(), llama(4)
    first = Schedule(steps=3, batch_size=2, checkpoint_every=1)
    with pytest.raises(Stop):
        train_layer_skip(model, data, tmp_path / "out", first, on_step=stop)
    for other, message in (
        ((data, Schedule(steps=4, batch_size=2, checkpoint_every=1), Recipe()), "other schedule"),
        ((data, first, Recipe(p_max=0.3)), "other loss"),
        ((sequences(20), first, Recipe()), "other data"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            train_layer_skip(model, other[0], tmp_path / "out", other[1], other[2])
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(InvalidRequest, match=r"other loss: .*'model'"):
        train_layer_skip(model, data, tmp_path / "out", first)


def test_formulas():
    # L = 5: e^(l ln 2 / 4) = 2^(l / 4)
    assert dropout_rates(5, 0.1) == pytest.approx(
        [0, 0.1 * (2**0.25 - 1), 0.1 * (2**0.5 - 1), 0.1 * (2**0.75 - 1), 0.1]
    )
    # 0, 1, 1 + 2, 1 + 2 + 3, and for the last one 4 + 0.5 (1 + 2 + 3)
    assert exit_scales(5, 0.5) == [0.0, 0.5, 1.5, 3.0, 7.0]
    recipe = Recipe(e_scale=0.5)
    assert recipe.exits(5) == (2, 3, 4)
    assert recipe.weights(5, (2, 4)) == pytest.approx([0.5 / 10.5, 3 / 10.5, 7 / 10.5])
    assert recipe.weights(5, ()) == [1.0]


def test_curricula():
    def turns(recipe: Recipe, layers: int, steps: int) -> list[tuple[int, ...]]:
        return [recipe.enabled(layers, step, steps) for step in range(steps)]

    assert turns(Recipe(rotation=2), 6, 3) == [(2, 4), (3, 5), (2, 4)]
    assert turns(Recipe(rotation=3), 6, 4) == [(2, 5), (4,), (3,), (2, 5)]
    assert turns(Recipe(exit_layers=(4, 2)), 6, 3) == [(2,), (4,), (2,)]
    # Four exits in 16 steps: one more every 16 / (2 x 4) steps, all from the middle on.
    gradual = turns(Recipe(curriculum="gradual"), 6, 16)
    assert gradual == [(5,)] * 2 + [(4, 5)] * 2 + [(3, 4, 5)] * 2 + [(2, 3, 4, 5)] * 10


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "gemma2", "opt", "gpt_neox", "cohere", "phi3", "mixtral", "falcon"]
)
def test_exits_are_what_views_of_the_model_say(family: str):
    """So that what is trained is what the drafter runs; and a dropped block is one that a view leaves out."""
    # The kernels of experts know no float64.
    model = build(family, torch.float32 if family == "mixtral" else torch.float64).requires_grad_(False)
    target, tokens = Target(model), torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])
    learnt = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    layers = target.layers
    kept = torch.ones(layers, 2, dtype=torch.bool)
    kept[1, 0] = False
    _, figures = layer_skip._loss(model, target.blocks, tokens, learnt, (2, 3), [0.2, 0.3, 0.5], kept)
    value, again = layer_skip._loss(model, target.blocks, tokens, learnt, (2, 3), [0.2, 0.3, 0.5], kept)
    assert again == figures and list(figures) == ["exit 2", "exit 3", "last"]
    expected = []
    for stop in (2, 3, layers):
        dropped = layer_view(target, 0, stop, skip_attention=[1], skip_mlp=[1])
        views = [dropped, layer_view(target, 0, stop)]
        losses = [
            nn.functional.cross_entropy(
                view.model(input_ids=tokens[row : row + 1], use_cache=False).logits[0, :-1][learnt[row, 1:]],
                tokens[row, 1:][learnt[row, 1:]],
                reduction="sum",
            )
            for row, view in enumerate(views)
        ]
        expected.append(float(sum(losses)) / int(learnt[:, 1:].sum()))
    assert list(figures.values()) == pytest.approx(expected, rel=1e-5)
    assert float(value) == pytest.approx(0.2 * expected[0] + 0.3 * expected[1] + 0.5 * expected[2], rel=1e-5)
    assert not any(module._forward_hooks for module in model.modules())


def test_blocks_are_dropped_as_often_as_asked():
    rates = dropout_rates(5, 0.5)
    kept = layer_skip._draw(rates, 20_000, torch.Generator().manual_seed(0))
    assert kept[0].all()
    assert (~kept).float().mean(1).tolist() == pytest.approx(rates, abs=0.015)


def test_the_models_own_weights_modes_and_noise_stay(tmp_path: Path):
    model = llama(4).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    noise = torch.random.get_rng_state()
    trained = train_layer_skip(model, sequences(), tmp_path / "out", FAST)
    assert torch.equal(noise, torch.random.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training and not trained.training
    assert all(parameter.grad is None for parameter in model.parameters())
    changed = [name for name, tensor in trained.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(changed) == len(before)


def test_bfloat16_stays_bfloat16(tmp_path: Path):
    trained = train_layer_skip(llama(4, torch.bfloat16), sequences(), tmp_path / "out", Schedule(steps=1, batch_size=1))
    assert trained.dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recipe(exit_layers=(2, 4)).exits(4), r"exit_layers must be from 2 to 3 .* got \[4\]"),
        (lambda: Recipe(exit_layers=(1,)).exits(4), r"got \[1\]"),
        (lambda: Recipe(exit_layers=()).exits(4), "got none"),
        (lambda: Recipe().exits(2), "at least 3 blocks, this one has 2"),
        (lambda: Recipe(p_max=1.0), r"p_max must be in \[0, 1\), got 1.0"),
        (lambda: Recipe(p_max=math.nan), "p_max"),
        (lambda: Recipe(e_scale=-1.0), "e_scale must be >= 0, got -1.0"),
        (lambda: Recipe(rotation=0), "rotation must be >= 1, got 0"),
        (lambda: Recipe(curriculum="sudden"), "'rotational' or 'gradual', got 'sudden'"),  # type: ignore[arg-type]
    ],
)
def test_bad_recipes(make: Any, message: str):
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_bad_input(tmp_path: Path):
    data, schedule = sequences(), Schedule(steps=1)
    with pytest.raises(InvalidRequest, match="exists"):
        train_layer_skip(llama(4), data, tmp_path, schedule)
    with pytest.raises(InvalidRequest, match="exit_layers must be from 2 to 3"):
        train_layer_skip(llama(4), data, tmp_path / "out", schedule, Recipe(exit_layers=(7,)))
    with pytest.raises(InvalidRequest, match="float16"):
        train_layer_skip(llama(4, torch.float16), data, tmp_path / "out", schedule)
    foreign = Sequences(data.tokens + 40, data.learnt)
    with pytest.raises(InvalidRequest, match="token 79, outside the target's vocabulary of 48"):
        train_layer_skip(llama(4), foreign, tmp_path / "out", schedule)
    assert list(tmp_path.iterdir()) == []
