"""Lookahead decoding: n-grams off the target's own Jacobi trajectories, guessed whenever their first token recurs.

No second model and no training: a window of guesses for the positions ahead is refined by the forward that
verifies anyway, and what it passes through becomes the pool that candidates come from. Window and candidates
are nodes of one token tree; the module builds no mask and calls no model. It does not know how it is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..core.checks import switch, whole_number
from ..core.drafter import Drafter, DraftSession, Observation
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal
from ..core.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from ..core.state import DecodeState, Row


class Lookahead(Drafter):
    """Lookahead decoding (Fu et al., arXiv:2402.02057). Guesses are chosen, not drawn, so there is no law.

    The defaults are the ones of the authors' code; on a large accelerator they widen window and guesses to 15.

    Args:
        window: W, how many positions ahead are refined in parallel; None for no window, so that the pool learns
            from the text alone.
        ngram: N, length of the n-grams; the window spans N - 1 steps of the trajectory.
        guesses: G, most n-grams kept, and verified at once, for each first token; the one unseen for longest makes
            room. None for no pool: the window runs and nothing is drafted.
        seed_from_prompt: whether the pool also learns the n-grams of the prompt and of the text that follows it.

    Raises:
        InvalidRequest: a number that is none or too small, or nothing left to draft from.
    """

    def __init__(
        self,
        *,
        window: int | None = 7,
        ngram: int = 5,
        guesses: int | None = 7,
        seed_from_prompt: bool = False,
    ) -> None:
        self.ngram = whole_number("ngram", ngram, 2, hint=" (a token and what follows it)")
        self.window, self.guesses = (
            value if value is None else whole_number(name, value, hint=", or None to switch it off")
            for name, value in (("window", window), ("guesses", guesses))
        )
        if guesses is None and (window is None or seed_from_prompt):
            raise InvalidRequest(
                f"without a pool (guesses=None) the window must stay and seed_from_prompt has no effect, "
                f"got window={window} and seed_from_prompt={seed_from_prompt}"
            )
        self.seed_from_prompt = switch("seed_from_prompt", seed_from_prompt)

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that keeps a window and a pool for each row."""
        return _LookaheadSession(self)


class NgramPool:
    """The n-grams seen in one text, by first token, the latest last.

    Args:
        limit: most n-grams kept for a first token.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._grams: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        """Notes an n-gram as the latest; the one of its first token that was unseen for longest makes room."""
        grams = self._grams.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self._limit:
            del grams[next(iter(grams))]

    def guesses(self, token: int) -> list[tuple[int, ...]]:
        """Returns what followed `token`, without it, the latest first."""
        return list(reversed(self._grams.get(token, ())))


class JacobiWindow:
    """The two-dimensional window of one row: level by column, a level for each past step of the trajectory.

    Cell (0, 0) is the newest committed token, whatever it is, so its entry is never read. Cell (0, i) follows
    (0, i - 1), and (j, i) follows (j - 1, i): all cells are i + j positions ahead. The window starts as one level
    of W + N - 2 random columns; each of the first N - 2 steps adds a level and drops a column.

    Args:
        width: W, columns once the window is full.
        ngram: N; a full window has N - 1 levels.
        first: tokens of cells (0, 1) onwards, W + N - 3 of them.
    """

    def __init__(self, width: int, ngram: int, first: Sequence[int]) -> None:
        self.levels = [[ROOT, *first]]
        self.reach = width + ngram - 3
        """Positions that the farthest cell is ahead; the same at every step."""
        self._full = ngram - 1

    def nodes(self) -> tuple[list[int], list[int]]:
        """Returns tokens and parents of all cells but (0, 0), level by level: cell c, so counted, is node c - 1."""
        columns = len(self.levels[0])
        tokens = [token for level in self.levels for token in level][1:]
        parents = [cell - 1 - (1 if cell < columns else columns) for cell in range(1, len(tokens) + 1)]
        return tokens, parents

    def newest(self) -> slice:
        """Returns where the logits of the last level are; those of cell c are in column c, as column 0 is the root."""
        columns = len(self.levels[0])
        return slice((len(self.levels) - 1) * columns, len(self.levels) * columns)

    def advance(self, found: list[int]) -> list[list[int]]:
        """Moves on by a step.

        Args:
            found: the target's most likely token after each cell of the last level.

        Returns:
            The window's n-grams, column by column, without the first token of column 0; none until it is full.
        """
        if len(self.levels) < self._full:
            self.levels = [level[1:] for level in (*self.levels, found)]
            return []
        ngrams = [list(column) for column in zip(*self.levels, found, strict=True)]
        self.levels = [*self.levels[1:], found]
        return ngrams


class _RowMemory:
    """What the session keeps for one row.

    Attributes:
        pool: the n-grams; None without one.
        window: the Jacobi window; None without one.
        scored: the window, while it is in the tree that is being verified.
    """

    def __init__(self, options: Lookahead, row: Row, eos: Sequence[int], vocabulary: int) -> None:
        self._ngram, self._eos, self._vocabulary = options.ngram, eos, vocabulary
        self.pool = None if options.guesses is None else NgramPool(options.guesses)
        self.window: JacobiWindow | None = None
        if options.window is not None:
            first = self._fillers(row, options.window + options.ngram - 3)
            self.window = JacobiWindow(options.window, options.ngram, first)
        self.scored: JacobiWindow | None = None
        self._reads_text = options.seed_from_prompt or options.window is None
        self._read = 0 if options.seed_from_prompt else row.prompt_length

    def advance(self, row: Row, root: int, found: list[int]) -> None:
        """Moves the window on, pools its n-grams, and puts tokens of the text where the text would end.

        Args:
            row: the row, what this round committed included.
            root: the newest committed token when the window was scored.
            found: the target's most likely token after each cell of the newest level.
        """
        if self.window is None:
            return
        for column, ngram in enumerate(self.window.advance(found)):
            self._add(ngram if column else [root, *ngram[1:]])
        newest = self.window.levels[-1]
        ended = [column for column, token in enumerate(newest) if token in self._eos]
        for column, token in zip(ended, self._fillers(row, len(ended)), strict=True):
            newest[column] = token

    def read(self, row: Row) -> None:
        """Pools the n-grams by which the text has grown."""
        while self._reads_text and self._read + self._ngram <= len(row.tokens):
            self._add(row.tokens[self._read : self._read + self._ngram])
            self._read += 1

    def _add(self, ngram: Sequence[int]) -> None:
        if self.pool is not None:
            self.pool.add(ngram)

    def _fillers(self, row: Row, count: int) -> list[int]:
        """Draws tokens of the text, as the authors' code does to start a window; never one that ends a text."""
        if not count:
            return []
        known = [token for token in row.tokens if token not in self._eos]
        known = known or [token for token in range(self._vocabulary) if token not in self._eos]
        return [known[place] for place in torch.randint(len(known), (count,), generator=row.generator).tolist()]


