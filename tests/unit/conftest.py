"""The server of interpreters, shared by the tests of all folders."""

from __future__ import annotations

from tests.support.interpreters import interpreters

__all__ = ["interpreters"]
