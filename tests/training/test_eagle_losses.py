"""What EAGLE's heads learn is what they meet when they draft; losses and measurements, position by position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from draftwood.core.state import DecodeState
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.decoder import Decoder
from draftwood.drafters.eagle.network import EagleHead, Head
from draftwood.drafters.medusa.trees import expected_tau, greedy_tree
from draftwood.training import eagle_losses
from draftwood.training.data import Batch, Sequences
from draftwood.training.eagle_losses import EagleObjective, Evaluation, Weights, feature_names, unroll
from draftwood.training.features import OnlineFeatures
from tests.conftest import VOCABULARY
from tests.drafters.eagle import heads
from tests.drafters.eagle.heads import KINDS, PROMPTS, finite_close, sure_target, true_features
from tests.drafters.eagle.test_drafter import Spy


@pytest.fixture(scope="module")
def sure() -> Target:
    return sure_target()


def network(kind: str, target: Target) -> Head:
    return heads.make_head(kind, target).attach(target)


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_steps_are_what_the_drafter_computes(sure: Target, kind: str):
    """In every round of a real call: the logits that the session drafts from are those that training would see."""
    head, compared = network(kind, sure), []

    def check(state: DecodeState, _reader: Any, root: Tensor, reads: list[Any], _proposal: Any) -> None:
        for index, row in enumerate(state.rows):
            # The last token that a row has room for is drafted, but not read.
            read_by_row = min(4, state.room(index)) - 1
            own = [(tree.tokens[index, opened], read) for tree, opened, read in reads[:read_by_row]]
            drafted = [int(token) for token, _ in own]
            texts = torch.tensor([[*row.tokens, *drafted, 0]])
            batch = Batch(texts, torch.ones_like(texts) > 0, torch.zeros(1, dtype=torch.int64))
            captured = OnlineFeatures(sure, feature_names(head))(batch)
            joined = torch.cat([captured[name] for name in head.feature_names], -1)
            column = len(row.tokens) - 2
            joined[:, column + 1 :] = 1e3  # which nobody knows while drafting
            states = unroll(head, texts, joined, 1 + len(own))
            logits = head.to_target(head.logits(states[:, :, column]))[:, 0]
            finite_close(root[index], logits[0].double())
            for (_, read), expected in zip(own, logits[1:], strict=True):
                finite_close(read[index, 0], expected.double())
            compared.append(len(own))

    with torch.no_grad():
        spy = Spy(check, checkpoint=head, tree="chain", depth=4)
        spy.copy = lambda: spy  # type: ignore[method-assign]
        prompts = [prompt for prompt in PROMPTS if len(prompt) > 1]
        Decoder(sure, spy).generate(prompts, max_new_tokens=8, eos_token_id=[], batch_size=3)
    assert len(compared) > 6 and max(compared) == 3  # the first of four tokens is the root's


def marked() -> Sequences:
    """Sequences of random tokens, of which some are learnt."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (3, 9), generator=generator)
    return Sequences(tokens, torch.rand(3, 9, generator=generator) < 0.6)


WEIGHTS = Weights(decay=0.5, feature=0.7, entropy=0.3, noise=0.0)


