"""The command that trains EAGLE heads, on a tiny saved model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftwood import cli_eagle
from draftwood.core.target import Target
from draftwood.drafters.eagle.formats import load_head
from draftwood.training import eagle
from draftwood.training.data import pack, read_documents
from draftwood.training.eagle import EagleRecipe, train_eagle
from draftwood.training.loop import Schedule
from tests.study.tiny import filled, save_with_texts
from tests.test_cli_training import check_refused, dw, good

TRAIN = ["train", "eagle", "MODEL", "--data", "DATA", "--out", "OUT", "--steps", "3", "--length", "9"]
THIRD = ["--version", "3", "--feature-layers", "0,1,2"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_texts(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("version", [1, 3])
def test_train_eagle_does_what_the_library_does(tiny: Path, tmp_path: Path, version: int):
    output = tmp_path / "head"
    options = ["--draft-vocabulary", "20", "--unroll", "2", "--decay", "0.5", "--batch-size", "2", "--accumulate", "2"]
    options += ["--learning-rate", "0.01", "--warmup", "2", "--clip", "0.7", "--eval-data", "DATA", "--noise", "0.1"]
    options += ["--eval-every", "2", "--depth", "3", "--nodes", "5", "--seed", "4", "--cache", str(tmp_path / "c")]
    options += ["--entropy-weight", "0.3", "--start", "block", "--dtype", "float32", "--recompute"]
    options += ["--save-dtype", "bfloat16"]
    options += THIRD if version == 3 else ["--feature-weight", "2"]
    done = good(*filled(tiny, output, [*TRAIN, *options]))
    assert done.stdout == f"{output}\n"
    assert f"--drafter eagle --option checkpoint={output}" in done.stderr.replace("\n", "")
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [0, 1, 2, 3]
    assert ["evaluation" in line for line in log] == [True, False, True, True]

    target = Target.from_pretrained(tiny, dtype="float32")
    recipe = EagleRecipe(
        version,
        unroll=2,
        decay=0.5,
        layers=(0, 1, 2) if version == 3 else None,
        draft_vocabulary=20,
        start="block",
        feature_weight=2.0 if version == 1 else None,
        entropy_weight=0.3,
        noise=0.1,
        recompute=True,
        depth=3,
        nodes=5,
    )
    data = pack(read_documents(tiny / "data.txt", target.tokenizer), 9)
    expected = train_eagle(
        target,
        data,
        tmp_path / "python",
        Schedule(3, 2, 2, 0.01, 2, clip=0.7, seed=4, eval_every=2),
        recipe,
        held=data,
        cache=tmp_path / "c",
        save_dtype=torch.bfloat16,
    )
    told = [json.loads((place / "training.json").read_text())["evaluation"] for place in (output, tmp_path / "python")]
    assert told[0] == told[1]
    assert expected.dtype == torch.bfloat16
    found = load_head(output, target, dtype=torch.bfloat16)
    for one, other in zip(expected.state_dict().values(), found.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    good("generate", tiny, "abc", "--drafter", "eagle", "--option", f"checkpoint={output}", "--max-new-tokens", 6)


def test_a_warm_start_in_vllms_layout_told_as_json(tiny: Path, tmp_path: Path):
    good(*filled(tiny, tmp_path / "first", [*TRAIN, *THIRD]))
    then = [*TRAIN, "--version", "3", "--init", str(tmp_path / "first"), "--layout", "speculators", "--json"]
    told = json.loads(good(*filled(tiny, tmp_path / "then", then)).stdout)
    assert told["directory"] == str(tmp_path / "then") and told["step"] == 3
    assert {"step 1 top-1", "step 5 acceptance", "expected tau", "chain tau"} <= told["evaluation"].keys()
    assert told["learning_rate"] < 5e-5
    config = json.loads((tmp_path / "then" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tiny)


@pytest.mark.parametrize(("version", "steps", "rate", "warmup"), [(1, 100, 3e-5, 5), (3, 50_000, 5e-5, 2000)])
def test_the_schedule_is_the_papers_by_default(
    monkeypatch: pytest.MonkeyPatch, version: int, steps: int, rate: float, warmup: int
):
    seen: list[Schedule] = []
    monkeypatch.setattr(cli_eagle, "load_target", lambda *_: None)
    monkeypatch.setattr(cli_eagle, "read_both", lambda *_: (None, None))
    monkeypatch.setattr(cli_eagle, "run_training", lambda _output, run, *_, **__: run({}))
    monkeypatch.setattr(eagle, "train_eagle", lambda *given, **_: seen.append(given[3]))
    good("train", "eagle", "some/model", "--data", "texts", "--out", "x", "--steps", steps, "--version", version)
    assert (seen[0].learning_rate, seen[0].warmup, seen[0].clip) == (rate, warmup, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--version", "2"], "'2' is not one of"),
        (["--unroll", "0"], "unroll must be a whole number >= 1, got 0"),
        (["--feature-layers", "1,2"], "layers are for EAGLE-3"),
        (["--version", "3", "--feature-layers", "two"], "--feature-layers takes numbers of blocks"),
        (["--version", "3", "--feature-layers", "1,9"], "block 9, the target has 2 blocks"),
        (["--version", "3", "--feature-weight", "1"], "feature_weight is for EAGLE-1"),
        (["--draft-vocabulary", "1000"], "draft_vocabulary must be <= 96"),
        (["--eval-fraction", "0"], "can be held out"),
        (["--steps", "0"], "steps must be >= 1, got 0"),
        (["--length", "5"], "nothing of the held-out data is to be learnt by step 4"),
        (["--layout", "speculators"], "layout must be 'yuhuili'"),
        (["--data", "/nowhere.txt"], "/nowhere.txt"),
        (["--init", "/nowhere/head"], "no head at '/nowhere/head'"),
        (["--out", "/dev/null/head"], "cannot keep the training in"),
        (["--out", "MODEL"], "exists"),
        (["--dtype", "float16"], "float16"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tiny: Path, tmp_path: Path, arguments: list[str], message: str):
    check_refused(dw(*filled(tiny, tmp_path / "out", [*TRAIN, *arguments])), message)
