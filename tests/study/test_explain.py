"""The explorer's pages: they need nothing else, no text can break them, and their simulation agrees with theory."""

from __future__ import annotations

import copy
import html
import itertools
import json
import re
import shutil
import subprocess

import pytest

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from draftwood.study.explain import explain_parameters, explain_trace
from draftwood.study.theory import expected_tokens, speedup
from draftwood.study.trace import record
from tests.study.browser import needs_browser
from tests.study.tiny import tiny_tokenizer

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
NASTY = '</script><script>document.title = "broken"</script><!-- & \u2028 "\'@style@'


@pytest.fixture(scope="module")
def trace(tiny_llama, tinier_llama):
    decoder = Decoder(
        Target(tiny_llama, tiny_tokenizer()), DraftModel(model=Target(tinier_llama), tree=(2, 2)), rule="rejection"
    )
    settings = {"temperature": 1.0, "max_new_tokens": 12, "eos_token_id": []}
    return record(
        decoder, ["abc abc", "</script>"], about={"drafter": "draft-model", "model": "tiny"}, **settings
    ).trace


@pytest.fixture(scope="module")
def nasty(trace):
    changed = copy.deepcopy(trace)
    for row in (*changed["rows"], *changed["plain"]["rows"]):
        row["prompt_text"] = NASTY
        row["pieces"][3] = NASTY
    changed["settings"]["model"] = NASTY
    for one in changed["rounds"]:
        for entry in one["rows"]:
            entry["tree"]["text"] = [NASTY for _ in entry["tree"]["text"]]
    return changed


def held(page: str):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(data)


def node(page: str, code: str):
    """Runs the page's own script, then `code`, and returns what that prints as JSON."""
    (script,) = re.findall(r'<script id="code">(.*?)</script>', page, re.S)
    done = subprocess.run(["node", "-"], input=script + code, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["recorded", "simulated", "nasty"])
def test_a_page_needs_nothing_else(kind, trace, nasty):
    page = {"recorded": trace, "nasty": nasty}.get(kind)
    page = explain_parameters() if page is None else explain_trace(page)
    assert not re.search(
        r"https?:|//[a-z]|\bsrc=|\bhref=|url\(|@import|\bfetch\(|XMLHttp|innerHTML", re.sub(r"// .*", "", page)
    )
    assert "default-src 'none'" in page
    assert page.count("</script>") == page.count("<script") == 2 and "<!--" not in page
    assert not re.search(r"@(title|data|script)@", page)


def test_the_page_holds_the_recording_whole(trace, nasty):
    assert held(explain_trace(trace)) == {"trace": trace}
    page = explain_trace(nasty)
    assert held(page) == {"trace": nasty}
    assert f"<h1>Speculative decoding, step by step: draft-model on {html.escape(NASTY)}</h1>" in page
    assert held(explain_parameters(0.4, 3, 0.5)) == {"parameters": {"alpha": 0.4, "gamma": 3, "c": 0.5}}


@needs_node
def test_the_simulation_agrees_with_theory():
    cases = [(0.0, 3, 0.2), (0.4, 4, 0.5), (0.7, 4, 0.1), (0.8, 2, 0.05), (0.95, 8, 0.0), (1.0, 5, 0.3), (0.5, 0, 0.3)]
    code = f"""
    const found = {json.dumps(cases)}.map(([alpha, gamma, c]) => {{
      const rounds = model.simulate(alpha, gamma, c, 60000, 7);
      const counts = rounds.slice(0, -gamma - 1).map((one) => one.count);
      const right = rounds.slice(0, -gamma - 1).every((one) => one.right.length === gamma);
      const theory = [model.expectedTokens(alpha, gamma), model.expectedSpeedup(alpha, gamma, c)];
      return [counts, right, model.endOf(rounds), ...theory];
    }});
    console.log(JSON.stringify(found));"""
    for (alpha, gamma, c), (counts, full, end, tokens, gain) in zip(
        cases, node(explain_parameters(), code), strict=True
    ):
        assert [tokens, gain] == pytest.approx([expected_tokens(alpha, gamma), speedup(alpha, gamma, c)])
        mean = sum(counts) / len(counts)
        error = (sum((count - mean) ** 2 for count in counts) / len(counts) / len(counts)) ** 0.5
        assert full and abs(mean - expected_tokens(alpha, gamma)) <= 4 * error + 1e-12
        assert error < 0.01 * mean
        assert 60000 / end == pytest.approx(speedup(alpha, gamma, c), rel=4 * error / mean + 1e-3)