@pytest.mark.parametrize("kind", ["eagle", "eagle, no bias, reduced", "eagle3", "eagle3, reduced", "eagle3.1"])
def test_losses_and_measurements_are_those_of_one_position_after_another(sure: Target, kind: str):
    head, data = network(kind, sure), marked()
    steps, every = 3, int(data.learnt[:, 1:].sum())
    features, target_logits = true_features(head, sure, data.tokens)
    truth = sure.model(data.tokens, output_hidden_states=True).hidden_states[-1].detach()
    ids = list(range(VOCABULARY)) if head.draft_tokens is None else head.draft_tokens.tolist()
    with torch.no_grad():
        drafted = heads.unrolled(head, data.tokens, features, steps)
        outputs = unroll(head, data.tokens, features, steps)
    total, labels, inside = 0.0, [0] * steps, [0] * steps
    entropies: list[list[float]] = [[] for _ in range(steps)]
    ranks, accepted = torch.zeros(steps, 10), [0.0] * steps
    for row in range(3):
        for column in range(7):
            for step in range(steps):
                place = column + 2 + step
                if place >= 9 or not data.learnt[row, place]:
                    continue
                labels[step] += 1
                full, guess = target_logits[row, place - 1].detach(), drafted[step][row, column]
                law = full[ids].softmax(-1)
                p = full.softmax(-1)
                accepted[step] += float(torch.minimum(p[ids], guess.softmax(-1)).sum())
                if isinstance(head, EagleHead):
                    distance = F.smooth_l1_loss(outputs[step, row, column], truth[row, place - 1])
                    total += 0.5**step * 0.7 * float(distance) / every
                if int(full.argmax()) in ids:
                    entropies[step].append(-float((law * guess.log_softmax(-1)).sum()))
                    total += 0.5**step * 0.3 * entropies[step][-1] / every
                token = int(data.tokens[row, place])
                if token in ids:
                    inside[step] += 1
                    rank = int((guess > guess[ids.index(token)]).sum())
                    if rank < 10:
                        ranks[step, rank] += 1
    source, teacher = OnlineFeatures(sure, feature_names(head)), head_of(sure)
    objective = EagleObjective(head, source, teacher, steps, WEIGHTS)
    loss, figures = objective(data.at(torch.arange(3)), 0, torch.Generator())
    assert not any(figure.requires_grad for figure in figures.values() if isinstance(figure, Tensor))
    assert loss.item() == pytest.approx(total, rel=1e-4)
    evaluation = Evaluation(head, source, teacher, data, 2, steps, 4)
    measured = evaluation()
    for step in range(steps):
        name = f"step {step + 1}"
        for told in (figures, measured):
            assert float(told[f"{name} loss"]) == pytest.approx(sum(entropies[step]) / len(entropies[step]), rel=1e-4)
            assert float(told[f"{name} top-1"]) == pytest.approx(float(ranks[step, 0]) / labels[step])
        assert evaluation.accuracies[step] == pytest.approx([hit / labels[step] for hit in ranks[step].tolist()])
        assert measured[f"{name} acceptance"] == pytest.approx(accepted[step] / labels[step], rel=1e-4)
    assert measured["coverage"] == pytest.approx(inside[0] / labels[0])
    if evaluation.accuracies[0][0]:
        tree = greedy_tree(evaluation.accuracies, 4)
        assert measured["expected tau"] == pytest.approx(expected_tau(tree, evaluation.accuracies))


def gradients(objective: EagleObjective, data: Sequences) -> list[Tensor]:
    objective.zero_grad()
    loss, _ = objective(data.at(torch.arange(len(data))), 0, torch.Generator().manual_seed(1))
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in objective.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("kind", ["eagle, no bias, reduced", "eagle3, reduced"])
def test_saving_memory_changes_no_gradient(sure: Target, kind: str, monkeypatch: pytest.MonkeyPatch):
    head, seen = network(kind, sure), []
    lm_head = head_of(sure)

    def teacher(hidden: Tensor) -> Tensor:
        seen.append(hidden.shape[1])
        return lm_head(hidden)

    source = OnlineFeatures(sure, feature_names(head))
    plain = gradients(EagleObjective(head, source, teacher, 3, WEIGHTS), marked())
    learnt = int(marked().learnt[:, 2:].sum())
    assert seen == [learnt]  # and no other position
    monkeypatch.setattr(eagle_losses, "ROWS", 12)
    thrifty = gradients(EagleObjective(head, source, teacher, 3, WEIGHTS, recompute=True), marked())
    assert max(seen[1:]) == 4 and sum(seen[1:]) == 2 * learnt
    assert len(plain) == len(list(head.parameters())) + 1
    torch.testing.assert_close(thrifty, plain, rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_all_steps(sure: Target):
    """The last step alone teaches the fusion of true features, through keys and outputs of all steps before."""
    head, data = network("eagle3", sure), marked()
    features = true_features(head, sure, data.tokens)[0].requires_grad_()
    unroll(head, data.tokens, features, 3)[2, :, 4].sum().backward()
    assert features.grad is not None
    assert (features.grad[:, :5].abs().sum(-1) > 0).all() and not features.grad[:, 5:].any()


def test_noise_is_on_what_is_read_and_not_on_what_is_learnt(sure: Target):
    head, data = network("eagle3", sure), marked()
    source, teacher = OnlineFeatures(sure, feature_names(head)), head_of(sure)
    batch = data.at(torch.arange(3))
    drawn = torch.rand(3, 9, 96, generator=torch.Generator().manual_seed(7)) - 0.5
    noises = (drawn * 0.2 * 512 / 9).split(32, -1)

    def noisy(batch: Batch) -> Any:
        captured = source(batch)
        for name, noise in zip(head.feature_names, noises, strict=True):
            captured[name] = captured[name] + noise
        return captured

    expected, _ = EagleObjective(head, noisy, teacher, 2, WEIGHTS)(batch, 0, torch.Generator())
    weights, generator = WEIGHTS._replace(noise=0.2), torch.Generator().manual_seed(7)
    loss, _ = EagleObjective(head, source, teacher, 2, weights)(batch, 0, generator)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.item() != pytest.approx(
        EagleObjective(head, source, teacher, 2, WEIGHTS)(batch, 0, generator)[0].item(), rel=1e-4
    )
