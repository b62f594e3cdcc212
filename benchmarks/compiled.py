"""What torch.compile makes of a verify pass on a CPU, beside the plain and the packed one, taking turns.

    python -m benchmarks.compiled [--dtype bfloat16] [--widths 1,9,17] [--context 256]

The packaged 135M model is compiled whole, for each width by itself, with static shapes and frozen weights, which
inductor packs too, once more for each width. Its cache is two tensors and an index, the simplest that could work; the
engine's own work is in the packed pass and not in the compiled one. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from transformers import Cache, PreTrainedModel

import draftwood as dw
from draftwood.core.anatomy import forward_arguments
from draftwood.core.loading import load_model
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--widths", default="1,9,17", help="tokens in a pass")
    parser.add_argument("--context", type=int, default=256)
    given = parser.parse_args()
    torch._inductor.config.freezing = True
    model, tokenizer = load_model("smollm2", dtype=given.dtype)
    plain, packed = dw.Target(model, tokenizer), dw.Target(model, tokenizer, packed=True)
    show(loaded=given.dtype, megabytes=peak())
    for width in map(int, given.widths.split(",")):
        with torch.inference_mode():
            passes = {"plain": engine_pass(plain, given.context, width)}
            passes["packed"] = engine_pass(packed, given.context, width)
        before = peak()
        start = time.perf_counter()
        passes["compiled"] = compiled_pass(model, packed, given.context, width)
        seconds = time.perf_counter() - start
        took: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(16):
            for name, work in passes.items():
                start = time.perf_counter()
                work()
                took[name].append(time.perf_counter() - start)
        medians = {name: round(1000 * statistics.median(times[1:]), 1) for name, times in took.items()}
        show(tokens=width, milliseconds=medians, seconds_to_compile=round(seconds, 1), megabytes_more=peak() - before)


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


def compiled_pass(model: PreTrainedModel, target: dw.Target, context: int, width: int) -> Callable[[], Tensor]:
    """Returns the same pass, compiled, and checked against the engine's."""
    name, cache, shape = forward_arguments(model).cache, StaticCache(), target.layout[0]
    capacity = 2 * context
    states = [
        torch.zeros(len(target.layout), 1, shape.heads, capacity, size, dtype=shape.dtype)
        for size in (shape.key_width, shape.value_width)
    ]

    def forward(ids: Tensor, slots: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        cache.keys, cache.values, cache.slots = keys, values, slots
        arguments = {"position_ids": slots[None], "attention_mask": mask, name: cache}
        logits: Tensor = model(input_ids=ids, **arguments, use_cache=True).logits
        return logits

    def columns(tokens: list[int], first: int) -> tuple[Tensor, Tensor, Tensor]:
        slots = torch.arange(first, first + len(tokens))
        return torch.tensor([tokens]), slots, (torch.arange(capacity) <= slots[:, None])[None, None]

    with torch.no_grad():
        forward(*columns(text(context), 0), *states)
        compiled = torch.compile(forward, dynamic=False, fullgraph=True)
        given = columns([7] * width, context)
        error = (compiled(*given, *states) - engine_pass(target, context, width)()).abs().max()
    show(tokens=width, largest_difference_of_logits=round(float(error), 4))

    def run() -> Tensor:
        with torch.no_grad():
            logits: Tensor = compiled(*given, *states)
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
