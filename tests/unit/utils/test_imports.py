"""Checks of packages, versions and devices, which import no large package."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from notebook_accelerate.hardware.versions import compare_versions, is_torch_version
from notebook_accelerate.utils import imports

CHECKS = [
    name
    for name, check in vars(imports).items()
    if name.startswith("is_") and inspect.isfunction(check) and name not in {"is_package", "is_torch_version"}
]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_check_returns_a_bool(name: str) -> None:
    assert getattr(imports, name)() in {True, False}


def test_checks_import_no_large_package() -> None:
    # These two checks have to import torch or bitsandbytes.
    asking = {"is_torch_distributed_available", "is_bitsandbytes_multi_backend_available"}
    names = [name for name in CHECKS if name not in asking]
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from notebook_accelerate.utils import imports\n"
        f"for name in {names}: getattr(imports, name)()\n"
        "print(sorted({'torch', 'numpy', 'pandas', 'rich', 'torchdata'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip() == "[]"


def test_packages_are_checked_by_import_and_version() -> None:
    assert imports.is_package("pytest")
    assert not imports.is_package("no_such_package_here")
    assert imports.is_package("numpy", minimum="1.0")
    assert not imports.is_package("numpy", minimum="99")
    assert imports.is_pytest_available()
    assert imports.is_weights_only_available()


def test_a_folder_named_like_a_package_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(imports, "installed_version", lambda _: None)
    assert imports.is_wandb_available() is False


def test_rich_must_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert imports.is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "yes")
    assert imports.is_rich_available() is imports.is_package("rich")


def test_xla_can_be_disabled_and_has_one_device_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_package", lambda name: name == "torch_xla")
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert imports.is_torch_xla_available()
    assert imports.is_torch_xla_available(check_is_tpu=True)
    assert not imports.is_torch_xla_available(check_is_gpu=True)
    assert imports.is_bf16_available()
    assert not imports.is_bf16_available(ignore_tpu=True)
    monkeypatch.setenv("USE_TORCH_XLA", "false")
    assert not imports.is_torch_xla_available()
    with pytest.raises(ValueError, match="cannot both be True"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_deprecated_checks_name_their_replacement() -> None:
    with pytest.warns(FutureWarning, match="is_tpu_available is deprecated: write is_torch_xla_available"):
        imports.is_tpu_available()
    with pytest.warns(FutureWarning, match="is_ipex_available is deprecated: write is_xpu_available"):
        imports.is_ipex_available()


def test_missing_packages_are_named_before_a_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "is_torchao_available", lambda: False)

    @imports.torchao_required
    def convert() -> None:
        raise AssertionError("this function must not run")

    with pytest.raises(ImportError, match="convert needs torchao, which is not installed: pip install"):
        convert()


def test_versions_compare_by_package_or_by_value() -> None:
    assert compare_versions("pytest", "==", version("pytest"))
    assert compare_versions("numpy", ">", "0.1")
    with pytest.raises(ValueError, match="operation='=>' is not allowed; pass one of >, >=, =="):
        compare_versions("numpy", "=>", "1.0")
    with pytest.raises(PackageNotFoundError):
        compare_versions("no_such_package_here", ">", "1.0")


def test_the_build_suffix_of_torch_is_ignored() -> None:
    import torch

    public = str(torch.__version__).split("+")[0]
    assert is_torch_version("==", public)
    assert not is_torch_version(">", public)
    assert is_torch_version(">=", "2.9")
