"""Which method of which library stands beside which of ours, with which options.

The longest draft is the same everywhere, and so are heads, draft models and layers. All else is each library's default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OURS, PACKED = "draftwood", "draftwood, packed"

LOOKUP = {"max_ngram": 3, "gamma": 8}
GAMMA = 4
COMPOSITE = 6
"""What flashspec's default looks up at most; it drafts two tokens where it finds nothing."""

PEERS = {
    "none": ["transformers", "economize", "llama-cpp-python"],
    "prompt-lookup": ["transformers", "economize", "flashspec", "llama-cpp-python"],
    "draft-model": ["transformers", "economize", "flashspec"],
    "draft-model+prompt-lookup": ["flashspec"],
    "early-exit": ["transformers"],
    "layer-skip": ["economize"],
    "medusa": ["economize", "economize, our tree"],
    "eagle3": ["economize"],
}


@dataclass(frozen=True)
class Assets:
    """What methods need beside the target; None is what is not at hand."""

    draft_model: Path
    exit_layer: int
    skip: tuple[int, ...]
    medusa: Path | None = None
    medusa_for_peers: Path | None = None
    medusa_tree: tuple[tuple[int, ...], ...] | None = None
    eagle3: Path | None = None


@dataclass(frozen=True)
class Entry:
    """One method of one library.

    Attributes:
        method: what it is called here.
        peer: the library, with what is special about it.
        name: of the method, as the library's worker calls it.
        options: for the worker.
        missing: what is not at hand, so that the entry cannot run.
    """

    method: str
    peer: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    missing: str | None = None

    @property
    def label(self) -> str:
        return f"{self.method} / {self.peer}"

    @property
    def worker(self) -> str:
        return self.peer.split(",")[0]


def entries(assets: Assets) -> Iterator[Entry]:
    """Yields every entry, the entries of a method together, ours first."""
    for method, peers in PEERS.items():
        missing = _missing(method, assets)
        name, options = _ours(method, assets)
        yield Entry(method, OURS, name, options, missing)
        yield Entry(method, PACKED, name, options | {"packed": True}, missing)
        for peer in peers:
            yield Entry(method, peer, method, _theirs(method, peer, assets), missing)


def _missing(method: str, assets: Assets) -> str | None:
    if method in ("medusa", "eagle3") and getattr(assets, method) is None:
        return f"no heads at hand; give --{method}"
    return None


def _ours(method: str, assets: Assets) -> tuple[str, dict[str, Any]]:
    draft = {"draft_model": str(assets.draft_model), "gamma": GAMMA}
    layers = list(assets.skip)
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "prompt-lookup": LOOKUP,
        "draft-model": draft,
        "draft-model+prompt-lookup": draft | {"gamma": 2, "lookup": COMPOSITE},
        "early-exit": {"exit_layer": assets.exit_layer, "gamma": GAMMA},
        "layer-skip": {"skip": {"attention": layers, "mlp": layers}, "gamma": GAMMA},
        "medusa": {"checkpoint": str(assets.medusa)},
        "eagle3": {"checkpoint": str(assets.eagle3), "depth": GAMMA},
    }
    return ("eagle" if method == "eagle3" else method), options[method]


def _theirs(method: str, peer: str, assets: Assets) -> dict[str, Any]:
    draft = {"draft_model": str(assets.draft_model), "gamma": GAMMA}
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "prompt-lookup": LOOKUP,
        "draft-model": draft,
        "draft-model+prompt-lookup": draft,
        "early-exit": {"exit_layer": assets.exit_layer, "gamma": GAMMA},
        "layer-skip": {"skip": list(assets.skip), "gamma": GAMMA},
        "medusa": {
            "checkpoint": str(assets.medusa_for_peers),
            "tree": assets.medusa_tree if peer.endswith("our tree") else None,
        },
        "eagle3": {"checkpoint": str(assets.eagle3), "gamma": GAMMA},
    }
    return options[method]
