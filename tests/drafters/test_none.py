"""The baseline drafts nothing."""

from types import SimpleNamespace
from typing import Any, cast

from draftwood.core.state import DecodeState
from draftwood.drafters.none import NoDrafter


def test_every_row_gets_an_empty_tree() -> None:
    rows = cast(Any, [SimpleNamespace(tokens=[1, 1], max_tokens=9)] * 3)
    state = DecodeState(target=cast(Any, None), cache=cast(Any, None), style="chosen", rows=rows)
    proposal = NoDrafter().session(state).propose(state)
    assert proposal.tree.sizes == (0, 0, 0)
    assert proposal.tree.tokens.shape == (3, 0)
    assert proposal.law is None
