"""Distilling a draft model: a small model of the target's family learns to say what the target would.

The student starts from the target's own weights (`student.py`) and learns the target's distribution at every learnt
position, as knowledge distillation for speculative decoding does (DistillSpec: Zhou et al., arXiv:2310.08461). What
the text is does not matter to the method; the target's own is what the student will be asked for. The module knows
no tokenizer and no tree; the drafter `draft-model` loads what it saves as it loads any model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.drafters.shared_model import draft_tokens, save_shared, share_with_target, shares_with_target
from draftwood.study.theory import expected_tokens

from .data import Sequences, apart, check_vocabulary, frequent_tokens
from .draft_model_losses import Distillation, Loss
from .features import feature_sources
from .fingerprint import fingerprint
from .loop import Schedule, held_out, train
from .output import new_output, publish
from .student import load_student, make_student, spread

LAYERS = 4
"""Blocks of a student of which nothing else is said."""


@dataclass(frozen=True)
class DraftModelRecipe:
    """What the student is and what it learns.

    Attributes:
        layers: how many of the target's blocks it starts from, evenly spaced, the first and the last among them; 4 when
            None, or as many as the student has that training starts from.
        keep_layers: these blocks instead.
        width: of its hidden states; the target's when None, or that student's.
        loss: `"forward"` KL(p || q), `"reverse"` KL(q || p), or `"tv"`, their total variation: 1 - alpha itself, of
            which little gradient comes while p and q have little in common.
        cross_entropy: how much of the loss is the cross-entropy of the text instead, from 0 to 1.
        gamma: of the chain whose expected tau is told.
        held_out: share of the sequences to measure on, or how many; 0 measures nothing.
        shared: use the target's embedding and LM head, so that only blocks and a final norm are learnt and saved; own
            ones when None, or as the student does that training starts from.
        draft_vocabulary: of a student that shares: guess only the tokens that are most often learnt, so many; all when
            None, or that student's.
    """

    layers: int | None = None
    keep_layers: tuple[int, ...] | None = None
    width: int | None = None
    loss: Loss = "forward"
    cross_entropy: float = 0.0
    gamma: int = 4
    held_out: int | float = 0.05
    shared: bool | None = None
    draft_vocabulary: int | None = None

    def __post_init__(self) -> None:
        whole_number("gamma", self.gamma)
        for name in ("layers", "width", "draft_vocabulary"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.shared is not None:
            switch("shared", self.shared)
        if self.loss not in get_args(Loss):
            raise InvalidRequest(f"loss must be one of {', '.join(get_args(Loss))}, got {self.loss!r}")
        real_number("cross_entropy", self.cross_entropy, 0.0, 1.0)

    def student(self, target: Target, data: Sequences) -> PreTrainedModel:
        """Returns the student that training starts from, of a target's blocks; tokens are counted in `data`.

        Raises:
            InvalidRequest: settings that cannot work together, or not with this target.
            UnsupportedModel: the target cannot be cut so.
        """
        kept, vocabulary = self.blocks(target.layers), target.vocabulary_size
        if not self.shared:
            if self.draft_vocabulary is not None:
                raise InvalidRequest(f"draft_vocabulary={self.draft_vocabulary} needs shared=True")
            return make_student(target, kept, self.width, torch.bincount(data.tokens.flatten(), minlength=vocabulary))
        if self.width not in (None, target.config.hidden_size):
            raise InvalidRequest(
                f"a student that shares the target's embedding has its width, {target.config.hidden_size}, not "
                f"{self.width}; leave it out"
            )
        tokens = None
        if self.draft_vocabulary not in (None, vocabulary):
            tokens = frequent_tokens(data, self.draft_vocabulary, vocabulary).to(target.device)
        student = make_student(target, kept)
        share_with_target(student, target, tokens)
        return student

    def blocks(self, layers: int) -> tuple[int, ...]:
        """Returns the blocks of a target of `layers` that the student starts from."""
        if self.keep_layers is not None:
            return tuple(self.keep_layers)
        return spread(layers, LAYERS if self.layers is None else self.layers)


def train_draft_model(
    target: Target,
    data: Sequences,
    output: str | Path,
    schedule: Schedule,
    recipe: DraftModelRecipe | None = None,
    *,
    init: str | Path | None = None,
    held: Sequences | None = None,
    cache: str | Path | None = None,
    save_dtype: torch.dtype | None = None,
    tensorboard: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_features: Callable[[int, int], None] | None = None,
) -> PreTrainedModel:
    """Trains a student of the target and saves it, for the drafter `draft-model`.

    While it trains, checkpoint and log are in `<output>.training`; a run that was stopped goes on from there. At the
    end `output` appears whole: an ordinary model with the target's tokenizer, or (`save_shared`) what a student that
    shares the target's embedding and LM head has of its own; `training.json` and `log.jsonl`. Weights are float32
    while they learn (float64 for a target in float64); with a target in bfloat16 matrix products run in bfloat16.

    Args:
        target: stays as it is.
        data: what the student learns from, and is measured on.
        output: directory to make, which must not exist yet.
        schedule: how long and how fast.
        recipe: what the student is and learns.
        init: student to start from, such as one that was trained before, in place of the target's blocks.
        held: what the student is measured on, in place of a part of `data`, which runs before this one may have learnt.
        cache: directory for the target's last hidden states, computed there once; without it they are computed as
            needed.
        save_dtype: of the saved weights; the target's when None.
        tensorboard: also write the log for tensorboard.
        on_step: called with each line of the log; its `evaluation` has the figures of `Distillation` on what is held
            out, `tau` and `greedy tau` besides: those of a chain of gamma tokens that are accepted independently with
            the mean acceptance or agreement.
        on_features: called while features are cached, with sequences done and their number.

    Returns:
        The student as it is saved, in evaluation mode.

    Raises:
        InvalidRequest: a setting that cannot work, data that does not fit, an `output` that exists, or one begun
            with other settings.
        InvalidCheckpoint: `init`, the checkpoint of the stopped run, or the cache, cannot be read.
        ModelNotFound: there is no model at `init`.
        VocabularyMismatch: the tokens of `init` are not the target's.
        UnsupportedModel: the target cannot be cut so, or its LM head cannot be run on its own.
    """
    recipe = recipe or DraftModelRecipe()
    output, working = new_output(output)
    learnt: Sequences = data
    if held is not None or recipe.held_out:
        learnt, held = apart(data, recipe.held_out, schedule.seed, held)
    for part in (data, *([] if held is None else [held])):
        check_vocabulary(part, target.vocabulary_size)
    student, setup = _student(target, learnt, recipe, init)
    source, measuring = feature_sources(target, ["last"], learnt, held, cache, on_features)
    setup["model"] = fingerprint(target.model)
    objective = Distillation(student, source, target, recipe.loss, recipe.cross_entropy)
    evaluate = None
    if held is not None:
        measured_as = Distillation(student, measuring, target, recipe.loss, recipe.cross_entropy, whole=True)
        evaluate = _evaluation(measured_as, held, schedule, recipe.gamma)
    measured: dict[str, float] = {}

    def note(entry: dict[str, Any]) -> None:
        measured.update(entry.get("evaluation", {}))
        if on_step is not None:
            on_step(entry)

    told: dict[str, Any] = {"on_step": note, "tensorboard": tensorboard}
    train(objective, learnt, schedule, directory=working, about=setup, evaluate=evaluate, **told)
    if evaluate is not None and not measured:  # stopped after the last step
        measured.update(evaluate())
    for parameter in student.requires_grad_(False).parameters():  # not the buffers: rotary frequencies stay exact
        parameter.data = parameter.data.to(save_dtype or target.dtype)

    shared = shares_with_target(student)
    if shared:
        share_with_target(student, target, draft_tokens(student))  # whose types may be others now

    def write(directory: Path) -> None:
        if shared:
            save_shared(student, directory)
            return
        student.save_pretrained(directory)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(directory)

    settings = setup | {
        "schedule": asdict(schedule),
        "data": data.digest(),
        "sequences": {"training": len(learnt), "held-out": 0 if held is None else len(held)},
        "evaluation": measured,
    }
    publish(output, working, write, settings)
    return student


def _student(
    target: Target, data: Sequences, recipe: DraftModelRecipe, init: str | Path | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns the student that training starts from, and what the run is to be known by."""
    told = asdict(recipe)
    if init is None:
        student, kept = recipe.student(target, data), recipe.blocks(target.layers)
        return student, {"recipe": told | {"layers": recipe.layers or LAYERS}, "keep_layers": kept}
    student = load_student(target, init)
    config, tokens = student.config.get_text_config(decoder=True), draft_tokens(student)
    sizes = {"layers": config.num_hidden_layers, "width": config.hidden_size, "keep_layers": None}
    sizes |= {"shared": shares_with_target(student), "draft_vocabulary": None if tokens is None else len(tokens)}
    for name, size in sizes.items():
        if told[name] not in (None, size):
            has = "its own blocks" if size is None else f"{name}={size}"
            raise InvalidRequest(f"the student at {str(init)!r} has {has}, not {name}={told[name]}; leave it out")
    return student, {"recipe": told | sizes, "init": fingerprint(student)}


def _evaluation(
    objective: Distillation, held: Sequences, schedule: Schedule, gamma: int
) -> Callable[[], dict[str, float]]:
    measure = held_out(objective, held, schedule.batch_size)

    def evaluate() -> dict[str, float]:
        figures = measure()
        alpha, agreement = (min(max(figures[name], 0.0), 1.0) for name in ("acceptance", "agreement"))
        return figures | {"tau": expected_tokens(alpha, gamma), "greedy tau": expected_tokens(agreement, gamma)}

    return evaluate
