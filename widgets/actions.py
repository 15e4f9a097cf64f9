"""Buttons and rows of text with buttons, without widgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Action:
    """A button.

    Attributes:
        id: What a click sends.
        label: The text of the button.
        hint: What a click does.
        tone: "bad" or "first" for another colour; "": the usual one.
        enabled: Whether it can be clicked.
        interrupts: Whether a click interrupts the cell that blocks the kernel, through the notebook's server. Where
            the browser does not reach that, the button is disabled.
    """

    id: str
    label: str
    hint: str
    tone: str = ""
    enabled: bool = True
    interrupts: bool = False


@dataclass(frozen=True, kw_only=True)
class ActionRow:
    """A text and its buttons.

    Attributes:
        key: Identifies the row in later updates.
        text: The text.
        actions: The buttons.
        tone: "bad", "warn" or "".
    """

    key: str
    text: str = ""
    actions: tuple[Action, ...] = ()
    tone: str = ""
