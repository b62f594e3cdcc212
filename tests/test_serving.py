"""What is exported for vLLM and SGLang: keys, shapes and settings as their loaders expect, and the same drafts."""

from __future__ import annotations

import copy
import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import draftwood as dw
from draftwood.core.errors import (
    DraftwoodError,
    InvalidCheckpoint,
    InvalidRequest,
    ModelNotFound,
    UnsupportedModel,
    VocabularyMismatch,
)
from draftwood.core.loading import load_model
from draftwood.core.target import Target
from draftwood.drafters.eagle.config import layer_config
from draftwood.drafters.eagle.formats import load_head, save_head
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead
from draftwood.drafters.medusa.formats import load_heads, save_heads
from draftwood.drafters.medusa.network import MedusaConfig, MedusaHeads
from draftwood.drafters.shared_model import save_shared, share_with_target
from draftwood.serving import Exported, export, recognise
from tests.conftest import VOCABULARY, llama_config, tiny_model
from tests.drafters.eagle.heads import PROMPTS, REDUCED, greedy_texts, make_head, sure_target, true_features
from tests.drafters.medusa.test_network import random_heads
from tests.study.tiny import tiny_tokenizer
from tests.test_cli_training import check_refused, good
from tests.test_cli_training import dw as run

WIDTH, KEPT = 32, torch.tensor([9, 2, 44, 7, 30])


@pytest.fixture(scope="module")
def target() -> Target:
    return sure_target()


@pytest.fixture(scope="module")
def place(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's directory."""
    folder = tmp_path_factory.mktemp("target")
    target.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def medusa(folder: Path, *, shared: bool, tokens: Tensor | None = KEPT, layers: int = 1) -> MedusaHeads:
    heads = random_heads(MedusaConfig(2, layers, WIDTH, VOCABULARY, shared), tokens, 3)
    save_heads(heads, folder, base_model="smollm2")
    return heads


def files(done: Exported) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Returns the configuration that was written, and the shapes of the weights."""
    config = json.loads((done.directory / "config.json").read_text())
    weights = load_file(done.directory / "model.safetensors")
    return config, {name: list(weight.shape) for name, weight in weights.items()}


def speculative(done: Exported, place: Path) -> dict[str, Any]:
    """Checks the command of vLLM, and returns what it says of drafting."""
    *words, settings = shlex.split(done.command)
    assert words == ["vllm", "serve", str(place.resolve()), "--speculative-config"]
    told: dict[str, Any] = json.loads(settings)
    assert told.pop("model") == str(done.directory)
    return told


def test_a_target_is_a_model_directory_with_its_tokenizer(place: Path, tmp_path: Path, target: Target) -> None:
    done = export(place, tmp_path / "out")
    assert done == Exported("target", tmp_path / "out", f"vllm serve {tmp_path / 'out'}")
    model, tokenizer = load_model(tmp_path / "out")
    assert all(torch.equal(one, target.model.state_dict()[name]) for name, one in model.state_dict().items())
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab() and tokenizer.chat_template
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_shared_medusa_heads_keep_their_reduced_vocabulary(place: Path, tmp_path: Path, target: Target) -> None:
    """By rows that never win: vLLM's `token_map` fails its own check that every weight was loaded."""
    heads = medusa(tmp_path / "heads", shared=True, layers=2)
    done = export(tmp_path / "heads", tmp_path / "out", target=place)
    config, shapes = files(done)
    blocks = {f"blocks.{head}.layers.{layer}": [WIDTH, WIDTH] for head in (0, 1) for layer in (0, 1)}
    expected = {f"{name}.weight": shape for name, shape in blocks.items()} | {f"{b}.bias": [WIDTH] for b in blocks}
    assert shapes == expected | {"lm_head.weight": [VOCABULARY, WIDTH]}
    wanted = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 2, "num_hidden_layers": 2}
    wanted |= {"hidden_size": WIDTH, "vocab_size": VOCABULARY, "truncated_vocab_size": VOCABULARY}
    assert config.items() >= (wanted | {"medusa_fc_bias": True, "original_lm_head": True}).items()
    rows = load_file(done.directory / "model.safetensors")["lm_head.weight"]
    assert torch.equal(rows[KEPT], target.model.lm_head.weight[KEPT].to(rows.dtype))
    hidden = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0)).to(rows.dtype)
    best = (heads.states(hidden) @ rows.T).argmax(-1)
    ours = heads.logits(hidden, lambda states: states @ rows[KEPT].T)
    assert torch.equal(best, KEPT[ours.argmax(-1)])
    assert speculative(done, place) == {"method": "medusa", "num_speculative_tokens": 2}


