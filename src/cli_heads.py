"""The commands that train heads for a target: `train medusa` and `train medusa-2`.

Everything heavy is imported when its command runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import Device, DType, JsonFlag, Model
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
    EvalFraction,
    Init,
    LearningRate,
    Length,
    LimitTokens,
    Nodes,
    Output,
    SaveDType,
    Steps,
    Tensorboard,
    Warmup,
    WeightDecay,
    check_extra,
    head_figures,
    held_out,
    read_both,
    run_training,
    saved_dtype,
)
from .cli_study import Seed, load_target


class Layout(StrEnum):
    """How heads are saved."""

    medusa = "medusa"
    vllm = "vllm"


ACCURACY = "head 0 top-1"
Heads = Annotated[int | None, typer.Option(help="Tokens to draft ahead.  [default: 4]")]
Layers = Annotated[int | None, typer.Option(help="Residual blocks of a head.  [default: 1]")]
Decay = Annotated[float, typer.Option(help="The loss of head k counts decay^k.")]
Shared = Annotated[
    bool | None, typer.Option("--shared/--own", help="Use the target's LM head, or one of its own for each head.")
]


def medusa(
    model: Model,
    data: Data,
    output: Output,
    steps: Steps,
    init: Init = None,
    heads: Heads = None,
    layers: Layers = None,
    shared: Shared = None,
    draft_vocabulary: DraftVocabulary = None,
    distil: Annotated[bool, typer.Option(help="Learn the target's distribution instead of the text.")] = False,
    decay: Decay = 0.8,
    length: Length = 512,
    limit_tokens: LimitTokens = None,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 1e-3,
    warmup: Warmup = 0,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_data: EvalData = None,
    eval_every: EvalEvery = 0,
    nodes: Nodes = 12,
    checkpoint_every: CheckpointEvery = 100,
    cache: Cache = None,
    layout: Annotated[Layout, typer.Option(help="Files to write: the Medusa authors', or vLLM's.")] = Layout.medusa,
    tensorboard: Tensorboard = False,
    save_dtype: SaveDType = None,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train Medusa heads for a model that stays as it is, for the drafter `medusa`."""
    check_extra()
    from .training.loop import Schedule
    from .training.medusa import MedusaRecipe, train_medusa

    recipe = MedusaRecipe(heads, layers, shared, draft_vocabulary, decay, distil, held_out(eval_fraction), nodes)
    schedule = Schedule(
        steps, batch_size, accumulate, learning_rate, warmup, weight_decay, clip, seed, checkpoint_every, eval_every
    )
    target = load_target(model, dtype, device)
    sequences, held = read_both(data, eval_data, target, length, limit_tokens)
    layout_name: Any = "vllm" if layout is Layout.vllm else "medusa-1"

    def run(told: dict[str, Any]) -> None:
        kept: dict[str, Any] = {
            "held": held,
            "cache": cache,
            "layout": layout_name,
            "base_model": model,
            "tensorboard": tensorboard,
            "save_dtype": saved_dtype(save_dtype),
        }
        train_medusa(target, sequences, output, schedule, recipe, init=init, **kept, **told)

    use = f"draftwood generate {model} PROMPT --drafter medusa --option checkpoint={output}"
    run_training(output, run, lambda _, last: (steps, head_figures(ACCURACY, last)), use=use, json_output=json_output)


def medusa_joint(
    model: Model,
    data: Data,
    output: Output,
    steps: Steps,
    head_steps: Annotated[int, typer.Option(help="Updates of the first stage, the heads alone; 0 with --init.")] = 0,
    init: Init = None,
    heads: Heads = None,
    layers: Layers = None,
    draft_vocabulary: DraftVocabulary = None,
    lora: Annotated[int | None, typer.Option(help="Rank of adapters.  [default: train in full]")] = None,
    self_distil: Annotated[bool, typer.Option(help="Keep the model close to what it was.")] = False,
    decay: Decay = 0.8,
    length: Length = 512,
    limit_tokens: LimitTokens = None,
    batch_size: BatchSize = 4,
    accumulate: Accumulate = 1,
    learning_rate: Annotated[float, typer.Option(help="The model's; the heads' is 4 times as high.")] = 2e-5,
    head_learning_rate: Annotated[float, typer.Option(help="Of the first stage.")] = 1e-3,
    warmup: Warmup = 0,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_data: EvalData = None,
    eval_every: EvalEvery = 0,
    nodes: Nodes = 12,
    checkpoint_every: CheckpointEvery = 100,
    cache: Annotated[
        Path | None, typer.Option(help="Directory to keep the target's features of the first stage in.")
    ] = None,
    tensorboard: Tensorboard = False,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train a copy of a model together with Medusa heads (Medusa-2); both are one directory."""
    check_extra()
    from .training.loop import Schedule
    from .training.medusa import MedusaRecipe
    from .training.medusa_joint import JointRecipe, train_medusa_joint

    recipe = MedusaRecipe(heads, layers, None, draft_vocabulary, decay, held_out=held_out(eval_fraction), nodes=nodes)
    joint = JointRecipe(lora=lora, self_distil=self_distil)
    shape: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate, "warmup": warmup, "seed": seed}
    shape |= {"weight_decay": weight_decay, "clip": clip}
    shape |= {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
    first = Schedule(head_steps, learning_rate=head_learning_rate, **shape) if head_steps else None
    schedule = Schedule(steps, learning_rate=learning_rate, **shape)
    target = load_target(model, dtype, device)
    sequences, held = read_both(data, eval_data, target, length, limit_tokens)

    def run(told: dict[str, Any]) -> None:
        kept: dict[str, Any] = {"init": init, "held": held, "cache": cache, "tensorboard": tensorboard}
        train_medusa_joint(target, sequences, output, schedule, recipe, joint, first=first, **kept, **told)

    def tell(entry: dict[str, Any], last: dict[str, Any]) -> tuple[int, str]:
        return steps if "model" in entry else head_steps, head_figures(ACCURACY, last)

    use = f"draftwood generate {output} PROMPT --drafter medusa --option checkpoint={output}"
    run_training(output, run, tell, use=use, json_output=json_output)
