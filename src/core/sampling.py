"""From logits to log-weights, for target and drafters alike.

Every setting is carried out by Hugging Face's own logits processor, in the order `generate` applies them. What is
new here is the tree: a processor that looks at the text so far sees, at each node, the prompt, the committed tokens
and the path to *that* node.

This module does not know models, rules or random numbers.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import transformers as hf
from torch import Tensor

from .errors import InvalidRequest
from .settings import SamplingParams
from .tree import TokenTree

if TYPE_CHECKING:
    from .state import Row

__all__ = ["Pipeline", "SamplingParams", "compile_pipeline", "process", "tree_paths"]

T = TypeVar("T")


class Step(NamedTuple):
    """One logits processor, not built yet.

    Attributes:
        kind: its class.
        values: what it is built from; steps of equal kind and values do the same.
        history: whether it looks at the text so far.
        make: builds it for a vocabulary size and a device.
    """

    kind: type
    values: Hashable
    history: bool
    make: Callable[[int, torch.device], Any]

    @property
    def key(self) -> Hashable:
        """Equal for steps that do the same."""
        return self.kind, self.values


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The processors of one row, in the order of `generate`.

    They are cut once: the ones up to the last that looks at the text so far, and the rest, which need nothing but
    the scores and so run on all nodes of all rows at once.

    Attributes:
        history: steps up to and including the last that looks at the text so far.
        memoryless: the steps after that.
        greedy: whether the row takes the most likely token (temperature 0).
    """

    history: tuple[Step, ...]
    memoryless: tuple[Step, ...]
    greedy: bool
    _built: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def needs_history(self) -> bool:
        """Whether `process` needs the path to each node."""
        return bool(self.history)

    @property
    def idle(self) -> bool:
        """Whether logits are log-weights already: greedy and nothing to process."""
        return self.greedy and not self.history and not self.memoryless

    @property
    def blind(self) -> bool:
        """Whether no step asks which token a score is of, so that the scores of some tokens can be processed alone."""
        return not self.history and all(step.kind in _BLIND for step in self.memoryless)

    @cached_property
    def history_key(self) -> Hashable:
        """Equal for pipelines whose `history` does the same."""
        return tuple(step.key for step in self.history)

    @cached_property
    def memoryless_key(self) -> Hashable:
        """Equal for pipelines whose `memoryless` does the same."""
        return tuple(step.key for step in self.memoryless)

    def run(self, steps: tuple[Step, ...], input_ids: Tensor, scores: Tensor) -> Tensor:
        """Applies `history` or `memoryless`.

        Args:
            steps: one of the two.
            input_ids: [n, length] int64.
            scores: [n, vocabulary] float32.
        """
        # Some processors fix vocabulary and device at their first call; a drafter may have others than the target.
        key = (steps is self.history, scores.shape[-1], scores.device)
        if key not in self._built:
            self._built[key] = hf.LogitsProcessorList(step.make(scores.shape[-1], scores.device) for step in steps)
        processors: Callable[[Tensor, Tensor], Tensor] = self._built[key]
        return processors(input_ids, scores)


def compile_pipeline(
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    prompt: Sequence[int],
    max_tokens: int,
) -> Pipeline:
    """Compiles the settings for one row, for logits of any vocabulary size on any device.

    Args:
        params: the settings.
        eos_token_ids: tokens that end the text; may be empty.
        prompt: the row's prompt.
        max_tokens: length at which the row ends, prompt included.

    Raises:
        InvalidRequest: a setting needs an end-of-sequence token and there is none.
    """
    eos, prompt = tuple(eos_token_ids), tuple(prompt)
    steps = _merge([*_content_steps(params, eos, prompt), *_length_steps(params, eos, len(prompt), max_tokens)], params)
    if params.temperature > 0:
        steps += _warper_steps(params)
    if params.watermarking_config is not None:
        config = params.watermarking_config
        steps.append(Step(hf.WatermarkLogitsProcessor, config.to_json_string(), True, config.construct_processor))
    if params.renormalize_logits:
        steps.append(_step(hf.LogitNormalization))
    cut = max((index + 1 for index, step in enumerate(steps) if step.history), default=0)
    return Pipeline(tuple(steps[:cut]), tuple(steps[cut:]), params.temperature == 0)


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
        paths: for each batch entry and node the drafted tokens that lead to it, the node's own included. An entry
            may have fewer paths than there are columns: the others are padding. None: all paths are empty.
        one_hot_greedy: give rows of temperature 0 the log-weight 0 at their most likely token and -inf elsewhere.

    Returns:
        [batch, nodes, vocabulary] log-weights, not normalised: `logits` itself when no row asks for anything, else
        float32 (a copy, as `generate` makes one).
    """
    pipelines = [row.pipeline for row in rows]
    if all(pipeline.idle for pipeline in pipelines) and not one_hot_greedy:
        return logits
    scores = logits.to(torch.float32, copy=True)
    _run_history(rows, scores, paths)
    for alike in _group(range(len(rows)), lambda index: pipelines[index].memoryless_key):
        pipeline = pipelines[alike[0]]
        if pipeline.memoryless:
            picked = (scores if len(alike) == len(rows) else scores[alike]).flatten(0, 1)  # [rows * nodes, vocabulary]
            no_text = torch.empty(len(picked), 0, dtype=torch.int64, device=picked.device)
            scores[alike] = pipeline.run(pipeline.memoryless, no_text, picked).reshape(len(alike), *scores.shape[1:])
    greedy = [index for index, pipeline in enumerate(pipelines) if pipeline.greedy]
    if one_hot_greedy and greedy:
        best = scores[greedy].argmax(-1, keepdim=True)
        scores[greedy] = torch.full_like(scores[greedy], float("-inf")).scatter_(-1, best, 0.0)
    return scores


def on_every_node(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Gives a processor that holds one prompt as many copies of it as there are nodes.

    Older versions of transformers (5.0 and 5.17, for two) would apply it to the first node alone.
    """

    def apply(input_ids: Tensor, scores: Tensor) -> Tensor:
        for_all = copy.copy(processor)
        for_all.encoder_input_ids = processor.encoder_input_ids.expand(len(scores), -1)
        result: Tensor = for_all(input_ids, scores)
        return result

    return apply


