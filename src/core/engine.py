"""The loop: draft, verify, commit, observe. It knows no drafter and no rule by name."""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .drafter import Drafter, DraftSession, Observation
from .errors import DraftwoodError
from .proposal import Proposal, Verdict
from .rule import Rule
from .sampling import process, tree_paths
from .state import DecodeState, Row
from .stats import Seconds
from .target import Target
from .tree import TokenTree


class Step(NamedTuple):
    """What one round committed to one row.

    Attributes:
        row: the row, its `tokens` already extended.
        tokens: the committed tokens.
        drafted: how many of them, the first ones, had been drafted; the rest came from the target.
    """

    row: Row
    tokens: list[int]
    drafted: int


@dataclass(eq=False)
class Engine:
    """A target, a drafter bound to it, and a rule.

    Attributes:
        watch: called after each round with what it observed; for traces and studies.
    """

    target: Target
    drafter: Drafter
    rule: Rule
    watch: Callable[[DecodeState, Observation], None] | None = None

    @torch.inference_mode()
    def decode(self, rows: Iterable[Row], batch_size: int, seconds: Seconds) -> Iterator[Step]:
        """Decodes all rows, at most `batch_size` at a time; a row that ends makes room for the next.

        Args:
            rows: what to decode; taken from the iterable as places fall free.
            batch_size: most rows in one forward.
            seconds: where the time is added up.

        Yields:
            One step a row and round.
        """
        waiting = deque(rows)
        state = DecodeState(self.target, self.target.new_cache(), self.rule.drafts)
        session = self.drafter.session(state)
        start = time.perf_counter()
        while waiting or state.rows:
            if waiting and len(state.rows) < batch_size:
                first = len(state.rows)
                fresh = [waiting.popleft() for _ in range(min(batch_size - first, len(waiting)))]
                state.cache.extend(len(fresh))
                state.rows += fresh
                session.admit(state, range(first, len(state.rows)))
                steps = self._round(state, session, None, first, seconds)
            else:
                clock = time.perf_counter()
                proposal = session.propose(state)
                seconds.draft += time.perf_counter() - clock
                self._check(state, proposal)
                steps = self._round(state, session, proposal, 0, seconds)
            self._retire(state, session)
            seconds.total += time.perf_counter() - start
            yield from steps
            start = time.perf_counter()

    def _round(
        self, state: DecodeState, session: DraftSession, draft: Proposal | None, first: int, seconds: Seconds
    ) -> list[Step]:
        """Verifies a draft for the rows from `first` on. Reading prompts is a round too, with None for a draft."""
        rows = state.rows[first:]
        proposal = draft or Proposal.empty(len(rows))
        drafted = proposal.tree  # where the drafter has it: on the host as a rule, where reading it is no copy
        began = time.perf_counter()
        pending = [row.tokens[length:] for row, length in zip(rows, state.cache.lengths[first:], strict=True)]
        scores = self.target.score(
            state.cache, pending, proposal.tree, first=first, features=self.drafter.features, exit=proposal.exit
        )  # logits [rows, 1 + nodes, vocabulary]
        proposal = proposal.to(scores.logits.device)
        scored = time.perf_counter()

        paths = tree_paths(drafted) if any(row.pipeline.needs_history for row in rows) else None
        logits = process(rows, scores.logits, paths, one_hot_greedy=self.rule.samples)
        verdict = self.rule.verify(proposal, logits, [row.source for row in rows], [len(row.tokens) for row in rows])
        judged = time.perf_counter()

        verdict = _commit(rows, verdict)
        state.cache.keep(verdict.paths)
        if draft is not None:
            _count(rows, drafted, verdict)
        committed = time.perf_counter()
        seen = Observation(range(first, len(state.rows)), proposal, scores, verdict)
        session.observe(state, seen)
        if self.watch is not None:
            self.watch(state, seen)

        if draft is None:
            seconds.prefill += committed - began
        else:
            seconds.verify += scored - began
            seconds.accept += judged - scored
            seconds.commit += committed - judged
        seconds.draft += time.perf_counter() - committed
        return [
            Step(row, tokens, len(path)) for row, path, tokens in zip(rows, verdict.paths, verdict.tokens, strict=True)
        ]

    def _check(self, state: DecodeState, proposal: Proposal) -> None:
        """A tree that runs over the context would crash a model with learned positions."""
        context = self.target.context_length
        longest = max(len(row.tokens) for row in state.rows)
        if context is None or longest + proposal.tree.width <= context or not proposal.tree.width:
            return
        depths = (proposal.tree.depths * proposal.tree.valid).amax(1).tolist()
        for row, depth in zip(state.rows, depths, strict=True):
            if len(row.tokens) + depth > context:
                raise DraftwoodError(
                    f"{type(self.drafter).__name__} drafted {depth} levels behind {len(row.tokens)} tokens; "
                    f"the context has {context} (a drafter must keep within DecodeState.room)"
                )

    def _retire(self, state: DecodeState, session: DraftSession) -> None:
        alive = [index for index, row in enumerate(state.rows) if row.stop_reason is None]
        if len(alive) == len(state.rows):
            return
        for row in state.rows:
            if row.stop_reason is not None:
                row.source.forget(sys.maxsize)
        # The last rows fill the gaps, so that a long cache is not moved up whole.
        last = iter(alive[bisect_left(alive, len(alive)) :])
        order = [index if state.rows[index].stop_reason is None else next(last) for index in range(len(alive))]
        state.cache.select(order)
        state.rows = [state.rows[index] for index in order]
        session.retain(order)


def _commit(rows: list[Row], verdict: Verdict) -> Verdict:
    """Appends the tokens one by one and cuts where a stop condition holds, before anything is kept."""
    paths, tokens = [], []
    for row, path, offered in zip(rows, verdict.paths, verdict.tokens, strict=True):
        taken = 0
        while taken < len(offered) and row.stop_reason is None:
            row.tokens.append(offered[taken])
            taken += 1
            row.stop_reason = row.stopper.check(row.tokens, row.prompt_length)
        row.source.forget(len(row.tokens))
        paths.append(path[:taken])
        tokens.append(offered[:taken])
    return Verdict(paths, tokens)


def _count(rows: list[Row], tree: TokenTree, verdict: Verdict) -> None:
    if tree.width:
        usable = tree.valid if tree.candidate is None else tree.valid & tree.candidate
        drafted, depth = torch.stack([usable.sum(1), (tree.depths * usable).amax(1)]).tolist()
    else:
        drafted = depth = [0] * len(rows)
    for index, (row, path, tokens) in enumerate(zip(rows, verdict.paths, verdict.tokens, strict=True)):
        row.stats.add_round(drafted[index], depth[index], len(path), len(tokens))