def test_medusa_heads_with_lm_heads_of_their_own_get_all_rows_and_draft_the_same(place: Path, tmp_path: Path) -> None:
    heads = medusa(tmp_path / "heads", shared=False)
    done = export(tmp_path / "heads", tmp_path / "out", target=place, depth=1)
    config, shapes = files(done)
    assert shapes["lm_heads.0.weight"] == shapes["lm_heads.1.weight"] == [VOCABULARY, WIDTH]
    assert "token_map" not in shapes and config["truncated_vocab_size"] == VOCABULARY
    assert config["original_lm_head"] is False
    whole = load_heads(tmp_path / "out", width=WIDTH, vocabulary=VOCABULARY).heads
    hidden = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(0), dtype=heads.lm_heads.dtype)
    assert torch.equal(whole.logits(hidden).argmax(-1), heads.to_target(heads.logits(hidden)).argmax(-1))
    assert speculative(done, place)["num_speculative_tokens"] == 1


LAYER = {
    **{f"self_attn.{name}_proj.weight": [16 if name in "kv" else 32, 32] for name in "qkvo"},
    **{f"mlp.{name}_proj.weight": [48, 32] for name in ("gate", "up")},
    "mlp.down_proj.weight": [32, 48],
    "post_attention_layernorm.weight": [32],
}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_eagle_1_head(place: Path, tmp_path: Path, target: Target, engine: Any) -> None:
    save_head(make_head("eagle, no bias, reduced", target), tmp_path / "head")
    done = export(tmp_path / "head", tmp_path / "out", engine=engine, target=place, depth=3)
    config, shapes = files(done)
    expected = {f"layers.0.{name}": shape for name, shape in LAYER.items()} | {"fc.weight": [32, 64]}
    assert "bias" not in config  # both would read it as the attention's
    assert config["num_hidden_layers"] == 1 and config["vocab_size"] == VOCABULARY
    if engine == "vllm":
        assert shapes == expected
        assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"
        assert speculative(done, place) == {"method": "eagle", "num_speculative_tokens": 3}
        assert "any of the 96 tokens, not only the 64" in " ".join(done.notes)
        return
    assert shapes == expected | {"fc.bias": [32]}  # it would stay random
    assert not load_file(done.directory / "model.safetensors")["fc.bias"].any()
    assert config["architectures"] == ["LlamaForCausalLMEagle"] and not done.notes
    tokens = done.directory / "hot_token_ids.pt"
    assert torch.load(tokens, weights_only=True) == REDUCED
    assert shlex.split(done.command) == [
        *("python", "-m", "sglang.launch_server", "--model-path", str(place), "--speculative-algorithm", "EAGLE"),
        *("--speculative-draft-model-path", str(done.directory), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"),
        *("--speculative-token-map", str(tokens)),
    ]


def third(target: Target, **options: Any) -> Eagle3Head:
    """A head whose features and draft tokens are in disorder."""
    torch.manual_seed(1)
    head = Eagle3Head(layer_config(target), **{"layers": (2, 0, 1), "draft_tokens": REDUCED[::-1], **options})
    for name, weight in head.named_parameters():
        weight.data = torch.rand_like(weight) + 0.5 if "norm" in name else weight.data * 3
    return head.double()


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("vllm", {"fc_norm": True, "norm_before_residual": True, "norm_output": True}),
        ("vllm", {"layers": (3, 1), "norm_before_fc": True, "fc_bias": True}),  # of zeros
        ("vllm", {"draft_tokens": list(range(VOCABULARY))[::-1]}),
        ("sglang", {"norm_before_fc": True}),
        ("sglang", {"fc_norm": True, "norm_output": True, "fc_bias": True}),
    ],
)
def test_an_eagle_3_head_is_put_in_order_and_drafts_the_same(
    place: Path, tmp_path: Path, target: Target, engine: Any, options: dict[str, Any]
) -> None:
    head = third(target, **options)
    if head.fc.bias is not None and engine == "vllm":
        head.fc.bias.data.zero_()
    save_head(head, tmp_path / "head")
    done = export(tmp_path / "head", tmp_path / "out", engine=engine, target=place, depth=4)
    config, shapes = files(done)
    names = sorted(head.feature_names)
    if engine == "vllm":
        assert config["architectures"] == ["Eagle3Speculator"] and config["speculators_model_type"] == "eagle3"
        assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(names)
        assert config["eagle_aux_hidden_state_layer_ids"] == names
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(place)
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert speculative(done, place) == {"method": "eagle3", "num_speculative_tokens": 4}
        assert "fc.bias" not in shapes and shapes["layers.0.self_attn.q_proj.weight"] == [32, 64]
    else:
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["bias"] is ("fc.bias" in shapes)
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [name - 1 for name in names]
        assert "eagle_aux_hidden_state_layer_ids" not in config and config["num_aux_hidden_states"] == len(names)
        assert "--speculative-algorithm EAGLE3" in done.command
    reduced = len(head.draft_tokens) < VOCABULARY
    assert ("d2t" in shapes) is reduced and config["draft_vocab_size"] == len(head.draft_tokens)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing of the order of features is left to be guessed
        again = load_head(done.directory, target)
    assert list(again.feature_names) == names
    assert again.draft_tokens is None or again.draft_tokens.tolist() == REDUCED
    texts = greedy_texts(target, 12, PROMPTS[:1])
    one, other = (drafts(each, target, texts) for each in (head, again))
    assert torch.isfinite(other).any() and torch.allclose(one, other, rtol=0, atol=1e-4)  # norms are of float32


