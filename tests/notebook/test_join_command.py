"""With ``python -m notebook_accelerate join``, machines run ranks for a notebook, however the command is started."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.join_commands import JOIN, LIMIT, SRUN, SSH, JoinCommand
from tests.support.kernel import Cell, Kernel
from tests.support.launching import PAST_THE_CALL, children, rank_pids, ready_kernel, said, wait_gone
from tests.support.namespaces import ADDRESSES, two_namespaces
from tests.support.notebooks import SETUP, Notebooks
from tests.support.ports import free_port

pytestmark = [pytest.mark.notebook, pytest.mark.timeout(600)]
HOST = platform.node()
SECRET = "hush-4711"
NOWHERE = "127.0.0.1:9"
FUNCTIONS = """
def stops():
    group()
    value = 40 + rank()
    dist.barrier()
    if rank() == 1:
        breakpoint()
        value += 1
    dist.barrier()
    return value

def asks():
    return input("who? ") if rank() else ""

def placed():
    group()
    dist.barrier()
    return [os.environ.get(name, "") for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "SLURM_NODEID")]

def shares():
    import sys
    torch.optim  # A function that uses this name is taken to train.
    return [os.getppid(), "torch._dynamo" in sys.modules]

def touches(folder):
    open(f"{folder}/{os.environ['RANK']}", "w").close()
    time.sleep(600)

def again():
    return meet(1 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else -1)
"""
Start = Callable[..., JoinCommand]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts a command line, by default with the run's secret in the environment."""
    with ExitStack() as started:

        def call(*command: str, secret: str = SECRET, **options: Any) -> JoinCommand:
            given = {"env": {**os.environ, "NOTEBOOK_ACCELERATE_SECRET": secret}, **options}
            made = JoinCommand(*command, **given)
            started.callback(made.close)
            return made

        yield call


@pytest.fixture
def join(start: Start) -> Start:
    """Return a function that starts ``join`` with ADDRESS:PORT and options."""
    return lambda *arguments, **options: start(*JOIN, *arguments, **options)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    """Return a file that contains the secret and that only its owner can read."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(f"{SECRET}\n")
    return path


@pytest.fixture(scope="module")
def first(kernel: Kernel) -> Kernel:
    """Return the first notebook's kernel, with the functions defined."""
    for code in (SETUP, FUNCTIONS, "launch(time.sleep, 1.0, panel=True)", "look()"):
        kernel.check(code, LIMIT)
    return kernel


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that no test changes what `look()` returns in the kernel, or leaves child processes."""
    if "first" not in request.fixturenames:
        yield
        return
    kernel = request.getfixturevalue("first")
    before = [kernel.value("look()", LIMIT)]
    yield
    kernel.answer = None
    assert Notebooks([kernel]).changed(before) == [{}]
    assert children(kernel) == []


def launch(kernel: Kernel, function: str, address: str = "127.0.0.1", **options: Any) -> tuple[Cell, str]:
    """Start a launch with one rank here, for two nodes by default. Return its cell and its ADDRESS:PORT."""
    port = free_port()
    given = {"num_processes": 1, "num_nodes": 2, "master_addr": address, "use_port": port, "panel": True, **options}
    given["rdzv_conf"] = {"secret": SECRET}
    call = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return kernel.submit(f"run = launch({function}, {call})"), f"{address}:{port}"


def begin(kernel: Kernel, start: Start, *options: str, nodes: int = 2, **more: Any) -> tuple[JoinCommand, list[int]]:
    """Let a command join a run of three sleeping ranks. Return the command and the ranks' process ids."""
    cell, where = launch(kernel, "meet, -1, 600.0", num_nodes=nodes, block=False)
    command = start(where, *(["--num_processes", "2"] if nodes == 2 else []), *options, **more)
    kernel.wait_for(lambda: cell.stdout.count("sum 3.0") == 3, LIMIT, "three sums")
    return command, rank_pids(kernel)


def end_of_run(kernel: Kernel) -> list[str]:
    """Wait for the run to end. Return its error's type and message."""
    assert kernel.value("run.wait(100)", LIMIT)
    return list(kernel.value("[type(run.error).__name__, str(run.error)]"))


