"""What an acceptance rule is, and the randomness it may use.

A rule judges a proposal against the target's processed logits. Which draws it makes is all it adds: with an
enumerating `RandomSource` in place of the real one, the law of its output can be computed exactly.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from .errors import DraftwoodError
from .proposal import Proposal, Verdict

DraftStyle = Literal["chosen", "drawn", "coupled"]
"""How a rule likes its candidates: the most likely tokens; siblings drawn without replacement, with their law;
or the maximisers of log q plus the very noise that the rule will add to log p."""


class RandomSource(Protocol):
    """The random decisions of one row."""

    def accept(self, probability: float) -> bool:
        """Returns True with the given probability (values outside [0, 1] act as the nearest bound)."""

    def draw(self, weights: Tensor) -> int:
        """Draws an index from non-negative weights [vocabulary], which need not sum to one."""

    def gumbel(self, position: int, vocabulary: int) -> Tensor:
        """Returns the standard Gumbel noise of an absolute position, [vocabulary] float32; same every time."""

    def forget(self, position: int) -> None:
        """Told that positions before `position` are committed."""


class Rule(Protocol):
    """An acceptance rule; a plugin like a drafter."""

    lossless: bool
    """Whether the committed text has the target's law."""
    drafts: DraftStyle
    """The candidates with which the rule accepts most. Any others are judged correctly too."""
    samples: bool
    """Whether the rule can serve a temperature above 0."""

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        """Judges a batch of trees.

        Args:
            proposal: trees of `batch` rows and `nodes` columns, on the device of `logits`.
            logits: [batch, 1 + nodes, vocabulary] float; column 0 is the target's processed log-weights after
                the last committed token, column 1 + i those after node i. -inf marks an impossible token.
            sources: one a row.
            positions: for each row the absolute position of the first token to be committed.
        """


class SeededSource:
    """A row's random decisions, a function of (seed, row) alone; touches no global generator.

    The text of a row so depends neither on its neighbours nor on the batch size.
    """

    def __init__(self, seed: int, row: int) -> None:
        self._key = (seed, row)
        self._generator = torch.Generator().manual_seed(_mix(seed, row, "verify"))
        self._noise: dict[int, Tensor] = {}

    def accept(self, probability: float) -> bool:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item() < probability

    def draw(self, weights: Tensor) -> int:
        total = weights.to(torch.float64).cumsum(-1)
        if not (math.isfinite(sum_of_all := float(total[-1])) and sum_of_all > 0.0):
            raise DraftwoodError(
                "the target gives no token a probability: its logits are NaN, or the processors leave none possible"
            )
        point = torch.rand((), generator=self._generator, dtype=torch.float64).to(total.device) * total[-1]
        # side="right" never returns an index of zero weight, and the point is below the total.
        return int(torch.searchsorted(total, point, side="right").clamp(max=weights.shape[-1] - 1).item())

    def gumbel(self, position: int, vocabulary: int) -> Tensor:
        noise = self._noise.get(position)
        if noise is None:
            generator = torch.Generator().manual_seed(_mix(*self._key, f"gumbel {position}"))
            uniform = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
            noise = uniform.clamp_(min=1e-300).log_().neg_().log_().neg_().to(torch.float32)
            self._noise[position] = noise
        return noise

    def forget(self, position: int) -> None:
        """Drops the noise of positions before `position`; it would be made again if asked for."""
        for old in [key for key in self._noise if key < position]:
            del self._noise[old]


def draft_generator(seed: int, row: int) -> torch.Generator:
    """Returns the generator a drafter draws from; independent of the rule's, as losslessness requires."""
    return torch.Generator().manual_seed(_mix(seed, row, "draft"))


def _mix(seed: int, row: int, purpose: str) -> int:
    """Hashes to 63 bits, so that neighbouring seeds and positions give unrelated streams."""
    digest = hashlib.blake2b(f"{seed}/{row}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
