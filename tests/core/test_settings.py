"""Settings are refused with the value received, and are values themselves."""

import dataclasses
import inspect
import re

import pytest
import torch
import transformers as hf

from draftwood.core.errors import InvalidRequest
from draftwood.core.settings import SamplingParams

penalty = hf.RepetitionPenaltyLogitsProcessor(1.2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1}, r"temperature must be .* got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": float("inf")}, "got inf"),
        ({"temperature": "hot"}, "got 'hot'"),
        ({"temperature": True}, "got True"),
        ({"top_p": 0.0}, r"\(0, 1\].* got 0.0"),
        ({"top_p": 1.2}, "got 1.2"),
        ({"min_p": -0.1}, r"\[0, 1\]"),
        ({"typical_p": 0}, "typical_p"),
        ({"top_h": 0}, "top_h"),
        ({"epsilon_cutoff": 1.0}, r"\[0, 1\)"),
        ({"eta_cutoff": -1.0}, "eta_cutoff"),
        ({"top_k": -1}, "got -1"),
        ({"top_k": 2.5}, "whole number"),
        ({"repetition_penalty": 0}, "1 is no penalty"),
        ({"encoder_repetition_penalty": -2}, "1 is no penalty"),
        ({"no_repeat_ngram_size": -1}, "whole number"),
        ({"bad_words_ids": "the"}, "lists of token ids"),
        ({"bad_words_ids": [[]]}, "non-empty"),
        ({"bad_words_ids": [3]}, "token ids"),
        ({"suppress_tokens": [-3]}, ">= 0"),
        ({"suppress_tokens": 3}, "list of token ids"),
        ({"sequence_bias": {(3,): "x"}}, "got 'x'"),
        ({"sequence_bias": [3]}, "token ids"),
        ({"sequence_bias": [[[3], 1.0, 2.0]]}, "token ids"),
        ({"forced_eos_token_id": -1}, ">= 0"),
        ({"exponential_decay_length_penalty": 3}, "pair"),
        ({"exponential_decay_length_penalty": (1, 2, 3)}, "pair"),
        ({"remove_invalid_values": 1}, "True or False"),
        ({"forced_bos_token_id": 5, "suppress_tokens": [4, 5]}, "forced_bos_token_id=.5. is in suppress_tokens"),
        ({"forced_eos_token_id": [5, 4], "suppress_tokens": [4, 5]}, "leaves no token"),
        ({"min_length": 3, "min_new_tokens": 3}, "give one"),
        ({"logits_processor": penalty}, "list of LogitsProcessor"),
        ({"logits_processor": [hf.RepetitionPenaltyLogitsProcessor]}, "list of LogitsProcessor"),
        ({"logits_processor": [hf.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3], 1)]}, "Prefix"),
        ({"watermarking_config": hf.SynthIDTextWatermarkingConfig(5, [1])}, "SynthID"),
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"topk": 1}, "top_k"),
        ({"frobnicate": 1}, "known: temperature"),
        ({"do_sample": True}, "above 0 samples"),
        ({"num_beams": 4}, "beam"),
        ({"guidance_scale": 2.0}, "guidance"),
    ],
)
def test_what_cannot_work_is_refused_with_the_value_received(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams.from_fields(**fields)


def test_none_is_the_default_and_settings_are_values():
    nothing = SamplingParams.from_fields(temperature=None, top_p=None, remove_invalid_values=None)
    assert nothing == SamplingParams()
    one = SamplingParams(bad_words_ids=[[3, 4]], sequence_bias=[[[3], 1]], suppress_tokens=torch.tensor([3]))
    two = SamplingParams(bad_words_ids=[(3, 4)], sequence_bias={(3,): 1.0}, suppress_tokens=(3,))
    assert one == two
    assert hash(one) == hash(two)


def test_every_sampling_field_of_transformers_has_a_place():
    """A field that transformers adds to its sampling must be looked at: added here or named as another's business."""
    not_about_scores = {
        "max_length", "max_new_tokens", "max_time", "stop_strings", "do_sample", "num_beams", "early_stopping",
        "length_penalty", "guidance_scale", "token_healing", "use_cache", "num_return_sequences",
    }  # fmt: skip
    pipeline = inspect.getsource(hf.GenerationMixin._get_logits_processor)
    used = set(re.findall(r"generation_config\.([a-z]\w+)", pipeline))
    assert len(used) > 20
    assert used - not_about_scores <= {field.name for field in dataclasses.fields(SamplingParams)}
