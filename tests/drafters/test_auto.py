"""Auto: the target's law whatever is cut, an inner session that never notices, and no world in which it loses much."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftwood.core.drafter import Drafter
from draftwood.core.errors import InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.rule import RandomSource, Rule
from draftwood.core.target import Target
from draftwood.core.tree import ROOT, TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.auto import Auto
from draftwood.drafters.auto_costs import Account, Clock, PassCosts, measure_passes
from draftwood.drafters.auto_policy import Acceptance, Plan, Policy, RowMemory
from draftwood.drafters.auto_trees import IDLE, RowTree, cut, row_trees
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.early_exit import EarlyExit
from draftwood.drafters.lookahead import Lookahead
from draftwood.drafters.merged import Merged
from draftwood.drafters.prompt_lookup import PromptLookup
from draftwood.plugins import load_registry
from tests.architectures import build
from tests.drafters.auto_world import World
from tests.drafters.test_merged import LENGTHS, PROMPTS, Oracle, Spy, plain
from tests.verify.enumeration import LOSSLESS, SCHEMES, Law, Shape, draft, runs
from tests.verify.enumeration import World as Toy

FLAT = PassCosts({1: 1.0, 64: 1.0})

# --- Exact losslessness ---

Cut = Callable[[RowTree], list[int]]
WIDE = Shape((ROOT, ROOT, 0, 1), conditional=True)
SHAPES = {"ragged": Shape((ROOT, ROOT, 0, 0)), "by value": WIDE, "idle": Shape((ROOT, ROOT, 0, 1), frozenset({0}))}
ALLOWED = [{(0,)}, {(0,), (0, 0)}, {(0,), (1,)}, {(0,), (1,), (0, 0), (1, 0)}, {(0,), (1,), (1, 0)}, {(1,)}, set()]


def allowing(positions: set[tuple[int, ...]]) -> Cut:
    policy = Policy(FLAT)
    policy.allowed = frozenset(positions)
    return lambda tree: policy.keep_allowed([tree], 2).kept[0]


def planned(tree: RowTree) -> list[int]:
    """What is kept of chosen nodes: as many as this account pays for, by value."""
    policy = Policy(PassCosts({1: 1.0, 8: 2.0}))
    return policy.plan([policy.new_row()], [tree], 0.0).kept[0]


def even(tree: RowTree) -> list[int]:
    """Keeps nodes for the tokens they hold, which is right only where they were chosen."""
    kept: list[int] = []
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if tree.positions[node] == IDLE or (token % 2 == 0 and (parent == ROOT or parent in kept)):
            kept.append(node)
    return kept


def distance(rule: Rule, world: Toy, shape: Shape, scheme: str, kept_of: Cut) -> float:
    """Returns how far what one cut round commits, continued by the target, is from the target's law."""

    def drafted(source: RandomSource) -> tuple[Proposal, torch.Tensor]:
        made = draft(source, world, shape, SCHEMES[scheme])
        trees = row_trees(made.proposal.tree)
        kept = kept_of(trees[0])
        columns = [0, *(1 + node for node in kept)]
        return cut(made.proposal, trees, [kept]), made.logits[:, columns if kept else [0]]

    law: Law = {}
    for chance, (proposal, logits) in runs(drafted):
        for judged, verdict in runs(lambda source: rule.verify(proposal, logits, [source], [0])):  # noqa: B023
            text = tuple(verdict.tokens[0])
            law[text] = law.get(text, 0.0) + chance * judged
    horizon = 1 + max(map(len, law))
    law, target = world.extend(law, horizon), world.extend({(): 1.0}, horizon)
    return sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", LOSSLESS)
def test_cuts_by_position_leave_the_law_of_drawn_candidates(rule: str, shape: str) -> None:
    for positions in ALLOWED:
        for scheme in ("without replacement", "mixed"):
            assert distance(LOSSLESS[rule], Toy(3, 0), SHAPES[shape], scheme, allowing(positions)) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_chosen_candidates_may_be_cut_for_what_they_are(rule: str) -> None:
    for kept in (even, planned):
        for scheme in ("chosen", "drawn, law withheld"):
            assert distance(LOSSLESS[rule], Toy(3, 0), WIDE, scheme, kept) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_cutting_drawn_candidates_by_token_would_be_found_out(rule: str) -> None:
    assert distance(LOSSLESS[rule], Toy(3, 0), SHAPES["ragged"], "without replacement", even) > 1e-3


