"""Every node of a tree gets what transformers' own pipeline gives to its path, and no work is done twice."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.core.errors import InvalidRequest
from draftwood.core.sampling import SamplingParams, compile_pipeline, process, tree_paths
from draftwood.core.tree import TokenTree

VOCABULARY, EOS, MAX_TOKENS = 48, (1, 2), 7  # a self-hashing watermark looks at 40 tokens


class Shift(hf.LogitsProcessor):
    """A caller's own processor: looks at the text, keeps nothing."""

    def __call__(self, input_ids, scores):
        return scores + torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1]) * input_ids.shape[1]


# Every setting, greedy unless it needs sampling to have an effect; values strong enough to show.
CASES = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.3, "top_p": 0.6},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "top_h": {"temperature": 1.0, "top_h": 0.4},
    "typical_p": {"temperature": 0.8, "typical_p": 0.5},
    "epsilon_cutoff": {"temperature": 1.0, "epsilon_cutoff": 0.05},
    "eta_cutoff": {"temperature": 1.0, "eta_cutoff": 0.2},
    "warpers without sampling": {"top_k": 1, "top_p": 0.1, "min_p": 0.9},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_penalty below 1": {"repetition_penalty": 0.5},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 5], [1], [6, 7, 4]]},
    "bad_words_ids of one token": {"bad_words_ids": [[3], [4]]},
    "sequence_bias": {"sequence_bias": [[[3], 2.0], [[4, 5], -3.0], [[5, 6, 7], 9.0]]},
    "sequence_bias of one token": {"sequence_bias": {(3,): 2.0, (4,): -3.0}},
    "min_length": {"min_length": 7},
    "min_new_tokens": {"min_new_tokens": 4},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "forced_eos_token_id, several": {"forced_eos_token_id": [1, 2]},
    "remove_invalid_values": {"suppress_tokens": [3], "bad_words_ids": [[4]], "remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 1.5)},
    "suppress_tokens": {"suppress_tokens": [3, 4, 5]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [3, 4, 5]},
    "begin after a forced bos": {"begin_suppress_tokens": [3, 4, 5], "forced_bos_token_id": 7},
    "renormalize_logits": {"temperature": 0.5, "top_k": 4, "renormalize_logits": True},
    "logits_processor": {"logits_processor": [Shift()]},
    "logits_processor before warpers": {"temperature": 0.7, "top_k": 5, "logits_processor": [Shift(), Shift()]},
    "logits_processor of a known class": {
        "repetition_penalty": 1.2,
        "min_new_tokens": 3,
        "logits_processor": [Shift(), hf.RepetitionPenaltyLogitsProcessor(3.0)],
    },
    "order of processors": {"remove_invalid_values": True, "suppress_tokens": [3], "sequence_bias": [[[4, 5], 1.0]],
                            "exponential_decay_length_penalty": (0, 1.4), "begin_suppress_tokens": [6],
                            "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.3},
}  # fmt: skip

# Apart, because transformers draws a table of a million entries for each processor.
WATERMARKS = {
    "watermarking_config": {"watermarking_config": hf.WatermarkingConfig(bias=2.5)},
    "watermark after warpers": {"temperature": 0.8, "top_k": 9, "watermarking_config": hf.WatermarkingConfig(bias=1.0)},
    "watermark before normalisation": {
        "renormalize_logits": True,
        "suppress_tokens": [3],
        "watermarking_config": hf.WatermarkingConfig(seeding_scheme="selfhash", context_width=2),
    },
}


@pytest.fixture(scope="module")
def model():
    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        eos_token_id=list(EOS), pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = hf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # logits of a useful spread
    return model


def make_row(fields, prompt, committed=(), max_tokens=MAX_TOKENS):
    pipeline = compile_pipeline(
        SamplingParams.from_fields(**fields), eos_token_ids=EOS, prompt=prompt, max_tokens=max_tokens
    )
    return SimpleNamespace(pipeline=pipeline, tokens=[*prompt, *committed], prompt=prompt, fields=fields)


def by_transformers(model, row, path, logits):
    """Applies the pipeline that `generate` would build for this row to one path."""
    given = {name: value for name, value in row.fields.items() if name != "logits_processor"}
    given |= {"do_sample": given.get("temperature", 0) > 0, "temperature": given.get("temperature", 0) or 1.0}
    config = hf.GenerationConfig(**given, max_length=MAX_TOKENS)
    config._eos_token_tensor = torch.tensor(EOS)
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=len(row.prompt),
        encoder_input_ids=torch.tensor([row.prompt]),
        logits_processor=hf.LogitsProcessorList(row.fields.get("logits_processor", [])),
        device="cpu",
        model_kwargs={},
    )
    return processors(torch.tensor([[*row.tokens, *path]]), logits[None].to(torch.float32, copy=True))[0]