def drafts(head: Any, target: Target, texts: Tensor) -> Tensor:
    """Logits of the step on the target's features and of the one on the head's own output, over all tokens."""
    features, _ = true_features(head, target, texts)
    head.attach(target)
    positions = torch.arange(texts.shape[1] - 1)[None]
    with torch.no_grad():
        hidden = head(texts[:, 1:], head.fuse(features[:, :-1]), positions, None)
        further = head(texts[:, 1:], hidden, positions, None)
        return torch.stack([head.to_target(head.logits(state)) for state in (hidden, further)])


def test_attention_biases_of_qwen_are_made_whole_for_vllm(place: Path, tmp_path: Path, target: Target) -> None:
    head = EagleHead(layer_config(target, attention_bias=True), fc_bias=False)
    head.layers[0].self_attn.o_proj.register_parameter("bias", None)
    head.layers[0].self_attn.q_proj.bias.data.fill_(1)
    save_head(head, tmp_path / "head")
    done = export(tmp_path / "head", tmp_path / "out", target=place)
    config, shapes = files(done)
    assert config["attention_bias"] is True and shapes["layers.0.self_attn.o_proj.bias"] == [32]
    sglang = export(tmp_path / "head", tmp_path / "sglang", engine="sglang", target=place)
    assert "layers.0.self_attn.o_proj.bias" not in files(sglang)[1]


