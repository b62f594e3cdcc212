"""Processors through the whole engine: trees give the text that plain decoding gives, and the law it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

from draftwood.core.proposal import Proposal, Verdict
from draftwood.core.sampling import SamplingParams, compile_pipeline, process, tree_paths
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from tests.core.test_sampling import CASES
from tests.verify.enumeration import LOSSLESS, SCHEMES, SHAPES, Text, World, total_variation

PROMPTS = [[5, 3, 6, 3, 5, 3], [4, 5, 4, 5, 4]]
LENGTH = 10


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


@pytest.fixture(scope="module")
def drafters(tiny_llama, tinier_llama) -> dict[str, object]:
    """Chains, merged n-grams, a window and guesses, a dynamic tree that is nearly right and one that is not."""
    return {
        "prompt-lookup": "prompt-lookup",
        "lookahead+prompt-lookup": "lookahead+prompt-lookup",
        "the target as a draft": DraftModel(model=tiny_llama, tree="dynamic", nodes=8),
        "another draft": DraftModel(model=tinier_llama, tree=(2, 2)),
    }


def settings_of(case: str) -> dict[str, object]:
    fields = dict(CASES[case])
    if fields.get("min_length"):
        fields["min_length"] = len(PROMPTS[0]) + 4
    return {**fields, "max_new_tokens": LENGTH, "eos_token_id": [1, 2]}


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case].get("temperature")])
def test_greedy_text_is_that_of_generate_with_every_drafter(target, drafters, tiny_llama, case) -> None:
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {**settings_of(case), "do_sample": False, "pad_token_id": 0}
        expected.append(tiny_llama.generate(ids, **given)[0, len(prompt) :].tolist())
    for name, drafter in drafters.items():
        texts = [result.tokens for result in Decoder(target, drafter).generate(PROMPTS, **settings_of(case))]
        assert texts == expected, name


@pytest.mark.parametrize("case", CASES)
def test_coupled_text_is_plain_coupled_text_with_every_drafter(target, drafters, case) -> None:
    given = {**settings_of(case), "seed": 7}
    given["temperature"] = given.get("temperature") or 0.9
    plain = [result.tokens for result in Decoder(target, rule="coupled").generate(PROMPTS, **given)]
    for name, drafter in drafters.items():
        texts = [result.tokens for result in Decoder(target, drafter, rule="coupled").generate(PROMPTS, **given)]
        assert texts == plain, name


class Echo(LogitsProcessor):
    """Looks at the whole text: its sum moves one token up."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1.5 * torch.nn.functional.one_hot(input_ids.sum(1) % scores.shape[1], scores.shape[1])


class ProcessedWorld(World):
    """A toy target whose distribution goes through processors that look at the text so far."""

    row = SimpleNamespace(
        tokens=[0],
        pipeline=compile_pipeline(
            SamplingParams(temperature=1.0, repetition_penalty=1.8, logits_processor=[Echo()]),
            eos_token_ids=(),
            prompt=[0],
            max_tokens=99,
        ),
    )

    def raw(self, context: Text) -> torch.Tensor:
        return self._weights("p", context).log()

    def p(self, context: Text) -> torch.Tensor:
        """One path at a time, by transformers' own processors."""
        scores = self.raw(context).float()[None]
        text = torch.tensor([[0, *context]])
        for processor in (RepetitionPenaltyLogitsProcessor(1.8), Echo()):
            scores = processor(text, scores)
        return scores[0].double().softmax(-1)


class Processing:
    """Judges by raw logits that go through `process`, as the engine does, every node with its own history."""

    def __init__(self, rule, world: ProcessedWorld) -> None:
        self.rule, self.world = rule, world

    def verify(self, proposal: Proposal, logits: torch.Tensor, sources, positions) -> Verdict:
        paths = tree_paths(proposal.tree)
        raw = torch.stack([self.world.raw(tuple(path)) for path in paths[0]])[None]
        raw = torch.cat([raw, torch.full_like(logits[:, raw.shape[1] :], torch.nan)], 1)
        return self.rule.verify(proposal, process([self.world.row], raw, paths), sources, positions)


@pytest.mark.parametrize("shape", ["chain", "wide", "breadth first"])
@pytest.mark.parametrize("scheme", ["without replacement", "chosen"])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_processor_with_a_history_keeps_the_law(rule, scheme, shape) -> None:
    """Enumerated; within float32, in which transformers' processors compute."""
    world = ProcessedWorld(3, seed=5)
    assert total_variation(Processing(LOSSLESS[rule], world), world, SHAPES[shape], SCHEMES[scheme]) <= 1e-6


def test_the_enumeration_sees_a_history_that_is_not_the_nodes_own() -> None:
    class RootHistory(Processing):
        def verify(self, proposal, logits, sources, positions):
            paths = tree_paths(proposal.tree)
            raw = torch.stack([self.world.raw(tuple(path)) for path in paths[0]])[None]
            raw = torch.cat([raw, torch.full_like(logits[:, raw.shape[1] :], torch.nan)], 1)
            return self.rule.verify(proposal, process([self.world.row], raw, None), sources, positions)

    world = ProcessedWorld(3, seed=5)
    wrong = total_variation(
        RootHistory(LOSSLESS["rejection"], world), world, SHAPES["chain"], SCHEMES["without replacement"]
    )
    assert wrong > 1e-2
