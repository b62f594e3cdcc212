"""Random ragged batches of trees, and the plain way to walk them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from draftwood.core.proposal import Proposal
from draftwood.core.tree import ROOT, TokenTree

VOCABULARY = 6
MOST_NODES = 7


class Batch(NamedTuple):
    """Trees with the target's logits, [batch, 1 + nodes, vocabulary] float64."""

    proposal: Proposal
    logits: Tensor

    def row(self, index: int) -> Batch:
        """Returns one row alone, without its padding."""
        tree, law = self.proposal.tree, self.proposal.law
        size = tree.sizes[index]
        part = slice(index, index + 1), slice(size)
        candidate = None if tree.candidate is None else tree.candidate[part]
        alone = TokenTree(tree.tokens[part], tree.parents[part], (size,), candidate)
        return Batch(Proposal(alone, None if law is None else law[part]), self.logits[index : index + 1, : 1 + size])

    def path(self, row: int, node: int) -> list[int]:
        """Returns the nodes from the root's child down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.insert(0, node)
            node = int(self.proposal.tree.parents[row, node])
        return path

    def passing_paths(self, row: int, passes: Callable[[int, int], bool]) -> list[list[int]]:
        """Returns every path, the empty one included, whose candidates all satisfy passes(parent, token)."""
        tree = self.proposal.tree

        def passed(node: int) -> bool:
            candidate = tree.candidate is None or bool(tree.candidate[row, node])
            return candidate and passes(int(tree.parents[row, node]), int(tree.tokens[row, node]))

        paths = [self.path(row, node) for node in range(tree.sizes[row])]
        return [[], *(path for path in paths if all(map(passed, path)))]

    def tokens(self, row: int, path: list[int]) -> list[int]:
        """Returns the tokens of a path."""
        return [int(self.proposal.tree.tokens[row, node]) for node in path]


@st.composite
def batches(draw: st.DrawFn, one_hot: bool = False) -> Batch:
    """Draws up to three trees, some empty; every other token is the target's most likely one, so that paths match.

    Logits and law of padding are nan.
    """
    size = st.integers(0, MOST_NODES)
    sizes = draw(st.lists(size, min_size=1, max_size=3))
    rows, widest = len(sizes), max(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    logits = torch.randn(rows, 1 + widest, VOCABULARY, generator=generator, dtype=torch.float64) * 2
    if one_hot:
        logits = torch.zeros_like(logits).masked_fill(logits < logits.max(-1, keepdim=True).values, -torch.inf)
    tokens, parents, candidate = [], [], []
    for row, nodes in enumerate(sizes):
        parents.append([draw(st.integers(ROOT, node - 1)) for node in range(nodes)])
        candidate.append([draw(st.integers(0, 5)) > 0 for _ in range(nodes)])
        likely = [int(logits[row, 1 + parent].argmax()) for parent in parents[row]]
        tokens.append([token if draw(st.booleans()) else draw(st.integers(0, VOCABULARY - 1)) for token in likely])
        logits[row, 1 + nodes :] = torch.nan
    marks = candidate if draw(st.booleans()) else None
    law = None
    if draw(st.booleans()):
        law = torch.randn(rows, widest, VOCABULARY, generator=generator, dtype=torch.float64).softmax(-1)
        law = law.masked_fill(logits[:, 1:].isnan(), torch.nan)
    return Batch(Proposal(TokenTree.from_lists(tokens, parents, marks), law), logits)
