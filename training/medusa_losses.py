"""What Medusa's heads learn (Cai et al., arXiv:2401.10774), and how well they have: losses and measurements.

Head k (from 0) reads the target's last hidden state at position t and learns token t + 2 + k, where that token is to
be learnt and in the draft vocabulary. The module knows neither files nor where features come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from draftwood.core.errors import InvalidRequest
from draftwood.drafters.medusa.network import IGNORED, MedusaHeads
from draftwood.drafters.medusa.trees import expected_tau, greedy_tree

from .data import Batch, Sequences
from .features import FeatureSource
from .loop import Figures, Objective

RANKS = 10
"""How many guesses of a head are measured; the published trees use no more."""

LMHead = Callable[[Tensor], Tensor]


class MedusaObjective(Objective):
    """The sum over the heads of decay^k times the cross-entropy of head k (arXiv:2401.10774, equation 1).

    Each cross-entropy is summed over the labels of its head and divided by the number of learnt tokens behind the
    first of each sequence, so that accumulated forwards weigh as one large one. The figures `head k loss`, `top-1` and
    `top-5` are means over head k's own labels, the loss over those in the draft vocabulary; for the accuracies a label
    outside it counts as missed.

    Args:
        heads: what is trained.
        features: give the feature `"last"`.
        lm_head: the target's, of the draft vocabulary: of shared heads, and the teacher of distilled ones.
        decay: what a head counts of what the one before does.
        distil: learn the target's distribution instead of the text.
    """

    def __init__(
        self, heads: MedusaHeads, features: FeatureSource, lm_head: LMHead, *, decay: float = 0.8, distil: bool = False
    ) -> None:
        super().__init__()
        self.heads = heads
        self._parts = (features, lm_head)
        self._decay, self._distil = decay, distil

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        features, lm_head = self._parts
        hidden = features(batch)["last"]
        return head_losses(self.heads, hidden, batch, lm_head, decay=self._decay, distil=self._distil)


def head_losses(
    heads: MedusaHeads,
    hidden: Tensor,
    batch: Batch,
    lm_head: LMHead | None,
    *,
    decay: float = 0.8,
    distil: bool = False,
) -> tuple[Tensor, Figures]:
    """Returns the loss of `MedusaObjective`, and its figures.

    Args:
        heads: what is trained.
        hidden: [batch, length, width], what the heads read.
        batch: the tokens that it belongs to.
        lm_head: the target's, of the draft vocabulary; neither own heads nor undistilled ones need it.
        decay: what a head counts of what the one before does.
        distil: learn the target's distribution instead of the text.
    """
    learnt = batch.learnt[:, 1:].sum().clamp(min=1)
    teacher = _Teacher(heads, hidden, batch, lm_head) if lm_head is not None and distil else None
    total, figures = torch.zeros((), device=hidden.device), Figures()
    for k, guess in enumerate(_guesses(heads, hidden, batch, lm_head)):
        goal = guess.labels if teacher is None else teacher.law(guess.places)
        entropy = nn.functional.cross_entropy(guess.logits.float(), goal, reduction="sum")
        total = total + decay**k * entropy / learnt
        hits, every = _hits(guess, 5), guess.every.clamp(min=1)
        figures[f"head {k} loss"] = entropy.detach() / max(len(guess.labels), 1)
        figures[f"head {k} top-1"] = hits[0] / every
        figures[f"head {k} top-5"] = hits.sum() / every
    return total, figures


class Evaluation:
    """Measures heads on data that they do not learn from: an `evaluate` for `train`.

    Its figures are those of `MedusaObjective`, over all of the data, and what share of the labels is in the draft
    vocabulary, and the expected tau of the best tree.

    Args:
        heads: those that are trained.
        features: of the data.
        lm_head: the target's, of the draft vocabulary.
        data: all of it is read.
        batch_size: sequences in a forward.
        nodes: size of the tree.

    Attributes:
        accuracies: accuracies[head][rank] of the latest call, how often the head's guess of that rank was right.
        figures: of the latest call.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        features: FeatureSource,
        lm_head: LMHead | None,
        data: Sequences,
        batch_size: int,
        nodes: int,
    ) -> None:
        self.accuracies: list[list[float]] = []
        self.figures: dict[str, float] = {}
        self._heads, self._features, self._lm_head = heads, features, lm_head
        self._data, self._batch_size, self._nodes = data, batch_size, nodes

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        device = next(self._heads.parameters()).device
        count, ranks = self._heads.config.heads, min(RANKS, self._heads.draft_vocabulary)
        # A column each for the hits by rank, all labels, those in the draft vocabulary, and their losses.
        sums = torch.zeros(count, ranks + 3, dtype=torch.float64, device=device)
        for start in range(0, len(self._data), self._batch_size):
            index = torch.arange(start, min(start + self._batch_size, len(self._data)))
            batch = self._data.at(index).to(device)
            hidden = self._features(batch)["last"]
            for k, guess in enumerate(_guesses(self._heads, hidden, batch, self._lm_head)):
                sums[k, :ranks] += _hits(guess, ranks)
                sums[k, ranks] += guess.every
                sums[k, ranks + 1] += len(guess.labels)
                sums[k, ranks + 2] += nn.functional.cross_entropy(guess.logits.float(), guess.labels, reduction="sum")
        self.accuracies, self.figures = [], {}
        for k, (*hits, every, known, loss) in enumerate(sums.tolist()):
            rates = [hit / max(every, 1) for hit in hits]
            self.accuracies.append(rates)
            self.figures[f"head {k} loss"] = loss / max(known, 1)
            self.figures[f"head {k} top-1"] = rates[0]
            self.figures[f"head {k} top-5"] = sum(rates[:5])
        self.figures["coverage"] = float(sums[0, ranks + 1] / sums[0, ranks])
        self.figures["expected tau"] = best_tau(self.accuracies, self._nodes)
        return self.figures


