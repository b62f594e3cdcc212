"""Candidates from a reduced draft vocabulary are those that the target's whole vocabulary would give."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.core.drafting import Candidates, candidates, law_of_nodes, spread
from draftwood.core.sampling import SamplingParams, compile_pipeline

VOCABULARY = 11
DRAFT_TOKENS = torch.tensor([7, 2, 9, 4, 0])


class Source:
    """The coupled rule's noise, the same for every vocabulary of a size."""

    def gumbel(self, position: int, vocabulary: int) -> torch.Tensor:
        return torch.linspace(-1.0, 1.0, vocabulary)


def state_of(style: str, *rows: dict[str, Any]) -> Any:
    made = [
        SimpleNamespace(
            pipeline=compile_pipeline(SamplingParams(**settings), eos_token_ids=(), prompt=(1,), max_tokens=20),
            generator=torch.Generator().manual_seed(3),
            source=Source(),
            tokens=[1],
        )
        for settings in rows
    ]
    return SimpleNamespace(style=style, target=SimpleNamespace(vocabulary_size=VOCABULARY), rows=made)


def make(style: str, logits: torch.Tensor, count: int, settings: dict[str, Any], **named: Any) -> Candidates:
    contexts = len(logits)
    return candidates(state_of(style, settings), logits, [0] * contexts, count, [[]] * contexts, **named)


LOGITS = torch.tensor([[0.5, 3.0, -1.0, 2.0, 0.0], [4.0, 1.0, 2.0, -2.0, 3.0]])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 4, "top_p": 0.95, "min_p": 0.01},
    {"suppress_tokens": [7]},
    {"temperature": 1.0, "suppress_tokens": [7]},
]


@pytest.mark.parametrize("style", ["chosen", "coupled"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_reduced_logits_draft_as_spread_ones_do(style, settings):
    reduced = make(style, LOGITS, 3, settings, draft_tokens=DRAFT_TOKENS)
    whole = make(style, spread(LOGITS, DRAFT_TOKENS, VOCABULARY), 3, settings)
    assert reduced.tokens.tolist() == whole.tokens.tolist()
    assert {*reduced.tokens.flatten().tolist()} <= {*DRAFT_TOKENS.tolist()} - {*settings.get("suppress_tokens", ())}
    torch.testing.assert_close(reduced.log_probs, whole.log_probs)
    assert reduced.law is whole.law is None


@pytest.mark.parametrize("settings", SETTINGS)
def test_siblings_drawn_from_reduced_logits_have_the_law_they_are_said_to_have(settings):
    contexts, whole_logits = 20_000, spread(LOGITS[1:], DRAFT_TOKENS, VOCABULARY)
    drawn = make("drawn", LOGITS[1:].expand(contexts, -1), 2, settings, draft_tokens=DRAFT_TOKENS)
    assert drawn.law is not None
    index = torch.arange(2 * contexts).view(contexts, 2)
    law = law_of_nodes([drawn.law[:100], drawn.law[100:]], index, drawn.columns, VOCABULARY)  # of two levels, say
    expected = make("drawn", whole_logits, 1, settings).law
    assert expected is not None
    torch.testing.assert_close(law[:, 0], expected[0].expand(contexts, -1))
    for eldest in range(VOCABULARY):
        there = drawn.tokens[:, 0] == eldest
        assert float(there.double().mean()) == pytest.approx(float(expected[0, 0, eldest]), abs=0.015)
        if int(there.sum()) > 2000:
            second = torch.bincount(drawn.tokens[there, 1], minlength=VOCABULARY) / there.sum()
            torch.testing.assert_close(second, law[there][0, 1], atol=0.03, rtol=0.0)
            assert law[there][0, 1, eldest] == 0.0


def test_laws_stay_as_narrow_as_the_draft_vocabulary_unless_a_processor_goes_by_ids():
    narrow, wide = (make("drawn", LOGITS, 2, one, draft_tokens=DRAFT_TOKENS) for one in (SETTINGS[1], SETTINGS[4]))
    assert narrow.law is not None and narrow.law.shape == (2, 2, len(DRAFT_TOKENS))
    assert wide.law is not None and wide.law.shape == (2, 2, VOCABULARY) and wide.columns is None


@pytest.mark.parametrize("tokens", [DRAFT_TOKENS, torch.arange(VOCABULARY).flip(0)])
@pytest.mark.parametrize("style", ["chosen", "drawn", "coupled"])
def test_a_row_drafts_the_same_beside_one_whose_processors_go_by_ids(style: str, tokens: torch.Tensor) -> None:
    logits = torch.linspace(-1.0, 1.0, len(tokens)).expand(2, -1)
    settings = [{"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "suppress_tokens": [7]}]
    beside = state_of(style, *settings)
    alone = [state_of(style, own) for own in settings]
    for _ in range(4):  # a row's generator goes on from round to round
        both = candidates(beside, logits, [0, 1], 3, draft_tokens=tokens)
        for row, state in enumerate(alone):
            one = candidates(state, logits[:1], [0], 3, draft_tokens=tokens)
            assert both.tokens[row].tolist() == one.tokens[0].tolist()
            torch.testing.assert_close(both.log_probs[row], one.log_probs[0])
            if style == "drawn":
                assert both.law is not None and one.law is not None
                law = law_of_nodes([one.law], torch.arange(3)[None], one.columns, VOCABULARY)[0]
                torch.testing.assert_close(both.law[row], law)
