"""Prompt lookup: what followed the last few tokens when they occurred before, in prompt or output.

Known as prompt lookup decoding (Saxena 2023) and, with a reference text, as LLMA (Yang et al., arXiv:2304.04487).
Costs no model and no training; pays where output repeats input: editing, quoting, summarising, code. It knows
nothing of the target but the committed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

from ..core.checks import whole_number
from ..core.drafter import Drafter, DraftSession
from ..core.proposal import Proposal
from ..core.tree import TokenTree

if TYPE_CHECKING:
    from ..core.state import DecodeState


class PromptLookup(Drafter):
    """Drafts the continuations of earlier occurrences of the text's last tokens, as one prefix tree.

    The tokens are looked up, not drawn, so the proposal has no law.

    Args:
        max_ngram: most tokens that an earlier occurrence is asked to share with the end of the text.
        min_ngram: fewest such tokens; shorter matches come after longer ones.
        gamma: most tokens drafted along one continuation.
        nodes: most tokens drafted a row; what the best continuation leaves goes to the next ones.

    Raises:
        InvalidRequest: an option is no whole number or below 1, or min_ngram above max_ngram.
    """

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 1, gamma: int = 8, nodes: int = 16) -> None:
        self.min_ngram = whole_number("min_ngram", min_ngram)
        self.max_ngram = whole_number("max_ngram", max_ngram, self.min_ngram, hint=" (min_ngram)")
        self.gamma, self.nodes = whole_number("gamma", gamma), whole_number("nodes", nodes)

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that keeps an index of each row."""
        return _LookupSession(self)


class NgramIndex:
    """Where each n-gram of a growing text last went on with each of its followers.

    Adding a token costs O(max_ngram), looking up O(matches asked for), however long the text.

    Args:
        min_ngram: shortest n-gram indexed.
        max_ngram: longest n-gram indexed.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._indexed = 0
        # n-gram -> {follower: its latest position}, the most recent follower last.
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def extend(self, text: Sequence[int]) -> None:
        """Indexes the tokens by which `text` has grown since the last call."""
        for position in range(self._indexed, len(text)):
            for length in self._lengths:
                if length <= position:
                    followers = self._followers.setdefault(tuple(text[position - length : position]), {})
                    followers.pop(text[position], None)
                    followers[text[position]] = position
        self._indexed = len(text)

    def matches(self, text: Sequence[int]) -> Iterator[int]:
        """Yields the positions after which `text`, indexed to its end, may go on: tokens that once followed it.

        One position, the latest, for each follower; longer matches first, then more recent ones.
        """
        tried: set[int] = set()
        for length in self._lengths:
            followers = self._followers.get(tuple(text[-length:]), {})
            for follower, position in reversed(followers.items()):
                if follower not in tried:
                    tried.add(follower)
                    yield position


class _LookupSession(DraftSession):
    """One index a row, brought up to date when a draft is asked for."""

    def __init__(self, options: PromptLookup) -> None:
        self._options = options
        self._indexes: list[NgramIndex] = []

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        self._indexes += [NgramIndex(self._options.min_ngram, self._options.max_ngram) for _ in rows]

    def propose(self, state: DecodeState) -> Proposal:
        gamma, nodes = self._options.gamma, self._options.nodes
        trees = []
        for index, (ngrams, row) in enumerate(zip(self._indexes, state.rows, strict=True)):
            ngrams.extend(row.tokens)
            depth = min(gamma, state.room(index))
            # Each match opens a branch of its own, so `nodes` of them are as many as the tree can hold.
            matches = islice(ngrams.matches(row.tokens), nodes if depth else 0)
            trees.append([_continuation(row.tokens, position, depth) for position in matches])
        return Proposal(TokenTree.from_paths(trees, budget=nodes))

    def retain(self, rows: Sequence[int]) -> None:
        self._indexes = [self._indexes[row] for row in rows]


def _continuation(text: Sequence[int], start: int, length: int) -> list[int]:
    """Returns `length` tokens from `start` on; past the end of the text the copy reads what it has written.

    So a text that repeats itself with a period below `length` still gets a full draft.
    """
    return list(islice(cycle(text[start : start + length]), length))
