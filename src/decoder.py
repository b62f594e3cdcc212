"""Decoder: a target, a drafter and a rule, wired. Prompts in, texts out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .core.checks import whole_number
from .core.drafter import Drafter
from .core.engine import Engine
from .core.errors import InvalidRequest
from .core.registry import Registry
from .core.request import Limits, Prompt, as_list, encode, kept, longest, split_settings
from .core.rule import Rule, SeededSource, draft_generator
from .core.sampling import SamplingParams, compile_pipeline
from .core.state import Row
from .core.stats import RowStats, Seconds
from .core.stopping import Stopper
from .core.streaming import TextStream
from .core.target import Target
from .plugins import load_registry


@dataclass(frozen=True)
class Generation:
    """One decoded text.

    Attributes:
        text: the new text, without the prompt and without special tokens; empty if the target has no tokenizer.
        tokens: the new token ids, the end-of-text token included where one ended the text.
        stop_reason: `eos`, `stop_string`, `criteria`, `time` or `length`.
        prompt_tokens: how many tokens the prompt had.
        stats: rounds, tau, acceptance by depth; `stats.seconds` is shared by all texts of the call.
    """

    text: str
    tokens: list[int]
    stop_reason: str
    prompt_tokens: int
    stats: RowStats


class StreamStep(NamedTuple):
    """What one round added to a streamed text.

    Attributes:
        pieces: (text, drafted) pairs in order; `drafted` says that the draft had guessed this piece.
        tokens: the committed token ids.
        drafted: how many of them, the first ones, had been drafted.
        stop_reason: why the text ended with this step; None while it goes on.
    """

    pieces: list[tuple[str, bool]]
    tokens: list[int]
    drafted: int
    stop_reason: str | None


class _Settings(NamedTuple):
    limits: Limits
    params: SamplingParams
    eos: tuple[int, ...]
    stopper: Stopper


class Decoder:
    """Generates with one drafter and one rule.

    Args:
        target: a `Target`, or what `Target.from_pretrained` takes.
        drafter: a name (`"eagle"`, or several joined by `+`), or a `Drafter` of your own, of which
            a copy is bound (`decoder.drafter`).
        drafter_options: keyword options of a drafter given by name.
        rule: a name, `"auto"` (greedy at temperature 0, rejection above), or a `Rule` of your own.
        rule_options: keyword options of a rule given by name.
        registry: plugins to choose from; the built-in and installed ones when None.

    Raises:
        UnknownName: no such drafter or rule.
        InvalidRequest: an option that the drafter or rule does not have, or a value it cannot work with.
    """

    def __init__(
        self,
        target: Target | str,
        drafter: str | Drafter = "none",
        *,
        drafter_options: Mapping[str, Any] | None = None,
        rule: str | Rule = "auto",
        rule_options: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> None:
        self.registry = registry or load_registry()
        self._rule = rule
        self._rule_options = dict(rule_options or {})
        if isinstance(rule, str) and rule != "auto":
            self.registry.create_rule(rule, self._rule_options)
        elif self._rule_options:
            raise InvalidRequest(f"rule_options {self._rule_options} need a rule given by name, got rule={rule!r}")
        if isinstance(drafter, str):
            drafter = self.registry.create_drafter(drafter, dict(drafter_options or {}))
        elif drafter_options:
            raise InvalidRequest("drafter_options go with a drafter's name; this drafter is already built")
        self.target = target if isinstance(target, Target) else Target.from_pretrained(target)
        # A copy, since binding ties a drafter to one target; the caller's may serve others.
        self.drafter = drafter.copy()
        self.drafter.bind(self.target)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        batch_size: int = 8,
        per_prompt: Sequence[Mapping[str, Any]] | None = None,
        **settings: Any,
    ) -> Any:
        """Decodes one prompt to a `Generation`, a list of prompts to a list of them.

        Args:
            prompts: a prompt, or a list of prompts. A list of ints is one prompt of token ids, a list of
                messages is one chat.
            batch_size: most texts decoded at once; a text that ends makes room for the next.
            per_prompt: settings that differ between prompts, one mapping a prompt, over those in `settings`. A
                prompt with a `seed` of its own is drawn as it would be alone, wherever it stands in the list.
            **settings: fields of `Limits` and every sampling field of transformers' `GenerationConfig`
                (`temperature`, 0 by default which is greedy; `top_k`, `top_p`, `repetition_penalty`, ...) by
                their own names, and `logits_processor` for processors of your own.

        Raises:
            InvalidRequest: a prompt or a setting that cannot work; the message names the value.
        """
        single, many = as_list(prompts)
        seconds = Seconds()
        rows = self.rows(many, settings, per_prompt, seconds)
        for _ in self.engine(rows).decode(rows, whole_number("batch_size", batch_size), seconds):
            pass
        done = [self._generation(row) for row in rows]
        return done[0] if single else done

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[StreamStep]:
        """Decodes one prompt and yields what each round commits; settings as in `generate`.

        Raises:
            InvalidRequest: as `generate`, before the first step.
        """
        single, many = as_list(prompt)
        if not single:
            raise InvalidRequest(f"stream takes one prompt, got a list of {len(many)}")
        seconds = Seconds()
        rows = self.rows(many, settings, None, seconds)
        return self._stream(rows, seconds)

    def _stream(self, rows: list[Row], seconds: Seconds) -> Iterator[StreamStep]:
        text = TextStream(self.target.tokenizer)
        for row, tokens, drafted in self.engine(rows).decode(rows, 1, seconds):
            parts = [(part, guessed) for part, guessed in ((tokens[:drafted], True), (tokens[drafted:], False)) if part]
            pieces = [
                (text.push(part, complete=row.stop_reason is not None and place == len(parts)), guessed)
                for place, (part, guessed) in enumerate(parts, start=1)
            ]
            yield StreamStep([piece for piece in pieces if piece[0]], tokens, drafted, row.stop_reason)

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns a prompt's token ids.

        Raises:
            InvalidRequest: it is empty, holds ids outside the vocabulary, or needs a tokenizer that is missing.
        """
        return encode(self.target, prompt)

    def rows(
        self,
        prompts: Sequence[Prompt],
        settings: Mapping[str, Any],
        per_prompt: Sequence[Mapping[str, Any]] | None,
        seconds: Seconds,
    ) -> list[Row]:
        """Returns the rows of a call, ready for the engine; arguments as of `generate`."""
        if per_prompt is not None and not (
            isinstance(per_prompt, Sequence) and all(isinstance(own, Mapping) for own in per_prompt)
        ):
            raise InvalidRequest(f"per_prompt must be a list of mappings, one a prompt, got {per_prompt!r}")
        if per_prompt is not None and len(per_prompt) != len(prompts):
            raise InvalidRequest(f"per_prompt has {len(per_prompt)} entries for {len(prompts)} prompts")
        settings = {name: kept(value) for name, value in settings.items()}
        common = self._settings(settings)
        rows = []
        for index, prompt in enumerate(prompts):
            own = per_prompt[index] if per_prompt is not None else {}
            # A prompt with a seed of its own gets the text that it would get alone.
            stream = 0 if "seed" in own else index
            merged = self._settings({**settings, **own}) if own else common
            rows.append(self._row(index, stream, self.encode(prompt), merged))
            rows[-1].stats.seconds = seconds
        return rows

    def _settings(self, settings: Mapping[str, Any]) -> _Settings:
        """Checks settings and builds what rows that share them also share."""
        limits, params = split_settings(settings)
        if limits.max_time is not None and self.target.sharded:
            raise InvalidRequest(
                f"max_time={limits.max_time} ends a text by the clock of one process, and all that share the target "
                "must end it together; use max_new_tokens"
            )
        eos = self.target.eos_token_ids if limits.eos_ids is None else limits.eos_ids
        stopper = Stopper(
            eos,
            max_tokens=0,
            stop_strings=limits.stop_strings,
            tokenizer=self.target.tokenizer,
            criteria=limits.stopping_criteria,
            max_time=limits.max_time,
            device=self.target.device,
        )
        self._check_ids("eos_token_id", eos)
        for name in ("suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "bad_words_ids"):
            self._check_ids(name, getattr(params, name))
        self._check_ids("forced_bos_token_id", params.forced_bos_token_id)
        self._check_ids("sequence_bias", [ids for ids, _ in params.sequence_bias or ()])
        return _Settings(limits, params, eos, stopper)

    def _check_ids(self, name: str, ids: Any) -> None:
        """Checks token ids, however deeply listed, against the vocabulary."""
        if isinstance(ids, int):
            if not 0 <= ids < self.target.vocabulary_size:
                raise InvalidRequest(
                    f"{name} names token {ids}; the vocabulary has {self.target.vocabulary_size} "
                    f"(0 to {self.target.vocabulary_size - 1})"
                )
        elif ids is not None:
            for inner in ids:
                self._check_ids(name, inner)

    def _row(self, key: int, stream: int, tokens: list[int], settings: _Settings) -> Row:
        target, limits = self.target, settings.limits
        max_tokens = longest(limits, len(tokens), target.context_length)
        pipeline = compile_pipeline(settings.params, eos_token_ids=settings.eos, prompt=tokens, max_tokens=max_tokens)
        return Row(
            key=key,
            tokens=tokens,
            prompt_length=len(tokens),
            max_tokens=max_tokens,
            pipeline=pipeline,
            stopper=settings.stopper.for_row(max_tokens),
            source=SeededSource(limits.seed, stream),
            generator=draft_generator(limits.seed, stream),
        )

    def engine(self, rows: Iterable[Row]) -> Engine:
        """Returns the engine for these rows, its rule resolved: `auto` is greedy where no row samples."""
        hot = any(not row.pipeline.greedy for row in rows)
        rule = self._rule
        if isinstance(rule, str):
            name = ("rejection" if hot else "greedy") if rule == "auto" else rule
            rule = self.registry.create_rule(name, self._rule_options)
        if hot and not rule.samples:
            raise InvalidRequest(
                f"the rule {type(rule).__name__} takes the most likely token: a temperature above 0 has no effect; "
                "use temperature=0, or rule='rejection' or 'coupled'"
            )
        return Engine(self.target, self.drafter, rule)

    def _generation(self, row: Row) -> Generation:
        reason = row.stop_reason or "length"
        text = TextStream(self.target.tokenizer).push(row.output, complete=True)
        return Generation(text, row.output, reason, row.prompt_length, row.stats)
