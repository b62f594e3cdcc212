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
from .serving import Exported, export
from .study.explain import explain_parameters, explain_trace
from .study.prompts import PromptSet, StudyPrompt, load_prompts
from .study.report import Report
from .study.run import compare
from .study.trace import load_trace, record, save_trace
from .study.verification import verify_drafters

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "DraftSession",
    "Drafter",
    "DraftwoodError",
    "DuplicateName",
    "Exported",
    "Generation",
    "InvalidCheckpoint",
    "InvalidRequest",
    "ModelNotFound",
    "Observation",
    "PromptSet",
    "Proposal",
    "Report",
    "StreamStep",
    "StudyPrompt",
    "Target",
    "TokenTree",
    "UnknownName",
    "UnsupportedModel",
    "Verdict",
    "VocabularyMismatch",
    "as_generate",
    "compare",
    "explain_parameters",
    "explain_trace",
    "export",
    "hookimpl",
    "load_prompts",
    "load_trace",
    "record",
    "save_trace",
    "verify_drafters",
]
