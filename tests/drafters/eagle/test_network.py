"""The networks against plain arithmetic; unrolling against drafting; what is the target's stays the target's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GPT2Config, Qwen3Config

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.drafters.eagle.config import default_layers, layer_config
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead, unroll_mask
from tests.conftest import VOCABULARY, llama_config, tiny_model
from tests.drafters.eagle.heads import (
    KINDS,
    REDUCED,
    Reference,
    finite_close,
    greedy_texts,
    make_head,
    sure_target,
    train,
    true_features,
    unrolled,
)

TEXT = [5, 9, 40, 3, 77, 8]


@pytest.fixture(scope="module")
def target() -> Target:
    return sure_target()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_text_is_read_as_plain_arithmetic_says(target, kind):
    head = make_head(kind, target).attach(target)
    features = true_features(head, target, torch.tensor([TEXT]))[0]
    with torch.no_grad():
        hidden = head(torch.tensor([TEXT[1:]]), head.fuse(features[:, :-1]), torch.arange(5)[None], None)
        logits = head.to_target(head.logits(hidden))
    assert logits.shape == (1, 5, VOCABULARY)
    for column in range(5):
        finite_close(logits[0, column], Reference(head, target, TEXT[: column + 2]).logits())


@pytest.mark.parametrize("kind", ["eagle", "eagle3.1"])
def test_unrolled_steps_are_what_drafting_would_compute(target, kind):
    head = make_head(kind, target).attach(target)
    text = torch.tensor([[*TEXT, 31, 12]])
    features = true_features(head, target, text)[0]
    with torch.no_grad():
        steps = unrolled(head, text, features, 3)
    for step, logits in enumerate(steps):
        logits = head.to_target(logits)
        for column in range(text.shape[1] - 1 - step):
            whole = text[0, : column + 2 + step].tolist()
            # The last `step` tokens are read beside the head's own outputs.
            expected = Reference(head, target, whole[: column + 2]).logits(whole[column + 2 :])
            finite_close(logits[0, column], expected)


def test_an_unroll_mask_by_hand():
    mask = unroll_mask(2, 2)
    assert mask.shape == (1, 1, 2, 6)
    assert mask[0, 0].int().tolist() == [[1, 0, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_learn_and_the_target_does_not(target, kind):
    head = make_head(kind, target).attach(target)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    losses = train(head, target, greedy_texts(target, 16), 12)
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in head.parameters())
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_target_is_held_or_copied(target, kind):
    head = make_head(kind, target)
    names, size = set(head.state_dict()), sum(parameter.numel() for parameter in head.parameters())
    head.attach(target)
    assert set(head.state_dict()) == names
    assert sum(parameter.numel() for parameter in head.parameters()) == size
    own = {parameter.data_ptr() for parameter in head.parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in target.model.parameters())
    assert not any("lm_head" in name for name in names) or isinstance(head, Eagle3Head)
    assert "draft_tokens" not in names
    # By reference: a change of the target's embedding is seen, by a deep copy of the head too.
    if kind != "eagle3, narrow":
        twins = [head, copy.deepcopy(head)]
        embedding: Any = target.model.get_input_embeddings().weight
        old = embedding.data.clone()
        try:
            embedding.data.zero_()
            assert all(twin._embed(torch.tensor([[5]])).abs().sum() == 0 for twin in twins)
        finally:
            embedding.data.copy_(old)


def test_a_twin_has_the_weights_and_another_target(target):
    head = make_head("eagle", target).attach(target)
    other = Target(tiny_model(llama_config(layers=2, heads=4), seed=5))
    twin = head.twin().attach(other)
    hidden = torch.randn(1, 1, 32, dtype=torch.float64)
    assert not torch.allclose(twin.logits(hidden), head.logits(hidden))
    assert all(a is b for a, b in zip(twin.parameters(), head.parameters(), strict=True))


FAMILIES: dict[str, Any] = {
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4),
    "gemma": GemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
    ),
    "qwen3": Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_targets_of_other_families(family):
    target = Target(tiny_model(FAMILIES[family]))
    texts = greedy_texts(target, 12)
    for head in (EagleHead(layer_config(target)), Eagle3Head(layer_config(target), layers=default_layers(target))):
        head.double().attach(target)
        with torch.no_grad():
            scores = target.score(
                target.new_cache(4), texts.tolist(), TokenTree.empty(4), features=frozenset(head.feature_names)
            )
        features = torch.cat([scores.features[name] for name in head.feature_names], -1)
        logits = unrolled(head, texts, features, 2)
        assert logits[1].shape == (4, 11, VOCABULARY)
        logits[1].sum().backward()
        assert all(parameter.grad is not None for parameter in head.parameters())


def test_reduced_vocabularies(target):
    small = make_head("eagle, no bias, reduced", target).attach(target)
    full = EagleHead(small.config, fc_bias=False).double().attach(target)
    hidden = torch.randn(2, 3, 32, dtype=torch.float64)
    torch.testing.assert_close(small.logits(hidden), full.logits(hidden)[..., REDUCED])
    spread = small.to_target(small.logits(hidden))
    torch.testing.assert_close(spread[..., REDUCED], full.logits(hidden)[..., REDUCED])
    assert spread.isinf().sum() == 6 * (VOCABULARY - len(REDUCED))


def test_half_precision_keeps_the_rotary_frequencies(target):
    config = layer_config(target, hidden_size=128, num_attention_heads=2)
    head = Eagle3Head(config, layers=(1,), target_hidden_size=32, own_embedding=True).attach(target)
    exact = head._rotary[0].inv_freq.clone()
    head.to(torch.bfloat16)
    assert torch.equal(head._rotary[0].inv_freq, exact)
    assert not torch.equal(exact, exact.bfloat16().float())
    assert head.fuse(torch.zeros(1, 2, 32, dtype=torch.float64)).dtype == torch.bfloat16


def test_layer_config_follows_the_target(target):
    config = layer_config(target)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (32, 4, 2)
    assert config.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]
    assert layer_config(target, intermediate_size=20).intermediate_size == 20
    assert layer_config(target, hidden_size=64).head_dim == 16
    with pytest.raises(InvalidRequest, match="no Llama layer"):
        layer_config(target, hidden_size=30)
    with pytest.raises(InvalidRequest, match="intermediate_size must be a whole number >= 1, got 0"):
        layer_config(target, intermediate_size=0)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "list of token ids"),
        ([3, 3], "a token twice"),
        ([-1], "from 0 to 95"),
        ([96], "0 to 95"),
        ([[1]], "list of"),
        ([1.5], "list of"),
        (["a"], "list of"),
    ],
)
def test_impossible_draft_tokens(target, tokens, message):
    with pytest.raises(InvalidRequest, match=message):
        EagleHead(layer_config(target), draft_tokens=tokens)


def test_heads_that_do_not_fit(target):
    config = layer_config(target)
    wide = layer_config(target, hidden_size=64)
    cases = [
        (EagleHead(wide), "features of width 64"),
        (Eagle3Head(wide, layers=(1,), target_hidden_size=32), "no embed_tokens of its own"),
        (Eagle3Head(config, layers=(1, 4)), "the input of block 4, the target has 3 blocks"),
        (EagleHead(layer_config(target, vocab_size=50)), "vocab_size is 50, the target has 96"),
    ]
    for head, message in cases:
        with pytest.raises(InvalidRequest, match=message):
            head.attach(target)
    with pytest.raises(InvalidRequest, match="call attach"):
        EagleHead(config).logits(torch.zeros(1, 1, 32))
    with pytest.raises(InvalidRequest, match="at least one layer"):
        Eagle3Head(config, layers=())