tokens = st.integers(1, 7)  # few of them, so that texts repeat


@st.composite
def trees(draw, batch):
    sizes = [draw(st.integers(0, 6)) for _ in range(batch)]
    parents = [[draw(st.integers(-1, node - 1)) for node in range(size)] for size in sizes]
    return TokenTree.from_lists([[draw(tokens) for _ in range(size)] for size in sizes], parents)


@st.composite
def requests(draw, batch):
    """Prompts and committed tokens; with a tree behind them, shorter and longer than MAX_TOKENS."""
    some = st.lists(tokens, min_size=1, max_size=3)
    return [(draw(some), draw(st.lists(tokens, max_size=3))) for _ in range(batch)]


def check_against_transformers(model, rows, tree, seed):
    logits = torch.randn(len(rows), 1 + tree.width, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    kept = logits.clone()
    paths = tree_paths(tree)
    result = process(rows, logits, paths)
    assert torch.equal(logits, kept)
    for index, row in enumerate(rows):
        for column, path in enumerate(paths[index]):
            wanted = by_transformers(model, row, path, logits[index, column])
            torch.testing.assert_close(result[index, column], wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_a_setting_gives_each_node_what_transformers_gives_its_path(model, case, data):
    batch = data.draw(st.integers(1, 3))
    rows = [make_row(CASES[case], *request) for request in data.draw(requests(batch))]
    check_against_transformers(model, rows, data.draw(trees(batch)), data.draw(st.integers(0, 99)))


def possible(fields) -> bool:
    """Whether transformers itself takes the mixture: it needs finite logits for an entropy, for example."""
    clashes = [
        ("min_length", "min_new_tokens"),
        ("forced_bos_token_id", "suppress_tokens"),
        ("remove_invalid_values", "eta_cutoff"),
        ("remove_invalid_values", "top_h"),
        ("exponential_decay_length_penalty", "top_h"),  # NaN where the end of the text is impossible
    ]
    return not any(one in fields and other in fields for one, other in clashes)


mixtures = (
    st.lists(st.sampled_from(sorted(CASES)), max_size=4)
    .map(lambda names: {key: value for name in names for key, value in CASES[name].items()})
    .filter(possible)
)


@given(data=st.data())
@settings(deadline=None, max_examples=120)
def test_any_mixture_of_settings_in_one_batch(model, data):
    batch = data.draw(st.integers(1, 4))
    rows = [make_row(data.draw(mixtures), *request) for request in data.draw(requests(batch))]
    check_against_transformers(model, rows, data.draw(trees(batch)), data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("case", WATERMARKS)
def test_a_watermark_gives_each_node_what_transformers_gives_its_path(model, case):
    rows = [make_row(WATERMARKS[case], [3, 4, 5], [6]), make_row(WATERMARKS[case], [4])]
    tree = TokenTree.from_lists([[3, 4, 5], [3]], [[-1, 0, -1], [-1]])
    check_against_transformers(model, rows, tree, 0)


@pytest.mark.parametrize("case", CASES | WATERMARKS)
def test_the_scores_of_generate_are_met_along_a_chain(model, case):
    """The same by the public API: what `generate` itself reports as logits and scores."""
    prompt, fields = [5, 3, 6, 3], (CASES | WATERMARKS)[case]
    given = {name: value for name, value in fields.items() if name != "logits_processor"}
    given |= {"do_sample": given.get("temperature", 0) > 0, "temperature": given.get("temperature", 0) or 1.0}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        out = model.generate(
            torch.tensor([prompt]), **({"top_k": 0} | given), max_length=12, output_scores=True,
            output_logits=True, return_dict_in_generate=True,
            logits_processor=hf.LogitsProcessorList(fields.get("logits_processor", [])),
        )  # fmt: skip
    drafted = out.sequences[0, len(prompt) : -1].tolist()
    paths = [[drafted[:depth] for depth in range(len(drafted) + 1)]]
    result = process([make_row(fields, prompt, max_tokens=12)], torch.stack(out.logits, 1), paths)
    torch.testing.assert_close(result, torch.stack(out.scores, 1), rtol=1e-5, atol=1e-5)


def test_a_forced_first_token_is_forced_after_one_token_only(model):
    rows = [make_row({"forced_bos_token_id": 5, "begin_suppress_tokens": [4]}, [3])]
    tree = TokenTree.from_lists([[5, 6]], [[-1, 0]])
    result = process(rows, torch.zeros(1, 3, VOCABULARY), tree_paths(tree))
    assert result[0, 0].isfinite().nonzero().flatten().tolist() == [5]
    assert (~result[0, 1].isfinite()).nonzero().flatten().tolist() == [4]
    assert result[0, 2].isfinite().all()


def counted(monkeypatch, kind):
    calls = []
    original = kind.__call__

    def call(self, input_ids, scores):
        calls.append(tuple(scores.shape))
        return original(self, input_ids, scores)

    monkeypatch.setattr(kind, "__call__", call)
    return calls


def test_memoryless_processors_run_once_for_all_nodes_of_all_rows(monkeypatch):
    warper = counted(monkeypatch, hf.TopKLogitsWarper)
    penalty = counted(monkeypatch, hf.RepetitionPenaltyLogitsProcessor)
    fields = {"temperature": 0.5, "top_k": 3}
    plain = [make_row(fields, [3] * length) for length in (1, 2, 4)]
    tree = TokenTree.from_lists([[3, 4, 5]] * 3, [[-1, 0, 0]] * 3)
    process(plain, torch.randn(3, 4, VOCABULARY), tree_paths(tree))
    assert warper == [(12, VOCABULARY)]
    assert penalty == []

    warper.clear()
    rows = [make_row(fields | {"repetition_penalty": 1.5}, [3] * length) for length in (1, 2, 4)]
    process(rows, torch.randn(3, 4, VOCABULARY), tree_paths(tree))
    assert warper == [(12, VOCABULARY)]
    # Lengths: 1 2 3 3, 2 3 4 4, 4 5 6 6; nodes of one length go together, whatever their row.
    assert sorted(penalty) == sorted((n, VOCABULARY) for n in (1, 2, 3, 3, 1, 2))


def test_rows_of_different_settings_share_nothing(monkeypatch):
    warper = counted(monkeypatch, hf.TopKLogitsWarper)
    rows = [make_row({"temperature": 1.0, "top_k": k}, [3]) for k in (2, 5, 2)]
    result = process(rows, torch.randn(3, 2, VOCABULARY), None)
    assert sorted(warper) == [(2, VOCABULARY), (4, VOCABULARY)]
    assert result.isfinite().sum(-1).tolist() == [[2, 2], [5, 5], [2, 2]]


def test_a_callers_own_processor_sees_the_text_of_every_node():
    seen = []

    class Recorder(hf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            assert input_ids.dtype == torch.int64
            assert scores.dtype == torch.float32
            assert scores.shape == (len(input_ids), VOCABULARY)
            seen.extend(input_ids.tolist())
            return scores

    fields = {"logits_processor": [Recorder()]}
    rows = [make_row(fields, [9, 8], [7]), make_row({}, [5]), make_row(fields, [6])]
    tree = TokenTree.from_lists([[3, 4, 5], [3], [4]], [[-1, 0, -1], [-1], [-1]])
    process(rows, torch.randn(3, 4, VOCABULARY, dtype=torch.bfloat16), tree_paths(tree))
    assert sorted(seen) == [[6], [6, 4], [9, 8, 7], [9, 8, 7, 3], [9, 8, 7, 3, 4], [9, 8, 7, 5]]


def test_padding_columns_do_not_reach_processors_with_a_history():
    rows = [make_row({"repetition_penalty": 2.0}, [3]), make_row({"repetition_penalty": 2.0}, [3])]
    tree = TokenTree.from_lists([[4, 5], []], [[-1, 0], []])
    logits = torch.ones(2, 3, VOCABULARY)
    result = process(rows, logits, tree_paths(tree))
    assert torch.equal(result[1, 1:], logits[1, 1:])
    assert result[0, 2, [3, 4, 5, 6]].tolist() == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_greedy_rows_without_processors_are_left_alone(dtype):
    rows = [make_row({}, [3]), make_row({"top_k": 5, "min_p": 0.1}, [4])]
    logits = torch.randn(2, 3, VOCABULARY, dtype=dtype)
    assert not any(row.pipeline.needs_history for row in rows)
    assert process(rows, logits, None) is logits


def test_greedy_rows_among_sampling_ones_become_one_hot():
    rows = [make_row({}, [3]), make_row({"temperature": 1.0}, [3]), make_row({"suppress_tokens": [3]}, [3])]
    logits = torch.randn(3, 2, VOCABULARY, dtype=torch.bfloat16)
    logits[:, :, 3], logits[:, :, 4] = 50, 40
    result = process(rows, logits, None, one_hot_greedy=True)
    assert result.dtype == torch.float32
    for row, token in ((0, 3), (2, 4)):
        assert result[row].softmax(-1)[:, token].tolist() == [1.0, 1.0]
        assert result[row].max(-1).values.tolist() == [0.0, 0.0]
    assert torch.equal(result[1], logits[1].float())
    alone = process(rows[:1], logits[:1], None, one_hot_greedy=True)
    assert torch.equal(alone, result[:1])


def test_one_pipeline_serves_vocabularies_of_different_padding():
    fields = {"sequence_bias": [[[4], 1.0], [[3, 5], 2.0]], "watermarking_config": hf.WatermarkingConfig(bias=3.0)}
    row = make_row(fields, [3])
    alone = make_row(fields, [3])
    for size in (VOCABULARY, VOCABULARY + 4, VOCABULARY):
        result = process([row], torch.zeros(1, 1, size), None)
        fresh = process([make_row(fields, [3])], torch.zeros(1, 1, size), None)
        assert torch.equal(result, fresh)
    assert process([alone], torch.zeros(1, 1, VOCABULARY + 4), None).shape[-1] == VOCABULARY + 4


def test_the_same_row_may_come_several_times():
    row = make_row({"no_repeat_ngram_size": 1, "temperature": 0.5}, [3])
    result = process([row, row], torch.zeros(2, 1, VOCABULARY), [[[4]], [[5, 6]]])
    assert [(~entry.isfinite()).nonzero().flatten().tolist() for entry in result[:, 0]] == [[3, 4], [3, 5, 6]]


@given(tree=trees(3))
@settings(deadline=None)
def test_tree_paths_are_the_ancestors_of_each_node(tree):
    for row, paths in enumerate(tree_paths(tree)):
        assert len(paths) == 1 + tree.sizes[row]
        assert paths[0] == []
        for node in range(tree.sizes[row]):
            above = tree.ancestors[row, node].nonzero().flatten()  # in order, since parents come first
            assert paths[1 + node] == tree.tokens[row, above].tolist()


def test_a_length_penalty_needs_an_end_of_sequence_token():
    params = SamplingParams(exponential_decay_length_penalty=(1, 1.5))
    with pytest.raises(InvalidRequest, match="eos_token_id"):
        compile_pipeline(params, eos_token_ids=[], prompt=[1], max_tokens=9)
