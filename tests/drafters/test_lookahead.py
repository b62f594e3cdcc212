"""Lookahead against a straight re-implementation of the paper: no tree, no cache, one forward a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftwood.core.drafter import Observation
from draftwood.core.errors import InvalidRequest
from draftwood.core.rule import RandomSource, SeededSource, draft_generator
from draftwood.core.state import DecodeState, Row
from draftwood.core.stats import Seconds
from draftwood.core.target import Target
from draftwood.core.tree import ROOT
from draftwood.decoder import Decoder
from draftwood.drafters.lookahead import JacobiWindow, Lookahead, NgramPool
from tests.architectures import VOCABULARY, build

NEW_TOKENS = 32
PROMPT = [7, 31, 7, 50, 12, 7, 31]
Ngram = tuple[int, ...]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama", num_hidden_layers=2, max_position_embeddings=128))


@dataclass
class Paper:
    """The algorithm of arXiv:2402.02057, as the authors' code starts it: one text, plain lists, greedy window."""

    target: Target
    width: int | None
    ngram: int
    limit: int | None
    seeded: bool = False
    temperature: float = 0.0
    rule: str = "greedy"
    seed: int = 0

    def __post_init__(self) -> None:
        self.cells_with_eos = 0

    def logits(self, texts: list[list[int]]) -> Tensor:
        """Returns the logits behind each text, [texts, vocabulary]. Padding at the end is seen by nothing before it."""
        width = max(len(text) for text in texts)
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        with torch.inference_mode():
            logits: Tensor = self.target.model(ids).logits
        return logits[range(len(texts)), [len(text) - 1 for text in texts]]

    def steps(self, prompt: list[int], count: int, key: int = 0) -> list[list[int]]:
        """Returns what each step commits, the one that reads the prompt first."""
        text, generator = list(prompt), draft_generator(self.seed, key)
        source, end = SeededSource(self.seed, key), len(prompt) + count
        pool: dict[int, list[Ngram]] = {}
        window = self._start(text, generator)
        committed = [self._verify(text, [], source)]
        text += committed[0]
        read = 0 if self.seeded else len(prompt)
        read = self._read_text(pool, text, read)
        while len(text) < end:
            room = end - len(text) - 1
            guesses = [] if self.limit is None else pool.get(text[-1], [])[::-1]
            found = self._jacobi(text, window)
            step = self._verify(text, [guess[:room] for guess in guesses], source)
            window = self._move(window, found, pool, text, step, generator)
            text += step
            committed.append(step)
            read = self._read_text(pool, text, read)
        return committed

    def _verify(self, text: list[int], guesses: list[Ngram], source: RandomSource) -> list[int]:
        """Algorithms 3 (greedy) and 4 (sampling); with coupled noise it is greedy on the perturbed logits."""
        step: list[int] = []
        alive = [guess for guess in guesses if guess]
        while True:
            place = len(text) + len(step)
            logits = self.logits([text + step])[0] / (self.temperature or 1.0)
            offered = list(dict.fromkeys(guess[len(step)] for guess in alive))
            if self.rule == "rejection":
                p = torch.softmax(logits, -1)
                token = None
                for guess in offered:
                    if source.accept(float(p[guess])):
                        token = guess
                        break
                    p[guess] = 0.0
                    p = p / p.sum()
                if token is None:
                    return [*step, source.draw(p)]
            else:
                noise = source.gumbel(place, VOCABULARY) if self.rule == "coupled" else 0.0
                token = int((logits + noise).argmax())
                if token not in offered:
                    return [*step, token]
            alive = [guess for guess in alive if guess[len(step)] == token and len(guess) > len(step) + 1]
            step.append(token)

    def _start(self, text: list[int], generator: torch.Generator) -> list[list[int]]:
        """One level, without the current token that heads it."""
        return [] if self.width is None else [self._fill(text, self.width + self.ngram - 3, generator)]

    def _fill(self, text: list[int], count: int, generator: torch.Generator) -> list[int]:
        usable = [token for token in text if token not in self.target.eos_token_ids]
        places = torch.randint(len(usable), (count,), generator=generator).tolist() if count else []
        return [usable[place] for place in places]

    def _jacobi(self, text: list[int], window: list[list[int]]) -> list[int]:
        """The argmax behind every column of the last level; the first column's level 0 is the current token."""
        columns = range(len(window[0]) + 1 if window else 0)
        texts = [text + window[0][:column] + [level[column] for level in window[1:]] for column in columns]
        found: list[int] = self.logits(texts).argmax(-1).tolist() if texts else []
        return found

    def _move(
        self,
        window: list[list[int]],
        found: list[int],
        pool: dict[int, list[Ngram]],
        text: list[int],
        step: list[int],
        generator: torch.Generator,
    ) -> list[list[int]]:
        if not window:
            return []
        if len(window) < self.ngram - 1:  # warm-up
            window, new = [level[1:] for level in window], found[1:]
        else:
            for column, last in enumerate(found):
                first = window[0][column - 1] if column else text[-1]
                self._add(pool, (first, *(level[column] for level in window[1:]), last))
            window, new = window[1:], list(found)
            if window:
                window[0] = window[0][1:]
        ended = [column for column, token in enumerate(new) if token in self.target.eos_token_ids]
        for column, token in zip(ended, self._fill(text + step, len(ended), generator), strict=True):
            new[column] = token
        self.cells_with_eos += len(ended)
        return [*window, new] if window else [new[1:]]

    def _read_text(self, pool: dict[int, list[Ngram]], text: list[int], read: int) -> int:
        while (self.seeded or self.width is None) and read + self.ngram <= len(text):
            self._add(pool, tuple(text[read : read + self.ngram]))
            read += 1
        return read

    def _add(self, pool: dict[int, list[Ngram]], ngram: Ngram) -> None:
        """The pool: at most G n-grams for a first token, the one seen least lately goes."""
        grams = pool.setdefault(ngram[0], [])
        if ngram[1:] in grams:
            grams.remove(ngram[1:])
        grams.append(ngram[1:])
        if self.limit is not None and len(grams) > self.limit:
            grams.pop(0)


