"""Reading, masking and packing of training data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from draftwood.core.errors import InvalidRequest
from draftwood.training.data import Document, pack, read_documents, split
from tests.study.tiny import tiny_tokenizer

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes."},
    {"role": "user", "content": "no?"},
    {"role": "assistant", "content": "ok"},
]


def write(place: Path, *lines: Any) -> Path:
    file = place / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def learnt_text(tokenizer: Any, document: Document) -> str:
    return "".join(
        tokenizer.decode([token]) if flag else "|" for token, flag in zip(document.tokens, document.learnt, strict=True)
    )


def test_plain_text_is_split_at_empty_lines(tmp_path):
    tokenizer = tiny_tokenizer()
    file = tmp_path / "data.txt"
    file.write_text("ab\ncd\n\n \n\nef\n")
    documents = read_documents(file, tokenizer)
    assert [tokenizer.decode(document.tokens[:-1]) for document in documents] == ["ab\ncd", "ef"]
    assert all(document.tokens[-1] == tokenizer.eos_token_id for document in documents)
    assert all(all(document.learnt) for document in documents)


def test_only_what_the_assistant_says_is_learnt(tmp_path):
    tokenizer = tiny_tokenizer()
    text, chat = read_documents(write(tmp_path, {"text": "a b"}, {"messages": CHAT}), tokenizer)
    assert tokenizer.decode(text.tokens) == "a b</s>"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(chat.tokens) == whole == "user: hi\nassistant: yes.\nuser: no?\nassistant: ok\n"
    expected = "|" * len("user: hi\nassistant: ") + "yes.\n" + "|" * len("user: no?\nassistant: ") + "ok\n"
    assert learnt_text(tokenizer, chat) == expected


def test_limits_and_rows_left_out(tmp_path):
    tokenizer = tiny_tokenizer()
    file = write(tmp_path, {"text": "abc"}, {"messages": CHAT[:1]}, {"text": "defg"}, {"text": "hi"})
    with pytest.raises(InvalidRequest, match="line 2: no assistant turn"):
        read_documents(file, tokenizer)
    skipped: list[InvalidRequest] = []
    documents = read_documents(file, tokenizer, on_skip=skipped.append)
    assert [tokenizer.decode(one.tokens) for one in documents] == ["abc</s>", "defg</s>", "hi</s>"]
    assert len(skipped) == 1 and "line 2: no assistant turn" in str(skipped[0])
    for limit, expected in (
        (1, ["a"]),
        (4, ["abc</s>"]),
        (7, ["abc</s>", "def"]),
        (99, ["abc</s>", "defg</s>", "hi</s>"]),
    ):
        documents = read_documents(file, tokenizer, limit_tokens=limit, on_skip=skipped.append)
        assert [tokenizer.decode(one.tokens) for one in documents] == expected
        assert all(len(one.tokens) == len(one.learnt) for one in documents)
    with pytest.raises(InvalidRequest, match="limit_tokens must be a whole number >= 1"):
        read_documents(file, tokenizer, limit_tokens=0)
    nothing = write(tmp_path, {"messages": CHAT[:1]})
    with pytest.raises(InvalidRequest, match=r"holds no training data; the last row .* line 1: no assistant turn"):
        read_documents(nothing, tokenizer, on_skip=skipped.append)


def test_a_big_file_is_not_read_past_the_limit(tmp_path):
    tokenizer = tiny_tokenizer()
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "abc"}\n' * 3 + "this is no JSON")
    assert len(read_documents(file, tokenizer, limit_tokens=12)) == 3
    with pytest.raises(InvalidRequest, match="line 4: not valid JSON"):
        read_documents(file, tokenizer, limit_tokens=13)


def test_parquet_and_data_sets_are_read_like_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer = tiny_tokenizer()
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes."}]
    rows = {"conversations": [shared, shared], "answer": ["ab", "cd"]}
    file = tmp_path / "data.parquet"
    datasets.Dataset.from_dict(rows).to_parquet(file)
    expected = read_documents(write(tmp_path, {"messages": CHAT[:2]}, {"messages": CHAT[:2]}), tokenizer)
    assert read_documents(file, tokenizer) == expected
    for limit in (None, 10_000):  # downloaded, streamed
        source = f"dataset:parquet,data_files={file},split=train"
        assert read_documents(source, tokenizer, limit_tokens=limit) == expected
    texts = read_documents(source + ",column=answer", tokenizer)
    assert [tokenizer.decode(one.tokens) for one in texts] == ["ab</s>", "cd</s>"]
    with pytest.raises(InvalidRequest, match=r"has the columns \['conversations', 'answer'\], not 'question'"):
        read_documents(source + ",column=question", tokenizer)
    with pytest.raises(InvalidRequest, match="cannot read the data set 'parquet'"):
        read_documents(tmp_path / "nowhere.parquet", tokenizer)
    file.write_bytes(b"PAR1")
    with pytest.raises(InvalidRequest, match="cannot read the data set 'parquet'"):
        read_documents(file, tokenizer)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_local_data_set_is_read_from_its_directory(tmp_path, monkeypatch, kind):
    """Two files of chats, whole and streamed, with the options of `load_dataset` and without."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer, place = tiny_tokenizer(), tmp_path / "set"
    place.mkdir()
    for number in range(2):
        chat = [{"role": "user", "content": f"hi {number}"}, {"role": "assistant", "content": "yes."}]
        rows = datasets.Dataset.from_dict({"messages": [chat, CHAT], "other": ["ab", "cd"]})
        write_rows = rows.to_parquet if kind == "parquet" else rows.to_json
        write_rows(place / f"train-0000{number}-of-00002.{kind}")
    expected = [f"user: hi {number}\nassistant: yes.\n" for number in range(2)]
    spec = f"dataset:{place},split=train"
    for source, limit in ((place, None), (spec, None), (spec, 10_000)):
        documents = read_documents(source, tokenizer, limit_tokens=limit)
        assert [tokenizer.decode(one.tokens) for one in documents[::2]] == expected
        assert learnt_text(tokenizer, documents[1]).endswith("|" * len("assistant: ") + "ok\n")
        assert len(documents) == 4
    limited = read_documents(place, tokenizer, limit_tokens=len(expected[0]) + 2)
    assert [tokenizer.decode(one.tokens) for one in limited] == [expected[0], "us"]
    texts = read_documents(spec + ",column=other", tokenizer)
    assert [tokenizer.decode(one.tokens) for one in texts] == ["ab</s>", "cd</s>"] * 2
    (place / "train-00000-of-00002.jsonl").write_text("")
    with pytest.raises(InvalidRequest, match="cannot read the data set 'json': no rows"):
        read_documents(f"dataset:json,data_files={place / 'train-00000-of-00002.jsonl'}", tokenizer)
    with pytest.raises(InvalidRequest, match=r"a data set needs a name, .* got 'dataset:,split=train'"):
        read_documents("dataset:,split=train", tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=f"cannot read the data set '{tmp_path / 'empty'}'"):
        read_documents(tmp_path / "empty", tokenizer)


