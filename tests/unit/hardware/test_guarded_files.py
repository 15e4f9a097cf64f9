"""Files and folders that others may have made, and JSON that takes far more memory than disk."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from notebook_accelerate.hardware import guarded_files

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to own a file as another user")
NOBODY = 65534


def test_links_of_the_user_lead_to_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "relative").symlink_to("../absolute/b")
    guarded_files.check_folder(tmp_path / "absolute" / "relative")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        guarded_files.check_folder(tmp_path / "loop")


@as_root
def test_a_link_of_another_user_is_found_behind_a_link_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(mode=0o700)
    (tmp_path / "theirs").symlink_to("a")
    os.chown(tmp_path / "theirs", NOBODY, NOBODY, follow_symlinks=False)
    (tmp_path / "mine").symlink_to("theirs")
    with pytest.raises(guarded_files.ForeignFileError, match=f"{tmp_path}/theirs belongs to"):
        guarded_files.check_folder(tmp_path / "mine")


def test_folders_are_created_for_the_user_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        guarded_files.make_folder(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert {(tmp_path / each).stat().st_mode & 0o777 for each in ("a", "a/b", "a/b/c")} == {0o700}


def test_in_a_container_without_root_its_folders_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to the overflow user there, as the folders of other users do, which only /tmp lets them create."""
    monkeypatch.setattr(guarded_files, "_overflow_user", lambda: NOBODY)
    assert guarded_files._is_trusted(NOBODY, shared=False)
    assert not guarded_files._is_trusted(NOBODY, shared=True)
    assert not guarded_files._is_trusted(NOBODY - 1, shared=False)


@as_root
def test_only_files_of_the_user_or_of_root_are_own(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert guarded_files.read_file(file, 5, own=True) == b"12345"
    (tmp_path / "link").symlink_to(file)
    assert guarded_files.read_file(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="not a regular file"):
        guarded_files.read_file(tmp_path / "link", 5, own=True)
    os.chown(file, NOBODY, NOBODY)
    assert guarded_files.read_file(file, 5) == b"12345"
    with pytest.raises(guarded_files.ForeignFileError, match="belongs to"):
        guarded_files.read_file(file, 5, own=True)


def test_what_has_no_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"123456")
    for name in ("pipe", "zero", "."):
        with pytest.raises(OSError, match="not a regular file"):
            guarded_files.read_file(tmp_path / name, 5)
    with pytest.raises(ValueError, match="has 6 bytes, at most 5"):
        guarded_files.read_file(tmp_path / "large", 5)


@pytest.mark.parametrize(
    "data",
    [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"[" + b"[]," * 1_000_000 + b"0]", b"[" + b"{}," * 1_000_000 + b"0]"],
)
def test_json_that_takes_far_more_memory_than_disk_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="lists and objects"):
        guarded_files.parse_json(data)


def test_brackets_in_texts_are_no_lists() -> None:
    value = ["[" * 500_000, '"[' * 100_000, "\\" * 9 + "[" * 100_000]
    assert guarded_files.parse_json(json.dumps(value).encode()) == value


def test_a_text_without_an_end_takes_no_time() -> None:
    begin = time.monotonic()
    for data in (b'"' + rb"\"[" * 1_000_000, b'"' * 1_000_001 + b"[" * 1_000_000, b'"[' * 1_000_000 + b"\\"):
        with pytest.raises(ValueError):  # noqa: PT011 - that it ends is what counts
            guarded_files.parse_json(data)
    assert time.monotonic() - begin < 10


def test_depth_is_bounded() -> None:
    nested: object = 1
    for _ in range(guarded_files.MAX_DEPTH):
        nested = [nested]
    guarded_files.check_depth(nested)
    with pytest.raises(ValueError, match="nested more than"):
        guarded_files.check_depth({"a": nested})
    with pytest.raises(ValueError, match="nested"):
        guarded_files.parse_json(b"[" * 60_000)
