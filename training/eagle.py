"""Training EAGLE heads on a target that stays as it is.

EAGLE-1 (arXiv:2401.15077), with HASS's alignment (arXiv:2408.15766) or without, and EAGLE-3 (arXiv:2503.01840). While a
head trains its weights are float32, whatever the target's type; it is saved in the target's. Where it starts
matters: features differ in scale by families and layers, and a random layer between them and the LM head begins with a
cross-entropy of a hundred. So the residual stream first carries a feature through unchanged, and the layer adds nothing
to it: the head then guesses what the target guessed a token before. The module knows neither where features come from
nor how a tree is drafted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.drafters.eagle.config import default_layers, layer_config
from draftwood.drafters.eagle.formats import load_head, save_head
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead
from draftwood.drafters.medusa.network import lm_head_rows

from .data import Sequences, apart, frequent_tokens
from .eagle_losses import EagleObjective, Evaluation, Weights, feature_names
from .features import check_data, feature_sources
from .fingerprint import fingerprint
from .loop import Schedule, train
from .output import new_output, publish

Start = Literal["feature", "block", "random"]
AnyHead = EagleHead | Eagle3Head

_PAPERS = {
    1: (1, Weights(decay=1.0, feature=1.0, entropy=0.1, noise=0.2)),
    3: (7, Weights(decay=0.8, feature=0.0, entropy=1.0, noise=0.0)),
}


@dataclass(frozen=True)
class EagleRecipe:
    """What is trained, and on what. Defaults that are None are the papers', by version.

    Attributes:
        version: 1 for the head of EAGLE-1 and EAGLE-2, 3 for that of EAGLE-3.
        unroll: steps that the head is run on its own outputs in training. EAGLE-1's default is 1, more are HASS's
            alignment; EAGLE-3's is 7 (its training-time test).
        decay: step s (from 0) counts decay^s; 1 for EAGLE-1, 0.8 for EAGLE-3.
        layers: blocks whose inputs EAGLE-3 reads; 2, L // 2 and L - 3 when None.
        draft_vocabulary: guess only the tokens that are most often learnt, so many; all when None.
        start: `"feature"`, from a layer that hands on a feature (of EAGLE-3 the last one, to the target's own norm and
            LM head); `"block"`, the same with the target's last block as the layer; or `"random"`.
        feature_weight: of the smooth L1 distance to the target's features; 1 for EAGLE-1, EAGLE-3 has none.
        entropy_weight: of the cross-entropy; 0.1 for EAGLE-1, 1 for EAGLE-3.
        noise: width of the uniform noise on the features of 512 tokens; 0.2 for EAGLE-1, 0 for EAGLE-3.
        recompute: run every step again for the backward pass, which saves memory.
        held_out: share of the sequences to measure on, or how many.
        depth: steps to measure.
        nodes: size of the tree whose expected tau is told.
    """

    version: int = 1
    unroll: int | None = None
    decay: float | None = None
    layers: tuple[int, ...] | None = None
    draft_vocabulary: int | None = None
    start: Start = "feature"
    feature_weight: float | None = None
    entropy_weight: float | None = None
    noise: float | None = None
    recompute: bool = False
    held_out: int | float = 0.05
    depth: int = 5
    nodes: int = 12

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise InvalidRequest(f"version must be 1 (EAGLE-1 and EAGLE-2) or 3, got {self.version!r}")
        if self.start not in ("feature", "block", "random"):
            raise InvalidRequest(f"start must be 'feature', 'block' or 'random', got {self.start!r}")
        for name in ("unroll", "draft_vocabulary", "depth", "nodes"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        for name, most in (("decay", 1.0), ("feature_weight", 1e6), ("entropy_weight", 1e6), ("noise", 1e6)):
            if getattr(self, name) is not None:
                real_number(name, getattr(self, name), 0.0, most)
        switch("recompute", self.recompute)
        if self.version == 1 and self.layers is not None:
            raise InvalidRequest("layers are for EAGLE-3; EAGLE-1 reads the last hidden state")
        if self.version == 3 and self.feature_weight:
            raise InvalidRequest("feature_weight is for EAGLE-1; EAGLE-3's outputs are no features of the target")

    def resolved(self) -> tuple[int, Weights]:
        """Returns steps and weights, with the version's defaults where the recipe says nothing."""
        unroll, weights = _PAPERS[self.version]
        own = {
            "decay": self.decay,
            "feature": self.feature_weight,
            "entropy": self.entropy_weight,
            "noise": self.noise,
        }
        return self.unroll or unroll, weights._replace(
            **{name: value for name, value in own.items() if value is not None}
        )


