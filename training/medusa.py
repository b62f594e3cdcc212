"""Training Medusa's heads on a target that stays as it is: Medusa-1 (Cai et al., arXiv:2401.10774, section 2.2.1).

Head k (from 0) reads the target's last hidden state at position t and learns token t + 2 + k, where that token is to
be learnt and in the draft vocabulary. While heads train their weights are float32, whatever the target's type; they
are saved in the target's. The module knows neither where features come from nor how a tree is drafted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.drafters.medusa.formats import Layout, load_heads, save_heads
from draftwood.drafters.medusa.network import IGNORED, MedusaHeads
from draftwood.drafters.medusa.trees import expected_tau, greedy_tree

from .checkpoint import fingerprint
from .data import Batch, Sequences, split
from .features import CachedFeatures, FeatureSource, OnlineFeatures
from .loop import Figures, Objective, Schedule, train
from .output import new_output, publish

RANKS = 10
"""How many guesses of a head are measured; the published trees use no more."""

LMHead = Callable[[Tensor], Tensor]


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
    cache: str | Path | None = None,
    layout: Layout = "medusa-1",
    base_model: str = "",
    tensorboard: bool = False,
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
        cache: directory for the target's features, computed there once; without it they are computed as needed.
        layout: of the saved heads.
        base_model: name of the target, for the config.
        tensorboard: also write the log for tensorboard.
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
    _check_data(data, target)
    learnt, held = split(data, recipe.held_out, schedule.seed)
    heads = make_heads(target, learnt, recipe, init)
    for part, name in ((learnt, "training"), (held, "held-out")):
        _check_labels(part, heads, name)
    # A launcher's processes share the work on the features too.
    accelerator = Accelerator() if "LOCAL_RANK" in os.environ else None
    sources: list[FeatureSource] = [OnlineFeatures(target, ["last"])] * 2
    if cache is not None:
        build = partial(CachedFeatures.build, target, ["last"], dtype=target.dtype, on_progress=on_features)
        parts = (learnt, Path(cache) / "training"), (held, Path(cache) / "held-out")
        sources = [build(part, place, accelerator=accelerator) for part, place in parts]
    lm_head = head_of(target, heads.draft_tokens)
    setup = {
        "recipe": asdict(recipe) | asdict(heads.config) | {"draft_vocabulary": heads.draft_vocabulary},
        "model": fingerprint(target.model),
        "init": None if init is None else fingerprint(heads),
    }
    objective = MedusaObjective(heads, sources[0], lm_head, recipe)
    evaluation = Evaluation(heads, sources[1], lm_head, held, schedule.batch_size, recipe.nodes)
    train(
        objective,
        learnt,
        schedule,
        directory=working,
        about=setup,
        evaluate=evaluation,
        on_step=on_step,
        accelerator=accelerator,
        tensorboard=tensorboard,
    )
    measured = evaluation.figures or evaluation()  # a run that was stopped after its last step has not measured
    heads.requires_grad_(False).eval().to(target.dtype)
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
        recipe: for `decay` and `distil`.
    """

    def __init__(self, heads: MedusaHeads, features: FeatureSource, lm_head: LMHead, recipe: MedusaRecipe) -> None:
        super().__init__()
        self.heads = heads
        self._parts = (features, lm_head)
        self._recipe = recipe

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        features, lm_head = self._parts
        hidden = features(batch)["last"]
        return head_losses(self.heads, hidden, batch, lm_head, self._recipe)


def head_losses(
    heads: MedusaHeads, hidden: Tensor, batch: Batch, lm_head: LMHead, recipe: MedusaRecipe
) -> tuple[Tensor, Figures]:
    """Returns the loss of `MedusaObjective`, and its figures.

    Args:
        heads: what is trained.
        hidden: [batch, length, width], what the heads read.
        batch: the tokens that it belongs to.
        lm_head: the target's, of the draft vocabulary.
        recipe: for `decay` and `distil`.
    """
    learnt = batch.learnt[:, 1:].sum().clamp(min=1)
    teacher = _Teacher(heads, hidden, batch, lm_head) if recipe.distil else None
    total, figures = torch.zeros((), device=hidden.device), Figures()
    for k, guess in enumerate(_guesses(heads, hidden, batch, lm_head)):
        goal = guess.labels if teacher is None else teacher.law(guess.places)
        entropy = nn.functional.cross_entropy(guess.logits.float(), goal, reduction="sum")
        total = total + recipe.decay**k * entropy / learnt
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
        lm_head: LMHead,
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
        device = _device(self._heads)
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


def frequent_tokens(data: Sequences, count: int, vocabulary: int) -> Tensor:
    """Returns the tokens that are learnt most often, of equally frequent ones the lower ids.

    Args:
        data: where they are counted.
        count: how many.
        vocabulary: number of token ids.

    Returns:
        [count] int64, in the order of their ids.

    Raises:
        InvalidRequest: more tokens than there are.
    """
    if count > vocabulary:
        raise InvalidRequest(f"draft_vocabulary must be <= {vocabulary}, the size of the vocabulary, got {count}")
    occurrences = torch.bincount(data.tokens[data.learnt], minlength=vocabulary)
    return occurrences.argsort(descending=True, stable=True)[:count].sort().values


def coverage(heads: MedusaHeads, data: Sequences) -> float:
    """Returns what share of the learnt tokens of `data` the heads can guess."""
    known = heads.labels(data.tokens[data.learnt].to(_device(heads))) != IGNORED
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


def _guesses(heads: MedusaHeads, hidden: Tensor, batch: Batch, lm_head: LMHead) -> Iterator[_Guess]:
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
            if heads.lm_heads is None:
                logits = lm_head(picked.to(hidden.dtype)[None])[0]
            else:
                logits = picked.to(heads.lm_heads.dtype) @ heads.lm_heads[k].T
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


def _device(heads: MedusaHeads) -> torch.device:
    return next(heads.parameters()).device


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


def _check_data(data: Sequences, target: Target) -> None:
    if target.dtype == torch.float16:
        raise InvalidRequest("float16 gradients underflow; load the target as bfloat16 or float32")
    largest, known = int(data.tokens.max()), target.vocabulary_size
    if largest >= known:
        raise InvalidRequest(f"the data holds token {largest}, outside the target's vocabulary of {known}")


def _check_labels(data: Sequences, heads: MedusaHeads, name: str) -> None:
    """Every head must have something to learn, and to be measured on."""
    known = data.learnt & (heads.labels(data.tokens.to(_device(heads))).cpu() != IGNORED)
    for k in range(heads.config.heads):
        if not known[:, 2 + k :].any():
            raise InvalidRequest(
                f"no token of the {name} data is to be learnt by head {k}, {2 + k} tokens or more into its sequence "
                "and in the draft vocabulary; give more or longer texts, or fewer heads"
            )
