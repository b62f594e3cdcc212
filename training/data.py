"""Texts and conversations as token sequences of one length, and which of their tokens are learnt.

A source is a file or a data set of the `datasets` library: `.jsonl`, an object a line; `.json` (objects in a list or a
line each), `.csv` and `.parquet`, a row each; any other file, plain text, of which empty lines separate one document
from the next; a directory of `.txt` files, or one that `load_dataset` reads; or `dataset:NAME,split=train,name=CONFIG`,
a hub id or directory with the options of `load_dataset`. An object or row
holds `text`, or `messages` (or `conversations`), a list of `{"role": "user", "content": "..."}` (or of `{"from":
"human", "value": "..."}`), which the tokenizer's chat template renders and of which only what the assistant says is
learnt. With `column=` another column of a data set is read. This module knows no model and no loss.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftwood.core.checks import whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.study.spec import parse_spec

from .chat import Message, encode_chat

COLUMNS = ("messages", "conversations", "text")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


class Document(NamedTuple):
    """Token ids, and for each of them whether it is learnt."""

    tokens: list[int]
    learnt: list[bool]


class Batch(NamedTuple):
    """Sequences that are read together.

    Attributes:
        tokens: [batch, length] int64.
        learnt: [batch, length] bool.
        index: [batch] int64, which sequences of the data these are.
    """

    tokens: Tensor
    learnt: Tensor
    index: Tensor  # type: ignore[assignment]  # in the place of tuple.index

    def to(self, device: torch.device) -> Batch:
        """Returns the batch with tokens and learnt on a device; the index stays on the CPU."""
        return Batch(self.tokens.to(device), self.learnt.to(device), self.index)


@dataclass(frozen=True, eq=False)
class Sequences:
    """Packed documents.

    Attributes:
        tokens: [sequences, length] int64.
        learnt: [sequences, length] bool; every sequence has a learnt token behind its first one.
        cut: tokens of the documents that are in no sequence.
    """

    tokens: Tensor
    learnt: Tensor
    cut: int = 0
    _orders: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def digest(self) -> str:
        """Returns a fingerprint of the contents."""
        parts = (self.tokens.to(torch.int64), self.learnt.to(torch.uint8))
        content = b"".join(part.contiguous().numpy().tobytes() for part in parts)
        return hashlib.sha256(str(self.tokens.shape[1]).encode() + content).hexdigest()[:16]

    def at(self, index: Tensor) -> Batch:
        """Returns the sequences numbered `index`, [batch] int64."""
        return Batch(self.tokens[index], self.learnt[index], index)

    def order(self, first: int, size: int, seed: int) -> Tensor:
        """Returns which sequences are read at positions `first` to `first + size - 1` of an endless order.

        Every epoch goes through all sequences in an order of its own, which follows from seed and epoch alone, so that
        a position is all that has to be known to go on.

        Returns:
            [size] int64.
        """
        parts = []
        while size > 0:
            epoch, start = divmod(first, len(self))
            parts.append(self._epoch(epoch, seed)[start : start + size])
            first, size = first + len(parts[-1]), size - len(parts[-1])
        return torch.cat(parts)

    def _epoch(self, epoch: int, seed: int) -> Tensor:
        if (epoch, seed) not in self._orders:
            self._orders.clear()  # one is enough: steps go through an epoch in a row
            generator = torch.Generator().manual_seed(mixed_seed(seed, epoch))
            self._orders[epoch, seed] = torch.randperm(len(self), generator=generator)
        return self._orders[epoch, seed]


def read_documents(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit_tokens: int | None = None,
    on_skip: Callable[[InvalidRequest], None] | None = None,
) -> list[Document]:
    """Returns what `stream_documents` yields, as a list."""
    return list(stream_documents(source, tokenizer, limit_tokens=limit_tokens, on_skip=on_skip))


def stream_documents(
    source: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limit_tokens: int | None = None,
    on_skip: Callable[[InvalidRequest], None] | None = None,
) -> Iterator[Document]:
    """Reads and tokenizes a source, in its own order; plain texts end with the end-of-text token, if there is one.

    Args:
        source: as this module describes it.
        tokenizer: the target's.
        limit_tokens: stops after as many, in the middle of a document if need be; a data set is then not downloaded but
            streamed. None reads everything.
        on_skip: told why a row is left out which cannot be used (no assistant turn, a conversation that the template
            does not take). None makes the first such row an error.

    Raises:
        InvalidRequest: the source cannot be read, is malformed or holds nothing.
    """
    if limit_tokens is not None:
        whole_number("limit_tokens", limit_tokens)
    total, skipped = 0, None
    for place, row in _rows(source, streaming=limit_tokens is not None):
        try:
            documents = _documents(row, tokenizer)
        except InvalidRequest as error:
            skipped = InvalidRequest(f"{place}: {error}")
            if on_skip is None:
                raise skipped from error
            on_skip(skipped)
            continue
        for document in documents:
            room = len(document.tokens) if limit_tokens is None else limit_tokens - total
            yield Document(document.tokens[:room], document.learnt[:room])
            total += min(len(document.tokens), room)
            if total == limit_tokens:
                return
    if not total:
        why = f"; the last row that was left out: {skipped}" if skipped else "; at least one text is needed"
        raise InvalidRequest(f"{str(source)!r} holds no training data{why}")


def pack(documents: Iterable[Document], length: int, *, whole: bool = False) -> Sequences:
    """Joins documents and cuts them into sequences of `length` tokens.

    Documents that share a sequence see each other; padding behind the last one is never learnt, and sequences in which
    nothing is learnt are left out.

    Args:
        documents: in the order in which they are joined.
        length: at least 2, since the first token of a sequence has nothing before it.
        whole: every document is in one sequence, with its beginning; longer ones are cut at `length`, and what comes
            behind is counted (see `Sequences.cut`), as are documents of which nothing is learnt. If False, a document
            goes on in the next sequence, without what came before.

    Raises:
        InvalidRequest: the length is too small, or nothing is learnt anywhere.
    """
    if length < 2:
        raise InvalidRequest(f"sequences need a length >= 2, got {length}")
    read = used = 0
    ids, kinds = [], []
    for tokens, learnt in documents:
        read += len(tokens)
        if whole:
            tokens, learnt = tokens[:length], [False, *learnt[1:length]]
            if not any(learnt):
                continue
            room = -used % length
            if len(tokens) > room:
                ids.append(torch.zeros(room, dtype=torch.int64))
                kinds.append(torch.full((room,), _PADDING, dtype=torch.int8))
                used += room
        ids.append(torch.tensor(tokens, dtype=torch.int64))
        kinds.append(torch.tensor([_LEARNT if flag else _READ for flag in learnt], dtype=torch.int8))
        used += len(tokens)
    padding = -used % length
    ids.append(torch.zeros(padding, dtype=torch.int64))
    kinds.append(torch.full((padding,), _PADDING, dtype=torch.int8))
    sequences, kind = torch.cat(ids).view(-1, length), torch.cat(kinds).view(-1, length)
    useful = (kind[:, 1:] == _LEARNT).any(1)
    if not useful.any():
        raise InvalidRequest(f"{read} tokens of training data, none of which is to be learnt; give longer texts")
    kind = kind[useful]
    return Sequences(sequences[useful], kind == _LEARNT, read - int((kind != _PADDING).sum()))


_PADDING, _READ, _LEARNT = range(3)  # what a place in a sequence is


def _documents(row: Any, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Tokenizes a row: a text, a list of messages, or an object with either under one of the known names."""
    content, unfinished, tools = row, False, None
    if isinstance(row, Mapping):
        content = next((row[name] for name in COLUMNS if row.get(name)), None)
        unfinished, tools = bool(row.get("unfinished")), row.get("tools") or None
        if tools is not None and not isinstance(tools, list):
            raise InvalidRequest(f"'tools' must be a list of JSON schemas, got {type(tools).__name__}")
    if isinstance(content, str) and content:
        return [_text(content, tokenizer)]
    messages = [_message(one) for one in content] if isinstance(content, list) and content else [None]
    if None in messages:
        raise InvalidRequest(
            "needs an object with 'text', or with 'messages' or 'conversations', a list of {'role', 'content'}, got "
            f"{str(row)[:60]!r}"
        )
    chat = [one for one in messages if one is not None]
    pieces = encode_chat(chat, tokenizer, tools=tools, unfinished=unfinished)
    return [Document(*piece) for piece in pieces]


