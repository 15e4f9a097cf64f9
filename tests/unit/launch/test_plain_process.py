"""The modules of notebooks and of Lightning are listed before ranks are forked."""

from __future__ import annotations

import sys
import types

import pytest

from notebook_accelerate.worker import plain_process

NAMES = "ipykernel.imported_later", "lightning_fabric.imported_later", "lightning_fabric.without_session"


def test_modules_imported_after_the_first_call_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_process.look_for_notebook()
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interactive = vars(sys.modules[NAMES[1]])
    interactive["_IS_INTERACTIVE"] = True
    plain_process.look_for_notebook()
    assert plain_process._of_notebook is not None
    assert NAMES[0] in plain_process._of_notebook
    assert NAMES[1] in plain_process._of_lightning
    assert NAMES[2] not in plain_process._of_lightning
    plain_process._plain_lightning(None)
    assert interactive["_IS_INTERACTIVE"] is False
