"""What load_registry() finds; installed plugins are stood in for by entry points (test_example_plugin installs one)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

import draftwood.plugins as plugins
from draftwood.core.drafter import Drafter
from draftwood.core.errors import DuplicateName, InvalidRequest, UnknownName
from draftwood.core.registry import Catalog, hookimpl
from draftwood.drafters.none import NoDrafter
from draftwood.drafters.prompt_lookup import PromptLookup

DRAFTERS = plugins.load_registry().drafters.names()
RULES = plugins.load_registry().rules.names()


class Oak:
    """Stands in for an installed module."""

    @hookimpl
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        registry.add("oak", NoDrafter)


class Impostor:
    @hookimpl
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        registry.add("none", NoDrafter)


class Failing:
    @hookimpl
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        registry.add("half", NoDrafter)
        raise RuntimeError("out of sap")


oak, impostor, failing = Oak(), Impostor(), Failing()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that replaces the installed entry points of the group."""

    def replace(**values: str) -> None:
        found = [EntryPoint(name, value, "draftwood") for name, value in values.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda *, group: found if group == "draftwood" else [])

    return replace


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_built_in_drafter_exists_and_documents_its_options(name: str) -> None:
    catalog = plugins.load_registry().drafters
    assert catalog.plugin(name) == "draftwood"
    assert catalog.summary(name)
    for option in catalog.options(name):
        assert option.doc, f"{name} does not document {option.name}"


@pytest.mark.parametrize("name", RULES)
def test_every_built_in_rule_can_be_made(name: str) -> None:
    registry = plugins.load_registry()
    assert registry.rules.summary(name)
    rule = registry.create_rule(name)
    assert rule.lossless == (name != "typical")


def test_built_in_names() -> None:
    assert {"none", "prompt-lookup", "draft-model"} <= set(DRAFTERS)
    assert set(RULES) == {"greedy", "coupled", "rejection", "traversal", "block", "typical"}


def test_built_in_drafters_take_their_options() -> None:
    registry = plugins.load_registry()
    assert type(registry.create_drafter("none")) is NoDrafter
    lookup = registry.create_drafter("prompt-lookup", {"max_ngram": 5})
    assert isinstance(lookup, PromptLookup) and lookup.max_ngram == 5
    with pytest.raises(InvalidRequest, match="did you mean 'max_ngram'"):
        registry.create_drafter("prompt-lookup", {"max_ngrams": 5})


def test_a_registry_is_built_anew() -> None:
    first, second = plugins.load_registry(), plugins.load_registry()
    first.drafters.add("oak", NoDrafter)
    first.broken["x"] = "y"
    assert "oak" not in second.drafters.names() and not second.broken
    assert "oak" not in plugins.load_registry().drafters.names()


def test_entry_points_are_found(install: Callable[..., None]) -> None:
    install(oak=f"{__name__}:oak")
    registry = plugins.load_registry()
    assert type(registry.create_drafter("oak")) is NoDrafter
    assert registry.drafters.plugin("oak") == "oak"


def test_broken_plugins_are_kept_and_quoted_and_stop_nobody(install: Callable[..., None]) -> None:
    install(
        missing="no_such_module_at_all",
        failing=f"{__name__}:failing",
        hookless=f"{__name__}:DRAFTERS",
        oak=f"{__name__}:oak",
    )
    registry = plugins.load_registry()
    assert registry.broken["missing"] == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert registry.broken["failing"] == "RuntimeError: out of sap"
    assert set(registry.broken) == {"missing", "failing", "hookless"}
    assert "oak" in registry.drafters.names() and "half" not in registry.drafters.names()
    with pytest.raises(UnknownName) as caught:
        registry.create_drafter("half")
    assert "plugin failing failed: RuntimeError: out of sap" in str(caught.value)
    assert "plugin missing failed: ModuleNotFoundError" in str(caught.value)


def test_a_plugin_that_claims_a_built_in_name_raises(install: Callable[..., None]) -> None:
    install(impostor=f"{__name__}:impostor")
    with pytest.raises(DuplicateName, match="'none' is registered twice, by plugin draftwood and plugin impostor"):
        plugins.load_registry()


def test_extras_are_added_and_their_errors_raise() -> None:
    assert "oak" in plugins.load_registry([oak]).drafters.names()
    with pytest.raises(RuntimeError, match="out of sap"):
        plugins.load_registry([failing])
    with pytest.raises(DuplicateName, match="plugin Impostor"):
        plugins.load_registry([impostor])


def test_a_merge_by_name_keeps_to_its_budget():
    merged = plugins.load_registry().create_drafter(
        "lookahead+prompt-lookup", {"budget": 7, "lookahead": {"window": 3}}
    )
    assert merged.budget == 7
    with pytest.raises(InvalidRequest, match="budget must be a whole number >= 1, or None for no limit, got 0"):
        plugins.load_registry().create_drafter("lookahead+prompt-lookup", {"budget": 0})
