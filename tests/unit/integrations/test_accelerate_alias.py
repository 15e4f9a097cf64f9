"""This package under the name `accelerate`: modules, metadata, child interpreters, and how the name is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import notebook_accelerate
from tests.support.interpreters import InterpreterServer

ROOT = Path(__file__).resolve().parents[3]
START = "import sys, notebook_accelerate\nnotebook_accelerate.as_accelerate()\n"


def python(code: str, *flags: str, path: Path | None = None, interpreters: InterpreterServer | None = None) -> str:
    """Run code in a new interpreter, or in a forked one that has imported torch. Return its output."""
    folders = [str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(ROOT)])}
    arguments = [*flags, "-c", textwrap.dedent(code)]
    if interpreters is not None:
        done = interpreters.run(*arguments, env=environment)
    else:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=300
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stand_in(folder: Path) -> Path:
    """Write a package named `accelerate` that is not this one."""
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "__init__.py").write_text("__version__ = '0.0.1'\n")
    return folder


def test_modules_and_classes_are_the_same_objects(interpreters: InterpreterServer) -> None:
    python(
        START + "import accelerate, accelerate.utils.dataclasses as dataclasses, accelerate.state\n"
        "from accelerate.utils import operations\n"
        "import accelerate.commands.config.config_args, notebook_accelerate.commands.config.config_args\n"
        "assert accelerate.Accelerator is notebook_accelerate.Accelerator\n"
        "assert accelerate.utils is notebook_accelerate.utils is sys.modules['accelerate.utils']\n"
        "assert dataclasses is sys.modules['notebook_accelerate.utils.dataclasses']\n"
        "assert operations is sys.modules['notebook_accelerate.utils.operations']\n"
        "assert accelerate.state.PartialState is notebook_accelerate.PartialState\n"
        "assert accelerate.utils.__spec__.name == 'notebook_accelerate.utils'\n",
        interpreters=interpreters,
    )


def test_a_moved_module_warns(interpreters: InterpreterServer) -> None:
    python(
        START + "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import accelerate.memory_utils\n"
        "assert [each.category for each in caught] == [FutureWarning], caught\n"
        "assert 'find_executable_batch_size' in str(caught[0].message)\n",
        interpreters=interpreters,
    )


def test_finding_a_module_does_not_import_it() -> None:
    python(
        START + "from importlib.util import find_spec\n"
        "assert find_spec('accelerate') is not None and 'accelerate' not in sys.modules\n"
        "assert find_spec('accelerate.tracking') is not None\n"
        "assert 'notebook_accelerate.tracking' not in sys.modules\n"
        "assert find_spec('accelerate.absent') is None\n"
        "assert find_spec('accelerated') is None\n"
    )


def test_the_metadata_give_the_version_of_accelerate() -> None:
    python(
        START + "from importlib import metadata\n"
        "import accelerate\n"
        "assert metadata.version('accelerate') == accelerate.__version__ == '1.15.0'\n"
        "assert metadata.version('Accelerate') == '1.15.0'\n"
        "assert notebook_accelerate.__version__ != '1.15.0'\n"
        "assert metadata.distribution('accelerate').metadata['Name'] == 'accelerate'\n"
        "assert [each.metadata['Name'] for each in metadata.distributions()].count('accelerate') == 1\n"
        "assert metadata.packages_distributions()['accelerate'] == ['accelerate']\n"
        "assert metadata.version('packaging')\n"
        "named = {each.metadata['Name'] for each in metadata.distributions(path=sys.path)}\n"
        "assert 'packaging' in named and 'accelerate' not in named, 'pip searches folders'\n"
    )


def test_a_missing_module_and_a_missing_name_are_reported_by_the_imported_name() -> None:
    out = python(
        START + "import accelerate\n"
        "try:\n    import accelerate.absent\nexcept ModuleNotFoundError as error:\n    print(error)\n"
        "print(hasattr(accelerate, 'absent'))\n"
    )
    assert out.splitlines() == ["No module named 'accelerate.absent'", "False"]


def test_assignments_in_one_module_appear_in_both(interpreters: InterpreterServer) -> None:
    python(
        START + "import accelerate\n"
        "accelerate.Accelerator = int\nassert notebook_accelerate.Accelerator is int\n"
        "del accelerate.Accelerator\nassert accelerate.Accelerator is not int\n"
        "assert 'Accelerator' in dir(accelerate)\n"
        "names = {}\nexec('from accelerate import *', names)\n"
        "assert names['Accelerator'] is notebook_accelerate.Accelerator\n",
        interpreters=interpreters,
    )


def test_patches_of_functions_reach_their_callers(interpreters: InterpreterServer) -> None:
    python(
        START + "import accelerate, accelerate.accelerator, accelerate.utils.fsdp_utils as fsdp_utils\n"
        "original = fsdp_utils.fsdp2_prepare_model\n"
        "fsdp_utils.fsdp2_prepare_model = patched = lambda accelerator, model: model\n"
        "assert notebook_accelerate.utils.fsdp2_prepare_model is patched\n"
        "assert accelerate.utils.fsdp2_prepare_model is patched\n"
        "accelerate.accelerator.fsdp2_prepare_model = original\n"
        "assert notebook_accelerate.utils.fsdp2_prepare_model is fsdp_utils.fsdp2_prepare_model is original\n"
        "from notebook_accelerate.collectives import gather\n"
        "import notebook_accelerate.accelerator as home\n"
        "import torch\n"
        "accelerate.utils.operations.gather = lambda tensor: 'patched'\n"
        "assert accelerate.Accelerator(cpu=True).gather(torch.ones(1)) == 'patched'\n"
        "accelerate.utils.operations.gather = gather\n"
        "assert accelerate.Accelerator(cpu=True).gather(torch.ones(1)).tolist() == [1.0]\n"
        "from unittest import mock\n"
        "with mock.patch('accelerate.utils.operations.gather', return_value='mocked'):\n"
        "    assert accelerate.Accelerator(cpu=True).gather(torch.ones(1)) == 'mocked'\n"
        "assert accelerate.Accelerator(cpu=True).gather(torch.ones(1)).tolist() == [1.0]\n"
        "accelerate.accelerator.gather = lambda tensor: 'again'\n"
        "assert accelerate.Accelerator(cpu=True).gather(torch.ones(1)) == 'again'\n",
        interpreters=interpreters,
    )


def test_patched_classes_and_methods_take_effect(interpreters: InterpreterServer) -> None:
    python(
        START + "import accelerate\n"
        "before = accelerate.accelerator.Accelerator.__init__\n"
        "def patched(self, *args, **kwargs):\n"
        "    before(self, *args, **kwargs)\n"
        "    self.patched = True\n"
        "accelerate.accelerator.Accelerator.__init__ = patched\n"
        "from notebook_accelerate import Accelerator\n"
        "assert Accelerator(cpu=True).patched\n",
        interpreters=interpreters,
    )


def test_the_tools_of_the_standard_library_work(interpreters: InterpreterServer) -> None:
    python(
        START + "import importlib, inspect, pickle, pkgutil, importlib.resources\n"
        "import accelerate.utils.dataclasses\n"
        "assert importlib.reload(accelerate.utils.dataclasses) is accelerate.utils.dataclasses\n"
        "assert importlib.reload(accelerate) is accelerate\n"
        "assert 'class Accelerator' in inspect.getsource(accelerate.Accelerator)\n"
        "assert 'notebook cell' in inspect.getsource(accelerate)\n"
        "found = {each.name for each in pkgutil.walk_packages(accelerate.utils.__path__, 'accelerate.utils.')}\n"
        "assert 'accelerate.utils.operations' in found\n"
        "assert importlib.resources.files('accelerate').joinpath('py.typed').is_file()\n"
        "assert importlib.resources.files('accelerate.utils').joinpath('ao.py').is_file()\n"
        "kind = accelerate.utils.DistributedType.NO\n"
        "assert pickle.loads(pickle.dumps(kind)) is kind\n"
        "assert pickle.loads(b'caccelerate.state\\nPartialState\\n.') is notebook_accelerate.PartialState\n",
        interpreters=interpreters,
    )


def test_threads_import_one_module(interpreters: InterpreterServer) -> None:
    code = """
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier
    import importlib
    barrier = Barrier(16)
    def load(index):
        barrier.wait()
        name = ("accelerate", "notebook_accelerate")[index % 2] + ".utils.operations"
        return importlib.import_module(name).gather
    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(load, range(16)))
    assert len(found) == 1, found
    assert sys.modules["accelerate.utils.operations"].__spec__.name == "notebook_accelerate.utils.operations"
    """
    python(START + textwrap.dedent(code), interpreters=interpreters)


def test_child_interpreters_have_the_alias(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN'] = 'has run'\n")
    code = """
    import os, subprocess
    def ask(code):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    show = "import accelerate, importlib.metadata as m, os; print(m.version('accelerate'), os.environ['HIDDEN'])"
    print(*ask(show), *ask("import subprocess, sys; subprocess.run([sys.executable, '-c', " + repr(show) + "])"))
    run = [sys.executable, "-m", "accelerate.utils.versions"]
    print(subprocess.run(run, capture_output=True, check=True).returncode)
    notebook_accelerate.as_accelerate(False)
    print(ask("import importlib.util; print(importlib.util.find_spec('accelerate'))")[0], os.environ["PYTHONPATH"])
    """
    out = python(START + textwrap.dedent(code), path=tmp_path).split()
    assert out == ["1.15.0", "has", "run"] * 2 + ["0", "None", f"{tmp_path}{os.pathsep}{ROOT}"]


def test_workers_started_by_spawn_have_the_alias(tmp_path: Path) -> None:
    (tmp_path / "client_data.py").write_text(
        "import accelerate\n"
        "class Numbers:\n"
        "    def __len__(self):\n        return 4\n"
        "    def __getitem__(self, index):\n        return accelerate.__version__\n"
    )
    code = """
    if __name__ == "__main__":
        from torch.utils.data import DataLoader
        from client_data import Numbers
        print(*list(DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn"))[0])
    """
    assert python(START + textwrap.dedent(code), path=tmp_path).split() == ["1.15.0"]


def test_the_real_package_returns_when_the_alias_is_removed(tmp_path: Path, interpreters: InterpreterServer) -> None:
    code = """
    import accelerate
    from accelerate import Accelerator
    notebook_accelerate.as_accelerate(False)
    notebook_accelerate.as_accelerate(False)
    assert not [name for name in sys.modules if name.split(".")[0] == "accelerate"]
    import accelerate
    print(accelerate.__version__, Accelerator is notebook_accelerate.Accelerator)
    """
    out = python(START + textwrap.dedent(code), path=stand_in(tmp_path), interpreters=interpreters)
    assert out.split() == ["0.0.1", "True"]


def test_it_is_refused_if_another_package_is_imported(tmp_path: Path) -> None:
    code = """
    import accelerate, notebook_accelerate
    try:
        notebook_accelerate.as_accelerate()
    except notebook_accelerate.NotebookAccelerateError as error:
        print(error)
    """
    out = python(code, path=stand_in(tmp_path))
    assert str(tmp_path / "accelerate" / "__init__.py") in out
    assert "restart the kernel and call notebook_accelerate.as_accelerate()" in out


def test_a_library_that_found_no_accelerate_is_named(tmp_path: Path) -> None:
    (tmp_path / "diffusers.py").write_text("")
    out = python("import diffusers\n" + START, "-W", "always", path=tmp_path)
    assert out == ""
    code = "import diffusers, warnings\nwarnings.simplefilter('error')\n" + START
    with pytest.raises(AssertionError, match="the kernel has imported diffusers, which found no accelerate"):
        python(code, path=tmp_path)


def test_no_distribution_with_that_name_is_shipped() -> None:
    shipped = {path.name for path in Path(notebook_accelerate.__file__).parent.rglob("*")}
    assert not {name for name in shipped if name.startswith("accelerate") and not name.endswith((".py", ".pyc"))}
