"""Static trees: their form, the published ones, and the best tree by three ways."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.core.tree import ROOT
from draftwood.drafters.medusa.trees import (
    PUBLISHED,
    StaticTree,
    check_accuracies,
    expected_tau,
    greedy_tree,
    optimal_tree,
    published_tree,
)

paths_of_ranks = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@given(paths_of_ranks, st.none() | st.integers(1, 9))
@settings(deadline=None)
def test_a_tree_holds_its_paths_and_what_leads_to_them(paths, nodes):
    tree = StaticTree.from_paths(paths, nodes)
    everything = list(dict.fromkeys(tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)))
    assert set(tree.paths) == set(everything[: nodes or len(everything)])
    assert len(tree.paths) == len(set(tree.paths))
    for node, (parent, path) in enumerate(zip(tree.parents, tree.paths, strict=True)):
        assert parent < node
        assert path[:-1] == (() if parent == ROOT else tree.paths[parent])
    assert [node for level in tree.levels for node in level] == list(range(len(tree.paths)))
    assert all(len(tree.paths[node]) == depth for depth, level in enumerate(tree.levels, 1) for node in level)
    for level, contexts, width in zip(tree.levels, tree.contexts, tree.widths, strict=True):
        assert list(contexts) == sorted({tree.parents[node] for node in level})
        assert width == max(tree.ranks[node] for node in level) + 1
    assert tree.cut(0).levels == tree.cut(0).contexts == tree.cut(0).widths == ()
    for depth in range(tree.depth + 2):
        assert tree.cut(depth).paths == tuple(path for path in tree.paths if len(path) <= depth)
        assert tree.cut(depth).depth == min(depth, tree.depth)


# Nodes of each level.
SHAPES = {
    "mc_sim_7b_63": [10, 28, 23, 2],
    "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1],
    "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19],
    "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees(name):
    tree = published_tree(name)
    assert [len(level) for level in tree.levels] == SHAPES[name]
    assert max(tree.ranks) == 9
    for path in tree.paths:  # better guesses come before worse ones
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in tree.paths
    for nodes in (1, 12, 40):  # listed best first, so that the first nodes are a tree
        first = published_tree(name, nodes)
        assert len(first.paths) == nodes and set(first.paths) <= set(tree.paths)
    assert first.paths != published_tree("zephyr_stage2", 40).paths or name == "zephyr_stage2"


def test_the_first_nodes_of_a_published_tree():
    expected = {(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2)}
    assert set(published_tree("mc_sim_7b_63", 8).paths) == expected


def test_expected_tau_by_hand():
    accuracies = [[0.5, 0.2], [0.4, 0.1]]
    tree = StaticTree.from_paths([(0, 0), (1,), (0, 1), (0, 7), (0, 0, 0)])
    assert expected_tau(tree, accuracies) == pytest.approx(1 + 0.5 + 0.2 + 0.5 * 0.4 + 0.5 * 0.1)


@st.composite
def tables(draw, heads=4, ranks=4):
    count = draw(st.integers(1, heads))
    rows = []
    for head in range(count):
        weights = draw(st.lists(st.integers(0, 5), min_size=1, max_size=ranks))
        weights[0] += head == 0  # head 0 is right sometimes
        total = max(sum(weights) + draw(st.integers(0, 3)), 1)
        rows.append([weight / total for weight in weights])
    return rows


def random_tree(accuracies, nodes: int, depth: int, generator: random.Random) -> StaticTree:
    taken: list[tuple[int, ...]] = []
    for _ in range(nodes):
        contexts = [path for path in [(), *taken] if len(path) < min(depth, len(accuracies))]
        offers = [(*path, rank) for path in contexts for rank in range(len(accuracies[len(path)]))]
        offers = [path for path in offers if path not in taken]
        if offers:
            taken.append(generator.choice(offers))
    return StaticTree.from_paths(taken)


@given(tables(), st.integers(1, 14), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=150)
def test_no_tree_beats_the_greedy_one(accuracies, nodes, depth, generator):
    greedy, optimal = greedy_tree(accuracies, nodes, depth), optimal_tree(accuracies, nodes, depth)
    for tree in (greedy, optimal):
        assert len(tree.paths) <= nodes and tree.depth <= depth
    best = expected_tau(optimal, accuracies)
    assert expected_tau(greedy, accuracies) == pytest.approx(best, abs=1e-12)
    for _ in range(5):
        assert expected_tau(random_tree(accuracies, nodes, depth, generator), accuracies) <= best + 1e-12


@given(tables(heads=3, ranks=2), st.integers(1, 6), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_both_equal_brute_force(accuracies, nodes, depth):
    levels = accuracies[:depth]
    everything = [
        path
        for length in range(1, len(levels) + 1)
        for path in itertools.product(*(range(len(rates)) for rates in levels[:length]))
    ]
    best = 0.0
    for size in range(1, min(nodes, len(everything)) + 1):
        for chosen in itertools.combinations(everything, size):
            if all(path[:-1] == () or path[:-1] in chosen for path in chosen):
                best = max(best, expected_tau(StaticTree.from_paths(chosen), accuracies))
    for choose in (greedy_tree, optimal_tree):
        assert expected_tau(choose(accuracies, nodes, depth), accuracies) == pytest.approx(best, abs=1e-12)


def test_the_greedy_tree_of_falling_accuracies_grows_node_by_node():
    accuracies = [[0.5, 0.15, 0.1], [0.35, 0.1], [0.2]]
    sizes = [set(greedy_tree(accuracies, nodes).paths) for nodes in range(1, 9)]
    assert all(small < large for small, large in itertools.pairwise(sizes))
    assert sizes[2] == {(0,), (0, 0), (1,)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StaticTree.from_paths([]), "at least one path"),
        (lambda: StaticTree.from_paths([()]), "got an empty one"),
        (lambda: StaticTree.from_paths([(0, -1)]), "whole number >= 0, got -1"),
        (lambda: StaticTree.from_paths([(0, 1.0)]), "got 1.0"),
        (lambda: published_tree("vicuna"), "no published tree 'vicuna'; known: mc_sim_7b_63, "),
        (lambda: greedy_tree([[0.5]], 0), "nodes must be a whole number >= 1, got 0"),
        (lambda: greedy_tree([[0.5]], 3, 0), "depth must be a whole number >= 1, got 0"),
        (lambda: optimal_tree([[0.0], [0.5]], 3), "first head is never right"),
        (lambda: check_accuracies([]), r"one list of numbers a head, got \[\]"),
        (lambda: check_accuracies([[0.5], []]), r"head 1 must be numbers by rank, got \[\]"),
        (lambda: check_accuracies([0.5]), "head 0 must be numbers by rank, got 0.5"),
        (lambda: check_accuracies([[0.5, "x"]]), r"must be a number in \[0, 1\], got 'x'"),
        (lambda: check_accuracies([[0.7, 0.7]]), "sum to at most 1, got 1.4"),
    ],
)
def test_what_is_no_tree(call, message):
    with pytest.raises(InvalidRequest, match=message):
        call()
