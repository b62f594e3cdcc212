"""Medusa-2: model and heads learn together, and are one checkpoint."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.decoder import Decoder
from draftwood.drafters.medusa.formats import load_heads
from draftwood.training.loop import Schedule
from draftwood.training.medusa import MedusaRecipe, make_heads
from draftwood.training.medusa_joint import JointRecipe, _add_weights, _Joint, train_medusa_joint
from draftwood.training.medusa_losses import head_losses
from tests.training.test_medusa import FOLLOWS, VOCABULARY, llama, sequences, settings_of

RECIPE = MedusaRecipe(heads=2, held_out=6, draft_vocabulary=28)
FIRST = Schedule(steps=4, batch_size=8, learning_rate=1e-2)
JOINT = Schedule(steps=40, batch_size=8, learning_rate=5e-3, warmup=5)


@pytest.fixture
def target() -> Target:
    return Target(llama())


@pytest.mark.parametrize("joint", [JointRecipe(), JointRecipe(lora=16)], ids=["full", "lora"])
def test_model_and_heads_learn_and_draft_from_one_directory(target: Target, tmp_path: Path, joint: JointRecipe):
    if joint.lora:
        pytest.importorskip("peft")
    weights = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    settings = settings_of(target.model)
    lines: list[dict[str, Any]] = []
    output = tmp_path / "model"
    schedule = JOINT if joint.lora is None else replace(JOINT, learning_rate=2e-2)
    model, heads = train_medusa_joint(
        target, sequences(80), output, schedule, RECIPE, joint, first=FIRST, on_step=lines.append
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in target.model.state_dict().items())
    assert settings_of(target.model) == settings
    second = lines[4:]
    # Adapters leave the random embeddings and LM head of this model as they are, and can teach it less.
    fall, right, tau = (0.5, 0.5, 1.5) if joint.lora is None else (0.2, 0.1, 1.0)
    assert second[-1]["model"] < second[0]["model"] - fall
    assert second[-1]["evaluation"]["head 0 top-1"] > lines[3]["evaluation"]["head 0 top-1"]
    assert second[-1]["evaluation"]["head 0 top-1"] > right
    assert [file.name for file in tmp_path.iterdir()] == ["model"]

    config = json.loads((output / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 1)
    assert config["accuracies"][1][0] == second[-1]["evaluation"]["head 1 top-1"]
    loaded = Target(_reload(output))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.model.state_dict().items())
    stored = load_heads(output, width=32, vocabulary=VOCABULARY).heads
    for one, other in zip(stored.state_dict().values(), heads.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    prompt = [1, FOLLOWS[1]]
    plain = Decoder(loaded).generate(prompt, max_new_tokens=16)
    drafted = Decoder(loaded, "medusa", drafter_options={"checkpoint": output}).generate(prompt, max_new_tokens=16)
    assert drafted.tokens == plain.tokens and drafted.stats.tau >= tau


def _reload(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def test_self_distillation_starts_without_loss_and_keeps_the_model_close(target: Target, tmp_path: Path):
    lines: list[dict[str, Any]] = []
    distil = JointRecipe(self_distil=True)
    short = replace(JOINT, steps=6, learning_rate=1e-3)
    train_medusa_joint(target, sequences(), tmp_path / "x", short, RECIPE, distil, first=FIRST, on_step=lines.append)
    assert lines[4]["model"] == pytest.approx(0.0, abs=1e-6)
    assert 0 < max(line["model"] for line in lines[5:]) < 0.1
    head = 0.2 * (lines[4]["head 0 loss"] + 0.8 * lines[4]["head 1 loss"])
    assert lines[4]["loss"] == pytest.approx(head, rel=0.3)  # the figures are means over fewer tokens


def test_a_stopped_run_ends_as_an_uninterrupted_one(target: Target, tmp_path: Path):
    short = replace(JOINT, steps=4, checkpoint_every=2)

    def run(name: str, **options: Any) -> Any:
        return train_medusa_joint(target, sequences(), tmp_path / name, short, RECIPE, first=FIRST, **options)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 3 and "model" in entry:
            raise KeyboardInterrupt

    model, heads = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", on_step=stop)
    with pytest.raises(InvalidRequest, match="heads of another run"):
        train_medusa_joint(target, sequences(), tmp_path / "stopped", short, RECIPE, first=replace(FIRST, seed=1))
    again, more = run("stopped")
    for one, other in ((model, again), (heads, more)):
        assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_heads_learn_faster_by_their_rate(target: Target, tmp_path: Path):
    seen = JointRecipe(head_rate=0.0)
    lines: list[dict[str, Any]] = []
    short = replace(JOINT, steps=1)
    train_medusa_joint(target, sequences(), tmp_path / "a", short, RECIPE, seen, first=FIRST, on_step=lines.append)
    train_medusa_joint(target, sequences(), tmp_path / "b", short, RECIPE, first=FIRST)
    still, moved = (load_heads(tmp_path / name, width=32, vocabulary=VOCABULARY).heads for name in "ab")
    assert not torch.equal(still.blocks[0].weight, moved.blocks[0].weight)


@pytest.mark.parametrize("lora", [None, 4])
def test_a_bfloat16_model_loses_no_small_update(tmp_path: Path, lora: int | None):
    """Most steps of 2e-5 are less than half the distance of two bfloat16 numbers of the size of weights."""
    target = Target(llama(torch.bfloat16))
    short = replace(JOINT, steps=12, learning_rate=1e-4 if lora else 2e-5, warmup=0)
    joint = JointRecipe(lora=lora)
    model, heads = train_medusa_joint(target, sequences(), tmp_path / "x", short, RECIPE, joint, first=FIRST)
    assert {part.dtype for part in (*model.parameters(), *heads.parameters())} == {torch.bfloat16}
    frequencies = [dict(one.named_buffers())["model.rotary_emb.inv_freq"] for one in (model, target.model)]
    assert torch.equal(*frequencies) and frequencies[0].dtype == torch.float32
    if lora is None:
        before = dict(target.model.named_parameters())
        moved = [(one != before[name]).float().mean() for name, one in model.named_parameters() if one.dim() > 1]
        assert float(torch.stack(moved).mean()) > 0.5


def test_what_the_losses_weigh_and_which_tokens_the_model_learns(target: Target):
    """The sum of the model's loss and 0.2 x that of the heads, token by token; self-distilled, KL(before, now)."""
    student, data = llama(), sequences(3)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    batch = data.at(torch.arange(3))
    batch.learnt[1, 3:7] = False
    heads = make_heads(target, data, RECIPE)
    for teacher in (None, target.model):
        objective = _Joint(student, student, heads, teacher, torch.float32, 0.8, JointRecipe())
        loss, figures = objective(batch, 0, torch.Generator())
        own, count = 0.0, 0
        now = student(batch.tokens).logits.log_softmax(-1)
        before = target.model(batch.tokens).logits.log_softmax(-1)
        for row in range(3):
            for place in range(1, 12):
                if batch.learnt[row, place]:
                    count += 1
                    law = before[row, place - 1]
                    kl = (law.exp() * (law - now[row, place - 1])).sum()
                    own += float(-now[row, place - 1, batch.tokens[row, place]] if teacher is None else kl)
        hidden = student.model(batch.tokens).last_hidden_state
        expected = head_losses(heads, hidden, batch, None, decay=0.8)[0].item()
        assert figures["model"].item() == pytest.approx(own / count, rel=1e-4)
        assert loss.item() == pytest.approx(own / count + 0.2 * expected, rel=1e-4)
    assert objective.rate("heads.blocks.0.weight") == 4.0 and objective.rate("model.lm_head.weight") == 1.0


def test_heads_join_a_model_of_several_files(target: Target, tmp_path: Path):
    target.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    state = {"medusa_head.0.0.weight": torch.randn(VOCABULARY, 32)}
    _add_weights(tmp_path, state)
    stored = load_heads(tmp_path, width=32, vocabulary=VOCABULARY).heads
    assert stored.lm_heads is not None and torch.equal(stored.lm_heads[0], state["medusa_head.0.0.weight"])
    loaded = _reload(tmp_path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in target.model.state_dict().items())


def test_requests_that_cannot_work(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(recipe: MedusaRecipe = RECIPE, joint: JointRecipe | None = None, **options: Any) -> None:
        train_medusa_joint(target, sequences(), tmp_path / "x", JOINT, recipe, joint, **options)

    with pytest.raises(InvalidRequest, match="either a schedule of the first stage"):
        run()
    with pytest.raises(InvalidRequest, match="leave out shared"):
        run(replace(RECIPE, shared=True), first=FIRST)
    with pytest.raises(InvalidRequest, match="lora must be a whole number >= 1, got 0"):
        JointRecipe(lora=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"draftwood\[lora\]"):
        run(joint=JointRecipe(lora=4), first=FIRST)
    assert list(tmp_path.iterdir()) == []
