"""Draft trees against the simplest way to grow them, their law by exact enumeration, levels against one forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from draftwood.core.drafting import Candidates, spread
from draftwood.core.errors import InvalidRequest
from draftwood.core.proposal import Proposal
from draftwood.core.sampling import tree_paths
from draftwood.core.target import Target
from draftwood.core.tree import ROOT, TokenTree
from draftwood.drafters import draft_tree
from draftwood.drafters.draft_tree import Grown, TreeShape, grow
from tests.verify.enumeration import LOSSLESS, Law, Text, World, one_hot, runs

Draw = Callable[[Tensor], int]
SHAPES = {
    "chain": (TreeShape.chain(2), 0.0),
    "confident chain": (TreeShape.chain(3), 0.6),
    "branching": (TreeShape((2, 2)), 0.0),
    "dynamic": (TreeShape.dynamic(2, 4, 2), 0.0),
    "confident dynamic": (TreeShape.dynamic(2, 4, 2), 0.5),
    "cut off": (TreeShape((2, 2), cutoff=0.2), 0.0),
    "tight budget": (TreeShape((2, 1, 1), 3, 2), 0.0),
    "one node": (TreeShape.dynamic(2, 1, 2), 0.0),
    "paths": (TreeShape.of_paths([(0,), (1,), (0, 0), (1, 1)]), 0.0),
}


class FakeNetwork:
    """Gives log q of each node's path; checks that levels arrive in order and counts the calls."""

    def __init__(self, q: Callable[[int, Text], Tensor], rows: int) -> None:
        self.q, self.rows, self.read, self.calls = q, rows, 0, 0

    def root(self) -> Tensor:
        return torch.stack([self.q(row, ()).log() for row in range(self.rows)])

    def __call__(self, tree: TokenTree, opened: int) -> Tensor:
        assert opened == self.read
        self.read, self.calls = tree.width, self.calls + 1
        self.tree = tree
        paths = [row[1 + opened :] for row in tree_paths(tree)]
        return torch.stack([torch.stack([self.q(row, tuple(p)).log() for p in own]) for row, own in enumerate(paths)])


def pick(draw: Draw | None) -> Callable[..., Candidates]:
    """Stands in for `candidates`: the most likely tokens, or drawn ones with their law, in float64."""

    def candidates(
        state: Any,
        logits: Tensor,
        rows: list[int],
        count: int,
        paths: list[list[int]],
        depth: int,
        *,
        draft_tokens: Tensor | None = None,
    ) -> Candidates:
        if draft_tokens is not None:
            logits = spread(logits, draft_tokens, state.target.vocabulary_size)
        assert len(rows) == len(logits) == len(paths)
        assert all(len(path) == depth - 1 for path in paths)
        q = logits.exp()
        if draw is None:
            order = sorted(range(q.shape[1]), key=lambda token: token)  # ties: the lower token
            top = torch.tensor([sorted(order, key=lambda t: -own[t])[:count] for own in q.tolist()])
            return Candidates(top, q.gather(1, top).log(), None)
        tokens = torch.zeros(len(q), count, dtype=torch.int64)
        law = torch.zeros(len(q), count, q.shape[1], dtype=torch.float64)
        for context, left in enumerate(q.clone()):
            for sibling in range(count):
                if left.sum() > 0:
                    law[context, sibling] = left / left.sum()
                    tokens[context, sibling] = draw(left)
                else:
                    tokens[context, sibling] = next(
                        token for token in range(len(left)) if token not in tokens[context, :sibling]
                    )
                    law[context, sibling] = one_hot(int(tokens[context, sibling]), len(left))
                left[tokens[context, sibling]] = 0.0
        return Candidates(tokens, q.topk(count).values.log(), law)

    return candidates


def grow_fake(
    monkeypatch: pytest.MonkeyPatch,
    network: FakeNetwork,
    shape: TreeShape,
    depths: list[int],
    draw: Draw | None = None,
    **options: Any,
) -> Grown:
    monkeypatch.setattr(draft_tree, "candidates", pick(draw))
    state = SimpleNamespace(target=SimpleNamespace(vocabulary_size=0))
    return grow(state, shape, depths, network.root(), network, **options)  # type: ignore[arg-type]


def paths_of(proposal: Proposal) -> list[list[Text]]:
    return [[tuple(path) for path in row[1:]] for row in tree_paths(proposal.tree)]


def naive_paths(q: Callable[[Text], Tensor], shape: TreeShape, depth: int, confidence: float) -> list[Text]:
    """EAGLE-2 in its own words: expand the best contexts of every level to the end, then take the best nodes."""
    scores: dict[Text, float] = {(): 0.0}
    level: list[Text] = [()]
    for count in shape.branching[:depth]:
        fresh = []
        for path in level:
            likely = sorted(enumerate(q(path).tolist()), key=lambda item: -item[1])[:count]
            for token, probability in likely:
                if probability > 0:
                    scores[*path, token] = scores[path] + math.log(probability)
                    if likely[0][1] >= confidence:
                        fresh.append((*path, token))
        level = sorted(fresh, key=lambda path: -scores[path])[: shape.width or len(fresh)]
    worth = [path for path in list(scores)[1:] if shape.cutoff == 0 or scores[path] >= math.log(shape.cutoff)]
    nodes = sorted(worth, key=lambda path: -scores[path])
    return nodes[: shape.nodes or len(nodes)]


@st.composite
def tables(draw: Any) -> Callable[[int, Text], Tensor]:
    """Distributions over four tokens with zeros and ties, different in every context."""
    seed = draw(st.integers(0, 10_000))

    def q(row: int, path: Text) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, row, path)) % 2**63)
        weights = torch.randint(0, 4, (4,), generator=generator, dtype=torch.float64)
        weights[int(weights.argmax())] += 1.0
        return weights / weights.sum()

    return q


@settings(deadline=None, max_examples=150)
@given(
    q=tables(),
    branching=st.lists(st.integers(1, 3), min_size=1, max_size=4) | st.sampled_from([[3, 2, 2, 1], [2, 3, 3]]),
    nodes=st.none() | st.integers(1, 12),
    width=st.sampled_from([None, 1, 2, 2, 3]),
    depths=st.lists(st.sampled_from([0, 1, 2, 4, 4]), min_size=1, max_size=3),
    confidence=st.just(0.0) | st.floats(0.0, 0.9) | st.lists(st.floats(0.0, 0.9), min_size=3, max_size=3),
    cutoff=st.just(0.0) | st.floats(0.0, 0.6),
)
def test_chosen_trees_are_the_naive_ones(q, branching, nodes, width, depths, confidence, cutoff):
    shape = TreeShape(tuple(branching), nodes, width, cutoff=cutoff)
    network = FakeNetwork(q, len(depths))
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = confidence if isinstance(confidence, float) else confidence[: len(depths)]
        grown = grow_fake(monkeypatch, network, shape, depths, confidence=own)
    for row, paths in enumerate(paths_of(grown.proposal)):
        floor = confidence if isinstance(confidence, float) else confidence[row]
        expected = naive_paths(lambda path, row=row: q(row, path), shape, depths[row], floor)
        assert sorted(paths) == sorted(expected)
        assert paths == sorted(paths, key=len)
    assert grown.proposal.law is None
    assert network.calls <= min(shape.depth, max(depths)) - 1 or max(depths) == 0


