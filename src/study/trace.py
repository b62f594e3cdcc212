"""Recording a run: every round's tree, probabilities, verdict and times, as plain JSON.

While the engine's clock runs only references are noted; they are read when it hands over the round, which is off the
clock. Nothing is drawn and nothing is changed, so that the text is the one of an unwatched run. The module knows
neither drafters nor rules; study/explain.py makes a page of what it records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.checks import whole_number
from ..core.drafter import Observation
from ..core.engine import Engine
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal, Verdict
from ..core.request import Prompt, as_list, kept
from ..core.rule import RandomSource, Rule
from ..core.state import DecodeState, Row
from ..core.stats import Seconds
from ..core.target import Target
from ..core.tree import ROOT
from ..decoder import Decoder, Generation
from .environment import environment

FORMAT, VERSION = "draftwood-trace", 1
DETAILED_ROUNDS = 2000
"""Rounds of which the trees are kept; a longer run goes on with times and committed tokens alone."""
TOP = 5
WARM_UP_TOKENS = 4

Trace = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """A recorded run.

    Attributes:
        texts: what was generated.
        trace: the recording; plain JSON.
    """

    texts: list[Generation]
    trace: Trace


def record(
    decoder: Decoder,
    prompts: Prompt | Sequence[Prompt],
    *,
    batch_size: int = 8,
    plain: bool = True,
    rounds: int = DETAILED_ROUNDS,
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Recorded:
    """Generates as `decoder.generate` does, and records it.

    A few tokens are generated first, so that what is measured does not contain the start of the machine.

    Args:
        decoder: what generates.
        prompts: a prompt or a list of them.
        batch_size: most texts decoded at once.
        plain: also decode the same prompts without a draft, for its clock.
        rounds: rounds that are recorded in full; 0 keeps times and committed tokens alone.
        about: what the caller wants written down with the settings, such as names of model, drafter and rule.
        **settings: as of `Decoder.generate`.

    Raises:
        InvalidRequest: a prompt or a setting that cannot work.
    """
    many = as_list(prompts)[1]
    whole_number("batch_size", batch_size)
    whole_number("rounds", rounds, 0)
    settings = {name: kept(value) for name, value in settings.items()}
    done, seconds, taken = _run(decoder, many, batch_size, settings, rounds)
    trace = {
        "format": FORMAT,
        "version": VERSION,
        "settings": _plain({**(about or {}), "batch_size": batch_size, **settings}),
        "environment": _plain(environment(decoder.target)),
        "rule": _describe(decoder.engine(done).rule, done),
        "rows": [_row(row, decoder.target) for row in done],
        "rounds": taken,
        "seconds": asdict(seconds),
        "plain": None,
    }
    if plain:
        bare = Decoder(decoder.target, registry=decoder.registry)
        done_plainly, plain_seconds, plainly = _run(bare, many, batch_size, settings, 0, decoder.engine(done).rule)
        trace["plain"] = {
            "rows": [_row(row, decoder.target) for row in done_plainly],
            "rounds": plainly,
            "seconds": asdict(plain_seconds),
        }
    return Recorded([_generation(row, decoder.target) for row in done], trace)


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Writes a recording.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(trace, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot write the recording {str(path)!r}: {error}") from error
    return Path(path)


def load_trace(path: str | Path) -> Trace:
    """Reads a recording.

    Raises:
        InvalidRequest: there is none, it is something else, or another version wrote it.
    """
    try:
        held = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise InvalidRequest(f"no recording at {str(path)!r}: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"{str(path)!r} is no recording of `draftwood generate --trace`: {error}") from error
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        raise InvalidRequest(f"{str(path)!r} is no recording of `draftwood generate --trace`")
    if held.get("version") != VERSION:
        raise InvalidRequest(
            f"{str(path)!r} is a recording of version {held.get('version')!r}; this release reads version {VERSION}: "
            "record the run again"
        )
    if missing := [
        name for name in ("settings", "environment", "rule", "rows", "rounds", "seconds") if name not in held
    ]:
        raise InvalidRequest(f"the recording {str(path)!r} lacks {missing[0]!r}")
    return held


class _Ear:
    """A rule and the engine's watch in one: notes what the rule judged and what became of it."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.lossless, self.drafts, self.samples = rule.lossless, rule.drafts, rule.samples
        self._logits: Tensor | None = None
        self.heard: tuple[list[Row], Observation, Tensor] | None = None

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        self._logits = logits
        return self._rule.verify(proposal, logits, sources, positions)

    def watch(self, state: DecodeState, seen: Observation) -> None:
        if self._logits is not None:
            self.heard = [state.rows[row] for row in seen.rows], seen, self._logits
            self._logits = None


def _describe(rule: Rule, rows: Sequence[Row]) -> dict[str, Any]:
    """Returns what a reader must know of the rule that `auto` may have chosen, and whether the texts are drawn."""
    greedy = all(row.pipeline.greedy for row in rows)
    return {"name": type(rule).__name__, "lossless": rule.lossless, "greedy": greedy}


def _run(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    batch_size: int,
    settings: Mapping[str, Any],
    detailed: int,
    rule: Rule | None = None,
) -> tuple[list[Row], Seconds, list[dict[str, Any]]]:
    """Decodes twice, a few tokens and then all; returns rows, seconds and rounds of the second run."""
    for short in (True, False):
        seconds = Seconds()
        asked = {name: value for name, value in settings.items() if not short or name != "stopping_criteria"}
        rows = decoder.rows(prompts, asked, None, seconds)
        if short:
            for row in rows:
                row.stopper = row.stopper.for_row(min(row.max_tokens, row.prompt_length + WARM_UP_TOKENS))
        engine = decoder.engine(rows)
        engine.rule = rule or engine.rule
        rounds = _listen(engine, rows, batch_size, seconds, detailed)
    return rows, seconds, rounds