def train_eagle(
    target: Target,
    data: Sequences,
    output: str | Path,
    schedule: Schedule,
    recipe: EagleRecipe | None = None,
    *,
    init: str | Path | None = None,
    held: Sequences | None = None,
    cache: str | Path | None = None,
    layout: Literal["yuhuili", "speculators"] = "yuhuili",
    base_model: str = "",
    tensorboard: bool = False,
    save_dtype: torch.dtype | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_features: Callable[[int, int], None] | None = None,
) -> AnyHead:
    """Trains a head for a target and saves it, for the drafter `eagle`.

    While it trains, checkpoint and log are in `<output>.training`; a run that was stopped goes on from there. At the
    end `output` appears whole: the head, a config with the measured accuracies, `training.json` and `log.jsonl`.

    Args:
        target: stays as it is.
        data: what the head learns from, and is measured on.
        output: directory to make, which must not exist yet.
        schedule: how long and how fast; the papers' learning rates are 3e-5 (EAGLE-1) and 5e-5 (EAGLE-3), with
            gradients clipped at 0.5.
        recipe: what is trained.
        init: head to start from, in any layout that is read; it settles layers and draft vocabulary.
        held: what the head is measured on, in place of a part of `data`, which runs before this one may have learnt.
        cache: directory for the target's features, computed there once; without it they are computed as needed.
        layout: of the saved head; `"speculators"` is for EAGLE-3.
        base_model: name of the target, for the config.
        tensorboard: also write the log for tensorboard.
        save_dtype: of the saved weights; the target's when None.
        on_step: called with each line of the log.
        on_features: called while features are cached, with sequences done and their number.

    Returns:
        The head as it is saved, attached and in evaluation mode.

    Raises:
        InvalidRequest: a setting that cannot work, data that does not fit, an `output` that exists, or one begun
            with other settings.
        InvalidCheckpoint: `init`, or the checkpoint of the stopped run, cannot be read.
        ModelNotFound: there is no head at `init`.
        UnsupportedModel: the target's LM head cannot be run on its own, or copied.
    """
    recipe = recipe or EagleRecipe()
    unroll, weights = recipe.resolved()
    if layout != "yuhuili" and (layout != "speculators" or recipe.version == 1):
        raise InvalidRequest(f"layout must be 'yuhuili' or, for EAGLE-3, 'speculators', got {layout!r}")
    output, working = new_output(output)
    learnt, held = apart(data, recipe.held_out, schedule.seed, held)
    for part in (learnt, held):
        check_data(part, target)
    check_lengths(learnt, unroll, "training")
    check_lengths(held, recipe.depth, "held-out")
    head = make_head(target, learnt, recipe, init, seed=schedule.seed)
    sources = feature_sources(target, feature_names(head), learnt, held, cache, on_features)
    teacher = head_of(target)
    setup = {
        "recipe": asdict(recipe)
        | {"unroll": unroll, "weights": weights._asdict()}
        | {"draft_vocabulary": _drafted(head), "layers": list(head.feature_names)},
        "model": fingerprint(target.model),
        "init": None if init is None else fingerprint(head),
    }
    objective = EagleObjective(head, sources[0], teacher, unroll, weights, recompute=recipe.recompute)
    evaluation = Evaluation(head, sources[1], teacher, held, schedule.batch_size, recipe.depth, recipe.nodes)
    train(
        objective,
        learnt,
        schedule,
        directory=working,
        about=setup,
        evaluate=evaluation,
        on_step=on_step,
        tensorboard=tensorboard,
    )
    measured = evaluation.figures or evaluation()  # a run that was stopped after its last step has not measured
    head.requires_grad_(False).eval().to(save_dtype or target.dtype)

    def write(directory: Path) -> None:
        save_head(head, directory, layout=layout, target_name=base_model or None, depth=recipe.depth)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config |= {"base_model_name_or_path": base_model, "accuracies": evaluation.accuracies}
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    settings = setup | {
        "schedule": asdict(schedule),
        "data": data.digest(),
        "sequences": {"training": len(learnt), "held-out": len(held), "length": data.tokens.shape[1]},
        "evaluation": measured,
    }
    publish(output, working, write, settings)
    return head