@needs_node
def test_speculation_finishes_last_where_it_must_and_first_where_it_should():
    code = """
    const ends = ([alpha, gamma, c]) => Array.from({ length: 30 }, (_, seed) => {
      const run = model.fromSimulation(alpha, gamma, c, 48, seed + 1);
      const committed = run.rounds.reduce((sum, one) => sum + one.count, 0);
      return [model.endOf(run.rounds), model.endOf(run.plain), committed, run.plain.length];
    });
    console.log(JSON.stringify([[0.4, 4, 0.5], [0.8, 4, 0.05]].map(ends)));"""
    losing, winning = node(explain_parameters(), code)
    assert all(mine > plain for mine, plain, _, _ in losing)
    assert all(mine < plain for mine, plain, _, _ in winning)
    assert all(committed == passes == 48 for _, _, committed, passes in (*losing, *winning))


@needs_node
def test_the_page_sees_the_run_that_was_recorded(trace):
    code = f"""
    const trace = {json.dumps(trace)};
    console.log(JSON.stringify(trace.rows.map((row) => {{
      const run = model.fromTrace(trace, row.row);
      return {{ run, steps: model.stepsOf(run) }};
    }})));"""
    for row, seen in zip(trace["rows"], node(explain_trace(trace), code), strict=True):
        run, steps = seen["run"], seen["steps"]
        assert run["same"] == (row["tokens"] == trace["plain"]["rows"][row["row"]]["tokens"])
        assert run["pieces"] == row["pieces"] and run["prompt"] == row["prompt_text"]
        for rounds, tokens in (
            (run["rounds"], row["tokens"]),
            (run["plain"], trace["plain"]["rows"][row["row"]]["tokens"]),
        ):
            firsts = [0, *itertools.accumulate(one["count"] for one in rounds)]
            assert [one["first"] for one in rounds] == firsts[:-1] and firsts[-1] == len(tokens)
            assert all(one["begin"] <= one["drafted"] <= one["end"] for one in rounds)
        assert [one["prompt"] for one in run["rounds"]] == [True] + [False] * (len(run["rounds"]) - 1)
        times = [one["time"] for one in steps]
        assert times == sorted(times) and times[-1] == max(run["rounds"][-1]["end"], run["plain"][-1]["end"])
        assert [one["round"] for one in steps if one["phase"] == "verdict"] == list(range(len(run["rounds"])))


@needs_node
def test_no_two_nodes_of_a_tree_lie_on_each_other():
    trees = [[-1], [-1, 0, 1], [-1, -1, 0, 0, 1, 1, 4], [-1, 0, 0, 0, 2, 2, -1, 6], []]
    code = f"console.log(JSON.stringify({json.dumps(trees)}.map(model.layout)))"
    for parents, spot in zip(trees, node(explain_parameters(), code), strict=True):
        assert len(set(zip(spot["level"], spot["line"], strict=True))) == len(parents)
        for child, parent in enumerate(parents):
            assert spot["level"][child] == (1 if parent < 0 else spot["level"][parent] + 1)
        leaves = [spot["line"][one] for one in range(len(parents)) if one not in parents]
        assert sorted(leaves) == list(range(len(leaves)))


