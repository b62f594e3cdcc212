"""What torch.compile makes of a verify pass on a CPU, beside the plain and the packed one, taking turns.

    python -m benchmarks.compiled [--ways frozen,opaque,blocks] [--dtype bfloat16] [--widths 1,9,17] [--context 256]

Three ways to compile the packaged 135M model:

- `frozen`: whole, for each width by itself, static shapes, weights frozen, which inductor packs once more for each;
- `opaque`: whole, once for all widths; products by packed weights and attention are calls that the compiler does not
  look into, and it fuses what is between them;
- `blocks`: the same, but one decoder block is compiled and serves for all.

The cache is the simplest that could work, and the engine's own work is in the packed pass and not in the compiled ones.
Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
import torch._inductor.config
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel

import draftwood as dw
from draftwood.core.anatomy import forward_arguments
from draftwood.core.attention import grouped_attention
from draftwood.core.loading import load_model
from draftwood.core.packing import PackedLinear
from draftwood.core.tree import TokenTree


class StaticCache(Cache):
    """Keys and values of all layers in two tensors; a forward writes its columns to `slots` and reads everything."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys = self.values = self.slots = torch.empty(0)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        return keys.index_copy_(2, self.slots, key_states), values.index_copy_(2, self.slots, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return self.keys.shape[3], 0


class OpaqueCache(StaticCache):
    """Hands a block the keys and values it brought; writing and reading them is part of `attend`."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        return key_states, value_states


class OpaqueLinear(nn.Module):
    """A packed linear layer as a call that is not looked into."""

    def __init__(self, linear: PackedLinear) -> None:
        super().__init__()
        self.index, self.width = len(PACKED), linear.out_features
        PACKED.append(linear)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = torch.ops.compiled.linear(input, self.index, self.width)
        return product


OPAQUE = OpaqueCache()
PACKED: list[PackedLinear] = []


def define_operations() -> torch.library.Library:
    """Defines what the compiler calls and does not look into; lives as long as the library that is returned."""
    library = torch.library.Library("compiled", "FRAGMENT")
    library.define("linear(Tensor x, SymInt index, SymInt width) -> Tensor")
    library.define(
        "attend(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, SymInt layer, Tensor slots) -> Tensor"
    )

    def linear(x: Tensor, index: int, _: int) -> Tensor:
        return PACKED[index](x).contiguous()  # siblings find their part of a joint product, as they do without this

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, layer: int, slots: Tensor) -> Tensor:
        start, stop = int(slots[0]), int(slots[0]) + slots.numel()
        keys, values = OPAQUE.keys[layer], OPAQUE.values[layer]
        keys[:, :, start:stop], values[:, :, start:stop] = k, v
        module = nn.Module()
        return grouped_attention(module, q, keys[:, :, :stop], values[:, :, :stop], mask[..., :stop], scaling=scale)[0]

    library.impl("linear", linear, "CPU")
    library.impl("linear", lambda x, _, width: x.new_empty(*x.shape[:-1], width), "Meta")
    library.impl("attend", attend, "CPU")
    library.impl("attend", lambda q, *_: q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3]), "Meta")
    AttentionInterface.register(
        "compiled",
        lambda module, q, k, v, mask, scaling=None, **_: (
            torch.ops.compiled.attend(q, k, v, mask, scaling, module.layer_idx, OPAQUE.slots),
            None,
        ),
    )
    return library


def opaque_copy(target: dw.Target) -> PreTrainedModel:
    """Returns a packed target's model with opaque products and attention."""
    model = target.model
    twin: PreTrainedModel = copy.deepcopy(model, {id(part): part for part in (*model.parameters(), *model.buffers())})
    for parent in [*twin.modules()]:
        for name, child in [*parent.named_children()]:
            if isinstance(child, PackedLinear):
                setattr(parent, name, OpaqueLinear(child))
    twin.config.get_text_config(decoder=True)._attn_implementation = "compiled"
    return twin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", default="frozen,opaque,blocks")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--widths", default="1,9,17", help="tokens in a pass")
    parser.add_argument("--context", type=int, default=256)
    given = parser.parse_args()
    model, tokenizer = load_model("smollm2", dtype=given.dtype)
    plain, packed = dw.Target(model, tokenizer), dw.Target(model, tokenizer, packed=True)
    show(loaded=given.dtype, megabytes=peak())
    operations = define_operations()
    for way in given.ways.split(","):
        torch._inductor.config.freezing = way == "frozen"
        # Blocks differ in their numbers alone, which would else be compiled in.
        torch._dynamo.config.allow_unspec_int_on_nn_module = way == "blocks"
        torch.compiler.reset()
        compiled = model if way == "frozen" else opaque_copy(packed)
        forward = whole(compiled, dynamic=False) if way == "frozen" else whole(compiled, dynamic=True)
        if way == "blocks":
            for block in compiled.get_decoder().layers:
                block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True)
            forward = plain_forward(compiled)
        for width in map(int, given.widths.split(",")):
            measure(way, forward, plain, packed, given.context, width)
    del operations


