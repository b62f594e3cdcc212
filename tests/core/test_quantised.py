"""Quantised targets: decoding with drafters gives the very tokens that the quantised model gives by itself."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel, TorchAoConfig

import draftwood as dw
from draftwood.core.errors import UnsupportedModel
from draftwood.core.packing import PackedLinear
from draftwood.core.views import head_of, resumes_exactly
from tests.conftest import llama_config, tiny_model
from tests.core.passes import every_kind_of_pass
from tests.study.tiny import save_tiny

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]
LENGTH = 12


def floats() -> PreTrainedModel:
    return tiny_model(llama_config(layers=3, heads=4)).float()


@pytest.fixture(scope="module")
def int8() -> PreTrainedModel:
    """The weights of all linear layers are int8, the LM head's too."""
    quantization = pytest.importorskip("torchao.quantization")
    model = floats()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    assert type(model.lm_head.weight) is not nn.Parameter
    return model


@pytest.fixture(scope="module")
def texts(int8: PreTrainedModel) -> list[list[int]]:
    """What the model generates by itself."""
    given: dict[str, Any] = {"do_sample": False, "max_new_tokens": LENGTH}
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [int8.generate(row, attention_mask=torch.ones_like(row), **given)[0, row.shape[1] :].tolist() for row in ids]


@every_kind_of_pass
def test_every_kind_of_pass_gives_the_texts_of_the_quantised_model(
    int8: PreTrainedModel, texts: list[list[int]], drafter: str, options: dict[str, Any]
) -> None:
    decoder = dw.Decoder(dw.Target(int8), drafter, drafter_options=options)
    assert [text.tokens for text in decoder.generate(PROMPTS, max_new_tokens=LENGTH)] == texts


def test_a_quantised_model_drafts_for_the_one_it_came_from(int8: PreTrainedModel) -> None:
    target = dw.Target(floats())
    plain = dw.Decoder(target).generate(PROMPTS, max_new_tokens=LENGTH)
    drafted = dw.Decoder(target, "draft-model", drafter_options={"model": dw.Target(int8), "gamma": 3}).generate(
        PROMPTS, max_new_tokens=LENGTH
    )
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]
    assert drafted[0].stats.tau > 2


def test_the_lm_head_alone_works_and_hidden_states_go_on(int8: PreTrainedModel) -> None:
    target = dw.Target(int8)
    hidden = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    expected = int8.lm_head(hidden)
    torch.testing.assert_close(head_of(target)(hidden), expected)
    kept = torch.tensor([3, 50, 7])
    torch.testing.assert_close(head_of(target, kept)(hidden), expected[..., kept])
    assert resumes_exactly(target, 2)


def test_quantised_weights_are_not_packed(int8: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModel, match="not quantised; leave packed=True out"):
        dw.Target(int8, packed=True)


def test_what_is_left_in_floats_is_packed(tmp_path: Path) -> None:
    """As transformers quantises a model while it loads it: all linear layers but the LM head."""
    quantization = pytest.importorskip("torchao.quantization")
    how = TorchAoConfig(quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    place = save_tiny(tmp_path)
    target = dw.Target.from_pretrained(place, dtype=torch.float32, quantization_config=how, packed=True)
    assert [name for name, part in target.model.named_modules() if isinstance(part, PackedLinear)] == ["lm_head"]
    assert len([part for part in target.model.parameters() if type(part) is not nn.Parameter]) == 2 * 7
    plain = dw.Decoder(target).generate(PROMPTS, max_new_tokens=LENGTH)
    drafted = dw.Decoder(target, "lookahead+prompt-lookup").generate(PROMPTS, max_new_tokens=LENGTH)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]


def test_activations_quantised_by_tensor_are_refused() -> None:
    """A token's activations then depend on what else is in its pass, a tree's other branches among it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(floats(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(UnsupportedModel, match="quantise activations"):
        dw.Target(model)


class Rounding(nn.Linear):
    """A product that differs by so much with the number of rows, as kernels of quantised weights do."""

    by = 0.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (1 + self.by * input.shape[-2])


@pytest.mark.parametrize(
    ("by", "quantised", "works"), [(0.0, False, True), (0.005, False, False), (0.005, True, True), (0.1, True, False)]
)
def test_kernels_of_quantised_weights_may_round_to_half_precision(by: float, quantised: bool, works: bool) -> None:
    model: Any = floats()
    model.is_quantized = quantised  # as transformers sets it
    for block in model.model.layers:
        block.mlp.down_proj.__class__ = Rounding
        block.mlp.down_proj.by = by
    if works:
        dw.Target(model)
    else:
        with pytest.raises(UnsupportedModel, match="relative error"):
            dw.Target(model)
