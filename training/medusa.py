"""Training Medusa's heads on a target that stays as it is: Medusa-1 (Cai et al., arXiv:2401.10774, section 2.2.1).

Head k (from 0) reads the target's last hidden state at position t and learns token t + 2 + k, where that token is to
be learnt and in the draft vocabulary. While heads train their weights are float32, whatever the target's type; they
are saved in the target's. The module knows neither where features come from nor how a tree is drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.drafters.medusa.formats import Layout, load_heads, save_heads
from draftwood.drafters.medusa.network import IGNORED, MedusaHeads

from .data import Sequences, apart, frequent_tokens
from .features import check_data, feature_sources
from .fingerprint import fingerprint
from .loop import Schedule, train
from .medusa_losses import Evaluation, MedusaObjective
from .output import new_output, publish


@dataclass(frozen=True)
class MedusaRecipe:
    """What is trained, and on what.

    Attributes:
        heads: how many tokens ahead to draft; 4 when None, or those of the heads that training starts from.
        layers: residual blocks of a head; 1 when None, or as many as those have.
        shared: use the target's LM head in place of own ones; own ones when None, or as those do.
        draft_vocabulary: guess only the tokens that are most often learnt, so many; all when None, or theirs.
        decay: the loss of head k counts decay^k.
        distil: learn the target's distribution instead of the text.
        held_out: share of the sequences to measure on, or how many.
        nodes: size of the tree whose expected tau is told.
    """

    heads: int | None = None
    layers: int | None = None
    shared: bool | None = None
    draft_vocabulary: int | None = None
    decay: float = 0.8
    distil: bool = False
    held_out: int | float = 0.05
    nodes: int = 12

    def __post_init__(self) -> None:
        for name, least in (("heads", 1), ("layers", 0), ("draft_vocabulary", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        whole_number("nodes", self.nodes)
        real_number("decay", self.decay, 0.0, 1.0)
        switch("distil", self.distil)


def train_medusa(
    target: Target,
    data: Sequences,
    output: str | Path,
    schedule: Schedule,
    recipe: MedusaRecipe | None = None,
    *,
    init: str | Path | None = None,
    held: Sequences | None = None,
    cache: str | Path | None = None,
    layout: Layout = "medusa-1",
    base_model: str = "",
    tensorboard: bool = False,
    save_dtype: torch.dtype | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_features: Callable[[int, int], None] | None = None,
) -> MedusaHeads:
    """Trains heads for a target and saves them, for the drafter `medusa`.

    While it trains, checkpoint and log are in `<output>.training`; a run that was stopped goes on from there. At the
    end `output` appears whole: heads, a config with the measured accuracies, `training.json` and `log.jsonl`.

    Args:
        target: stays as it is.
        data: what the heads learn from, and are measured on.
        output: directory to make, which must not exist yet.
        schedule: how long and how fast.
        recipe: what is trained.
        init: heads to start from, in any layout that is read.
        held: what heads are measured on, in place of a part of `data`, which runs before this one may have learnt.
        cache: directory for the target's features, computed there once; without it they are computed as needed.
        layout: of the saved heads.
        base_model: name of the target, for the config.
        tensorboard: also write the log for tensorboard.
        save_dtype: of the saved weights; the target's when None.
        on_step: called with each line of the log.
        on_features: called while features are cached, with sequences done and their number.

    Returns:
        The heads as they are saved, in evaluation mode.

    Raises:
        InvalidRequest: a setting that cannot work, data that does not fit, an `output` that exists, or one begun
            with other settings.
        InvalidCheckpoint: `init`, or the checkpoint of the stopped run, cannot be read.
        ModelNotFound: there are no heads at `init`.
        UnsupportedModel: the target's LM head cannot be run on its own, or copied.
    """
    recipe = recipe or MedusaRecipe()
    output, working = new_output(output)
    learnt, held = apart(data, recipe.held_out, schedule.seed, held)
    for part in (learnt, held):
        check_data(part, target)
    heads = make_heads(target, learnt, recipe, init)
    for part, name in ((learnt, "training"), (held, "held-out")):
        check_labels(part, heads, name)
    sources = feature_sources(target, ["last"], learnt, held, cache, on_features)
    lm_head = head_of(target, heads.draft_tokens)
    setup = {
        "recipe": asdict(recipe) | asdict(heads.config) | {"draft_vocabulary": heads.draft_vocabulary},
        "model": fingerprint(target.model),
        "init": None if init is None else fingerprint(heads),
    }
    objective = MedusaObjective(heads, sources[0], lm_head, decay=recipe.decay, distil=recipe.distil)
    evaluation = Evaluation(heads, sources[1], lm_head, held, schedule.batch_size, recipe.nodes)
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
    heads.requires_grad_(False).eval().to(save_dtype or target.dtype)
    # Of heads that are never right no tree can be chosen.
    accuracies = evaluation.accuracies if any(evaluation.accuracies[0]) else None

    def write(directory: Path) -> None:
        save_heads(heads, directory, layout=layout, base_model=base_model, accuracies=accuracies, target=target)

    settings = setup | {
        "schedule": asdict(schedule),
        "data": data.digest(),
        "sequences": {"training": len(learnt), "held-out": len(held), "length": data.tokens.shape[1]},
        "coverage": {"training": coverage(heads, learnt), "held-out": coverage(heads, held)},
        "evaluation": measured,
    }
    publish(output, working, write, settings)
    return heads


def coverage(heads: MedusaHeads, data: Sequences) -> float:
    """Returns what share of the learnt tokens of `data` the heads can guess."""
    known = heads.labels(data.tokens[data.learnt].to(next(heads.parameters()).device)) != IGNORED
    return float(known.double().mean())


def make_heads(target: Target, data: Sequences, recipe: MedusaRecipe, init: str | Path | None = None) -> MedusaHeads:
    """Returns the heads that training starts from, in float32 (or float64) on the target's device.

    Args:
        target: for which they are.
        data: whose tokens are counted for the draft vocabulary.
        recipe: the sizes.
        init: heads to start from.

    Raises:
        InvalidRequest: a size that cannot be, or that is not the one of `init`.
        InvalidCheckpoint: `init` is broken or another target's.
        ModelNotFound: there are no heads at `init`.
        UnsupportedModel: the target's LM head cannot be copied.
    """
    if init is None:
        tokens = None
        if recipe.draft_vocabulary not in (None, target.vocabulary_size):
            tokens = frequent_tokens(data, recipe.draft_vocabulary, target.vocabulary_size).to(target.device)
        heads = MedusaHeads.for_target(
            target,
            heads=4 if recipe.heads is None else recipe.heads,
            layers=1 if recipe.layers is None else recipe.layers,
            shared=bool(recipe.shared),
            draft_tokens=tokens,
        )
    else:
        heads = load_heads(init, width=target.config.hidden_size, vocabulary=target.vocabulary_size).heads
        sizes = asdict(heads.config) | {"draft_vocabulary": heads.draft_vocabulary}
        for name in ("heads", "layers", "shared", "draft_vocabulary"):
            wanted = getattr(recipe, name)
            if wanted not in (None, sizes[name]):
                raise InvalidRequest(
                    f"the heads at {str(init)!r} have {name}={sizes[name]}, not {wanted}; leave it out"
                )
    return heads.to(target.device, torch.promote_types(target.dtype, torch.float32))


def check_labels(data: Sequences, heads: MedusaHeads, name: str) -> None:
    """Refuses data on which a head has nothing to learn, or to be measured on; `name` is what messages call it.

    Raises:
        InvalidRequest: it is such.
    """
    known = data.learnt & (heads.labels(data.tokens.to(next(heads.parameters()).device)).cpu() != IGNORED)
    for k in range(heads.config.heads):
        if not known[:, 2 + k :].any():
            raise InvalidRequest(
                f"no token of the {name} data is to be learnt by head {k}, {2 + k} tokens or more into its sequence "
                "and in the draft vocabulary; give more or longer texts, or fewer heads"
            )
