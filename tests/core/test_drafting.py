"""Candidates from a reduced draft vocabulary are those that the target's whole vocabulary would give."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.core.drafting import candidates, spread
from draftwood.core.sampling import SamplingParams, compile_pipeline

VOCABULARY = 11
DRAFT_TOKENS = torch.tensor([7, 2, 9, 4, 0])


class Source:
    """The coupled rule's noise, the same for every vocabulary of a size."""

    def gumbel(self, position: int, vocabulary: int) -> torch.Tensor:
        return torch.linspace(-1.0, 1.0, vocabulary)


@pytest.mark.parametrize("style", ["chosen", "coupled", "drawn"])
@pytest.mark.parametrize(
    ("settings", "barred"), [({}, set()), ({"temperature": 0.7}, set()), ({"suppress_tokens": [7]}, {7})]
)
def test_reduced_logits_draft_as_spread_ones_do(style, settings, barred):
    def made(logits: torch.Tensor, **named: Any) -> Any:
        row = SimpleNamespace(
            pipeline=compile_pipeline(SamplingParams(**settings), eos_token_ids=(), prompt=(1,), max_tokens=20),
            generator=torch.Generator().manual_seed(3),
            source=Source(),
            tokens=[1],
        )
        state: Any = SimpleNamespace(style=style, target=SimpleNamespace(vocabulary_size=VOCABULARY), rows=[row])
        return candidates(state, logits, [0, 0], 3, [[], []], **named)

    logits = torch.tensor([[0.5, 3.0, -1.0, 2.0, 0.0], [4.0, 1.0, 2.0, -2.0, 3.0]])
    reduced = made(logits, draft_tokens=DRAFT_TOKENS)
    whole = made(spread(logits, DRAFT_TOKENS, VOCABULARY))
    assert reduced.tokens.tolist() == whole.tokens.tolist()
    assert {*reduced.tokens.flatten().tolist()} <= {*DRAFT_TOKENS.tolist()} - barred
    torch.testing.assert_close(reduced.log_probs, whole.log_probs)
    assert (reduced.law is None) == (whole.law is None) == (style != "drawn")
    if style == "drawn":
        assert reduced.law.shape == (2, 3, VOCABULARY)
