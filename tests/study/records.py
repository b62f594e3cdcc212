"""Records made by hand."""

from __future__ import annotations

from typing import Any


def run(
    drafter: str,
    *,
    total: float = 1.0,
    prefill: float = 0.0,
    verify: float = 0.0,
    draft: float = 0.0,
    agreement: list[dict[str, Any]] | None = None,
    **counts: Any,
) -> dict[str, Any]:
    made = {
        "drafter": drafter,
        "turn": 0,
        "again": False,
        "tokens": [[3, 4]],
        "seconds": {
            "prefill": prefill, "draft": draft, "verify": verify, "accept": 0.0, "commit": 0.0, "total": total
        },
        "rounds": 10,
        "committed": 10,
        "drafted": 0,
        "drafted_by_depth": [],
        "accepted_by_depth": [],
        "tried_by_rank": [],
        "accepted_by_rank": [],
        "passes": [],
        "peak_bytes": None,
    }  # fmt: skip
    return made | counts | ({} if agreement is None else {"agreement": agreement})


def record(
    *runs: dict[str, Any],
    category: str = "text",
    temperature: float = 0.0,
    rule: str = "auto",
    prompt: object = 1,
    **conditions: Any,
) -> dict[str, Any]:
    return {
        "key": "k",
        "conditions": {
            "target": "tiny",
            "dtype": "float64",
            "rule": rule,
            "temperature": temperature,
            "batch_size": 1,
            "max_new_tokens": 10,
            "seed": 0,
            "chat": False,
            **conditions,
        },
        "prompt_set": "set",
        "category": category,
        "prompts": [str(prompt)],
        "asked": [[[5, 6]]],
        "repeat": 0,
        "lossless": rule != "typical",
        "drafters": list(dict.fromkeys(one["drafter"] for one in runs)),
        "runs": list(runs),
        "environment": {
            "date": "2026-01-01T00:00:00+00:00",
            "versions": {"python": "3", "torch": "2", "draftwood": None},
            "commit": None,
            "machine": "m",
            "processor": "p",
            "cores": 2,
            "threads": 1,
            "device": "cpu",
            "attention": "sdpa",
        },
    }
