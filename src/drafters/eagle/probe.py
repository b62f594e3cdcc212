"""Which layers was an EAGLE-3 head trained on? Measured, since its file often does not say.

A head on the wrong layers drafts next to nothing that is accepted, and says nothing about it (vLLM issue 50170).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...core.drafter import FeatureName
from ...core.errors import InvalidCheckpoint, InvalidRequest
from ...core.target import Target
from ...core.tree import TokenTree
from ...core.views import head_of
from .formats import LayerIds, load_head
from .network import Eagle3Head, Head


class LayerProbe(NamedTuple):
    """What was measured.

    Attributes:
        best: the meaning under which head and target agree more often.
        agreement: for each meaning that is possible, the share of positions where head and target name the same most
            likely token.
        positions: how many there were.
    """

    best: LayerIds
    agreement: dict[LayerIds, float]
    positions: int


def probe_layer_ids(source: str | Path, target: Target, prompts: Sequence[Sequence[int]]) -> LayerProbe:
    """Tries both meanings of a checkpoint's layer ids on a few texts.

    Args:
        source: a directory or hub id of an EAGLE-3 head.
        target: its target.
        prompts: texts as token ids, such as answers of the target; of three tokens at least. A few hundred tokens in
            all tell a trained head's meanings apart.

    Raises:
        InvalidRequest: no text is long enough, or it is no EAGLE-3 head.
        InvalidCheckpoint: the checkpoint does not fit under either meaning.
    """
    texts = [list(prompt) for prompt in prompts if len(prompt) >= 3]
    if not texts:
        raise InvalidRequest("a probe needs at least one text of three tokens or more")
    agreement: dict[LayerIds, float] = {}
    meanings: tuple[LayerIds, LayerIds] = ("before", "after")
    for meaning in meanings:
        try:
            head = load_head(source, target, layer_ids=meaning)
        except InvalidCheckpoint:  # one meaning may name a block that there is not
            if meaning == "after" and not agreement:
                raise
            continue
        if not isinstance(head, Eagle3Head):
            raise InvalidRequest(f"{str(source)!r} is an EAGLE-1 head, which always reads the last hidden state")
        agreement[meaning] = measure_agreement(head.attach(target), target, texts)
    positions = sum(len(text) - 1 for text in texts)
    return LayerProbe(max(agreement, key=lambda meaning: agreement[meaning]), agreement, positions)


@torch.inference_mode()
def measure_agreement(head: Head, target: Target, texts: Sequence[Sequence[int]]) -> float:
    """Returns the share of positions of `texts` where an attached head and the target favour the same next token.

    Every text is read with the target's true features, so that this is the acceptance of first draft tokens under
    greedy decoding of these very texts.
    """
    score, same, total = head_of(target), 0, 0
    names = head.feature_names
    for text in texts:
        wanted = frozenset[FeatureName]({*names, "last"})
        captured = target.score(target.new_cache(1), [list(text)], TokenTree.empty(1), features=wanted).features
        joined = torch.cat([captured[name][:, :-1].to(head.device) for name in names], -1)
        ids = torch.tensor([text], device=head.device)
        positions = torch.arange(len(text) - 1, device=head.device)[None]
        drafted = head.to_target(head.logits(head(ids[:, 1:], head.fuse(joined), positions, None))).argmax(-1)
        expected = score(captured["last"][:, 1:]).argmax(-1)  # after token t + 1, as the head's column t
        same += int((drafted.to(expected.device) == expected).sum())
        total += expected.numel()
    return same / total
