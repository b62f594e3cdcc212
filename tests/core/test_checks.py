"""Numbers are let through as what they are; what is no number, or too small or great, is refused with its value."""

import math

import numpy as np
import pytest

from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.errors import InvalidRequest


@pytest.mark.parametrize("value", [1, 7, np.int64(7)])
def test_whole_numbers(value):
    got = whole_number("gamma", value)
    assert got == value and type(got) is int


@pytest.mark.parametrize("value", [0, -1, 2.5, 3.0, True, None, "3", {"x": 3}, [1], 1j, math.nan])
def test_no_whole_numbers(value):
    with pytest.raises(InvalidRequest) as refused:
        whole_number("gamma", value, hint=", or None")
    assert str(refused.value) == f"gamma must be a whole number >= 1, or None, got {value!r}"


def test_the_least_whole_number():
    assert whole_number("ngram", 2, 2) == 2
    with pytest.raises(InvalidRequest, match="ngram must be a whole number >= 2, got 1"):
        whole_number("ngram", 1, 2)


@pytest.mark.parametrize("value", [0, 0.0, 0.5, np.float32(0.5), 1])
def test_real_numbers(value):
    got = real_number("epsilon", value, 0.0, 1.0)
    assert got == value and type(got) is float


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan, math.inf, "x", None, True, {"x": 1}, 1j])
def test_no_real_numbers(value):
    with pytest.raises(InvalidRequest) as refused:
        real_number("epsilon", value, 0.0, 1.0)
    assert str(refused.value) == f"epsilon must be a number in [0, 1], got {value!r}"


def test_an_open_end():
    assert real_number("threshold", 0.999, 0.0, 1.0, ends="[)") == 0.999
    with pytest.raises(InvalidRequest, match=r"threshold must be a number in \[0, 1\), got 1"):
        real_number("threshold", 1, 0.0, 1.0, ends="[)")


def test_switches():
    assert switch("adaptive", True) is True and switch("adaptive", False) is False
    for value in ("false", 0, 1, None):
        with pytest.raises(InvalidRequest, match=f"adaptive must be True or False, got {value!r}"):
            switch("adaptive", value)
