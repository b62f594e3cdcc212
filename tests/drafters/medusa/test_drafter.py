"""The Medusa drafter: what it guesses from, that its text is the target's, and the law of drawn trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftwood.core.drafting import Candidates
from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.sampling import tree_paths
from draftwood.core.state import DecodeState
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.core.views import head_of
from draftwood.decoder import Decoder
from draftwood.drafters.medusa import drafter as module
from draftwood.drafters.medusa.drafter import Medusa, _Drafts
from draftwood.drafters.medusa.formats import save_heads
from draftwood.drafters.medusa.network import MedusaHeads
from draftwood.drafters.medusa.trees import StaticTree, greedy_tree, published_tree
from tests.conftest import VOCABULARY
from tests.drafters.test_draft_tree import pick
from tests.verify.enumeration import LOSSLESS, Law, World, runs

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3], [20, 21, 22], [40, 41, 42, 43, 44]]
TREE = [(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,), (0, 0, 1)]
KEPT = torch.arange(VOCABULARY - 1, 1, -2)


def trained(target: Target, shared: bool, tokens: Tensor | None, steps: int = 15) -> MedusaHeads:
    """Heads that have learnt a little of what the target says, so that some guesses are right."""
    torch.manual_seed(0)
    heads = MedusaHeads.for_target(target, heads=3, layers=2, shared=shared, draft_tokens=tokens)
    texts = Decoder(target).generate(PROMPTS, max_new_tokens=30, eos_token_id=[])
    head, pairs = head_of(target, tokens), []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids = [*prompt, *text.tokens]
        with torch.no_grad():
            scores = target.score(target.new_cache(1, 64), [ids], TokenTree.empty(1), features=frozenset({"last"}))
        pairs.append((scores.features["last"][0], heads.labels(torch.tensor(ids))))
    optimiser = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(steps):
        loss = sum(
            nn.functional.cross_entropy(heads.logits(hidden, head)[index][: -2 - index], labels[2 + index :])
            for hidden, labels in pairs
            for index in range(3)
        )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return heads


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


@pytest.fixture(scope="module", params=["own", "shared, reduced"])
def heads(request, target) -> MedusaHeads:
    return trained(target, "shared" in request.param, KEPT if "reduced" in request.param else None)


@pytest.fixture(scope="module")
def own(target) -> MedusaHeads:
    return trained(target, False, None)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_what_generate_gives(target, heads, batch_size):
    decoder = Decoder(target, Medusa(checkpoint=heads, tree=TREE))
    got = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], batch_size=batch_size)
    for prompt, one in zip(PROMPTS, got, strict=True):
        plain = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert one.tokens == plain[0, len(prompt) :].tolist()
    accepted = [sum(depth) for depth in zip(*(one.stats.accepted_by_depth for one in got), strict=False)]
    assert accepted[0] > 0
    assert heads.draft_tokens is not None or len(accepted) > 2


@pytest.mark.parametrize("draw", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3},
        {"temperature": 0.0, "no_repeat_ngram_size": 2},
    ],
)
def test_coupled_text_is_plain_coupled_text(target, heads, settings, draw):
    options: dict[str, Any] = {"max_new_tokens": 20, "seed": 3, "eos_token_id": [], **settings}
    plain = Decoder(target, rule="coupled").generate(PROMPTS, **options)
    got = Decoder(target, Medusa(checkpoint=heads, tree=TREE, draw=draw), rule="coupled").generate(PROMPTS, **options)
    assert [one.tokens for one in got] == [one.tokens for one in plain]


@pytest.mark.parametrize("rule", ["rejection", "traversal", "typical", "greedy"])
@pytest.mark.parametrize("draw", [True, False])
def test_a_row_does_not_depend_on_its_neighbours(target, own, rule, draw):
    options: dict[str, Any] = {"temperature": 0.0 if rule == "greedy" else 1.0, "seed": 1, "eos_token_id": []}
    decoder = Decoder(target, Medusa(checkpoint=own, tree=TREE, draw=draw), rule=rule)
    together = decoder.generate(PROMPTS, max_new_tokens=15, batch_size=3, **options)
    apart = decoder.generate(PROMPTS, max_new_tokens=15, batch_size=1, **options)
    assert [one.tokens for one in together] == [one.tokens for one in apart]
    assert all(len(one.tokens) == 15 for one in together)


def proposals(target: Target, drafter: Medusa, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """Decodes; returns (tokens of each row before, room of each, proposal) for every draft."""
    noted: list[Any] = []
    propose = module._Session.propose

    def note(self: Any, state: DecodeState) -> Proposal:
        made = propose(self, state)
        noted.append(
            ([list(row.tokens) for row in state.rows], [state.room(row) for row in range(len(state.rows))], made)
        )
        return made

    monkeypatch.setattr(module._Session, "propose", note)
    Decoder(target, drafter, **options.pop("decoder", {})).generate(PROMPTS, eos_token_id=[], **options)
    return noted


@pytest.mark.parametrize("batch_size", [2, 4])
def test_guesses_come_from_the_state_of_the_last_token_read(target, heads, monkeypatch, batch_size):
    """In every round, also after rejections and when rows have left, a plain forward over the text gives the same."""
    noted = proposals(
        target, Medusa(checkpoint=heads, tree=TREE), monkeypatch, max_new_tokens=12, batch_size=batch_size
    )
    tree, head = StaticTree.from_paths(TREE), head_of(target, heads.draft_tokens)
    assert len({len(texts) for texts, _, _ in noted}) > 1
    for texts, rooms, proposal in noted:
        for row, (text, room, paths) in enumerate(zip(texts, rooms, tree_paths(proposal.tree), strict=True)):
            with torch.no_grad():
                cache = target.new_cache(1, 64)
                features = target.score(cache, [text[:-1]], TokenTree.empty(1), features=frozenset({"last"})).features
                ranked = heads.to_target(heads.logits(features["last"][:, -1], head))[:, 0].argsort(-1, descending=True)
            expected = [[int(ranked[i, rank]) for i, rank in enumerate(path)] for path in tree.cut(room).paths]
            assert paths[1:] == expected, row
    assert {1, 2} & {room for _, rooms, _ in noted for room in rooms}  # trees that were cut


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 4}])
def test_with_a_history_every_context_has_guesses_of_its_own(target, own, monkeypatch, settings):
    """With bigrams forbidden no draft holds one that the text, or its own path, has had."""
    noted = proposals(
        target,
        Medusa(checkpoint=own, tree=TREE),
        monkeypatch,
        max_new_tokens=20,
        no_repeat_ngram_size=1,
        decoder={"rule": "traversal" if settings["temperature"] else "greedy"},
        **settings,
    )
    for texts, _, proposal in noted:
        for text, paths in zip(texts, tree_paths(proposal.tree), strict=True):
            for path in paths:
                assert not set(path) & set(text) and len(set(path)) == len(path)


def test_drawn_siblings_come_with_their_law(target, own, monkeypatch):
    noted = proposals(
        target, Medusa(checkpoint=own, tree=TREE), monkeypatch, max_new_tokens=10, temperature=1.0, top_k=3,
        decoder={"rule": "rejection"},
    )  # fmt: skip
    first = []  # what is guessed first behind the two guesses of head 0: drawn for each of them, not once
    for texts, _, proposal in noted:
        assert proposal.law is not None or not proposal.tree.width
        if proposal.law is None:
            continue
        tokens, parents = proposal.tree.to_lists()
        for row in range(len(texts)):
            assert tokens[row] or proposal.tree.sizes[row] == 0
            for node, parent in enumerate(parents[row]):
                law = proposal.law[row, node]
                elders = [e for e in range(node) if parents[row][e] == parent]
                torch.testing.assert_close(law.sum(), torch.tensor(1.0))
                assert law[tokens[row][node]] > 0 and (law > 0).sum() == 3 - len(elders)
                assert all(law[tokens[row][elder]] == 0 for elder in elders)
            first += [[tokens[row][parents[row].index(above)] for above in (0, 1)]] if 1 in parents[row] else []
    assert any(one != other for one, other in first)


def test_the_best_guesses_everywhere_have_no_law(target, own, monkeypatch):
    drafter = Medusa(checkpoint=own, tree=TREE, draw=False)
    noted = proposals(target, drafter, monkeypatch, max_new_tokens=8, temperature=1.0, decoder={"rule": "traversal"})
    assert all(proposal.law is None for _, _, proposal in noted)


def test_guesses_without_a_probability_are_left_out(target, own, monkeypatch):
    drafter = Medusa(checkpoint=own, tree=[(0,), (1,), (2,), (2, 0), (0, 0), (0, 3)])
    for rule in ("rejection", "coupled"):
        noted = proposals(
            target, drafter, monkeypatch, max_new_tokens=6, temperature=1.0, top_k=2, decoder={"rule": rule}
        )
        for _, rooms, proposal in noted:
            for room, size in zip(rooms, proposal.tree.sizes, strict=True):
                assert size == (0, 2, 3)[min(room, 2)]


def test_coupled_guesses_use_the_noise_of_their_own_position(target, own, monkeypatch):
    checked, propose = [], module._Session.propose

    def compare(self: Any, state: DecodeState) -> Proposal:
        made = propose(self, state)
        for row, paths in zip(state.rows, tree_paths(made.tree), strict=True):
            logits = own.logits(self._hidden[state.rows.index(row)][None])[:, 0]
            best = [
                int((log_q + row.source.gumbel(len(row.tokens) + level, VOCABULARY)).argmax())
                for level, log_q in enumerate(logits.float().log_softmax(-1))
            ]
            checked.append(max(paths, key=len) == best or len(max(paths, key=len)) < 3)
        return made

    monkeypatch.setattr(module._Session, "propose", compare)
    decoder = Decoder(target, Medusa(checkpoint=own, tree=[(0, 0, 0)]), rule="coupled")
    decoder.generate(PROMPTS, max_new_tokens=9, temperature=1.0, seed=5, eos_token_id=[])
    assert len(checked) > 8 and all(checked)


# --- Exact losslessness of drawn trees ---

SHAPES = {
    "chain": [(0, 0)],
    "two contexts": [(0, 0), (1, 0)],
    "siblings": [(0, 0), (0, 1), (1,)],
    "a rank left out": [(0,), (2,), (0, 1)],
}


def committed_law(monkeypatch: pytest.MonkeyPatch, rule: str, world: World, paths: Any, shared: bool = False) -> Law:
    """Returns the law of one round's text; `shared` has one draw a level for all contexts."""
    shape = StaticTree.from_paths(paths)
    q = [world.q((9,) * level) for level in range(shape.depth)]
    law: Law = {}

    def draft(source: Any) -> Proposal:
        def drawn(state: Any, logits: Tensor, rows: Any, count: int, paths: Any, depth: int, **_: Any) -> Candidates:
            return pick(source.draw)(state, logits, rows, count, [[0] * (depth - 1)] * len(rows), depth)

        monkeypatch.setattr(module, "candidates", drawn)
        drafts = _Drafts([shape], shared=shared)
        for level in range(shape.depth):
            state = SimpleNamespace(target=SimpleNamespace(vocabulary_size=0))
            drafts.add_level(state, level + 1, q[level].log()[None], False, None)  # type: ignore[arg-type]
        return drafts.proposal()

    for drafted, proposal in runs(draft):
        paths_of_nodes = [tuple(path) for path in tree_paths(proposal.tree)[0]]
        logits = torch.stack([world.p(path).log() for path in paths_of_nodes])[None]
        for judged, verdict in runs(
            lambda source: LOSSLESS[rule].verify(proposal, logits, [source], [0])  # noqa: B023
        ):
            text = tuple(verdict.tokens[0])
            law[text] = law.get(text, 0.0) + drafted * judged
    return law


