"""Plain decoding as a drafter: the baseline runs through the same engine as everything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.drafter import Drafter
from ..core.proposal import Proposal

if TYPE_CHECKING:
    from ..core.state import DecodeState


class NoDrafter(Drafter):
    """Drafts nothing, so that every round commits the one token that the target gives."""

    def propose(self, state: DecodeState) -> Proposal:
        """Returns an empty tree for every row."""
        return Proposal.empty(len(state.rows))
