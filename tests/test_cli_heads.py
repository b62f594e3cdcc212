"""The command that trains Medusa heads, on a tiny saved model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftwood.core.target import Target
from draftwood.drafters.medusa.formats import load_heads
from draftwood.training.data import pack, read_documents
from draftwood.training.loop import Schedule
from draftwood.training.medusa import MedusaRecipe, train_medusa
from draftwood.training.medusa_joint import train_medusa_joint
from tests.conftest import llama_config, tiny_model
from tests.study.tiny import filled, save_with_texts, tiny_tokenizer
from tests.test_cli_training import check_refused, dw, good

TRAIN = ["train", "medusa", "MODEL", "--data", "DATA", "--out", "OUT", "--steps", "3", "--length", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_texts(tmp_path_factory.mktemp("tiny"))


def test_train_medusa_does_what_the_library_does(tiny: Path, tmp_path: Path):
    output = tmp_path / "heads"
    options = ["--heads", "2", "--draft-vocabulary", "20", "--decay", "0.5", "--distil", "--batch-size", "2"]
    options += ["--accumulate", "2", "--learning-rate", "0.01", "--warmup", "2", "--eval-fraction", "3"]
    options += ["--eval-every", "2", "--nodes", "5", "--dtype", "float32", "--seed", "4"]
    options += ["--cache", str(tmp_path / "c"), "--save-dtype", "bfloat16"]
    done = good(*filled(tiny, output, [*TRAIN, *options]))
    assert done.stdout == f"{output}\n"
    assert f"--drafter medusa --option checkpoint={output}" in done.stderr.replace("\n", "")
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2, 3]
    assert ["evaluation" in line for line in log] == [True, False, True, True]

    target = Target.from_pretrained(tiny, dtype="float32")
    expected = train_medusa(
        target,
        pack(read_documents(tiny / "data.txt", target.tokenizer), 8),
        tmp_path / "python",
        Schedule(3, 2, 2, 0.01, 2, seed=4, eval_every=2),
        MedusaRecipe(heads=2, draft_vocabulary=20, decay=0.5, distil=True, held_out=3, nodes=5),
        cache=tmp_path / "c",
        save_dtype=torch.bfloat16,
    )
    found = load_heads(output, width=target.config.hidden_size, vocabulary=target.vocabulary_size).heads
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert {part.dtype for part in found.parameters()} == {torch.bfloat16}
    good("generate", tiny, "abc", "--drafter", "medusa", "--option", f"checkpoint={output}", "--max-new-tokens", 6)


def test_a_warm_start_in_vllms_layout_told_as_json(tiny: Path, tmp_path: Path):
    first = filled(tiny, tmp_path / "first", [*TRAIN, "--shared", "--layers", "2", "--heads", "1"])
    good(*first)
    then = [*TRAIN, "--init", str(tmp_path / "first"), "--layout", "vllm", "--json"]
    told = json.loads(good(*filled(tiny, tmp_path / "then", then)).stdout)
    assert told["directory"] == str(tmp_path / "then") and told["step"] == 3
    assert {"head 0 top-1", "expected tau", "coverage"} <= told["evaluation"].keys()
    config = json.loads((tmp_path / "then" / "config.json").read_text())
    assert (config["model_type"], config["num_heads"], config["num_hidden_layers"]) == ("medusa", 1, 2)
    assert config["original_lm_head"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "0"], "heads must be a whole number >= 1, got 0"),
        (["--draft-vocabulary", "1000"], "draft_vocabulary must be <= 96"),
        (["--eval-fraction", "0"], "can be held out"),
        (["--eval-fraction", "1.5"], "got 1.5"),
        (["--steps", "0"], "steps must be >= 1, got 0"),
        (["--layout", "gguf"], "gguf"),
        (["--data", "/nowhere.txt"], "/nowhere.txt"),
        (["--init", "/nowhere/heads"], "no Medusa heads at '/nowhere/heads'"),
        (["--out", "/dev/null/heads"], "cannot keep the training in"),
        (["--out", "MODEL"], "exists"),
        (["--dtype", "float16"], "float16"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tiny: Path, tmp_path: Path, arguments: list[str], message: str):
    check_refused(dw(*filled(tiny, tmp_path / "out", [*TRAIN, *arguments])), message)


def test_train_medusa_2_makes_a_target_that_drafts_for_itself(tiny: Path, tmp_path: Path):
    output = tmp_path / "model"
    arguments = [*TRAIN, "--head-steps", "2", "--heads", "2", "--dtype", "float32"]
    arguments[1] = "medusa-2"
    done = good(*filled(tiny, output, arguments))
    assert done.stdout == f"{output}\n"
    options = ["--drafter", "medusa", "--option", f"checkpoint={output}", "--max-new-tokens", 6]
    good("generate", output, "abc", *options)
    check_refused(dw(*filled(tiny, tmp_path / "x", arguments[:-6])), "give either a schedule of the first stage")


def test_train_medusa_2_does_what_the_library_does(tiny: Path, tmp_path: Path):
    output, cache = tmp_path / "model", tmp_path / "cache"
    options = "--head-steps 2 --heads 2 --decay 0.5 --nodes 3 --weight-decay 0.1 --clip 0.1 --learning-rate 0.01 "
    options += f"--eval-every 1 --batch-size 2 --eval-data DATA --dtype float32 --cache {cache} --json"
    arguments = [*TRAIN, *options.split()]
    arguments[1] = "medusa-2"
    told = json.loads(good(*filled(tiny, output, arguments)).stdout)
    assert told["step"] == 3 and told["evaluation"]["expected tau"] >= 1
    assert (cache / "training" / "features.json").exists()
    target = Target.from_pretrained(tiny, dtype="float32")
    common: dict[str, Any] = {"batch_size": 2, "weight_decay": 0.1, "clip": 0.1, "eval_every": 1}
    data = pack(read_documents(tiny / "data.txt", target.tokenizer), 8)
    _, expected = train_medusa_joint(
        target,
        data,
        tmp_path / "python",
        Schedule(3, learning_rate=0.01, **common),
        MedusaRecipe(heads=2, decay=0.5, nodes=3),
        held=data,
        first=Schedule(2, learning_rate=1e-3, **common),
        cache=cache,
    )
    found = load_heads(output, width=target.config.hidden_size, vocabulary=target.vocabulary_size).heads
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    found, expected = (json.loads((place / "training.json").read_text()) for place in (output, tmp_path / "python"))
    assert found == expected and found["nodes"] == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file, state: file.write_bytes(file.read_bytes()[:-9]), "medusa_lm_head.safetensors' is truncated"),
        (
            lambda file, state: save_file(state | {"0.0.linear.weight": torch.ones(3, 3)}, file),
            "key '0.0.linear.weight'",
        ),
        (lambda file, state: save_file(state | {"0.1.weight": torch.ones(9, 32)}, file), "key '0.1.weight'"),
        (lambda file, state: torch.save([1], file.with_suffix(".pt")) or file.unlink(), "medusa_lm_head.pt' must hold"),
    ],
    ids=["truncated", "hidden size", "vocabulary", "no state dict"],
)
def test_heads_to_start_from_that_are_broken(tiny: Path, tmp_path: Path, make: Any, message: str):
    width, size = Target.from_pretrained(tiny).config.hidden_size, 96
    parts = {"0.0.linear.weight": (width, width), "0.0.linear.bias": (width,), "0.1.weight": (size, width)}
    state = {name: torch.zeros(shape) for name, shape in parts.items()}
    file = tmp_path / "heads" / "medusa_lm_head.safetensors"
    file.parent.mkdir()
    save_file(state, file)
    make(file, state)
    arguments = filled(tiny, tmp_path / "out", [*TRAIN, "--init", str(file.parent)])
    check_refused(dw(*arguments), message)


@pytest.mark.parametrize("command", ["medusa", "medusa-2", "draft-model", "eagle", "layer-skip"])
def test_an_extra_that_is_missing_is_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    needed = {
        "medusa-2": ["--head-steps", "1"],
        "draft-model": ["--layers", "1"],
        "eagle": ["--length", "9"],
        "layer-skip": [],
    }
    model = save_deep(tmp_path / "deep") if command == "layer-skip" else tiny
    arguments = filled(model, tmp_path / "x", ["train", command, *TRAIN[2:], *needed.get(command, [])])
    arguments[arguments.index("--data") + 1] = str(tiny / "data.txt")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch.utils.tensorboard", None)
        check_refused(dw(*arguments, "--tensorboard"), "tensorboard is not installed")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    check_refused(dw(*arguments), "needs accelerate, which is not installed; pip install 'draftwood[train]'")


def save_deep(place: Path) -> Path:
    """A model with enough blocks for an early exit."""
    tiny_model(llama_config(layers=3, heads=4)).save_pretrained(place)
    tiny_tokenizer(chat=False).save_pretrained(place)
    return place


def test_learning_curves_are_drawn(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, then = tmp_path / "first", tmp_path / "then"
    good(*filled(tiny, first, [*TRAIN, "--heads", "1", "--eval-every", "1"]))
    good(*filled(tiny, then, [*TRAIN, "--init", str(first), "--eval-every", "1", "--eval-data", "DATA"]))
    settings = json.loads((then / "training.json").read_text())
    assert settings["sequences"]["training"] == settings["sequences"]["held-out"]
    for joined in (True, False):
        curve = tmp_path / f"{joined}.svg"
        done = good("train", "plot", first, then, "--out", curve, *(["--joined"] if joined else []))
        assert done.stdout == f"{curve}\n"
        assert (f">head 0 top-1, {then}<" in curve.read_text()) is not joined
    check_refused(dw("train", "plot", tmp_path / "no", "--out", tmp_path / "x.svg"), "no log of a training at")
    check_refused(dw("train", "plot", first, "--out", "/dev/null/x.svg"), "cannot write '/dev/null/x.svg'")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    check_refused(dw("train", "plot", first, "--out", tmp_path / "x.svg"), "draftwood[plot]")
