from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.core.tree import ROOT, TokenTree

thorough = settings(deadline=None, max_examples=100)
paths = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=8)


@st.composite
def parent_lists(draw: st.DrawFn) -> list[list[int]]:
    """Draws the parents of up to four trees, some of them empty, chains among them."""
    sizes = draw(st.lists(st.integers(0, 17), min_size=1, max_size=4))
    chain = draw(st.booleans())
    return [[node - 1 if chain else draw(st.integers(ROOT, node - 1)) for node in range(size)] for size in sizes]


def tree_of(parents: Sequence[Sequence[int]]) -> TokenTree:
    return TokenTree.from_lists(
        [[10 * row + node for node in range(len(of))] for row, of in enumerate(parents)], parents
    )


def naive_path(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


@thorough
@given(parent_lists())
def test_ancestors_and_depths(parents: list[list[int]]) -> None:
    tree = tree_of(parents)
    assert tree.ancestors.shape == (len(parents), tree.width, tree.width)
    assert tree.depths.dtype == torch.int64
    assert tree._closure().equal(tree.ancestors)  # as on a device that is not the host
    for row, of in enumerate(parents):
        for node in range(len(of)):
            path = naive_path(of, node)
            assert tree.ancestors[row, node].nonzero().flatten().tolist() == path
            assert int(tree.depths[row, node]) == len(path)


@thorough
@given(parent_lists())
def test_rows_are_ragged(parents: list[list[int]]) -> None:
    tree = tree_of(parents)
    sizes = [len(of) for of in parents]
    assert (tree.batch, tree.width, list(tree.sizes)) == (len(parents), max(sizes), sizes)
    assert tree.valid.sum(-1).tolist() == sizes
    assert all(row[:size].all() for row, size in zip(tree.valid, sizes, strict=True))
    tokens, listed = tree.to_lists()
    assert listed == parents
    assert tokens == [[10 * row + node for node in range(size)] for row, size in enumerate(sizes)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 62, 63, 64, 100])
def test_ancestors_of_long_chains_are_complete(length: int) -> None:
    tree = TokenTree.chain(torch.zeros(2, length, dtype=torch.int64))
    assert tree.ancestors.equal(torch.ones(length, length).tril().bool().expand(2, -1, -1))


def test_chain_with_sizes() -> None:
    tree = TokenTree.chain(torch.tensor([[5, 6, 7], [8, 9, 0]]), sizes=[3, 2])
    assert tree.to_lists() == ([[5, 6, 7], [8, 9]], [[-1, 0, 1], [-1, 0]])
    assert TokenTree.chain(torch.tensor([[5, 6, 7]])).sizes == (3,)


def test_empty() -> None:
    tree = TokenTree.empty(3)
    assert (tree.batch, tree.width, tree.sizes) == (3, 0, (0, 0, 0))
    assert tree.to_lists() == ([[], [], []], [[], [], []])
    assert tree.ancestors.shape == (3, 0, 0)
    assert tree.depths.shape == tree.valid.shape == (3, 0)


def read_paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """Returns the tokens from the root to each node of a row."""
    tokens, parents = (part[row] for part in tree.to_lists())
    return [tuple(tokens[node] for node in naive_path(parents, end)) for end in range(len(tokens))]


@thorough
@given(st.lists(paths, min_size=1, max_size=3))
def test_from_paths_has_every_prefix_once(rows: list[list[list[int]]]) -> None:
    tree = TokenTree.from_paths(rows)
    for row, given_paths in enumerate(rows):
        prefixes = {tuple(path[:length]) for path in given_paths for length in range(1, len(path) + 1)}
        read = read_paths(tree, row)
        assert len(read) == len(set(read))
        assert set(read) == prefixes


@thorough
@given(paths, st.integers(0, 12))
def test_a_budget_keeps_the_first_nodes_of_the_preferred_paths(given_paths: list[list[int]], budget: int) -> None:
    whole, cut = TokenTree.from_paths([given_paths]), TokenTree.from_paths([given_paths], budget=budget)
    assert cut.sizes[0] == min(budget, whole.sizes[0])
    assert read_paths(cut, 0) == read_paths(whole, 0)[:budget]


def test_candidate_marks_are_padded_with_false() -> None:
    tree = TokenTree.from_lists([[1, 2], [3]], [[-1, 0], [-1]], candidate=[[True, False], [True]])
    assert tree.candidate is not None
    assert tree.candidate.tolist() == [[True, False], [True, False]]


def test_to_the_same_device_is_the_same_tree() -> None:
    tree = tree_of([[-1, 0]])
    assert tree.to("cpu") is tree
    moved = TokenTree.from_lists([[1, 2]], [[-1, 0]], [[True, False]]).to("meta")
    assert moved.candidate is not None
    assert {part.device.type for part in (moved.tokens, moved.parents, moved.candidate)} == {"meta"}


@pytest.mark.parametrize("parent", [1, 2, -2])
def test_a_parent_must_come_before_its_child(parent: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"row 1, node 1: parent must be in \[-1, 1\), got {parent}"):
        TokenTree.from_lists([[1], [2, 3]], [[-1], [-1, parent]])


def test_tokens_and_parents_must_match() -> None:
    with pytest.raises(InvalidRequest, match="row 0 has 2 tokens but 1 parents"):
        TokenTree.from_lists([[1, 2]], [[-1]])
