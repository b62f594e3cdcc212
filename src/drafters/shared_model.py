"""A draft model without an embedding and an LM head of its own: it uses the target's where they are.

What it has of its own, and all that its files hold, is blocks and a final norm of the target's width. Its LM head may
be cut to a draft vocabulary, the rows of some tokens (as FR-Spec, arXiv:2502.14856, cuts EAGLE's): its logits are of
these alone then. To whoever calls it, it is a model of transformers. The module knows neither drafting nor training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.errors import InvalidCheckpoint
from ..core.loading import new_model
from ..core.target import Target
from ..core.views import embedding_and_head
from .checkpoint_files import WEIGHTS, check_places, check_token_ids, read_json, read_weights, write_checkpoint

SHARED = "shared_with_target"
"""The field of a `config.json` that lists what is the target's."""

_PARTS = ["embedding", "lm_head"]
_TOKENS = "draft_tokens"
_IMPOSSIBLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)
"""What configurations raise that no model can have."""


def share_with_target(model: PreTrainedModel, target: Target, tokens: Tensor | None = None) -> None:
    """Gives a model the target's embedding and LM head, by reference, in place of its own.

    They are no part of its parameters and of its state, and no gradient is computed for them. What goes from the one
    into the model, and from the model into the other, is converted between the types of both.

    Args:
        model: of the target's family and width, in the type that it is to have; changed.
        target: stays as it is.
        tokens: [draft vocabulary] int64, distinct target ids: logits of these alone, in this order. Their rows are
            copied out of an ordinary LM head. None is all of them.

    Raises:
        InvalidRequest: `tokens` is no list of the target's token ids.
    """
    embedding, head = embedding_and_head(target, tokens)
    dtype = next(parameter.dtype for parameter in model.parameters())
    model.set_input_embeddings(_Embedding(embedding, dtype))
    model.set_output_embeddings(_Head(head, target.dtype, tokens))  # type: ignore[no-untyped-call]


def shares_with_target(model: PreTrainedModel) -> bool:
    """Tells whether a model uses a target's embedding and LM head."""
    return isinstance(model.get_input_embeddings(), _Embedding)


def draft_tokens(model: PreTrainedModel) -> Tensor | None:
    """Returns the target ids that a model's logits are of, [draft vocabulary] int64; None where they are of all."""
    head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head.tokens if isinstance(head, _Head) else None


def is_shared(source: str | Path) -> bool:
    """Tells whether a directory holds a model that shares with its target; so does none of the hub.

    Raises:
        InvalidCheckpoint: its `config.json` is broken, or lists other parts than those that can be shared.
    """
    file = Path(source).expanduser() / "config.json"
    parts = read_json(file).get(SHARED) if file.is_file() else None
    if parts not in (None, _PARTS):
        raise InvalidCheckpoint(f"{str(file)!r}: {SHARED!r} must be {_PARTS}, got {parts!r}")
    return parts is not None


def save_shared(model: PreTrainedModel, directory: str | Path) -> None:
    """Writes what a model has of its own, as safetensors with a `config.json`; a file is there whole or not at all.

    Args:
        model: shares with a target.
        directory: made where it does not exist.
    """
    weights = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    tokens = draft_tokens(model)
    if tokens is not None:
        weights[_TOKENS] = tokens.cpu()
    settings = json.loads(model.config.to_json_string())
    settings |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    write_checkpoint(Path(directory), WEIGHTS[0], settings | {SHARED: _PARTS}, weights)


def load_shared(source: str | Path, target: Target, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads a model that shares with `target`, to its device and in evaluation mode.

    Args:
        source: a directory that `save_shared` wrote.
        target: for which it was made.
        dtype: of the weights; the target's when None.

    Raises:
        InvalidCheckpoint: a file is broken, a key is missing, unknown or of the wrong shape, or a size is not the
            target's; the message names file and key.
    """
    folder = Path(source).expanduser()
    config = _read_config(folder / "config.json", target)
    file, weights = read_weights(folder, "draft model")
    tokens = weights.pop(_TOKENS, None)
    if tokens is not None:
        tokens = check_token_ids(tokens, target.vocabulary_size, f"{str(file)!r}: {_TOKENS!r}").to(target.device)
    try:
        model = _without_ends(config, target.dtype if dtype is None else dtype)
    except _IMPOSSIBLE as error:
        raise InvalidCheckpoint(f"no model can be as {str(folder / 'config.json')!r} says: {error}") from error
    share_with_target(model, target, tokens)
    check_places(file, weights, model.state_dict(), type(model).__name__)
    model.load_state_dict(weights)
    return model.to(target.device).eval()  # type: ignore[no-any-return, arg-type]


def _read_config(file: Path, target: Target) -> Any:
    """Reads a configuration of the target's family and sizes."""
    settings, theirs = read_json(file), target.model.config
    if settings.get("model_type") != theirs.model_type:
        raise InvalidCheckpoint(
            f"{str(file)!r}: 'model_type' is {settings.get('model_type')!r}; the target's is {theirs.model_type!r}"
        )
    del settings[SHARED]
    try:
        config = type(theirs).from_dict(settings)
        text: Any = config.get_text_config(decoder=True)
        sizes = {"vocab_size": (text.vocab_size, target.vocabulary_size)}
        sizes["hidden_size"] = (text.hidden_size, target.config.hidden_size)
    except _IMPOSSIBLE as error:
        raise InvalidCheckpoint(f"no model can be as {str(file)!r} says: {error}") from error
    for name, (own, expected) in sizes.items():
        if own != expected:
            raise InvalidCheckpoint(f"{str(file)!r}: {name!r} is {own}; the target's is {expected}")
    return config


def _without_ends(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Returns a model of random weights whose embedding and LM head, of a single token, are to be replaced."""
    text = config.get_text_config(decoder=True)
    size, padding = text.vocab_size, text.pad_token_id
    text.vocab_size, text.pad_token_id = 1, None
    model = new_model(config, dtype)
    text = model.config.get_text_config(decoder=True)
    text.vocab_size, text.pad_token_id = size, padding
    return model


class _Held:
    """The target's module, which copies of its holder go on sharing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, _: Any) -> _Held:
        return self


class _Embedding(nn.Module):
    """The target's embedding, by reference; `dtype` is that of the model which reads what it puts out."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self._held, self._dtype = _Held(module), dtype

    @property
    def weight(self) -> Tensor:
        """The target's, [vocabulary, width]."""
        weight: Tensor = self._held.module.weight  # type: ignore[assignment]
        return weight

    def forward(self, ids: Tensor) -> Tensor:
        """Returns [..., width]."""
        embedded: Tensor = self._held.module(ids)
        return embedded.to(self._dtype)


class _Head(nn.Module):
    """The target's LM head, by reference, or some rows of it; `dtype` is the target's.

    Attributes:
        tokens: [draft vocabulary] int64, whose rows; None for all.
    """

    tokens: Tensor | None

    def __init__(self, module: nn.Module, dtype: torch.dtype, tokens: Tensor | None) -> None:
        super().__init__()
        self._held, self._dtype = _Held(module), dtype
        self.register_buffer("tokens", tokens, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., vocabulary or draft vocabulary]."""
        logits: Tensor = self._held.module(hidden.to(self._dtype))
        return logits
