"""The cells of a study: which conditions, which prompts. A cell's key says when two studies mean the same cell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from ..core.target import Target
from .prompts import PromptSet, StudyPrompt

MIXED = "mixed"
"""Category of a batch that holds prompts of several."""

RECHECK_EVERY = 3
"""Plain decoding runs twice in every so many cells; the differences say how noisy the machine is."""


@dataclass(frozen=True)
class Conditions:
    """What is equal for all drafters of a cell.

    Attributes:
        target: where the target came from.
        dtype: of its weights, and whether they are packed.
        rule: name of the acceptance rule.
        temperature: 0 is greedy.
        batch_size: prompts decoded together.
        max_new_tokens: of each text.
        seed: of the first repeat.
        chat: whether prompts are rendered by the chat template.
    """

    target: str
    dtype: str
    rule: str = "auto"
    temperature: float = 0.0
    batch_size: int = 1
    max_new_tokens: int = 64
    seed: int = 0
    chat: bool = False

    @classmethod
    def of(
        cls, target: Target, source: Target | str | Path, *, max_new_tokens: int, seed: int, chat: bool | None
    ) -> Conditions:
        """Fills in what the target knows: its name, its type, whether it has a chat template."""
        known = source if not isinstance(source, Target) else target.model.config.name_or_path
        chat = bool(getattr(target.tokenizer, "chat_template", None)) if chat is None else chat
        dtype = str(target.dtype).removeprefix("torch.") + (", packed" if target.packed else "")
        name = str(known or type(target.model).__name__)
        return cls(name, dtype, chat=chat, max_new_tokens=max_new_tokens, seed=seed)


@dataclass(frozen=True)
class Cell:
    """One batch of prompts under one set of conditions: the unit that is claimed, run and written down.

    Attributes:
        conditions: what is equal for all drafters.
        prompt_set: name of the set the prompts are from.
        category: of the prompts; `mixed` for several.
        prompts: as many as the batch size.
        repeat: 0 for the first run of these prompts.
        index: place in the study; rotates the order of the drafters.
    """

    conditions: Conditions
    prompt_set: str
    category: str
    prompts: tuple[StudyPrompt, ...]
    repeat: int
    index: int

    @property
    def prompt_ids(self) -> list[str]:
        """The ids of the prompts."""
        return [prompt.id for prompt in self.prompts]

    @property
    def recheck(self) -> bool:
        """Whether plain decoding is run a second time."""
        return self.index % RECHECK_EVERY == 0

    @cached_property
    def key(self) -> str:
        """A digest of everything that the measured texts depend on."""
        meant = [asdict(self.conditions), [asdict(prompt) for prompt in self.prompts], self.repeat]
        return hashlib.blake2b(json.dumps(meant).encode(), digest_size=12).hexdigest()


def plan(conditions: Conditions, sets: Sequence[PromptSet], repeats: int) -> Iterator[Cell]:
    """Yields the cells of some conditions: every repeat of every batch of every prompt set."""
    index = 0
    for repeat in range(repeats):
        for prompt_set in sets:
            for batch in _batches(prompt_set.prompts, conditions.batch_size):
                categories = {prompt.category for prompt in batch}
                category = categories.pop() if len(categories) == 1 else MIXED
                yield Cell(conditions, prompt_set.name, category, batch, repeat, index)
                index += 1


def _batches(prompts: Sequence[StudyPrompt], size: int) -> Iterator[tuple[StudyPrompt, ...]]:
    """Cuts prompts into full batches, of one category where it has enough; the rest are mixed.

    The last batch is filled up from the beginning: a batch that is not full would measure another batch size. Prompts
    of equally many turns are put together, since a batch has the turns of its shortest conversation.
    """
    groups: dict[tuple[str, int], list[StudyPrompt]] = {}
    for prompt in prompts:
        group = groups.setdefault((prompt.category, len(prompt.turns)), [])
        group.append(prompt)
        if len(group) == size:
            yield tuple(group)
            group.clear()
    rest = sorted((prompt for group in groups.values() for prompt in group), key=lambda one: len(one.turns))
    for start in range(0, len(rest), size):
        batch = rest[start : start + size]
        fill = [prompts[index % len(prompts)] for index in range(size - len(batch))]
        yield (*batch, *fill)