def test_two_commands_join(first: Kernel, join: Start, secret_file: Path) -> None:
    cell, where = launch(first, "meet", num_processes=2, num_nodes=3)
    one = join(where)
    one.wait_until_it_prints("2 of 3 nodes have joined")
    other = join(where, "--secret_file", str(secret_file), "--num-processes", "1", secret="")
    first.finish(cell, LIMIT).expect_ok()
    members = f"ranks 0-1 on node 0 ({HOST}){{}}; ranks 2-3 on node 1 ({HOST}){{}}; rank 4 on node 2 ({HOST}){{}}"
    assert f"all 3 nodes have joined: {members.format(', here', '', '')}" in cell.stdout
    for rank, here in enumerate([2, 2, 2, 2, 1]):
        assert f"[rank {rank}] sum 10.0 of 5 here {here}\n" in cell.stdout
    assert first.value("run.results") == [10.0] * 5
    found = first.value("[[info.rank, info.node, info.host, info.state, info.exit] for info in run.ranks]")
    hosts = ["", "", HOST, HOST, HOST]
    assert found == [[rank, rank // 2, hosts[rank], "succeeded", "exit 0"] for rank in range(5)]
    assert (one.exit_code(), other.exit_code(), one.out, other.out) == (0, 0, "", "")
    assert one.err.splitlines() == [
        f"joining the run at {where}",
        "2 of 3 nodes have joined; waiting for 1 of nodes 1, 2",
        "3 of 3 nodes have joined",
        f"all 3 nodes have joined: {members.format('', ', here', '')}",
        "starting ranks 2, 3",
        "the ranks of this host have ended",
        "the run succeeded",
    ]
    assert f"{members.format('', '', ', here')}\nstarting rank 4\n" in other.err


@pytest.mark.parametrize("by_file", [False, True])
def test_the_secret_does_not_appear_on_a_command_line(
    first: Kernel, join: Start, secret_file: Path, by_file: bool
) -> None:
    options = ["--secret_file", str(secret_file)] if by_file else []
    command, _ = begin(first, join, *options, secret="" if by_file else SECRET)
    lines = [" ".join(process.cmdline()) for process in command.processes]
    assert len(lines) >= 3
    assert not [line for line in lines if SECRET in line]
    first.check("run.stop()", LIMIT)
    assert command.exit_code() == 1
    assert SECRET not in command.out + command.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([NOWHERE], "a host needs the run's secret: set NOTEBOOK_ACCELERATE_SECRET, or pass --secret_file"),
        ([NOWHERE, "--secret_file", "empty"], "empty is empty; write the run's secret into it"),
        ([NOWHERE, "--secret_file", "absent"], "absent: [Errno 2] No such file or directory"),
        ([NOWHERE, "--secret_file", "/"], "/: [Errno 21] Is a directory"),
        (["127.0.0.1"], "'127.0.0.1' is not ADDRESS:PORT; pass what the first notebook shows"),
    ],
)
def test_invalid_options_are_refused(join: Start, tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "empty").write_text(" \n")
    command = join(*(option.replace("empty", str(tmp_path / "empty")) for option in options), secret="")
    assert command.exit_code() == 2
    assert re.fullmatch(r"notebook-accelerate join: .*\n", command.err)
    assert words in command.err


def test_the_error_says_that_nothing_listens(join: Start) -> None:
    where = f"127.0.0.1:{free_port()}"
    command = join(where, "--join_timeout", "2")
    assert command.exit_code() == 1
    assert f"join: node 0 did not join within 2 s: no run answers at {where} (" in command.err


@pytest.mark.parametrize("name", ["nowhere.invalid", "a..b"])
def test_a_name_without_an_address_is_refused(join: Start, name: str) -> None:
    with suppress(UnicodeError):
        try:
            socket.getaddrinfo(name, 29500)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:
                pytest.skip("no server answers for names here")
    command = join(f"{name}:29500", "--join_timeout", "600")
    assert command.exit_code() == 1
    assert f"join: this machine cannot resolve '{name}', where the first notebook should listen (" in command.err
    assert "; pass its address, for example 10.0.0.1:29500\n" in command.err


def test_the_run_keeps_waiting_for_a_command_with_its_secret(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "meet", num_nodes=3)
    first.wait_for(lambda: "1 of 3 nodes" in cell.stdout, LIMIT)
    wrong = join(where, secret="wrong-4711")
    assert wrong.exit_code() == 1
    assert f"join: no run with this secret listens on {where}; pass the secret of the first" in wrong.err
    leaves = join(where)
    leaves.wait_until_it_prints("2 of 3 nodes")
    leaves.process.send_signal(signal.SIGINT)
    assert leaves.exit_code() == 130
    first.wait_for(lambda: "has left: its command was interrupted" in cell.plain, LIMIT)
    right = [join(where), join(where)]
    first.finish(cell, LIMIT).expect_ok()
    assert [each.exit_code() for each in right] == [0, 0]
    assert SECRET not in cell.plain + wrong.err


