"""The commands of studies: `compare`, `report`, `verify`, `theory`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .cli_common import Device, DType, JsonFlag, Model, Packed, err, out, print_json, progress_bar, remark
from .core.errors import InvalidRequest
from .core.target import Target
from .study import run
from .study import theory as theories
from .study.environment import default_device, launched
from .study.prompts import PromptSet, load_prompts
from .study.report import Report
from .study.spec import DrafterSpec, parse_specs, parse_value
from .study.verification import Verification, verify_drafters

Drafters = Annotated[
    list[str] | None,
    typer.Argument(help="Drafters: `prompt-lookup`, `prompt-lookup:gamma=8,max_ngram=3`; `gamma=4|8` is a grid."),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        help="question.jsonl, a text file (a prompt a line), or dataset:NAME,split=...,column=...; repeatable."
    ),
]
Limit = Annotated[int | None, typer.Option(help="Most prompts, from all categories in turn.")]
Tokens = Annotated[int, typer.Option(help="New tokens a prompt.")]
BatchSizes = Annotated[
    list[int] | None, typer.Option("--batch-size", help="Prompts decoded together; may be repeated.  [default: 1]")
]
Seed = Annotated[int, typer.Option(help="Of all randomness.")]
ChatFlag = Annotated[
    bool | None, typer.Option("--chat/--raw", help="Use the chat template, or not; default: if there is one.")
]

DEMO_PROMPTS, DEMO_TOKENS = 6, 40
DEMO_DRAFTERS = ["prompt-lookup"]
TREE_NODES = 16


def compare(
    model: Model,
    drafters: Drafters = None,
    prompts: Prompts = None,
    limit: Limit = None,
    target: Annotated[list[str] | None, typer.Option(help="A further model to compare on; may be repeated.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Acceptance rule; may be repeated.  [default: auto]")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="0 is greedy; may be repeated.  [default: 0]")] = None,
    batch_size: BatchSizes = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="New tokens a prompt.  [default: 64]")] = None,
    repeats: Annotated[int, typer.Option(help="How often everything is run.")] = 1,
    seed: Seed = 0,
    chat: ChatFlag = None,
    dtype: DType = None,
    device: Device = None,
    packed: Packed = False,
    study: Annotated[
        Path | None,
        typer.Option("--out", help="Directory of the study: finished cells are kept, and a killed study goes on."),
    ] = None,
    by_category: Annotated[bool, typer.Option("--by-category", help="One row a category.")] = False,
    demo: Annotated[bool, typer.Option("--demo", help="A short run on a few packaged prompts.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Compare drafters with plain decoding on the same prompts, in the same run."""
    if demo and limit is None:
        limit = DEMO_PROMPTS
    if max_new_tokens is None:
        max_new_tokens = DEMO_TOKENS if demo else 64
    rank, processes = launched()
    if processes > 1 and study is None:
        raise InvalidRequest(f"{processes} processes share a study through its directory: give --out")
    with progress_bar() as progress:
        found = run.compare(
            [model, *(target or [])],
            _specs(drafters),
            prompts=_prompt_sets(prompts),
            limit=limit,
            rules=rule or ["auto"],
            temperatures=temperature or [0.0],
            batch_sizes=batch_size or [1],
            max_new_tokens=max_new_tokens,
            repeats=repeats,
            seed=seed,
            chat=chat,
            dtype=dtype,
            device=device,
            packed=packed,
            directory=study,
            progress=progress,
        )
    if rank > 0:
        return  # the first process tells what all have measured
    if study is not None:
        remark(f"report in {found.save(study)}")
    _print_report(found, by_category or demo, json_output)
    if any(row.errors and not row.cells for row in found.rows):
        raise typer.Exit(1)


