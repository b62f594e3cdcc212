"""Drafting with some of the target's own layers, on the target's own cache.

What `layer-skip` and `early-exit` share. The view writes the keys and values of its layers behind the committed
tokens, and the target's forward writes over them; no second copy exists. The module does not know which layers the
view has left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.cache import SlotCache
from ..core.checks import real_number, switch
from ..core.drafter import Drafter, DraftSession, FeatureName, Observation
from ..core.proposal import ExitStates, Proposal
from ..core.state import DecodeState
from ..core.target import Target
from ..core.tree import TokenTree
from .draft_tree import Grown, Tree, grow, parse_shape

DEFAULT_GAMMA = 8
START_THRESHOLD = 0.8


class Resume(NamedTuple):
    """How the target goes on from a draft that ran its first layers: the exit layer E, and a view of the others."""

    layer: int
    rest: Target


class ViewDrafter(Drafter):
    """A drafter whose network is a view of the target. Subclasses set `view` (and `resume`) in `bind`.

    Args:
        gamma: depth of the draft, 8 when None; with a branching `tree` it is the number of levels.
        tree: `"chain"`; children of each context level by level, such as `(3, 2, 1)`; or `"dynamic"`, the best
            nodes by the draft's cumulative probability: deep where it is sure, wide where it is not.
        nodes: most nodes of a dynamic tree.
        width: contexts that a dynamic tree continues at each level, and children it tries in each.
        threshold: the draft goes no further behind a token for which its top probability was below this; 0 never stops.
        adaptive: move a threshold above 0, row by row, so as to hold an acceptance of 0.9.
    """

    view: Target
    resume: Resume | None = None

    def __init__(
        self,
        *,
        gamma: int | None,
        tree: Tree,
        nodes: int | None,
        width: int | None,
        threshold: float,
        adaptive: bool,
    ) -> None:
        if gamma is None and isinstance(tree, str):
            gamma = DEFAULT_GAMMA
        self.shape = parse_shape(tree, gamma, nodes, width)
        self.threshold = real_number("threshold", threshold, 0.0, 1.0, ends="[)")
        self.adaptive = switch("adaptive", adaptive) and self.threshold > 0.0

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that drafts on the cache of the call."""
        return _Session(self)


@dataclass
class StopThreshold:
    """When a row's draft stops, and how that adapts: section 3.3 of Draft & Verify (arXiv:2309.08168).

    Attributes:
        value: the draft stops behind a token for which its top probability was below this.
        acceptance: running mean of accepted over drafted tokens.
    """

    value: float = START_THRESHOLD
    acceptance: float = 0.0

    GOAL = 0.9  # alpha: the acceptance to hold
    MEMORY = 0.5  # beta_1: of the running acceptance
    STEP = 0.01  # epsilon
    INERTIA = 0.9  # beta_2: of the threshold

    def update(self, accepted: int, drafted: int, *, full: bool) -> None:
        """Learns from one round; `full` says that the draft stopped for its length, so that less would not help."""
        self.acceptance = self.MEMORY * self.acceptance + (1 - self.MEMORY) * accepted / drafted
        if self.acceptance < self.GOAL:
            moved = self.value + self.STEP
        else:
            moved = self.value if full else self.value - self.STEP
        # Beyond 1 nothing would change, but the way back would be as long as the way there.
        self.value = min(self.INERTIA * self.value + (1 - self.INERTIA) * moved, 1.0)


