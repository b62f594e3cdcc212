"""One target with every drafter of a study, ready to run cells."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from ..core.errors import DraftwoodError
from ..core.registry import Registry
from ..core.rule import SeededSource
from ..core.stats import RowStats
from ..core.target import Target
from ..decoder import Decoder, Generation
from .agreement import compare_texts, measure_noise
from .cell import Cell
from .environment import PeakMemory, environment
from .prompts import StudyPrompt
from .spec import DrafterSpec
from .store import Record
from .watch import RoundCounts, Watched

_logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
NOISE_PROMPTS = 4
"""On how many prompts the disagreement of wide and narrow passes is measured."""


class Bench:
    """The decoders of one target and one rule.

    A drafter that cannot be bound stays in the study, as an error.

    Args:
        target: the target.
        specs: the drafters, `none` among them.
        rule: name of the acceptance rule.
        registry: where names are looked up.
    """

    def __init__(self, target: Target, specs: Sequence[DrafterSpec], rule: str, registry: Registry) -> None:
        self.target, self.rule = target, rule
        self._decoders: dict[str, Decoder | str] = {}
        self._watched: dict[str, Watched] = {}
        self._warm: set[str] = set()
        self._noise: list[float] = []
        # Both rules that `auto` stands for are lossless.
        self._lossless = rule == "auto" or bool(registry.create_rule(rule).lossless)
        for spec in specs:
            try:
                drafter = Watched(spec.built or registry.create_drafter(spec.name, dict(spec.options)))
                decoder = Decoder(target, drafter, rule=rule, registry=registry)
                self._decoders[spec.label] = decoder
                self._watched[spec.label] = cast("Watched", decoder.drafter)
            except Exception as error:  # noqa: BLE001 (a study outlives whatever one drafter raises)
                self._decoders[spec.label] = _describe(error)

    def run(self, cell: Cell, labels: Sequence[str]) -> Record:
        """Runs the given drafters on a cell, turn by turn, in an order that rotates from cell to cell.

        Args:
            cell: conditions and prompts.
            labels: of the drafters; `none` must be among them.

        Returns:
            The record of the cell: conditions, environment, the token ids of the prompts by turn and row, and one run
            a drafter and turn.
        """
        runs: list[dict[str, Any]] = []
        asked: list[list[list[int]]] = []
        answers: list[list[str]] = [[] for _ in cell.prompts]
        for turn in range(min(len(prompt.turns) for prompt in cell.prompts)):
            try:
                prompts = [self._encode(*pair, cell, turn) for pair in zip(cell.prompts, answers, strict=True)]
            except DraftwoodError as error:
                runs += [{"drafter": label, "turn": turn, "error": _describe(error)} for label in labels]
                break
            asked.append(prompts)
            taken = self._turn(cell, turn, prompts, labels)
            runs += taken
            plain = next(run for run in taken if run["drafter"] == "none")
            if "error" in plain:
                break
            for said, tokens in zip(answers, plain["tokens"], strict=True):
                said.append(self._decode(tokens))
        return {
            "key": cell.key,
            "conditions": asdict(cell.conditions),
            "prompt_set": cell.prompt_set,
            "category": cell.category,
            "prompts": cell.prompt_ids,
            "asked": asked,
            "repeat": cell.repeat,
            "lossless": self._lossless,
            "drafters": list(labels),
            "runs": runs,
            "environment": environment(self.target),
        }

    def _turn(self, cell: Cell, turn: int, prompts: list[list[int]], labels: Sequence[str]) -> list[dict[str, Any]]:
        start = cell.index % len(labels)
        order = [*labels[start:], *labels[:start]]
        if cell.recheck:
            order.append("none")
        runs: list[dict[str, Any]] = []
        for label in order:
            run = {"drafter": label, "turn": turn, "again": any(run["drafter"] == label for run in runs)}
            runs.append(run | self._measure(label, cell, prompts))
        self._judge(cell, prompts, runs)
        return runs

    def _measure(self, label: str, cell: Cell, prompts: list[list[int]]) -> dict[str, Any]:
        """Runs one drafter on one batch; the result is plain data."""
        decoder = self._decoders[label]
        if isinstance(decoder, str):
            return {"error": decoder}
        settings: dict[str, Any] = {
            "temperature": cell.conditions.temperature,
            "seed": cell.conditions.seed + cell.repeat,
        }
        count, size = cell.conditions.max_new_tokens, len(prompts)
        try:
            if label not in self._warm:
                decoder.generate(prompts, batch_size=size, max_new_tokens=min(WARM_UP_TOKENS, count), **settings)
                self._warm.add(label)
            self._watched[label].counts()
            memory = PeakMemory(self.target.device)
            texts: list[Generation] = decoder.generate(prompts, batch_size=size, max_new_tokens=count, **settings)
        except Exception as error:  # a study outlives whatever one drafter raises
            _logger.info("%s failed", label, exc_info=True)
            return {"error": _describe(error)}
        stats = RowStats().merge(text.stats for text in texts)
        counts = {name: value for name, value in asdict(stats).items() if name != "seconds"}
        return {
            "tokens": [text.tokens for text in texts],
            "stop_reasons": [text.stop_reason for text in texts],
            "prompt_tokens": [text.prompt_tokens for text in texts],
            "seconds": asdict(texts[0].stats.seconds),
            **counts,
            **_plain(self._watched[label].counts()),
            "peak_bytes": memory.read(),
        }

    def _judge(self, cell: Cell, prompts: list[list[int]], runs: list[dict[str, Any]]) -> None:
        """Adds to each run how its texts agree with plain decoding's, where the two must agree."""
        plain = next((run for run in runs if run["drafter"] == "none" and "tokens" in run), None)
        if plain is None or not (cell.conditions.temperature == 0 or self.rule == "coupled"):
            return
        if len(self._noise) < NOISE_PROMPTS:
            self._noise.append(measure_noise(self.target, prompts[0], plain["tokens"][0]))
        for run in runs:
            if run is not plain and "tokens" in run:
                run["agreement"] = [
                    asdict(self._compare(cell, row, prompt, plain["tokens"][row], run["tokens"][row]))
                    for row, prompt in enumerate(prompts)
                ]

    def _compare(self, cell: Cell, row: int, prompt: list[int], plain: list[int], text: list[int]) -> Any:
        temperature = cell.conditions.temperature
        source = SeededSource(cell.conditions.seed + cell.repeat, row) if temperature > 0 else None
        noise = max(self._noise)
        return compare_texts(self.target, prompt, plain, text, noise, temperature=temperature, source=source)

    def _encode(self, prompt: StudyPrompt, answers: Sequence[str], cell: Cell, turn: int) -> list[int]:
        """Returns the token ids of a turn: everything said before it, plain decoding's answers included."""
        decoder = self._decoders["none"]
        if isinstance(decoder, str):
            raise DraftwoodError(decoder)
        if prompt.tokens is not None:
            return decoder.encode(prompt.tokens)
        turns = prompt.turns[: turn + 1]
        if not cell.conditions.chat:
            said = [part for pair in zip(turns, answers, strict=False) for part in pair]
            return decoder.encode("\n".join([*(str(m["content"]) for m in prompt.history), *said, turns[-1]]))
        chat: list[Mapping[str, str]] = list(prompt.history)
        for question, answer in zip(turns, answers, strict=False):
            chat += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return decoder.encode([*chat, {"role": "user", "content": turns[-1]}])

    def _decode(self, tokens: list[int]) -> str:
        tokenizer = self.target.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))


def _plain(counts: RoundCounts) -> dict[str, Any]:
    """Returns counts as JSON keeps them: a table of passes in place of a dict with numbers for keys."""
    return {**asdict(counts), "passes": [[width, *total] for width, total in sorted(counts.passes.items())]}


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
