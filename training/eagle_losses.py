"""What EAGLE's heads learn, and how well they have: the unrolled head, losses and measurements.

Column t of a head reads the target's feature of token t beside token t + 1 and guesses token t + 2. Unrolled, at step s
(from 0) it reads token t + 1 + s beside its own output of the step before and guesses token t + 2 + s, at the position
and with the attention that it has when it drafts s tokens behind its text. All that is unrolled follows the text that
is learnt: documents packed into a sequence see each other, in the head as in the target. The module knows neither
files nor where features come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from draftwood.core.drafter import FeatureName
from draftwood.drafters.eagle.network import EagleHead, Head, unroll_mask

from .data import Batch, Sequences
from .features import FeatureSource
from .loop import Figures, Objective
from .medusa_losses import RANKS, LMHead, best_tau
from .medusa_losses import _in_type_of as in_type_of

ROWS = 2048
"""Most rows of logits that are held at once."""


def feature_names(head: Head) -> tuple[FeatureName, ...]:
    """Returns the features that training a head takes: its own, and what the target's LM head reads."""
    return tuple(dict.fromkeys((*head.feature_names, "last")))


def unroll(head: Head, tokens: Tensor, features: Tensor, steps: int, *, recompute: bool = False) -> Tensor:
    """Runs an attached head over whole texts, step after step on its own outputs.

    One step is how EAGLE-1 is trained; several are HASS's harmonized context alignment (arXiv:2408.15766) and EAGLE-3's
    training-time test (arXiv:2503.01840).

    Args:
        head: the head.
        tokens: [batch, length] int64, length >= 3.
        features: [batch, length, joined width], the target's.
        steps: how many, at least one.
        recompute: keep no activations of a step for the backward pass, but run it again.

    Returns:
        [steps, batch, length - 2, width]. Column t of step s tells token t + 2 + s; those where the text has no such
        token hold nothing of meaning.
    """
    columns = tokens.shape[1] - 2
    ids = F.pad(tokens[:, 1:], (0, steps))
    positions = torch.arange(columns, device=tokens.device)[None].expand(len(tokens), -1)
    hidden, outputs = head.fuse(features[:, :columns]), []
    known: list[Tensor] = []
    for step in range(steps):
        mask = unroll_mask(columns, step, tokens.device) if step else None
        read: list[Any] = [ids[:, step : step + columns], hidden, positions + step, mask, *known]
        done = checkpoint(_step, head, *read, use_reentrant=False) if recompute else _step(head, *read)
        hidden, known = done[0], [*known, *done[1:]]
        outputs.append(hidden)
    return torch.stack(outputs)