def total_variation(law: Law, world: World, depth: int) -> float:
    committed, expected = world.extend(law, depth + 1), world.extend({(): 1.0}, depth + 1)
    return sum(abs(committed.get(t, 0.0) - expected.get(t, 0.0)) for t in committed.keys() | expected.keys()) / 2


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("name", SHAPES)
def test_drawn_trees_are_lossless(rule, name, monkeypatch):
    for seed in range(3):
        world = World(3, seed)
        assert total_variation(committed_law(monkeypatch, rule, world, SHAPES[name]), world, 2) < 1e-12


def test_one_draw_for_all_contexts_would_be_lossless_from_the_root_only(monkeypatch):
    """Root to leaf only one context of a level is ever judged; leaf to root several are."""
    paths, worst = [(0, 0), (1, 0)], {}
    for rule in LOSSLESS:
        worlds = [World(3, seed) for seed in range(3)]
        laws = [committed_law(monkeypatch, rule, world, paths, shared=True) for world in worlds]
        worst[rule] = max(total_variation(law, world, 2) for law, world in zip(laws, worlds, strict=True))
    assert worst["rejection"] < 1e-12
    assert worst["traversal"] > 1e-3


# --- Options ---


def test_the_tree_is_the_best_for_the_stored_accuracies(tmp_path, target, own):
    accuracies = [[0.4, 0.2, 0.1], [0.3, 0.25], [0.2, 0.1]]
    save_heads(own, tmp_path / "a", accuracies=accuracies)
    save_heads(own, tmp_path / "b")

    def tree(**options: Any) -> StaticTree:
        drafter = Medusa(**options)
        drafter.bind(target)
        return drafter.tree

    assert tree(checkpoint=tmp_path / "a") == greedy_tree(accuracies, 12)
    assert tree(checkpoint=str(tmp_path / "a"), nodes=4) == greedy_tree(accuracies, 4)
    assert tree(checkpoint=tmp_path / "b") == published_tree("mc_sim_7b_63", 12)
    assert tree(checkpoint=tmp_path / "b", nodes=30) == published_tree("mc_sim_7b_63", 30, 3)
    assert tree(checkpoint=tmp_path / "b", nodes=30).depth == 3
    assert tree(checkpoint=tmp_path / "a", tree="vicuna_33b_stage1") == published_tree("vicuna_33b_stage1")
    assert tree(checkpoint=tmp_path / "a", tree="vicuna_33b_stage1", nodes=5).paths == (
        (0,),
        (1,),
        (2,),
        (0, 0),
        (0, 1),
    )
    assert tree(checkpoint=tmp_path / "a", tree=TREE, nodes=2).paths == ((0,), (0, 0))


