"""The command `train eagle`: a head that drafts from the target's own hidden states.

Everything heavy is imported when the command runs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from .cli_common import Device, DType, JsonFlag, Model, out, print_json, progress_bar, remark
from .cli_data import Data, LimitTokens, read_sequences
from .cli_heads import Cache, DraftVocabulary, EvalFraction, Init, Output, Steps
from .cli_heads import _held_out as held_out
from .cli_study import Seed, load_target
from .core.errors import InvalidRequest


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
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    limit_tokens: LimitTokens = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a forward.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Forwards in a step.")] = 1,
    learning_rate: Annotated[
        float | None,
        typer.Option(help="At its highest, before it falls on a cosine.  [default: 3e-5, or 5e-5 for EAGLE-3]"),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Steps in which the learning rate rises.  [default: one in 20, at most 2000]")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Longest norm of the gradient.")] = 0.5,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 is at the end only.")] = 0,
    depth: Annotated[int, typer.Option(help="Tokens ahead that are measured.")] = 5,
    nodes: Annotated[int, typer.Option(help="Size of the tree whose expected tau is told.")] = 12,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    cache: Cache = None,
    layout: Annotated[
        Layout, typer.Option(help="Files to write: the EAGLE authors', or vLLM's for EAGLE-3.")
    ] = Layout.yuhuili,
    tensorboard: Annotated[bool, typer.Option(help="Also write the log for tensorboard.")] = False,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train an EAGLE head for a model that stays as it is, for the drafter `eagle`."""
    from .training.eagle import EagleRecipe, train_eagle
    from .training.loop import Schedule

    recipe = EagleRecipe(
        int(version.value),
        unroll,
        decay,
        _layers(feature_layers),
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
    sequences = read_sequences(data, target, length, limit_tokens)
    last: dict[str, Any] = {}
    with progress_bar() as progress:

        def on_step(entry: dict[str, Any]) -> None:
            last.update(entry)
            progress(entry["step"], steps, _figures(last))

        def on_features(done: int, total: int) -> None:
            progress(done, total, "features")

        options: dict[str, Any] = {"init": init, "cache": cache, "layout": layout.value, "base_model": model}
        options |= {"tensorboard": tensorboard, "on_step": on_step, "on_features": on_features}
        try:
            train_eagle(target, sequences, output, schedule, recipe, **options)
        except OSError as error:
            raise InvalidRequest(f"cannot keep the training in {str(output)!r}: {error}") from error
    if json_output:
        print_json({"directory": str(output), **last})
        return
    remark(f"use it with draftwood generate {model} PROMPT --drafter eagle --option checkpoint={output}")
    out.print(str(output), markup=False, soft_wrap=True)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"--feature-layers takes numbers of blocks such as 2,15,27, got {text!r}") from error


def _figures(last: dict[str, Any]) -> str:
    """What stands beside the bar: of the latest step, and of the latest evaluation."""
    text = f"loss {last['loss']:.3f}, top-1 {last['step 1 top-1']:.1%}"
    return text if "evaluation" not in last else f"{text}, tau {last['evaluation']['expected tau']:.2f}"
