"""The command line: one function a command, those of studies and training in modules of their own.

Results go to stdout, progress and remarks to stderr. Whatever Draftwood refuses is one line on stderr and exit
code 2; an interrupt is exit code 130.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from . import cli_eagle, cli_export, cli_heads, cli_study, cli_synthesis, cli_trace, cli_training
from .cli_common import Commands, Device, DType, JsonFlag, Model, Packed, out, print_json, remark
from .core.errors import InvalidRequest
from .core.registry import Catalog
from .core.request import split_settings
from .decoder import Decoder, StreamStep
from .plugins import load_registry
from .study.spec import DrafterSpec, nest, parse_option

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Draft trees, verify losslessly: speculative decoding on unmodified transformers models.",
)
app.command()(cli_study.compare)
app.command()(cli_study.report)
app.command()(cli_study.verify)
app.command()(cli_study.theory)
app.command()(cli_trace.explain)
app.command()(cli_synthesis.synthesise)
app.command()(cli_export.export)
app.add_typer(cli_training.search, name="search")
cli_training.train.command("medusa")(cli_heads.medusa)
cli_training.train.command("medusa-2")(cli_heads.medusa_joint)
cli_training.train.command("eagle")(cli_eagle.eagle)
app.add_typer(cli_training.train, name="train")


def main() -> None:
    """Runs the command line."""
    app(prog_name="draftwood")


@app.callback()
def _root() -> None:
    """Keeps every command a sub-command."""


@app.command()
def drafters(json_output: JsonFlag = False) -> None:
    """List the drafters and acceptance rules, their options, and plugins that failed to load."""
    registry = load_registry()
    catalogs: dict[str, Catalog[Any]] = {"drafters": registry.drafters, "rules": registry.rules}
    if json_output:
        listed = {kind: {name: _entry(catalog, name) for name in catalog.names()} for kind, catalog in catalogs.items()}
        print_json({**listed, "broken": registry.broken})
        return
    for kind, catalog in catalogs.items():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in (kind, "options", "what it is"):
            table.add_column(heading, overflow="fold")
        for name in catalog.names():
            entry = _entry(catalog, name)
            options = "\n".join(f"{key}={value}" for key, value in entry["options"].items())
            table.add_row(Text(name), Text(options), Text(entry["summary"]))
        out.print(table)
        out.print()
    for plugin, error in registry.broken.items():
        out.print(Text(f"plugin {plugin} failed: {error}"))


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.")],
    drafter: Annotated[str, typer.Option(help="Name, or several joined by `+`.")] = "prompt-lookup",
    option: Annotated[
        list[str] | None, typer.Option(help="Drafter option, key=value; part.key=value for one part of several.")
    ] = None,
    rule: Annotated[str, typer.Option(help="Acceptance rule.")] = "auto",
    max_new_tokens: Annotated[int | None, typer.Option(help="Most new tokens.  [default: 128]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.  [default: 0]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all randomness.  [default: 0]")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="Any other field of GenerationConfig, key=value, such as top_p=0.9.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Use the chat template, or not; default: if there is one.")
    ] = None,
    dtype: DType = None,
    device: Device = None,
    packed: Packed = False,
    trace: cli_trace.TraceFile = None,
    json_output: JsonFlag = False,
) -> None:
    """Generate a text; on a terminal, tokens that the drafter had guessed are coloured."""
    text = _read(prompt)
    spec = DrafterSpec(drafter, nest(dict(parse_option(one) for one in option or ())))
    named = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "stop_strings": stop or None}
    settings = _settings(named, setting or [])
    registry = load_registry()
    # A typing error should not wait for the model.
    split_settings(settings)
    registry.create_drafter(spec.name, spec.options)
    if rule != "auto":
        registry.create_rule(rule)
    cli_trace.check_trace_file(trace)
    target = cli_study.load_target(model, dtype, device, packed)
    decoder = Decoder(target, drafter, drafter_options=spec.options, rule=rule, registry=registry)
    asked = _render(decoder, text, chat)
    if trace is not None:
        about = {"model": model, "drafter": drafter, "options": spec.options, "rule": rule}
        done = cli_trace.record_to(trace, decoder, asked, settings, about)
    elif json_output:
        done = decoder.generate(asked, **settings)
    if json_output:
        stats = asdict(done.stats)
        stats |= {"tau": done.stats.tau, "acceptance_by_depth": done.stats.acceptance_by_depth}
        print_json({**asdict(done), "stats": stats})
        return
    if trace is not None:
        out.print(done.text, markup=False, soft_wrap=True)
        remark(f"{len(done.tokens)} tokens, ended by {done.stop_reason}; recorded in {trace}")
        return
    drafted = tokens = 0
    for step in decoder.stream(asked, **settings):
        _show(step)
        drafted, tokens = drafted + step.drafted, tokens + len(step.tokens)
        reason = step.stop_reason
    out.print()
    remark(f"{tokens} tokens, {drafted} of them drafted; ended by {reason}")


def _entry(catalog: Catalog[Any], name: str) -> dict[str, Any]:
    options = {option.name: "(required)" if option.required else option.default for option in catalog.options(name)}
    return {"summary": catalog.summary(name), "options": options, "plugin": catalog.plugin(name)}


def _read(prompt: str) -> str:
    """Returns the prompt's text, from standard input if it is `-`."""
    # Bytes of an argument that are no UTF-8 arrive as surrogates; encoding restores them.
    raw = sys.stdin.buffer.read() if prompt == "-" else prompt.encode(errors="surrogateescape")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.end]
        raise InvalidRequest(f"the prompt must be UTF-8 text, got {bad!r} at byte {error.start}") from error


def _settings(named: Mapping[str, Any], others: Iterable[str]) -> dict[str, Any]:
    """Joins the settings that have an option of their own (None where it is not used) and those of `--setting`."""
    given = {key: value for key, value in named.items() if value is not None}
    settings = dict(parse_option(one) for one in others)
    if twice := sorted(given.keys() & settings.keys()):
        raise InvalidRequest(f"{twice[0]} is given twice: {given[twice[0]]!r} and --setting {settings[twice[0]]!r}")
    return settings | given


def _render(decoder: Decoder, text: str, chat: bool | None) -> Any:
    template = getattr(decoder.target.tokenizer, "chat_template", None)
    if not text.strip():
        raise InvalidRequest("the prompt is empty; give a text, or `-` and a text on standard input")
    return [{"role": "user", "content": text}] if (bool(template) if chat is None else chat) else text


def _show(step: StreamStep) -> None:
    for piece, guessed in step.pieces:
        if out.is_terminal:
            out.print(Text(piece, style="green" if guessed else ""), end="", soft_wrap=True)
        else:
            sys.stdout.write(piece)
    sys.stdout.flush()
