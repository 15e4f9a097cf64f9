"""The modules of notebooks and of Lightning are listed before ranks are forked."""

from __future__ import annotations

import sys
import types

import pytest

from notebook_accelerate.worker import plain_process

NAMES = "ipykernel.imported_later", "lightning_fabric.imported_later", "lightning_fabric.without_session"


@pytest.mark.parametrize("moves_last", [False, True])
def test_modules_imported_after_the_first_look_are_listed(monkeypatch: pytest.MonkeyPatch, *, moves_last: bool) -> None:
    first = types.ModuleType("imported_first")
    monkeypatch.setitem(sys.modules, first.__name__, first)
    plain_process.look_for_notebook()
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interactive = vars(sys.modules[NAMES[1]])
    interactive["_IS_INTERACTIVE"] = True
    if moves_last:  # The last module of the first look is removed and imported again.
        del sys.modules[first.__name__]
        sys.modules[first.__name__] = first
    for _ in range(2):
        plain_process.look_for_notebook()
        assert plain_process._of_notebook.count(NAMES[0]) == 1
        assert plain_process._of_lightning.count(NAMES[1]) == 1
        assert NAMES[2] not in plain_process._of_lightning
    plain_process._plain_lightning(None)
    assert interactive["_IS_INTERACTIVE"] is False
