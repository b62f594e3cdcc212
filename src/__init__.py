"""Draftwood: draft trees, verify losslessly."""

from .as_generate import as_generate
from .core.drafter import Drafter, DraftSession, Observation
from .core.errors import (
    DraftwoodError,
    DuplicateName,
    InvalidCheckpoint,
    InvalidRequest,
    ModelNotFound,
    UnknownName,
    UnsupportedModel,
    VocabularyMismatch,
)
from .core.proposal import Proposal, Verdict
from .core.registry import hookimpl
from .core.target import Target
from .core.tree import TokenTree
from .decoder import Decoder, Generation, StreamStep
from .study.report import Report
from .study.run import compare
from .study.verification import verify_drafters

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "DraftSession",
    "Drafter",
    "DraftwoodError",
    "DuplicateName",
    "Generation",
    "InvalidCheckpoint",
    "InvalidRequest",
    "ModelNotFound",
    "Observation",
    "Proposal",
    "Report",
    "StreamStep",
    "Target",
    "TokenTree",
    "UnknownName",
    "UnsupportedModel",
    "Verdict",
    "VocabularyMismatch",
    "as_generate",
    "compare",
    "hookimpl",
    "verify_drafters",
]
