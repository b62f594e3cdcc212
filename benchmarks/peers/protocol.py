"""How a library is asked to decode: JSON lines over the pipes of a process of its own.

    {"load": LABEL, "method": NAME, "options": {...}}    -> {"ready": true}
    {"run": LABEL, "prompt": [ids], "max_new_tokens": N} -> {"tokens": [ids], "seconds": S, "rounds": R, "committed": C}
    anything that goes wrong                             -> {"error": "Kind: message"}

This module runs in every virtual environment, so that it needs nothing but the standard library. `rounds` are
forwards of the target that may check a draft, and `committed` the tokens that came of them: where a library reads the
prompt in a forward of its own, neither counts that one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

ROOT = Path(__file__).parents[2]

Run = Callable[[list[int], int], tuple[list[int], int, int]]
"""Decodes (prompt, most new tokens) greedily to (new tokens, rounds, committed)."""
Method = Callable[[dict[str, Any]], Run]
"""Makes a method ready with its options."""


class PeerError(Exception):
    """A library could not do what it was asked; the message is its own."""


class Worker:
    """A library in a process of its own.

    Args:
        command: what to start; it calls `serve`.
        log: where its stderr goes, with all that the library prints.
        threads: that the process may use.
    """

    def __init__(self, command: Sequence[str], log: Path, threads: int) -> None:
        self._log = log.open("w", encoding="utf-8")
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                [*command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                cwd=ROOT,
                env={**os.environ, **limits, **quiet},
            )
        except OSError as error:
            self._log.close()
            raise PeerError(f"not installed: {error}") from error
        self._requests, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns the answer.

        Raises:
            PeerError: the library failed, or its process ended.
        """
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            self._log.flush()
            said = [line for line in Path(self._log.name).read_text(encoding="utf-8").splitlines() if line.strip()]
            raise PeerError(said[-1] if said else f"its process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        try:
            self._requests.close()  # a loop that waits for requests ends here
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._log.close()


def serve(methods: Mapping[str, Method]) -> None:
    """Answers requests until stdin ends; `methods` are those of the library, by name."""
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    loaded: dict[str, Run] = {}
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line), methods, loaded)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is its row in the table
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], methods: Mapping[str, Method], loaded: dict[str, Run]) -> dict[str, Any]:
    if "load" in request:
        if request["method"] not in methods:
            raise NotImplementedError(f"no method {request['method']!r}; known: {', '.join(methods)}")
        loaded[request["load"]] = methods[request["method"]](request["options"])
        return {"ready": True}
    run = loaded[request["run"]]
    start = time.perf_counter()
    tokens, rounds, committed = run(request["prompt"], request["max_new_tokens"])
    return {
        "tokens": tokens,
        "seconds": time.perf_counter() - start,
        "rounds": rounds,
        "committed": committed,
    }


def serve_on_torch(methods: Callable[[str], Mapping[str, Method]]) -> None:
    """Runs the worker of a library on torch, with the threads of its command line; `methods` loads the model."""
    import torch  # not in every environment that reads this module

    given = arguments()
    torch.set_num_threads(given.threads)
    serve(methods(given.model))


def arguments() -> argparse.Namespace:
    """Reads the command line of a worker: `model`, a directory or file, and `threads`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("threads", type=int)
    return parser.parse_args()
