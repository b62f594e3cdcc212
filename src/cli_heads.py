"""The commands that train heads for a target: `train medusa` and `train medusa-2`.

Everything heavy is imported when its command runs.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import Device, DType, JsonFlag, Model, out, print_json, progress_bar, remark
from .cli_data import Data, LimitTokens, read_sequences
from .cli_study import Seed, load_target
from .core.errors import InvalidRequest


class Layout(StrEnum):
    """How heads are saved."""

    medusa = "medusa"
    vllm = "vllm"


Output = Annotated[
    Path, typer.Option("--out", help="Directory to make. A stopped run goes on when its command is repeated.")
]
Steps = Annotated[int, typer.Option(help="Updates of the weights.")]
Init = Annotated[
    str | None, typer.Option(help="Heads to start from, a directory or hub id; they settle the sizes below.")
]
Heads = Annotated[int | None, typer.Option(help="Tokens to draft ahead.  [default: 4]")]
Layers = Annotated[int | None, typer.Option(help="Residual blocks of a head.  [default: 1]")]
Shared = Annotated[
    bool | None, typer.Option("--shared/--own", help="Use the target's LM head, or one of its own for each head.")
]
DraftVocabulary = Annotated[
    int | None, typer.Option(help="Guess only so many tokens, the most frequent ones.  [default: all]")
]
EvalFraction = Annotated[
    float, typer.Option(help="Share of the sequences that is held out to measure on, or their number.")
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Directory to keep the target's features in; without it they are computed in every step."),
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
    decay: Annotated[float, typer.Option(help="The loss of head k counts decay^k.")] = 0.8,
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    limit_tokens: LimitTokens = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a forward.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Forwards in a step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="At its highest, before it falls on a cosine.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = 0,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.")] = 0.0,
    clip: Annotated[float, typer.Option(help="Longest norm of the gradient.")] = 1.0,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 is at the end only.")] = 0,
    nodes: Annotated[int, typer.Option(help="Size of the tree whose expected tau is told.")] = 12,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    cache: Cache = None,
    layout: Annotated[Layout, typer.Option(help="Files to write: the Medusa authors', or vLLM's.")] = Layout.medusa,
    tensorboard: Annotated[bool, typer.Option(help="Also write the log for tensorboard.")] = False,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train Medusa heads for a model that stays as it is, for the drafter `medusa`."""
    from .training.loop import Schedule
    from .training.medusa import MedusaRecipe, train_medusa

    recipe = MedusaRecipe(heads, layers, shared, draft_vocabulary, decay, distil, _held_out(eval_fraction), nodes)
    schedule = Schedule(
        steps,
        batch_size,
        accumulate,
        learning_rate,
        warmup,
        weight_decay,
        clip,
        seed,
        checkpoint_every,
        eval_every,
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

        try:
            train_medusa(
                target,
                sequences,
                output,
                schedule,
                recipe,
                init=init,
                cache=cache,
                layout="vllm" if layout is Layout.vllm else "medusa-1",
                base_model=model,
                tensorboard=tensorboard,
                on_step=on_step,
                on_features=on_features,
            )
        except OSError as error:
            raise InvalidRequest(f"cannot keep the training in {str(output)!r}: {error}") from error
    if json_output:
        print_json({"directory": str(output), **last})
        return
    remark(f"use it with draftwood generate {model} PROMPT --drafter medusa --option checkpoint={output}")
    out.print(str(output), markup=False, soft_wrap=True)


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
    length: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    limit_tokens: LimitTokens = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a forward.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Forwards in a step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="The model's; the heads' is 4 times as high.")] = 2e-5,
    head_learning_rate: Annotated[float, typer.Option(help="Of the first stage.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises.")] = 0,
    seed: Seed = 0,
    eval_fraction: EvalFraction = 0.05,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0 is at the end only.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Train a copy of a model together with Medusa heads (Medusa-2); both are one directory."""
    from .training.loop import Schedule
    from .training.medusa import MedusaRecipe
    from .training.medusa_joint import JointRecipe, train_medusa_joint

    recipe = MedusaRecipe(heads, layers, None, draft_vocabulary, held_out=_held_out(eval_fraction))
    joint = JointRecipe(lora=lora, self_distil=self_distil)
    shape: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate, "warmup": warmup, "seed": seed}
    shape |= {"eval_every": eval_every, "checkpoint_every": checkpoint_every}
    first = Schedule(head_steps, learning_rate=head_learning_rate, **shape) if head_steps else None
    schedule = Schedule(steps, learning_rate=learning_rate, **shape)
    target = load_target(model, dtype, device)
    sequences = read_sequences(data, target, length, limit_tokens)
    last: dict[str, Any] = {}
    with progress_bar() as progress:

        def on_step(entry: dict[str, Any]) -> None:
            last.update(entry)
            progress(entry["step"], steps if "model" in entry else head_steps, _figures(last))

        try:
            train_medusa_joint(
                target, sequences, output, schedule, recipe, joint, first=first, init=init, on_step=on_step
            )
        except ImportError as error:  # peft is an extra
            raise InvalidRequest(str(error)) from error
        except OSError as error:
            raise InvalidRequest(f"cannot keep the training in {str(output)!r}: {error}") from error
    if json_output:
        print_json({"directory": str(output), **last})
        return
    remark(f"use it with draftwood generate {output} PROMPT --drafter medusa --option checkpoint={output}")
    out.print(str(output), markup=False, soft_wrap=True)


def _held_out(value: float) -> int | float:
    """A share below 1; above it, a number of sequences."""
    return int(value) if value >= 1 and value == int(value) else value


def _figures(last: dict[str, Any]) -> str:
    """What stands beside the bar: of the latest step, and of the latest evaluation."""
    text = f"loss {last['loss']:.3f}, top-1 {last['head 0 top-1']:.1%}"
    return text if "evaluation" not in last else f"{text}, tau {last['evaluation']['expected tau']:.2f}"
