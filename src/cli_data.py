"""What the commands that train share: their options, reading their data, running, and saying what came of it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import out, print_json, progress_bar, remark
from .core.errors import InvalidRequest
from .core.loading import parse_dtype
from .core.target import Target

Data = Annotated[
    str,
    typer.Option(
        help="A .jsonl, .json, .csv or .parquet file of `text` or `messages`, of which the assistant's are learnt; "
        "plain text, documents separated by empty lines; a directory of such; or `dataset:NAME,split=train`, a hub id "
        "or directory with options of `load_dataset`."
    ),
]
LimitTokens = Annotated[int | None, typer.Option(help="Most tokens to read; a data set is then streamed.")]
Output = Annotated[
    Path, typer.Option("--out", help="Directory to make. A stopped run goes on when its command is repeated.")
]
Steps = Annotated[int, typer.Option(help="Updates of the weights.")]
Length = Annotated[int, typer.Option(help="Tokens in a sequence.")]
BatchSize = Annotated[int, typer.Option(help="Sequences in a forward.")]
Accumulate = Annotated[int, typer.Option(help="Forwards in a step.")]
LearningRate = Annotated[float, typer.Option(help="At its highest, before it falls on a cosine.")]
Warmup = Annotated[int, typer.Option(help="Steps in which the learning rate rises.")]
WeightDecay = Annotated[float, typer.Option(help="Of matrices.")]
Clip = Annotated[float, typer.Option(help="Longest norm of the gradient.")]
CheckpointEvery = Annotated[int, typer.Option(help="Steps between checkpoints.")]
EvalEvery = Annotated[
    int, typer.Option(help="Steps between evaluations, the first before any step; 0 is at the end only.")
]
EvalFraction = Annotated[
    float, typer.Option(help="Share of the sequences that is held out to measure on, or their number.")
]
EvalData = Annotated[
    str | None,
    typer.Option(help="Measure on this instead, as --data takes it; so that runs one after another compare."),
]
OptionalEvalFraction = Annotated[
    float, typer.Option(help="Share of the sequences to hold out and measure on, or their number; 0 measures nothing.")
]
Nodes = Annotated[int, typer.Option(help="Size of the tree whose expected tau is told.")]
Init = Annotated[
    str | None, typer.Option(help="Heads to start from, a directory or hub id; they settle the sizes below.")
]
DraftVocabulary = Annotated[
    int | None, typer.Option(help="Guess only so many tokens, the most frequent ones.  [default: all]")
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Directory to keep the target's features in; without it they are computed in every step."),
]
SaveDType = Annotated[str | None, typer.Option(help="Type of the saved weights.  [default: the target's]")]
Tensorboard = Annotated[bool, typer.Option(help="Also write the log for tensorboard.")]

Entry = dict[str, Any]
"""A line of the training's log."""


def check_extra() -> None:
    """Checks that what training needs is installed.

    Raises:
        InvalidRequest: the extra is not installed.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise InvalidRequest("training needs accelerate, which is not installed; pip install 'draftwood[train]'")


def read_sequences(source: str, target: Target, length: int, limit_tokens: int | None = None) -> Any:
    """Reads and packs training data, and says on stderr how much there is and what is left out.

    Returns:
        `draftwood.training.data.Sequences`, which is not imported before a command needs it.

    Raises:
        InvalidRequest: it cannot be read, or the target has no tokenizer.
    """
    from .training.data import pack, stream_documents

    if target.tokenizer is None:
        raise InvalidRequest("the target has no tokenizer, which training data needs")
    skipped: list[InvalidRequest] = []
    documents = stream_documents(source, target.tokenizer, limit_tokens=limit_tokens, on_skip=skipped.append)
    sequences = pack(documents, length)
    cut = f"; {sequences.cut} tokens left out, around which nothing is learnt" if sequences.cut else ""
    remark(f"{len(sequences)} sequences of {length} tokens{cut}")
    if skipped:
        remark(f"{len(skipped)} rows left out, the first: {skipped[0]}")
    return sequences


def read_both(
    source: str, measured: str | None, target: Target, length: int, limit_tokens: int | None
) -> tuple[Any, Any]:
    """Returns the sequences to train on, and those of `--eval-data`, None without it; as `read_sequences`."""
    sequences = read_sequences(source, target, length, limit_tokens)
    return sequences, None if measured is None else read_sequences(measured, target, length)


def run_training(
    output: Path,
    run: Callable[[dict[str, Any]], object],
    tell: Callable[[Entry, Entry], tuple[int, str]],
    *,
    use: str,
    json_output: bool,
) -> None:
    """Runs a training under a progress bar, then prints its directory.

    Args:
        output: the directory that it makes.
        run: the training, given its `on_step` and `on_features`.
        tell: takes a line of the log, and the latest value of everything logged; gives the number of steps in all, and
            what stands beside the bar.
        use: how to use the result, for stderr.
        json_output: print the last figures as JSON instead.

    Raises:
        InvalidRequest: files cannot be written, or an extra is not installed.
    """
    last: Entry = {}
    with progress_bar() as progress:

        def on_step(entry: Entry) -> None:
            last.update(entry)
            progress(entry["step"], *tell(entry, last))

        def on_features(done: int, total: int) -> None:
            progress(done, total, "features of the target")

        try:
            run({"on_step": on_step, "on_features": on_features})
        except ImportError as error:  # peft and tensorboard are extras
            raise InvalidRequest(str(error)) from error
        except OSError as error:
            raise InvalidRequest(f"cannot keep the training in {str(output)!r}: {error}") from error
    if os.environ.get("RANK", "0") != "0":
        return  # of several processes one says it
    if json_output:
        print_json({"directory": str(output), **last})
        return
    remark(f"use it with {use}")
    out.print(str(output), markup=False, soft_wrap=True)


def head_figures(accuracy: str, last: Entry) -> str:
    """Returns what stands beside the bar while heads train: of the latest step, and of the latest evaluation."""
    told = [f"loss {last['loss']:.3f}, top-1 {last[accuracy]:.1%}"] if "loss" in last else []
    if "evaluation" in last:
        told.append(f"tau {last['evaluation']['expected tau']:.2f}")
    return ", ".join(told)


def held_out(value: float) -> int | float:
    """Returns a share below 1 as it is; above it, a number of sequences."""
    return int(value) if value >= 1 and value == int(value) else value


def saved_dtype(name: str | None) -> Any:
    """Returns the torch type that `--save-dtype` names; None for the target's."""
    return None if name in (None, "auto") else parse_dtype(name)


def block_numbers(option: str, example: str, text: str | None) -> tuple[int, ...] | None:
    """Returns the numbers of blocks in a list such as `example`, None for None.

    Raises:
        InvalidRequest: it is no such list.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest(f"{option} takes numbers of blocks such as {example}, got {text!r}") from error
