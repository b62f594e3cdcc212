"""Every published layout in synthetic checkpoints, both layouts out, and files that are broken in one way each."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound
from draftwood.core.target import Target
from draftwood.drafters.eagle.formats import load_head, save_head
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead
from tests.conftest import VOCABULARY
from tests.drafters.eagle.heads import KINDS, REDUCED, make_head, sure_target

WIDTH = 32


@pytest.fixture(scope="module")
def target() -> Target:
    return sure_target()


def values(*shape: int, seed: int = 0) -> Tensor:
    return 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(prefix: str, read: int) -> dict[str, Tensor]:
    """The weights of a Llama layer of the tiny target's sizes; its attention reads `read` numbers."""
    shapes = {
        "self_attn.q_proj": (32, read),
        "self_attn.k_proj": (16, read),
        "self_attn.v_proj": (16, read),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (48, 32),
        "mlp.up_proj": (48, 32),
        "mlp.down_proj": (32, 48),
        "post_attention_layernorm": (32,),
    }
    return {f"{prefix}{name}.weight": values(*shape, seed=n) for n, (name, shape) in enumerate(shapes.items())}


def eagle1_weights(bias: bool = True) -> dict[str, Tensor]:
    """As yuhuili/EAGLE-*: with an embedding that is the target's."""
    weights = {"embed_tokens.weight": values(VOCABULARY, 32), "fc.weight": values(32, 64), **layer("layers.0.", 32)}
    return weights | ({"fc.bias": values(32)} if bias else {})


def eagle3_weights(prefix: str = "midlayer.", drafted: int = 40) -> dict[str, Tensor]:
    """As yuhuili/EAGLE3-*: every other token can be drafted."""
    ids = torch.arange(drafted) * 2
    weights = {
        "d2t": ids - torch.arange(drafted),
        "t2d": torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True),
        "fc.weight": values(32, 96),
        "norm.weight": values(32),
        "lm_head.weight": values(drafted, 32),
        **layer(prefix, 64),
    }
    return weights | {f"{prefix}{name}.weight": values(32) for name in ("hidden_norm", "input_layernorm")}


