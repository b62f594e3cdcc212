"""Where a study keeps its finished cells: one JSON object a line, appended and flushed to the disk at once.

A killed study loses no more than the cell it was at. Several processes may share a directory: each cell is claimed by
a file lock, which the operating system releases when its holder dies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

from filelock import FileLock, Timeout

from ..core.errors import InvalidCheckpoint, InvalidRequest

Record = dict[str, Any]

RESULTS = "results.jsonl"


class _Line(NamedTuple):
    """Where a record is in a file."""

    key: str
    number: int
    start: int
    end: int


class StoredRecords(Sequence[Record]):
    """Records that stay in their file and are read one by one, whenever they are asked for.

    Args:
        file: the results of a study.
        lines: where the records are.
        drafters: the labels to leave in them; None for all.
    """

    def __init__(self, file: Path, lines: Sequence[_Line], drafters: Collection[str] | None = None) -> None:
        self._file, self._lines, self._drafters = file.absolute(), lines, drafters

    @property
    def keys(self) -> list[str]:
        """The keys of the records, read long ago."""
        return [line.key for line in self._lines]

    def __len__(self) -> int:
        return len(self._lines)

    def __iter__(self) -> Iterator[Record]:
        return self._read(self._lines)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...

    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return list(self._read(self._lines[index]))
        return next(self._read([self._lines[index]]))

    def __repr__(self) -> str:
        return f"<{len(self)} records in {str(self._file)!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _read(self, lines: Sequence[_Line]) -> Iterator[Record]:
        if not lines:
            return
        with _opened(self._file) as content:
            for line in lines:
                content.seek(line.start)
                record = _parse(content.read(line.end - line.start), self._file, line.number)
                yield record if self._drafters is None else _only(record, self._drafters)


class Store:
    """The finished cells of a study, in a directory or, without one, in memory.

    Of a directory's cells only keys, drafters and places in the file are held, whatever the length of the texts.

    Args:
        directory: made if it is missing; None keeps everything in memory.

    Raises:
        InvalidRequest: the directory cannot be made.
        InvalidCheckpoint: a line of its results, other than a half-written last one, is no record.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._records: list[Record] = []  # without a directory
        self._lines: list[_Line] = []  # with one
        self._finished: dict[str, set[str]] = {}
        self._read = 0
        if directory is not None:
            try:
                (directory / ".locks").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidRequest(f"cannot keep a study in {str(directory)!r}: {error}") from error
            self.refresh()

    def records(self, keys: Iterable[str] | None = None, drafters: Collection[str] | None = None) -> Sequence[Record]:
        """Returns the records of the given cells, in the order in which they were written; all when None.

        Args:
            keys: of the cells.
            drafters: the labels to leave in the records, since a directory may hold more than one study; None for all.
        """
        wanted = None if keys is None else set(keys)
        if self.directory is None:
            kept = [record for record in self._records if wanted is None or record["key"] in wanted]
            return kept if drafters is None else [_only(record, drafters) for record in kept]
        lines = [line for line in self._lines if wanted is None or line.key in wanted]
        return StoredRecords(self.directory / RESULTS, lines, drafters)

    def finished(self, key: str) -> set[str]:
        """Returns the labels of the drafters that a cell already has."""
        return set(self._finished.get(key, ()))

    @contextmanager
    def claim(self, key: str, *, wait: bool) -> Iterator[bool]:
        """Claims a cell for this process; gives False if another one has it and `wait` is off."""
        if self.directory is None:
            yield True
            return
        lock = FileLock(self.directory / ".locks" / key)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            yield False
            return
        try:
            self.refresh()
            yield True
        finally:
            lock.release()

    def append(self, record: Record) -> None:
        """Writes a record down for good."""
        if self.directory is None:
            self._records.append(json.loads(json.dumps(record)))  # what a file would give back
            self._note(record)
            return
        with self._locked(), open(self.directory / RESULTS, "ab+") as file:
            # The last line of a process that was killed while it wrote: no record, and none may be glued to it.
            if file.tell() and not _ends_with_newline(file):
                file.truncate(_last_line(file))
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.refresh()

    def refresh(self) -> None:
        """Reads what this and other processes have written since the last look."""
        path = None if self.directory is None else self.directory / RESULTS
        if path is None or not path.exists():
            return
        with self._locked(), open(path, "rb") as file:
            file.seek(self._read)
            # Line by line, since a study that goes on may have found gigabytes.
            for line in file:
                if not line.endswith(b"\n"):  # another process is killed, or is writing
                    break
                record = _parse(line, path, len(self._lines) + 1)
                start, self._read = self._read, self._read + len(line)
                self._lines.append(_Line(record["key"], len(self._lines) + 1, start, self._read))
                self._note(record)

    def _note(self, record: Record) -> None:
        self._finished.setdefault(record["key"], set()).update(run["drafter"] for run in record["runs"])

    def _locked(self) -> FileLock:
        if self.directory is None:
            raise InvalidRequest("a study in memory has no file to lock")
        return FileLock(self.directory / ".locks" / "results")


def read_records(path: Path) -> StoredRecords:
    """Reads the records of a study directory or of its results file, without claiming or changing anything.

    Raises:
        InvalidRequest: there is none.
        InvalidCheckpoint: a line is no record.
    """
    file = path / RESULTS if path.is_dir() else path
    lines: list[_Line] = []
    with _opened(file) as content:
        start = 0
        for number, line in enumerate(content, start=1):
            if not line.endswith(b"\n"):  # another process is writing it, or was killed; nothing behind it is ours
                break
            lines.append(_Line(_parse(line, file, number)["key"], number, start, start + len(line)))
            start += len(line)
    return StoredRecords(file, lines)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    try:
        with open(file, "rb") as content:
            yield content
    except OSError as error:
        raise InvalidRequest(f"no study at {str(file)!r}: {error}") from error


def _only(record: Record, labels: Collection[str]) -> Record:
    """Returns a record without the drafters that are not among `labels`."""
    runs = [run for run in record["runs"] if run["drafter"] in labels]
    return {**record, "drafters": [label for label in record["drafters"] if label in labels], "runs": runs}


def _parse(line: bytes, path: Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidCheckpoint(f"{path}, line {number}: no JSON: {line[:60]!r}") from error
    if not isinstance(record, dict) or not {"key", "conditions", "drafters", "runs"} <= record.keys():
        raise InvalidCheckpoint(f"{path}, line {number}: no record of a study: {line[:60]!r}")
    return record


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def _last_line(file: Any) -> int:
    """Returns where the unfinished last line starts."""
    file.seek(0)
    return int(file.read().rfind(b"\n")) + 1
