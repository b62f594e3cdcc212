"""What `draftwood export` writes, run by vLLM: the texts are plain decoding's, and as many drafts are accepted as here.

    python -m benchmarks.serving VLLM_PYTHON [--prompts 4] [--tokens 40] [--kinds medusa,eagle,eagle3,draft-model]

VLLM_PYTHON is the interpreter of an environment in which vLLM is installed. The shipped heads are exported. All is
float32 and greedy, a chain of drafts. Results are JSON lines; whatever fails ends the run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import draftwood as dw
from draftwood.core.stats import RowStats
from draftwood.study.default_prompts import PACKAGED

SHIPPED = Path(__file__).parents[1] / "heads" / "smollm2-135m-instruct"
KINDS = {"medusa": 3, "eagle": 4, "eagle3": 4, "draft-model": 3}
"""How many tokens are drafted at a time."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="the interpreter of vLLM's environment")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(KINDS))
    given = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        served = dw.export("smollm2", place / "target", dtype="float32").directory
        target = dw.Target.from_pretrained(served)
        chats = [[{"role": "user", "content": text}] for _, text in PACKAGED[: given.prompts]]
        plain = dw.Decoder(target)
        prompts = [plain.encode(chat) for chat in chats]
        wanted = [one.tokens for one in plain.generate(prompts, max_new_tokens=given.tokens)]
        kinds = given.kinds.split(",")
        sources = {kind: SHIPPED / kind for kind in kinds}
        exported = {
            kind: dw.export(source, place / kind, target=served, depth=KINDS[kind], dtype="float32")
            for kind, source in sources.items()
        }
        settings = [json.loads(shlex.split(done.command)[-1]) for done in exported.values()]
        asked = {"target": str(served), "speculative": settings, "prompts": prompts, "tokens": given.tokens}
        told = run(given.python, asked, place / "answers.jsonl")
        for kind, theirs in zip(kinds, told, strict=True):
            line: dict[str, Any] = {"kind": kind, "depth": KINDS[kind], "notes": exported[kind].notes}
            line["vllm same text"] = [one == other for one, other in zip(theirs["texts"], wanted, strict=True)]
            counts = theirs["counts"]
            line["vllm accepted to depth"] = shares(counts["accepted_tokens_per_pos"], counts["drafts"])
            for name, checkpoint in (("draftwood", exported[kind].directory), ("before the export", sources[kind])):
                texts, stats = ours(target, kind, checkpoint, prompts, given.tokens)
                line[f"{name}: same text"] = texts == wanted
                line[f"{name}: accepted to depth"] = shares(stats.accepted_by_depth, stats.rounds)
            print(json.dumps(line), flush=True)


def run(python: str, asked: dict[str, Any], answers: Path) -> list[dict[str, Any]]:
    """Lets vLLM decode with what the printed commands tell it; an answer for each."""
    words = [python, str(Path(__file__).with_name("serving_vllm.py"))]
    subprocess.run(words, input=json.dumps(asked | {"answer": str(answers)}), text=True, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in answers.read_text().splitlines()]


def shares(accepted: list[int], rounds: int) -> list[float]:
    """Returns how many rounds of all accepted each depth."""
    return [round(count / rounds, 3) for count in accepted]


def ours(target: dw.Target, kind: str, checkpoint: Path, prompts: list[Any], tokens: int) -> tuple[Any, RowStats]:
    """Decodes with the drafter of that name, a chain as deep as vLLM's; returns the texts and all counts."""
    depth = KINDS[kind]
    options: dict[str, Any] = {"checkpoint": checkpoint, "tree": "chain", "depth": depth}
    if kind == "medusa":
        options = {"checkpoint": checkpoint, "tree": [(0,) * level for level in range(1, depth + 1)]}
    if kind == "draft-model":
        options = {"model": checkpoint, "gamma": depth}
    made = dw.Decoder(target, kind, drafter_options=options).generate(prompts, max_new_tokens=tokens)
    return [one.tokens for one in made], RowStats().merge(one.stats for one in made)


if __name__ == "__main__":
    main()
