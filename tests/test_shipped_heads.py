"""What is shipped under heads/ for the demo model: it loads, changes no text, and is often enough right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import draftwood as dw
from draftwood.study.default_prompts import PACKAGED

SHIPPED = Path(__file__).parent.parent / "heads" / "smollm2-135m-instruct"
DRAFTERS: dict[str, tuple[dict[str, Any], float]] = {
    "medusa": ({"checkpoint": SHIPPED / "medusa", "nodes": 12}, 1.2),
    "eagle": ({"checkpoint": SHIPPED / "eagle", "nodes": 8, "depth": 4}, 1.3),
    "eagle3": ({"checkpoint": SHIPPED / "eagle3", "nodes": 8, "depth": 4}, 1.25),
    "draft-model": ({"model": SHIPPED / "draft-model", "gamma": 2}, 1.05),
    "layer-skip": ({"skip": SHIPPED / "layer-skip.json"}, 1.2),
}
"""Options, and a tau that untrained heads, or heads of another target, do not come near."""


@pytest.fixture(scope="module")
def target() -> dw.Target:
    return dw.Target.from_pretrained("smollm2", dtype="float32")


@pytest.fixture(scope="module")
def plain(target: dw.Target) -> list[list[int]]:
    return [text.tokens for text in dw.Decoder(target).generate(chats(), max_new_tokens=24, batch_size=2)]


def chats() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for _, text in PACKAGED[:2]]


@pytest.mark.real
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_shipped_drafter_is_of_use_and_changes_nothing(
    target: dw.Target, plain: list[list[int]], drafter: str
) -> None:
    options, least = DRAFTERS[drafter]
    made = dw.Decoder(target, drafter, drafter_options=options).generate(chats(), max_new_tokens=24, batch_size=2)
    assert [text.tokens for text in made] == plain
    rounds = sum(text.stats.rounds for text in made)
    assert sum(text.stats.committed for text in made) / rounds > least


def test_nothing_shipped_is_large() -> None:
    """The repository is cloned by everybody, and the heads come with it."""
    sizes = {path: path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file()}
    assert max(sizes.values()) < 25e6
    assert sum(sizes.values()) < 60e6
    assert sizes[SHIPPED / "eagle" / "model.safetensors"] < 9e6
    assert sizes[SHIPPED / "eagle3" / "model.safetensors"] < 15e6
