"""Training data that the target writes itself: user turns from the chat template's bare prefix, and its own answers.

An instruction-tuned model that is handed the template up to the point where a user would speak goes on with what a user
might have said (Magpie, arXiv:2406.08464); answering that, it gives text of its own distribution, which is what a
drafter has to guess. Given prompts, only the answers are written (self-distillation). Texts are decoded in ragged
batches by our own engine. This module knows nothing of what is trained on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from draftwood import Decoder, Generation
from draftwood.core.checks import whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.core.request import Prompt

from .fingerprint import fingerprint

Chat = list[dict[str, str]]
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Writing:
    """How texts are written.

    Attributes:
        samples: conversations to write; with prompts at hand, at most as many.
        turns: user turns of a conversation, each with its answer.
        temperatures: of the answers; conversation i takes the i-th in turn. 0 is greedy.
        user_temperature: of the user turns; greedy ones would all be the same.
        top_p: nucleus that both are sampled from; 1 is off, and fastest.
        user_tokens: most tokens of a user turn; longer ones are dropped.
        answer_tokens: most tokens of an answer; longer ones are cut.
        batch_size: texts decoded at once.
        seed: of all randomness.
    """

    samples: int
    turns: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.7)
    user_temperature: float = 1.0
    top_p: float = 1.0
    user_tokens: int = 128
    answer_tokens: int = 384
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "turns", "user_tokens", "answer_tokens", "batch_size"):
            whole_number(name, getattr(self, name))
        for value in (*self.temperatures, self.user_temperature):
            if not 0 <= value < math.inf:
                raise InvalidRequest(f"a temperature must be >= 0, got {value}")
        if not self.temperatures:
            raise InvalidRequest("temperatures must name at least one temperature, got none")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def chunk(self) -> int:
        """Conversations written between two saves: enough to keep the batch full for most of the time."""
        return 4 * self.batch_size


class Written(NamedTuple):
    """How far the writing is.

    Attributes:
        tried: conversations begun.
        kept: those in the file.
        repeated: those whose first user turn was written before.
        dropped: those with a user turn that was empty or did not end.
        tokens: tokens of all answers.
    """

    tried: int = 0
    kept: int = 0
    repeated: int = 0
    dropped: int = 0
    tokens: int = 0


def synthesise(
    decoder: Decoder,
    output: str | Path,
    writing: Writing,
    *,
    prompts: Sequence[Chat] | None = None,
    on_chunk: Callable[[Written], None] | None = None,
) -> Written:
    """Writes conversations as JSON lines of `messages`, which `read_documents` reads.

    What is written depends on the settings alone: a run that was stopped goes on where it was last saved, and the file
    is the one that it would have been.

    A last answer that was cut at its limit is marked `unfinished`, so that nobody learns to end there.

    Args:
        decoder: of the target; its drafter and rule change the time that writing takes, and not its law.
        output: file to write. Beside it `<output>.progress` says how far it is.
        writing: how much, and how.
        prompts: conversations that end with a user turn, to be answered; None has the target write its own.
        on_chunk: called whenever texts were saved.

    Raises:
        InvalidRequest: the tokenizer has no chat template, a prompt does not end with a user turn, or `output` holds
            what other settings wrote.
    """
    if not getattr(decoder.target.tokenizer, "chat_template", None):
        raise InvalidRequest("the target's tokenizer has no chat template; self-written text needs one")
    if prompts is not None and not prompts:
        raise InvalidRequest("prompts is empty; give at least one conversation, or None")
    for number, chat in enumerate(prompts or ()):
        if not chat or chat[-1].get("role") != "user":
            raise InvalidRequest(f"prompts[{number}] must end with a user turn, got {str(chat)[-60:]!r}")
    samples = writing.samples if prompts is None else min(writing.samples, len(prompts))
    setup = json.loads(
        json.dumps({**asdict(writing), "model": fingerprint(decoder.target.model), "prompts": _digest(prompts)})
    )
    del setup["samples"]  # more may be asked for later
    file = _File(Path(output).expanduser(), setup)
    done = file.done
    while done.tried < samples:
        indices = range(done.tried, min(done.tried + writing.chunk, samples))
        begun: list[Chat] = [[] for _ in indices] if prompts is None else [list(prompts[index]) for index in indices]
        kept = repeated = dropped = tokens = 0
        lines = []
        for one in _converse(decoder, begun, indices, writing, given=prompts is not None):
            if not one.usable:
                dropped += 1
            elif not file.first_time(one.chat):
                repeated += 1
            else:
                kept, tokens = kept + 1, tokens + one.tokens
                line = {"messages": one.chat, **({"unfinished": True} if one.unfinished else {})}
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        step = Written(len(indices), kept, repeated, dropped, tokens)
        done = Written(*(before + more for before, more in zip(done, step, strict=True)))
        file.save(lines, done)
        if on_chunk is not None:
            on_chunk(done)
    return done


@dataclass
class _Conversation:
    """One conversation as it grows."""

    sample: int
    chat: Chat
    usable: bool = True
    unfinished: bool = False
    tokens: int = 0


def _converse(
    decoder: Decoder, begun: Sequence[Chat], samples: Sequence[int], writing: Writing, *, given: bool
) -> list[_Conversation]:
    """Writes the turns of some conversations, side by side."""
    all_of_them = [_Conversation(sample, chat) for sample, chat in zip(samples, begun, strict=True)]
    user = _sampling(writing.user_temperature, writing.top_p)
    for turn in range(1 if given else writing.turns):
        if not given:
            live = [one for one in all_of_them if one.usable and not one.unfinished]
            prefixes = [_user_prefix(decoder, one.chat) for one in live]
            asked = _decode(decoder, prefixes, live, [user] * len(live), 2 * turn, writing.user_tokens, writing)
            for one, made in zip(live, asked, strict=True):
                text = made.text.strip()
                one.usable = bool(text) and made.stop_reason == "eos"
                one.chat = [*one.chat, {"role": "user", "content": text}]
        live = [one for one in all_of_them if one.usable and not one.unfinished]
        temperatures = [writing.temperatures[one.sample % len(writing.temperatures)] for one in live]
        own = [_sampling(temperature, writing.top_p) for temperature in temperatures]
        answers = _decode(decoder, [one.chat for one in live], live, own, 2 * turn + 1, writing.answer_tokens, writing)
        for one, made in zip(live, answers, strict=True):
            one.chat = [*one.chat, {"role": "assistant", "content": made.text}]
            one.unfinished = made.stop_reason != "eos"
            one.usable = bool(made.text.strip())
            one.tokens += len(made.tokens)
    return all_of_them


def _sampling(temperature: float, top_p: float) -> dict[str, float]:
    return {"temperature": temperature, **({"top_p": top_p} if temperature and top_p < 1 else {})}


def _decode(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    live: Sequence[_Conversation],
    own: Sequence[Mapping[str, float]],
    stage: int,
    tokens: int,
    writing: Writing,
) -> list[Generation]:
    """Decodes one text for each of `live`; its seed is its own, so that neighbours do not matter."""
    if not live:
        return []
    encoded = [decoder.encode(prompt) for prompt in prompts]
    context = decoder.target.context_length or math.inf
    per_prompt = [
        {
            **settings,
            "seed": _seed(writing.seed, one.sample, stage),
            "max_new_tokens": int(min(tokens, context - len(ids))),
        }
        for one, settings, ids in zip(live, own, encoded, strict=True)
    ]
    made: list[Generation] = decoder.generate(encoded, batch_size=writing.batch_size, per_prompt=per_prompt)
    return made


def _user_prefix(decoder: Decoder, chat: Chat) -> list[int]:
    """Returns the tokens of the chat template up to where the next user turn's words begin."""
    tokenizer: Any = decoder.target.tokenizer
    text = str(tokenizer.apply_chat_template([*chat, {"role": "user", "content": MARK}], tokenize=False))
    if text.count(MARK) != 1:
        raise InvalidRequest("the chat template does not write a user's words once, as they are; give prompts instead")
    ids: list[int] = tokenizer(text[: text.index(MARK)], add_special_tokens=False).input_ids
    if not ids:
        raise InvalidRequest("the chat template puts nothing before a user's words; give prompts instead")
    return ids


