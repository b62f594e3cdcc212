"""Students that use the target's embedding and LM head: what they learn, what is saved, and going on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest
from draftwood.core.target import Target
from draftwood.drafters.shared_model import draft_tokens, share_with_target
from draftwood.training import draft_model_losses
from draftwood.training.data import Sequences, frequent_tokens
from draftwood.training.draft_model import DraftModelRecipe, train_draft_model
from draftwood.training.draft_model_losses import Distillation, divergence
from draftwood.training.features import OnlineFeatures
from draftwood.training.loop import Schedule
from draftwood.training.student import make_student
from tests.conftest import VOCABULARY
from tests.training.test_draft_model import FAST, Stop, committed, llama, own_text, sharp

SHARED = DraftModelRecipe(keep_layers=(0, 3), held_out=3, shared=True, draft_vocabulary=60)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("loss", ["forward", "reverse", "tv"])
def test_loss_and_figures_over_a_draft_vocabulary_are_those_of_plain_code(
    loss: Any, whole: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(draft_model_losses, "POSITIONS", 7)
    target, kept = Target(llama(tied=True)), torch.tensor([50, 3, 80, 7, 20, 21, 22, 23])
    tokens = torch.randint(3, 24, (3, 12), generator=torch.Generator().manual_seed(2))
    learnt = torch.rand(3, 12, generator=torch.Generator().manual_seed(3)) < 0.6
    student = make_student(target, [0, 2])
    share_with_target(student, target, kept)
    own = Distillation(student, OnlineFeatures(target, ["last"]), target, loss, 0.25, whole=whole)
    value, figures = own(Sequences(tokens, learnt).at(torch.arange(3)), 0, torch.Generator())
    value.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in own.named_parameters()}
    assert all(parameter.grad is None for parameter in target.model.parameters())

    own.zero_grad()
    labels = tokens[:, 1:][learnt[:, 1:]]
    with torch.no_grad():
        full = target.model(input_ids=tokens).logits[:, :-1][learnt[:, 1:]]
    log_q = student(input_ids=tokens).logits[:, :-1][learnt[:, 1:]].log_softmax(-1)
    assert log_q.shape[1] == len(kept)
    known = torch.isin(labels, kept)
    assert 0 < known.sum() < len(known)
    places = torch.full((VOCABULARY,), -1).index_copy_(0, kept, torch.arange(len(kept)))
    log_p = full[:, kept].log_softmax(-1)
    entropy = -log_q[known].gather(1, places[labels[known]][:, None]).sum()
    expected = (0.75 * divergence(log_p, log_q, loss)[known].sum() + 0.25 * entropy) / len(labels)
    assert value.item() == pytest.approx(expected.item())
    p = full.softmax(-1)[:, kept] if whole else log_p.exp() * known[:, None]
    accepted = torch.minimum(p, log_q.exp()).sum() / len(labels)
    assert float(figures["acceptance"]) == pytest.approx(accepted.item())
    best = full.argmax(-1) if whole else torch.where(known, kept[log_p.argmax(-1)], -1)
    assert float(figures["agreement"]) == pytest.approx(float((best == kept[log_q.argmax(-1)]).double().mean()))
    assert float(figures["coverage"]) == pytest.approx(float(known.double().mean()))
    expected.backward()
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-12)


def test_a_batch_without_a_token_of_the_draft_vocabulary_teaches_nothing():
    target = Target(llama(tied=True))
    student = make_student(target, [0])
    share_with_target(student, target, torch.tensor([90, 91]))
    own = Distillation(student, OnlineFeatures(target, ["last"]), target)
    tokens = torch.randint(3, 24, (2, 8))
    value, figures = own(Sequences(tokens, tokens > 0).at(torch.arange(2)), 0, torch.Generator())
    value.backward()
    assert value.item() == 0 and not any(float(figure) for figure in figures.values())
    assert not any(parameter.grad.any() for parameter in own.parameters() if parameter.grad is not None)


def test_training_makes_a_student_of_a_target_in_bfloat16_draft_well(tmp_path: Path):
    exact = sharp()
    target = Target(exact.model.to(torch.bfloat16), exact.tokenizer)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    data = own_text(target, 60)
    lines: list[dict[str, Any]] = []
    schedule = Schedule(steps=40, batch_size=8, learning_rate=1e-2, warmup=3, eval_every=40)
    recipe = replace(SHARED, keep_layers=None, layers=1, held_out=0.2)
    trained = train_draft_model(target, data, tmp_path / "out", schedule, recipe, on_step=lines.append)
    first, last = lines[0]["evaluation"], lines[-1]["evaluation"]
    assert last["acceptance"] > first["acceptance"] + 0.1 and last["agreement"] > first["agreement"] + 0.1
    assert last["agreement"] <= last["coverage"] <= 1 and last["loss"] < first["loss"]
    assert trained.dtype == torch.bfloat16 and not any(parameter.requires_grad for parameter in trained.parameters())
    assert committed(target, tmp_path / "out") == committed(target, trained) > 1.2
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in target.model.parameters())


def test_a_stopped_run_goes_on_bit_for_bit_and_so_does_one_that_is_trained_further(tmp_path: Path):
    target = sharp(tied=True)
    data = own_text(target, 20)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 5:
            raise Stop

    def trained(name: str, recipe: DraftModelRecipe = SHARED, **options: Any) -> dict[str, torch.Tensor]:
        return train_draft_model(target, data, tmp_path / name, FAST, recipe, **options).state_dict()

    whole = trained("whole", save_dtype=torch.bfloat16)
    with pytest.raises(Stop):
        trained("out", on_step=stop)
    with pytest.raises(InvalidRequest, match="begun with other loss"):
        trained("out", replace(SHARED, draft_vocabulary=50))
    done = trained("out", save_dtype=torch.bfloat16, cache=tmp_path / "cache")
    assert whole.keys() == done.keys() and all(torch.equal(tensor, done[name]) for name, tensor in whole.items())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    kept = stored.pop("draft_tokens")
    assert kept.tolist() == sorted(kept.tolist()) and len(kept) == 60
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert not any("embed" in name or "head" in name for name in stored) and len(stored) == 2 * 9 + 1
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    settings = json.loads((tmp_path / "out" / "training.json").read_text())
    assert settings["keep_layers"] == [0, 3] and settings["evaluation"]["coverage"] > 0.9
    assert settings["recipe"]["shared"] and settings["recipe"]["draft_vocabulary"] == 60

    # Its sizes need not be said again, and its draft vocabulary is not that of the new data.
    init = {"init": tmp_path / "out"}
    rest = DraftModelRecipe(held_out=3)
    again = trained("again", rest, **init)
    with pytest.raises(Stop):
        trained("stopped", rest, on_step=stop, **init)
    stopped = trained("stopped", rest, **init)
    assert all(torch.equal(tensor, stopped[name]) for name, tensor in again.items())
    assert not all(torch.equal(tensor.bfloat16(), done[name]) for name, tensor in again.items())
    settings = json.loads((tmp_path / "again" / "training.json").read_text())
    assert settings["recipe"]["shared"] and settings["recipe"]["draft_vocabulary"] == 60 and settings["init"]
    for changes, message in (
        ({"shared": False}, "has shared=True, not shared=False"),
        ({"draft_vocabulary": 50}, "has draft_vocabulary=60, not draft_vocabulary=50"),
        ({"keep_layers": (0, 3)}, r"has its own blocks, not keep_layers=\(0, 3\)"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            trained("x", replace(rest, **changes), **init)
    narrow = Target(llama(tied=True, hidden_size=16))
    with pytest.raises(InvalidCheckpoint, match=r"config\.json': 'hidden_size' is 32; the target's is 16"):
        train_draft_model(narrow, data, tmp_path / "x", FAST, rest, init=tmp_path / "out")


def test_the_draft_vocabulary_is_of_the_most_frequent_tokens(tmp_path: Path):
    target, data = sharp(), own_text(sharp(), 12)
    one = replace(FAST, steps=1)
    cut = train_draft_model(target, data, tmp_path / "cut", one, replace(SHARED, held_out=0))
    assert draft_tokens(cut).tolist() == frequent_tokens(data, 60, VOCABULARY).tolist()
    whole = replace(SHARED, held_out=0, draft_vocabulary=VOCABULARY)
    assert draft_tokens(train_draft_model(target, data, tmp_path / "whole", one, whole)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocabulary": 8}, "draft_vocabulary=8 needs shared=True"),
        ({"shared": True, "width": 16}, "has its width, 32, not 16"),
        ({"shared": True, "draft_vocabulary": 97}, "draft_vocabulary must be <= 96"),
        ({"shared": True, "draft_vocabulary": 0}, "draft_vocabulary must be a whole number >= 1"),
        ({"shared": "yes"}, "shared must be True or False"),
    ],
)
def test_settings_that_cannot_work(options: dict[str, Any], message: str, tmp_path: Path):
    data = Sequences(torch.ones(40, 8, dtype=torch.int64), torch.ones(40, 8, dtype=torch.bool))
    with pytest.raises(InvalidRequest, match=message):
        train_draft_model(Target(llama(tied=False)), data, tmp_path / "out", FAST, DraftModelRecipe(**options))
    assert not list(tmp_path.iterdir())
