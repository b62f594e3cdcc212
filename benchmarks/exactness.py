"""Writes docs/exactness.md: what is exact, how it was established, and the figures.

python -m benchmarks.exactness [--fuzz N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.architectures import families
from tests.core.test_architectures import NOT_BUILT, Outcome, examine
from tests.core.test_sampling import CASES, WATERMARKS
from tests.verify.enumeration import LOSSLESS, SCHEMES, SHAPES, World, expected_tau, worst_total_variation

PAGE = Path(__file__).parents[1] / "docs" / "exactness.md"


def passed(*arguments: str, fuzz: int = 0) -> tuple[int, int]:
    """Runs tests, with `fuzz` cases where they count them, and returns how many passed of how many."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "DRAFTWOOD_FUZZ": str(fuzz), "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=False, env=environment).stdout
    words = output.split()
    count = {
        word.strip(","): int(words[at - 1]) for at, word in enumerate(words) if word.strip(",") in ("passed", "failed")
    }
    return count.get("passed", 0), count.get("passed", 0) + count.get("failed", 0)


def variation_table() -> list[str]:
    lines = ["| rule | how the candidates were drafted | worst total variation |", "| --- | --- | --- |"]
    return lines + [f"| {rule} | {law} | {worst:.1e} |" for (rule, law), worst in worst_total_variation().items()]


def traversal_table() -> list[str]:
    lines = ["| tree | tau, rejection | tau, traversal | gain |", "| --- | --- | --- | --- |"]
    scheme = SCHEMES["without replacement"]
    for name, shape in SHAPES.items():
        if not shape.parents:
            continue
        worlds = [World(3, seed=seed) for seed in range(8 if len(shape.parents) < 5 else 3)]
        means = {
            rule: sum(expected_tau(LOSSLESS[rule], world, shape, scheme) for world in worlds) / len(worlds)
            for rule in ("rejection", "traversal")
        }
        gain = means["traversal"] / means["rejection"] - 1
        lines.append(f"| {name} | {means['rejection']:.3f} | {means['traversal']:.3f} | {100 * gain:+.1f} % |")
    return lines


def architecture_table(outcomes: dict[str, Outcome]) -> list[str]:
    reasons = {name: reason for reason, names in NOT_BUILT.items() for name in names}
    lines = ["| family | outcome | remark |", "| --- | --- | --- |"]
    for name, outcome in outcomes.items():
        remark = outcome.detail if outcome.status == "passed" else reasons.get(name, outcome.detail).split("; ")[0]
        lines.append(f"| {name} | {outcome.status} | {remark.replace('|', '/')} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fuzz", type=int, default=10_000, help="cases to run")
    cases = parser.parse_args().fuzz
    torch.set_num_threads(1)  # two would only wait for each other on models this small
    transformers.logging.set_verbosity_error()
    variations = variation_table()
    outcomes = {family: examine(family) for family in families()}
    counts = Counter(outcome.status for outcome in outcomes.values())
    settings = passed("tests/core/test_sampling.py", "tests/test_processors.py")
    fuzzed = passed("tests/fuzz", fuzz=cases)
    worst = max(worst_total_variation().values())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(
        "\n".join(
            [
                "# Exactness",
                "",
                "This page is written by `python -m benchmarks.exactness`; "
                f"last with torch {torch.__version__} and transformers {transformers.__version__}.",
                "",
                "| figure | value |",
                "| --- | --- |",
                f"| total variation of the worst rule and law | {worst:.1e} |",
                f"| architectures passed / tried | {counts['passed']} / {len(outcomes)} |",
                f"| of the others: refused by name / not built small | {counts['refused']} / {counts['not built']} |",
                f"| sampling settings tried, each on trees and through the engine | {len(CASES) + len(WATERMARKS)} |",
                f"| tests of them passed / run | {settings[0]} / {settings[1]} |",
                f"| fuzz cases run | {cases:,} |",
                f"| fuzz properties that held / tried | {fuzzed[0]} / {fuzzed[1]} |",
                "",
                "## Rules",
                "",
                "Each rule is run once for every combination of its random decisions, over every tree that the drafter "
                "can draw, on random toy models of 3 to 4 tokens. The law of the committed text, continued by the "
                "target, is compared with the target's. `typical` is lossy and is tested against its definition.",
                "",
                *variations,
                "",
                "## What traversal gains over rejection",
                "",
                "Expected tokens a round on the same drafts, computed exactly by the same enumeration, mean over "
                "random toy models. On chosen candidates the two rules accept alike; the gain is on drawn ones.",
                "",
                *traversal_table(),
                "",
                "## Architectures",
                "",
                "A tiny random model of every causal language model family in the installed transformers. *Passed* "
                "means: in a ragged batch, behind a kept path with a gap, tree logits equal those of the paths, with "
                "windows shorter than the tree, and greedy text equals `generate`. *Refused* means an "
                "`UnsupportedModel` error when the target is built.",
                "",
                *architecture_table(outcomes),
                "",
            ]
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
