"""The lists in pyproject.toml are complete, and a wheel holds the package `draftwood` and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import draftwood

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def package_folders() -> dict[str, Path]:
    """Returns every package of the tree by the name it is imported by."""
    folders = {}
    for name, folder in SETUPTOOLS["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            folders[".".join([name, *init.parent.relative_to(ROOT / folder).parts])] = init.parent
    return folders


def test_every_package_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(package_folders())


def test_every_module_lies_in_a_package():
    modules = {file.parent for name in SETUPTOOLS["package-dir"].values() for file in (ROOT / name).rglob("*.py")}
    assert modules == set(package_folders().values())


def test_the_installed_package_is_this_tree():
    assert Path(draftwood.__file__).resolve() == ROOT / "src" / "__init__.py"
    assert version("draftwood") == PROJECT["project"]["version"]
    (command,) = entry_points(group="console_scripts", name="draftwood")
    assert callable(command.load())


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    tree = tmp_path / "tree"  # a build leaves files behind, so it gets its own copy
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        "pyproject.toml",
        *PROJECT["project"]["license-files"],
        *filter(None, [PROJECT["project"].get("readme")]),
    ):
        shutil.copy(ROOT / file, tree)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(tree)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("draftwood-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        f"{name.replace('.', '/')}/{file.name}"
        for name, folder in package_folders().items()
        for file in folder.iterdir()
        if file.suffix in {".py", ".html", ".css", ".js"}
    }
    assert names == expected | {"draftwood/py.typed"}


def requirements() -> list[Requirement]:
    groups = [PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_constraints_pin_every_requirement_within_its_range(requirement):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if line and not line.startswith("#"))
    assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier
