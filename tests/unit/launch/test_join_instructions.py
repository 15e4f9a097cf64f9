"""The instructions that the first notebook prints for other machines: where the secret comes from, and what to type."""

from __future__ import annotations

import pytest

from notebook_accelerate import LaunchConfig
from notebook_accelerate.launch.hosts.joining import instruction_lines

VARIABLE = "NOTEBOOK_ACCELERATE_SECRET"


def first_line(function: str = "train", shown: str = "", **options: object) -> str:
    given = {"num_nodes": 2, "master_addr": "10.0.0.1", **options}
    return instruction_lines(LaunchConfig(**given), function, shown)[0]  # type: ignore[arg-type]


def test_a_secret_from_the_environment_is_named() -> None:
    assert first_line().startswith(f"in another notebook, with the same {VARIABLE}: notebook_launcher(train, args, ")
    assert first_line("warm_rank").startswith(f"in another notebook, with the same {VARIABLE}: %rank_start --num-nodes")
    line = f"on the other machines: the same command with --machine_rank=1 and the same {VARIABLE}"
    assert first_line("run_script") == line


def test_a_secret_from_the_configuration_is_part_of_the_call() -> None:
    line = first_line(rdzv_conf={"secret": "hush"})
    assert line.startswith("in another notebook: notebook_launcher(")
    assert line.endswith("rdzv_conf={'secret': <the same>})")
    line = "in another notebook: %rank_start -c config --node-rank 1, where config is the same LaunchConfig"
    assert first_line("warm_rank", rdzv_conf={"secret": "hush"}) == line


@pytest.mark.parametrize(
    ("function", "begin", "end"),
    [
        ("train", "in another notebook: notebook_launcher(", "rdzv_conf={'secret': 'made'})"),
        ("warm_rank", f"in another notebook, after %env {VARIABLE}=made: %rank_start", "--port 29500"),
        ("run_module", "on the other machines: the same command", f" with {VARIABLE}=made"),
    ],
)
def test_a_generated_secret_is_part_of_the_line(function: str, begin: str, end: str) -> None:
    line = first_line(function, "made", rdzv_backend="c10d")
    assert line.startswith(begin)
    assert line.endswith(end)
