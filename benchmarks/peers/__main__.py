"""Runs all libraries side by side on the packaged model and prompts.

    python -m benchmarks.peers [--only prompt-lookup] [--prompts 4] [--tokens 48] [--medusa DIR] [--eagle3 DIR]

On every prompt the entries of a method take turns, each prompt starting with another one. Each run is a JSON line in
`runs.jsonl`; the table is printed and in `table.md`. What fails is a row with its error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import draftwood as dw
from draftwood.core.loading import DEMO_MODEL, load_model
from draftwood.study.default_prompts import PACKAGED

from .assets import gather, packaged_gguf, save_gguf, save_model
from .methods import OURS, PACKED, PEERS, Assets, Entry, entries
from .protocol import ROOT, PeerError, Worker
from .table import markdown

WARM_UP = 8
WORKERS = {
    "draftwood": ("run_draftwood", None),
    "transformers": ("run_transformers", None),
    "economize": ("run_economize", ".venv-peers-economize"),
    "flashspec": ("run_flashspec", ".venv-peers-flashspec"),
    "llama-cpp-python": ("run_llama_cpp", ".venv-peers-llama"),
}
"""Module and virtual environment of each library; None is this one."""


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    given.out /= Path(given.model).name  # what is made of a model is kept for the next run
    given.out.mkdir(parents=True, exist_ok=True)
    model = save_model(given.model, given.out / "model")
    tokenizer = load_model(model)[1]
    target = dw.Target.from_pretrained(str(model))
    decoder = dw.Decoder(target)
    chats = [[{"role": "user", "content": text}] for _, text in PACKAGED[:: max(len(PACKAGED) // given.prompts, 1)]]
    prompts = [decoder.encode(chat if tokenizer.chat_template else chat[0]["content"]) for chat in chats]
    layers = {"exit_layer": given.exit_layer or target.layers // 2, "skip": given.skip or default_skip(target.layers)}
    assets = gather(model, given.out, given.draft_model, given.medusa, given.eagle3, **layers)
    del target, decoder
    chosen = [entry for entry in entries(assets) if asked_for(entry, given)]
    with (given.out / "runs.jsonl").open("w", encoding="utf-8") as log, ExitStack() as stack:
        show(log, about(given, assets))
        runs = []
        for run in measure(chosen, prompts[: given.prompts], given, model, stack):
            show(log, run)
            runs.append(run)
    table = markdown(runs)
    (given.out / "table.md").write_text(table, encoding="utf-8")
    print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL, help="the packaged one, or a directory")
    parser.add_argument("--only", action="append", choices=list(PEERS), help="a method; all by default")
    parser.add_argument("--peer", action="append", choices=list(WORKERS), help="a library beside ours; all by default")
    parser.add_argument("--prompts", type=int, default=len(PACKAGED), help="spread over the packaged ones")
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--draft-model", type=Path, default=shipped("draft-model"), help="a directory")
    parser.add_argument("--medusa", type=Path, default=shipped("medusa"), help="heads, in a layout that we read")
    parser.add_argument("--eagle3", type=Path, default=shipped("eagle3"), help="a head in the authors' layout")
    parser.add_argument("--exit-layer", type=int, help="blocks that early exit runs; half of them by default")
    parser.add_argument("--skip", type=lambda text: tuple(map(int, text.split(","))), help="blocks to skip, from 0")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "peers", help="directory for all that is written")
    return parser.parse_args()


def shipped(name: str) -> Path | None:
    """Returns where the heads or the draft model of the packaged model are, if they are there."""
    place = ROOT / "heads" / "smollm2-135m-instruct" / name
    return place if place.is_dir() else None


def default_skip(layers: int) -> tuple[int, ...]:
    """Returns one block in four behind the first third."""
    return tuple(range(layers // 3, layers - 2, 4)) or (layers // 2,)


def asked_for(entry: Entry, given: argparse.Namespace) -> bool:
    libraries = {peer.split(",")[0] for peer in PEERS[entry.method]} & {*(given.peer or WORKERS)}
    ours = entry.peer in (OURS, PACKED) and bool(libraries)
    return entry.method in (given.only or PEERS) and (ours or entry.worker in libraries)


def about(given: argparse.Namespace, assets: Assets) -> dict[str, Any]:
    """What a reader needs to know of the run."""
    names = ("torch", "transformers")
    return {
        "about": {
            **{name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()},
            "exit_layer": assets.exit_layer,
            "skip": assets.skip,
            "draft_model": assets.draft_model.name,
            "dtype": "float32",
            "machine": platform.processor() or platform.machine(),
            "versions": {name: version(name) for name in names},
        }
    }


def show(log: Any, run: dict[str, Any]) -> None:
    log.write(json.dumps(run) + "\n")
    log.flush()
    line = {name: value for name, value in run.items() if name != "tokens"}
    print(json.dumps(line), file=sys.stderr, flush=True)


def measure(
    chosen: Sequence[Entry], prompts: Sequence[list[int]], given: argparse.Namespace, model: Path, stack: ExitStack
) -> Iterator[dict[str, Any]]:
    """Yields a run of each entry on each prompt, or its error, once.

    What text is the right one, transformers' plain `generate` tells.
    """
    workers: dict[str, Worker | PeerError] = {}
    alive: list[Entry] = []
    for entry in chosen:
        try:
            if entry.missing:
                raise PeerError(entry.missing)
            worker = started(entry.worker, workers, given, model, stack)
            worker.ask(load=entry.label, method=entry.name, options=entry.options)
            worker.ask(run=entry.label, prompt=prompts[0], max_new_tokens=WARM_UP)
            alive.append(entry)
        except PeerError as error:
            yield {"method": entry.method, "peer": entry.peer, "error": str(error)}
    reference = started("transformers", workers, given, model, stack)
    reference.ask(load="reference", method="none", options={})
    for repeat in range(given.repeats):
        for index, prompt in enumerate(prompts):
            plain = reference.ask(run="reference", prompt=prompt, max_new_tokens=given.tokens)["tokens"]
            for entry in in_turn(alive, index + repeat):
                run: dict[str, Any] = {"method": entry.method, "peer": entry.peer}
                worker = started(entry.worker, workers, given, model, stack)
                try:
                    got = worker.ask(run=entry.label, prompt=prompt, max_new_tokens=given.tokens)
                except PeerError as error:
                    alive.remove(entry)
                    yield run | {"error": str(error)}
                    continue
                run |= {"prompt": index, "repeat": repeat, "prompt_tokens": len(prompt)}
                yield run | got | {"count": len(got["tokens"]), "same": got["tokens"] == plain}


def started(
    name: str, workers: dict[str, Worker | PeerError], given: argparse.Namespace, model: Path, stack: ExitStack
) -> Worker:
    """Returns a library's worker, which is started when it is first asked for.

    Raises:
        PeerError: it could not be started.
    """
    if name not in workers:
        module, place = WORKERS[name]
        python = sys.executable if place is None else str(ROOT / place / "bin" / "python")
        try:
            if name == "llama-cpp-python":
                model = gguf_of(given, model)
            command = [python, "-m", f"benchmarks.peers.{module}", str(model), str(given.threads)]
            worker = Worker(command, given.out / f"{name}.log", given.threads)
            stack.callback(worker.close)
            workers[name] = worker
        except PeerError as error:
            workers[name] = error
    found = workers[name]
    if isinstance(found, PeerError):
        raise found
    return found


def gguf_of(given: argparse.Namespace, model: Path) -> Path:
    """Returns the model as GGUF.

    Raises:
        PeerError: it is not the packaged one, whose file everything but the weights is taken from; or that failed.
    """
    if given.model != DEMO_MODEL:
        raise PeerError(f"needs a GGUF file, which there is of the model {DEMO_MODEL!r} alone")
    try:
        return save_gguf(model, packaged_gguf(), given.out / "model-f32.gguf")
    except Exception as error:
        raise PeerError(f"no GGUF file could be written: {type(error).__name__}: {error}") from error


def in_turn(alive: Sequence[Entry], turn: int) -> list[Entry]:
    """Returns the entries by method; who comes first in a method goes round with the turns."""
    ordered = []
    for method in dict.fromkeys(entry.method for entry in alive):
        some = [entry for entry in alive if entry.method == method]
        start = turn % len(some)
        ordered += [*some[start:], *some[:start]]
    return ordered


if __name__ == "__main__":
    main()
