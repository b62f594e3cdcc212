"""Positions and attention masks of "committed tokens, pending tokens, tree" for ragged rows.

There is no other mask builder. A column attends to its row's committed slots, to pending tokens up to itself,
and, if it is a node, to its ancestors. Windows and chunks restrict that by position, not by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import GROUPED
from .errors import UnsupportedModel
from .tree import TokenTree

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class MaskPlan:
    """Which masks a model wants.

    Attributes:
        kinds: the attention kinds of its layers, each at most once.
        window: positions a sliding layer sees, itself included; None without one.
        chunk: positions of a chunk of chunked attention; None without one.
        additive: whether masks are floats to be added (eager) or booleans (sdpa).
    """

    kinds: tuple[str, ...]
    window: int | None
    chunk: int | None
    additive: bool

    @classmethod
    def of(cls, model: PreTrainedModel, config: Any) -> MaskPlan:
        """Reads the plan off a model's configuration.

        Raises:
            UnsupportedModel: a layer kind or an attention implementation that cannot take a tree.
        """
        name = type(model).__name__
        implementation = config._attn_implementation
        if implementation not in ("sdpa", "eager", GROUPED):
            raise UnsupportedModel(
                f"{name} uses the attention {implementation!r}, which takes no tree-shaped mask; "
                "load it with attn_implementation='sdpa' (or 'eager')"
            )
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
        types = getattr(config, "layer_types", None)
        if types is None:
            types = [SLIDING] if window else [FULL]
        kinds = tuple(dict.fromkeys(types))
        for kind in kinds:
            if kind not in (FULL, SLIDING, CHUNKED):
                raise UnsupportedModel(
                    f"{name} has layers of kind {kind!r}; token trees need {FULL}, {SLIDING} or {CHUNKED} layers"
                )
        return cls(kinds, window, getattr(config, "attention_chunk_size", None), implementation == "eager")


def tree_positions(lengths: Sequence[int], pending: int, tree: TokenTree, device: torch.device) -> Tensor:
    """Returns the absolute position of every column, [batch, pending + nodes] int64.

    Args:
        lengths: committed tokens of each row.
        pending: pending columns, which come first.
        tree: nodes of depth d sit d positions after the last pending token.
        device: where the result goes.
    """
    start = torch.tensor(lengths, dtype=torch.int64, device=device)[:, None]
    columns = start + torch.arange(pending, device=device)
    if not tree.width:
        return columns
    return torch.cat([columns, start + (pending - 1) + tree.depths.to(device)], 1)


def tree_masks(
    plan: MaskPlan,
    lengths: Sequence[int],
    pending: int,
    tree: TokenTree,
    positions: Tensor,
    span: int,
    dtype: torch.dtype,
    opened: int = 0,
) -> Tensor | dict[str, Tensor]:
    """Returns the mask the model takes, [batch, 1, columns - opened, span], or one for each kind of layer.

    Args:
        plan: which masks the model wants.
        lengths: committed tokens of each row; columns are written right behind them.
        pending: pending columns, which come first.
        tree: the nodes, on the device of the masks.
        positions: [batch, columns] int64, absolute.
        span: slots attended over.
        dtype: of additive masks.
        opened: columns, the first ones, that are in the cache already; they are attended to and ask nothing.
    """
    device = positions.device
    batch, columns = positions.shape
    inner = torch.ones(columns, columns, dtype=torch.bool, device=device).tril_().expand(batch, columns, columns)
    if tree.width:
        inner = inner.clone()
        inner[:, pending:, pending:] = tree.ancestors
    uniform = len(set(lengths)) == 1
    if uniform:
        mask = torch.ones(batch, columns - opened, span, dtype=torch.bool, device=device)
        mask[:, :, lengths[0] :] = inner[:, opened:]
    else:
        start = torch.tensor(lengths, device=device)[:, None]
        own = start + torch.arange(columns, device=device)  # [batch, columns]: the slot of every column
        mask = (torch.arange(span, device=device) < start)[:, None].repeat(1, columns - opened, 1)
        mask.scatter_(2, own[:, None].expand(batch, columns - opened, columns), inner[:, opened:])
    masks = {}
    for kind in plan.kinds:
        restricted = mask if kind == FULL else mask & _within(plan, kind, lengths, positions, span, opened)
        masks[kind] = _additive(restricted, dtype)[:, None] if plan.additive else restricted[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _within(
    plan: MaskPlan, kind: str, lengths: Sequence[int], positions: Tensor, span: int, opened: int
) -> Tensor | bool:
    """Which slots lie within a column's window or chunk, [batch, columns - opened, span]; by position, not by slot.

    Compared with one number a column, so that nothing of that shape is ever wider than a bool.
    """
    batch, columns = positions.shape
    device = positions.device
    start = torch.tensor(lengths, device=device)[:, None]
    slots = torch.arange(span, device=device).expand(batch, span).clone()
    slots.scatter_(1, start + torch.arange(columns, device=device), positions)
    asking = positions[:, opened:, None]
    if kind == SLIDING and plan.window is not None:
        return slots[:, None] > asking - plan.window
    if kind == CHUNKED and plan.chunk is not None:
        return slots[:, None] // plan.chunk == asking // plan.chunk
    return True


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)
