"""Medusa-1: what heads learn from, that they learn it, and that the target stays as it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from draftwood.core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound
from draftwood.core.target import Target
from draftwood.core.views import head_of
from draftwood.decoder import Decoder
from draftwood.drafters.medusa.drafter import Medusa
from draftwood.drafters.medusa.formats import load_heads
from draftwood.drafters.medusa.network import MedusaConfig, MedusaHeads
from draftwood.drafters.medusa.trees import expected_tau, greedy_tree
from draftwood.training.data import Batch, Document, Sequences, frequent_tokens, pack
from draftwood.training.features import OnlineFeatures
from draftwood.training.loop import Schedule
from draftwood.training.medusa import MedusaRecipe, coverage, make_heads, train_medusa
from draftwood.training.medusa_losses import Evaluation, best_tau, head_losses

WORDS, VOCABULARY = 24, 32
FOLLOWS = torch.randperm(WORDS, generator=torch.Generator().manual_seed(5)).tolist()
"""The whole grammar of the language that is learnt: what follows each word."""

RECIPE = MedusaRecipe(heads=2, held_out=6)
FAST = Schedule(steps=4, batch_size=4, accumulate=2, learning_rate=1e-2, seed=3, checkpoint_every=2)


def sequences(count: int = 40, length: int = 12) -> Sequences:
    words = torch.randint(WORDS, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = []
    for word in words:
        text = [word]
        while len(text) < length:
            text.append(FOLLOWS[text[-1]])
        documents.append(Document(text, [True] * length))
    return pack(documents, length)


def llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.fixture
def target() -> Target:
    return Target(llama())


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """All that is set on a model and its modules, hooks included."""
    return {
        name: {key: repr(value) for key, value in vars(module).items() if not key.startswith("_param")}
        for name, module in model.named_modules()
    } | {"gradients": [(one.requires_grad, one.grad) for one in model.parameters()]}


def test_heads_learn_what_follows_and_the_target_stays_as_it_is(target: Target, tmp_path: Path):
    model = target.model
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = settings_of(model)
    lines: list[dict[str, Any]] = []
    schedule = Schedule(steps=60, batch_size=16, learning_rate=1e-2, warmup=5, eval_every=20)
    train_medusa(target, sequences(120), tmp_path / "heads", schedule, RECIPE, on_step=lines.append, base_model="tiny")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert settings_of(model) == settings

    start, *measured = [line["evaluation"] for line in lines if "evaluation" in line]
    assert start["head 0 top-1"] < 0.5 and [line["step"] for line in lines] == list(range(61))
    unigram = 2 / WORDS  # no word is learnt twice as often as another
    fresh = held_out_figures(target, make_heads(target, sequences(), RECIPE))
    for head in ("head 0", "head 1"):
        assert measured[-1][f"{head} top-1"] >= 0.9 > 0.5 > max(fresh[f"{head} top-1"], unigram)
        assert measured[-1][f"{head} loss"] < measured[0][f"{head} loss"] < fresh[f"{head} loss"]
    assert len(measured) == 3
    assert 2.5 < measured[-1]["expected tau"] <= 3.0

    stored = load_heads(tmp_path / "heads", width=32, vocabulary=VOCABULARY)
    assert stored.accuracies is not None
    assert [rates[0] for rates in stored.accuracies] == [measured[-1][f"head {k} top-1"] for k in range(2)]
    assert sum(stored.accuracies[0][:5]) == pytest.approx(measured[-1]["head 0 top-5"])
    assert len(stored.accuracies[0]) == 10
    tree = greedy_tree(stored.accuracies, 12)
    assert expected_tau(tree, stored.accuracies) == pytest.approx(measured[-1]["expected tau"])
    drafter = Medusa(checkpoint=tmp_path / "heads")
    drafter.bind(target)
    assert drafter.tree == tree
    told = json.loads((tmp_path / "heads" / "training.json").read_text())
    assert told["evaluation"] == measured[-1] and told["schedule"]["steps"] == 60
    assert told["sequences"] == {"training": 114, "held-out": 6, "length": 12}
    assert not (tmp_path / "heads.training").exists()
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["base_model_name_or_path"] == "tiny"


def held_out_figures(target: Target, heads: MedusaHeads) -> dict[str, float]:
    return Evaluation(heads, OnlineFeatures(target, ["last"]), head_of(target), sequences(), 16, 12)()


def marked() -> Sequences:
    """Sequences of random tokens, of which some are learnt."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (5, 9), generator=generator)
    return Sequences(tokens, torch.rand(5, 9, generator=generator) < 0.6)


