"""An object store's failures: saves killed at any moment, refused credentials, missing buckets, and no server."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.checkpointing import save, save_model
from notebook_accelerate.errors import CheckpointError
from tests.s3.conftest import store
from tests.s3.test_states import names_in, of_manifest
from tests.support.killed import killed_saves
from tests.support.s3 import S3Server
from tests.support.trainings import Training


@pytest.mark.timeout(900)
def test_a_process_killed_at_a_change_of_the_store_loses_nothing(bucket: str) -> None:
    steps = killed_saves(bucket, "old", blocking=False, every=5)  # tests/faults/test_remote.py kills at every change.
    assert {found for _, found in steps} <= {"1.0", "2.0"}
    assert steps[-1][1] == "2.0"
    for step, _ in steps:
        assert names_in(f"{bucket}/at_{step}/old") == of_manifest(f"{bucket}/at_{step}/old")


def test_refused_credentials_raise_and_lose_nothing(server: S3Server, bucket: str, tmp_path: Path) -> None:
    training = Training()
    training.accelerator.save_state(f"{bucket}/out")
    before = names_in(f"{bucket}/out")
    calls: list[Any] = [
        lambda: training.accelerator.save_state(f"{bucket}/out"),
        lambda: training.accelerator.load_state(f"{bucket}/out"),
        lambda: save_model(training.accelerator, training.raw, f"{bucket}/model"),
        lambda: save({"a": 1}, f"{bucket}/a.bin"),
    ]
    server.check_credentials(True)
    try:
        for call in calls:
            with pytest.raises(CheckpointError, match=r"denied access .*AWS_ACCESS_KEY_ID"):
                call()
    finally:
        server.check_credentials(False)
    assert names_in(f"{bucket}/out") == before
    training.accelerator.load_state(f"{bucket}/out")


def test_a_missing_bucket_raises_and_is_not_created(bucket: str) -> None:
    training = Training()
    missing = f"{bucket}-missing"
    for call in (
        lambda: training.accelerator.save_state(f"{missing}/out"),
        lambda: save_model(training.accelerator, training.raw, f"{missing}/model"),
    ):
        with pytest.raises(CheckpointError, match=rf"{missing} does not exist .*Create it first"):
            call()
    with pytest.raises(ValueError, match="folder does not exist"):
        training.accelerator.load_state(f"{missing}/out")
    assert not store().exists(missing)


def test_an_unreachable_server_raises(bucket: str) -> None:
    code = f"""
        import os
        os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
        from tests.support.trainings import Training
        Training().accelerator.save_state("{bucket}/out")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert f"CheckpointError: Cannot list {bucket}/out" in done.stderr or "Cannot look for" in done.stderr, done.stderr
    assert "127.0.0.1:9" in done.stderr


def test_a_script_that_exits_still_uploads(bucket: str) -> None:
    code = f"""
        from tests.support.trainings import Training
        training = Training()
        training.epoch(stop=2)
        training.accelerator.save_state("{bucket}/out", blocking=False)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert names_in(f"{bucket}/out") == of_manifest(f"{bucket}/out"), done.stderr
