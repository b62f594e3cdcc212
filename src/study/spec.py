"""Drafters in one word: `prompt-lookup`, `prompt-lookup:gamma=8,max_ngram=3`, and grids `prompt-lookup:gamma=4|8`.

This module knows the notation only; whether a name or an option exists is the registry's to say.
"""

from __future__ import annotations

import ast
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.drafter import Drafter
from ..core.errors import InvalidRequest


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter of a study.

    Attributes:
        name: its name in the registry, or the class name of a drafter that is already built.
        options: its options; those of a merged drafter by part.
        built: the drafter itself, where the caller built it.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    built: Drafter | None = None

    @property
    def label(self) -> str:
        """What tables call it; the notation that `parse_specs` reads."""
        flat = [
            (f"{key}.{inner}", deep) if isinstance(value, Mapping) else (key, value)
            for key, value in self.options.items()
            for inner, deep in (value.items() if isinstance(value, Mapping) else [("", value)])
        ]
        return self.name + (":" if flat else "") + ",".join(f"{key}={_show(value)}" for key, value in flat)


def as_specs(drafter: Any) -> list[DrafterSpec]:
    """Returns what `compare` was given for one drafter as specs: several if it is a grid.

    Args:
        drafter: a name or the notation of `parse_specs`, a (name, options) pair, a `Drafter`, or a spec.

    Raises:
        InvalidRequest: none of these.
    """
    match drafter:
        case DrafterSpec():
            return [drafter]
        case str():
            return parse_specs(drafter)
        case (str(name), Mapping() as options):
            return [DrafterSpec(name, dict(options))]
        case Drafter():
            return [DrafterSpec(type(drafter).__name__, built=drafter)]
    raise InvalidRequest(f"a drafter is a name, a (name, options) pair or a Drafter, got {drafter!r}")


def parse_specs(text: str) -> list[DrafterSpec]:
    """Reads one word, of the command line say; values separated by `|` make a grid.

    Raises:
        InvalidRequest: an option without `=`, or no name.
    """
    name, options = parse_spec(text, grid=True)
    choices = [[(key, value) for value in values] for key, values in options.items()]
    return [DrafterSpec(name, nest(dict(choice))) for choice in itertools.product(*choices)]


def parse_spec(text: str, *, grid: bool = False) -> tuple[str, dict[str, Any]]:
    """Parts `name:option=value,option=value`.

    Args:
        text: the notation; `part.option=value` is an option of one part of a merged drafter.
        grid: read `a|b` as a list of values, and leave dotted names as they are.
    """
    name, _, rest = text.partition(":")
    if not name.strip():
        raise InvalidRequest(f"expected a name, as in 'prompt-lookup:gamma=8', got {text!r}")
    options: dict[str, Any] = {}
    for part in _split(rest, ",") if rest else []:
        key, value = parse_option(part, raw=True)
        options[key] = [parse_value(one) for one in _split(value, "|")] if grid else parse_value(value)
    return name.strip(), options if grid else nest(options)


def parse_option(text: str, *, raw: bool = False) -> tuple[str, Any]:
    """Parts `key=value`.

    Raises:
        InvalidRequest: there is no `=` or no key.
    """
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise InvalidRequest(f"an option must look like key=value, got {text!r}")
    return key.strip(), value if raw else parse_value(value)


def parse_value(text: str) -> Any:
    """Returns a JSON or Python scalar, list or dict; anything else (a path, a name) stays a text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


def _split(text: str, separator: str) -> list[str]:
    """Splits outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        if character == separator and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def nest(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with those named `part.option` gathered by part.

    Raises:
        InvalidRequest: a part is also given as an option of its own.
    """
    nested: dict[str, Any] = {}
    for key, value in options.items():
        part, dot, inner = key.partition(".")
        if dot and part in options:
            raise InvalidRequest(f"give {part} or {key}, not both; got {part}={options[part]!r} and {key}={value!r}")
        if dot:
            nested.setdefault(part, {})[inner] = value
        else:
            nested[key] = value
    return nested


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def unique(specs: Sequence[DrafterSpec]) -> list[DrafterSpec]:
    """Returns the specs without repetitions, `none` first: every study has its baseline.

    Drafters of one class that were built with different options are told apart by a number.
    """
    kept = {"none": DrafterSpec("none")}
    for spec in specs:
        number = 1
        while spec.built is not None and spec.label in kept and kept[spec.label].built is not spec.built:
            number += 1
            spec = replace(spec, name=f"{type(spec.built).__name__}#{number}")
        kept.setdefault(spec.label, spec)
    return list(kept.values())
