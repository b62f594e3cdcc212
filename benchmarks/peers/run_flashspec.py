"""The worker of PyPI `flashspec`."""

from __future__ import annotations

from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from .protocol import Method, Run, serve_on_torch


def methods(directory: str) -> dict[str, Method]:
    device = torch.device("cpu")

    def load(place: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()

    model = load(directory)
    ends = model.generation_config.eos_token_id
    ends = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)

    def engine(drafters: list[Any], gamma: int, strategy: str) -> Run:
        config = FlashSpecConfig(
            device="cpu",
            dtype="float32",
            drafter_strategy=strategy,
            bandit=BanditConfig(n_arms=1),
            eos_token_ids=ends,
            sampling=SamplingConfig(temperature=0.0, gamma=gamma),
        )
        engine = SpeculativeEngine(config, drafters, TargetModel(directory, device, torch.float32, model=model))

        def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
            result = engine.generate(torch.tensor([prompt]), max_new_tokens=count)
            tokens = result.output_ids[0, : result.n_tokens_generated].tolist()
            return tokens, len(result.arm_steps), len(tokens)  # the first step checks a draft too

        return run

    def drafter(options: dict[str, Any]) -> HuggingFaceDrafter:
        place = options["draft_model"]
        return HuggingFaceDrafter(place, device, torch.float32, temperature=0.0, model=load(place))

    return {
        "prompt-lookup": lambda options: engine(
            [NgramDrafter(max_ngram=options["max_ngram"])], options["gamma"], "bandit"
        ),
        "draft-model": lambda options: engine([drafter(options)], options["gamma"], "bandit"),
        # Its default: look up, and draft two tokens where nothing is found.
        "draft-model+prompt-lookup": lambda options: engine(
            [drafter(options), NgramDrafter()], options["gamma"], "composite-g6-f2"
        ),
    }


if __name__ == "__main__":
    serve_on_torch(methods)
