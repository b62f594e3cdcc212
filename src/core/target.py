"""The target: one forward over pending tokens and token trees through an unmodified Hugging Face model.

This is the only place that knows how a causal language model of transformers is called: the name of its cache
argument, the form of its masks, where its features are. It knows no drafter, no rule and no sampling.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cache import LayerShape, LayoutRecorder, SlotCache
from .drafter import FeatureName
from .errors import InvalidRequest, UnsupportedModel
from .masks import MaskPlan, tree_masks, tree_positions
from .proposal import ExitStates
from .tree import TokenTree


@dataclass(frozen=True, eq=False)
class Scores:
    """What a forward gives.

    Attributes:
        logits: [batch, 1 + nodes, vocabulary], raw. Column 0 follows the newest committed token, column 1 + i
            follows node i.
        features: by name, [batch, columns, width]; a row's pending tokens come first, then its nodes.
        pending: number of pending tokens in each row.
    """

    logits: Tensor
    features: dict[FeatureName, Tensor]
    pending: Sequence[int]


class Target:
    """A causal language model that scores token trees.

    Nothing is set on the model. It must be in evaluation mode and use the `sdpa` or `eager` attention.

    Args:
        model: any decoder-only model of transformers whose layers keep keys and values for every token.
        tokenizer: needed for text in and out, not for token ids.
        prefill_chunk: most prompt tokens read in one forward; bounds the memory of long prompts.

    Raises:
        UnsupportedModel: the model cannot score trees; the message names what prevents it.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, prefill_chunk: int = 1024
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidRequest(f"prefill_chunk must be >= 1, got {prefill_chunk}")
        self.model = model
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.config = model.config.get_text_config(decoder=True)
        self._masks = MaskPlan.of(model, self.config)
        self._arguments = _forward_arguments(model)
        self._decoder = _find_decoder(model)
        self.blocks = _find_blocks(self._decoder, getattr(self.config, "num_hidden_layers", 0))
        self.layout = self._probe()

    @classmethod
    def from_pretrained(cls, source: str | Path, *, dtype: str | torch.dtype | None = None, **options: Any) -> Target:
        """Loads a model and its tokenizer.

        Args:
            source: a directory, a hub id, a GGUF file, or `"smollm2"`, the packaged demo model.
            dtype: such as `"bfloat16"`; None keeps the type the weights are stored in.
            **options: as of `draftwood.core.loading.load_model`.

        Raises:
            ModelNotFound: there is no model or no tokenizer at `source`.
            UnsupportedModel: the model cannot score token trees.
        """
        from .loading import load_model

        model, tokenizer = load_model(source, dtype=dtype, **options)
        return cls(model, tokenizer)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.dtype

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids the model reads."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[union-attr,arg-type]

    @property
    def context_length(self) -> int | None:
        """Most tokens the model was built for; None where its configuration does not say."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def layers(self) -> int:
        """Number of decoder blocks."""
        return len(self.blocks)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text ids of the model's generation configuration."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = ids if ids is not None else getattr(self.config, "eos_token_id", None)
        if ids is None:
            return ()
        return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)

    def over(self, model: PreTrainedModel, blocks: nn.ModuleList) -> Target:
        """Returns a scorer that calls `model`, a view of this target's (core/views.py), on this target's caches."""
        twin = copy.copy(self)
        twin.model, twin.blocks = model, blocks
        twin.config = model.config.get_text_config(decoder=True)
        twin._decoder = _find_decoder(model)
        return twin

    def new_cache(self, rows: int = 0, capacity: int = 256) -> SlotCache:
        """Returns an empty cache for this model."""
        return SlotCache(self.layout, rows, capacity)

    def score(
        self,
        cache: SlotCache,
        pending: Sequence[Sequence[int]],
        tree: TokenTree,
        *,
        first: int = 0,
        opened: int = 0,
        features: frozenset[FeatureName] = frozenset(),
        exit: ExitStates | None = None,
    ) -> Scores:
        """Reads pending tokens and scores a tree, in one forward (or several, for a long prompt).

        The pending tokens are committed to the cache. The nodes stay open: `cache.keep(paths)` decides.

        Args:
            cache: the cache of the call.
            pending: for each covered row the committed tokens that the cache lacks, at least one. Rows may
                differ in length only where the tree is empty.
            tree: one tree a covered row.
            first: the first covered row; all rows from there on are covered.
            opened: how many nodes, the first ones, earlier calls have left open in the cache. Only the others are
                read, behind them; then nothing may be pending, and logits and features begin with node `opened`.
            features: what to capture.
            exit: where the forward goes on from; ignored where a feature of an earlier block is asked for.
        """
        widest = max(len(row) for row in pending)
        if tree.width or widest <= self.prefill_chunk:
            return self._forward(cache, pending, tree, first, features, exit, opened)
        parts = []
        for start in range(0, widest, self.prefill_chunk):
            part = [row[start : start + self.prefill_chunk] for row in pending]
            parts.append(self._forward(cache, part, tree, first, features))
        last = [(len(row) - 1) // self.prefill_chunk for row in pending]
        logits = torch.stack([parts[part].logits[row] for row, part in enumerate(last)])
        joined = {name: torch.cat([part.features[name] for part in parts], 1) for name in features}
        return Scores(logits, joined, [len(row) for row in pending])

    def _forward(
        self,
        cache: SlotCache,
        pending: Sequence[Sequence[int]],
        tree: TokenTree,
        first: int,
        features: frozenset[FeatureName],
        exit: ExitStates | None = None,
        opened: int = 0,
    ) -> Scores:
        device = self.device
        tree = tree.to(device)
        counts = [len(row) for row in pending]
        width = max(counts)
        ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in pending], dtype=torch.int64, device=device)
        ids = torch.cat([ids, tree.tokens[:, opened:]], 1)  # [batch, columns]
        lengths = cache.lengths[first:]
        span = cache.open(ids.shape[1], first, opened)
        positions = tree_positions(lengths, width, tree, device)
        masks = tree_masks(self._masks, lengths, width, tree, positions, span, self.dtype, opened)
        # Column 0 of the logits is the last pending one, which differs between rows in a ragged prefill only.
        ragged = len(set(counts)) > 1
        columns = (ids, positions[:, opened:], masks, cache)
        keep = width if ragged else min(width, 1) + tree.width - opened
        if exit is None or any(name != "last" and name < exit.layer for name in features):
            logits, captured = self.call(*columns, keep=keep, features=features)
        else:
            logits, captured = self._resume(exit, *columns, keep=keep, features=features)
        if ragged:
            index = torch.tensor([max(count - 1, 0) for count in counts], device=logits.device)
            logits = logits[torch.arange(len(counts), device=logits.device), index][:, None]
        cache.advance(counts)
        return Scores(logits, captured, counts)

    def call(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Any,
        cache: Any,
        *,
        keep: int,
        features: frozenset[FeatureName] = frozenset(),
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, dict[FeatureName, Tensor]]:
        """Calls the model itself.

        Args:
            ids: [batch, columns] int64.
            positions: [batch, columns] int64.
            masks: as `tree_masks` makes them.
            cache: a cache of transformers' interface.
            keep: of how many columns, counted from the end, the logits are wanted.
            features: what to capture.
            hidden: [batch, columns, width], what goes into the first block in place of the ids' embeddings.

        Returns:
            Logits [batch, keep, vocabulary] and the captured features, [batch, columns, width] each.
        """
        names = self._arguments
        arguments: dict[str, Any] = {"attention_mask": masks, "position_ids": positions, names.cache: cache}
        if names.logits_to_keep:
            arguments["logits_to_keep"] = keep
        with self._capture(features) as captured:
            entry = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
            logits = self.model(**entry, return_dict=True, **arguments).logits
        return logits[:, -keep:], captured

    def _resume(
        self, exit: ExitStates, *columns: Any, keep: int, features: frozenset[FeatureName]
    ) -> tuple[Tensor, dict[FeatureName, Tensor]]:
        """Calls the blocks that the drafter has not run; block l of the target is block l - E of the view."""
        names = {name: name if name == "last" else name - exit.layer for name in features}
        logits, captured = exit.rest.call(*columns, keep=keep, features=frozenset(names.values()), hidden=exit.hidden)
        return logits, {name: captured[inner] for name, inner in names.items()}

    @contextmanager
    def _capture(self, features: frozenset[FeatureName]) -> Iterator[dict[FeatureName, Tensor]]:
        """Hooks that note block inputs and outputs during one forward, and are gone after it."""
        captured: dict[FeatureName, Tensor] = {}

        def final(_module: nn.Module, _arguments: Any, output: Any) -> None:
            captured["last"] = output[0]

        def leaving(_module: nn.Module, _arguments: Any, output: Any) -> None:
            captured[self.layers] = output[0] if isinstance(output, tuple) else output

        def entering(name: int) -> Any:
            def note(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
                captured[name] = arguments[0] if arguments else named["hidden_states"]

            return note

        handles = []
        try:
            for name in features:
                if name == "last":
                    handles.append(self._decoder.register_forward_hook(final))
                elif name == self.layers:
                    handles.append(self.blocks[-1].register_forward_hook(leaving))
                else:
                    self._check_layer(name)
                    handles.append(self.blocks[name].register_forward_pre_hook(entering(name), with_kwargs=True))
            yield captured
        finally:
            for handle in handles:
                handle.remove()

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise InvalidRequest(f"the target has blocks 0 to {self.layers - 1}; no features of block {layer}")

    def _probe(self) -> dict[int, LayerShape]:
        """Finds out what each layer stores, and whether a tree is scored as its paths are.

        Two siblings and a grandchild behind two tokens must get the logits that they get as plain sequences.
        """
        prompt, tree = [1, 2], TokenTree.from_lists([[3, 4, 3, 5]], [[-1, -1, 1, 2]])
        paths = [[], [3], [4], [4, 3], [4, 3, 5]]
        recorder = LayoutRecorder()
        try:
            with torch.inference_mode():
                self._plain(prompt, recorder)
                layout = recorder.layout
                scores = self._forward(SlotCache(layout, 1, 8), [prompt], tree, 0, frozenset())
                expected = torch.cat([self._plain([*prompt, *path], LayoutRecorder()) for path in paths])
        except UnsupportedModel:
            raise
        except (
            RuntimeError,
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            IndexError,
            NotImplementedError,
        ) as error:
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not take a tree-shaped attention mask and a cache of ours: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not layout:
            raise UnsupportedModel(f"{type(self.model).__name__} keeps no keys and values in its cache")
        difference = (scores.logits[0].double() - expected.double()).abs().mean(-1)
        spread = expected.double().std(-1).clamp(min=1e-9)
        allowed = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.2
        worst = float((difference / spread).median())
        if not worst <= allowed:
            raise UnsupportedModel(
                f"{type(self.model).__name__} scores a token tree differently from its paths (relative error "
                f"{worst:.2g}); its positions or its mask do not follow position_ids and a 4-D attention_mask"
            )
        return layout

    def _plain(self, tokens: list[int], cache: LayoutRecorder) -> Tensor:
        """Logits after a plain sequence, [1, vocabulary]: the reference of the probe."""
        tree = TokenTree.empty(1)
        positions = tree_positions([0], len(tokens), tree, self.device)
        masks = tree_masks(self._masks, [0], len(tokens), tree.to(self.device), positions, len(tokens), self.dtype)
        ids = torch.tensor([tokens], device=self.device)
        return self.call(ids, positions, masks, cache, keep=1)[0][:, 0]


# What modelling code raises when it meets a mask, a position or a cache that it does not expect.
_REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)


@dataclass(frozen=True)
class _Arguments:
    """The names by which this model's forward takes what we hand over."""

    cache: str
    logits_to_keep: bool


