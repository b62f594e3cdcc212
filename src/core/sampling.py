"""Sampling settings and the log-weights they make of a model's logits, for target and drafters alike.

Every setting bears the name it has in transformers' `GenerationConfig` and is carried out by Hugging Face's own
logits processor, in the order `generate` applies them. What is new here is the tree: a processor that looks at
the text so far sees, at each node, the prompt, the committed tokens and the path to *that* node.

This module does not know models, rules or random numbers.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

from .errors import InvalidRequest
from .tree import TokenTree

if TYPE_CHECKING:
    from .state import Row


class _Real(NamedTuple):
    """Accepts a number in an interval and returns it as a float."""

    low: float
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False
    hint: str = ""

    def __call__(self, name: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        above = number and (value > self.low if self.open_low else value >= self.low)
        below = number and (value < self.high if self.open_high or self.high == float("inf") else value <= self.high)
        if not (above and below):
            left, right = "(["[not self.open_low], ")]"[not self.open_high and self.high != float("inf")]
            raise InvalidRequest(
                f"{name} must be a number in {left}{self.low}, {self.high}{right}, got {value!r}{self.hint}"
            )
        return float(value)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"{name} must be a whole number >= 0, got {value!r}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}")
    return value


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    """Accepts a non-empty list of token ids."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list of token ids, got {value!r}")
    ids = tuple(value)
    if not ids or any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in ids):
        raise InvalidRequest(f"{name} must be a non-empty list of token ids >= 0, got {value!r}")
    return ids


def _token_or_tokens(name: str, value: Any) -> tuple[int, ...]:
    return _tokens(name, [value] if isinstance(value, int) else value)


def _sequences(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(f"{name} must be a list of lists of token ids, got {value!r}")
    return tuple(_tokens(f"each entry of {name}", entry) for entry in value)


def _biases(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    pairs = value.items() if isinstance(value, dict) else value
    try:
        listed = [(ids, bias) for ids, bias in pairs]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name} must be a dict {{(token ids): bias}} or a list of [[token ids], bias], got {value!r}"
        ) from error
    real = _Real(float("-inf"))
    return tuple((_tokens(f"each key of {name}", ids), real(f"each bias of {name}", bias)) for ids, bias in listed)


def _decay(name: str, value: Any) -> tuple[int, float]:
    try:
        start, factor = value
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} must be a pair (start, factor) such as (15, 1.6), got {value!r}") from error
    return _count(f"start of {name}", start), _Real(0.0, open_low=True)(f"factor of {name}", factor)


def _processors(name: str, value: Any) -> tuple[hf.LogitsProcessor, ...]:
    listed = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(callable(processor) for processor in listed):
        raise InvalidRequest(f"{name} must be a list of LogitsProcessor, got {value!r}")
    return listed


def _watermark(name: str, value: Any) -> hf.WatermarkingConfig:
    if isinstance(value, dict):
        value = hf.WatermarkingConfig.from_dict(value)
    if not isinstance(value, hf.WatermarkingConfig):
        raise InvalidRequest(
            f"{name} must be a transformers.WatermarkingConfig, got {type(value).__name__}; "
            "SynthID keeps one state a row and cannot judge several branches of a tree"
        )
    value.validate()
    return value


