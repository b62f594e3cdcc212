"""The Decoder at its boundary: prompts of every form, streams, and every kind of bad input."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

import draftwood
from draftwood import Decoder, DraftwoodError, InvalidRequest, Target, UnknownName
from draftwood.core.loading import load_model
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.early_exit import EarlyExit
from draftwood.drafters.merged import Merged
from draftwood.drafters.prompt_lookup import PromptLookup
from tests.architectures import build
from tests.conftest import llama_config, tiny_model


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


@pytest.fixture(scope="module")
def decoder(target) -> Decoder:
    return Decoder(target, "prompt-lookup")


def test_one_prompt_gives_one_result_and_a_list_gives_a_list(decoder) -> None:
    one = decoder.generate([5, 6, 7], max_new_tokens=4, eos_token_id=[])
    many = decoder.generate([[5, 6, 7], torch.tensor([5, 6, 7])], max_new_tokens=4, eos_token_id=[])
    batch = decoder.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, eos_token_id=[])
    assert isinstance(one, draftwood.Generation)
    assert [result.tokens for result in many] == [one.tokens] * 2
    assert [result.tokens for result in batch] == [one.tokens]
    assert one.prompt_tokens == 3
    assert one.stats.seconds.total > 0


def test_a_stream_commits_what_generate_commits(decoder) -> None:
    steps = list(decoder.stream([5, 6, 5, 6], max_new_tokens=20, eos_token_id=[]))
    assert [token for step in steps for token in step.tokens] == decoder.generate(
        [5, 6, 5, 6], max_new_tokens=20, eos_token_id=[]
    ).tokens
    assert [step.stop_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].stop_reason == "length"
    assert all(0 <= step.drafted <= len(step.tokens) for step in steps)


def test_criteria_and_processors_of_the_caller_are_honoured(decoder) -> None:
    class Sixth(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.tensor([input_ids.shape[1] >= 9])

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            allowed = (input_ids[:, -1] + 1) % 96
            return torch.full_like(scores, -torch.inf).scatter(1, allowed[:, None], 0.0)

    result = decoder.generate(
        [5, 6, 7], max_new_tokens=30, stopping_criteria=[Sixth()], logits_processor=[Only()], eos_token_id=[]
    )
    assert result.tokens == [8, 9, 10, 11, 12, 13]
    assert result.stop_reason == "criteria"


GOOD = {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty prompt"),
        ([[]], {}, "empty prompt"),
        ([5, 96], {}, r"token id 96 is outside the vocabulary of 96 \(0 to 95\)"),
        ([-1], {}, "token id -1 is outside"),
        ([5.5], {}, "a prompt is|token ids must be integers"),
        ([5, "a"], {}, "token ids must be integers, got 'a'"),
        ("text", {}, "no tokenizer"),
        ([{"role": "user", "content": "hi"}], {}, "no tokenizer"),
        (7, {}, "a prompt is a string, a chat or token ids, got int"),
        ([5] * 2048, {}, "the prompt has 2048 tokens; the model's context of 2048"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ([5], {"max_new_tokens": -3}, "max_new_tokens must be a whole number >= 1, got -3"),
        ([5], {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number >= 1, got 2.5"),
        ([5], {"max_new_tokens": 2048}, "at most 2047 new tokens fit"),
        ([5], {"max_new_tokens": None, "max_length": 1}, "max_length 1 leaves no room"),
        ([5], {"max_length": 9}, "not both"),
        ([5], {"temperature": -1}, "temperature"),
        ([5], {"temperature": float("nan")}, "temperature"),
        ([5], {"top_p": 1.5}, "top_p"),
        ([5], {"top_pp": 0.5}, "top_p"),
        ([5], {"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ([5], {"stop_strings": "x"}, "tokenizer"),
        ([5], {"seed": "x"}, "seed must be an integer, got 'x'"),
        ([5], {"bad_words_ids": [[96]]}, "bad_words_ids names token 96"),
        ([5], {"eos_token_id": [-1]}, "eos_token_id names token -1"),
        ([{"role": "user"}], {}, "no tokenizer|role and content"),
        (torch.tensor(5), {}, "a prompt is"),
        ([5], {"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ([5], {"per_prompt": [{}, {}]}, "per_prompt has 2 entries for 1 prompts"),
    ],
)
def test_bad_input_is_a_clear_error(decoder, prompt, settings, message) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        decoder.generate(prompt, **{**GOOD, **settings})
    assert isinstance(caught.value, ValueError)


def test_names_and_options_that_do_not_exist(target) -> None:
    with pytest.raises(UnknownName, match="prompt-lookup") as caught:
        Decoder(target, "prompt-lokup")
    assert isinstance(caught.value, LookupError)
    with pytest.raises(UnknownName, match="rejection"):
        Decoder(target, "none", rule="rejektion")
    with pytest.raises(InvalidRequest, match="gamma"):
        Decoder(target, "prompt-lookup", drafter_options={"gama": 3})
    with pytest.raises(InvalidRequest, match="gamma"):
        Decoder(target, "prompt-lookup", drafter_options={"gamma": 0})
    with pytest.raises(InvalidRequest, match="already built"):
        Decoder(target, Decoder(target).drafter, drafter_options={"gamma": 3})
    with pytest.raises(InvalidRequest, match="temperature"):
        Decoder(target, rule="greedy").generate([5], temperature=0.5, max_new_tokens=2)


def test_a_drafter_may_serve_several_targets(target, tiny_llama, tinier_llama) -> None:
    other = Target(tiny_model(llama_config(layers=2, heads=4), seed=7))
    for drafter in (EarlyExit(exit_layer=1), Merged([PromptLookup(), DraftModel(model=tinier_llama)])):
        first, second = Decoder(target, drafter), Decoder(other, drafter)
        prompt = [3, 4, 5, 3, 4]
        for decoder in (first, second, first):
            ids = torch.tensor([prompt])
            plain = decoder.target.model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
            assert decoder.generate(prompt, max_new_tokens=12).tokens == plain[0, 5:].tolist()


@pytest.mark.parametrize("rule", ["rejection", "traversal", "coupled"])
def test_no_possible_token_is_an_error_where_tokens_are_drawn(target, rule) -> None:
    decoder = Decoder(target, "prompt-lookup", rule=rule)
    settings = {"max_new_tokens": 5, "temperature": 1.0, "suppress_tokens": list(range(96))}
    if rule == "coupled":  # picks a token whatever happens, as argmax does in plain greedy decoding
        assert len(decoder.generate([95] * 5, **settings, eos_token_id=[]).tokens) == 5
        return
    with pytest.raises(DraftwoodError, match="no token a probability"):
        decoder.generate([95] * 5, **settings)


def test_iterators_of_processors_reach_every_prompt(target) -> None:
    class NotSeven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([9]), 0.0)

    results = Decoder(target).generate(
        [[5], [6]], logits_processor=iter([NotSeven()]), per_prompt=[{"seed": 1}, {"seed": 2}], max_new_tokens=3
    )
    assert [result.tokens for result in results] == [[9, 9, 9]] * 2


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_prompt_with_a_seed_of_its_own_is_drawn_as_it_would_be_alone(target, rule) -> None:
    decoder = Decoder(target, "lookahead", rule=rule)
    settings: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}
    own = [{"seed": 3}, {"seed": 4}, {"seed": 3}, {}]
    texts = [result.tokens for result in decoder.generate([[5, 6]] * 4, per_prompt=own, **settings)]
    assert texts[:3] == [decoder.generate([5, 6], seed=seed, **settings).tokens for seed in (3, 4, 3)]
    assert texts[3] not in texts[:3]  # those without draw from streams of their own


def test_a_model_that_changed_asks_for_a_new_target() -> None:
    model = build("llama")
    decoder = Decoder(Target(model))
    decoder.generate([5, 6], max_new_tokens=2)
    model.float()
    with pytest.raises(InvalidRequest, match="build a new Target"):
        decoder.generate([5, 6], max_new_tokens=2)


def test_every_error_is_ours() -> None:
    for name in draftwood.__all__:
        kind = getattr(draftwood, name)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not DraftwoodError:
            assert issubclass(kind, DraftwoodError)
            assert issubclass(kind, (ValueError, LookupError))


@pytest.mark.real
def test_the_demo_model_writes_what_generate_writes() -> None:
    model, tokenizer = load_model("smollm2", dtype="float32")
    decoder = Decoder(Target(model, tokenizer), "prompt-lookup")
    chat = [{"role": "user", "content": "Repeat this twice: the cat sat on the mat, the cat sat on the rug."}]
    result = decoder.generate(chat, max_new_tokens=40)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = model.generate(**ids, do_sample=False, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    assert result.tokens == plain.tolist()
    assert result.text == tokenizer.decode(plain, skip_special_tokens=True)
    pieces = [piece for step in decoder.stream(chat, max_new_tokens=40) for piece, _ in step.pieces]
    assert "".join(pieces) == result.text
