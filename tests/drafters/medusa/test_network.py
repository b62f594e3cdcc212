"""Medusa's heads against the plain modules they stand for: values, gradients, draft vocabularies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.core.views import head_of
from draftwood.drafters.medusa.network import IGNORED, MedusaConfig, MedusaHeads
from tests.architectures import build


def random_heads(config: MedusaConfig, tokens: Tensor | None = None, seed: int = 0) -> MedusaHeads:
    heads = MedusaHeads(config, tokens).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return heads


def plain_head(heads: MedusaHeads, index: int, hidden: Tensor) -> Tensor:
    """One head as the paper writes it, with modules of its own."""
    for block in heads.blocks:
        linear = nn.Linear(hidden.shape[-1], hidden.shape[-1], dtype=torch.float64)
        linear.weight, linear.bias = nn.Parameter(block.weight[index]), nn.Parameter(block.bias[index])
        hidden = hidden + nn.SiLU()(linear(hidden))
    return hidden


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8)])
def test_every_head_is_blocks_of_its_own(layers: int, shape: tuple[int, ...]):
    heads = random_heads(MedusaConfig(3, layers, 8, 11))
    hidden = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    states, logits = heads.states(hidden), heads.logits(hidden)
    assert states.shape == (3, *shape) and logits.shape == (3, *shape[:-1], 11)
    for index in range(3):
        expected = plain_head(heads, index, hidden)
        torch.testing.assert_close(states[index], expected)
        torch.testing.assert_close(logits[index], expected @ heads.lm_heads[index].T)
    torch.testing.assert_close(heads.logits(hidden, count=2), logits[:2])
    logits[1].square().sum().backward()
    for parameter in heads.parameters():
        assert parameter.grad[1].abs().sum() > 0 and parameter.grad[[0, 2]].abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types(dtype: torch.dtype):
    target = Target(build("llama", torch.bfloat16))
    heads = MedusaHeads.for_target(target, heads=2, shared=True).to(dtype)
    hidden = torch.randn(2, 3, target.config.hidden_size).bfloat16()
    assert heads.states(hidden).dtype == dtype
    logits = heads.logits(hidden, head_of(target))
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert heads.blocks[0].weight.grad.dtype == dtype and heads.blocks[0].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["llama", "gpt2", "granite"])
@pytest.mark.parametrize("tokens", [None, torch.tensor([7, 3, 50])])
def test_fresh_heads_guess_what_the_target_says_next(family: str, tokens: Tensor | None):
    """With W and b at zero the blocks add nothing; the LM heads are the target's."""
    target = Target(build(family))
    with torch.no_grad():
        scores = target.score(
            target.new_cache(1, 8), [[4, 5]], TokenTree.from_lists([[6]], [[-1]]), features=frozenset({"last"})
        )
        hidden = scores.features["last"][:, 1:]
        shared = MedusaHeads.for_target(target, heads=3, layers=2, shared=True, draft_tokens=tokens)
        expected = scores.logits if tokens is None else scores.logits[..., tokens]
        got = shared.logits(hidden, head_of(target, tokens))
        torch.testing.assert_close(got, expected.expand(3, *expected.shape))
        own = MedusaHeads.for_target(target, heads=3, layers=2, draft_tokens=tokens).logits(hidden)
        torch.testing.assert_close(own / own.std(), got / got.std())  # granite scales its logits afterwards
    assert not any("lm_head" in name for name in shared.state_dict())


def test_the_draft_vocabulary_and_back():
    tokens = torch.tensor([9, 2, 4])
    heads = random_heads(MedusaConfig(2, 1, 8, 11), tokens)
    assert heads.draft_vocabulary == 3 and heads.lm_heads.shape == (2, 3, 8)
    assert heads.labels(torch.tensor([[2, 3], [4, 9]])).tolist() == [[1, IGNORED], [2, 0]]
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    whole = heads.to_target(logits)[0]
    assert whole[tokens].tolist() == [1.0, 2.0, 3.0] and whole.isinf().sum() == 8
    everything = random_heads(MedusaConfig(2, 1, 8, 11))
    assert everything.to_target(logits) is logits
    assert everything.labels(tokens) is tokens


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 11]), "ids from 0 to 10, got 11"),
        (torch.tensor([-2]), "got -2"),
        (torch.tensor([1, 1]), "distinct, got 2 ids of 1 tokens"),
        (torch.tensor([1.0]), r"int64 ids, got \[1\] torch.float32"),
    ],
)
def test_draft_tokens_that_cannot_be(tokens: Tensor, message: str):
    with pytest.raises(InvalidRequest, match=message):
        MedusaHeads(MedusaConfig(2, 1, 8, 11), tokens)


def test_what_cannot_be_made():
    with pytest.raises(InvalidRequest, match="heads must be a whole number >= 1, got 0"):
        MedusaConfig(0, 1, 8, 11)
    with pytest.raises(InvalidRequest, match="share the target's LM head"):
        MedusaHeads(MedusaConfig(1, 1, 8, 11, shared=True)).logits(torch.zeros(2, 8))
    model = build("llama")
    target = Target(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:-1])
    with pytest.raises(UnsupportedModel, match="share it instead"):
        MedusaHeads.for_target(target, heads=1)