class _Session(DraftSession):
    """Drafts for the rows of one call; keeps a threshold for each, and of the text nothing."""

    def __init__(self, drafter: ViewDrafter) -> None:
        self._drafter = drafter
        self._thresholds: list[StopThreshold] = []
        self._drafted: list[int] = []

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Gives new rows a threshold."""
        self._thresholds += [StopThreshold(self._drafter.threshold) for _ in rows]

    def propose(self, state: DecodeState) -> Proposal:
        """Drafts a tree for every row that has room, and leaves the cache's committed part as it was."""
        shape, resume = self._drafter.shape, self._drafter.resume
        cache, committed = state.cache, list(state.cache.lengths)
        depths = [min(shape.depth, state.room(row)) for row in range(len(state.rows))]
        if not any(depths):
            return Proposal.empty(len(depths))
        pending = [row.tokens[length:] for row, length in zip(state.rows, committed, strict=True)]
        reader = _Reader(self._drafter.view, cache, None if resume is None else resume.layer)
        grown = grow(
            state,
            shape,
            depths,
            reader.begin(pending),
            reader.read,
            confidence=[threshold.value for threshold in self._thresholds],
            leaves=None if resume is None else reader.complete,
        )
        if resume is not None:
            cache.keep(grown.columns)  # moves each node's keys and values to where the target will look for them
        cache.lengths = committed
        self._drafted = _depths(grown.proposal.tree)
        return grown.proposal if resume is None else _with_exit(grown, reader.states(), resume)

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Adapts the thresholds to what was accepted."""
        if not self._drafter.adaptive or not seen.proposal.tree.width:
            return
        for row, path in zip(seen.rows, seen.verdict.paths, strict=True):
            drafted = self._drafted[row]
            if drafted:
                full = drafted == self._drafter.shape.depth
                self._thresholds[row].update(len(path), drafted, full=full)

    def retain(self, rows: Sequence[int]) -> None:
        """Drops the rows that left."""
        self._thresholds = [self._thresholds[row] for row in rows]


class _Reader:
    """Runs the view behind the committed tokens of a cache, and collects its exit states if there is an exit."""

    def __init__(self, view: Target, cache: SlotCache, exit_layer: int | None) -> None:
        self._view, self._cache, self._exit = view, cache, exit_layer
        self._features: frozenset[FeatureName] = frozenset() if exit_layer is None else frozenset({exit_layer})
        self._states: list[Tensor] = []

    def begin(self, pending: Sequence[Sequence[int]]) -> Tensor:
        """Reads the newest committed token of each row; returns the logits after it, [batch, vocabulary]."""
        scores = self._view.score(self._cache, pending, TokenTree.empty(len(pending)), features=self._features)
        self._states += scores.features.values()
        return scores.logits[:, 0]

    def read(self, tree: TokenTree, opened: int, head: bool = True) -> Tensor:
        """Reads the nodes from `opened` on; returns the logits after them."""
        nothing: list[list[int]] = [[]] * tree.batch
        scores = self._view.score(self._cache, nothing, tree, opened=opened, features=self._features, head=head)
        self._states += scores.features.values()
        return scores.logits

    def complete(self, tree: TokenTree, opened: int) -> None:
        """Reads the nodes from `opened` on, of which only keys, values and exit states are wanted."""
        self.read(tree, opened, head=False)

    def states(self) -> Tensor:
        """Returns the exit states, [batch, 1 + columns, width], the newest committed token first."""
        return torch.cat(self._states, 1)


def _depths(tree: TokenTree) -> list[int]:
    if not tree.width:
        return [0] * tree.batch
    depths: list[int] = (tree.depths * tree.valid).amax(1).tolist()
    return depths


def _with_exit(grown: Grown, states: Tensor, resume: Resume) -> Proposal:
    """Adds the exit states of the newest committed token and of every node, in the order of the proposal."""
    tree = grown.proposal.tree
    index = torch.zeros(tree.batch, 1 + tree.width, dtype=torch.int64)
    for row, columns in enumerate(grown.columns):
        index[row, 1 : 1 + len(columns)] = torch.tensor(columns, dtype=torch.int64) + 1
    hidden = states[torch.arange(tree.batch)[:, None].to(states.device), index.to(states.device)]
    return Proposal(tree, grown.proposal.law, ExitStates(resume.layer, hidden, resume.rest))
