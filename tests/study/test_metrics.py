"""Rows from records made by hand, so that every figure can be told in advance."""

from __future__ import annotations

import pytest

from draftwood.study import metrics
from draftwood.study.metrics import noise, rows
from draftwood.study.report import Report
from tests.study.records import record, run


def row_of(records, drafter, **options):
    return next(row for row in rows(records, **options) if row.drafter == drafter)


def test_figures_of_one_cell():
    plain = run("none", total=10.5, prefill=0.5, verify=9.0, draft=0.2, rounds=10, committed=10)
    own = run(
        "x", total=5.5, prefill=0.5, verify=4.0, draft=0.5, rounds=4, committed=10, drafted=16,
        drafted_by_depth=[4, 4, 4], accepted_by_depth=[3, 2, 1], tried_by_rank=[10, 4], accepted_by_rank=[5, 1],
        passes=[[4, 3, 3.0], [5, 1, 1.5]],
    )  # fmt: skip
    row = row_of([record(plain, own)], "x")
    assert (row.cells, row.tokens) == (1, 10)
    assert row.tokens_per_second == pytest.approx(10 / 5.0)
    assert row.speedup == pytest.approx(10.0 / 5.0)
    assert row.interval is None
    assert row.tau == pytest.approx(2.5)
    assert row.acceptance_by_depth == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert row.acceptance_by_rank == pytest.approx([0.5, 0.25])
    assert row.drafted_by_round == 4
    assert row.prefill_seconds == 0.5
    assert row.seconds_per_round == pytest.approx(
        {"draft": 0.125, "verify": 1.0, "accept": 0, "commit": 0, "other": 0.125}
    )
    assert row.seconds_by_width == pytest.approx({4: 1.0, 5: 1.5})
    theory = row.theory
    assert theory.alpha == pytest.approx(6 / 9)  # 3 of 4, 2 of 3, 1 of 2
    assert theory.gamma == pytest.approx(3.0)
    assert theory.c == pytest.approx(0.5 / 12 / 0.9)
    assert theory.v == pytest.approx(1.0 / 0.9)
    assert theory.tokens == pytest.approx(1 + 2 / 3 + 4 / 9 + 8 / 27)
    assert theory.speedup == pytest.approx(theory.tokens / (3 * theory.c + theory.v))
    assert theory.break_even == pytest.approx(0.2, abs=0.1)
    base = row_of([record(plain, own)], "none")
    assert (base.speedup, base.tau, base.theory) == (1.0, 1.0, None)


def test_speedup_is_of_totals_per_token():
    # Sampled texts differ in length: 10 tokens in 10 s against 20 tokens in 10 s is twice the speed.
    records = [record(run("none", total=10, committed=10), run("x", total=10, committed=20))]
    assert row_of(records, "x").speedup == pytest.approx(2.0)
    # Totals, not a mean of ratios: (10 + 90) / (5 + 90), not (2 + 1) / 2.
    records = [
        record(run("none", total=10, committed=10), run("x", total=5, committed=10)),
        record(run("none", total=90, committed=90), run("x", total=90, committed=90)),
    ]
    assert row_of(records, "x").speedup == pytest.approx(100 / 95)


def test_intervals_cover_the_speedup_and_need_enough_cells():
    records = [
        record(run("none", total=10 + index % 3, committed=10), run("x", total=5, committed=10), prompt=index)
        for index in range(12)
    ]
    assert row_of(records[:4], "x").interval is None
    row = row_of(records, "x")
    low, high = row.interval
    assert 2.0 <= low < row.speedup < high <= 2.4
    same = [record(run("none", total=10, committed=10), run("x", total=5, committed=10), prompt=i) for i in range(6)]
    assert row_of(same, "x").interval == pytest.approx((2.0, 2.0))


def test_repeating_prompts_does_not_narrow_an_interval():
    def once(count):
        return [
            record(run("none", total=10 + 5 * index, committed=10), run("x", total=9, committed=10), prompt=index)
            for index in range(count)
        ]

    assert row_of(once(6) * 9, "x").interval == row_of(once(6), "x").interval
    assert row_of(once(4) * 9, "x").interval is None, "four prompts stay four"


