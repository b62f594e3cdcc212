"""Features for training against those of the scorer, and what of them is kept on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.training.data import Batch, Sequences
from draftwood.training.features import CachedFeatures, OnlineFeatures
from tests.architectures import build

NAMES = ("last", 1, 3)


@pytest.fixture(scope="module")
def target(tiny_llama) -> Target:
    return Target(tiny_llama)


def sequences(count: int = 7, length: int = 11, seed: int = 0) -> Sequences:
    tokens = torch.randint(3, 90, (count, length), generator=torch.Generator().manual_seed(seed))
    return Sequences(tokens, torch.ones(count, length, dtype=torch.bool))


def everything(data: Sequences) -> Batch:
    return data.at(torch.arange(len(data)))


def build_cache(target: Target, directory: Path, **options: Any) -> CachedFeatures:
    settings = {"batch_size": 2, "shard_tokens": 33, "dtype": torch.float64} | options
    data = settings.pop("data", sequences())
    return CachedFeatures.build(target, settings.pop("names", NAMES), data, directory, **settings)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3_text", "opt", "falcon", "gpt_neox", "cohere2"])
def test_they_are_what_the_scorer_gives(family):
    """Also past a sliding window, which is of 4 tokens."""
    target, batch = Target(build(family)), everything(sequences())
    names = ("last", 0, 2, target.layers)
    found = OnlineFeatures(target, names)(batch)
    with torch.no_grad():
        cache, tree = target.new_cache(len(batch.tokens)), TokenTree.empty(len(batch.tokens))
        scored = target.score(cache, batch.tokens.tolist(), tree, features=frozenset(names), head=False)
    assert list(found) == list(names)
    for name in names:
        torch.testing.assert_close(found[name], scored.features[name], rtol=0, atol=1e-10)
        assert not found[name].requires_grad and not found[name].is_inference()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


def test_autocast_around_them_changes_nothing(target):
    single = Target(copy.deepcopy(target.model).float())  # autocast leaves float64 alone
    batch, source = everything(sequences()), OnlineFeatures(single, NAMES)
    expected = source(batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = source(batch)
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_the_cache_holds_what_is_computed(target, tmp_path):
    data, progress = sequences(), []
    cached = build_cache(target, tmp_path, on_progress=lambda done, every: progress.append((done, every)))
    assert progress == [(2, 7), (3, 7), (5, 7), (6, 7), (7, 7)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "features.json", "shard-00000.bin", "shard-00001.bin", "shard-00002.bin",
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == 7 * 11 * 3 * 32 * 8
    for index in ([6, 0, 3, 3], [2], [0, 1, 2, 3, 4, 5, 6]):
        batch = data.at(torch.tensor(index))
        found, expected = cached(batch), OnlineFeatures(target, NAMES)(batch)
        assert list(found) == list(NAMES) and len(cached) == 7
        for name in NAMES:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)
    again = CachedFeatures(tmp_path)(everything(data))
    assert torch.equal(again["last"], cached(everything(data))["last"])
    found["last"].zero_()  # a copy: what is on disk stays
    assert torch.equal(again["last"], CachedFeatures(tmp_path)(everything(data))["last"])


def test_half_precision_is_rounded_once(target, tmp_path):
    cached, batch = build_cache(target, tmp_path, dtype=torch.bfloat16), everything(sequences())
    found, exact = cached(batch), OnlineFeatures(target, NAMES)(batch)
    for name in NAMES:
        assert found[name].dtype == torch.bfloat16
        torch.testing.assert_close(found[name].double(), exact[name], rtol=2**-8, atol=0)


def test_a_stopped_build_goes_on(target, tmp_path):
    seen: list[int] = []

    def stop(done: int, _: int) -> None:
        seen.append(done)
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_cache(target, tmp_path, on_progress=stop)
    with pytest.raises(InvalidCheckpoint, match=r"shard-00001.bin' is missing .* build the features again"):
        CachedFeatures(tmp_path)
    first = (tmp_path / "shard-00000.bin").stat().st_mtime_ns
    seen.clear()
    cached = build_cache(target, tmp_path, on_progress=lambda done, _: seen.append(done))
    assert seen == [5, 6, 7] and (tmp_path / "shard-00000.bin").stat().st_mtime_ns == first
    assert not list(tmp_path.glob("*.partial"))
    batch = everything(sequences())
    torch.testing.assert_close(cached(batch)["last"], OnlineFeatures(target, NAMES)(batch)["last"], rtol=0, atol=1e-12)
    build_cache(target, tmp_path, on_progress=lambda *_: pytest.fail("all is there"))


def test_other_models_data_and_settings_are_told_apart(target, tmp_path):
    build_cache(target, tmp_path)
    other = copy.deepcopy(target.model)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    for options, message in (
        ({"data": sequences(seed=1)}, "of another data"),
        ({"names": ("last", 1)}, "of another names and widths"),
        ({"dtype": torch.float32}, "of another dtype: {'dtype': 'float64'}, not {'dtype': 'float32'}"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            build_cache(target, tmp_path, **options)
    with pytest.raises(InvalidRequest, match="of another model"):
        build_cache(Target(other), tmp_path)
    cached = build_cache(target, tmp_path)
    for batch in (everything(sequences(8)), everything(sequences(length=12))):
        with pytest.raises(InvalidRequest, match=r"7 sequences of 11 tokens, .* features of other data"):
            cached(batch)


def test_the_size_is_bounded(target, tmp_path):
    needed = 7 * 11 * 3 * 32 * 8
    with pytest.raises(InvalidRequest, match=r"take 59,136 bytes, more than the 59,135 .* at most 6 sequences"):
        build_cache(target, tmp_path / "new", limit_bytes=needed - 1)
    assert not list((tmp_path / "new").iterdir())
    build_cache(target, tmp_path / "new", limit_bytes=needed)


def test_broken_files(target, tmp_path):
    build_cache(target, tmp_path)
    shard, manifest = tmp_path / "shard-00001.bin", tmp_path / "features.json"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    with pytest.raises(InvalidCheckpoint, match=r"shard-00001.bin' is missing or not of 25344 bytes"):
        CachedFeatures(tmp_path)
    build_cache(target, tmp_path)
    assert shard.read_bytes() == content
    sound = json.loads(manifest.read_text())
    for broken in ("", "[]", "{}", json.dumps(sound | {"dtype": "x"}), json.dumps(sound | {"widths": [0, 1, 1]})):
        manifest.write_text(broken)
        with pytest.raises(InvalidCheckpoint, match=r"manifest of features .*features.json"):
            CachedFeatures(tmp_path)
    with pytest.raises(InvalidCheckpoint, match="cannot read the manifest"):
        CachedFeatures(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ()}, "no features are asked for"),
        ({"names": ("first",)}, "'last' or a block from 0 to 3, got 'first'"),
        ({"names": (4,)}, "got 4"),
        ({"names": (True,)}, "got True"),
        ({"dtype": torch.int8}, "floating-point numbers, got torch.int8"),
        ({"batch_size": 0}, "batch_size must be a whole number >= 1"),
        ({"shard_tokens": 0}, "shard_tokens must be a whole number >= 1"),
    ],
)
def test_bad_settings(target, tmp_path, options, message):
    with pytest.raises(InvalidRequest, match=message):
        build_cache(target, tmp_path, **options)