def random_tree(chance: random.Random) -> RowTree:
    size = chance.randrange(12)
    parents = [chance.randrange(-1, node) for node in range(size)]
    return row_trees(TokenTree.from_lists([[chance.randrange(3) for _ in parents]], [parents]))[0]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_allowed_and_what_is_kept_are_trees_without_gaps(seed: int) -> None:
    chance = random.Random(seed)
    policy = Policy(PassCosts({1: 1.0, 64: 1.0 + chance.random()}))
    for _ in range(60):
        for table in (policy.pooled,):
            table.learn((chance.random() < 0.5, chance.randrange(1, 5), chance.randrange(3)), chance.random() < 0.4)
    trees = [random_tree(chance) for _ in range(3)]
    policy.allow(3, trees)
    assert policy.allowed is not None
    for position in policy.allowed:
        *above, rank = position
        assert not above or tuple(above) in policy.allowed
        assert rank == 0 or (*above, rank - 1) in policy.allowed
    for tree, kept in zip(trees, policy.plan([policy.new_row() for _ in trees], trees, 0.0).kept, strict=True):
        assert kept == sorted(set(kept))
        assert all(tree.parents[node] == ROOT or tree.parents[node] in kept for node in kept)


# --- At work ---


class Restless(Policy):
    """Decides by lot, so that every change between drafting, holding back, cutting and not drafting occurs."""

    def __init__(self, seed: int) -> None:
        super().__init__(FLAT)
        self.chance = random.Random(seed)
        self.cuts = self.held = 0

    def depth(self, rows: Sequence[RowMemory], room: int) -> int:
        self.allowed = frozenset((0,) * level for level in range(1, self.chance.randrange(4) + 1))
        return min(self.chance.choice([0, 0, 1, 3, 6]), room)

    def plan(self, rows: Sequence[RowMemory], trees: Sequence[RowTree], spent: float) -> Plan:
        kept = []
        for tree in trees:
            chosen: list[int] = []
            for node, (parent, position) in enumerate(zip(tree.parents, tree.positions, strict=True)):
                if position == IDLE or (self.chance.random() < 0.7 and (parent == ROOT or parent in chosen)):
                    chosen.append(node)
            kept.append(chosen)
        if not any(tree.idle for tree in trees) and self.chance.random() < 0.3:
            kept = [[] for _ in trees]
        self.held += not any(kept)
        self.cuts += any(0 < len(own) < len(tree.tokens) for own, tree in zip(kept, trees, strict=True))
        return Plan(kept)


class RestlessAuto(Auto):
    def copy(self) -> RestlessAuto:
        return RestlessAuto(of=self.drafter.copy(), curve={1: 1.0})

    def bind(self, target: Target) -> None:
        super().bind(target)
        self.policy = Restless(3)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(build("llama", num_hidden_layers=3, max_position_embeddings=128))


INNER: dict[str, Callable[[Target], Drafter]] = {
    "prompt-lookup": lambda _: PromptLookup(max_ngram=2),
    "draft-model": lambda target: DraftModel(model=target, tree="dynamic", gamma=4, nodes=9, width=3),
    "lookahead": lambda _: Lookahead(window=3, ngram=3, guesses=3),
    "early-exit": lambda _: EarlyExit(exit_layer=2, gamma=4),
    "merged": lambda _: Merged([Lookahead(window=3, ngram=3, guesses=3), PromptLookup()]),
}


@pytest.mark.parametrize("name", INNER)
def test_the_text_is_the_targets_whatever_is_decided(target: Target, name: str) -> None:
    per_prompt = [{"max_new_tokens": length} for length in LENGTHS]
    for rule, more in (("greedy", {}), ("coupled", {"temperature": 0.8, "seed": 3})):
        expected = plain(target, rule=rule, **more)
        decoder = Decoder(target, RestlessAuto(of=INNER[name](target), curve={1: 1.0}), rule=rule)
        for _ in range(2):  # what it learned from the first call must not matter in the second
            outs = decoder.generate(PROMPTS, batch_size=3, per_prompt=per_prompt, eos_token_id=[], **more)
            assert [out.tokens for out in outs] == [
                text[:length] for text, length in zip(expected, LENGTHS, strict=True)
            ]


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_drawn_candidates_of_a_ragged_batch(target: Target, rule: str) -> None:
    """A draft model that is the target is always right, also after rounds that it was not told of."""
    drafter = RestlessAuto(of=DraftModel(model=target, gamma=4), curve={1: 1.0})
    outs = Decoder(target, drafter, rule=rule).generate(
        PROMPTS, batch_size=3, max_new_tokens=24, eos_token_id=[], temperature=1.0
    )
    for out in outs:
        assert len(out.tokens) == 24
        assert all(rate == 1.0 for rate in out.stats.acceptance_by_depth[:1])


