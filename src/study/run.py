"""Runs a study: every drafter in turn on every prompt, cell by cell.

The order of the drafters rotates from cell to cell, so that a machine that warms up, slows down or is shared treats
all alike; each is paired with plain decoding of the very same prompts, minutes at most apart. This module measures; it
sums nothing up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import InvalidRequest
from ..core.registry import Registry
from ..core.target import Target
from ..plugins import load_registry
from .bench import Bench
from .cell import Cell, Conditions, plan
from .prompts import PromptSet, load_prompts
from .report import Report
from .spec import DrafterSpec, as_spec, unique
from .store import Store

Progress = Callable[[int, int, str], None]
"""Called with cells done, cells in all and what is being done."""


def compare(
    target: Target | str | Sequence[Target | str],
    drafters: Sequence[Any] = ("prompt-lookup",),
    *,
    prompts: Any = None,
    limit: int | None = None,
    rules: Sequence[str] = ("auto",),
    temperatures: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 64,
    repeats: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    dtype: str | None = None,
    directory: str | Path | None = None,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compares drafters on the same prompts; `none`, plain decoding, is always among them.

    Runs are interleaved, warmed up and paired by prompt. Speed is counted on decoding alone; reading the prompts is
    reported apart. A drafter that does not fit or fails is a row with its error.

    Args:
        target: a `Target`, what `Target.from_pretrained` takes, or a list of these.
        drafters: names, (name, options) pairs or built `Drafter`s.
        prompts: a file, a list, a `PromptSet`, a list of `PromptSet`s, or None for the packaged prompts; see
            `load_prompts`.
        limit: most prompts of a set, taken from its categories in turn.
        rules: names of acceptance rules.
        temperatures: 0 is greedy.
        batch_sizes: how many prompts are decoded together.
        max_new_tokens: of each text.
        repeats: how often everything is run; the seed goes up by one each time.
        seed: of all randomness.
        chat: render prompts with the chat template; None does so where there is one.
        dtype: of targets that are loaded here.
        directory: where finished cells are kept; a study that was killed goes on there, and several processes may
            share it. None keeps them in memory.
        registry: plugins to choose from; the built-in and installed ones when None.
        progress: told how far it is.

    Raises:
        InvalidRequest: a setting or an option that cannot work.
        UnknownName: no such drafter or rule.
        ModelNotFound: no such target.
    """
    registry = registry or load_registry()
    specs = unique([as_spec(drafter) for drafter in drafters])
    _check(registry, specs, rules, temperatures=temperatures, batch_sizes=batch_sizes, counts=(max_new_tokens, repeats))
    sets = _prompt_sets(prompts, limit)
    store = Store(None if directory is None else Path(directory))
    targets = [target] if isinstance(target, Target | str) else list(target)
    keys: list[str] = []
    for place, one in enumerate(targets):
        loaded = one if isinstance(one, Target) else Target.from_pretrained(one, dtype=dtype)
        conditions = [
            Conditions.of(loaded, one, rule, temperature, batch_size, max_new_tokens, seed, chat)
            for rule in rules
            for temperature in temperatures
            for batch_size in batch_sizes
        ]
        cells = [cell for given in conditions for cell in plan(given, sets, repeats)]
        keys += [cell.key for cell in cells]
        _run(loaded, cells, specs, store, registry, _part(progress, place, len(targets)))
    return Report(store.records(keys))


def _run(
    target: Target,
    cells: Sequence[Cell],
    specs: Sequence[DrafterSpec],
    store: Store,
    registry: Registry,
    progress: Progress,
) -> None:
    """Runs all cells of one target. A cell that another process is at is looked at again in the end."""
    waiting, done, wait = list(cells), 0, False
    bench: Bench | None = None
    while waiting:
        elsewhere = []
        for cell in waiting:
            with store.claim(cell.key, wait=wait) as claimed:
                if not claimed:
                    elsewhere.append(cell)
                    continue
                finished = store.finished(cell.key)
                missing = [spec.label for spec in specs if spec.label not in finished]
                if missing:
                    progress(done, len(cells), f"{cell.category}: {', '.join(cell.prompt_ids)}")
                    if bench is None or bench.rule != cell.conditions.rule:
                        bench = None  # the drafters of one rule at a time are in memory
                        bench = Bench(target, specs, cell.conditions.rule, registry)
                    store.append(bench.run(cell, ["none", *(label for label in missing if label != "none")]))
                done += 1
                progress(done, len(cells), cell.category)
        waiting, wait = elsewhere, True


def _prompt_sets(prompts: Any, limit: int | None) -> list[PromptSet]:
    if isinstance(prompts, Sequence) and prompts and all(isinstance(one, PromptSet) for one in prompts):
        return [load_prompts(one, limit) for one in prompts]
    return [load_prompts(prompts, limit)]


def _part(progress: Progress | None, place: int, parts: int) -> Progress:
    """Maps the progress of one target to that of all."""

    def report(done: int, total: int, what: str) -> None:
        if progress is not None:
            progress(place * total + done, parts * total, what)

    return report


def _check(
    registry: Registry,
    specs: Iterable[DrafterSpec],
    rules: Sequence[str],
    *,
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
    counts: tuple[int, int],
) -> None:
    """Refuses at once what could only fail, before a model is loaded."""
    for spec in specs:
        if spec.built is None:
            registry.create_drafter(spec.name, dict(spec.options))
    for rule in rules:
        if rule != "auto":
            registry.create_rule(rule)
    for name, values in (("rules", rules), ("temperatures", temperatures), ("batch_sizes", batch_sizes)):
        if isinstance(values, str) or not values:
            raise InvalidRequest(f"{name} must be a non-empty list, got {values!r}")
    for temperature in temperatures:
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or temperature < 0:
            raise InvalidRequest(f"a temperature must be a number >= 0, got {temperature!r}")
    for name, value in (
        ("max_new_tokens", counts[0]),
        ("repeats", counts[1]),
        *(("batch size", b) for b in batch_sizes),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequest(f"{name} must be an integer >= 1, got {value!r}")
