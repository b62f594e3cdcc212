"""The command that trains Medusa heads, on a tiny saved model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from draftwood.core.target import Target
from draftwood.drafters.medusa.formats import load_heads
from draftwood.training.data import pack, read_documents
from draftwood.training.loop import Schedule
from draftwood.training.medusa import MedusaRecipe, train_medusa
from tests.study.tiny import filled, save_with_texts
from tests.test_cli_training import check_refused, dw, good

TRAIN = ["train", "medusa", "MODEL", "--data", "DATA", "--out", "OUT", "--steps", "3", "--length", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_texts(tmp_path_factory.mktemp("tiny"))


def test_train_medusa_does_what_the_library_does(tiny: Path, tmp_path: Path):
    output = tmp_path / "heads"
    options = ["--heads", "2", "--draft-vocabulary", "20", "--decay", "0.5", "--distil", "--batch-size", "2"]
    options += ["--accumulate", "2", "--learning-rate", "0.01", "--warmup", "2", "--eval-fraction", "3"]
    options += [
        "--eval-every",
        "2",
        "--nodes",
        "5",
        "--dtype",
        "float32",
        "--seed",
        "4",
        "--cache",
        str(tmp_path / "c"),
    ]
    done = good(*filled(tiny, output, [*TRAIN, *options]))
    assert done.stdout == f"{output}\n"
    assert f"--drafter medusa --option checkpoint={output}" in done.stderr.replace("\n", "")
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3] and ["evaluation" in line for line in log] == [False, True, True]

    target = Target.from_pretrained(tiny, dtype="float32")
    expected = train_medusa(
        target,
        pack(read_documents(tiny / "data.txt", target.tokenizer), 8),
        tmp_path / "python",
        Schedule(3, 2, 2, 0.01, 2, seed=4, eval_every=2),
        MedusaRecipe(heads=2, draft_vocabulary=20, decay=0.5, distil=True, held_out=3, nodes=5),
        cache=tmp_path / "c",
    )
    found = load_heads(output, width=target.config.hidden_size, vocabulary=target.vocabulary_size).heads
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
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


def test_an_extra_that_is_missing_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    check_refused(dw(*filled(tiny, tmp_path / "x", [*TRAIN, "--tensorboard"])), "tensorboard is not installed")
