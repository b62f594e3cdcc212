"""The door from transformers: `model.generate(..., custom_generate=as_generate("eagle", ...))`, pipelines included.

`generate` prepares ids, logits processors and stopping criteria as for plain decoding and hands them over; here each
row gets its own view of them, since a row of Draftwood has no padding and moves at its own pace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from .core.drafter import Drafter, Observation
from .core.engine import Engine
from .core.errors import InvalidRequest
from .core.registry import Registry
from .core.rule import Rule
from .core.sampling import on_every_node
from .core.state import DecodeState
from .core.stats import Seconds
from .core.target import Target
from .decoder import Decoder

# Processors that keep a state a row, or run the model again: they cannot judge the branches of a tree.
_STATEFUL = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)


def as_generate(
    drafter: str | Drafter = "none",
    *,
    rule: str | Rule = "auto",
    rule_options: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    seed: int | None = None,
    streamer: Any = None,
    **drafter_options: Any,
) -> Callable[..., Any]:
    """Returns a callable for the `custom_generate` argument of transformers' `generate`.

    Greedy text is that of plain `generate`, sampled text has its law. Prepared processors and stopping criteria,
    `streamer`, `return_dict_in_generate` with `output_scores` and `output_logits`, `num_return_sequences` and left
    padding are honoured.

    Args:
        drafter: as for `Decoder`.
        rule: as for `Decoder`.
        rule_options: as for `Decoder`.
        registry: as for `Decoder`.
        seed: of the sampled text. None takes a number from torch's global generator, as `generate` itself
            samples from it, so that `transformers.set_seed` works as usual.
        streamer: gets the tokens as they are committed. Give it here: transformers 5 does not pass the `streamer`
            of `generate` on to a custom callable (it shows it the prompt only).
        **drafter_options: options of the drafter.

    transformers keeps the tokenizer from custom callables as well: for stop strings pass
    `stopping_criteria=[StopStringCriteria(tokenizer, [...])]`. A text may not outgrow the model's context, where
    plain `generate` only warns.

    Raises:
        DraftwoodError: as `Decoder`; and, when it is called, InvalidRequest for what `generate` can do and this
            cannot: beam search, contrastive search, guidance, attentions and hidden states.
    """
    held: dict[str, Any] = {}  # the decoder of the latest model, so that calls in a row share one

    def custom_generate(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        _check(input_ids, generation_config, logits_processor, synced_gpus, streamer, model_kwargs)
        state = (model.dtype, model.device, model.config.get_text_config(decoder=True)._attn_implementation)
        if held.get("model") is not model or held["state"] != state:
            held.update(model=model, state=state)
            held["decoder"] = Decoder(
                Target(model),
                drafter,
                drafter_options=drafter_options or None,
                rule=rule,
                rule_options=rule_options,
                registry=registry,
            )
        chosen = seed if seed is not None else int(torch.randint(2**31, ()).item())
        call = _Call(input_ids, model_kwargs.get("attention_mask"), logits_processor, stopping_criteria)
        return call.run(held["decoder"], generation_config, chosen, streamer)

    return custom_generate


class _Call:
    """One call of `generate`: its rows without padding, and what was prepared for each."""

    def __init__(self, input_ids: Tensor, mask: Tensor | None, processors: Any, criteria: Any) -> None:
        self.input_ids = input_ids  # [batch, length] int64
        self.padding = [0] * len(input_ids) if mask is None else (mask == 0).sum(1).tolist()
        self.processors = [self._for_row(row, list(processors or ())) for row in range(len(input_ids))]
        self.criteria = [[_Padded(one, self._pads(row)) for one in (criteria or ())] for row in range(len(input_ids))]
        self.raw: list[list[Tensor]] = [[] for _ in input_ids]

    def run(self, decoder: Decoder, config: Any, seed: int, streamer: Any) -> Any:
        """Decodes all rows and puts the result into the form that `generate` returns."""
        prompts = [ids[pad:].tolist() for ids, pad in zip(self.input_ids, self.padding, strict=True)]
        own = [
            {"logits_processor": processors, "stopping_criteria": criteria}
            for processors, criteria in zip(self.processors, self.criteria, strict=True)
        ]
        seconds = Seconds()
        shared = {
            "temperature": 1.0 if config.do_sample else 0.0,
            "max_new_tokens": config.max_length - self.input_ids.shape[1],
            "eos_token_id": [],  # among the criteria
            "seed": seed,
        }
        rows = decoder.rows(prompts, shared, own, seconds)
        engine = decoder.engine(rows)
        wants_scores = config.return_dict_in_generate and (config.output_scores or config.output_logits)
        if wants_scores:
            engine = Engine(engine.target, engine.drafter, engine.rule, watch=self._note)
        for step in engine.decode(rows, len(rows), seconds):
            if streamer is not None:
                for token in step.tokens:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        sequences = self._sequences([row.output for row in rows], config)
        if not config.return_dict_in_generate:
            return sequences
        texts = [row.tokens for row in rows]
        output: dict[str, Any] = {"sequences": sequences}
        if config.output_scores:
            output["scores"] = self._scores(texts, processed=True)
        if config.output_logits:
            output["logits"] = self._scores(texts, processed=False)
        return GenerateDecoderOnlyOutput(**output)

    def _pads(self, row: int) -> Tensor:
        return self.input_ids[row, : self.padding[row]]

    def _for_row(self, row: int, processors: list[Any]) -> list[Any]:
        made = []
        one: Any
        for one in processors:
            if isinstance(one, hf.PrefixConstrainedLogitsProcessor):
                one = hf.PrefixConstrainedLogitsProcessor(_of_row(one._prefix_allowed_tokens_fn, row), 1)
            elif isinstance(getattr(one, "prompt_ignore_length", None), Tensor):  # the padding of each row
                lengths = one.prompt_ignore_length
                one = copy.copy(one)
                one.prompt_ignore_length = int(lengths[row])
            elif isinstance(one, hf.EncoderRepetitionPenaltyLogitsProcessor):
                whole = one.encoder_input_ids
                one = copy.copy(one)
                one.encoder_input_ids = whole[row : row + 1]
                one = on_every_node(one)
            elif isinstance(one, hf.EncoderNoRepeatNGramLogitsProcessor):
                one = copy.copy(one)
                one.batch_size, one.generated_ngrams = 1, one.generated_ngrams[row : row + 1]
            made.append(_Padded(one, self._pads(row)))
        return made

    def _note(self, state: DecodeState, seen: Observation) -> None:
        """Keeps the raw logits that each committed token was picked from."""
        for index, path, tokens in zip(seen.rows, seen.verdict.paths, seen.verdict.tokens, strict=True):
            columns = [0, *(1 + node for node in path)][: len(tokens)]
            logits = seen.scores.logits[index - seen.rows[0], columns]
            self.raw[state.rows[index].key] += list(logits.to(torch.float32, copy=True))

    def _sequences(self, outputs: Sequence[Sequence[int]], config: Any) -> Tensor:
        longest = max(len(output) for output in outputs)
        pad = config.pad_token_id
        if pad is None:
            pad = config._pad_token_tensor.item() if getattr(config, "_pad_token_tensor", None) is not None else 0
        rows = [[*output, *([pad] * (longest - len(output)))] for output in outputs]
        new = torch.tensor(rows, dtype=self.input_ids.dtype, device=self.input_ids.device)
        return torch.cat([self.input_ids, new], 1)

    def _scores(self, texts: Sequence[Sequence[int]], processed: bool) -> tuple[Tensor, ...]:
        """Returns [batch, vocabulary] a step; zeros for rows that had ended by then."""
        steps = []
        for step in range(max(len(raw) for raw in self.raw)):
            rows = []
            for row, raw in enumerate(self.raw):
                if step >= len(raw):
                    rows.append(torch.zeros_like(self.raw[0][0]))
                    continue
                scores = raw[step][None].clone()  # a processor may work in place
                length = len(texts[row]) - len(raw) + step
                text = torch.tensor([texts[row][:length]], device=scores.device)
                for processor in self.processors[row] if processed else ():
                    scores = processor(text, scores)
                rows.append(scores[0])
            steps.append(torch.stack(rows))
        return tuple(steps)


def _of_row(allowed: Callable[[int, Tensor], Any], row: int) -> Callable[[int, Tensor], Any]:
    """On a tree the index in the batch is a node; the caller's function is asked about its row instead."""
    return lambda _node, text: allowed(row, text)


