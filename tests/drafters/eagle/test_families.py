"""Heads on targets of other families, in float32: greedy text is that of plain decoding."""

from __future__ import annotations

import pytest
import torch

from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.eagle.config import default_layers, layer_config
from draftwood.drafters.eagle.drafter import Eagle
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead
from tests.architectures import build
from tests.drafters.eagle.heads import PROMPTS, REDUCED

FAMILIES = [
    "gemma2", "gemma3_text", "gpt2", "gpt_neox", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe",
]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family: str) -> None:
    target = Target(build(family, torch.float32))
    config = layer_config(target)
    settings = {"max_new_tokens": 12, "eos_token_id": [], "batch_size": 3}
    plain = Decoder(target, "none").generate(PROMPTS, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads = [EagleHead(config, draft_tokens=REDUCED), Eagle3Head(config, layers=default_layers(target))]
    for head in heads:
        # So wide that an untrained head is right now and then.
        done = Decoder(target, Eagle(checkpoint=head, tree=(40, 1))).generate(PROMPTS, **settings)
        assert [text.tokens for text in done] == [text.tokens for text in plain]
        assert max(text.stats.tau for text in done) > 1