def run(
    target: Target,
    drafter: Lookahead,
    prompts: list[list[int]],
    rule: str = "greedy",
    batch_size: int = 8,
    per_prompt: list[dict[str, Any]] | None = None,
    watch: Callable[[Observation], None] = lambda seen: None,
    **more: Any,
) -> tuple[list[Row], list[list[list[int]]]]:
    """Returns the decoded rows and, for each, what each round committed."""
    decoder = Decoder(target, drafter, rule=rule)
    more = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], **more}
    rows = decoder.rows(prompts, more, per_prompt, Seconds())
    rounds: list[list[list[int]]] = [[] for _ in prompts]

    def note(state: DecodeState, seen: Observation) -> None:
        for index, tokens in zip(seen.rows, seen.verdict.tokens, strict=True):
            rounds[state.rows[index].key].append(tokens)
        watch(seen)

    engine = decoder.engine(rows)
    engine.watch = note
    for _ in engine.decode(rows, batch_size, Seconds()):
        pass
    return rows, rounds


OPTIONS: list[dict[str, Any]] = [
    {"window": 5, "ngram": 4, "guesses": 3},
    {"window": 1, "ngram": 2, "guesses": 1},
    {"window": 4, "ngram": 2, "guesses": 5},
    {"window": 1, "ngram": 5, "guesses": 2},
    {"window": 7, "ngram": 5, "guesses": 7},
    {"window": 3, "ngram": 3, "guesses": 4, "seed_from_prompt": True},
    {"window": None, "ngram": 3, "guesses": 3},
    {"window": None, "ngram": 2, "guesses": 4, "seed_from_prompt": True},
    {"window": 4, "ngram": 3, "guesses": None},
]


def paper(target: Target, options: dict[str, Any], **more: Any) -> Paper:
    return Paper(
        target, options["window"], options["ngram"], options["guesses"], options.get("seed_from_prompt", False), **more
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_steps_equal_the_papers(target: Target, options: dict[str, Any]) -> None:
    [row], [rounds] = run(target, Lookahead(**options), [PROMPT])
    expected = paper(target, options).steps(PROMPT, NEW_TOKENS)
    assert rounds == expected
    # The prefill round commits one token and is no draft round.
    assert row.stats.tau == pytest.approx((NEW_TOKENS - 1) / (len(expected) - 1))
    if options["window"] != 1:  # too narrow to guess anything in so short a text
        assert (row.stats.tau > 1.0) == (options["guesses"] is not None)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5], OPTIONS[7]], ids=str)
