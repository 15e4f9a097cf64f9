"""`mypy --strict` on a user's files finds a real signature for every public name, and an error in each wrong use.

All files are checked in one run of mypy with the configuration of pyproject.toml, so that the run shares the cache of
`make lint`. Checking torch takes most of the time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    path.relative_to(ROOT).with_suffix("")
    for folder in ("notebook_accelerate", "widgets")
    for path in (ROOT / folder).rglob("*.py")
    if "\nreexport(__name__)\n" in path.read_text()
}
LAZY_MODULES = sorted(
    ".".join(path.parts).removesuffix(".__init__").replace("widgets", "notebook_accelerate.widgets") for path in FILES
)
"""Modules whose names are loaded on first use."""

RIGHT_USES = """
import torch
from typing_extensions import assert_type

import notebook_accelerate
from notebook_accelerate import (
    Accelerator,
    DistributedType,
    GradScalerKwargs,
    LaunchConfig,
    Run,
    WorkerError,
    find_executable_batch_size,
    infer_auto_device_map,
    init_empty_weights,
    notebook_launcher,
)
from notebook_accelerate.hooks import ModelHook, add_hook_to_module
from notebook_accelerate.tracking import GeneralTracker
from notebook_accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from notebook_accelerate.utils import gather, send_to_device, set_seed, tqdm
from notebook_accelerate.utils.random import synchronize_rng_states


def train(epochs: int) -> float:
    set_seed(1, device_specific=True)
    accelerator = Accelerator(
        mixed_precision="bf16",
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        project_config=ProjectConfiguration(project_dir="runs"),
    )
    assert_type(accelerator.distributed_type, DistributedType)
    with init_empty_weights():
        model = torch.nn.Linear(2, 2)
    assert_type(infer_auto_device_map(model, {0: "1GB"}), "dict[str, int | str | torch.device]")
    add_hook_to_module(model, ModelHook())
    prepared = accelerator.prepare_model(model)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in tqdm(range(epochs)):
        loss: torch.Tensor = prepared(torch.ones(2, device=accelerator.device)).sum()
        accelerator.backward(loss)
        assert_type(accelerator.clip_grad_norm_(model.parameters(), 1.0), torch.Tensor)
        optimizer.step()
        optimizer.zero_grad()
        assert_type(accelerator.gather_for_metrics((loss, [loss])), tuple[torch.Tensor, list[torch.Tensor]])
        assert_type(accelerator.reduce(loss, "mean"), torch.Tensor)
    with accelerator.split_between_processes(["a", "b"]) as share:
        assert_type(share, list[str])
    with accelerator.main_process_first(), accelerator.profile() as profiler:
        profiler.step()
    assert_type(send_to_device({"x": loss}, accelerator.device), dict[str, torch.Tensor])
    assert_type(accelerator.save_state("folder"), str)
    assert_type(accelerator.get_tracker("live"), GeneralTracker)
    assert_type(accelerator.scaler_handler, "GradScalerKwargs | None")
    assert_type(accelerator.on_main_process(fit)(3), "int | None")
    on_first = accelerator.on_process(process_index=0)
    assert_type(on_first(fit)(epochs=3), "int | None")
    assert_type(gather(loss), torch.Tensor)
    synchronize_rng_states(["torch"])
    return float(loss)


@find_executable_batch_size(starting_batch_size=64)
def fit(batch_size: int, epochs: int) -> int:
    return batch_size * epochs


assert_type(fit(3), int)

run = notebook_launcher(train, (3,), num_processes=2, config=LaunchConfig(max_restarts=1), block=False)
assert_type(run, Run)
assert_type(run.logs(rank=0), list[str])
try:
    run.wait(timeout=10)
except WorkerError as error:
    assert error.run is not None
    assert_type(error.run.logs(), list[str])
    assert_type(error.run.report().text, str)
    assert_type(error.rank, "int | None")
    error.run.debug(error.rank)
    if isinstance(error.run, Run):
        error.run.diagnose()
assert_type(list(notebook_accelerate.runs()), list[Run])
notebook_accelerate.utils.random.set_seed(1)
assert_type(notebook_accelerate.__version__, str)
"""

WRONG_USES = """
import notebook_accelerate
from notebook_accelerate import acelerator  # E: attr-defined
from notebook_accelerate.utils import set_sed  # E: attr-defined
from notebook_accelerate.utils.random import set_sed as also_wrong  # E: attr-defined
from notebook_accelerate import Accelerator, LaunchConfig, WorkerError, cpu_offload, init_empty_weights
from notebook_accelerate import notebook_launcher
from notebook_accelerate.utils import DistributedType, send_to_device, set_seed


