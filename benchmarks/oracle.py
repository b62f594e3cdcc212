"""The drafter `oracle` against study/theory.py: does the speedup come out that an acceptance and a cost promise?

    python -m benchmarks.oracle [--alpha 0.5 --alpha 0.9] [--gamma 4] [--c 0.1] [--prompts 12] [--tokens 64]

The target has random weights. The drafter replays what plain decoding says, right with probability alpha, and computes
idly for c passes a token. `accepted`, c and v (the cost of a verifying pass) are what the study saw; `predicted` is
what theory makes of them, `formula` what it makes of the chosen alpha and gamma with the same costs. `interval` is that
of the measured speedup, a bootstrap of the prompts, 95 %; `within` says that `predicted` lies in it.
"""

from __future__ import annotations

import argparse
import json
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import draftwood as dw
from draftwood.drafters.oracle import Oracle
from draftwood.study.theory import speedup

VOCABULARY, PROMPT_TOKENS = 512, 16


def random_target(layers: int, width: int) -> dw.Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        eos_token_id=None,
    )
    return dw.Target(LlamaForCausalLM(config).eval())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alpha", type=float, action="append", help="probability that a drafted token is accepted")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted a round")
    parser.add_argument("--c", type=float, default=0.1, help="cost of a drafted token, in passes")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of every prompt")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()

    target, chance = random_target(given.layers, given.width), random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(given.prompts)]
    said = {
        tuple(prompt): text.tokens
        for prompt, text in zip(prompts, dw.Decoder(target).generate(prompts, max_new_tokens=given.tokens), strict=True)
    }
    alphas = given.alpha or [0.0, 0.3, 0.5, 0.7, 0.9, 1.0]
    oracles = [Oracle(continuation=said, alpha=alpha, gamma=given.gamma, c=given.c) for alpha in alphas]
    report = dw.compare(target, oracles, prompts=prompts, max_new_tokens=given.tokens)
    for alpha, row in zip(alphas, report.rows[1:], strict=True):
        if row.theory is None or row.speedup is None or row.interval is None:
            raise SystemExit(f"alpha {alpha}: not enough was measured: {', '.join(row.errors) or 'take more prompts'}")
        result = {
            "alpha": alpha,
            "accepted": round(row.theory.alpha, 3),
            "c": round(row.theory.c, 3),
            "v": round(row.theory.v, 3),
            "formula": round(speedup(alpha, given.gamma, row.theory.c, row.theory.v), 3),
            "predicted": round(row.theory.speedup, 3),
            "measured": round(row.speedup, 3),
            "interval": [round(end, 3) for end in row.interval],
            "within": row.interval[0] <= row.theory.speedup <= row.interval[1],
        }
        print(json.dumps(result), flush=True)
    noise = "unknown" if report.noise is None else f"{report.noise:.1%}"
    print(f"gamma {given.gamma}; repeated plain decoding differs by {noise}")


if __name__ == "__main__":
    main()
