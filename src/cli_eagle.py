"""The command `train eagle`: a head that drafts from the target's own hidden states.

Everything heavy is imported when the command runs.
"""

from __future__ import annotations

from enum import StrEnum
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
    Length,
    LimitTokens,
    Nodes,
    Output,
    SaveDType,
    Steps,
    Tensorboard,
    WeightDecay,
    block_numbers,
    check_extra,
    head_figures,
    held_out,
    read_both,
    run_training,
    saved_dtype,
)
from .cli_study import Seed, load_target


class Version(StrEnum):
    """Which network is trained."""

    eagle1 = "1"
    eagle3 = "3"


class Start(StrEnum):
    """What a head begins as."""

    feature = "feature"
    block = "block"
    random = "random"


class Layout(StrEnum):
    """How a head is saved."""

    yuhuili = "yuhuili"
    speculators = "speculators"


def eagle(
    model: Model,
    data: Data,
    output: Output,
    steps: Steps,
    version: Annotated[Version, typer.Option(help="1 for EAGLE-1 and EAGLE-2, 3 for EAGLE-3.")] = Version.eagle1,
    init: Init = None,
    start: Annotated[
        Start,
        typer.Option(help="Begin with a layer that hands on a feature, with the target's last block, or at random."),
    ] = Start.feature,
    unroll: Annotated[
        int | None,
        typer.Option(
            help="Steps on the head's own outputs: HASS's alignment for EAGLE-1, EAGLE-3's training-time test.  "
            "[default: 1, or 7 for EAGLE-3]"
        ),
    ] = None,
    decay: Annotated[
        float | None, typer.Option(help="Each step counts so much of the one before.  [default: 1, or 0.8 for EAGLE-3]")
    ] = None,
    feature_layers: Annotated[
        str | None, typer.Option(help="Blocks whose inputs EAGLE-3 reads, such as 2,15,27.  [default: 2,L//2,L-3]")
    ] = None,
    draft_vocabulary: DraftVocabulary = None,
    noise: Annotated[
        float | None, typer.Option(help="Uniform noise on the features.  [default: 0.2, or 0 for EAGLE-3]")
    ] = None,
    feature_weight: Annotated[
        float | None, typer.Option(help="Of the distance to the target's features, EAGLE-1 only.  [default: 1]")
    ] = None,
    entropy_weight: Annotated[
        float | None, typer.Option(help="Of the cross-entropy.  [default: 0.1, or 1 for EAGLE-3]")
    ] = None,
    recompute: Annotated[bool, typer.Option(help="Run steps twice, to save memory.")] = False,
    length: Length = 512,
    limit_tokens: LimitTokens = None,
    batch_size: BatchSize = 8,
    accumulate: Accumulate = 1,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="At its highest, before it falls on a cosine.  [default: 3e-5, or 5e-5 for EAGLE-3]"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises.  [default: one in 20, at most 2000]")
    ] = None,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 0.5,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_data: EvalData = None,
    eval_every: EvalEvery = 0,
    depth: Annotated[int, typer.Option(help="Tokens ahead that are measured.")] = 5,
    nodes: Nodes = 12,
    checkpoint_every: CheckpointEvery = 100,
    cache: Cache = None,
    layout: Annotated[
        Layout, typer.Option(help="Files to write: the EAGLE authors', or vLLM's for EAGLE-3.")
    ] = Layout.yuhuili,
    tensorboard: Tensorboard = False,
    save_dtype: SaveDType = None,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train an EAGLE head for a model that stays as it is, for the drafter `eagle`."""
    check_extra()
    from .training.eagle import EagleRecipe, train_eagle
    from .training.loop import Schedule

    recipe = EagleRecipe(
        int(version.value),
        unroll,
        decay,
        block_numbers("--feature-layers", "2,15,27", feature_layers),
        draft_vocabulary,
        start.value,
        feature_weight,
        entropy_weight,
        noise,
        recompute,
        held_out(eval_fraction),
        depth,
        nodes,
    )
    rate = (3e-5 if version is Version.eagle1 else 5e-5) if learning_rate is None else learning_rate
    rise = min(steps // 20, 2000) if warmup is None else warmup
    schedule = Schedule(
        steps, batch_size, accumulate, rate, rise, weight_decay, clip, seed, checkpoint_every, eval_every
    )
    target = load_target(model, dtype, device)
    sequences, held = read_both(data, eval_data, target, length, limit_tokens)

    def run(told: dict[str, Any]) -> None:
        kept: dict[str, Any] = {
            "held": held,
            "cache": cache,
            "layout": layout.value,
            "base_model": model,
            "tensorboard": tensorboard,
            "save_dtype": saved_dtype(save_dtype),
        }
        train_eagle(target, sequences, output, schedule, recipe, init=init, **kept, **told)

    use = f"draftwood generate {model} PROMPT --drafter eagle --option checkpoint={output}"
    run_training(
        output, run, lambda _, last: (steps, head_figures("step 1 top-1", last)), use=use, json_output=json_output
    )