def _setting(check: Callable[[str, Any], Any], default: Any = None) -> Any:
    """Declares a field and what it accepts; None always means the default."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; each field as in `transformers.GenerationConfig`.

    A temperature above 0 samples (what `do_sample=True` means there), 0 is greedy, and then the settings from
    `top_h` to `eta_cutoff` have no effect, as in `generate`. None leaves a setting at its default.

    `logits_processor` holds the caller's own processors. They are called with `input_ids` [n, length] int64 and
    `scores` [n, vocabulary] float32 as in `generate`, but the n rows are tree nodes: a processor must be a
    function of its arguments, not of the order of calls or the index in the batch.

    Raises:
        InvalidRequest: a value that cannot work.
    """

    temperature: float = _setting(_Real(0.0, hint="; 0 is greedy, 1 samples from the model as it is"), 0.0)
    top_h: float | None = _setting(_Real(0.0, 1.0, open_low=True))
    top_k: int | None = _setting(_count)
    top_p: float | None = _setting(_Real(0.0, 1.0, open_low=True, hint="; 1 keeps every token"))
    min_p: float | None = _setting(_Real(0.0, 1.0))
    typical_p: float | None = _setting(_Real(0.0, 1.0, open_low=True))
    epsilon_cutoff: float | None = _setting(_Real(0.0, 1.0, open_high=True))
    eta_cutoff: float | None = _setting(_Real(0.0, 1.0, open_high=True))
    sequence_bias: Any = _setting(_biases)
    encoder_repetition_penalty: float | None = _setting(_Real(0.0, open_low=True, hint="; 1 is no penalty"))
    repetition_penalty: float | None = _setting(_Real(0.0, open_low=True, hint="; 1 is no penalty"))
    no_repeat_ngram_size: int | None = _setting(_count)
    encoder_no_repeat_ngram_size: int | None = _setting(_count)
    bad_words_ids: Any = _setting(_sequences)
    min_length: int | None = _setting(_count)
    min_new_tokens: int | None = _setting(_count)
    forced_bos_token_id: int | None = _setting(_count)
    forced_eos_token_id: Any = _setting(_token_or_tokens)
    remove_invalid_values: bool = _setting(_flag, False)
    exponential_decay_length_penalty: tuple[int, float] | None = _setting(_decay)
    suppress_tokens: Any = _setting(_tokens)
    begin_suppress_tokens: Any = _setting(_tokens)
    watermarking_config: Any = _setting(_watermark)
    renormalize_logits: bool = _setting(_flag, False)
    logits_processor: Any = _setting(_processors)

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            value = setting.default if value is None else setting.metadata["check"](setting.name, value)
            object.__setattr__(self, setting.name, value)
        if self.min_length and self.min_new_tokens:
            raise InvalidRequest(
                f"min_length={self.min_length} and min_new_tokens={self.min_new_tokens} contradict each other; give one"
            )

    @classmethod
    def from_fields(cls, **given: Any) -> SamplingParams:
        """Builds the settings from keyword arguments.

        Raises:
            InvalidRequest: an unknown name, or a value that cannot work.
        """
        known = [setting.name for setting in fields(cls)]
        for name in given:
            if name in _ELSEWHERE:
                raise InvalidRequest(f"{name}={given[name]!r}: {_ELSEWHERE[name]}")
            if name not in known:
                close = difflib.get_close_matches(name, known)
                advice = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
                raise InvalidRequest(f"unknown sampling setting {name!r}; {advice}")
        return cls(**given)


_ELSEWHERE = {
    "do_sample": "a temperature above 0 samples, temperature=0 is greedy; leave do_sample out",
    "num_beams": "beam search has no lossless speculative form here; leave num_beams out",
    "guidance_scale": "classifier-free guidance runs a second model pass a token and is not supported",
    "prefix_allowed_tokens_fn": "its batch index means nothing on a tree; pass a LogitsProcessor of your own",
}


