"""Export to serving engines: directories that vLLM and SGLang load, and the command that serves them.

Heads and draft models keep drafting what they draft here, but the engines draft chains (SGLang trees, for EAGLE). The
module knows no drafter at work; what a checkpoint is, it tells by the files, as the drafters' loaders do.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from .core.checks import whole_number
from .core.errors import InvalidCheckpoint, InvalidRequest, ModelNotFound, UnsupportedModel, VocabularyMismatch
from .core.loading import DEMO_MODEL, parse_dtype
from .core.target import Target
from .drafters.checkpoint_files import UNREADABLE, check_tensors, find_checkpoint, read_json, unreadable
from .drafters.eagle.formats import load_head
from .drafters.eagle.serving import HOT_TOKENS, Engine, save_for_engine
from .drafters.medusa.formats import load_heads, save_heads
from .drafters.medusa.network import MedusaHeads
from .drafters.shared_model import draft_tokens, is_shared, load_shared
from .drafters.vocabulary import VocabularyPolicy, match_vocabularies

Kind = Literal["medusa", "eagle", "eagle3", "draft-model", "target"]

DEPTH = 5
"""Tokens that EAGLE heads and draft models are told to draft."""

_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_FETCHED = (("*.json", "*.safetensors", "*.jinja"), ("medusa_lm_head.pt", "pytorch_model*.bin"))
_MEDUSA = re.compile(r"medusa_heads?\..*|\d+\.\d+\.(linear\.)?(weight|bias)|blocks\.\d+\.layers\.\d+\..*")
_TREE = {"topk": 4, "nodes": 8}  # what SGLang chooses for Llama


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        kind: what the checkpoint was.
        directory: what the engine loads.
        command: serves it, for a shell.
        notes: what the engine does otherwise than the drafter here.
    """

    kind: Kind
    directory: Path
    command: str
    notes: tuple[str, ...] = ()


def export(
    checkpoint: str | Path,
    directory: str | Path,
    *,
    engine: Engine = "vllm",
    target: str | Path | None = None,
    depth: int | None = None,
    vocabulary: VocabularyPolicy = "strict",
    dtype: str | None = None,
) -> Exported:
    """Writes heads, a draft model or a target as a serving engine loads them.

    Args:
        checkpoint: Medusa or EAGLE heads, a draft model, or a target: a directory or hub id; for models also a `.gguf`
            file or `"smollm2"`.
        directory: to write; must not exist or be empty. It appears whole or not at all.
        engine: `"vllm"` or `"sglang"`.
        target: the model that heads or a draft model draft for; None exports a target itself.
        depth: how many tokens ahead are drafted; None for all Medusa heads, 5 of the others.
        vocabulary: `"intersection"` has vLLM draft the tokens that target and draft model share, where their
            vocabularies differ.
        dtype: of the weights; None for the type in which they are stored.

    Raises:
        InvalidRequest: an option that cannot work, a directory that is there, or something that the engine lacks.
        ModelNotFound: there is no such checkpoint or target.
        InvalidCheckpoint: files are broken, or made for another target.
        UnsupportedModel: the target's LM head is no matrix that could be copied.
        VocabularyMismatch: the draft model's vocabulary is another one.
    """
    if engine not in ("vllm", "sglang"):
        raise InvalidRequest(f"engine must be 'vllm' or 'sglang', got {engine!r}")
    if vocabulary == "intersection" and engine != "vllm":
        raise InvalidRequest("SGLang has no drafting across vocabularies; vocabulary must be 'strict'")
    depth = None if depth is None else whole_number("depth", depth)
    parse_dtype(dtype)
    place = Path(directory).expanduser().resolve()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise InvalidRequest(f"{str(place)!r} exists; give a directory that is yet to be made")
    kind = recognise(checkpoint, target)
    job = _Job(checkpoint, place, engine, depth, dtype)
    if target is None:
        return job.target()
    model = Target.from_pretrained(target, dtype="auto")
    served = _served(target, model)
    if kind == "medusa":
        return job.medusa(model, served)
    if kind == "draft-model":
        return job.draft_model(model, served, vocabulary)
    return job.eagle(model, served, kind)


def recognise(checkpoint: str | Path, target: str | Path | None = None) -> Kind:
    """Tells by its files what a checkpoint is.

    Args:
        checkpoint: as of `export`.
        target: as of `export`; a causal language model is a draft model where there is one, and heads need one.

    Raises:
        ModelNotFound: there is nothing that can be exported.
        InvalidCheckpoint: a file is broken.
        InvalidRequest: heads without a target.
    """
    model: Kind = "target" if target is None else "draft-model"
    if checkpoint == DEMO_MODEL or (Path(checkpoint).suffix == ".gguf" and Path(checkpoint).expanduser().is_file()):
        return model
    folder = find_checkpoint(checkpoint, "checkpoint", _FETCHED)
    names = {name.removeprefix("model.") for name in _weight_names(folder)}
    kind = model
    if any(_MEDUSA.fullmatch(name) for name in names):
        kind = "medusa"
    elif names & {"fc.weight", "fusion_fc.weight"}:
        kind = "eagle3" if any(name.endswith("hidden_norm.weight") for name in names) else "eagle"
    elif not names or not (folder / "config.json").is_file():
        raise ModelNotFound(
            f"nothing to export in {str(folder)!r}: Medusa heads, EAGLE heads and models are config.json beside one of "
            f"{', '.join(_FILES)}; layers to skip or to exit at have no counterpart in vLLM and SGLang"
        )
    if target is None and (kind != "target" or is_shared(folder)):
        kind = "draft-model" if kind == "target" else kind
        made_for = read_json(folder / "config.json").get("base_model_name_or_path")
        named = f"; they name {made_for!r}" if made_for else ""
        raise InvalidRequest(f"{str(folder)!r} holds {kind} weights: say which target they draft for, target={named}")
    return kind


