"""The engine on the packaged 135M model: identical texts, speed against `generate`, what the engine itself adds.

    python -m benchmarks.engine [--dtype float32] [--quick]

Every comparison of speed is a ratio of two things that took turns in one run. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3Config,
)

import draftwood as dw
from draftwood.core.anatomy import forward_arguments
from draftwood.core.loading import load_model
from draftwood.core.packing import PackedLinear
from draftwood.core.tree import TokenTree
from draftwood.drafters.draft_model import DraftModel
from draftwood.plugins import load_registry
from draftwood.study.default_prompts import PACKAGED

SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
TINY: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=8),
    "gemma3, sliding": Gemma3TextConfig(
        **SIZES, intermediate_size=64, num_key_value_heads=2, head_dim=8, sliding_window=6
    ),
    "gpt2": GPT2Config(vocab_size=128, n_embd=32, n_layer=3, n_head=4),
    "mixtral": MixtralConfig(**SIZES, intermediate_size=64, num_key_value_heads=2, num_local_experts=4),
}  # fmt: skip
SHOWN = ["dtype", "drafter", "tokens", "tokens_per_second", "speedup", "interval", "tau", "acceptance_by_depth"]
SELF_CONTAINED = ["none", "prompt-lookup", "lookahead", "lookahead+prompt-lookup"]


def show(**result: Any) -> None:
    print(json.dumps(result), flush=True)


def drafters_for(target: dw.Target) -> dict[str, Any]:
    """Every drafter that needs no trained heads. The draft model is the target itself without a layer of its own."""
    half = target.layers // 2
    return {
        **{name: name for name in SELF_CONTAINED},
        "draft-model, chain": DraftModel(model=target, gamma=4),
        "draft-model, dynamic tree": DraftModel(model=target, tree="dynamic", gamma=3, nodes=8, width=2),
        "layer-skip": load_registry().create_drafter("layer-skip", {"skip": {"attention": [half], "mlp": [half]}}),
        "early-exit": load_registry().create_drafter("early-exit", {"exit_layer": target.layers - 1}),
    }


def identity(name: str, target: dw.Target, prompts: list[list[int]], length: int) -> None:
    """Greedy text against `generate`, and coupled text against `none`, batch 1 and a ragged batch of 4."""
    plain, coupled = [], None
    for prompt in prompts:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": length}
        plain.append(target.model.generate(ids, **given)[0, len(prompt) :].tolist())
    same = tried = coupled_same = coupled_tried = 0
    differing = []
    for label, drafter in drafters_for(target).items():
        for batch_size in (1, 4):
            greedy = dw.Decoder(target, drafter).generate(prompts, max_new_tokens=length, batch_size=batch_size)
            hits = sum(out.tokens == text for out, text in zip(greedy, plain, strict=True))
            same, tried = same + hits, tried + len(prompts)
            if hits < len(prompts):
                differing.append(label)
        sampled = dw.Decoder(target, drafter, rule="coupled").generate(
            prompts, max_new_tokens=length, temperature=1.0, seed=1, batch_size=4
        )
        texts = [out.tokens for out in sampled]
        coupled = coupled or texts
        coupled_tried += len(texts)
        coupled_same += sum(one == other for one, other in zip(texts, coupled, strict=True))
    show(
        figure="identical texts",
        model=name,
        dtype=str(target.dtype),
        greedy=f"{same}/{tried}",
        coupled=f"{coupled_same}/{coupled_tried}",
        differing=differing,
    )


def described(target: dw.Target) -> str:
    """The type of a target's weights, and whether they are packed."""
    return str(target.dtype) + (", packed" if target.packed else "")