def test_it_is_registered(tmp_path, target, own):
    save_heads(own, tmp_path)
    assert isinstance(Decoder(target, "medusa", drafter_options={"checkpoint": tmp_path}).drafter, Medusa)
    decoder = Decoder(target, "medusa", drafter_options={"checkpoint": tmp_path, "nodes": 6})
    plain = Decoder(target).generate(PROMPTS[0], max_new_tokens=20, eos_token_id=[])
    assert decoder.generate(PROMPTS[0], max_new_tokens=20, eos_token_id=[]).tokens == plain.tokens


def test_heads_in_memory_stay_as_they_are(target, own):
    single = MedusaHeads.for_target(target, heads=1, shared=True).float()
    Medusa(checkpoint=single, tree=[(0,)]).bind(target)
    assert next(single.parameters()).dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "vicuna"}, "no published tree 'vicuna'; known"),
        ({"tree": 3}, "tree must be the name .* got 3"),
        ({"tree": ["00"]}, r"tree must be the name .* got \['00'\]"),
        ({"tree": []}, "at least one path"),
        ({"nodes": 0}, "nodes must be a whole number >= 1, got 0"),
        ({"draw": 1}, "draw must be True or False, got 1"),
        ({"checkpoint": 5}, "checkpoint must be a directory, a hub id or heads, got int"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Medusa(**{"checkpoint": "x", **options})


def test_heads_that_do_not_fit(tmp_path, target, own, tinier_llama):
    with pytest.raises(InvalidRequest, match="has 4 levels; there are 3 heads"):
        Medusa(checkpoint=own, tree="mc_sim_7b_63").bind(target)
    few = MedusaHeads.for_target(target, heads=1, shared=True, draft_tokens=torch.tensor([3, 4]))
    with pytest.raises(InvalidRequest, match="looks at 3 guesses of a head; it knows 2 tokens"):
        Medusa(checkpoint=few, tree=[(2,)]).bind(target)
    with pytest.raises(InvalidRequest, match="for hidden size 32 and vocabulary 96; the target has 16 and 96"):
        Medusa(checkpoint=own).bind(Target(tinier_llama))
    save_heads(own, tmp_path)
    with pytest.raises(InvalidCheckpoint, match=r"'0.0.linear.weight' has the shape \[32, 32\]; .* hidden size 16"):
        Medusa(checkpoint=tmp_path).bind(Target(tinier_llama))
