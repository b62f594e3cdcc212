"""The loop: exact lengths, stops inside accepted blocks, rows that come and go, and rows that do not see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.drafter import Drafter, DraftSession, Observation
from draftwood.core.errors import DraftwoodError
from draftwood.core.proposal import Proposal
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder


class Scripted(Drafter):
    """Drafts from texts it was given: right, wrong or partly right, as trees with decoys, and checks what it is told.

    Args:
        texts: the full text that each prompt leads to, by the prompt's tokens.
        wrong: of how many drafted tokens one is wrong; 0 for never.
        width: candidates a level, of which at most one is right.
    """

    def __init__(self, texts: dict[tuple[int, ...], list[int]], wrong: int = 0, gamma: int = 4, width: int = 2) -> None:
        self.texts, self.wrong, self.gamma, self.width = texts, wrong, gamma, width

    def session(self, state) -> DraftSession:
        session = Scripted(self.texts, self.wrong, self.gamma, self.width)
        session.known: list[list[int]] = []
        return session

    def admit(self, state, rows) -> None:
        assert list(rows) == list(range(len(self.known), len(state.rows)))
        self.known += [list(state.rows[row].tokens) for row in rows]

    def propose(self, state) -> Proposal:
        assert self.known == [row.tokens for row in state.rows]
        assert state.cache.lengths == [len(row.tokens) - 1 for row in state.rows]
        tokens, parents = [], []
        for index, row in enumerate(state.rows):
            text = self.texts[tuple(row.tokens[: row.prompt_length])]
            future = text[len(row.tokens) :][: min(self.gamma, state.room(index))]
            own_tokens, own_parents, parent = [], [], -1
            for depth, token in enumerate(future):
                bad = self.wrong and (len(row.tokens) + depth) % self.wrong == 0
                for decoy in range(1, self.width):
                    own_tokens.append((token + 7 * decoy) % 90)
                    own_parents.append(parent)
                own_tokens.append((token + 1) % 90 if bad else token)
                own_parents.append(parent)
                parent = len(own_tokens) - 1
            tokens.append(own_tokens)
            parents.append(own_parents)
        return Proposal(TokenTree.from_lists(tokens, parents))

    def observe(self, state, seen: Observation) -> None:
        for row, committed in zip(seen.rows, seen.verdict.tokens, strict=True):
            self.known[row] += committed
            assert self.known[row] == state.rows[row].tokens

    def retain(self, rows) -> None:
        self.known = [self.known[row] for row in rows]


PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [17, 18], [19, 20, 21]]


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


@pytest.fixture(scope="module")
def plain(tiny_llama) -> dict[tuple[int, ...], list[int]]:
    """What transformers' own greedy `generate` writes, 40 tokens past the end-of-text token if need be."""
    texts = {}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = tiny_llama.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=95, pad_token_id=0)
        texts[tuple(prompt)] = out[0].tolist()
    return texts


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_greedy_equals_generate(target, plain, wrong, batch_size) -> None:
    decoder = Decoder(target, Scripted(plain, wrong))
    results = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], batch_size=batch_size)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.tokens == plain[tuple(prompt)][len(prompt) :][:24]
        assert result.stop_reason == "length"
        assert result.stats.committed == 23  # the first token comes with the prompt


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 12), gamma=st.integers(1, 9), wrong=st.integers(0, 4), stop=st.integers(0, 30), data=st.data()
)
def test_a_text_ends_where_plain_decoding_ends(target, plain, length, gamma, wrong, stop, data) -> None:
    prompt = data.draw(st.sampled_from(PROMPTS))
    future = plain[tuple(prompt)][len(prompt) :]
    eos = [future[stop]]
    result = Decoder(target, Scripted(plain, wrong, gamma)).generate(prompt, max_new_tokens=length, eos_token_id=eos)
    ended = future.index(eos[0]) + 1
    assert result.tokens == future[: min(length, ended)]
    assert result.stop_reason == ("eos" if ended <= length else "length")


def test_full_acceptance_counts_the_bonus_token(target, plain) -> None:
    result = Decoder(target, Scripted(plain, 0, gamma=4)).generate(PROMPTS[0], max_new_tokens=21, eos_token_id=[])
    assert result.stats.rounds == 4
    assert result.stats.tau == 5.0
    assert result.stats.acceptance_by_depth == [1.0] * 4
    assert result.stats.drafted == 4 * 4 * 2