_PLAIN = ("role", "from", "content", "value")


def _message(entry: Any) -> Message | None:
    """Reads a message of either notation; None where it is none."""
    if not isinstance(entry, Mapping):
        return None
    role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    # What else a message holds (tool calls, reasoning) is for the template; data sets fill up columns with None.
    more = {name: value for name, value in entry.items() if name not in _PLAIN and value is not None}
    content = "" if content is None and more.get("tool_calls") else content
    if not isinstance(role, str) or not isinstance(content, str):
        return None
    return {"role": ROLES.get(role, role), "content": content, **more}


def _text(text: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    ids: list[int] = list(tokenizer(text).input_ids)
    end = tokenizer.eos_token_id
    if isinstance(end, int) and (not ids or ids[-1] != end):
        ids.append(end)
    return Document(ids, [True] * len(ids))


def _rows(source: str | Path, *, streaming: bool) -> Iterator[tuple[str, Any]]:
    """Yields each row of a source with the place where it stands."""
    if str(source).startswith("dataset:"):
        spec = str(source).removeprefix("dataset:").replace(",", ":", 1)
        if not spec.partition(":")[0].strip():
            raise InvalidRequest(f"a data set needs a name, as in 'dataset:NAME,split=train', got {str(source)!r}")
        yield from _dataset(*parse_spec(spec), streaming)
        return
    path = Path(source).expanduser()
    kind = path.suffix.lower()
    # Streamed, so that no copy is made in the library's cache.
    if kind in (".parquet", ".json", ".csv") and not path.is_dir():
        yield from _dataset(kind[1:], {"data_files": str(path)}, True)
        return
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
        if files and all(file.suffix.lower() == ".txt" for file in files):  # `datasets` would make each line a text
            for file in files:
                yield from _rows(file, streaming=streaming)
            return
        yield from _dataset(str(path), {}, True)
        return
    try:
        with open(path, encoding="utf-8-sig") as lines:
            yield from _json_lines(path, lines) if kind == ".jsonl" else _paragraphs(path, lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read training data from {str(path)!r}: {error}") from error


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidRequest(f"{place}: not valid JSON: {error}") from error
            yield place, row


def _paragraphs(path: Path, lines: Iterable[str]) -> Iterator[tuple[str, Any]]:
    numbered = enumerate(lines, start=1)
    for blank, group in itertools.groupby(numbered, key=lambda one: not one[1].strip()):
        if not blank:
            (number, first), *rest = group
            yield f"{path}, line {number}", "".join([first, *(line for _, line in rest)]).strip("\n")


def _dataset(name: str, options: dict[str, Any], streaming: bool) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    column = options.pop("column", None)
    try:
        rows = load_dataset(name, **{"split": "train", "streaming": streaming} | options)
        for index, row in enumerate(rows):
            if column is not None and column not in row:
                raise InvalidRequest(
                    f"data set {name!r} has the columns {list(row)}, not {column!r}; give another column="
                )
            yield f"data set {name!r}, row {index}", row if column is None else row[column]
    except InvalidRequest:
        raise
    except Exception as error:  # whatever a data set's own code or the network raises
        why = "no rows" if isinstance(error, StopIteration) else f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"cannot read the data set {name!r}: {why}") from error


def mixed_seed(*parts: int) -> int:
    """Returns a seed that no other sequence of numbers is likely to have."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "big")


def split(data: Sequences, held: int | float, seed: int = 0) -> tuple[Sequences, Sequences]:
    """Returns data to train on and data held out of it, a function of the contents' order and the seed alone.

    Args:
        data: at least 2 sequences; both parts keep their order.
        held: how many sequences to hold out, or their share if it is below 1.
        seed: of the choice.

    Raises:
        InvalidRequest: a part would be empty.
    """
    if len(data) < 2:
        raise InvalidRequest(
            f"{len(data)} sequence of {data.tokens.shape[1]} tokens is too little to hold a part out; give more texts, "
            "or shorter sequences"
        )
    count = round(held * len(data)) if 0 < held < 1 else held
    if isinstance(held, bool) or count != int(count) or not 1 <= count < len(data):
        raise InvalidRequest(
            f"of {len(data)} sequences 1 to {len(data) - 1} can be held out, or a share that comes to as many; "
            f"got {held!r}"
        )
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(mixed_seed(seed)))
    out, rest = shuffled[: int(count)].sort().values, shuffled[int(count) :].sort().values
    return Sequences(data.tokens[rest], data.learnt[rest]), Sequences(data.tokens[out], data.learnt[out])


def apart(data: Sequences, held_out: int | float, seed: int, held: Sequences | None) -> tuple[Sequences, Sequences]:
    """Returns what is learnt and what is measured on: all of `data` and `held` where that is given, else a split."""
    return split(data, held_out, seed) if held is None else (data, held)


def frequent_tokens(data: Sequences, count: int, vocabulary: int) -> Tensor:
    """Returns the tokens that are learnt most often, of equally frequent ones the lower ids.

    Args:
        data: where they are counted.
        count: how many.
        vocabulary: number of token ids.

    Returns:
        [count] int64, in the order of their ids.

    Raises:
        InvalidRequest: more tokens than there are.
    """
    if count > vocabulary:
        raise InvalidRequest(f"draft_vocabulary must be <= {vocabulary}, the size of the vocabulary, got {count}")
    occurrences = torch.bincount(data.tokens[data.learnt], minlength=vocabulary)
    return occurrences.argsort(descending=True, stable=True)[:count].sort().values


def check_vocabulary(data: Sequences, size: int) -> None:
    """Refuses tokens that a model of `size` token ids does not have.

    Raises:
        InvalidRequest: there are such.
    """
    largest = int(data.tokens.max())
    if largest >= size:
        raise InvalidRequest(f"the data holds token {largest}, outside the target's vocabulary of {size}")
