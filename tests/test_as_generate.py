"""The door from transformers: whatever plain `generate` gives, `custom_generate` gives."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    pipeline,
)

from draftwood import InvalidRequest, as_generate
from tests.architectures import build
from tests.conftest import VOCABULARY

IDS = torch.tensor([[0, 0, 0, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9, 8, 7, 9]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8])


def both(model, drafter="prompt-lookup", **settings):
    """Plain `generate`, and the same through a drafter."""
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0, **settings}
    given = {"input_ids": IDS, "attention_mask": MASK, **settings.pop("inputs", {})}
    plain = model.generate(**given, **settings)
    return plain, model.generate(**given, custom_generate=as_generate(drafter), **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[60], [5, 6]]},
        {"min_new_tokens": 5, "eos_token_id": list(range(40))},
        {"eos_token_id": list(range(0, 95, 6))},
        {"forced_eos_token_id": 3},
        {"suppress_tokens": list(range(48))},
        {"sequence_bias": [[[5, 6], 4.0], [[30], -3.0]]},
        {"exponential_decay_length_penalty": (3, 1.4)},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(10 + 40 * row, 50 + 40 * row))},
        {"max_length": 17, "max_new_tokens": None},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
@pytest.mark.parametrize("drafter", ["none", "prompt-lookup"])
def test_greedy_batches_with_left_padding_equal_generate(tiny_llama, settings, drafter) -> None:
    plain, ours = both(tiny_llama, drafter, **settings)
    assert ours.dtype == plain.dtype
    assert ours.tolist() == plain.tolist()


def test_the_callers_own_processors_and_criteria_see_what_generate_shows_them(tiny_llama) -> None:
    class Far(LogitsProcessor):
        def __call__(self, input_ids, scores):
            distance = (torch.arange(scores.shape[1]) - input_ids.sum(1, keepdim=True) % VOCABULARY).abs()
            return scores - 0.1 * distance

    class Sum(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return input_ids.sum(1) % 5 == 0

    plain, ours = both(tiny_llama, logits_processor=[Far()], stopping_criteria=StoppingCriteriaList([Sum()]))
    assert ours.tolist() == plain.tolist()


def test_scores_and_logits_are_those_of_generate(tiny_llama) -> None:
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, ours = both(tiny_llama, repetition_penalty=1.2, eos_token_id=list(range(0, 95, 6)), **wanted)
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == ours.sequences.shape[1] - IDS.shape[1]
        for step, (mine, theirs) in enumerate(zip(ours[name], plain[name], strict=True)):
            for row in range(2):
                if ours.sequences[row, IDS.shape[1] + step] != 0 or step == 0:
                    torch.testing.assert_close(mine[row], theirs[row], rtol=1e-4, atol=1e-4)


def test_sampling_follows_the_seed_and_gives_several_texts(tiny_llama) -> None:
    def sample(seed: int | None, global_seed: int = 0) -> list[list[int]]:
        with torch.random.fork_rng():
            torch.manual_seed(global_seed)
            door = as_generate("prompt-lookup", seed=seed)
            settings = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "temperature": 0.9}
            out = tiny_llama.generate(IDS, attention_mask=MASK, custom_generate=door, pad_token_id=0, **settings)
            return out.tolist()

    texts = sample(1)
    assert len(texts) == 6
    assert len({tuple(text) for text in texts[:3]}) > 1
    assert sample(1) == texts
    assert sample(2) != texts
    assert sample(None, 4) == sample(None, 4) != sample(None, 5)


def test_the_law_of_sampled_text_is_that_of_generate(tiny_llama) -> None:
    """Chi-square of the third token's parity, 600 texts each way; the third token comes out of a drafted round."""
    ids = torch.tensor([[5, 6, 7, 5, 6]]).expand(300, -1)
    settings = {"do_sample": True, "max_new_tokens": 3, "top_k": 6, "eos_token_id": 95, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        plain = tiny_llama.generate(ids, **settings)[:, -3:]
        ours = tiny_llama.generate(ids, custom_generate=as_generate("prompt-lookup", rule="rejection"), **settings)[
            :, -3:
        ]
    for column in range(3):
        counts = torch.stack([torch.bincount(text[:, column], minlength=VOCABULARY) for text in (plain, ours)]).double()
        counts = counts[:, counts.sum(0) >= 20]
        expected = counts.sum(0) * counts.sum(1, keepdim=True) / counts.sum()
        statistic = float(((counts - expected) ** 2 / expected).sum())
        degrees = counts.shape[1] - 1
        assert statistic < degrees + 4 * (2 * max(degrees, 1)) ** 0.5 + 4


def test_a_streamer_gets_every_token_in_order(tiny_llama) -> None:
    class Keep:
        def __init__(self):
            self.tokens, self.ended = [], False

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    keep = Keep()
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": 95, "pad_token_id": 0}
    out = tiny_llama.generate(IDS[1:], custom_generate=as_generate("prompt-lookup", streamer=keep), **settings)
    assert keep.tokens == out[0, IDS.shape[1] :].tolist()
    assert keep.ended


@pytest.mark.parametrize("mask", [[[1, 1, 0, 0]], [[1, 0, 1, 1]]])
def test_a_mask_that_is_no_left_padding_is_refused(tiny_llama, mask) -> None:
    with pytest.raises(InvalidRequest, match="padding on the left"):
        tiny_llama.generate(
            IDS[:1, -4:], attention_mask=torch.tensor(mask), custom_generate=as_generate(), max_new_tokens=2
        )


def test_a_model_that_changed_gets_a_new_target() -> None:
    model, door = build("llama"), as_generate("prompt-lookup")
    for implementation in ("sdpa", "eager", "sdpa"):
        model.set_attn_implementation(implementation)
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        plain = model.generate(IDS[1:], **settings)
        assert model.generate(IDS[1:], custom_generate=door, **settings).tolist() == plain.tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "contrastive search|penalty_alpha|custom_generate"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny_llama, settings, message) -> None:
    with pytest.raises((InvalidRequest, ValueError), match=message):
        tiny_llama.generate(
            IDS, attention_mask=MASK, max_new_tokens=4, custom_generate=as_generate("none"), pad_token_id=0, **settings
        )


@pytest.mark.real
def test_it_works_inside_a_pipeline(smollm2) -> None:
    model, tokenizer = smollm2
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    settings = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    prompt = "one two three four one two three four one two"
    plain = writer(prompt, **settings)
    ours = writer(prompt, custom_generate=as_generate("prompt-lookup"), **settings)
    assert ours == plain
