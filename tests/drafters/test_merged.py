"""Merged drafters: the union of what the parts draft, the target's law, and parts that never notice each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.drafter import Drafter, DraftSession, Observation
from draftwood.core.errors import InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.rule import RandomSource, Rule
from draftwood.core.state import DecodeState
from draftwood.core.stats import RowStats
from draftwood.core.target import Target
from draftwood.core.tree import ROOT, TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.lookahead import Lookahead
from draftwood.drafters.merged import CUT, Merged, merge
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.prompt_lookup import PromptLookup
from tests.architectures import VOCABULARY, build
from tests.verify.enumeration import LOSSLESS, SCHEMES, Law, Shape, Text, World, draft, runs

# --- One tree of two ---


class Node(NamedTuple):
    """A node by what it stands for: the tokens from the root to it, and whether it is a candidate."""

    path: Text
    candidate: bool


def nodes_of(tree: TokenTree, row: int) -> list[Node]:
    tokens, parents = tree.to_lists()
    candidate = [[True] * size for size in tree.sizes] if tree.candidate is None else tree.candidate.tolist()
    nodes: list[Node] = []
    for node, (token, parent) in enumerate(zip(tokens[row], parents[row], strict=True)):
        assert parent < node
        above: Text = () if parent == ROOT else nodes[parent].path
        nodes.append(Node((*above, token), candidate[row][node]))
    return nodes


@st.composite
def proposals(draw: st.DrawFn, batch: int) -> Proposal:
    """Trees of few tokens, so that they overlap; some nodes, with all below them, are no candidates."""
    tokens, parents, candidate = [], [], []
    for _ in range(batch):
        size = draw(st.integers(0, 7))
        tokens.append(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
        parents.append([draw(st.integers(ROOT, node - 1)) for node in range(size)])
        flags: list[bool] = []
        for parent in parents[-1]:
            flags.append((parent == ROOT or flags[parent]) and draw(st.integers(0, 3)) > 0)
        candidate.append(flags)
    return Proposal(TokenTree.from_lists(tokens, parents, candidate))


@given(st.data(), st.integers(1, 3), st.integers(2, 3))
@settings(deadline=None)
def test_the_merged_tree_is_the_union(data: st.DataObject, batch: int, count: int) -> None:
    parts = [data.draw(proposals(batch)) for _ in range(count)]
    merged = merge(parts)
    assert merged.proposal.law is None
    for row in range(batch):
        united = nodes_of(merged.proposal.tree, row)
        apart = [nodes_of(part.tree, row) for part in parts]
        candidates = [node.path for node in united if node.candidate]
        assert len(set(candidates)) == len(candidates)
        assert set(candidates) == {node.path for part in apart for node in part if node.candidate}
        idle = sorted(node.path for node in united if not node.candidate)
        assert idle == sorted(node.path for part in apart for node in part if not node.candidate)
        for part, places in zip(apart, merged.places, strict=True):
            assert [united[place] for place in places[row]] == part


@given(st.data(), st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_the_budget_goes_to_the_first_part_first(data: st.DataObject, budget: int, drawn: bool) -> None:
    parts = [data.draw(proposals(1)) for _ in range(3)]
    if drawn:  # the last part then comes first in the tree, yet still last when the budget is shared
        parts[2] = Proposal(parts[2].tree, torch.full((1, parts[2].tree.width, 2), 0.5))
    merged = merge(parts, budget)
    united = nodes_of(merged.proposal.tree, 0)
    spent: set[int] = set()
    for part, places in zip(parts, merged.places, strict=True):
        kept: list[bool] = []
        apart = nodes_of(part.tree, 0)
        for node, parent in enumerate(part.tree.parents[0].tolist()):
            fits = len(spent) < budget or not apart[node].candidate
            kept.append((parent == ROOT or kept[parent]) and fits)
            if kept[-1] and apart[node].candidate:
                spent.add(places[0][node])
        assert [place != CUT for place in places[0]] == kept
        assert all(place == CUT or united[place] == apart[node] for node, place in enumerate(places[0]))
    assert sum(node.candidate for node in united) <= budget


def test_laws() -> None:
    """Siblings with a law come first and keep it, whatever the order of the parts; all others are chosen."""
    chosen = Proposal(TokenTree.from_lists([[5, 1, 7, 2]], [[ROOT, ROOT, 1, 2]]))
    law = torch.rand(1, 3, 8)
    drawn = Proposal(TokenTree.from_lists([[1, 3, 6]], [[ROOT, ROOT, 0]]), law)
    other = Proposal(TokenTree.from_lists([[3, 4]], [[ROOT, 0]]), torch.rand(1, 2, 8))
    merged = merge([chosen, drawn, other])
    assert merged.proposal.law is not None and other.law is not None
    expected = {
        (1,): law[0, 0],
        (3,): law[0, 1],
        (1, 6): law[0, 2],
        (3, 4): other.law[0, 1],  # nobody else is there
        (5,): torch.eye(8)[5],
        (1, 7): torch.eye(8)[7],
        (1, 7, 2): torch.eye(8)[2],
    }
    paths = [node.path for node in nodes_of(merged.proposal.tree, 0)]
    assert sorted(paths) == sorted(expected)
    for path, row in zip(paths, merged.proposal.law[0], strict=True):
        torch.testing.assert_close(row, expected[path], rtol=0, atol=0)
    assert paths.index((1,)) < paths.index((3,)) < paths.index((5,))
    assert paths.index((1, 6)) < paths.index((1, 7))


# --- Exact losslessness ---


@dataclass(eq=False)
class OtherDrafter(World):
    """The same target and another q."""

    def q(self, context: Text) -> torch.Tensor:
        return self._weights("other q", context)


CHAIN, WIDE, RAGGED = Shape((ROOT, 0)), Shape((ROOT, ROOT)), Shape((ROOT, ROOT, 0))
MERGES = {
    "drawn and chosen": ([(RAGGED, "without replacement"), (RAGGED, "chosen")], None),
    "chosen and drawn": ([(RAGGED, "chosen"), (RAGGED, "without replacement")], None),
    "drawn twice": ([(WIDE, "without replacement"), (CHAIN, "without replacement")], None),
    "drawn twice, the other way": ([(CHAIN, "without replacement"), (WIDE, "without replacement")], None),
    "with replacement": ([(WIDE, "chosen"), (WIDE, "with replacement")], None),
    "three": ([(CHAIN, "chosen"), (CHAIN, "without replacement"), (WIDE, "chosen")], None),
    "shape by value": ([(Shape((ROOT, ROOT, 0, 1), conditional=True), "without replacement"), (CHAIN, "chosen")], None),
    "no law": ([(RAGGED, "chosen"), (RAGGED, "drawn, law withheld")], None),
    "idle nodes": ([(Shape((ROOT, ROOT, 0), frozenset({0, 2})), "chosen"), (RAGGED, "without replacement")], None),
    "budget, drawn and chosen": ([(RAGGED, "without replacement"), (RAGGED, "chosen")], 4),
    "budget, chosen and drawn": ([(WIDE, "chosen"), (RAGGED, "without replacement")], 4),
    "small budget, chosen and drawn": ([(WIDE, "chosen"), (RAGGED, "without replacement")], 3),
    "budget for one of two": ([(Shape((ROOT,)), "chosen"), (WIDE, "without replacement")], 2),
    "budget, below an elder": ([(WIDE, "chosen"), (Shape((ROOT, ROOT, 0, 1)), "without replacement")], 5),
    "budget, drawn twice": ([(WIDE, "without replacement"), (WIDE, "without replacement")], 3),
}


def draft_merged(
    source: RandomSource, world: World, parts: list[tuple[Shape, str]], budget: int | None
) -> tuple[Proposal, torch.Tensor]:
    """Lets every part draft, each with a q of its own, and merges; returns the target's logits as well."""
    drafters = [world, OtherDrafter(world.vocabulary, world.seed), World(world.vocabulary, world.seed, agreement=1.0)]
    drafted = [
        draft(source, drafter, shape, SCHEMES[scheme]).proposal
        for drafter, (shape, scheme) in zip(drafters, parts, strict=False)
    ]
    proposal = merge(drafted, budget).proposal
    logits = [world.p(()).log(), *(world.p(node.path).log() for node in nodes_of(proposal.tree, 0))]
    return proposal, torch.stack(logits)[None]


