"""The command `train draft-model`: a small model learns to say what the target would."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import Device, DType, JsonFlag, Model, out, print_json, progress_bar, remark
from .cli_data import Data, LimitTokens, read_sequences
from .cli_study import Seed, load_target
from .core.errors import InvalidRequest
from .core.loading import _parse_dtype as parse_dtype


class Divergence(StrEnum):
    """What the student makes small."""

    forward = "forward"
    reverse = "reverse"
    tv = "tv"


def draft_model(
    model: Model,
    data: Data,
    output: Annotated[
        Path, typer.Option("--out", help="Directory to make. A stopped run goes on when its command is repeated.")
    ],
    steps: Annotated[int, typer.Option(help="Updates of the weights.")],
    layers: Annotated[int, typer.Option(help="Blocks of the target to start from, evenly spaced.")] = 4,
    keep_layers: Annotated[str | None, typer.Option(help="These blocks instead, such as 0,10,20,29.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the hidden states.  [default: the target's]")] = None,
    loss: Annotated[
        Divergence, typer.Option(help="`forward` or `reverse` KL to the target, or `tv`, their total variation.")
    ] = Divergence.forward,
    cross_entropy: Annotated[float, typer.Option(help="Share of the text's own cross-entropy in the loss.")] = 0.0,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    limit_tokens: LimitTokens = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a forward.")] = 1,
    accumulate: Annotated[int, typer.Option(help="Forwards in a step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="At its highest, before it falls on a cosine.")] = 1e-3,
    warmup: Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises.  [default: one in 20]")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Longest norm of the gradient.")] = 1.0,
    gamma: Annotated[int, typer.Option(help="Length of the draft whose expected tau is told.")] = 4,
    eval_fraction: Annotated[
        float, typer.Option(help="Share of the data, or number of sequences, to measure on; 0: none.")
    ] = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between measurements; 0 measures at the end.")] = 0,
    seed: Seed = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    cache: Annotated[
        Path | None, typer.Option(help="Directory to keep the target's hidden states in, computed once.")
    ] = None,
    save_dtype: Annotated[str | None, typer.Option(help="Type of the saved weights.  [default: the target's]")] = None,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Distil a small draft model from the target, for the drafter `draft-model`.

    The best data is what the target itself has written (`draftwood synthesise`).
    """
    from .training.draft_model import DraftModelRecipe
    from .training.draft_model import train_draft_model as run
    from .training.loop import Schedule

    recipe = DraftModelRecipe(layers, _blocks(keep_layers), width, loss.value, cross_entropy, gamma, eval_fraction)
    warmup = steps // 20 if warmup is None else warmup
    schedule = Schedule(
        steps, batch_size, accumulate, learning_rate, warmup, weight_decay, clip, seed, checkpoint_every, eval_every
    )
    saved: Any = None if save_dtype in (None, "auto") else parse_dtype(save_dtype)
    target = load_target(model, dtype, device)
    sequences = read_sequences(data, target, length, limit_tokens)
    last: dict[str, Any] = {}
    with progress_bar() as progress:

        def on_step(entry: dict[str, Any]) -> None:
            last.update(entry)
            progress(entry["step"], steps, f"loss {entry['loss']:.3f}, acceptance {entry['acceptance']:.1%}")
            if found := entry.get("evaluation"):
                remark(f"step {entry['step']} of {steps}, {entry['seconds'] / 60:.1f} min: {_told(found, gamma)}")

        def on_features(done: int, every: int) -> None:
            progress(done, every, "features of the target")

        options: dict[str, Any] = {"cache": cache, "save_dtype": saved, "on_step": on_step, "on_features": on_features}
        try:
            run(target, sequences, output, schedule, recipe, **options)
        except OSError as error:
            raise InvalidRequest(f"cannot keep the training in {str(output)!r}: {error}") from error
    if json_output:
        print_json({"directory": str(output), **last})
        return
    remark(f"use it with draftwood generate {model} PROMPT --drafter draft-model --option model={output}")
    out.print(str(output), markup=False, soft_wrap=True)


def _told(figures: dict[str, float], gamma: int) -> str:
    return (
        f"agreement {figures['agreement']:.1%}, acceptance {figures['acceptance']:.1%}; expected tau with {gamma} "
        f"tokens {figures['greedy tau']:.2f} greedy, {figures['tau']:.2f} sampled"
    )


def _blocks(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"--keep-layers takes numbers of blocks such as 0,10,20,29, got {text!r}") from error