class _Padded:
    """A processor or criterion that sees a row as plain `generate` shows it: with its left padding."""

    def __init__(self, inner: Callable[..., Any], pads: Tensor) -> None:
        self.inner, self.pads = inner, pads

    def __call__(self, input_ids: Tensor, scores: Tensor | None) -> Any:
        if len(self.pads):
            pads = self.pads.to(input_ids.device).expand(len(input_ids), -1)
            input_ids = torch.cat([pads, input_ids], 1)
        return self.inner(input_ids, scores)


def _check(
    input_ids: Tensor, config: Any, processors: Any, synced_gpus: bool, streamer: Any, model_kwargs: Mapping[str, Any]
) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidRequest(
            f"generate was asked for {mode.value.replace('_', ' ')}; speculative decoding is lossless for greedy "
            "search and sampling (num_beams=1, no penalty_alpha, no assistant)"
        )
    for one in processors or ():
        if isinstance(one, _STATEFUL):
            raise InvalidRequest(f"{type(one).__name__} keeps a state a row and cannot judge the branches of a tree")
    if config.output_attentions or config.output_hidden_states:
        raise InvalidRequest("output_attentions and output_hidden_states need plain decoding: a round has no step each")
    if synced_gpus:
        raise InvalidRequest("synced_gpus=True needs every process to run the same number of forwards; rounds differ")
    if streamer is not None and len(input_ids) > 1:
        raise InvalidRequest(f"a streamer takes one text, got a batch of {len(input_ids)}")
    if not input_ids.numel() or model_kwargs.get("inputs_embeds") is not None:
        raise InvalidRequest("generate needs input_ids, and nothing but them: inputs_embeds are not supported")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:].bool() < mask[:, :-1].bool()).any() or (mask[:, -1] == 0).any()):
        raise InvalidRequest("the attention_mask must be padding on the left and ones behind it in every row")
    for name in ("cache", "past_key_values"):
        held = model_kwargs.get(name)
        if held is not None and held.get_seq_length() > 0:
            raise InvalidRequest(
                f"{name} holds {held.get_seq_length()} tokens; pass the whole text as input_ids instead"
            )