def tree_paths(tree: TokenTree) -> list[list[list[int]]]:
    """Returns for each row the drafted tokens that lead to the root (none) and to each node, [batch][1 + size]."""
    paths = []
    for tokens, parents in zip(*tree.to_lists(), strict=True):
        row: list[list[int]] = [[]]
        for token, parent in zip(tokens, parents, strict=True):
            row.append([*row[1 + parent], token])
        paths.append(row)
    return paths


class _Node(NamedTuple):
    entry: int
    column: int
    path: Sequence[int]


def _run_history(rows: Sequence[Row], scores: Tensor, paths: Sequence[Sequence[Sequence[int]]] | None) -> None:
    """Runs what looks at the text so far, in place: one call for all nodes of equal length and processors."""
    nodes = [
        _Node(entry, column, path)
        for entry, row in enumerate(rows)
        if row.pipeline.needs_history
        for column, path in enumerate([()] * scores.shape[1] if paths is None else paths[entry])
    ]
    # The committed text is long and the paths are short: it is made a tensor once a row, not once a node.
    committed = {id(row): torch.tensor(row.tokens, dtype=torch.int64) for row in rows if row.pipeline.needs_history}

    def text(node: _Node) -> Tensor:
        return torch.cat([committed[id(rows[node.entry])], torch.tensor(node.path, dtype=torch.int64)])

    def alike(node: _Node) -> Hashable:
        row = rows[node.entry]
        return row.pipeline.history_key, len(row.tokens) + len(node.path)

    for group in _group(nodes, alike):
        at = [node.entry for node in group], [node.column for node in group]
        input_ids = torch.stack([text(node) for node in group]).to(scores.device)  # [n, length]
        pipeline = rows[group[0].entry].pipeline
        scores[at] = pipeline.run(pipeline.history, input_ids, scores[at])