def distance(rule: Rule, world: World, parts: list[tuple[Shape, str]], budget: int | None) -> float:
    """Returns how far what one round commits, continued by the target, is from the target, in total variation."""
    law: Law = {}
    for drafted, (proposal, logits) in runs(lambda source: draft_merged(source, world, parts, budget)):
        for judged, verdict in runs(lambda source: rule.verify(proposal, logits, [source], [0])):  # noqa: B023
            text = tuple(verdict.tokens[0])
            law[text] = law.get(text, 0.0) + drafted * judged
    horizon = 1 + max(map(len, law))
    law, target = world.extend(law, horizon), world.extend({(): 1.0}, horizon)
    return sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("case", MERGES)
def test_a_merge_is_lossless(case: str, rule: str) -> None:
    parts, budget = MERGES[case]
    for seed in (0, 1):
        assert distance(LOSSLESS[rule], World(3, seed), parts, budget) < 1e-12


# --- Parts at work ---


class Oracle(Drafter):
    """Drafts a random tree in which the right continuation is likely; draws from the row's generator alone.

    Args:
        answers: for each prompt's key, the text that the target will commit.
        odds: how likely each right token is to be drafted.
        nodes: size of the tree.
        feature: the target's feature it asks for.
    """

    def __init__(self, answers: list[list[int]], odds: float, nodes: int, feature: int | str = "last") -> None:
        self._answers, self._odds, self._nodes = answers, odds, nodes
        self.features = frozenset({feature})  # type: ignore[arg-type]

    def propose(self, state: DecodeState) -> Proposal:
        tokens, parents = [], []
        for index, row in enumerate(state.rows):
            chance = random.Random(int(torch.randint(2**31, (), generator=row.generator)))
            made: list[int] = []
            above: list[int] = []
            depths = {ROOT: 0}
            right = {ROOT}
            answer = self._answers[row.key][len(row.output) :]
            for node in range(self._nodes):
                parent = chance.choice([one for one in depths if depths[one] < state.room(index)] or [None])
                if parent is None:
                    break
                true = parent in right and chance.random() < self._odds
                made.append(answer[depths[parent]] if true else chance.randrange(VOCABULARY))
                above.append(parent)
                depths[node] = depths[parent] + 1
                right |= {node} if true else set()
            tokens.append(made)
            parents.append(above)
        return Proposal(TokenTree.from_lists(tokens, parents))


