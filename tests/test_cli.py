"""The command line, through typer's runner and, where signals and exit codes matter, as a process."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from typer.testing import CliRunner

from draftwood import cli_study, plugins
from draftwood.cli import app
from draftwood.core.errors import DraftwoodError
from draftwood.core.proposal import Verdict
from draftwood.core.registry import Registry, hookimpl
from draftwood.study import run as study_run
from draftwood.verify import Greedy
from tests import forked
from tests.study.tiny import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def rawtiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("raw"), chat=False))


def dw(*arguments, stdin=None):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def good(*arguments, stdin=None):
    done = dw(*arguments, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return done


GENERATE = ["--max-new-tokens", "8"]


def test_drafters_lists_names_options_and_broken_plugins(monkeypatch):
    text = good("drafters").stdout
    assert "prompt-lookup" in text and "max_ngram=3" in text and "model=(required)" in text and "traversal" in text
    data = json.loads(good("drafters", "--json").stdout)
    assert data["drafters"]["prompt-lookup"]["options"]["gamma"] == 8
    assert data["rules"]["coupled"]["plugin"] == "draftwood"
    broken = plugins.load_registry()
    broken.broken["oak"] = "ImportError: no wood"
    monkeypatch.setattr("draftwood.cli.load_registry", lambda: broken)
    assert "plugin oak failed: ImportError: no wood" in good("drafters").stdout


def test_generate_streams_the_text_that_json_reports(tiny):
    done = good("generate", tiny, "abc abc", *GENERATE)
    data = json.loads(good("generate", tiny, "abc abc", *GENERATE, "--json").stdout)
    assert done.stdout == data["text"] + "\n"
    assert len(data["tokens"]) == 8 and data["stop_reason"] == "length"
    assert data["stats"]["tau"] >= 1 and data["stats"]["seconds"]["total"] > 0
    assert "8 tokens" in done.stderr and "8 tokens" not in done.stdout
    plain = json.loads(good("generate", tiny, "abc abc", *GENERATE, "--json", "--drafter", "none").stdout)
    assert plain["tokens"] == data["tokens"]


def test_generate_reads_standard_input_and_chat_or_not(tiny, rawtiny):
    typed = json.loads(good("generate", tiny, "abc", *GENERATE, "--json").stdout)
    piped = json.loads(good("generate", tiny, "-", *GENERATE, "--json", stdin="abc").stdout)
    raw = json.loads(good("generate", tiny, "abc", *GENERATE, "--json", "--raw").stdout)
    bare = json.loads(good("generate", rawtiny, "abc", *GENERATE, "--json").stdout)
    assert typed == piped | {"stats": typed["stats"]}
    assert raw["prompt_tokens"] == bare["prompt_tokens"] == 3 < typed["prompt_tokens"]


def test_generate_passes_settings_on(tiny):
    options = ["--temperature", "1", "--seed", "3", "--setting", "top_k=1", "--rule", "coupled", "--json", *GENERATE]
    greedy = json.loads(good("generate", tiny, "abc", *GENERATE, "--json").stdout)
    assert json.loads(good("generate", tiny, "abc", *options).stdout)["tokens"] == greedy["tokens"]
    stop = greedy["text"][2]
    stopped = json.loads(good("generate", tiny, "abc", *GENERATE, "--json", "--stop", stop).stdout)
    assert stopped["stop_reason"] == "stop_string" and stopped["text"].endswith(stop)
    single = good("generate", tiny, "abc abc", *GENERATE, "--json", "--option", "gamma=1", "--option", "nodes=1")
    assert len(json.loads(single.stdout)["stats"]["drafted_by_depth"]) <= 1


def test_a_setting_is_not_overridden_by_a_default(tiny):
    def run(*options):
        done = json.loads(good("generate", tiny, "abc", "--raw", "--json", "--rule", "coupled", *options).stdout)
        return done["tokens"]

    drawn = run("--temperature", "2", "--max-new-tokens", "9", "--seed", "5")
    assert run("--setting", "temperature=2", "--setting", "max_new_tokens=9", "--setting", "seed=5") == drawn
    assert drawn != run("--max-new-tokens", "9")
    assert len(run("--setting", "max_length=7")) == 7 - 3


@pytest.mark.parametrize("prompt", ["-", os.fsdecode(b"abc \xff d")])
def test_a_prompt_that_is_no_utf8_is_one_line_and_exit_2(prompt):
    done = dw("generate", "/nowhere/model", prompt, stdin=b"abc \xff d")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == "draftwood: the prompt must be UTF-8 text, got b'\\xff' at byte 4\n"


def test_accepted_tokens_are_coloured_on_a_terminal(tiny, monkeypatch):
    from rich.console import Console

    console = Console(force_terminal=True, color_system="standard", highlight=False)
    monkeypatch.setattr("draftwood.cli.out", console)
    coloured = good("generate", tiny, "abc abc abc abc", "--max-new-tokens", "40").stdout
    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in good("generate", tiny, "abc abc abc abc", "--drafter", "none", *GENERATE).stdout


def test_compare_prints_a_table_and_json(tiny, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc abc abc\nto be or not to be\n")
    arguments = ["compare", tiny, "none", "prompt-lookup:gamma=2|4", "--prompts", prompts, "--max-new-tokens", 6]
    text = good(*arguments).stdout
    lines = text.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["none", "prompt-lookup:gamma=2", "prompt-lookup:gamma=4"]
    assert "tokens/s" in lines[0] and "same text" in lines[0]
    data = json.loads(good(*arguments, "--json", "--limit", 1, "--temperature", 0, "--temperature", 1).stdout)
    assert [(row["temperature"], row["drafter"], row["cells"]) for row in data["rows"]][3:] == [
        (1.0, "none", 1),
        (1.0, "prompt-lookup:gamma=2", 1),
        (1.0, "prompt-lookup:gamma=4", 1),
    ]


def test_a_packed_target_is_told_apart_in_a_study(tiny):
    options = ["--dtype", "float32", "--packed", "--limit", 1, "--max-new-tokens", 4, "--json"]
    data = json.loads(good("compare", tiny, "prompt-lookup", *options).stdout)
    assert {row["dtype"] for row in data["rows"]} == {"float32, packed"}
    assert data["rows"][1]["cells"] == 1
    assert data["rows"][1]["differing"] == 0


def test_compare_keeps_a_study_and_report_shows_it_again(tiny, tmp_path):
    place = tmp_path / "study"
    first = good("compare", tiny, "prompt-lookup", "--limit", 2, "--max-new-tokens", 4, "--out", place)
    assert str(place / "index.html") in first.stderr.replace("\n", "")
    assert good("report", place).stdout == first.stdout
    assert "summarise" in good("report", place, "--by-category").stdout
    assert json.loads(good("report", place, "--json").stdout) == json.loads((place / "report.json").read_text())


def test_compare_exits_1_if_a_drafter_failed_throughout(tiny, tmp_path):
    other = save_tiny(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = dw("compare", tiny, f"draft-model:model={other}", "prompt-lookup", "--limit", 1, "--max-new-tokens", 4)
    assert done.exit_code == 1
    assert "VocabularyMismatch" in done.stderr
    assert "failed" in done.stdout and "prompt-lookup" in done.stdout


class Careless(Greedy):
    """Accepts whatever was drafted first: a fault."""

    def verify(self, proposal, logits, sources, positions):
        verdict = super().verify(proposal, logits, sources, positions)
        if not proposal.tree.width:
            return verdict
        first = proposal.tree.tokens[:, 0].tolist()
        tokens = [[first[row], *tokens[-1:]] for row, tokens in enumerate(verdict.tokens)]
        return Verdict([[0] for _ in tokens], tokens)


def test_verify_passes_sound_drafters_and_exits_1_on_faults(tiny, monkeypatch):
    arguments = ["verify", tiny, "prompt-lookup", "--limit", 2, "--max-new-tokens", 12]
    done = good(*arguments)
    assert done.stdout.splitlines()[-1].split()[:5] == ["prompt-lookup", "4", "4", "0", "0"]
    assert json.loads(good(*arguments, "--no-coupled", "--json").stdout)[1]["texts"] == 2

    def careless() -> Registry:
        registry = plugins.load_registry()
        del registry.rules._entries["greedy"]
        registry.register(type("Plugin", (), {"register_rules": hookimpl(_add_careless)})(), "careless")
        return registry

    monkeypatch.setattr(study_run, "load_registry", careless)
    failed = dw(*arguments, "--no-coupled")
    assert failed.exit_code == 1
    assert "differs at new token" in failed.stderr and "margin" in failed.stderr


def _add_careless(self, registry):
    registry.add("greedy", Careless)


def test_theory_predicts():
    lines = good("theory", "--alpha", "0.8", "--gamma", "4", "--c", "0.1").stdout.splitlines()
    assert lines[4].split() == ["4", "3.36", "2.40x", "0.287"]
    data = json.loads(good("theory", "--alpha", "0.4", "--c", "0.5", "--json").stdout)
    assert data["best_gamma"] == 0
    assert all(one["speedup"] < 1 for one in data["predictions"])
    tree = json.loads(good("theory", "--by-rank", "0.6,0.2", "--nodes", "3", "--c", "0.1", "--json").stdout)
    assert (tree["parents"], tree["depth"]) == ([-1, 0, 1], 3)
    assert tree["speedup"] == pytest.approx(tree["tokens"] / 1.3) == pytest.approx(2.176 / 1.3)
    assert "depth 3, 2.18 tokens a round" in good("theory", "--by-rank", "0.6,0.2", "--nodes", "3").stdout
    assert "do not draft" in good("theory", "--alpha", "0.4", "--c", "0.5").stdout


def model_without_tokenizer(tmp_path):
    return save_tiny(tmp_path / "model", tokenizer=False)


def unsupported(tmp_path):
    place = tmp_path / "t5"
    place.mkdir()
    (place / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    return place


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nowhere/model", "x"], "/nowhere/model"),
        (["generate", model_without_tokenizer, "x"], "no tokenizer in"),
        (["generate", unsupported, "x"], "cannot load"),
        (["generate", "MODEL", ""], "the prompt is empty"),
        (["generate", "MODEL", "x", "--drafter", "nope"], "no drafter 'nope'"),
        (["generate", "/nowhere/model", "x", "--drafter", "nope"], "no drafter 'nope'"),
        (["generate", "MODEL", "x", "--rule", "nope"], "no rule 'nope'"),
        (["generate", "MODEL", "x", "--option", "gama=3"], "did you mean 'gamma'"),
        (["generate", "/nowhere/model", "x", "--rule", "nope"], "no rule 'nope'"),
        (["generate", "MODEL", "x", "--option", "gamma"], "key=value"),
        (["generate", "MODEL", "x", "--option", "gamma.x=3"], "gamma must be a whole number >= 1, got {'x': 3}"),
        (["generate", "MODEL", "x", "--option", "gamma=3", "--option", "gamma.x=3"], "gamma or gamma.x, not both"),
        (["generate", "MODEL", "x", "--temperature", "0", "--setting", "temperature=1"], "temperature is given twice"),
        (["generate", "MODEL", "x", "--stop", "a", "--setting", "stop_strings=b"], "stop_strings is given twice"),
        (["generate", "MODEL", "x", "--max-new-tokens", "3", "--setting", "max_length=9"], "not both"),
        (["generate", "MODEL", "x", "--device", "bogus"], "got 'bogus'"),
        (["generate", "MODEL", "x", "--option", "gamma=0"], "gamma must be a whole number >= 1, got 0"),
        (["generate", "MODEL", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (["generate", "MODEL", "x", "--max-new-tokens", "-3"], "-3"),
        (["generate", "MODEL", "x", "--max-new-tokens", "many"], "valid integer"),
        (["generate", "MODEL", "x", "--temperature", "-1"], "temperature must be a number"),
        (["generate", "MODEL", "x", "--rule", "greedy", "--temperature", "1"], "temperature"),
        (["generate", "MODEL", "x", "--setting", "top_q=1"], "top_q"),
        (["generate", "MODEL", "x" * 3000], "context"),
        (["generate", "MODEL", "x", "--dtype", "int9"], "int9"),
        (["generate", "MODEL", "x", "--nonsense"], "--nonsense"),
        (["generate", "MODEL"], "Missing argument"),
        (["nonsense"], "nonsense"),
        (["compare", "MODEL", "nope"], "no drafter 'nope'"),
        (["compare", "MODEL", "prompt-lookup:gamma"], "key=value"),
        (["compare", "MODEL", "--rule", "nope"], "no rule 'nope'"),
        (["compare", "MODEL", "--limit", "0"], "limit must be a whole number >= 1, got 0"),
        (["compare", "MODEL", "--batch-size", "-2"], "got -2"),
        (["compare", "MODEL", "--temperature", "-2"], "got -2"),
        (["compare", "MODEL", "--prompts", "/nowhere.jsonl"], "cannot read prompts"),
        (["compare", "/nowhere/model", "--limit", "1"], "/nowhere/model"),
        (["report", "/nowhere"], "no study at"),
        (["verify", "MODEL", "nope"], "no drafter 'nope'"),
        (["theory"], "either --alpha"),
        (["theory", "--by-rank", "0.6,x"], "acceptance by rank must be probabilities"),
        (["theory", "--alpha", "2"], "alpha must be in [0, 1], got 2"),
        (["theory", "--alpha", "0.5", "--c", "nan"], "c must be >= 0 and v > 0, both finite, got c=nan"),
        (["theory", "--alpha", "0.5", "--v", "inf"], "both finite, got c=0.0, v=inf"),
        (["theory", "--by-rank", "0.6,0.2", "--v", "0"], "c must be >= 0 and v > 0, both finite, got c=0.0, v=0.0"),
        (["theory", "--by-rank", "0.6", "--gamma", "3"], "--gamma is of chains"),
        (["theory", "--alpha", "0.5", "--nodes", "4"], "--nodes is of trees"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(tiny, tmp_path, arguments, message):
    known = {"MODEL": tiny}
    done = dw(*(one(tmp_path) if callable(one) else known.get(one, one) for one in arguments))
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.strip() and "Loading weights" not in line]
    assert len(lines) == 1 and lines[0].startswith("draftwood: "), done.stderr
    assert message in lines[0]
    assert done.stderr.startswith("draftwood: ") or arguments[0] == "generate", "an empty line came first"


@pytest.mark.parametrize(
    "command", [["generate"], ["compare"], ["synthesise", "--samples", "1"], ["search", "early-exit"]], ids=" ".join
)
def test_packed_reaches_the_target(tiny, tmp_path, command):
    """The tiny model is in float64, which cannot be packed."""
    more = {"generate": ["x"], "compare": ["none"]}.get(command[0], ["--out", tmp_path / "out"])
    done = dw(*command, tiny, *more, "--packed")
    assert done.exit_code == 2
    assert "packed=True needs float32" in done.stderr


def test_errors_of_several_lines_become_one(monkeypatch):
    def fail(*_, **__):
        raise DraftwoodError("one\n  two")

    monkeypatch.setattr(cli_study.theories, "best_gamma", fail)
    assert dw("theory", "--alpha", "0.5").stderr == "draftwood: one two\n"


def test_help_names_every_command():
    text = good("--help").stdout
    commands = ("drafters", "generate", "compare", "report", "verify", "theory", "synthesise")
    assert all(command in text for command in commands)


def test_an_interrupted_study_exits_130_and_goes_on(tiny, tmp_path):
    place = tmp_path / "study"
    arguments = ["compare", tiny, "prompt-lookup", "--out", str(place), "--max-new-tokens", "24", "--repeats", "60"]
    process = forked.start(forked.command_line, *arguments, output=tmp_path / "told")
    results = place / "results.jsonl"
    deadline = time.monotonic() + 300
    while not (results.exists() and results.read_bytes().count(b"\n") >= 2):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(300)
    output, errors = ((tmp_path / f"told.{name}").read_text() for name in ("out", "err"))
    assert process.exitcode == 130, errors
    assert output == "" and "Traceback" not in errors
    written = results.read_bytes()
    assert written.endswith(b"\n") and all(json.loads(line) for line in written.splitlines())
    before = written.count(b"\n")
    assert before < 720
    good("compare", tiny, "prompt-lookup", "--out", place, "--max-new-tokens", 24, "--limit", 2)
    assert results.read_bytes().startswith(written)
    assert os.path.getsize(results) == len(written)  # its first two cells were there already


def test_a_mistyped_setting_does_not_wait_for_the_model():
    refused = dw("generate", "/no/such/model", "hello", "--setting", "top_q=0.9")
    assert refused.exit_code == 2 and "top_q" in refused.stderr and "/no/such/model" not in refused.stderr
