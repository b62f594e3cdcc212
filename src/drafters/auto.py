"""Auto: drafts with another drafter as deep and as wide as pays on this machine and this text, or not at all.

How much wider passes take is measured once a target; how often its drafter is right is watched as the text
grows, also while nothing is submitted: a draft that was held back is compared with what the target says by itself.
What may be lost is kept in an account (auto_costs.py), so that no text makes it slower than plain decoding by more
than a few percent. It knows no drafter by name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.checks import real_number, whole_number
from ..core.drafter import Drafter, DraftSession, FeatureName, Observation
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal, Verdict
from ..core.state import DecodeState
from ..core.target import Scores, Target
from .auto_costs import Clock, PassCosts, pass_seconds
from .auto_policy import LONGEST, Plan, Policy, RowMemory, Watch, follow, learn_level
from .auto_trees import RowTree, cut, row_trees, seen_whole

__all__ = ["LONGEST", "Auto"]

BACKLOG = 256
"""Rounds without a draft after which the inner drafter is told of them; bounds what is kept of the target."""


class Auto(Drafter):
    """Wraps a drafter, and decides every round whether it drafts, how deep, and which of its nodes are verified.

    Texts keep the target's law: candidates that were drawn are cut by where they hang in the tree, and that is
    settled before they are drawn. Choices depend on measured time. So the text of rule `rejection` or `traversal` at
    a temperature above 0, which is a matter of chance and of what was drafted, may differ from run to run though the
    seed is the same; with rules `greedy` and `coupled` it is always plain decoding's.

    What is learned is kept from call to call. Reading prompts is not spared while drafting is off: a drafter that
    reads them (a draft model) takes that time once a prompt.

    Args:
        of: the drafter, of which a copy is bound.
        seconds: most time spent on measuring the target when it is bound; what another `auto` has measured on it in
            as much time is taken over.
        curve: seconds of a pass by its number of tokens; nothing is measured then.
        clock: tells the time, in seconds.

    Raises:
        InvalidRequest: `of` is no drafter, or the curve has no times.
    """

    def __init__(
        self,
        *,
        of: Drafter,
        seconds: float = 1.5,
        curve: Mapping[int, float] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        if not isinstance(of, Drafter):
            raise InvalidRequest(f"of must be a Drafter, got {of!r}")
        self.drafter = of
        self.seconds = real_number("seconds", seconds, 0.0, 60.0)
        self.curve = None if curve is None else _checked(curve)
        self.clock = clock
        self.policy = Policy(PassCosts(self.curve or {1: 1.0}))

    def copy(self) -> Auto:
        """Returns a wrap of a copy of the drafter, which has learned nothing."""
        return Auto(of=self.drafter.copy(), seconds=self.seconds, curve=self.curve, clock=self.clock)

    def bind(self, target: Target) -> None:
        """Binds the drafter and measures what passes of the target take, unless that is known.

        Raises:
            InvalidRequest: several processes share the target; each has a clock of its own.
        """
        if target.sharded:
            raise InvalidRequest(
                "auto drafts by the clock, and the processes that share a target must draft alike; "
                "name the drafter itself, with a gamma of your choice"
            )
        self.drafter.bind(target)
        self.features = self.drafter.features
        self.policy = Policy(PassCosts(self.curve or pass_seconds(target, self.clock, self.seconds)))

    def session(self, state: DecodeState) -> DraftSession:
        """Returns a session that drives the drafter's."""
        return _Session(self.policy, self.drafter.session(state), self.clock)


@dataclass(eq=False)
class _Shallow(DecodeState):
    """A call as the inner drafter sees it: no deeper than `limit`."""

    limit: int = 0

    def room(self, row: int) -> int:
        return min(super().room(row), self.limit)


@dataclass(eq=False)
class _Round:
    """A round between proposal and observation.

    Attributes:
        began: when it began.
        depth: what the inner drafter was asked for; 0 where it was not.
        whole: what it drafted.
        trees: the same on the host.
        plan: what was kept.
        drafted: when the draft was done.
    """

    began: float
    depth: int = 0
    whole: Proposal | None = None
    trees: list[RowTree] = field(default_factory=list)
    plan: Plan = field(default_factory=lambda: Plan([]))
    drafted: float = 0.0


