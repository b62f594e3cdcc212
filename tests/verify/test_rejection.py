from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import Tensor

from draftwood.core.proposal import Proposal
from draftwood.core.rule import Rule
from draftwood.core.tree import TokenTree
from draftwood.verify import Rejection, Traversal, rejection
from tests.verify.enumeration import (
    SCHEMES,
    SHAPES,
    EnumeratingSource,
    Shape,
    Text,
    World,
    committed_law,
    expected_tau,
    runs,
)

P = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)  # sum of min(p, q) = 0.7; p - q is (-0.3, 0.2, 0.1)
CHAIN_OF_ONE = Shape((-1,))


class Steady(World):
    """The same p and q in every context."""

    def p(self, context: Text) -> Tensor:
        return P

    def q(self, context: Text) -> Tensor:
        return Q


def law_of(rule: Rule, proposal: Proposal, p: Tensor) -> dict[Text, float]:
    """Returns the law of what is committed when every node has the target p."""
    logits = p.log().expand(1, 1 + proposal.tree.width, -1)
    law: dict[Text, float] = defaultdict(float)
    for probability, verdict in runs(lambda source: rule.verify(proposal, logits, [source], [0])):
        law[tuple(verdict.tokens[0])] += probability
    return law


def test_worked_example() -> None:
    law = committed_law(Rejection(), Steady(3, 0), CHAIN_OF_ONE, SCHEMES["without replacement"])
    accepted = {token: sum(law.get((token, bonus), 0.0) for bonus in range(3)) for token in range(3)}
    rejected = {token: law.get((token,), 0.0) for token in range(3)}
    assert list(accepted.values()) == pytest.approx([0.2, 0.3, 0.2], abs=1e-12)  # min(p, q): 0.7 in all
    assert list(rejected.values()) == pytest.approx([0.0, 0.2, 0.1], abs=1e-12)  # 0.3 split 2 : 1


def test_expected_tokens_of_a_chain_follow_the_formula() -> None:
    alpha, gamma = 0.7, 3
    tau = expected_tau(Rejection(), Steady(3, 0), SHAPES["chain"], SCHEMES["with replacement"])
    assert tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), abs=1e-12)


@pytest.mark.parametrize("law", [None, torch.eye(3, dtype=torch.float64)[[0, 2]][None]])
def test_a_chosen_token_is_accepted_with_its_probability_then_removed(law: Tensor | None) -> None:
    siblings = TokenTree.from_lists([[0, 2]], [[-1, -1]])
    found = law_of(Rejection(), Proposal(siblings, law), P)
    assert sum(found[0, bonus] for bonus in range(3)) == pytest.approx(0.2, abs=1e-15)
    assert sum(found[2, bonus] for bonus in range(3)) == pytest.approx(0.3, abs=1e-15)  # 0.8 of 0.3 / 0.8
    assert found[1,] == pytest.approx(0.5, abs=1e-15)
    assert found[0,] == found[2,] == 0.0


def test_a_law_is_normalised_and_may_have_less_precision() -> None:
    tree = TokenTree.from_lists([[0]], [[-1]])
    exact = law_of(Rejection(), Proposal(tree, Q[None, None]), P)
    single = law_of(Rejection(), Proposal(tree, (2 * Q[None, None]).float()), P)
    assert single == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("rule", [Rejection(), Traversal()])
def test_a_token_whose_own_probability_underflowed_counts_as_chosen(rule: Rule) -> None:
    tree = TokenTree.from_lists([[0, 0]], [[-1, -1]])
    law = torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]])
    assert law_of(rule, Proposal(tree, law), P) == pytest.approx(law_of(rule, Proposal(tree), P), abs=1e-15)


def test_residual_and_its_fallback() -> None:
    left, mass = rejection.residual(P, Q)
    assert left.tolist() == pytest.approx([0, 2 / 3, 1 / 3], abs=1e-15)
    assert mass == pytest.approx(0.3, abs=1e-15)
    half, mass = rejection.residual(P, Q, 0.9)
    assert half.tolist() == pytest.approx([0, 0.15 / 0.22, 0.07 / 0.22], abs=1e-15)
    assert mass == pytest.approx(0.22, abs=1e-15)
    fallback, mass = rejection.residual(P, P.clone())
    assert (fallback.tolist(), mass) == (P.tolist(), 0.0)
    fallback, mass = rejection.residual(P, Q, 0.1)  # nothing left though p is not q
    assert (fallback.tolist(), mass) == (P.tolist(), 0.0)


def test_a_rejection_without_residual_still_draws_from_p() -> None:
    drawn: list[Tensor] = []

    class Refusing(EnumeratingSource):
        """Rejects what is accepted but for rounding."""

        def accept(self, probability: float) -> bool:
            assert probability == 1.0
            return False

        def draw(self, weights: Tensor) -> int:
            drawn.append(weights)
            return super().draw(weights)

    tree, logits = TokenTree.from_lists([[1]], [[-1]]), torch.zeros(1, 2, 4)
    Rejection().verify(Proposal(tree, torch.full((1, 1, 4), 0.25)), logits, [Refusing([])], [0])
    assert drawn[0].tolist() == [0.25] * 4


def test_only_visited_nodes_cost_a_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[Tensor] = []
    softmax = rejection.probabilities

    def counting(logits: Tensor) -> Tensor:
        visits.append(logits)
        return softmax(logits)

    monkeypatch.setattr(rejection, "probabilities", counting)
    # A root with three children, each with three; the middle one is accepted for sure, and none of its own.
    tree = TokenTree.from_lists([[0, 1, 2, *[0] * 9]], [[-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2]])
    logits = torch.full((1, 13, 3), -torch.inf)
    logits[..., 1] = 0.0
    verdict = Rejection().verify(Proposal(tree), logits, [EnumeratingSource([])], [0])
    assert verdict.tokens == [[1, 1]]
    assert len(visits) == 2
