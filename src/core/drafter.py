"""What a drafter is: the protocol, what it declares it needs, what it is told.

A drafter guesses; it never decides. It sees the committed text and, if it asks, features of the target; it
does not see the rule's randomness.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from .proposal import Proposal, Verdict

if TYPE_CHECKING:
    from .state import DecodeState
    from .target import Scores, Target

FeatureName = int | Literal["last"]
"""`"last"` is the target's final normalised hidden state (what the LM head reads); an int l is the *input* of
block l, which Hugging Face calls `hidden_states[l]`. The number of blocks names the output of the last one,
before the final norm."""


@dataclass(frozen=True, eq=False)
class Observation:
    """What a session is told after each verified forward, the prefill of new rows included.

    Attributes:
        rows: indices into `state.rows` that the forward covered, in the order of the tensors.
        proposal: what had been drafted for these rows (empty at prefill).
        scores: logits and features of the forward.
        verdict: what was committed, after stop conditions have cut it. Where several drafters share a tree, the
            path holds those nodes that this one drafted; the tokens, all that was committed, then run on past it.
    """

    rows: Sequence[int]
    proposal: Proposal
    scores: Scores
    verdict: Verdict

    def kept(self, name: FeatureName) -> list[Tensor]:
        """Returns, for each covered row, the feature of every token that entered the cache in this forward.

        These are the pending tokens and the accepted path, in order of position; the newest committed token
        is not among them (the target has not read it yet).

        Returns:
            One [kept tokens, width] tensor a row.
        """
        feature = self.scores.features[name]
        columns = [
            [*range(pending), *(pending + node for node in path)]
            for pending, path in zip(self.scores.pending, self.verdict.paths, strict=True)
        ]
        return [feature[index, row] for index, row in enumerate(columns)]


class DraftSession:
    """One drafter at work in one call; holds whatever the drafter keeps a row. Every hook may be left out."""

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Told when prompts enter: `state.rows[i]` for i in `rows` are new, at the end of the batch."""

    def propose(self, state: DecodeState) -> Proposal:
        """Returns a token tree for every row of `state`, no deeper than `state.room(row)` in each."""
        raise NotImplementedError(f"{type(self).__name__} has no propose()")

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Told what a forward committed. `state.rows[i].tokens` already ends with the committed tokens."""

    def retain(self, rows: Sequence[int]) -> None:
        """Told when rows leave: row i of the batch is from now on what row `rows[i]` was."""


class Drafter(DraftSession):
    """A drafting strategy. Options are keyword-only constructor arguments, so a misspelt one is an error.

    A drafter without state of its own overrides `propose` alone and serves as its own session.
    """

    features: frozenset[FeatureName] = frozenset()
    """Target features to be captured in every forward."""

    def copy(self) -> Drafter:
        """Returns a drafter of the same options that can be bound to another target."""
        return copy.copy(self)

    def bind(self, target: Target) -> None:
        """Checks that the drafter fits the target and loads what it needs; called once, before any session.

        Raises:
            DraftwoodError: it does not fit.
        """

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the object that drafts for one call. `state` has no rows yet."""
        return self
