"""Views against the same model with hooks that null what is skipped; resumed forwards against whole ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GraniteConfig, PreTrainedModel

from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.proposal import ExitStates
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.core.views import head_of, layer_view, resumes_exactly
from tests.architectures import build, families
from tests.conftest import llama_config, tiny_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
TREE = TokenTree.from_lists([[3, 4, 3, 5, 6], [7, 8]], [[-1, -1, 0, 1, 2], [-1, 0]])
FAMILIES = ["llama", "qwen3", "mistral", "gemma3_text", "gpt2", "gpt_neox", "falcon", "phi3", "mixtral", "cohere2"]
# The matrix product of mixtures of experts knows no float64.
DTYPES = {"mixtral": torch.float32}
SKIPPED = {"attention": {1, 2}, "mlp": {2, 3}}  # skipped in blocks of four: one, both and the other


def text_scores(scorer: Target, target: Target, **options: Any) -> Tensor:
    """Reads the ragged prompts with the target and a tree behind them with `scorer`."""
    with torch.inference_mode():
        cache = target.new_cache(2)
        target.score(cache, [prompt[:-1] for prompt in PROMPTS], TokenTree.empty(2))
        return scorer.score(cache, [prompt[-1:] for prompt in PROMPTS], TREE, **options).logits


def real(logits: Tensor) -> Tensor:
    """Drops the columns that pad the second row."""
    return torch.cat([logits[0], logits[1, :3]])


def nulled(model: PreTrainedModel, skip: dict[str, Collection[int]]) -> PreTrainedModel:
    """Returns a copy of the model, with hooks that null what the named sub-layers put out."""
    model = copy.deepcopy(model)
    blocks = Target(model).blocks
    names = {"attention": ("self_attn", "attn", "attention", "self_attention"), "mlp": ("mlp",)}
    for kind, layers in skip.items():
        for layer in layers:
            (part,) = [getattr(blocks[layer], name) for name in names[kind] if hasattr(blocks[layer], name)]
            part.register_forward_hook(
                lambda _module, _arguments, output: (
                    (torch.zeros_like(output[0]), *output[1:])
                    if isinstance(output, tuple)
                    else torch.zeros_like(output)
                )
            )
    return model


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Everything that is set on the model, by module and name: values of tensors, identities of objects."""
    seen: dict[str, Any] = {"config": model.config.to_dict()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            seen[f"{path}/{name}"] = list(value.items()) if isinstance(value, dict) else id(value)
    seen |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return seen


def assert_unchanged(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if isinstance(value, Tensor):
            assert torch.equal(after[name], value), name
        elif isinstance(value, list):
            assert [(key, id(one)) for key, one in after[name]] == [(key, id(one)) for key, one in value], name
        else:
            assert after[name] == value, name


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_sublayers_add_nothing(family: str):
    model = build(family, DTYPES.get(family, torch.float64))
    target = Target(model)
    view = layer_view(target, skip_attention=SKIPPED["attention"], skip_mlp=SKIPPED["mlp"])
    reference = Target(nulled(model, SKIPPED))
    got = real(text_scores(view, target))
    assert view.layers == 3
    torch.testing.assert_close(got, real(text_scores(reference, target)), rtol=0, atol=1e-5)
    assert not torch.allclose(got, real(text_scores(target, target)), atol=1e-3)


@given(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)))
@settings(deadline=None, max_examples=12)
def test_any_set_of_sublayers(attention: set[int], mlp: set[int]):
    model = shared_llama()
    target = Target(model)
    if attention & mlp == {0, 1, 2}:
        with pytest.raises(InvalidRequest, match="every sub-layer"):
            layer_view(target, skip_attention=attention, skip_mlp=mlp)
        return
    view = layer_view(target, skip_attention=attention, skip_mlp=mlp)
    reference = Target(nulled(model, {"attention": attention, "mlp": mlp}))
    torch.testing.assert_close(real(text_scores(view, target)), real(text_scores(reference, target)))


@functools.cache
def shared_llama() -> PreTrainedModel:
    """The model of the property test, which can take no fixture that lives for one example."""
    return tiny_model(llama_config(layers=3, heads=4))


