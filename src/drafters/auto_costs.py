"""What a round costs and what it may lose: measured passes, measured drafts, and the account of losses.

Everything is learned from a clock that is handed in, so that a test can run on a made-up one. The module knows no
drafter and no tree.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..core.target import Target
from ..core.tree import TokenTree

Clock = Callable[[], float]
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
CONTEXT = 64
PLAIN_WINDOW, WINDOW = 16, 8
TRUST = 2.0
"""How many measured rounds weigh as much as the curve that was measured at the start."""


HELD = "_pass_seconds"
"""Where a `Target` keeps what was measured on it; its model is left alone."""


class _Measured(NamedTuple):
    clock: Clock
    budget: float
    curve: dict[int, float]


def pass_seconds(target: Target, clock: Clock, budget: float) -> dict[int, float]:
    """Returns what `measure_passes` does, measured once for all drafters and decoders of this target.

    It is measured again only by another clock, or where more time is offered than was spent then.
    """
    # A view made of this target by copying has other blocks: what it inherits so would not be its own.
    held: dict[Target, _Measured] = vars(target).setdefault(HELD, WeakKeyDictionary())
    known = held.get(target)
    if known is None or known.clock is not clock or known.budget < budget:
        known = held[target] = _Measured(clock, budget, measure_passes(target, clock, budget))
    return known.curve


@torch.inference_mode()
def measure_passes(target: Target, clock: Clock, budget: float) -> dict[int, float]:
    """Returns the seconds of a pass by its number of tokens: the median of what fits into `budget` seconds.

    The widest passes are left out where the budget ends before them; the first two are always measured.
    """
    room = (target.context_length or CONTEXT + max(WIDTHS)) - 1
    context = max(min(CONTEXT, room - max(WIDTHS)), 1)
    widths = [width for width in WIDTHS if context + width <= room] or [1]
    cache = target.new_cache(1, context + max(widths))
    target.score(cache, [[0] * context], TokenTree.empty(1))
    taken: dict[int, list[float]] = {}
    begun = clock()
    for turn in range(1 + 7):  # the first turn warms up
        for place, width in enumerate(widths):
            if place > 1 and clock() - begun > (budget if turn else budget / 2):
                widths = widths if turn else widths[:place]
                break
            tree = TokenTree.chain(torch.zeros(1, width - 1, dtype=torch.int64)) if width > 1 else TokenTree.empty(1)
            start = clock()
            target.score(cache, [[0]], tree).logits.argmax(-1).tolist()  # reading a result waits for an accelerator
            taken.setdefault(width, []).append(clock() - start)
            cache.lengths[0] = context
        if turn and clock() - begun > budget:
            break
    return {width: statistics.median(times[1:] or times) for width, times in taken.items()}


class PassCosts:
    """Seconds of a verified round by rows and by nodes of the widest row.

    The curve says how a pass grows with its tokens; rounds as they come say the rest: what a plain round takes now,
    and how much longer those with drafts are, verdict and bookkeeping included.

    Args:
        curve: seconds of a pass by its number of tokens, those of all rows together.
    """

    def __init__(self, curve: Mapping[int, float]) -> None:
        self._tokens = sorted(curve)
        self._seconds = [curve[tokens] for tokens in self._tokens]
        for index in range(1, len(self._seconds)):  # noise must not make a wider pass the cheaper one
            self._seconds[index] = max(self._seconds[index], self._seconds[index - 1])
        self._plain: dict[int, deque[float]] = {}
        self._wide: dict[tuple[int, int], deque[float]] = {}
        self._typical: dict[int, float] = {}  # medians, and ratios by rows and nodes; asked for far more often than set
        self._ratios: dict[tuple[int, int], float] = {}

    def plain(self, rows: int) -> float:
        """Returns the seconds of a round that drafts nothing: a median of the last ones."""
        typical = self._typical.get(rows)
        if typical is None:
            typical = self._typical[rows] = self._curve(rows)
        return typical

    def drafted(self, rows: int, nodes: int) -> float:
        """Returns the seconds of a round with `nodes` nodes in the widest row, the draft itself not counted."""
        if not nodes:
            return self.plain(rows)
        ratio = self._ratios.get((rows, nodes))
        if ratio is None:
            ratio = self._curve(rows * (1 + nodes)) / self._curve(rows)
            seen = self._wide.get((rows, _bucket(nodes)))
            if seen:
                ratio = (ratio * TRUST + statistics.median(seen) * len(seen)) / (TRUST + len(seen))
            self._ratios[rows, nodes] = ratio
        return self.plain(rows) * ratio

    def learn(self, rows: int, nodes: int, seconds: float) -> None:
        """Notes what a round took."""
        if not nodes:
            seen = self._plain.setdefault(rows, deque(maxlen=PLAIN_WINDOW))
            seen.append(seconds)
            self._typical[rows] = statistics.median(seen)
        else:
            bucket = _bucket(nodes)
            self._wide.setdefault((rows, bucket), deque(maxlen=WINDOW)).append(seconds / self.plain(rows))
            self._ratios = {
                at: ratio for at, ratio in self._ratios.items() if (at[0], _bucket(at[1])) != (rows, bucket)
            }

    def _curve(self, tokens: int) -> float:
        """Interpolates; past the last point the last slope goes on, or proportion where there is one point only."""
        known, seconds = self._tokens, self._seconds
        if tokens <= known[0]:
            return seconds[0]
        if len(known) == 1:
            return seconds[0] * tokens / known[0]
        right = min(bisect.bisect_left(known, tokens), len(known) - 1)
        left = right - 1
        slope = (seconds[right] - seconds[left]) / (known[right] - known[left])
        return seconds[left] + slope * (tokens - known[left])


class DraftCosts:
    """Seconds that the inner drafter takes a round, by the depth it was asked for."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}

    def seconds(self, depth: int) -> float | None:
        """Returns what a draft of `depth` levels takes, in proportion to the nearest known; None before any is."""
        if not self._seen:
            return None
        nearest = min(self._seen, key=lambda known: (abs(known - depth), known))
        times = sorted(self._seen[nearest])
        return times[(len(times) - 1) // 2] * depth / nearest  # the lower median: whatever is new starts slowly

    def learn(self, depth: int, seconds: float) -> None:
        """Notes what a draft took, with the telling of what came of it."""
        self._seen.setdefault(depth, deque(maxlen=WINDOW)).append(seconds)


@dataclass
class Account:
    """What may be lost, in plain rounds. Every second earns a little; every loss is paid; gains are kept up to a bound.

    Since no round is drafted that the balance does not cover if nothing at all is accepted, all losses of any stretch
    of time are below `most` rounds and `share` of it, whatever the text does.

    Attributes:
        share: of the time spent that may be lost.
        balance: what may be lost now; begun so low that a text of 48 rounds loses 3 % at most.
        most: what is kept at most.
    """

    share: float = 0.015
    balance: float = 0.7
    most: float = 8.0

    def covers(self, loss: float) -> bool:
        """Whether a round that may lose `loss` plain rounds is allowed."""
        return loss <= self.balance

    def book(self, rounds: float, loss: float) -> None:
        """Notes a round.

        Args:
            rounds: what it took, in plain rounds.
            loss: what it took beyond the tokens it brought, in plain rounds; negative for a gain.
        """
        if math.isfinite(rounds) and math.isfinite(loss):
            self.balance = min(self.balance + self.share * rounds - loss, self.most)


def _bucket(nodes: int) -> int:
    return nodes if nodes < 8 else nodes // 4 * 4
