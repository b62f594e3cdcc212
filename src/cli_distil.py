"""The command `train draft-model`: a small model learns to say what the target would."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from .cli_common import Device, DType, JsonFlag, Model, remark
from .cli_data import (
    Accumulate,
    BatchSize,
    Cache,
    CheckpointEvery,
    Clip,
    Data,
    DraftVocabulary,
    EvalData,
    EvalEvery,
    LearningRate,
    Length,
    LimitTokens,
    OptionalEvalFraction,
    Output,
    SaveDType,
    Steps,
    Tensorboard,
    WeightDecay,
    block_numbers,
    check_extra,
    held_out,
    read_both,
    run_training,
    saved_dtype,
)
from .cli_study import Seed, load_target


class Divergence(StrEnum):
    """What the student makes small."""

    forward = "forward"
    reverse = "reverse"
    tv = "tv"


def draft_model(
    model: Model,
    data: Data,
    output: Output,
    steps: Steps,
    init: Annotated[
        str | None, typer.Option(help="Student to start from, a directory or hub id; it settles the sizes below.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Blocks of the target to start from, evenly spaced.  [default: 4]")
    ] = None,
    keep_layers: Annotated[str | None, typer.Option(help="These blocks instead, such as 0,10,20,29.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the hidden states.  [default: the target's]")] = None,
    shared: Annotated[
        bool | None,
        typer.Option("--shared/--own", help="Use the target's embedding and LM head, or ones of its own."),
    ] = None,
    draft_vocabulary: DraftVocabulary = None,
    loss: Annotated[
        Divergence, typer.Option(help="`forward` or `reverse` KL to the target, or `tv`, their total variation.")
    ] = Divergence.forward,
    cross_entropy: Annotated[float, typer.Option(help="Share of the text's own cross-entropy in the loss.")] = 0.0,
    length: Length = 512,
    limit_tokens: LimitTokens = None,
    batch_size: BatchSize = 1,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 1e-3,
    warmup: Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises.  [default: one in 20]")
    ] = None,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    gamma: Annotated[int, typer.Option(help="Length of the draft whose expected tau is told.")] = 4,
    eval_fraction: OptionalEvalFraction = 0.05,
    eval_data: EvalData = None,
    eval_every: EvalEvery = 0,
    seed: Seed = 0,
    checkpoint_every: CheckpointEvery = 100,
    cache: Cache = None,
    save_dtype: SaveDType = None,
    tensorboard: Tensorboard = False,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Distil a small draft model from the target, for the drafter `draft-model`.

    The best data is what the target itself has written (`draftwood synthesise`).
    """
    check_extra()
    from .training.draft_model import DraftModelRecipe, train_draft_model
    from .training.loop import Schedule

    recipe = DraftModelRecipe(
        layers,
        block_numbers("--keep-layers", "0,10,20,29", keep_layers),
        width,
        loss.value,
        cross_entropy,
        gamma,
        held_out(eval_fraction),
        shared,
        draft_vocabulary,
    )
    warmup = steps // 20 if warmup is None else warmup
    schedule = Schedule(
        steps, batch_size, accumulate, learning_rate, warmup, weight_decay, clip, seed, checkpoint_every, eval_every
    )
    saved = saved_dtype(save_dtype)
    target = load_target(model, dtype, device)
    sequences, held = read_both(data, eval_data, target, length, limit_tokens)

    def run(told: dict[str, Any]) -> None:
        kept: dict[str, Any] = {"held": held, "cache": cache, "save_dtype": saved, "tensorboard": tensorboard}
        train_draft_model(target, sequences, output, schedule, recipe, init=init, **kept, **told)

    def tell(entry: dict[str, Any], _: dict[str, Any]) -> tuple[int, str]:
        if found := entry.get("evaluation"):
            remark(f"step {entry['step']} of {steps}, {entry['seconds'] / 60:.1f} min: {_told(found, gamma)}")
        return steps, f"loss {entry['loss']:.3f}, acceptance {entry['acceptance']:.1%}" if "loss" in entry else ""

    use = f"draftwood generate {model} PROMPT --drafter draft-model --option model={output}"
    run_training(output, run, tell, use=use, json_output=json_output)


def _told(figures: dict[str, float], gamma: int) -> str:
    return (
        f"agreement {figures['agreement']:.1%}, acceptance {figures['acceptance']:.1%}; expected tau with {gamma} "
        f"tokens {figures['greedy tau']:.2f} greedy, {figures['tau']:.2f} sampled"
    )
