"""The command `export`: heads, draft models and targets for serving engines."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .cli_common import JsonFlag, out, print_json, remark
from .serving import export as run


class Format(StrEnum):
    """A serving engine."""

    vllm = "vllm"
    sglang = "sglang"


class Vocabulary(StrEnum):
    """Which tokens a draft model drafts."""

    strict = "strict"
    intersection = "intersection"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Medusa or EAGLE heads, a draft model, or a target: a directory or hub id; for models also a .gguf "
            "file or `smollm2`."
        ),
    ],
    engine: Annotated[Format, typer.Option("--format", help="The engine that is to load it.")],
    output: Annotated[Path, typer.Option("--out", help="Directory to make.")],
    target: Annotated[
        str | None,
        typer.Option(help="The model that it drafts for, as above; without it, CHECKPOINT is exported as a target."),
    ] = None,
    depth: Annotated[
        int | None,
        typer.Option(help="Tokens ahead that the engine drafts.  [default: all Medusa heads, 5 of the others]"),
    ] = None,
    vocabulary: Annotated[
        Vocabulary,
        typer.Option(help="`intersection`: where a draft model's tokens are others, vLLM drafts those that both have."),
    ] = Vocabulary.strict,
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights, such as bfloat16.  [default: as they are stored]")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Write heads, draft models and targets as vLLM or SGLang loads them; prints the command that serves them."""
    done = run(
        checkpoint,
        output,
        engine=engine.value,
        target=target,
        depth=depth,
        vocabulary=vocabulary.value,
        dtype=dtype,
    )
    if json_output:
        print_json(asdict(done))
        return
    remark(f"{done.kind} in {done.directory}")
    for note in done.notes:
        remark(note)
    out.print(done.command, markup=False, soft_wrap=True)
