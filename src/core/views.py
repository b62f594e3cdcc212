"""Views: some layers and sub-layers of a target as a scorer of their own, sharing every weight with it.

A view is made of shallow copies of the few modules between the model and its list of blocks, with a shorter list
and a config of its own. The blocks themselves are the target's, and since they know their layer index, a view
reads and writes the right layers of the target's own cache. Nothing is set on the target's model. The module
knows no drafter; who decides which layers are left out is not its business.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from .errors import REFUSALS, InvalidRequest, UnsupportedModel
from .packing import PackedLinear
from .proposal import ExitStates
from .target import Target
from .tree import TokenTree

_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward", "ffn")


def layer_view(
    target: Target,
    first: int = 0,
    stop: int | None = None,
    *,
    skip_attention: Collection[int] = (),
    skip_mlp: Collection[int] = (),
) -> Target:
    """Returns a scorer that runs blocks `first` to `stop - 1`, without the sub-layers named.

    It works on caches of `target`. A view that starts at 0 reads token ids; one that starts later has to be entered
    with hidden states (see `ExitStates`). The final norm and the LM head are always the target's.

    Args:
        target: whose layers.
        first: the first block to run.
        stop: the block to stop before; all remaining ones when None.
        skip_attention: blocks whose attention adds nothing.
        skip_mlp: blocks whose MLP adds nothing. A block that skips both is left out.

    Raises:
        InvalidRequest: a block that the target does not have, or nothing is left to run.
        UnsupportedModel: the model is built in a way that cannot be viewed; the message says which.
    """
    layers = target.layers
    stop = layers if stop is None else stop
    if not 0 <= first < stop <= layers:
        raise InvalidRequest(f"a view needs 0 <= first < stop <= {layers} blocks, got first={first}, stop={stop}")
    for kind, skipped in (("attention", skip_attention), ("mlp", skip_mlp)):
        outside = sorted(layer for layer in skipped if not 0 <= layer < layers)
        if outside:
            raise InvalidRequest(f"the target has blocks 0 to {layers - 1}; cannot skip the {kind} of {outside}")
    kept = [layer for layer in range(first, stop) if layer not in skip_attention or layer not in skip_mlp]
    if not kept:
        raise InvalidRequest(f"every sub-layer of blocks {first} to {stop - 1} is skipped; keep at least one")

    blocks = nn.ModuleList()
    for layer in kept:
        block = target.blocks[layer]
        if layer in skip_attention:
            block = _without(block, _ATTENTION, _NoAttention())
        elif layer in skip_mlp:
            block = _without(block, _MLP, _NoMLP())
        blocks.append(block)
    view = target.over(_rebuilt(target.model, target.blocks, blocks, kept), blocks)
    if first == 0:
        _try(target, view)
    return view


@torch.inference_mode()
def _try(target: Target, view: Target) -> None:
    """Runs a view once: layers that read other layers' states (gemma4) cannot do without them."""
    try:
        view.score(target.new_cache(1, 8), [[1, 2]], TokenTree.empty(1))
    except REFUSALS as error:
        raise UnsupportedModel(
            f"{type(target.model).__name__} does not run without the layers left out: {type(error).__name__}: {error}"
        ) from error


