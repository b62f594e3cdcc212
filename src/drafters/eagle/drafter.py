"""EAGLE: a small head drafts from the target's own hidden states.

EAGLE-1 (arXiv:2401.15077), EAGLE-2 (arXiv:2406.16858) and EAGLE-3 (arXiv:2503.01840); the checkpoint tells which. After
every round the head reads the committed tokens beside the target's true features, and what it had read of its own draft
is forgotten. The module knows neither the rule nor how a tree is grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...core.attention import group_attention
from ...core.checks import real_number, whole_number
from ...core.drafter import Drafter, DraftSession, Observation
from ...core.errors import InvalidRequest
from ...core.packing import pack_linears, pack_siblings
from ...core.proposal import Proposal
from ...core.state import DecodeState
from ...core.target import Target
from ..draft_tree import Tree, TreeShape, grow, parse_shape
from .formats import LayerIds, load_head
from .network import Head
from .reader import HeadReader

# EAGLE-1's own tree (SafeAILab/EAGLE, eagle/model/choices.py), each digit a rank. It bears a name of Medusa's.
PUBLISHED = {
    "mc_sim_7b_63": ("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
}


WIDTH = 8
"""Of a dynamic tree: at 16 nodes four siblings a context accept less (EAGLE-2's own default is ten)."""


class Eagle(Drafter):
    """Drafts with a head of EAGLE-1, 2 or 3.

    Args:
        checkpoint: a directory or hub id that holds a head, or a head.
        depth: levels of the draft, 5 when None; with a branching `tree` it is their number.
        nodes: most nodes of a dynamic tree, 12 when None; EAGLE-2 on a large GPU takes 60.
        width: contexts that a dynamic tree continues at each level, and children it tries in each; 8 when None.
        tree: `"dynamic"`, EAGLE-2's tree: the best nodes by the head's cumulative probability; `"chain"`; children of
            each context level by level, such as `(3, 2, 1)`; or `"mc_sim_7b_63"`, the 25 nodes of EAGLE-1's authors.
        cutoff: no node whose cumulative probability by the head is below this: where the head is unsure the tree is
            smaller, and drafting ends sooner. A node is worth about what a further token of a verify pass costs, as
            a share of a plain pass.
        confidence: the draft goes no further behind tokens where the head's top probability was below this.
        siblings: `"auto"` draws siblings with their law under rules that sample, which accepts most; `"chosen"` takes
            the most likely tokens at every temperature, as the papers' own code does.
        layer_ids: what the checkpoint's layer ids mean: `"before"`, the inputs of those blocks, or `"after"`, their
            outputs. None goes by the file and warns where it does not say. See `probe_layer_ids`.
        draft_tokens: ids of the tokens that an EAGLE-1 head may draft, such as the most frequent ones; None for what
            the checkpoint says, or all.

    Raises:
        InvalidRequest: an option that cannot work, or that another one makes pointless.
    """

    def __init__(
        self,
        *,
        checkpoint: str | Path | Head,
        depth: int | None = None,
        nodes: int | None = None,
        width: int | None = None,
        tree: Tree | Literal["mc_sim_7b_63"] = "dynamic",
        cutoff: float = 0.0,
        confidence: float = 0.0,
        siblings: Literal["auto", "chosen"] = "auto",
        layer_ids: LayerIds | None = None,
        draft_tokens: Sequence[int] | Tensor | None = None,
    ) -> None:
        if not isinstance(checkpoint, (str, Path, Head)):
            raise InvalidRequest(f"checkpoint must be a path, a hub id or a head, got {type(checkpoint).__name__}")
        if siblings not in ("auto", "chosen"):
            raise InvalidRequest(f"siblings must be 'auto' or 'chosen', got {siblings!r}")
        if isinstance(checkpoint, Head) and (layer_ids is not None or draft_tokens is not None):
            raise InvalidRequest("layer_ids and draft_tokens say how a checkpoint is read; a head has its own")
        depth = depth if depth is None else whole_number("depth", depth)
        if not isinstance(tree, str) and isinstance(tree, Sequence) and depth not in (None, len(tree)):
            raise InvalidRequest(
                f"depth {depth} and the {len(tree)} levels of tree={tuple(tree)} contradict each other"
            )
        self.shape = replace(_shape(tree, depth, nodes, width), cutoff=cutoff)
        self.confidence = real_number("confidence", confidence, 0.0, 1.0, ends="[)")
        self.siblings = siblings
        self._checkpoint, self._layer_ids, self._draft_tokens = checkpoint, layer_ids, draft_tokens

    def bind(self, target: Target) -> None:
        """Loads the head in the target's type and to its device, packed if the target is.

        Raises:
            ModelNotFound: there is no checkpoint.
            InvalidCheckpoint: it is broken or was made for another target.
            InvalidRequest: the head does not fit, or the tree is wider than its vocabulary.
            UnsupportedModel: the target's LM head cannot be used by itself.
        """
        if isinstance(self._checkpoint, Head):
            # A twin that shares every weight: attaching must not change whose target the caller's head has.
            self.head = self._checkpoint.twin().attach(target)
        else:
            self.head = load_head(
                self._checkpoint, target, layer_ids=self._layer_ids, draft_tokens=self._draft_tokens
            ).attach(target)
            if target.packed:
                _pack(self.head)
        self.features = frozenset(self.head.feature_names)
        widest, tokens = max(self.shape.branching), self.head.draft_tokens
        drafted = target.vocabulary_size if tokens is None else len(tokens)
        if widest > drafted:
            raise InvalidRequest(f"{widest} children a context are too many: the head drafts {drafted} tokens")

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that keeps the head's cache."""
        return _Session(self, state.target.prefill_chunk)


def _pack(head: Head) -> None:
    ids = torch.arange(2)[None]
    hidden = torch.ones(1, 2, head.config.hidden_size, dtype=head.dtype)
    pack_linears(head)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril_()
    pack_siblings(head, lambda: head(ids, hidden, ids, mask))
    group_attention(head.config, lambda: head(ids, hidden, ids, mask), head.dtype)


def _shape(tree: Any, depth: int | None, nodes: int | None, width: int | None) -> TreeShape:
    if not isinstance(tree, str) or tree not in PUBLISHED:
        return parse_shape(tree, depth, nodes, WIDTH if tree == "dynamic" and width is None else width)
    if (depth, nodes, width) != (None, None, None):
        raise InvalidRequest(f"tree={tree!r} is fixed; depth, nodes and width do not go with it")
    return TreeShape.of_paths([int(rank) for rank in path] for path in PUBLISHED[tree].split())


class _Session(DraftSession):
    """The head at work in one call: in its cache are the pairs of every row's text up to the newest token."""

    def __init__(self, drafter: Eagle, chunk: int) -> None:
        self._drafter = drafter
        self._reader = HeadReader(drafter.head, chunk)

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Makes room; the prompts are read when their features are known."""
        self._reader.extend(len(rows))

    def propose(self, state: DecodeState) -> Proposal:
        """Drafts a tree for every row that has room."""
        drafter = self._drafter
        depths = [min(drafter.shape.depth, state.room(row)) for row in range(len(state.rows))]
        if not any(depths):
            return Proposal.empty(len(depths))
        if drafter.siblings == "chosen":
            state = replace(state, style="chosen")
        return grow(
            state,
            drafter.shape,
            depths,
            self._reader.logits(),
            self._reader.read_nodes,
            confidence=drafter.confidence,
            draft_tokens=drafter.head.draft_tokens,
        ).proposal

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Reads what was committed beside the target's features, whoever drafted it."""
        rows = [state.rows[row] for row in seen.rows]
        if all(row.stop_reason is not None for row in rows):
            return
        kept = [seen.kept(name) for name in self._drafter.head.feature_names]
        device = self._drafter.head.device
        joined = [torch.cat([part.to(device) for part in parts], -1) for parts in zip(*kept, strict=True)]
        # The pair of the newest token's feature comes with the next round: the target has not read that token yet.
        tokens = [
            row.tokens[self._reader.cache.lengths[index] + 1 :] for index, row in zip(seen.rows, rows, strict=True)
        ]
        features = [part[: len(own)] for part, own in zip(joined, tokens, strict=True)]
        self._reader.read_text(tokens, features, seen.rows[0])

    def retain(self, rows: Sequence[int]) -> None:
        """Drops the rows that left."""
        self._reader.select(rows)
