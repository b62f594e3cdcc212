"""Several drafters, one tree: each drafts by itself, equal prefixes share nodes, one forward scores them all.

A part never learns of the others. What it is told after the round speaks of its own nodes, wherever in the merged
tree they were; only the committed tokens may have come from elsewhere. This module knows no drafter by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.checks import whole_number
from ..core.drafter import Drafter, DraftSession, FeatureName, Observation
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal, Verdict
from ..core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from ..core.state import DecodeState
    from ..core.target import Scores, Target

CUT = -2
"""Where a node is that the budget left out of the merged tree."""


class Merged(Drafter):
    """Drafts with every part and merges their candidates into one prefix tree.

    The tree holds all that each part would have drafted alone. Where a single part has a law for the children of
    a node they keep it, as elder siblings of what the others chose; where two laws meet, the first part's holds and
    the later ones' nodes count as chosen. Both are lossless: see `merge`.

    Args:
        drafters: the parts, the most trusted first; at least two.
        budget: most candidates in a row's tree; None for no limit. A part gets what the ones before it have left,
            and its nodes in its own order. Nodes that are no candidates are scored on top.

    Raises:
        InvalidRequest: fewer than two drafters, or a budget that is no whole number or below 1.
    """

    def __init__(self, drafters: Sequence[Drafter], *, budget: int | None = None) -> None:
        if len(drafters) < 2:
            raise InvalidRequest(f"merging takes at least two drafters, got {len(drafters)}")
        self.drafters = list(drafters)
        self.budget = budget if budget is None else whole_number("budget", budget, hint=", or None for no limit")

    def copy(self) -> Merged:
        """Returns the merge of copies of the parts."""
        return Merged([drafter.copy() for drafter in self.drafters], budget=self.budget)

    def bind(self, target: Target) -> None:
        """Binds every part; the features captured are those that any of them asks for."""
        for drafter in self.drafters:
            drafter.bind(target)
        self.features = frozenset[FeatureName]().union(*(drafter.features for drafter in self.drafters))

    def session(self, state: DecodeState) -> DraftSession:
        """Returns one session that drives those of the parts."""
        return _MergedSession([drafter.session(state) for drafter in self.drafters], self.budget)


class _Branch(NamedTuple):
    """One row of one part: tokens, parents and which nodes are candidates."""

    tokens: list[int]
    parents: list[int]
    candidate: list[bool]


class Merge(NamedTuple):
    """A merged proposal and how it came about.

    Attributes:
        proposal: the merged one.
        parts: what was merged.
        branches: the trees of each part, by row.
        places: for each part and row, where each of the part's nodes is in the merged tree, or `CUT`.
    """

    proposal: Proposal
    parts: list[Proposal]
    branches: list[list[_Branch]]
    places: list[list[list[int]]]


def merge(parts: Sequence[Proposal], budget: int | None = None) -> Merge:
    """Merges proposals for the same rows.

    Why the law stays true: parts draft independently, so given all that the others did, a part's nodes still have
    the law it states. Whether a node is in the tree must only not depend on its own token: siblings with a law come
    first, as they were drawn; none of them is dropped for being a duplicate (a later, chosen one is); and none is let
    in for being one when the budget is used up. Any node may be called chosen, whatever it was.

    Args:
        parts: the proposals, the most trusted first.
        budget: most candidates a row; None for no limit.
    """
    drawn = [part.law is not None for part in parts]
    order = sorted(range(len(parts)), key=lambda part: not drawn[part])
    rows: list[_MergedRow] = []
    places: list[list[list[int]]] = [[] for _ in parts]
    branches = [_branches(part.tree) for part in parts]
    for apart in zip(*branches, strict=True):
        trial, row = _MergedRow(budget), _MergedRow()
        # Who gets a share of the budget goes by trust, who comes first in the tree by law.
        fits = [trial.add(part, branch, drawn[part]) for part, branch in enumerate(apart)]
        for part in order:
            places[part].append(row.add(part, apart[part], drawn[part], fits[part]))
        rows.append(row)
    idle = any(not all(row.candidate) for row in rows)
    tree = TokenTree.from_lists(
        [row.tokens for row in rows],
        [row.parents for row in rows],
        [row.candidate for row in rows] if idle else None,
    )
    return Merge(Proposal(tree, _merge_laws(parts, rows, tree)), list(parts), branches, places)


class _MergedRow:
    """One row of the merged tree, grown part by part.

    Args:
        budget: the number of candidates at which it takes no more, not even duplicates; None for no limit.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._budget = budget
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.candidate: list[bool] = []
        self.law: list[tuple[int, int] | None] = []  # of each node: the part and its node whose law it keeps
        self._children: dict[tuple[int, int], int] = {}  # candidates by parent and token
        self._owner: dict[int, int] = {}  # of each node: the first part that drafts candidates under it

    def add(self, part: int, branch: _Branch, drawn: bool, fits: list[int] | None = None) -> list[int]:
        """Adds the nodes of a part.

        Args:
            part: its index.
            branch: its nodes.
            drawn: whether it has a law.
            fits: its places in a trial; what was cut there is cut here.

        Returns:
            The place of each node.
        """
        places: list[int] = []
        for node, (token, parent, candidate) in enumerate(zip(*branch, strict=True)):
            above = ROOT if parent == ROOT else places[parent]
            full = candidate and self._budget is not None and sum(self.candidate) >= self._budget
            if above == CUT or full or (fits is not None and fits[node] == CUT):
                places.append(CUT)
                continue
            keeps_law = candidate and self._owner.setdefault(above, part) == part and drawn
            place = self._children.get((above, token)) if candidate else None
            if place is None or (drawn and place in places):
                place = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.candidate.append(candidate)
                self.law.append((part, node) if keeps_law else None)
                if candidate:
                    self._children.setdefault((above, token), place)
            places.append(place)
        return places


