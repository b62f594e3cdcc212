"""The worker of transformers' own assisted generation."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .protocol import Method, Run, serve_on_torch


class Passes:
    """Counts the forwards of a whole model; its own early exits do not count."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._config, self.count = model.config, 0
        self._layers = model.config.num_hidden_layers
        model.register_forward_pre_hook(self._seen)

    def _seen(self, *_: Any) -> None:
        # Early exit drafts with the model itself, told to have fewer layers.
        self.count += self._config.num_hidden_layers == self._layers


def methods(directory: str) -> dict[str, Method]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    passes = Passes(model)

    def generating(**given: Any) -> Run:
        def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
            ids, before = torch.tensor([prompt]), passes.count
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, **given
            )
            tokens = out[0, len(prompt) :].tolist()
            return tokens, passes.count - before, len(tokens)  # the first forward checks a draft too

        return run

    def draft_model(options: dict[str, Any]) -> Run:
        draft = AutoModelForCausalLM.from_pretrained(options["draft_model"], dtype=torch.float32).eval()
        draft.generation_config.num_assistant_tokens = options["gamma"]
        return generating(assistant_model=draft)

    def early_exit(options: dict[str, Any]) -> Run:
        model.generation_config.num_assistant_tokens = options["gamma"]
        return generating(assistant_early_exit=options["exit_layer"])

    return {
        "none": lambda _: generating(),
        "prompt-lookup": lambda options: generating(
            prompt_lookup_num_tokens=options["gamma"], max_matching_ngram_size=options["max_ngram"]
        ),
        "draft-model": draft_model,
        "early-exit": early_exit,
    }


if __name__ == "__main__":
    serve_on_torch(methods)