def test_sampled_steps_equal_the_papers(target: Target, options: dict[str, Any], rule: str) -> None:
    accepted = 0
    for seed in range(2):
        _, [rounds] = run(target, Lookahead(**options), [PROMPT], rule, temperature=0.4, seed=seed)
        assert rounds == paper(target, options, temperature=0.4, rule=rule, seed=seed).steps(PROMPT, NEW_TOKENS)
        accepted += sum(len(step) - 1 for step in rounds)
    assert accepted > 3


def test_no_end_of_text_token_is_in_the_window() -> None:
    model = build("llama", num_hidden_layers=2, max_position_embeddings=128)
    plain = Decoder(Target(model)).generate(PROMPT, max_new_tokens=NEW_TOKENS, eos_token_id=[]).tokens
    # A token that the text is full of, so that the trajectories are too.
    model.generation_config.eos_token_id = [max(set(plain), key=plain.count), plain[3]]
    target = Target(model)
    for options in OPTIONS[:1] + OPTIONS[2:3]:
        reference = paper(target, options)
        expected = reference.steps(PROMPT, NEW_TOKENS)
        assert reference.cells_with_eos > 3
        [row], [rounds] = run(target, Lookahead(**options), [PROMPT])
        assert rounds == expected
        assert row.output == plain


def test_the_prompt_is_learnt_from_only_if_asked_for(target: Target) -> None:
    prompt = PROMPT + Decoder(target).generate(PROMPT, max_new_tokens=24, eos_token_id=[]).tokens + PROMPT
    taus = []
    for seeded in (False, True):
        options: dict[str, Any] = {"window": None, "ngram": 3, "guesses": 4, "seed_from_prompt": seeded}
        [row], [rounds] = run(target, Lookahead(**options), [prompt], max_new_tokens=20)
        assert rounds == paper(target, options).steps(prompt, 20)
        taus.append(row.stats.tau)
    assert taus[0] < taus[1]


def test_a_prompt_of_nothing_but_end_of_text(target: Target) -> None:
    [eos] = target.eos_token_ids
    plain = Decoder(target).generate([eos], max_new_tokens=12, eos_token_id=[])
    [row], _ = run(target, Lookahead(), [[eos]], max_new_tokens=12)
    assert row.output == plain.tokens


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_rows_of_a_ragged_batch_do_not_meet(target: Target, rule: str) -> None:
    prompts = [PROMPT, [5], [9, 9, 80, 3, 44, 21, 9, 80, 3], [60, 61], [60, 61]]
    lengths = [NEW_TOKENS, 9, 20, 1, 14]
    temperature = 0.4 if rule == "rejection" else 0.0
    per_prompt = [{"max_new_tokens": length} for length in lengths]
    options = {**OPTIONS[5], "window": 4}
    _, rounds = run(
        target, Lookahead(**options), prompts, rule, batch_size=3, temperature=temperature, per_prompt=per_prompt
    )
    for key, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        reference = paper(target, options, temperature=temperature, rule=rule)
        assert rounds[key] == reference.steps(prompt, length, key)


def test_window_and_text_stop_where_the_context_ends() -> None:
    # Learned positions: one node too far and the embedding table is overrun.
    model = build("gpt2", n_layer=2, n_positions=24)
    target = Target(model)
    plain = Decoder(target).generate(PROMPT, max_length=24, eos_token_id=[])
    for drafter in (Lookahead(window=6, ngram=4), Lookahead(window=40), Lookahead(window=None, seed_from_prompt=True)):
        [row], _ = run(target, drafter, [PROMPT], max_new_tokens=None, max_length=24)
        assert row.output == plain.tokens
        assert len(row.output) == 24 - len(PROMPT)


def test_the_window_is_scored_as_long_as_its_farthest_cell_is_inside_the_context() -> None:
    target = Target(build("gpt2", n_layer=2, n_positions=24))
    widths: list[int] = []
    drafter = Lookahead(window=6, ngram=4, guesses=None)  # a token a round
    run(
        target,
        drafter,
        [PROMPT],
        max_new_tokens=None,
        max_length=24,
        watch=lambda seen: widths.append(seen.proposal.tree.width),
    )
    # Behind n tokens the farthest cell is the token of index n - 1 + 7.
    lengths = range(len(PROMPT) + 1, 24)
    assert [width > 0 for width in widths] == [False, *(before + 7 <= 24 for before in lengths)]


