"""What features cost when heads are trained: cached, computed in every step, and the target's bare forward.

    python -m benchmarks.training DATA.jsonl [--steps 12] [--length 512]

The three take turns in one run on the packaged 135M model, in float32. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import draftwood as dw
from draftwood.core.tree import TokenTree
from draftwood.core.views import head_of
from draftwood.training.data import Batch, Sequences, pack, stream_documents
from draftwood.training.features import CachedFeatures, FeatureSource, OnlineFeatures
from draftwood.training.medusa import MedusaRecipe, make_heads
from draftwood.training.medusa_losses import MedusaObjective


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="what `draftwood train --data` takes")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()

    target = dw.Target.from_pretrained("smollm2", dtype="float32")
    data = pack(stream_documents(given.data, target.tokenizer), length=given.length)
    count = min(given.steps + 1, len(data))  # the first one warms up
    data = Sequences(data.tokens[:count], data.learnt[:count])
    recipe = MedusaRecipe(heads=3, shared=True, draft_vocabulary=8192, distil=True)
    heads = make_heads(target, data, recipe)
    lm_head = head_of(target, heads.draft_tokens)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def trains(source: FeatureSource) -> Callable[[Batch], None]:
        objective = MedusaObjective(heads, source, lm_head, distil=True)

        def step(batch: Batch) -> None:
            objective(batch, 0, generator)[0].backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    @torch.inference_mode()
    def forward(batch: Batch) -> None:
        rows = batch.tokens.tolist()
        target.score(target.new_cache(len(rows), given.length), rows, TokenTree.empty(len(rows)), head=False)

    with tempfile.TemporaryDirectory() as place:
        cached = CachedFeatures.build(
            target, ["last"], data, Path(place) / "features", batch_size=1, dtype=target.dtype
        )
        ways = {
            "cached": trains(cached),
            "online": trains(OnlineFeatures(target, ["last"])),
            "bare forward": forward,
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for index in range(len(data)):
            batch = data.at(torch.tensor([index]))
            for name, work in ways.items():
                start = time.perf_counter()
                work(batch)
                took[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(times[1:]) for name, times in took.items()}
    result = {
        "figure": "seconds a step of one sequence, three Medusa heads",
        "threads": torch.get_num_threads(),
        "length": given.length,
        **{name: round(value, 3) for name, value in seconds.items()},
        "cached over online": round(seconds["online"] / seconds["cached"], 2),
        "online over bare forward": round(seconds["bare forward"] / seconds["online"], 2),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
