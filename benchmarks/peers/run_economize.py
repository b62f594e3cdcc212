"""The worker of PyPI `economize`, through its `decode`."""

from __future__ import annotations

from typing import Any

import economize
import torch
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.layer_skip import LayerSkipConfig
from economize.techniques.lookup import LookupConfig
from economize.techniques.medusa import MedusaConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from .protocol import Method, Run, serve_on_torch


def methods(directory: str) -> dict[str, Method]:
    def base() -> PreTrainedModel:
        # One each: nothing is known of techniques that share a model.
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def decoding(model: Any, cycle: int) -> Run:
        config = economize.DecodeConfig(cycle_length=cycle)
        ends = model.unwrap().generation_config.eos_token_id

        def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
            result = model.decode(torch.tensor(prompt), count, decoding=config, stop=ends)
            tokens = result.tokens.tolist()
            return tokens, result.cost.count("exact") - 1, len(tokens) - 1

        return run

    def applied(config: Any, gamma: int) -> Run:
        return decoding(economize.apply(base(), config), gamma + 1)

    def none(options: dict[str, Any]) -> Run:
        return decoding(economize.apply(base(), LookupConfig()), 1)

    def prompt_lookup(options: dict[str, Any]) -> Run:
        return applied(LookupConfig(max_ngram=options["max_ngram"]), options["gamma"])

    def layer_skip(options: dict[str, Any]) -> Run:
        # Its layers count from 1.
        return applied(LayerSkipConfig(skip_layers=tuple(layer + 1 for layer in options["skip"])), options["gamma"])

    def draft_model(options: dict[str, Any]) -> Run:
        return applied(DraftModelConfig(model=options["draft_model"]), options["gamma"])

    def medusa(options: dict[str, Any]) -> Run:
        if options.get("tree") is None:
            model = economize.load(base(), options["checkpoint"])
        else:
            heads = economize.read_checkpoint(options["checkpoint"])
            config = heads.configs[0]
            config = MedusaConfig(num_heads=config.num_heads, num_layers=config.num_layers, tree=options["tree"])
            model = economize.apply(base(), config)
            model.techniques["medusa"].load_state_dict(heads.states["medusa"])
        return decoding(model, len(model.techniques["medusa"].heads) + 1)

    def eagle3(options: dict[str, Any]) -> Run:
        return decoding(economize.load(base(), options["checkpoint"]), options["gamma"] + 1)

    return {
        "none": none,
        "prompt-lookup": prompt_lookup,
        "layer-skip": layer_skip,
        "draft-model": draft_model,
        "medusa": medusa,
        "eagle3": eagle3,
    }


if __name__ == "__main__":
    serve_on_torch(methods)
