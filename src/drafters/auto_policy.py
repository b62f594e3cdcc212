"""Whether to draft, how deep, and which nodes to keep: most tokens a second under what was measured.

Draft lengths by expected speedup are Leviathan et al.'s (arXiv:2211.17192, section 3.3); the value of a node as the
product of acceptances along its path by rank is Sequoia's (arXiv:2402.12374), as is the idea that tree size follows
from measured passes. The module knows neither clock nor engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .auto_costs import Account, DraftCosts, PassCosts
from .auto_trees import IDLE, Position, RowTree

LONGEST = 16
"""Deepest draft that is asked for."""
PROBE_DEPTH = 4
MARGIN = 0.01
"""What a draft must promise to gain, in plain rounds."""
CHEAP = 0.005
"""The share of the time that may go into watching a drafter that does not pay. A draft that takes less than this share
of a plain round is made every round."""
STALE = 64
"""Rounds after which a plain one is due, so that what is gained is measured against the present."""
UNKNOWN = 0.25
"""What a level of drafting is taken to cost before it was measured, in plain rounds."""
LEVEL = -1
"""In place of a rank: whether any child was accepted."""

Key = tuple[bool, int, int]


class Acceptance:
    """How often a node was accepted where its parent was, by depth and rank, old rounds counting less and less.

    Keys are (hot, depth, rank): `hot` says that the row's last draft got something right, which in text that
    copies is the best predictor there is. What is not known yet is taken from the level above.

    Args:
        memory: what a trial still weighs after the next one.
        prior: where to look for what is not known, instead of the level above.
    """

    FIRST, SIBLING = 0.4, 0.4
    """Before anything was seen: the acceptance of an eldest sibling, and a younger one's over its elder's."""

    def __init__(self, memory: float, prior: Acceptance | None = None) -> None:
        self._memory, self._prior = memory, prior
        self._strength = 2.0 if prior is None else 6.0
        self._seen: dict[Key, tuple[float, float]] = {}
        self._known: dict[Key, float] = {}

    def rate(self, key: Key) -> float:
        """Returns the probability that a node is accepted, given that its parent is and the node is there."""
        known = self._known.get(key) if self._prior is None else None
        if known is None:
            tried, accepted = self._seen.get(key, (0.0, 0.0))
            known = self._known[key] = (accepted + self._strength * self._before(key)) / (tried + self._strength)
        return known

    def learn(self, key: Key, accepted: bool) -> None:
        """Notes a trial."""
        tried, before = self._seen.get(key, (0.0, 0.0))
        self._seen[key] = self._memory * tried + 1.0, self._memory * before + accepted
        self._known.clear()

    def _before(self, key: Key) -> float:
        hot, depth, rank = key
        if self._prior is not None:
            return self._prior.rate(key)
        return self.rate((hot, depth - 1, rank)) if depth > 1 else self.FIRST * self.SIBLING ** max(rank, 0)


@dataclass(eq=False)
class Watch:
    """A tree that is compared with the text as the text grows.

    Attributes:
        tokens: of its nodes.
        positions: of its nodes.
        children: candidate children of each node, eldest first.
        start: length of the text behind which it was drafted.
        node: how far the text has followed it.
        depth: of that node.
    """

    tokens: Sequence[int]
    positions: Sequence[Position]
    children: dict[int, list[int]]
    start: int
    node: int = -1
    depth: int = 0


@dataclass(eq=False)
class RowMemory:
    """What is known of one row."""

    acceptance: Acceptance
    hot: bool = False
    watch: Watch | None = None


@dataclass(eq=False)
class Plan:
    """What a proposal is cut to.

    Attributes:
        kept: for each row the nodes that stay, rising.
        positions: the positions that the next drawn proposal may keep, best first for all rows together.
    """

    kept: list[list[int]]
    positions: frozenset[Position] = field(default_factory=frozenset)


class Policy:
    """Decides round by round; learns from what it is told.

    Args:
        costs: of passes.
    """

    def __init__(self, costs: PassCosts) -> None:
        self.costs, self.drafts, self.account = costs, DraftCosts(), Account()
        self.pooled = Acceptance(0.99)
        self.deepest = PROBE_DEPTH
        self.idle = 0
        self.drawn = False
        self.allowed: frozenset[Position] | None = None  # of drawn trees; None before the first plan
        self._since_plain = self._since_draft = 0
        self._interval = 1
        self._tokens, self._rounds = 1.0, 1.0  # with forgetting, in plain rounds

    def new_row(self) -> RowMemory:
        """Returns the memory of a row that enters."""
        return RowMemory(Acceptance(0.95, self.pooled))

    def depth(self, rows: Sequence[RowMemory], room: int) -> int:
        """Returns how deep to draft in this round; 0 says: not at all. Decided before anything is drafted."""
        limit = min(room, LONGEST, self.deepest + 2)
        plain = self.costs.plain(len(rows))
        if limit < 1 or not rows or self._since_plain >= STALE:
            return 0
        if self._draft_seconds(limit, plain) <= CHEAP * plain and not self.drawn and not self.idle:
            return limit if self._covers(rows, limit, plain, probing=True) else 0
        best, gain = max(((depth, self._gain(rows, depth, plain)) for depth in range(1, limit + 1)), key=lambda g: g[1])
        if gain > MARGIN * plain and self._covers(rows, best, plain, probing=False):
            self._interval = 1
            return best
        if self._since_draft + 1 < self._interval:
            return 0
        probe = min(limit, PROBE_DEPTH)
        if not self._covers(rows, probe, plain, probing=True):
            return 0
        often = math.ceil(self._loss(rows, probe, plain, probing=True) / CHEAP)
        self._interval = min(max(8, 2 * self._interval), max(often, 1), 512)
        if self.drawn:
            self.allowed = _chain(probe)
        return probe

    def plan(self, rows: Sequence[RowMemory], trees: Sequence[RowTree], spent: float) -> Plan:
        """Chooses the nodes that are verified: of every row its best ones, as many as pay for the wider pass.

        For candidates that were chosen, not drawn: what it keeps depends on the trees themselves.

        Args:
            rows: their memories.
            trees: what was drafted.
            spent: seconds that the draft took.
        """
        plain, idle = self.costs.plain(len(rows)), max((tree.idle for tree in trees), default=0)
        price = self._price(len(rows), plain)
        orders: list[list[int]] = []
        worth: list[float] = []  # of the nodes that a width of one more adds, all rows together
        for row, tree in zip(rows, trees, strict=True):
            values = self._values(row.acceptance, row.hot, tree)
            order = sorted(range(len(values)), key=lambda node, values=values: -values[node])  # type: ignore[misc]
            orders.append(order[: len(order) - tree.idle])
            worth += [0.0] * (len(orders[-1]) - len(worth))
            for place, node in enumerate(orders[-1]):
                worth[place] += values[node]
        forced = self.costs.drafted(len(rows), idle)
        best, most, total = 0, MARGIN * plain, 0.0
        for width, value in enumerate(worth, start=1):
            total += value
            seconds = self.costs.drafted(len(rows), idle + width)
            if not self.account.covers((seconds + spent) / plain - 1.0):
                break
            gain = total * price - (seconds - forced)
            if gain > most:
                best, most = width, gain
        return Plan([_with_idle(tree, order[:best]) for tree, order in zip(trees, orders, strict=True)])

    def allow(self, rows: int, trees: Sequence[RowTree]) -> None:
        """Settles which positions the next drawn proposal may keep, from one that has already been judged.

        The values are those of all rows together; a position counts as often as it occurred.
        """
        worth: dict[Position, float] = {}
        for tree in trees:
            values = self._values(self.pooled, False, tree, either=True)
            for position, value in zip(tree.positions, values, strict=True):
                if position != IDLE:
                    worth[position] = worth.get(position, 0.0) + value
        # Parents and elder siblings are worth no less and occur no less often; lengths and ranks settle ties.
        order = sorted(worth, key=lambda position: (-worth[position], len(position), position))
        plain = self.costs.plain(rows)
        best, most, total = 0, 0.0, 0.0
        for width, position in enumerate(order, start=1):
            total += worth[position]
            gain = total * self._price(rows, plain) - (self.costs.drafted(rows, width) - plain)
            if gain > most:
                best, most = width, gain
        self.allowed = frozenset(order[:best]) or _chain(PROBE_DEPTH)

    def keep_allowed(self, trees: Sequence[RowTree], depth: int) -> Plan:
        """Cuts drawn trees to the positions that were settled before they were drawn.

        A node that is dropped for the token it drew, or for what hung below it, would bend the law of the text; where
        a node hangs says nothing of its token.
        """
        allowed = _chain(depth) if self.allowed is None else self.allowed
        return Plan(
            [
                [node for node, position in enumerate(tree.positions) if position == IDLE or position in allowed]
                for tree in trees
            ]
        )

    def book(self, rows: int, tokens: int, nodes: int, verify: float, draft: float, depth: int) -> None:
        """Notes a round.

        Args:
            rows: of the batch.
            tokens: that were committed, all rows together.
            nodes: of the widest row that was verified.
            verify: seconds from the draft's end to what was committed.
            draft: seconds that drafting took, the telling of what came of it included.
            depth: what the inner drafter was asked for; 0 where it was not.
        """
        self.costs.learn(rows, nodes, verify)
        plain = self.costs.plain(rows)
        # Twice what was expected is a machine that did something else meanwhile, which nobody should pay for.
        verify = min(verify, 2.0 * self.costs.drafted(rows, nodes))
        draft = min(draft, 2.0 * self._draft_seconds(depth, plain) + CHEAP * plain)
        rounds, brought = (verify + draft) / plain, tokens / rows
        self._since_plain = self._since_plain + 1 if nodes else 0
        self._since_draft = 0 if depth else self._since_draft + 1
        self._tokens, self._rounds = 0.97 * self._tokens + brought, 0.97 * self._rounds + rounds
        self.account.book(rounds, rounds - brought if nodes else draft / plain)

    def _draft_seconds(self, depth: int, plain: float) -> float:
        known = self.drafts.seconds(depth)
        return UNKNOWN * depth * plain if known is None else known

    def _price(self, rows: int, plain: float) -> float:
        """Returns what a token is worth in seconds: what it takes to come by one at the present rate."""
        return plain / rows / max(self._tokens / self._rounds, 1.0)

    def _gain(self, rows: Sequence[RowMemory], depth: int, plain: float) -> float:
        """Returns the seconds that a draft of so many levels is expected to save."""
        tokens = 0.0
        for row in rows:
            reached = 1.0
            for level in range(1, depth + 1):
                reached *= row.acceptance.rate((row.hot, level, LEVEL))
                tokens += reached
        extra = self.costs.drafted(len(rows), self.idle + self._width(depth)) - plain
        return tokens * self._price(len(rows), plain) - extra - self._draft_seconds(depth, plain)

    def _width(self, depth: int) -> int:
        """Returns how many nodes a row is expected to have: those allowed, and one a level that is new."""
        known = self.allowed if self.drawn and self.allowed is not None else frozenset()
        return sum(len(position) <= depth for position in known) + max(depth - max(map(len, known), default=0), 0)

    def _covers(self, rows: Sequence[RowMemory], depth: int, plain: float, *, probing: bool) -> bool:
        return self.account.covers(self._loss(rows, depth, plain, probing=probing))

    def _loss(self, rows: Sequence[RowMemory], depth: int, plain: float, *, probing: bool) -> float:
        """Returns what a round loses of which nothing is accepted, in plain rounds. Chosen trees can still be cut."""
        forced = self.idle
        if self.drawn:
            forced += depth if probing else self._width(depth)
        return (self._draft_seconds(depth, plain) + self.costs.drafted(len(rows), forced)) / plain - 1.0

    def _values(self, acceptance: Acceptance, hot: bool, tree: RowTree, either: bool = False) -> list[float]:
        """Returns for each node how likely it is to be committed; -1 for nodes that are no candidates.

        Never more than its elder sibling's, so that the best nodes are a tree without gaps.
        """
        values: list[float] = []
        youngest: dict[int, float] = {}
        rates: dict[tuple[int, int], float] = {}
        for parent, position in zip(tree.parents, tree.positions, strict=True):
            if position == IDLE:
                values.append(-1.0)
                continue
            at = len(position), position[-1]
            rate = rates.get(at)
            if rate is None:
                heat = (False, True) if either else (hot,)
                rate = rates[at] = sum(acceptance.rate((warm, *at)) for warm in heat) / len(heat)
            value = min((1.0 if parent < 0 else values[parent]) * rate, youngest.get(parent, math.inf))
            youngest[parent] = value
            values.append(value)
        return values


def learn_level(row: RowMemory, pooled: Acceptance, depth: int, ranks: Iterable[tuple[int, bool]]) -> None:
    """Notes what became of the children of a node that was committed: (rank, accepted) pairs."""
    accepted = False
    for rank, hit in ranks:
        accepted = accepted or hit
        for table in (row.acceptance, pooled):
            table.learn((row.hot, depth, rank), hit)
    for table in (row.acceptance, pooled):
        table.learn((row.hot, depth, LEVEL), accepted)


def follow(row: RowMemory, text: Sequence[int], pooled: Acceptance) -> None:
    """Compares the watched tree with the text, as far as the text goes; unwatches it where they part."""
    watch = row.watch
    if watch is None:
        return
    for token in text[watch.start + watch.depth :]:
        children = watch.children.get(watch.node)
        if not children:
            break
        hits = [(watch.positions[child][-1], watch.tokens[child] == token) for child in children]
        learn_level(row, pooled, watch.depth + 1, hits)
        node = next((child for child, (_, hit) in zip(children, hits, strict=True) if hit), None)
        if node is None:
            break
        watch.node, watch.depth = node, watch.depth + 1
    else:
        return
    row.hot = watch.depth > 0
    row.watch = None


def _chain(depth: int) -> frozenset[Position]:
    return frozenset((0,) * level for level in range(1, depth + 1))


def _with_idle(tree: RowTree, nodes: Sequence[int]) -> list[int]:
    if not tree.idle:
        return sorted(nodes)
    return sorted([*(node for node, position in enumerate(tree.positions) if position == IDLE), *nodes])
