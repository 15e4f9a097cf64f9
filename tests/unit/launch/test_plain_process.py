"""The modules of notebooks and of Lightning are listed before ranks are forked."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from notebook_accelerate.worker import plain_process

NAMES = "ipykernel.imported_later", "lightning_fabric.imported_later", "lightning_fabric.without_session"


@pytest.mark.parametrize("moves_last", [False, True])
def test_modules_imported_after_the_first_call_are_listed(monkeypatch: pytest.MonkeyPatch, *, moves_last: bool) -> None:
    first = types.ModuleType("imported_first")
    monkeypatch.setitem(sys.modules, first.__name__, first)
    plain_process.look_for_notebook()
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    interactive = vars(sys.modules[NAMES[1]])
    interactive["_IS_INTERACTIVE"] = True
    if moves_last:  # The last module of the first call is removed and imported again.
        del sys.modules[first.__name__]
        sys.modules[first.__name__] = first
    for _ in range(2):
        plain_process.look_for_notebook()
        assert NAMES[0] in plain_process._of_notebook
        assert NAMES[1] in plain_process._of_lightning
        assert NAMES[2] not in plain_process._of_lightning
    plain_process._plain_lightning(None)
    assert interactive["_IS_INTERACTIVE"] is False


def test_a_module_is_read_again_once_its_import_has_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    look = "from notebook_accelerate.worker import plain_process\nplain_process.look_for_notebook()"
    (tmp_path / "lightning_fabric.py").write_text(f"{look}\n_IS_INTERACTIVE = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "lightning_fabric", types.ModuleType("lightning_fabric"))
    del sys.modules["lightning_fabric"]
    module = importlib.import_module("lightning_fabric")
    plain_process.look_for_notebook()
    plain_process._plain_lightning(None)
    assert module._IS_INTERACTIVE is False


def test_other_threads_can_import_modules_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, tracer = itertools.count(), sys.gettrace()

    def import_one(frame: FrameType, *_: object) -> Any:
        frame.f_trace_opcodes = True
        monkeypatch.setitem(sys.modules, f"imported_{next(numbers)}", types.ModuleType("imported"))
        return import_one if frame.f_code is plain_process.look_for_notebook.__code__ else None

    sys.settrace(import_one)  # The interpreter may switch to another thread between any two instructions.
    try:
        plain_process.look_for_notebook()
    finally:
        sys.settrace(tracer)
    assert next(numbers) > 20
