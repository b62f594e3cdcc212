"""What holds for every rule on ragged batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.proposal import Proposal
from draftwood.core.rule import Rule, SeededSource
from draftwood.verify import Coupled, Greedy, Rejection, Traversal, Typical
from tests.verify.batches import VOCABULARY, Batch, batches

RULES: list[Rule] = [Greedy(), Coupled(), Rejection(), Traversal(), Typical()]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
quick = settings(deadline=None, max_examples=40)


@every_rule
@quick
@given(batch=batches(), seed=st.integers(0, 1000))
def test_a_row_is_judged_as_if_it_were_alone(rule: Rule, batch: Batch, seed: int) -> None:
    rows = range(batch.proposal.tree.batch)
    positions = [10 * row for row in rows]
    together = rule.verify(batch.proposal, batch.logits, [SeededSource(seed, row) for row in rows], positions)
    for row in rows:
        proposal, logits = batch.row(row)
        alone = rule.verify(proposal, logits, [SeededSource(seed, row)], [positions[row]])
        assert (alone.paths, alone.tokens) == ([together.paths[row]], [together.tokens[row]])


@every_rule
@quick
@given(batch=batches(), seed=st.integers(0, 1000))
def test_paths_run_down_candidates_of_the_tree(rule: Rule, batch: Batch, seed: int) -> None:
    rows = range(batch.proposal.tree.batch)
    verdict = rule.verify(batch.proposal, batch.logits, [SeededSource(seed, row) for row in rows], [0 for _ in rows])
    for row in rows:
        path, tokens = verdict.paths[row], verdict.tokens[row]
        assert path in batch.passing_paths(row, lambda parent, token: True)
        assert tokens[:-1] == batch.tokens(row, path)
        assert len(tokens) == len(path) + 1
        assert 0 <= tokens[-1] < VOCABULARY


@every_rule
@quick
@given(batch=batches(one_hot=True), seed=st.integers(0, 1000))
def test_temperature_zero_commits_what_greedy_decoding_would(rule: Rule, batch: Batch, seed: int) -> None:
    rows = range(batch.proposal.tree.batch)
    verdict = rule.verify(batch.proposal, batch.logits, [SeededSource(seed, row) for row in rows], [0 for _ in rows])
    for row in rows:
        for node, token in zip([-1, *verdict.paths[row]], verdict.tokens[row], strict=True):
            assert token == int(batch.logits[row, 1 + node].argmax())
        matching = batch.passing_paths(row, lambda p, t, row=row: t == int(batch.logits[row, 1 + p].argmax()))  # type: ignore[misc]
        # A repeated sibling may hold the longer path; only rules that look at all nodes at once see it.
        ends = [path for path in matching if not any(other[:-1] == path for other in matching if other)]
        assert verdict.paths[row] in ends


@every_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_any_precision(rule: Rule, dtype: torch.dtype) -> None:
    proposal = Proposal.empty(2)
    logits = torch.tensor([[[0.0, 9.0, -torch.inf]], [[-torch.inf, -torch.inf, 3.0]]], dtype=dtype)
    verdict = rule.verify(proposal, logits, [SeededSource(0, 0), SeededSource(0, 1)], [0, 5])
    assert verdict.paths == [[], []]
    assert verdict.tokens == [[1], [2]]


def test_what_the_rules_say_of_themselves() -> None:
    assert [(rule.lossless, rule.drafts, rule.samples) for rule in RULES] == [
        (True, "chosen", False),
        (True, "coupled", True),
        (True, "drawn", True),
        (True, "drawn", True),
        (False, "chosen", True),
    ]
