"""Early exit: lossless, each layer run once for each verified token, full verification where none can be resumed."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.early_exit import NAME, EarlyExit
from draftwood.drafters.layer_choice import save_choice
from tests.core.test_views import assert_unchanged, snapshot
from tests.drafters.view_checks import PROMPTS, SHAPES, agreeing_model, watched


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return agreeing_model(contribution=0.2)


@pytest.fixture(scope="module")
def target(model) -> Target:
    return Target(model)


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_plain_decoding(target, shape, batch_size, exit_layer):
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=24, eos_token_id=[])
    decoder = Decoder(target, EarlyExit(exit_layer=exit_layer, **SHAPES[shape]))
    got = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], batch_size=batch_size)
    assert [one.tokens for one in got] == [one.tokens for one in plain]
    assert exit_layer == 1 or sum(one.stats.accepted_by_depth[0] for one in got) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_text_is_plain_coupled_text(target, shape):
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "eos_token_id": []}
    plain = Decoder(target, rule="coupled").generate(PROMPTS, **settings)
    got = Decoder(target, EarlyExit(exit_layer=2, **SHAPES[shape]), rule="coupled").generate(PROMPTS, **settings)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


@pytest.mark.parametrize("rule", ["greedy", "rejection", "traversal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_stays_the_targets(target, shape, rule):
    """In all layers, those of the draft included: what it wrote for accepted tokens is what the target keeps."""
    temperature = 0.0 if rule == "greedy" else 1.0
    drafter = EarlyExit(exit_layer=2, threshold=0.2, **SHAPES[shape])
    assert watched(target, drafter, PROMPTS, max_new_tokens=12, rule=rule, temperature=temperature)


@contextmanager
def counted(target: Target) -> Iterator[Counter[tuple[str, int]]]:
    """Counts, for each block, its calls and the columns they covered; and the LM head's."""
    counts: Counter[tuple[str, int]] = Counter()

    def note(part: int) -> Any:
        def hook(_module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = arguments[0] if arguments else named["hidden_states"]
            counts["calls", part] += 1
            counts["columns", part] += hidden.shape[0] * hidden.shape[1]

        return hook

    parts = {**dict(enumerate(target.blocks)), -1: target.model.get_output_embeddings()}
    handles = [module.register_forward_pre_hook(note(part), with_kwargs=True) for part, module in parts.items()]
    yield counts
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("exit_layer", [1, 3])
def test_a_verified_block_costs_each_layer_once(target, exit_layer):
    """E + (L - E) layers for every column, never L + E; and the head no more than drafting and verifying need."""
    decoder = Decoder(target, EarlyExit(exit_layer=exit_layer, gamma=5))
    with counted(target) as counts:
        result = decoder.generate(PROMPTS[2], max_new_tokens=1 + 12, eos_token_id=[])
    rounds, drafted, prompt = result.stats.rounds, result.stats.drafted, len(PROMPTS[2])
    verified = rounds + drafted  # columns of the verifications: the newest committed token and the draft of each round
    for layer in range(4):
        assert counts["columns", layer] == prompt + verified
        forwards = rounds + drafted if layer < exit_layer else rounds
        assert counts["calls", layer] == 1 + forwards
    assert counts["calls", -1] == 1 + drafted + rounds


def test_the_same_holds_for_trees(target):
    """Ragged in a batch, where a level is as wide as its widest row; the padding is the only thing run twice."""
    decoder = Decoder(target, EarlyExit(exit_layer=2, tree=(2, 2)))
    with counted(target) as counts:
        result = decoder.generate(PROMPTS[0], max_new_tokens=1 + 30, eos_token_id=[])
    whole = result.stats.drafted_by_depth[1]  # rounds with room for both levels, of 6 nodes each
    assert result.stats.drafted == 6 * whole + 2 * (result.stats.drafted_by_depth[0] - whole)
    for layer in range(4):
        assert counts["columns", layer] == len(PROMPTS[0]) + result.stats.rounds + result.stats.drafted


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_add_nothing_are_left_out_without_a_rejection(shape):
    drafter = EarlyExit(exit_layer=2, **SHAPES[shape])
    result = Decoder(Target(agreeing_model(contribution=0.0)), drafter).generate(
        PROMPTS, max_new_tokens=1 + 3 * 5, eos_token_id=[]
    )
    for one in result:
        if shape == "dynamic":  # the best nodes need not hold the whole of the most likely path, but hold its beginning
            assert one.stats.acceptance_by_depth[0] == 1.0
        else:
            assert one.stats.tau == (5.0 if shape == "chain" else 15 / 4)
            assert set(one.stats.acceptance_by_depth) == {1.0}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_that_cannot_be_resumed_is_verified_in_full(tiny_gpt2, shape):
    target = Target(tiny_gpt2)
    with pytest.warns(UserWarning, match="GPT2LMHeadModel cannot be entered at block 1 exactly") as noted:
        decoder = Decoder(target, EarlyExit(exit_layer=1, **SHAPES[shape]))
        got = decoder.generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
        decoder.generate(PROMPTS, max_new_tokens=2)
    assert len(noted) == 1
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
    assert [one.tokens for one in got] == [one.tokens for one in plain]


def test_a_model_that_can_be_resumed_gives_no_warning(target):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Decoder(target, EarlyExit(exit_layer=1)).generate(PROMPTS[0], max_new_tokens=4)


def test_a_feature_of_an_early_block_is_still_given(target):
    """A drafter beside it may ask for one: then the whole model runs, and the output is the same."""
    drafter = EarlyExit(exit_layer=3, gamma=3)
    drafter.features = frozenset({1})
    rounds = watched(target, drafter, PROMPTS, max_new_tokens=12)
    assert all(seen.scores.features[1].shape[1] == 1 + seen.proposal.tree.width for _, seen in rounds)


def test_the_model_is_left_alone(model):
    before = snapshot(model)
    Decoder(Target(model), EarlyExit(exit_layer=2)).generate(PROMPTS, max_new_tokens=12)
    assert_unchanged(model, before)


def test_the_file_of_a_search_is_loaded(target, tmp_path: Path):
    path = tmp_path / "exit.json"
    save_choice(path, target, NAME, {"exit_layer": 2}, {})
    drafter = Decoder(target, EarlyExit(exit_layer=path)).drafter
    assert drafter.view.layers == 2
    content = json.loads(path.read_text())
    for options, got in (({}, "None"), ({"exit_layer": True}, "True"), ({"exit_layer": "2"}, "'2'")):
        path.write_text(json.dumps(content | {"options": options}))
        with pytest.raises(InvalidCheckpoint, match=f"'exit_layer' must be a number of blocks, got {got}"):
            Decoder(target, EarlyExit(exit_layer=path))
    path.write_text(json.dumps(content | {"options": {"exit_layer": 4}}))
    with pytest.raises(InvalidRequest, match="exit_layer must be from 1 to 3 in this target, got 4"):
        Decoder(target, EarlyExit(exit_layer=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit_layer": 0}, "exit_layer must be a whole number >= 1 .* got 0"),
        ({"exit_layer": True}, "exit_layer must be a whole number .* or a file, got True"),
        ({"exit_layer": 4}, "from 1 to 3 in this target, got 4"),
        ({"exit_layer": 1.5}, "exit_layer must be a whole number .* or a file, got 1.5"),
        ({"exit_layer": 2, "threshold": -0.1}, r"threshold must be a number in \[0, 1\), got -0.1"),
        ({"exit_layer": 2, "tree": "wide"}, "tree must be 'chain', 'dynamic'"),
    ],
)
def test_bad_options(target, options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        Decoder(target, EarlyExit(**options))
