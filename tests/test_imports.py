"""Imports run one way, and few files know transformers' modelling and cache API.

Read from the syntax trees alone, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each part may import besides itself. A new part of the package needs a line here.
MAY_IMPORT = {
    "core": set(),
    "verify": {"core"},
    "drafters": {"core"},
    "plugins": {"core", "verify", "drafters"},
    "decoder": {"core", "plugins"},
    "as_generate": {"core", "plugins", "decoder"},
    "study": {"core", "plugins", "decoder"},
    "serving": {"core", "drafters"},
    "__init__": {"core", "plugins", "decoder", "as_generate", "study", "serving"},
    "cli": {"core", "plugins", "decoder", "as_generate", "study", "serving", "__init__"},
    "__main__": {"cli"},
    "training": {"core", "verify", "drafters", "plugins", "decoder", "study", "__init__"},
}
LAZILY = {"cli": {"training"}}

KNOW_TRANSFORMERS = re.compile(
    r"core/(target|anatomy|attention|cache|views)\.py|drafters/(medusa|eagle)/.*|training/.*"
)
# The generation API and the types that are handed through are anyone's; `Auto*` belongs to loading.
PROCESSING = r"\w*(LogitsProcessor|LogitsWarper|LogitNormalization|LengthPenalty|Criteria)(List)?|generation\.[\w.]+"
ANYONE = rf"({PROCESSING}|GenerationConfig|WatermarkingConfig|PreTrainedModel|PreTrainedTokenizerBase)"
LOADING = rf"({ANYONE}|Auto\w+)"
GENERATING = rf"({ANYONE}|generation\..*)"


def imported(tree: ast.AST, package: str) -> Iterator[tuple[str, bool]]:
    """Yields (dotted name, whether inside a function) of everything imported; relative names are made absolute."""
    lazy = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name] = name.name
                if name.name != "transformers":  # of the bare module, what is used of it counts
                    yield name.name, id(node) in lazy
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                yield f"{module}.{name.name}", id(node) in lazy
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            if module == "transformers":
                yield f"{module}.{node.attr}", id(node) in lazy


def part_of(path: str) -> str:
    """Returns the part a file belongs to: its folder, or the name of its module; `cli_*.py` is the cli's."""
    first = path.split("/")[0].removesuffix(".py")
    return "cli" if first.startswith("cli_") else first


def violations(path: str, source: str) -> list[str]:
    """Lists what the file at `path`, relative to src/ or beginning with training/, imports against the rules."""
    part = part_of(path)
    if part not in MAY_IMPORT:
        return [f"{path}: MAY_IMPORT has no line for {part!r}"]
    package = ".".join(["draftwood", *path.split("/")[:-1]])
    found = []
    for name, lazy in imported(ast.parse(source), package):
        top, *rest = name.split(".")
        if top == "draftwood":
            target = part_of(rest[0]) if rest and part_of(rest[0]) in MAY_IMPORT else "__init__"
            allowed = MAY_IMPORT[part] | {part} | (LAZILY.get(part, set()) if lazy else set())
            if target not in allowed:
                found.append(f"{path} imports {name}: {part} may import {sorted(allowed)}")
        elif top == "transformers" and not KNOW_TRANSFORMERS.fullmatch(path):
            known = {"core/loading.py": LOADING, "as_generate.py": GENERATING}.get(path, ANYONE)
            if not re.fullmatch(known, ".".join(rest)):
                found.append(f"{path} imports {name}: transformers' modelling and cache API is not its business")
    return found


def sources() -> Iterator[tuple[str, str]]:
    for folder in (ROOT / "src", ROOT / "training"):
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(folder if folder.name == "src" else ROOT)
            yield inside.as_posix(), file.read_text(encoding="utf-8")


def test_imports_run_one_way():
    files = dict(sources())
    assert {"__init__.py", "core/tree.py", "verify/rejection.py", "drafters/none.py"} <= files.keys()
    assert [line for path, source in files.items() for line in violations(path, source)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/tree.py", "from ..verify.matching import Greedy"),
        ("core/tree.py", "import draftwood.drafters.none"),
        ("core/engine.py", "def f():\n    from .. import plugins"),
        ("core/engine.py", "from draftwood import Decoder"),
        ("verify/matching.py", "from ..drafters.none import NoDrafter"),
        ("drafters/none.py", "if TYPE_CHECKING:\n    from ..verify import matching"),
        ("drafters/eagle/network.py", "from ...verify import matching"),
        ("decoder.py", "from .verify.matching import Greedy"),
        ("plugins.py", "from .decoder import Decoder"),
        ("study/run.py", "from ..cli import main"),
        ("study/run.py", "def f():\n    from ..training import loop"),
        ("cli_study.py", "from .training import loop"),
        ("training/loop.py", "from draftwood.cli import main"),
        ("surprise.py", ""),
        ("core/engine.py", "from transformers import DynamicCache"),
        ("core/engine.py", "from transformers.cache_utils import Cache"),
        ("core/engine.py", "def f():\n    import transformers.masking_utils"),
        ("core/stopping.py", "import transformers as hf\nhf.LlamaForCausalLM"),
        ("core/sampling.py", "from transformers import AutoModelForCausalLM"),
        ("core/loading.py", "from transformers import DynamicCache"),
        ("drafters/draft_model.py", "from transformers.models.llama.modeling_llama import LlamaModel"),
    ],
)
def test_a_violation_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("core/tree.py", "from .errors import InvalidRequest\nimport torch"),
        ("drafters/eagle/network.py", "from ...core.tree import TokenTree\nfrom transformers.models import llama"),
        ("plugins.py", "from .verify import matching\nfrom .drafters import none"),
        ("cli_study.py", "from . import cli_common\nfrom .core.errors import InvalidRequest"),
        ("cli.py", "def train():\n    from .training import loop"),
        ("training/loop.py", "from . import data\nfrom .data import read\nfrom draftwood import Decoder"),
        ("core/cache.py", "from transformers import Cache"),
        ("core/stopping.py", "import transformers as hf\nhf.StoppingCriteriaList"),
        ("core/loading.py", "from transformers import AutoTokenizer"),
    ],
)
def test_what_is_allowed_passes(path, source):
    assert violations(path, source) == []
