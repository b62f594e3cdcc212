"""Prompt lookup against a search that is too simple to be wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.drafter import DraftSession
from draftwood.core.errors import InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.state import DecodeState
from draftwood.drafters.prompt_lookup import NgramIndex, PromptLookup

# Few different tokens, so that nearly every suffix has occurred before.
TOKEN = st.integers(0, 2)
TEXT = st.lists(TOKEN, min_size=1, max_size=30)


def new_row(tokens: list[int], room: int = 100) -> Any:
    return SimpleNamespace(tokens=list(tokens), max_tokens=len(tokens) + 1 + room)


def new_state(*rows: Any) -> DecodeState:
    return DecodeState(target=cast(Any, None), cache=cast(Any, None), style="chosen", rows=list(rows))


def propose_once(drafter: PromptLookup, text: list[int], room: int = 100) -> list[tuple[int, ...]]:
    state = new_state()
    session = drafter.session(state)
    state.rows.append(new_row(text, room))
    session.admit(state, [0])
    return paths_of(session.propose(state))[0]


def paths_of(proposal: Proposal) -> list[list[tuple[int, ...]]]:
    """Returns, for each row, each node as the tokens from the root down to it, in node order."""
    rows = []
    for tokens, parents in zip(*proposal.tree.to_lists(), strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


def naive_matches(text: list[int], min_ngram: int, max_ngram: int) -> list[int]:
    found: list[int] = []
    for length in range(max_ngram, min_ngram - 1, -1):
        for position in range(len(text) - 1, length - 1, -1):
            same = text[position - length : position] == text[len(text) - length :]
            if same and text[position] not in [text[other] for other in found]:
                found.append(position)
    return found


def naive_paths(options: PromptLookup, text: list[int], room: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for position in naive_matches(text, options.min_ngram, options.max_ngram):
        written = list(text)
        for step in range(min(options.gamma, room)):
            written.append(written[position + step])
            paths.append(tuple(written[len(text) :]))
    return paths[: options.nodes]


@given(st.lists(TEXT, min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 3))
@settings(deadline=None)
def test_index_finds_what_a_search_finds(chunks: list[list[int]], min_ngram: int, more: int) -> None:
    index, text = NgramIndex(min_ngram, min_ngram + more), list[int]()
    for chunk in chunks:
        text += chunk
        index.extend(text)
        assert list(index.matches(text)) == naive_matches(text, min_ngram, min_ngram + more)


@given(TEXT, st.integers(1, 4), st.integers(0, 3), st.integers(1, 6), st.integers(1, 12), st.integers(0, 8))
@settings(deadline=None)
def test_proposal_is_the_naive_one(text: list[int], least: int, more: int, gamma: int, nodes: int, room: int) -> None:
    drafter = PromptLookup(min_ngram=least, max_ngram=least + more, gamma=gamma, nodes=nodes)
    paths = propose_once(drafter, text, room)
    assert paths == naive_paths(drafter, text, room)
    assert max(map(len, paths), default=0) <= room


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_rows_stay_aligned_while_they_grow_come_and_go(data: st.DataObject) -> None:
    drafter = PromptLookup(max_ngram=3, gamma=4, nodes=7)
    state = new_state()
    session: DraftSession = drafter.session(state)
    for _ in range(data.draw(st.integers(1, 8), "rounds")):
        newcomers = data.draw(st.lists(TEXT, max_size=2), "admitted")
        first = len(state.rows)
        state.rows += [new_row(text, room=data.draw(st.integers(0, 30), "room")) for text in newcomers]
        session.admit(state, list(range(first, len(state.rows))))
        proposal = session.propose(state)
        assert proposal.law is None and proposal.tree.batch == len(state.rows)
        assert paths_of(proposal) == [
            naive_paths(drafter, row.tokens, state.room(index)) for index, row in enumerate(state.rows)
        ]
        for row in state.rows:
            row.tokens += data.draw(st.lists(TOKEN, min_size=1, max_size=5), "committed")
        stay = data.draw(st.lists(st.sampled_from(range(len(state.rows))), unique=True), "stay") if state.rows else []
        state.rows = [state.rows[row] for row in stay]
        session.retain(stay)


def test_longest_match_comes_first_then_shorter_ones() -> None:
    #       1 2 3 went on with 4; 2 3, later, with 5; 3, latest, with 6
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 1, 2, 3]
    assert propose_once(PromptLookup(gamma=2), text) == [(4,), (4, 9), (5,), (5, 8), (6,), (6, 7)]
    assert propose_once(PromptLookup(gamma=2, min_ngram=2), text) == [(4,), (4, 9), (5,), (5, 8)]
    assert propose_once(PromptLookup(gamma=2, max_ngram=1), text) == [(6,), (6, 7), (5,), (5, 8), (4,), (4, 9)]


def test_nodes_cut_the_last_continuations_first() -> None:
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 1, 2, 3]
    assert propose_once(PromptLookup(gamma=2, nodes=3), text) == [(4,), (4, 9), (5,)]


def test_a_repeating_text_gets_a_full_draft() -> None:
    assert propose_once(PromptLookup(gamma=5, nodes=5), [1, 7, 7, 7])[-1] == (7, 7, 7, 7, 7)
    assert propose_once(PromptLookup(gamma=5, nodes=5), [7, 8, 9, 7, 8, 9, 7])[-1] == (8, 9, 7, 8, 9)


@pytest.mark.parametrize("text", [[5], [1, 2, 3, 4]])
def test_nothing_to_look_up_drafts_nothing(text: list[int]) -> None:
    assert propose_once(PromptLookup(), text) == []


class CountingList(list[int]):
    """Counts the tokens read from it."""

    read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.read += len(found) if isinstance(key, slice) else 1
        return found


def test_a_round_costs_what_is_new_not_the_text() -> None:
    drafter, tokens = PromptLookup(), CountingList([1, 2, 3, 4] * 500)
    state = new_state()
    session = drafter.session(state)
    state.rows.append(SimpleNamespace(tokens=tokens, max_tokens=10_000))
    session.admit(state, [0])
    session.propose(state)
    tokens.extend([1, 2])
    tokens.read = 0
    assert session.propose(state).tree.sizes == (8,)
    # Two new tokens with n-grams of 1, 2 and 3; the suffixes; one continuation of 8.
    assert tokens.read <= 2 * (3 + 2 + 1) + 2 * 6 + 6 + 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_ngram": 0}, "min_ngram must be a whole number >= 1, got 0"),
        ({"max_ngram": 0}, r"max_ngram must be a whole number >= 1 \(min_ngram\), got 0"),
        ({"max_ngram": 2, "min_ngram": 3}, r"max_ngram must be a whole number >= 3 \(min_ngram\), got 2"),
        ({"gamma": 0}, "gamma must be a whole number >= 1, got 0"),
        ({"gamma": "abc"}, "gamma must be a whole number >= 1, got 'abc'"),
        ({"gamma": 2.5}, "gamma must be .* got 2.5"),
        ({"nodes": None}, "nodes must be .* got None"),
        ({"nodes": -1}, "nodes must be a whole number >= 1, got -1"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        PromptLookup(**options)
