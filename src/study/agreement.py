"""Are two texts the same, and if not: a near tie of two tokens, or a fault?

A pass over several tokens adds its sums up in another order than a pass over one. Where the two best tokens are
closer than that difference, either is a correct greedy choice, and a text may part there with nothing wrong. So a
difference is judged by a third, plain forward over the common beginning: how far apart does it see the two tokens,
against what passes of different width are measured to differ by?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.rule import SeededSource
from ..core.target import Target
from ..core.tree import TokenTree

Verdict = Literal["yes", "near-tie", "no"]

WIDTH = 16
"""Nodes of the wide pass whose numbers are compared with those of single-token passes."""


@dataclass(frozen=True)
class Agreement:
    """How a text compares with plain decoding's.

    Attributes:
        verdict: `yes`, the same tokens; `near-tie`, they part where the target can hardly tell two tokens apart;
            `no`, they part elsewhere: a fault.
        position: index of the first differing new token.
        margin: by how much, in logits, the worse of the two tokens there lies below the best; None where one text
            simply ends before the other.
        noise: the margin up to which passes of different width are measured to disagree.
    """

    verdict: Verdict
    position: int | None = None
    margin: float | None = None
    noise: float | None = None


def measure_noise(target: Target, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    """Measures by how much the gap of two logits may differ between single-token and 16-node passes.

    Both read the same text behind the same prompt, each with a cache of its own, and are compared at every
    position.

    Args:
        target: the target.
        prompt: token ids.
        continuation: what plain decoding wrote behind it.

    Returns:
        Twice the largest difference of a logit: two tokens may move towards each other.
    """
    text = [prompt[-1], *continuation]
    with torch.inference_mode():
        single, wide = (_read(target, prompt[:-1], text, width) for width in (1, WIDTH))
        return 2.0 * float((single - wide).abs().max())


def compare_texts(
    target: Target,
    prompt: Sequence[int],
    reference: Sequence[int],
    other: Sequence[int],
    noise: float,
    *,
    temperature: float = 0.0,
    source: SeededSource | None = None,
) -> Agreement:
    """Compares a text with plain decoding's and, where they part, asks a plain forward for the margin.

    Args:
        target: the target.
        prompt: token ids.
        reference: new tokens of plain decoding.
        other: new tokens of the drafter under test.
        noise: what `measure_noise` gave.
        temperature: of the call, where coupled noise decided.
        source: gives the noise that the coupled rule added; None for greedy texts.
    """
    if list(reference) == list(other):
        return Agreement("yes")
    shared = min(len(reference), len(other))
    position = next((i for i in range(shared) if reference[i] != other[i]), shared)
    if position == shared:
        return Agreement("no", position, None, noise)
    prefix = [*prompt, *reference[:position]]
    with torch.inference_mode():
        scores = target.score(target.new_cache(1), [prefix], TokenTree.empty(1)).logits[0, 0].double()
    if source is not None:
        # What the rule maximises is log p + g with p at the temperature; times the temperature these are logits.
        scores = scores + temperature * source.gumbel(len(prefix), len(scores)).to(scores)
    pair = scores[[reference[position], other[position]]]
    margin = float(scores.max() - pair.min())
    return Agreement("near-tie" if margin <= noise else "no", position, margin, noise)


def worst(agreements: Sequence[Agreement]) -> Agreement:
    """Returns the worst of several: a fault before a near tie, a wide margin before a narrow one."""
    order = {"yes": 0, "near-tie": 1, "no": 2}
    return max(agreements, key=lambda one: (order[one.verdict], one.margin if one.margin is not None else float("inf")))


def _read(target: Target, prompt: Sequence[int], text: Sequence[int], width: int) -> Tensor:
    """Returns the logits after each token of `text`, read `width` tokens at a time, [len(text), vocabulary]."""
    cache = target.new_cache(1)
    if prompt:
        target.score(cache, [list(prompt)], TokenTree.empty(1))
        cache.keep([[]])
    logits = []
    for start in range(0, len(text), width):
        first, *rest = text[start : start + width]
        tree = TokenTree.chain(torch.tensor([rest], dtype=torch.int64)) if rest else TokenTree.empty(1)
        logits.append(target.score(cache, [[first]], tree).logits[0])
        cache.keep([list(range(len(rest)))])
    return torch.cat(logits)
