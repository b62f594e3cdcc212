"""The example plugin and a broken one, really installed, in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[1] / "examples" / "bigram"

BROKEN_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "draftwood-rotten"
version = "0.1.0"
[project.entry-points.draftwood]
rotten = "draftwood_rotten"
[tool.setuptools]
py-modules = ["draftwood_rotten"]
"""

PROBE = """
import json, sys
from types import SimpleNamespace
from draftwood.core.errors import DraftwoodError
from draftwood.core.state import DecodeState
from draftwood.plugins import load_registry

def attempt(name, options):
    try:
        registry.create_drafter(name, options)
    except DraftwoodError as error:
        return f"{type(error).__name__}: {error}"

registry = load_registry()
imported = [name for name in sys.modules if name.startswith("draftwood.drafters.")]
drafter = registry.create_drafter("bigram", {"gamma": 3})
texts = [([1, 2, 1, 3, 1, 3, 1], 99), ([5, 6, 7, 5, 6, 7, 5], 2), ([1, 2, 3], 99), ([4, 4], 0)]
rows = [SimpleNamespace(tokens=text, max_tokens=len(text) + 1 + room) for text, room in texts]
state = DecodeState(target=None, cache=None, style="chosen", rows=rows)
session = drafter.session(state)
session.admit(state, [0, 1, 2, 3])
tokens, parents = session.propose(state).tree.to_lists()
print(json.dumps({
    "imported": imported,
    "module": type(drafter).__module__,
    "names": registry.drafters.names(),
    "plugin": registry.drafters.plugin("bigram"),
    "summary": registry.drafters.summary("bigram"),
    "options": [(option.name, option.default, option.doc) for option in registry.drafters.options("bigram")],
    "tokens": tokens,
    "parents": parents,
    "broken": registry.broken,
    "unknown": attempt("bigramm", {}),
    "misspelt": attempt("bigram", {"gama": 3}),
    "invalid": attempt("bigram", {"gamma": 0}),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Installs both packages into an empty directory, offline, and returns what a new process finds there."""
    for tool in ("pip", "setuptools"):
        if find_spec(tool) is None:
            pytest.skip(f"needs {tool} to install a package")
    base = tmp_path_factory.mktemp("plugins")
    shutil.copytree(EXAMPLE, base / "bigram")  # building writes into the sources
    (base / "rotten").mkdir()
    (base / "rotten" / "pyproject.toml").write_text(BROKEN_PROJECT)
    (base / "rotten" / "draftwood_rotten.py").write_text("import bark_that_does_not_exist\n")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", "site"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, "./bigram", "./rotten"]
    subprocess.run(pip, cwd=base, check=True)
    paths = [str(base / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    probe = subprocess.run([sys.executable, "-c", PROBE], env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(probe.stdout)
    return result


def test_an_installed_plugin_is_found_by_name(found: dict[str, Any]) -> None:
    assert found["module"] == "draftwood_bigram"
    assert found["names"][-1] == "bigram" and "none" in found["names"]
    assert found["plugin"] == "bigram (draftwood-bigram)"
    assert found["summary"] == "Drafts by the most frequent follower of each token in the row so far."
    assert found["options"] == [["gamma", 4, "tokens drafted a round."]]


def test_building_a_registry_imports_no_built_in_drafter(found: dict[str, Any]) -> None:
    assert set(found["imported"]) <= {"draftwood.drafters.merged"}  # what joins drafters is none itself


def test_bigram_follows_the_most_frequent_bigrams(found: dict[str, Any]) -> None:
    # 1 was followed by 3 twice and by 2 once; the second row has room for two; 3 and a full row have nothing.
    assert found["tokens"] == [[3, 1, 3], [6, 7], [], []]
    assert found["parents"] == [[-1, 0, 1], [-1, 0], [], []]


def test_a_broken_plugin_is_quoted_and_stops_nobody(found: dict[str, Any]) -> None:
    assert found["broken"] == {
        "rotten (draftwood-rotten)": "ModuleNotFoundError: No module named 'bark_that_does_not_exist'"
    }
    assert found["unknown"].startswith("UnknownName: no drafter 'bigramm'; did you mean 'bigram'?; known: none, ")
    assert found["unknown"].endswith("; plugin rotten (draftwood-rotten) failed: " + found["broken"].popitem()[1])


def test_options_of_a_plugin_are_checked(found: dict[str, Any]) -> None:
    assert found["misspelt"] == (
        "InvalidRequest: drafter 'bigram' has no option 'gama'; did you mean 'gamma'?; options: gamma"
    )
    assert found["invalid"] == "InvalidRequest: gamma must be >= 1, got 0"


def test_the_example_is_under_forty_lines() -> None:
    assert len((EXAMPLE / "draftwood_bigram.py").read_text().splitlines()) < 40