@settings(deadline=None, max_examples=40)
@given(q=tables(), depths=st.lists(st.integers(0, 3), min_size=1, max_size=3), leaves=st.booleans())
def test_columns_are_where_the_network_read_the_nodes(q, depths, leaves):
    network = FakeNetwork(q, len(depths))
    with pytest.MonkeyPatch.context() as monkeypatch:
        grown = grow_fake(monkeypatch, network, TreeShape.dynamic(3, 6, 2), depths, leaves=network if leaves else None)
    for row, (paths, columns) in enumerate(zip(paths_of(grown.proposal), grown.columns, strict=True)):
        read = tree_paths(network.tree)[row][1:] if network.calls else []
        for path, column in zip(paths, columns, strict=True):
            assert column >= 0 or not leaves
            if column >= 0:
                assert tuple(read[column]) == path
                ancestors = [columns[paths.index(path[:length])] for length in range(1, len(path) + 1)]
                assert grown.spelled(row, path) == ancestors
                assert grown.spelled(row, (*path, 9)) == ancestors
    assert grown.spelled(0, [9]) == []


def test_a_tree_of_paths_has_these_nodes_alone(monkeypatch):
    def q(_row: int, path: Text) -> Tensor:
        return torch.randperm(4, generator=torch.Generator().manual_seed(hash(path) % 2**63)).double().softmax(-1)

    ranks = [(0,), (2,), (0, 1), (2, 0), (2, 1), (2, 1, 0)]
    network = FakeNetwork(q, 2)
    grown = grow_fake(monkeypatch, network, TreeShape.of_paths(ranks), [3, 2])
    tokens: dict[Text, Text] = {(): ()}
    for path in ranks:
        above = tokens[path[:-1]]
        tokens[path] = (*above, int(q(0, above).argsort(descending=True)[path[-1]]))
    expected = [tokens[path] for path in ranks]
    assert [sorted(paths) for paths in paths_of(grown.proposal)] == [sorted(expected), sorted(expected[:5])]
    assert network.tree.width == 3  # (0,), (2,) and (2, 1): what nothing hangs on is not read


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("name", SHAPES)
def test_drawn_trees_are_lossless(rule, name, monkeypatch):
    shape, confidence = SHAPES[name]
    for seed in range(2):
        assert total_variation(monkeypatch, rule, World(3, seed), shape, confidence=confidence) < 1e-12


def test_dropping_nodes_for_the_tokens_they_drew_would_not_be(monkeypatch):
    def prune(proposal: Proposal, world: World) -> Proposal:
        """Keeps the three best nodes by the probability of the drawn tokens."""
        paths = paths_of(proposal)[0]
        chance = [math.prod(float(world.q(path[:at])[path[at]]) for at in range(len(path))) for path in paths]
        kept = sorted(sorted(range(len(paths)), key=lambda node: -chance[node])[:3])
        tokens, parents = proposal.tree.to_lists()
        place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        tree = TokenTree.from_lists([[tokens[0][node] for node in kept]], [[place[parents[0][node]] for node in kept]])
        return Proposal(tree, proposal.law[:, kept])

    shape = TreeShape((2, 2))
    assert total_variation(monkeypatch, "rejection", World(3, 0), shape) < 1e-12
    assert total_variation(monkeypatch, "rejection", World(3, 0), shape, prune=prune) > 0.01


def total_variation(
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    world: World,
    shape: TreeShape,
    prune: Callable[[Proposal, World], Proposal] | None = None,
    **options: Any,
) -> float:
    """Returns how far one round's text, continued by the target, is from the target's."""
    law: Law = {}

    def draft(source: Any) -> Proposal:
        network = FakeNetwork(lambda _, path: world.q(path), 1)
        proposal = grow_fake(monkeypatch, network, shape, [shape.depth], source.draw, **options).proposal
        return prune(proposal, world) if prune else proposal

    for drafted, proposal in runs(draft):
        logits = torch.stack([world.p(()).log(), *(world.p(path).log() for path in paths_of(proposal)[0])])[None]
        for judged, verdict in runs(
            lambda source: LOSSLESS[rule].verify(proposal, logits, [source], [0])  # noqa: B023
        ):
            text = tuple(verdict.tokens[0])
            law[text] = law.get(text, 0.0) + drafted * judged
    committed = world.extend(law, shape.depth + 1)
    target = world.extend({(): 1.0}, shape.depth + 1)
    return sum(abs(committed.get(text, 0.0) - target.get(text, 0.0)) for text in committed.keys() | target.keys()) / 2


