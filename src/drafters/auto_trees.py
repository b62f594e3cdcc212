"""Cutting a proposal by position, and telling its drafter what came of it in the drafter's own numbers.

A position is where a node hangs, not which token it is: the ranks of the nodes from the root's child down to it,
each among its candidate siblings, from 0. The module decides nothing; it knows neither costs nor acceptances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.drafter import Observation
from ..core.proposal import Proposal, Verdict
from ..core.tree import ROOT, TokenTree

Position = tuple[int, ...]
IDLE: Position = ()
"""The position of nodes that are no candidates."""


class RowTree(NamedTuple):
    """One row of a tree on the host.

    Attributes:
        tokens: of each node.
        parents: of each node; -1 for the root.
        positions: of each node; `IDLE` where it is no candidate.
    """

    tokens: list[int]
    parents: list[int]
    positions: list[Position]

    @property
    def idle(self) -> int:
        """Number of nodes that are no candidates."""
        return self.positions.count(IDLE)

    def children(self) -> dict[int, list[int]]:
        """Returns the candidate children of each node, eldest first."""
        found: dict[int, list[int]] = {}
        for node, (parent, position) in enumerate(zip(self.parents, self.positions, strict=True)):
            if position != IDLE:
                found.setdefault(parent, []).append(node)
        return found


def row_trees(tree: TokenTree) -> list[RowTree]:
    """Copies trees to the host and names the position of every node."""
    flags = None if tree.candidate is None else tree.candidate.tolist()
    rows = []
    for row, (tokens, parents) in enumerate(zip(*tree.to_lists(), strict=True)):
        positions: list[Position] = []
        born: dict[int, int] = {}
        for node, parent in enumerate(parents):
            above = IDLE if parent == ROOT else positions[parent]
            if (flags is not None and not flags[row][node]) or (parent != ROOT and above == IDLE):
                positions.append(IDLE)  # what hangs below an idle node can never be committed either
                continue
            rank = born[parent] = born.get(parent, -1) + 1
            positions.append((*above, rank))
        rows.append(RowTree(tokens, parents, positions))
    return rows


def cut(proposal: Proposal, rows: Sequence[RowTree], kept: Sequence[Sequence[int]]) -> Proposal:
    """Returns the proposal of the kept nodes, in their order.

    Args:
        proposal: what was drafted.
        rows: its trees.
        kept: for each row the nodes that stay, rising, parents with their children.
    """
    if not any(kept):
        return Proposal.empty(len(rows))
    if all(len(nodes) == len(row.tokens) for nodes, row in zip(kept, rows, strict=True)):
        return proposal
    tokens, parents, candidate = [], [], []
    for row, nodes in zip(rows, kept, strict=True):
        place = {node: index for index, node in enumerate(nodes)} | {ROOT: ROOT}
        tokens.append([row.tokens[node] for node in nodes])
        parents.append([place[row.parents[node]] for node in nodes])
        candidate.append([row.positions[node] != IDLE for node in nodes])
    flagged = proposal.tree.candidate is not None
    tree = TokenTree.from_lists(tokens, parents, candidate if flagged else None).to(proposal.tree.tokens.device)
    if proposal.law is None:
        return Proposal(tree)
    index = _padded(kept, tree.width, 0).to(proposal.law.device)
    return Proposal(tree, proposal.law[torch.arange(len(rows), device=index.device)[:, None], index])


def seen_whole(seen: Observation, whole: Proposal, kept: Sequence[Sequence[int]]) -> Observation:
    """Translates what was observed of a cut proposal into the nodes of the whole one.

    Scores of nodes that were cut are NaN, as they are for a part of a merged tree; paths end where the cut does.
    """
    paths = [[nodes[node] for node in path] for nodes, path in zip(kept, seen.verdict.paths, strict=True)]
    width, pending = whole.tree.width, seen.scores.pending[0]  # the same in all rows, as there is a tree
    places = torch.full((len(kept), width), -1)
    for row, nodes in enumerate(kept):
        places[row, list(nodes)] = torch.arange(len(nodes))

    def spread(values: Tensor, before: int) -> Tensor:  # [batch, before + kept, size] -> [batch, before + nodes, size]
        own = places.to(values.device)
        prefix = torch.arange(before, device=values.device).expand(len(kept), before)
        columns = torch.cat([prefix, before + own.clamp(min=0)], 1)
        spread = values[torch.arange(len(kept), device=values.device)[:, None], columns]
        spread[:, before:][own < 0] = torch.nan
        return spread

    features = {name: spread(feature, pending) for name, feature in seen.scores.features.items()}
    scores = replace(seen.scores, logits=spread(seen.scores.logits, 1), features=features)
    verdict = Verdict(paths, seen.verdict.tokens)
    return Observation(seen.rows, whole.to(seen.scores.logits.device), scores, verdict)


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int) -> Tensor:
    return torch.tensor([[*row, *([fill] * (width - len(row)))] for row in rows], dtype=torch.int64)