def _listen(
    engine: Engine, rows: Sequence[Row], batch_size: int, seconds: Seconds, detailed: int
) -> list[dict[str, Any]]:
    ear = _Ear(engine.rule)
    engine.rule, engine.watch = ear, ear.watch
    piece = pieces(engine.target, rows[0].tokens[-1])
    rounds: list[dict[str, Any]] = []
    before = asdict(seconds)
    for _ in engine.decode(rows, batch_size, seconds):
        if ear.heard is None:  # a further row of the same round
            continue
        now = asdict(seconds)
        phases = {name: round(now[name] - before[name], 7) for name in now if name != "total"}
        entry = {"at": round(before["total"], 7), "end": round(now["total"], 7), "seconds": phases}
        before = now
        rounds.append(entry | {"rows": _read(*ear.heard, piece if len(rounds) < detailed else None)})
        ear.heard = None
    return rounds


@torch.inference_mode()
def _read(
    rows: Sequence[Row], seen: Observation, logits: Tensor, piece: Callable[[int], str | None] | None
) -> list[dict[str, Any]]:
    """Returns what one round did to its rows; trees and probabilities only where `piece` says how tokens read."""
    verdict, tree, law = seen.verdict, seen.proposal.tree, seen.proposal.law
    entries: list[dict[str, Any]] = [
        {"row": row.key, "path": path, "committed": tokens}
        for row, path, tokens in zip(rows, verdict.paths, verdict.tokens, strict=True)
    ]
    if piece is None:
        return entries
    p = torch.softmax(logits.float(), -1)  # [rows, 1 + nodes, vocabulary]
    drafted, parents = tree.to_lists()
    candidate = None if tree.candidate is None else tree.candidate.tolist()
    for index, (entry, tokens, above) in enumerate(zip(entries, drafted, parents, strict=True)):
        nodes = torch.tensor(tokens, dtype=torch.int64, device=p.device)
        places = torch.tensor(above, dtype=torch.int64, device=p.device) + 1
        entry["tree"] = {
            "tokens": tokens,
            "parents": above,
            "candidate": [True] * len(tokens) if candidate is None else candidate[index][: len(tokens)],
            "text": [piece(token) for token in tokens],
            "p": _numbers(p[index, places, nodes]),
            "q": None if law is None else _numbers(law[index, : len(tokens)].gather(1, nodes[:, None])[:, 0]),
        }
        entry["pieces"] = [piece(token) for token in entry["committed"]]
        entry["decided"] = _decided(entry, p[index], None if law is None else law[index], piece)
    return entries


def _decided(
    entry: Mapping[str, Any], p: Tensor, law: Tensor | None, piece: Callable[[int], str | None]
) -> dict[str, Any]:
    """Returns p and q at the node that ended the round: the last accepted one, whose children were all refused.

    q is the law of its first candidate child, the one that was judged first.
    """
    node = entry["path"][-1] if entry["path"] else ROOT
    tree = entry["tree"]
    children = [child for child, parent in enumerate(tree["parents"]) if parent == node and tree["candidate"][child]]
    q = None if law is None or not children else _top(law[children[0]], piece)
    return {"node": node, "children": children, "p": _top(p[1 + node], piece), "q": q}


def _top(law: Tensor, piece: Callable[[int], str | None]) -> list[list[Any]]:
    """Returns the likeliest tokens as [token, text, probability]."""
    best = law.float().topk(min(TOP, law.shape[-1]))
    pairs = zip(best.indices.tolist(), _numbers(best.values), strict=True)
    return [[token, piece(token), chance] for token, chance in pairs]


def pieces(target: Target, anchor: int) -> Callable[[int], str | None]:
    """Returns what tells how a token reads inside a text; None without a tokenizer.

    Args:
        target: whose tokenizer is asked.
        anchor: a token that is put before, since some tokenizers drop the space at a text's beginning.
    """
    tokenizer, known = target.tokenizer, dict[int, str]()
    if tokenizer is None:
        return lambda token: None
    before = str(tokenizer.decode([anchor]))

    def piece(token: int) -> str:
        if token not in known:
            both = str(tokenizer.decode([anchor, token]))
            known[token] = both[len(before) :] if both.startswith(before) else str(tokenizer.decode([token]))
        return known[token]

    return piece


def _row(row: Row, target: Target) -> dict[str, Any]:
    prompt, piece = row.tokens[: row.prompt_length], pieces(target, row.tokens[row.prompt_length - 1])
    return {
        "row": row.key,
        "prompt": prompt,
        "prompt_text": None if target.tokenizer is None else str(target.tokenizer.decode(prompt)),
        "tokens": row.output,
        "pieces": [piece(token) for token in row.output],
        "text": _text(row, target),
        "stop_reason": row.stop_reason or "length",
        "tau": row.stats.tau,
        "acceptance_by_depth": row.stats.acceptance_by_depth,
    }


def _generation(row: Row, target: Target) -> Generation:
    return Generation(_text(row, target), row.output, row.stop_reason or "length", row.prompt_length, row.stats)


def _text(row: Row, target: Target) -> str:
    return "" if target.tokenizer is None else str(target.tokenizer.decode(row.output, skip_special_tokens=True))


def _numbers(values: Tensor) -> list[float | None]:
    """Returns probabilities to six places; None for what is no number."""
    return [round(value, 6) if math.isfinite(value) else None for value in values.tolist()]


def _plain(value: Any) -> Any:
    """Returns what JSON can hold; anything else, a caller's own stopping criterion say, as text."""
    return json.loads(json.dumps(value, default=str))