class _Session(DraftSession):
    """Stands between the engine and the inner session.

    While nothing is drafted the inner session is told nothing; what it missed is told before its next draft, as if it
    had been one forward that read several pending tokens, which every drafter knows from the prompts.
    """

    def __init__(self, policy: Policy, inner: DraftSession, clock: Clock) -> None:
        self._policy, self._inner, self._clock = policy, inner, clock
        self._rows: list[RowMemory] = []
        self._missed = _Missed(type(inner).observe is not DraftSession.observe)
        self._round: _Round | None = None
        self._fresh = False

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        self._missed.tell(self._inner, state, rows[0])
        self._inner.admit(state, rows)
        self._rows += [self._policy.new_row() for _ in rows]
        self._fresh = True

    def propose(self, state: DecodeState) -> Proposal:
        """Returns what is left of the inner drafter's proposal; often nothing."""
        at = self._round = _Round(self._clock())
        count = len(state.rows)
        room = max((state.room(row) for row in range(count)), default=0)
        at.depth = self._policy.depth(self._rows, room)
        proposal = self._draft(state, at) if at.depth else Proposal.empty(count)
        at.drafted = self._clock()
        return proposal

    def _draft(self, state: DecodeState, at: _Round) -> Proposal:
        self._missed.tell(self._inner, state, len(state.rows))
        limited = _Shallow(state.target, state.cache, state.style, state.rows, limit=at.depth)
        whole = at.whole = self._inner.propose(limited)
        at.trees = row_trees(whole.tree)
        policy = self._policy
        policy.idle = max((tree.idle for tree in at.trees), default=0)
        if whole.tree.width:  # a draft that found nothing worth its row says nothing of how it is made
            policy.drawn = whole.law is not None
        deepest = max((len(position) for tree in at.trees for position in tree.positions), default=0)
        policy.deepest = max(policy.deepest, deepest)
        if policy.drawn:
            at.plan = policy.keep_allowed(at.trees, at.depth)
        else:
            at.plan = policy.plan(self._rows, at.trees, self._clock() - at.began)
        if whole.exit is not None and any(at.plan.kept):  # its columns are in the cache already, in their order
            at.plan.kept = [list(range(len(tree.tokens))) for tree in at.trees]
        return cut(whole, at.trees, at.plan.kept)

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Tells the inner session, now or later, and learns from what was committed."""
        at, self._round = self._round, None
        if at is None:  # the prompts of new rows
            self._inner.observe(state, seen)
            return
        now = self._clock()
        nodes = seen.proposal.tree.width
        if at.whole is None:
            self._missed.note(seen)
            if len(self._missed) >= BACKLOG:
                self._missed.tell(self._inner, state, len(state.rows))
        elif not nodes or all(len(own) == len(tree.tokens) for own, tree in zip(at.plan.kept, at.trees, strict=True)):
            self._inner.observe(state, seen)
        elif self._missed.wanted:
            self._inner.observe(state, seen_whole(seen, at.whole, at.plan.kept))
        self._learn(state, seen, at)
        draft = (at.drafted - at.began) + (self._clock() - now)
        policy, tokens = self._policy, sum(map(len, seen.verdict.tokens))
        if at.depth and (not self._fresh or policy.drafts.seconds(at.depth) is None):
            policy.drafts.learn(at.depth, draft)
        if at.depth:
            self._fresh = False
        policy.book(len(self._rows), tokens, nodes, now - at.drafted, draft, at.depth)

    def retain(self, rows: Sequence[int]) -> None:
        self._inner.retain(rows)
        self._missed.retain(rows)
        self._rows = [self._rows[row] for row in rows]

    def _learn(self, state: DecodeState, seen: Observation, at: _Round) -> None:
        policy = self._policy
        if at.whole is not None and policy.drawn:
            for row, tree, kept, path in zip(self._rows, at.trees, at.plan.kept, seen.verdict.paths, strict=True):
                _learn_drawn(row, policy, tree, kept, [kept[node] for node in path])
            policy.allow(len(self._rows), at.trees)
            return
        for index, row in enumerate(self._rows):
            if at.whole is not None and (row.watch is None or seen.proposal.tree.width):
                tree, start = at.trees[index], len(state.rows[index].tokens) - len(seen.verdict.tokens[index])
                children = tree.children()
                row.watch = Watch(tree.tokens, tree.positions, children, start) if children else None
                if not children:
                    learn_level(row, policy.pooled, 1, ())
            follow(row, state.rows[index].tokens, policy.pooled)
            if row.watch is not None and seen.proposal.tree.width:
                row.hot, row.watch = row.watch.depth > 0, None  # the next draft is watched from its beginning


class _Missed:
    """Rounds that the inner session has not been told of; every row was in each of them.

    Args:
        wanted: whether the inner session listens at all.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._features: list[dict[FeatureName, Tensor]] = []
        self._last: Observation | None = None

    def __len__(self) -> int:
        return len(self._features)

    def note(self, seen: Observation) -> None:
        """Keeps what a round without a draft observed: features of one token a row."""
        if self.wanted:
            self._features.append(dict(seen.scores.features))
            self._last = seen

    def tell(self, inner: DraftSession, state: DecodeState, rows: int) -> None:
        """Tells of all that was missed as of one forward over the first `rows` rows."""
        if self._last is None:
            return
        features = {name: torch.cat([part[name] for part in self._features], 1) for name in self._features[0]}
        scores = Scores(self._last.scores.logits, features, [len(self._features)] * rows)
        verdict = Verdict([[] for _ in range(rows)], self._last.verdict.tokens)
        seen = Observation(range(rows), Proposal.empty(rows), scores, verdict)
        self._features, self._last = [], None
        inner.observe(state, seen)

    def retain(self, rows: Sequence[int]) -> None:
        """Drops the rows that left."""
        if not rows:
            self._features, self._last = [], None
        if self._last is None:
            return
        order = list(rows)
        self._features = [{name: part[order] for name, part in features.items()} for features in self._features]
        scores = Scores(self._last.scores.logits[order], {}, [1] * len(order))
        tokens = [self._last.verdict.tokens[row] for row in order]
        self._last = Observation(
            range(len(order)), Proposal.empty(len(order)), scores, Verdict([[]] * len(order), tokens)
        )


def _learn_drawn(row: RowMemory, policy: Policy, tree: RowTree, kept: Sequence[int], path: Sequence[int]) -> None:
    """Notes which of the nodes that were verified the rule accepted: of drawn ones the text says too little."""
    staying, children = set(kept), tree.children()
    before = -1
    for depth, node in enumerate([*path, -1], start=1):
        tried = [child for child in children.get(before, ()) if child in staying]
        if tried or not children:
            learn_level(row, policy.pooled, depth, [(tree.positions[child][-1], child == node) for child in tried])
        before = node
    row.hot = bool(path)


def _checked(curve: Mapping[int, float]) -> dict[int, float]:
    if not curve:
        raise InvalidRequest("curve must give the seconds of a pass by its number of tokens, got nothing")
    return {
        whole_number("a number of tokens in curve", tokens): real_number("seconds in curve", seconds, 1e-9, 3600.0)
        for tokens, seconds in curve.items()
    }