def _branches(tree: TokenTree) -> list[_Branch]:
    """Copies a part's trees to the host."""
    if tree.candidate is None:
        candidate = [[True] * size for size in tree.sizes]
    else:
        candidate = [row[:size] for row, size in zip(tree.candidate.tolist(), tree.sizes, strict=True)]
    return [_Branch(*row) for row in zip(*tree.to_lists(), candidate, strict=True)]


def _merge_laws(parts: Sequence[Proposal], rows: Sequence[_MergedRow], tree: TokenTree) -> Tensor | None:
    """Returns the law of the merged tree, [batch, nodes, vocabulary], or None when no part has one."""
    laws = [part.law for part in parts]
    like = next((law for law in laws if law is not None), None)
    if like is None:
        return None
    merged = like.new_zeros(tree.batch, tree.width, like.shape[-1])
    merged.scatter_(2, tree.tokens.to(like.device)[:, :, None], 1.0)
    for part, law in enumerate(laws):
        kept = [
            (index, place, source[1])
            for index, row in enumerate(rows)
            for place, source in enumerate(row.law)
            if source is not None and source[0] == part
        ]
        if law is not None and kept:
            index, place, node = torch.tensor(kept, device=like.device).T
            merged[index, place] = law[index, node].to(merged)
    return merged


class _MergedSession(DraftSession):
    """Drives the sessions of the parts."""

    def __init__(self, sessions: Sequence[DraftSession], budget: int | None) -> None:
        self._sessions = sessions
        self._budget = budget
        self._merge: Merge | None = None

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        for session in self._sessions:
            session.admit(state, rows)

    def propose(self, state: DecodeState) -> Proposal:
        self._merge = merge([session.propose(state) for session in self._sessions], self._budget)
        return self._merge.proposal

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Tells each part what became of its own nodes; at prefill nobody has any."""
        for part, session in enumerate(self._sessions):
            if type(session).observe is not DraftSession.observe:
                drafted = self._merge if seen.proposal.tree.width else None
                session.observe(state, seen if drafted is None else _seen_by(part, drafted, seen))

    def retain(self, rows: Sequence[int]) -> None:
        for session in self._sessions:
            session.retain(rows)


@dataclass(frozen=True, eq=False)
class _PartObservation(Observation):
    """What one part is told. Its own nodes have its own indices; features of accepted tokens come from the whole."""

    whole: Observation

    def kept(self, name: FeatureName) -> list[Tensor]:
        return self.whole.kept(name)


def _seen_by(part: int, merged: Merge, seen: Observation) -> Observation:
    """Translates what was observed into the nodes of one part.

    The part's path is what it owns of the accepted one, always a prefix; `verdict.tokens` are all that was committed.
    """
    places, proposal = merged.places[part], merged.parts[part]
    paths = []
    for branch, row, path in zip(merged.branches[part], places, seen.verdict.paths, strict=True):
        own = {place: node for node, place in enumerate(row)}
        node = next((own[place] for place in reversed(path) if place in own), ROOT)
        up = []
        while node != ROOT:
            up.append(node)
            node = branch.parents[node]
        paths.append(up[::-1])
    verdict = Verdict(paths, seen.verdict.tokens)
    scores = _columns(seen.scores, places, proposal.tree.width)
    return _PartObservation(seen.rows, proposal, scores, verdict, seen)


def _columns(scores: Scores, places: list[list[int]], width: int) -> Scores:
    """Returns the scores of the nodes at `places` as those of nodes 0 to width - 1; NaN for nodes that were cut."""
    own_order = all(place == node for row in places for node, place in enumerate(row))
    padded = torch.tensor([[*row, *([CUT] * (width - len(row)))] for row in places], dtype=torch.int64)

    def gather(values: Tensor, before: int) -> Tensor:  # [batch, before + nodes, size]
        if own_order:
            return values[:, : before + width]
        prefix = torch.arange(-before, 0).expand(len(places), before)
        columns = before + torch.cat([prefix, padded.clamp(min=0)], 1).to(values.device)
        gathered = values[torch.arange(len(places), device=values.device)[:, None], columns]
        gathered[:, before:][(padded == CUT).to(values.device)] = torch.nan
        return gathered

    pending = scores.pending[0]  # the same in all rows, as there is a tree
    features = {name: gather(feature, pending) for name, feature in scores.features.items()}
    return replace(scores, logits=gather(scores.logits, 1), features=features)