@pytest.mark.parametrize("size", [VOCABULARY - 6, VOCABULARY, VOCABULARY + 5])
@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_model_gets_the_targets_vocabulary(place: Path, tmp_path: Path, size: int, tied: bool) -> None:
    config = llama_config(layers=1, heads=2)
    config.vocab_size, config.tie_word_embeddings = size, tied
    model = tiny_model(config)
    model.save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    if size < VOCABULARY:  # only padding may be missing
        tokenizer = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
        words = tokenizer["model"]["vocab"]
        tokenizer["model"]["vocab"] = {word: number for word, number in words.items() if number < size}
        (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = export(tmp_path / "draft", tmp_path / "out", engine="sglang", target=place, depth=2)
    assert done.kind == "draft-model" and not done.notes
    assert done.command.endswith(
        "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
    )
    assert "--speculative-algorithm STANDALONE" in done.command
    written, tokenizer = load_model(done.directory)
    assert written.get_input_embeddings().weight.shape[0] == VOCABULARY == written.config.vocab_size
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    ids = torch.tensor([[5, 6, 70, 8, 33, 2]])
    shared = min(size, VOCABULARY)
    ours, theirs = model(ids).logits[..., :shared], written(ids).logits
    assert torch.allclose(ours, theirs[..., :shared], atol=1e-12)
    assert int(theirs.argmax(-1).max()) < shared


@pytest.mark.parametrize("tokens", [None, KEPT])
def test_a_draft_model_that_shares_with_its_target_becomes_whole(
    place: Path, tmp_path: Path, target: Target, tokens: Tensor | None
) -> None:
    model = copy.deepcopy(target.model)
    share_with_target(model, target, tokens)
    save_shared(model, tmp_path / "draft")
    with pytest.raises(InvalidRequest, match="holds draft-model weights: say which target"):
        export(tmp_path / "draft", tmp_path / "out")
    done = export(tmp_path / "draft", tmp_path / "out", target=place)
    written, _ = load_model(done.directory)
    ids = torch.tensor([[5, 6, 70, 8, 33, 2]])
    allowed = torch.arange(VOCABULARY) if tokens is None else tokens
    ours, theirs = model(ids).logits, written(ids).logits
    assert theirs.shape[-1] == VOCABULARY
    assert torch.allclose(ours, theirs[..., allowed], atol=1e-12)
    assert torch.equal(allowed[ours.argmax(-1)], theirs.argmax(-1))


def test_vocabularies_that_differ(place: Path, tmp_path: Path) -> None:
    tiny_model(llama_config(layers=1, heads=2)).save_pretrained(tmp_path / "draft")
    tiny_tokenizer().save_pretrained(tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(VocabularyMismatch):
        export(tmp_path / "draft", tmp_path / "out", target=place)
    done = export(tmp_path / "draft", tmp_path / "out", target=place, vocabulary="intersection")
    wanted = {"method": "draft_model", "num_speculative_tokens": 5, "use_heterogeneous_vocab": True}
    assert speculative(done, place) == wanted
    assert load_model(done.directory)[1].get_vocab() == words


def test_a_directory_of_an_earlier_run_is_not_written_over(place: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(place, tmp_path / "out")  # an empty one is taken
    with pytest.raises(InvalidRequest, match="exists"):
        export(place, tmp_path / "out")
    assert not [entry for entry in tmp_path.iterdir() if entry.name != "out"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"engine": "tgi"}, InvalidRequest, "engine must be 'vllm' or 'sglang'"),
        ({"depth": 0}, InvalidRequest, "depth must be a whole number >= 1"),
        ({"depth": 3}, InvalidRequest, "depth must be <= 2, the number of heads"),
        ({"dtype": "int8"}, InvalidRequest, "dtype must be a floating-point type"),
        ({"engine": "sglang"}, InvalidRequest, "SGLang has no Medusa"),
        ({"engine": "sglang", "vocabulary": "intersection"}, InvalidRequest, "no drafting across vocabularies"),
        ({"target": None}, InvalidRequest, "holds medusa weights.*they name 'smollm2'"),
        ({"target": "/nowhere"}, ModelNotFound, "/nowhere"),
        ({"target": "NARROW"}, InvalidCheckpoint, "hidden size 16"),
        ({"checkpoint": "/nowhere"}, ModelNotFound, "no checkpoint at '/nowhere'"),
        ({"checkpoint": "EMPTY"}, ModelNotFound, "nothing to export"),
        ({"checkpoint": "BROKEN"}, InvalidCheckpoint, "truncated or no file of weights"),
        ({"directory": "/dev/null/x"}, InvalidRequest, "cannot write"),
    ],
)
def test_what_cannot_be_exported(
    place: Path, tmp_path: Path, options: dict[str, Any], error: type[DraftwoodError], message: str
) -> None:
    medusa(tmp_path / "heads", shared=True)
    for name in ("EMPTY", "BROKEN"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "BROKEN" / "model.safetensors").write_bytes(b"\x10")
    tiny_model(llama_config(layers=1, heads=2)).save_pretrained(tmp_path / "NARROW")
    tiny_tokenizer().save_pretrained(tmp_path / "NARROW")
    before = sorted(tmp_path.iterdir())
    given = {"checkpoint": tmp_path / "heads", "directory": tmp_path / "out", "target": place} | options
    known = {name: tmp_path / name for name in ("EMPTY", "BROKEN", "NARROW")}
    given = {key: known.get(value, value) if isinstance(value, str) else value for key, value in given.items()}
    with pytest.raises(error, match=message):
        export(**given)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("vllm", {"fc_bias": True}, "no place for a bias of fc"),
        ("vllm", {"layers": (1, 1)}, "the same feature twice"),
        ("sglang", {"norm_before_residual": True}, "norm_before_residual"),
        ("sglang", {"layers": (0, 3)}, "the last block's output, feature 3"),
        ("sglang", {"layers": (1,)}, "an fc of a single feature"),
        ("sglang", {"own_embedding": True}, "an embedding of the head's own"),
    ],
)
def test_eagle_3_heads_that_an_engine_would_read_wrongly(
    place: Path, tmp_path: Path, target: Target, engine: Any, options: dict[str, Any], message: str
) -> None:
    save_head(third(target, **options), tmp_path / "head")
    with pytest.raises(InvalidRequest, match=message):
        export(tmp_path / "head", tmp_path / "out", engine=engine, target=place)
    assert not (tmp_path / "out").exists()


