"""State that ranks inherit from the thread that launches them is captured on one thread and applied on another."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accelerate.telemetry.inherited_state import apply_inherited_state, capture_inherited_state
from tests.support.interpreters import InterpreterServer


def _on_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def _settings() -> dict[str, Any]:
    return {
        "device": torch.empty(0).device.type,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "determinism": torch.get_deterministic_debug_mode(),
        "matmul": torch.get_float32_matmul_precision(),
        "anomalies": torch.is_anomaly_enabled(),
        "numpy": np.geterr()["over"],
    }


def _inherited() -> dict[str, Any]:
    """Pickle this thread's state and apply it on a new thread. Return the new thread's settings."""
    state = pickle.dumps(capture_inherited_state())

    def rank() -> dict[str, Any]:
        apply_inherited_state(pickle.loads(state))
        return _settings()

    return _on_new_thread(rank)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """Restore the settings that all threads of a process share."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)


def test_a_new_thread_lacks_the_settings_of_its_parent() -> None:
    with torch.device("meta"), torch.no_grad(), torch.autocast("cpu", torch.float16):
        found = _on_new_thread(_settings)
    assert (found["device"], found["grad"], found["autocast"][0]) == ("cpu", True, False)


def test_default_settings_are_inherited() -> None:
    assert _inherited() == _settings()


def test_the_settings_of_the_thread_are_inherited() -> None:
    with (
        torch.device("meta"),
        torch.no_grad(),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
        np.errstate(over="raise"),
    ):
        expected, found = _settings(), _inherited()
    assert found == expected
    assert (found["device"], found["grad"], found["autocast"]) == ("meta", False, (True, torch.float16))
    assert (found["autocast cache"], found["numpy"]) == (False, "raise")
    assert _settings()["device"] == "cpu"


def test_the_default_device_is_inherited_however_it_is_set() -> None:
    def kernel() -> dict[str, Any]:
        torch.set_default_device("meta")
        return _inherited()

    assert _on_new_thread(kernel)["device"] == "meta"


def test_inference_mode_is_inherited() -> None:
    with torch.inference_mode():
        state = capture_inherited_state()

    def rank() -> tuple[bool, bool]:
        apply_inherited_state(state)
        import gc

        gc.collect()
        return torch.is_inference_mode_enabled(), torch.ones(1).is_inference()

    assert _on_new_thread(rank) == (True, True)
    assert not torch.is_inference_mode_enabled()


def test_the_random_state_is_inherited_and_the_kernels_own_is_unchanged() -> None:
    torch.manual_seed(0)
    state = capture_inherited_state()
    expected = torch.rand(3).tolist(), np.random.rand(3).tolist()  # noqa: NPY002 - the generator that is inherited
    apply_inherited_state(state)
    assert (torch.rand(3).tolist(), np.random.rand(3).tolist()) == expected  # noqa: NPY002 - the same


_RANK = """
import json, pickle, sys, torch
from notebook_accelerate.telemetry import inherited_state
kernel = sys.argv[1] == "kernel"
if kernel:
    exec(sys.argv[2])
    print(pickle.dumps(inherited_state.capture_inherited_state()).hex())
else:
    inherited_state.apply_inherited_state(pickle.loads(bytes.fromhex(input())))
    print(json.dumps(eval(sys.argv[2])))
"""


def _captured(interpreters: InterpreterServer, setup: str) -> str:
    """Run ``setup`` in an interpreter and return its state."""
    kernel = interpreters.run("-c", _RANK, "kernel", setup, env=os.environ)
    assert kernel.returncode == 0, kernel.stderr
    return kernel.stdout


def _applied(interpreters: InterpreterServer, state: str, expression: str) -> Any:
    """Apply a state in an interpreter and return the value of ``expression`` there."""
    rank = interpreters.run("-c", _RANK, "rank", expression, env=os.environ, answers=state)
    assert rank.returncode == 0, rank.stderr
    return json.loads(rank.stdout)


