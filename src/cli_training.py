"""The commands that prepare a target ahead of decoding: `search layer-skip | early-exit`, `train layer-skip | plot`.

Everything heavy is imported when its command runs: `draftwood.training` and optuna are not needed for anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from . import cli_distil
from .cli_common import Device, DType, JsonFlag, Model, Packed, out, print_json, progress_bar, remark
from .cli_data import (
    Accumulate,
    BatchSize,
    CheckpointEvery,
    Clip,
    Data,
    EvalData,
    EvalEvery,
    LearningRate,
    Length,
    LimitTokens,
    OptionalEvalFraction,
    Output,
    Steps,
    Tensorboard,
    Warmup,
    WeightDecay,
    block_numbers,
    check_extra,
    held_out,
    read_both,
    run_training,
)
from .cli_study import ChatFlag, Limit, Prompts, Seed, load_target
from .core.errors import InvalidRequest
from .core.target import Target
from .study.prompts import StudyPrompt, load_prompts

search = typer.Typer(no_args_is_help=True, help="Find the layers that a target can spare while it drafts.")
train = typer.Typer(no_args_is_help=True, help="Train for one target what drafts for it.")
train.command("draft-model")(cli_distil.draft_model)


class Curriculum(StrEnum):
    """Which exits a step learns."""

    rotational = "rotational"
    gradual = "gradual"


class Objective(StrEnum):
    """What a search makes large."""

    proxy = "proxy"
    speed = "speed"


FoundFile = Annotated[
    Path,
    typer.Option("--out", help="File for the drafter. Its trials lie beside it: the same command goes on with them."),
]
ObjectiveOption = Annotated[
    Objective, typer.Option(help="`proxy`, a speedup computed without a clock; or `speed`, measured tokens per second.")
]
NewTokens = Annotated[int, typer.Option(help="Length of the texts that candidates are tried on.")]
Gamma = Annotated[int, typer.Option(help="Most tokens in a draft.")]


@search.command("layer-skip")
def layer_skip(
    model: Model,
    output: FoundFile,
    prompts: Prompts = None,
    limit: Limit = None,
    trials: Annotated[int, typer.Option(help="Sets to try, those of an earlier call included.")] = 200,
    objective: ObjectiveOption = Objective.proxy,
    max_new_tokens: NewTokens = 64,
    gamma: Gamma = 8,
    seed: Seed = 0,
    chat: ChatFlag = None,
    dtype: DType = None,
    device: Device = None,
    packed: Packed = False,
    json_output: JsonFlag = False,
) -> None:
    """Search the attention and MLP sub-layers to skip, for the drafter `layer-skip`."""
    settings = {"trials": trials, "max_new_tokens": max_new_tokens, "gamma": gamma, "seed": seed}
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "packed": packed}
    _search("layer-skip", "skip", model, output, prompts, limit, chat, objective, settings, loading, json_output)


@search.command("early-exit")
def early_exit(
    model: Model,
    output: FoundFile,
    prompts: Prompts = None,
    limit: Limit = None,
    trials: Annotated[
        int | None, typer.Option(help="Exits to try, those of an earlier call included.  [default: all]")
    ] = None,
    objective: ObjectiveOption = Objective.proxy,
    max_new_tokens: NewTokens = 64,
    gamma: Gamma = 8,
    seed: Seed = 0,
    chat: ChatFlag = None,
    dtype: DType = None,
    device: Device = None,
    packed: Packed = False,
    json_output: JsonFlag = False,
) -> None:
    """Search the layer to exit after, for the drafter `early-exit`."""
    settings = {"trials": trials, "max_new_tokens": max_new_tokens, "gamma": gamma, "seed": seed}
    loading: dict[str, Any] = {"dtype": dtype, "device": device, "packed": packed}
    _search("early-exit", "exit_layer", model, output, prompts, limit, chat, objective, settings, loading, json_output)


@train.command("layer-skip")
def layer_skip_training(
    model: Model,
    data: Data,
    output: Output,
    steps: Steps,
    exit_layers: Annotated[
        str | None, typer.Option(help="Blocks behind which to exit, such as 4,8,12.  [default: every one from 2]")
    ] = None,
    p_max: Annotated[float, typer.Option(help="How often the last block is dropped.")] = 0.1,
    e_scale: Annotated[float, typer.Option(help="How much early exits count beside the last layer.")] = 0.2,
    curriculum: Annotated[Curriculum, typer.Option(help="Which exits a step learns.")] = Curriculum.rotational,
    rotation: Annotated[int, typer.Option(help="Of the rotational curriculum: every which exit a step learns.")] = 8,
    length: Length = 512,
    limit_tokens: LimitTokens = None,
    batch_size: BatchSize = 4,
    accumulate: Accumulate = 1,
    learning_rate: LearningRate = 2e-5,
    warmup: Warmup = 0,
    weight_decay: WeightDecay = 0.0,
    clip: Clip = 1.0,
    seed: Seed = 0,
    eval_fraction: OptionalEvalFraction = 0.0,
    eval_data: EvalData = None,
    eval_every: EvalEvery = 0,
    checkpoint_every: CheckpointEvery = 100,
    tensorboard: Tensorboard = False,
    dtype: Annotated[str | None, typer.Option(help="Type of weights and optimizer: float32 or bfloat16.")] = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Fine-tune a model so that its early exits draft well (LayerSkip), for the drafter `early-exit`."""
    check_extra()
    from .training.layer_skip import Recipe, train_layer_skip
    from .training.loop import Schedule

    recipe = Recipe(block_numbers("--exit-layers", "4,8,12", exit_layers), p_max, e_scale, curriculum.value, rotation)
    schedule = Schedule(
        steps, batch_size, accumulate, learning_rate, warmup, weight_decay, clip, seed, checkpoint_every, eval_every
    )
    target = load_target(model, dtype, device)
    sequences, held = read_both(data, eval_data, target, length, limit_tokens)

    def run(told: dict[str, Any]) -> None:
        kept: dict[str, Any] = {"held_out": held_out(eval_fraction), "tensorboard": tensorboard}
        kept |= {"held": held, "tokenizer": target.tokenizer, "on_step": told["on_step"]}  # it caches no features
        train_layer_skip(target.model, sequences, output, schedule, recipe, **kept)

    run_training(
        output,
        run,
        lambda entry, _: (steps, f"loss {entry['loss']:.3f}" if "loss" in entry else ""),
        use=f"draftwood generate {output} PROMPT --drafter early-exit --option exit_layer=...",
        json_output=json_output,
    )