@dataclass(frozen=True)
class _Job:
    """An export of which all is known but the target."""

    checkpoint: str | Path
    place: Path
    engine: Engine
    depth: int | None
    dtype: str | None

    def target(self) -> Exported:
        model = Target.from_pretrained(self.checkpoint, dtype=self.dtype or "auto")
        with _appearing(self.place) as partial:
            _save_model(model.model, model.tokenizer, partial)
        return Exported("target", self.place, _command(self.engine, str(self.place)))

    def medusa(self, target: Target, served: str) -> Exported:
        if self.engine == "sglang":
            raise InvalidRequest(
                "SGLang has no Medusa; export these heads with vllm, or train an EAGLE head for SGLang"
            )
        width, vocabulary = target.config.hidden_size, target.vocabulary_size
        heads = load_heads(self.checkpoint, width=width, vocabulary=vocabulary).heads
        depth = heads.config.heads if self.depth is None else self.depth
        if depth > heads.config.heads:
            raise InvalidRequest(f"depth must be <= {heads.config.heads}, the number of heads, got {depth}")
        output: Any = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if heads.config.shared and getattr(output, "bias", None) is not None:
            raise UnsupportedModel(
                "the target's LM head, which these heads share, has a bias, and vLLM's Medusa has none; train heads "
                "with LM heads of their own"
            )
        if self.dtype is not None:
            heads = heads.to(parse_dtype(self.dtype))
        tokens = heads.draft_tokens
        with _appearing(self.place) as partial:
            save_heads(_with_all_tokens(heads), partial, layout="vllm", base_model=served, target=target)
            if tokens is not None and heads.config.shared:
                file = partial / "model.safetensors"
                weights = load_file(file)
                rows = weights["lm_head.weight"]
                weights["lm_head.weight"] = _all_rows(rows[tokens], tokens, vocabulary)
                save_file(weights, file, metadata={"format": "pt"})
        return Exported("medusa", self.place, _command("vllm", served, "medusa", self.place, depth))

    def eagle(self, target: Target, served: str, kind: Kind) -> Exported:
        folder = find_checkpoint(self.checkpoint, "head", _FETCHED)
        settings = read_json(folder / "config.json")
        stored = parse_dtype(self.dtype or settings.get("dtype") or settings.get("torch_dtype"))
        head = load_head(folder, target, dtype=stored if isinstance(stored, torch.dtype) else None)
        depth = DEPTH if self.depth is None else self.depth
        notes = []
        tokens = head.draft_tokens
        reduced = kind == "eagle" and tokens is not None
        if reduced and tokens is not None and self.engine == "vllm":
            notes.append(
                f"vLLM's EAGLE-1 heads draft any of the {target.vocabulary_size} tokens, not only the {len(tokens)} of "
                "this one; texts stay exact, but acceptance may differ"
            )
        with _appearing(self.place) as partial:
            options: dict[str, Any] = {"layers": target.layers, "target_name": served, "depth": depth}
            save_for_engine(head, partial, self.engine, **options)
        more = ["--speculative-token-map", str(self.place / HOT_TOKENS)] if reduced else []
        return Exported(kind, self.place, _command(self.engine, served, kind, self.place, depth, more), tuple(notes))

    def draft_model(self, target: Target, served: str, vocabulary: VocabularyPolicy) -> Exported:
        draft = self._load_draft(target)
        try:
            match_vocabularies(target, draft, "strict")
            same = True
        except VocabularyMismatch:
            if vocabulary == "strict":
                raise
            same = False
        size = target.vocabulary_size
        if same and draft.vocabulary_size != size:
            _resize(draft.model, size)
        depth = DEPTH if self.depth is None else self.depth
        with _appearing(self.place) as partial:
            # SGLang compares all of both tokenizers; that of the target says the same of every token that both have.
            _save_model(draft.model, target.tokenizer if same else draft.tokenizer, partial)
        command = _command(self.engine, served, "draft-model", self.place, depth, across=not same)
        return Exported("draft-model", self.place, command)

    def _load_draft(self, target: Target) -> Target:
        if not is_shared(self.checkpoint):
            return Target.from_pretrained(self.checkpoint, dtype=self.dtype or "auto")
        dtype = None if self.dtype is None else parse_dtype(self.dtype)
        model = load_shared(self.checkpoint, target, dtype if isinstance(dtype, torch.dtype) else None)
        return Target(_standalone(model, target), target.tokenizer)


