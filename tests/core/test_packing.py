"""Packed targets: the same model but for rounding, and the user's own is left as it was."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import draftwood as dw
from draftwood.core import packing
from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.packing import PackedLinear, PackedWeight
from draftwood.core.tree import TokenTree
from draftwood.core.views import head_of, weights_read
from draftwood.training.fingerprint import fingerprint
from tests.conftest import llama_config, tiny_model
from tests.core.passes import every_kind_of_pass
from tests.study.tiny import tiny_tokenizer

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16]]


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model(llama_config(layers=3, heads=4)).float()


def scores(target: dw.Target, width: int) -> torch.Tensor:
    with torch.inference_mode():
        tree = TokenTree.chain(torch.arange(20, 20 + width)[None]) if width else TokenTree.empty(1)
        return target.score(target.new_cache(1), [[5, 6, 7]], tree).logits


@pytest.mark.parametrize("width", [0, 1, 7, 40])
def test_logits_differ_by_rounding_alone(model: PreTrainedModel, width: int) -> None:
    plain, packed = dw.Target(model), dw.Target(model, packed=True)
    torch.testing.assert_close(scores(packed, width), scores(plain, width), rtol=1e-4, atol=1e-4)


def test_the_users_model_is_left_as_it_was_and_shares_every_weight(model: PreTrainedModel) -> None:
    before = {name: (type(part), dict(vars(part))) for name, part in model.named_modules()}
    packed = dw.Target(model, packed=True).model
    assert {name: (type(part), dict(vars(part))) for name, part in model.named_modules()} == before
    assert [part.data_ptr() for part in packed.parameters()] == [part.data_ptr() for part in model.parameters()]
    assert model.config._attn_implementation == "sdpa"
    linears = [part for part in packed.modules() if isinstance(part, nn.Linear)]
    assert len(linears) == 3 * 7 + 1
    assert all(isinstance(part, PackedLinear) for part in linears)


def products(model: PreTrainedModel | nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns the packed products of a forward: the sizes of the results."""
    made: list[tuple[int, ...]] = []
    product = packing._Packed._product

    def noting(self: Any, input: torch.Tensor, bias: Any) -> torch.Tensor:
        made.append(tuple(product(self, input, bias).shape))
        return product(self, input, bias)

    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(packing._Packed, "_product", noting)
        model(torch.tensor([[3, 4, 5]]))
    return made


def test_layers_that_read_the_same_tensor_are_multiplied_at_once(model: PreTrainedModel, monkeypatch: Any) -> None:
    packed = dw.Target(model, packed=True).model
    config: Any = model.config
    attention = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    block = [attention, config.hidden_size, 2 * config.intermediate_size, config.hidden_size]
    assert [shape[-1] for shape in products(packed, monkeypatch)] == block * 3 + [config.vocab_size]
    with torch.inference_mode():  # nothing of a pass stays behind
        packed(torch.tensor([[3, 4, 5]]))
    assert all(part._packed._kept == (None, []) for part in packed.modules() if isinstance(part, PackedLinear))


