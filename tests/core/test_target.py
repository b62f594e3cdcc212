"""Tree logits and features equal those of plain forwards; what cannot score trees is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    BloomConfig,
    MambaConfig,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from tests.architectures import build
from tests.core.test_architectures import tree_error

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "mixtral", "llama4_text", "deepseek_v3"])
def test_tree_logits_equal_path_logits(family: str, implementation: str) -> None:
    model = build(family)
    float32_only = family in ("mixtral", "deepseek_v3")
    model = (model.float() if float32_only else model).eval()
    model.set_attn_implementation(implementation)
    assert tree_error(Target(model)) < (1e-3 if float32_only else 1e-5)


@torch.inference_mode()
def test_features_are_layer_inputs_and_the_final_state(tiny_llama) -> None:
    target = Target(tiny_llama)
    tree = TokenTree.from_lists([[5, 6, 7]], [[-1, 0, 0]])
    cache = target.new_cache(1)
    names = frozenset({"last", 0, 2, 3})
    target.score(cache, [[1, 2]], TokenTree.empty(1))
    scores = target.score(cache, [[3]], tree, features=names)
    assert set(scores.features) == names
    plain = tiny_llama(torch.tensor([[1, 2, 3, 5, 7]]), output_hidden_states=True)
    last = tiny_llama.model(torch.tensor([[1, 2, 3, 5, 7]])).last_hidden_state
    for column, position in ((0, 2), (1, 3), (3, 4)):
        torch.testing.assert_close(scores.features["last"][0, column], last[0, position])
        for layer in (0, 2):
            torch.testing.assert_close(scores.features[layer][0, column], plain.hidden_states[layer][0, position])


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 100])
def test_chunked_prefill_equals_whole_prefill(tiny_llama, chunk: int) -> None:
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [12, 13, 14]]
    features = frozenset({"last"})
    whole, chunked = Target(tiny_llama), Target(tiny_llama, prefill_chunk=chunk)
    a, b = whole.new_cache(3), chunked.new_cache(3)
    first = whole.score(a, prompts, TokenTree.empty(3), features=features)
    second = chunked.score(b, prompts, TokenTree.empty(3), features=features)
    assert a.lengths == b.lengths == [7, 1, 3]
    torch.testing.assert_close(first.logits, second.logits)
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(
            first.features["last"][row, : len(prompt)], second.features["last"][row, : len(prompt)]
        )
    tree = TokenTree.chain(torch.tensor([[1, 2]] * 3))
    torch.testing.assert_close(whole.score(a, [[4]] * 3, tree).logits, chunked.score(b, [[4]] * 3, tree).logits)


@torch.inference_mode()
def test_only_the_logits_that_are_needed_are_computed(tiny_llama) -> None:
    seen = []
    handle = tiny_llama.lm_head.register_forward_hook(lambda _module, _given, out: seen.append(out.shape[1]))
    try:
        target = Target(tiny_llama)
        seen.clear()
        cache = target.new_cache(1)
        target.score(cache, [list(range(3, 40))], TokenTree.empty(1))
        target.score(cache, [[1]], TokenTree.chain(torch.tensor([[1, 2, 3]])))
        cache.extend(2)
        target.score(cache, [list(range(3, 30)), [5, 6]], TokenTree.empty(2), first=1)
    finally:
        handle.remove()
    assert seen == [1, 4, 2]


def test_the_model_is_left_as_it_was(tiny_llama) -> None:
    def picture() -> list[object]:
        return [
            (name, sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks))
            for name, module in tiny_llama.named_modules()
        ]

    before, weights = picture(), {name: value.clone() for name, value in tiny_llama.state_dict().items()}
    target = Target(tiny_llama)
    cache = target.new_cache(1)
    with torch.inference_mode():
        target.score(cache, [[1, 2]], TokenTree.empty(1), features=frozenset({"last", 1}))
        with pytest.raises(InvalidRequest):
            target.score(cache, [[1]], TokenTree.empty(1), features=frozenset({"last", 99}))
    assert picture() == before
    assert all(torch.equal(weights[name], value) for name, value in tiny_llama.state_dict().items())


def refused(config: object, **options: object) -> str:
    with torch.random.fork_rng(), pytest.raises(UnsupportedModel) as caught:
        Target(Auto.from_config(config, **options).eval())
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_what_cannot_score_trees_is_refused_by_name() -> None:
    assert "position" in refused(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4))
    reason = refused(MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2))
    assert "linear_attention" in reason or "recurrent" in reason  # transformers before 5.4 names no layer types
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        Target(T5ForConditionalGeneration(T5Config(vocab_size=96, **sizes)).eval())
    with pytest.raises(UnsupportedModel, match=r"model\.eval\(\)"):
        Target(Auto.from_config(Qwen3Config(**SIZES, intermediate_size=32, head_dim=8)).train())


def test_prefill_chunk_must_be_positive(tiny_llama) -> None:
    with pytest.raises(InvalidRequest, match="prefill_chunk must be >= 1, got 0"):
        Target(tiny_llama, prefill_chunk=0)
