"""What the tests of layer-skip and early-exit share: prompts, shapes, and a look into the cache of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftwood.core.cache import SlotCache
from draftwood.core.drafter import Drafter, DraftSession, Observation
from draftwood.core.state import DecodeState
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from tests.conftest import llama_config, tiny_model

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [17, 18]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"gamma": 4},
    "branching": {"tree": (3, 2, 1)},
    "dynamic": {"tree": "dynamic", "gamma": 4, "nodes": 7, "width": 3},
}


def contents(target: Target, cache: SlotCache, row: int, length: int) -> list[Tensor]:
    """Returns keys and values of the first `length` tokens of a row, [heads, length, width] for each layer."""
    found = []
    cache.open(0)
    for layer, shape in target.layout.items():
        nothing = torch.zeros(len(cache.lengths), shape.heads, 0, shape.key_width, dtype=shape.dtype)
        for stored in cache.update(nothing, nothing, layer):
            found.append(stored[row, :, :length].clone())
    return found


def assert_cache_is_the_targets(target: Target, state: DecodeState) -> None:
    """Compares what the call has in its cache with what the target alone would have there."""
    for index, row in enumerate(state.rows):
        length = state.cache.lengths[index]
        assert length == len(row.tokens) - 1 or row.stop_reason is not None
        alone = target.new_cache(1)
        target.score(alone, [row.tokens[:length]], TokenTree.empty(1))
        pairs = zip(contents(target, state.cache, index, length), contents(target, alone, 0, length), strict=True)
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


class Round(NamedTuple):
    """What a draft round observed, and the texts that it drafted behind."""

    texts: list[list[int]]
    seen: Observation


class _Watch(Drafter):
    """A drafter that is told what its inner one is told, and notes it."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.features = inner, inner.features
        self.rounds: list[Round] = []

    def bind(self, target: Target) -> None:
        self.target = target
        self.inner.bind(target)

    def session(self, state: DecodeState) -> DraftSession:
        session, observe = self.inner.session(state), self._observe

        class Watched(DraftSession):
            admit, propose, retain = session.admit, session.propose, session.retain

            def observe(self, state: DecodeState, seen: Observation) -> None:
                observe(state, seen)
                session.observe(state, seen)

        return Watched()

    def _observe(self, state: DecodeState, seen: Observation) -> None:
        assert_cache_is_the_targets(self.target, state)
        if seen.proposal.tree.width:
            committed = zip(state.rows, seen.verdict.tokens, strict=True)
            self.rounds.append(Round([row.tokens[: len(row.tokens) - len(new)] for row, new in committed], seen))


def watched(
    target: Target, drafter: Drafter, prompts: list[list[int]], rule: str = "auto", **settings: Any
) -> list[Round]:
    """Decodes and returns the draft rounds; after every round the cache must be the target's own."""
    watch = _Watch(drafter)
    Decoder(target, watch, rule=rule).generate(prompts, **settings)
    return watch.rounds


def agreeing_model(contribution: float = 0.4, layers: int = 4) -> PreTrainedModel:
    """Returns a llama that is sure of itself, and whose blocks from the third on contribute little."""
    model = tiny_model(llama_config(layers, heads=4))
    model.lm_head.weight.data.mul_(4.0)
    for layer in range(2, layers):
        model.model.layers[layer].self_attn.o_proj.weight.data.mul_(contribution)
        model.model.layers[layer].mlp.down_proj.weight.data.mul_(contribution)
    return model
