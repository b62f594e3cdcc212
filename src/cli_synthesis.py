"""The command `synthesise`: training data that the target writes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_common import Device, DType, JsonFlag, Model, Packed, out, print_json, progress_bar, remark
from .cli_study import Limit, Prompts, Seed, load_target
from .core.errors import InvalidRequest
from .decoder import Decoder
from .study.prompts import load_prompts


def synthesise(
    model: Model,
    output: Annotated[
        Path,
        typer.Option("--out", help="JSON-lines file to write. A stopped run goes on when its command is repeated."),
    ],
    samples: Annotated[int, typer.Option(help="Conversations to write; with --prompts, at most as many.")] = 1000,
    prompts: Prompts = None,
    limit: Limit = None,
    turns: Annotated[int, typer.Option(help="User turns of a conversation.")] = 1,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Of the answers; conversations take several in turn.  [default: 0 and 0.7]"),
    ] = None,
    user_temperature: Annotated[float, typer.Option(help="Of the user turns.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus to sample from; 1 is off.")] = 1.0,
    user_tokens: Annotated[int, typer.Option(help="Longest user turn; longer ones are dropped.")] = 128,
    answer_tokens: Annotated[int, typer.Option(help="Longest answer; longer ones are cut.")] = 384,
    batch_size: Annotated[int, typer.Option(help="Texts decoded at once.")] = 32,
    seed: Seed = 0,
    dtype: DType = None,
    device: Device = None,
    packed: Packed = False,
    json_output: JsonFlag = False,
) -> None:
    """Have a chat model write conversations, user turns included, or its answers to given prompts.

    The drafters that are trained on them learn to guess what this model says.
    """
    from .training.synthesis import Writing, Written
    from .training.synthesis import synthesise as run

    writing = Writing(
        samples,
        turns,
        tuple(temperature or (0.0, 0.7)),
        user_temperature,
        top_p,
        user_tokens,
        answer_tokens,
        batch_size,
        seed,
    )
    asked = None
    if prompts:
        given = [prompt for source in prompts for prompt in load_prompts(source, limit).prompts]
        asked = [[*map(dict, prompt.history), {"role": "user", "content": prompt.turns[0]}] for prompt in given]
        samples = min(samples, len(asked))
    # The coupled rule samples at the least cost, and its texts do not depend on the batch.
    decoder = Decoder(load_target(model, dtype, device, packed), rule="coupled")
    with progress_bar() as progress:

        def on_chunk(written: Written) -> None:
            progress(written.tried, samples, f"{written.tokens:,} tokens")

        try:
            written = run(decoder, output, writing, prompts=asked, on_chunk=on_chunk)
        except OSError as error:
            raise InvalidRequest(f"cannot write {str(output)!r}: {error}") from error
    if json_output:
        print_json({"file": str(output), **written._asdict()})
        return
    remark(
        f"{written.kept} conversations, {written.tokens:,} tokens of answers; {written.repeated} repeated and "
        f"{written.dropped} unusable ones left out"
    )
    out.print(str(output), markup=False, soft_wrap=True)
