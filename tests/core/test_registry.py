"""The mechanism alone: hooks, catalogs, names, options. Every plugin here is made up."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from draftwood.core.drafter import Drafter
from draftwood.core.errors import DuplicateName, InvalidRequest, UnknownName
from draftwood.core.registry import Catalog, Registry, hookimpl
from draftwood.core.rule import Rule


class Twig(Drafter):
    """Drafts twigs.

    More about it.

    Args:
        length: how long, in tokens,
            a twig is.
        bark (str | None): what covers it.

    Raises:
        ValueError: never.
    """

    def __init__(self, *, length: int = 3, bark: str | None = None, root: str) -> None:
        """Makes it.

        Args:
            root: where it starts.
        """
        self.length, self.bark, self.root = length, bark, root


class Plain(Drafter):
    """Takes nothing."""


class Coin(Rule):
    lossless, drafts, samples = False, "chosen", True


class Forest:
    """A plugin object with both hooks."""

    @hookimpl
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        registry.add("twig", Twig)
        registry.add("plain", Plain, summary="nothing at all")

    @hookimpl
    def register_rules(self, registry: Catalog[Rule]) -> None:
        registry.add("coin", Coin)


@pytest.fixture
def registry() -> Registry:
    registry = Registry()
    registry.register(Forest(), "forest")
    return registry


def test_hooks_fill_the_two_catalogs(registry: Registry) -> None:
    assert registry.drafters.names() == ["twig", "plain"]
    assert registry.rules.names() == ["coin"]
    assert registry.drafters.plugin("twig") == "forest"


def test_a_plugin_may_be_a_module_with_one_hook() -> None:
    module = types.ModuleType("grove")

    @hookimpl
    def register_drafters(registry: Catalog[Drafter]) -> None:
        registry.add("plain", Plain)

    module.register_drafters = register_drafters  # type: ignore[attr-defined]
    registry = Registry()
    registry.register(module, "grove")
    assert type(registry.create_drafter("plain")) is Plain


def test_options_reach_the_constructor(registry: Registry) -> None:
    twig = registry.create_drafter("twig", {"length": 5, "root": "oak"})
    assert isinstance(twig, Twig)
    assert (twig.length, twig.bark, twig.root) == (5, None, "oak")
    assert type(registry.create_rule("coin")) is Coin


def test_each_call_makes_a_new_one(registry: Registry) -> None:
    assert registry.create_drafter("plain") is not registry.create_drafter("plain")


def test_misspelt_option_names_the_valid_ones(registry: Registry) -> None:
    with pytest.raises(InvalidRequest) as caught:
        registry.create_drafter("twig", {"lenght": 5, "root": "oak"})
    assert str(caught.value) == (
        "drafter 'twig' has no option 'lenght'; did you mean 'length'?; options: length, bark, root"
    )


def test_what_takes_no_options_says_so(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match="drafter 'plain' has no option 'x'; it takes no options"):
        registry.create_drafter("plain", {"x": 0.5})


def test_a_rule_without_constructor_takes_no_options(registry: Registry) -> None:
    class Dice(Rule):
        lossless, drafts, samples = False, "chosen", True

    registry.rules.add("dice", Dice)
    for _ in range(2):  # a protocol changes the constructor of its subclass when the first one is made
        assert registry.rules.options("dice") == []
        with pytest.raises(InvalidRequest, match="rule 'dice' has no option 'bias'; it takes no options"):
            registry.create_rule("dice", {"bias": 0.5})
        registry.create_rule("dice")


def test_missing_option_is_named(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match=r"drafter 'twig' needs the option 'root'; options: length, bark, root"):
        registry.create_drafter("twig", {})


def test_type_error_from_inside_a_constructor_passes_through(registry: Registry) -> None:
    class Faulty(Drafter):
        def __init__(self, *, size: int = 1) -> None:
            len(size)  # type: ignore[arg-type]

    registry.drafters.add("faulty", Faulty)
    with pytest.raises(TypeError, match="has no len"):
        registry.create_drafter("faulty", {"size": 2})


def test_a_factory_that_takes_anything_gets_everything(registry: Registry) -> None:
    seen: dict[str, object] = {}

    def factory(**options: object) -> Drafter:
        seen.update(options)
        return Plain()

    registry.drafters.add("any", factory)
    registry.create_drafter("any", {"whatever": 1})
    assert seen == {"whatever": 1}
    assert registry.drafters.options("any") == []


def test_a_factory_that_makes_something_else_is_blamed(registry: Registry) -> None:
    registry.drafters.add("stone", lambda: 7)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvalidRequest, match="'stone' made a int, which is no drafter: it has no features, bind"):
        registry.create_drafter("stone")

    class Half:
        lossless = True

    registry.rules.add("half", Half)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="is no rule: it has no drafts, samples, verify"):
        registry.create_rule("half")


def test_option_listing_has_defaults_and_documentation(registry: Registry) -> None:
    options = registry.drafters.options("twig")
    assert [(option.name, option.doc) for option in options] == [
        ("length", "how long, in tokens, a twig is."),
        ("bark", "what covers it."),
        ("root", "where it starts."),
    ]
    assert [option.default for option in options[:2]] == [3, None]
    assert [option.required for option in options] == [False, False, True]


def test_summary_is_given_or_the_first_line(registry: Registry) -> None:
    assert registry.drafters.summary("plain") == "nothing at all"
    assert registry.drafters.summary("twig") == "Drafts twigs."


def test_unknown_name_lists_known_suggests_and_quotes_the_broken(registry: Registry) -> None:
    registry.broken["rotten"] = "ImportError: no module named 'x'"
    with pytest.raises(UnknownName) as caught:
        registry.create_drafter("twigs")
    assert str(caught.value) == (
        "no drafter 'twigs'; did you mean 'twig'?; known: twig, plain;"
        " plugin rotten failed: ImportError: no module named 'x'"
    )
    with pytest.raises(UnknownName, match=r"^no rule 'zzz'; known: coin; plugin rotten failed"):
        registry.create_rule("zzz")
    for look_up in (registry.drafters.options, registry.drafters.summary, registry.drafters.plugin):
        with pytest.raises(UnknownName, match=r"^no drafter 'zzz'"):
            look_up("zzz")


def test_duplicate_names_raise_and_name_both_plugins(registry: Registry) -> None:
    with pytest.raises(DuplicateName, match="drafter 'twig' is registered twice, by plugin forest and plugin copse"):
        registry.register(Forest(), "copse")
    with pytest.raises(DuplicateName, match="rule 'coin'"):
        registry.rules.add("coin", Coin)


def test_a_drafter_and_a_rule_may_share_a_name(registry: Registry) -> None:
    registry.rules.add("twig", Coin)
    assert type(registry.create_rule("twig")) is Coin


def test_a_plugin_that_fails_half_way_leaves_nothing(registry: Registry) -> None:
    class Storm:
        @hookimpl
        def register_drafters(self, registry: Catalog[Drafter]) -> None:
            registry.add("leaf", Plain)

        @hookimpl
        def register_rules(self, registry: Catalog[Rule]) -> None:
            raise RuntimeError("struck")

    with pytest.raises(RuntimeError, match="struck"):
        registry.register(Storm(), "storm")
    assert registry.drafters.names() == ["twig", "plain"]


def test_misspelt_hook_is_an_error(registry: Registry) -> None:
    class Typo:
        @hookimpl
        def register_drafter(self, registry: Catalog[Drafter]) -> None:
            registry.add("leaf", Plain)

    with pytest.raises(Exception, match="unknown hook 'register_drafter'"):
        registry.register(Typo(), "typo")


def test_a_plugin_without_hooks_is_an_error(registry: Registry) -> None:
    class Unmarked:
        def register_drafters(self, registry: Catalog[Drafter]) -> None:
            registry.add("leaf", Plain)

    with pytest.raises(InvalidRequest, match="hookimpl"):
        registry.register(Unmarked(), "unmarked")


@pytest.mark.parametrize("name", ["", "a+b", "a b", "a,b"])
def test_names_that_cannot_be_asked_for(registry: Registry, name: str) -> None:
    with pytest.raises(InvalidRequest, match="drafter name must be"):
        registry.drafters.add(name, Plain)


@pytest.mark.parametrize("factory", [7, "no_attribute", "spaces in:it", "a:b:c"])
def test_factories_that_cannot_work(registry: Registry, factory: object) -> None:
    with pytest.raises(InvalidRequest, match="module:attribute"):
        registry.drafters.add("leaf", factory)  # type: ignore[arg-type]


def test_dotted_factories_are_imported_on_use(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_twig.py").write_text(
        "from draftwood.core.drafter import Drafter\nclass Late(Drafter):\n    '''Late.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry.drafters.add("late", "late_twig:Late", summary="comes late")
    assert registry.drafters.summary("late") == "comes late"
    assert "late_twig" not in sys.modules
    assert type(registry.create_drafter("late")).__name__ == "Late"
    assert sys.modules.pop("late_twig")


@pytest.mark.parametrize("factory", ["no_such_module_at_all:Late", "draftwood.core.drafter:NoSuchClass"])
def test_dotted_factories_that_cannot_be_imported(registry: Registry, factory: str) -> None:
    registry.drafters.add("late", factory)
    with pytest.raises(
        UnknownName, match=f"(?i)drafter 'late' of plugin .* cannot be imported from '{factory}': .*no_?such"
    ):
        registry.create_drafter("late")


class Bundle(Drafter):
    def __init__(self, parts: list[Drafter], *, budget: int | None) -> None:
        self.parts, self.budget = parts, budget


def test_a_merged_tree_can_have_a_budget(registry: Registry) -> None:
    registry.merger = Bundle
    options = {"budget": 12, "twig": {"root": "elm"}}
    bundle = registry.create_drafter("plain+twig", options)
    assert isinstance(bundle, Bundle) and bundle.budget == 12 and options["budget"] == 12


def test_names_joined_by_plus_are_merged_in_order(registry: Registry) -> None:
    registry.merger = Bundle
    bundle = registry.create_drafter("plain+twig", {"twig": {"root": "elm"}})
    assert isinstance(bundle, Bundle)
    assert [type(part) for part in bundle.parts] == [Plain, Twig]
    assert bundle.parts[1].root == "elm"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain+plain", {}, "different parts, got 'plain.plain'"),
        ("plain+twig", {"root": "elm"}, "by part, like {'plain': .*, except budget; got 'root': 'elm'"),
        ("plain+twig", {"bush": {}}, "by part"),
        ("plain+twig", {"twig": "elm"}, "by part"),
        ("plain+twig", {"twig": {"rot": "elm"}}, "drafter 'twig' has no option 'rot'; did you mean 'root'"),
    ],
)
def test_bad_merges(registry: Registry, name: str, options: dict[str, object], message: str) -> None:
    registry.merger = Bundle
    with pytest.raises(InvalidRequest, match=message):
        registry.create_drafter(name, options)


@pytest.mark.parametrize("name", ["plain+bush", "plain+", "+"])
def test_a_merge_of_unknown_parts(registry: Registry, name: str) -> None:
    registry.merger = Bundle
    error: type[Exception] = InvalidRequest if name == "+" else UnknownName
    with pytest.raises(error):
        registry.create_drafter(name, {"length": 3})


def test_a_registry_without_merger_says_so(registry: Registry) -> None:
    with pytest.raises(InvalidRequest, match="merger is None"):
        registry.create_drafter("plain+twig", {"twig": {"root": "elm"}})
