"""The plugin mechanism: hook specifications, and catalogs of drafters and rules by name.

This module names no plugin and does not look for any; `plugins.py` does both. A registry is built per call,
so nothing here is global.
"""

from __future__ import annotations

import difflib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import pluggy

from .drafter import Drafter
from .errors import DuplicateName, InvalidRequest, UnknownName
from .rule import Rule

T = TypeVar("T")

PROJECT = "draftwood"
"""Name of the pluggy project and of the entry-point group."""
AUTO = "auto"
"""The value of `gamma` that leaves it to measurement."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """What a plugin (a module or an object) may implement, marked with `hookimpl`."""

    @hookspec
    def register_drafters(self, registry: Catalog[Drafter]) -> None:
        """Adds drafters: `registry.add("bigram", Bigram)`."""

    @hookspec
    def register_rules(self, registry: Catalog[Rule]) -> None:
        """Adds acceptance rules: `registry.add("greedy", Greedy)`."""


class Option(NamedTuple):
    """One option of a drafter or rule; `default` is `inspect.Parameter.empty` where a value must be given."""

    name: str
    default: object
    doc: str

    @property
    def required(self) -> bool:
        """Whether a value must be given."""
        return self.default is inspect.Parameter.empty


@dataclass(frozen=True)
class _Entry(Generic[T]):
    factory: Callable[..., T] | str
    summary: str
    plugin: str


class Catalog(Generic[T]):
    """The drafters, or the rules, by name. A plugin's hook is handed one to add to.

    Args:
        kind: what the entries make, for messages: "drafter" or "rule".
        needs: attributes that whatever an entry makes must have.
        broken: plugins that failed to load, with their errors; quoted when a name is unknown.
        plugin: the plugin that adds to this catalog.
    """

    def __init__(self, kind: str, needs: tuple[str, ...], broken: Mapping[str, str], plugin: str = "") -> None:
        self._kind, self._needs, self._broken, self._plugin = kind, needs, broken, plugin
        self._entries: dict[str, _Entry[T]] = {}

    def add(self, name: str, factory: Callable[..., T] | str, *, summary: str = "") -> None:
        """Adds a name.

        Args:
            name: what users will write; `+` is taken, it joins drafters.
            factory: the class, or any callable whose keyword arguments are the options; or
                "package.module:attribute", imported when the name is first used.
            summary: one line for listings; the first line of the factory's docstring if left out.

        Raises:
            DuplicateName: the name is taken.
            InvalidRequest: the name or the factory cannot work.
        """
        if not re.fullmatch(r"[^\s+,]+", name):
            raise InvalidRequest(f"a {self._kind} name must be non-empty, without spaces, '+' or ',', got {name!r}")
        if not (re.fullmatch(r"[\w.]+:[\w.]+", factory) if isinstance(factory, str) else callable(factory)):
            raise InvalidRequest(f"{self._kind} {name!r}: not a callable or 'package.module:attribute': {factory!r}")
        self._insert(name, _Entry(factory, summary, self._plugin))

    def stage(self, plugin: str) -> Catalog[T]:
        """Returns an empty catalog for `plugin` to add to, so that one which fails half-way leaves nothing."""
        return Catalog(self._kind, self._needs, self._broken, plugin)

    def take(self, staged: Catalog[T]) -> None:
        """Adds every entry of `staged`.

        Raises:
            DuplicateName: a name is taken.
        """
        for name, entry in staged._entries.items():
            self._insert(name, entry)

    def names(self) -> list[str]:
        """Returns every name, in the order in which they were added."""
        return list(self._entries)

    def plugin(self, name: str) -> str:
        """Returns the plugin that added `name`."""
        return self._entry(name).plugin

    def summary(self, name: str) -> str:
        """Returns one line on what `name` is."""
        entry = self._entry(name)
        return entry.summary or next(iter((inspect.getdoc(self._factory(name)) or "").splitlines()), "")

    def options(self, name: str) -> list[Option]:
        """Returns the options of `name`, documented by the `Args:` section of its Google docstring."""
        factory = self._factory(name)
        docs = _argument_docs(factory)
        return [
            Option(option.name, option.default, docs.get(option.name, ""))
            for option in _parameters(factory)
            if option.kind is not inspect.Parameter.VAR_KEYWORD
        ]

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> T:
        """Makes what `name` stands for. Errors from inside its constructor pass through unchanged.

        Raises:
            UnknownName: no such name, or its module cannot be imported.
            InvalidRequest: an option is unknown or missing, or the plugin's factory makes something else.
        """
        factory, options = self._factory(name), dict(options or {})
        self._check_options(name, factory, options)
        made = factory(**options)
        missing = [attribute for attribute in self._needs if not hasattr(made, attribute)]
        if missing:
            raise InvalidRequest(
                f"plugin {self.plugin(name)}: {name!r} made a {type(made).__name__}, which is no {self._kind}:"
                f" it has no {', '.join(missing)}"
            )
        return made

    def _insert(self, name: str, entry: _Entry[T]) -> None:
        if name in self._entries:
            first, second = self._entries[name].plugin, entry.plugin
            raise DuplicateName(f"{self._kind} {name!r} is registered twice, by plugin {first} and plugin {second}")
        self._entries[name] = entry

    def _entry(self, name: str) -> _Entry[T]:
        if name not in self._entries:
            parts = [f"no {self._kind} {name!r}{_suggestion(name, self._entries)}"]
            parts.append(f"known: {', '.join(self._entries) or 'none'}")
            parts += [f"plugin {plugin} failed: {error}" for plugin, error in self._broken.items()]
            raise UnknownName("; ".join(parts))
        return self._entries[name]

    def _factory(self, name: str) -> Callable[..., T]:
        entry = self._entry(name)
        if not isinstance(entry.factory, str):
            return entry.factory
        try:
            factory: Callable[..., T] = pkgutil.resolve_name(entry.factory)
        except (ImportError, AttributeError) as error:
            raise UnknownName(
                f"{self._kind} {name!r} of plugin {entry.plugin} cannot be imported from {entry.factory!r}: {error}"
            ) from error
        return factory

    def _check_options(self, name: str, factory: Callable[..., T], options: Mapping[str, Any]) -> None:
        parameters = _parameters(factory)
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return
        known = [parameter.name for parameter in parameters]
        valid = f"options: {', '.join(known)}" if known else "it takes no options"
        for option in options:
            if option not in known:
                suggestion = _suggestion(option, known)
                raise InvalidRequest(f"{self._kind} {name!r} has no option {option!r}{suggestion}; {valid}")
        for parameter in parameters:
            if parameter.default is inspect.Parameter.empty and parameter.name not in options:
                raise InvalidRequest(f"{self._kind} {name!r} needs the option {parameter.name!r}; {valid}")


class Registry:
    """Every drafter and rule that can be asked for by name.

    Attributes:
        drafters: the drafters.
        rules: the acceptance rules.
        broken: plugins that failed to load, with their errors.
        merger: makes one drafter of a list of several and a `budget` of nodes, for names joined by `+`.
        tuner: makes a drafter that chooses its own length, of a function from `gamma` to a drafter, for `gamma="auto"`.
    """

    def __init__(self) -> None:
        self.broken: dict[str, str] = {}
        self.drafters: Catalog[Drafter] = Catalog("drafter", ("features", "bind", "session"), self.broken)
        self.rules: Catalog[Rule] = Catalog("rule", ("lossless", "drafts", "samples", "verify"), self.broken)
        self.merger: Callable[..., Drafter] | None = None
        self.tuner: Callable[[Callable[[int], Drafter]], Drafter] | None = None

    def register(self, plugin: object, name: str) -> None:
        """Runs the hooks of one plugin; `name` is what messages call it.

        Raises:
            DuplicateName: it adds a name that is taken.
            InvalidRequest: it implements no hook.
            Exception: whatever its hooks raise; nothing of it is registered then.
        """
        # A manager of its own, so that a plugin which fails takes no other along.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        manager.register(plugin, name)
        manager.check_pending()
        if not manager.get_hookcallers(plugin):
            raise InvalidRequest("no register_drafters or register_rules marked with @draftwood.hookimpl")
        drafters, rules = self.drafters.stage(name), self.rules.stage(name)
        manager.hook.register_drafters(registry=drafters)
        manager.hook.register_rules(registry=rules)
        self.drafters.take(drafters)
        self.rules.take(rules)

    def create_drafter(self, name: str, options: Mapping[str, Any] | None = None) -> Drafter:
        """Makes a drafter by name, or one merged drafter from names joined by `+`.

        Args:
            name: "eagle", or "eagle+prompt-lookup".
            options: its keyword arguments; of a merged drafter by part: {"eagle": {...}, "prompt-lookup": {...}}, and
                `budget`, most nodes of the merged tree. An option `gamma` may be "auto".

        Raises:
            UnknownName: no such drafter.
            InvalidRequest: an option is unknown or missing, or the names cannot be merged.
        """
        if "+" not in name:
            return self._create(name, options)
        parts, options = name.split("+"), dict(options or {})
        budget = options.pop("budget", None)
        if len(set(parts)) < len(parts):
            raise InvalidRequest(f"a merged drafter must have different parts, got {name!r}")
        for part in parts:
            self.drafters.plugin(part)  # an unknown part is a clearer complaint than its unknown options
        for part, part_options in options.items():
            if part not in parts or not isinstance(part_options, Mapping):
                raise InvalidRequest(
                    f"options of {name!r} must be given by part, like {{{parts[0]!r}: {{'option': value}}}}, except "
                    f"budget; got {part!r}: {part_options!r}"
                )
        if self.merger is None:
            raise InvalidRequest(f"this registry cannot merge drafters ({name!r}): its merger is None")
        return self.merger([self._create(part, options.get(part)) for part in parts], budget=budget)

    def _create(self, name: str, options: Mapping[str, Any] | None) -> Drafter:
        """Makes one drafter; `gamma="auto"` goes to the tuner if the drafter has a gamma of its own."""
        rest = dict(options or {})
        if rest.get("gamma") != AUTO or all(option.name != "gamma" for option in self.drafters.options(name)):
            return self.drafters.create(name, options)
        if self.tuner is None:
            raise InvalidRequest(f"this registry has nothing to choose a gamma of {name!r} with: its tuner is None")
        return self.tuner(lambda gamma: self.drafters.create(name, {**rest, "gamma": gamma}))

    def create_rule(self, name: str, options: Mapping[str, Any] | None = None) -> Rule:
        """Makes an acceptance rule by name.

        Raises:
            UnknownName: no such rule.
            InvalidRequest: an option is unknown or missing.
        """
        return self.rules.create(name, options)


def _parameters(factory: Callable[..., object]) -> list[inspect.Parameter]:
    if getattr(factory, "__init__", None) is Rule.__init__:
        return []  # a protocol's own constructor, which its subclasses inherit, shows *args and **kwargs
    return [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    ]


def _argument_docs(factory: Callable[..., object]) -> dict[str, str]:
    """Returns the `Args:` of a Google docstring, of the class or of its constructor, one line each."""
    docs: dict[str, str] = {}
    for documented in (factory, factory.__init__ if isinstance(factory, type) else None):  # type: ignore[misc]
        text = inspect.cleandoc(getattr(documented, "__doc__", None) or "")
        for section in re.findall(r"^Args:\n((?: +.*\n?|\n)+)", text, re.MULTILINE):
            entries = re.findall(r"^ {4}(\w+)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)", section, re.MULTILINE)
            docs.update({name: " ".join(doc.split()) for name, doc in entries})
    return docs


def _suggestion(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
