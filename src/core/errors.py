"""The errors Draftwood raises at its boundary. Each is also a ValueError or a LookupError."""


class DraftwoodError(Exception):
    """Base of every error that Draftwood raises on purpose."""


class InvalidRequest(DraftwoodError, ValueError):
    """An argument has a value that cannot work; the message says which would."""


class UnsupportedModel(DraftwoodError, ValueError):
    """The model cannot take a token tree; the message names the layer kind that prevents it."""


class VocabularyMismatch(DraftwoodError, ValueError):
    """Target and draft speak different vocabularies; the message names both sides."""


class InvalidCheckpoint(DraftwoodError, ValueError):
    """A file of weights or settings is broken or does not fit; the message names file and key."""


class ModelNotFound(DraftwoodError, LookupError):
    """No model is where the caller said; the message names the place and what would work."""


class UnknownName(DraftwoodError, LookupError):
    """No plugin of that name; the message lists the known names and the broken plugins."""


class DuplicateName(DraftwoodError, ValueError):
    """Two plugins claim one name."""


REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
"""What modelling code raises when it meets a mask, a position, a cache or an attention that it does not expect."""
