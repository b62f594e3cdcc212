"""`auto` against plain decoding on the packaged 135M model, on prompts where drafting pays and where it cannot.

    python -m benchmarks.auto [--dtype float32] [--packed] [--rounds 6] [--tokens 48] [--only summaries --only random]

The two take turns in small slices, so that what else the machine does meets both; a ratio above 1 says that `auto` is
faster. The interval is a bootstrap of the slices, 95 %.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import draftwood as dw
from draftwood.core.loading import load_model
from draftwood.study.default_prompts import PACKAGED


class PromptSet(NamedTuple):
    """Prompts and how they are decoded."""

    prompts: list[list[int]]
    batch_size: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def prompt_sets(decoder: dw.Decoder) -> dict[str, PromptSet]:
    def chats(*categories: str) -> list[list[int]]:
        chosen = [text for category, text in PACKAGED if category in categories]
        return [decoder.encode([{"role": "user", "content": text}]) for text in chosen]

    chance = random.Random(0)
    noise = [[chance.randrange(100, decoder.target.vocabulary_size) for _ in range(96)] for _ in range(4)]
    everything = chats("summarise", "rewrite", "extract", "code", "explain", "story")
    return {
        "summaries": PromptSet(chats("summarise", "rewrite", "extract")),
        "chat": PromptSet(chats("explain", "story")),
        "random": PromptSet(noise),
        "temperature 1.5": PromptSet(chats("explain", "story"), settings={"temperature": 1.5}),
        "batch 16": PromptSet((everything * 2)[:16], batch_size=16),
    }


def measure(pair: Sequence[dw.Decoder], chosen: PromptSet, rounds: int, tokens: int) -> list[tuple[float, float]]:
    """Returns seconds of (plain, auto) for every slice: the same prompts, the order of the two changing."""
    step = chosen.batch_size
    slices = [chosen.prompts[start : start + step] for start in range(0, len(chosen.prompts), step)]
    seconds = []
    for turn in range(rounds):
        for index, prompts in enumerate(slices):
            took = [0.0, 0.0]
            for who in (0, 1) if (turn + index) % 2 else (1, 0):
                start = time.perf_counter()
                pair[who].generate(
                    prompts, batch_size=step, max_new_tokens=tokens, eos_token_id=[], seed=turn, **chosen.settings
                )
                took[who] = time.perf_counter() - start
            seconds.append((took[0], took[1]))
    return seconds


def interval(seconds: Sequence[tuple[float, float]], draws: int = 2000) -> list[float]:
    """Returns the 2.5 and 97.5 % quantiles of the ratio of sums over resampled slices."""
    chance, ratios = random.Random(0), []
    for _ in range(draws):
        drawn = chance.choices(seconds, k=len(seconds))
        ratios.append(sum(plain for plain, _ in drawn) / sum(auto for _, auto in drawn))
    ratios.sort()
    return [round(ratios[int(draws * share)], 3) for share in (0.025, 0.975)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--packed", action="store_true", help="on a packed target")
    parser.add_argument("--of", default="prompt-lookup", help="what `auto` drafts with")
    parser.add_argument("--rounds", type=int, default=6, help="how often every slice is decoded by each")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of every prompt")
    parser.add_argument("--only", action="append", help="some of the prompt sets")
    given = parser.parse_args()

    target = dw.Target(*load_model("smollm2", dtype=given.dtype), packed=given.packed)
    plain = dw.Decoder(target)
    for name, chosen in prompt_sets(plain).items():
        if given.only and name not in given.only:
            continue
        # A drafter for each set: what it learned elsewhere would be no fair start.
        auto = dw.Decoder(target, "auto", drafter_options={"of": given.of})
        for decoder in (plain, auto):
            decoder.generate(chosen.prompts[: chosen.batch_size], batch_size=chosen.batch_size, max_new_tokens=2)
        seconds = measure((plain, auto), chosen, given.rounds, given.tokens)
        result = {
            "prompts": name,
            "dtype": given.dtype + (", packed" if given.packed else ""),
            "of": given.of,
            "auto over none": round(sum(pair[0] for pair in seconds) / sum(pair[1] for pair in seconds), 3),
            "interval": interval(seconds),
            "slices": len(seconds),
            "tokens a slice": given.tokens * chosen.batch_size,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