def _command(
    engine: Engine,
    served: str,
    kind: Kind = "target",
    place: Path | None = None,
    depth: int = 0,
    more: Iterable[str] = (),
    across: bool = False,
) -> str:
    """Returns the command line that serves a target with what was exported."""
    if engine == "vllm":
        words = ["vllm", "serve", served]
        if kind != "target":
            method = {"draft-model": "draft_model"}.get(kind, kind)
            settings = {"method": method, "model": str(place), "num_speculative_tokens": depth}
            settings |= {"use_heterogeneous_vocab": True} if across else {}
            words += ["--speculative-config", json.dumps(settings)]
        return shlex.join(words)
    words = ["python", "-m", "sglang.launch_server", "--model-path", served]
    if kind == "target":
        return shlex.join(words)
    algorithm = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft-model": "STANDALONE"}[kind]
    topk = 1 if kind == "draft-model" else _TREE["topk"]
    room = depth + 1 if topk == 1 else min(_TREE["nodes"], 1 + topk + (depth - 1) * topk * topk)
    words += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(place)]
    words += ["--speculative-num-steps", str(depth), "--speculative-eagle-topk", str(topk)]
    return shlex.join([*words, "--speculative-num-draft-tokens", str(room), *more])


def _served(source: str | Path, target: Target) -> str:
    """Returns by what name an engine can load a target: a directory or hub id, never a GGUF file."""
    path = Path(source).expanduser()
    if source == DEMO_MODEL or path.is_file():
        path = Path(str(target.model.config.name_or_path))  # the converted copy
    return str(path.resolve()) if path.is_dir() else str(source)


def _weight_names(folder: Path) -> set[str]:
    """Returns the names of the weights in the first file of weights, or list of files, that there is."""
    for name in _FILES:
        file, index = folder / name, folder / f"{name}.index.json"
        if index.is_file():
            return {*read_json(index).get("weight_map", {})}
        if not file.is_file():
            continue
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    return {*opened.keys()}
            mapped = zipfile.is_zipfile(file)
            return {*check_tensors(file, torch.load(file, map_location="cpu", weights_only=True, mmap=mapped))}
        except InvalidCheckpoint:
            raise
        except UNREADABLE as error:
            raise unreadable(file, error) from error
    return set()


def _with_all_tokens(heads: MedusaHeads) -> MedusaHeads:
    """Returns heads over the whole vocabulary that draft the same, but for an LM head that they share.

    vLLM 0.32 knows a reduced vocabulary, `token_map`, for a shared LM head alone, and there its own check that all
    weights were loaded stops it.
    """
    tokens, rows = heads.draft_tokens, heads.lm_heads
    if tokens is None:
        return heads
    whole = MedusaHeads(heads.config)
    whole.blocks = heads.blocks
    if rows is not None:
        whole.lm_heads = nn.Parameter(torch.stack([_all_rows(own, tokens, heads.config.vocabulary) for own in rows]))
    return whole


def _all_rows(rows: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Returns an LM head [size, width] whose best token is that of `rows`, [tokens, width] for these token ids.

    All other tokens get the mean of the rows: their logit is the mean of the logits, which never is the largest.
    """
    rows = rows.detach()
    mean = rows.float().mean(0).to(rows.dtype)
    return mean.repeat(size, *[1] * mean.dim()).index_copy_(0, tokens, rows)


@torch.no_grad()
def _resize(model: PreTrainedModel, size: int) -> None:
    """Cuts off or adds ids at the end of a model's vocabulary, of which the new ones are never the best."""
    embedding: Any = model.get_input_embeddings()
    had = embedding.weight.shape[0]
    model.resize_token_embeddings(size, mean_resizing=False)
    if size > had:
        output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        for name, weight in [*output.named_parameters(recurse=False)]:
            weight.copy_(_all_rows(getattr(output, name)[:had], torch.arange(had), size))


@torch.no_grad()
def _standalone(model: PreTrainedModel, target: Target) -> PreTrainedModel:
    """Returns a draft model with copies of what it shares with its target, over all tokens; it drafts the same."""
    embedding: Any = target.model.get_input_embeddings()
    output: Any = target.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = config.get_text_config(decoder=True).tie_word_embeddings = False
    whole = copy.deepcopy(model)
    whole.config = config
    output = copy.deepcopy(output)
    tokens = draft_tokens(model)
    for name, weight in [*output.named_parameters(recurse=False)]:
        rows = weight if tokens is None else _all_rows(weight[tokens], tokens, target.vocabulary_size)
        setattr(output, name, nn.Parameter(rows.clone()))
    whole.set_input_embeddings(copy.deepcopy(embedding).to(model.dtype))
    whole.set_output_embeddings(output.to(model.dtype))  # type: ignore[no-untyped-call]
    return whole


def _save_model(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Writes a model and, where there is one, its tokenizer, as every loader of the field reads them."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        copy.copy(tokenizer).save_pretrained(folder)


@contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """Gives a directory beside `place` to write to, which then takes its place."""
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(place)
    except OSError as error:
        raise InvalidRequest(f"cannot write {str(place)!r}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
