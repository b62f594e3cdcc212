"""The draft model through the real engine: same text, exact cache, exact law, no forward too many."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import GPT2Config, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftwood.core.drafter import DraftSession, Observation
from draftwood.core.errors import InvalidRequest, ModelNotFound, VocabularyMismatch
from draftwood.core.proposal import Proposal
from draftwood.core.sampling import process, tree_paths
from draftwood.core.state import DecodeState, Row
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from tests.conftest import VOCABULARY, llama_config, tiny_model
from tests.drafters.view_checks import contents

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [17, 18]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"gamma": 4},
    "branching": {"tree": (3, 2, 1)},
    "dynamic": {"tree": "dynamic", "gamma": 4, "nodes": 7, "width": 3},
    "hesitant": {"gamma": 6, "confidence": 0.3},
}


@pytest.fixture(scope="module")
def target(tiny_llama: PreTrainedModel) -> Target:
    model = copy.deepcopy(tiny_llama)
    model.get_output_embeddings().weight.data.mul_(4.0)  # as sure of itself as real models are
    return Target(model)


@pytest.fixture(scope="module")
def relative(target: Target) -> PreTrainedModel:
    """A model that often says what the target says, and often not."""
    model = copy.deepcopy(target.model)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.data += (
                0.15 * parameter.data.std() * torch.randn_like(parameter.data) if parameter.dim() > 1 else 0
            )
    return model


class Draft(NamedTuple):
    """A proposal, the rows as they were when it was made, and their room."""

    rows: list[Row]
    rooms: list[int]
    proposal: Proposal


class Spy(DraftModel):
    """Notes every proposal and hands each round to `check`."""

    def copy(self) -> Spy:
        """Itself: what is bound is what is looked at."""
        return self

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.drafts: list[Draft] = []
        self.check = lambda state, session: None

    def session(self, state: DecodeState) -> DraftSession:
        inner, spy = super().session(state), self

        class Session(DraftSession):
            admit, retain = inner.admit, inner.retain

            def propose(self, state: DecodeState) -> Proposal:
                proposal = inner.propose(state)
                rooms = [state.room(row) for row in range(len(state.rows))]
                spy.drafts.append(Draft([replace(row, tokens=list(row.tokens)) for row in state.rows], rooms, proposal))
                return proposal

            def observe(self, state: DecodeState, seen: Observation) -> None:
                inner.observe(state, seen)
                spy.check(state, inner)

        return Session()


def decode(
    target: Target, drafter: Any, prompts: list[list[int]] = PROMPTS, rule: str = "auto", **settings: Any
) -> Any:
    settings = {"max_new_tokens": 20, "eos_token_id": [], "batch_size": 4, **settings}
    return Decoder(target, drafter, rule=rule).generate(prompts, **settings)


def tokens_of(generations: Any) -> list[list[int]]:
    return [generation.tokens for generation in generations]


def plain_logits(model: Target, text: Sequence[int]) -> Tensor:
    """Logits after a text, read from scratch, [vocabulary]."""
    return model.score(model.new_cache(1), [list(text)], TokenTree.empty(1)).logits[0, 0]


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_text_is_that_of_plain_decoding(target, relative, shape, batch_size):
    lengths = [{"max_new_tokens": count} for count in (20, 3, 17, 9)]
    settings = {"batch_size": batch_size, "per_prompt": lengths}
    done = decode(target, DraftModel(model=relative, **SHAPES[shape]), **settings)
    assert tokens_of(done) == tokens_of(decode(target, "none", **settings))
    assert 1.2 < done[0].stats.tau < 4.9


@pytest.mark.parametrize("shape", SHAPES)
def test_coupled_text_is_that_of_plain_decoding(target, relative, shape):
    settings = {"rule": "coupled", "temperature": 0.8, "top_k": 30, "seed": 5, "batch_size": 3}
    done = decode(target, DraftModel(model=relative, **SHAPES[shape]), **settings)
    assert tokens_of(done) == tokens_of(decode(target, "none", **settings))
    assert max(generation.stats.tau for generation in done) > 1.2


def test_processors_see_the_path_of_each_node(target):
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "eos_token_id": 2}
    done = decode(target, DraftModel(model=target, gamma=3), max_new_tokens=17, **settings)
    assert tokens_of(done) == tokens_of(decode(target, "none", max_new_tokens=17, **settings))
    # A draft that missed what a processor forbids on its own path would be refused.
    assert all(len(generation.tokens) < 17 or generation.stats.tau == 4 for generation in done)


@pytest.mark.parametrize("rule", ["greedy", "rejection", "traversal", "coupled"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_target_itself_is_always_accepted(target, rule, batch_size):
    settings = {} if rule == "greedy" else {"temperature": 0.9}
    # One token at the prefill, then rounds of gamma drafts and a bonus token.
    done = decode(target, DraftModel(model=target, gamma=4), rule=rule, max_new_tokens=1 + 5 * 4, **settings)
    assert [generation.stats.tau for generation in done] == [5.0] * 4


@pytest.mark.parametrize("rule", ["auto", "rejection"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("same", [False, True])
def test_cache_is_never_stale(target, relative, shape, rule, same):
    spy = Spy(model=target if same else relative, **SHAPES[shape])
    lacking = set()

    def check(state: DecodeState, session: Any) -> None:
        cache = session._cache
        for index, row in enumerate(state.rows):
            length = cache.lengths[index]
            lacking.add(len(row.tokens) - length)
            alone = spy.draft.new_cache(1)
            spy.draft.score(alone, [row.tokens[:length]], TokenTree.empty(1))
            got, expected = contents(spy.draft, cache, index, length), contents(spy.draft, alone, 0, length)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)

    spy.check = check
    temperature = 0.0 if rule == "auto" else 0.8
    lengths = [{"max_new_tokens": count} for count in (20, 4, 11, 7)]
    decode(target, spy, rule=rule, temperature=temperature, batch_size=3, per_prompt=lengths)
    # The newest token always; after full acceptance the last draft too, which nobody has read.
    assert lacking == {1, 2}


@pytest.mark.parametrize("shape", ["chain", "branching", "dynamic"])
def test_one_forward_a_level(target, relative, shape):
    drafter = DraftModel(model=relative, **SHAPES[shape])
    widths: list[int] = []
    handle = relative.register_forward_pre_hook(
        lambda _module, _arguments, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        drafter.bind(target)
        widths.clear()
        done = decode(target, drafter, [PROMPTS[0]], max_new_tokens=60)[0]
    finally:
        handle.remove()
    # `decode` binds again, which probes the model; what counts is what follows the prompt.
    widths = widths[len(widths) - widths[::-1].index(len(PROMPTS[0])) :]
    if shape == "dynamic":  # the last levels may be read in vain
        assert sum(done.stats.drafted_by_depth) <= len(widths) <= 4 * done.stats.rounds
    else:
        assert len(widths) == sum(done.stats.drafted_by_depth)
    assert max(widths) <= {"chain": 2, "branching": 6, "dynamic": 3}[shape]


def test_law_is_the_drafts_own_distribution(target, relative):
    spy = Spy(model=relative, tree=(3, 2))
    settings = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
    decode(target, spy, rule="rejection", max_new_tokens=10, **settings)
    drafts = [draft for draft in spy.drafts if draft.proposal.tree.width]
    assert len(drafts) > 2
    for rows, _, proposal in drafts:
        assert proposal.law is not None
        tokens, parents = proposal.tree.to_lists()
        for index, (row, paths) in enumerate(zip(rows, tree_paths(proposal.tree), strict=True)):
            for node, path in enumerate(paths[1:]):
                with torch.inference_mode():
                    logits = plain_logits(spy.draft, [*row.tokens, *path[:-1]])
                q = torch.softmax(process([row], logits[None, None], [[path[:-1]]])[0, 0].double(), -1)
                q[[tokens[index][n] for n in range(node) if parents[index][n] == parents[index][node]]] = 0.0
                torch.testing.assert_close(proposal.law[index, node].double(), q / q.sum(), rtol=0, atol=1e-5)
                assert proposal.law[index, node].sum().item() == pytest.approx(1.0, abs=1e-5)


def test_chosen_tokens_carry_no_law(target, relative):
    spy = Spy(model=relative, tree="dynamic")
    decode(target, spy)
    assert all(proposal.law is None for _, _, proposal in spy.drafts)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tree_is_deeper_than_the_room(target, relative, shape):
    spy = Spy(model=relative, **SHAPES[shape])
    decode(target, spy, per_prompt=[{"max_new_tokens": count} for count in (9, 2, 5, 1)])
    deepest = 0
    for _, rooms, proposal in spy.drafts:
        for room, paths in zip(rooms, tree_paths(proposal.tree), strict=True):
            assert max(map(len, paths)) <= room
            deepest = max(deepest, max(map(len, paths)))
    assert deepest >= 3


def test_a_row_decodes_the_same_alone_and_in_a_batch(target, relative):
    drafter = DraftModel(model=relative, tree="dynamic", nodes=6, width=2)
    settings = {"rule": "rejection", "temperature": 0.8, "seed": 11}
    together = tokens_of(decode(target, drafter, batch_size=4, **settings))
    assert together == tokens_of(decode(target, drafter, batch_size=1, **settings))
    assert together != tokens_of(decode(target, drafter, batch_size=4, **{**settings, "seed": 12}))


@pytest.mark.parametrize("learned", [False, True])
def test_rows_outgrow_a_short_draft_context(target, learned):
    if learned:  # a position past the end would crash this one
        config: Any = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=16)
    else:
        config = llama_config(layers=1, heads=2)
        config.max_position_embeddings = 16
    prompts = [[5, 6, 7], list(range(3, 33)), list(range(3, 18)), [9] * 12]
    spy = Spy(model=tiny_model(config, seed=4), tree=(2, 1, 1, 1))
    done = decode(target, spy, prompts)
    assert tokens_of(done) == tokens_of(decode(target, "none", prompts))
    for rows, _, proposal in spy.drafts:
        for row, paths in zip(rows, tree_paths(proposal.tree), strict=True):
            assert len(row.tokens) + max(map(len, paths)) <= max(16, len(row.tokens))
    assert done[0].stats.drafted and done[3].stats.drafted
    assert not done[1].stats.drafted


def test_loads_its_model_in_the_targets_type(target, tmp_path, tinier_llama):
    tinier_llama.save_pretrained(tmp_path)
    words(range(VOCABULARY)).save_pretrained(tmp_path)
    spoken = Target(target.model, words(range(VOCABULARY)))
    drafter = Decoder(spoken, DraftModel(model=tmp_path)).drafter
    assert tokens_of(decode(spoken, drafter)) == tokens_of(decode(target, "none"))
    assert drafter.draft.dtype == target.dtype == torch.float64
    with pytest.raises(ModelNotFound, match="nowhere"):
        decode(target, DraftModel(model=tmp_path / "nowhere"))


@pytest.mark.parametrize("packed", [False, True])
def test_is_packed_if_the_target_is(tmp_path, tiny_llama, tinier_llama, packed):
    tinier_llama.save_pretrained(tmp_path)
    words(range(VOCABULARY)).save_pretrained(tmp_path)
    spoken = Target(copy.deepcopy(tiny_llama).float(), words(range(VOCABULARY)), packed=packed)
    drafter = Decoder(spoken, DraftModel(model=tmp_path)).drafter
    assert drafter.draft.packed == packed
    assert tokens_of(decode(spoken, drafter)) == tokens_of(decode(spoken, "none"))


def words(ids: Sequence[int], prefix: str = "w") -> PreTrainedTokenizerBase:
    """A tokenizer whose token i is the word number `ids[i]`."""
    vocabulary = {f"{prefix}{word}": index for index, word in enumerate(ids)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=f"{prefix}{ids[0]}"))
    )


def resized(model: PreTrainedModel, size: int) -> PreTrainedModel:
    grown = copy.deepcopy(model)
    grown.resize_token_embeddings(size, mean_resizing=False)
    return grown.eval()


@pytest.mark.parametrize("size", [VOCABULARY - 16, VOCABULARY + 16])
def test_padding_is_no_mismatch(target, size):
    # The target has more rows in its embedding than the draft, or fewer; the tokenizers are the same.
    tokenizer = words(range(VOCABULARY - 16))
    draft = Target(resized(target.model, size), tokenizer)
    spoken = Target(target.model, tokenizer)
    spy = Spy(model=draft, gamma=4)
    for rule, temperature in (("greedy", 0.0), ("rejection", 0.7)):
        done = decode(spoken, spy, rule=rule, temperature=temperature, max_new_tokens=21)
        if rule == "greedy":
            assert tokens_of(done) == tokens_of(decode(target, "none", max_new_tokens=21))
        assert sum(generation.stats.tau for generation in done) / 4 > 2.0
    laws = [proposal.law for _, _, proposal in spy.drafts if proposal.law is not None]
    assert {law.shape[-1] for law in laws} == {VOCABULARY}


def test_intersection_maps_tokens_by_their_text(target):
    # The draft is the target with its tokens in another order; the tokenizers know it, and spell spaces differently.
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(target.model)
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        layer.weight = torch.nn.Parameter(layer.weight[order])
    draft = Target(model, words(order.tolist(), "Ġ"))
    spoken = Target(target.model, words(range(VOCABULARY), "▁"))
    done = decode(spoken, DraftModel(model=draft, gamma=4, vocabulary="intersection"), max_new_tokens=21)
    assert tokens_of(done) == tokens_of(decode(target, "none", max_new_tokens=21))
    assert [generation.stats.tau for generation in done] == [5.0] * 4


def test_only_shared_tokens_are_drafted(target, relative):
    # Odd words are unknown to the draft.
    draft = Target(relative, words([word if word % 2 == 0 else word + 1000 for word in range(VOCABULARY)]))
    spoken = Target(target.model, words(range(VOCABULARY)))
    spy = Spy(model=draft, tree=(3, 2), vocabulary="intersection")
    done = decode(spoken, spy, rule="rejection", temperature=1.0)
    assert {token for _, _, proposal in spy.drafts for token in proposal.tree.tokens.flatten().tolist()} <= set(
        range(0, VOCABULARY, 2)
    )
    for _, _, proposal in spy.drafts:
        if proposal.law is not None:
            law = proposal.law[proposal.tree.valid]
            assert not law[:, 1::2].any()
            torch.testing.assert_close(law.sum(-1), torch.ones(len(law)))
    assert any(token % 2 for generation in done for token in generation.tokens)
    greedy = decode(spoken, DraftModel(model=draft, vocabulary="intersection"))
    assert tokens_of(greedy) == tokens_of(decode(target, "none"))


def test_vocabularies_that_differ_are_named(target, relative):
    ours = Target(target.model, words(range(VOCABULARY)))
    swapped = [*range(40), 41, 40, *range(42, VOCABULARY)]
    with pytest.raises(VocabularyMismatch, match=r"token 40 is 'w40' for the target and 'w41' for the draft"):
        decode(ours, DraftModel(model=Target(relative, words(swapped))))
    with pytest.raises(VocabularyMismatch, match=r"96 tokens, 96 embeddings"):
        decode(ours, DraftModel(model=Target(relative, words(swapped))))
    with pytest.raises(VocabularyMismatch, match="no token in common"):
        decode(ours, DraftModel(model=Target(relative, words(range(96), "x")), vocabulary="intersection"))
    with pytest.raises(VocabularyMismatch, match="without a tokenizer of the draft model"):
        decode(ours, DraftModel(model=resized(target.model, 112)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma must be a whole number >= 1, got 0"),
        ({"gamma": 2.5}, "gamma must be a whole number >= 1, got 2.5"),
        ({"gamma": True}, "gamma must be a whole number >= 1, got True"),
        ({"gamma": {"x": 3}}, "gamma must be a whole number >= 1, got {'x': 3}"),
        ({"tree": "bush"}, "tree must be .* got 'bush'"),
        ({"tree": 5}, "tree must be .* got 5"),
        ({"tree": None}, "tree must be .* got None"),
        ({"tree": (3, "2")}, "each level of tree must be .* got '2'"),
        ({"tree": (3, True)}, "each level of tree must be .* got True"),
        ({"tree": (3, 0)}, "each level of tree must be a whole number >= 1, got 0"),
        ({"tree": ()}, "at least one level"),
        ({"tree": (3, 2), "gamma": 5}, "gamma 5 and the 2 levels"),
        ({"nodes": 8}, "nodes and width shape a tree='dynamic'"),
        ({"tree": "dynamic", "width": 0}, "width must be a whole number >= 1, got 0"),
        ({"confidence": 1.5}, r"confidence must be a number in \[0, 1\), got 1.5"),
        ({"confidence": "x"}, "confidence must be a number in .* got 'x'"),
        ({"vocabulary": "union"}, "'strict' or 'intersection', got 'union'"),
        ({"gamma": 64}, "gamma 64 leaves no text in the draft model's context of 64"),
        ({"gamma": 5000}, "the target's context of 2048"),
        ({"tree": (97,)}, "97 children a context are too many: the models share 96"),
    ],
)
def test_options_that_cannot_work(target, options, message):
    config = llama_config(layers=1, heads=2)
    config.max_position_embeddings = 64
    with pytest.raises(InvalidRequest, match=message):
        DraftModel(model=tiny_model(config), **options).bind(target)


def test_model_of_a_wrong_kind():
    with pytest.raises(InvalidRequest, match="got int"):
        DraftModel(model=3)  # type: ignore[arg-type]
