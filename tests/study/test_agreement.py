from __future__ import annotations

import pytest
import torch

from draftwood.core.rule import SeededSource
from draftwood.decoder import Decoder
from draftwood.study.agreement import Agreement, compare_texts, measure_noise, worst

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def plain(tiny_target):
    return Decoder(tiny_target).generate(PROMPT, max_new_tokens=24).tokens


def logits_after(target, ids):
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([ids])).logits[0, -1].double()


def test_noise_in_float64_is_tiny_but_measured(tiny_target, plain):
    noise = measure_noise(tiny_target, PROMPT, plain)
    assert 0 < noise < 1e-9
    assert measure_noise(tiny_target, PROMPT[:1], plain[:3]) < 1e-9


def test_equal_texts_agree(tiny_target, plain):
    assert compare_texts(tiny_target, PROMPT, plain, list(plain), 0.1) == Agreement("yes")


def test_the_margin_is_that_of_a_plain_forward(tiny_target, plain):
    other = [*plain[:7], (plain[7] + 1) % 96, *plain[8:]]
    found = compare_texts(tiny_target, PROMPT, plain, other, 1e-9)
    logits = logits_after(tiny_target, [*PROMPT, *plain[:7]])
    assert (found.verdict, found.position, found.noise) == ("no", 7, 1e-9)
    assert found.margin == pytest.approx(float(logits[plain[7]] - logits[other[7]]), abs=1e-9)
    assert found.margin > 0
    assert compare_texts(tiny_target, PROMPT, plain, other, found.margin).verdict == "near-tie"


def test_a_reference_that_is_not_the_best_is_no_near_tie_either(tiny_target, plain):
    # Two unlikely tokens may be close to one another; neither is what the target would write.
    logits = logits_after(tiny_target, PROMPT)
    low = logits.argsort()[:2].tolist()
    found = compare_texts(tiny_target, PROMPT, low[:1], low[1:], 1.0)
    assert found.margin == pytest.approx(float(logits.max() - logits[low].min()), abs=1e-9)


def test_a_text_that_ends_early_is_a_fault(tiny_target, plain):
    assert compare_texts(tiny_target, PROMPT, plain, plain[:5], 1e9) == Agreement("no", 5, None, 1e9)


def test_coupled_texts_are_judged_with_their_noise(tiny_target):
    text = Decoder(tiny_target, rule="coupled").generate(PROMPT, max_new_tokens=6, temperature=1.5, seed=3).tokens
    logits = logits_after(tiny_target, [*PROMPT, *text[:4]])
    noisy = logits + 1.5 * SeededSource(3, 0).gumbel(len(PROMPT) + 4, 96).double()
    assert int(noisy.argmax()) == text[4]
    second = int(noisy.topk(2).indices[1])
    found = compare_texts(
        tiny_target, PROMPT, text, [*text[:4], second], 1e-9, temperature=1.5, source=SeededSource(3, 0)
    )
    assert found.margin == pytest.approx(float(noisy[text[4]] - noisy[second]), abs=1e-5)


def test_the_worst_of_several():
    near, wide = Agreement("near-tie", 3, 0.2), Agreement("near-tie", 1, 0.3)
    fault, short = Agreement("no", 3, 0.1), Agreement("no", 2, None)
    assert worst([Agreement("yes"), near, wide]) is wide
    assert worst([wide, fault]) is fault
    assert worst([fault, short]) is short