PROBE = """
  const spans = [...document.querySelectorAll("#text span:not(.prompt)")].map((one) => one.textContent);
  return { now: document.getElementById("now").textContent, at: Number(document.getElementById("cursor").value),
    end: Number(document.getElementById("cursor").max), facts: document.getElementById("facts").textContent, spans,
    scripts: document.scripts.length, shown: document.querySelectorAll("#tree .node, #tree .box").length };"""
RIGHT, END = "\ue014", "\ue010"


@pytest.fixture(scope="module")
def pages(nasty, tmp_path_factory):
    place = tmp_path_factory.mktemp("pages")
    (place / "recorded.html").write_text(explain_trace(nasty), encoding="utf-8")
    (place / "simulated.html").write_text(explain_parameters(0.8, 4, 0.05), encoding="utf-8")
    return place


@needs_browser
@pytest.mark.parametrize("kind", ["recorded", "simulated"])
def test_a_person_steps_through_it_in_a_browser(pages, nasty, browser, kind):
    browser.open(pages / f"{kind}.html")
    before = browser.run(PROBE)
    assert before["at"] == 0 and before["spans"] == [] and before["scripts"] == 2, "a token became markup"
    seen = {before["now"]}
    for step in range(1, before["end"] + 1):
        if step % 2:
            browser.click("#next")
        else:
            browser.run("document.activeElement.blur()")
            browser.press(RIGHT)
        now = browser.run(PROBE)
        assert now["at"] == step
        seen.add(now["now"])
        if step == 3:
            browser.check_layout()
    assert len(seen) == before["end"] + 1 > 5
    if kind == "recorded":
        assert now["spans"] == nasty["rows"][0]["pieces"]
    else:
        assert len(now["spans"]) == 48
    browser.check_layout()
    browser.click("#first")
    assert browser.run(PROBE) == before | {"at": 0}


@needs_browser
def test_sliders_show_where_speculation_finishes_last(pages, browser):
    browser.open(pages / "simulated.html")
    assert "finishes last" not in browser.run(PROBE)["facts"]
    for name, value in (("alpha", 0.4), ("c", 0.5)):
        browser.run(
            f"const knob = document.getElementById('{name}'); knob.value = {value};"
            "knob.dispatchEvent(new Event('input', { bubbles: true }));"
        )
    browser.press(END)
    found = browser.run(PROBE)
    assert found["at"] == found["end"] and len(found["spans"]) == 48
    assert "speculation finishes last" in found["facts"]
    assert f"{speedup(0.4, 4, 0.5):.2f}x" in found["facts"], "what theory says"
    browser.check_layout()


def test_a_damaged_recording_is_refused(trace):
    def without(path, value=None):
        broken = copy.deepcopy(trace)
        *way, last = path
        place = broken
        for key in way:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
        return broken

    entry = ["rounds", 2, "rows", 0]
    for path, value in (
        (["rows"], []),
        (["rule"], None),
        (["rows", 0, "tokens"], [1]),
        (["rows", 0, "pieces"], ["a"]),
        (["rounds", 2, "at"], -1.0),
        (["rounds", 1, "rows"], 7),
        ([*entry, "committed"], [1, 2]),
        ([*entry, "path"], [3, 1]),
        ([*entry, "tree", "p"], [0.5]),
        ([*entry, "tree", "parents"], None),
        (["plain", "rounds", 0, "rows"], []),
    ):
        with pytest.raises(InvalidRequest, match="the recording is damaged"):
            explain_trace(without(path, value))
    explain_trace({**trace, "plain": None})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.2}, "alpha must be"),
        ({"gamma": -1}, "gamma must be"),
        ({"gamma": 17}, "gamma must be at most 16 on the page, got 17"),
        ({"c": 2.5}, "c must be"),
        ({"c": float("nan")}, "c must be"),
    ],
)
def test_parameters_that_cannot_work(options, message):
    with pytest.raises(InvalidRequest, match=message):
        explain_parameters(**options)