class _File:
    """The lines written so far and, beside them, how far they reach."""

    def __init__(self, path: Path, setup: dict[str, Any]) -> None:
        self._path, self._progress = path, path.with_name(path.name + ".progress")
        self._setup = setup
        self._seen: set[bytes] = set()
        self.done = Written()
        self._size = 0
        if self._progress.exists():
            self._resume()
        elif path.exists():
            raise InvalidRequest(f"{str(path)!r} exists and was not written here; give another file")

    def first_time(self, chat: Chat) -> bool:
        """Tells whether no earlier conversation began alike: with the same user turn, or all of the same prompt."""
        written = self._setup["prompts"] is None
        begun = [next(message for message in chat if message["role"] == "user")] if written else chat[:-1]
        words = [f"{message['role']} {' '.join(str(message['content']).lower().split())}" for message in begun]
        key = hashlib.sha256("\n".join(words).encode("utf-8", "surrogatepass")).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def save(self, lines: Sequence[str], done: Written) -> None:
        """Appends lines, and notes that they are there once they are on the disk."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._progress.exists():  # else a file whose writing was killed here would be a stranger's
            self._note()
        with open(self._path, "ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()
        self.done = done
        self._note()

    def _note(self) -> None:
        partial = self._progress.with_name(self._progress.name + ".partial")
        with open(partial, "w", encoding="utf-8") as note:
            json.dump({"settings": self._setup, "done": self.done._asdict(), "bytes": self._size}, note)
            note.flush()
            os.fsync(note.fileno())
        partial.replace(self._progress)

    def _resume(self) -> None:
        try:
            note = json.loads(self._progress.read_text(encoding="utf-8"))
            begun, self.done, self._size = note["settings"], Written(**note["done"]), int(note["bytes"])
            with open(self._path, "r+b" if self._size else "w+b") as file:
                file.truncate(self._size)  # what a killed run had begun to write
                for line in file:
                    self.first_time(json.loads(line)["messages"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"{str(self._path)!r} cannot be gone on with ({type(error).__name__}: {error}); delete it and "
                f"{self._progress.name!r}, or give another file"
            ) from error
        if begun != self._setup:
            other = {name: begun.get(name) for name in self._setup if begun.get(name) != self._setup[name]}
            raise InvalidRequest(f"{str(self._path)!r} was begun with other settings: {other}; give another file")


def _seed(seed: int, sample: int, stage: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {sample} {stage}".encode()).digest()[:6], "big")


def _digest(prompts: Sequence[Chat] | None) -> str | None:
    if prompts is None:
        return None
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
