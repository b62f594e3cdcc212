"""What a distilled draft model learns: the target's distribution, all of it or over a draft vocabulary.

Knowledge distillation for speculative decoding (DistillSpec: Zhou et al., arXiv:2310.08461). The module knows neither
files nor where features and students come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwood.core.anatomy import find_decoder
from draftwood.core.target import Target
from draftwood.core.views import head_alone, head_of
from draftwood.drafters.medusa.network import IGNORED
from draftwood.drafters.shared_model import draft_tokens

from .data import Batch
from .features import FeatureSource
from .loop import Figures, Objective

Loss = Literal["forward", "reverse", "tv"]
Head = Callable[[Tensor], Tensor]

POSITIONS = 256
"""At how many positions logits are in memory at once: 50 MB each of float32 with a vocabulary of 49,152."""


class Distillation(Objective):
    """The mean divergence of student and target over the learnt positions, in float32.

    Of a student with a draft vocabulary it is the divergence from the target's distribution over these tokens, and
    positions before a token outside of it count as zero.

    Its figures: `agreement`, how often both have the same most probable token, which is alpha at temperature 0; and
    `acceptance`, the mean of 1 - TV(p, q), which is alpha at temperature 1 (arXiv:2211.17192, corollary 3.6). With a
    draft vocabulary also `coverage`, the share of the learnt tokens that are in it.

    Args:
        student: what is trained.
        features: give the target's feature `"last"`.
        target: whose LM head; its weights are not copied.
        loss: which divergence.
        cross_entropy: how much of the loss is the cross-entropy of the text instead.
        whole: compare with the target's distribution over all tokens, for figures that are exact with a draft
            vocabulary, too. Without, where the target's other logits are not computed, acceptance and agreement take
            positions before a token outside the draft vocabulary for missed, and none of the target's probability to
            be outside of it at others.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        features: FeatureSource,
        target: Target,
        loss: Loss = "forward",
        cross_entropy: float = 0.0,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        self.student = student
        self._loss: Loss = loss
        self._cross_entropy = cross_entropy
        tokens = draft_tokens(student)
        self._drafted = None if tokens is None else _Drafted(tokens, target.vocabulary_size, whole)
        # In tuples, so that they are neither trained nor registered twice.
        self._teacher = (features, head_of(target, None if whole else tokens), target.dtype)
        self._parts = (find_decoder(student), *_live_head(student))

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        features, teacher_head, dtype = self._teacher
        decoder, head, weights = self._parts
        wanted, labels = batch.learnt[:, 1:], batch.tokens[:, 1:]
        every = wanted.sum().clamp(min=1)
        if self._drafted is not None:
            wanted, labels = self._drafted.labels(wanted, labels)
        labels = labels[wanted]
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
        acceptance, agreement = sums / every
        figures: Figures = {"acceptance": acceptance, "agreement": agreement}
        if self._drafted is not None:
            figures["coverage"] = (labels != IGNORED).sum() / every
        return loss / every, figures

    def _sums(self, logits: Tensor, expected: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, and [acceptance, agreement], all summed over the positions."""
        log_q, log_p = (_log_probabilities(part) for part in (logits, expected))
        law, best = log_p, log_p.argmax(-1, keepdim=True)
        if self._drafted is not None:
            law, log_p, best = self._drafted.over(log_p, best)
        loss = divergence(law, log_q, self._loss)[labels != IGNORED].sum()
        if share := self._cross_entropy:
            loss = (1 - share) * loss + share * nn.functional.nll_loss(log_q, labels, reduction="sum")
        with torch.no_grad():
            acceptance = torch.minimum(log_p, log_q).exp().sum()
            # A second argmax would cost as much as a softmax on the CPU.
            same = log_q.gather(-1, best.clamp(min=0)) == log_q.amax(-1, keepdim=True)
            agreement = (same & (best >= 0)).sum()
        return loss, torch.stack([acceptance, agreement.to(acceptance.dtype)])


class _Drafted:
    """The draft vocabulary of a student, and what the target's distribution is over it.

    Args:
        tokens: [draft vocabulary] int64.
        vocabulary: number of the target's token ids.
        whole: whether the target's distributions that are asked about are over all tokens, not these alone.
    """

    def __init__(self, tokens: Tensor, vocabulary: int, whole: bool) -> None:
        self._tokens, self._whole = tokens, whole
        self._places = torch.full((vocabulary,), IGNORED, device=tokens.device)
        self._places[tokens] = torch.arange(len(tokens), device=tokens.device)

    def labels(self, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which positions are computed, and labels as ids of the draft vocabulary, `IGNORED` outside it."""
        labels = self._places[labels]
        return wanted if self._whole else wanted & (labels != IGNORED), labels

    def over(self, log_p: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities over the draft vocabulary, renormalised and as they are, and the best token's id.

        Args:
            log_p: [positions, vocabulary or draft vocabulary].
            best: [positions, 1], its argmax; comes back as an id of the draft vocabulary, `IGNORED` outside it.
        """
        if not self._whole:
            return log_p, log_p, best
        own = log_p[:, self._tokens]
        return own.log_softmax(-1), own, self._places[best]


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
    chunks = [slice(start, start + POSITIONS) for start in range(0, max(len(hidden), 1), POSITIONS)]
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
