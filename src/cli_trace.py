"""Recordings on the command line: `generate --trace` and `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .cli_common import out
from .core.errors import InvalidRequest
from .core.request import Prompt
from .decoder import Decoder, Generation
from .study.explain import explain_parameters, explain_trace
from .study.trace import load_trace, record, save_trace

TraceFile = Annotated[
    Path | None,
    typer.Option(help="Record each round to this file, and plain decoding of the same prompt; for `explain`."),
]

DEFAULT_PAGE = "explain.html"


def check_trace_file(path: Path | None) -> None:
    """Refuses at once a file that could not be written after the run.

    Raises:
        InvalidRequest: it is a directory, or its own directory is missing.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise InvalidRequest(f"cannot write to {str(path)!r}: give a file in a directory that exists")


def record_to(
    path: Path, decoder: Decoder, prompt: Prompt, settings: Mapping[str, Any], about: Mapping[str, Any]
) -> Generation:
    """Generates one text, records it to `path` and returns it."""
    recorded = record(decoder, prompt, about=about, **settings)
    save_trace(recorded.trace, path)
    return recorded.texts[0]


def explain(
    recording: Annotated[
        Path | None, typer.Argument(help="A recording of `generate --trace`; none to choose alpha, gamma and c.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--out", help="The page.  [default: the recording's name with .html, or explain.html]"),
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Probability that a drafted token is accepted.")] = None,
    gamma: Annotated[int | None, typer.Option(help="Tokens drafted a round.")] = None,
    c: Annotated[float | None, typer.Option("--c", help="Cost of a draft step over a pass of the target.")] = None,
) -> None:
    """Write a page on which a recorded run, or one made up from alpha, gamma and c, can be stepped through."""
    chosen = {name: value for name, value in (("alpha", alpha), ("gamma", gamma), ("c", c)) if value is not None}
    if recording is None and not chosen:
        raise InvalidRequest("give a recording of `draftwood generate --trace`, or --alpha, --gamma and --c")
    if recording is not None and chosen:
        raise InvalidRequest(f"give a recording or --{next(iter(chosen))}, not both")
    written = explain_parameters(**chosen) if recording is None else explain_trace(load_trace(recording))  # type: ignore[arg-type]
    place = page or (Path(DEFAULT_PAGE) if recording is None else recording.with_suffix(".html"))
    if recording is not None and place.resolve() == recording.resolve():
        raise InvalidRequest(f"the page would overwrite the recording {str(recording)!r}; give another --out")
    try:
        place.write_text(written, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write the page {str(place)!r}: {error}") from error
    out.print(str(place), markup=False, soft_wrap=True)