def best_tau(accuracies: list[list[float]], nodes: int) -> float:
    """Returns the expected tau, the target's own token counted, of the best tree of so many nodes."""
    if not any(accuracies[0]):
        return 1.0
    return expected_tau(greedy_tree(accuracies, nodes), accuracies)


@dataclass(frozen=True, eq=False)
class _Guess:
    """What one head says where it has a label.

    Attributes:
        logits: [labels, draft vocabulary], of the labels in the draft vocabulary alone.
        labels: [labels] int64, ids of the draft vocabulary.
        places: [labels] int64, where these are in the flattened batch.
        every: [] int64, number of labels, those outside the draft vocabulary too.
    """

    logits: Tensor
    labels: Tensor
    places: Tensor
    every: Tensor


def _guesses(heads: MedusaHeads, hidden: Tensor, batch: Batch, lm_head: LMHead | None) -> Iterator[_Guess]:
    """Yields what each head says; nothing is computed at positions without a label."""
    labels = heads.labels(batch.tokens)
    known = batch.learnt & (labels != IGNORED)
    numbers = torch.arange(labels.numel(), device=labels.device).view_as(labels)
    used = torch.zeros_like(known)
    for k in range(heads.config.heads):
        used |= _ahead(known, 2 + k)
    with _in_type_of(hidden):
        states = heads.states(hidden[used])  # [heads, used, width]
    for k in range(heads.config.heads):
        chosen = _ahead(known, 2 + k)[used]
        with _in_type_of(hidden):
            picked = states[k, chosen]
            if heads.lm_heads is not None:
                logits = picked.to(heads.lm_heads.dtype) @ heads.lm_heads[k].T
            elif lm_head is not None:
                logits = lm_head(picked.to(hidden.dtype)[None])[0]
            else:
                raise InvalidRequest(
                    "these heads share the target's LM head; pass lm_head=head_of(target, draft_tokens)"
                )
        own = [_ahead(part, 2 + k)[used][chosen] for part in (labels, numbers)]
        yield _Guess(logits, own[0], own[1], _ahead(batch.learnt, 2 + k).sum())


class _Teacher:
    """What the target makes of each token that is to be guessed, over the draft vocabulary."""

    @torch.no_grad()
    def __init__(self, heads: MedusaHeads, hidden: Tensor, batch: Batch, lm_head: LMHead) -> None:
        known = (batch.learnt & (heads.labels(batch.tokens) != IGNORED)).flatten()
        self._rows = known.cumsum(0) - 1
        # Token l is guessed from position l - 1; of the first token of a sequence, which no head learns, that is wrong.
        before = hidden.flatten(0, 1)[known.nonzero()[:, 0] - 1]
        self._laws = lm_head(before[None])[0].float().softmax(-1)

    def law(self, places: Tensor) -> Tensor:
        """Returns [places, draft vocabulary] probabilities of the tokens at places of the flattened batch."""
        return self._laws[self._rows[places]]


def _hits(guess: _Guess, ranks: int) -> Tensor:
    """Counts how often the guess of each rank is the label, [ranks, or the draft vocabulary if it is smaller]."""
    best = guess.logits.detach().topk(min(ranks, guess.logits.shape[-1])).indices
    return (best == guess.labels[:, None]).sum(0)


def _ahead(values: Tensor, offset: int) -> Tensor:
    """Returns `values` [batch, length] of `offset` positions further on, zero where the sequence has ended."""
    return nn.functional.pad(values[:, offset:], (0, min(offset, values.shape[1])))


def _in_type_of(hidden: Tensor) -> AbstractContextManager[object]:
    """Runs matrix products in the features' type; the weights are float32 so that no small update is lost."""
    if hidden.dtype == torch.bfloat16:
        return torch.autocast(hidden.device.type, dtype=torch.bfloat16)
    return nullcontext()