def test_a_biased_lm_head_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    medusa(tmp_path / "heads", shared=True)
    real = Target.from_pretrained

    def biased(*arguments: Any, **options: Any) -> Target:
        found = real(*arguments, **options)
        found.model.get_output_embeddings().bias = torch.nn.Parameter(torch.ones(VOCABULARY).double())
        return found

    monkeypatch.setattr(Target, "from_pretrained", biased)
    with pytest.raises(UnsupportedModel, match="has a bias"):
        export(tmp_path / "heads", tmp_path / "out", target=place)


def test_kinds_are_told_by_their_files(place: Path, tmp_path: Path, target: Target) -> None:
    medusa(tmp_path / "medusa", shared=True)
    save_head(make_head("eagle", target), tmp_path / "eagle")
    save_head(third(target), tmp_path / "eagle3", layout="speculators")
    for kind in ("medusa", "eagle", "eagle3"):
        assert recognise(tmp_path / kind, place) == kind
    assert (recognise(place), recognise(place, place), recognise("smollm2")) == ("target", "draft-model", "target")
    model = {f"model.{name}": weight for name, weight in load_file(tmp_path / "eagle" / "model.safetensors").items()}
    (tmp_path / "eagle" / "model.safetensors").unlink()
    torch.save(model, tmp_path / "eagle" / "pytorch_model.bin")
    assert recognise(tmp_path / "eagle", place) == "eagle"


def test_the_command_prints_the_command_to_serve(place: Path, tmp_path: Path, target: Target) -> None:
    save_head(make_head("eagle, no bias, reduced", target), tmp_path / "head")
    arguments = ["export", str(tmp_path / "head"), "--target", str(place), "--format", "vllm", "--depth", "2"]
    done = good(*arguments, "--out", str(tmp_path / "one"))
    settings = {"method": "eagle", "model": str(tmp_path / "one"), "num_speculative_tokens": 2}
    assert done.stdout == shlex.join(["vllm", "serve", str(place), "--speculative-config", json.dumps(settings)]) + "\n"
    assert f"eagle in {tmp_path / 'one'}" in done.stderr.replace("\n", "") and "any of the 96 tokens" in done.stderr
    told = json.loads(good(*arguments, "--out", str(tmp_path / "two"), "--json").stdout)
    library = export(tmp_path / "head", tmp_path / "three", target=place, depth=2)
    assert told["command"].replace("two", "three") == library.command and told["kind"] == "eagle"
    assert told["notes"] == list(library.notes) and told["directory"] == str(tmp_path / "two")
    assert dw.export is export
    check_refused(run(*arguments, "--out", tmp_path / "one"), "exists")
