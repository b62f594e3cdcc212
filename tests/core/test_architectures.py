"""Every causal language model family of the installed transformers: a tree is scored as its paths are, or refused.

`examine` is also what `benchmarks/architectures.py` makes the table in the docs from.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from draftwood.core.errors import UnsupportedModel
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.prompt_lookup import PromptLookup
from tests.architectures import VOCABULARY, build, families

# Kernels that exist in no other type than float32 (grouped matrix products of mixtures of experts, mostly).
FLOAT32_ONLY = ("mat_a to be Float32", "without overflow", "expected scalar type", "must have the same dtype")

# Families whose own `generate` writes something else than text; their tree logits are checked all the same.
GENERATE_OTHERWISE = {"moshi"}


# What is refused, by the reason that the error gives. A family that is in neither list must pass.
REFUSED = {
    "has layers of kind": [
        "axk2",
        "bailing_hybrid",
        "deepseek_v32",
        "deepseek_v4",
        "falcon_h1",
        "falcon_mamba",
        "glm_moe_dsa",
        "hy_v4",
        "inkling_text",
        "jamba",
        "lara_mini",
        "lfm3",
        "mamba",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "zaya",
    ],
    "takes no position_ids": [
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "bloom",
        "cpmant",
        "marian",
        "mbart",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "roformer",
        "trocr",
        "whisper",
        "xlstm",
    ],
    "scores a token tree differently": ["dory", "gpt_neo"],
    "alibi": ["mpt"],
    "takes no key-value cache": ["openai-gpt", "rwkv", "xlnet"],
}

# What cannot be built small here, and why. Their text-only or attention-only relatives are in the matrix.
NOT_BUILT = {
    "a model of several modalities": [
        "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "moss_transcribe_diarize",
        "phi4_multimodal",
    ],
    "reads the states of another model": ["gemma4_assistant", "gemma4_unified_assistant"],
    "recurrent or hashing layers with sizes of their own": [
        "bamba", "granitemoehybrid", "mamba2", "reformer", "zamba", "zamba2",
    ],
    "sizes that the configuration does not let one shrink": [
        "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "inkling2_loop_text", "inkling2_text",
        "kimi_linear", "qwen4_exp", "qwen4_exp_text", "roc_bert", "xlm",
    ],
}  # fmt: skip


class Outcome(NamedTuple):
    """What became of a family: `passed`, `refused` by UnsupportedModel, or `not built` here, and why."""

    status: str
    detail: str


def examine(family: str) -> Outcome:
    """Builds a tiny model of `family` and checks tree logits and greedy text."""
    warnings.simplefilter("ignore")
    try:
        model = build(family)
    except Exception as error:  # noqa: BLE001 - random sizes run into anything
        return Outcome("not built", f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
    for dtype, tolerance in ((torch.float64, 1e-5), (torch.float32, 2e-3)):
        try:
            target = Target(model.to(dtype))
        except UnsupportedModel as error:
            if dtype == torch.float64 and any(sign in str(error) for sign in FLOAT32_ONLY):
                continue
            return Outcome("refused", str(error))
        error = tree_error(target)
        if not error <= tolerance:
            return Outcome("wrong", f"tree logits differ by {error:.1e} in {dtype}")
        if family not in GENERATE_OTHERWISE and not greedy_equal(model, target):
            return Outcome("wrong", f"greedy text differs from generate in {dtype}")
        return Outcome("passed", f"{str(dtype).removeprefix('torch.')}, tree logits within {error:.0e}")
    return Outcome("refused", "runs in float32 only, and not there either")


@torch.inference_mode()
def tree_error(target: Target) -> float:
    """The greatest difference between tree logits and those of the paths, relative to their spread.

    Two rows of different lengths, both longer than the windows of the tiny models, after a round that kept a path
    with a gap in it; trees deeper than those windows.
    """
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    parents = [[-1, 0, 1, 2, 3, 0, -1, 6], [-1, -1, 1, 1, 3, 4, 5, 6]]
    tokens = [[20, 21, 22, 23, 24, 25, 26, 27], [30, 31, 32, 33, 34, 35, 36, 37]]
    cache = target.new_cache(2, 8)
    target.score(cache, prompts, TokenTree.empty(2))
    tree = TokenTree.from_lists(tokens, parents)
    target.score(cache, [[40], [41]], tree)
    cache.keep([[0, 5], [1, 3]])
    texts = [[*prompts[0], 40, 20, 25, 50], [*prompts[1], 41, 31, 33, 51]]
    scores = target.score(cache, [[50], [51]], tree)
    worst = 0.0
    for row, text in enumerate(texts):
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            paths.append([*paths[parent + 1], token])
        for node in (0, 5, 8):
            fresh = target.new_cache(1, 32)
            expected = target.score(fresh, [[*text, *paths[node]]], TokenTree.empty(1)).logits[0, 0].double()
            got = scores.logits[row, node].double()
            worst = max(worst, float((got - expected).abs().max() / expected.std().clamp(min=1e-9)))
    return worst


def greedy_equal(model: PreTrainedModel, target: Target) -> bool:
    """Whether speculative greedy text, batched and with drafts that partly fail, is what `generate` writes."""
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9]]
    texts = Decoder(target, PromptLookup(gamma=4)).generate(prompts, max_new_tokens=7, eos_token_id=[])
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        plain = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=7, eos_token_id=VOCABULARY + 1
        )
        if plain[0, len(prompt) :].tolist() != text.tokens:
            return False
    return True


@pytest.mark.parametrize("family", families())
def test_a_family_scores_trees_exactly_or_is_refused(family: str) -> None:
    outcome = examine(family)
    refusal = next((reason for reason, names in REFUSED.items() if family in names), None)
    if refusal is not None:
        assert outcome.status == "refused"
        assert refusal in outcome.detail
    elif any(family in names for names in NOT_BUILT.values()):
        assert outcome.status == "not built"
    else:
        assert outcome.status == "passed", outcome.detail


def test_forty_families_and_more_pass() -> None:
    exceptions = {name for names in [*REFUSED.values(), *NOT_BUILT.values()] for name in names}
    assert len(set(families()) - exceptions) >= 40
