"""Whole studies on a tiny model: what is measured, written down, resumed and shared."""

from __future__ import annotations

import json
import math
import threading
import time

import pytest

import draftwood
from draftwood.core.drafter import Drafter
from draftwood.core.errors import InvalidRequest, ModelNotFound, UnknownName
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.prompt_lookup import PromptLookup
from draftwood.study import theory
from draftwood.study.prompts import StudyPrompt, load_prompts
from draftwood.study.store import RESULTS
from draftwood.study.verification import verify_drafters

PROMPTS = ["abc abc abc", "to be or not to be", "1 2 3 4 1 2 3 4", "x"]


def compare(target, drafters=("prompt-lookup",), **options):
    return draftwood.compare(target, drafters, **{"prompts": PROMPTS, "max_new_tokens": 8} | options)


def runs_of(report, drafter):
    return [run for record in report.records for run in record["runs"] if run["drafter"] == drafter]


def test_every_drafter_runs_on_every_prompt_in_turn(tiny_target):
    report = compare(tiny_target, ["prompt-lookup", ("prompt-lookup", {"gamma": 2}), PromptLookup(gamma=3)])
    orders = [[run["drafter"] for run in record["runs"]] for record in report.records]
    names = ["none", "prompt-lookup", "prompt-lookup:gamma=2", "PromptLookup"]
    assert (
        orders
        == [
            [*names, "none"],  # plain decoding again, for the noise
            [*names[1:], *names[:1]],
            [*names[2:], *names[:2]],
            [*names[3:], *names[:3], "none"],
        ]
    )
    assert [row.drafter for row in report.rows] == names
    assert all(run["tokens"] == runs_of(report, "none")[0]["tokens"] for run in report.records[0]["runs"])
    assert all(row.cells == 4 and row.tokens == 4 * 7 for row in report.rows)
    assert report.noise is not None
    assert report.rows[0].peak_bytes > 50_000_000  # of the whole process


def test_records_say_where_they_were_made(tiny_target, tiny_directory):
    record = compare(tiny_target).records[0]
    environment = record["environment"]
    assert environment["versions"]["torch"] and environment["versions"]["transformers"]
    assert {"date", "commit", "machine", "processor", "cores", "threads", "device", "attention"} <= environment.keys()
    assert record["conditions"] == {
        "target": str(tiny_directory),
        "dtype": "float64",
        "rule": "auto",
        "temperature": 0.0,
        "batch_size": 1,
        "max_new_tokens": 8,
        "seed": 0,
        "chat": True,
    }


def test_the_chat_template_is_used_where_there_is_one(tiny_target):
    chat, raw = (compare(tiny_target, chat=chat, prompts=["abc"]).records[0]["runs"][0] for chat in (None, False))
    decoder = Decoder(tiny_target)
    assert raw["prompt_tokens"] == [3]
    assert chat["prompt_tokens"] == [len(decoder.encode([{"role": "user", "content": "abc"}]))]


@pytest.mark.parametrize("chat", [True, False])
def test_later_turns_read_plain_decodings_answers(tiny_target, chat):
    prompt = StudyPrompt("q", "c", ("abc", "def"))
    report = compare(tiny_target, prompts=[prompt], chat=chat)
    first, second = (run for run in runs_of(report, "none") if not run["again"])
    answer = tiny_target.tokenizer.decode(first["tokens"][0], skip_special_tokens=True)
    expected = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "def"},
    ]
    asked = Decoder(tiny_target).encode(expected if chat else f"abc\n{answer}\ndef")
    assert (first["turn"], second["turn"]) == (0, 1)
    assert second["prompt_tokens"] == [len(asked)]
    assert second["tokens"][0] == Decoder(tiny_target).generate(asked, max_new_tokens=8).tokens
    assert [run["prompt_tokens"] for run in runs_of(report, "prompt-lookup")] == [
        first["prompt_tokens"],
        second["prompt_tokens"],
    ]


def test_batches_are_full_and_keep_to_a_category_where_they_can(tiny_target):
    prompts = [StudyPrompt(f"{c}{i}", c, (f"{c} {i}",)) for c in "ab" for i in range(3)]
    report = compare(tiny_target, prompts=[*prompts, StudyPrompt("c0", "c", ("c",))], batch_sizes=(2,))
    assert [(record["category"], record["prompts"]) for record in report.records] == [
        ("a", ["a0", "a1"]),
        ("b", ["b0", "b1"]),
        ("mixed", ["a2", "b2"]),
        ("mixed", ["c0", "a0"]),
    ]
    assert all(len(run["tokens"]) == 2 for run in runs_of(report, "none"))


def test_conversations_of_equal_length_share_a_batch(tiny_target):
    prompts = [StudyPrompt(f"{i}", "c", ("a", "b")[:turns]) for i, turns in enumerate((1, 2, 1, 2))]
    report = compare(tiny_target, prompts=prompts, batch_sizes=(2,))
    assert [(record["prompts"], len(record["asked"])) for record in report.records] == [
        (["0", "2"], 1),
        (["1", "3"], 2),
    ]


