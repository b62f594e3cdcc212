"""Distilling a draft model: a small model of the target's family learns to say what the target would.

The student starts from the target's own weights (`student.py`) and learns the target's distribution at every learnt
position, as knowledge distillation for speculative decoding does (DistillSpec: Zhou et al., arXiv:2310.08461). What
the text is does not matter to the method; the target's own is what the student will be asked for. The module knows
no tokenizer and no tree; the drafter `draft-model` loads what it saves as it loads any model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwood.core.anatomy import find_decoder
from draftwood.core.checks import real_number, whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.views import head_alone, head_of
from draftwood.study.theory import expected_tokens

from .data import Batch, Sequences, apart, check_vocabulary
from .features import FeatureSource, feature_sources
from .fingerprint import fingerprint
from .loop import Figures, Objective, Schedule, held_out, train
from .output import new_output, publish
from .student import load_student, make_student, spread

Loss = Literal["forward", "reverse", "tv"]
Head = Callable[[Tensor], Tensor]

LAYERS = 4
"""Blocks of a student of which nothing else is said."""

POSITIONS = 256
"""At how many positions logits are in memory at once: 50 MB each of float32 with a vocabulary of 49,152."""


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
    """

    layers: int | None = None
    keep_layers: tuple[int, ...] | None = None
    width: int | None = None
    loss: Loss = "forward"
    cross_entropy: float = 0.0
    gamma: int = 4
    held_out: int | float = 0.05

    def __post_init__(self) -> None:
        whole_number("gamma", self.gamma)
        for name in ("layers", "width"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        if self.loss not in get_args(Loss):
            raise InvalidRequest(f"loss must be one of {', '.join(get_args(Loss))}, got {self.loss!r}")
        real_number("cross_entropy", self.cross_entropy, 0.0, 1.0)

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
    """Trains a student of the target and saves it as an ordinary model, for the drafter `draft-model`.

    While it trains, checkpoint and log are in `<output>.training`; a run that was stopped goes on from there. At the
    end `output` appears whole: model, the target's tokenizer, `training.json` and `log.jsonl`. Weights are float32
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
    objective = Distillation(student, source, target, recipe)
    evaluate = None if held is None else _evaluation(Distillation(student, measuring, target, recipe), held, schedule)
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

    def write(directory: Path) -> None:
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
        counts = torch.bincount(data.tokens.flatten(), minlength=target.vocabulary_size)
        kept = recipe.blocks(target.layers)
        student = make_student(target, kept, recipe.width, counts)
        return student, {"recipe": told | {"layers": recipe.layers or LAYERS}, "keep_layers": kept}
    student = load_student(target, init)
    config = student.config.get_text_config(decoder=True)
    sizes = {"layers": config.num_hidden_layers, "width": config.hidden_size, "keep_layers": None}
    for name, size in sizes.items():
        if told[name] not in (None, size):
            has = "its own blocks" if size is None else f"{name}={size}"
            raise InvalidRequest(f"the student at {str(init)!r} has {has}, not {name}={told[name]}; leave it out")
    return student, {"recipe": told | sizes, "init": fingerprint(student)}


def _evaluation(objective: Distillation, held: Sequences, schedule: Schedule) -> Callable[[], dict[str, float]]:
    measure = held_out(objective, held, schedule.batch_size)
    gamma = objective.recipe.gamma

    def evaluate() -> dict[str, float]:
        figures = measure()
        alpha, agreement = (min(max(figures[name], 0.0), 1.0) for name in ("acceptance", "agreement"))
        return figures | {"tau": expected_tokens(alpha, gamma), "greedy tau": expected_tokens(agreement, gamma)}

    return evaluate


class Distillation(Objective):
    """The mean divergence of student and target over the learnt positions, in float32.

    Its figures: `agreement`, how often both have the same most probable token, which is alpha at temperature 0; and
    `acceptance`, the mean of 1 - TV(p, q), which is alpha at temperature 1 (arXiv:2211.17192, corollary 3.6).

    Args:
        student: what is trained.
        features: give the target's feature `"last"`.
        target: whose LM head; its weights are not copied.
        recipe: for the loss.
    """

    def __init__(
        self, student: PreTrainedModel, features: FeatureSource, target: Target, recipe: DraftModelRecipe
    ) -> None:
        super().__init__()
        self.student = student
        self.recipe = recipe
        # In tuples, so that they are neither trained nor registered twice.
        self._teacher = (features, head_of(target), target.dtype)
        self._parts = (find_decoder(student), *_live_head(student))

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        features, teacher_head, dtype = self._teacher
        decoder, head, weights = self._parts
        wanted = batch.learnt[:, 1:]
        labels = batch.tokens[:, 1:][wanted]
        taught = features(batch)["last"][:, :-1][wanted].to(dtype)  # [positions, target width]
        half = dtype == torch.bfloat16
        kind = batch.tokens.device.type
        # Without its cache of converted weights, which would outlive the graph of a chunk.
        mixed: AbstractContextManager[Any] = torch.autocast(kind, dtype, cache_enabled=False) if half else nullcontext()
        with mixed:
            hidden = decoder(input_ids=batch.tokens, use_cache=False)[0][:, :-1][wanted]  # [positions, width]

        def compute(part: slice) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
            def losses(own: Tensor) -> tuple[Tensor, Tensor]:
                with torch.no_grad(), torch.autocast(kind, enabled=False):
                    expected = teacher_head(taught[None, part]).squeeze(0)
                with mixed:
                    logits = head(own[None]).squeeze(0)
                with torch.autocast(kind, enabled=False):
                    return self._sums(logits, expected, labels[part])

            return losses

        loss, sums = _in_chunks(compute, hidden, weights)
        acceptance, agreement = sums / len(labels)
        return loss / len(labels), {"acceptance": acceptance, "agreement": agreement}

    def _sums(self, logits: Tensor, expected: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, and [acceptance, agreement], all summed over the positions."""
        log_q, log_p = (_log_probabilities(part) for part in (logits, expected))
        loss = divergence(log_p, log_q, self.recipe.loss).sum()
        if share := self.recipe.cross_entropy:
            loss = (1 - share) * loss + share * nn.functional.nll_loss(log_q, labels, reduction="sum")
        with torch.no_grad():
            acceptance = torch.minimum(log_p, log_q).exp().sum()
            # A second argmax would cost as much as a softmax on the CPU.
            agreement = (log_q.gather(-1, log_p.argmax(-1, keepdim=True))[:, 0] == log_q.amax(-1)).sum()
        return loss, torch.stack([acceptance, agreement.to(acceptance.dtype)])


def divergence(log_p: Tensor, log_q: Tensor, loss: Loss) -> Tensor:
    """Returns a divergence of the student's distribution q from the target's p at each position.

    Args:
        log_p: [positions, vocabulary], log-probabilities of the target.
        log_q: the student's.
        loss: which.

    Returns:
        [positions], in nats; total variation in [0, 1].
    """
    if loss == "forward":
        p = log_p.exp()
        # Dot products: half the passes over the vocabulary of a sum over p (log p - log q).
        return _dots(p, log_p) - _dots(p, log_q)
    if loss == "reverse":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Returns the dot product of each row, [rows]."""
    return torch.bmm(left[:, None], right[..., None])[:, 0, 0]


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _live_head(student: PreTrainedModel) -> tuple[Head, list[nn.Parameter]]:
    """Returns what the student makes of its final hidden states, and the parameters of it, which are the student's own.

    `core.views.head_of` gives no gradient to the head; a student's head learns.
    """
    own = (*student.parameters(), *student.buffers(), student.config)
    head, twin = head_alone(student, find_decoder(student), {id(part): part for part in own})
    return head, list(twin.parameters())


def _in_chunks(
    compute: Callable[[slice], Callable[[Tensor], tuple[Tensor, Tensor]]], hidden: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Adds up losses and figures over chunks of positions; only one chunk's logits are ever in memory.

    Args:
        compute: gives for a chunk the function from its hidden states to (loss, figures), which uses `weights`.
        hidden: [positions, width].
        weights: what else is to have a gradient.
    """
    chunks = [slice(start, start + POSITIONS) for start in range(0, len(hidden), POSITIONS)]
    if torch.is_grad_enabled():
        loss, sums = _Chunks.apply(compute, chunks, hidden, *weights)  # type: ignore[no-untyped-call]
        return loss, sums
    parts = [compute(chunk)(hidden[chunk]) for chunk in chunks]
    return torch.stack([loss for loss, _ in parts]).sum(), torch.stack([sums for _, sums in parts]).sum(0)


class _Chunks(torch.autograd.Function):
    """Computes a chunk's gradients right after its loss, and keeps them instead of its logits."""

    @staticmethod
    def forward(ctx: Any, compute: Any, chunks: Sequence[slice], hidden: Tensor, *weights: Tensor) -> Any:
        learnt = [weight for weight in weights if weight.requires_grad]
        losses, sums = [], []
        own_gradient = torch.zeros_like(hidden)
        gradients = [torch.zeros_like(weight) for weight in learnt]
        for chunk in chunks:
            own = hidden[chunk].detach().requires_grad_()
            with torch.enable_grad():
                loss, figures = compute(chunk)(own)
                first, *rest = torch.autograd.grad(loss, [own, *learnt])
            own_gradient[chunk] = first
            for total, part in zip(gradients, rest, strict=True):
                total += part
            losses.append(loss.detach())
            sums.append(figures)
        places = iter(gradients)
        ctx.gradients = [own_gradient, *(next(places) if weight.requires_grad else None for weight in weights)]
        figures = torch.stack(sums).sum(0)
        ctx.mark_non_differentiable(figures)
        return torch.stack(losses).sum(), figures

    @staticmethod
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> Any:
        return None, None, *(part if part is None else part * factor for part in ctx.gradients)
