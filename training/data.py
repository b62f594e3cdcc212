"""Texts and conversations as token sequences of one length, and which of their tokens are learnt.

A `.jsonl` file holds an object a line: `{"text": "..."}`, or `{"messages": [{"role": "user", "content": "..."}, ...]}`,
which the tokenizer's chat template renders and of which only what the assistant says is learnt. Any other file is
plain text, of which empty lines separate one document from the next. This module knows no model and no loss.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftwood.core.errors import InvalidRequest


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
    """

    tokens: Tensor
    learnt: Tensor
    _orders: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def digest(self) -> str:
        """Returns a fingerprint of the contents."""
        parts = (self.tokens.to(torch.int64), self.learnt.to(torch.uint8))
        return hashlib.sha256(b"".join(part.contiguous().numpy().tobytes() for part in parts)).hexdigest()[:16]

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


def read_documents(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Reads and tokenizes a file, in its own order; plain texts end with the end-of-text token, if there is one.

    Raises:
        InvalidRequest: the file cannot be read, is malformed or holds nothing.
    """
    path = Path(path).expanduser()
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read training data from {str(path)!r}: {error}") from error
    if path.suffix == ".jsonl":
        documents = [_from_line(f"{path}, line {number}", line, tokenizer) for number, line in _lines(content)]
    else:
        documents = [_text(part.strip("\n"), tokenizer) for part in re.split(r"\n\s*\n", content) if part.strip()]
    if not documents:
        raise InvalidRequest(f"{str(path)!r} holds no training data; at least one text is needed")
    return documents


def pack(documents: Iterable[Document], length: int) -> Sequences:
    """Joins documents and cuts them into sequences of `length` tokens.

    Documents that share a sequence see each other; padding behind the last one is never learnt, and sequences in which
    nothing is learnt are left out.

    Args:
        documents: in the order in which they are joined.
        length: at least 2, since the first token of a sequence has nothing before it.

    Raises:
        InvalidRequest: the length is too small, or nothing is learnt anywhere.
    """
    if length < 2:
        raise InvalidRequest(f"sequences need a length >= 2, got {length}")
    tokens = [token for document in documents for token in document.tokens]
    learnt = [flag for document in documents for flag in document.learnt]
    padding = -len(tokens) % length
    ids = torch.tensor(tokens + [0] * padding, dtype=torch.int64).view(-1, length)
    flags = torch.tensor(learnt + [False] * padding, dtype=torch.bool).view(-1, length)
    useful = flags[:, 1:].any(1)
    if not useful.any():
        raise InvalidRequest(f"{len(tokens)} tokens of training data, none of which is to be learnt; give longer texts")
    return Sequences(ids[useful], flags[useful])


def _lines(content: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(), which also splits at separators that JSON allows inside a string.
    return ((number, line) for number, line in enumerate(content.split("\n"), start=1) if line.strip())


def _from_line(place: str, line: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{place}: not valid JSON: {error}") from error
    text, messages = (entry.get("text"), entry.get("messages")) if isinstance(entry, dict) else (None, None)
    if isinstance(text, str) and text:
        return _text(text, tokenizer)
    if isinstance(messages, list) and messages and all(map(_is_message, messages)):
        return _chat(place, messages, tokenizer)
    raise InvalidRequest(
        f"{place}: needs an object with 'text', or with 'messages', a list of {{'role', 'content'}}, got {line[:60]!r}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _text(text: str, tokenizer: PreTrainedTokenizerBase) -> Document:
    ids: list[int] = list(tokenizer(text).input_ids)
    end = tokenizer.eos_token_id
    if isinstance(end, int) and (not ids or ids[-1] != end):
        ids.append(end)
    return Document(ids, [True] * len(ids))


def _chat(place: str, messages: Sequence[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase) -> Document:
    """Learns the assistant's words, and how its turns end, but not how they begin."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidRequest(f"{place}: the tokenizer has no chat template for 'messages'; give 'text' instead")
    if not tokenizer.is_fast:
        raise InvalidRequest(f"{place}: {type(tokenizer).__name__} cannot tell which tokens are whose; give 'text'")

    def render(count: int, prompt: bool) -> str:
        chat = [dict(message) for message in messages[:count]]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt))

    whole = render(len(messages), False)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = render(index, True), render(index + 1, False)
            if not (whole.startswith(after) and after.startswith(before)):
                raise InvalidRequest(
                    f"{place}: the chat template writes message {index + 1} differently when others follow it, so that "
                    "its tokens cannot be told; give a line for each answer, or 'text'"
                )
            spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    offsets: list[tuple[int, int]] = encoded["offset_mapping"]
    learnt = [any(start <= begin < stop for start, stop in spans) for begin, _ in offsets]
    return Document(list(encoded.input_ids), learnt)


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
    count = round(held * len(data)) if 0 < held < 1 else held
    if isinstance(held, bool) or count != int(count) or not 1 <= count < len(data):
        raise InvalidRequest(
            f"of {len(data)} sequences 1 to {len(data) - 1} can be held out, or a share that comes to as many; "
            f"got {held!r}"
        )
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(mixed_seed(seed)))
    out, rest = shuffled[: int(count)].sort().values, shuffled[int(count) :].sort().values
    return Sequences(data.tokens[rest], data.learnt[rest]), Sequences(data.tokens[out], data.learnt[out])
