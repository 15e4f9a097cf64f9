"""The style sheet that the HTML parts of panels bring with them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def style_sheet() -> str:
    """Return the style element of run panels."""
    return f"<style>{files(__package__).joinpath('static/panel.css').read_text(encoding='utf-8')}</style>"


__all__ = ["style_sheet"]
