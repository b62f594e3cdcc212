"""Attention of few queries by many keys, for packed targets: grouped heads read their keys once.

transformers repeats keys and values for all the heads that share them wherever there is a mask and more than one query,
so that the copies of a long context take longer than what is computed. Here the queries of these heads go behind each
other instead, and the keys stay where they are. The module knows nothing of trees, caches or drafters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .checks import same_but_for_rounding
from .errors import REFUSALS

GROUPED = "draftwood_grouped_sdpa"
"""The name by which transformers' models find `grouped_attention`."""

FEW_QUERIES = 64
"""Up to so many queries masks are copied for every head of a group; more are left to torch's own grouping."""


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Scaled dot-product attention in the form of transformers' attention functions.

    Args:
        module: the attention layer.
        query: [batch, heads, queries, width].
        key: [batch, key heads, keys, width]; head h reads key head h // (heads / key heads).
        value: [batch, key heads, keys, value width].
        attention_mask: [batch or 1, 1, queries or 1, keys], boolean or to be added; None leaves out nothing but, of
            several queries, what comes later.
        options: as transformers hands them over.

    Returns:
        [batch, queries, heads, value width], and no weights.
    """
    batch, heads, queries, width = query.shape
    groups = heads // key.shape[1]
    common = options.get("position_bias") is None and options.get("softcap") is None
    if groups == 1 or attention_mask is None or attention_mask.shape[1] != 1 or not common:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    given = {"dropout_p": options.get("dropout", 0.0), "scale": options.get("scaling")}
    if queries > FEW_QUERIES:
        output = scaled_dot_product_attention(query, key, value, attention_mask, enable_gqa=True, **given)
    else:
        folded = query.reshape(batch, key.shape[1], groups * queries, width)
        mask = attention_mask.expand(-1, groups, queries, -1).reshape(-1, 1, groups * queries, key.shape[2])
        output = scaled_dot_product_attention(folded, key, value, mask, **given).view(batch, heads, queries, -1)
    return output.transpose(1, 2).contiguous(), None


def group_attention(config: PreTrainedConfig, run: Callable[[], Tensor], dtype: torch.dtype) -> None:
    """Lets the layers that were built with a configuration attend by `grouped_attention`, if that changes no result.

    Args:
        config: nobody else's, since it is changed.
        run: a forward of these layers with a mask, the same at every call.
        dtype: of their weights.
    """
    if config._attn_implementation != "sdpa":
        return
    with torch.inference_mode():
        before = run()
        config._attn_implementation = GROUPED
        try:
            same = same_but_for_rounding(run(), before, dtype)
        except REFUSALS:  # a family that looks its attention up elsewhere, or asks for more of it
            same = False
    if not same:
        config._attn_implementation = "sdpa"


# transformers' own table, by its own door: an entry under our name, which only models of ours ask for and their copies,
# in other processes too.
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)
