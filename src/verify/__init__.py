"""The acceptance rules, one file a rule. They know proposals and logits; no drafter and no model."""

from .matching import Coupled, Greedy
from .rejection import Rejection
from .traversal import Traversal
from .typical import Typical

__all__ = ["Coupled", "Greedy", "Rejection", "Traversal", "Typical"]
