from __future__ import annotations

import json
import threading
from contextlib import contextmanager

import pytest

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.study import store as store_module
from draftwood.study.store import RESULTS, Store, read_records


def record(key: str, *drafters: str) -> dict:
    return {"key": key, "conditions": {}, "drafters": [*drafters], "runs": [{"drafter": one} for one in drafters]}


@pytest.fixture(params=["directory", "memory"])
def store(request, tmp_path):
    return Store(tmp_path / "study" if request.param == "directory" else None)


def test_what_is_appended_is_found(store):
    store.append(record("a", "none", "x"))
    store.append(record("b", "none"))
    store.append(record("a", "none", "y"))
    assert store.finished("a") == {"none", "x", "y"}
    assert store.finished("c") == set()
    assert [one["key"] for one in store.records(["a"])] == ["a", "a"]
    assert len(store.records()) == 3


def test_another_process_sees_it_and_a_new_one_too(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path)
    first.append(record("a", "none"))
    with second.claim("b", wait=False) as claimed:
        assert claimed
        assert second.finished("a") == {"none"}
    assert Store(tmp_path).records() == first.records() == read_records(tmp_path)


def test_records_stay_in_their_file_and_can_be_indexed(tmp_path):
    store = Store(tmp_path)
    for key in "abc":
        store.append(record(key, "none", "x"))
    found = store.records(["c", "a"], {"x"})
    assert [(one["key"], one["drafters"], len(one["runs"])) for one in found] == [("a", ["x"], 1), ("c", ["x"], 1)]
    assert found[-1] == found[1] == list(found)[1]
    assert found[:1] == [found[0]]
    with pytest.raises(IndexError):
        found[2]
    store.append(record("a", "none"))
    assert len(found) == 2  # what was there when they were asked for
    (tmp_path / RESULTS).unlink()
    with pytest.raises(InvalidRequest, match="no study at"):
        list(found)


def test_a_line_that_is_finished_while_it_is_read_is_no_record_yet(tmp_path, monkeypatch):
    line = json.dumps(record("a", "none")).encode() + b"\n"
    (tmp_path / RESULTS).write_bytes(line)

    @contextmanager
    def growing(_):
        yield iter([line, line[:20], line[20:]])  # what a reader gets who reaches the end before the writer

    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_opened", growing)
        records = read_records(tmp_path)
    assert [one["key"] for one in records] == ["a"]


def test_a_half_written_line_is_no_record_and_is_replaced(tmp_path):
    Store(tmp_path).append(record("a", "none"))
    with open(tmp_path / RESULTS, "ab") as file:
        file.write(b'{"key": "b", "cond')
    assert [one["key"] for one in read_records(tmp_path)] == ["a"]
    store = Store(tmp_path)
    assert [one["key"] for one in store.records()] == ["a"]
    store.append(record("c", "none"))
    assert [one["key"] for one in read_records(tmp_path)] == ["a", "c"]
    assert (tmp_path / RESULTS).read_bytes().count(b"\n") == 2


def test_a_claimed_cell_is_left_to_its_holder(tmp_path):
    first, second = Store(tmp_path), Store(tmp_path)
    with (
        first.claim("a", wait=False) as mine,
        second.claim("a", wait=False) as theirs,
        second.claim("b", wait=False) as b,
    ):
        assert (mine, theirs, b) == (True, False, True)
    waited = []
    with first.claim("a", wait=False):
        thread = threading.Thread(target=lambda: waited.append(_claim(second)))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(10)
    assert waited == [True]


def _claim(store: Store) -> bool:
    with store.claim("a", wait=True) as claimed:
        return claimed


@pytest.mark.parametrize("line", [b"not json\n", b"[]\n", b'{"key": 1}\n'])
def test_a_broken_whole_line_is_named(tmp_path, line):
    (tmp_path / RESULTS).write_bytes(json.dumps(record("a")).encode() + b"\n" + line)
    for read in (Store, read_records):
        with pytest.raises(InvalidCheckpoint, match=f"{RESULTS}, line 2: no (JSON|record of a study)"):
            read(tmp_path)


def test_places_that_cannot_hold_a_study(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="cannot keep a study in"):
        Store(tmp_path / "file")
    with pytest.raises(InvalidRequest, match="no study at"):
        read_records(tmp_path / "missing")
