"""What panels bring to the browser: scripts and style sheets beside this module."""

from __future__ import annotations

from importlib.resources import files


def asset(name: str) -> str:
    """Return the text of a file in ``static/``."""
    return files(__package__).joinpath("static").joinpath(name).read_text(encoding="utf-8")


def script(*names: str) -> str:
    """Return files of ``static/`` as one module: what they share is written before what uses it.

    A widget's script reaches the browser as one text, which cannot import another one.
    """
    return "\n".join(asset(name) for name in names)


__all__ = ["asset", "script"]
