from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.study import theory

probability = st.floats(0, 1)


def test_the_worked_example_of_the_paper():
    assert theory.expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert theory.speedup(0.8, 4, 0.1) == pytest.approx(2.4011, abs=1e-4)


@settings(deadline=None)
@given(probability, st.integers(0, 20))
def test_expected_tokens_sum_the_chances_of_each_depth(alpha, gamma):
    by_sum = sum(alpha**depth for depth in range(gamma + 1))
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(by_sum)
    assert theory.expected_tokens_by_depth([alpha] * gamma) == pytest.approx(by_sum)
    assert theory.expected_tokens_of_lengths(alpha, [1.0] * gamma) == pytest.approx(by_sum)


def test_drafts_of_varying_length():
    # Half of the rounds draft two tokens, half none: 0.5 (1 + a + a^2) + 0.5.
    assert theory.expected_tokens_of_lengths(0.6, [0.5, 0.5]) == pytest.approx(0.5 * 1.96 + 0.5)


@settings(deadline=None)
@given(probability, st.floats(0, 2))
def test_the_best_gamma_beats_all_others(alpha, c):
    best = theory.best_gamma(alpha, c)
    assert all(theory.speedup(alpha, best, c) >= theory.speedup(alpha, gamma, c) - 1e-9 for gamma in range(30))


def test_the_best_gamma_knows_when_not_to_draft():
    assert theory.best_gamma(0.4, 0.5) == 0
    assert theory.best_gamma(0.9, 0.0, lambda gamma: 1.0 if gamma <= 7 else 99.0) == 7
    assert theory.best_gamma(0.9, 0.01, lambda gamma: 10.0) == 0


@settings(deadline=None)
@given(st.integers(1, 10), st.floats(0, 0.9), st.floats(0.5, 2))
def test_break_even_is_where_the_speedup_is_one(gamma, c, v):
    alpha = theory.break_even_alpha(gamma, c, v)
    if alpha is None:
        assert theory.speedup(1.0, gamma, c, v) < 1
    elif alpha > 1e-9:
        assert theory.speedup(alpha, gamma, c, v) == pytest.approx(1.0, abs=1e-6)
    else:
        assert theory.speedup(0.0, gamma, c, v) >= 1 - 1e-9


def test_with_one_token_break_even_is_c():
    assert theory.break_even_alpha(1, 0.37) == pytest.approx(0.37)
    assert theory.break_even_alpha(2, 1.5) is None


def tree_shapes(nodes: int, ranks: int):
    """Every tree of `nodes` nodes in which a node of rank r has all its elder siblings."""

    def grow(parents, taken):
        if len(parents) == nodes:
            yield parents, taken
            return
        for parent in range(-1, len(parents)):
            rank = sum(p == parent for p in parents)
            if rank < ranks:
                yield from grow((*parents, parent), (*taken, rank))

    yield from grow((), ())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), st.integers(1, 5))
def test_the_best_tree_beats_every_other_shape(weights, nodes):
    acceptance = sorted((weight / sum(weights) * 0.9 for weight in weights), reverse=True)
    best = theory.best_tree(acceptance, nodes)
    assert best.tokens == pytest.approx(theory.expected_tokens_of_tree(best.parents, best.ranks, acceptance))
    others = [theory.expected_tokens_of_tree(*shape, acceptance) for shape in tree_shapes(nodes, len(acceptance))]
    assert best.tokens == pytest.approx(max(others))


def test_a_chain_is_the_tree_of_one_rank():
    chain = theory.best_tree([0.7], 4)
    assert (chain.parents, chain.depth) == ((-1, 0, 1, 2), 4)
    assert theory.best_tree([0.7], 0).depth == 0
    assert chain.tokens == pytest.approx(theory.expected_tokens(0.7, 4))
    assert theory.best_tree([0.7], 4, depth=2).parents == (-1, 0)


def test_expected_tokens_of_a_tree_against_simulation():
    acceptance, draw = [0.5, 0.2], random.Random(0)
    shape = theory.best_tree(acceptance, 5)
    total = 0
    for _ in range(20_000):
        node = -1
        for _ in itertools.count():
            total += 1
            point = draw.random()
            rank = 0 if point < 0.5 else 1 if point < 0.7 else None
            places = [i for i, p in enumerate(shape.parents) if p == node and shape.ranks[i] == rank]
            if not places:
                break
            node = places[0]
    assert total / 20_000 == pytest.approx(shape.tokens, abs=0.03)


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens(1.1, 3),
        lambda: theory.expected_tokens(-0.1, 3),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.speedup(0.5, 3, -0.1),
        lambda: theory.speedup(0.5, 3, 0.1, 0.0),
        lambda: theory.best_tree([0.7, 0.7], 3),
        lambda: theory.best_tree([], 3),
        lambda: theory.best_tree([-0.1], 3),
        lambda: theory.best_tree([0.5], -1),
    ],
)
def test_values_outside_their_range_are_refused(call):
    with pytest.raises(InvalidRequest, match=r"must be"):
        call()
