"""Runs on a cluster of two nodes, as users see them: results, output, failures, stops and resources."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import notebook_accelerate
from notebook_accelerate import LaunchConfig, LaunchError, RayCluster, RunStoppedError, WorkerError, notebook_launcher
from notebook_accelerate.telemetry import MetricEvent, emit
from tests.support.ray_cluster import LocalCluster
from tests.support.waiting import until

SPREAD = RayCluster(strategy="SPREAD")


def mapped_at(address: int) -> str:
    """Return the device and inode of the file that this process has mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, _, _, device, inode, *_ = line.split()
        begin, _, end = area.partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return f"{device} {inode}"
    raise LookupError("no file is mapped at this address")


def actor() -> int:
    """Return the process id of the actor. The parent of a rank is the actor's server process."""
    return psutil.Process(os.getppid()).ppid()


def train(big: torch.Tensor, gate: Path) -> dict[str, Any]:
    """Print and log; once `gate` exists, reduce over all ranks, and return facts about this rank.

    The first rank of each node changes the tensor after all ranks have read it.
    """
    from notebook_accelerate import Accelerator

    accelerator = Accelerator()
    print(f"hello from {accelerator.process_index}")
    for step in range(5):
        emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
    until(gate.exists, 600)
    variables = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "GLOO_SOCKET_IFNAME")
    file, total = mapped_at(big.data_ptr()), float(big.sum())
    accelerator.wait_for_everyone()
    if accelerator.is_local_main_process:
        big.fill_(7.0)
    accelerator.wait_for_everyone()
    return {
        "sum": int(accelerator.reduce(torch.ones(1))),
        "file": file,
        "total": total,
        "mean after a change": float(big.mean()),
        "environment": [os.environ[name] for name in variables],
        "breakpoint": os.environ.get("PYTHONBREAKPOINT", ""),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def test_a_run_spans_two_nodes(cluster: LocalCluster, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    big, gate = torch.ones(1 << 20), tmp_path / "gate"
    run = notebook_launcher(train, (big, gate), 3, on=SPREAD, config=LaunchConfig(panel=True), block=False)
    until(lambda: run.ended or len(run._internals.store.resources) == 3, 300)
    gate.touch()
    assert run.wait(300)

    results = run.results
    assert [result["sum"] for result in results] == [3, 3, 3]
    assert [result["total"] for result in results] == [float(1 << 20)] * 3
    nodes = [info.node for info in run.ranks]
    assert sorted(set(nodes)) == [0, 1]
    assert nodes == sorted(nodes), "the ranks of a node are consecutive"
    assert {info.host.rpartition(", ")[2] for info in run.ranks} == set(cluster.nodes)
    alone = next(info.rank for info in run.ranks if nodes.count(info.node) == 1)
    local_ranks = [result["environment"][1] for result in results]
    assert local_ranks[alone] == "0"
    assert sorted(rank for index, rank in enumerate(local_ranks) if index != alone) == ["0", "1"]
    master = run.ranks[0].host.rpartition(", ")[2]
    for rank, result in enumerate(results):
        assert result["environment"][0] == str(rank)
        assert result["environment"][2] == str(nodes.count(nodes[rank]))
        assert result["environment"][3:] == [str(nodes[rank]), master, "lo"]
        assert (result["breakpoint"], result["threads"]) == ("", 1)
    # The tensor reached each node once: two ranks map the same file, and the rank on the other node maps another.
    files = [result["file"] for result in results]
    assert len(set(files)) == 2
    assert files.count(files[alone]) == 1
    changed = [7.0 if local_rank == "0" else 1.0 for local_rank in local_ranks]
    assert [result["mean after a change"] for result in results] == changed, "a rank changes only its own copy"

    assert [info.pid for info in run.ranks] == [result["pid"] for result in results]
    assert [info.exit for info in run.ranks] == ["exit 0"] * 3
    assert len(run.metrics["loss"].rank(2).values) == 5
    assert run.logs(rank=1) == ["hello from 1"]
    assert all(run._internals.store.resources[rank].memory_bytes > 0 for rank in range(3)), (
        "memory was sampled on each node"
    )
    out = capfd.readouterr().out
    assert "3 processes on a Ray cluster · ray (as asked: on=RayCluster(...))" in out
    for rank in range(3):
        assert f"[rank {rank}] hello from {rank}" in out


def test_the_first_failure_is_reported_at_its_line(cluster: LocalCluster) -> None:
    class CustomError(Exception):
        pass

    def fail() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise CustomError("only here")
        dist.barrier()

    with pytest.raises(WorkerError, match="rank 1") as caught:
        notebook_launcher(fail, (), 2, on=SPREAD)
    first = caught.value.failures[0]
    assert first.rank == 1
    assert type(caught.value.__cause__).__name__ == "CustomError"
    assert first.chain[-1].frames[-1].source.strip() == 'raise CustomError("only here")'
    assert [info.state for info in caught.value.run.ranks][1] == "failed"  # type: ignore[union-attr]


def test_ranks_answer_questions_and_end_with_their_children_when_stopped(cluster: LocalCluster) -> None:
    def stuck() -> None:
        import subprocess

        import torch.distributed as dist

        subprocess.Popen(["sleep", "600"])
        dist.init_process_group("gloo")
        secret = dist.get_rank() * 10
        if secret == 0:
            dist.barrier()
        while secret:
            time.sleep(0.1)

    run = notebook_launcher(stuck, (), 2, on=SPREAD, block=False)
    try:
        until(lambda: run.status == "running" and run.ask("secret", ranks=[1]).get(1) == 10)
        until(lambda: any(place.rank == 0 and place.waiting for place in run.diagnose().places))
        until(lambda: "barrier" in run.diagnose().text)
        until(lambda: "time.sleep(0.1)" in str(run.stacks()))
        pids = [int(info.pid or 0) for info in run.ranks]
        children = [child.pid for pid in pids for child in psutil.Process(pid).children()]
        assert len(children) == 2
        # A suspended rank cannot answer, so its host inspects it from outside.
        os.kill(pids[1], signal.SIGSTOP)
        assert len(run.diagnose().places) == 2
    finally:
        os.kill(int(run.ranks[1].pid or 0), signal.SIGCONT)
        run.stop()
    assert run.status == "stopped"
    assert [info.state for info in run.ranks] == ["stopped", "stopped"]
    until(lambda: not any(psutil.pid_exists(pid) for pid in [*pids, *children]))


@pytest.mark.parametrize("rank_first", [False, True], ids=["actor", "rank, then actor"])
def test_a_killed_actor_is_reported_and_the_group_restarts(cluster: LocalCluster, rank_first: bool) -> None:
    """When a node is lost, Ray's worker kills the ranks and then itself, which does not count as the ranks' failure."""

    def fragile() -> str:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
            kill = f"kill -9 {os.getpid()}; sleep 0.3; " if rank_first else ""
            subprocess.Popen(["sh", "-c", f"{kill}kill -9 {actor()}"], start_new_session=True)
            time.sleep(600)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    run = notebook_launcher(fragile, (), 2, on=RayCluster(strategy="STRICT_SPREAD"), max_restarts=1)
    assert run.results == ("1", "1")
    words = r"rank 1: node 1 \(.*127\.0\.0\.\d\) was lost: its actor's process has died"
    assert re.search(words, run.attempts[0].outcome)


def test_a_killed_rank_is_reported_while_its_actor_lives(cluster: LocalCluster) -> None:
    def fragile() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(WorkerError, match=r"killed by SIGKILL"):
        notebook_launcher(fragile, (), 2, on=RayCluster(strategy="STRICT_SPREAD"))


def test_the_ranks_of_a_node_have_one_host(cluster: LocalCluster, tmp_path: Path) -> None:
    def fragile(started: Path) -> tuple[int, int, int]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        (started / str(os.getpid())).touch()
        dist.barrier()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if (os.environ["NODE_RANK"], os.environ["LOCAL_RANK"]) == ("1", "1"):
                os.kill(actor(), signal.SIGKILL)
            time.sleep(600)
        return int(os.environ["NODE_RANK"]), int(os.environ["GROUP_WORLD_SIZE"]), actor()

    run = notebook_launcher(fragile, (tmp_path,), 5, on="ray", max_restarts=1)

    nodes = [node for node, _, _ in run.results]
    assert sorted(map(nodes.count, (0, 1))) == [2, 3]
    assert nodes == sorted(nodes)
    hosts = {node: host for node, _, host in run.results}
    assert [(node, 2, hosts[node]) for node in nodes] == list(run.results)
    assert hosts[0] != hosts[1]
    words = r"ranks .*, 4: node 1 \(.*127\.0\.0\.\d\) was lost: its actor's process has died"
    assert re.search(words, run.attempts[0].outcome)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 * 5
    until(lambda: not any(psutil.pid_exists(pid) for pid in [*pids, *hosts.values()]))


def test_a_cluster_that_is_too_small_is_refused(cluster: LocalCluster) -> None:
    on = RayCluster(when_full="refuse")
    with pytest.raises(LaunchError, match="too small or too busy: 50 ranks with CPU 1 each are requested") as caught:
        notebook_launcher(print, (), 50, on=on)
    for part in (
        "there are CPU 5 on 2 nodes",
        "127.0.0.2 (CPU 3)",
        "127.0.0.3 (CPU 2)",
        "currently free: CPU",
        "wait=",
    ):
        assert part in str(caught.value)
    with pytest.raises(LaunchError, match="placed STRICT_SPREAD"):
        notebook_launcher(print, (), 3, on=RayCluster(when_full="refuse", strategy="STRICT_SPREAD"))
    with pytest.raises(LaunchError, match="did not have the resources within 1 s"):
        notebook_launcher(print, (), 2, on=RayCluster(resources={"unicorn": 1}, wait=1))


def test_waiting_for_resources_can_be_stopped(cluster: LocalCluster) -> None:
    caught: list[BaseException] = []

    def launch() -> None:
        try:
            notebook_launcher(print, (), 2, on=RayCluster(resources={"unicorn": 1}), block=False)
        except BaseException as error:  # noqa: BLE001 - looked at below
            caught.append(error)

    before = notebook_accelerate.runs()
    thread = threading.Thread(target=launch)
    thread.start()
    until(lambda: any(run.notes for run in notebook_accelerate.runs() if run not in before))
    run = notebook_accelerate.runs()[-1]
    assert "waiting for the Ray cluster: 2 ranks with CPU 1, unicorn 1 each are requested" in run.notes[0]
    run.stop()
    thread.join(60)
    assert run.status == "stopped"
    assert isinstance(caught[0], RunStoppedError)


def test_versions_are_compared_before_the_function_is_sent(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "torch-9.9.9.dist-info").mkdir()
    (tmp_path / "torch-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.9\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    on = RayCluster(runtime_env={"env_vars": {"PYTHONPATH": path}})
    ours = re.escape(torch.__version__)
    words = rf"so the function was not sent: node \S+ \(127\.0\.0\.\d\) has torch 9\.9\.9; the notebook has {ours}"
    with pytest.raises(LaunchError, match=words):
        notebook_launcher(print, (), 2, on=on)


def test_an_address_without_a_cluster_is_reported() -> None:
    on = RayCluster(address="127.0.0.9:9", start_timeout=5)
    with pytest.raises(LaunchError, match=r"the Ray cluster at 127\.0\.0\.9:9"):
        notebook_launcher(print, (), 1, on=on)


def test_a_launch_through_rays_client_works(cluster: LocalCluster) -> None:
    def work(big: torch.Tensor) -> tuple[int, float]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        print("x" * 200_000)
        return int(total), float(big.sum())

    on = RayCluster(address=cluster.client, start_timeout=500.0)
    run = notebook_launcher(work, (torch.ones(1 << 20),), 2, on=on)
    assert run.results == ((2, float(1 << 20)), (2, float(1 << 20)))
    assert [len(run.logs(rank=rank)[0]) for rank in (0, 1)] == [200_000, 200_000]


def resumable(folder: str, wait: bool) -> list[float]:
    """Train six steps, with a checkpoint after each. With `wait`, the first attempt hangs after the third step."""
    import tests.support.mounted
    from notebook_accelerate import Accelerator

    class Progress:
        losses: list[float]

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.losses = state["losses"]

    assert tests.support.mounted.MountedFileSystem.protocol == "mounted"
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    progress = Progress()
    progress.losses = []
    accelerator.register_for_checkpointing(progress)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        accelerator.load_state(folder)
        print("going on after", len(progress.losses))
    for batch in torch.randn(6, 12, 4, generator=torch.Generator().manual_seed(0))[len(progress.losses) :]:
        loss = model(batch.chunk(accelerator.num_processes)[accelerator.process_index]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.log({"loss": progress.losses[-1]}, step=len(progress.losses))
        accelerator.save_state(folder)
        if wait and len(progress.losses) == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print("three steps")
            time.sleep(600)
    return progress.losses


def tables(run: Any) -> dict[str, list[str]]:
    """Return the header of each table in a run's report, by caption."""
    html = run.report().html
    between = r"(?:(?!<table|<summary).)*"  # A section may have a picture above the table.
    found = re.findall(rf"<summary>([^<]*)</summary>{between}<table[^>]*><thead><tr>(.*?)</tr></thead>", html)
    heads = {caption.partition(":")[0]: re.findall(r"<th[^>]*>(.*?)</th>", head) for caption, head in found}
    heads.pop("Step time", None)  # Only longer runs report step times.
    return heads


def test_a_dead_node_is_named_and_training_resumes_on_the_others(cluster: LocalCluster, tmp_path: Path) -> None:
    third = cluster.add_node(1)
    on = RayCluster(strategy="SPREAD")
    run = notebook_launcher(resumable, (f"mounted://{tmp_path}/a", True), 3, on=on, max_restarts=1, block=False)
    try:
        until(lambda: all("three steps" in run.logs(rank=rank) for rank in range(3)), 300)
        until(lambda: len(run._internals.store.peak_memory) == 3)
        assert {info.host.rpartition(", ")[2] for info in run.ranks} == {*cluster.nodes, third}
        lost = next(info for info in run.ranks if info.host.endswith(third))
        lost_on = f"rank {lost.rank}: node {lost.node} ({lost.host}) was lost"
        cluster.kill_node(third)
        assert run.wait(300)
    finally:
        run.stop(grace=1.0)
    assert run.attempts[0].outcome == f"{lost_on}: the Ray node at {third} has died"
    assert third not in str([info.host for info in run.ranks])
    assert [run.logs(rank=rank)[-1] for rank in range(3)] == ["going on after 3"] * 3

    alone = notebook_launcher(resumable, (f"mounted://{tmp_path}/b", False), 3, use_port=0)
    for losses in run.results:
        assert losses == pytest.approx(alone.results[0], rel=1e-6)
    assert len(set(alone.results[0])) == 6
    found, expected = tables(run), tables(alone)
    assert all(f"node {info.node} · {info.host}" in run.report().text for info in run.ranks)
    assert found.pop("Attempts") == ["attempt", "started", "seconds", "outcome"]
    assert found == expected
    assert {
        "Ranks",
        "Metrics",
        "Sharding",
        "Arguments of resumable",
        "Launch",
        "Configuration",
        "Environment",
    } == expected.keys()
    assert all(run._internals.store.peak_memory[rank] > 0 for rank in range(3))


def test_a_launch_placed_on_a_dead_node_moves_to_another(cluster: LocalCluster) -> None:
    before = [cluster.add_node(4), cluster.add_node(2, gpus=3)]
    for address in before:
        cluster.kill_node(address, known=False)
    run = notebook_launcher(lambda: os.environ["RANK"], (), 2, on=RayCluster(gpus=0))
    assert run.results == ("0", "1")
    assert not {info.host.rpartition(", ")[2] for info in run.ranks} & set(before)


def test_a_launch_waits_until_a_node_with_gpus_joins(cluster: LocalCluster) -> None:
    def place() -> tuple[str, list[str], int]:
        return os.environ["NODE_RANK"], os.environ["CUDA_VISIBLE_DEVICES"].split(","), actor()

    found: list[Any] = []
    on = RayCluster(resources={"late": 1}, gpus=1, strategy="STRICT_PACK")
    thread = threading.Thread(target=lambda: found.append(notebook_launcher(place, (), 2, on=on)))
    before = notebook_accelerate.runs()
    thread.start()
    until(lambda: any(run.notes for run in notebook_accelerate.runs() if run not in before))
    address = cluster.add_node(2, gpus=3, late=2)  # Ray does not check whether a node has the GPUs that it claims.
    thread.join(300)
    run = found[0]
    assert run.results[0] == run.results[1], "both ranks see both devices, and each uses the one at its local rank"
    node, devices, _ = run.results[0]
    assert node == "0"
    assert len(devices) == 2
    assert set(devices) < {"0", "1", "2"}
    assert {info.host.rpartition(", ")[2] for info in run.ranks} == {address}
    cluster.kill_node(address)


def served(folder: str) -> tuple[str, bool, str]:
    """Return the version of `accelerate`, whether this package serves it, and the version that a child process sees."""
    import importlib
    import importlib.metadata
    import subprocess
    import sys

    same = importlib.import_module("accelerate").Accelerator is notebook_accelerate.Accelerator
    ask = [sys.executable, "-c", "import accelerate; print(accelerate.__version__)"]
    child = subprocess.run(ask, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
    return importlib.metadata.version("accelerate"), same, child


def test_ranks_on_nodes_get_a_runtime_environment_and_the_package_as_accelerate(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def facts() -> tuple[str, str, int, tuple[str, bool, str]]:
        variables = os.environ["FROM_RUNTIME_ENV"], os.environ["MINE"]
        return *variables, torch.get_num_threads(), served(str(tmp_path))

    on = RayCluster(strategy="SPREAD", runtime_env={"env_vars": {"FROM_RUNTIME_ENV": "here"}}, cpus=2, resources=None)
    run = notebook_launcher(facts, (), 2, on=on, env={"MINE": "too"}, config=LaunchConfig(as_accelerate=True))
    assert run.results == (("here", "too", 2, ("1.15.0", True, "1.15.0")),) * 2