def _group(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return list(groups.values())


_DEVICE = object()


def _step(kind: type, *values: Any, history: bool = False) -> Step:
    """Returns the step that builds `kind(*values)`, the device in the place of `_DEVICE`."""

    def make(_: int, device: torch.device) -> Any:
        return kind(*(device if value is _DEVICE else value for value in values))

    return Step(kind, values, history, make)


def _content_steps(params: SamplingParams, eos: tuple[int, ...], prompt: tuple[int, ...]) -> Iterator[Step]:
    """Yields, in the order of `generate`, the steps that judge which tokens follow which."""

    def on_prompt(kind: Any, value: float | None, history: bool) -> Step:
        return Step(
            kind, (value, prompt), history, lambda _, device: kind(value, torch.tensor([prompt], device=device))
        )

    if params.sequence_bias:
        biases, bias = params.sequence_bias, hf.SequenceBiasLogitsProcessor
        yield Step(
            bias,
            biases,
            any(len(ids) > 1 for ids, _ in biases),
            lambda *_: bias([[list(ids), value] for ids, value in biases]),
        )
    if (params.encoder_repetition_penalty or 1.0) != 1.0:
        reward: Any = hf.EncoderRepetitionPenaltyLogitsProcessor
        penalty = params.encoder_repetition_penalty
        yield Step(
            reward,
            (penalty, prompt),
            False,
            lambda _, device: on_every_node(reward(penalty, torch.tensor([prompt], device=device))),
        )
    if (params.repetition_penalty or 1.0) != 1.0:
        yield _step(hf.RepetitionPenaltyLogitsProcessor, params.repetition_penalty, history=True)
    if params.no_repeat_ngram_size:
        yield _step(hf.NoRepeatNGramLogitsProcessor, params.no_repeat_ngram_size, history=True)
    if params.encoder_no_repeat_ngram_size:
        yield on_prompt(hf.EncoderNoRepeatNGramLogitsProcessor, params.encoder_no_repeat_ngram_size, True)
    # An end-of-sequence token is no bad word, as in `generate`.
    words = tuple(word for word in params.bad_words_ids or () if len(word) > 1 or word[0] not in eos)
    if words:
        bad = hf.NoBadWordsLogitsProcessor
        yield Step(bad, words, any(len(word) > 1 for word in words), lambda *_: bad([list(word) for word in words]))


def _length_steps(params: SamplingParams, eos: tuple[int, ...], length: int, max_tokens: int) -> Iterator[Step]:
    """Yields, in the order of `generate`, the steps that depend on the length, and those between them."""
    if params.min_length and eos:
        yield _step(hf.MinLengthLogitsProcessor, params.min_length, eos, _DEVICE, history=True)
    if params.min_new_tokens and eos:
        yield _step(hf.MinNewTokensLengthLogitsProcessor, length, params.min_new_tokens, eos, _DEVICE, history=True)
    if params.forced_bos_token_id is not None:
        yield _step(hf.ForcedBOSTokenLogitsProcessor, params.forced_bos_token_id, history=True)
    if params.forced_eos_token_id is not None:
        yield _step(hf.ForcedEOSTokenLogitsProcessor, max_tokens, params.forced_eos_token_id, _DEVICE, history=True)
    if params.remove_invalid_values:
        yield _step(hf.InfNanRemoveLogitsProcessor)
    if params.exponential_decay_length_penalty is not None:
        if not eos:
            raise InvalidRequest("exponential_decay_length_penalty needs an eos_token_id, and there is none")
        penalty = params.exponential_decay_length_penalty
        yield _step(hf.ExponentialDecayLengthPenalty, penalty, eos, length, history=True)
    if params.suppress_tokens is not None:
        yield _step(hf.SuppressTokensLogitsProcessor, params.suppress_tokens, _DEVICE)
    if params.begin_suppress_tokens is not None:
        begin = length if length > 1 or params.forced_bos_token_id is None else length + 1
        suppressed = params.begin_suppress_tokens
        yield _step(hf.SuppressTokensAtBeginLogitsProcessor, suppressed, begin, _DEVICE, history=True)


def _merge(steps: list[Step], params: SamplingParams) -> list[Step]:
    """Adds the caller's own processors as `generate` does: one of a class that is there takes its place."""
    own = {id(one): Step(type(one), id(one), True, lambda *_, one=one: one) for one in params.logits_processor or ()}
    merged = [next((mine for mine in own.values() if mine.kind is step.kind), step) for step in steps]
    return merged + [mine for mine in own.values() if mine not in merged]


_BLIND = frozenset(
    {
        hf.TemperatureLogitsWarper,
        hf.TopHLogitsWarper,
        hf.TopKLogitsWarper,
        hf.TopPLogitsWarper,
        hf.MinPLogitsWarper,
        hf.TypicalLogitsWarper,
        hf.EpsilonLogitsWarper,
        hf.EtaLogitsWarper,
        hf.LogitNormalization,
    }
)
"""Processors to which a token that is left out is one with a score of -inf."""


def _warper_steps(params: SamplingParams) -> Iterator[Step]:
    """Yields, in the order of `generate`, the steps that it applies only when it samples. None looks at the text."""
    if params.temperature != 1.0:
        yield _step(hf.TemperatureLogitsWarper, params.temperature)
    if params.top_h is not None:
        yield _step(hf.TopHLogitsWarper, params.top_h)
    if params.top_k:
        yield _step(hf.TopKLogitsWarper, params.top_k)
    if (params.top_p or 1.0) < 1.0:
        yield _step(hf.TopPLogitsWarper, params.top_p)
    if params.min_p:
        yield _step(hf.MinPLogitsWarper, params.min_p)
    if (params.typical_p or 1.0) < 1.0:
        yield _step(hf.TypicalLogitsWarper, params.typical_p)
    if params.epsilon_cutoff:
        yield _step(hf.EpsilonLogitsWarper, params.epsilon_cutoff)
    if params.eta_cutoff:
        yield _step(hf.EtaLogitsWarper, params.eta_cutoff, float("-inf"), 1, _DEVICE)