class Spy(Drafter):
    """Checks what another drafter's session is told against forwards of whole texts."""

    def copy(self) -> Spy:
        """Itself: what is bound is what is looked at."""
        return self

    def __init__(self, spied: Drafter) -> None:
        self.spied = spied
        self.accepted: list[int] = []
        self.beyond = 0  # rounds that accepted nodes of others behind or instead of its own
        self.cut = 0

    def bind(self, target: Target) -> None:
        self.spied.bind(target)
        self.features = self.spied.features

    def session(self, state: DecodeState) -> DraftSession:
        return SpySession(self, self.spied.session(state))


class SpySession(DraftSession):
    def __init__(self, spy: Spy, session: DraftSession) -> None:
        self._spy, self._session = spy, session
        self._proposal = Proposal.empty(0)

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        self._session.admit(state, rows)

    def propose(self, state: DecodeState) -> Proposal:
        self._proposal = self._session.propose(state)
        return self._proposal

    def observe(self, state: DecodeState, seen: Observation) -> None:
        if seen.proposal.tree.width:
            assert seen.proposal is self._proposal
        for index, row in enumerate(seen.rows):
            self._check(state, seen, index, state.rows[row].tokens)
        self._session.observe(state, seen)

    def retain(self, rows: Sequence[int]) -> None:
        self._session.retain(rows)

    def _check(self, state: DecodeState, seen: Observation, index: int, tokens: list[int]) -> None:
        committed, path = seen.verdict.tokens[index], seen.verdict.paths[index]
        before = tokens[: len(tokens) - len(committed)]
        assert tokens[len(before) :] == committed
        nodes = nodes_of(seen.proposal.tree, index)
        parents = seen.proposal.tree.parents[index].tolist()
        # Its path is the longest beginning of what was accepted that it drafted itself.
        assert [parents[node] for node in path] == [ROOT, *path][: len(path)]
        logits = seen.scores.logits[index]
        assert len(logits) == 1 + seen.proposal.tree.width
        scored = [
            node for node, row in zip(nodes, logits[1:], strict=False) if node.candidate and not row.isnan().any()
        ]
        right = [node.path for node in scored if node.path == tuple(committed[: len(node.path)])]
        assert [nodes[node].path for node in path][-1:] == sorted(right, key=len)[-1:]
        for place, text in enumerate([(), *(node.path for node in nodes)]):
            if bool(logits[place].isnan().all()):
                self._spy.cut += 1
                assert place - 1 not in path
            else:
                expected = plain_forward(state.target, [*before, *text])
                torch.testing.assert_close(logits[place], expected.logits[0, -1])
        for name in seen.scores.features:
            kept = seen.kept(name)[index]
            hidden = plain_forward(state.target, tokens).hidden_states[-1 if name == "last" else name][0]
            torch.testing.assert_close(kept, hidden[len(tokens) - 1 - len(kept) : -1])
            assert len(kept) == seen.scores.pending[index] + len(committed) - 1
        self._spy.accepted.append(len(path))
        self._spy.beyond += len(path) < len(committed) - 1