def head_of(target: Target, tokens: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Returns what the target makes of its final normalised hidden states: LM head, scaling and soft-capping.

    Its weights are the target's own memory, but no gradient is ever computed for them; one flows through to the
    hidden states.

    Args:
        target: whose LM head.
        tokens: [kept] int64 target ids: the logits of these alone, in this order. Of an ordinary LM head their rows
            are then copied, so that no other is read. None keeps the whole vocabulary.

    Returns:
        A function from [batch, columns, width], the feature `"last"`, to raw logits [batch, columns, vocabulary or
        kept].

    Raises:
        InvalidRequest: `tokens` is no list of the target's token ids.
        UnsupportedModel: the model does not take hidden states from its decoder to its LM head.
    """
    decoder = target.decoder
    path = next(name for name, module in target.model.named_modules() if module is decoder)
    inside = {id(part) for part in decoder.modules()}
    shared = _shared(part for part in target.model.modules() if id(part) not in inside)
    shared[id(target.model.config)] = target.model.config
    if tokens is not None:
        output: nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        shared[id(output)] = _rows(output, _token_ids(tokens, target.vocabulary_size))
    head, _ = head_alone(target.model, decoder, shared)
    try:
        with torch.inference_mode():
            cache = target.new_cache(1, 8)
            scores = target.score(cache, [[1, 2]], TokenTree.empty(1), features=frozenset({"last"}))
            expected = scores.logits[:, 0] if tokens is None else scores.logits[:, 0, tokens.to(scores.logits.device)]
            error = (head(scores.features["last"])[:, -1] - expected).abs().max() / scores.logits.std()
    except REFUSALS as refusal:
        raise UnsupportedModel(
            f"{type(target.model).__name__} does not take hidden states to its LM head at {path!r}: "
            f"{type(refusal).__name__}: {refusal}"
        ) from refusal
    if not error < (1e-4 if target.dtype in (torch.float32, torch.float64) else 0.1):
        raise UnsupportedModel(
            f"the logits of {type(target.model).__name__} are no function of its final hidden states alone"
        )
    return head


def head_alone(
    model: PreTrainedModel, decoder: nn.Module, shared: dict[int, Any]
) -> tuple[Callable[[Tensor], Tensor], PreTrainedModel]:
    """Returns a model's LM head with all that it does to logits, and the copy of the model that runs it.

    Args:
        model: any causal language model.
        decoder: the part of it that is left out.
        shared: by `id`, what stands in the copy for a part of the model; everything else is copied.
    """
    twin: PreTrainedModel = copy.deepcopy(model, {**shared, id(decoder): _Given()})

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = twin(inputs_embeds=hidden, use_cache=False, return_dict=True).logits
        return logits

    return head, twin


def embedding_and_head(target: Target, tokens: Tensor | None = None) -> tuple[nn.Module, nn.Module]:
    """Returns the target's embedding and its bare LM head, for another model to use.

    Their weights are the target's own memory, but no gradient is ever computed for them.

    Args:
        target: whose.
        tokens: [kept] int64 target ids: an LM head of these alone, in this order; as of `head_of`.

    Raises:
        InvalidRequest: `tokens` is no list of the target's token ids.
    """
    embedding = target.model.get_input_embeddings()
    output: nn.Module = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    shared = _shared([*embedding.modules(), *output.modules()])
    if tokens is not None:
        shared[id(output)] = _rows(output, _token_ids(tokens, target.vocabulary_size))
    return copy.deepcopy(embedding, shared), copy.deepcopy(output, shared)


def _shared(modules: Iterable[nn.Module]) -> dict[int, Any]:
    """Returns by `id` what stands in a copy for the modules' tensors: the same memory, without gradients."""
    shared: dict[int, Any] = {}
    for part in modules:
        for parameter in part.parameters(recurse=False):
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        shared.update((id(buffer), buffer) for buffer in part.buffers(recurse=False))
    return shared


def _token_ids(tokens: Tensor, vocabulary: int) -> Tensor:
    """Checks that `tokens` are ids below `vocabulary`."""
    if tokens.dim() != 1 or not tokens.numel() or tokens.dtype != torch.int64:
        raise InvalidRequest(f"tokens must be [kept] int64 ids, got {list(tokens.shape)} {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise InvalidRequest(f"tokens must be ids from 0 to {vocabulary - 1}, got {low if low < 0 else high}")
    return tokens


def _rows(output: nn.Module, tokens: Tensor) -> nn.Module:
    """Returns an LM head that computes the logits of `tokens` alone, or, of an unusual one, picks them out."""
    # Anything else, quantised or adapted, multiplies by something else than its weight.
    plain = type(output) in (nn.Linear, PackedLinear) and type(output.weight) is nn.Parameter
    if not isinstance(output, nn.Linear) or not plain:
        return _Picked(output, tokens)
    rows = nn.Linear(output.in_features, len(tokens), bias=output.bias is not None, device="meta")
    for name, parameter in output.named_parameters(recurse=False):
        kept = parameter.detach()[tokens.to(parameter.device)]
        setattr(rows, name, nn.Parameter(kept, requires_grad=False))
    return PackedLinear(rows) if isinstance(output, PackedLinear) else rows


class _Picked(nn.Module):
    """An LM head of which some logits are picked out."""

    def __init__(self, output: nn.Module, tokens: Tensor) -> None:
        super().__init__()
        self._outputs = (output,)  # in a tuple: it is the target's, no part of this module
        self._tokens = tokens

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._outputs[0](hidden)
        return logits[..., self._tokens.to(logits.device)]


class _Given(nn.Module):
    """Stands in for a decoder that has run already: gives back the hidden states that it is handed."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _GivenStates:
        return _GivenStates(last_hidden_state=inputs_embeds)


class _GivenStates(BaseModelOutputWithPast):
    """The output of a decoder of any family: whatever else it may hold is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def resumes_exactly(target: Target, layer: int) -> bool:
    """Tells whether the target's logits are those of blocks `layer` onwards, run on what the block before put out.

    They are not where embeddings are scaled or given positions on their way in (gemma, gpt2, opt), or where later
    blocks read more than the hidden state. This is measured, not read off the model's name.
    """
    prefix, rest = layer_view(target, 0, layer), layer_view(target, layer)
    prompt, tree = [1, 2], TokenTree.from_lists([[3, 4, 3]], [[-1, -1, 1]])
    try:
        with torch.inference_mode():
            expected = target.score(target.new_cache(1, 8), [prompt], tree).logits
            cache = target.new_cache(1, 8)
            hidden = prefix.score(cache, [prompt], tree, features=frozenset({layer})).features[layer]
            cache.lengths = [0]
            logits = target.score(cache, [prompt], tree, exit=ExitStates(layer, hidden, rest)).logits
    except REFUSALS:
        return False  # a model that refuses `inputs_embeds` cannot be entered there at all
    # The very same operations, so that equality to rounding can be asked for in every type.
    error = (logits.double() - expected.double()).abs().amax()
    allowed = 1e-5 if target.dtype in (torch.float32, torch.float64) else 1e-2
    return bool(error <= allowed * expected.double().std())


def weights_read(scorer: Target) -> int:
    """Returns how many weights a forward of a target or view reads: those of its blocks and of the LM head.

    At small batches a forward takes as long as its weights take to arrive. Of experts all are counted; the
    embeddings are looked up, not read.
    """
    head: nn.Module = scorer.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for part in (scorer.blocks, head) for parameter in part.parameters())


class _NoAttention(nn.Module):
    """Stands in for an attention that is skipped; touches no cache."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    """Stands in for an MLP that is skipped."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def _rebuilt(model: PreTrainedModel, old: nn.ModuleList, new: nn.ModuleList, kept: list[int]) -> PreTrainedModel:
    """Copies the modules from `model` down to its list of blocks, and puts `new` in the place of `old`."""
    path = next(name for name, module in model.named_modules() if module is old)
    *names, last = path.split(".")
    top: PreTrainedModel = _twin(model)
    module: Any = top
    modules = [module]
    for name in names:
        module._modules[name] = module = _twin(module._modules[name])
        modules.append(module)
    module._modules[last] = new

    copies: dict[int, Any] = {}  # shared, so that modules which share a config go on sharing one
    for module in modules:
        if hasattr(module, "config"):
            module.config = copy.deepcopy(module.config, copies)
    config = top.config.get_text_config(decoder=True)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds is not None:
            setattr(config, name, [kinds[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    return top


def _twin(module: Any) -> Any:
    """A module that shares parameters, buffers and children with `module`, but not the dicts that hold them."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, (dict, set)):
            vars(twin)[name] = copy.copy(value)
    # A forward that was replaced on the instance (torch.compile, accelerate's hooks) is bound to the original.
    vars(twin).pop("forward", None)
    twin._compiled_call_impl = None
    return twin


def _without(block: nn.Module, names: tuple[str, ...], stand_in: nn.Module) -> nn.Module:
    """A copy of `block` with `stand_in` for the child that has one of `names`."""
    name = next((name for name in names if name in block._modules), None)
    if name is None:
        raise UnsupportedModel(
            f"{type(block).__name__} has no sub-layer called {' or '.join(names)} (it has "
            f"{list(block._modules)}); skip its attention and its MLP together"
        )
    twin: nn.Module = _twin(block)
    twin._modules[name] = stand_in
    return twin