class _LookaheadSession(DraftSession):
    """A window and a pool a row."""

    def __init__(self, options: Lookahead) -> None:
        self._options = options
        self._memories: list[_RowMemory] = []

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        eos, vocabulary = state.target.eos_token_ids, state.target.vocabulary_size
        self._memories += [_RowMemory(self._options, state.rows[row], eos, vocabulary) for row in rows]

    def propose(self, state: DecodeState) -> Proposal:
        """Returns for each row the cells of its window, which are no candidates, and its guesses behind them."""
        guesses = [
            [ngram[: state.room(index)] for ngram in memory.pool.guesses(row.tokens[-1])] if memory.pool else []
            for index, (memory, row) in enumerate(zip(self._memories, state.rows, strict=True))
        ]
        tokens, parents = TokenTree.from_paths(guesses).to_lists()
        candidate = [[True] * len(row) for row in tokens]
        for index, memory in enumerate(self._memories):
            memory.scored = memory.window if _fits(state, index, memory.window) else None
            if memory.scored is not None:
                cells, above = memory.scored.nodes()
                shifted = [parent if parent == ROOT else parent + len(cells) for parent in parents[index]]
                tokens[index], parents[index] = cells + tokens[index], above + shifted
                candidate[index] = [False] * len(cells) + candidate[index]
        plain = self._options.window is None
        return Proposal(TokenTree.from_lists(tokens, parents, None if plain else candidate))

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Reads the target's picks after the newest level of every window: one argmax, one copy to the host."""
        scored = []
        for index, row in enumerate(seen.rows):
            memory = self._memories[row]
            if memory.scored is not None:
                scored.append((memory, row, index, seen.scores.logits[index, memory.scored.newest()]))
                memory.scored = None
        picks = torch.cat([logits for *_, logits in scored]).argmax(-1).tolist() if scored else []
        for memory, row, index, logits in scored:
            found, picks = picks[: len(logits)], picks[len(logits) :]
            root = state.rows[row].tokens[-1 - len(seen.verdict.tokens[index])]
            memory.advance(state.rows[row], root, found)
        for row in seen.rows:
            self._memories[row].read(state.rows[row])

    def retain(self, rows: Sequence[int]) -> None:
        self._memories = [self._memories[row] for row in rows]


def _fits(state: DecodeState, row: int, window: JacobiWindow | None) -> bool:
    """Whether the window is scored: not past the model's context, nor in a round that ends the text anyway."""
    context, length = state.target.context_length, len(state.rows[row].tokens)
    return window is not None and state.room(row) > 0 and (context is None or length + window.reach <= context)
