"""Processes that a test starts: forked from one that has imported already what takes seconds to import.

That one holds no threads and no accelerator, which a fork of the test's own process might.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["draftwood.cli", "draftwood.training.loop", "transformers.models.llama.modeling_llama", "accelerate"]
)


def start(work: Callable[..., object], *arguments: Any, output: Path, threads: int = 1) -> ForkServerProcess:
    """Starts `work` in a process; what it writes goes to the files `output`.out and `output`.err."""
    process = _CONTEXT.Process(target=_run, args=(work, arguments, threads, output))
    process.start()
    return process


def command_line(*arguments: str) -> None:
    """Runs `draftwood` with these arguments."""
    from draftwood.cli import main

    sys.argv = ["draftwood", *arguments]
    main()


def _run(work: Callable[..., object], arguments: tuple[Any, ...], threads: int, output: Path) -> None:
    # A test run that was started in the background ignores interrupts, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(threads)
    for stream, ending in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(f"{output}{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    work(*arguments)
