"""Does every drafter give plain decoding's text? Differences are told apart into near ties and faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.target import Target
from .agreement import Agreement
from .report import Report
from .run import compare
from .store import Record


@dataclass(frozen=True)
class Difference:
    """One text that is not plain decoding's.

    Attributes:
        prompt: id of the prompt.
        turn: of the conversation, from 0.
        temperature: of the call.
        agreement: where the texts part, and by what margin.
    """

    prompt: str
    turn: int
    temperature: float
    agreement: Agreement


@dataclass(frozen=True)
class Verification:
    """What the check of one drafter found.

    Attributes:
        drafter: name and options.
        texts: how many texts were compared.
        near_ties: texts that part where the target can hardly tell two tokens apart.
        faults: texts that part elsewhere.
        errors: what went wrong, each message once.
    """

    drafter: str
    texts: int = 0
    near_ties: list[Difference] = field(default_factory=list)
    faults: list[Difference] = field(default_factory=list)
    errors: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether texts were compared and nothing but near ties was found."""
        return self.texts > 0 and not self.faults and not self.errors


def verify_drafters(
    target: Target | str, drafters: Sequence[Any] = ("prompt-lookup",), *, coupled: bool = True, **options: Any
) -> list[Verification]:
    """Runs drafters against plain decoding: greedy at temperature 0 and, if asked, coupled sampling at 1.

    In both the text is a function of target and seed alone, so that any difference is a near tie or a fault.

    Args:
        target: as in `compare`.
        drafters: as in `compare`.
        coupled: also check sampling at temperature 1.
        **options: further ones of `compare`: `prompts`, `limit`, `batch_sizes`, `max_new_tokens`, `seed`, ...

    Raises:
        InvalidRequest: as `compare`.
    """
    kinds = [("greedy", 0.0), *([("coupled", 1.0)] if coupled else [])]
    return summarise(compare(target, drafters, kinds=kinds, **options))


def summarise(report: Report) -> list[Verification]:
    """Sums the agreements in a report up by drafter; plain decoding, rerun, is a drafter too."""
    found: dict[str, Verification] = {}
    for record in report.records:
        for run in record["runs"]:
            one = found.get(run["drafter"], Verification(run["drafter"]))
            if "error" in run:
                errors = tuple(dict.fromkeys((*one.errors, run["error"])))
                found[one.drafter] = Verification(one.drafter, one.texts, one.near_ties, one.faults, errors)
                continue
            found[one.drafter] = _add(one, record, run)
    return list(found.values())


def _add(one: Verification, record: Record, run: dict[str, Any]) -> Verification:
    ties, faults = list(one.near_ties), list(one.faults)
    agreements = [Agreement(**agreement) for agreement in run.get("agreement", ())]
    for prompt, agreement in zip(record["prompts"], agreements, strict=False):
        difference = Difference(prompt, run["turn"], record["conditions"]["temperature"], agreement)
        if agreement.verdict == "near-tie":
            ties.append(difference)
        elif agreement.verdict == "no":
            faults.append(difference)
    return Verification(one.drafter, one.texts + len(agreements), ties, faults, one.errors)
