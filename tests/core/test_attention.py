"""Grouped attention: what the layers' own attention gives, whatever the shapes, and only where it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import draftwood as dw
from draftwood.core.attention import FEW_QUERIES, GROUPED, group_attention, grouped_attention
from draftwood.core.views import layer_view
from draftwood.study.environment import environment
from tests.conftest import llama_config, tiny_model


def expected(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention head by head, in float64."""
    batch, heads, queries, width = query.shape
    output = torch.zeros(batch, queries, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // key.shape[1])
        scores = query[:, head].double() @ key[:, shared].double().mT * (scale or width**-0.5)
        if mask is None:
            scores += torch.full(scores.shape[-2:], -torch.inf).triu(1)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, 0], -torch.inf)
        else:
            scores += mask[:, 0]
        output[:, :, head] = scores.softmax(-1) @ value[:, shared].double()
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("heads", "shared"), [(6, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (5, 9), (FEW_QUERIES, 70), (FEW_QUERIES + 1, 80)])
@pytest.mark.parametrize(("masks", "width"), [(1, 4), (3, 8)])
def test_it_is_attention(
    dtype: torch.dtype, added: bool, heads: int, shared: int, queries: int, keys: int, masks: int, width: int
) -> None:
    source = torch.Generator().manual_seed(0)
    query = torch.randn(3, queries, heads, 8, generator=source).to(dtype).transpose(1, 2)
    # keys and values as the cache hands them over: parts of something longer
    key = torch.randn(3, shared, keys + 5, 8, generator=source).to(dtype)[:, :, :keys]
    value = torch.randn(3, shared, keys + 5, width, generator=source).to(dtype)[:, :, :keys]
    mask: Any = torch.rand(masks, 1, queries, keys, generator=source) < 0.5
    mask[..., 0] = True
    if masks == 3 and queries == 5:
        mask = mask[:, :, :1]  # the same for all queries
    if added:
        mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    module = nn.Module()
    module.num_key_value_groups = heads // shared  # type: ignore[assignment]
    got, weights = grouped_attention(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    assert weights is None
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got.double(), expected(query, key, value, mask, 0.3), **close)


def test_without_a_mask_it_is_causal() -> None:
    query, key, value = torch.randn(3, 1, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    got, _ = grouped_attention(module, query, key[:, :2], value[:, :2], None, scaling=None)
    torch.testing.assert_close(got, expected(query, key[:, :2], value[:, :2], None, None).float())


def test_packed_targets_attend_so_and_their_views_and_copies_too() -> None:
    model: Any = tiny_model(llama_config(layers=3, heads=4)).float()
    target = dw.Target(model, packed=True)
    assert target.config._attn_implementation == GROUPED
    assert environment(target)["attention"] == GROUPED
    assert layer_view(target, 0, 2).config._attn_implementation == GROUPED
    assert dw.Target(model).config._attn_implementation == model.config._attn_implementation == "sdpa"
    prompt = torch.tensor([[5, 6, 7]])
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 8}
    assert torch.equal(target.model.generate(prompt, **given), model.generate(prompt, **given))


def test_eager_attention_stays() -> None:
    model = tiny_model(llama_config(layers=2, heads=4)).float()
    model.set_attn_implementation("eager")
    assert dw.Target(model, packed=True).config._attn_implementation == "eager"


@pytest.mark.parametrize("hindrance", ["other results", "an error"])
def test_where_it_changes_results_it_is_not_used(hindrance: str) -> None:
    config = llama_config(layers=1, heads=4)
    config._attn_implementation = "sdpa"

    def run() -> Tensor:
        if config._attn_implementation == GROUPED and hindrance == "an error":
            raise ValueError("an attention that is not known")
        return torch.tensor([0.0, 1.0, 2.0 + (config._attn_implementation == GROUPED)])

    group_attention(config, run, torch.float32)
    assert config._attn_implementation == "sdpa"


def test_a_family_without_shared_keys_gives_the_same_logits() -> None:
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    model = tiny_model(config).float()
    given: Any = {"max_new_tokens": 12, "eos_token_id": []}
    texts = [
        dw.Decoder(dw.Target(model, packed=packed), "lookahead").generate([5, 6, 7], **given).tokens
        for packed in (False, True)
    ]
    assert texts[0] == texts[1]


def test_masks_of_each_head_and_soft_capping_are_the_layers_own() -> None:
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8, generator=source) for heads in (4, 2, 2))
    module = nn.Module()
    module.num_key_value_groups = 2  # type: ignore[assignment]
    bias = torch.randn(1, 4, 5, 5, generator=source)
    shared = [0, 0, 1, 1]
    heads = [
        expected(query[:, [head]], key[:, [other]], value[:, [other]], bias[:, [head]], None)
        for head, other in enumerate(shared)
    ]
    single = torch.cat(heads, 2).float()
    torch.testing.assert_close(grouped_attention(module, query, key, value, bias)[0], single)
    outcomes: list[Any] = []
    for attend in (grouped_attention, sdpa_attention_forward):
        try:
            outcomes.append(attend(module, query, key, value, bias[:, :1], softcap=3.0)[0].tolist())
        except ValueError as error:  # newer versions of transformers refuse, older ones leave it out
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
