"""Runs a study: every drafter in turn on every prompt, cell by cell.

The order of the drafters rotates from cell to cell, so that a machine that warms up, slows down or is shared treats
all alike; each is paired with plain decoding of the very same prompts, minutes at most apart. This module measures; it
sums nothing up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import InvalidRequest
from ..core.registry import Registry
from ..core.target import Target
from ..plugins import load_registry
from .bench import Bench
from .cell import Cell, Conditions, plan
from .environment import default_device
from .prompts import PromptSet, load_prompts
from .report import Report
from .spec import DrafterSpec, as_specs, unique
from .store import Store

Progress = Callable[[int, int, str], None]
"""Called with cells done, cells in all and what is being done."""


def compare(
    target: Target | str | Path | Sequence[Target | str | Path],
    drafters: Sequence[Any] = ("prompt-lookup",),
    *,
    prompts: Any = None,
    limit: int | None = None,
    rules: Sequence[str] = ("auto",),
    temperatures: Sequence[float] = (0.0,),
    kinds: Sequence[tuple[str, float]] | None = None,
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 64,
    repeats: int = 1,
    seed: int = 0,
    chat: bool | None = None,
    dtype: str | None = None,
    device: str | None = None,
    packed: bool = False,
    directory: str | Path | None = None,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compares drafters on the same prompts; `none`, plain decoding, is always among them.

    Runs are interleaved, warmed up and paired by prompt. Speed is counted on decoding alone; reading the prompts is
    reported apart. A drafter that does not fit or fails is a row with its error.

    Args:
        target: a `Target`, what `Target.from_pretrained` takes, or a list of these.
        drafters: names (`"prompt-lookup:gamma=4"` too, and the grid `"prompt-lookup:gamma=4|8"`), (name, options)
            pairs or built `Drafter`s.
        prompts: a file, a list, a `PromptSet`, a list of `PromptSet`s, or None for the packaged prompts; see
            `load_prompts`.
        limit: most prompts of a set, taken from its categories in turn.
        rules: names of acceptance rules.
        temperatures: 0 is greedy.
        kinds: (rule, temperature) pairs, in place of every rule at every temperature.
        batch_sizes: how many prompts are decoded together.
        max_new_tokens: of each text.
        repeats: how often everything is run; the seed goes up by one each time.
        seed: of all randomness.
        chat: render prompts with the chat template; None does so where there is one.
        dtype: of targets that are loaded here.
        device: of targets that are loaded here; None takes this process's accelerator, if there is one.
        packed: whether targets that are loaded here multiply by packed weights; see `Target.from_pretrained`.
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
    specs = unique([spec for drafter in _listed("drafters", drafters) for spec in as_specs(drafter)])
    if kinds is None:
        kinds = list(itertools.product(_listed("rules", rules), _listed("temperatures", temperatures)))
    _check_plugins(registry, specs, kinds)
    sizes = [("a batch size", size) for size in _listed("batch_sizes", batch_sizes)]
    _check_counts([("max_new_tokens", max_new_tokens), ("repeats", repeats), *sizes])
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidRequest(f"seed must be a whole number, got {seed!r}")
    sets = _prompt_sets(prompts, limit)
    targets = [target] if isinstance(target, Target | str | Path) else _listed("target", target)
    store = Store(None if directory is None else Path(directory))
    keys: list[str] = []
    for place, one in enumerate(targets):
        loaded = one
        if not isinstance(loaded, Target):
            loaded = Target.from_pretrained(loaded, dtype=dtype, device=device or default_device(), packed=packed)
        common = Conditions.of(loaded, one, max_new_tokens=max_new_tokens, seed=seed, chat=chat)
        conditions = [
            replace(common, rule=rule, temperature=float(temperature), batch_size=batch_size)
            for rule, temperature in kinds
            for batch_size in batch_sizes
        ]
        cells = [cell for given in conditions for cell in plan(given, sets, repeats)]
        keys += [cell.key for cell in cells]
        _run(loaded, cells, specs, store, registry, _part(progress, place, len(targets)))
    return Report(store.records(keys, {spec.label for spec in specs}))


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


def _check_plugins(registry: Registry, specs: Iterable[DrafterSpec], kinds: Iterable[tuple[str, float]]) -> None:
    """Refuses at once what could only fail, before a model is loaded."""
    for spec in specs:
        if spec.built is None:
            registry.create_drafter(spec.name, dict(spec.options))
    for rule, temperature in kinds:
        number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
        if not (number and 0 <= temperature < math.inf):
            raise InvalidRequest(f"a temperature must be a number >= 0, got {temperature!r}")
        if rule != "auto" and not registry.create_rule(rule).samples and temperature > 0:
            raise InvalidRequest(
                f"the rule {rule!r} takes the most likely token: it has no meaning at temperature {temperature:g}; "
                "use temperature 0, or the rule auto, coupled or rejection"
            )


def _check_counts(counts: Iterable[tuple[str, Any]]) -> None:
    for name, value in counts:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidRequest(f"{name} must be a whole number >= 1, got {value!r}")


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable) or not (listed := list(values)):
        raise InvalidRequest(f"{name} must be a non-empty list, got {values!r}")
    return listed