def test_the_inner_session_is_told_the_truth_of_every_round(target: Target) -> None:
    """`Spy` compares each observation with forwards of whole texts: logits, features, paths."""
    answers = plain(target)
    spies = [Spy(Oracle(answers, 0.6, 6, 1)), Spy(Oracle(answers, 0.8, 7))]
    decoder = Decoder(target, RestlessAuto(of=Merged(spies), curve={1: 1.0}))
    per_prompt = [{"max_new_tokens": length} for length in LENGTHS]
    outs = decoder.generate(PROMPTS, batch_size=3, per_prompt=per_prompt, eos_token_id=[])
    assert [out.tokens for out in outs] == [answer[:length] for answer, length in zip(answers, LENGTHS, strict=True)]
    policy = decoder.drafter.policy  # type: ignore[attr-defined]
    assert policy.held > 2 and policy.cuts > 2 and max(max(spy.accepted) for spy in spies) > 1


# --- What it loses and what it gains ---


def narrow(tokens: int) -> float:
    """A machine on which every token more costs 6 % of a pass."""
    return 0.02 * (1 + 0.065 * (tokens - 1))


BAD: dict[str, World] = {
    "never right": World(lambda n, d: 0.0, narrow),
    "never right, costly": World(lambda n, d: 0.0, narrow, cost=0.004),
    "rarely right, costly": World(lambda n, d: 0.2, narrow, cost=0.004),
    "right until it is trusted": World(lambda n, d: float(n < 100 or n % 97 < 10), narrow, cost=0.004),
    "right once, wrong behind": World(lambda n, d: float(d > 1), narrow, cost=0.001),
    "large batch": World(lambda n, d: 0.1, narrow, rows=16, tokens=250, cost=0.002),
    "noise": World(lambda n, d: 0.05, narrow, noise=0.1),
    "passes wider than measured": World(lambda n, d: 0.02, narrow, measured=lambda _: 0.02),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_never_slower_than_plain_by_more_than_three_percent(name: str) -> None:
    world = BAD[name]
    assert world.run() <= 1.03 * world.plain


@pytest.mark.parametrize("rows", [1, 16])
def test_a_short_text_loses_no_more_though_all_estimates_are_wrong(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(Acceptance, "rate", lambda self, key: 0.9)
    world = World(lambda n, d: 0.0, narrow, rows=rows, tokens=60)
    assert world.run() <= 1.03 * world.plain


def test_the_account_bounds_the_loss_though_all_estimates_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceptance, "rate", lambda self, key: 0.9)
    world = World(lambda n, d: 0.0, narrow, tokens=1500, cost=0.004)
    assert 1.01 * world.plain < world.run() <= 1.03 * world.plain  # without the account: 2.5 times as slow


@pytest.mark.parametrize(
    ("world", "least"),
    [
        (World(lambda n, d: 0.9, narrow, tokens=400), 3.0),
        (World(lambda n, d: 0.9, narrow, tokens=400, cost=0.004), 1.7),
        (World(lambda n, d: 0.6, lambda n: 0.02, tokens=400, siblings=1), 2.0),
        (World(lambda n, d: 0.9, narrow, rows=16, tokens=150), 1.2),
        (World(lambda n, d: float(n > 400), narrow, tokens=900), 1.6),  # it notices when drafting begins to pay
        (World(lambda n, d: float(n > 400), narrow, tokens=1200, cost=0.001), 1.3),
    ],
)
def test_it_drafts_where_that_pays(world: World, least: float) -> None:
    assert world.plain / world.run() >= least


def test_width_follows_what_passes_cost() -> None:
    wide, slim = (World(lambda n, d: 0.5, verify, tokens=300) for verify in (lambda n: 0.02 + n * 1e-5, narrow))
    for world in (wide, slim):
        world.run()
    assert sum(wide.widths) / len(wide.widths) > 1.5 * sum(slim.widths) / len(slim.widths)


def test_account() -> None:
    account = Account(share=0.1, balance=1.0, most=2.0)
    assert account.covers(1.0) and not account.covers(1.01)
    account.book(rounds=1.0, loss=1.0)
    assert account.balance == pytest.approx(0.1)
    account.book(rounds=1.0, loss=-7.0)
    assert account.balance == 2.0


def test_costs_interpolate_and_follow_the_rounds() -> None:
    costs = PassCosts({1: 1.0, 4: 0.9, 8: 3.0})
    assert [costs.drafted(1, nodes) for nodes in (0, 3, 5, 7, 11)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert costs.drafted(2, 3) == pytest.approx(3.0)
    for _ in range(8):
        costs.learn(1, 0, 2.0)
        costs.learn(1, 3, 8.0)
    assert costs.plain(1) == 2.0 and costs.drafted(1, 3) == pytest.approx(2.0 * (2 * 1.0 + 8 * 4.0) / 10)


def test_measuring_keeps_to_its_budget(target: Target) -> None:
    ticks = iter(range(10**6))
    curve = measure_passes(target, lambda: float(next(ticks)), 1e9)
    assert sorted(curve)[:3] == [1, 2, 3] and set(curve.values()) == {1.0}
    short = measure_passes(target, lambda: float(next(ticks)), 0.0)
    assert sorted(short) == [1, 2]


def test_passes_are_measured_once_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Target] = []

    def measure(target: Target, _clock: Clock, budget: float) -> dict[int, float]:
        measured.append(target)
        return {1: 1.0 + budget}

    monkeypatch.setattr("draftwood.drafters.auto_costs.measure_passes", measure)
    one, other = (Target(build("llama", num_hidden_layers=3)) for _ in range(2))
    model = set(vars(one.model))
    first = Decoder(one, "auto")
    for drafter in ("auto", "prompt-lookup", Auto(of=Lookahead()), Auto(of=PromptLookup(), seconds=0.5)):
        options = {"gamma": "auto"} if drafter == "prompt-lookup" else {}
        decoder = Decoder(one, drafter, drafter_options=options)
        assert isinstance(decoder.drafter, Auto)
        assert decoder.drafter.policy is not first.drafter.policy  # type: ignore[attr-defined]
        assert decoder.drafter.policy.costs.plain(1) == 2.5
    assert measured == [one] and set(vars(one.model)) == model
    Decoder(other, "auto")
    view = one.over(one.model, one.blocks)
    Decoder(view, "auto")
    assert measured == [one, other, view]
    Decoder(one, "auto", drafter_options={"seconds": 2.0})
    Decoder(one, Auto(of=PromptLookup(), clock=lambda: 0.0))
    assert measured == [one, other, view, one, one]


# --- By name ---


def test_by_name() -> None:
    registry = load_registry()
    auto: Any = registry.create_drafter("auto")
    assert isinstance(auto, Auto) and isinstance(auto.drafter, PromptLookup)
    auto = registry.create_drafter("auto", {"of": "lookahead+prompt-lookup", "lookahead": {"window": 3}, "budget": 9})
    assert auto.drafter.budget == 9 and auto.drafter.drafters[0].window == 3
    auto = registry.create_drafter("prompt-lookup", {"gamma": "auto", "max_ngram": 2})
    assert isinstance(auto, Auto) and (auto.drafter.gamma, auto.drafter.max_ngram) == (16, 2)
    auto = registry.create_drafter("auto", {"of": "prompt-lookup", "gamma": "auto"})
    assert isinstance(auto.drafter, PromptLookup)
    merged: Any = registry.create_drafter("lookahead+prompt-lookup", {"prompt-lookup": {"gamma": "auto"}})
    assert isinstance(merged.drafters[1], Auto)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("auto", {"of": "prompt-lookup", "gama": 3}, "'prompt-lookup' has no option 'gama'"),
        ("auto", {"of": PromptLookup(), "gamma": 3}, "already built"),
        ("auto", {"of": 7}, "of must be a Drafter, got 7"),
        ("auto", {"seconds": -1}, "seconds must be a number"),
        ("lookahead", {"gamma": "auto"}, "has no option 'gamma'"),
        ("prompt-lookup", {"gamma": "automatic"}, "gamma must be a whole number"),
    ],
)
def test_options_that_cannot_work(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_registry().create_drafter(name, options)


def test_a_cut_proposal_keeps_its_laws() -> None:
    law = torch.rand(1, 3, 5)
    proposal = Proposal(TokenTree.from_lists([[1, 2, 3]], [[ROOT, ROOT, 0]]), law)
    trees = row_trees(proposal.tree)
    slim = cut(proposal, trees, [[0, 2]])
    assert slim.law is not None and torch.equal(slim.law, law[:, [0, 2]])
    assert slim.tree.to_lists() == ([[1, 3]], [[ROOT, 0]])
    assert cut(proposal, trees, [[0, 1, 2]]) is proposal
    assert cut(replace(proposal, law=None), trees, [[]]).tree.width == 0
