"""What a report writes; the page is looked at in a real browser where there is one."""

from __future__ import annotations

import html.parser
import importlib
import json
import re
import shutil
import sys
import tracemalloc
import xml.etree.ElementTree as ElementTree

import pytest

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.study import plots
from draftwood.study.export import Grid, markdown
from draftwood.study.report import Report
from tests.study.browser import needs_browser
from tests.study.records import record, run

NASTY = "x:path=<b>a_b&c|d%$x$</b>"
COUNTS = {
    "drafted": 20,
    "drafted_by_depth": [10, 10],
    "accepted_by_depth": [6, 3],
    "tried_by_rank": [10, 5],
    "accepted_by_rank": [6, 1],
    "passes": [[3, 10, 0.9]],
}


def study(categories="ab", temperatures=(0.0, 1.0)) -> Report:
    plain = {"verify": 1.0, "passes": [[1, 10, 1.0]]}
    return Report(
        [
            record(
                run("none", total=1.0, **plain),
                run(NASTY, total=0.5 + index / 100, verify=0.4, draft=0.01, **COUNTS),
                {"drafter": "broken", "turn": 0, "error": "ValueError: <script>alert(1)</script>"},
                category=category,
                temperature=temperature,
                rule="typical" if temperature else "auto",
                prompt=f"{category}{index}",
            )
            for temperature in temperatures
            for category in categories
            for index in range(5)
        ]
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    assert study().save(place) == place / "index.html"
    return place


class Checker(html.parser.HTMLParser):
    """Collects what a page refers to, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.references, self.tags, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_no_other_file(saved):
    checker = Checker()
    checker.feed((saved / "index.html").read_text())
    assert checker.open == []
    assert checker.references
    assert all(reference.startswith("data:image/svg+xml;base64,") for reference in checker.references)
    assert "script" not in checker.tags
    assert "b" in checker.tags  # of captions, none of a drafter's name
    assert any(NASTY in text for text in checker.text)
    assert checker.tags.count("section") == 2
    assert {"predicted speedup", "pays from alpha"} <= set(checker.text)
    assert not list(saved.glob(".*"))


def test_every_figure_is_there_as_svg_and_png(saved):
    for name in ("speedup", "acceptance", "rank", "time", "width", "theory"):
        for number in (1, 2):
            svg = ElementTree.parse(saved / f"{name}-{number}.svg").getroot()
            assert svg.tag.endswith("svg")
            assert (saved / f"{name}-{number}.png").read_bytes().startswith(b"\x89PNG")
    texts = "".join(ElementTree.parse(saved / "speedup-1.svg").getroot().itertext())
    assert NASTY in texts
    assert "2.0" in texts


def test_tables_are_escaped(saved):
    lines = (saved / "table.md").read_text().splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert len(lines) == 2 + 6
    assert any(r"x:path=\<b\>a_b&c\|d%$x$\</b\>" in line for line in lines)
    latex = (saved / "table.tex").read_text()
    assert r"\textless{}b\textgreater{}a\_b\&c\textbar{}d\%\$x\$" in latex
    assert latex.count(r"\\") == 1 + 6
    assert len({line.count(" & ") for line in latex.splitlines() if line.endswith(r"\\")}) == 1


def test_markdown_shows_names_as_they_are():
    names = ["max_ngram=2", "_a_/b_", "~/*`[x](y)", "a+b=c"]
    lines = markdown(Grid(["drafter"], [[name] for name in names], 1)).splitlines()
    assert lines[2:] == ["| max_ngram=2 |", r"| \_a\_/b\_ |", r"| \~/\*\`\[x\](y) |", "| a+b=c |"]


def test_json_and_records_read_back(saved):
    data = json.loads((saved / "report.json").read_text())
    row = next(row for row in data["rows"] if row["drafter"] == NASTY)
    assert row["speedup"] == pytest.approx(1 / 0.52)
    assert data["rows"][2]["errors"] == ["ValueError: <script>alert(1)</script>"]
    again = Report.load(saved)
    assert again.records == study().records
    assert again.to_json() == study().to_json()


def test_saving_again_does_not_touch_the_records(saved, tmp_path):
    shutil.copy(saved / "results.jsonl", tmp_path)
    study(categories="a", temperatures=(0.0,)).save(tmp_path)
    assert (tmp_path / "results.jsonl").read_bytes() == (saved / "results.jsonl").read_bytes()
    assert (tmp_path / "speedup.svg").exists()  # one set of conditions needs no numbers


def test_a_report_outlives_the_directory_of_its_study(saved, tmp_path):
    shutil.copy(saved / "results.jsonl", tmp_path)
    report = Report.load(tmp_path)
    shutil.rmtree(tmp_path)
    assert report.to_json() == study().to_json()
    assert str(report) == str(study())
    with pytest.raises(InvalidRequest, match="no study at"):
        report.save(tmp_path)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_a_report_keeps_its_records_whatever_the_caller_does_with_the_list():
    records = [record(run("none"), prompt=place) for place in range(3)]
    report = Report(records)
    records.pop()
    assert len(report.records) == report.rows[0].cells == 3
    assert Report(iter(records)).rows[0].cells == 2


def test_categories_may_have_any_name():
    report = Report([record(run("none"), category=name, prompt=name) for name in (None, "None", "a")])
    assert report.rows[0].cells == 3
    assert [(row.category, row.cells) for row in report.rows_by_category] == [(None, 1), ("None", 1), ("a", 1)]


def test_a_note_names_what_differs_between_environments_in_their_own_order():
    records = [record(run("none"), prompt=place) for place in range(3)]
    records[1]["environment"]["threads"] = 9
    records[2]["environment"] |= {"commit": "abc", "date": "2027-01-01T00:00:00+00:00", "new": 1}
    assert "measured under different commit, threads, new:" in " ".join(Report(records).notes())


def test_a_report_of_a_relative_place_follows_it_no_further(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "study")
    monkeypatch.chdir(tmp_path)
    report = Report.load("study")
    assert repr(report.records) == f"<{len(report.records)} records in {str(tmp_path / 'study' / 'results.jsonl')!r}>"
    monkeypatch.chdir("/")
    report.save(tmp_path / "copy")
    assert (tmp_path / "copy" / "results.jsonl").read_bytes() == (saved / "results.jsonl").read_bytes()


def test_a_long_study_is_summed_up_in_little_memory(tmp_path):
    def grown(prompts: int) -> int:
        with open(tmp_path / "results.jsonl", "w") as file:
            for place in range(prompts):
                one = record(*(run(name, tokens=[[place] * 64], agreement=[]) for name in ("none", "x")), prompt=place)
                file.write(json.dumps(one) + "\n")
        tracemalloc.start()
        report = Report.load(tmp_path)
        assert len(report.rows) == len(report.rows_by_category) == 2
        assert report.rows[1].cells == prompts
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    grown(50)  # what is loaded once
    assert (grown(1200) - grown(200)) / 1000 < 2500  # bytes a prompt; a record takes thirteen thousand


@pytest.mark.parametrize("lacks", ["environment", "temperature"])
def test_records_of_something_else_are_refused(tmp_path, lacks):
    whole = record(run("none"))
    del (whole if lacks in whole else whole["conditions"])[lacks]
    (tmp_path / "results.jsonl").write_text(json.dumps(whole) + "\n")
    with pytest.raises(InvalidCheckpoint, match=f"line 1: no record of a study, it lacks '{lacks}'"):
        Report.load(tmp_path)


def test_a_report_is_not_saved_over_another_study(saved, tmp_path):
    shutil.copy(saved / "results.jsonl", tmp_path)
    others = Report([{**record, "key": f"other {record['key']}"} for record in study().records])
    with pytest.raises(InvalidRequest, match="holds another study"):
        others.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl"]


def test_pandas_has_a_line_a_row():
    frame = study().to_pandas()
    assert len(frame) == 6
    assert frame.loc[1, "speedup"] == pytest.approx(1 / 0.52)
    assert frame.loc[1, "seconds_per_round.verify"] == pytest.approx(0.04)
    assert frame.loc[1, "theory.gamma"] == pytest.approx(2.0)
    assert len(study().to_pandas(by_category=True)) == 12


def test_text_and_notebook_show_the_table():
    text = str(study())
    assert "1.92x" in text and NASTY in text and "failed" in text
    shown = study()._repr_html_()
    assert "<table>" in shown and "&lt;script&gt;" in shown and "<script>" not in shown


def test_conditions_that_differ_are_named(tmp_path):
    report = Report(
        [record(run("none"), run("x"), **given) for given in ({}, {"max_new_tokens": 20}, {"seed": 1}, {"chat": True})]
    )
    assert len({tuple(line.split()[:4]) for line in str(report).splitlines()[1:9]}) == 8
    report.save(tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<section>") == 4 and "20 new tokens, seed 0, raw" in page and "seed 1, raw" in page


def test_an_error_is_said_once_with_the_conditions_it_came_under():
    failed = {"drafter": "x", "turn": 0, "error": "E: boom"}
    twice = [record(run("none"), failed, temperature=heat) for heat in (0.0, 1.0)]
    assert Report(twice).notes() == ["x: E: boom"]
    fine = record(run("none"), run("x"), temperature=2.0)
    assert Report([*twice, fine]).notes() == ["x (T 0; T 1): E: boom"]


def test_cells_of_different_machines_are_told():
    first, second = record(run("none")), record(run("none"))
    assert Report([first, second]).notes() == []
    second["environment"] |= {"threads": 8, "date": "2026-02-02T00:00:00+00:00", "commit": "abc"}
    assert "under different commit, threads:" in Report([first, second]).notes()[0]


def test_an_empty_report_can_be_shown(tmp_path):
    assert str(Report([]))
    Report([]).save(tmp_path)
    assert "<h1>" in (tmp_path / "index.html").read_text()


def test_without_matplotlib_the_page_says_so(saved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    importlib.reload(plots)
    Report.load(saved).save(tmp_path / "page")
    assert "matplotlib is not installed" in (tmp_path / "page" / "index.html").read_text()
    assert not list((tmp_path / "page").glob("*.svg"))


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot write the report to"):
        study().save(tmp_path / "file")


@needs_browser
def test_the_page_fits_a_desktop_and_a_phone(saved, browser):
    browser.open(saved / "index.html")
    browser.check_layout()
    assert browser.run("return document.images.length") == 12
    assert browser.run("return getComputedStyle(document.body).fontSize") == "16px"
    for index in range(browser.run("return document.querySelectorAll('summary').length")):
        browser.run(f"document.querySelectorAll('summary')[{index}].click()")
    assert browser.run("return document.querySelectorAll('details[open] table').length") == 6
    browser.check_layout()


@needs_browser
def test_long_names_leave_the_figures_of_a_table_in_sight(browser, tmp_path):
    name = "lookahead+prompt-lookup:lookahead.window=3,lookahead.ngram=3,prompt-lookup.gamma=12"
    Report([record(run("none"), run(name))]).save(tmp_path)
    browser.open(tmp_path / "index.html")
    seen = "name" if browser.width < 500 else "number:last-child"
    right = browser.run(f"return document.querySelector('td.{seen}').getBoundingClientRect().right")
    assert right < (browser.width / 2 if browser.width < 500 else browser.width)
    browser.check_layout()


def test_long_names_of_drafters_leave_room_to_draw_in():
    from draftwood.study.plots import _lines

    name = "lookahead+prompt-lookup:lookahead.window=3,lookahead.ngram=3,prompt-lookup.gamma=12"
    assert _lines("prompt-lookup") == "prompt-lookup"
    assert _lines(name).replace("\n", "") == name and max(map(len, _lines(name).split("\n"))) <= 34


def test_legends_stand_above_the_data(monkeypatch):
    """What is drawn lies within the axes; a legend must not."""
    from draftwood.study import plots

    figures = []

    def keep(name, title, note, paint, height):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4, height), layout="constrained")
        paint(figure.add_subplot())
        figure.draw_without_rendering()
        figures.append((name, figure))
        return plots.Plot(name, title, note, "", b"")

    monkeypatch.setattr(plots, "_render", keep)
    study().plots()
    assert len(figures) == 12
    for name, figure in figures:
        (legend,), (axes,) = figure.legends, figure.axes
        assert axes.get_legend() is None, name
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1, name
        assert axes.get_window_extent().height > figure.bbox.height / 3, name


def test_drafters_of_one_colour_have_different_markers():
    names = ["none", *(f"drafter-{index}" for index in range(20))]
    palette = dict(
        zip(names, ["#000000"] + [plots._COLOURS[index % len(plots._COLOURS)] for index in range(20)], strict=True)
    )
    looks = [(palette[name], plots._marker(palette, name)) for name in names[1:]]
    assert len(set(looks)) == len(looks)


def test_brackets_in_a_label_are_no_markup():
    label = "eagle:checkpoint=a[/x]b[red]c"
    report = Report([record(run("none"), run(label))])
    assert label in "".join(str(report).split())
    assert markdown(Grid(["x"], [["a\nb"]], 1)).splitlines()[-1] == "| a b |"


def test_a_lone_surrogate_is_kept(tmp_path):
    Report([record(run("none"), category="a\ud800b")]).save(tmp_path)
    assert "a\\ud800b" in (tmp_path / "results.jsonl").read_text()
