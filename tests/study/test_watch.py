from __future__ import annotations

import torch

from draftwood.core.drafter import Drafter
from draftwood.core.proposal import Proposal
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.prompt_lookup import PromptLookup
from draftwood.study.watch import Watched

PROMPT = [5, 6, 7, 8]


class Siblings(Drafter):
    """Knows the text; drafts the right token as the second of three siblings, with a useless node below the first."""

    def __init__(self, text):
        self.text = text

    def propose(self, state):
        rows = []
        for index, row in enumerate(state.rows):
            right = self.text[len(row.output)] if state.room(index) else 0
            rows.append(([(right + 1) % 96, right, (right + 2) % 96, 9], [-1, -1, -1, 0]))
        return Proposal(TokenTree.from_lists([tokens for tokens, _ in rows], [parents for _, parents in rows]))


def test_ranks_and_passes_are_counted(tiny_target):
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=13).tokens
    decoder = Decoder(tiny_target, Watched(Siblings(plain)))
    found = decoder.generate(PROMPT, max_new_tokens=13)
    assert found.tokens == plain
    counts = decoder.drafter.counts()
    assert found.stats.rounds == 6
    assert counts.tried_by_rank == [6, 6, 6]
    assert counts.accepted_by_rank == [0, 6, 0]
    assert {width: rounds for width, (rounds, _) in counts.passes.items()} == {5: 6}
    assert 0 < counts.passes[5][1] < found.stats.seconds.total
    assert decoder.drafter.counts().passes == {}


class Window(Drafter):
    """Drafts the right token and, before it, one that is scored but is no candidate."""

    def __init__(self, text):
        self.text = text

    def propose(self, state):
        tokens = [[9, self.text[len(row.output)]] for row in state.rows]
        return Proposal(TokenTree.from_lists(tokens, [[-1, -1]] * len(tokens), [[False, True]] * len(tokens)))


def test_nodes_that_are_no_candidates_have_no_rank(tiny_target):
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=13).tokens
    decoder = Decoder(tiny_target, Watched(Window([*plain, 0, 0])))
    decoder.generate(PROMPT, max_new_tokens=12)
    assert decoder.drafter.counts().accepted_by_rank == [6]


def test_a_watched_drafter_drafts_as_it_does_alone(tiny_target):
    prompts = [PROMPT * 3, [9, 10, 11] * 4, [20, 21]]
    settings = {"max_new_tokens": 20, "batch_size": 2}
    alone = Decoder(tiny_target, PromptLookup()).generate(prompts, **settings)
    decoder = Decoder(tiny_target, Watched(PromptLookup()))
    seen = decoder.generate(prompts, **settings)
    assert [one.tokens for one in seen] == [one.tokens for one in alone]
    assert [one.stats.accepted_by_depth for one in seen] == [one.stats.accepted_by_depth for one in alone]
    # Rows are at different tokens; every round of the batch is one pass.
    counts = decoder.drafter.counts()
    assert sum(counts.accepted_by_rank) == sum(sum(one.stats.accepted_by_depth) for one in seen)


def test_features_are_those_of_the_drafter():
    drafter = Siblings([])
    watched = Watched(drafter)
    drafter.features = frozenset({"last", 1})
    assert watched.features == {"last", 1}


def test_counting_starts_behind_the_prompt(tiny_target):
    decoder = Decoder(tiny_target, Watched(PromptLookup()))
    decoder.generate(PROMPT, max_new_tokens=1)
    assert decoder.drafter.counts().passes == {}
    assert torch.is_grad_enabled()
