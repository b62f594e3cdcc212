"""EAGLE through the real engine: same text, no stale feature, exact law."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig

from draftwood.core.attention import GROUPED
from draftwood.core.cache import SlotCache
from draftwood.core.drafter import DraftSession, Observation
from draftwood.core.errors import InvalidRequest, ModelNotFound
from draftwood.core.packing import PackedLinear
from draftwood.core.proposal import Proposal, Verdict
from draftwood.core.sampling import process, tree_paths
from draftwood.core.state import DecodeState
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters import draft_tree
from draftwood.drafters.eagle.config import default_layers, layer_config
from draftwood.drafters.eagle.drafter import Eagle
from draftwood.drafters.eagle.formats import save_head
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead, Head
from draftwood.drafters.eagle.reader import HeadReader
from tests.conftest import VOCABULARY, tiny_model
from tests.drafters.eagle.heads import (
    KINDS,
    PROMPTS,
    REDUCED,
    Reference,
    finite_close,
    make_head,
    sure_target,
    trained_head,
    true_features,
)
from tests.drafters.test_draft_tree import pick
from tests.verify.enumeration import LOSSLESS, runs

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "depth": 4},
    "static": {"tree": (3, 2, 1)},
    "published": {"tree": "mc_sim_7b_63"},
    "dynamic": {"depth": 4, "nodes": 7, "width": 3},
    "hesitant": {"depth": 6, "confidence": 0.3},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return sure_target()


@pytest.fixture(scope="module")
def trained(target: Target) -> Callable[[str], Head]:
    return cache(lambda kind: trained_head(kind, target))


@pytest.fixture(params=["eagle", "eagle3.1"])
def head(request: pytest.FixtureRequest, trained: Callable[[str], Head]) -> Head:
    return trained(request.param)


@pytest.fixture
def eagle1(trained: Callable[[str], Head]) -> Head:
    return trained("eagle")


def decode(target: Target, drafter: Any, prompts: Any = PROMPTS, rule: str = "auto", **settings: Any) -> Any:
    settings = {"max_new_tokens": 20, "eos_token_id": [], "batch_size": 4, **settings}
    return Decoder(target, drafter, rule=rule).generate(prompts, **settings)


def tokens_of(generations: Any) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@pytest.mark.parametrize(("shape", "batch_size"), [*((shape, 3) for shape in SHAPES), ("dynamic", 1)])
def test_greedy_text_is_that_of_generate(target, head, shape, batch_size):
    # Rows end at different times, and with room for three the fourth enters late.
    lengths = [20, 3, 17, 9]
    settings = {"batch_size": batch_size, "per_prompt": [{"max_new_tokens": count} for count in lengths]}
    done = decode(target, Eagle(checkpoint=head, **SHAPES[shape]), **settings)
    model: Any = target.model
    for prompt, count, tokens in zip(PROMPTS, lengths, tokens_of(done), strict=True):
        text = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=count, eos_token_id=[], pad_token_id=0
        )
        assert tokens == text[0, len(prompt) :].tolist()
    assert max(generation.stats.tau for generation in done) > 1.5


@pytest.mark.parametrize(("kind", "shape"), [*((kind, "dynamic") for kind in KINDS), ("eagle", "static")])
def test_coupled_text_is_that_of_plain_decoding(target, kind, shape):
    settings = {"rule": "coupled", "temperature": 0.8, "top_k": 30, "seed": 5, "batch_size": 3}
    done = decode(target, Eagle(checkpoint=make_head(kind, target), **SHAPES[shape]), **settings)
    assert tokens_of(done) == tokens_of(decode(target, "none", **settings))


class Spy(Eagle):
    """Notes the session and hands over every proposal with what led to it."""

    def __init__(self, check: Callable[[DecodeState, Any, Tensor, list[Any], Proposal], None], **options: Any) -> None:
        super().__init__(**options)
        self._check = check

    def session(self, state: DecodeState) -> DraftSession:
        session: Any = super().session(state)
        reader, propose = session._reader, session.propose
        begin, read = reader.logits, reader.read_nodes
        noted: list[Any] = []

        def logits() -> Tensor:
            noted.clear()
            raw = begin()
            noted.append(self.head.to_target(raw))
            return raw

        def read_nodes(tree: TokenTree, opened: int) -> Tensor:
            raw = read(tree, opened)
            noted.append((tree, opened, self.head.to_target(raw)))
            return raw

        def proposing(state: DecodeState) -> Proposal:
            proposal = propose(state)
            if proposal.tree.width:
                self._check(state, reader, noted[0], noted[1:], proposal)
            return proposal

        reader.logits, reader.read_nodes, session.propose = logits, read_nodes, proposing
        return session


def cached(cache: SlotCache, head: Head, row: int, length: int) -> list[Tensor]:
    """Keys and values of the first pairs of a row."""
    cache.open(0)
    shape = head.cache_layout[0]
    nothing = torch.zeros(len(cache.lengths), shape.heads, 0, shape.key_width, dtype=shape.dtype)
    return [stored[row, :, :length].clone() for stored in cache.update(nothing, nothing, 0)]


@pytest.mark.parametrize(
    ("kind", "shape", "rule"),
    [
        *((kind, "dynamic", "greedy") for kind in KINDS),
        ("eagle", "static", "rejection"),
        ("eagle3.1", "static", "rejection"),
    ],
)
def test_no_stale_feature_is_ever_used(target, trained, kind, shape, rule):
    head = trained(kind)
    rounds, deepest = 0, 0

    def check(state: DecodeState, reader: HeadReader, root: Tensor, reads: list[Any], proposal: Proposal) -> None:
        nonlocal rounds, deepest
        rounds += 1
        for index, row in enumerate(state.rows):
            drafted = tree_paths(proposal.tree)[index][: 1 + proposal.tree.sizes[index]]
            assert max(map(len, drafted)) <= state.room(index)
            pairs = len(row.tokens) - 1
            assert reader.cache.lengths[index] == pairs
            reference = Reference(head, target, row.tokens)
            finite_close(root[index], reference.logits())
            # Keys and values are those of a fresh reading with the true features of the whole text.
            text = torch.tensor([row.tokens])
            features = true_features(head, target, text)[0][:, :-1]
            alone = HeadReader(head, 1000)
            alone.extend(1)
            alone.read_text([row.tokens[1:]], [features[0]], 0)
            got, expected = cached(reader.cache, head, index, pairs), cached(alone.cache, head, 0, pairs)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
            for tree, opened, logits in reads:
                paths = tree_paths(tree)[index]
                for node in range(opened, tree.width):
                    path = paths[1 + node]
                    if path[-1] != 0:  # which pads narrower rows
                        deepest = max(deepest, len(path))
                        finite_close(logits[index, node - opened], reference.logits(path))

    with torch.no_grad():
        lengths = [{"max_new_tokens": count} for count in (16, 3, 8, 6)]
        temperature = 0.0 if rule == "greedy" else 0.8
        spy = Spy(check, checkpoint=head, **SHAPES[shape])
        spy.copy = lambda: spy  # type: ignore[method-assign]
        done = decode(target, spy, rule=rule, temperature=temperature, batch_size=3, per_prompt=lengths)
    assert rounds > 2
    assert deepest >= 2
    # Rounds in which something, or all, was refused leave the most behind.
    assert 1.0 < sum(generation.stats.tau for generation in done) / 4 < 4.0


def test_the_draft_stops_where_the_head_is_unsure(target, eagle1):
    stopped = set()

    def check(state: DecodeState, _reader: Any, root: Tensor, reads: list[Any], _proposal: Any) -> None:
        if state.room(0) > 1:
            stopped.add(not reads)
            assert (not reads) == (float(root.softmax(-1).max()) < 0.5)

    spy = Spy(check, checkpoint=eagle1, depth=2, confidence=0.5)
    spy.copy = lambda: spy  # type: ignore[method-assign]
    decode(target, spy, batch_size=1)
    assert stopped == {False, True}


def test_no_node_below_the_cutoff_is_proposed(target, eagle1):
    sizes = set()

    def check(state: DecodeState, _reader: Any, root: Tensor, reads: list[Any], proposal: Any) -> None:
        likely = root.softmax(-1)[0]
        first = {
            token for token, parent in zip(*(one[0] for one in proposal.tree.to_lists()), strict=True) if parent < 0
        }
        assert first <= set((likely >= 0.3 - 1e-6).nonzero()[:, 0].tolist())
        sizes.add(proposal.tree.width)

    spy = Spy(check, checkpoint=eagle1, depth=2, nodes=6, cutoff=0.3)
    spy.copy = lambda: spy  # type: ignore[method-assign]
    decode(target, spy, batch_size=1)
    assert min(sizes) <= 1 < max(sizes)


def test_what_a_head_reads_of_its_draft_is_forgotten(target, eagle1):
    reader = HeadReader(eagle1, 1000)
    reader.extend(1)
    features = true_features(eagle1, target, torch.tensor([[5, 6, 7, 8]]))[0][0]
    with torch.no_grad():
        reader.read_text([[6, 7, 8]], [features[:3]], 0)
        before = reader.logits().clone()
        reader.read_nodes(TokenTree.from_lists([[9, 10]], [[-1, -1]]), 0)
        assert torch.equal(reader.logits(), before)
        assert reader.cache.lengths == [3]


def test_long_prompts_are_read_in_pieces(target, eagle1):
    prompts = [[(7 * i) % 90 + 3 for i in range(length)] for length in (61, 5, 33)]
    narrow = Target(target.model, prefill_chunk=7)
    drafter = Eagle(checkpoint=eagle1, **SHAPES["static"])
    widths: list[int] = []
    handle = eagle1.fc.register_forward_pre_hook(lambda _module, arguments: widths.append(arguments[0].shape[1]))
    try:
        done = decode(narrow, drafter, prompts)
    finally:
        handle.remove()
    whole = decode(target, drafter, prompts)
    assert tokens_of(done) == tokens_of(whole) == tokens_of(decode(target, "none", prompts))
    assert [generation.stats.tau for generation in done] == [generation.stats.tau for generation in whole]
    assert widths[:30] == [2] * 30  # seven tokens among three rows; the longest prompt has sixty pairs


def test_a_row_decodes_the_same_alone_and_in_a_batch(target, head):
    drafter = Eagle(checkpoint=head, nodes=6, width=2)
    settings = {"rule": "rejection", "temperature": 0.8, "seed": 11, "max_new_tokens": 10}
    together = tokens_of(decode(target, drafter, batch_size=4, **settings))
    assert together == tokens_of(decode(target, drafter, batch_size=1, **settings))


def test_siblings_are_drawn_or_chosen(target, head):
    laws: list[Tensor | None] = []

    def check(state: DecodeState, reader: Any, root: Tensor, reads: Any, proposal: Proposal) -> None:
        laws.append(proposal.law)
        if proposal.law is not None:  # the law of the eldest sibling is the head's own distribution
            q = torch.softmax(process(state.rows, root[:, None])[:, 0].double(), -1)
            drafted = [row for row, size in enumerate(proposal.tree.sizes) if size]
            torch.testing.assert_close(proposal.law[drafted, 0].double(), q[drafted], rtol=0, atol=1e-5)
        else:
            tokens = proposal.tree.to_lists()[0]
            for row, own in zip(root, tokens, strict=True):
                assert not own or own[:3] == row.topk(3).indices.tolist()

    for rule in ("rejection", "coupled"):
        for siblings in ("auto", "chosen"):
            laws.clear()
            spy = Spy(check, checkpoint=head, tree=(3, 1), siblings=siblings)
            spy.copy = lambda spy=spy: spy  # type: ignore[method-assign, misc]
            if (rule, siblings) != ("coupled", "auto"):
                decode(target, spy, [[5, 6, 7]] * 2, rule=rule, temperature=0.9, max_new_tokens=12)
                assert laws
                assert all((law is not None) == (rule == "rejection" and siblings == "auto") for law in laws)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    ("drafted", "shape"), [([0, 3, 4], {"tree": (2, 1)}), ([0, 3], {"depth": 2, "nodes": 3, "width": 2})]
)
@pytest.mark.parametrize("third", [False, True])
def test_drawn_siblings_are_lossless(rule, drafted, shape, third, monkeypatch):
    config = LlamaConfig(vocab_size=7, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2)
    target = Target(tiny_model(config))
    torch.manual_seed(3)
    # Other tokens than these are never drafted.
    small = layer_config(target)
    three = Eagle3Head(small, layers=default_layers(target), draft_tokens=drafted)
    head: Head = three if third else EagleHead(small, draft_tokens=drafted)
    drafter = Eagle(checkpoint=head.double(), **shape)
    drafter.bind(target)
    with torch.inference_mode():
        law = round_law(target, drafter, LOSSLESS[rule], [1, 2, 4], monkeypatch)
        p = Continuations(target, [1, 2, 4])
        committed, expected = p.extend(law, 3), p.extend({(): 1.0}, 3)
    assert {len(text) for text in law} == {1, 2, 3}
    assert all(committed[text] == pytest.approx(probability, abs=1e-9) for text, probability in expected.items())


class Continuations:
    """The target's law behind a text, one context after another."""

    def __init__(self, target: Target, text: list[int]) -> None:
        self._target, self._text = target, text
        self._known: dict[tuple[int, ...], list[float]] = {}

    def extend(self, law: dict[tuple[int, ...], float], length: int) -> dict[tuple[int, ...], float]:
        """Returns the law of `length` tokens when the target goes on where `law` ends."""
        done: dict[tuple[int, ...], float] = {}
        left = list(law.items())
        while left:
            path, probability = left.pop()
            if len(path) == length:
                done[path] = done.get(path, 0.0) + probability
                continue
            if path not in self._known:
                logits = self._target.model(torch.tensor([[*self._text, *path]])).logits[0, -1]
                self._known[path] = logits.softmax(-1).tolist()
            left += [((*path, token), probability * weight) for token, weight in enumerate(self._known[path])]
        return done


