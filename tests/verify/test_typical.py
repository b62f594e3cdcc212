from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.core.errors import InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.rule import SeededSource
from draftwood.core.tree import TokenTree
from draftwood.verify import Typical
from tests.verify.batches import Batch, batches


class Recording(SeededSource):
    """Remembers what it drew from; asked to decide anything else, it fails."""

    def draw(self, weights: Tensor) -> int:
        self.weights = weights
        return super().draw(weights)

    def accept(self, probability: float) -> bool:
        raise AssertionError("typical acceptance is not random")


def sources(batch: Batch) -> list[Recording]:
    return [Recording(0, row) for row in range(batch.proposal.tree.batch)]


@settings(deadline=None, max_examples=80)
@given(batches(), st.floats(0, 1), st.floats(0, 2))
def test_takes_the_longest_and_likeliest_path_above_the_bar(batch: Batch, epsilon: float, delta: float) -> None:
    recording = sources(batch)
    verdict = Typical(epsilon=epsilon, delta=delta).verify(
        batch.proposal, batch.logits, recording, [0] * len(recording)
    )
    for row, source in enumerate(recording):
        p = [weights.tolist() for weights in batch.logits[row].softmax(-1)]

        def passes(parent: int, token: int, p: list[list[float]] = p) -> bool:
            entropy = -sum(probability * math.log(probability + 1e-5) for probability in p[1 + parent])
            return p[1 + parent][token] > min(epsilon, delta * math.exp(-entropy))

        def likelihood(path: list[int], row: int = row, p: list[list[float]] = p) -> float:
            above = [-1, *path]
            return math.prod(
                p[1 + parent][token] for parent, token in zip(above, batch.tokens(row, path), strict=False)
            )

        paths = batch.passing_paths(row, passes)
        best = max(paths, key=lambda path: (len(path), likelihood(path)))
        assert verdict.tokens[row][:-1] == batch.tokens(row, best)
        end = verdict.paths[row][-1] if best else -1
        assert source.weights.tolist() == pytest.approx(p[1 + end], abs=1e-12)


def judge(rule: Typical, p: list[list[float]], tokens: list[int], parents: list[int]) -> list[int]:
    logits = torch.tensor([p], dtype=torch.float64).log()
    tree = TokenTree.from_lists([tokens], [parents])
    return rule.verify(Proposal(tree), logits, [SeededSource(0, 0)], [0]).paths[0]


@pytest.mark.parametrize(
    ("p", "token", "accepted"),
    [
        # Entropy 0.36: the bar is epsilon, 0.09; with the defaults swapped it would be 0.063.
        ([0.92, 0.08, 0.0], 1, False),
        ([0.90, 0.10, 0.0], 1, True),
        # 40 equal tokens: the bar is 0.3 / 40 = 0.0075; with the defaults swapped 0.00225.
        ([0.975 / 39] * 39 + [0.025 - 0.005, 0.005], 40, False),
        ([0.975 / 39] * 39 + [0.025 - 0.010, 0.010], 40, True),
    ],
)
def test_defaults(p: list[float], token: int, accepted: bool) -> None:
    assert judge(Typical(), [p, p], [token], [-1]) == ([0] if accepted else [])
    assert judge(Typical(epsilon=0.09, delta=0.3), [p, p], [token], [-1]) == ([0] if accepted else [])


def test_swapped_defaults_would_be_noticed() -> None:
    p = [0.92, 0.08, 0.0]
    assert judge(Typical(epsilon=0.3, delta=0.09), [p, p], [1], [-1]) == [0]


def test_length_comes_before_likelihood_and_likelihood_before_order() -> None:
    root, after_0, after_2, other = [0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.3, 0.1, 0.6], [0.3, 0.3, 0.4]
    assert judge(Typical(), [root, other, other, other], [0, 1, 2], [-1, -1, -1]) == [1]
    # Of the whole path: 0 then 1 has 0.2 * 0.8, less than the 0.3 * 0.6 of 2 then 2; 1 alone has 0.5 but is shorter.
    tree = ([0, 1, 2, 1, 2], [-1, -1, -1, 0, 2])
    assert judge(Typical(), [root, after_0, other, after_2, other, other], *tree) == [2, 4]


@pytest.mark.parametrize(
    "options",
    [{"epsilon": -0.1}, {"epsilon": 1.5}, {"epsilon": math.nan}, {"epsilon": "x"}, {"delta": -1.0}, {"delta": True}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    (name, value), *_ = options.items()
    with pytest.raises(InvalidRequest, match=f"{name} must be a number in .*, got {value!r}"):
        Typical(**options)