def test_a_view_of_everything_is_the_target(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    assert torch.equal(text_scores(layer_view(target), target), text_scores(target, target))


def test_views_leave_the_model_alone(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    before = snapshot(tiny_llama)
    view = layer_view(target, 0, 2, skip_attention=[1])
    text_scores(view, target, features=frozenset({1, 2, "last"}))
    assert resumes_exactly(target, 1)
    view.model.register_forward_hook(lambda *_: None)
    view.model.model.register_forward_pre_hook(lambda *_: None)  # type: ignore[union-attr]
    view.model.config.vocab_size = 1
    assert_unchanged(tiny_llama, before)


def test_views_share_every_weight(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    own = {id(parameter) for parameter in tiny_llama.parameters()}
    for view in (layer_view(target, 0, 2), layer_view(target, 1), layer_view(target, skip_mlp=[0, 2])):
        assert {id(parameter) for parameter in view.model.parameters()} < own


def test_a_view_writes_the_kept_layers_of_the_targets_cache(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    cache = target.new_cache(1)
    with torch.inference_mode():
        layer_view(target, skip_attention=[1]).score(cache, [[1, 2, 3]], TokenTree.empty(1))
        cache.open(0)
        written = [
            bool(cache.update(torch.zeros(1, 2, 0, 8), torch.zeros(1, 2, 0, 8), layer)[0].abs().sum() > 0)
            for layer in range(3)
        ]
    assert written == [True, False, True]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layer", [1, 3])
def test_a_resumed_forward_is_the_whole_one(family: str, layer: int):
    """Where the probe says that it is; so a probe that says yes to everything fails here."""
    target = Target(build(family, DTYPES.get(family, torch.float64)))
    rest = layer_view(target, layer)
    names: frozenset[Any] = frozenset({3, "last"})
    with torch.inference_mode():
        cache = target.new_cache(2)
        target.score(cache, [prompt[:-1] for prompt in PROMPTS], TokenTree.empty(2))
        pending = [prompt[-1:] for prompt in PROMPTS]
        committed = list(cache.lengths)
        states = layer_view(target, 0, layer).score(cache, pending, TREE, features=frozenset({layer})).features[layer]
        cache.lengths = list(committed)
        resumed = target.score(cache, pending, TREE, features=names, exit=ExitStates(layer, states, rest))
        cache.lengths = list(committed)
        whole = target.score(cache, pending, TREE, features=names)
    close = torch.allclose(real(resumed.logits), real(whole.logits), rtol=0, atol=1e-6)
    assert close == resumes_exactly(target, layer)
    assert close == (family != "gpt2")
    if close:
        for name in names:
            torch.testing.assert_close(real(resumed.features[name]), real(whole.features[name]))


def test_a_resumed_forward_runs_only_the_rest(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    calls: list[int] = []
    handles = [
        block.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
        for layer, block in enumerate(target.blocks)
    ]
    exit = ExitStates(2, torch.zeros(2, 6, 32, dtype=torch.float64), layer_view(target, 2))
    text_scores(target, target)
    calls.clear()
    text_scores(target, target, exit=exit)
    assert calls == [0, 1, 2, 2]
    calls.clear()
    text_scores(target, target, exit=exit, features=frozenset({1}))  # block 1 must run to give its input
    assert calls == [0, 1, 2, 0, 1, 2]
    for handle in handles:
        handle.remove()


def test_entering_a_model_that_scales_its_embeddings_is_noticed():
    for multiplier in (1.0, 2.0):
        config = GraniteConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            embedding_multiplier=multiplier,
        )
        assert resumes_exactly(Target(tiny_model(config)), 1) == (multiplier == 1.0)


def test_features_of_the_last_blocks_output(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    with torch.inference_mode():
        scores = target.score(target.new_cache(1), [[1, 2, 3]], TokenTree.empty(1), features=frozenset({3, "last"}))
        assert torch.equal(tiny_llama.model.norm(scores.features[3]), scores.features["last"])


def test_a_forward_replaced_on_the_instance_is_not_taken_over(tiny_llama: PreTrainedModel):
    """accelerate and torch.compile bind the original; a view that kept theirs would run the whole model."""
    model = copy.deepcopy(tiny_llama)
    bound = model.model.forward
    model.model.forward = lambda *arguments, **named: bound(*arguments, **named)
    target = Target(model)
    expected = text_scores(layer_view(Target(tiny_llama), 0, 1), Target(tiny_llama))
    assert torch.equal(text_scores(layer_view(target, 0, 1), target), expected)


def test_without_the_head_there_are_features_and_no_logits(tiny_llama: PreTrainedModel):
    target = Target(tiny_llama)
    called: list[nn.Module] = []
    handle = tiny_llama.lm_head.register_forward_pre_hook(lambda module, _: called.append(module))
    with torch.inference_mode():
        scores = target.score(target.new_cache(1), [[1, 2]], TREE_OF_ONE, features=frozenset({2}), head=False)
        whole = target.score(target.new_cache(1), [[1, 2]], TREE_OF_ONE, features=frozenset({2}))
    handle.remove()
    assert len(called) == 1
    assert scores.logits.shape == (1, 0, 96)
    assert torch.equal(scores.features[2], whole.features[2])


TREE_OF_ONE = TokenTree.from_lists([[5]], [[-1]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stop": 0}, "0 <= first < stop <= 3"),
        ({"stop": 4}, "got first=0, stop=4"),
        ({"first": 3}, "got first=3, stop=3"),
        ({"first": -1}, "got first=-1"),
        ({"skip_attention": [0, 3]}, r"blocks 0 to 2; cannot skip the attention of \[3\]"),
        ({"skip_mlp": [-1]}, r"cannot skip the mlp of \[-1\]"),
        ({"first": 1, "stop": 2, "skip_mlp": [1], "skip_attention": [1]}, "blocks 1 to 1 is skipped"),
    ],
)
def test_bad_views(tiny_llama: PreTrainedModel, arguments: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        layer_view(Target(tiny_llama), **arguments)


def test_blocks_without_an_mlp_of_their_own_are_skipped_whole():
    target = Target(build("opt"))
    with pytest.raises(UnsupportedModel, match="skip its attention and its MLP together"):
        layer_view(target, skip_mlp=[1])
    assert layer_view(target, skip_mlp=[1], skip_attention=[1]).layers == target.layers - 1


def test_layers_that_others_read_are_not_left_out():
    """In gemma4 the last blocks have the keys and values of earlier ones; what nobody reads can be skipped."""
    if "gemma4_text" not in families():
        pytest.skip("this version of transformers has no gemma4")
    target = Target(build("gemma4_text"))
    for skipped in ({"skip_attention": [1]}, {"skip_attention": [1], "skip_mlp": [1]}, {"stop": 3}):
        with pytest.raises(UnsupportedModel, match="Gemma4ForCausalLM does not run without the layers left out"):
            layer_view(target, **skipped)
    layer_view(target, skip_attention=[3])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "cohere", "llama4_text", "opt"])
def test_the_head_makes_the_targets_logits_and_computes_no_gradient_of_its_weights(family):
    target = Target(build(family))
    state = {name: value.clone() for name, value in target.model.state_dict().items()}
    tree = TokenTree.from_lists([[3, 4, 3]], [[-1, -1, 1]])
    scores = target.score(target.new_cache(1, 16), [[5, 6]], tree, features=frozenset({"last"}))
    head = head_of(target)
    hidden = scores.features["last"].detach().clone().requires_grad_()
    logits = head(hidden)
    torch.testing.assert_close(logits[:, 1:].detach(), scores.logits.detach(), rtol=1e-9, atol=1e-9)
    logits.square().sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in target.model.state_dict().items())


def test_the_head_follows_the_targets_weights_without_a_copy(tiny_llama):
    target = Target(tiny_llama)
    head = head_of(target)
    hidden = torch.randn(
        1, 1, target.config.hidden_size, dtype=target.dtype, generator=torch.Generator().manual_seed(0)
    )
    before = head(hidden).clone()
    weight = target.model.get_output_embeddings().weight
    with torch.no_grad():
        kept = weight.clone()
        weight.mul_(2)
        doubled = head(hidden)
        weight.copy_(kept)
    torch.testing.assert_close(doubled, before * 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "cohere", "gptj", "opt"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_of_some_tokens_makes_their_logits_alone(family: str, tied: bool):
    target = Target(build(family, tie_word_embeddings=tied))
    bias = target.model.get_output_embeddings().bias
    if bias is not None:
        torch.nn.init.normal_(bias, generator=torch.Generator().manual_seed(0))
    state = {name: value.clone() for name, value in target.model.state_dict().items()}
    kept = torch.tensor([7, 3, 100, 0, 41])
    scores = target.score(target.new_cache(1, 16), [[5, 6]], TREE_OF_ONE, features=frozenset({"last"}))
    hidden = scores.features["last"].detach().clone().requires_grad_()
    head = head_of(target, kept)
    logits = head(hidden)
    torch.testing.assert_close(logits, head_of(target)(hidden)[..., kept], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits[:, 1:].detach(), scores.logits[..., kept].detach(), rtol=1e-9, atol=1e-9)
    logits.square().sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in target.model.state_dict().items())


def test_the_head_of_some_tokens_reads_their_rows_alone(tiny_llama: PreTrainedModel):
    target = Target(copy.deepcopy(tiny_llama))
    head = head_of(target, torch.tensor([5, 2]))
    hidden = torch.randn(1, 1, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = head(hidden)
    with torch.no_grad():
        target.model.get_output_embeddings().weight.fill_(torch.nan)
    assert torch.equal(head(hidden), before)


def test_the_logits_of_some_tokens_are_picked_from_an_unusual_head(tiny_llama: PreTrainedModel):
    class Shifted(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) + torch.arange(self.out_features)

    model = copy.deepcopy(tiny_llama)
    model.lm_head.__class__ = Shifted
    target = Target(model)
    hidden = torch.randn(1, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([90, 2, 5])
    torch.testing.assert_close(head_of(target, kept)(hidden), model.lm_head(hidden)[..., kept])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([3, 96]), "ids from 0 to 95, got 96"),
        (torch.tensor([-1, 4]), "ids from 0 to 95, got -1"),
        (torch.tensor([[3]]), r"must be \[kept\] int64 ids, got \[1, 1\]"),
        (torch.tensor([], dtype=torch.int64), r"got \[0\] torch.int64"),
        (torch.tensor([3.0]), "got .* torch.float32"),
    ],
)
def test_a_head_of_tokens_that_are_none(tiny_llama: PreTrainedModel, tokens: Tensor, message: str):
    with pytest.raises(InvalidRequest, match=message):
        head_of(Target(tiny_llama), tokens)
