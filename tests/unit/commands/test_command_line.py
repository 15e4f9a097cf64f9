"""The program `notebook-accelerate`, run in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
import yaml

from notebook_accelerate import LaunchConfig, __version__
from notebook_accelerate.commands.accelerate_cli import main
from notebook_accelerate.commands.launch import launch_command_parser
from notebook_accelerate.commands.launch_settings import GENERAL, GROUPS, launch_config
from notebook_accelerate.commands.parsers import in_options
from notebook_accelerate.config import config_file
from notebook_accelerate.errors import LaunchError, RunStoppedError, WorkerError
from notebook_accelerate.hardware import detect
from notebook_accelerate.launch.hosts import joining
from tests.support.interpreters import InterpreterServer
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home"), "COLUMNS": "110"}


class Command(Protocol):
    """A function that runs the program in a folder."""

    def __call__(self, folder: Path, *arguments: str, answers: str = "") -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def command(interpreters: InterpreterServer) -> Command:
    def run(folder: Path, *arguments: str, answers: str = "") -> subprocess.CompletedProcess[str]:
        program = ("-m", "notebook_accelerate", *arguments)
        return interpreters.run(*program, cwd=folder, env=environment(folder), answers=answers)

    return run


def script(folder: Path, code: str, name: str = "train.py") -> str:
    (folder / name).write_text(code)
    return name


SHOW = """
import json, os, sys
from helper import VALUE
names = ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU", "MINE")
print(json.dumps([__name__, sys.argv, VALUE, {name: os.environ.get(name) for name in names}]))
"""


def test_a_script_runs_as_main_in_labelled_processes(command: Command, tmp_path: Path) -> None:
    script(tmp_path, "VALUE = 3\n", "helper.py")
    (tmp_path / "inner").mkdir()
    script(tmp_path / "inner", SHOW)
    script(tmp_path / "inner", "VALUE = 4\n", "helper.py")
    done = command(
        tmp_path, "launch", "--cpu", "--num_processes", "2", "--mixed-precision", "bf16", "inner/train.py", "--lr", "1"
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        line = re.search(rf"^\[rank {rank}\] (.*)$", done.stdout, re.MULTILINE)
        assert line is not None, done.stdout
        name, argv, value, variables = json.loads(line[1])
        assert (name, argv, value) == ("__main__", ["inner/train.py", "--lr", "1"], 4)
        assert variables == {
            "RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True",
            "MINE": None,
        }  # fmt: skip


WRITE = """
import os, subprocess, sys
print("printed")
print("wrong", file=sys.stderr)
subprocess.run([sys.executable, "-c", "print('by a child')"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0":
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("options", "out", "err"),
    [([], "01", "01"), (["--tee", "1"], "01", ""), (["--tee", "0:2,1:1"], "1", "0"), (["--tee", "0"], "", "")],
)
def test_each_rank_has_log_files(command: Command, options: list[str], out: str, err: str, tmp_path: Path) -> None:
    name = script(tmp_path, WRITE)
    options = ["--log_dir", "deep/logs", *options]
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", "--max_restarts", "1", *options, name)
    assert done.returncode == 0, done.stderr
    assert "[rank 1] printed\n" in done.stdout
    (folder,) = (tmp_path / "deep" / "logs").iterdir()
    attempt = folder / "attempt_1"
    found = {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")}
    assert found == {
        **{f"{rank}/stdout.log": "printed\nby a child\n" for rank in out},
        **{f"{rank}/stderr.log": "wrong\n" for rank in err},
    }
    assert (folder / "attempt_0").exists() == bool(out or err)


@pytest.mark.parametrize("options", [[], ["--no_python"]])
def test_one_process_has_log_files(command: Command, options: list[str], tmp_path: Path) -> None:
    name = script(tmp_path, "print('only')\n")
    words = [sys.executable, name] if options else [name]
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "1", "--log_dir", "logs", *options, *words)
    assert (done.returncode, done.stdout) == (0, "only\n"), done.stderr
    (file,) = (tmp_path / "logs").rglob("stdout.log")
    assert file.read_text() == "only\n"
    (tmp_path / "file").touch()
    done = command(tmp_path, "launch", "--cpu", "--log_dir", "file", name)
    assert (done.returncode, "--log_dir file cannot be used" in done.stderr) == (2, True)


def test_one_process_has_no_label(command: Command, tmp_path: Path) -> None:
    name = script(tmp_path, "import sys\nprint('only', sys.argv[1:])\n")
    for options in ([], ["--max_restarts", "1"]):
        done = command(tmp_path, "launch", "--cpu", "--num_processes", "1", *options, name, "x")
        assert (done.returncode, done.stdout) == (0, "only ['x']\n"), done.stderr


FAIL = """
import os, sys
def inner():
    raise ValueError("of this rank")
if os.environ["RANK"] == "1":
    inner()
print("other")
"""


@pytest.mark.parametrize(
    ("code", "options", "exit_code", "shown"),
    [
        (FAIL, ["--num_processes", "2"], 1, "train.py, line 4, in inner\n    raise ValueError"),
        ("import sys\nsys.exit(7)\n", ["--num_processes", "2"], 7, "train.py, line 2"),
        ("import sys\nsys.exit(7)\n", ["--num_processes", "1"], 7, "train.py, line 2"),
        ("import os\nos.kill(os.getpid(), 9)\n", ["--num_processes", "2"], 137, "SIGKILL"),
        ("x = (\n", ["--num_processes", "2"], 1, "SyntaxError"),
    ],
    ids=["exception", "exit", "exit of one process", "signal", "syntax"],
)
def test_a_failure_is_reported_at_its_line(
    command: Command, code: str, options: list[str], exit_code: int, shown: str, tmp_path: Path
) -> None:
    done = command(tmp_path, "launch", "--cpu", *options, script(tmp_path, code))
    assert done.returncode == exit_code, done.stderr
    assert shown in done.stderr
    for own in ("script_runner", "launch.py", "entry.py"):
        assert own not in done.stderr


def test_quiet_shows_one_line(command: Command, tmp_path: Path) -> None:
    done = command(tmp_path, "launch", "--quiet", "--cpu", "--num_processes", "2", script(tmp_path, FAIL))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "ValueError: of this rank" in done.stderr


def test_modules_and_programs_are_launched(command: Command, tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint(__name__, sys.argv[1:])\n", "mine.py")
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", "-m", "mine", "--flag")
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] __main__ ['--flag']" for rank in range(2)], done.stderr
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", "--no_python", "sh", "-c", "echo $RANK")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0", "[rank 1] 1"], done.stderr
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", "--no_python", "sh", "-c", "exit 5")
    assert done.returncode == 5