def train(epochs: int) -> None:
    accelerator = Accelerator(mixed_precison="bf16")  # E: call-arg
    accelerator = Accelerator(gradient_accumulation_steps="2")  # E: arg-type
    accelerator.prepare_modle()  # E: attr-defined
    accelerator = Accelerator(fsdp_plugin="fsdp")  # E: arg-type
    accelerator.backward("loss")  # E: arg-type
    accelerator.save_model("folder")  # E: call-arg arg-type
    accelerator.device = "cuda"  # E: misc assignment
    DistributedType.NOPE  # E: attr-defined
    set_seed("1")  # E: arg-type
    send_to_device([1])  # E: call-arg
    init_empty_weights(include_bufers=True)  # E: call-arg
    cpu_offload("model")  # E: arg-type


notebook_launcher(train, (3,), processes=2)  # E: call-arg
notebook_launcher(train, 3)  # E: arg-type
run = notebook_launcher(train, (3,), num_processes="2")  # E: arg-type
run.log()  # E: attr-defined
LaunchConfig(2)  # E: call-arg
try:
    run.wait()
except WorkerError as error:
    error.run.logs()  # E: union-attr
    assert error.run is not None
    error.run.report().txt  # E: attr-defined
    error.run.stop_now()  # E: attr-defined
    len(error.rank)  # E: arg-type
notebook_accelerate.utils.randon  # E: attr-defined
notebook_accelerate.reexport  # E: attr-defined
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[str]]]:
    """Return mypy's messages by file and line."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "right.py").write_text(RIGHT_USES)
    (folder / "wrong.py").write_text(WRONG_USES)
    (folder / "names.py").write_text("\n".join(_uses_of_every_name()))
    options = ["--strict", f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(path.name for path in folder.iterdir())],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # mypy treats a package on PYTHONPATH as installed.
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for line in done.stdout.splitlines():
        if match := re.match(r"(\w+\.py):(\d+): (.*)", line):
            found[match[1]][int(match[2])].append(match[3])
    return found


def _uses_of_every_name() -> list[str]:
    lines = []
    for module in LAZY_MODULES:
        lines.append(f"from {module} import no_such_name")
        for name in import_module(module).__all__:
            lines += [f"from {module} import {name} as {name}_{len(lines)}", f"reveal_type({name}_{len(lines)})"]
    return lines


def test_correct_uses_have_no_errors(messages: dict[str, dict[int, list[str]]]) -> None:
    assert messages["right.py"] == {}


def test_wrong_uses_are_errors(messages: dict[str, dict[int, list[str]]]) -> None:
    lines = enumerate(WRONG_USES.splitlines(), start=1)
    expected = {number: line.partition("# E: ")[2] for number, line in lines if "# E: " in line}
    codes = {
        number: re.findall(r"error: .*\[([a-z-]+)\]", "\n".join(texts))
        for number, texts in messages["wrong.py"].items()
    }
    assert codes == {number: code.split() for number, code in expected.items()}


def test_every_public_name_has_a_type(messages: dict[str, dict[int, list[str]]]) -> None:
    lines = dict(enumerate(_uses_of_every_name(), start=1))
    revealed = {line: messages["names.py"][number] for number, line in lines.items() if "reveal_type" in line}
    assert len(revealed) > 700
    typed = re.compile(r'note: Revealed type is "(?!Any"|Unknown).+"')
    assert [line for line, texts in revealed.items() if not (len(texts) == 1 and typed.fullmatch(texts[0]))] == []


def test_an_unknown_name_of_every_lazy_module_is_an_error(messages: dict[str, dict[int, list[str]]]) -> None:
    lines = dict(enumerate(_uses_of_every_name(), start=1))
    errors = {number: " ".join(texts) for number, texts in messages["names.py"].items()}
    unknown = {number: line for number, line in lines.items() if line.endswith("import no_such_name")}
    assert len(unknown) == len(LAZY_MODULES) > 25
    assert [line for number, line in unknown.items() if "[attr-defined]" not in errors.get(number, "")] == []