def test_cells_in_which_either_failed_count_for_neither():
    failed = {"drafter": "x", "turn": 0, "error": "RuntimeError: boom"}
    records = [
        record(run("none", total=10, committed=10), run("x", total=5, committed=10)),
        record(run("none", total=99, committed=10), failed),
    ]
    row = row_of(records, "x")
    assert (row.cells, row.speedup, row.errors) == (1, 2.0, ("RuntimeError: boom",))
    only = row_of(records[1:], "x")
    assert (only.cells, only.tau, only.speedup) == (0, None, None)
    assert "failed" in str(Report(records[1:]))


def test_repeated_plain_runs_measure_noise_and_nothing_else():
    again = run("none", total=20, committed=10, again=True)
    records = [record(run("none", total=10, committed=10), run("x", total=5, committed=10), again)]
    assert row_of(records, "x").speedup == 2.0
    assert row_of(records, "none").tokens == 10
    assert noise(records) == pytest.approx(0.693, abs=1e-3)
    report = Report(records)
    assert report.noisy
    assert any("noisy" in note for note in report.notes())
    assert noise([record(run("none"))]) is None


def test_conditions_and_categories_are_kept_apart():
    records = [
        record(run("none", total=10), run("x", total=5), category="a"),
        record(run("none", total=10), run("x", total=2), category="b"),
        record(run("none", total=10), run("x", total=10), category="b", temperature=1.0),
    ]
    assert [row.speedup for row in rows(records) if row.drafter == "x"] == pytest.approx([20 / 7, 1.0])
    by_category = [row for row in rows(records, by_category=True) if row.drafter == "x"]
    assert [(row.category, row.temperature, row.speedup) for row in by_category] == [
        ("a", 0.0, 2.0),
        ("b", 0.0, 5.0),
        ("b", 1.0, 1.0),
    ]


def test_a_cell_run_in_two_parts_pairs_each_part_with_its_own_baseline():
    records = [
        record(run("none", total=10), run("x", total=5)),
        record(run("none", total=20), run("y", total=5)),
    ]
    assert row_of(records, "x").speedup == 2.0
    assert row_of(records, "y").speedup == 4.0


def test_agreement_is_the_worst_of_all_texts():
    tie = {"verdict": "near-tie", "position": 3, "margin": 0.01, "noise": 0.02}
    same = {"verdict": "yes", "position": None, "margin": None, "noise": None}
    records = [
        record(run("none"), run("x", agreement=[same, tie])),
        record(run("none"), run("x", agreement=[same, same])),
    ]
    row = row_of(records, "x")
    assert (row.same_text, row.differing) == ("near-tie (0.01)", 1)
    fault = [record(run("none"), run("x", agreement=[{**tie, "verdict": "no", "margin": 2.5}]))]
    assert row_of([*records, *fault], "x").same_text == "no (2.5)"
    assert row_of([record(run("none"), run("x"))], "x").same_text == "-"


def test_texts_of_one_token_have_no_speed():
    records = [record(run("none", total=1, prefill=1, rounds=0, committed=0), run("x", rounds=0, committed=0))]
    row = row_of(records, "x")
    assert (row.tokens_per_second, row.speedup, row.tau) == (None, None, None)
    assert str(Report(records))


def test_intervals_do_not_depend_on_how_many_samples_are_drawn_at_once(monkeypatch):
    records = [
        record(run("none", total=5 + place % 3), run("x", total=3 + place % 4), prompt=place) for place in range(12)
    ]
    whole = row_of(records, "x").interval
    assert whole[0] < whole[1]
    for few in (1, 50):
        monkeypatch.setattr(metrics, "RESAMPLES_AT_ONCE", few)
        assert row_of(records, "x").interval == whole


def test_the_most_memory_counts_and_one_lossy_record_makes_a_row_lossy():
    records = [
        record(run("none"), run("x", peak_bytes=peak), prompt=place) for place, peak in enumerate([5, None, 9, 7])
    ]
    assert row_of(records, "x").peak_bytes == 9
    assert row_of(records, "none").peak_bytes is None
    assert row_of(records, "x").lossless
    records[1]["lossless"] = False
    assert not row_of(records, "x").lossless