@train.command("plot")
def plot(
    logs: Annotated[
        list[Path], typer.Argument(help="Directories that trainings made or are making, or their logs (log.jsonl).")
    ],
    output: Annotated[Path, typer.Option("--out", help="An .svg, .png or .pdf file to write.")],
    joined: Annotated[
        bool, typer.Option("--joined", help="Each run started from what the one before had made: draw one curve.")
    ] = False,
) -> None:
    """Draw learning curves: rates and expected tau against tokens and minutes, as `--eval-every` has measured them."""
    check_extra()
    from .training.curve import join_curves, plot_curves, read_curve

    curves = {str(log).removesuffix("/log.jsonl"): read_curve(log) for log in logs}
    try:
        plot_curves({"joined": join_curves(curves.values())} if joined else curves, output)
    except ImportError as error:  # matplotlib is an extra
        raise InvalidRequest(str(error)) from error
    except OSError as error:
        raise InvalidRequest(f"cannot write {str(output)!r}: {error}") from error
    out.print(str(output), markup=False, soft_wrap=True)


def _search(
    drafter: str,
    option: str,
    model: str,
    output: Path,
    prompts: list[str] | None,
    limit: int | None,
    chat: bool | None,
    objective: Objective,
    settings: dict[str, Any],
    loading: dict[str, Any],
    json_output: bool,
) -> None:
    """Runs one search; `option` is the drafter's option that takes the file."""
    from .training import layer_search

    run: Callable[..., Any] = {
        "layer-skip": layer_search.search_layer_skip,
        "early-exit": layer_search.search_early_exit,
    }[drafter]
    sources: list[str | None] = [*prompts] if prompts else [None]
    asked = [prompt for source in sources for prompt in load_prompts(source, limit).prompts]
    target = load_target(model, **loading)
    with progress_bar() as progress:

        def on_trial(done: Any) -> None:
            best = "none yet" if done.best is None else f"{done.best.value:.3g}"
            progress(done.finished, done.trials, f"{drafter}, best {best}")

        texts = [_render(target, prompt, chat) for prompt in asked]
        try:
            found = run(target, texts, objective=objective.value, output=output, on_trial=on_trial, **settings)
        except ImportError as error:  # optuna is an extra
            raise InvalidRequest(str(error)) from error
        except OSError as error:
            raise InvalidRequest(f"cannot keep the search in {str(output)!r}: {error}") from error
    if json_output:
        print_json({"drafter": drafter, "file": str(output), **asdict(found)})
        return
    unit = "x expected" if objective is Objective.proxy else " tokens per second"
    remark(f"best of {found.trials} trials: {found.options}, {found.value:.3g}{unit}")
    remark(f"use it with --drafter {drafter} --option {option}={output}")
    out.print(str(output), markup=False, soft_wrap=True)


def _render(target: Target, prompt: StudyPrompt, chat: bool | None) -> Any:
    """Returns a prompt's first turn as a decoder takes it; the answers to later ones are not known yet."""
    templated = bool(getattr(target.tokenizer, "chat_template", None)) if chat is None else chat
    if not templated:
        return prompt.turns[0]
    return [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