def against_generate(
    model: PreTrainedModel, target: dw.Target, prompts: list[list[int]], length: int, rounds: int
) -> None:
    """`none` through the engine against `model.generate`, taking turns; decoding and prefill together."""
    decoder, ratios, other, seconds = dw.Decoder(target), [], 0.0, 0.0
    for turn in range(rounds + 1):
        for index, prompt in enumerate(prompts):
            took = {}
            for who in ("engine", "generate") if (turn + index) % 2 else ("generate", "engine"):
                start = time.perf_counter()
                if who == "engine":
                    out = decoder.generate(prompt, max_new_tokens=length, eos_token_id=[])
                else:
                    ids = torch.tensor([prompt])
                    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
                    model.generate(ids, max_new_tokens=length, min_new_tokens=length, **given)
                took[who] = time.perf_counter() - start
            if turn:  # the first turn warms up
                ratios.append(took["generate"] / took["engine"])
                spent = out.stats.seconds
                other += spent.total - spent.prefill - spent.verify
                seconds += spent.total - spent.prefill
    show(
        figure="speed of `none` over model.generate",
        dtype=described(target),
        median=round(statistics.median(ratios), 3),
        quartiles=[round(value, 3) for value in statistics.quantiles(ratios, n=4)[::2]],
        pairs=len(ratios),
    )
    show(figure="share of a plain round that the engine adds", dtype=described(target), share=round(other / seconds, 4))


def drafted_overhead(target: dw.Target, prompts: list[list[int]], length: int) -> None:
    """Everything but the target's forwards and the drafter's, for prompt lookup, whose drafting is bookkeeping too."""
    outs = [dw.Decoder(target, "prompt-lookup").generate(prompt, max_new_tokens=length) for prompt in prompts]
    spent = [out.stats.seconds for out in outs]
    rounds = sum(one.total - one.prefill for one in spent)
    added = sum(one.accept + one.commit + one.other for one in spent)
    show(
        figure="share of a prompt-lookup round that the engine adds",
        dtype=described(target),
        share=round(added / rounds, 4),
    )


def prompt_lookup_on_summaries(target: dw.Target, limit: int) -> None:
    """Prompt lookup against `none` on the packaged prompts that repeat their source, interleaved."""
    chosen = [text for category, text in PACKAGED if "summ" in category]
    chats = [[{"role": "user", "content": text}] for text in chosen][:limit]
    report = dw.compare(target, ["prompt-lookup:gamma=4", "prompt-lookup"], prompts=chats, max_new_tokens=64)
    for row in report.rows:
        show(figure="prompt lookup on summaries", **{name: getattr(row, name) for name in SHOWN})


