"""The target: one forward over pending tokens and token trees through an unmodified Hugging Face model.

This is the only place that knows how a causal language model of transformers is called: the name of its cache
argument, the form of its masks, where its features are. It knows no drafter, no rule and no sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .anatomy import find_blocks, find_decoder, forward_arguments, is_sharded, probe
from .attention import group_attention
from .cache import SlotCache
from .checks import switch
from .drafter import FeatureName
from .errors import InvalidRequest
from .masks import MaskPlan, tree_masks, tree_positions
from .packing import check_fresh, pack_in_place, pack_siblings, packed_copy
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
        prefill_chunk: most prompt tokens read in one forward, all its rows together; bounds the memory of long
            prompts, of which the mask of a forward takes `prefill_chunk` bytes a token of context.
        packed: multiply by packed copies of the weights of linear layers (core/packing.py), and read keys once for
            all heads that share them (core/attention.py): on a CPU a pass over a tree then costs little more than
            one over a token. Takes the memory of these weights once more, unless `from_pretrained` loads the model;
            logits differ from the model's by rounding.

    Raises:
        InvalidRequest: `packed` for a model that is sharded or not on the CPU, or of a type that cannot be packed.
        UnsupportedModel: the model cannot score trees; the message names what prevents it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        prefill_chunk: int = 1024,
        packed: bool = False,
    ) -> None:
        if prefill_chunk < 1:
            raise InvalidRequest(f"prefill_chunk must be >= 1, got {prefill_chunk}")
        self.packed = switch("packed", packed)
        self.model = model = packed_copy(model) if packed else model
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.config = model.config.get_text_config(decoder=True)
        self.mask_plan = MaskPlan.of(model, self.config)
        self._arguments = forward_arguments(model)
        self.decoder = find_decoder(model)
        self.blocks = find_blocks(self.decoder, getattr(self.config, "num_hidden_layers", 0))
        self.layout = probe(self)
        if packed:  # a model that cannot be run has been refused by now
            pack_siblings(model, self._run)
            group_attention(self.config, self._run, self.dtype)
        self._state = self._model_state()

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: str | torch.dtype | None = None,
        packed: bool = False,
        prefill_chunk: int = 1024,
        **options: Any,
    ) -> Target:
        """Loads a model and its tokenizer.

        Args:
            source: a directory, a hub id, a GGUF file, or `"smollm2"`, the packaged demo model.
            dtype: such as `"bfloat16"`; None keeps the type the weights are stored in.
            packed: as of `Target`; but of linear layers other than the LM head the packed weights are the only ones,
                which can be read and not written to, so that it takes little more memory than without.
            prefill_chunk: as of `Target`.
            **options: as of `draftwood.core.loading.load_model`, such as `device_map="auto"` or, under torchrun,
                `tp_plan="auto"`.

        Raises:
            InvalidRequest: an option that cannot work.
            ModelNotFound: there is no model or no tokenizer at `source`.
            UnsupportedModel: the model cannot score token trees.
        """
        from .loading import load_model

        model, tokenizer = load_model(source, dtype=dtype, **options)
        if switch("packed", packed):
            pack_in_place(model)
        return cls(model, tokenizer, packed=packed, prefill_chunk=prefill_chunk)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return self.model.dtype

    @property
    def sharded(self) -> bool:
        """Whether several processes hold parts of each weight (`tp_plan`) and must do the very same work."""
        return is_sharded(self.model)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids the model reads."""
        weight: Tensor = self.model.get_input_embeddings().weight  # type: ignore[assignment]
        return weight.shape[0]

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
        twin.decoder = find_decoder(model)
        return twin

    def new_cache(self, rows: int = 0, capacity: int = 256) -> SlotCache:
        """Returns an empty cache for this model.

        Raises:
            InvalidRequest: the model was moved, converted or given another attention since the target was built, or
                weights changed that were packed.
        """
        if self._model_state() != self._state:
            raise InvalidRequest(
                f"the model was {self._state} when the target was built and is {self._model_state()} now; "
                "build a new Target"
            )
        check_fresh(self.model)  # which may be another target's packed one
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
        head: bool = True,
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
            head: False leaves out the LM head, and with it the logits, where only features or the cache are wanted.
        """
        widest = max(len(row) for row in pending)
        chunk = max(self.prefill_chunk // len(pending), 1)
        if tree.width or widest <= chunk:
            return self._forward(cache, pending, tree, first, features, exit, opened, head)
        cache.reserve(max(cache.lengths[first:]) + -(-widest // chunk) * chunk)
        last = [(len(row) - 1) // chunk for row in pending]
        ends: dict[int, Scores] = {}
        captured: dict[FeatureName, list[Tensor]] = {name: [] for name in features}
        for index, start in enumerate(range(0, widest, chunk)):
            part = [row[start : start + chunk] for row in pending]
            scores = self._forward(cache, part, tree, first, features, head=head)
            if index in last:
                ends[index] = scores
            for name, parts in captured.items():
                parts.append(scores.features[name])
        logits = torch.stack([ends[part].logits[row] for row, part in enumerate(last)])
        joined = {name: torch.cat(parts, 1) for name, parts in captured.items()}
        return Scores(logits, joined, [len(row) for row in pending])

    def _run(self) -> Tensor:
        """A small pass over a tree, to see whether something that was rearranged in the model changes its results."""
        tree = TokenTree.chain(torch.tensor([[2, 3]]))
        return self.score(SlotCache(self.layout, 1, 8), [[0, 1]], tree).logits

    def _model_state(self) -> tuple[str, ...]:
        """What masks and caches depend on and a caller may change on a model."""
        return str(self.dtype), str(self.device), str(self.config._attn_implementation)

    def _forward(
        self,
        cache: SlotCache,
        pending: Sequence[Sequence[int]],
        tree: TokenTree,
        first: int,
        features: frozenset[FeatureName],
        exit: ExitStates | None = None,
        opened: int = 0,
        head: bool = True,
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
        masks = tree_masks(self.mask_plan, lengths, width, tree, positions, span, self.dtype, opened)
        columns = (ids, positions[:, opened:], masks, cache)
        # Column 0 of the logits is the last pending one, which differs between rows in a ragged prefill only.
        ends = [max(count - 1, 0) for count in counts]
        ragged = len(set(counts)) > 1
        keep: int | list[int] = sorted(set(ends)) if ragged else min(width, 1) + tree.width - opened
        keep = keep if head else 0
        if exit is None or any(name != "last" and name < exit.layer for name in features):
            logits, captured = self.call(*columns, keep=keep, features=features)
        else:
            logits, captured = self._resume(exit, *columns, keep=keep, features=features)
        if isinstance(keep, list):
            index = torch.tensor([keep.index(end) for end in ends], device=logits.device)
            logits = logits[torch.arange(len(ends), device=logits.device), index][:, None]
        cache.advance(counts)
        return Scores(logits, captured, counts)

    def call(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Any,
        cache: Any,
        *,
        keep: int | list[int],
        features: frozenset[FeatureName] = frozenset(),
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, dict[FeatureName, Tensor]]:
        """Calls the model itself.

        Args:
            ids: [batch, columns] int64.
            positions: [batch, columns] int64.
            masks: as `tree_masks` makes them.
            cache: a cache of transformers' interface.
            keep: of how many columns, counted from the end, the logits are wanted; or of which columns.
            features: what to capture.
            hidden: [batch, columns, width], what goes into the first block in place of the ids' embeddings.

        Returns:
            Logits [batch, keep, vocabulary] and the captured features, [batch, columns, width] each.
        """
        names, model = self._arguments, self.model if keep else self.decoder
        arguments: dict[str, Any] = {"attention_mask": masks, "position_ids": positions, names.cache: cache}
        # Given a number, a model may drop columns before its last layers (gemma4), which features would miss.
        listed = keep if isinstance(keep, list) or not features else [*range(ids.shape[1])][-keep:]
        wanted = torch.tensor(listed, device=ids.device) if isinstance(listed, list) else listed
        if names.logits_to_keep and keep:
            arguments["logits_to_keep"] = wanted
        with self._capture(features) as captured:
            entry = {"input_ids": ids} if hidden is None else {"inputs_embeds": hidden}
            output = model(**entry, return_dict=True, **arguments)
        if not keep:
            return torch.empty(*positions.shape[:1], 0, self.vocabulary_size, device=self.device), captured
        logits: Tensor = output.logits
        if not names.logits_to_keep:
            logits = logits[:, wanted] if isinstance(keep, list) else logits[:, -keep:]
        return logits, captured

    def _resume(
        self, exit: ExitStates, *columns: Any, keep: int | list[int], features: frozenset[FeatureName]
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
                    handles.append(self.decoder.register_forward_hook(final))
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
