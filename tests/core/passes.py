"""Drafters that between them need every kind of pass of a target."""

import pytest

every_kind_of_pass = pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("lookahead+prompt-lookup", {}),
        ("layer-skip", {"skip": {"attention": [1], "mlp": [2]}}),
        ("early-exit", {"exit_layer": 2, "tree": (2, 1)}),
    ],
)
"""Whole passes, trees, views that leave layers out, resumed passes; of a target of three blocks."""
