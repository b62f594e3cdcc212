"""The worker of this library, with a plain and a packed target."""

from __future__ import annotations

from typing import Any

import draftwood as dw
from draftwood.core.loading import load_model

from .protocol import Method, Run, serve_on_torch


def methods(model: str) -> dict[str, Method]:
    """Every drafter of a target and of its packed copy, which share the model.

    Options: `packed`, and those of the drafter; a draft model is packed with its target.
    """
    loaded, tokenizer = load_model(model, dtype="float32")
    targets: dict[bool, dw.Target] = {}

    def target(packed: bool) -> dw.Target:
        if packed not in targets:
            targets[packed] = dw.Target(loaded, tokenizer, packed=packed)
        return targets[packed]

    def method(name: str) -> Method:
        def make(options: dict[str, Any]) -> Run:
            packed = options.pop("packed", False)
            if "draft_model" in options:
                options["model"] = dw.Target.from_pretrained(options.pop("draft_model"), dtype="float32", packed=packed)
            decoder = dw.Decoder(target(packed), name, drafter_options=options)

            def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
                out = decoder.generate(prompt, max_new_tokens=count)
                return out.tokens, out.stats.rounds, out.stats.committed

            return run

        return make

    names = ("none", "prompt-lookup", "draft-model", "early-exit", "layer-skip", "medusa", "eagle")
    return {name: method(name) for name in names} | {"draft-model+prompt-lookup": merged(target)}


def merged(target: Any) -> Method:
    """A draft model and prompt lookup in one tree."""
    from draftwood.drafters.draft_model import DraftModel
    from draftwood.drafters.merged import Merged
    from draftwood.drafters.prompt_lookup import PromptLookup

    def make(options: dict[str, Any]) -> Run:
        packed = options.pop("packed", False)
        draft = dw.Target.from_pretrained(options.pop("draft_model"), dtype="float32", packed=packed)
        parts = [DraftModel(model=draft, gamma=options["gamma"]), PromptLookup(gamma=options["lookup"])]
        decoder = dw.Decoder(target(packed), Merged(parts))

        def run(prompt: list[int], count: int) -> tuple[list[int], int, int]:
            out = decoder.generate(prompt, max_new_tokens=count)
            return out.tokens, out.stats.rounds, out.stats.committed

        return run

    return make


if __name__ == "__main__":
    serve_on_torch(methods)