def test_one_command_too_many_is_refused_and_a_stop_ends_the_others(first: Kernel, join: Start) -> None:
    command, pids = begin(first, join)
    late = join(command.command[len(JOIN)])
    assert late.exit_code() == 1
    assert "join: the run already has its 2 nodes: " in late.err
    assert f"{HOST} (process {command.process.pid})" in late.err
    first.check("run.stop()", LIMIT)
    assert command.exit_code() == 1
    assert re.search(rf"join: run \d+ ended after \S+ s: node 0 \({HOST}\): it was stopped\n", command.err)
    wait_gone(pids, LIMIT)
    assert end_of_run(first)[0] == "RunStoppedError"


def test_a_failure_of_a_commands_rank_is_reported_at_its_line_of_the_cell(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "meet, 2")
    command = join(where, "--num_processes", "2")
    first.finish(cell, LIMIT)
    assert re.search(r"rank 2 failed( first)?:", said(cell))
    assert re.search(r"Cell In\[\d+\], line 8, in meet\n +raise KeyError\(\"bad batch\"\)", said(cell))
    assert command.exit_code() == 1
    assert re.search(r"join: run \d+.*: KeyError: 'bad batch' at Cell In\[\d+\], line 8", command.err)
    assert "Traceback" not in command.err


def test_a_commands_ranks_share_what_an_optimizer_imports(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "shares")
    join(where, "--num_processes", "2", forked=False)
    first.finish(cell, LIMIT).expect_ok()
    (parent, is_shared), other = first.value("run.results[1:]")
    assert is_shared
    assert other == [parent, True]


def test_a_launch_with_spawn_starts_an_interpreter_for_each_rank_of_a_command(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "shares", start_method="spawn")
    command = join(where, "--num_processes", "2")
    first.finish(cell, LIMIT).expect_ok()
    assert [parent for parent, _ in first.value("run.results[1:]")] == [command.process.pid] * 2


def test_a_stop_while_a_command_imports_torch_starts_no_rank(first: Kernel, join: Start, tmp_path: Path) -> None:
    _, where = launch(first, f"touches, {str(tmp_path)!r}", block=False)
    command = join(where, "--num_processes", "2", forked=False)
    command.wait_until_it_prints("starting ranks 1, 2")
    first.check("run.stop(grace=1.0)", LIMIT)
    assert command.exit_code() != 0
    assert [path.name for path in tmp_path.iterdir()] in ([], ["0"])


def test_a_commands_ranks_are_restarted(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "again", max_restarts=1)
    command = join(where)
    first.finish(cell, LIMIT).expect_ok()
    assert "attempt 1 failed (rank 1: KeyError: 'bad batch'" in cell.stderr
    assert first.value("run.results") == [1.0, 1.0]
    assert command.exit_code() == 0
    assert "\nstarting rank 1\n" in command.err
    assert command.err.count("\nattempt 2 starts here with rank 1\n") == 1


def test_a_command_says_that_its_ranks_are_held_for_the_debugger(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "meet, 2", hold_on_error=True)
    command = join(where, "--num_processes", "2")
    first.finish(cell, LIMIT)
    command.wait_until_it_prints("; its ranks are held for the debugger of the first notebook\n")
    assert re.search(r"\nrun \d+.*: KeyError: 'bad batch' at Cell In\[\d+\], line 8; its ranks are held", command.err)
    first.check("notebook_accelerate.runs()[-1].stop()", LIMIT)
    assert command.exit_code() == 1


@pytest.mark.parametrize(
    ("number", "exit_code", "words"),
    [
        (signal.SIGINT, 130, "has left: its command was interrupted"),
        (signal.SIGTERM, 128 + signal.SIGTERM, "has left: its command was interrupted"),
        (signal.SIGKILL, -signal.SIGKILL, "was lost: the other end has closed"),
    ],
    ids=["SIGINT", "SIGTERM", "SIGKILL"],
)
def test_a_signal_to_the_command_ends_the_run(
    first: Kernel, join: Start, number: int, exit_code: int, words: str
) -> None:
    command, pids = begin(first, join)
    command.process.send_signal(number)
    assert command.exit_code() == exit_code
    name, text = end_of_run(first)
    assert name == "WorkerDiedError"
    assert f"ranks 1, 2: node 1 ({HOST}) {words}" in text
    wait_gone(pids, LIMIT)


