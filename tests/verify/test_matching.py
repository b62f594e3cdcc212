from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.proposal import Proposal, Verdict
from draftwood.core.rule import SeededSource
from draftwood.core.tree import TokenTree
from draftwood.verify import Coupled, Greedy
from tests.verify.batches import VOCABULARY, Batch, batches
from tests.verify.enumeration import SCHEMES, SHAPES, World, decode

thorough = settings(deadline=None, max_examples=60)


def sources(seed: int, batch: Batch) -> list[SeededSource]:
    return [SeededSource(seed, row) for row in range(batch.proposal.tree.batch)]


def assert_follows(verdict: Verdict, batch: Batch, pick: Callable[[int, int], int]) -> None:
    """Asserts that the longest path of picked tokens was accepted, then the pick at its end."""
    for row, (path, tokens) in enumerate(zip(verdict.paths, verdict.tokens, strict=True)):
        matching = batch.passing_paths(row, lambda parent, token, row=row: token == pick(row, parent))  # type: ignore[misc]
        assert path in [longest for longest in matching if len(longest) == max(map(len, matching))]
        assert tokens == [*batch.tokens(row, path), pick(row, path[-1] if path else -1)]


@thorough
@given(batches())
def test_greedy_is_the_plain_walk(batch: Batch) -> None:
    verdict = Greedy().verify(batch.proposal, batch.logits, sources(0, batch), [0] * batch.proposal.tree.batch)
    assert_follows(verdict, batch, lambda row, node: int(batch.logits[row, 1 + node].argmax()))


@thorough
@given(batches(), st.integers(0, 1000), st.integers(0, 50))
def test_coupled_picks_the_maximum_of_log_p_and_the_noise_of_the_position(batch: Batch, seed: int, start: int) -> None:
    positions = [start + 7 * row for row in range(batch.proposal.tree.batch)]
    verdict = Coupled().verify(batch.proposal, batch.logits, sources(seed, batch), positions)

    def pick(row: int, node: int) -> int:
        position = positions[row] + len(batch.path(row, node))
        noise = SeededSource(seed, row).gumbel(position, VOCABULARY)
        return int((batch.logits[row, 1 + node].log_softmax(-1) + noise).argmax())

    assert_follows(verdict, batch, pick)


@thorough
@given(st.integers(0, 100_000), st.sampled_from(list(SHAPES)), st.sampled_from(list(SCHEMES)), st.integers(0, 5))
def test_coupled_text_does_not_depend_on_the_drafter(seed: int, shape: str, scheme: str, world_seed: int) -> None:
    world = World(4, world_seed)
    plain = decode(Coupled(), world, SHAPES["empty"], SCHEMES["chosen"], seed, 6)
    assert decode(Coupled(), world, SHAPES[shape], SCHEMES[scheme], seed, 6) == plain


@thorough
@given(st.integers(0, 100_000), st.integers(0, 5))
def test_a_draft_made_with_the_same_noise_and_law_is_accepted_whole(seed: int, position: int) -> None:
    source = SeededSource(seed, 0)
    logits = torch.randn(1, 4, VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    noise = torch.stack([source.gumbel(position + depth, VOCABULARY) for depth in range(4)])
    tokens = (logits[0] + noise).argmax(-1)
    verdict = Coupled().verify(Proposal(TokenTree.chain(tokens[None, :3])), logits, [source], [position])
    assert verdict == Verdict([[0, 1, 2]], [tokens.tolist()])


def test_of_repeated_siblings_the_one_with_the_longer_path_is_followed() -> None:
    tree = TokenTree.from_lists([[2, 2, 1]], [[-1, -1, 1]])
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 1, 0]]), 3).double()
    assert Greedy().verify(Proposal(tree), logits, [SeededSource(0, 0)], [0]) == Verdict([[1, 2]], [[2, 1, 0]])