LAYER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "model_type": "llama",
}
EAGLE3 = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, "target_hidden_size": 32}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {**LAYER, "rope_theta": 500.0},
    "draft_vocab_size": 40,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
}


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], pickled: bool = False) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def load(source: Path, target: Target, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_head(source, target, **options)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle1_as_published(target, tmp_path, pickled, bias):
    # The configuration is wrong about the bias; there is no rope_theta.
    weights = eagle1_weights(bias)
    head = load(write(tmp_path, {**LAYER, "bias": not bias}, weights, pickled), target)
    assert isinstance(head, EagleHead)
    assert (head.fc.bias is not None) == bias
    assert head.config.rope_parameters["rope_theta"] == 10000.0
    assert head.config.rms_norm_eps == 1e-5
    assert head.feature_names == ("last",)
    assert head.draft_tokens is None
    assert head.dtype == target.dtype == torch.float64
    for key, value in head.state_dict().items():
        assert torch.equal(value, weights[key].double()), key
    assert set(head.state_dict()) == weights.keys() - {"embed_tokens.weight"}


def test_eagle1_may_be_told_what_to_draft(target, tmp_path):
    write(tmp_path, LAYER, eagle1_weights())
    head = load(tmp_path, target, draft_tokens=[5, 3, 60])
    assert head.draft_tokens.tolist() == [5, 3, 60]
    with pytest.raises(InvalidRequest, match="from 0 to 95"):
        load(tmp_path, target, draft_tokens=[500])


@pytest.mark.parametrize("tokens", [None, [5, 3, 60]])
def test_an_lm_head_in_an_eagle1_file_is_the_targets_or_warned_of(target, tmp_path, tokens):
    theirs = target.model.get_output_embeddings().weight.detach()
    drafted = {} if tokens is None else {"d2t": torch.tensor(tokens) - torch.arange(3)}
    rows = theirs if tokens is None else theirs[tokens]
    for same in (rows.clone(), rows.half(), theirs.clone(), theirs.bfloat16()):
        load(write(tmp_path, LAYER, eagle1_weights() | drafted | {"lm_head.weight": same}), target)
    write(tmp_path, LAYER, eagle1_weights() | drafted | {"lm_head.weight": rows * 1.25})
    with pytest.warns(UserWarning, match=r"'lm_head\.weight' is not the target's LM head, they differ by 25\.0%"):
        head = load_head(tmp_path, target)
    assert "lm_head.weight" not in head.state_dict()
    write(tmp_path, {**LAYER, "vocab_size": 90}, eagle1_weights() | drafted | {"lm_head.weight": rows.clone()})
    with pytest.raises(InvalidCheckpoint, match="vocab_size is 90"):
        load(tmp_path, target)


def test_eagle1_of_llama2_does_not_say_how_many_key_value_heads(target, tmp_path):
    config = {name: value for name, value in LAYER.items() if name != "num_key_value_heads"}
    whole = {f"layers.0.self_attn.{name}_proj.weight": values(32, 32) for name in "kv"}
    head = load(write(tmp_path, config, eagle1_weights() | whole), target)
    assert head.config.num_key_value_heads == 4
    assert head.cache_layout[0].heads == 4


def test_eagle1_of_qwen2_has_biases_in_front_of_the_attention_only(target, tmp_path):
    biases = {f"layers.0.self_attn.{name}_proj.bias": values(size) for name, size in (("q", 32), ("k", 16), ("v", 16))}
    head = load(write(tmp_path, LAYER, eagle1_weights() | biases), target)
    assert torch.equal(head.layers[0].self_attn.k_proj.bias, biases["layers.0.self_attn.k_proj.bias"].double())
    assert head.layers[0].self_attn.o_proj.bias is None


def test_eagle3_as_published(target, tmp_path):
    weights = eagle3_weights()
    config = {**EAGLE3, "rope_theta": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    write(tmp_path, config, weights)
    with pytest.warns(UserWarning, match=r"says nothing of eagle_aux_hidden_state_layer_ids; .* blocks \(2, 1, 0\)"):
        head = load_head(tmp_path, target)
    assert isinstance(head, Eagle3Head)
    assert head.feature_names == (2, 1, 0)
    assert load(tmp_path, target, layer_ids="after").feature_names == (3, 2, 1)
    assert head.draft_tokens.tolist() == list(range(0, 80, 2))
    assert head.config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}
    assert (head.norm_before_residual, head.norm_output, head.fc_norm, head.embed_tokens) == (False, False, None, None)
    assert torch.equal(head.midlayer.self_attn.q_proj.weight, weights["midlayer.self_attn.q_proj.weight"].double())
    assert set(head.state_dict()) == weights.keys() - {"d2t", "t2d"}


def test_eagle3_without_a_reduced_vocabulary(target, tmp_path):
    weights = eagle3_weights(drafted=40) | {"lm_head.weight": values(VOCABULARY, 32)}
    weights = {key: value for key, value in weights.items() if key not in ("d2t", "t2d")}
    assert load(write(tmp_path, EAGLE3, weights), target, layer_ids="before").draft_tokens is None


def test_eagle3_with_t2d_alone(target, tmp_path):
    weights = {key: value for key, value in eagle3_weights().items() if key != "d2t"}
    head = load(write(tmp_path, EAGLE3, weights), target, layer_ids="before")
    assert head.draft_tokens.tolist() == list(range(0, 80, 2))


@pytest.mark.parametrize("own", [False, True])
def test_an_embedding_is_kept_only_where_it_differs(target, tmp_path, own):
    theirs: Any = target.model.get_input_embeddings().weight
    table = theirs.detach().bfloat16() + (1 if own else 0)
    head = load(write(tmp_path, EAGLE3, eagle3_weights() | {"embed_tokens.weight": table}), target, layer_ids="before")
    assert (head.embed_tokens is not None) == own


def test_speculators_layout(target, tmp_path):
    weights = eagle3_weights("layers.0.") | {f"fc_norm.{i}.weight": values(32) for i in range(3)}
    weights |= {"verifier_norm.weight": values(32), "verifier_lm_head.weight": values(40, 32)}
    write(tmp_path, {**SPECULATORS, "norm_output": True}, weights)
    with pytest.warns(UserWarning, match="before or after blocks; reading inputs; .*probe_layer_ids"):
        head: Any = load_head(tmp_path, target)
    assert head.feature_names == (1, 2, 3)
    assert head.norm_before_residual  # the default of this layout
    assert head.norm_output
    assert len(head.fc_norm) == 3
    assert head.config.rope_parameters["rope_theta"] == 500.0
    write(tmp_path, {**SPECULATORS, "norm_before_residual": False}, weights)
    assert not load(tmp_path, target, layer_ids="before").norm_before_residual


def test_other_spellings(target, tmp_path):
    """`model.` in front, EAGLE-1 as speculators writes it, one norm before fc, ids in eagle_config."""
    old = {f"model.{key}": value for key, value in eagle3_weights("layers.0.").items()}
    config = {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    head = load(write(tmp_path, config, old | {"model.input_norm.weight": values(96)}), target, layer_ids="after")
    assert head.input_norm is not None
    assert head.feature_names == (1, 2, 3)
    names = {"fc.": "fusion_fc.", "layers.0.": "transformer."}
    weights = eagle1_weights(bias=False)
    for plain, other in names.items():
        weights = {key.replace(plain, other): value for key, value in weights.items()}
    config = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER, "fusion_bias": True}
    head = load(write(tmp_path, config, weights), target)
    assert isinstance(head, EagleHead)
    assert head.fc.bias is None


@pytest.mark.parametrize("layout", ["yuhuili", "speculators"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(target, kind, layout, tmp_path):
    head: Any = make_head(kind, target)
    if layout == "speculators" and isinstance(head, EagleHead):
        with pytest.raises(InvalidRequest, match="EAGLE-3 alone"):
            save_head(head, tmp_path, layout="speculators")
        return
    save_head(head, tmp_path / "a" / "b", layout=layout, target_name="some/target")
    again = load(tmp_path / "a" / "b", target)  # no warning: our own files say what their layer ids mean
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["config.json", "model.safetensors"]
    assert type(again) is type(head)
    assert again.config.to_dict() == head.config.to_dict()
    assert again.feature_names == head.feature_names
    for name in ("norm_before_residual", "norm_output", "target_width"):
        assert getattr(again, name, None) == getattr(head, name, None)
    assert str(again.draft_tokens) == str(head.draft_tokens)
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_is_saved_is_the_published_layout(target, tmp_path):
    head = make_head("eagle3.1", target)
    save_head(head, tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    norms = {f"fc_norm.{i}.weight" for i in range(3)}
    assert weights.keys() == eagle3_weights().keys() | norms
    assert torch.equal(weights["d2t"] + torch.arange(len(REDUCED)), torch.tensor(REDUCED))
    assert weights["t2d"].nonzero()[:, 0].tolist() == REDUCED
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["rope_theta"], config["rope_scaling"]) == (len(REDUCED), 10000.0, None)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 1, 3]
    save_head(make_head("eagle", target), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == eagle1_weights().keys() - {"embed_tokens.weight"}
    assert json.loads((tmp_path / "config.json").read_text())["bias"] is True
    save_head(head, tmp_path, layout="speculators", target_name="some/target", depth=3)
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert config["transformer_layer_config"]["hidden_size"] == 32
    with pytest.raises(InvalidRequest, match="layout must be"):
        save_head(head, tmp_path, layout="gguf")  # type: ignore[arg-type]


Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def without(*keys: str) -> Change:
    return lambda config, weights: [weights.pop(key) for key in keys] and None


def field(**fields: Any) -> Change:
    return lambda config, weights: config.update(fields)


def tensor(key: str, value: Tensor) -> Change:
    return lambda config, weights: weights.update({key: value})


BROKEN1: list[tuple[Change, str]] = [
    (without("fc.weight"), r"model\.safetensors.*no 'fc\.weight'; a EagleHead needs it"),
    (without("layers.0.mlp.up_proj.weight"), r"no 'layers\.0\.mlp\.up_proj\.weight'"),
    (tensor("layers.1.mlp.up_proj.weight", values(2)), r"unknown key 'layers\.1\.mlp\.up_proj\.weight'"),
    (tensor("layers.0.self_attn.k_proj.weight", values(32, 32)), r"k_proj\.weight' is \[32, 32\], expected \[16, 32\]"),
    (
        tensor("embed_tokens.weight", values(80, 32)),
        r"'embed_tokens\.weight' is \[80, 32\], the target's is \[96, 32\]",
    ),
    (tensor("fc.bias", torch.ones(32, dtype=torch.int64)), r"'fc\.bias' must hold floating-point numbers"),
    (tensor("fc.bias", torch.full((32,), torch.nan)), r"'fc\.bias' must hold finite numbers, .* at 32 of 32"),
    (tensor("embed_tokens.weight", values(96, 32).log()), r"'embed_tokens\.weight' must hold finite numbers"),
    (tensor("lm_head.weight", values(80, 32)), r"'lm_head\.weight' is \[80, 32\], the target's is \[96, 32\]"),
    (tensor("lm_head.weight", torch.ones(96, 32).int()), r"'lm_head\.weight' must hold floating-point numbers"),
    (field(hidden_size=64), r"config\.json.*features of width 64 \(hidden_size\), the target's are 32 wide"),
    (field(vocab_size=90), r"config\.json.*vocab_size is 90, the target has 96"),
    (field(num_attention_heads=5), r"config\.json.*no Llama layer can have"),
    (field(rope_theta="far"), r"config\.json.*no Llama layer can have.*TypeError"),
    (field(rope_scaling={"rope_type": "spiral", "factor": 2.0}), r"config\.json.*no Llama layer can have.*spiral"),
    (field(eagle_config="none"), r"config\.json.*eagle_config must be an object, got 'none'"),
    (field(hidden_size=None), r"config\.json.*hidden_size must be a whole number >= 1, got None"),
    (field(num_hidden_layers=2), "num_hidden_layers is 2"),
    (field(layernorms=True), "extra norms are not supported"),
]
BROKEN3: list[tuple[Change, str]] = [
    (without("norm.weight", "lm_head.weight"), r"no 'lm_head\.weight', 'norm\.weight'; a Eagle3Head needs it"),
    (without("midlayer.hidden_norm.weight"), r"no 'midlayer\.hidden_norm\.weight'; a Eagle3Head needs it"),
    (without("d2t", "t2d"), r"'lm_head\.weight' has 40 rows for 96 tokens, but there is no 'd2t' or 't2d'"),
    (tensor("d2t", torch.zeros(39, dtype=torch.int64)), r"'d2t' has 39 tokens, 'lm_head\.weight' has 40 rows"),
    (tensor("d2t", -torch.arange(40)), "'d2t' does not name distinct token ids"),
    (tensor("d2t", torch.full((40,), 60)), "'d2t' does not name distinct token ids from 0 to vocab_size 96"),
    (tensor("d2t", torch.zeros(40)), "'d2t' must be a list of whole numbers"),
    (
        tensor("d2t", torch.arange(40) - (torch.arange(40) > 2).long()),
        "'d2t' and 't2d' contradict each other: token 5 is drafted by 'd2t' alone",
    ),
    (
        tensor("t2d", torch.ones(96, dtype=torch.bool)),
        "'d2t' and 't2d' contradict each other: token 1 is drafted by 't2d' alone",
    ),
    (
        tensor("midlayer.mlp.up_proj.weight", torch.tensor([1.0, -torch.inf]).bfloat16().repeat(48, 16)),
        r"'midlayer\.mlp\.up_proj\.weight' must hold finite numbers, got NaN or infinity at 768 of 1536",
    ),
    (tensor("fc.weight", values(32, 64)), r"'fc\.weight' is \[32, 64\], expected \[32, 96\]"),
    (tensor("midlayer.self_attn.q_norm.weight", values(8)), r"unknown key 'midlayer\.self_attn\.q_norm\.weight'"),
    (tensor("model.norm.weight", values(32)), "'norm.weight' is there twice"),
    (field(target_hidden_size=64), "features of width 64"),
    (field(hidden_size=16, num_attention_heads=2), "no embed_tokens of its own"),
    (field(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), r"\[1, 2, 9\] do not exist in a target of 3 blocks"),
    (tensor("lm_head.weight", torch.tensor(1.0)), r"'lm_head\.weight' is \[\], expected \[40, 32\]"),
    (field(eagle_aux_hidden_state_layer_ids="all"), "must be a list of block numbers, got 'all'"),
    (field(eagle_aux_hidden_state_is="guess"), "must be one of"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN1, ids=[message for _, message in BROKEN1])
def test_broken_eagle1(target, tmp_path, change, message):
    config, weights = dict(LAYER), eagle1_weights()
    change(config, weights)
    with pytest.raises(InvalidCheckpoint, match=message):
        load(write(tmp_path, config, weights), target)


@pytest.mark.parametrize(("change", "message"), BROKEN3, ids=[message for _, message in BROKEN3])
def test_broken_eagle3(target, tmp_path, change, message):
    config, weights = dict(EAGLE3), eagle3_weights()
    change(config, weights)
    with pytest.raises(InvalidCheckpoint, match=message):
        load(write(tmp_path, config, weights), target, layer_ids="before")


class Unsafe:
    """Would run code when unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_files_that_are_none(target, tmp_path):
    good = write(tmp_path, LAYER, eagle1_weights())
    weights = good / "model.safetensors"

    def refused(message: str) -> None:
        with pytest.raises(InvalidCheckpoint, match=message):
            load(good, target)

    weights.write_bytes(weights.read_bytes()[:-100])
    refused(r"model\.safetensors' is truncated or no file of weights")
    weights.unlink()
    refused(r"has no weights; a head is config\.json beside model\.safetensors or pytorch_model\.bin")
    pickle = good / "pytorch_model.bin"
    torch.save(eagle1_weights(), pickle)
    load(good, target)
    pickle.write_bytes(pickle.read_bytes()[:500])
    refused(r"pytorch_model\.bin' is truncated")
    for content, message in (
        ([1, 2], "must hold tensors by name, got list"),
        ({"fc.weight": 3}, r"'fc\.weight' must be a tensor, got int"),
        (Unsafe(), "is truncated or no file of weights"),
    ):
        torch.save(content, pickle)
        refused(message)
    (good / "config.json").write_text("{")
    refused(r"config\.json' is not valid JSON")
    (good / "config.json").write_text("[]")
    refused("must be a JSON object, got list")
    (good / "config.json").unlink()
    refused(r"config\.json' is missing")
    shutil.rmtree(good)
    with pytest.raises(ModelNotFound, match="there is no such directory"):
        load(good, target)


def test_arguments_that_cannot_work(target, tmp_path):
    write(tmp_path, EAGLE3, eagle3_weights())
    with pytest.raises(InvalidRequest, match="layer_ids must be 'before', 'after' or None, got 'inside'"):
        load(tmp_path, target, layer_ids="inside")
    with pytest.raises(InvalidRequest, match="draft_tokens is for EAGLE-1 heads"):
        load(tmp_path, target, layer_ids="before", draft_tokens=[1, 2])
