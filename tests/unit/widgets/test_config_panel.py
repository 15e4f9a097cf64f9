"""The config panel without a browser. Entries and clicks are simulated."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml

import notebook_accelerate
from notebook_accelerate import attach
from notebook_accelerate.config.config_file import ClusterConfig
from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin
from notebook_accelerate.config.kwargs_handlers import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch import KernelFacts
from notebook_accelerate.widgets import ConfigPanel, TrainingOptions, config_file_form
from notebook_accelerate.widgets.fields import groups_of
from tests.support.detached import user_folder

CPU = HardwareInfo(accelerator="cpu", count=0, cpu_count=8, memory_bytes=2**34, host="jupyter", loopback="lo")
GPUS = HardwareInfo(accelerator="cuda", count=4, cpu_count=16, memory_bytes=2**36, host="colab", loopback="lo")
SAFE = KernelFacts(environment={})


def _panel(machine: HardwareInfo = CPU, facts: KernelFacts = SAFE, **values: Any) -> ConfigPanel:
    return ConfigPanel(machine=machine, facts=lambda: facts, **values)


def _set(panel: ConfigPanel, **values: Any) -> ConfigPanel:
    for name, value in values.items():
        form = panel.launch_form if name in LaunchConfig.__dataclass_fields__ else panel.training_form
        form.enter(name, value)
    return panel


def _call(panel: ConfigPanel, function: str, arguments: str) -> None:
    panel.widget.enter("call.function", function)
    panel.widget.enter("call.arguments", arguments)


NUMBERS = object()
"""A value that cannot be written as code, so that a variable must name it."""


def double(number: int) -> int:
    return 2 * number


def fail() -> None:
    raise KeyError("lost")


# ---- the plan


def test_the_sentence_describes_the_plan() -> None:
    panel = _set(_panel(), num_processes="2", mixed_precision="bf16", batch_size="8", gradient_accumulation_steps="4")
    assert panel.sentence == "2 processes on cpu, fork, gloo, bf16; effective batch: 64"
    assert panel.sentence in panel.widget.texts["plan"]
    assert "8 per process × 2 processes × 4 accumulation steps" in panel.widget.texts["plan"]


def test_the_sentence_follows_the_hardware_and_the_kernel() -> None:
    assert _panel(GPUS).sentence == "4 processes on cuda, fork, nccl, fp32; effective batch: 4 × your loader's"
    busy = KernelFacts(environment={}, fork_hazard=lambda: "CUDA is initialised in the kernel")
    panel = _panel(GPUS, busy)
    assert panel.sentence.startswith("4 processes on cuda, zygote, nccl")
    assert "zygote: CUDA is initialised in the kernel" in panel.widget.texts["plan"]
    assert _set(panel, cpu=True).sentence.startswith("1 process on cpu, zygote, fp32")
    assert _set(panel, num_nodes="2", num_processes="3").sentence.startswith("3 processes of 6 on cpu, zygote, gloo")


def test_more_processes_than_cores_have_a_caution() -> None:
    panel = _set(_panel(), num_processes="8")
    assert panel.caution == ""
    _set(panel, num_processes="9")
    assert panel.caution == "9 processes share 8 CPU cores, so each one trains more slowly."
    assert panel.caution in panel.widget.texts["plan"]
    assert panel.caution in panel.bundle["text/plain"]
    assert panel.widget.disabled == [], "a caution must not disable the button"
    _set(panel, num_processes="0")
    assert panel.caution == ""
    assert panel.widget.disabled == ["launch", "cell"]


def test_split_batches_are_not_multiplied_by_the_processes() -> None:
    panel = _set(_panel(), num_processes="2", batch_size="8", dataloader_config=True)
    assert panel.sentence.endswith("effective batch: 16")
    panel.training_form.enter("dataloader_config.split_batches", True)
    assert panel.sentence.endswith("effective batch: 8")


def test_one_blocking_process_runs_inline() -> None:
    panel = _set(_panel(), block=True)
    assert panel.sentence.startswith("1 process on cpu, inline, fp32")
    assert "Launch starts it in the background" in panel.widget.texts["plan"]


def test_a_launch_that_does_not_fit_the_machine_is_an_error() -> None:
    panel = _set(_panel(GPUS), num_processes="5")
    assert "this machine has 4 cuda devices" in panel.errors[""]
    assert 'role="alert"' in panel.widget.texts["plan"]
    assert "num_processes" not in panel.widget.texts["plan"]
    assert panel.widget.disabled == ["launch", "cell"]
    assert panel.code.startswith("# num_processes=5")
    _set(panel, num_processes="4")
    assert panel.errors == {}
    assert panel.widget.disabled == []


def test_the_hardware_is_shown() -> None:
    for fact in ("4 × cuda", "16 CPU cores", "68.7 GB memory", "Colab"):
        assert f"<li>{fact}</li>" in _panel(GPUS).widget.texts["title"]
    assert "no accelerator" in _panel().text


def test_the_machine_and_the_kernel_are_detected_by_default() -> None:
    panel = _set(ConfigPanel(), num_processes="2", cpu=True)
    assert panel.errors == {}
    assert panel.sentence.startswith("2 processes on cpu, ")


# ---- entries and values


def test_the_config_has_the_values_of_the_form_and_sets_them() -> None:
    panel = _set(_panel(), num_processes="2", timeout="60", env="A=1", gradient_accumulation_steps="4")
    given = {"gradient_accumulation_steps": 4}
    assert panel.config == LaunchConfig(num_processes=2, timeout=60.0, block=False, env={"A": "1"}, accelerator=given)
    other = _panel()
    other.config = panel.config
    assert other.config == panel.config
    assert other.training.gradient_accumulation_steps == 4
    assert other.launch_form.value.env == {"A": "1"}


def test_fields_are_set_from_code() -> None:
    panel = _panel()
    panel.change(num_processes=2, timeout=60.0, batch_size=8, dataloader_config=DataLoaderConfiguration(data_seed=1))
    given = {"dataloader_config": DataLoaderConfiguration(data_seed=1)}
    assert panel.config == LaunchConfig(num_processes=2, timeout=60.0, block=False, accelerator=given)
    assert panel.launch_form.shown()["num_processes"] == "2"
    assert panel.training.dataloader_config == DataLoaderConfiguration(data_seed=1)
    with pytest.raises(ValueError, match="num_processes=0 is not allowed"):
        panel.change(batch_size=9, num_processes=0)
    assert panel.training.batch_size == 8
    with pytest.raises(ValueError, match="no field 'processes'"):
        panel.change(processes=2)


def test_the_launch_gives_the_options_of_the_training_to_every_accelerator() -> None:
    loader = DataLoaderConfiguration(split_batches=True)
    handler = InitProcessGroupKwargs(backend="gloo")
    plugin = TorchDynamoPlugin(backend="INDUCTOR", fullgraph=True)  # type: ignore[arg-type]
    training = TrainingOptions(
        dataloader_config=loader, process_group_kwargs=handler, dynamo_plugin=plugin, gradient_accumulation_steps=4
    )
    panel = _panel(training=training)
    given = panel.config.accelerator
    assert given == {
        "dataloader_config": loader,
        "dynamo_plugin": plugin,
        "gradient_accumulation_steps": 4,
        "kwargs_handlers": [handler],
    }
    assert panel.config.env is None
    other = _panel()
    other.config = panel.config
    assert other.training == training
    assert other.config == panel.config


def test_arguments_without_a_field_are_kept() -> None:
    given = {"rng_types": ["torch"], "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}
    panel = _panel(config=LaunchConfig(num_processes=2, accelerator=given))
    assert panel.config.accelerator == given
    panel.change(gradient_accumulation_steps=2)
    assert panel.config.accelerator == {**given, "gradient_accumulation_steps": 2}
    panel.change(accelerator={"gradient_accumulation_steps": 3})
    assert panel.config.accelerator == {"gradient_accumulation_steps": 3}


def test_an_accumulation_plugin_keeps_the_number_of_steps() -> None:
    options = TrainingOptions(
        gradient_accumulation_steps=4, gradient_accumulation_plugin=GradientAccumulationPlugin(adjust_scheduler=False)
    )
    given = options.accelerator()["gradient_accumulation_plugin"]
    assert given == GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False)
    with pytest.raises(ValueError, match="clear one of them"):
        TrainingOptions(gradient_accumulation_steps=4, gradient_accumulation_plugin=GradientAccumulationPlugin(2))


def test_the_accelerator_accepts_every_option() -> None:
    import inspect

    from notebook_accelerate import Accelerator

    options = TrainingOptions(
        dataloader_config=DataLoaderConfiguration(),
        project_config=ProjectConfiguration(),
        log_with=["all"],
        step_scheduler_with_optimizer=False,
        process_group_kwargs=InitProcessGroupKwargs(),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
        dynamo_plugin=TorchDynamoPlugin(disable=True),
    ).accelerator()
    assert len(options) == 7
    inspect.signature(Accelerator).bind(**options)


# ---- the cell


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"num_processes": "2", "mixed_precision": "bf16", "start_method": "fork", "block": True},
        {"cpu": True, "num_processes": "2", "env": "A=a 'quoted' \"text\"", "timeout": "1.5", "use_port": "0"},
        {"num_nodes": "2", "node_rank": "1", "master_addr": "10.0.0.1", "gradient_accumulation_steps": "2"},
    ],
)
def test_the_cell_launches_with_the_current_settings(entries: dict[str, Any]) -> None:
    panel = _set(_panel(), **entries)
    _call(panel, "train", "(3,)")
    called: dict[str, Any] = {}

    def notebook_launcher(function: Any, args: Any = (), **values: Any) -> str:
        config = (values.pop("config", None) or LaunchConfig()).changed(**values)
        called.update(function=function, args=args, config=config)
        return "the run"

    scope: dict[str, Any] = {"train": double}
    imports, _, call = panel.code.partition("\n\n")
    exec(imports, scope)
    scope["notebook_launcher"] = notebook_launcher
    exec(call, scope)
    assert scope["run"] == "the run"
    assert called == {"function": double, "args": (3,), "config": panel.config}


def test_the_cell_contains_the_options_of_the_training() -> None:
    training = TrainingOptions(
        dataloader_config=DataLoaderConfiguration(even_batches=False),
        process_group_kwargs=InitProcessGroupKwargs(backend="gloo"),
    )
    panel = _panel(training=training)
    found: list[LaunchConfig] = []
    scope: dict[str, Any] = {"train": double}
    imports, _, call = panel.code.partition("\n\n")
    exec(imports, scope)
    scope["notebook_launcher"] = lambda *_, config, **__: found.append(config)
    exec(call, scope)
    assert found[0].accelerator == panel.config.accelerator


def test_the_copied_text_is_the_cell() -> None:
    panel = _set(_panel(), num_processes="2")
    assert panel.widget.code == panel.code
    assert "num_processes=2" in panel.widget.texts["cell"]


def test_the_shown_cell_hides_credentials_of_the_training_options_and_the_copied_one_contains_them() -> None:
    address = "https://user:hunter2@example.org/logs"
    panel = _panel(training=TrainingOptions(project_config=ProjectConfiguration(logging_dir=address)))
    assert address in panel.widget.code
    assert "https://***@example.org/logs" in panel.widget.texts["cell"]
    assert "hunter2" not in panel.html + panel.text + panel.widget.texts["cell"]


# ---- configuration files


def test_a_configuration_file_is_saved_and_loaded(tmp_path: Path) -> None:
    plugin = TorchDynamoPlugin(backend="INDUCTOR", mode="max-autotune")  # type: ignore[arg-type]
    panel = _set(
        _panel(GPUS, training=TrainingOptions(dynamo_plugin=plugin)), num_processes="2", mixed_precision="fp16"
    )
    _set(panel, num_nodes="2", node_rank="1", master_addr="10.0.0.1", use_port="1234")
    file = panel.save(tmp_path / "config.yaml")
    written = ClusterConfig.from_yaml_file(file)
    assert (written.num_processes, written.num_machines, written.machine_rank) == (4, 2, 1)
    assert (written.main_process_ip, written.main_process_port) == ("10.0.0.1", 1234)
    assert (written.mixed_precision, written.distributed_type, written.use_cpu) == ("fp16", "MULTI_GPU", False)
    other = _panel(GPUS)
    other.load(file)
    assert other.config == panel.config
    assert other.training == panel.training


@pytest.mark.parametrize("machine", [CPU, GPUS], ids=["cpu", "gpus"])
@pytest.mark.parametrize(
    "entered",
    [{}, {"num_processes": "1"}, {"cpu": True}, {"num_processes": "2", "mixed_precision": "bf16"}, {"num_nodes": "2"}],
    ids=str,
)
def test_a_saved_configuration_is_unchanged_when_it_is_loaded(
    machine: HardwareInfo, entered: dict[str, Any], tmp_path: Path
) -> None:
    """Values that were not entered are not written, for example ``use_cpu`` on a machine without a GPU."""
    panel = _set(_panel(machine), **entered)
    file = panel.save(tmp_path / "config.yaml")
    other = _panel(machine)
    other.load(file)
    assert other.config == panel.config
    assert other.sentence == panel.sentence


def test_an_error_is_shown_once_and_disappears_when_it_is_fixed() -> None:
    panel = _set(_panel(), num_processes="0")
    error = panel.errors["num_processes"]
    shown = [panel.widget.texts["plan"], panel.widget.texts["cell"], panel.widget.code, panel.widget.texts["run"]]
    words = error.replace("num_processes=", '"Number of processes" = ').replace("pass", "enter")
    assert panel.widget.errors == {"launch.num_processes": words}
    assert not any(str(escape(error)) in text or error in text for text in shown)
    assert escape('Correct "Number of processes" to see the plan') in panel.widget.texts["plan"]
    assert (panel.text.count(error), panel.html.count(str(escape(error)))) == (1, 1)
    _set(panel, num_processes="2")
    assert panel.widget.errors == {}
    assert "num_processes=0" not in panel.widget.texts["plan"]
    assert "2 processes on" in panel.widget.texts["plan"]


def test_the_error_of_a_click_disappears_when_something_is_entered() -> None:
    panel = _panel()
    panel.widget.enter("call.function", "nothing_here")
    panel.click("launch")
    assert "is not a function in this notebook" in panel.widget.texts["run"]
    panel.widget.enter("call.function", "nothing_here_eithe")
    assert panel.widget.texts["run"] == ""
    panel.widget.enter("file.path", "/nowhere/config.yaml")
    panel.click("load")
    assert "FileNotFoundError" in panel.widget.texts["file"]
    panel.widget.enter("file.path", "/nowhere/else.yaml")
    assert panel.widget.texts["file"] == ""


def test_settings_of_a_file_without_a_field_are_kept_and_reach_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    values = {"num_processes": 4, "distributed_type": "FSDP", "mixed_precision": "bf16", "main_training_function": "go"}
    values["fsdp_config"] = {"fsdp_version": 2, "fsdp_offload_params": True}
    file.write_text(yaml.safe_dump(values))
    panel = _panel(GPUS)
    panel.load(file)
    assert (panel.config.env or {})["ACCELERATE_USE_FSDP"] == "true"
    assert (panel.config.env or {})["FSDP_OFFLOAD_PARAMS"] == "true"
    assert panel.config.num_processes == 4
    _set(panel, num_processes="2")
    written = yaml.safe_load(panel.save(tmp_path / "other.yaml").read_text())
    assert written["fsdp_config"] == values["fsdp_config"]
    assert (written["distributed_type"], written["num_processes"]) == ("FSDP", 2)
    assert written["main_training_function"] == "go"


def test_loading_replaces_settings_of_the_previous_file_and_keeps_others(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        yaml.safe_dump({"num_processes": 2, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}})
    )
    second.write_text(yaml.safe_dump({"num_processes": 3}))
    panel = _set(_panel(GPUS), timeout="60", env="A=1")
    panel.load(first)
    assert set(panel.config.env or {}) == {"A", "ACCELERATE_USE_FSDP", "FSDP_VERSION"}
    panel.load(second)
    assert panel.config == LaunchConfig(num_processes=3, timeout=60.0, block=False, env={"A": "1"})


def test_gpu_ids_of_a_file_become_the_visible_devices(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"num_processes": 2, "distributed_type": "MULTI_GPU", "gpu_ids": "1,3"}))
    panel = _panel(GPUS)
    panel.load(file)
    assert panel.config.env == {"CUDA_VISIBLE_DEVICES": "1,3"}


def test_files_that_cannot_be_loaded_are_reported_next_to_the_button(tmp_path: Path) -> None:
    panel = _set(_panel(), num_processes="3")
    file = tmp_path / "config.yaml"
    panel.widget.enter("file.path", str(file))
    panel.click("load")
    assert "FileNotFoundError" in panel.widget.texts["file"]
    file.write_text(yaml.safe_dump({"num_process": 2}))
    panel.click("load")
    assert "unknown keys: num_process" in panel.widget.texts["file"]
    assert panel.config.num_processes == 3
    with pytest.raises(ValueError, match="unknown keys"):
        panel.load(file)


def test_saving_over_another_file_asks_first(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("mine: true\n")
    panel = _set(_panel(), num_processes="2", timeout="5")
    panel.widget.enter("file.path", str(file))
    panel.click("save")
    assert "Click Save again" in panel.widget.texts["file"]
    assert file.read_text() == "mine: true\n"
    panel.click("save")
    assert "Saved. Not stored: block, timeout." in panel.widget.texts["file"]
    assert ClusterConfig.from_yaml_file(file).num_processes == 2
    _set(panel, num_processes="").click("save")
    assert "num_processes" not in file.read_text(), "Accelerate's launcher rejects -1, so the entry must be left out"


# ---- launching


def test_a_launch_from_code_returns_the_run() -> None:
    panel = _set(ConfigPanel(), num_processes="2", cpu=True, use_port="0")
    run = panel.launch(double, (4,))
    run.wait()
    assert run.results == (8, 8)
    assert panel.runs == [run]
    assert run.config == panel.config


def test_the_button_launches_without_blocking_and_shows_the_outcome() -> None:
    panel = _set(ConfigPanel(double, (5,)), num_processes="2", cpu=True, use_port="0", block=True)
    panel.click("launch")
    run = panel.runs[-1]
    assert run.config.block is False
    run.wait()
    assert run.results == (10, 10)
    assert f"run {run.id} succeeded" in panel.widget.texts["run"]


def test_the_check_box_detaches_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = _set(ConfigPanel(double, (5,)), num_processes="2", cpu=True, use_port="0", block=True, detach=True)
    assert panel.errors == {}
    assert panel.config.block is False
    assert panel.sentence.startswith("2 processes on cpu, zygote")
    assert "detach=True" in panel.code
    with user_folder(tmp_path, monkeypatch):
        panel.click("launch")
        run = panel.runs[-1]
        assert run.folder is not None
        assert run.wait(120)
        assert (run.results, run.plan and run.plan.start_method) == ((10, 10), "zygote")
        assert attach(run.name) is run
        assert f"run {run.id} succeeded" in panel.widget.texts["run"]
    assert "detach=True is not allowed with start_method='fork'" in str(_set(panel, start_method="fork").errors)


def test_a_failing_run_is_shown_in_the_panel_and_raises_nothing() -> None:
    panel = _set(ConfigPanel(fail), num_processes="2", cpu=True, use_port="0")
    panel.click("launch")
    panel.runs[-1].wait()
    assert panel.runs[-1].status == "failed"
    assert "KeyError" in panel.widget.texts["run"]
    assert 'role="alert"' in panel.widget.texts["run"]


def test_functions_and_arguments_of_the_notebook_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "twice", double, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "number", 21, raising=False)
    panel = _set(ConfigPanel(), cpu=True)
    _call(panel, "twice", "(number,)")
    panel.click("launch")
    panel.runs[-1].wait()
    assert panel.runs[-1].results == (42,)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [((), ""), ((3,), "(3,)"), ((3, "a", [1.5]), "(3, 'a', [1.5])"), ((NUMBERS, 1), "(numbers, 1)"), ((object(),), "")],
)
def test_the_cell_has_the_arguments_that_the_form_was_created_with(
    arguments: tuple[Any, ...], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "numbers", NUMBERS, raising=False)
    panel = ConfigPanel(double, arguments)
    assert panel.widget.entries["call.arguments"] == shown
    assert f"notebook_launcher(double, {shown}" in panel.code or not shown
    assert panel._chosen_arguments() == arguments


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("", "", "enter the name of a function"),
        ("nothing_here", "", "is not a function in this notebook"),
        ("double", "(1", "SyntaxError"),
        ("double", "(missing,)", "NameError"),
    ],
)
def test_an_impossible_launch_is_reported_next_to_the_button(
    name: str, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "double", double, raising=False)
    panel = _panel()
    _call(panel, name, arguments)
    panel.click("launch")
    assert message in panel.widget.texts["run"]
    assert panel.runs == []


def test_a_wrong_form_cannot_be_launched_from_code_either() -> None:
    panel = _set(_panel(), num_processes="none")
    with pytest.raises(ValueError, match="num_processes='none' is not a whole number"):
        panel.launch(double, (1,))
    with pytest.raises(ValueError, match="num_processes"):
        _ = panel.config


# ---- without widgets


def test_the_static_forms_are_complete_and_without_scripts() -> None:
    panel = _set(_panel(), num_processes="2", rdzv_id="<script>1</script>", batch_size="4")
    assert "<script" not in panel.html
    for part in ("2 processes on cpu, fork, gloo, fp32; effective batch: 8", "num_processes", "8 CPU cores"):
        assert part in panel.html
        assert part in panel.text
    shown = panel._repr_mimebundle_()
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"] == panel.widget.model_id


def test_a_broken_listener_leaves_the_form_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = _panel()
    monkeypatch.setattr(ConfigPanel, "_plan_html", lambda *_: 1 / 0)
    _set(panel, num_processes="2")
    assert "ZeroDivisionError" in panel.widget.texts["run"]
    assert panel.config.num_processes == 2


def test_configure_is_a_public_name() -> None:
    panel = notebook_accelerate.configure(double, (3,), config=LaunchConfig(num_processes=2, cpu=True))
    assert isinstance(panel, ConfigPanel)
    assert panel.widget.entries["call.function"] == "double"
    assert panel.config == LaunchConfig(num_processes=2, cpu=True)


def test_every_field_has_its_place_in_the_panel() -> None:
    for cls in (LaunchConfig, TrainingOptions):
        placed = [name for _, names in groups_of(cls) for name in names]
        # The arguments of an Accelerator are entered in the other form.
        assert sorted(placed) == sorted(set(cls.__dataclass_fields__) - {"accelerator"})


def test_only_in_config_lists_the_fields_that_are_not_parameters() -> None:
    import inspect

    parameters = inspect.signature(notebook_accelerate.notebook_launcher).parameters
    assert set(LaunchConfig.__dataclass_fields__) - set(parameters) == set(config_file_form.ONLY_IN_CONFIG)