def network(shared: bool, draft_tokens: Tensor | None) -> MedusaHeads:
    """Three random heads of width 6."""
    heads = MedusaHeads(MedusaConfig(3, 1, 6, VOCABULARY, shared), draft_tokens).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return heads


DRAFT_TOKENS = torch.tensor([30, 2, 3, 5, 8, 13, 21, 29, 1, 4, 6, 7])


@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize("draft_tokens", [None, DRAFT_TOKENS])
@pytest.mark.parametrize("shared", [False, True])
def test_losses_and_accuracies_are_those_of_one_position_after_another(
    shared: bool, draft_tokens: Tensor | None, distil: bool
):
    heads, data = network(shared, draft_tokens), marked()
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, 9, 6, generator=generator, dtype=torch.float64)
    ids = torch.arange(VOCABULARY) if draft_tokens is None else draft_tokens
    rows = torch.randn(VOCABULARY, 6, generator=generator, dtype=torch.float64)[ids]
    batch = data.at(torch.arange(5))

    total, ranks, labels, entropies = 0.0, torch.zeros(3, 10), [0] * 3, [[] for _ in range(3)]
    every = int(data.learnt[:, 1:].sum())
    logits = heads.logits(hidden, lambda states: states @ rows.T)
    for row in range(5):
        for position in range(9):
            for k in range(3):
                place = position + 2 + k
                if place >= 9 or not data.learnt[row, place]:
                    continue
                labels[k] += 1
                label = (ids == data.tokens[row, place]).nonzero().flatten().tolist()
                if not label:
                    continue
                guess = logits[k, row, position]
                goal = torch.nn.functional.one_hot(torch.tensor(label[0]), len(ids)).double()
                if distil:
                    goal = (hidden[row, place - 1] @ rows.T).softmax(0)
                entropies[k].append(-float((goal * guess.detach().log_softmax(0)).sum()))
                rank = int((guess > guess[label[0]]).sum())
                if rank < 10:
                    ranks[k, rank] += 1
                total += 0.5**k * entropies[k][-1] / every

    loss, figures = head_losses(heads, hidden, batch, lambda states: states @ rows.T, decay=0.5, distil=distil)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(total, rel=1e-5)
    evaluation = Evaluation(
        heads, lambda batch: {"last": hidden[batch.index]}, lambda states: states @ rows.T, data, 2, 4
    )
    measured = evaluation()
    for k in range(3):
        assert figures[f"head {k} loss"].item() == pytest.approx(sum(entropies[k]) / len(entropies[k]), rel=1e-5)
        assert figures[f"head {k} top-1"].item() == pytest.approx(ranks[k, 0].item() / labels[k])
        assert figures[f"head {k} top-5"].item() == pytest.approx(ranks[k, :5].sum().item() / labels[k])
        assert evaluation.accuracies[k] == pytest.approx([hit / labels[k] for hit in ranks[k].tolist()])
        if not distil:
            assert measured[f"head {k} loss"] == pytest.approx(figures[f"head {k} loss"].item(), rel=1e-5)
    assert measured["coverage"] == pytest.approx(len(entropies[0]) / labels[0])
    assert measured["expected tau"] == pytest.approx(
        expected_tau(greedy_tree(evaluation.accuracies, 4), evaluation.accuracies)
    )