def test_files_are_read_by_what_they_are(tmp_path, monkeypatch):
    """None is taken for plain text that is none, and texts in a directory end where they do in a file."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    tokenizer, row = tiny_tokenizer(), {"messages": CHAT}
    expected = read_documents(write(tmp_path, row, row), tokenizer)
    lines = json.dumps(row) + "\n" + json.dumps(row) + "\n"
    for name, content in (("a.json", json.dumps([row, row])), ("b.json", lines), ("C.JSONL", "\ufeff" + lines)):
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_documents(tmp_path / name, tokenizer) == expected, name
    (tmp_path / "d.csv").write_text("text,more\nabc,1\nde,2\n")
    texts = [tokenizer.decode(one.tokens) for one in read_documents(tmp_path / "d.csv", tokenizer)]
    assert texts == ["abc</s>", "de</s>"]
    (tmp_path / "texts").mkdir()
    for name in "ba":
        (tmp_path / "texts" / f"{name}.txt").write_text(f"{name}\nb\n\nc\n")
    texts = [tokenizer.decode(one.tokens) for one in read_documents(tmp_path / "texts", tokenizer)]
    assert texts == ["a\nb</s>", "c</s>", "b\nb</s>", "c</s>"]


def test_tool_calls_and_reasoning_are_the_templates(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool['name'] }}]{% endfor %}{% for message in messages %}"
        "{{ message['role'] }}: {{ message['thought'] }}{{ message['content'] }}"
        "{% for call in message['tool_calls'] or [] %}({{ call['name'] }}){% endfor %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chat = [CHAT[0], call, {"role": "tool", "content": "3", "tool_calls": None}, CHAT[1] | {"thought": "so "}]
    (document,) = read_documents(write(tmp_path, {"messages": chat, "tools": [{"name": "f"}]}), tokenizer)
    assert tokenizer.decode(document.tokens) == "[f]user: hi\nassistant: (f)\ntool: 3\nassistant: so yes.\n"
    said = [part for part in learnt_text(tokenizer, document).split("|") if part]
    assert said == ["(f)\n", "so yes.\n"]
    with pytest.raises(InvalidRequest, match="needs an object with"):  # nothing is said, and nothing called
        read_documents(write(tmp_path, {"messages": [CHAT[0], {"role": "assistant", "content": None}]}), tokenizer)


def test_packing():
    documents = [Document([1, 2, 3], [True] * 3), Document([4, 5, 6, 7, 8], [False] * 4 + [True])]
    packed = pack(documents, 4)
    assert packed.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert packed.learnt.tolist() == [[True, True, True, False], [False, False, False, True]]
    # Nothing is learnt in the middle one: nothing comes before the first token of a sequence.
    packed = pack([Document([1, 2, 3, 4, 5], [True, True, True, False, True])], 2)
    assert packed.tokens.tolist() == [[1, 2]]
    assert pack([Document([1, 2, 3], [True] * 3)], 8).tokens.tolist() == [[1, 2, 3, 0, 0, 0, 0, 0]]


def test_whole_documents_are_cut_and_counted():
    documents = [
        Document([1, 2, 3], [True] * 3),
        Document([4, 5], [True] * 2),  # no room beside the first one
        Document([6, 7], [True, True]),
        Document([8, 9], [True, False]),  # nothing is learnt behind its first token
        Document([10, 11, 12, 13, 14, 15], [False, True, True, True, True, True]),
    ]
    packed = pack(documents, 4, whole=True)
    assert packed.tokens.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7], [10, 11, 12, 13]]
    assert packed.learnt.tolist() == [
        [False, True, True, False], [False, True, False, True], [False, True, True, True],
    ]  # fmt: skip
    assert packed.cut == 2 + 2  # the one of which nothing is learnt, and what is behind the limit
    assert pack(documents, 6, whole=True).cut == 2
    assert pack(documents, 4).cut == 0
    assert pack([*documents, Document([1] * 9, [False] * 9)], 4).cut == 8  # the last two sequences


def test_the_order_is_an_epochs_own_and_known_from_the_position():
    packed = pack([Document(list(range(20)), [True] * 20)], 2)
    whole = packed.order(0, 30, seed=1)
    epochs = [whole[start : start + 10].tolist() for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert torch.equal(packed.order(7, 8, seed=1), whole[7:15])
    assert torch.equal(packed.order(7, 20, seed=1), whole[7:27])
    assert not torch.equal(packed.order(0, 10, seed=2), whole[:10])
    batch = packed.at(whole[3:5])
    assert batch.tokens.tolist() == [[2 * index, 2 * index + 1] for index in whole[3:5].tolist()]
    assert torch.equal(batch.index, whole[3:5]) and batch.learnt.all()
    assert packed.digest() != pack([Document(list(range(20)), [True] * 20)], 4).digest()
    other = pack([Document(list(range(20)), [True] * 19 + [False])], 2)
    assert packed.digest() == pack([Document(list(range(20)), [True] * 20)], 2).digest() != other.digest()


def test_a_split_is_the_seeds():
    packed = pack([Document(list(range(40)), [True] * 40)], 2)
    rest, out = split(packed, 0.25, seed=3)
    assert len(rest) == 15 and len(out) == 5
    starts = [rest.tokens[:, 0].tolist(), out.tokens[:, 0].tolist()]
    assert sorted(starts[0] + starts[1]) == list(range(0, 40, 2)) and all(part == sorted(part) for part in starts)
    assert torch.equal(split(packed, 5, seed=3)[1].tokens, out.tokens)
    assert not torch.equal(split(packed, 5, seed=4)[1].tokens, out.tokens)
    for held in (0, 20, 0.01, 2.5, -1, True):
        with pytest.raises(InvalidRequest, match="of 20 sequences 1 to 19 can be held out"):
            split(packed, held)
    with pytest.raises(InvalidRequest, match="1 sequence of 2 tokens is too little"):
        split(pack([Document([1, 2], [True] * 2)], 2), 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no training data"),
        ("\n\n", "holds no training data"),
        ("{", "line 1: not valid JSON"),
        ('{"text": "a"}\n[]', "line 2: needs an object with 'text'"),
        ('{"text": ""}', "line 1: needs an object"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": "[]"}', "line 1: 'tools' must be a list"),
        ('{"messages": []}', "line 1: needs an object"),
        ('{"messages": [{"role": "user"}]}', "line 1: needs an object"),
    ],
)
def test_bad_files(tmp_path, content, message):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=message):
        read_documents(file, tiny_tokenizer())


def test_no_file_no_length_nothing_to_learn(tmp_path):
    with pytest.raises(InvalidRequest, match="cannot read training data"):
        read_documents(tmp_path / "nowhere.txt", tiny_tokenizer())
    with pytest.raises(InvalidRequest, match="length >= 2, got 1"):
        pack([Document([1, 2], [True, True])], 1)
    with pytest.raises(InvalidRequest, match="none of which is to be learnt"):
        pack([Document([1, 2], [True, False])], 2)
    with pytest.raises(InvalidRequest, match="0 tokens"):
        pack([], 2)
