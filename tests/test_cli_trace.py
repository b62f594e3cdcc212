"""`generate --trace` and `explain`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.study.trace import VERSION, load_trace
from tests.study.tiny import save_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def dw(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def good(*arguments):
    done = dw(*arguments)
    assert done.exit_code == 0, done.stderr
    return done


GENERATE = ["--max-new-tokens", "12"]


def test_a_run_is_recorded_and_explained(tiny, tmp_path):
    run = tmp_path / "run.json"
    alone = json.loads(good("generate", tiny, "abc abc", *GENERATE, "--json").stdout)
    done = good("generate", tiny, "abc abc", *GENERATE, "--trace", run)
    assert done.stdout == alone["text"] + "\n" and str(run) in done.stderr
    trace = load_trace(run)
    assert trace["rows"][0]["tokens"] == trace["plain"]["rows"][0]["tokens"] == alone["tokens"]
    assert trace["settings"]["drafter"] == "prompt-lookup" and trace["settings"]["max_new_tokens"] == 12
    again = json.loads(good("generate", tiny, "abc abc", *GENERATE, "--json", "--trace", run).stdout)
    assert again["tokens"] == alone["tokens"] and again["stats"]["tau"] == alone["stats"]["tau"]
    assert good("explain", run).stdout == f"{tmp_path / 'run.html'}\n"
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "prompt-lookup" in page and load_trace(run) == trace | {
        name: load_trace(run)[name] for name in ("rounds", "seconds", "plain", "environment")
    }
    good("explain", run, "--out", tmp_path / "other.html")
    assert (tmp_path / "other.html").read_text(encoding="utf-8") == page


def test_the_oracle_replays_a_recording(tiny, tmp_path):
    run = tmp_path / "run.json"
    good("generate", tiny, "abc", *GENERATE, "--trace", run, "--drafter", "none")
    options = ["--drafter", "oracle", "--option", f"continuation={run}", "--option", "gamma=3", "--json"]
    stats = json.loads(good("generate", tiny, "abc", *GENERATE, *options).stdout)["stats"]
    assert stats["rounds"] == 3 and stats["accepted_by_depth"] == [3, 3, 2]


def test_a_page_from_parameters_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert good("explain", "--alpha", "0.4", "--c", "0.5").stdout == "explain.html\n"
    assert '"alpha":0.4,"gamma":4,"c":0.5' in (tmp_path / "explain.html").read_text(encoding="utf-8")


def test_what_cannot_work_is_one_line_and_exit_2(tiny, tmp_path):
    (tmp_path / "text.txt").write_text("no recording")
    (tmp_path / "old.json").write_text(json.dumps({"format": "draftwood-trace", "version": VERSION - 1}))
    good("generate", tiny, "abc", "--max-new-tokens", "2", "--trace", tmp_path / "run.json")
    for arguments, message in (
        (["explain"], "give a recording"),
        (["explain", tmp_path / "missing.json"], "no recording at"),
        (["explain", tmp_path / "text.txt"], "is no recording of"),
        (["explain", tmp_path / "old.json"], f"of version {VERSION - 1}"),
        (["explain", tmp_path / "run.json", "--alpha", "0.5"], "a recording or --alpha, not both"),
        (["explain", tmp_path / "run.json", "--out", tmp_path / "run.json"], "would overwrite the recording"),
        (["explain", tmp_path / "run.json", "--out", tmp_path], "cannot write the page"),
        (["explain", "--alpha", "3"], "alpha must be a number in [0, 1], got 3"),
        (["explain", "--gamma", "40"], "gamma must be at most 16"),
        (["generate", "/nowhere/model", "abc", "--trace", tmp_path], "cannot write to"),
        (["generate", "/nowhere/model", "abc", "--trace", tmp_path / "no" / "run.json"], "cannot write to"),
    ):
        done = dw(*arguments)
        assert done.exit_code == 2 and done.stdout == "", done.stdout
        assert done.stderr.count("\n") == 1 and message in done.stderr, done.stderr
    load_trace(tmp_path / "run.json")
