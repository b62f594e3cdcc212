"""Where a study keeps its finished cells: one JSON object a line, appended and flushed to the disk at once.

A killed study loses no more than the cell it was at. Several processes may share a directory: each cell is claimed by
a file lock, which the operating system releases when its holder dies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..core.errors import InvalidCheckpoint, InvalidRequest

Record = dict[str, Any]

RESULTS = "results.jsonl"


class Store:
    """The finished cells of a study, in a directory or, without one, in memory.

    Of a directory's cells only keys and drafters are held, so that a study of any length takes the same memory.

    Args:
        directory: made if it is missing; None keeps everything in memory.

    Raises:
        InvalidRequest: the directory cannot be made.
        InvalidCheckpoint: a line of its results, other than a half-written last one, is no record.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._records: list[Record] = []  # without a directory
        self._lines: list[tuple[str, int, int]] = []  # with one: key, start and end of each record in the file
        self._finished: dict[str, set[str]] = {}
        self._read = 0
        if directory is not None:
            try:
                (directory / ".locks").mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidRequest(f"cannot keep a study in {str(directory)!r}: {error}") from error
            self.refresh()

    def records(self, keys: Iterable[str] | None = None) -> list[Record]:
        """Returns the records of the given cells, in the order in which they were written; all when None."""
        wanted = None if keys is None else set(keys)
        if self.directory is None:
            return [record for record in self._records if wanted is None or record["key"] in wanted]
        if not self._lines:
            return []
        path = self.directory / RESULTS
        with open(path, "rb") as file:
            return [
                _parse(file.read(end - start), path, number)
                for number, (key, start, end) in enumerate(self._lines, start=1)
                if (wanted is None or key in wanted) and file.seek(start) >= 0
            ]

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
                self._lines.append((record["key"], start, self._read))
                self._note(record)

    def _note(self, record: Record) -> None:
        self._finished.setdefault(record["key"], set()).update(run["drafter"] for run in record["runs"])

    def _locked(self) -> FileLock:
        if self.directory is None:
            raise InvalidRequest("a study in memory has no file to lock")
        return FileLock(self.directory / ".locks" / "results")


def read_records(path: Path) -> list[Record]:
    """Reads the records of a study directory or of its results file, without claiming or changing anything.

    Raises:
        InvalidRequest: there is none.
        InvalidCheckpoint: a line is no record.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"no study at {str(path)!r}: {error}") from error
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    return [_parse(line, file, number) for number, line in enumerate(lines, start=1)]


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
