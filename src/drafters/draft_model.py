"""Draft model: a smaller language model guesses what the target will say.

Speculative decoding as Leviathan et al. (arXiv:2211.17192) and Chen et al. (arXiv:2302.01318) introduced it, with
chains, fixed branching (SpecInfer, arXiv:2305.09781) or dynamic trees (EAGLE-2, arXiv:2406.16858). The draft model is
one of transformers with a cache of its own, which may use the target's embedding and LM head; of the target's passes
it knows the committed tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.checks import real_number
from ..core.drafter import Drafter, DraftSession, Observation
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal
from ..core.state import DecodeState
from ..core.target import Target
from ..core.tree import TokenTree
from .draft_tree import Grown, Tree, TreeShape, grow, parse_shape
from .shared_model import is_shared, load_shared
from .vocabulary import TokenMap, VocabularyPolicy, match_vocabularies


class DraftModel(Drafter):
    """Drafts with a smaller model.

    Args:
        model: the draft model: what `Target.from_pretrained` takes (loaded in the target's type and to its device), a
            directory of one that shares the target's embedding and LM head, a model of transformers, or a `Target`
            around one. With a bare model the vocabularies cannot be compared.
        gamma: depth of the draft, 5 when None; with a branching `tree` it is the number of levels.
        tree: `"chain"`; children of each context level by level, such as `(3, 2, 1)`; or `"dynamic"`, the best
            nodes by the draft's cumulative probability.
        nodes: most nodes of a dynamic tree, 12 when None.
        width: contexts that a dynamic tree continues at each level, and children it tries in each; 4 when None.
        cutoff: no node whose cumulative probability by the draft model is below this; 0 leaves none out.
        confidence: the draft goes no further behind tokens where the draft model's top probability was below this.
        vocabulary: `"strict"`, or `"intersection"` to draft only tokens that both models have.

    Raises:
        InvalidRequest: an option that cannot work, or that another one makes pointless.
    """

    def __init__(
        self,
        *,
        model: str | Path | PreTrainedModel | Target,
        gamma: int | None = None,
        tree: Tree = "chain",
        nodes: int | None = None,
        width: int | None = None,
        cutoff: float = 0.0,
        confidence: float = 0.0,
        vocabulary: VocabularyPolicy = "strict",
    ) -> None:
        if not isinstance(model, (str, Path, PreTrainedModel, Target)):
            raise InvalidRequest(f"model must be a path, a hub id, a model or a Target, got {type(model).__name__}")
        if vocabulary not in ("strict", "intersection"):
            raise InvalidRequest(f"vocabulary must be 'strict' or 'intersection', got {vocabulary!r}")
        self.shape = replace(parse_shape(tree, gamma, nodes, width), cutoff=cutoff)
        self.confidence = real_number("confidence", confidence, 0.0, 1.0, ends="[)")
        self._model = model
        self._policy: VocabularyPolicy = vocabulary

    def bind(self, target: Target) -> None:
        """Loads the draft model, packed if the target is, and compares it with the target.

        Raises:
            ModelNotFound: there is no draft model.
            InvalidCheckpoint: it is broken, or shares with a target of another family, hidden size or vocabulary.
            UnsupportedModel: the draft model cannot take token trees.
            VocabularyMismatch: the vocabularies differ.
            InvalidRequest: the tree is deeper than a context or wider than the vocabulary.
        """
        model = self._model
        if isinstance(model, Target):
            self.draft = model
        elif isinstance(model, PreTrainedModel):
            self.draft = Target(model)
        elif is_shared(model):
            self.draft = Target(load_shared(model, target), target.tokenizer, packed=target.packed)
        else:
            self.draft = Target.from_pretrained(model, dtype=target.dtype, device=target.device, packed=target.packed)
        self._tokens = match_vocabularies(target, self.draft, self._policy)
        for name, context in (("target", target.context_length), ("draft model", self.draft.context_length)):
            if context is not None and self.shape.depth >= context:
                raise InvalidRequest(
                    f"gamma {self.shape.depth} leaves no text in the {name}'s context of {context} tokens; "
                    f"it must be < {context}"
                )
        shared = self.draft.vocabulary_size if self._tokens is None else self._tokens.shared.shape[1]
        widest = max(self.shape.branching)
        if widest > shared:
            raise InvalidRequest(f"{widest} children a context are too many: the models share {shared} tokens")

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that keeps the draft model's cache."""
        return _Session(self.draft, self._tokens, self.shape, self.confidence)


class _Session(DraftSession):
    """The draft model's cache, row by row beside the text.

    Between rounds it holds a beginning of each row's committed tokens: what it lacks (the newest token, and after
    full acceptance the last draft too) is read together with it at the next proposal. A row that has outgrown the draft
    model's context is drafted for no more.
    """

    def __init__(self, draft: Target, tokens: TokenMap | None, shape: TreeShape, confidence: float) -> None:
        self._draft, self._tokens, self._shape, self._confidence = draft, tokens, shape, confidence
        self._cache = draft.new_cache()
        self._grown: Grown | None = None

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Reads the prompts."""
        self._cache.extend(len(rows))
        prompts = [state.rows[row].tokens for row in rows]
        pending = [self._ids(prompt if self._fits(prompt) else prompt[:1]) for prompt in prompts]
        self._draft.score(self._cache, pending, TokenTree.empty(len(rows)), first=rows[0])

    def propose(self, state: DecodeState) -> Proposal:
        """Drafts a tree for every row that has room."""
        depths = [self._depth(state, row) for row in range(len(state.rows))]
        if max(depths, default=0) == 0:
            return Proposal.empty(len(depths))
        logits = self._read_text(state)
        tokens = None if self._tokens is None else self._tokens.draft_tokens
        self._grown = grow(
            state,
            self._shape,
            depths,
            logits,
            self._read_nodes,
            confidence=self._confidence,
            draft_tokens=tokens,
        )
        return self._grown.proposal

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Keeps what the draft model has read of the committed text, whoever drafted it; forgets the rest."""
        if self._grown is None:  # the prompts of new rows, or a round without a draft
            return
        lengths = self._cache.lengths
        fresh = [row.tokens[length:-1] for row, length in zip(state.rows, lengths, strict=True)]
        self._cache.keep([self._grown.spelled(row, tokens) for row, tokens in enumerate(fresh)])
        self._grown = None

    def retain(self, rows: Sequence[int]) -> None:
        """Drops the rows that left."""
        self._cache.select(rows)

    def _depth(self, state: DecodeState, row: int) -> int:
        depth = min(self._shape.depth, state.room(row))
        context = self._draft.context_length
        return depth if context is None else max(min(depth, context - len(state.rows[row].tokens)), 0)

    def _fits(self, tokens: Sequence[int]) -> bool:
        return self._draft.context_length is None or len(tokens) < self._draft.context_length

    def _read_text(self, state: DecodeState) -> Tensor:
        """Reads what the cache lacks of the text; returns the logits after it, [batch, tokens that can be drafted]."""
        rows = list(zip(state.rows, self._cache.lengths, strict=True))
        width = max(len(row.tokens) - length for row, length in rows if self._fits(row.tokens))
        pending = []
        for index, (row, _) in enumerate(rows):
            # As many tokens in every row, so that the batch is a rectangle: a row that lacks fewer reads some again,
            # and one that is past the draft model's context its beginning.
            start = max(len(row.tokens) - width, 0) if self._fits(row.tokens) else 0
            self._cache.lengths[index] = start
            pending.append(self._ids(row.tokens[start : start + width]))
        return self._picked(self._draft.score(self._cache, pending, TokenTree.empty(len(rows))).logits[:, 0])

    def _read_nodes(self, tree: TokenTree, opened: int) -> Tensor:
        if self._tokens is not None:
            tree = TokenTree(self._tokens.to_draft(tree.tokens), tree.parents, tree.sizes)
        nothing: list[list[int]] = [[]] * tree.batch
        return self._picked(self._draft.score(self._cache, nothing, tree, opened=opened).logits)

    def _ids(self, tokens: list[int]) -> list[int]:
        return tokens if self._tokens is None else self._tokens.to_draft(torch.tensor(tokens)).tolist()

    def _picked(self, logits: Tensor) -> Tensor:
        return logits if self._tokens is None else self._tokens.pick(logits)
