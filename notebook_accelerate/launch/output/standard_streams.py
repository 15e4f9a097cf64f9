"""Write to the kernel's standard streams, which the user may have replaced with any object."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any


class StandardStream:
    """A standard stream of the kernel. Writing to it never raises an error.

    The stream may be None (under pythonw and some servers), may be broken, or may have only a `write` method. If its
    encoding lacks a character, the character is escaped. A stream that raises an error is not used again.

    Args:
        stream: The stream to write to, or None to discard everything.
        name: "stdout" or "stderr".
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._broken = False

    def write(self, text: str) -> None:
        """Write ``text`` and flush the stream. Do nothing if the stream is closed or missing."""
        stream = self._stream
        if stream is None or self._broken:
            return
        try:
            if getattr(stream, "closed", False):
                return
            try:
                stream.write(text)
            except UnicodeEncodeError:
                stream.write(escape(text, stream))
            if hasattr(stream, "flush"):
                stream.flush()
        except Exception as error:  # noqa: BLE001 - a user's stream may raise any error
            self._broken = True
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        text = f"sys.{self._name} raised {type(error).__name__}: {error}; run.logs() returns the ranks' output"
        with suppress(Exception):  # Warnings may be configured to raise errors, or may be written to this very stream.
            warnings.warn(text, stacklevel=3)


def escape(text: str, stream: Any) -> str:
    """Return ``text`` with escapes in place of the characters that a stream cannot encode."""
    encoding = getattr(stream, "encoding", None)
    encoding = encoding if isinstance(encoding, str) else "ascii"
    try:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    except LookupError:
        return text.encode("ascii", "backslashreplace").decode("ascii")