def test_the_law_goes_with_its_node(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    world = World(5, 3)
    network = FakeNetwork(lambda row, path: world.q((row, *path)), 3)
    grown = grow_fake(
        monkeypatch,
        network,
        TreeShape.dynamic(3, 7, 3),
        [3, 0, 2],
        lambda q: int(torch.multinomial(q, 1, generator=generator)),
    )
    tokens, parents = grown.proposal.tree.to_lists()
    assert [bool(own) for own in tokens] == [True, False, True]
    for row, paths in enumerate(paths_of(grown.proposal)):
        for node, path in enumerate(paths):
            q = world.q((row, *path[:-1])).clone()
            q[[tokens[row][elder] for elder in range(node) if parents[row][elder] == parents[row][node]]] = 0.0
            torch.testing.assert_close(grown.proposal.law[row, node], q / q.sum())


@pytest.mark.parametrize("kind", ["llama", "sliding", "eager", "learned positions"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 9, 6)])
def test_levels_read_one_by_one_score_like_a_whole_tree(kind, lengths):
    target = Target(tiny_model(kind))
    rows = [[(7 * i + row) % 50 for i in range(length)] for row, length in enumerate(lengths)]
    batch = len(rows)
    # Three levels; the parents differ between the rows.
    parents = torch.tensor([[-1, -1, 0, 1, 1, 2, 4, 4], [-1, -1, 1, 1, 0, 3, 3, 2], [-1, -1, 0, 0, 0, 2, 3, 4]])[:batch]
    tokens = torch.arange(8 * batch).reshape(batch, 8) % 50
    whole = TokenTree(tokens, parents, (8,) * batch)
    with torch.inference_mode():
        expected = target.score(target.new_cache(batch, 8), rows, TokenTree.empty(batch)).logits
        cache = target.new_cache(batch, 8)
        target.score(cache, [row[:-1] for row in rows], TokenTree.empty(batch))
        once = target.score(cache, [row[-1:] for row in rows], whole).logits
        cache = target.new_cache(batch, 8)
        root = target.score(cache, rows, TokenTree.empty(batch)).logits
        levels = [
            target.score(
                cache, [[]] * batch, TokenTree(tokens[:, :end], parents[:, :end], (end,) * batch), opened=start
            ).logits
            for start, end in ((0, 2), (2, 5), (5, 8))
        ]
        torch.testing.assert_close(root, expected)
        torch.testing.assert_close(torch.cat([root, *levels], 1), once)
        path = [[1, 4, 6], [1, 3, 5], [0, 3]][:batch]
        cache.keep(path)
        kept = [[*row, *tokens[index, path[index]].tolist()] for index, row in enumerate(rows)]
        assert cache.lengths == [len(row) for row in kept]
        after = target.score(cache, [[9]] * batch, TokenTree.empty(batch)).logits
        plain = target.score(target.new_cache(batch, 8), [[*row, 9] for row in kept], TokenTree.empty(batch)).logits
    torch.testing.assert_close(after, plain)


def tiny_model(kind: str) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "sliding":
        config: Any = MistralConfig(vocab_size=50, num_key_value_heads=2, sliding_window=4, **sizes)
    elif kind == "learned positions":
        config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    else:
        config = LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    attention = "eager" if kind == "eager" else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TreeShape(()), "at least one level"),
        (lambda: TreeShape((2, 0)), "branching must be a whole number >= 1, got 0"),
        (lambda: TreeShape.dynamic(2, 0, 3), "nodes must be a whole number >= 1, got 0"),
        (lambda: TreeShape.dynamic(2, 3, -1), "must be a whole number >= 1, got -1"),
    ],
)
def test_shapes_that_cannot_be(make, message):
    with pytest.raises(InvalidRequest, match=message):
        make()
