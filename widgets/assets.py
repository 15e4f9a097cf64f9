"""The scripts and style sheets of panels, in ``static/``."""

from __future__ import annotations

from importlib.resources import files


def asset(name: str) -> str:
    """Return the text of a file in ``static/``."""
    return files(__package__).joinpath("static").joinpath(name).read_text(encoding="utf-8")


def script(*names: str) -> str:
    """Return files of ``static/`` as one module, in this order: definitions before their uses.

    A widget's script is sent to the browser as one text, which cannot import other files.
    """
    return "\n".join(asset(name) for name in names)
