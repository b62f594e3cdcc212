"""Malformed input and random lives: `make fuzz` runs at least 10,000 cases, `make test-all` a few hundred.

A case fails if anything but a DraftwoodError comes out, if a text differs from plain decoding, or if the model, a
global random state or a later call is affected. hypothesis prints the seed of a failure and replays it.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from draftwood import DraftwoodError, InvalidRequest
from draftwood.cli import app
from draftwood.core.drafter import Drafter
from draftwood.core.proposal import Proposal
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from tests.core.test_cache import scripts
from tests.core.test_cache import test_any_life_of_a_cache_keeps_what_was_committed as cache_life

pytestmark = pytest.mark.slow
TOTAL = int(os.environ.get("DRAFTWOOD_FUZZ", "500"))
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def share(percent: int) -> settings:
    """Settings for this part of all cases."""
    return settings(deadline=None, max_examples=TOTAL * percent // 100, suppress_health_check=QUIET, database=None)


anything = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(), st.text(max_size=5), st.binary(max_size=3)
)
ragged = st.lists(st.lists(st.integers(-3, 6), max_size=6), max_size=4)


@share(30)
@given(tokens=ragged, parents=ragged)
def test_trees_of_any_lists(tokens, parents) -> None:
    """Either an error of ours, or a tree whose mask is what walking up the parents gives."""
    try:
        tree = TokenTree.from_lists(tokens, parents)
    except (InvalidRequest, ValueError) as error:
        broken = len(tokens) != len(parents) or any(
            len(t) != len(p) or any(not -1 <= parent < node for node, parent in enumerate(p))
            for t, p in zip(tokens, parents, strict=False)
        )
        assert broken, error
        return
    for row, own in enumerate(parents):
        for node in range(len(own)):
            line, at = set(), node
            while at != -1:
                line.add(at)
                at = own[at]
            assert set(tree.ancestors[row, node].nonzero().flatten().tolist()) == line
            assert int(tree.depths[row, node]) == len(line)
    assert tree.to_lists() == (tokens, parents)


@share(30)
@given(scripts())
def test_caches_of_any_life(script) -> None:
    cache_life.hypothesis.inner_test(script)


class Random(Drafter):
    """Drafts random trees from few tokens, some of them right by chance, some with nodes that are no candidates."""

    def __init__(self, seed: int, likely: list[int]) -> None:
        self.seed, self.likely = seed, likely

    def propose(self, state) -> Proposal:
        generator = torch.Generator().manual_seed(self.seed + sum(len(row.tokens) for row in state.rows))

        def pick(high: int) -> int:
            return int(torch.randint(high, (), generator=generator))

        tokens, parents, candidate = [], [], []
        for index in range(len(state.rows)):
            size = pick(9) if state.room(index) else 0
            depth, own, line = [0], [], []
            for node in range(size):
                parent = pick(node + 1) - 1
                while depth[parent + 1] >= state.room(index):
                    parent = own[parent] if parent >= 0 else -1
                own.append(parent)
                depth.append(depth[parent + 1] + 1)
                line.append(self.likely[pick(len(self.likely))])
            tokens.append(line)
            parents.append(own)
            candidate.append([pick(5) > 0 for _ in own])
        return Proposal(TokenTree.from_lists(tokens, parents, candidate))


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


@pytest.fixture(scope="module")
def plain(target) -> dict[int, list[int]]:
    """Greedy continuations of four prompts, 24 tokens long."""
    decoder = Decoder(target)
    prompts = [[5, 6], [7], [9, 9, 9, 9], [30, 4, 12]]
    results = decoder.generate(prompts, max_new_tokens=24, eos_token_id=[])
    return {
        index: [*prompt, *result.tokens] for index, (prompt, result) in enumerate(zip(prompts, results, strict=True))
    }


@share(20)
@given(
    order=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    batch_size=st.integers(1, 4),
    rule=st.sampled_from(["greedy", "coupled", "rejection", "traversal"]),
    eos=st.sets(st.integers(0, 95), max_size=20),
    seed=st.integers(0, 2**30),
)
def test_the_engine_with_random_drafts(target, plain, order, lengths, batch_size, rule, eos, seed) -> None:
    prompt_lengths = [2, 1, 4, 3]
    prompts = [plain[index][: prompt_lengths[index]] for index in order]
    likely = sorted({token for text in plain.values() for token in text})
    own = [{"max_new_tokens": lengths[position]} for position in range(len(order))]
    state = torch.get_rng_state()
    results = Decoder(target, Random(seed, likely), rule=rule).generate(
        prompts, per_prompt=own, batch_size=batch_size, eos_token_id=sorted(eos)
    )
    assert torch.equal(state, torch.get_rng_state())
    for index, length, result in zip(order, lengths, results, strict=False):
        future = plain[index][prompt_lengths[index] :][:length]
        ends = [position for position, token in enumerate(future) if token in eos]
        assert result.tokens == future[: ends[0] + 1 if ends else length]
        assert result.stop_reason == ("eos" if ends else "length")


@share(10)
@given(
    prompt=st.one_of(anything, st.lists(anything, max_size=4), st.lists(st.lists(anything, max_size=2), max_size=2)),
    name=st.sampled_from(
        [
            "max_new_tokens",
            "max_length",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "batch_size",
            "stop_strings",
            "eos_token_id",
            "repetition_penalty",
            "bad_words_ids",
            "sequence_bias",
            "max_time",
            "stopping_criteria",
            "logits_processor",
            "per_prompt",
            "no_such_setting",
        ]
    ),
    value=st.one_of(anything, st.lists(anything, max_size=3)),
)
def test_generate_with_any_arguments(target, prompt, name, value) -> None:
    given_settings = {"max_new_tokens": 2, name: value} if name != "max_length" else {name: value}
    if name in ("max_new_tokens", "max_length") and isinstance(value, int):
        given_settings[name] = min(value, 5)
    try:
        Decoder(target, "prompt-lookup").generate(prompt, **given_settings)
    except DraftwoodError as error:
        assert isinstance(error, (ValueError, LookupError))
        assert str(error)


words = st.one_of(
    st.sampled_from(
        [
            "drafters",
            "generate",
            "compare",
            "verify",
            "theory",
            "--json",
            "--drafter",
            "--rule",
            "--option",
            "gamma=0",
            "none",
            "prompt-lookup",
            "no/such/dir",
            "--alpha",
            "2",
            "--gamma",
            "-1",
            "--temperature",
            "--max-new-tokens",
            "prompt-lookup:gamma=x",
            "a+b",
            "+",
            ":",
            "--limit",
            "0",
            "--prompts",
            "--seed",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
)


@share(10)
@given(st.lists(words, max_size=6))
def test_the_command_line_with_any_words(arguments) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
