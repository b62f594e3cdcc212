"""A made-up machine and text for `auto`: time passes as a model says, so that nothing depends on the real clock.

Rounds are decided as the greedy rule decides them, against a text that is known beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import torch

from draftwood.core.drafter import Drafter, DraftSession, Observation
from draftwood.core.proposal import Proposal, Verdict
from draftwood.core.state import DecodeState
from draftwood.core.target import Scores
from draftwood.core.tree import ROOT, TokenTree
from draftwood.drafters.auto import Auto

VOCABULARY = 50
Right = Callable[[int, int], float]
"""The probability that a guess at a depth is right, by (length of the text, depth)."""


@dataclass
class FakeClock:
    """Seconds that pass when they are told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Guesser(Drafter):
    """Guesses a chain, or a chain with wrong siblings, right with a given probability; each level takes its time."""

    def __init__(
        self,
        clock: FakeClock,
        truth: Sequence[int],
        right: Right,
        *,
        cost: float = 0.0,
        gamma: int = 8,
        siblings: int = 0,
    ) -> None:
        self.clock, self.truth, self.right = clock, truth, right
        self.cost, self.gamma, self.siblings = cost, gamma, siblings
        self.asked: list[int] = []

    def copy(self) -> Guesser:
        return self

    def propose(self, state: DecodeState) -> Proposal:
        depth = min(self.gamma, max(state.room(row) for row in range(len(state.rows))))
        self.asked.append(depth)
        self.clock.now += self.cost * depth
        tokens, parents = [], []
        for index, row in enumerate(state.rows):
            own: list[int] = []
            above: list[int] = []
            before = ROOT
            for level in range(1, min(self.gamma, state.room(index)) + 1):
                at = len(row.tokens) + level - 1
                chance = random.Random(f"{index} {at} {level}").random()
                true = self.truth[at]
                own.append(true if chance < self.right(len(row.tokens), level) else (true + 1) % VOCABULARY)
                above.append(before)
                first = len(own) - 1
                for sibling in range(self.siblings):
                    own.append((true + 2 + sibling) % VOCABULARY)
                    above.append(before)
                before = first
            tokens.append(own)
            parents.append(above)
        return Proposal(TokenTree.from_lists(tokens, parents))


@dataclass
class World:
    """A text, a machine and a drafter.

    Attributes:
        right: how good the drafter's guesses are.
        verify: seconds of a pass by its tokens, those of all rows together.
        measured: what the curve measured at the start says; the truth when None.
        noise: relative spread of what passes take.
    """

    right: Right
    verify: Callable[[int], float] = lambda tokens: 0.02 + 0.0002 * tokens
    measured: Callable[[int], float] | None = None
    cost: float = 0.0
    rows: int = 1
    gamma: int = 8
    siblings: int = 0
    noise: float = 0.0
    tokens: int = 1000
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        chance = random.Random(7)
        self.truth = [chance.randrange(VOCABULARY) for _ in range(self.tokens + 2 * self.gamma + 40)]
        curve = {n: (self.measured or self.verify)(n) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)}
        self.guesser = Guesser(
            self.clock, self.truth, self.right, cost=self.cost, gamma=self.gamma, siblings=self.siblings
        )
        self.auto = Auto(of=self.guesser, curve=curve, clock=self.clock)
        self.auto.bind(cast(Any, SimpleNamespace(sharded=False)))
        self.widths: list[int] = []

    @property
    def plain(self) -> float:
        """Seconds of the same text without drafts."""
        return self.verify(self.rows) * self.tokens

    def run(self) -> float:
        """Decodes the text in every row; returns the seconds that took."""
        state = DecodeState(cast(Any, None), cast(Any, None), "chosen")
        session: DraftSession = self.auto.session(state)
        end = 10 + self.tokens
        state.rows = [cast(Any, SimpleNamespace(tokens=self.truth[:10], max_tokens=end)) for _ in range(self.rows)]
        session.admit(state, range(self.rows))
        session.observe(state, self._seen(Proposal.empty(self.rows), [[]] * self.rows, [[0]] * self.rows))
        jitter = random.Random(11)
        start = self.clock.now
        while state.rows:
            proposal = session.propose(state)
            width = proposal.tree.width
            self.widths.append(width)
            seconds = self.verify(len(state.rows) * (1 + width))
            self.clock.now += seconds * (1.0 + self.noise * (jitter.random() * 2 - 1))
            paths, tokens = self._judge(state, proposal)
            session.observe(state, self._seen(proposal, paths, tokens))
            alive = [index for index, row in enumerate(state.rows) if len(row.tokens) < end]
            if len(alive) < len(state.rows):
                state.rows = [state.rows[index] for index in alive]
                session.retain(alive)
        return self.clock.now - start

    def _judge(self, state: DecodeState, proposal: Proposal) -> tuple[list[list[int]], list[list[int]]]:
        paths, tokens = [], []
        for row, own, parents in zip(state.rows, *proposal.tree.to_lists(), strict=True):
            path: list[int] = []
            taken: list[int] = []
            while True:
                right = self.truth[len(row.tokens)]
                row.tokens.append(right)
                taken.append(right)
                before = path[-1] if path else ROOT
                child = next((n for n, parent in enumerate(parents) if parent == before and own[n] == right), None)
                if child is None or len(row.tokens) >= row.max_tokens:
                    break
                path.append(child)
            paths.append(path)
            tokens.append(taken)
        return paths, tokens

    def _seen(self, proposal: Proposal, paths: list[list[int]], tokens: list[list[int]]) -> Observation:
        logits = torch.zeros(len(paths), 1 + proposal.tree.width, 1)
        return Observation(range(len(paths)), proposal, Scores(logits, {}, [1] * len(paths)), Verdict(paths, tokens))