@torch.inference_mode()
def pass_widths(target: dw.Target, context: int = 256, rounds: int = 8) -> None:
    """Milliseconds of a verify pass by its number of tokens, and of a bare step with transformers' own cache."""
    text = [[5 + index % 40 for index in range(context)]]
    cache = target.new_cache(1, context + 80)
    target.score(cache, text, TokenTree.empty(1))
    bare = DynamicCache()
    name = {forward_arguments(target.model).cache: bare}
    target.model(torch.tensor(text), **name, use_cache=True)
    took: dict[str, list[float]] = {}

    def timed(label: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        took.setdefault(label, []).append(time.perf_counter() - start)

    for _ in range(rounds + 1):
        timed("bare step", lambda: target.model(torch.tensor([[7]]), **name, use_cache=True))
        bare.crop(-1)
        for width in (1, 4, 8, 16, 32, 64):
            tree = TokenTree.empty(1) if width == 1 else TokenTree.chain(torch.full((1, width - 1), 7))
            timed(str(width), lambda tree=tree: target.score(cache, [[7]], tree))  # type: ignore[misc]
            cache.keep([[]])
            cache.lengths[0] = context  # forgets the pending token too
    medians = {label: round(1000 * statistics.median(times[1:]), 1) for label, times in took.items()}
    show(figure="milliseconds a pass by tokens", dtype=described(target), context=context, **medians)


@torch.inference_mode()
def products(target: dw.Target, rounds: int = 12) -> None:
    """Gigabytes of weights a second: of a packed pass's products by the rows multiplied, and of reading them alone."""
    linears = [part for part in target.model.modules() if isinstance(part, PackedLinear)]
    packed = {id(part._packed): part._packed for part in linears}.values()
    size = sum(part.weight.numel() * part.weight.element_size() for part in linears)

    def multiply(rows: int) -> None:
        for one in packed:
            one._product(inputs[rows, one.weight.shape[1]], None)

    counts = (1, 4, 8, 16)
    inputs = {(rows, one.weight.shape[1]): torch.randn(rows, one.weight.shape[1]) for rows in counts for one in packed}
    inputs = {key: value.to(target.dtype) for key, value in inputs.items()}
    work: dict[str, Callable[[], object]] = {"read": lambda: [part.weight.sum() for part in linears]}
    work |= {str(rows): functools.partial(multiply, rows) for rows in counts}
    took: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for label, one in work.items():
            start = time.perf_counter()
            one()
            took.setdefault(label, []).append(time.perf_counter() - start)
    speeds = {label: round(size / statistics.median(times[1:]) / 1e9, 1) for label, times in took.items()}
    show(
        figure="gigabytes a second of packed products by rows", dtype=str(target.dtype), gigabytes=size / 1e9, **speeds
    )


def resident(dtype: str, packed: bool) -> tuple[int, int, int]:
    """Resident bytes of a process before it loads the model, after some decoding, and at its peak."""
    before = status("VmRSS")
    target = dw.Target.from_pretrained("smollm2", dtype=dtype, packed=packed)
    dw.Decoder(target).generate([5, 6, 7] * 20, max_new_tokens=8)
    return before, status("VmRSS"), status("VmHWM")


def status(field: str) -> int:
    """A figure of Linux about this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def memory(dtype: str) -> None:
    """What a packed target takes over one that is not, each in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        plain, packed = (pool.submit(resident, dtype, packed).result() for packed in (False, True))
    show(
        figure="megabytes of a process: before the model, with it, at the peak",
        dtype=dtype,
        plain=[round(value / 2**20) for value in plain],
        packed=[round(value / 2**20) for value in packed],
        factor=round(packed[1] / plain[1], 2),
        factor_of_the_peak=round(packed[2] / plain[2], 2),
        factor_without_what_was_there_before=round((packed[1] - packed[0]) / (plain[1] - plain[0]), 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", action="append", help="of the speed figures; float32 and bfloat16 by default")
    parser.add_argument(
        "--only", choices=["identity", "speed", "widths", "products", "memory"], help="some of the figures"
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts and shorter texts")
    given = parser.parse_args()
    length, count = (16, 2) if given.quick else (48, 4)

    tiny_prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8], [3, 3, 3, 3, 3, 3, 3, 3, 3], [20, 21, 22, 20]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads only wait for each other on models this small
    for name, config in TINY.items() if given.only in (None, "identity") else ():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config).float().eval()
        identity(f"tiny {name}", dw.Target(model), tiny_prompts, 32)
    torch.set_num_threads(threads)
    for dtype in given.dtype or ["float32", "bfloat16"]:
        packable = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if packable and given.only in (None, "memory"):
            memory(dtype)
        model, tokenizer = load_model("smollm2", dtype=dtype)
        targets = [dw.Target(model, tokenizer)]
        decoder = dw.Decoder(targets[0])
        prompts = [decoder.encode([{"role": "user", "content": text}]) for _, text in PACKAGED[:count]]
        if packable:
            targets.append(dw.Target(model, tokenizer, packed=True))
        if dtype == "float32" and given.only in (None, "identity"):
            identity("SmolLM2-135M", targets[0], prompts, length)
        for target in targets:
            if given.only in (None, "widths"):
                pass_widths(target)
            if target.packed and given.only in (None, "products"):
                products(target)
            if given.only in (None, "speed"):
                against_generate(model, target, prompts, length, rounds=1 if given.quick else 3)
                drafted_overhead(target, prompts, length)
                prompt_lookup_on_summaries(target, limit=count)


if __name__ == "__main__":
    main()
