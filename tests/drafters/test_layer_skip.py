"""Layer skipping: lossless, on the target's own cache, with the distribution of the model that skips the layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.loading import load_model
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.core.views import layer_view
from draftwood.decoder import Decoder
from draftwood.drafters.layer_choice import save_choice
from draftwood.drafters.layer_skip import NAME, LayerSkip
from draftwood.drafters.view_draft import StopThreshold
from tests.conftest import VOCABULARY
from tests.core.test_views import assert_unchanged, nulled, snapshot
from tests.drafters.test_early_exit import counted
from tests.drafters.view_checks import PROMPTS, SHAPES, agreeing_model, watched

SKIP = {"attention": [2, 3], "mlp": [2]}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return agreeing_model(contribution=0.2)


@pytest.fixture(scope="module")
def target(model) -> Target:
    return Target(model)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_plain_decoding(target, shape, batch_size):
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=24, eos_token_id=[])
    decoder = Decoder(target, LayerSkip(skip=SKIP, **SHAPES[shape]))
    got = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], batch_size=batch_size)
    assert [one.tokens for one in got] == [one.tokens for one in plain]
    assert sum(one.stats.accepted_by_depth[0] for one in got if one.stats.accepted_by_depth) > 0
    assert any(one.stats.drafted > sum(one.stats.accepted_by_depth) for one in got)


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_text_is_plain_coupled_text(target, shape):
    settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "eos_token_id": []}
    plain = Decoder(target, rule="coupled").generate(PROMPTS, **settings)
    got = Decoder(target, LayerSkip(skip=SKIP, **SHAPES[shape]), rule="coupled").generate(PROMPTS, **settings)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


@pytest.mark.parametrize("rule", ["greedy", "rejection", "traversal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_stays_the_targets(target, shape, rule):
    temperature = 0.0 if rule == "greedy" else 1.0
    drafter = LayerSkip(skip=SKIP, **SHAPES[shape])
    assert watched(target, drafter, PROMPTS, max_new_tokens=12, rule=rule, temperature=temperature)


def test_the_law_is_that_of_the_model_that_skips(model, target):
    """The text was read by the whole target, the drafted tokens only by the view."""
    rounds = watched(target, LayerSkip(skip=SKIP, gamma=3, threshold=0.0), PROMPTS, max_new_tokens=12, temperature=1)
    skipping = Target(nulled(model, SKIP))
    for texts, seen in rounds:
        tree, law = seen.proposal.tree, seen.proposal.law
        assert law is not None
        for row, text in enumerate(texts):
            cache = target.new_cache(1)
            with torch.inference_mode():
                target.score(cache, [text[:-1]], TokenTree.empty(1))
                size = tree.sizes[row]
                logits = skipping.score(cache, [text[-1:]], TokenTree.chain(tree.tokens[row : row + 1, :size])).logits
            q = logits[0, :size].softmax(-1).float()
            torch.testing.assert_close(law[row, :size], q, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_sublayers_that_add_nothing_are_skipped_without_a_rejection(shape):
    target = Target(agreeing_model(contribution=0.0))
    drafter = LayerSkip(skip={"attention": [2], "mlp": [2, 3]}, threshold=0.0, **SHAPES[shape])
    result = Decoder(target, drafter).generate(PROMPTS, max_new_tokens=1 + 3 * 5, eos_token_id=[])
    for one in result:
        if shape == "dynamic":  # the best nodes need not hold the whole of the most likely path, but hold its beginning
            assert one.stats.acceptance_by_depth[0] == 1.0
        else:
            assert one.stats.tau == (5.0 if shape == "chain" else 15 / 4)
            assert set(one.stats.acceptance_by_depth) == {1.0}


def test_there_is_one_cache(target, monkeypatch):
    made = []
    new_cache = Target.new_cache
    monkeypatch.setattr(Target, "new_cache", lambda *arguments: made.append(1) or new_cache(*arguments))
    decoder = Decoder(target, LayerSkip(skip=SKIP))
    made.clear()  # the view was tried on one
    decoder.generate(PROMPTS, max_new_tokens=12)
    assert len(made) == 1


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.999])
def test_a_chain_stops_behind_the_first_unsure_token(target, threshold):
    drafter = LayerSkip(skip=SKIP, gamma=6, threshold=threshold, adaptive=False)
    view = layer_view(target, skip_attention=SKIP["attention"], skip_mlp=SKIP["mlp"])
    lengths = []
    for texts, seen in watched(target, drafter, PROMPTS, max_new_tokens=20, eos_token_id=[]):
        tree = seen.proposal.tree
        for row, text in enumerate(texts):
            cache = target.new_cache(1)
            with torch.inference_mode():
                target.score(cache, [text[:-1]], TokenTree.empty(1))
                size = tree.sizes[row]
                logits = view.score(cache, [text[-1:]], TokenTree.chain(tree.tokens[row : row + 1, :size])).logits
            sure = (logits[0].softmax(-1).amax(-1) >= threshold).tolist()
            room = 20 - (len(text) - len(PROMPTS[seen_row(texts, row)])) - 1
            assert all(sure[: size - 1])
            assert size == min(6, room) or not sure[size - 1]
            lengths.append(size)
    assert max(lengths) == (1 if threshold == 0.999 else 6)
    assert (len(set(lengths) - {0}) > 1) == (threshold != 0.999)


def seen_row(texts: list[list[int]], row: int) -> int:
    """Which prompt a text began with: no prompt is the beginning of another."""
    (found,) = [index for index, prompt in enumerate(PROMPTS) if texts[row][: len(prompt)] == prompt]
    return found


def test_the_threshold_adapts_as_the_paper_says():
    stop = StopThreshold(0.8)
    stop.update(3, 4, full=False)  # running acceptance 0.375: stricter
    assert stop.acceptance == pytest.approx(0.375)
    assert stop.value == pytest.approx(0.9 * 0.8 + 0.1 * 0.81)
    stop.acceptance = 1.0
    stop.update(4, 4, full=False)  # above 0.9: looser
    assert stop.value == pytest.approx(0.9 * 0.801 + 0.1 * 0.791)
    stop.update(4, 4, full=True)  # the draft could not have been longer
    assert stop.value == pytest.approx(0.8)
    stop.update(0, 1, full=True)
    assert (stop.acceptance, stop.value) == (0.5, pytest.approx(0.801))


def test_a_threshold_that_was_missed_for_long_comes_back_at_once():
    stop = StopThreshold(0.8)
    for _ in range(1000):
        stop.update(0, 1, full=False)
    assert stop.value == 1.0
    for _ in range(5):
        stop.update(1, 1, full=False)
    assert stop.value < 1.0


def test_a_draft_that_stopped_for_its_length_is_known_as_such(target, monkeypatch):
    told = []
    monkeypatch.setattr(StopThreshold, "update", lambda self, accepted, drafted, full: told.append((drafted, full)))
    Decoder(target, LayerSkip(skip=SKIP, gamma=3, threshold=0.3)).generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
    assert set(told) == {(1, False), (2, False), (3, True)}


@pytest.mark.parametrize("shape", ["chain", "branching"])
def test_a_draft_runs_the_view_once_a_level(target, shape):
    """Never for the leaves: nobody needs what comes after them."""
    decoder = Decoder(target, LayerSkip(skip=SKIP, threshold=0.0, **SHAPES[shape]))
    with counted(target) as counts:
        stats = decoder.generate(PROMPTS[0], max_new_tokens=1 + 20, eos_token_id=[]).stats
    assert counts["calls", 0] == 1 + stats.rounds + sum(stats.drafted_by_depth)


def test_rows_adapt_for_themselves(target, monkeypatch):
    """A text is the same, and drafted the same way, alone and in a batch whose rows come and go."""
    monkeypatch.setattr(StopThreshold, "STEP", 0.3)
    monkeypatch.setattr(StopThreshold, "INERTIA", 0.5)
    lengths = [{"max_new_tokens": count} for count in (30, 10, 20, 25)]
    drafted = {}
    for adaptive in (True, False):
        decoder = Decoder(target, LayerSkip(skip=SKIP, gamma=6, threshold=0.3, adaptive=adaptive))
        together = decoder.generate(PROMPTS, per_prompt=lengths, batch_size=2, eos_token_id=[])
        for prompt, length, one in zip(PROMPTS, lengths, together, strict=True):
            alone = decoder.generate(prompt, **length, eos_token_id=[])
            assert one.tokens == alone.tokens
            assert one.stats.drafted_by_depth == alone.stats.drafted_by_depth
        drafted[adaptive] = [one.stats.drafted for one in together]
    assert all(strict < fixed for strict, fixed in zip(drafted[True], drafted[False], strict=True))


def test_a_level_may_be_wider_than_the_vocabulary(target):
    """Every continuation is then drafted, so that the first token never misses."""
    got = Decoder(target, LayerSkip(skip=SKIP, tree=(VOCABULARY + 4,))).generate(PROMPTS[0], max_new_tokens=6)
    assert got.tokens == Decoder(target).generate(PROMPTS[0], max_new_tokens=6).tokens
    assert got.stats.acceptance_by_depth == [1.0]
    assert got.stats.drafted == VOCABULARY * got.stats.accepted_by_depth[0]


def test_models_with_positions_of_their_own(tiny_gpt2):
    target = Target(tiny_gpt2)
    plain = Decoder(target).generate(PROMPTS, max_new_tokens=20)
    got = Decoder(target, LayerSkip(skip={"attention": [1]}, gamma=3)).generate(PROMPTS, max_new_tokens=20)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


def test_the_model_is_left_alone(model):
    before = snapshot(model)
    Decoder(Target(model), LayerSkip(skip=SKIP)).generate(PROMPTS, max_new_tokens=12)
    assert_unchanged(model, before)


def test_the_file_of_a_search_is_loaded(target, tmp_path: Path):
    path = tmp_path / "new" / "skip.json"
    save_choice(path, target, NAME, SKIP, {"value": 1.5})
    by_file = Decoder(target, LayerSkip(skip=path)).generate(PROMPTS, max_new_tokens=20)
    by_hand = Decoder(target, LayerSkip(skip=SKIP)).generate(PROMPTS, max_new_tokens=20)
    assert [one.stats.accepted_by_depth for one in by_file] == [one.stats.accepted_by_depth for one in by_hand]
    assert not list(path.parent.glob("*.partial"))


def test_a_file_for_another_model_is_refused(target, tiny_gpt2, tmp_path: Path):
    path = tmp_path / "skip.json"
    save_choice(path, target, NAME, SKIP, {})
    with pytest.raises(InvalidCheckpoint, match=r"skip.json was made for another model.*'llama'.*this target.*'gpt2'"):
        Decoder(Target(tiny_gpt2), LayerSkip(skip=path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "has no 'drafter'"),
        ({"target": None}, "another model: None"),
        ({"drafter": "early-exit"}, "for the drafter 'early-exit', not for 'layer-skip'"),
        ({"options": [1]}, "'options' must be an object"),
        ({"options": {"attention": "1"}}, "must be a list of block numbers"),
        ({"options": {"attention": [7]}}, r"cannot skip the attention of \[7\]"),
    ],
)
def test_broken_files(target, tmp_path: Path, content, message: str):
    path = tmp_path / "skip.json"
    save_choice(path, target, NAME, SKIP, {})
    whole = json.loads(path.read_text())
    path.write_text(content if isinstance(content, str) else json.dumps(whole | content))
    with pytest.raises((InvalidCheckpoint, InvalidRequest), match=message):
        Decoder(target, LayerSkip(skip=path))


def test_a_missing_file(target, tmp_path: Path):
    with pytest.raises(InvalidCheckpoint, match=r"cannot read .*no.json: .*`draftwood search layer-skip` writes"):
        Decoder(target, LayerSkip(skip=tmp_path / "no.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip": {"attention": [4]}}, r"blocks 0 to 3; cannot skip the attention of \[4\]"),
        ({"skip": {"attention": [0, 1, 2, 3], "mlp": [0, 1, 2, 3]}}, "every sub-layer of blocks 0 to 3 is skipped"),
        ({"skip": {}}, "skips nothing"),
        ({"skip": {"attention": [], "mlp": []}}, "skips nothing"),
        ({"skip": {"attn": [1]}}, "must be like"),
        ({"skip": [1, 2]}, "must be like"),
        ({"skip": {"mlp": [0.5]}}, "'mlp' must be a list of block numbers"),
        ({"skip": {"mlp": [True]}}, "'mlp' must be a list of block numbers"),
        ({"skip": {"mlp": 1}}, "'mlp' must be a list of block numbers, got 1"),
        ({"skip": SKIP, "threshold": 1.0}, r"threshold must be a number in \[0, 1\), got 1.0"),
        ({"skip": SKIP, "threshold": "a"}, "threshold must be a number in .* got 'a'"),
        ({"skip": SKIP, "gamma": 0}, "gamma must be a whole number >= 1, got 0"),
        ({"skip": SKIP, "tree": "chain", "nodes": 3}, "does not use them"),
        ({"skip": SKIP, "tree": (2, 0)}, "each level of tree must be a whole number >= 1, got 0"),
    ],
)
def test_bad_options(target, options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        Decoder(target, LayerSkip(**options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer-skip+prompt-lookup", {"layer-skip": {"skip": SKIP}}),
        ("early-exit+layer-skip", {"early-exit": {"exit_layer": 2}, "layer-skip": {"skip": SKIP}}),
    ],
)
def test_beside_another_drafter(target, name: str, options: dict[str, Any]):
    """A merged tree has no exit states; drafters that share the target's cache do not disturb each other."""
    settings: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": []}
    plain = Decoder(target).generate(PROMPTS, **settings)
    got = Decoder(target, name, drafter_options=options).generate(PROMPTS, **settings)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", ["layer-skip", "early-exit"])
def test_float32_text_of_a_real_model_is_the_plain_one(real, drafter, shape):
    target, plain = real
    options = {"skip": {"attention": [9, 13, 17, 21], "mlp": [21]}} if drafter == "layer-skip" else {"exit_layer": 24}
    got = Decoder(target, drafter, drafter_options=options | SHAPES[shape]).generate(CHATS, max_new_tokens=24)
    assert [one.tokens for one in got] == [one.tokens for one in plain]
    assert sum(sum(one.stats.accepted_by_depth) for one in got) > 0


CHATS = [[{"role": "user", "content": text}] for text in ("What is gravity?", "List three tips for staying healthy.")]


@pytest.fixture(scope="module")
def real() -> tuple[Target, Any]:
    target = Target(*load_model("smollm2", dtype="float32"))
    return target, Decoder(target).generate(CHATS, max_new_tokens=24)
