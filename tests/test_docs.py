"""The documentation is true: Python blocks run, commands parse, shown output is what is printed.

A ```python block is run, examples with `>>>` by their output. Lines of a ```console block that begin with `$` are run,
and what stands below is their output (`...` stands for any). Of ```sh blocks the `draftwood` commands are parsed. The
blocks of a page share their names and a directory; what they call `smollm2` is a tiny random model.
"""

from __future__ import annotations

import doctest
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from typer.main import get_command
from typer.testing import CliRunner

from draftwood.cli import app
from draftwood.core import loading
from draftwood.plugins import load_registry
from draftwood.study.spec import nest, parse_option, parse_spec
from tests.study.tiny import save_tiny

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTHON = PythonCodeBlockParser(doctest_optionflags=doctest.ELLIPSIS)


def stem(page: Path) -> str:
    return page.stem


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def commands(text: str) -> Iterator[list[str]]:
    """Yields the arguments of every `draftwood` command in a piece of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if command[:1] == ["draftwood"]:
                    yield command[1:]
                command = []
            else:
                command.append(word)


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Returns the command and its parameters; whatever the real application refuses is an error."""
    command, context, path = get_command(app), None, []
    while hasattr(command, "resolve_command"):
        context = command.make_context(" ".join(path) or "draftwood", [*arguments], parent=context)
        name, command, arguments = command.resolve_command(context, [*arguments])
        path.append(name)
    return " ".join(path), command.make_context(path[-1], arguments, parent=context).params


def check_options(drafter: str, options: dict[str, Any]) -> None:
    """Fails where a drafter, or an option of it, does not exist."""
    catalog = load_registry().drafters
    parts = drafter.split("+")
    for part in parts:
        given = options if len(parts) == 1 else options.get(part, {})
        assert set(given) <= {option.name for option in catalog.options(part)}, (drafter, options)
    if len(parts) > 1:
        assert set(options) <= {*parts, "budget"}, (drafter, options)


SHELL = [
    pytest.param(arguments, id=f"{page.stem}: {' '.join(arguments)[:60]}")
    for page in PAGES
    for body in blocks(page, "sh", "bash", "shell")
    for arguments in commands(body)
]


@pytest.mark.parametrize("arguments", SHELL)
def test_a_command_parses(arguments):
    command, given = parse(arguments)
    if command == "generate":
        check_options(given["drafter"], nest(dict(parse_option(one) for one in given["option"] or ())))
    if command in ("compare", "verify"):
        for word in given["drafters"] or ():
            check_options(*parse_spec(word))


@pytest.mark.parametrize(
    "line", ["generate m p --drafer x", "compare", "train m --steps 1", "theory --gamma x", "draft", "search layers m"]
)
def test_a_wrong_command_does_not_parse(line):
    with pytest.raises(Exception, match=r"."):  # typer's own errors differ by version
        parse(line.split())


def test_commands_are_found_behind_comments_pipes_and_line_ends():
    found = list(commands("# draftwood none\ndraftwood a \\\n  b # c\nmake && draftwood d; ls | draftwood 'e|f'\n"))
    assert found == [["a", "b"], ["d"], ["e|f"]]


def load_instead(monkeypatch: pytest.MonkeyPatch, name: str, **instead: Any) -> None:
    """Has `smollm2` stand for another model, or be loaded with other options."""
    real = loading.load_model

    def load(source: Any, **options: Any) -> Any:
        return real(name, **(options | instead)) if source == "smollm2" else real(source, **options)

    monkeypatch.setattr(loading, "load_model", load)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with what pages name, where `smollm2` is a tiny model."""
    load_instead(monkeypatch, str(save_tiny(tmp_path / "tiny")))
    monkeypatch.chdir(tmp_path)
    talk = {"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "to be or not " * 3}]}
    (tmp_path / "own.jsonl").write_text((json.dumps(talk) + "\n") * 12)
    return tmp_path


def run_python(page: Path, names: dict[str, Any]) -> int:
    document = Document.parse(str(page), PYTHON)
    document.namespace.update(names)
    examples = list(document.examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=stem)
def test_python_blocks_run(page, place):
    names: dict[str, Any] = {}
    if page.stem == "README":  # its last block begins with a model that the reader has
        model, tokenizer = loading.load_model("smollm2")
        names = {"model": model, "inputs": tokenizer("abc", return_tensors="pt", return_token_type_ids=False)}
    assert run_python(page, names) >= len(blocks(page, "python"))


@pytest.mark.real
def test_the_quickstart_runs_on_the_demo_model(tmp_path, monkeypatch):
    load_instead(monkeypatch, "smollm2", dtype="float32")  # in bfloat16 a near tie may part its texts
    monkeypatch.chdir(tmp_path)
    assert run_python(ROOT / "docs" / "index.md", {}) > 0


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=stem)
def test_console_blocks_print_what_they_show(page, place):
    for body in blocks(page, "console"):
        for session in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            line, _, shown = session.partition("\n")
            (arguments,) = commands(line)
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, (line, done.output)
            assert doctest.OutputChecker().check_output(shown, done.stdout, doctest.ELLIPSIS), (line, done.stdout)


def test_the_plugins_page_shows_the_example_as_it_is():
    source = (ROOT / "examples" / "bigram" / "draftwood_bigram.py").read_text(encoding="utf-8")
    assert source in blocks(ROOT / "docs" / "plugins.md", "python")


@pytest.mark.parametrize("drafter", [name for name in load_registry().drafters.names() if name != "none"])
def test_every_option_of_a_drafter_is_on_its_page(drafter):
    text = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    (section,) = (part for part in re.split(r"^## ", text, flags=re.MULTILINE) if drafter in heading(part))
    missing = [one.name for one in load_registry().drafters.options(drafter) if f"`{one.name}" not in section]
    assert not missing, f"docs/drafters.md, {drafter}: no word on {missing}"


def heading(section: str) -> list[str]:
    return re.split(r",\s*", section.partition("\n")[0])


def test_the_site_asks_nothing_of_the_network():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    assert config["theme"]["font"] == "false"
    assert not {"extra_javascript", "extra_css"} & config.keys()
    pages = {leaf for entry in config["nav"] for leaf in leaves(entry)}
    assert pages == {page.name for page in PAGES if page.parent.name == "docs"}


def leaves(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [leaf for inner in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(inner)]
