"""Prompt sets of a study: the packaged one, Spec-Bench's `question.jsonl`, text files, `datasets` sources, lists.

This module reads prompts and puts them in order; it knows no tokenizer and no chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.checks import whole_number
from ..core.errors import InvalidRequest
from .default_prompts import PACKAGED
from .spec import parse_spec

Message = Mapping[str, str]


@dataclass(frozen=True)
class StudyPrompt:
    """One prompt of a study.

    Attributes:
        id: names it within its set.
        category: prompts of one category are summed up together.
        turns: what the user says, turn by turn; the answers between are the target's own.
        history: messages before the first turn (a system message, say).
        tokens: token ids that replace everything else, for targets without a tokenizer.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    history: tuple[Message, ...] = ()
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptSet:
    """A named list of prompts, the categories in turn."""

    name: str
    prompts: tuple[StudyPrompt, ...]


def load_prompts(source: Any = None, limit: int | None = None) -> PromptSet:
    """Loads a prompt set.

    Args:
        source: None for the packaged prompts; a `.jsonl` file in the layout of Spec-Bench (an object a line with
            `turns`, and `category` and `question_id` if there are any); any other file, one prompt a line;
            `"dataset:NAME,split=train,column=question"` for a source of the `datasets` library (`category=` names a
            second column, other options go to `load_dataset`); or a list of texts, chats or token-id lists.
        limit: most prompts, taken from the categories in turn.

    Raises:
        InvalidRequest: the source is missing, malformed or empty, or the limit is below 1.
    """
    if limit is not None:
        whole_number("limit", limit)
    if isinstance(source, PromptSet):
        return PromptSet(source.name, source.prompts[:limit])
    name, prompts = _read(source)
    if not prompts:
        raise InvalidRequest(f"no prompts in {name}: at least one is needed")
    return PromptSet(name, tuple(_in_turn(prompts))[:limit])


def _read(source: Any) -> tuple[str, list[StudyPrompt]]:
    if source is None:
        return "packaged", [StudyPrompt(str(i), category, (text,)) for i, (category, text) in enumerate(PACKAGED)]
    if isinstance(source, str) and source.startswith("dataset:"):
        return source, list(_from_dataset(source.removeprefix("dataset:")))
    if isinstance(source, str | Path):
        return str(source), list(_from_file(Path(source)))
    if isinstance(source, Sequence):
        return "list", [_from_object(str(index), entry) for index, entry in enumerate(source)]
    raise InvalidRequest(f"prompts must be a file, 'dataset:NAME' or a list, got {type(source).__name__}")


def _from_file(path: Path) -> Iterator[StudyPrompt]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # `splitlines` would cut JSON at U+2028, too
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read prompts from {str(path)!r}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            yield _from_question(f"{path}, line {number}", str(number), line)
        else:
            yield StudyPrompt(str(number), "text", (line.strip(),))


def _from_question(place: str, number: str, line: str) -> StudyPrompt:
    try:
        question = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{place}: not valid JSON: {error}") from error
    turns = question.get("turns") if isinstance(question, dict) else None
    if isinstance(turns, str):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise InvalidRequest(f"{place}: needs an object with 'turns', a non-empty list of texts, got {line[:60]!r}")
    identity, category = question.get("question_id", number), question.get("category", "text")
    return StudyPrompt(str(identity), str(category), tuple(turns))


def _from_dataset(text: str) -> Iterator[StudyPrompt]:
    from datasets import load_dataset

    name, options = parse_spec(text.replace(",", ":", 1))
    column, category = options.pop("column", None), options.pop("category", None)
    options.setdefault("split", "train")
    try:
        rows: Any = load_dataset(name, **options)
    except Exception as error:  # whatever a data set's own code or the network raises
        raise InvalidRequest(f"cannot load the data set {name!r}: {type(error).__name__}: {error}") from error
    columns = list(rows.column_names)
    for wanted in (column, *([category] if category else [])):
        if wanted not in columns:
            raise InvalidRequest(f"data set {name!r}: give column= (and category=) out of {columns}, got {wanted!r}")
    for index, row in enumerate(rows):
        turns = [row[column]] if isinstance(row[column], str) else row[column]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise InvalidRequest(
                f"data set {name!r}, row {index}: {column!r} is no text and no list of texts: {turns!r}"
            )
        yield StudyPrompt(str(index), str(row[category]) if category else "text", tuple(turns))


def _from_object(index: str, entry: Any) -> StudyPrompt:
    if isinstance(entry, StudyPrompt):
        return entry
    if isinstance(entry, str):
        return StudyPrompt(index, "text", (entry,))
    entries = entry.tolist() if hasattr(entry, "tolist") else entry
    if isinstance(entries, Sequence) and entries and all(isinstance(message, Mapping) for message in entries):
        last = entries[-1]
        if last.get("role") != "user" or not isinstance(last.get("content"), str):
            raise InvalidRequest(f"prompt {index}: a chat must end with a user message, got {last!r}")
        return StudyPrompt(index, "text", (last["content"],), tuple(entries[:-1]))
    if isinstance(entries, Sequence) and all(isinstance(token, int) for token in entries):
        return StudyPrompt(index, "text", ("",), tokens=tuple(entries))
    raise InvalidRequest(f"prompt {index} must be a text, a chat or a list of token ids, got {entry!r}")


def _in_turn(prompts: Iterable[StudyPrompt]) -> Iterator[StudyPrompt]:
    """Yields one prompt of each category after the other, so that any first part of a study is balanced."""
    waiting: dict[str, list[StudyPrompt]] = {}
    seen: set[str] = set()
    for index, prompt in enumerate(prompts):
        identity = prompt.id if prompt.id not in seen else f"{prompt.id}#{index}"
        seen.add(identity)
        waiting.setdefault(prompt.category, []).append(replace(prompt, id=identity))
    while waiting:
        for category in list(waiting):
            yield waiting[category].pop(0)
            if not waiting[category]:
                del waiting[category]
