"""Packed linears: a CPU target whose matrices are also kept in the layout that oneDNN multiplies fastest by.

A verify pass multiplies few rows by large matrices, the case that general matrix products on a CPU are worst at. With
packed weights a pass over a small tree costs little more than one over a single token. The user's model is not touched:
a copy of its modules, sharing every weight with it, multiplies by the packed weights, which are memory of its own. Of a
model that nobody else holds the packed weights are the only ones (`pack_in_place`).
Results differ from the model's own by rounding. This module knows nothing of trees, caches or drafters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from .anatomy import is_sharded
from .checks import same_but_for_rounding
from .errors import InvalidRequest, UnsupportedModel

ROWS_HINT = 16
"""The number of rows that the layout is chosen for; measured to be good from 1 to 512, where a hint of 1 is not."""


_UNCHANGEABLE = (
    "the weights of a model that was packed while it was loaded cannot be changed, moved or shared; load the model "
    "yourself and hand it to Target(model, packed=True)"
)


class PackedWeight(Tensor):
    """A linear layer's weight, [out_features, in_features], of which only the packed copy is kept.

    Whatever reads it gets the dense weight, made for that moment; a deep copy is an ordinary weight. It cannot be
    written to.
    """

    _packed: _Packed
    _place: int

    @staticmethod
    def __new__(cls, packed: _Packed, place: int) -> PackedWeight:
        width = packed.weight.shape[1]
        size, cpu = (packed.sizes[place], width), torch.device("cpu")
        weight: PackedWeight = Tensor._make_wrapper_subclass(cls, size, dtype=packed.weight.dtype, device=cpu)
        weight._packed, weight._place = packed, place
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is torch.ops.aten.detach.default:
            return PackedWeight(args[0]._packed, args[0]._place)
        for place, argument in enumerate(operation._schema.arguments):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(isinstance(part, PackedWeight) for part in tree_leaves(given)):
                raise InvalidRequest(_UNCHANGEABLE)
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.dense, (args, kwargs))
        return operation(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The weight without a history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as a module sets it that is moved to where it is
            raise InvalidRequest(_UNCHANGEABLE)

    def share_memory_(self) -> Tensor:
        """Refuses: packed memory cannot be shared."""
        raise InvalidRequest(_UNCHANGEABLE)

    def dense(self) -> Tensor:
        """Returns the weight as an ordinary tensor of its own."""
        return self._packed.dense(self._place)

    def __deepcopy__(self, _: Any) -> nn.Parameter:
        return nn.Parameter(self.dense(), requires_grad=self.requires_grad)


class PackedLinear(nn.Linear):
    """A linear layer that shares its weight with another one and multiplies by a packed copy of it.

    Where a gradient is wanted, or autocast another type, it multiplies by the weight itself. A deep copy is an ordinary
    linear layer, unless the copy's weight is the same memory.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.train(linear.training)
        self._place, self._packed = 0, _Packed([self])

    def forward(self, input: Tensor) -> Tensor:
        """Returns [..., out_features]."""
        graph = torch.is_grad_enabled() and any(part.requires_grad for part in (input, *self.parameters()))
        if graph or torch.is_autocast_enabled("cpu"):
            return super().forward(input)
        return self._packed.multiply(input, self._place, self.bias)

    def join(self, place: int, packed: _Packed) -> None:
        """Multiplies from now on as the layer number `place` of those that are packed together."""
        self._place, self._packed = place, packed
        if isinstance(self.weight, PackedWeight):
            self.release()

    def release(self) -> None:
        """Lets go of the weight: the packed one is the only one from now on."""
        with torch.inference_mode(False), torch.no_grad():
            self.weight = nn.Parameter(PackedWeight(self._packed, self._place), requires_grad=False)
        self._packed.of[self._place] = _version(self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if isinstance(self.weight, PackedWeight):  # what is saved must have a storage
            destination[f"{prefix}weight"] = self.weight.dense()

    @property
    def stale(self) -> bool:
        """Whether the weight was changed since it was packed."""
        return self._packed.of[self._place] != _version(self.weight)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Linear:
        weight, bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        if _version(weight) == _version(self.weight):
            twin: nn.Linear = copy.copy(self)
            # Dicts of its own: hooks of the copy must not be hooks of this layer.
            vars(twin).update({name: copy.copy(own) for name, own in vars(self).items() if isinstance(own, dict)})
        else:
            twin = nn.Linear(self.in_features, self.out_features, bias=False, device="meta").train(self.training)
        twin.weight, twin.bias = weight, bias
        return twin


class _Packed:
    """Packed weights of a linear layer, or of several that read the same tensor and are then multiplied at once.

    The first one that is asked multiplies for all; the others find their part.
    """

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        # Whatever mode the caller is in: an inference tensor could not be used where gradients are on.
        with torch.inference_mode(False), torch.no_grad():
            weights = [layer.weight.detach() for layer in layers]
            joined = weights[0] if len(weights) == 1 else torch.cat(weights)
            self.weight = torch.ops.mkldnn._reorder_linear_weight(joined, ROWS_HINT)
        self.of = [_version(layer.weight) for layer in layers]
        self.sizes = [layer.out_features for layer in layers]
        self._kept: tuple[Tensor | None, list[Tensor | None]] = (None, [])

    def multiply(self, input: Tensor, place: int, bias: Tensor | None) -> Tensor:
        """Returns the product of the layer number `place`; only one that is alone has a bias."""
        if len(self.sizes) == 1:
            return self._product(input, bias)
        # Read once, as another thread may put its own there; whose input it is says whether it is ours.
        of, parts = self._kept
        if of is not input or parts[place] is None:
            parts = list(torch.split(self._product(input, None), self.sizes, -1))
            self._kept = (input, parts)
        part, parts[place] = parts[place], None
        if not any(left is not None for left in parts):
            self._kept = (None, [])
        return part  # type: ignore[return-value]

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(input, self.weight, bias, "none", [], "")
        return product

    def dense(self, place: int) -> Tensor:
        """Returns the weight of the layer number `place` by itself."""
        parts = torch.split(self.weight.to_dense(), self.sizes)
        return parts[place] if len(parts) == 1 else parts[place].clone()


def _version(weight: Tensor) -> tuple[int, int]:
    """Tells one memory, and what was written to it, from others."""
    if isinstance(weight, PackedWeight):
        return id(weight._packed), weight._place
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def packed_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model's modules that shares all its weights, with packed linears.

    Layers of other classes than `torch.nn.Linear`, and those whose weight is quantised, stay what they are. A model
    with packed linears is returned as it is.

    Args:
        model: on the CPU, in float32, or in bfloat16 where the CPU has instructions for it.

    Raises:
        InvalidRequest: the model is elsewhere, or of another type, or sharded.
        UnsupportedModel: it has no linear layers to pack, or modules that cannot be copied.
    """
    _check_packable(model)
    if any(isinstance(part, PackedLinear) for part in model.modules()):
        return model
    shared: dict[int, Any] = {id(part): part for part in (*model.parameters(), *model.buffers())}
    try:
        twin: PreTrainedModel = copy.deepcopy(model, shared)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedModel(f"the modules of {type(model).__name__} cannot be copied: {error}") from error
    _pack(twin)
    return twin


def pack_in_place(model: PreTrainedModel) -> None:
    """Packs a model that nobody else holds; but for the LM head it then has no other weights of these layers.

    So no two copies of all weights are ever in memory. The LM head's weight stays, since heads take rows of it.

    Args:
        model: as of `packed_copy`.

    Raises:
        InvalidRequest: as of `packed_copy`.
        UnsupportedModel: it has no linear layers to pack.
    """
    _check_packable(model)
    linears = {part for part in model.modules() if _packs(part)}
    kept = {id(weight) for part in model.modules() if part not in linears for weight in part.parameters(recurse=False)}
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    kept |= set() if output is None else {id(weight) for weight in output.parameters(recurse=False)}
    alone = {id(part.weight) for part in linears} - kept
    for weight in model.parameters():
        if id(weight) not in alone:  # of its own, for what was read from a file may keep all of the file
            weight.data = weight.data.clone()
    del linears
    _pack(model, alone)


def pack_linears(module: nn.Module, alone: Collection[int] = ()) -> int:
    """Puts packed linears in the place of a module's own; returns how many.

    Args:
        module: nobody else's, since it is changed; what cannot be packed stays what it is.
        alone: by `id`, the weights that are let go, so that their packed copies are the only ones; the packed linears
            share all others.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # by linear, which may have several parents
    for parent in module.modules():
        for name, child in parent.named_children():
            if _packs(child):
                places.setdefault(id(child), []).append((parent, name))
    for shared in places.values():
        linear: Any = getattr(*shared[0])
        packed = PackedLinear(linear)
        if id(linear.weight) in alone:
            packed.release()
        for parent, name in shared:
            parent.register_module(name, packed)
        del linear
    return len(places)


def pack_siblings(module: nn.Module, run: Callable[[], Tensor]) -> None:
    """Packs linear layers together that read the same tensor, such as queries, keys and values.

    Few rows are multiplied by one large matrix in less time than by several small ones.

    Args:
        module: with packed linears.
        run: a forward of it, the same at every call.
    """
    reads: list[tuple[PackedLinear, Tensor]] = []
    linears = [part for part in module.modules() if isinstance(part, PackedLinear)]
    parents = {child: parent for parent in module.modules() for child in parent.children()}
    handles = [part.register_forward_pre_hook(lambda own, given: reads.append((own, given[0]))) for part in linears]
    with torch.inference_mode():
        try:
            before = run()
        finally:
            for handle in handles:
                handle.remove()
        alike: dict[tuple[nn.Module, int], list[PackedLinear]] = {}
        for part, read in reads:
            alike.setdefault((parents[part], id(read)), []).append(part)
        for group in alike.values():
            together = len({part._packed for part in group}) == 1  # by another target with the same model
            if 1 < len(group) == len(set(group)) and not together and all(part.bias is None for part in group):
                _pack_together(group)
        try:
            same = same_but_for_rounding(run(), before, linears[0].weight.dtype)
        except RuntimeError:  # parts of a joint product do not lie one behind the other, as a model may ask them to
            same = False
    if not same:  # where something is written to the tensor between two reads of it, either
        for part in linears:
            _pack_together([part])


def _pack_together(layers: Sequence[PackedLinear]) -> None:
    packed = _Packed(layers)
    for place, layer in enumerate(layers):
        layer.join(place, packed)


def check_fresh(model: nn.Module) -> None:
    """Checks that no weight was changed since it was packed.

    Raises:
        InvalidRequest: one was.
    """
    for name, part in model.named_modules():
        if isinstance(part, PackedLinear) and part.stale:
            raise InvalidRequest(f"the weight of {name!r} was changed since it was packed; build a new Target")


def _pack(model: PreTrainedModel, alone: Collection[int] = ()) -> None:
    if not pack_linears(model, alone):
        raise UnsupportedModel(
            f"{type(model).__name__} has no torch.nn.Linear layers that are not quantised; leave packed=True out"
        )


def _check_packable(model: PreTrainedModel) -> None:
    if is_sharded(model):
        raise InvalidRequest("packed=True is for models of one process; a tp_plan shards this one, leave it out")
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or getattr(model, "hf_device_map", None):
        raise InvalidRequest(f"packed=True is for models on the CPU, this one is on {weight.device}; leave it out")
    if not _packable(model.dtype):
        raise InvalidRequest(
            f"packed=True needs float32 weights, or bfloat16 on a CPU with instructions for it, got {model.dtype}; "
            "load the model with dtype=torch.float32, or leave it out"
        )


def _packs(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is a linear layer and no more: no other class, no hooks, no forward of its own."""
    return (
        type(module) is nn.Linear
        and _plain(module.weight)
        and "forward" not in vars(module)
        and not any(getattr(module, hooks) for hooks in _HOOKS)
    )


def _plain(weight: Tensor) -> bool:
    # A quantised weight is a tensor of another class that calls itself float, in a linear layer like any other.
    return type(weight) is nn.Parameter and weight.device.type == "cpu" and _packable(weight.dtype)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _packable(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