def report(
    study: Annotated[Path, typer.Argument(help="Directory that `compare --out` wrote, finished or not.")],
    by_category: Annotated[bool, typer.Option("--by-category", help="One row a category.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Show a study that was kept with `compare --out`, and write its page anew."""
    found = Report.load(study)
    remark(f"report in {found.save(study)}")
    _print_report(found, by_category, json_output)


def verify(
    model: Model,
    drafters: Drafters = None,
    prompts: Prompts = None,
    limit: Limit = None,
    batch_size: BatchSizes = None,
    max_new_tokens: Tokens = 64,
    coupled: Annotated[bool, typer.Option(help="Also check coupled sampling at temperature 1.")] = True,
    seed: Seed = 0,
    chat: ChatFlag = None,
    dtype: DType = None,
    device: Device = None,
    json_output: JsonFlag = False,
) -> None:
    """Check that drafters give plain decoding's text; exit 1 if one differs by more than a near tie."""
    with progress_bar() as progress:
        found = verify_drafters(
            model,
            _specs(drafters),
            coupled=coupled,
            prompts=_prompt_sets(prompts),
            limit=limit,
            batch_sizes=batch_size or [1],
            max_new_tokens=max_new_tokens,
            seed=seed,
            chat=chat,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    if json_output:
        print_json([asdict(one) | {"ok": one.ok} for one in found])
    else:
        _print_verifications(found)
    if not all(one.ok for one in found if one.drafter != "none" or one.errors):
        raise typer.Exit(1)


def theory(
    alpha: Annotated[float | None, typer.Option(help="Probability that a drafted token is accepted.")] = None,
    gamma: Annotated[int | None, typer.Option(help="Tokens drafted a round; default: the best.")] = None,
    c: Annotated[float, typer.Option("--c", help="Cost of a draft step over a pass of the target.")] = 0.0,
    v: Annotated[float, typer.Option("--v", help="Cost of a verifying pass over a single-token pass.")] = 1.0,
    by_rank: Annotated[
        str | None, typer.Option(help="For trees: acceptance of the first, second, ... sibling, such as 0.6,0.2,0.1.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help=f"Nodes of the tree.  [default: {TREE_NODES}]")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Predict tokens a round and speedup from acceptance and cost, and when drafting does not pay."""
    if (alpha is None) == (by_rank is None):
        raise InvalidRequest("give either --alpha, for chains, or --by-rank, for trees")
    if alpha is None and gamma is not None:
        raise InvalidRequest(f"--gamma is of chains, with --alpha; a tree takes --nodes, got --gamma {gamma}")
    if alpha is not None and nodes is not None:
        raise InvalidRequest(f"--nodes is of trees, with --by-rank; a chain takes --gamma, got --nodes {nodes}")
    if alpha is None:
        acceptance = [parse_value(rate) for rate in (by_rank or "").split(",")]
        _tree_theory(acceptance, TREE_NODES if nodes is None else nodes, c, v, json_output)
    else:
        _chain_theory(alpha, gamma, c, v, json_output)


def _tree_theory(acceptance: list[Any], nodes: int, c: float, v: float, json_output: bool) -> None:
    theories.check_costs(c, v)
    tree = theories.best_tree(acceptance, nodes)
    depth = tree.depth
    speed = tree.tokens / (depth * c + v)
    if json_output:
        print_json(asdict(tree) | {"depth": depth, "speedup": speed})
        return
    out.print(f"best tree of {len(tree.parents)} nodes: depth {depth}, {tree.tokens:.2f} tokens a round, {speed:.2f}x")
    out.print(f"parents {' '.join(map(str, tree.parents))}")
    out.print(f"ranks   {' '.join(map(str, tree.ranks))}")


def _chain_theory(alpha: float, gamma: int | None, c: float, v: float, json_output: bool) -> None:
    best = theories.best_gamma(alpha, c, lambda _: v)
    chosen = gamma if gamma is not None else best
    predicted = [
        {
            "gamma": length,
            "tokens": theories.expected_tokens(alpha, length),
            "speedup": theories.speedup(alpha, length, c, v),
            "break_even_alpha": theories.break_even_alpha(length, c, v),
        }
        for length in sorted({chosen, best, *range(1, 9)} - {0})
    ]
    if json_output:
        print_json({"alpha": alpha, "c": c, "v": v, "best_gamma": best, "gamma": chosen, "predictions": predicted})
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("gamma", "tokens a round", "speedup", "pays from alpha"):
        table.add_column(heading, justify="right")
    for one in predicted:
        even = one["break_even_alpha"]
        figures = [f"{one['tokens']:.2f}", f"{one['speedup']:.2f}x", "never" if even is None else f"{even:.3f}"]
        table.add_row(str(one["gamma"]), *figures, style="bold" if one["gamma"] == chosen else "")
    out.print(table)
    out.print(f"best gamma: {best}" + (" (do not draft)" if best == 0 else ""))


def load_target(model: str, dtype: str | None, device: str | None, packed: bool = False) -> Target:
    """Loads the target, saying so while it takes its time."""
    with err.status(f"loading {model}"):
        return Target.from_pretrained(model, dtype=dtype, device=device or default_device(), packed=packed)


def _specs(drafters: list[str] | None) -> list[DrafterSpec]:
    return [spec for word in drafters or DEMO_DRAFTERS for spec in parse_specs(word)]


def _prompt_sets(prompts: list[str] | None) -> list[PromptSet]:
    return [load_prompts(source) for source in prompts] if prompts else [load_prompts()]


def _print_report(report: Report, by_category: bool, json_output: bool) -> None:
    if json_output:
        print_json(report.to_json())
        return
    if by_category:
        out.print(report.table(by_category=True))
        out.print()
    out.print(report.table())
    for note in report.notes():
        remark(note)


def _print_verifications(found: list[Verification]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("drafter", "texts", "equal", "near ties", "faults", "widest margin"):
        table.add_column(heading, overflow="fold")
    for one in found:
        differing = [*one.near_ties, *one.faults]
        margins = [difference.agreement.margin for difference in differing if difference.agreement.margin is not None]
        counts = (one.texts, one.texts - len(differing), len(one.near_ties), len(one.faults))
        table.add_row(Text(one.drafter), *map(str, counts), f"{max(margins):.3g}" if margins else "")
    out.print(table)
    for one in found:
        for error in one.errors:
            remark(f"{one.drafter}: {error}")
        for fault in one.faults:
            where = f"prompt {fault.prompt}, turn {fault.turn}, temperature {fault.temperature:g}"
            agreement = fault.agreement
            remark(
                f"{one.drafter}: {where}: differs at new token {agreement.position}, margin "
                f"{agreement.margin}, measured noise {agreement.noise}"
            )