def round_law(
    target: Target, drafter: Eagle, rule: Any, text: list[int], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, ...], float]:
    """Returns the law of what one round commits behind `text`: every draw of the drafter, every draw of the rule."""
    row: Any = SimpleNamespace(tokens=text, max_tokens=100, stop_reason=None)
    state = DecodeState(target, target.new_cache(1), "drawn", [row])
    session = drafter.session(state)
    session.admit(state, [0])
    scores = target.score(state.cache, [text[:-1]], TokenTree.empty(1), features=drafter.features)
    session.observe(state, Observation(range(1), Proposal.empty(1), scores, Verdict([[]], [text[-1:]])))

    def draft(source: Any) -> Proposal:
        draw = pick(source.draw)
        monkeypatch.setattr(
            draft_tree,
            "candidates",
            lambda state, logits, *rest, **named: draw(state, logits.double().log_softmax(-1), *rest, **named),
        )
        return session.propose(state)

    law: dict[tuple[int, ...], float] = {}
    for drafted, proposal in runs(draft):
        assert proposal.law is not None
        state.cache.lengths = [len(text) - 1]
        logits = target.score(state.cache, [text[-1:]], proposal.tree).logits.log_softmax(-1)
        for judged, verdict in runs(lambda source: rule.verify(proposal, logits, [source], [0])):  # noqa: B023
            path = tuple(verdict.tokens[0])
            law[path] = law.get(path, 0.0) + drafted * judged
    return law


