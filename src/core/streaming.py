"""Text of a growing list of tokens, piece by piece; every piece decodes the newest tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"


class TextStream:
    """Turns tokens into text as they come. All pieces together are the text of all tokens.

    What a token says may hang on the one before it (a space that only the first one drops, a character of several
    tokens), so that tokens are decoded behind others whose text is known, and that text is taken off. Such a window
    opens where the text ended in a whole character.

    Args:
        tokenizer: of transformers; None makes no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._told = ""  # the text of the window that was handed out
        self._whole = 0  # the tokens of the window that ended in a whole character when it last did

    def push(self, tokens: Sequence[int], *, complete: bool) -> str:
        """Returns what the next tokens add to the text.

        Args:
            tokens: the next ones.
            complete: whether they are the last ones; else an incomplete character at the end is held back.
        """
        if self._tokenizer is None:
            return ""
        self._window += tokens
        text = self._decode(self._window)
        ready = text if complete else text.rstrip(_BROKEN)
        piece = ready[len(self._told) :]
        self._told = max(self._told, ready, key=len)
        if ready == text:
            self._shorten()
        return piece

    def _shorten(self) -> None:
        """Drops from the window what was there when the text last ended in a whole character, but for its echo."""
        rest = self._window[self._whole :]
        told = self._decode(rest) if self._whole else ""
        if told:  # else nothing would stand before the next token
            self._window, self._told = rest, told
        self._whole = len(self._window)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
