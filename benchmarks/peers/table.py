"""From single runs to a table: speeds, ratios, tau, and whether the texts are plain decoding's."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .methods import OURS, PACKED, PEERS

HEAD = (
    "method", "peer", "peer tok/s", "ours tok/s", "ratio (quartiles)", "packed tok/s", "ratio (quartiles)",
    "tau peer / ours", "peer's texts as plain", "ours",
)  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """An entry over all its runs.

    Attributes:
        rate: tokens per second, prompts read included.
        tau: tokens that a round commits; None if there was no round.
        same: in how many runs the text was plain decoding's.
        runs: how many there were.
        seconds_a_token: of every run, by prompt and repeat.
    """

    rate: float
    tau: float | None
    same: int
    runs: int
    seconds_a_token: dict[tuple[int, int], float]


def summarise(runs: Iterable[dict[str, Any]]) -> dict[tuple[str, str], Summary]:
    """Returns the summary of each (method, peer) that has no error."""
    runs = list(runs)
    failed = {(run["method"], run["peer"]) for run in runs if "error" in run}
    by_entry: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        key = run["method"], run["peer"]
        if key not in failed:
            by_entry.setdefault(key, []).append(run)
    return {key: _summary(some) for key, some in by_entry.items()}


def _summary(runs: Sequence[dict[str, Any]]) -> Summary:
    rounds, committed = (sum(run[name] for run in runs) for name in ("rounds", "committed"))
    return Summary(
        rate=sum(run["count"] for run in runs) / sum(run["seconds"] for run in runs),
        tau=committed / rounds if rounds else None,
        same=sum(run["same"] for run in runs),
        runs=len(runs),
        seconds_a_token={(run["prompt"], run["repeat"]): run["seconds"] / max(run["count"], 1) for run in runs},
    )


def ratio(ours: Summary | None, peer: Summary | None) -> tuple[float, float, float] | None:
    """Returns median and quartiles of how many times faster ours was, over the runs that took turns."""
    if ours is None or peer is None:
        return None
    shared = ours.seconds_a_token.keys() & peer.seconds_a_token.keys()
    ratios = [peer.seconds_a_token[key] / ours.seconds_a_token[key] for key in shared]
    if not ratios:
        return None
    low, high = (ratios * 2) if len(ratios) == 1 else statistics.quantiles(ratios, n=4, method="inclusive")[::2]
    return statistics.median(ratios), low, high


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Returns the table of all runs, a row for each method of each peer; what failed is told in its row."""
    done = summarise(runs)
    errors = {(run["method"], run["peer"]): str(run["error"]) for run in runs if "error" in run}
    asked = {(run["method"], run["peer"]) for run in runs}
    lines = [_line(HEAD), _line(["---"] * len(HEAD))]
    for method, peers in PEERS.items():
        ours, packed = done.get((method, OURS)), done.get((method, PACKED))
        for peer in peers:
            if (method, peer) not in asked:
                continue
            theirs = done.get((method, peer))
            failed = errors.get((method, peer))
            told = [
                *([f"failed: {failed}"] if failed else [_rate(theirs)]),
                _rate(ours) if (method, OURS) not in errors else f"failed: {errors[method, OURS]}",
                _ratio(ratio(ours, theirs)),
                _rate(packed) if (method, PACKED) not in errors else f"failed: {errors[method, PACKED]}",
                _ratio(ratio(packed, theirs)),
                f"{_tau(theirs)} / {_tau(ours)}",
                _same(theirs),
                _same(ours),
            ]
            lines.append(_line([method, peer, *told]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _rate(summary: Summary | None) -> str:
    return "" if summary is None else f"{summary.rate:.1f}"


def _tau(summary: Summary | None) -> str:
    return "-" if summary is None or summary.tau is None else f"{summary.tau:.2f}"


def _same(summary: Summary | None) -> str:
    return "" if summary is None else f"{summary.same} of {summary.runs}"


def _ratio(found: tuple[float, float, float] | None) -> str:
    return "" if found is None else f"{found[0]:.2f} ({found[1]:.2f} to {found[2]:.2f})"