@pytest.mark.parametrize("merged", ["eagle+prompt-lookup", "prompt-lookup+eagle"])
def test_merged_with_prompt_lookup(target, eagle1, merged, tmp_path):
    save_head(eagle1, tmp_path)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], *PROMPTS]
    eagle_options = {"checkpoint": str(tmp_path), "nodes": 5, "width": 2, "depth": 3}
    options = {"eagle": eagle_options, "prompt-lookup": {}}
    for settings in ({"rule": "auto"}, {"rule": "coupled", "temperature": 0.8, "seed": 4}):
        rule = settings.pop("rule")
        settings = {"max_new_tokens": 20, "eos_token_id": [], "batch_size": 3, **settings}
        done = Decoder(target, merged, drafter_options=options, rule=rule).generate(prompts, **settings)
        plain = Decoder(target, "none", rule=rule).generate(prompts, **settings)
        assert tokens_of(done) == tokens_of(plain)


@pytest.mark.parametrize("third", [False, True])
def test_a_target_of_another_family(third):
    target = Target(tiny_model(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=40)))
    config = layer_config(target)
    head = Eagle3Head(config, layers=default_layers(target)) if third else EagleHead(config, draft_tokens=REDUCED)
    drafter = Eagle(checkpoint=head.double(), **SHAPES["dynamic"])
    settings = {"rule": "coupled", "temperature": 0.7, "max_new_tokens": 24}
    assert tokens_of(decode(target, drafter, **settings)) == tokens_of(decode(target, "none", **settings))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_by_name_from_a_checkpoint(target, eagle1, name, tmp_path):
    save_head(eagle1, tmp_path)
    options = {"checkpoint": tmp_path, **SHAPES["dynamic"]}
    done = Decoder(target, name, drafter_options=options).generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
    same = decode(target, Eagle(checkpoint=eagle1, **SHAPES["dynamic"]), batch_size=1)
    assert tokens_of(done) == tokens_of(same)
    assert [one.stats.tau for one in done] == [one.stats.tau for one in same]


@pytest.mark.parametrize("packed", [False, True])
def test_a_loaded_head_is_packed_if_the_target_is(target, eagle1, tmp_path, packed):
    save_head(eagle1, tmp_path)
    own = Target(copy.deepcopy(target.model).float(), packed=packed)
    decoder = Decoder(own, Eagle(checkpoint=tmp_path, **SHAPES["dynamic"]))
    linears = [part for part in decoder.drafter.head.modules() if isinstance(part, nn.Linear)]
    assert linears and {isinstance(part, PackedLinear) for part in linears} == {packed}
    if packed:
        attention = decoder.drafter.head.layers[0].self_attn
        assert attention.q_proj._packed is attention.k_proj._packed is attention.v_proj._packed
    assert (decoder.drafter.head.config._attn_implementation == GROUPED) == packed
    drafted = decoder.generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
    plain = Decoder(own).generate(PROMPTS, max_new_tokens=20, eos_token_id=[])
    assert tokens_of(drafted) == tokens_of(plain)
    assert max(one.stats.tau for one in drafted) > 1


def test_a_head_keeps_its_own_target(target, eagle1):
    other = sure_target()
    borrowed = eagle1._borrowed
    decode(other, Eagle(checkpoint=eagle1))
    assert eagle1._borrowed is borrowed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": 3}, "checkpoint must be a path, a hub id or a head, got int"),
        ({"depth": 0}, "depth must be a whole number >= 1, got 0"),
        ({"tree": (2, 1), "depth": 3}, r"depth 3 and the 2 levels of tree=\(2, 1\)"),
        ({"tree": "chain", "nodes": 3}, "nodes and width shape a tree='dynamic'"),
        ({"tree": "mc_sim_7b_63", "nodes": 9}, "is fixed; depth, nodes and width do not go with it"),
        ({"tree": "bush"}, "tree must be 'chain', 'dynamic' or"),
        ({"confidence": 1.0}, "confidence must be a number in"),
        ({"cutoff": 1.0}, "cutoff must be a number in"),
        ({"siblings": "drawn"}, "siblings must be 'auto' or 'chosen', got 'drawn'"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Eagle(**{"checkpoint": "somewhere", **options})


def test_eagle1s_own_tree_has_25_nodes():
    shape = Eagle(checkpoint="somewhere", tree="mc_sim_7b_63").shape
    assert shape.branching == (4, 3, 3, 3, 2) and shape.paths is not None and len(shape.paths) == 25
    assert all(path[:-1] in shape.paths for path in shape.paths if len(path) > 1)


def test_trees_and_heads_that_do_not_fit(target):
    head = EagleHead(layer_config(target), draft_tokens=[1, 2]).double()
    with pytest.raises(InvalidRequest, match="3 children a context are too many: the head drafts 2 tokens"):
        decode(target, Eagle(checkpoint=head, tree=(3,)))
    with pytest.raises(InvalidRequest, match="a head has its own"):
        Eagle(checkpoint=head, draft_tokens=[1])
    with pytest.raises(InvalidRequest, match="vocab_size is 50"):
        decode(target, Eagle(checkpoint=EagleHead(layer_config(target, vocab_size=50)).double()))
    with pytest.raises(ModelNotFound, match="no head at"):
        decode(target, Eagle(checkpoint="./nowhere"))
    with pytest.raises(ModelNotFound, match="the hub gave"):
        decode(target, Eagle(checkpoint="someone/some-head"))
