"""Files of Medusa heads: every layout gives the heads that were stored, and what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.drafters.medusa.formats import Layout, load_heads, save_heads
from draftwood.drafters.medusa.network import MedusaConfig, MedusaHeads
from tests.architectures import VOCABULARY, build
from tests.drafters.medusa.test_network import random_heads

HEADS, LAYERS, WIDTH, SIZE, KEPT = 3, 2, 8, 11, torch.tensor([9, 2, 4])
MEDUSA_1 = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "some/base"}  # both wrong
VLLM = {
    "model_type": "medusa",
    "architectures": ["MedusaModel"],
    "hidden_size": WIDTH,
    "vocab_size": SIZE,
    "num_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "medusa_fc_bias": True,
}


def stored(layout: str, shared: bool, tokens: Tensor | None, seed: int = 0) -> tuple[MedusaHeads, dict[str, Tensor]]:
    """Returns heads, and their weights by the names that a layout gives them."""
    heads = random_heads(MedusaConfig(HEADS, LAYERS, WIDTH, SIZE, shared), tokens, seed)
    prefix = {"medusa-2": "medusa_head.", "modelopt": "medusa_heads.", "old vllm": "medusa_heads."}.get(layout, "")
    vllm = layout in ("vllm", "old vllm")
    state = {}
    for head in range(HEADS):
        for layer, block in enumerate(heads.blocks):
            name = f"blocks.{head}.layers.{layer}" if vllm else f"{head}.{layer}.linear"
            state[f"{prefix}{name}.weight"] = block.weight[head].detach().clone()
            state[f"{prefix}{name}.bias"] = block.bias[head].detach().clone()
        if not shared:
            name = f"lm_heads.{head}" if vllm else f"{head}.{LAYERS}"
            state[f"{prefix}{name}.weight"] = heads.lm_heads[head].detach().clone()
    if tokens is not None:
        state["token_map"] = tokens
    if layout in ("medusa-2", "modelopt"):  # with the weights of the model it is part of
        state |= {"model.layers.0.mlp.up_proj.weight": torch.ones(4, 4), "lm_head.weight": torch.ones(SIZE, WIDTH)}
    return heads, state


def write(folder: Path, name: str, state: Any, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (save_file if name.endswith(".safetensors") else torch.save)(state, folder / name)
    return folder


def load(folder: Path) -> MedusaHeads:
    return load_heads(folder, width=WIDTH, vocabulary=SIZE).heads


def assert_equal(got: MedusaHeads, expected: MedusaHeads) -> None:
    assert got.config == expected.config
    ours, theirs = got.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)
    assert all(parameter.requires_grad for parameter in got.parameters())


@pytest.mark.parametrize("tokens", [None, KEPT])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("layout", "name", "config"),
    [
        ("medusa-1", "medusa_lm_head.pt", MEDUSA_1),
        ("medusa-1", "medusa_lm_head.safetensors", MEDUSA_1),
        ("medusa-2", "model.safetensors", {"model_type": "llama", "vocab_size": SIZE, **MEDUSA_1}),
        ("medusa-2", "pytorch_model.bin", {"model_type": "llama", "vocab_size": SIZE, **MEDUSA_1}),
        ("modelopt", "model.safetensors", {"model_type": "llama", "vocab_size": SIZE}),
        ("old vllm", "model.safetensors", VLLM),
        ("vllm", "model.safetensors", VLLM),
        ("vllm", "pytorch_model.bin", VLLM),
    ],
)
def test_every_layout_is_read(tmp_path, layout, name, config, shared, tokens):
    heads, state = stored(layout, shared, tokens)
    if "vllm" in layout:
        config = config | {"original_lm_head": shared, "truncated_vocab_size": heads.draft_vocabulary}
        if shared:
            state["lm_head.weight"] = torch.zeros(heads.draft_vocabulary, WIDTH)
    assert_equal(load(write(tmp_path, name, state, config)), heads)


def test_a_config_is_not_needed(tmp_path):
    heads, state = stored("medusa-1", False, None)
    save_file(state, tmp_path / "medusa_lm_head.safetensors")
    assert_equal(load(tmp_path), heads)


def test_rows_of_a_whole_vocabulary_are_cut_to_the_token_map(tmp_path):
    """VLLM lets a truncated checkpoint keep all rows."""
    heads, state = stored("vllm", False, None)
    state["token_map"] = KEPT
    got = load(write(tmp_path, "model.safetensors", state, VLLM | {"truncated_vocab_size": 3}))
    assert torch.equal(got.draft_tokens, KEPT)
    assert torch.equal(got.lm_heads, heads.lm_heads[:, KEPT])


def test_blocks_without_biases(tmp_path):
    heads, state = stored("vllm", False, None)
    state = {key: value for key, value in state.items() if not key.endswith("bias")}
    got = load(write(tmp_path, "model.safetensors", state, VLLM | {"medusa_fc_bias": False}))
    assert all(torch.equal(ours.weight, theirs.weight) for ours, theirs in zip(got.blocks, heads.blocks, strict=True))
    assert all(block.bias.abs().sum() == 0 for block in got.blocks)


def test_of_a_model_in_several_files_only_those_with_heads_are_read(tmp_path):
    heads, state = stored("medusa-2", False, None)
    names = sorted(key for key in state if key.startswith("medusa_head"))
    shards = {"model-2.safetensors": names[:5], "model-3.safetensors": names[5:]}
    for file, keys in shards.items():
        save_file({key: state[key] for key in keys}, tmp_path / file)
    (tmp_path / "model-1.safetensors").write_text("not to be read")
    placed = {key: file for file, keys in shards.items() for key in keys} | {"lm_head.weight": "model-1.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert_equal(load(tmp_path), heads)
    (tmp_path / "model-3.safetensors").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"index.json names 'model-3.safetensors', which is not there"):
        load(tmp_path)


@pytest.mark.parametrize("tokens", [None, KEPT])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("layout", ["medusa-1", "vllm"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_saved_is_loaded(tmp_path, layout: Layout, shared, tokens, dtype):
    target = Target(build("llama"))
    width = target.config.hidden_size
    heads = random_heads(MedusaConfig(HEADS, LAYERS, width, VOCABULARY, shared), tokens).to(dtype)
    accuracies = [[0.5, 0.1], [0.3]]
    save_heads(heads, tmp_path / "new", layout=layout, base_model="b", accuracies=accuracies, target=target)
    got = load_heads(tmp_path / "new", width=width, vocabulary=VOCABULARY)
    assert_equal(got.heads, heads)
    assert got.accuracies == accuracies
    assert not [file for file in (tmp_path / "new").iterdir() if "partial" in file.name]


def test_the_names_that_the_layouts_are_read_by_elsewhere(tmp_path):
    heads, state = stored("medusa-1", False, None)
    save_heads(heads, tmp_path / "one")
    saved = load_file(tmp_path / "one" / "medusa_lm_head.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (HEADS, LAYERS)

    heads, state = stored("vllm", False, KEPT)
    save_heads(heads, tmp_path / "two", layout="vllm")
    saved = load_file(tmp_path / "two" / "model.safetensors")
    assert saved.keys() == state.keys() and all(torch.equal(saved[key], state[key]) for key in state)
    config = json.loads((tmp_path / "two" / "config.json").read_text())
    assert config.items() >= (VLLM | {"original_lm_head": False, "truncated_vocab_size": 3}).items()


@pytest.mark.parametrize("tokens", [None, KEPT])
def test_vllm_gets_the_rows_of_the_shared_head(tmp_path, tokens):
    target = Target(build("llama"))
    heads = MedusaHeads.for_target(target, heads=2, shared=True, draft_tokens=tokens)
    save_heads(heads, tmp_path, layout="vllm", target=target)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        rows = opened.get_tensor("lm_head.weight")
    hidden = torch.randn(1, 2, target.config.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(hidden @ rows.T, head_of(target, tokens)(hidden))
    assert json.loads((tmp_path / "config.json").read_text())["original_lm_head"] is True
    with pytest.raises(InvalidRequest, match="copy of the target's LM head; pass target="):
        save_heads(heads, tmp_path, layout="vllm")


def spoilt(change: Any, layout: str = "medusa-1", tokens: Tensor | None = None, **config: Any) -> Any:
    def make(folder: Path) -> None:
        _, state = stored(layout, False, tokens)
        change(state)
        write(folder, "model.safetensors" if layout != "medusa-1" else "medusa_lm_head.safetensors", state, config)

    return make


def cut(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])


def truncated(name: str) -> Any:
    def make(folder: Path) -> None:
        write(folder, name, stored("medusa-1", False, None)[1], {})
        cut(folder, name)

    return make


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated("medusa_lm_head.safetensors"), r"medusa_lm_head.safetensors' is truncated .*: SafetensorError"),
        (truncated("medusa_lm_head.pt"), r"medusa_lm_head.pt' is truncated .*: "),
        (lambda f: write(f, "medusa_lm_head.pt", Harmful(), {}), "medusa_lm_head.pt' is truncated .*: UnpicklingError"),
        (lambda f: (f / "medusa_lm_head.pt").write_text("hello"), "medusa_lm_head.pt' is truncated"),
        (lambda f: (f / "medusa_lm_head.pt").write_bytes(b""), "medusa_lm_head.pt' is truncated .*: EOFError"),
        (lambda f: write(f, "medusa_lm_head.pt", [1, 2], {}), "must hold tensors by name, got list"),
        (lambda f: write(f, "medusa_lm_head.pt", {"0": 3}, {}), "medusa_lm_head.pt': '0' must be a tensor, got int"),
        (spoilt(lambda s: s.update(more=torch.ones(1))), r"safetensors: key 'more' is none of Medusa heads, such as"),
        (spoilt(lambda s: s.pop("1.0.linear.weight")), "has no weight of block 0 of head 1"),
        (spoilt(lambda s: s.pop("2.1.linear.bias")), "has no bias of block 1 of head 2"),
        (spoilt(lambda s: s.pop("1.2.weight")), "has no LM head of head 1; others have one"),
        (spoilt(lambda s: s.update({"1.3.weight": s.pop("1.2.weight")})), "'1.3.weight' is the LM head behind 3"),
        (spoilt(lambda s: s.update({"lm_heads.1.weight": s["1.2.weight"]+0})), "lm_heads.1.weight' is the same as"),
        (
            spoilt(lambda s: s.update({"0.0.linear.weight": torch.ones(4, 4)})),
            r"key '0.0.linear.weight' has the shape \[4, 4\]; for a target of hidden size 8 it must be \[8, 8\]",
        ),
        (
            spoilt(lambda s: s.update({"0.2.weight": torch.ones(13, 8)})),
            r"'0.2.weight' has the shape \[13, 8\]; for a target of vocabulary 11 and hidden size 8 .* \[11, 8\]",
        ),
        (
            spoilt(lambda s: s.update({"medusa_head.0.2.weight": torch.ones(5, 8)}), "medusa-2", KEPT),
            r"'medusa_head.0.2.weight' has the shape \[5, 8\]; for a target of vocabulary 11 \(or 3 draft tokens\)",
        ),
        (spoilt(lambda s: s.update({"1.0.linear.bias": s["1.0.linear.bias"].int()})), "bias' must hold floating-point"),
        (spoilt(lambda s: s["1.0.linear.bias"].fill_(torch.nan)), "key '1.0.linear.bias' must hold finite numbers"),
        (
            spoilt(lambda s: s["medusa_head.0.2.weight"][3].fill_(torch.inf), "medusa-2"),
            "key 'medusa_head.0.2.weight' must hold finite numbers, got NaN or infinity at 8 of 88",
        ),
        (spoilt(lambda s: s.update(token_map=torch.tensor([1, 11]))), "'token_map' must be distinct ids from 0 to 10"),
        (spoilt(lambda s: s.update(token_map=torch.tensor([1, 1]))), "got 1 distinct ones among 2"),
        (spoilt(lambda s: s.update(token_map=torch.ones(2))), r"'token_map' must be a list of token ids, got \[2\]"),
        (spoilt(lambda s: None, accuracies=[[0.5], []]), r"config.json: 'accuracies': accuracies of head 1"),
        (lambda f: save_file({"token_map": KEPT}, f / "model.safetensors"), "holds no Medusa heads; their keys are"),
        (
            lambda f: write(f, "model.safetensors", stored("vllm", True, KEPT)[1], {"vocab_size": 99}),
            "config.json: 'vocab_size' is 99; the target's vocabulary is 11",
        ),
        (lambda f: (f / "config.json").write_text("{"), "config.json' is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json' must be a JSON object, got list"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json has no 'weight_map'"),
    ],
)  # fmt: skip
def test_broken_files(tmp_path, make, message, capsys):
    make(tmp_path)
    with pytest.raises(InvalidCheckpoint, match=message):
        load(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/place", "no Medusa heads at '/no/such/place': there is no such directory"),
        (Path("nowhere"), "no such directory"),
        ("nowhere", "no such directory"),
        ("some-user/medusa-that-is-not-cached", "'some-user/medusa-that-is-not-cached': .* and the hub gave "),
    ],
)
def test_heads_that_are_not_there(source, message):
    with pytest.raises(ModelNotFound, match=message):
        load_heads(source, width=WIDTH, vocabulary=SIZE)


def test_an_empty_directory(tmp_path):
    with pytest.raises(ModelNotFound, match=r"it holds none of medusa_lm_head.safetensors, medusa_lm_head.pt"):
        load(tmp_path)


@pytest.mark.parametrize("patterns", [("medusa_lm_head.pt",), ("model.safetensors", "config.json")])
def test_heads_from_the_hub(tmp_path, monkeypatch, patterns):
    """The hub is asked for one kind of file after the other, until there are weights."""
    heads, state = stored("medusa-1", False, None)
    asked: list[str] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        from fnmatch import fnmatch

        assert name == "user/heads"
        asked.extend(allow_patterns)
        for file in patterns:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                if file == "config.json":
                    (tmp_path / file).write_text("{}")
                else:
                    (save_file if "safetensors" in file else torch.save)(state, tmp_path / file)
        return str(tmp_path)

    monkeypatch.setattr("draftwood.drafters.checkpoint_files.snapshot_download", snapshot)
    assert_equal(load("user/heads"), heads)
    assert not any("pytorch_model" in pattern for pattern in asked)


def test_layouts_that_are_none(tmp_path):
    heads, _ = stored("medusa-1", False, None)
    with pytest.raises(InvalidRequest, match="'medusa-1' or 'vllm', got 'gguf'"):
        save_heads(heads, tmp_path, layout="gguf")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="sum to at most 1"):
        save_heads(heads, tmp_path / "x", accuracies=[[0.9, 0.9]])
    assert not (tmp_path / "x").exists()