def _in_processes(interpreters: InterpreterServer, setup: str, expression: str) -> Any:
    """Run ``setup`` in one interpreter and apply its state in another. Return the value of ``expression`` there."""
    return _applied(interpreters, _captured(interpreters, setup), expression)


def test_a_process_that_is_not_forked_inherits_the_settings_of_the_process(interpreters: InterpreterServer) -> None:
    setup = """
torch.backends.cudnn.benchmark = True
torch.backends.cuda.enable_flash_sdp(False)
torch.backends.cudnn.allow_tf32 = False
torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_warn_always(True)
torch.set_default_dtype(torch.float64)
torch.autograd.set_detect_anomaly(True, check_nan=False)
torch.set_float32_matmul_precision("medium")
"""
    names = (
        "torch.backends.cudnn.benchmark",
        "torch.backends.cuda.flash_sdp_enabled()",
        "torch.backends.cudnn.allow_tf32",
        "torch.get_deterministic_debug_mode()",
        "torch.is_warn_always_enabled()",
        "str(torch.get_default_dtype())",
        "torch.is_anomaly_enabled()",
        "torch.is_anomaly_check_nan_enabled()",
        "torch.get_float32_matmul_precision()",
    )
    expected = [True, False, False, 1, True, "torch.float64", True, False, "medium"]
    assert _in_processes(interpreters, setup, f"[{', '.join(names)}]") == expected


_NUMBERS = "[torch.rand(1).item(), __import__('numpy').random.rand(), __import__('random').random()]"


@pytest.mark.parametrize(
    "setup",
    [
        "torch.manual_seed(0)",
        "torch.manual_seed(-1)",
        "torch.manual_seed(1 << 60)",
        "torch.cuda.manual_seed(0)",
        "import numpy; numpy.random.seed(0)",
        "import random; random.seed(0)",
        "import random; random.setstate(random.getstate()); random.random(); random.seed(0); random.random()",
        "import notebook_accelerate.utils; notebook_accelerate.utils.set_seed(0)",
    ],
)
def test_ranks_of_a_seeded_kernel_draw_the_same_numbers(interpreters: InterpreterServer, setup: str) -> None:
    setup = f"import numpy.random\n{setup}"
    state = _captured(interpreters, setup)
    first, second = (_applied(interpreters, state, _NUMBERS) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    "setup",
    [
        "pass",
        "import numpy; torch.rand(10_000); numpy.random.rand(10_000)",
        "import random; [random.random() for _ in range(10_000)]",
        "torch.set_rng_state(torch.get_rng_state())",
    ],
)
def test_ranks_of_a_kernel_that_was_not_seeded_draw_other_numbers(interpreters: InterpreterServer, setup: str) -> None:
    state = _captured(interpreters, setup)
    first, second = (_applied(interpreters, state, _NUMBERS) for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_precisions_set_with_the_newer_settings_are_inherited(interpreters: InterpreterServer) -> None:
    """After a precision is set in this way, torch raises a RuntimeError if the older function is called to read it."""
    setup = "torch.backends.cuda.matmul.fp32_precision = 'tf32'; torch.backends.mkldnn.matmul.fp32_precision = 'bf16'"
    expression = "[torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]"
    assert _in_processes(interpreters, setup, expression) == ["tf32", "bf16"]


def test_capture_omits_the_index() -> None:
    """With an index, all ranks would use the same device."""

    def kernel() -> dict[str, Any]:
        torch.set_default_device("cuda:1")
        return capture_inherited_state().thread

    assert _on_new_thread(kernel)["device"] == "cuda"


def test_capture_starts_no_accelerator() -> None:
    """``torch.get_default_device`` would create a tensor, which fails here, and in a kernel creates a CUDA context."""

    def kernel() -> dict[str, Any]:
        torch.set_default_device("cuda")
        return capture_inherited_state().thread

    assert _on_new_thread(kernel)["device"] == "cuda"
    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
