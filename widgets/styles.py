"""The style sheet that the HTML parts of panels bring with them."""

from __future__ import annotations

from functools import cache

from notebook_accelerate.widgets.assets import asset


@cache
def style_sheet() -> str:
    """Return the style element of run panels."""
    return f"<style>{asset('panel.css')}</style>"


__all__ = ["style_sheet"]
