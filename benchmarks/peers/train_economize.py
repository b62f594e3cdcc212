"""Trains heads with PyPI `economize` for a number of minutes; runs in its virtual environment.

    python -m benchmarks.peers.train_economize MODEL CHATS OUT KIND MINUTES ...

Its own tokenization, collation, objective and optimizer settings; what it does not settle are batch size and length.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import economize
import torch
from economize.techniques.eagle3 import Eagle3Config
from economize.techniques.medusa import MedusaConfig
from economize.train import SequenceSource, fit, tokenize_chats
from transformers import AutoModelForCausalLM, AutoTokenizer

OBJECTIVES = {"medusa": "medusa_ce", "medusa-shared": "medusa_ce", "eagle3": "eagle3_ttt"}


def make(given: argparse.Namespace, frequent: torch.Tensor) -> Any:
    """Returns the model with fresh heads."""
    base = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    if given.kind == "eagle3":
        limited = given.draft_vocabulary and given.draft_vocabulary < base.config.vocab_size
        model = economize.apply(base, Eagle3Config(draft_vocab=given.draft_vocabulary if limited else None))
        if limited:
            model.techniques["eagle3"].set_draft_vocab(frequent)
        return model
    head = "shared" if given.kind == "medusa-shared" else "own"
    return economize.apply(base, MedusaConfig(num_heads=given.heads, head=head))


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    chats = [json.loads(line)["messages"] for line in given.chats.read_text(encoding="utf-8").splitlines() if line]
    examples = tokenize_chats(tokenizer, chats, given.length)
    counts = torch.bincount(torch.cat([one.input_ids for one in examples]), minlength=len(tokenizer))
    frequent = counts.topk(min(given.draft_vocabulary or len(counts), len(counts))).indices
    pad = tokenizer.pad_token_id or 0

    def run(steps: int, output: Path | None, **logging: Any) -> tuple[float, Any]:
        source = SequenceSource(examples, given.batch_size, pad_token_id=pad)
        model = make(given, frequent)
        start = time.perf_counter()
        result = fit(
            model,
            source,
            OBJECTIVES[given.kind],
            steps=steps,
            warmup_steps=min(100, steps // 20),
            output_dir=output,
            seed=0,
            **logging,
        )
        return time.perf_counter() - start, result

    _, probe = run(given.probe, None, log_every=1)
    took = probe.history[-1]["time"] - probe.history[0]["time"]  # the first step is no measure
    steps = max(int(60 * given.minutes / (took / (given.probe - 1))), 1)
    took, result = run(steps, given.out)
    print(json.dumps({"steps": steps, "seconds": took, "final": str(result.final_path), "loss": result.losses[-1]}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("chats", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=list(OBJECTIVES))
    parser.add_argument("minutes", type=float)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--draft-vocabulary", type=int, default=0)
    parser.add_argument("--probe", type=int, default=5, help="steps that tell how many fit into the minutes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
