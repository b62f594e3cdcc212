from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftwood.core.proposal import Proposal
from draftwood.core.tree import TokenTree
from draftwood.verify import Rejection, Traversal, rejection
from tests.verify.enumeration import SCHEMES, SHAPES, EnumeratingSource, Shape, Text, World, expected_tau, runs


@pytest.mark.parametrize("shape", ["chain", "wide", "ragged"])
@pytest.mark.parametrize("scheme", ["without replacement", "mixed"])
def test_commits_at_least_as_much_as_rejection_on_the_same_drafts(shape: str, scheme: str) -> None:
    gains = []
    for seed in range(5):
        world = World(3, seed)
        tau = expected_tau(Traversal(), world, SHAPES[shape], SCHEMES[scheme])
        gains.append(tau - expected_tau(Rejection(), world, SHAPES[shape], SCHEMES[scheme]))
    assert min(gains) >= -1e-12
    # One level leaves nothing to be gained from looking further; two do.
    assert (max(gains) > 1e-3) == (shape != "wide")


@pytest.mark.parametrize("shape", ["chain", "wide", "ragged"])
def test_commits_just_as_much_as_rejection_when_candidates_were_chosen(shape: str) -> None:
    for seed in range(5):
        world, chosen = World(3, seed), SCHEMES["chosen"]
        tau = expected_tau(Traversal(), world, SHAPES[shape], chosen)
        assert tau == pytest.approx(expected_tau(Rejection(), world, SHAPES[shape], chosen), abs=1e-12)


class TwoTokens(World):
    """The example of Sun et al. (arXiv:2403.10444), section 2: p = (1/3, 2/3), q = (2/3, 1/3) in every context."""

    def p(self, context: Text) -> Tensor:
        return torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)

    def q(self, context: Text) -> Tensor:
        return self.p(context).flip(0)


def test_block_verification_of_two_tokens() -> None:
    chain, scheme, world = Shape((-1, 0)), SCHEMES["with replacement"], TwoTokens(2, 0)
    assert expected_tau(Rejection(), world, chain, scheme) == pytest.approx(1 + 10 / 9, abs=1e-12)
    assert expected_tau(Traversal(), world, chain, scheme) == pytest.approx(1 + 11 / 9, abs=1e-12)


def test_the_root_is_accepted_with_probability_one_exactly() -> None:
    asked: list[list[float]] = []

    class Recording(EnumeratingSource):
        def __init__(self) -> None:
            super().__init__([])
            asked.append([])

        def accept(self, probability: float) -> bool:
            asked[-1].append(probability)
            return probability == 1.0  # every node that may be rejected is

    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.randn(1, 4, 5, generator=generator)
        law = torch.randn(1, 3, 5, generator=generator).softmax(-1)
        tree = TokenTree.from_lists([torch.randint(5, (3,), generator=generator).tolist()], [[-1, -1, 0]])
        Traversal().verify(Proposal(tree, law), logits, [Recording()], [0])
    rejected_to_the_root = [probabilities for probabilities in asked if len(probabilities) > 1]
    assert len(rejected_to_the_root) > 50
    assert all(probabilities[-1] == 1.0 for probabilities in asked)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Returns a list that grows with every softmax."""
    softmaxes: list[Tensor] = []
    softmax = rejection.probabilities

    def counting(logits: Tensor) -> Tensor:
        softmaxes.append(logits)
        return softmax(logits)

    monkeypatch.setattr(rejection, "probabilities", counting)
    return softmaxes


def test_a_leaf_that_is_rejected_costs_no_softmax(visits: list[Tensor]) -> None:
    tree = TokenTree.from_lists([[0, 1, 2]], [[-1, -1, -1]])
    logits = torch.tensor([0.2, 0.3, 0.5]).log().expand(1, 4, 3)
    costs = []
    for _, verdict in runs(lambda source: Traversal().verify(Proposal(tree), logits, [source], [0])):
        costs.append((len(visits), len(verdict.paths[0])))
        visits.clear()
    assert {cost - accepted for cost, accepted in costs} == {1}


def test_what_hangs_on_an_impossible_token_costs_no_softmax(visits: list[Tensor]) -> None:
    tree = TokenTree.from_lists([[0, 1, 2]], [[-1, 0, 1]])
    logits = torch.tensor([0.0, 0.5, 0.5]).log().expand(1, 4, 3)
    verdict = Traversal().verify(Proposal(tree), logits, [EnumeratingSource([])], [0])
    assert (verdict.paths, len(visits)) == ([[]], 1)


def test_a_long_chain_needs_no_deep_recursion() -> None:
    length = 3000
    tokens = torch.ones(1, length, dtype=torch.int64)
    logits = torch.tensor([-torch.inf, 0.0]).expand(1, 1 + length, 2)
    verdict = Traversal().verify(Proposal(TokenTree.chain(tokens)), logits, [EnumeratingSource([])], [0])
    assert verdict.tokens == [[1] * (length + 1)]
