from __future__ import annotations

import json

import pytest

from draftwood.core.errors import InvalidRequest
from draftwood.study.prompts import StudyPrompt, load_prompts


def test_the_packaged_prompts_take_categories_in_turn():
    loaded = load_prompts(limit=8)
    categories = [prompt.category for prompt in loaded.prompts]
    assert categories == ["summarise", "rewrite", "extract", "code", "explain", "story", "summarise", "rewrite"]
    assert len(load_prompts().prompts) == 12
    assert all(len(turn) > 20 for prompt in load_prompts().prompts for turn in prompt.turns)


def test_spec_bench_files_keep_turns_and_are_balanced(tmp_path):
    questions = [
        {"question_id": 1, "category": "a", "turns": ["a1", "a1b"], "reference": []},
        {"question_id": 2, "category": "a", "turns": ["a2"]},
        {"question_id": 3, "category": "a", "turns": ["a3"]},
        {"question_id": 4, "category": "b", "turns": ["b1"]},
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, questions)) + "\n\n")
    loaded = load_prompts(file)
    assert [prompt.id for prompt in loaded.prompts] == ["1", "4", "2", "3"]
    assert loaded.prompts[0].turns == ("a1", "a1b")
    assert [prompt.id for prompt in load_prompts(str(file), limit=2).prompts] == ["1", "4"]


def test_text_files_hold_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n  two \n", encoding="utf-8")
    assert [prompt.turns for prompt in load_prompts(file).prompts] == [("one",), ("two",)]


def test_datasets_are_read_by_column(tmp_path):
    file = tmp_path / "data.json"
    file.write_text("\n".join(json.dumps({"q": f"q{i}", "kind": "x" if i else "y"}) for i in range(3)))
    loaded = load_prompts(f"dataset:json,data_files={file},column=q,category=kind")
    assert [(prompt.turns, prompt.category) for prompt in loaded.prompts] == [
        (("q0",), "y"),
        (("q1",), "x"),
        (("q2",), "x"),
    ]
    with pytest.raises(InvalidRequest, match=r"\['q', 'kind'\], got 'nope'"):
        load_prompts(f"dataset:json,data_files={file},column=nope")


def test_lists_of_texts_chats_and_ids():
    system = {"role": "system", "content": "s"}
    loaded = load_prompts(["text", [system, {"role": "user", "content": "u"}], [4, 5], StudyPrompt("x", "c", ("t",))])
    text, own, chat, ids = (loaded.prompts[i] for i in (0, 1, 2, 3))
    assert (text.turns, own.id) == (("text",), "x")
    assert (chat.turns, chat.history) == (("u",), (system,))
    assert ids.tokens == (4, 5)


def test_equal_ids_are_told_apart():
    twice = [StudyPrompt("1", "c", ("a",)), StudyPrompt("1", "c", ("b",))]
    assert [prompt.id for prompt in load_prompts(twice).prompts] == ["1", "1#1"]


def test_only_newlines_end_a_line_of_json(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text('{"turns": ["one\u2028two"]}\r\n{"turns": ["three"]}\n', encoding="utf-8")
    assert [prompt.turns for prompt in load_prompts(file).prompts] == [("one\u2028two",), ("three",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no prompts in"),
        ('{"turns": []}', "line 1: needs an object with 'turns'"),
        ('{"turns": ["ok"]}\n{"turns": [3]}', "line 2: needs"),
        ('{"turns": ["ok"]}\n[]', "line 2: needs"),
        ("{", "line 1: not valid JSON"),
    ],
)
def test_malformed_files_are_refused_with_their_line(tmp_path, content, message):
    file = tmp_path / "question.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        load_prompts(file)


def test_other_bad_sources(tmp_path):
    binary = tmp_path / "x.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    for source, message in [
        (tmp_path / "missing.txt", "cannot read prompts"),
        (binary, "cannot read prompts"),
        (3, "must be a file"),
        ([], "no prompts in list"),
        ([chat], "must end with a user message"),
        ([[{"role": "user"}]], "must end with a user message"),
        ([1], "prompt 0 must be a text, a chat or a list of token ids, got 1"),
        (["fine", None], "prompt 1 must be a text"),
        ([["a", "b"]], "prompt 0 must be a text"),
        ([load_prompts(limit=1), "file.txt"], "prompt 0 must be a text"),
        ("dataset:/nowhere/at/all,column=q", "cannot load the data set"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            load_prompts(source)
    for limit in (0, -1, True, 2.5, "x"):
        with pytest.raises(InvalidRequest, match="limit must be"):
            load_prompts(limit=limit)
