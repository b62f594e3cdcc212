"""Heads trained by us and by PyPI `economize`, for the same minutes on the same conversations and threads.

    python -m benchmarks.peer_training chats.jsonl --minutes 10 [--kind medusa] [--kind eagle3]

The file holds a conversation a line, `{"messages": [...]}`; the last ones are held out. How many steps fit into the
minutes, a few steps tell beforehand. Whoever trained them, heads are measured by the same code on the same held-out
tokens: how often each head is right, given the true text before it, the tau that follows for the best tree, and the tau
of decoding answers to the held-out questions with that tree. Results are printed as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import draftwood as dw
from draftwood.core.loading import DEMO_MODEL
from draftwood.core.views import head_of
from draftwood.drafters.eagle.config import default_layers, layer_config
from draftwood.drafters.eagle.drafter import Eagle
from draftwood.drafters.eagle.network import Eagle3Head
from draftwood.drafters.medusa.drafter import Medusa
from draftwood.drafters.medusa.network import MedusaConfig, MedusaHeads
from draftwood.drafters.medusa.trees import greedy_tree
from draftwood.training.data import Batch, Sequences, pack, read_documents
from draftwood.training.eagle import EagleRecipe, train_eagle
from draftwood.training.eagle_losses import Evaluation as EagleEvaluation
from draftwood.training.eagle_losses import feature_names
from draftwood.training.features import OnlineFeatures
from draftwood.training.loop import Schedule
from draftwood.training.medusa import MedusaRecipe, train_medusa
from draftwood.training.medusa_losses import Evaluation as MedusaEvaluation

from .peers.assets import save_model
from .peers.protocol import ROOT

NODES = 12
DEPTH = 4
PYTHON = ROOT / ".venv-peers-economize" / "bin" / "python"
KINDS = ("medusa", "medusa-shared", "eagle3")
"""Medusa heads have an LM head each, which is everyone's default, or use the target's."""


def main() -> None:
    given = parse()
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    model = save_model(given.model, given.out.parent / f"model-{Path(given.model).name}")
    target = dw.Target.from_pretrained(str(model), dtype="float32")
    learnt, held = split_chats(given)
    text = pack(read_documents(held, target.tokenizer), given.length)
    questions = first_questions(held, given.prompts)
    for kind in given.kind or KINDS:
        ours = train_ours(kind, target, learnt, given)
        show("draftwood", kind, *ours, target, text, questions, given)
        try:
            theirs = train_theirs(kind, model, target, learnt, given)
        except (subprocess.CalledProcessError, OSError, RuntimeError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
            print(json.dumps({"trainer": "economize", "kind": kind, "error": said}), flush=True)
        else:
            show("economize", kind, *theirs, target, text, questions, given)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chats", type=Path)
    parser.add_argument("--model", default=DEMO_MODEL, help="the packaged one, or a directory")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--kind", action="append", choices=KINDS, help="all by default")
    parser.add_argument("--held-out", type=int, default=64, help="conversations to measure on")
    parser.add_argument("--prompts", type=int, default=8, help="held-out questions to decode answers to; 0 for none")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--batch-size", type=int, default=2, help="sequences in a step, ours and theirs")
    parser.add_argument("--length", type=int, default=256, help="most tokens in a sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--draft-vocabulary", type=int, default=8192, help="of EAGLE-3, ours and theirs")
    parser.add_argument("--probe", type=int, default=5, help="steps that tell how many fit, at least 3")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "peer-training", help="directory, new at each run")
    return parser.parse_args()


def split_chats(given: argparse.Namespace) -> tuple[Path, Path]:
    """Writes the conversations to learn from and the held-out ones to files of their own."""
    lines = [line for line in given.chats.read_text(encoding="utf-8").splitlines() if line.strip()]
    files = given.out / "learnt.jsonl", given.out / "held.jsonl"
    for file, part in zip(files, (lines[: -given.held_out], lines[-given.held_out :]), strict=True):
        file.write_text("\n".join(part) + "\n", encoding="utf-8")
    return files


def first_questions(held: Path, count: int) -> list[list[dict[str, str]]]:
    """Returns the first user turn of so many conversations, with what is said before it."""
    found = []
    for line in held.read_text(encoding="utf-8").splitlines()[:count]:
        messages = json.loads(line)["messages"]
        answer = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
        found.append(messages[:answer])
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    done = work()
    return time.perf_counter() - start, done


def train_ours(kind: str, target: dw.Target, learnt: Path, given: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Trains ours, with the settings of `draftwood train`."""
    data = pack(read_documents(learnt, target.tokenizer, on_skip=lambda _: None), given.length)

    def run(steps: int, output: Path, on_step: Callable[[dict[str, Any]], None] | None = None) -> Any:
        shape: dict[str, Any] = {"batch_size": given.batch_size, "checkpoint_every": 10**9}
        if kind != "eagle3":
            recipe = MedusaRecipe(heads=given.heads, shared=kind == "medusa-shared", held_out=1, nodes=NODES)
            schedule = Schedule(steps, learning_rate=1e-3, **shape)
            return train_medusa(target, data, output, schedule, recipe, on_step=on_step)
        vocabulary = min(given.draft_vocabulary, target.vocabulary_size)
        recipe3 = EagleRecipe(version=3, draft_vocabulary=vocabulary, held_out=1, depth=DEPTH, nodes=NODES)
        schedule = Schedule(steps, learning_rate=5e-5, warmup=min(steps // 20, 2000), clip=0.5, **shape)
        return train_eagle(target, data, output, schedule, recipe3, on_step=on_step)

    ends: list[float] = []
    run(given.probe + 1, given.out / f"ours-{kind}-probe", lambda _: ends.append(time.perf_counter()))
    # The first step is no measure, and the last one has the evaluation in it.
    steps = max(int(60 * given.minutes / ((ends[-2] - ends[0]) / (given.probe - 1))), 1)
    took, head = timed(lambda: run(steps, given.out / f"ours-{kind}"))
    return head, {"steps": steps, "seconds": round(took, 1)}


def train_theirs(
    kind: str, model: Path, target: dw.Target, learnt: Path, given: argparse.Namespace
) -> tuple[Any, dict[str, Any]]:
    """Trains theirs in its virtual environment and reads the heads into our networks."""
    names = ("threads", "batch_size", "length", "heads", "draft_vocabulary", "probe")
    options = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(given, name)))]
    place = given.out / f"economize-{kind}"
    command = [str(PYTHON), "-m", "benchmarks.peers.train_economize", str(model), str(learnt), str(place), kind]
    limits = {"OMP_NUM_THREADS": str(given.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, str(given.minutes), *options],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | limits,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    weights = {
        key: value
        for file in sorted(Path(told["final"]).glob("*.safetensors"))
        for key, value in load_file(file).items()
    }
    head = eagle3_of(weights, target) if kind == "eagle3" else medusa_of(weights, target, shared=kind != "medusa")
    return head, {"steps": told["steps"], "seconds": round(told["seconds"], 1)}


def medusa_of(weights: dict[str, torch.Tensor], target: dw.Target, *, shared: bool) -> MedusaHeads:
    """Returns economize's Medusa heads as ours. Shared ones read states before the final norm: see `measure`."""
    count = 1 + max(int(key.split("heads.")[1].split(".")[0]) for key in weights)
    heads = MedusaHeads(MedusaConfig(count, 1, target.config.hidden_size, target.vocabulary_size, shared))
    with torch.no_grad():
        for key, value in weights.items():
            number, part = key.split("heads.")[1].split(".", 1)
            if part == "proj.weight" and heads.lm_heads is not None:
                heads.lm_heads[int(number)].copy_(value)
            else:
                getattr(heads.blocks[0], part.rsplit(".", 1)[1])[int(number)].copy_(value)
    return heads.requires_grad_(False).eval()


def eagle3_of(weights: dict[str, torch.Tensor], target: dw.Target) -> Eagle3Head:
    """Returns economize's EAGLE-3 head as ours, with its defaults: the target's sizes, its rotary embeddings."""
    ours = {}
    for key, value in weights.items():
        name = key.removeprefix("techniques.").removeprefix("eagle3.")
        ours["midlayer." + name.removeprefix("layer.") if name.startswith("layer.") else name] = value
    offsets, _ = ours.pop("d2t"), ours.pop("t2d")
    tokens = torch.arange(len(offsets)) + offsets
    everything = len(tokens) == target.vocabulary_size
    head = Eagle3Head(
        layer_config(target), layers=sorted({*default_layers(target)}), draft_tokens=None if everything else tokens
    )
    head.load_state_dict(ours)
    head.attach(target)
    return head.requires_grad_(False).eval()


class BeforeNorm:
    """The states that economize's shared Medusa heads read, in the place of normalised ones."""

    def __init__(self, target: dw.Target) -> None:
        self._features, self._layer = OnlineFeatures(target, [target.layers]), target.layers

    def __call__(self, batch: Batch) -> dict[Any, torch.Tensor]:
        return {"last": self._features(batch)[self._layer]}


def evaluation_of(head: Any, target: dw.Target, text: Sequences, *, before_norm: bool) -> Any:
    """Returns what measures a head on the held-out text."""
    if isinstance(head, Eagle3Head):
        features = OnlineFeatures(target, feature_names(head))
        return EagleEvaluation(head, features, head_of(target), text, 1, DEPTH, NODES)
    lm_head = head_of(target)
    if not before_norm:
        return MedusaEvaluation(head, OnlineFeatures(target, ["last"]), lm_head, text, 1, NODES)

    def with_norm(states: torch.Tensor) -> torch.Tensor:
        return lm_head(target.decoder.norm(states))

    return MedusaEvaluation(head, BeforeNorm(target), with_norm, text, 1, NODES)


def show(
    trainer: str,
    kind: str,
    head: Any,
    trained: dict[str, Any],
    target: dw.Target,
    text: Sequences,
    questions: list[Any],
    given: argparse.Namespace,
) -> None:
    """Measures a head and prints what comes of it."""
    before_norm = trainer != "draftwood" and kind == "medusa-shared"
    evaluation = evaluation_of(head, target, text, before_norm=before_norm)
    figures = {name: round(value, 4) for name, value in evaluation().items() if "loss" not in name}
    # Our drafter gives heads normalised states; what reads others cannot be decoded with.
    tau = None if before_norm or not questions else decoded_tau(head, evaluation.accuracies, target, questions, given)
    result = {"trainer": trainer, "kind": kind, "minutes": given.minutes, **trained, **figures, "decoded tau": tau}
    print(json.dumps(result), flush=True)


def decoded_tau(
    head: Any, accuracies: list[list[float]], target: dw.Target, questions: list[Any], given: argparse.Namespace
) -> float:
    """Returns the mean tokens a round commits in greedy answers."""
    if isinstance(head, Eagle3Head):
        drafter: Any = Eagle(checkpoint=head, depth=DEPTH, nodes=NODES)
    else:
        tree = greedy_tree(accuracies, NODES, head.config.heads).paths if any(accuracies[0]) else [(0,)]
        drafter = Medusa(checkpoint=head, tree=tree)
    decoder = dw.Decoder(target, drafter)
    rows = [decoder.generate(question, max_new_tokens=given.tokens).stats for question in questions]
    return round(sum(row.committed for row in rows) / max(sum(row.rounds for row in rows), 1), 3)


if __name__ == "__main__":
    main()
