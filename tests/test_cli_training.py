"""The commands that search and train, on a tiny saved model."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.cli_data import run_training
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.training.data import pack, read_documents
from draftwood.training.layer_search import search_early_exit, search_layer_skip
from draftwood.training.layer_skip import Recipe
from draftwood.training.layer_skip import train_layer_skip as train_in_python
from draftwood.training.loop import Schedule
from tests.drafters.view_checks import agreeing_model
from tests.study.tiny import TEMPLATE, tiny_tokenizer

SHORT = ["--max-new-tokens", "12", "--gamma", "3"]
TRAIN = ["train", "layer-skip", "MODEL", "--data", "DATA", "--out", "OUT", "--steps", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Four blocks, the last two of which contribute little."""
    place = tmp_path_factory.mktemp("tiny")
    model = agreeing_model(contribution=0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(place)
    tiny_tokenizer(chat=False).save_pretrained(place)
    return str(place)


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("abc abc abc\nto be or not to be\n")
    return str(file)


def dw(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def good(*arguments):
    done = dw(*arguments)
    assert done.exit_code == 0, done.stderr
    return done


def test_search_early_exit_writes_what_the_library_finds(tiny, prompts, tmp_path):
    output = tmp_path / "new" / "exit.json"
    done = good("search", "early-exit", tiny, "--prompts", prompts, "--out", output, *SHORT)
    assert done.stdout == f"{output}\n"
    assert f"--option exit_layer={output}" in done.stderr.replace("\n", "")
    texts = ["abc abc abc", "to be or not to be"]
    found = search_early_exit(Target.from_pretrained(tiny), texts, max_new_tokens=12, gamma=3)
    content = json.loads(output.read_text())
    assert content["options"] == found.options and content["search"]["value"] == found.value
    option = f"exit_layer={output}"
    good("generate", tiny, "abc", "--drafter", "early-exit", "--option", option, "--max-new-tokens", 6)


def test_search_layer_skip_goes_on_where_it_was(tiny, prompts, tmp_path):
    output = tmp_path / "skip.json"
    arguments = ["search", "layer-skip", tiny, "--prompts", prompts, "--out", output, "--json", "--seed", 3, *SHORT]
    first = json.loads(good(*arguments, "--trials", 4).stdout)
    assert first["file"] == str(output) and first["drafter"] == "layer-skip" and first["trials"] == 4
    again = json.loads(good(*arguments, "--trials", 4).stdout)
    assert again == first
    more = json.loads(good(*arguments, "--trials", 7).stdout)
    assert more["trials"] == 7 and more["value"] >= first["value"]
    assert json.loads(output.read_text())["options"] == more["options"]
    other = dw(*arguments, "--trials", 7, "--gamma", 2)
    assert other.exit_code == 2 and "was begun with" in other.stderr
    texts = ["abc abc abc", "to be or not to be"]
    target = Target.from_pretrained(tiny)
    assert first["value"] == search_layer_skip(target, texts, trials=4, seed=3, max_new_tokens=12, gamma=3).value


def test_the_packaged_prompts_the_chat_template_and_measured_speed(tiny, tmp_path, monkeypatch):
    seen = []
    encode = Decoder.encode
    monkeypatch.setattr(Decoder, "encode", lambda self, prompt: seen.append(prompt) or encode(self, prompt))
    options = ["--limit", 1, "--trials", 1, "--out", tmp_path / "exit.json", *SHORT]
    value = json.loads(good("search", "early-exit", tiny, "--objective", "speed", *options, "--json").stdout)["value"]
    assert value > 0
    assert isinstance(seen[0], str) and len(seen[0]) > 20
    chat = tmp_path / "chat"
    Target.from_pretrained(tiny).model.save_pretrained(chat)
    tiny_tokenizer().save_pretrained(chat)
    assert tiny_tokenizer().chat_template == TEMPLATE
    seen.clear()
    options[options.index("--out") + 1] = tmp_path / "chat.json"
    good("search", "early-exit", chat, *options)
    assert [message["role"] for message in seen[0]] == ["user"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "early-exit", "MODEL"], "--out"),
        (["search", "early-exit", "MODEL", "--out", "OUT", "--objective", "tau"], "tau"),
        (
            ["search", "layer-skip", "MODEL", "--out", "OUT", "--trials", "0"],
            "trials must be a whole number >= 1, got 0",
        ),
        (["search", "layer-skip", "MODEL", "--out", "OUT", "--gamma", "0"], "gamma must be a whole number >= 1, got 0"),
        (["search", "layer-skip", "MODEL", "--out", "OUT", "--prompts", "/nowhere.txt"], "cannot read prompts"),
        (["search", "layer-skip", "/nowhere/model", "--out", "OUT"], "/nowhere/model"),
        (["search", "early-exit", "MODEL", "--out", "/dev/null/exit.json"], "cannot keep the search in"),
        (["search", "early-exit", "MODEL", "--out", "OUT", "--dtype", "int9"], "int9"),
        (["search", "early-exit", "MODEL", "--out", "OUT", "--chat"], "no chat template"),
        (["search", "nonsense"], "nonsense"),
        (["train", "layer-skip", "MODEL", "--out", "OUT", "--steps", "1"], "--data"),
        ([*TRAIN, "--steps", "0"], "steps must be >= 1, got 0"),
        ([*TRAIN, "--exit-layers", "2,x"], "such as 4,8,12, got '2,x'"),
        ([*TRAIN, "--exit-layers", "2,4"], "exit_layers must be from 2 to 3"),
        ([*TRAIN, "--p-max", "1"], "p_max must be in [0, 1), got 1"),
        ([*TRAIN, "--curriculum", "sudden"], "sudden"),
        ([*TRAIN, "--dtype", "float16"], "float16"),
        ([*TRAIN, "--length", "1"], "length >= 2, got 1"),
        ([*TRAIN, "--data", "/nowhere.txt"], "cannot read training data"),
        ([*TRAIN, "--data", "EMPTY"], "holds no training data"),
        ([*TRAIN, "--out", "/dev/null/model"], "cannot keep the training in"),
        ([*TRAIN, "--out", "MODEL"], "exists"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tiny, tmp_path, arguments, message):
    known = {
        "MODEL": tiny,
        "OUT": tmp_path / "out.json",
        "DATA": tmp_path / "data.txt",
        "EMPTY": tmp_path / "empty.txt",
    }
    known["DATA"].write_text("abc abc\n\nabd abd\n")
    known["EMPTY"].write_text("\n")
    check_refused(dw(*(known.get(one, one) for one in arguments)), message)


def check_refused(done, message):
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    noise = ("Loading weights", " tokens")  # progress, and how much data there is
    lines = [line for line in done.stderr.splitlines() if line.strip() and not any(word in line for word in noise)]
    assert len(lines) == 1 and lines[0].startswith("draftwood: "), done.stderr
    assert message in lines[0]


def test_without_optuna(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    check_refused(dw("search", "early-exit", tiny, "--out", tmp_path / "x.json", *SHORT), "draftwood[search]")


def test_train_layer_skip_makes_a_model_that_early_exit_drafts_with(tiny, tmp_path):
    data, output = tmp_path / "data.jsonl", tmp_path / "trained"
    data.write_text('{"text": "abc abc abc"}\n{"text": "to be or not to be"}\n')
    arguments = [
        "--data",
        data,
        "--out",
        output,
        "--steps",
        4,
        "--length",
        8,
        "--batch-size",
        2,
        "--exit-layers",
        "3,2",
    ]
    arguments += [
        "--batch-size",
        2,
        "--dtype",
        "float32",
        "--learning-rate",
        0.01,
        "--curriculum",
        "gradual",
        "--checkpoint-every",
        2,
        "--eval-data",
        data,
        "--eval-every",
        4,
    ]
    done = good("train", "layer-skip", tiny, *arguments)
    assert done.stdout == f"{output}\n"
    start, *log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    # All exits are measured, with nothing dropped, whichever the curriculum has the step learn.
    assert start["evaluation"].keys() == log[-1]["evaluation"].keys() == {"loss", "exit 2", "exit 3", "last"}
    assert [set(line) & {"exit 2", "exit 3", "last"} for line in log] == [{"exit 3", "last"}] + [
        {"exit 2", "exit 3", "last"}
    ] * 3
    assert log[-1]["last"] < log[0]["last"]
    target = Target.from_pretrained(output)
    documents = read_documents(data, target.tokenizer)
    schedule = Schedule(4, 2, learning_rate=0.01, checkpoint_every=2)
    expected = train_in_python(
        Target.from_pretrained(tiny, dtype="float32").model,
        pack(documents, 8),
        tmp_path / "python",
        schedule,
        Recipe(exit_layers=(2, 3), curriculum="gradual"),
        held=pack(documents, 8),
    )
    again = json.loads((tmp_path / "python" / "log.jsonl").read_text().splitlines()[-1])
    assert again["evaluation"] == log[-1]["evaluation"]
    assert json.loads((output / "training.json").read_text())["schedule"]["steps"] == 4
    trained = target.model.state_dict()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in expected.state_dict().items())
    options = ["--drafter", "early-exit", "--option", "exit_layer=2", "--max-new-tokens", 6]
    good("generate", output, "abc", *options)


def test_of_several_processes_one_says_where_the_result_is(tmp_path, monkeypatch, capsys):
    for rank, expected in (("1", ""), ("0", f"{tmp_path}\n")):
        monkeypatch.setenv("RANK", rank)
        run_training(tmp_path, lambda told: None, lambda entry, last: (1, ""), use="x", json_output=False)
        assert capsys.readouterr().out == expected


def test_data_that_cannot_be_used_is_counted(tiny, tmp_path):
    """The tokenizer has no chat template: a conversation is left out; and reading stops at the limit."""
    data = tmp_path / "data.jsonl"
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"text": "abc abc"}, chat, {"text": "to be"}, {"no": 1}))
    )
    arguments = ["train", "layer-skip", tiny, "--data", data, "--steps", 1, "--length", 4, "--dtype", "float32"]
    done = good(*arguments, "--limit-tokens", 10, "--out", tmp_path / "some")
    lines = done.stderr.replace("\n", " ")
    assert "3 sequences of 4 tokens" in lines and "1 rows left out, the first:" in lines and "line 2:" in lines
    done = good(*arguments, "--out", tmp_path / "all")
    assert "4 sequences of 4 tokens" in done.stderr and "2 rows left out" in done.stderr
