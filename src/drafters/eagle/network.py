"""The networks of EAGLE-1/2 and EAGLE-3: one Llama layer that reads the target's features beside the next token.

Column t reads the pair (feature of position t, token t + 1) at position t and says what follows token t + 1. Its
output stands in for the feature of position t + 1, so that a head goes on from its own outputs where the target's
features end: when it drafts, and when training unrolls it. The embedding and the LM head of the target are used where
they are: no head copies them or holds them in its state_dict. The module knows no files, no trees and no losses.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from ...core.cache import LayerShape
from ...core.drafter import FeatureName
from ...core.drafting import spread
from ...core.errors import InvalidRequest
from ...core.target import Target
from ...core.views import head_of

# transformers renamed the argument in 5.24.
CACHE = (
    "cache" if "cache" in inspect.signature(inspect.unwrap(LlamaAttention.forward)).parameters else "past_key_values"
)


class _Borrowed(NamedTuple):
    """What a head uses of its target. Functions, so that copying a head copies nothing of the target."""

    embed: Callable[[Tensor], Tensor]
    score: Callable[[Tensor], Tensor] | None


class Head(nn.Module, ABC):
    """What the heads of all versions share.

    Attributes:
        config: of the Llama layer; `vocab_size` is the target's.
        feature_names: the target's features that it reads, in the order in which they are joined.
        target_width: of one feature.
        draft_tokens: [draft vocabulary] int64, the target's id of each token that can be drafted; None for all.
    """

    feature_names: tuple[FeatureName, ...]
    target_width: int
    draft_tokens: Tensor | None

    def __init__(self, config: LlamaConfig, draft_tokens: Sequence[int] | Tensor | None) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        config.attention_dropout = 0.0
        self.config = config
        self.register_buffer("draft_tokens", _checked_tokens(draft_tokens, config.vocab_size), persistent=False)
        self._borrowed: _Borrowed | None = None
        # Kept out of the module tree: `.to(bfloat16)` would round its frequencies.
        self._rotary = (LlamaRotaryEmbedding(config),)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(self.parameters()).dtype

    @property
    def cache_layout(self) -> dict[int, LayerShape]:
        """What the layer stores for a column, for a `SlotCache`."""
        config: Any = self.config
        heads, width = config.num_key_value_heads, config.head_dim
        return {0: LayerShape(heads, width, width, self.dtype, self.device)}

    def misfit(self, target: Target) -> str | None:
        """Says which size of the head is not the target's; None when it fits."""
        if self.config.vocab_size != target.vocabulary_size:
            return f"vocab_size is {self.config.vocab_size}, the target has {target.vocabulary_size} tokens"
        theirs, width = target.config.hidden_size, self.config.hidden_size
        if self.target_width != theirs:
            return f"it reads features of width {self.target_width} (hidden_size), the target's are {theirs} wide"
        embedding: Any = target.model.get_input_embeddings()
        embeddings = embedding.weight.shape[-1]
        if embeddings != width and getattr(self, "embed_tokens", None) is None:
            return (
                f"hidden_size is {width}, the target's embeddings are {embeddings} wide, and there is no "
                "embed_tokens of its own"
            )
        for name in self.feature_names:
            if name != "last" and not 0 <= name <= target.layers:
                return f"the head reads the input of block {name}, the target has {target.layers} blocks"
        return None

    def attach(self, target: Target) -> Self:
        """Lets the head use the embedding and the LM head of `target`, by reference; returns the head.

        Raises:
            InvalidRequest: the head was made for a target of other sizes.
            UnsupportedModel: the target's LM head cannot be used by itself.
        """
        wrong = self.misfit(target)
        if wrong is not None:
            raise InvalidRequest(f"{type(self).__name__} does not fit the target: {wrong}")
        embedding: Callable[[Tensor], Tensor] = target.model.get_input_embeddings()

        def embed(ids: Tensor) -> Tensor:
            with torch.no_grad():
                return embedding(ids.to(target.device))

        self._borrowed = _Borrowed(embed, self._target_head(target))
        return self

    def twin(self) -> Self:
        """Returns a head that shares every weight with this one and may be attached to another target."""
        return copy.copy(self)

    def fuse(self, features: Tensor) -> Tensor:
        """Returns [..., width] hidden states from the target's features, joined in the order of `feature_names`.

        Args:
            features: [..., features x target_width], of any type and on any device.
        """
        return features.to(self.device, self.dtype)

    @abstractmethod
    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        """Reads one pair a column.

        Args:
            ids: [batch, columns] int64, of each column the token *after* its feature.
            hidden: [batch, columns, width], `fuse` of the target's features, or what earlier columns put out.
            positions: [batch, columns] int64, those of the features.
            mask: [batch, 1, columns, span] bool, True where a column attends; the span is what the cache holds
                and then these columns. None is causal, for a whole text without a cache.
            cache: a cache of transformers' interface that takes the keys and values of layer 0, or None.

        Returns:
            [batch, columns, width], what the column after each reads in place of the target's feature.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the token after each column, [batch, columns, draft vocabulary].

        Args:
            hidden: [batch, columns, width], as `forward` returns them.
        """

    def to_target(self, logits: Tensor) -> Tensor:
        """Returns draft logits as [..., vocabulary]; tokens that cannot be drafted get -inf."""
        if self.draft_tokens is None:
            return logits
        return spread(logits, self.draft_tokens, self.config.vocab_size)

    def _embed(self, ids: Tensor) -> Tensor:
        return self._target().embed(ids).to(self.device, self.dtype)

    def _target(self) -> _Borrowed:
        if self._borrowed is None:
            raise InvalidRequest(f"this {type(self).__name__} has no target; call attach(target) first")
        return self._borrowed

    def _target_head(self, target: Target) -> Callable[[Tensor], Tensor] | None:
        return None

    def _attend(
        self, attention: LlamaAttention, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        rotary = self._rotary[0](x, positions)
        attended: Tensor = attention(x, position_embeddings=rotary, attention_mask=mask, **{CACHE: cache})[0]
        return attended


class _Layer(nn.Module):
    """EAGLE-1's decoder layer: a Llama layer without its first norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class EagleHead(Head):
    """The head of EAGLE-1 (arXiv:2401.15077) and EAGLE-2 (arXiv:2406.16858).

    fc([embed(token t + 1); feature t]), a Llama layer without its first norm, and the target's own LM head. The feature
    is the target's last hidden state after the final norm. The state_dict has the keys of the published checkpoints.

    Args:
        config: of the layer; `hidden_size` and `vocab_size` must be the target's.
        fc_bias: whether fc has a bias.
        draft_tokens: the target's ids of the tokens that can be drafted, such as the most frequent ones; None for all.
            Only their logits are computed (FR-Spec, arXiv:2502.14856).

    Raises:
        InvalidRequest: `draft_tokens` are no distinct token ids.
    """

    def __init__(
        self, config: LlamaConfig, *, fc_bias: bool = True, draft_tokens: Sequence[int] | Tensor | None = None
    ) -> None:
        super().__init__(config, draft_tokens)
        self.feature_names = ("last",)
        self.target_width = config.hidden_size
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([_Layer(self.config)])

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        layer: Any = self.layers[0]
        x: Tensor = self.fc(torch.cat([self._embed(ids), hidden], -1))
        x = x + self._attend(layer.self_attn, x, positions, mask, cache)
        output: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        score = self._target().score
        if score is None:
            raise InvalidRequest("the head was attached without an LM head")
        return score(hidden)

    def _target_head(self, target: Target) -> Callable[[Tensor], Tensor]:
        head = head_of(target, self.draft_tokens)
        return lambda hidden: head(hidden.to(target.device, target.dtype))


class _WideLayer(_Layer):
    """EAGLE-3's decoder layer: its attention reads embedding and hidden state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Head(Head):
    """The head of EAGLE-3 (arXiv:2503.01840), with the norms that EAGLE-3.1 (arXiv:2605.09992) adds.

    Several features are fused by fc; the layer's attention reads cat(input_layernorm(embed), hidden_norm(h)); an LM
    head of its own scores a reduced vocabulary. The state_dict has the keys of the published checkpoints but for the
    vocabulary's, d2t and t2d.

    Args:
        config: of the layer; `vocab_size` must be the target's.
        layers: blocks of the target whose *inputs* are fused; the number of blocks names the last one's output.
        draft_tokens: the target's ids of the tokens that can be drafted; None for all.
        target_hidden_size: width of one feature; None when it is the head's own.
        fc_bias: whether fc has a bias.
        norm_before_residual: the residual is the normed hidden state rather than the hidden state itself.
        norm_before_fc: one norm over all features together, before fc.
        fc_norm: a norm for each feature, before fc.
        norm_output: the next column reads this one's output after the final norm rather than before it.
        own_embedding: the head has an embedding of its own.

    Raises:
        InvalidRequest: no layer, or `draft_tokens` are no distinct token ids.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        layers: Sequence[int],
        draft_tokens: Sequence[int] | Tensor | None = None,
        target_hidden_size: int | None = None,
        fc_bias: bool = False,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        own_embedding: bool = False,
    ) -> None:
        super().__init__(config, draft_tokens)
        if not layers:
            raise InvalidRequest("an EAGLE-3 head reads at least one layer, got layers=()")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.feature_names = tuple(layers)
        self.target_width = target_hidden_size or width
        self.norm_before_residual, self.norm_output = norm_before_residual, norm_output
        joined = len(layers) * self.target_width
        self.input_norm = LlamaRMSNorm(joined, eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(self.target_width, eps) for _ in layers) if fc_norm else None
        self.fc = nn.Linear(joined, width, bias=fc_bias)
        self.midlayer = _WideLayer(self.config)
        self.norm = LlamaRMSNorm(width, eps)
        drafted = config.vocab_size if self.draft_tokens is None else len(self.draft_tokens)
        self.lm_head = nn.Linear(width, drafted, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if own_embedding else None

    def fuse(self, features: Tensor) -> Tensor:
        features = super().fuse(features)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.feature_names), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(features)
        return fused

    def forward(self, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any = None) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([layer.input_layernorm(self._embed(ids)), normed], -1)
        x: Tensor = residual + self._attend(layer.self_attn, both, positions, mask, cache)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) if self.norm_output else x

    def logits(self, hidden: Tensor) -> Tensor:
        scored: Tensor = self.lm_head(hidden if self.norm_output else self.norm(hidden))
        return scored

    def _embed(self, ids: Tensor) -> Tensor:
        if self.embed_tokens is None:
            return super()._embed(ids)
        own: Tensor = self.embed_tokens(ids.to(self.device))
        return own


def unroll_mask(length: int, step: int, device: torch.device | None = None) -> Tensor:
    """Returns who attends to whom when training unrolls a head over a whole text (EAGLE-3's training-time test).

    At step s column t reads token t + 1 + s beside its own output of step s - 1, at position t + s. It sees what a
    drafter's cache would hold there: the true columns up to t, of step 0, and of every later step itself alone.

    Args:
        length: columns of a step; a cache that keeps everything holds `step * length` columns before this one's.
        step: s, from 0.
        device: where the mask goes.

    Returns:
        [1, 1, length, (step + 1) * length] bool.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    itself = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([causal] + [itself] * step, 1)[None, None]


def _checked_tokens(tokens: Sequence[int] | Tensor | None, vocabulary: int) -> Tensor | None:
    if tokens is None:
        return None
    message = f"draft_tokens must be a list of token ids from 0 to {vocabulary - 1}"
    try:
        ids = torch.as_tensor(tokens).clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{message}: {error}") from error
    whole = not ids.is_floating_point() and ids.dtype != torch.bool
    if ids.dim() != 1 or not len(ids) or not whole or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise InvalidRequest(message)
    ids = ids.long()
    if len(set(ids.tolist())) != len(ids):
        raise InvalidRequest("draft_tokens names a token twice; each may be drafted once")
    return ids
