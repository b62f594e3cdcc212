"""SlotCache: keys and values in preallocated slots, ragged over the rows.

A forward writes its columns behind each row's committed tokens; afterwards the accepted path is kept and the
rest forgotten. Forgetting costs nothing, since slots past a row's length are never attended to. The module
knows transformers' cache interface and nothing of trees, masks or drafters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from .errors import UnsupportedModel


class LayerShape(NamedTuple):
    """What one layer stores for a token, and where."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnsupportedModel(
        "the model has recurrent, linear-attention or indexed layers, which fold tokens into one state; "
        "token trees need layers that keep keys and values for every token"
    )


class _AttentionOnly(Cache):
    """A cache for layers that keep every token; a layer that asks for anything else is refused."""

    get_conv_state = update_conv_state = _refuse
    get_recurrent_state = update_recurrent_state = _refuse
    has_previous_state = update_indexer = _refuse


class LayoutRecorder(_AttentionOnly):
    """Stands in for a cache in one forward and notes which layers store what; keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.layout: dict[int, LayerShape] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        self.layout[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[-1], value_states.shape[-1], key_states.dtype, key_states.device
        )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return _columns(query_length), 0


class SlotCache(_AttentionOnly):
    """A transformers cache whose rows have lengths of their own.

    Layers that store tensors of one shape share one tensor, [layers, rows, heads, capacity, width], so that a
    path is moved in one gather and one scatter, whatever the number of layers. Capacity doubles when needed; rows
    that leave keep their place in memory for those that come.

    Attributes:
        lengths: committed tokens of each row, on the host.
    """

    def __init__(self, layout: dict[int, LayerShape], rows: int = 0, capacity: int = 256) -> None:
        super().__init__(layers=[])
        self._groups: dict[LayerShape, list[int]] = {}
        for layer, shape in sorted(layout.items()):
            self._groups.setdefault(shape, []).append(layer)
        self.capacity = capacity
        self.lengths = [0] * rows
        self._rows = rows
        self._stores = {shape: self._allocate(shape, rows, capacity) for shape in self._groups}
        self._first = 0
        self._opened = 0
        self._width = 0
        self._span = 0
        self._uniform: int | None = 0
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._bind()

    def extend(self, count: int) -> None:
        """Adds `count` empty rows at the end; rows that others left behind are used again."""
        used, rows = len(self.lengths), len(self.lengths) + count
        if rows > self._rows:
            self._rebuild(rows, self.capacity)
        else:
            for store in self._all_stores():
                store[:, used:rows] = 0
        self.lengths += [0] * count

    def reserve(self, slots: int) -> None:
        """Makes room for rows of `slots` tokens, in one go: a long prompt is read in many forwards."""
        capacity = self.capacity
        while capacity < slots:
            capacity *= 2
        if capacity > self.capacity:
            self._rebuild(self._rows, capacity)

    def select(self, rows: Sequence[int]) -> None:
        """Reorders and drops rows: row i becomes what row `rows[i]` was. Only rows that change place are moved."""
        if len(rows) > self._rows:
            self._rebuild(len(rows), self.capacity)
        moves = [(place, row) for place, row in enumerate(rows) if place != row]
        if moves:
            for shape, stores in self._stores.items():
                places, sources = torch.tensor(moves, device=shape.device).T
                for store in stores:
                    store[:, places] = store[:, sources]
        self.lengths = [self.lengths[row] for row in rows]

    def open(self, width: int, first: int = 0, opened: int = 0) -> int:
        """Prepares the next forward, which covers the rows from `first` on and writes `width` columns in each.

        Args:
            width: columns to be written.
            first: the first covered row.
            opened: columns of the forwards before that stay open; the new ones go behind them.

        Returns:
            The span: how many slots the forward will attend over.
        """
        lengths = self.lengths[first:]
        self._span = max(lengths, default=0) + opened + width
        self.reserve(self._span)
        self._first, self._width = first, width
        self._opened = opened
        self._uniform = lengths[0] + opened if len(set(lengths)) == 1 else None
        self._slots = {}
        return self._span

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Writes [rows, heads, width, size] states into their slots; returns all slots of the span."""
        covered = slice(self._first, len(self.lengths))
        keys, values = (store[covered] for store in self._layers[layer_idx])
        if self._uniform is not None:
            end = self._uniform + self._width
            keys[:, :, self._uniform : end] = key_states
            values[:, :, self._uniform : end] = value_states
        else:
            rows, slots = self._slot_index(keys.device)
            keys[rows, :, slots] = key_states.transpose(1, 2)
            values[rows, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : self._span], values[:, :, : self._span]

    def advance(self, counts: Sequence[int]) -> None:
        """Commits the first `counts[i]` columns of the open forward in each row that it covers."""
        for row, count in enumerate(counts, start=self._first):
            self.lengths[row] += count

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commits the columns `paths[i]`, counted from the end of what is committed; forgets all others."""
        rows, sources, targets = [], [], []
        for row, path in enumerate(paths, start=self._first):
            start = self.lengths[row]
            for place, column in enumerate(path):
                if column != place:
                    rows.append(row)
                    sources.append(start + column)
                    targets.append(start + place)
            self.lengths[row] += len(path)
        if not rows:
            return
        for shape, stores in self._stores.items():
            index = torch.tensor([rows, sources, targets], device=shape.device)
            for store in stores:
                store[:, index[0], :, index[2]] = store[:, index[0], :, index[1]]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths[self._first :], default=0)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self._span, 0

    def _slot_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._slots:
            lengths = torch.tensor(self.lengths[self._first :], device=device)
            slots = lengths[:, None] + self._opened + torch.arange(self._width, device=device)
            self._slots[device] = torch.arange(len(lengths), device=device)[:, None], slots
        return self._slots[device]

    def _allocate(self, shape: LayerShape, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
        layers = len(self._groups[shape])
        # Zeros, not garbage: a masked slot still meets a weight of 0, and 0 times NaN is NaN.
        return tuple(  # type: ignore[return-value]
            torch.zeros(layers, rows, shape.heads, capacity, width, dtype=shape.dtype, device=shape.device)
            for width in (shape.key_width, shape.value_width)
        )

    def _rebuild(self, rows: int, capacity: int) -> None:
        """Moves the rows in use into larger tensors; what others left behind stays behind."""
        used = len(self.lengths)
        for shape, old in self._stores.items():
            new = self._allocate(shape, rows, capacity)
            for target, source in zip(new, old, strict=True):
                target[:, :used, :, : self.capacity] = source[:, :used]
            self._stores[shape] = new
        self._rows, self.capacity = rows, capacity
        self._bind()

    def _all_stores(self) -> Iterator[Tensor]:
        return (store for stores in self._stores.values() for store in stores)

    def _bind(self) -> None:
        self._layers = {
            layer: (keys[index], values[index])
            for shape, (keys, values) in self._stores.items()
            for index, layer in enumerate(self._groups[shape])
        }


def _columns(query_length: Any) -> int:
    """The number of query columns; transformers before 5.3 hands over their positions instead."""
    return int(query_length.shape[0]) if isinstance(query_length, Tensor) else int(query_length)
