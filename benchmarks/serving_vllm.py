"""Run by vLLM's interpreter for benchmarks/serving.py: texts and counts of drafting, as JSON.

Reads from standard input the target, the prompts, and what to draft with, one engine after another.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # gigabytes
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

COUNTS = "vllm:spec_decode_num_"


def main() -> None:
    asked = json.load(sys.stdin)
    for settings in asked["speculative"]:
        told = run(asked, settings)
        with open(asked["answer"], "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")


def run(asked: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        asked["target"],
        dtype="float32",
        speculative_config=settings,
        max_model_len=512,
        max_num_batched_tokens=512,
        max_num_seqs=len(asked["prompts"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=asked["tokens"]), use_tqdm=False)
    counts = {
        metric.name.removeprefix(COUNTS): getattr(metric, "values", getattr(metric, "value", None))
        for metric in llm.get_metrics()
        if metric.name.startswith(COUNTS)
    }
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    del llm, outputs
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"texts": texts, "counts": counts}


if __name__ == "__main__":
    main()
