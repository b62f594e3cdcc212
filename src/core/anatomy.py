"""What a model is made of, and whether it can score token trees: all that is found out when a target is built.

Everything is read off the model or tried on it; nothing is set on it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import LayerShape, LayoutRecorder, SlotCache
from .errors import REFUSALS, UnsupportedModel
from .masks import tree_masks, tree_positions
from .tree import TokenTree

if TYPE_CHECKING:
    from .target import Target


class ForwardArguments(NamedTuple):
    """How a model's forward takes what we hand over.

    Attributes:
        cache: the name of the cache argument; `past_key_values` became `cache` in transformers 5.24.
        logits_to_keep: whether it can leave out logits that are not wanted.
    """

    cache: str
    logits_to_keep: bool


def forward_arguments(model: PreTrainedModel) -> ForwardArguments:
    """Reads the argument names off the signature of a model's forward.

    Raises:
        UnsupportedModel: the model is no decoder, not in evaluation mode, has no cache or counts positions itself.
    """
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; token trees need a decoder-only one")
    if model.training:
        raise UnsupportedModel(f"{name} is in training mode, where dropout changes its output; call model.eval() first")
    causal = any(getattr(module, "is_causal", False) is True for module in model.modules())
    if getattr(config, "is_decoder", None) is False and not causal:
        raise UnsupportedModel(f"{name} is configured as a bidirectional encoder; set is_decoder=True in its config")
    if any(getattr(part, "alibi", False) for part in (config, getattr(config, "attn_config", None))):
        raise UnsupportedModel(f"{name} biases attention by distance (alibi), which knows slots, not tree positions")
    parameters = inspect.signature(inspect.unwrap(model.forward)).parameters
    cache = next((known for known in ("cache", "past_key_values") if known in parameters), None)
    if cache is None:
        raise UnsupportedModel(f"{name} takes no key-value cache; recurrent layers cannot follow a token tree")
    if "position_ids" not in parameters:
        raise UnsupportedModel(
            f"{name} takes no position_ids (it counts positions itself, as alibi does); siblings share a position"
        )
    return ForwardArguments(cache, "logits_to_keep" in parameters)


def is_sharded(model: nn.Module) -> bool:
    """Whether several processes hold parts of each weight."""
    # By its full tensor, since a torch that was built without distributed has no DTensor to compare types with.
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """Returns the module whose output is what the LM head reads."""
    decoder: object = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[no-untyped-call]
    # Some families call their LM head a decoder.
    if not isinstance(decoder, nn.Module) or decoder is model or isinstance(decoder, nn.Linear):
        decoder = model.base_model
    if decoder is model:  # a name that its base class does not look for
        decoder = next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)
    return decoder


def find_blocks(decoder: nn.Module, layers: int) -> nn.ModuleList:
    """Returns the list of decoder blocks: the one of the configured length, or else the longest.

    Raises:
        UnsupportedModel: there is no list of modules at all.
    """
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnsupportedModel(f"{type(decoder).__name__} has no list of decoder blocks")
    return next((found for found in lists if len(found) == layers), max(lists, key=len))


@torch.inference_mode()
def probe(target: Target) -> dict[int, LayerShape]:
    """Finds out what each layer stores, and tries whether trees are scored as their paths are.

    Two rows of different lengths are read; then a tree behind each, with two siblings and what follows them, must
    get the logits that its paths get as plain sequences without a cache.

    Raises:
        UnsupportedModel: the model takes no tree-shaped mask, or scores trees wrongly.
    """
    name = type(target.model).__name__
    prompts, pending = [[1, 2, 3], [4]], [[5], [6]]
    tree = TokenTree.from_lists([[3, 4, 3, 5]] * 2, [[-1, -1, 1, 2]] * 2)
    paths = [[], [3], [4], [4, 3], [4, 3, 5]]
    recorder = LayoutRecorder()
    try:
        _plain(target, prompts[0], recorder)
        cache = SlotCache(recorder.layout, 2, 16)
        target.score(cache, prompts, TokenTree.empty(2))
        scores = target.score(cache, pending, tree).logits.double()  # [2, 1 + nodes, vocabulary]
        texts = [[*prompts[row], *pending[row], *path] for row in range(2) for path in paths]
        expected = torch.cat([_plain(target, text, LayoutRecorder()) for text in texts]).double().view_as(scores)
    except UnsupportedModel:
        raise
    except REFUSALS as error:
        raise UnsupportedModel(
            f"{name} does not take a tree-shaped attention mask and a cache of ours: {type(error).__name__}: {error}"
        ) from error
    if not recorder.layout:
        raise UnsupportedModel(f"{name} keeps no keys and values in its cache")
    wrong = (scores - expected).abs().mean(-1) / expected.std(-1).clamp(min=1e-9)
    # The median, since a near tie between experts may send one node to another expert in half precision.
    worst = float(wrong.median(-1).values.max())
    allowed = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.2
    if getattr(target.model, "is_quantized", False):  # kernels of quantised weights round to half precision inside
        allowed = max(allowed, 1e-2)
    if not worst <= allowed:
        raise UnsupportedModel(
            f"{name} scores a token tree differently from its paths (relative error {worst:.2g}): its layers do not "
            "follow position_ids and a 4-D attention_mask, keep more than keys and values, or quantise activations by "
            "what else is in the pass, as dynamic quantisation by tensor does"
        )
    return recorder.layout


def _plain(target: Target, tokens: list[int], cache: LayoutRecorder) -> Tensor:
    """Logits after a plain sequence, [1, vocabulary]."""
    device, width = target.device, len(tokens)
    tree = TokenTree.empty(1).to(device)
    positions = tree_positions([0], width, tree, device)
    masks = tree_masks(target.mask_plan, [0], width, tree, positions, width, target.dtype)
    return target.call(torch.tensor([tokens], device=device), positions, masks, cache, keep=1)[0][:, 0]