class _Step(NamedTuple):
    """One logits processor to be built: what tells it from others, whether it looks at the text so far, how."""

    key: Hashable
    kind: type
    history: bool
    make: Callable[[int, torch.device], Any]


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The processors of one row, in Hugging Face's order.

    They split once: up to the last processor that looks at the text so far, and the rest, which need only the
    scores and so may run on all nodes at once.

    Attributes:
        history: steps up to and including the last that looks at the text so far.
        memoryless: the steps after that.
        greedy: whether the row takes the most likely token (temperature 0).
    """

    history: tuple[_Step, ...]
    memoryless: tuple[_Step, ...]
    greedy: bool
    _built: dict[Hashable, hf.LogitsProcessorList] = field(default_factory=dict)

    @property
    def needs_history(self) -> bool:
        """Whether `process` needs the path to each node."""
        return bool(self.history)

    @property
    def idle(self) -> bool:
        """Whether logits are log-weights already: greedy and nothing to process."""
        return self.greedy and not self.history and not self.memoryless

    def build(self, steps: tuple[_Step, ...], scores: Tensor) -> hf.LogitsProcessorList:
        """Returns the processors of `steps` for the vocabulary and device of `scores` [n, vocabulary].

        Several of them remember both from their first call, and a drafter may differ from the target in either.
        """
        key = (steps is self.history, scores.shape[-1], scores.device)
        if key not in self._built:
            made = [step.make(scores.shape[-1], scores.device) for step in steps]
            self._built[key] = hf.LogitsProcessorList(made)
        return self._built[key]


def compile_pipeline(
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    prompt: Sequence[int],
    max_tokens: int,
    device: torch.device | str = "cpu",
) -> Pipeline:
    """Compiles the settings for one row.

    Args:
        params: the settings.
        eos_token_ids: tokens that end the text; may be empty.
        prompt: the row's prompt.
        max_tokens: length at which the row ends, prompt included.
        device: where the logits will be; others are served too.

    Raises:
        InvalidRequest: a setting needs an end-of-sequence token and there is none.
    """
    steps = _text_steps(params, tuple(eos_token_ids), tuple(prompt), max_tokens)
    steps = _with_own(steps, params.logits_processor or ())
    if params.temperature > 0:
        steps += _warper_steps(params)
    if params.watermarking_config is not None:
        config = params.watermarking_config
        make = lambda vocabulary, device: config.construct_processor(vocabulary, device)  # noqa: E731
        steps.append(_Step(config.to_json_string(), type(config), True, make))
    if params.renormalize_logits:
        steps.append(_step(hf.LogitNormalization))
    split = max((index + 1 for index, step in enumerate(steps) if step.history), default=0)
    return Pipeline(tuple(steps[:split]), tuple(steps[split:]), params.temperature == 0)


def process(
    rows: Sequence[Row],
    logits: Tensor,
    paths: Sequence[Sequence[Sequence[int]]] | None = None,
    *,
    one_hot_greedy: bool = False,
) -> Tensor:
    """Turns logits into log-weights, every node with its own history.

    Args:
        rows: one a batch entry; the same row may come several times.
        logits: [batch, nodes, vocabulary] float; not modified.
        paths: for each batch entry the drafted tokens that lead to each node, the node's own included. An entry
            may have fewer paths than columns; the surplus columns are padding. None: all paths are empty.
        one_hot_greedy: give rows of temperature 0 the weight 1 on their most likely token and 0 elsewhere.

    Returns:
        [batch, nodes, vocabulary] log-weights, not normalised; `logits` itself when no row asks for anything,
        else float32.
    """
    pipelines = [row.pipeline for row in rows]
    if all(pipeline.idle for pipeline in pipelines) and not one_hot_greedy:
        return logits
    scores = logits.to(torch.float32, copy=True)
    _apply_history(rows, scores, paths)
    for same in _group(range(len(rows)), lambda index: _key(pipelines[index].memoryless)):
        pipeline = pipelines[same[0]]
        if pipeline.memoryless:
            flat = scores[same].flatten(0, 1)  # [rows * nodes, vocabulary]
            processors = pipeline.build(pipeline.memoryless, flat)
            nothing = torch.empty(len(flat), 0, dtype=torch.int64, device=flat.device)
            scores[same] = processors(nothing, flat).unflatten(0, (len(same), -1))
    greedy = [index for index, pipeline in enumerate(pipelines) if pipeline.greedy]
    if one_hot_greedy and greedy:
        best = scores[greedy].argmax(-1, keepdim=True)
        scores[greedy] = torch.full_like(scores[greedy], float("-inf")).scatter_(-1, best, 0.0)
    return scores


def tree_paths(tree: TokenTree) -> list[list[list[int]]]:
    """Returns for each row the drafted tokens that lead to the root (none) and to each node, [batch][1 + size]."""
    paths = []
    for tokens, parents in zip(*tree.to_lists(), strict=True):
        row: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            row.append([*row[parent + 1], token])
        paths.append(row)
    return paths


def _apply_history(rows: Sequence[Row], scores: Tensor, paths: Sequence[Sequence[Sequence[int]]] | None) -> None:
    """Runs the processors that look at the text so far, in place: one call a list of processors and length."""
    nodes = [
        (index, column, path)
        for index, row in enumerate(rows)
        if row.pipeline.needs_history
        for column, path in enumerate([()] * scores.shape[1] if paths is None else paths[index])
    ]
    texts: dict[int, Tensor] = {}
    for index, _, _ in nodes:
        if id(rows[index]) not in texts:
            texts[id(rows[index])] = torch.tensor(rows[index].tokens, dtype=torch.int64, device=scores.device)
    groups = _group(
        nodes, lambda node: (_key(rows[node[0]].pipeline.history), len(rows[node[0]].tokens) + len(node[2]))
    )
    for group in groups:
        index, column = [node[0] for node in group], [node[1] for node in group]
        text = [
            torch.cat([texts[id(rows[i])], torch.tensor(path, dtype=torch.int64, device=scores.device)])
            for i, _, path in group
        ]
        picked = scores[index, column]  # [n, vocabulary], a copy
        pipeline = rows[index[0]].pipeline
        scores[index, column] = pipeline.build(pipeline.history, picked)(torch.stack(text), picked)


def _key(steps: tuple[_Step, ...]) -> tuple[Hashable, ...]:
    return tuple(step.key for step in steps)


def _group(items: Iterable[Any], key: Callable[[Any], Hashable]) -> list[list[Any]]:
    groups: dict[Hashable, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


def _step(kind: type, *args: Any, history: bool = False) -> _Step:
    """Returns the step that builds `kind(*args)`; arguments that are devices are filled in when it is built."""

    def make(vocabulary: int, device: torch.device) -> Any:
        return kind(*(device if arg is _DEVICE else arg for arg in args))

    return _Step((kind, args), kind, history, make)


_DEVICE = object()


def _text_steps(params: SamplingParams, eos: tuple[int, ...], prompt: tuple[int, ...], max_tokens: int) -> list[_Step]:
    """Returns the steps that `generate` applies whether it samples or not, in its order."""
    steps: list[_Step] = []
    length = len(prompt)

    def add(kind: type, *args: Any, history: bool = True) -> None:
        steps.append(_step(kind, *args, history=history))

    def add_made(kind: type, key: Hashable, make: Callable[[torch.device], Any], history: bool = True) -> None:
        steps.append(_Step((kind, key), kind, history, lambda vocabulary, device: make(device)))

    if params.sequence_bias:
        pairs = params.sequence_bias
        longer = any(len(ids) > 1 for ids, _ in pairs)
        add_made(hf.SequenceBiasLogitsProcessor, pairs, lambda _: hf.SequenceBiasLogitsProcessor(dict(pairs)), longer)
    if (params.encoder_repetition_penalty or 1.0) != 1.0:
        penalty, kind = params.encoder_repetition_penalty, hf.EncoderRepetitionPenaltyLogitsProcessor
        add_made(kind, (penalty, prompt), lambda device: kind(penalty, torch.tensor([prompt], device=device)), False)
    if (params.repetition_penalty or 1.0) != 1.0:
        add(hf.RepetitionPenaltyLogitsProcessor, params.repetition_penalty)
    if params.no_repeat_ngram_size:
        add(hf.NoRepeatNGramLogitsProcessor, params.no_repeat_ngram_size)
    if params.encoder_no_repeat_ngram_size:
        size, ngram = params.encoder_no_repeat_ngram_size, hf.EncoderNoRepeatNGramLogitsProcessor
        add_made(ngram, (size, prompt), lambda device: ngram(size, torch.tensor([prompt], device=device)))
    words = [list(word) for word in params.bad_words_ids or () if word not in {(token,) for token in eos}]
    if words:
        bad, longer = hf.NoBadWordsLogitsProcessor, any(len(word) > 1 for word in words)
        add_made(bad, params.bad_words_ids, lambda _: bad(words), longer)
    if params.min_length and eos:
        add(hf.MinLengthLogitsProcessor, params.min_length, eos, _DEVICE)
    if params.min_new_tokens and eos:
        add(hf.MinNewTokensLengthLogitsProcessor, length, params.min_new_tokens, eos, _DEVICE)
    if params.forced_bos_token_id is not None:
        add(hf.ForcedBOSTokenLogitsProcessor, params.forced_bos_token_id)
    if params.forced_eos_token_id is not None:
        add(hf.ForcedEOSTokenLogitsProcessor, max_tokens, params.forced_eos_token_id, _DEVICE)
    if params.remove_invalid_values:
        add(hf.InfNanRemoveLogitsProcessor, history=False)
    if params.exponential_decay_length_penalty is not None:
        if not eos:
            raise InvalidRequest("exponential_decay_length_penalty needs an eos_token_id, and there is none")
        add(hf.ExponentialDecayLengthPenalty, params.exponential_decay_length_penalty, eos, length)
    if params.suppress_tokens is not None:
        add(hf.SuppressTokensLogitsProcessor, params.suppress_tokens, _DEVICE, history=False)
    if params.begin_suppress_tokens is not None:
        begin = length if length > 1 or params.forced_bos_token_id is None else length + 1
        add(hf.SuppressTokensAtBeginLogitsProcessor, params.begin_suppress_tokens, begin, _DEVICE)
    return steps


def _with_own(steps: list[_Step], own: Sequence[Any]) -> list[_Step]:
    """Adds the caller's processors as `generate` does: one of a kind that is there takes its place."""
    given = [_Step(id(one), type(one), True, lambda vocabulary, device, one=one: one) for one in own]
    merged = [next((mine for mine in given if mine.kind is step.kind), step) for step in steps]
    return merged + [mine for mine in given if mine not in merged]


def _warper_steps(params: SamplingParams) -> list[_Step]:
    """Returns the steps that `generate` applies only when it samples, in its order. None looks at the text."""
    steps = []
    if params.temperature != 1.0:
        steps.append(_step(hf.TemperatureLogitsWarper, params.temperature))
    if params.top_h is not None:
        steps.append(_step(hf.TopHLogitsWarper, params.top_h))
    if params.top_k:
        steps.append(_step(hf.TopKLogitsWarper, params.top_k))
    if (params.top_p or 1.0) < 1.0:
        steps.append(_step(hf.TopPLogitsWarper, params.top_p))
    if params.min_p:
        steps.append(_step(hf.MinPLogitsWarper, params.min_p))
    if (params.typical_p or 1.0) < 1.0:
        steps.append(_step(hf.TypicalLogitsWarper, params.typical_p))
    if params.epsilon_cutoff:
        steps.append(_step(hf.EpsilonLogitsWarper, params.epsilon_cutoff))
    if params.eta_cutoff:
        steps.append(_step(hf.EtaLogitsWarper, params.eta_cutoff, float("-inf"), 1, _DEVICE))
    return steps