def plain_forward(target: Target, text: list[int]) -> Any:
    return target.model(torch.tensor([text]), output_hidden_states=True)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama", num_hidden_layers=3, max_position_embeddings=128))


PROMPTS = [[7, 31, 7, 50, 12, 7, 31], [5], [9, 9, 80, 3, 44, 21, 9, 80, 3], [60, 61, 60]]
LENGTHS = [24, 15, 7, 20]


def plain(target: Target, prompts: list[list[int]] = PROMPTS, length: int = 24, **more: Any) -> list[list[int]]:
    texts = Decoder(target, rule=more.pop("rule", "auto")).generate(
        prompts, max_new_tokens=length, eos_token_id=[], **more
    )
    return [text.tokens for text in texts]


@pytest.mark.parametrize("budget", [None, 10])
def test_parts_are_told_of_their_own_nodes(target: Target, budget: int | None) -> None:
    answers = plain(target)
    spies = [
        Spy(Oracle(answers, 0.6, 6, 1)),
        Spy(Lookahead(window=3, ngram=3, guesses=2)),
        Spy(Oracle(answers, 0.8, 7)),
    ]
    decoder = Decoder(target, Merged(spies, budget=budget))
    per_prompt = [{"max_new_tokens": length} for length in LENGTHS]
    texts = decoder.generate(PROMPTS, batch_size=3, per_prompt=per_prompt, eos_token_id=[])
    assert [text.tokens for text in texts] == [answer[:length] for answer, length in zip(answers, LENGTHS, strict=True)]
    assert decoder.drafter.features == {1, "last"}
    for spy in (spies[0], spies[2]):
        assert max(spy.accepted) > 1 and spy.beyond > 3
    assert (spies[0].cut > 0, spies[2].cut > 0) == (False, budget is not None)


