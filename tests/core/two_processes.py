"""Decodes with a target whose weights two gloo processes share, and notes what each of them wrote; run by a test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.eagle.network import EagleHead
from draftwood.drafters.medusa.network import MedusaConfig, MedusaHeads
from draftwood.plugins import load_registry
from tests.conftest import VOCABULARY, llama_config, tiny_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8]]


def drafters() -> dict[str, Any]:
    """Returns one drafter of each kind, with weights that are the same in every process."""
    config = LlamaConfig(**llama_config(1, 4).to_dict())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        heads, eagle = MedusaHeads(MedusaConfig(2, 1, 32, VOCABULARY, shared=True)), EagleHead(config)
    create = load_registry().create_drafter
    return {
        "none": "none",
        "prompt-lookup": "prompt-lookup",
        "lookahead": "lookahead",
        "draft-model": DraftModel(model=tiny_model(llama_config(1, 2), seed=1).float(), gamma=3),
        "layer-skip": create("layer-skip", {"skip": {"attention": [1], "mlp": [1]}, "gamma": 3}),
        "early-exit": create("early-exit", {"exit_layer": 1, "gamma": 3}),
        "medusa": create("medusa", {"checkpoint": heads, "nodes": 6}),
        "eagle": create("eagle", {"checkpoint": eagle, "nodes": 6}),
    }


def texts(target: Target) -> dict[str, list[list[int]]]:
    """Returns what each drafter writes, greedily and sampled."""
    return {
        f"{name}, {rule}": [
            text.tokens
            for text in Decoder(target, drafter, rule=rule).generate(
                PROMPTS, max_new_tokens=10, eos_token_id=[], temperature=temperature
            )
        ]
        for name, drafter in drafters().items()
        for rule, temperature in (("greedy", 0.0), ("rejection", 1.0))
    }


def refusals(target: Target) -> list[str]:
    """Returns what cannot be done with such a target, in words."""
    said = []
    for attempt in (
        lambda: Target(target.model, packed=True),
        lambda: Decoder(target, "auto", drafter_options={"of": "prompt-lookup"}),
        lambda: Decoder(target).generate([5, 6], max_time=1.0),
    ):
        try:
            attempt()
            said.append("nothing")
        except InvalidRequest as error:
            said.append(str(error))
    return said


def work(rank: int, place: str) -> None:
    """Loads the model as a process of torchrun would, and decodes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    out = Path(place)
    # A file, not a port, so that tests may run side by side; torchrun's own processes meet at a port.
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    target = Target.from_pretrained(out / "model", tp_plan="auto")
    heads = [shape.heads for shape in target.layout.values()]
    notes = {"sharded": target.sharded, "heads": heads, "texts": texts(target), "refusals": refusals(target)}
    (out / f"{rank}.json").write_text(json.dumps(notes))
    dist.destroy_process_group()


def launch(place: str) -> None:
    """Starts both processes and waits for them."""
    torch.multiprocessing.start_processes(work, (place,), nprocs=2, start_method="fork")
