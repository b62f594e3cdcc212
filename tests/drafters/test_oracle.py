"""The oracle: as right and as slow as it is told to be, and never a part of the text."""

from __future__ import annotations

import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters import oracle
from draftwood.drafters.oracle import Oracle
from draftwood.study.theory import expected_tokens
from tests.conftest import VOCABULARY

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
LENGTH = 40
FREE = {"eos_token_id": []}


@pytest.fixture(scope="module")
def target(tiny_llama):
    return Target(tiny_llama)


@pytest.fixture(scope="module")
def plain(target):
    return [one.tokens for one in Decoder(target).generate(PROMPTS, max_new_tokens=LENGTH, **FREE)]


def run(target, drafter, prompts=PROMPTS, length=LENGTH, **options):
    return Decoder(target, drafter).generate(prompts, max_new_tokens=length, **FREE, **options)


@pytest.mark.parametrize(
    ("alpha", "gamma"),
    [pytest.param(0.3, 2, marks=pytest.mark.slow), pytest.param(0.6, 3, marks=pytest.mark.slow), (0.8, 4)],
)
def test_tau_is_what_theory_says(target, alpha, gamma):
    length = 600
    text = Decoder(target).generate(PROMPTS[0], max_new_tokens=length, **FREE).tokens
    committed: list[int] = []
    for seed in range(3):
        done = run(target, Oracle(continuation=text, alpha=alpha, gamma=gamma, seed=seed), PROMPTS[0], length)
        assert done.tokens == text
        accepted = done.stats.accepted_by_depth
        rounds = done.stats.rounds
        exactly = [a - b for a, b in zip([rounds, *accepted], [*accepted, 0], strict=True)]
        committed += [1 + depth for depth, count in enumerate(exactly) for _ in range(count)]
    tokens = torch.tensor(committed, dtype=torch.float64)
    error = float(tokens.std() / len(tokens) ** 0.5)
    # Three and a half standard errors, and the one round that the text's end cut short.
    assert abs(float(tokens.mean()) - expected_tokens(alpha, gamma)) < 3.5 * error + 3 * gamma / len(tokens)
    assert error < 0.1


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_a_ragged_batch_keeps_its_texts(target, plain, alpha, batch_size):
    done = run(target, Oracle(continuation=plain, alpha=alpha, gamma=3), batch_size=batch_size)
    assert [one.tokens for one in done] == plain
    for one in done:
        # The prompt's own round commits one token; 39 are left: 9 full rounds and one of 3, or 39 of one each.
        bounds = {0.0: 39, 1.0: 10}
        assert one.stats.rounds == bounds.get(alpha, one.stats.rounds)
        assert alpha in bounds or 10 < one.stats.rounds < 39


def test_rows_do_not_depend_on_their_neighbours(target, plain):
    drafter = Oracle(continuation=plain, alpha=0.5, gamma=3, seed=4)
    together = run(target, drafter, batch_size=3)
    apart = run(target, drafter, batch_size=1)
    assert [one.stats.accepted_by_depth for one in together] == [one.stats.accepted_by_depth for one in apart]
    twins = run(target, Oracle(continuation=plain[0], alpha=0.5, gamma=3, seed=4), [PROMPTS[0], PROMPTS[0]])
    assert twins[0].tokens == twins[1].tokens and twins[0].stats.rounds != twins[1].stats.rounds
    other = run(target, Oracle(continuation=plain, alpha=0.5, gamma=3, seed=5))
    assert [one.stats.accepted_by_depth for one in other] != [one.stats.accepted_by_depth for one in apart]


def test_continuations_are_found_by_place_by_prompt_and_in_files(target, plain, tmp_path):
    recording = tmp_path / "run.json"
    rows = [{"prompt": prompt, "tokens": text} for prompt, text in zip(PROMPTS, plain, strict=True)]
    recording.write_text(json.dumps({"rows": rows[::-1]}))
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps(plain))
    by_prompt = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain, strict=True)}
    for given_as in (plain, dict(enumerate(plain)), by_prompt, str(recording), recording, lists, torch.tensor(plain)):
        done = run(target, Oracle(continuation=given_as, gamma=3))
        assert [one.stats.rounds for one in done] == [10, 10, 10]
        assert [one.tokens for one in done] == plain
    assert run(target, Oracle(continuation=plain[1], gamma=3), PROMPTS[1]).stats.rounds == 10
    # The order of the call is not that of the recording.
    assert run(target, Oracle(continuation=recording, gamma=3), PROMPTS[2]).stats.rounds == 10