def test_observations_survive_a_merge_of_merges(target: Target) -> None:
    answers = plain(target)
    spies = [Spy(Oracle(answers, 0.7, 4)) for _ in range(3)]
    decoder = Decoder(target, Merged([spies[0], Merged(spies[1:])]))
    assert [text.tokens for text in decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[])] == answers
    assert all(max(spy.accepted) > 0 and spy.beyond > 0 for spy in spies)


def rounds_of(target: Target, drafter: Drafter, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    rounds: list[list[list[int]]] = [[] for _ in prompts]
    decoder = Decoder(target, drafter)
    for key, prompt in enumerate(prompts):
        rounds[key] = [step.tokens for step in decoder.stream(prompt, max_new_tokens=40, eos_token_id=[])]
    return rounds


def test_nothing_merged_in_changes_nothing(target: Target) -> None:
    alone = rounds_of(target, Lookahead(window=4, ngram=3, guesses=3))
    assert max(len(step) for rounds in alone for step in rounds) > 1
    for parts in (
        [Lookahead(window=4, ngram=3, guesses=3), NoDrafter()],
        [NoDrafter(), Lookahead(window=4, ngram=3, guesses=3)],
    ):
        assert rounds_of(target, Merged(parts)) == alone


def small_draft() -> Target:
    return Target(build("llama", num_hidden_layers=1, max_position_embeddings=128))


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_the_text_is_the_targets(target: Target, rule: str) -> None:
    more: dict[str, Any] = {"temperature": 0.7, "seed": 3} if rule == "coupled" else {}
    expected = plain(target, rule=rule, **more)
    for parts in (
        [Lookahead(window=4, ngram=3, guesses=3), PromptLookup()],
        [PromptLookup(), DraftModel(model=small_draft(), tree=(2, 1, 1))],
        [DraftModel(model=target, gamma=3), PromptLookup(), Lookahead(seed_from_prompt=True)],
    ):
        texts = Decoder(target, Merged(parts, budget=12), rule=rule).generate(
            PROMPTS, batch_size=3, max_new_tokens=24, eos_token_id=[], **more
        )
        assert [text.tokens for text in texts] == expected


def mean_tau(target: Target, drafter: Drafter, rule: str, **more: Any) -> float:
    prompts = [random.Random(key).choices(range(3, VOCABULARY), k=8) * 2 for key in range(6)]
    texts = Decoder(target, drafter, rule=rule).generate(prompts, max_new_tokens=32, eos_token_id=[], **more)
    return RowStats().merge(text.stats for text in texts).tau


@pytest.mark.parametrize(("rule", "temperature"), [("greedy", 0.0), ("rejection", 0.5), ("coupled", 0.5)])
def test_tau_is_no_lower_than_that_of_the_better_half(target: Target, rule: str, temperature: float) -> None:
    def halves(name: str) -> list[Drafter]:
        return {
            "lookahead+prompt-lookup": [Lookahead(window=5, ngram=4, guesses=5), PromptLookup(max_ngram=2)],
            "draft-model+prompt-lookup": [DraftModel(model=target, gamma=2), PromptLookup(max_ngram=2)],
        }[name]

    more: dict[str, Any] = {"temperature": temperature} if temperature else {}
    for name in ("lookahead+prompt-lookup", "draft-model+prompt-lookup"):
        apart = [mean_tau(target, half, rule, **more) for half in halves(name)]
        together = mean_tau(target, Merged(halves(name)), rule, **more)
        assert together >= max(apart), f"{name}: {together} against {apart}"
        assert together > 1.0


def test_arguments_that_cannot_work() -> None:
    with pytest.raises(InvalidRequest, match="at least two drafters, got 1"):
        Merged([NoDrafter()])
    with pytest.raises(InvalidRequest, match="budget must be a whole number >= 1, or None for no limit, got 0"):
        Merged([NoDrafter(), NoDrafter()], budget=0)
    with pytest.raises(InvalidRequest, match=r"budget must be .* got 'all'"):
        Merged([NoDrafter(), NoDrafter()], budget="all")  # type: ignore[arg-type]