def test_window_nodes_are_no_candidates(target: Target) -> None:
    sizes = []

    def watch(seen: Observation) -> None:
        tree = seen.proposal.tree
        assert tree.candidate is not None or not tree.width
        candidates = 0 if tree.candidate is None else int(tree.candidate.sum())
        assert tree.candidate is None or bool(tree.candidate[0, seen.verdict.paths[0]].all())
        sizes.append((tree.width - candidates, candidates))

    [row], _ = run(target, Lookahead(window=5, ngram=4, guesses=3), [PROMPT], watch=watch)
    # W + N - 3 = 6 nodes, then 5 + 6, then (N - 1) W - 1 at every step; the root is a cell of the first level.
    assert [idle for idle, _ in sizes[:5]] == [0, 6, 11, 14, 14]
    assert max(candidates for _, candidates in sizes) > 3
    assert row.stats.drafted == sum(candidates for _, candidates in sizes)


def test_nothing_is_drafted_for_the_last_token(target: Target) -> None:
    widths: list[int] = []
    run(target, Lookahead(), [PROMPT], max_new_tokens=3, watch=lambda seen: widths.append(seen.proposal.tree.width))
    assert widths == [0, 9, 0]


@given(st.integers(1, 6), st.integers(2, 6), st.data())
@settings(deadline=None, max_examples=60)
def test_cells_follow_each_other_as_in_the_paper(width: int, ngram: int, data: st.DataObject) -> None:
    """Follows every cell's parents to the root and compares with the levels read as in the paper's figure."""
    window = JacobiWindow(width, ngram, list(range(100, 100 + width + ngram - 3)))
    for step in range(data.draw(st.integers(0, 2 * ngram))):
        count = len(window.levels[-1])
        ngrams = window.advance([1000 * (step + 1) + column for column in range(count)])
        assert len(ngrams) == (width if step >= ngram - 2 else 0)
        assert all(len(one) == ngram for one in ngrams)
    tokens, parents = window.nodes()
    columns, deepest = len(window.levels[0]), 0
    for level, row in enumerate(window.levels):
        assert len(row) == columns
        for column in range(columns):
            if level or column:
                path, node = [], level * columns + column - 1
                while node != ROOT:
                    path.append(tokens[node])
                    node = parents[node]
                assert path[::-1] == window.levels[0][1 : column + 1] + [
                    window.levels[above][column] for above in range(1, level + 1)
                ]
                deepest = max(deepest, len(path))
    assert deepest == window.reach
    assert window.newest() == slice((len(window.levels) - 1) * columns, len(tokens) + 1)


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), max_size=40), st.integers(1, 3))
def test_the_pool_forgets_what_it_has_not_seen_for_longest(ngrams: list[Ngram], limit: int) -> None:
    pool = NgramPool(limit)
    for ngram in ngrams:
        pool.add(ngram)
    for first in range(4):
        latest = list(dict.fromkeys(ngram[1:] for ngram in reversed(ngrams) if ngram[0] == first))
        assert pool.guesses(first) == latest[:limit]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram": 1}, "ngram must be a whole number >= 2 .*, got 1"),
        ({"ngram": "x"}, "ngram must be a whole number >= 2 .*, got 'x'"),
        ({"window": 2.5}, "window must be a whole number >= 1, .* got 2.5"),
        ({"window": 0}, "window must be a whole number >= 1, or None to switch it off, got 0"),
        ({"window": -3}, "window must be .* got -3"),
        ({"guesses": 0}, "guesses must be a whole number >= 1, or None to switch it off, got 0"),
        ({"window": None, "guesses": None}, "got window=None and seed_from_prompt=False"),
        ({"guesses": None, "seed_from_prompt": True}, "got window=7 and seed_from_prompt=True"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Lookahead(**options)


def test_options_have_the_authors_defaults() -> None:
    drafter = Lookahead()
    assert (drafter.window, drafter.ngram, drafter.guesses, drafter.seed_from_prompt) == (7, 5, 7, False)
    with pytest.raises(TypeError):
        Lookahead(windows=7)  # type: ignore[call-arg]