def measure(
    way: str, forward: Callable[..., Tensor], plain: dw.Target, packed: dw.Target, context: int, width: int
) -> None:
    """Times a pass of one width, compiled so, beside the engine's own."""
    passes = {"plain": engine_pass(plain, context, width), "packed": engine_pass(packed, context, width)}
    before, start = peak(), time.perf_counter()
    passes["compiled"] = compiled_pass(way, forward, packed, context, width)
    seconds = time.perf_counter() - start
    took: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(16):
        for name, work in passes.items():
            start = time.perf_counter()
            work()
            took[name].append(time.perf_counter() - start)
    medians = {name: round(1000 * statistics.median(times[1:]), 1) for name, times in took.items()}
    show(
        way=way,
        tokens=width,
        milliseconds=medians,
        seconds_to_compile=round(seconds, 1),
        megabytes_more=round(peak() - before, 1),
    )


def plain_forward(model: PreTrainedModel) -> Callable[..., Tensor]:
    """Returns the model's forward over ids, slots and a mask, with keys and values in two tensors."""
    name, static = forward_arguments(model).cache, StaticCache()

    def forward(ids: Tensor, slots: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache = OPAQUE if model.config._attn_implementation == "compiled" else static
        cache.keys, cache.values, cache.slots = keys, values, slots
        arguments = {"position_ids": slots[None], "attention_mask": mask, name: cache}
        logits: Tensor = model(input_ids=ids, **arguments, use_cache=True).logits
        return logits

    return forward


def whole(model: PreTrainedModel, *, dynamic: bool) -> Callable[..., Tensor]:
    """Returns the same forward, compiled as a whole."""
    compiled: Callable[..., Tensor] = torch.compile(plain_forward(model), dynamic=dynamic, fullgraph=True)
    return compiled


def engine_pass(target: dw.Target, context: int, width: int) -> Callable[[], Tensor]:
    """Returns a pass of the engine behind `context` tokens; it forgets what it read."""
    cache = target.new_cache(1, context + width)
    target.score(cache, [text(context)], TokenTree.empty(1), head=False)
    tree = TokenTree.empty(1) if width == 1 else TokenTree.chain(torch.full((1, width - 1), 7))

    def run() -> Tensor:
        with torch.inference_mode():
            logits = target.score(cache, [[7]], tree).logits
        cache.keep([[]])
        cache.lengths[0] = context
        return logits

    return run


def compiled_pass(
    way: str, forward: Callable[..., Tensor], target: dw.Target, context: int, width: int
) -> Callable[[], Tensor]:
    """Returns the same pass through a compiled forward, checked against the engine's."""
    shape = target.layout[0]
    capacity = 2 * context
    states = [
        torch.zeros(len(target.layout), 1, shape.heads, capacity, size, dtype=shape.dtype)
        for size in (shape.key_width, shape.value_width)
    ]
    wide = width if way == "frozen" else max(width, 4)  # a dimension of 1 would be compiled once more

    def columns(tokens: list[int], first: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = torch.arange(first, first + len(tokens))
        return torch.tensor([tokens]), slots, (torch.arange(capacity) <= slots[:, None])[None, None]

    with torch.inference_mode():
        plain_forward(target.model if way == "frozen" else opaque_copy(target))(*columns(text(context), 0), *states)
        given = columns([7] * wide, context)
        error = (forward(*given, *states)[:, :width] - engine_pass(target, context, width)()).abs().max()
    show(way=way, tokens=width, largest_difference_of_logits=round(float(error), 4))

    def run() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = forward(*given, *states)
        return logits

    return run


def text(length: int) -> list[int]:
    return [5 + place % 40 for place in range(length)]


def peak() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def show(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
