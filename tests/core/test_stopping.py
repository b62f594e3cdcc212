"""Texts end where plain decoding ends: against decoding everything anew, and against transformers itself."""

import time

import pytest
import tokenizers
import torch
import transformers as hf
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from draftwood.core.errors import InvalidRequest
from draftwood.core.stopping import Stopper

CORPUS = [
    "the stop shop stops, stop! opera topper",
    "né à Zürich, 東京の天気 👍👍 naïve",
    "User: hi\n\nBot: a  b\n",
] * 3
ALPHABET = "stop e\n:!éü東京👍"


def byte_level() -> hf.PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen and SmolLM: a token may be part of a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<|end|>"])
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback() -> hf.PreTrainedTokenizerFast:
    """As Llama 2, Mistral and Gemma: spaces belong to words, rare characters are byte tokens."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS[:1], trainers.BpeTrainer(vocab_size=60))
    words = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [
        (left, right) for word in vocabulary for cut in range(1, len(word))
        if (left := word[:cut]) in vocabulary and (right := word[cut:]) in vocabulary and not word.startswith("<0x")
    ]  # fmt: skip
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def first_end(stopper: Stopper, tokens: list[int], prompt_length: int) -> tuple[int, str | None]:
    for length in range(prompt_length + 1, len(tokens) + 1):
        reason = stopper.check(tokens[:length], prompt_length)
        if reason is not None:
            return length, reason
    return len(tokens), None


def naive_end(tokenizer, strings: list[str], tokens: list[int], prompt_length: int) -> int:
    """Decodes the whole text after every token: it ends where a stop string ends behind the text so far."""
    for length in range(prompt_length + 1, len(tokens) + 1):
        text, clean = tokenizer.decode(tokens[:length]), length - 1
        while (before := tokenizer.decode(tokens[:clean])).endswith("\ufffd"):
            clean -= 1
        if any(text.find(string, max(len(before) - len(string) + 1, 0)) >= 0 for string in strings):
            return length
    return len(tokens)


strings_to_stop = st.lists(st.text(ALPHABET, min_size=1, max_size=6), min_size=1, max_size=3)


@st.composite
def texts_and_strings(draw):
    """Strings that may occur in the text, and one that does."""
    text = draw(st.text(ALPHABET, min_size=2, max_size=40))
    begin = draw(st.integers(0, len(text) - 1))
    return text, [text[begin : begin + draw(st.integers(1, 6))], *draw(strings_to_stop)[1:]]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(case=texts_and_strings(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_stop_strings_end_a_text_where_decoding_it_all_anew_would(kind, case, data):
    tokenizer, (text, strings) = TOKENIZERS[kind], case
    tokens = tokenizer.encode(text)
    boundaries = [n for n in range(len(tokens)) if not tokenizer.decode(tokens[:n]).endswith("\ufffd")]
    prompt_length = data.draw(st.sampled_from(boundaries))
    stopper = Stopper(max_tokens=1000, stop_strings=strings, tokenizer=tokenizer)
    length, reason = first_end(stopper, tokens, prompt_length)
    assert length == naive_end(tokenizer, strings, tokens, prompt_length)
    assert reason in ("stop_string", None)


@given(tokens=st.lists(st.integers(0, 329), min_size=1, max_size=25), strings=strings_to_stop)
@settings(deadline=None, max_examples=150)
def test_stop_strings_agree_with_transformers_on_any_tokens(tokens, strings):
    tokenizer = TOKENIZERS["byte level"]
    try:
        criterion = hf.StopStringCriteria(tokenizer, strings)
    except ValueError:  # older versions of transformers refuse strings that a token does not end with
        assume(False)
    stopper = Stopper(max_tokens=1000, stop_strings=strings, tokenizer=tokenizer)
    for length in range(1, len(tokens) + 1):
        stops = criterion(torch.tensor([tokens[:length]]), None).item()
        assert (stopper.check(tokens[:length], 0) == "stop_string") == stops
        if stops:
            break


@pytest.mark.parametrize(
    ("pieces", "string", "end"),
    [
        (["st", "op"], "stop", 2),
        (["s", "top", "per"], "stop", 2),
        (["st", "opera", " x"], "stop", 2),  # ends inside a token
        (["a", "\n", "\n", "b"], "\n\n", 3),
        (["x", "<|end|>", "y"], "<|end|>", 2),  # a special token is text, too
    ],
)
def test_stop_string_across_and_inside_tokens(pieces, string, end):
    tokenizer = TOKENIZERS["byte level"]
    tokens = [tokenizer.encode(piece) for piece in pieces]
    ends = [sum(map(len, tokens[: index + 1])) for index in range(len(tokens))]
    flat = [token for piece in tokens for token in piece]
    length, reason = first_end(Stopper(max_tokens=99, stop_strings=string, tokenizer=tokenizer), flat, 0)
    assert reason == "stop_string"
    assert ends[end - 2] < length <= ends[end - 1]
    assert string in tokenizer.decode(flat[:length])
    assert string not in tokenizer.decode(flat[: length - 1])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stop_string_in_the_prompt_does_not_stop_but_one_that_begins_there_does(kind):
    tokenizer = TOKENIZERS[kind]
    stopper = Stopper(max_tokens=99, stop_strings=["é"], tokenizer=tokenizer)
    prompt = tokenizer.encode("é")
    ü = tokenizer.encode("éü")  # ü shares its first byte with é
    assert first_end(stopper, ü, len(prompt)) == (len(ü), None)
    assert first_end(stopper, tokenizer.encode("éüé"), len(prompt))[1] == "stop_string"
    begun = Stopper(max_tokens=99, stop_strings="東京", tokenizer=tokenizer)
    tokens = tokenizer.encode("東京")
    assert first_end(begun, tokens, len(tokens) - 1) == (len(tokens), "stop_string")


@given(
    tokens=st.lists(st.integers(0, 5), min_size=2, max_size=12),
    eos=st.sets(st.integers(0, 5), max_size=2),
    limit=st.integers(2, 12),
    wanted=st.integers(0, 5),
)
@settings(deadline=None)
def test_the_first_condition_that_holds_ends_the_text(tokens, eos, limit, wanted):
    def twice(input_ids, scores):
        return (input_ids == wanted).sum(-1) >= 2

    def naive() -> tuple[int, str | None]:
        for length in range(2, len(tokens) + 1):
            if tokens[length - 1] in eos:
                return length, "eos"
            if tokens[:length].count(wanted) >= 2:
                return length, "criteria"
            if length >= limit:
                return length, "length"
        return len(tokens), None

    assert first_end(Stopper(eos, max_tokens=limit, criteria=[twice]), tokens, 1) == naive()


def test_criteria_are_called_as_generate_calls_them_and_all_of_them():
    seen = []

    class Recorder(hf.StoppingCriteria):
        def __init__(self, answer):
            self.answer = answer

        def __call__(self, input_ids, scores, **kwargs):
            seen.append((input_ids, scores))
            return self.answer

    answers = [torch.tensor([True]), False]
    stopper = Stopper(max_tokens=9, criteria=hf.StoppingCriteriaList(map(Recorder, answers)))
    assert stopper.check([4, 7, 1], 2) == "criteria"
    assert len(seen) == 2
    for input_ids, scores in seen:
        assert input_ids.dtype == torch.int64
        assert input_ids.tolist() == [[4, 7, 1]]
        assert scores is None


@pytest.mark.parametrize(
    ("criterion", "reason"),
    [
        (hf.EosTokenCriteria(1), "eos"),
        (hf.MaxLengthCriteria(3), "length"),
        (hf.MaxTimeCriteria(1.0, initial_timestamp=0.0), "time"),
        (hf.StopStringCriteria(TOKENIZERS["byte level"], "\x02"), "stop_string"),
    ],
)
def test_a_criterion_of_transformers_gives_its_own_reason(criterion, reason):
    two = TOKENIZERS["byte level"].encode("\x02")
    tokens = [4, 4, *two] if reason == "stop_string" else [4, 4, 1]
    assert Stopper(max_tokens=99, criteria=[criterion]).check(tokens, 2) == reason


def test_eos_comes_before_length_and_nothing_ends_a_text_without_a_new_token():
    stopper = Stopper([1], max_tokens=2)
    assert stopper.check([5, 1], 1) == "eos"
    assert stopper.check([5, 5], 1) == "length"
    assert stopper.check([5, 1], 2) is None


def test_a_deadline_is_shared_by_the_rows_and_named_last(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stopper = Stopper(max_tokens=9, max_time=2.0)
    now = 101.0
    row = stopper.for_row(3)
    assert row.check([5, 5], 1) is None
    now = 102.5
    assert row.check([5, 5], 1) == "time"
    assert row.check([5, 5, 5], 1) == "length"
    assert stopper.check([5, 5, 5], 1) == "time"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"stop_strings": ["x"]}, "tokenizer"),
        ({"stop_strings": [""], "tokenizer": TOKENIZERS["byte level"]}, "at least one character"),
        ({"stop_strings": [3], "tokenizer": TOKENIZERS["byte level"]}, "got 3"),
        ({"stop_strings": "a\ufffd", "tokenizer": TOKENIZERS["byte level"]}, "FFFD"),
        ({"criteria": [3]}, "got 3"),
        ({"criteria": 3}, "got 3"),
        ({"criteria": [hf.StoppingCriteria]}, "StoppingCriteria"),
        ({"max_time": 0}, "got 0"),
        ({"max_time": "1"}, "got '1'"),
        ({"max_time": float("nan")}, "got nan"),
    ],
)
def test_what_cannot_work_is_refused_with_the_value_received(arguments, words):
    with pytest.raises(InvalidRequest, match=words):
        Stopper(max_tokens=9, **arguments)


def test_the_text_ends_where_generate_ends_it():
    tokenizer = TOKENIZERS["byte level"]
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=330, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = hf.LlamaForCausalLM(config).eval()
    prompt = torch.tensor([tokenizer.encode("stop")])
    options = {"max_new_tokens": 30, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    checked = 0
    for seed in range(10):
        torch.manual_seed(seed)
        free = model.generate(prompt, **options)[0].tolist()
        whole = tokenizer.decode(free[prompt.shape[1] :])
        stop = next((whole[i : i + 2] for i in range(4, len(whole) - 2) if "\ufffd" not in whole[i : i + 2]), None)
        if stop is None:
            continue
        torch.manual_seed(seed)
        stopped = model.generate(prompt, **options, stop_strings=[stop], tokenizer=tokenizer)[0].tolist()
        stopper = Stopper(max_tokens=1000, stop_strings=[stop], tokenizer=tokenizer)
        assert free[: first_end(stopper, free, prompt.shape[1])[0]] == stopped
        checked += 1
    assert checked >= 6
