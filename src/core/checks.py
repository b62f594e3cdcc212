"""Checks of the numbers and switches that drafters and rules take as options, none by name, and of equal results."""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor

from .errors import InvalidRequest


def whole_number(name: str, value: object, least: int = 1, *, hint: str = "") -> int:
    """Returns `value` as an int; NumPy's integers count as whole numbers, True and 3.0 do not.

    Args:
        name: what messages call it.
        value: what was given.
        least: the smallest that works.
        hint: what else works, for messages; follows the bound.

    Raises:
        InvalidRequest: no whole number, or one below `least`.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InvalidRequest(f"{name} must be a whole number >= {least}{hint}, got {value!r}")
    return int(value)


def real_number(name: str, value: object, low: float, high: float, *, ends: str = "[]") -> float:
    """Returns `value` as a float.

    Args:
        name: what messages call it.
        value: what was given.
        low: the smallest that works.
        high: the greatest that works.
        ends: `"[)"` leaves `high` itself out.

    Raises:
        InvalidRequest: no number, NaN, or one outside the interval.
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not low <= value <= high or (ends == "[)" and value == high):  # type: ignore[operator]
        raise InvalidRequest(f"{name} must be a number in {ends[0]}{low:g}, {high:g}{ends[1]}, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def switch(name: str, value: object) -> bool:
    """Returns `value`, which must be True or False: any text, "false" among them, would count as true.

    Raises:
        InvalidRequest: it is neither.
    """
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be True or False, got {value!r}")
    return value


def same_but_for_rounding(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether what a model makes of the same input after it was rearranged is what it made before.

    Args:
        found: of any shape.
        expected: of that shape.
        dtype: what the model computes in; its results may be of another type.
    """
    error = float((found.float() - expected.float()).abs().max() / expected.float().std())
    return error < (1e-3 if dtype in (torch.float32, torch.float64) else 0.1)
