"""Whatever was drafted and however it was judged, the committed text has the target's law."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftwood.core.proposal import Proposal
from draftwood.core.rule import Rule, SeededSource
from draftwood.verify import Coupled, Greedy, Rejection, Traversal, Typical, rejection, traversal
from tests.verify.enumeration import (
    LOSSLESS,
    SCHEMES,
    SHAPES,
    EnumeratingSource,
    Scheme,
    Text,
    World,
    decode,
    runs,
    total_variation,
    worlds,
)

EXACT = 1e-12


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_committed_text_has_the_law_of_the_target(rule: str, scheme: str, shape: str) -> None:
    for world in worlds(SHAPES[shape]):
        assert total_variation(LOSSLESS[rule], world, SHAPES[shape], SCHEMES[scheme]) <= EXACT


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "rule", [Greedy(), Coupled(), Rejection(), Traversal(), Typical()], ids=lambda r: type(r).__name__
)
def test_every_rule_is_greedy_and_exact_at_temperature_zero(rule: Rule, scheme: str) -> None:
    for shape in (SHAPES["empty"], SHAPES["ragged"], SHAPES["idle nodes"]):
        assert total_variation(rule, World(3, seed=0, greedy=True), shape, SCHEMES[scheme]) <= EXACT


def test_typical_is_rightly_called_lossy() -> None:
    assert not Typical.lossless
    assert total_variation(Typical(), World(3, seed=0), SHAPES["wide"], SCHEMES["chosen"]) > 0.1


def test_the_enumeration_itself() -> None:
    def program(source: EnumeratingSource) -> tuple[bool, int]:
        accepted = source.accept(0.25)
        return accepted, source.draw(torch.tensor([1.0, 0.0, 3.0])) if accepted else int(source.accept(1.5))

    found = {outcome: probability for probability, outcome in runs(program)}
    assert found == {(True, 0): 0.0625, (True, 2): 0.1875, (False, 1): 0.75}


# Mutations: the enumeration must notice each of them. Those of a rule are patched into its module, those of a
# drafter into what it hands in.

Residual = Callable[..., tuple[Tensor, float]]


def _no_residual(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    return p, _RESIDUAL(p, q, scale)[1]


def _not_renormalised(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    left = (scale * p - q).clamp(min=0.0)
    return left, float(left.sum())


def _no_fallback(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    left = (scale * p - q).clamp(min=0.0)
    return left / left.sum(), float(left.sum())


def _share_of_residual_ignored(p: Tensor, q: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
    return _RESIDUAL(p, q, 1.0)


def _no_ratio(p: Tensor, q: Tensor, token: int, scale: float = 1.0) -> float:
    return min(1.0, scale * float(p[token]))


def _always(p: Tensor, q: Tensor, token: int, scale: float = 1.0) -> float:
    return 1.0


def _share_of_parent_ignored(p: Tensor, q: Tensor, token: int, scale: float = 1.0) -> float:
    return _ACCEPTANCE(p, q, token, 1.0)


def _root_moved_off_one(visit: traversal._Visit, q: Tensor) -> None:
    visit.p, visit.share = rejection.residual(visit.p, q, visit.share)


def _share_kept(visit: traversal._Visit, q: Tensor) -> None:
    visit.p, _ = rejection.residual(visit.p, q, visit.share)


_RESIDUAL, _ACCEPTANCE = rejection.residual, rejection.acceptance
RULE_MUTATIONS = [
    ("rejection", rejection, "residual", _no_residual),
    ("rejection", rejection, "residual", _not_renormalised),
    ("rejection", rejection, "residual", _no_fallback),
    ("rejection", rejection, "acceptance", _no_ratio),
    ("rejection", rejection, "acceptance", _always),
    ("traversal", traversal, "residual", _no_residual),
    ("traversal", traversal, "residual", _not_renormalised),
    ("traversal", traversal, "residual", _no_fallback),
    ("traversal", traversal, "residual", _share_of_residual_ignored),
    ("traversal", traversal, "acceptance", _no_ratio),
    ("traversal", traversal, "acceptance", _always),
    ("traversal", traversal, "acceptance", _share_of_parent_ignored),
    ("traversal", traversal._Visit, "reject", _root_moved_off_one),
    ("traversal", traversal._Visit, "reject", _share_kept),
]


def _eldest_law(proposal: Proposal) -> Proposal:
    """Siblings not renormalised: each claims to have been drawn from what the eldest was drawn from."""
    assert proposal.law is not None
    parents, law = proposal.tree.parents[0].tolist(), proposal.law.clone()
    for node, parent in enumerate(parents):
        law[0, node] = proposal.law[0, parents.index(parent)]
    return replace(proposal, law=law)


def _softmax_for_argmax(source: object, q: Tensor, elders: list[int], node: int) -> tuple[int, Tensor]:
    return int(q.argmax()), q


def _exact_everywhere(rule: Rule, schemes: list[Scheme], spoil: Callable[[Proposal], Proposal] | None = None) -> bool:
    for shape in (SHAPES["chain"], SHAPES["wide"], SHAPES["ragged"]):
        for scheme in schemes:
            for world in worlds(shape):
                try:
                    if not total_variation(rule, world, shape, scheme, spoil) <= EXACT:
                        return False
                except (ArithmeticError, IndexError):  # nan for a probability; a walk back past the root
                    return False
    return True


@pytest.mark.parametrize(
    ("rule", "owner", "name", "mutation"),
    RULE_MUTATIONS,
    ids=[f"{rule}{m.__name__}" for rule, _, _, m in RULE_MUTATIONS],
)
def test_a_broken_rule_is_found_out(
    rule: str, owner: object, name: str, mutation: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutation)
    schemes = [SCHEMES["without replacement"], SCHEMES["with replacement"], SCHEMES["mixed"]]
    assert not _exact_everywhere(LOSSLESS[rule], schemes)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_drafter_that_misstates_its_law_is_found_out(rule: str) -> None:
    assert not _exact_everywhere(LOSSLESS[rule], [SCHEMES["without replacement"]], _eldest_law)
    assert not _exact_everywhere(LOSSLESS[rule], [Scheme(_softmax_for_argmax)])


@pytest.mark.parametrize("rule", LOSSLESS)
def test_nodes_that_are_no_candidates_would_be_accepted_without_their_mark(rule: str) -> None:
    def unmarked(proposal: Proposal) -> Proposal:
        return replace(proposal, tree=replace(proposal.tree, candidate=None))

    with pytest.raises(AssertionError, match="not in the tree"):
        total_variation(LOSSLESS[rule], World(3, seed=0), SHAPES["idle nodes"], SCHEMES["chosen"], unmarked)


# Sampled, with the random source of real calls: once for the source, and for Coupled, which cannot be enumerated.


def chi_square(texts: list[Text], world: World) -> tuple[float, int]:
    """Returns Pearson's statistic of the texts against the target's law, and its degrees of freedom."""
    law, counts = world.extend({(): 1.0}, len(texts[0])), Counter(texts)
    assert set(counts) <= set(law)
    common = {text: probability * len(texts) for text, probability in law.items() if probability * len(texts) >= 5}
    cells = [(counts[text], expected) for text, expected in common.items()]
    cells.append((len(texts) - sum(seen for seen, _ in cells), len(texts) - sum(expected for _, expected in cells)))
    cells = [cell for cell in cells if cell[1] > 1e-6]
    return sum((seen - expected) ** 2 / expected for seen, expected in cells), len(cells) - 1


def _plausible(rule: Rule) -> bool:
    world = World(3, seed=7)
    texts = [decode(rule, world, SHAPES["ragged"], SCHEMES["without replacement"], seed, 2) for seed in range(500)]
    statistic, freedom = chi_square(texts, world)
    # Wilson-Hilferty: the cube root is nearly normal; 3.7 standard deviations leave 1 in 10,000 above.
    deviation = 2 / (9 * freedom)
    return math.cbrt(statistic / freedom) < 1 - deviation + 3.7 * math.sqrt(deviation)


@pytest.mark.parametrize("rule", [Coupled(), Rejection(), Traversal()], ids=lambda rule: type(rule).__name__)
def test_sampled_text_has_the_law_of_the_target(rule: Rule) -> None:
    assert _plausible(rule)


def test_coupled_sampling_with_one_noise_for_all_positions_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gumbel = SeededSource.gumbel
    monkeypatch.setattr(SeededSource, "gumbel", lambda source, position, vocabulary: gumbel(source, 0, vocabulary))
    assert not _plausible(Coupled())


def test_lossy_sampling_is_found_out() -> None:
    assert not _plausible(Typical())