def test_a_missing_or_short_continuation_drafts_nothing(target, plain):
    done = run(target, Oracle(continuation={1: plain[1]}, gamma=3))
    assert [one.stats.drafted for one in done][::2] == [0, 0] and done[1].stats.drafted > 0
    assert [one.tokens for one in done] == plain
    short = run(target, Oracle(continuation=plain[0][:9], gamma=4), PROMPTS[0])
    # The prompt's round commits the first token and the next one five; a draft of three reaches the recording's end.
    assert short.tokens == plain[0] and short.stats.drafted == 7
    assert run(target, Oracle(continuation=[], gamma=4), PROMPTS[0]).stats.drafted == 0


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.floats(0, 1), st.integers(1, 6), st.integers(0, 9))
@settings(deadline=None, max_examples=25)
def test_no_recording_changes_the_text(target, plain, text, alpha, gamma, seed):
    drafter = Oracle(continuation=text, alpha=alpha, gamma=gamma, seed=seed)
    assert run(target, drafter, PROMPTS[1], 12).tokens == plain[1][:12]
    hot = {"temperature": 1.0, "seed": seed}
    coupled = [
        Decoder(target, one, rule="coupled").generate(PROMPTS[1], max_new_tokens=12, **FREE, **hot).tokens
        for one in (drafter, "none")
    ]
    assert coupled[0] == coupled[1]


def test_a_draft_step_costs_what_it_is_told(target, plain, monkeypatch):
    begun = time.perf_counter()
    done = run(target, Oracle(continuation=plain[0], gamma=3, cost=0.004), PROMPTS[0], 13)
    seconds = done.stats.seconds
    assert done.stats.rounds == 3 and done.stats.drafted_by_depth == [3, 3, 3]
    assert 9 * 0.004 <= seconds.draft <= time.perf_counter() - begun
    monkeypatch.setattr(oracle, "_pass_seconds", lambda target: 0.008)
    half = run(target, Oracle(continuation=plain[0], gamma=3, c=0.5), PROMPTS[0], 13)
    assert half.stats.seconds.draft >= 9 * 0.004
    assert run(target, Oracle(continuation=plain[0], gamma=3), PROMPTS[0], 13).stats.seconds.draft < 9 * 0.004


def test_a_pass_is_measured(target):
    assert 0 < oracle._pass_seconds(target) < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, r"alpha must be a number in \[0, 1\], got 1.5"),
        ({"gamma": 0}, "gamma must be a whole number >= 1, got 0"),
        ({"cost": -1}, "cost must be"),
        ({"c": -0.1}, "c must be"),
        ({"c": 0.1, "cost": 0.1}, "not both"),
        ({"seed": 0.5}, "seed must be an integer, got 0.5"),
        ({"continuation": 7}, "continuation must be token ids, .* got 7"),
        ({"continuation": [1, "a"]}, "list of token ids"),
        ({"continuation": [[1], [True]]}, "list of token ids"),
        ({"continuation": "/nowhere/run.json"}, "no continuation at '/nowhere/run.json'"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Oracle(**{"continuation": [1], **options})


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is no JSON"), ('{"a": 1}', "holds no continuation"), ("3", "holds no continuation")]
)
def test_files_that_hold_no_continuation(tmp_path, content, message):
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        Oracle(continuation=tmp_path / "file.json")


def test_tokens_outside_the_vocabulary_are_refused(target):
    with pytest.raises(InvalidRequest, match=f"token {VOCABULARY}; .* has {VOCABULARY}"):
        Decoder(target, Oracle(continuation=[1, VOCABULARY]))