class Pair(nn.Module):
    """Two layers that read one tensor, with something that keeps them from being multiplied at once."""

    def __init__(self, hindrance: str) -> None:
        super().__init__()
        bias, self.hindrance = hindrance == "bias", hindrance
        self.first, self.second = nn.Linear(8, 4, bias=bias), nn.Linear(8, 6, bias=bias)
        packing.pack_linears(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.one_hot(ids, 8).float()
        first = self.first(x)
        if self.hindrance == "written between":
            x += 1.0
        if self.hindrance == "viewed":
            first = first.view(-1, 2).view(*ids.shape, 4)
        return torch.cat([first, self.second(x)], -1)


@pytest.mark.parametrize("hindrance", ["", "written between", "viewed", "bias"])
def test_layers_are_packed_together_only_where_that_changes_nothing(hindrance: str) -> None:
    ids = torch.tensor([[1, 2, 3]])
    torch.manual_seed(0)
    pair = Pair(hindrance)
    with torch.inference_mode():
        expected = pair(ids)
        packing.pack_siblings(pair, lambda: pair(ids))
        assert (pair.first._packed is pair.second._packed) == (not hindrance)  # type: ignore[attr-defined]
        torch.testing.assert_close(pair(ids), expected)


def test_each_of_a_pair_may_be_asked_alone_and_again() -> None:
    ids = torch.tensor([[1, 2, 3]])
    pair = Pair("")
    x, y = torch.rand(2, 1, 3, 8)
    with torch.inference_mode():
        expected = [pair.second(x), pair.second(x), pair.first(y), pair.second(y), pair.first(x)]
        packing.pack_siblings(pair, lambda: pair(ids))
        asked = [pair.second(x), pair.second(x), pair.first(y), pair.second(y), pair.first(x)]
    torch.testing.assert_close(asked, expected)


@every_kind_of_pass
def test_every_kind_of_pass_gives_the_texts_of_the_packed_target(
    model: PreTrainedModel, drafter: str, options: dict[str, Any]
) -> None:
    """Whole passes, views that leave layers out, resumed passes, and ragged batches."""
    target = dw.Target(model, packed=True)
    plain = dw.Decoder(target).generate(PROMPTS, max_new_tokens=16)
    drafted = dw.Decoder(target, drafter, drafter_options=options).generate(PROMPTS, max_new_tokens=16)
    assert [text.tokens for text in drafted] == [text.tokens for text in plain]


def test_the_lm_head_alone_is_packed_too_and_lets_gradients_through(model: PreTrainedModel) -> None:
    target = dw.Target(model, packed=True)
    kept = torch.tensor([3, 50, 7])
    hidden = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    expected = model.lm_head(hidden)
    torch.testing.assert_close(head_of(target)(hidden), expected, rtol=1e-4, atol=1e-4)
    few = head_of(target, kept)
    torch.testing.assert_close(few(hidden), expected[..., kept], rtol=1e-4, atol=1e-4)
    wanted = hidden.requires_grad_()
    few(wanted).sum().backward()
    torch.testing.assert_close(wanted.grad[0, 0], model.lm_head.weight[kept].sum(0))


class Doubling(nn.Linear):
    """A layer that is no plain product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_other_classes_of_linears_stay_what_they_are(model: PreTrainedModel) -> None:
    up = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Doubling(up.in_features, up.out_features, bias=False)
    packed = dw.Target(model, packed=True)
    assert type(packed.model.model.layers[1].mlp.up_proj) is Doubling
    torch.testing.assert_close(scores(packed, 7), scores(dw.Target(model), 7), rtol=1e-4, atol=1e-4)


def test_weights_may_be_strided(model: PreTrainedModel) -> None:
    for block in model.model.layers:
        block.mlp.down_proj.weight.data = block.mlp.down_proj.weight.data.T.contiguous().T
        assert not block.mlp.down_proj.weight.is_contiguous()
    plain = scores(dw.Target(model), 7)
    torch.testing.assert_close(scores(dw.Target(model, packed=True), 7), plain, rtol=1e-4, atol=1e-4)


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data.clone()


@pytest.mark.parametrize("change", [in_place, replaced])
def test_weights_changed_since_are_noticed(model: PreTrainedModel, change: Any) -> None:
    target = dw.Target(model, packed=True)
    change(model.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj.*build a new Target"):
        target.new_cache(1)


def test_gradients_flow_through_a_model_that_was_loaded_in_inference_mode(source: Path) -> None:
    with torch.inference_mode():
        layer: Any = dw.Target.from_pretrained(source, packed=True).blocks[1].get_submodule("mlp.up_proj")
    x = torch.randn(2, 32).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_weights_made_in_inference_mode_can_be_packed() -> None:
    with torch.inference_mode():
        model = tiny_model(llama_config(layers=1, heads=2)).float()
        target = dw.Target(model, packed=True)
    assert len(dw.Decoder(target).generate([1, 2], max_new_tokens=3).tokens) == 3


@pytest.fixture
def source(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_model_that_is_loaded_for_it_keeps_its_blocks_packed_alone(model: PreTrainedModel, source: Path) -> None:
    loaded, plain = dw.Target.from_pretrained(source, packed=True), dw.Target(model, packed=True)
    blocks = [part for part in loaded.blocks.modules() if isinstance(part, nn.Linear)]
    assert len(blocks) == 3 * 7
    assert all(isinstance(part.weight, PackedWeight) for part in blocks)
    head = loaded.model.get_output_embeddings().weight
    assert type(head) is nn.Parameter
    assert torch.equal(head, model.lm_head.weight)
    for width in (0, 7):
        torch.testing.assert_close(scores(loaded, width), scores(plain, width), rtol=1e-4, atol=1e-4)
    # whatever reads weights finds them, as part of a joint product too
    assert [name for name, _ in loaded.model.named_parameters()] == [name for name, _ in model.named_parameters()]
    for (_, kept), (_, own) in zip(loaded.model.named_parameters(), model.named_parameters(), strict=True):
        assert (kept.shape, kept.dtype, kept.device) == (own.shape, own.dtype, own.device)
        assert torch.equal(kept.double(), own.double())
    assert fingerprint(loaded.model) == fingerprint(model)
    assert weights_read(loaded) == weights_read(plain)


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [part for part in gc.get_objects() if type(part) in (torch.Tensor, nn.Parameter)]


def test_only_one_copy_of_a_blocks_weights_is_in_memory(source: Path) -> None:
    before = {id(part): part for part in tensors()}
    loaded = dw.Target.from_pretrained(source, packed=True)
    sizes = {weight.shape for block in loaded.blocks for weight in block.parameters() if weight.dim() == 2}
    inside = {id(weight) for weight in loaded.model.parameters()} | before.keys()
    held = [part for part in tensors() if id(part) not in inside]
    assert not [part for part in held if not part.is_mkldnn and part.shape in sizes]
    assert sum(part.is_mkldnn for part in held) == 3 * 4 + 1
    assert str(source) not in Path("/proc/self/maps").read_text(encoding="utf-8")  # the file is not kept mapped


def test_gradients_flow_through_packed_weights_that_are_alone_but_cannot_change_them(source: Path) -> None:
    loaded = dw.Target.from_pretrained(source, packed=True)
    layer: Any = loaded.blocks[1].get_submodule("mlp.up_proj")
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad[0], layer.weight.double().sum(0).float())
    before = scores(loaded, 3)
    changes = (in_place, lambda weight: weight.data.zero_(), replaced, lambda weight: weight.share_memory_())
    for change in changes:
        with pytest.raises(InvalidRequest, match=r"cannot be changed.*; load the model yourself"):
            change(layer.weight)
    assert torch.equal(scores(loaded, 3), before)
    loaded.model.to("cpu").to(torch.float32)  # where and what it is
    assert len(dw.Decoder(loaded).generate([1, 2], max_new_tokens=3).tokens) == 3
    with pytest.raises(InvalidRequest, match="cannot be changed"):
        loaded.model.to(torch.bfloat16)


def test_packed_weights_that_are_alone_can_be_read_and_saved(
    model: PreTrainedModel, source: Path, tmp_path: Path
) -> None:
    loaded = dw.Target.from_pretrained(source, packed=True)
    weight: Any = loaded.blocks[0].get_submodule("mlp.up_proj").weight
    own: Any = model.get_submodule("model.layers.0.mlp.up_proj").weight
    assert torch.equal(torch.zeros(weight.shape).add_(weight), own)
    assert torch.equal(torch.empty(weight.shape).copy_(weight), own)
    loaded.model.save_pretrained(tmp_path / "saved")
    torch.save(loaded.model.state_dict(), tmp_path / "state.pt")
    other = tiny_model(llama_config(layers=3, heads=4)).float()
    for state in (torch.load(tmp_path / "state.pt"), loaded.model.state_dict()):
        for part in other.parameters():
            part.data.zero_()
        other.load_state_dict(state)
        assert fingerprint(other) == fingerprint(model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert fingerprint(again) == fingerprint(model)
    with pytest.raises(RuntimeError, match="cannot be changed"):
        loaded.model.load_state_dict(state)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_a_deep_copy_has_ordinary_layers_that_can_be_trained(tmp_path: Path, alone: bool, tied: bool) -> None:
    config: Any = llama_config(layers=3, heads=4)
    config.tie_word_embeddings = tied
    model = tiny_model(config).float()
    model.save_pretrained(source := tmp_path / "model")
    tiny_tokenizer().save_pretrained(source)
    target = dw.Target.from_pretrained(source, packed=True) if alone else dw.Target(model, packed=True)
    student = copy.deepcopy(target.model)
    assert not [part for part in student.modules() if isinstance(part, PackedLinear)]
    assert all(type(weight) is nn.Parameter for weight in student.parameters())
    before = scores(target, 0)
    with torch.no_grad():
        for weight in student.parameters():
            weight.mul_(1.1)
    assert torch.equal(scores(target, 0), before)
    with torch.inference_mode():
        assert not torch.allclose(student(torch.tensor([[5, 6, 7]])).logits[:, -1], before[:, -1])
    assert dw.Target(student).mask_plan == target.mask_plan  # whatever attention it has taken over


def test_a_packed_model_can_be_the_model_of_another_target(source: Path) -> None:
    first = dw.Target.from_pretrained(source, packed=True)
    second = dw.Target(first.model, packed=True)
    assert second.model is first.model
    assert torch.equal(scores(second, 7), scores(first, 7))


@pytest.mark.parametrize(
    ("change", "packed", "message"),
    [
        (lambda model: model.double(), True, "float64"),
        (lambda model: model.half(), True, "float16"),
        (lambda model: model.to("meta"), True, "meta"),
        (lambda model: model, "yes", "True or False, got 'yes'"),
    ],
)
def test_what_cannot_be_packed_is_refused(model: PreTrainedModel, change: Any, packed: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        dw.Target(change(copy.deepcopy(model)), packed=packed)


def test_a_model_that_cannot_score_trees_is_refused_as_it_is_without_packing() -> None:
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        dw.Target(T5ForConditionalGeneration(config).eval(), packed=True)


def test_a_copy_that_shares_weights_stays_packed_and_has_hooks_of_its_own(model: PreTrainedModel) -> None:
    packed = dw.Target(model, packed=True).model
    shared = {id(part): part for part in (*packed.parameters(), *packed.buffers())}
    twin = copy.deepcopy(packed, shared)
    assert sum(isinstance(part, PackedLinear) for part in twin.modules()) == 3 * 7 + 1
    assert [part.data_ptr() for part in twin.parameters()] == [part.data_ptr() for part in packed.parameters()]
    seen: list[Any] = []
    twin.lm_head.register_forward_hook(lambda *given: seen.append(given))
    with torch.inference_mode():
        expected = packed(torch.tensor([[5, 6]])).logits
        assert not seen
        assert torch.equal(twin(torch.tensor([[5, 6]])).logits, expected)
    assert len(seen) == 1


def test_linear_layers_that_do_more_are_left_alone(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _module, _given, output: output * 3)
    own = model.model.layers[1].mlp.up_proj
    own.forward = lambda input: nn.functional.linear(input, own.weight) * 2
    packed = dw.Target(model, packed=True)
    assert sum(isinstance(part, PackedLinear) for part in packed.model.modules()) == 3 * 7 + 1 - 2
    torch.testing.assert_close(scores(packed, 7), scores(dw.Target(model), 7), rtol=1e-4, atol=1e-4)


def test_a_bias_gets_its_gradient_and_autocast_its_type() -> None:
    linear = nn.Linear(8, 4)
    linear.weight.requires_grad_(False)
    x = torch.randn(2, 8)
    for alone in (False, True):
        packed: Any = PackedLinear(linear)
        if alone:
            packed.release()
        packed(x).sum().backward()
        assert packed.bias.grad.tolist() == [2.0] * 4
        packed.bias.grad = None
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert packed(x).dtype == torch.bfloat16


def test_a_layer_with_two_parents_stays_one() -> None:
    shared = nn.Linear(8, 4)
    pair: Any = nn.ModuleList([nn.Sequential(shared), nn.Sequential(nn.Identity(), shared)])
    assert packing.pack_linears(pair, {id(shared.weight)}) == 1
    assert pair[0][0] is pair[1][1]
    assert isinstance(pair[0][0].weight, PackedWeight)


def test_a_change_is_noticed_by_whoever_uses_the_packed_model(model: Any) -> None:
    target = dw.Target(dw.Target(model, packed=True).model)
    in_place(model.model.layers[0].mlp.down_proj.weight)
    with pytest.raises(InvalidRequest, match=r"down_proj.*build a new Target"):
        target.new_cache(1)


def test_another_target_leaves_joint_products_as_they_are(model: PreTrainedModel) -> None:
    first = dw.Target(model, packed=True)
    before = [part._packed for part in first.model.modules() if isinstance(part, PackedLinear)]
    dw.Target(first.model, packed=True)
    assert [part._packed for part in first.model.modules() if isinstance(part, PackedLinear)] == before