def test_coupled_texts_are_compared_and_freely_drawn_ones_are_not(tiny_target):
    options = {"temperatures": (1.0,), "prompts": PROMPTS[:2]}
    coupled = compare(tiny_target, rules=("coupled",), **options)
    assert [row.same_text for row in coupled.rows if row.drafter != "none"] == ["yes"]
    drawn = compare(tiny_target, rules=("rejection",), **options)
    assert {row.same_text for row in drawn.rows} == {"-"}


def test_lossy_rules_are_marked(tiny_target):
    report = compare(tiny_target, rules=("typical",), temperatures=(1.0,), prompts=PROMPTS[:1])
    assert not any(row.lossless for row in report.rows)
    assert any("lossy" in note for note in report.notes())


def test_repeats_take_new_seeds(tiny_target):
    report = compare(tiny_target, repeats=2, temperatures=(1.0,), prompts=PROMPTS[:1])
    first, second = (record["runs"][0]["tokens"] for record in report.records)
    assert first != second
    again = Decoder(tiny_target, "none").generate(
        Decoder(tiny_target).encode([{"role": "user", "content": PROMPTS[0]}]),
        max_new_tokens=8,
        temperature=1.0,
        seed=1,
    )
    assert again.tokens in (run["tokens"][0] for run in report.records[1]["runs"] if run["drafter"] == "none")


class Refuses(Drafter):
    def bind(self, target):
        raise draftwood.VocabularyMismatch("two tongues")


class Breaks(Drafter):
    def propose(self, state):
        raise RuntimeError("out\nof memory")


def test_a_drafter_that_fails_is_a_row(tiny_target):
    report = compare(tiny_target, [Refuses(), Breaks(), "prompt-lookup"])
    refused, broken, fine = report.rows[1:]
    assert refused.errors == ("VocabularyMismatch: two tongues",)
    assert broken.errors == ("RuntimeError: out of memory",)
    assert (fine.cells, fine.errors) == (4, ())
    assert "Breaks: RuntimeError: out of memory" in report.notes()


def test_a_prompt_that_cannot_work_is_an_error_of_its_cell(tiny_target):
    report = compare(tiny_target, prompts=[[1, 2, 3], [1, 999]])
    assert all(row.cells == 1 and "999" in row.errors[0] for row in report.rows)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafters": ["nope"]}, UnknownName, "no drafter 'nope'"),
        ({"drafters": ["prompt-lookup:gama=2"]}, InvalidRequest, "did you mean 'gamma'"),
        ({"drafters": [("prompt-lookup", {"gamma": 0})]}, InvalidRequest, "gamma must be a whole number >= 1, got 0"),
        ({"rules": ["nope"]}, UnknownName, "no rule 'nope'"),
        ({"rules": "auto"}, InvalidRequest, "rules must be a non-empty list"),
        ({"rules": ["greedy"], "temperatures": [1.0]}, InvalidRequest, "no meaning at temperature 1"),
        ({"temperatures": [-1]}, InvalidRequest, "a temperature must be a number >= 0, got -1"),
        ({"temperatures": []}, InvalidRequest, "temperatures must be a non-empty list"),
        ({"batch_sizes": [0]}, InvalidRequest, "a batch size must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 0}, InvalidRequest, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"max_new_tokens": -5}, InvalidRequest, "max_new_tokens must be a whole number >= 1, got -5"),
        ({"repeats": 1.5}, InvalidRequest, "repeats must be a whole number >= 1"),
        ({"prompts": "missing.jsonl"}, InvalidRequest, "cannot read prompts"),
        ({"limit": 0}, InvalidRequest, "limit must be a whole number >= 1"),
        ({}, ModelNotFound, "/nowhere"),
    ],
)
def test_bad_requests_are_refused_before_a_model_is_loaded(options, error, message):
    with pytest.raises(error, match=message):
        compare("/nowhere/at/all", **options)


def test_a_study_goes_on_where_it_was_killed(tiny_target, tmp_path):
    class Killed(BaseException):
        pass

    def kill(done, total, what):
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        compare(tiny_target, directory=tmp_path, progress=kill)
    written = (tmp_path / RESULTS).read_bytes()
    assert written.count(b"\n") == 2
    seen = []
    report = compare(tiny_target, directory=tmp_path, progress=lambda *where: seen.append(where))
    everything = (tmp_path / RESULTS).read_bytes()
    assert everything.startswith(written)
    assert everything.count(b"\n") == 4 == len(report.records)
    assert seen[-1][:2] == (4, 4)
    compare(tiny_target, directory=tmp_path)
    assert (tmp_path / RESULTS).read_bytes() == everything


def test_a_drafter_added_later_is_paired_with_a_new_baseline(tiny_target, tmp_path):
    compare(tiny_target, directory=tmp_path)
    report = compare(tiny_target, ["prompt-lookup", "prompt-lookup:gamma=2"], directory=tmp_path)
    assert len(report.records) == 8
    assert [run["drafter"] for run in report.records[5]["runs"]] == ["prompt-lookup:gamma=2", "none"]
    assert [row.cells for row in report.rows] == [8, 4, 4]
    only = compare(tiny_target, ["prompt-lookup"], directory=tmp_path)
    assert [row.drafter for row in only.rows] == ["none", "prompt-lookup"]


