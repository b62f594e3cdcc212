"""How cost and memory grow: a round's milliseconds by context length and batch, long prompts, and long studies.

    python -m benchmarks.scale [--only rounds,prompts,studies] [--dtype bfloat16] [--plot docs/scale.svg]

Rounds are measured on the packaged 135M model, packed if the CPU can; memory on a small random model, in a fresh
process each, so that a peak is nobody else's. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import draftwood as dw
from draftwood.core.cache import SlotCache
from draftwood.core.tree import TokenTree

CONTEXTS = (128, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 2, 4, 8, 16, 32)
WIDTHS = (1, 8, 16)
"""Tokens that a row's pass reads: one is plain decoding's."""
PROMPTS = (25_000, 50_000, 100_000)
STUDIES = (300, 3_000)
BATCH_CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="rounds,prompts,studies")
    parser.add_argument("--dtype", default="float32", help="of the rounds")
    parser.add_argument("--plot", type=Path, help="where to draw the rounds")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kind, size = given.child
        print({"prompt": long_prompt, "study": long_study}[kind](int(size)))
        return
    wanted = given.only.split(",")
    if "rounds" in wanted:
        target = dw.Target.from_pretrained("smollm2", dtype=given.dtype, packed=True)
        lines = [*rounds(target, [(1, context) for context in CONTEXTS], "context")]
        lines += rounds(target, [(batch, BATCH_CONTEXT) for batch in BATCHES], "batch")
        if given.plot:
            plot(lines, given.plot)
    for kind, name, sizes in (("prompt", "prompts", PROMPTS), ("study", "studies", STUDIES)):
        for size in sizes if name in wanted else ():
            words = [sys.executable, "-m", "benchmarks.scale", "--child", kind, str(size)]
            told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            show(figure=f"memory of a {kind}", size=size, megabytes_above_the_start=round(float(told.split()[-1]), 1))


@torch.inference_mode()
def rounds(target: dw.Target, shapes: list[tuple[int, int]], by: str, repeats: int = 9) -> Iterator[dict[str, Any]]:
    """Yields what a pass of each width takes, for every (batch, context); the widths take turns."""
    for batch, context in shapes:
        cache = target.new_cache(batch, context + max(WIDTHS))
        target.score(cache, [[5 + place % 40 for place in range(context)]] * batch, TokenTree.empty(batch), head=False)
        took: dict[int, list[float]] = {width: [] for width in WIDTHS}
        for _ in range(repeats):
            for width in WIDTHS:
                took[width].append(one_pass(target, cache, batch, width))
        figures = {str(width): round(1000 * statistics.median(times[1:]), 1) for width, times in took.items()}
        yield show(
            figure=f"milliseconds a pass by {by}", dtype=str(target.dtype), batch=batch, context=context, **figures
        )


def one_pass(target: dw.Target, cache: SlotCache, batch: int, width: int) -> float:
    """Returns the seconds of a pass over `width` tokens a row, which the cache then forgets."""
    context = list(cache.lengths)
    tree = TokenTree.empty(batch) if width == 1 else TokenTree.chain(torch.full((batch, width - 1), 7))
    start = time.perf_counter()
    target.score(cache, [[7]] * batch, tree)
    seconds = time.perf_counter() - start
    cache.keep([[]] * batch)
    cache.lengths[:] = context
    return seconds


def long_prompt(length: int) -> float:
    """Returns the megabytes that decoding behind a prompt of `length` tokens adds to the process's peak."""
    decoder = dw.Decoder(small_model(), "prompt-lookup")
    decoder.generate([1, 2, 3], max_new_tokens=4)
    before = peak()
    decoder.generate([place % 97 for place in range(length)], max_new_tokens=16)
    return peak() - before


def long_study(count: int) -> float:
    """Returns the megabytes that a study of `count` prompts, kept in a directory, adds to the peak of one of 30."""
    model = small_model()

    def study(prompts: int) -> None:
        texts = [[place % 89 for place in range(start, start + 12)] for start in range(prompts)]
        with tempfile.TemporaryDirectory() as folder:
            report = dw.compare(
                model, ["prompt-lookup"], prompts=texts, max_new_tokens=4, directory=Path(folder) / "study"
            )
            report.save(folder)

    study(30)
    before = peak()
    study(count)
    return peak() - before


def small_model() -> dw.Target:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return dw.Target(AutoModelForCausalLM.from_config(config).float().eval())


def peak() -> float:
    """The most memory that the process has held, in megabytes."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draws both series of rounds beside each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    by_context, by_batch = figure.subplots(1, 2)
    for axes, by, title in (
        (by_context, "context", "batch 1"),
        (by_batch, "batch", f"{BATCH_CONTEXT} tokens of context"),
    ):
        own = [line for line in lines if line["figure"].endswith(by)]
        for width in WIDTHS:
            label = "1 token (plain)" if width == 1 else f"{width} tokens"
            axes.plot([line[by] for line in own], [line[str(width)] for line in own], marker="o", label=label)
        axes.set(title=title, xlabel="tokens of context" if by == "context" else "batch", ylabel="ms a pass")
        axes.set_xscale("log", base=2)
        axes.set_xticks([line[by] for line in own], [str(line[by]) for line in own])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(color="#e5e5e5")
    by_context.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})


def show(**line: Any) -> dict[str, Any]:
    print(json.dumps(line), flush=True)
    return line


if __name__ == "__main__":
    main()