def make_head(
    target: Target, data: Sequences, recipe: EagleRecipe, init: str | Path | None = None, *, seed: int = 0
) -> AnyHead:
    """Returns the head that training starts from, attached, in float32 (or float64) on the target's device.

    Args:
        target: for which it is.
        data: whose tokens are counted for the draft vocabulary.
        recipe: the sizes, and how to start.
        init: head to start from.
        seed: of what is random in the weights.

    Raises:
        InvalidRequest: a size that cannot be, or that is not the one of `init`.
        InvalidCheckpoint: `init` is broken or another target's.
        ModelNotFound: there is no head at `init`.
        UnsupportedModel: the target has no such weights to start from.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    if init is not None:
        loaded = load_head(init, target, dtype=dtype)
        found: dict[str, Any] = {
            "version": 3 if isinstance(loaded, Eagle3Head) else 1,
            "draft_vocabulary": _drafted(loaded),
        }
        found["layers"] = loaded.feature_names if isinstance(loaded, Eagle3Head) else None
        for name, value in found.items():
            if getattr(recipe, name) not in (None, value):
                raise InvalidRequest(f"the head at {str(init)!r} has {name}={value}, not {getattr(recipe, name)}")
        return loaded.attach(target).train()
    tokens = None
    if recipe.draft_vocabulary not in (None, target.vocabulary_size):
        tokens = frequent_tokens(data, recipe.draft_vocabulary, target.vocabulary_size)
    config = layer_config(target)
    with torch.random.fork_rng(devices=[]):  # modules draw from the global generator
        torch.manual_seed(seed)
        head: AnyHead
        if recipe.version == 1:
            head = EagleHead(config, fc_bias=False, draft_tokens=tokens)
        else:
            layers = default_layers(target) if recipe.layers is None else recipe.layers
            head = Eagle3Head(config, layers=layers, draft_tokens=tokens, target_hidden_size=target.config.hidden_size)
    head = head.to(target.device, dtype).attach(target).train()
    if recipe.start != "random":
        start_from_feature(head, target)
        if recipe.start == "block":
            start_from_block(head, target)
    return head


@torch.no_grad()
def start_from_feature(head: AnyHead, target: Target) -> None:
    """Has a head hand on the feature that it reads, of several the last one, and add nothing to it.

    Raises:
        UnsupportedModel: an EAGLE-3 head is to start from an LM head that is no matrix.
    """
    width = head.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -width:].fill_diagonal_(1.0)
    layer: Any = head.layers[0] if isinstance(head, EagleHead) else head.midlayer
    for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
        last.weight.zero_()
    if isinstance(head, Eagle3Head):
        head.lm_head.weight.copy_(lm_head_rows(target, head.draft_tokens))
        gain = _gain(getattr(target.decoder, "norm", None), width)
        if gain is not None:
            head.norm.weight.copy_(gain)


@torch.no_grad()
def start_from_block(head: AnyHead, target: Target) -> None:
    """Makes the target's last block the layer of a head that hands on a feature.

    EAGLE-3's residual stream is the target's own, so that the block is copied as it is, its attention blind to the
    embedding. EAGLE-1's is the feature behind the final norm: what the block reads is rescaled by both norms' gains,
    and what it would add is left out, since how large the stream was before that norm is lost; both projections that
    write to the stream start as zeros.

    Raises:
        UnsupportedModel: the block is not built as a Llama's, or of other sizes.
    """
    block, name = target.blocks[-1], type(target.blocks[-1]).__name__
    norms = ("input_layernorm", "post_attention_layernorm")
    reading = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    inner: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    writing = ("self_attn.o_proj", "mlp.down_proj")
    linears = (*reading, *inner, *writing)
    found = {part for part, _ in block.named_parameters()}
    if strange := sorted(found ^ {f"{part}.weight" for part in (*norms, *linears)}):
        raise UnsupportedModel(f"the target's {name} is not built as a Llama's ({strange[0]}); use start='feature'")
    if any(type(block.get_submodule(part)) is not nn.Linear for part in linears):
        raise UnsupportedModel(f"the matrices of the target's {name} are quantised or adapted; use start='feature'")
    width = head.config.hidden_size
    before, between, final = (
        _gain(norm, width) for norm in (*map(block.get_submodule, norms), getattr(target.decoder, "norm", None))
    )
    if before is None or between is None or final is None:
        raise UnsupportedModel(f"the norms of the target's {name} are not RMS norms; use start='feature'")
    if isinstance(head, Eagle3Head):
        layer: Any = head.midlayer
        layer.hidden_norm.weight.copy_(before)
        entry, copied = before.new_ones(()), inner + writing
    else:
        layer, copied = head.layers[0], inner
        # Small gains of the final norm are not undone in full: what they let through is mostly noise.
        undone = 1.0 / final.clamp(min=float(final.abs().mean()) / 10)
        entry, between = before * undone, between * undone
    for part in (*reading, *copied):
        weight, own = block.get_submodule(part).weight, layer.get_submodule(part).weight
        if part in reading:
            own.zero_()
            own[:, -width:].copy_(weight.to(own) * entry)  # type: ignore[operator]
        else:
            own.copy_(weight)
    layer.post_attention_layernorm.weight.copy_(between)


def _gain(norm: nn.Module | None, width: int) -> Tensor | None:
    """What an RMS norm multiplies by, however it stores that; None for another norm."""
    if norm is None:
        return None
    parameter = next(norm.parameters(), torch.ones(()))
    ones = torch.ones(width, dtype=parameter.dtype, device=parameter.device)
    gain: Tensor = norm(ones[None])[0]
    negated: Tensor = norm(-ones[None])[0]
    # A norm that takes off the mean makes nothing of ones, or its bias.
    return gain.detach() if torch.allclose(gain, -negated) and bool(gain.abs().mean() > 1e-3) else None


def check_lengths(data: Sequences, steps: int, name: str) -> None:
    """Refuses data on which a step has nothing to guess; `name` is what messages call it.

    Raises:
        InvalidRequest: it is such.
    """
    for step in range(steps):
        if not data.learnt[:, 2 + step :].any():
            raise InvalidRequest(
                f"nothing of the {name} data is to be learnt by step {step + 1}, which guesses what is {2 + step} "
                "places or more into a sequence; give more or longer texts, or fewer steps"
            )


def _drafted(head: AnyHead) -> int:
    return head.config.vocab_size if head.draft_tokens is None else len(head.draft_tokens)