def test_other_settings_are_other_cells(tiny_target, tmp_path):
    for options in ({}, {"max_new_tokens": 9}, {"seed": 1}, {"chat": False}, {"temperatures": (1.0,)}):
        compare(tiny_target, directory=tmp_path, prompts=["ab"], **options)
    keys = [json.loads(line)["key"] for line in (tmp_path / RESULTS).read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 5


def test_two_at_once_share_the_cells(tiny_target, tmp_path):
    reports = []
    threads = [
        threading.Thread(target=lambda: reports.append(compare(tiny_target, directory=tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    keys = [json.loads(line)["key"] for line in (tmp_path / RESULTS).read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 4
    assert [len(report.records) for report in reports] == [4, 4]


def test_measured_acceptance_follows_theory(tiny_target, tmp_path):
    alpha, gamma = 0.6, 3
    given = {"prompts": [[index, index + 1, 7] for index in range(20, 30)], "max_new_tokens": 50}
    compare(tiny_target, ["none"], directory=tmp_path, **given)
    oracle = ("oracle", {"continuation": str(tmp_path), "alpha": alpha, "gamma": gamma})
    row = compare(tiny_target, [oracle], **given).rows[1]
    assert row.same_text == "yes"
    rounds = row.tokens / row.tau
    assert rounds > 150
    expected = theory.expected_tokens(alpha, gamma)
    spread = math.sqrt(sum(alpha**k * (1 - alpha) * (k + 1 - expected) ** 2 for k in range(gamma)) + alpha**gamma)
    assert row.tau == pytest.approx(expected, abs=4 * spread / math.sqrt(rounds))
    assert row.theory.alpha == pytest.approx(alpha, abs=0.07)
    assert row.theory.tokens == pytest.approx(row.tau, rel=0.07)


@pytest.mark.parametrize(("alpha", "c", "helps"), [(0.8, 0.1, True), (0.4, 0.5, False)])
def test_measured_speedup_follows_theory(tiny_llama, tmp_path, monkeypatch, alpha, c, helps):
    """On a clock that knows passes and draft steps alone, theory is within the measured interval."""
    gamma, now, score = 4, [0.0], Target.score

    def clock():
        now[0] += 1e-5
        return now[0]

    def one_pass(self, *arguments, **options):
        now[0] += 0.01
        return score(self, *arguments, **options)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(Target, "score", one_pass)
    target = Target(tiny_llama)
    given = {"prompts": [[index, index + 1, 7] for index in range(20, 28)], "max_new_tokens": 32}
    compare(target, ["none"], directory=tmp_path, **given)
    oracle = ("oracle", {"continuation": str(tmp_path), "alpha": alpha, "gamma": gamma, "c": c})
    row = compare(target, [oracle], **given).rows[1]
    low, high = row.interval
    assert low <= row.theory.speedup <= high
    # A text's end cuts its last drafts short, which the formula does not know.
    assert row.speedup == pytest.approx(theory.speedup(alpha, gamma, c), rel=0.2)
    assert (row.theory.c, row.theory.v) == pytest.approx((c, 1.0), rel=0.02)
    assert row.theory.speedup == pytest.approx(row.speedup, rel=0.1)
    assert (low > 1) is helps and (high < 1) is not helps and (row.theory.alpha > row.theory.break_even) is helps


def test_an_oracle_of_a_study_prefers_greedy_and_long_texts(tiny_target, tmp_path):
    for options in ({"temperatures": (1.0,)}, {"max_new_tokens": 12}, {"max_new_tokens": 3}):
        compare(tiny_target, directory=tmp_path, **options)
    for place in (tmp_path, tmp_path / RESULTS):
        report = compare(tiny_target, [("oracle", {"continuation": str(place), "gamma": 2})], max_new_tokens=12)
        assert report.rows[1].acceptance_by_depth == [1.0, 1.0]
    (tmp_path / RESULTS).write_text(json.dumps({"runs": [{"drafter": "none", "tokens": [[1]], "turn": 0}]}) + "\n")
    with pytest.raises(InvalidRequest, match=f"{RESULTS}, line 1: no record of a study with its prompts"):
        compare(tiny_target, [("oracle", {"continuation": str(tmp_path)})])


def test_verification_tells_faults_from_near_ties(tiny_target):
    (fine,) = (
        one for one in verify_drafters(tiny_target, prompts=PROMPTS[:2], max_new_tokens=8) if one.drafter != "none"
    )
    assert (fine.texts, fine.near_ties, fine.faults, fine.ok) == (4, [], [], True)
    broken = verify_drafters(tiny_target, [Breaks()], prompts=PROMPTS[:1], max_new_tokens=8, coupled=False)[1]
    assert not broken.ok
    assert broken.errors == ("RuntimeError: out of memory",)


def test_packaged_prompts_fit_any_study(tiny_target):
    report = draftwood.compare(tiny_target, prompts=[load_prompts(limit=1), load_prompts(["abc"])], max_new_tokens=2)
    assert {row.prompt_set for row in report.rows} == {"packaged", "list"}