@pytest.mark.parametrize("k", [0, 1, 2])
def test_head_k_learns_the_token_k_plus_2_ahead(k: int):
    """Fresh blocks change nothing: a state that points at a token is a guess of that token."""
    tokens = torch.tensor([[3, 1, 4, 0, 5, 2, 6, 7]])
    hidden = torch.zeros(1, 8, 8)
    for position in range(8 - 2 - k):
        hidden[0, position, tokens[0, position + 2 + k]] = 50.0
    heads = MedusaHeads(MedusaConfig(3, 1, 8, 8, shared=True))
    batch = Batch(tokens, torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, dtype=torch.int64))
    _, figures = head_losses(heads, hidden, batch, lambda states: states)
    assert [figures[f"head {other} top-1"].item() for other in range(3)] == [float(other == k) for other in range(3)]
    assert figures[f"head {k} loss"].item() == pytest.approx(0.0, abs=1e-6)


def test_nothing_is_computed_where_nothing_is_learnt():
    """States of positions without a label may be anything."""
    heads, data = network(True, DRAFT_TOKENS), marked()
    hidden = torch.randn(5, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    known = data.learnt & torch.isin(data.tokens, DRAFT_TOKENS)
    for row in range(5):
        for position in range(9):
            if not known[row, position + 2 : position + 5].any():
                hidden[row, position] = math.nan
    assert hidden.isnan().any()
    seen: list[int] = []

    def lm_head(states: Tensor) -> Tensor:
        seen.append(states.shape[1])
        return states[..., :1] * torch.ones(12, dtype=torch.float64)

    loss, _ = head_losses(heads, hidden, data.at(torch.arange(5)), lm_head)
    assert loss.isfinite()
    assert seen == [int(known[:, 2 + k :].sum()) for k in range(3)]


def untimed(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def same(one: MedusaHeads, other: MedusaHeads) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_a_stopped_run_ends_as_an_uninterrupted_one(target: Target, tmp_path: Path):
    whole = train_medusa(target, sequences(), tmp_path / "whole", FAST, RECIPE)

    def stop(entry: dict[str, Any]) -> None:
        if entry["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_medusa(target, sequences(), tmp_path / "stopped", FAST, RECIPE, on_step=stop)
    assert not (tmp_path / "stopped").exists()
    with pytest.raises(InvalidRequest, match="begun with other loss"):
        train_medusa(target, sequences(), tmp_path / "stopped", FAST, replace(RECIPE, decay=0.5))
    again = train_medusa(target, sequences(), tmp_path / "stopped", FAST, RECIPE)
    assert same(whole, again)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")
    files = {file.name: file.read_bytes() for file in (tmp_path / "whole").iterdir() if file.name != "log.jsonl"}
    assert files == {name: (tmp_path / "stopped" / name).read_bytes() for name in files}
    assert set(files) == {"config.json", "medusa_lm_head.safetensors", "training.json"}


def test_a_run_that_is_killed_while_it_is_published_is_measured_again(target: Target, tmp_path: Path, monkeypatch):
    whole = train_medusa(target, sequences(), tmp_path / "whole", FAST, RECIPE)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("draftwood.training.medusa.save_heads", killed)
        train_medusa(target, sequences(), tmp_path / "killed", FAST, RECIPE)
    assert same(whole, train_medusa(target, sequences(), tmp_path / "killed", FAST, RECIPE))
    whole_config, config = ((tmp_path / name / "config.json").read_bytes() for name in ("whole", "killed"))
    assert whole_config == config


def test_cached_features_teach_the_same(target: Target, tmp_path: Path):
    online = train_medusa(target, sequences(), tmp_path / "online", FAST, RECIPE)
    told: list[tuple[int, int]] = []
    cached = train_medusa(
        target,
        sequences(),
        tmp_path / "cached",
        FAST,
        RECIPE,
        cache=tmp_path / "cache",
        on_features=lambda done, total: told.append((done, total)),
    )
    for one, other in zip(online.parameters(), cached.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (34, 34) in told and (6, 6) in told


def test_the_log_for_tensorboard_is_kept(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Writer:
        def __init__(self, place: str, purge_step: int) -> None:
            Path(place).mkdir()
            self.file = Path(place) / "events"

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.file.write_text(f"{name} {step}")

        def close(self) -> None:
            pass

    monkeypatch.setattr("draftwood.training.checkpoint._summary_writer", lambda: Writer)
    train_medusa(target, sequences(), tmp_path / "x", replace(FAST, steps=1), RECIPE, tensorboard=True)
    assert (tmp_path / "x" / "tensorboard" / "events").read_text().endswith(" 1")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_data_to_measure_on_may_be_given(target: Target, tmp_path: Path):
    lines: list[dict[str, Any]] = []
    held = sequences(10)
    heads = train_medusa(target, sequences(), tmp_path / "x", FAST, RECIPE, held=held, on_step=lines.append)
    told = json.loads((tmp_path / "x" / "training.json").read_text())
    assert told["sequences"] == {"training": 40, "held-out": 10, "length": 12}
    expected = Evaluation(heads, OnlineFeatures(target, ["last"]), head_of(target), held, 4, 12)()
    assert lines[-1]["evaluation"] == pytest.approx(expected)
    outside = Sequences(held.tokens + VOCABULARY, held.learnt)
    with pytest.raises(InvalidRequest, match="outside the target's vocabulary"):
        train_medusa(target, sequences(), tmp_path / "y", FAST, RECIPE, held=outside)


def test_training_goes_on_from_saved_heads(target: Target, tmp_path: Path):
    recipe = replace(RECIPE, draft_vocabulary=20, layers=2)
    first = train_medusa(target, sequences(), tmp_path / "first", FAST, recipe)
    lines: list[dict[str, Any]] = []
    train_medusa(
        target,
        sequences(),
        tmp_path / "then",
        replace(FAST, steps=1),
        MedusaRecipe(held_out=6),
        init=tmp_path / "first",
        on_step=lines.append,
    )
    assert not same(first, load_heads(tmp_path / "then", width=32, vocabulary=VOCABULARY).heads)
    assert lines[0]["head 1 loss"] == pytest.approx(untimed(tmp_path / "first")[-1]["head 1 loss"], rel=0.2)
    for wrong, said in ((MedusaRecipe(heads=3), "heads=2, not 3"), (MedusaRecipe(draft_vocabulary=9), "=20, not 9")):
        with pytest.raises(InvalidRequest, match=said):
            train_medusa(target, sequences(), tmp_path / "x", FAST, wrong, init=tmp_path / "first")
    with pytest.raises(ModelNotFound, match="nowhere"):
        train_medusa(target, sequences(), tmp_path / "x", FAST, init=tmp_path / "nowhere")
    (tmp_path / "first" / "medusa_lm_head.safetensors").write_bytes(b"nonsense")
    with pytest.raises(InvalidCheckpoint, match="medusa_lm_head"):
        train_medusa(target, sequences(), tmp_path / "x", FAST, init=tmp_path / "first")


def test_bfloat16_targets_shared_heads_and_vllm_files(tmp_path: Path):
    target = Target(llama(torch.bfloat16))
    recipe = replace(RECIPE, shared=True, draft_vocabulary=WORDS, distil=True)
    heads = make_heads(target, sequences(), recipe)
    assert heads.lm_heads is None and heads.blocks[0].weight.dtype == torch.float32
    trained = train_medusa(target, sequences(), tmp_path / "heads", FAST, recipe, layout="vllm")
    assert trained.blocks[0].weight.dtype == torch.bfloat16
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["model_type"] == "medusa"
    assert same(trained, load_heads(tmp_path / "heads", width=32, vocabulary=VOCABULARY).heads)
    exact = Target(llama())
    prompts = [[1, 2, 3], [4, 5]]
    plain = Decoder(exact).generate(prompts, max_new_tokens=12)
    drafted = Decoder(exact, "medusa", drafter_options={"checkpoint": tmp_path / "heads"})
    assert [one.tokens for one in drafted.generate(prompts, max_new_tokens=12)] == [one.tokens for one in plain]


def test_the_draft_vocabulary_is_what_is_learnt_most(target: Target):
    tokens = torch.tensor([[7, 7, 7, 7, 5, 3, 3, 9, 2, 2]])
    learnt = torch.tensor([[False, False, False, True, True, True, True, True, True, True]])
    data = Sequences(tokens, learnt)
    assert frequent_tokens(data, 2, 10).tolist() == [2, 3]
    assert frequent_tokens(data, 4, 10).tolist() == [2, 3, 5, 7]  # 5, 7 and 9 are as frequent
    assert frequent_tokens(data, 6, 10).tolist() == [0, 2, 3, 5, 7, 9]
    heads = make_heads(target, data, MedusaRecipe(heads=1, draft_vocabulary=2))
    assert coverage(heads, data) == pytest.approx(4 / 7)
    assert make_heads(target, data, MedusaRecipe(heads=1, draft_vocabulary=VOCABULARY)).draft_tokens is None


def test_heads_that_are_never_right_have_a_tau_of_1():
    assert best_tau([[0.0, 0.0], [0.5, 0.1]], 4) == 1.0
    assert best_tau([[0.5, 0.25], [0.5, 0.0]], 3) == pytest.approx(1 + 0.5 + 0.25 + 0.25)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ({"heads": 0}, "heads must be a whole number >= 1, got 0"),
        ({"layers": -1}, "layers must be a whole number >= 0, got -1"),
        ({"draft_vocabulary": 0}, "draft_vocabulary must be a whole number >= 1, got 0"),
        ({"draft_vocabulary": 33}, "draft_vocabulary must be <= 32, the size of the vocabulary, got 33"),
        ({"heads": 11}, "by head 10"),
        ({"held_out": 40}, "1 to 39 can be held out"),
        ({"decay": 1.5}, "decay must be a number in"),
        ({"nodes": 0}, "nodes must be"),
        ({"distil": "no"}, "distil must be True or False"),
    ],
)
def test_recipes_that_cannot_work(target: Target, tmp_path: Path, recipe: dict[str, Any], said: str):
    with pytest.raises(InvalidRequest, match=said):
        train_medusa(target, sequences(), tmp_path / "x", FAST, MedusaRecipe(**{"held_out": 6, **recipe}))
    assert list(tmp_path.iterdir()) == []


def test_data_that_cannot_work(target: Target, tmp_path: Path):
    good = sequences()
    outside = good.tokens.clone()
    outside[3, 4] = VOCABULARY
    with pytest.raises(InvalidRequest, match=f"token {VOCABULARY}, outside the target's vocabulary of {VOCABULARY}"):
        train_medusa(target, Sequences(outside, good.learnt), tmp_path / "x", FAST, RECIPE)
    nothing = torch.zeros_like(good.learnt)
    nothing[:, :2] = True
    with pytest.raises(InvalidRequest, match="no token of the training data is to be learnt by head 0"):
        train_medusa(target, Sequences(good.tokens, nothing), tmp_path / "x", FAST, RECIPE)
    (tmp_path / "there").mkdir()
    with pytest.raises(InvalidRequest, match=r"there' exists"):
        train_medusa(target, good, tmp_path / "there", FAST, RECIPE)
    half = Target(llama(torch.float16))
    with pytest.raises(InvalidRequest, match="float16"):
        train_medusa(half, good, tmp_path / "x", FAST, RECIPE)
