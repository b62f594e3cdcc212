"""What the commands share: error handling, consoles, options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from .core.errors import DraftwoodError

# A file or a pipe has no width; rich would fold tables to 80 columns.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False)

Model = Annotated[
    str, typer.Argument(help="A directory, a hub id, a .gguf file, or `smollm2`, the packaged demo model.")
]
DType = Annotated[str | None, typer.Option(help="Type of the target's weights, such as bfloat16.")]
Device = Annotated[str | None, typer.Option(help="Where the target runs; default: the accelerator, if there is one.")]
Packed = Annotated[
    bool, typer.Option("--packed", help="Pack the weights: faster passes on a CPU, a little more memory.")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Commands(TyperGroup):
    """The commands, with every error on purpose in one line and exit code 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Runs a command line."""
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except Exception as error:
            # A wrong command line is an error of typer's or of click's, by typer's version; each can format itself.
            describe = getattr(error, "format_message", None)
            if describe is None and not isinstance(error, DraftwoodError):
                raise
            remark(f"draftwood: {' '.join((describe() if describe else str(error)).split())}")
            code = 2
        except KeyboardInterrupt:
            code = 130
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code


def remark(text: str) -> None:
    """Prints a line to stderr."""
    err.print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints a value as JSON to stdout; what JSON does not know becomes text."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar with the time left, on stderr."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    ]
    # Where there is no terminal, rich would end what it does not show with an empty line.
    with Progress(*columns, console=err, transient=True, disable=not err.is_interactive) as bar:
        task = bar.add_task("loading", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what[:60])

        yield report