def _forward_arguments(model: PreTrainedModel) -> _Arguments:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; token trees need a decoder-only one")
    if model.training:
        raise UnsupportedModel(f"{name} is in training mode, where dropout changes its output; call model.eval() first")
    if any(getattr(part, "alibi", False) for part in (model.config, getattr(model.config, "attn_config", None))):
        raise UnsupportedModel(f"{name} biases attention by distance (alibi), which knows slots, not tree positions")
    parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
    # `past_key_values` became `cache` in transformers 5.24.
    cache = next((known for known in ("cache", "past_key_values") if known in parameters), None)
    if cache is None:
        raise UnsupportedModel(
            f"{name} takes no key-value cache (recurrent layers?); its forward has {list(parameters)}"
        )
    if "position_ids" not in parameters:
        raise UnsupportedModel(
            f"{name} takes no position_ids (it counts positions itself, as alibi does); siblings share a position"
        )
    return _Arguments(cache, "logits_to_keep" in parameters)


def _find_decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose output is what the LM head reads."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else model.base_model


def _find_blocks(decoder: nn.Module, layers: int) -> nn.ModuleList:
    """The list of decoder blocks: the one of the configured length, or else the longest."""
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModel(f"{type(decoder).__name__} has no list of decoder blocks")
    return next((found for found in lists if len(found) == layers), max(lists, key=len))