def test_the_command_ends_if_the_first_notebook_is_lost(join: Start) -> None:
    with ready_kernel(zygote=False) as kernel:
        kernel.check(SETUP, LIMIT)
        command, pids = begin(kernel, join)
        kernel.kill()
        assert command.exit_code() == 1
        assert "join: the first notebook was lost: " in command.err
        wait_gone(pids, LIMIT)


def test_a_commands_ranks_can_be_debugged_in_the_notebook(first: Kernel, join: Start) -> None:
    cell, where = launch(first, "stops", block=False)
    command = join(where)
    first.wait_for(lambda: "rank 1 is stopped at a breakpoint; notebook_accelerate.debug(rank=1)" in cell.plain, LIMIT)
    asked = first.value("{str(rank): value for rank, value in run.ask('value', timeout=60).items()}", LIMIT)
    assert asked == {"0": 40, "1": 41}
    assert "in stops" in first.value("str(run.stacks(ranks=[1]))", LIMIT)
    prompts = first.types(*PAST_THE_CALL, "p value", "value = 50", "c")
    shown = first.check("run.debug(rank=1)", LIMIT).plain
    assert "[rank 1] 41" in shown
    assert "-> value += 1" in shown
    assert len(prompts) == 3 + len(PAST_THE_CALL)
    assert first.value("run.wait(100)", LIMIT)
    assert first.value("run.results") == [40, 51]
    assert command.exit_code() == 0


def test_a_commands_rank_can_ask_for_input_in_the_notebook(first: Kernel, join: Start) -> None:
    prompts = first.types("Ada")
    cell, where = launch(first, "asks")
    command = join(where)
    first.finish(cell, LIMIT).expect_ok()
    assert (first.value("run.results"), prompts, command.exit_code()) == (["", "Ada"], ["[rank 1] who? "], 0)


def test_a_scheduler_starts_and_cancels_its_commands(first: Kernel, start: Start) -> None:
    command, pids = begin(first, lambda where: start("bash", "-c", SRUN, "srun", "2", *JOIN, where), nodes=3)
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "SLURM_NODEID")
    question = f"[__import__('os').environ.get(name, '') for name in {names}]"
    results = first.value(f"list(run.ask({question!r}, timeout=60).values())", LIMIT)
    assert [result[:3] for result in results] == [["0", "0", "0"], ["1", "1", "0"], ["2", "2", "0"]]
    assert (results[0][3], sorted(result[3] for result in results[1:])) == ("", ["0", "1"])
    command.process.terminate()
    assert command.exit_code() == 128 + signal.SIGTERM
    assert re.search(rf"node [12] \({HOST}\) has left: its command was interrupted", end_of_run(first)[1])
    wait_gone(pids, LIMIT)


def over_ssh(start: Start, path: Path, where: str, *prefix: str) -> JoinCommand:
    """Start a shell without the secret's variable. The secret arrives on stdin and is written to a file."""
    shell = ("env", "-i", "/bin/sh", "-c", SSH, "sh")
    return start(*prefix, *shell, str(path), sys.executable, where, env={"PATH": os.environ["PATH"]}, sent=SECRET)


def test_a_command_over_ssh_joins(first: Kernel, start: Start, tmp_path: Path) -> None:
    cell, where = launch(first, "placed")
    command = over_ssh(start, tmp_path / "secret", where)
    first.finish(cell, LIMIT).expect_ok()
    assert (command.exit_code(), first.value("run.results[1]")) == (0, ["1", "1", "0", ""])
    assert "mode 600\n" in command.err
    assert not (tmp_path / "secret").exists()


def test_a_command_over_ssh_joins_from_another_network(start: Start, tmp_path: Path) -> None:
    with (
        two_namespaces("join") as names,
        ready_kernel(zygote=False, prefix=("ip", "netns", "exec", names[0])) as kernel,
    ):
        kernel.check(SETUP, LIMIT)
        cell, where = launch(kernel, "meet", ADDRESSES[0])
        command = over_ssh(start, tmp_path / "secret", where, "ip", "netns", "exec", names[1])
        kernel.finish(cell, LIMIT).expect_ok()
        assert "[rank 1] sum 1.0 of 2 here 1" in cell.stdout
        assert kernel.value("run.results") == [1.0, 1.0]
        assert command.exit_code() == 0
