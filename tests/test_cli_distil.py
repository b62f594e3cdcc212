"""The command that distils a draft model, on a tiny saved model."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from draftwood.core.target import Target
from draftwood.training.data import pack, read_documents
from draftwood.training.draft_model import DraftModelRecipe, train_draft_model
from draftwood.training.loop import Schedule
from tests.study.tiny import filled, save_with_texts
from tests.test_cli_training import check_refused, dw, good

TRAIN = ["train", "draft-model", "MODEL", "--data", "DATA", "--out", "OUT", "--steps", "3", "--length", "8"]
OPTIONS = shlex.split(
    "--keep-layers 1 --width 16 --loss tv --cross-entropy 0.1 --batch-size 2 --accumulate 2 --learning-rate 0.01 "
    "--warmup 1 --weight-decay 0.1 --clip 0.5 --gamma 3 --eval-fraction 3 --eval-every 2 --seed 4 --checkpoint-every 1 "
    "--save-dtype bfloat16 --dtype float32 --json"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_texts(tmp_path_factory.mktemp("tiny"))


def command(tiny: Path, output: Path, *arguments: str | Path) -> list[str]:
    return filled(tiny, output, [str(one) for one in (*TRAIN, *arguments)])


def test_the_command_does_what_the_library_does_and_drafts(tiny: Path, tmp_path: Path):
    output = tmp_path / "draft"
    done = good(*command(tiny, output, *OPTIONS, "--cache", tmp_path / "cache"))
    printed = json.loads(done.stdout)
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert printed == {"directory": str(output), **lines[-1]}
    assert ["evaluation" in line for line in lines] == [True, False, True, True]
    assert "step 0 of 3" in done.stderr and "step 2 of 3" in done.stderr and "expected tau with 3 tokens" in done.stderr
    assert (tmp_path / "cache" / "training" / "features.json").exists()

    target = Target.from_pretrained(tiny, dtype="float32")
    data = pack(read_documents(tiny / "data.txt", target.tokenizer), 8)
    schedule = Schedule(3, 2, 2, 0.01, 1, 0.1, 0.5, 4, 1, 2)
    recipe = DraftModelRecipe(4, (1,), 16, "tv", 0.1, 3, 3)
    expected = train_draft_model(target, data, tmp_path / "same", schedule, recipe, save_dtype=torch.bfloat16)
    found = Target.from_pretrained(output).model
    assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in found.state_dict().items())
    assert found.dtype == torch.bfloat16

    draft = ["--drafter", "draft-model", "--option", f"model={output}", "--option", "gamma=3"]
    short = ["--max-new-tokens", "8", "--dtype", "float32", "--json"]
    with_draft = json.loads(good("generate", tiny, "abc", *draft, *short).stdout)
    alone = json.loads(good("generate", tiny, "abc", "--drafter", "none", *short).stdout)
    assert with_draft["tokens"] == alone["tokens"] and with_draft["stats"]["drafted"] > 0


def test_a_student_that_shares_and_what_is_said(tiny: Path, tmp_path: Path):
    output = tmp_path / "draft"
    done = good(*command(tiny, output, "--layers", "2", "--shared", "--draft-vocabulary", "20"))
    assert done.stdout == f"{output}\n"
    assert f"--drafter draft-model --option model={output}" in done.stderr.replace("\n", "")
    settings = json.loads((output / "training.json").read_text())
    assert settings["keep_layers"] == [0, 1] and settings["recipe"]["loss"] == "forward"
    assert settings["evaluation"].keys() == {"loss", "agreement", "acceptance", "coverage", "tau", "greedy tau"}
    assert settings["recipe"]["shared"] and settings["recipe"]["draft_vocabulary"] == 20
    assert json.loads((output / "config.json").read_text())["shared_with_target"] == ["embedding", "lm_head"]


def test_a_student_is_trained_further(tiny: Path, tmp_path: Path):
    good(*command(tiny, tmp_path / "first", "--layers", "1", "--width", "16", "--dtype", "float32"))
    further = ["--init", tmp_path / "first", "--dtype", "float32", "--learning-rate", "1e-12"]
    good(*command(tiny, tmp_path / "then", *further))
    first, then = (Target.from_pretrained(tmp_path / name).model.state_dict() for name in ("first", "then"))
    for name, tensor in first.items():
        torch.testing.assert_close(then[name], tensor, rtol=0, atol=1e-6)
    check_refused(dw(*command(tiny, tmp_path / "x", *further, "--layers", "2")), "has layers=1, not layers=2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the target has 2 layers; a student of 4"),
        (["--keep-layers", "0,x"], "numbers of blocks such as 0,10,20,29, got '0,x'"),
        (["--layers", "1", "--width", "15"], "width 15 leaves 2 of the target's 4 heads of 8"),
        (["--layers", "1", "--loss", "l2"], "'l2'"),
        (["--layers", "1", "--save-dtype", "int8"], "dtype must be a floating-point type"),
        (["--layers", "1", "--data", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_bad_input_is_refused(options: list[str], message: str, tiny: Path, tmp_path: Path):
    check_refused(dw(*command(tiny, tmp_path / "draft", *options)), message)
    assert not list(tmp_path.iterdir())
