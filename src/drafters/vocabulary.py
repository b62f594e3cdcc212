"""Token ids of a draft model and of its target: are they the same, and if not, which tokens do both have?

A draft model may also have logits of some tokens only, its draft vocabulary.

Vocabularies are compared by their tokenizers, never by the sizes of the embeddings, which padding changes. The
module knows nothing of drafting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import InvalidRequest, VocabularyMismatch
from ..core.target import Target
from .shared_model import draft_tokens

VocabularyPolicy = Literal["strict", "intersection"]


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Takes token ids to the draft model and its logits back. A token that is not shared is never drafted.

    Attributes:
        size: of the target's vocabulary.
        ids: [size] int64, the draft's id of each of the target's tokens; some stand-in where it has none.
        shared: [2, tokens] int64, of each token that can be drafted the target's id and the column of the draft's
            logits, which is the draft's id unless its vocabulary is cut.
    """

    size: int
    ids: Tensor
    shared: Tensor

    def to_draft(self, tokens: Tensor) -> Tensor:
        """Returns the draft's ids of the target's tokens, of any shape."""
        return self.ids.to(tokens.device)[tokens]

    @property
    def draft_tokens(self) -> Tensor:
        """The target's ids of the tokens that can be drafted, [tokens] int64."""
        return self.shared[0]

    def pick(self, logits: Tensor) -> Tensor:
        """Returns of draft logits [..., columns] those of `draft_tokens`, [..., tokens]."""
        if self._in_order:  # as where a vocabulary is cut or padded
            return logits[..., : self.shared.shape[1]]
        return logits[..., self.shared[1].to(logits.device)]

    @cached_property
    def _in_order(self) -> bool:
        return torch.equal(self.shared[1], torch.arange(self.shared.shape[1]))

    def cut(self, tokens: Tensor) -> TokenMap:
        """Returns the map for a draft whose logits are of `tokens` alone, [columns] int64 ids of the draft."""
        columns = torch.arange(len(tokens))
        place = torch.full((1 + int(max(self.shared[1].max(), tokens.max())),), -1).index_copy_(
            0, tokens.cpu(), columns
        )
        target, column = self.shared[0], place[self.shared[1]]
        return TokenMap(self.size, self.ids, torch.stack([target, column])[:, column >= 0])


def match_vocabularies(target: Target, draft: Target, policy: VocabularyPolicy) -> TokenMap | None:
    """Compares the vocabularies of two models.

    Args:
        target: the target.
        draft: the draft model.
        policy: with `"strict"` the tokenizers must agree on every id that both use. `"intersection"` maps tokens by
            their text where they do not (Timor et al., arXiv:2502.05202, algorithm 4).

    Returns:
        How to translate; None when ids mean the same, the sizes are equal and the draft has logits of all tokens.

    Raises:
        InvalidRequest: an unknown policy.
        VocabularyMismatch: the vocabularies differ and the policy forbids it, they share nothing, or they cannot be
            compared because a tokenizer is missing.
    """
    if policy not in ("strict", "intersection"):
        raise InvalidRequest(f"vocabulary must be 'strict' or 'intersection', got {policy!r}")
    found, tokens = _match(target, draft, policy), draft_tokens(draft.model)
    if tokens is None:
        return found
    ids = torch.arange(target.vocabulary_size)
    return (found or TokenMap(target.vocabulary_size, ids, torch.stack([ids, ids]))).cut(tokens)


def _match(target: Target, draft: Target, policy: VocabularyPolicy) -> TokenMap | None:
    """Does what `match_vocabularies` does for a draft model that has logits of all its tokens."""
    sizes = target.vocabulary_size, draft.vocabulary_size
    if target.tokenizer is None or draft.tokenizer is None:
        if sizes[0] == sizes[1]:
            return None
        missing = "target" if target.tokenizer is None else "draft model"
        raise VocabularyMismatch(
            f"{_describe(target)} and {_describe(draft)} differ in size, and without a tokenizer of the {missing} it "
            "cannot be told whether that is padding; pass Target(model, tokenizer) for both"
        )
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    difference = _first_difference(ours, theirs)
    if difference is None:
        if sizes[0] == sizes[1]:
            return None
        ids = torch.arange(min(sizes))
        return _token_map(sizes[0], torch.stack([ids, ids]), draft)
    if policy == "strict":
        raise VocabularyMismatch(
            f"{_describe(target)} and {_describe(draft)} differ: {difference}; vocabulary='intersection' drafts the "
            "tokens that both have"
        )
    texts = {_text(token): number for token, number in theirs.items() if number < sizes[1]}
    pairs = [(number, texts.get(_text(token), -1)) for token, number in ours.items() if number < sizes[0]]
    shared = torch.tensor([pair for pair in pairs if pair[1] >= 0], dtype=torch.int64).reshape(-1, 2).T
    if not shared.shape[1]:
        raise VocabularyMismatch(f"{_describe(target)} and {_describe(draft)} have no token in common")
    return _token_map(sizes[0], shared, draft)


def _token_map(size: int, shared: Tensor, draft: Target) -> TokenMap:
    tokenizer = draft.tokenizer
    known = (getattr(tokenizer, name, None) for name in ("unk_token_id", "eos_token_id"))
    stand_in = next((number for number in known if number is not None), 0)
    ids = torch.full((size,), stand_in, dtype=torch.int64)
    ids[shared[0]] = shared[1]
    return TokenMap(size, ids, shared)


def _first_difference(ours: dict[str, int], theirs: dict[str, int]) -> str | None:
    """Says where two vocabularies disagree; a token or an id that only one of them has is no disagreement."""
    if ours == theirs:
        return None
    tokens = {number: token for token, number in theirs.items()}
    for token, number in sorted(ours.items(), key=lambda item: item[1]):
        other = tokens.get(number, token)
        if other != token:
            return f"token {number} is {token!r} for the target and {other!r} for the draft model"
        if theirs.get(token, number) != number:
            return f"{token!r} is token {number} for the target and {theirs[token]} for the draft model"
    return None


def _text(token: str) -> str:
    """A token's text as far as tokenizer families agree on it: byte-level ones write a space as Ġ, others as ▁."""
    return token.replace("Ġ", "▁")


def _describe(model: Target) -> str:
    name = model.config.name_or_path or type(model.model).__name__
    tokens = "no tokenizer" if model.tokenizer is None else f"{len(model.tokenizer)} tokens"
    return f"the vocabulary of {name!r} ({tokens}, {model.vocabulary_size} embeddings)"