class Remote(torch.Tensor):
    """Stands in for a tensor on an accelerator: whatever is computed from it is one too, and reading it is noted."""

    READS = frozenset({"tolist", "item", "cpu", "numpy", "nonzero", "__int__", "__bool__", "__float__", "__index__"})
    read: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        masks = func.__name__ == "__getitem__" and getattr(args[1], "dtype", None) == torch.bool
        if func.__name__ in cls.READS or masks:
            cls.read.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(("rule", "temperature"), [("greedy", 0.0), ("coupled", 1.0)])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_round_copies_once_from_the_device(target, plain, monkeypatch, rule, temperature, batch_size) -> None:
    score, rounds = target.score, []

    def scored(*arguments, **named):
        scores = score(*arguments, **named)
        rounds.append(len(Remote.read))
        return replace(scores, logits=scores.logits.as_subclass(Remote))

    def moved(tree, _device):
        there = TokenTree(tree.tokens.as_subclass(Remote), tree.parents.as_subclass(Remote), tree.sizes)
        there.__dict__["height"] = tree.to("meta").height  # a meta tensor holds nothing: it was read before
        there.__dict__["ancestors"] = there._closure()  # as on a device that is not the host
        return there

    monkeypatch.setattr(target, "score", scored)
    monkeypatch.setattr(Proposal, "to", lambda self, device: replace(self, tree=moved(self.tree, device)))
    monkeypatch.setattr(Remote, "read", [])
    decoder = Decoder(target, Scripted(plain, 3), rule=rule)
    decoder.generate(PROMPTS, max_new_tokens=12, temperature=temperature, batch_size=batch_size, repetition_penalty=1.1)
    assert rounds == list(range(len(rounds))) and Remote.read == ["tolist"] * len(rounds)


def test_a_queue_keeps_the_batch_full(target, plain) -> None:
    sizes = []

    class Counting(Scripted):
        def session(self, state):
            session = super().session(state)
            session.__class__ = Counting
            return session

        def propose(self, state):
            sizes.append(len(state.rows))
            return super().propose(state)

    prompts = PROMPTS * 4
    settings_of = [{"max_new_tokens": 5 + (7 * index) % 20} for index in range(len(prompts))]
    results = Decoder(target, Counting(plain, 3)).generate(
        prompts, batch_size=4, per_prompt=settings_of, eos_token_id=[]
    )
    for prompt, own, result in zip(prompts, settings_of, results, strict=True):
        assert result.tokens == plain[tuple(prompt)][len(prompt) :][: own["max_new_tokens"]]
    full = sizes.index(next(size for size in sizes if size < 4))
    assert all(size == 4 for size in sizes[:full])
    assert sizes[full:] == sorted(sizes[full:], reverse=True)  # only when no prompt waits does the batch shrink


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
def test_sampled_text_of_a_row_does_not_depend_on_its_neighbours(target, plain, rule) -> None:
    decoder = Decoder(target, Scripted(plain, 3), rule=rule)
    settings_of = {"max_new_tokens": 16, "temperature": 1.0, "seed": 3, "eos_token_id": []}
    together = decoder.generate(PROMPTS, batch_size=5, **settings_of)
    in_turn = decoder.generate(PROMPTS, batch_size=1, **settings_of)
    assert [result.tokens for result in together] == [result.tokens for result in in_turn]


def test_rows_may_differ_in_temperature_and_seed(target, plain) -> None:
    decoder = Decoder(target, Scripted(plain, 0))
    own = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2}]
    prompts = [PROMPTS[0]] * 3
    greedy, one, two = decoder.generate(prompts, per_prompt=own, max_new_tokens=16, eos_token_id=[])
    assert greedy.tokens == plain[tuple(PROMPTS[0])][4:20]
    assert one.tokens != two.tokens
    again = decoder.generate(prompts, per_prompt=own, max_new_tokens=16, eos_token_id=[])
    assert [result.tokens for result in again] == [greedy.tokens, one.tokens, two.tokens]


def test_coupled_text_is_the_same_with_every_drafter(target, plain) -> None:
    texts = []
    for drafter in (Scripted(plain, 0), Scripted(plain, 2, gamma=7, width=3), "none", "prompt-lookup"):
        decoder = Decoder(target, drafter, rule="coupled")
        results = decoder.generate(PROMPTS, max_new_tokens=20, temperature=0.8, seed=11, eos_token_id=[])
        texts.append([result.tokens for result in results])
    assert all(text == texts[0] for text in texts[1:])


def test_no_global_random_state_is_touched(target, plain) -> None:
    before = torch.get_rng_state()
    Decoder(target, Scripted(plain, 2)).generate(PROMPTS, max_new_tokens=8, temperature=1.0, seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_a_draft_past_the_context_is_an_error_of_the_drafter(tiny_gpt2) -> None:
    class TooFar(Drafter):
        def propose(self, state):
            return Proposal(TokenTree.chain(torch.ones(1, 40, dtype=torch.int64)))

    target = Target(tiny_gpt2)
    context = target.context_length
    with pytest.raises(DraftwoodError, match="TooFar drafted 40 levels"):
        Decoder(target, TooFar()).generate([3] * (context - 20), max_new_tokens=20)


def test_the_last_token_of_the_context_is_reached(tiny_gpt2) -> None:
    target = Target(tiny_gpt2)
    prompt = [3, 4] * ((target.context_length - 10) // 2)
    texts = [
        Decoder(target, drafter).generate(prompt, max_new_tokens=10, eos_token_id=[]).tokens
        for drafter in ("none", "prompt-lookup")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 10