def _own_lines(output: str) -> list[str]:
    """Return the lines of an output, except for torch 2.9's message that gloo has connected the ranks."""
    return [line for line in output.splitlines() if "[Gloo] Rank" not in line]


def test_a_script_written_for_accelerate_trains(command: Command, tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import torch\nfrom accelerate import Accelerator\nfrom accelerate.utils import gather_object\n"
        "accelerator = Accelerator()\nmodel = accelerator.prepare(torch.nn.Linear(2, 1))\n"
        "accelerator.print(gather_object([accelerator.process_index]), type(model).__name__)\n",
    )
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", "--as_accelerate", "true", name)
    assert _own_lines(done.stdout) == ["[rank 0] [0, 1] DistributedDataParallel"], done.stderr


def test_libraries_launch_scripts_with_accelerates_names(interpreters: InterpreterServer, tmp_path: Path) -> None:
    name = script(tmp_path, "import sys, accelerate\nprint(accelerate.Accelerator().num_processes, sys.argv[1:])\n")
    arguments = ["--cpu", "--num_processes", "2", name, "--lr", "1"]
    code = (
        "import subprocess, sys, notebook_accelerate; notebook_accelerate.as_accelerate()\n"
        "from accelerate.commands.launch import launch_command, launch_command_parser\n"
        f"launch_command(launch_command_parser().parse_args({arguments}))\n"
        "sys.stdout.flush()\n"
        f"subprocess.run([sys.executable, '-m', 'accelerate.commands.launch', *{arguments}], check=True)\n"
        f"subprocess.run([sys.executable, '-m', 'accelerate', 'launch', *{arguments}], check=True)\n"
    )
    done = interpreters.run("-c", code, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr
    assert sorted(_own_lines(done.stdout)) == [f"[rank {rank}] 2 ['--lr', '1']" for rank in (0, 0, 0, 1, 1, 1)]


def test_workers_started_by_spawn_import_the_script(command: Command, tmp_path: Path) -> None:
    name = script(
        tmp_path,
        "import multiprocessing, os\ndef square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(square, [3]))\n",
    )
    done = command(tmp_path, "launch", "--cpu", "--num_processes", "2", name)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] [9]", "[rank 1] [9]"], done.stderr


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    name = script(tmp_path, "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n")
    program = [sys.executable, "-m", "notebook_accelerate", "launch", "--cpu", "--num_processes", "2", name]
    # A shell ignores SIGINT in background jobs, and child processes inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        program, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "interrupted" in errors
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_two_machines_run_one_script(tmp_path: Path) -> None:
    name = script(tmp_path, "import accelerate\nprint(accelerate.Accelerator().num_processes)\n")
    options = ["--num_machines", "2", "--num_processes", "2", "--main_process_port", str(free_port())]
    program = [sys.executable, "-m", "notebook_accelerate", "launch", "--cpu", *options, "--as_accelerate", "true"]
    machines = [
        subprocess.Popen(
            [*program, "--machine_rank", str(rank), "--main_process_ip", "127.0.0.1", name],
            cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank, machine in enumerate(machines):
            out, _ = machine.communicate(timeout=300)
            assert machine.returncode == 0, out
            assert f"[rank {rank}] 2\n" in out
            assert ("on the other machines: the same command with --machine_rank=1\n" in out) == (rank == 0)
            assert "notebook" not in out.replace("NOTEBOOK_ACCELERATE_SECRET", "").replace("notebook_accelerate", "")
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from notebook_accelerate.commands.accelerate_cli import parser_for; parser_for([]).format_help(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ---- settings


def settings(*arguments: str) -> LaunchConfig:
    return launch_config(launch_command_parser().parse_args([*arguments, "train.py"]))


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "default_config.yaml"
    monkeypatch.setattr(config_file, "default_config_file", str(path))
    return path


MACHINES = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
ALWAYS = {
    "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}  # fmt: skip
"""The variables that Accelerate's command sets for every process."""


def test_options_become_settings_of_a_launch() -> None:
    found = settings(
        "--num_processes", "8", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1",
        "--main_process_port", "2000", "--rdzv_backend", "c10d", "--rdzv_conf", "join_timeout=5", "--max_restarts", "2",
        "--num_cpu_threads_per_process", "3", "--gpu_ids", "0,1", "--debug", "--as_accelerate", "no",
    )  # fmt: skip
    assert found.non_default() == {
        "num_processes": 4, "num_nodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "use_port": "2000",
        "rdzv_backend": "c10d", "rdzv_conf": {"join_timeout": "5"}, "max_restarts": 2, "panel": False,
        "env": {
            **ALWAYS, "ACCELERATE_DEBUG_MODE": "true", "CUDA_VISIBLE_DEVICES": "0,1", "OMP_NUM_THREADS": "3",
            "ROLE_NAME": "default",
        },
    }  # fmt: skip


def test_options_that_accelerate_lacks_become_settings() -> None:
    found = settings("--devices", "0,1", "--queue", "--notify", "https://example.org/hook")
    assert (found.devices, found.queue, found.notify) == ((0, 1), True, "https://example.org/hook")
    assert settings("--devices", "2").devices == 2


# The environment that Accelerate's command gives its processes, observed with version 1.15.
OBSERVED: dict[str, dict[str, str]] = {
    "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
    " --fsdp_transformer_layer_cls_to_wrap A,B": {
        "ACCELERATE_USE_FSDP": "true", "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "FSDP_FORWARD_PREFETCH": "false", "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_OFFLOAD_PARAMS": "false", "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_SYNC_MODULE_STATES": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B", "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_VERSION": "2",
    },
    "--dynamo_backend inductor": {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"},
    "--enable_cpu_affinity": {"ACCELERATE_CPU_AFFINITY": "1"},
    "--use_deepspeed --zero_stage 3 --gradient_clipping 0.5": {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5", "ACCELERATE_DEEPSPEED_DEEPSPEED_MULTINODE_LAUNCHER": "standard",
    },
    "--zero_stage 3 --fsdp_version 2": {},
}  # fmt: skip


@pytest.mark.parametrize("options", OBSERVED)
def test_options_of_a_strategy_reach_the_ranks_as_variables(options: str) -> None:
    found = settings("--num_processes", "2", *options.split()).env
    assert found == {**ALWAYS, "OMP_NUM_THREADS": "1", "ROLE_NAME": "default", **OBSERVED[options]}


@pytest.mark.parametrize(
    ("options", "inherited", "expected"),
    [
        (["--num_processes", "8"], None, "1"),
        (["--num_processes", "8"], "5", "5"),
        (["--num_processes", "8", "--num_cpu_threads_per_process", "3"], "5", "3"),
        (["--cpu", "--num_processes", "2"], None, "6"),
        (["--cpu", "--num_processes", "2"], "0", "6"),
        (["--cpu", "--num_processes", "64"], None, "1"),
        ([*MACHINES, "--cpu", "--num_processes", "4"], None, "6"),
        (["--cpu"], None, "1"),
        (["--num_processes", "2"], "4,2", "4,2"),
    ],
)
def test_a_rank_gets_its_share_of_threads(
    options: list[str], inherited: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 24 if logical else 12)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if inherited is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", inherited)
    assert (settings(*options).env or {})["OMP_NUM_THREADS"] == expected


def test_intels_openmp_does_not_bind_several_ranks_to_the_same_cores() -> None:
    one, two = ((settings("--cpu", "--num_processes", count).env or {}).get("KMP_AFFINITY") for count in "12")
    assert (one, two) == ("granularity=fine,compact,1,0", None)


def test_fp8_options_have_accelerates_defaults() -> None:
    env = settings("--mixed_precision", "fp8", "--fp8_backend", "te", "--fp8-override-linear-precision", "1,0,1").env
    assert env is not None
    assert env["ACCELERATE_FP8_BACKEND"] == "te"
    assert [env[f"ACCELERATE_FP8_OVERRIDE_{name}"] for name in ("FPROP", "DGRAD", "WGRAD")] == ["1", "0", "1"]
    assert (env["ACCELERATE_FP8_AMAX_HISTORY_LEN"], env["ACCELERATE_FP8_FORMAT"]) == ("1024", "HYBRID")


def test_options_override_the_file(no_default_file: Path) -> None:
    contents = {
        "num_processes": 4, "mixed_precision": "bf16", "distributed_type": "FSDP", "use_cpu": True,
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
    }  # fmt: skip
    no_default_file.write_text(yaml.safe_dump(contents))
    found = settings("--num_processes", "2", "--fsdp_offload_params", "false")
    assert (found.num_processes, found.mixed_precision, found.cpu) == (2, "bf16", True)
    assert found.env is not None
    assert (found.env["FSDP_VERSION"], found.env["FSDP_OFFLOAD_PARAMS"]) == ("2", "false")
    other = settings("--use_deepspeed", "--zero_stage", "2")
    assert not [name for name in other.env or {} if name.startswith("FSDP")]
    # As in Accelerate, the default file is not read with --cpu.
    assert (settings("--cpu").num_processes, settings("--cpu").mixed_precision) == (None, "no")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vm", "a"], "--vm is not supported"),
        (
            ["-t", "7"],
            "--tee 7 is not allowed; pass 1 (stdout), 2 (stderr), 3 (both), or one for each process: 0:1,1:3",
        ),
        (["-t", "0:1,1"], "--tee 0:1,1 is not allowed"),
        (["--tpu_use_sudo"], "--tpu_use_sudo is not supported"),
        (["--deepspeed_multinode_launcher", "pdsh"], "start this command on each machine"),
        ([*MACHINES, "--num_processes", "3"], "num_processes=3 is not a multiple of num_machines=2"),
        (["--config_file", "absent.yaml"], "absent.yaml does not exist"),
        (["--use_fsdp", "--use_deepspeed"], "--use_deepspeed and --use_fsdp are mutually exclusive; pass one of them"),
        (["--cpu", "--multi_gpu", "--tpu"], "--cpu, --multi_gpu and --tpu are mutually exclusive"),
        (["--cpu", "--use_fsdp"], "--cpu and --use_fsdp are mutually exclusive; pass one of them"),
        (["--use_fsdp", "--use_megatron_lm"], "--use_fsdp and --use_megatron_lm are mutually exclusive"),
        (["--multi_gpu", "--num_processes", "1"], "--multi_gpu needs at least 2 processes; got --num_processes 1"),
        (["--multi_gpu", "--gpu_ids", "3"], "gpu_ids=3 selects one; pass --gpu_ids all"),
        (["--use_parallelism_config"], "add --use_fsdp --fsdp_version 2"),
        (["--use_parallelism_config", "--use_fsdp", "--fsdp_version", "1"], "add --use_fsdp --fsdp_version 2"),
        (["--use_parallelism_config", "--use_deepspeed"], "add --use_fsdp --fsdp_version 2"),
        (["--num_processes", "-1"], "--num_processes -1 is not allowed"),
        (["--num_processes", "0"], "--num_processes 0 is not allowed"),
        (["--num_machines", "2"], "num_machines=2 needs the address of the first machine; pass --main_process_ip"),
        (["--num_machines", "2", "--main_process_ip", "10.0.0.1"], "pass --machine_rank 0 on the first machine"),
        (["--tpu", "--no_python"], "--no_python is not supported on a TPU"),
    ],
)
def test_unsupported_options_are_refused(options: list[str], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        settings(*options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lunch", "a.py"], "there is no command 'lunch' (did you mean launch?); known: launch, config"),
        (
            ["launch", "--num_proceses", "2", "a.py"],
            "unrecognized arguments: --num_proceses (did you mean --num_processes?)",
        ),
        (["env", "--config_fiel=a"], "unrecognized arguments: --config_fiel=a (did you mean --config_file?)"),
        (["launch", "--zzz", "a.py"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_a_similar_command_or_option_is_suggested(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--max_restarts -1", "--max_restarts -1 is not allowed; pass a whole number of at least 0"),
        ("--machine_rank 3", "--machine_rank 3 is out of range: --num_machines 1, counted from 0"),
        ("--num_machines 2 --main_process_ip a", "--num_machines 2 needs the index of this machine; pass --machine_"),
        (
            "--queue --num_machines 2 --main_process_ip a --machine_rank 0",
            "--queue is for devices of this machine only",
        ),
        ("--notify a", "--notify *** is not allowed; pass a URL"),
        ("--rdzv_conf a=b", "--rdzv_conf {'a': ...} is not known"),
    ],
)
def test_errors_name_options(options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--cpu", *options.split(), str(tmp_path / script(tmp_path, ""))]) == 2
    assert message in capsys.readouterr().err


def test_an_error_of_a_launch_names_the_option_for_the_queue() -> None:
    options = launch_command_parser().get_default("names")
    assert in_options("devices=9, but there are 2; pass at most devices=2", options) == (
        "--devices 9, but there are 2; pass at most --devices 2"
    )
    assert (
        in_options("end it, or pass queue=True to start after it", options)
        == "end it, or pass --queue to start after it"
    )
    assert in_options("kept=1, env={'queue=1'} and a.queue=2", options) == "kept=1, env={'queue=1'} and a.queue=2"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"notebook-accelerate {__version__}\n"


@pytest.mark.skipif(detect().accelerator != "cpu", reason="this machine has an accelerator")
@pytest.mark.parametrize("options", [["--multi_gpu", "--num_processes", "2"], ["--gpu_ids", "0,1"]])
def test_options_for_gpus_are_refused_without_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    (tmp_path / "a.py").write_text("")
    assert main(["launch", *options, str(tmp_path / "a.py")]) == 2
    assert f"{options[0]} needs GPUs, but this machine has none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "options", "message"),
    [
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0"}, [], "gpu_ids=0 selects one"),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0"}, ["--gpu_ids", "0,1"], ""),
        ({"distributed_type": "MULTI_GPU", "gpu_ids": "0"}, ["--use_fsdp"], ""),
        ({"distributed_type": "XLA"}, ["--no_python"], "--no_python is not supported on a TPU"),
        ({"distributed_type": "XLA"}, ["--no_python", "--cpu"], ""),
        ({"num_machines": 2}, [], "needs the address of the first machine"),
        ({"num_machines": 2, "main_process_ip": "10.0.0.1"}, [], ""),
        (
            {
                "num_machines": 2, "main_process_ip": "10.0.0.1", "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_multinode_launcher": "pdsh"},
            },
            [],
            "deepspeed_multinode_launcher: pdsh is not supported; start this command on each machine",
        ),
    ],
)  # fmt: skip
def test_unsupported_settings_of_a_file_are_refused(
    contents: dict[str, Any], options: list[str], message: str, no_default_file: Path
) -> None:
    no_default_file.write_text(yaml.safe_dump({"num_processes": 2, **contents}))
    if not message:
        settings(*options)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        settings(*options)


def test_defaults_of_unsupported_options_are_accepted() -> None:
    assert settings("--tee", "0", "--role", "default", "--num_processes", "2").num_processes == 2


def test_every_option_is_accepted_in_both_spellings() -> None:
    parser = launch_command_parser()
    known = {name for action in parser._actions for name in action.option_strings}
    for each in [*GENERAL, *(each for group in GROUPS.values() for each in group)]:
        assert {f"--{each.name}", f"--{each.name.replace('_', '-')}"} <= known


def test_a_file_is_read_like_the_settings_of_a_launch(tmp_path: Path) -> None:
    path = tmp_path / "launch.yaml"
    contents = {"num_processes": 2, "use_cpu": True, "gpu_ids": "all", "debug": True, "main_process_port": 3000}
    path.write_text(yaml.safe_dump(contents))
    found = LaunchConfig.from_file(path, env={"MINE": "1"}, timeout=5)
    assert found.non_default() == {
        "num_processes": 2, "cpu": True, "use_port": "3000", "timeout": 5,
        "env": {"ACCELERATE_DEBUG_MODE": "true", "MINE": "1"},
    }  # fmt: skip
    path.write_text("distributed_type: 'NO'\nnum_processes: 8\n")
    assert LaunchConfig.from_file(path).num_processes == 1
    assert LaunchConfig.from_file(path, num_processes=2).num_processes == 2
    path.write_text("compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: a\niam_role_name: b\n")
    with pytest.raises(ValueError, match="Amazon SageMaker"):
        LaunchConfig.from_file(path)


# ---- the other commands


def test_help_names_every_command(command: Command, tmp_path: Path) -> None:
    done = command(tmp_path)
    assert done.returncode == 0
    for name in ("launch", "config", "join", "env", "test", "estimate-memory", "merge-weights", "to-fsdp2"):
        assert name in done.stdout
        shown = command(tmp_path, name, "--help")
        assert shown.returncode == 0
        assert max(map(len, shown.stdout.splitlines())) <= 110
    assert command(tmp_path, "launch", "--absent", "x.py").returncode == 2
    missing = command(tmp_path, "launch", "absent.py")
    assert (missing.returncode, missing.stderr) == (
        2, "notebook-accelerate launch: the script absent.py does not exist; with -m, pass the name of a module\n",
    )  # fmt: skip


def test_env_prints_versions_and_the_default_file(command: Command, tmp_path: Path) -> None:
    import torch

    assert command(tmp_path, "config", "default", "--mixed_precision", "bf16").returncode == 0
    done = command(tmp_path, "env")
    assert done.returncode == 0, done.stderr
    for part in (f"- torch: {torch.__version__}", "- platform: ", "    mixed_precision: bf16", "- accelerators: "):
        assert part in done.stdout


def test_questions_are_repeated_until_answered(command: Command, tmp_path: Path) -> None:
    answers = ["1", "y", "2", "fp32", "bf16", "fsdp", "3", "2", "", "", "Block,Other", "", "y", "", ""]
    done = command(tmp_path, "config", "--config_file", "mine.yaml", answers="\n".join([*answers, ""]))
    assert done.returncode == 0, done.stderr
    assert "'3' is not allowed; type one of 1, 2" in done.stdout
    found = LaunchConfig.from_file(tmp_path / "mine.yaml")
    assert (found.num_processes, found.mixed_precision, found.cpu) == (2, "bf16", True)
    assert found.env is not None
    assert found.env["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block,Other"
    assert found.env["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    assert "ACCELERATE_DYNAMO_BACKEND" not in found.env
    cut = command(tmp_path, "config", "--config_file", "other.yaml", answers="1\n")
    assert cut.returncode == 130
    assert not (tmp_path / "other.yaml").exists()


def test_a_file_can_be_updated(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("fp16: true\ndynamo_backend: INDUCTOR\nnum_processes: 2\n")
    assert command(tmp_path, "config", "update", "--config_file", "old.yaml").returncode == 0
    contents = yaml.safe_load(path.read_text())
    assert (contents["mixed_precision"], contents["dynamo_config"]) == ("fp16", {"dynamo_backend": "INDUCTOR"})


def _fsdp1(**given: Any) -> dict[str, Any]:
    section = {"fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_state_dict_type": "FULL_STATE_DICT"}
    return {"distributed_type": "FSDP", "fsdp_config": {**section, **given}}


@pytest.mark.parametrize(
    ("strategy", "reshards"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), (1, True), (2, False)]
)
def test_a_configuration_can_be_converted_to_fsdp2(
    command: Command, strategy: object, reshards: bool, tmp_path: Path
) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(_fsdp1(fsdp_sharding_strategy=strategy)))
    convert = ("to-fsdp2", "--config_file", "one.yaml")
    assert command(tmp_path, *convert).returncode == 2
    done = command(tmp_path, *convert, "--output_file", "two.yaml")
    assert "fsdp_backward_prefetch is left out" in done.stdout
    expected = {"fsdp_version": 2, "fsdp_reshard_after_forward": reshards, "fsdp_state_dict_type": "FULL_STATE_DICT"}
    assert yaml.safe_load((tmp_path / "two.yaml").read_text()) == {"distributed_type": "FSDP", "fsdp_config": expected}
    assert "exists; pass --overwrite" in command(tmp_path, *convert, "--output_file", "two.yaml").stderr
    again = command(tmp_path, "to-fsdp2", "--config_file", "two.yaml", "--overwrite")
    assert "is for FSDP 2 already" in again.stdout
    command(tmp_path, "to-fsdp2", "--config_file", "two.yaml", "--output_file", "three.yaml")
    assert yaml.safe_load((tmp_path / "three.yaml").read_text()) == yaml.safe_load((tmp_path / "two.yaml").read_text())


def test_a_short_training_tests_a_configuration(command: Command, tmp_path: Path) -> None:
    done = command(tmp_path, "test", "--cpu", "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok: ") == 4
    assert done.stdout.endswith("training works with this configuration\n")


# ---- join


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace `joining.join`. Return a list of its arguments: address, secret, number of processes and timeout."""
    found: list[Any] = []

    def join(
        where: tuple[str, int], secret: str, processes: int, *, seconds: float, show: Callable[[str], None]
    ) -> None:
        found.extend([where, secret, processes, seconds])

    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", "of the environment")
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["10.0.0.1:29500"], [("10.0.0.1", 29500), "of the environment", 0, 600.0]),
        (["[fe80::1]:1"], [("fe80::1", 1), "of the environment", 0, 600.0]),
        (["node-0.cluster:65535", "--num_processes", "4"], [("node-0.cluster", 65535), "of the environment", 4, 600.0]),
        (["a:1", "--join_timeout", "2.5", "--secret_file", "{}"], [("a", 1), "of the file", 0, 2.5]),
        (["a:1", "--join-timeout=2", "--secret-file={}", "--num-processes=1"], [("a", 1), "of the file", 1, 2.0]),
    ],
    ids=["defaults", "IPv6", "name", "options", "other spelling"],
)
def test_a_join_command_line_is_parsed(
    joined: list[Any], options: list[str], expected: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "secret"
    path.write_text("of the file\n")
    assert main(["join", *(option.replace("{}", str(path)) for option in options)]) == 0
    assert joined == expected


@pytest.mark.parametrize("address", ["10.0.0.1", ":29500", "10.0.0.1:", "10.0.0.1:http", "a:-1", "a:0", "a:65536", ""])
def test_an_address_to_join_needs_a_port(joined: list[Any], address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", address]) == 2
    words = f"{address!r} is not ADDRESS:PORT; pass what the first notebook shows, such as 10.0.0.1:29500\n"
    assert capsys.readouterr().err == f"notebook-accelerate join: {words}"
    assert not joined


@pytest.mark.parametrize(
    ("options", "variable", "words"),
    [
        ([], "", "a host needs the run's secret: set NOTEBOOK_ACCELERATE_SECRET, or pass --secret_file with a file"),
        (["--secret_file", "{}/absent"], "hush", "No such file or directory"),
        (["--secret_file", "{}/empty"], "hush", "is empty; write the run's secret into it"),
        (["--num_processes", "-1"], "hush", "--num_processes -1 is not allowed; pass a number of at least 1"),
    ],
)
def test_join_requires_a_secret_and_a_valid_number_of_ranks(
    joined: list[Any],
    options: list[str],
    variable: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", variable)
    (tmp_path / "empty").write_text("\n")
    assert main(["join", "a:1", *(option.replace("{}", str(tmp_path)) for option in options)]) == 2
    assert words in capsys.readouterr().err
    assert not joined


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (LaunchError("refused"), 1, "notebook-accelerate join: refused\n"),
        (RunStoppedError("it was stopped"), 1, "notebook-accelerate join: it was stopped\n"),
        (WorkerError("rank 1 failed"), 1, "notebook-accelerate join: rank 1 failed\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_result_of_the_run_becomes_the_exit_code_of_join(
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    exit_code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def join(*given: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(joining, "join", join)
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_SECRET", "hush")
    assert main(["join", "a:1"]) == exit_code
    assert capsys.readouterr().err == words