def _step(
    head: Head, ids: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, *known: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One step; `known` are keys and values of the steps before in turn, and its own come back beside its output."""
    cache = _Columns(known)
    output = head(ids, hidden, positions, mask, cache)
    return output, *cache.own


class _Columns:
    """Keys and values of earlier steps, in transformers' interface; holds what it is given as it is."""

    own: tuple[Tensor, Tensor]

    def __init__(self, known: tuple[Tensor, ...]) -> None:
        self._known = known

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = keys, values
        return torch.cat([*self._known[::2], keys], 2), torch.cat([*self._known[1::2], values], 2)


class Weights(NamedTuple):
    """What counts how much in the loss.

    Attributes:
        decay: step s counts decay^s.
        feature: of the smooth L1 distance to the target's features, which EAGLE-3 does without.
        entropy: of the cross-entropy.
        noise: width of the uniform noise on the features of 512 tokens; of longer texts less, of shorter ones more.
    """

    decay: float
    feature: float
    entropy: float
    noise: float


class EagleObjective(Objective):
    """The losses of EAGLE-1 (arXiv:2401.15077, section 4.2) and EAGLE-3 (arXiv:2503.01840, section 3.2).

    The sum over the steps of decay^s times: the cross-entropy between the target's distribution, over the draft
    vocabulary, and the head's; and, for EAGLE-1, the smooth L1 distance between the head's output and the target's
    feature. Both are summed where the guessed token is learnt, and divided by the number of learnt tokens behind the
    first of each sequence; the cross-entropy leaves out where the target's most likely token is outside the draft
    vocabulary. The figures of step i (from 1) are means over its own guesses: `step i loss`, its cross-entropy, over
    those that are not left out, and `step i top-1`, how often the text's token was the most likely one.

    Args:
        head: what is trained, attached.
        features: give `feature_names(head)`.
        teacher: the target's LM head, of the whole vocabulary.
        steps: how often the head is unrolled.
        weights: of the parts.
        recompute: keep no activations of a step for the backward pass.
    """

    def __init__(
        self,
        head: Head,
        features: FeatureSource,
        teacher: LMHead,
        steps: int,
        weights: Weights,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.head = head
        self._parts = (features, teacher)
        self._steps, self._weights, self._recompute = steps, weights, recompute

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        features, teacher = self._parts
        captured, weights = features(batch), self._weights
        joined, truth = _joined(self.head, captured), captured["last"]
        if weights.noise:
            drawn = torch.rand(joined.shape, generator=generator).to(joined.device) - 0.5
            joined = joined + (drawn * (weights.noise * 512 / joined.shape[1])).to(joined.dtype)
        with in_type_of(truth):
            states = unroll(self.head, batch.tokens, joined, self._steps, recompute=self._recompute)
        places = _Places.of(batch, self._steps)

        def summed(start: int, stop: int) -> Tensor:
            part = places.part(start, stop)
            guess = _Guess(self.head, states, truth, batch.tokens, part, teacher)
            used = guess.known & part.valid  # [steps, places]
            entropy = (guess.entropy() * used).sum(1)
            distance = guess.distance(truth, part) if isinstance(self.head, EagleHead) else torch.zeros_like(entropy)
            hits = (guess.logits.detach().argmax(-1) == guess.labels) & part.valid
            return torch.stack([entropy, distance, used.sum(1), hits.sum(1), part.valid.sum(1)])

        sums = torch.zeros(5, self._steps, device=truth.device)
        bounds = list(places.chunks(self._steps))
        for bound in bounds:
            # Of one chunk all stays for the backward pass; of several, logits are computed again there.
            sums = sums + (checkpoint(summed, *bound, use_reentrant=False) if len(bounds) > 1 else summed(*bound))
        factors = weights.decay ** torch.arange(self._steps, device=sums.device)
        learnt = batch.learnt[:, 1:].sum().clamp(min=1)
        loss = (factors * (weights.entropy * sums[0] + weights.feature * sums[1])).sum() / learnt
        figures = Figures()
        for index, (loss_sum, _, used, hits, valid) in enumerate(sums.detach().T):
            figures[f"step {index + 1} loss"] = loss_sum / used.clamp(min=1)
            figures[f"step {index + 1} top-1"] = hits / valid.clamp(min=1)
        if isinstance(self.head, EagleHead):
            figures["distance"] = sums[1, 0].detach() / sums[4, 0].clamp(min=1).detach()
        return loss, figures


class Evaluation:
    """Measures a head on data that it does not learn from: an `evaluate` for `train`.

    Step i (from 1) reads true tokens beside its own outputs of the steps before, as it does when it drafts and all its
    guesses are right. Its figures are means over the learnt tokens that it guesses: `step i top-1` and `top-5`, how
    often the text's token was among the most likely ones; `step i acceptance`, the sum over the vocabulary of min(p, q)
    at temperature 1; `step i loss`, as of `EagleObjective`. `coverage` is the share of the tokens that are in the draft
    vocabulary; `expected tau` that of the best tree of so many nodes, and `chain tau` that of a chain as long as there
    are steps, the target's own token counted in both.

    Args:
        head: the one that is trained, attached.
        features: of the data, `feature_names(head)`.
        teacher: the target's LM head, of the whole vocabulary.
        data: all of it is read.
        batch_size: sequences in a forward.
        steps: how many are measured.
        nodes: size of the tree.

    Attributes:
        accuracies: accuracies[step][rank] of the latest call, how often the guess of that rank was right.
        figures: of the latest call.
    """

    def __init__(
        self,
        head: Head,
        features: FeatureSource,
        teacher: LMHead,
        data: Sequences,
        batch_size: int,
        steps: int,
        nodes: int,
    ) -> None:
        self.accuracies: list[list[float]] = []
        self.figures: dict[str, float] = {}
        self._head, self._features, self._teacher = head, features, teacher
        self._data, self._batch_size, self._steps, self._nodes = data, batch_size, steps, nodes

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        tokens = self._head.draft_tokens
        ranks = min(RANKS, self._head.config.vocab_size if tokens is None else len(tokens))
        # Rows: hits by rank, guesses, those in the draft vocabulary, acceptance, losses and their number; by step.
        sums = torch.zeros(ranks + 5, self._steps, dtype=torch.float64, device=self._head.device)
        for start in range(0, len(self._data), self._batch_size):
            index = torch.arange(start, min(start + self._batch_size, len(self._data)))
            for part in self._measured(self._data.at(index).to(self._head.device), ranks):
                sums += part
        *hits, every, inside, accepted, losses, used = sums.tolist()
        self.accuracies, self.figures = [], {}
        for step in range(self._steps):
            count = max(every[step], 1)
            rates = [row[step] / count for row in hits]
            self.accuracies.append(rates)
            self.figures[f"step {step + 1} loss"] = losses[step] / max(used[step], 1)
            self.figures[f"step {step + 1} top-1"] = rates[0]
            self.figures[f"step {step + 1} top-5"] = sum(rates[:5])
            self.figures[f"step {step + 1} acceptance"] = accepted[step] / count
        self.figures["coverage"] = inside[0] / max(every[0], 1)
        self.figures["expected tau"] = best_tau(self.accuracies, self._nodes)
        self.figures["chain tau"] = best_tau([rates[:1] for rates in self.accuracies], self._steps)
        return self.figures

    def _measured(self, batch: Batch, ranks: int) -> Iterator[Tensor]:
        """Yields sums over the guesses of a batch, [ranks + 5, steps], a chunk at a time."""
        captured = self._features(batch)
        truth = captured["last"]
        with in_type_of(truth):
            states = unroll(self._head, batch.tokens, _joined(self._head, captured), self._steps)
        places = _Places.of(batch, self._steps)
        for bound in places.chunks(self._steps):
            part = places.part(*bound)
            guess = _Guess(self._head, states, truth, batch.tokens, part, self._teacher)
            best = guess.logits.topk(ranks).indices == guess.labels[:, None]
            used = guess.known & part.valid
            rows = [
                *(best & part.valid[..., None]).sum(1).T,
                part.valid.sum(1),
                (part.valid & (guess.labels >= 0)).sum(1),
                (guess.acceptance() * part.valid).sum(1),
                (guess.entropy() * used).sum(1),
                used.sum(1),
            ]
            yield torch.stack([row.double() for row in rows])


class _Places(NamedTuple):
    """The learnt tokens that are guessed.

    Attributes:
        rows: [places] int64, of the batch.
        at: [places] int64, where in its sequence the token is; at least 2.
        valid: [steps, places] bool, whether a step has a column that guesses it.
    """

    rows: Tensor
    at: Tensor
    valid: Tensor

    @classmethod
    def of(cls, batch: Batch, steps: int) -> _Places:
        rows, at = batch.learnt[:, 2:].nonzero().unbind(1)
        first = torch.arange(steps, device=at.device)[:, None] + 2
        return cls(rows, at + 2, at + 2 >= first)

    def part(self, start: int, stop: int) -> _Places:
        return _Places(self.rows[start:stop], self.at[start:stop], self.valid[:, start:stop])

    def chunks(self, steps: int) -> Iterator[tuple[int, int]]:
        size = max(ROWS // steps, 1)
        for start in range(0, len(self.rows), size):
            yield start, min(start + size, len(self.rows))

    def gather(self, states: Tensor) -> Tensor:
        """Returns of [steps, batch, columns, width] what each step says of each place, [steps, places, width]."""
        steps = torch.arange(len(states), device=states.device)[:, None]
        return states[steps, self.rows, (self.at - 2 - steps).clamp(min=0)]


class _Guess:
    """What head and target say of some tokens.

    Attributes:
        states: [steps, places, width], the head's outputs.
        logits: [steps, places, draft vocabulary], the head's, float32 or float64.
        law: [places, draft vocabulary], the target's distribution over the draft vocabulary.
        share: [places], what the draft vocabulary has of the target's distribution.
        known: [places] bool, whether the target's most likely token is in the draft vocabulary.
        labels: [places] int64, the text's token as an id of the draft vocabulary, or -1.
    """

    def __init__(
        self, head: Head, states: Tensor, truth: Tensor, tokens: Tensor, places: _Places, teacher: LMHead
    ) -> None:
        self.states = places.gather(states)
        with in_type_of(truth):
            logits = head.logits(self.states)
        self.logits = _exact(logits)
        with torch.no_grad(), torch.autocast(truth.device.type, enabled=False):
            # Token l is what the target's feature of token l - 1 leads to.
            full = _exact(teacher(truth[places.rows, places.at - 1][None])[0])
            best, labels = full.argmax(-1), tokens[places.rows, places.at]
            self.law, self.share, self.known = full.softmax(-1), torch.ones_like(full[:, 0]), best >= 0
            if head.draft_tokens is not None:
                ids = head.draft_tokens.to(full.device)
                places_of = torch.full((full.shape[1],), -1, device=full.device).index_copy_(
                    0, ids, torch.arange(len(ids), device=full.device)
                )
                self.share = self.law[:, ids].sum(-1)
                self.law = full[:, ids].softmax(-1)
                self.known, labels = places_of[best] >= 0, places_of[labels]
            self.labels = labels

    def entropy(self) -> Tensor:
        """Cross-entropy of the head's distribution against the target's, [steps, places]."""
        with torch.autocast(self.logits.device.type, enabled=False):
            return self.logits.logsumexp(-1) - torch.einsum("spv,pv->sp", self.logits, self.law)

    def acceptance(self) -> Tensor:
        """Sum of min(p, q) over the vocabulary, [steps, places]."""
        p = self.law * self.share[:, None]
        return torch.minimum(p, self.logits.softmax(-1)).sum(-1)

    def distance(self, truth: Tensor, places: _Places) -> Tensor:
        """Smooth L1 distance of the outputs to the target's features, meant over the width, summed by step."""
        goal = truth[places.rows, places.at - 1].to(self.states.dtype).expand_as(self.states)
        each = F.smooth_l1_loss(self.states, goal, reduction="none").mean(-1)
        return (each * places.valid).sum(1)


def _joined(head: Head, captured: dict[FeatureName, Tensor]) -> Tensor:
    return torch.cat([captured[name] for name in head.feature_names], -1)


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
