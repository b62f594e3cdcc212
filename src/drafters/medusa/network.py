"""Medusa's heads (Cai et al., arXiv:2401.10774): residual blocks on the target's last hidden state, and an LM head.

Head i (from 0) reads the final normalised hidden state of position t and guesses token t + 2 + i; token t + 1 is what
the target's own LM head makes of it. The module knows neither files, nor trees, nor how the heads are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...core.checks import whole_number
from ...core.drafting import spread
from ...core.errors import InvalidRequest, UnsupportedModel
from ...core.target import Target

IGNORED = -100
"""The label of a token that is not in the draft vocabulary; what torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class MedusaConfig:
    """The sizes of a set of heads.

    Attributes:
        heads: number of heads, which is how many tokens ahead they draft.
        layers: residual blocks of each head.
        width: of the target's hidden states.
        vocabulary: number of the target's token ids.
        shared: whether all heads use the target's LM head in place of one of their own each.

    Raises:
        InvalidRequest: a size that is not whole, or too small.
    """

    heads: int
    layers: int
    width: int
    vocabulary: int
    shared: bool = False

    def __post_init__(self) -> None:
        for name, least in (("heads", 1), ("layers", 0), ("width", 1), ("vocabulary", 1)):
            whole_number(name, getattr(self, name), least)


class ResidualBlocks(nn.Module):
    """One residual block of every head, x + SiLU(W x + b); W and b start at zero, so that it changes little.

    The weights of the heads are stacked: all blocks are one batched product.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, width, width))  # [heads, out, in]
        self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, states: Tensor) -> Tensor:
        """Takes [count, positions, width], the states of the first `count` heads, one block further."""
        count = len(states)
        inner = torch.baddbmm(self.bias[:count, None], states, self.weight[:count].transpose(1, 2))
        return states + nn.functional.silu(inner)


class MedusaHeads(nn.Module):
    """A set of heads.

    Args:
        config: the sizes.
        draft_tokens: [draft vocabulary] int64, distinct target ids: the heads guess these alone. None is all.

    Raises:
        InvalidRequest: draft tokens that are not distinct ids of the target.
    """

    draft_tokens: Tensor | None

    def __init__(self, config: MedusaConfig, draft_tokens: Tensor | None = None) -> None:
        super().__init__()
        if draft_tokens is not None:
            _check_tokens(draft_tokens, config.vocabulary)
            draft_tokens = draft_tokens.clone()
        self.config = config
        self.register_buffer("draft_tokens", draft_tokens)
        self.blocks = nn.ModuleList(ResidualBlocks(config.heads, config.width) for _ in range(config.layers))
        size = (config.heads, self.draft_vocabulary, config.width)
        self.lm_heads = None if config.shared else nn.Parameter(torch.zeros(size))

    @classmethod
    def for_target(
        cls,
        target: Target,
        *,
        heads: int,
        layers: int = 1,
        shared: bool = False,
        draft_tokens: Tensor | None = None,
    ) -> MedusaHeads:
        """Returns fresh heads in the target's type; LM heads of their own begin as copies of the target's.

        Raises:
            InvalidRequest: a size or draft tokens that cannot be.
            UnsupportedModel: the target's LM head is no matrix that could be copied.
        """
        config = MedusaConfig(heads, layers, target.config.hidden_size, target.vocabulary_size, shared)
        made = cls(config, draft_tokens).to(target.device, target.dtype)
        if made.lm_heads is not None:
            with torch.no_grad():
                made.lm_heads.copy_(lm_head_rows(target, made.draft_tokens))
        return made

    @property
    def draft_vocabulary(self) -> int:
        """Number of tokens that can be guessed."""
        return self.config.vocabulary if self.draft_tokens is None else len(self.draft_tokens)

    def states(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Returns what the LM heads read.

        Args:
            hidden: [..., width], final normalised hidden states of the target (the feature `"last"`).
            count: run the first so many heads alone; all when None.

        Returns:
            [count, ..., width], in the type of the weights.
        """
        count = self.config.heads if count is None else count
        flat = hidden.reshape(-1, hidden.shape[-1])
        if self.blocks:
            flat = flat.to(next(self.blocks.parameters()).dtype)
        states = flat.expand(count, *flat.shape)
        for block in self.blocks:
            states = block(states)
        return states.reshape(count, *hidden.shape)

    def logits(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None, count: int | None = None
    ) -> Tensor:
        """Returns the logits of each head's guess.

        Args:
            hidden: [..., width], final normalised hidden states of the target.
            head: the target's LM head, `core.views.head_of(target, draft_tokens)`; only shared heads use it. It is
                given states in the type of `hidden`.
            count: run the first so many heads alone; all when None.

        Returns:
            [count, ..., draft vocabulary]. Entry j belongs to target id `draft_tokens[j]`, or j where that is None.

        Raises:
            InvalidRequest: the heads share the target's LM head, and there is none.
        """
        states = self.states(hidden, count)
        flat = states.reshape(len(states), -1, states.shape[-1])  # [count, positions, width]
        if self.lm_heads is not None:
            logits = flat.to(self.lm_heads.dtype) @ self.lm_heads[: len(flat)].transpose(1, 2)
        elif head is not None:
            logits = head(flat.to(hidden.dtype))
        else:
            raise InvalidRequest("these heads share the target's LM head; pass head=head_of(target, draft_tokens)")
        return logits.reshape(*states.shape[:-1], -1)

    def labels(self, tokens: Tensor) -> Tensor:
        """Returns target ids [...] as ids of the draft vocabulary, `IGNORED` where they have none."""
        if self.draft_tokens is None:
            return tokens
        places = torch.full((self.config.vocabulary,), IGNORED, device=tokens.device)
        places[self.draft_tokens] = torch.arange(len(self.draft_tokens), device=tokens.device)
        return places[tokens]

    def to_target(self, logits: Tensor) -> Tensor:
        """Returns logits [..., draft vocabulary] over the target's vocabulary, -inf for tokens that have none."""
        if self.draft_tokens is None:
            return logits
        return spread(logits, self.draft_tokens, self.config.vocabulary)


def lm_head_rows(target: Target, tokens: Tensor | None) -> Tensor:
    """Returns the rows of the target's LM head for `tokens`, [kept, width]; all when None.

    Raises:
        UnsupportedModel: its weights are no matrix of floating-point rows.
    """
    output: nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = getattr(output, "weight", None)
    rows, width = target.vocabulary_size, target.config.hidden_size
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.shape != (rows, width):
        shape = list(weight.shape) if isinstance(weight, Tensor) else None
        raise UnsupportedModel(
            f"the LM head of {type(target.model).__name__} ({type(output).__name__}, weight {shape}) cannot be copied "
            f"as [{rows}, {width}] floating-point rows; share it instead (shared=True)"
        )
    return weight.detach() if tokens is None else weight.detach()[tokens.to(weight.device)]


def _check_tokens(tokens: Tensor, vocabulary: int) -> None:
    if tokens.dim() != 1 or tokens.dtype != torch.int64 or not tokens.numel():
        raise InvalidRequest(f"draft_tokens must be [kept] int64 ids, got {list(tokens.shape)} {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise InvalidRequest(f"draft_tokens must be ids from 0 to {vocabulary - 1}, got {low if low < 0 else high}")
    distinct = len(set(tokens.tolist()))
    if distinct < len(tokens):
        raise InvalidRequest(f"draft_tokens must be distinct, got {len(tokens)} ids of {distinct} tokens")
