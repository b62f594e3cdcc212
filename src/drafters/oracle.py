"""The oracle: replays a recorded continuation, right as often and at such a cost as it is told.

It separates what the engine costs from what a model accepts: with it, a random-weight target of any size can be
benchmarked at any acceptance rate. The text stays the target's own, so no recording can change it. It knows the
recording and the committed length, nothing of the target.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.checks import real_number, whole_number
from ..core.drafter import Drafter
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal
from ..core.tree import TokenTree

if TYPE_CHECKING:
    from ..core.state import DecodeState, Row
    from ..core.target import Target

PROBE_CONTEXT, PROBE_PASSES = 64, 7

Recording = Mapping[int | tuple[int, ...], Sequence[int]]
"""Continuations by index of the prompt in the call, or by the prompt's own token ids."""


class Oracle(Drafter):
    """Drafts a chain of `gamma` tokens, each the recorded one with probability `alpha` and a wrong one otherwise.

    Whether a position is guessed right is a function of (seed, row, position, recorded token), so that acceptances are
    independent, from prompt to prompt too, and equally likely: where the recording is what the target says, a round
    commits (1 - alpha^(gamma+1)) / (1 - alpha) tokens (Leviathan et al. 2023, arXiv:2211.17192, eq. 1). A text that
    has left its recording is still drafted from it, by position. The tokens are chosen, so there is no law. Rows
    without a recording draft nothing.

    Args:
        continuation: the new tokens that are expected: token ids, for every prompt; a list of such lists, one a prompt
            of the call; a mapping from a prompt's index or from its token ids (a tuple); or the name of a JSON
            file: any of the lists, a recording of `draftwood generate --trace`, or a study (the directory of
            `draftwood compare --out` or its `results.jsonl`), whose plain texts are found by prompt.
        alpha: probability that a drafted token is the recorded one.
        gamma: tokens a round.
        cost: seconds that a draft step takes; the drafter computes idly for that long.
        c: the same as a share of a single-token pass of the target, measured when the drafter is bound.
        seed: of the guesses.

    Raises:
        InvalidRequest: an option that cannot work, `cost` and `c` at once, or a file that holds no continuation.
    """

    def __init__(
        self,
        *,
        continuation: Recording | Sequence[int] | Sequence[Sequence[int]] | Tensor | str | Path,
        alpha: float = 1.0,
        gamma: int = 4,
        cost: float = 0.0,
        c: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.alpha, self.gamma = real_number("alpha", alpha, 0, 1), whole_number("gamma", gamma)
        self.cost, self.c = real_number("cost", cost, 0, 60), real_number("c", c, 0, 1000)
        if self.cost and self.c:
            raise InvalidRequest(f"give cost, in seconds, or c, in passes of the target, not both: {cost!r} and {c!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InvalidRequest(f"seed must be an integer, got {seed!r}")
        self.seed = seed
        self._everywhere, self._known = _read(continuation)
        self._step_seconds = self.cost
        self._vocabulary = 0

    def bind(self, target: Target) -> None:
        self._vocabulary = target.vocabulary_size
        texts = [*self._known.values(), *([] if self._everywhere is None else [self._everywhere])]
        for token in (token for text in texts for token in text):
            if not 0 <= token < self._vocabulary:
                raise InvalidRequest(
                    f"the recorded continuation holds token {token}; the target's vocabulary has {self._vocabulary}"
                )
        if self.c:
            self._step_seconds = self.c * _pass_seconds(target)

    def propose(self, state: DecodeState) -> Proposal:
        until = time.perf_counter()
        chains = [self._chain(row, min(self.gamma, state.room(index))) for index, row in enumerate(state.rows)]
        until += self._step_seconds * max(map(len, chains), default=0)
        while time.perf_counter() < until:  # sleeping would hand the core to others and come back late
            pass
        return Proposal(TokenTree.from_paths([[chain] for chain in chains]))

    def _chain(self, row: Row, depth: int) -> list[int]:
        start = len(row.tokens) - row.prompt_length
        recorded = self._recording(row)[start : start + depth]
        return [self._guess(row.key, len(row.tokens) + step, token) for step, token in enumerate(recorded)]

    def _recording(self, row: Row) -> Sequence[int]:
        if self._everywhere is not None:
            return self._everywhere
        by_prompt = self._known.get(tuple(row.tokens[: row.prompt_length]))
        return self._known.get(row.key, ()) if by_prompt is None else by_prompt

    def _guess(self, row: int, position: int, recorded: int) -> int:
        chance = random.Random(f"{self.seed}/{row}/{position}/{recorded}")
        if chance.random() < self.alpha or self._vocabulary < 2:
            return recorded
        return (recorded + chance.randrange(1, self._vocabulary)) % self._vocabulary


def _read(continuation: Any) -> tuple[tuple[int, ...] | None, dict[int | tuple[int, ...], tuple[int, ...]]]:
    """Returns the continuation of every prompt, or None and those of single ones."""
    if isinstance(continuation, str | Path):
        continuation = _load(Path(continuation))
    if isinstance(continuation, Tensor):
        continuation = continuation.tolist()
    if isinstance(continuation, Mapping):
        return None, {_key(key): _ids(text) for key, text in continuation.items()}
    if not isinstance(continuation, Sequence) or isinstance(continuation, str | bytes):
        raise InvalidRequest(
            f"continuation must be token ids, lists of them, a mapping or a file, got {continuation!r}"
        )
    if any(isinstance(one, Sequence | Tensor) for one in continuation):
        return None, {index: _ids(text) for index, text in enumerate(continuation)}
    return _ids(continuation), {}


def _load(path: Path) -> Any:
    """Reads lists of ids, or the texts of a recording or a study as a mapping by prompt."""
    path = path / "results.jsonl" if path.is_dir() else path
    try:
        if path.suffix == ".jsonl":
            return _load_study(path)
        held = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(f"no continuation at {str(path)!r}: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"the continuation {str(path)!r} is no JSON: {error}") from error
    if isinstance(held, list):
        return held
    rows = held.get("rows") if isinstance(held, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"prompt", "tokens"} <= row.keys() for row in rows
    ):
        raise InvalidRequest(
            f"{str(path)!r} holds no continuation: a list of token ids, a list of such lists, a recording of "
            "`draftwood generate --trace` or a study of `draftwood compare --out` would do"
        )
    return {_ids(row["prompt"]): row["tokens"] for row in rows}


def _load_study(path: Path) -> dict[tuple[int, ...], list[int]]:
    """Reads plain decoding's text of each prompt; of several, a greedy one before a drawn one, then the longest."""
    known: dict[tuple[int, ...], tuple[bool, int, list[int]]] = {}
    content = path.read_bytes()
    # A study that is still being written may end in half a line.
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
        record = json.loads(line)
        try:
            plain = [run for run in record["runs"] if run["drafter"] == "none" and "tokens" in run]
            for run in plain:
                for prompt, text in zip(record["asked"][run["turn"]], run["tokens"], strict=True):
                    one = (record["conditions"]["temperature"] == 0, len(text), text)
                    known[_ids(prompt)] = max(one, known.get(_ids(prompt), one), key=lambda kept: kept[:2])
        except (KeyError, TypeError, IndexError) as error:
            raise InvalidRequest(
                f"{path}, line {number}: no record of a study with its prompts ({error!r} is missing); run it again"
            ) from error
    return {prompt: text for prompt, (_, _, text) in known.items()}


def _key(key: Any) -> int | tuple[int, ...]:
    return key if isinstance(key, int) and not isinstance(key, bool) else _ids(key)


def _ids(text: Any) -> tuple[int, ...]:
    ids = text.tolist() if isinstance(text, Tensor) else text
    whole = isinstance(ids, Sequence) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    if not whole:
        raise InvalidRequest(f"a continuation is a list of token ids, got {text!r}")
    return tuple(ids)


@torch.inference_mode()
def _pass_seconds(target: Target) -> float:
    """Returns the seconds of a single-token pass behind a short context: the median of a few."""
    cache = target.new_cache(rows=1)
    context = min(PROBE_CONTEXT, max((target.context_length or math.inf) - PROBE_PASSES, 1))
    empty = TokenTree.empty(1)
    target.score(cache, [[0] * int(context)], empty)
    taken = []
    for _ in range(PROBE_PASSES):
        start = time.perf_counter()
        target.score(cache, [[0]], empty).logits.argmax(-1).tolist()  # reading a result waits for the accelerator
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)
