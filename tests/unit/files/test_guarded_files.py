"""Files and folders that other users may have created, and JSON that takes far more memory than it takes on disk."""

from __future__ import annotations

import grp
import json
import os
import pwd
import sys
import time
from pathlib import Path

import pytest

from notebook_accelerate.files import guarded_files

as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to own a file as another user")
NOBODY = 65534


def test_links_of_the_user_are_followed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "relative").symlink_to("../absolute/b")
    guarded_files.check_folder(tmp_path / "absolute" / "relative")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        guarded_files.check_folder(tmp_path / "loop")


@as_root
def test_a_link_of_another_user_is_detected_behind_a_link_of_the_user(tmp_path: Path) -> None:
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
    """Without root, the overflow user owns a container's folders, but also those that other users create in /tmp."""
    monkeypatch.setattr(guarded_files, "_overflow_user", lambda: NOBODY)
    assert guarded_files._is_trusted(NOBODY, shared=False)
    assert not guarded_files._is_trusted(NOBODY, shared=True)
    assert not guarded_files._is_trusted(NOBODY - 1, shared=False)


_USERS = {0: "root", 1000: "ada", 1001: "grace", 5000: None}
_GROUPS: dict[int, tuple[str, list[str]]] = {
    0: ("root", []),
    50: ("staff", ["grace"]),
    # All users of a directory service may have this primary group, and neither grp nor pwd lists them.
    100: ("users", []),
    1000: ("students", []),
    2000: ("ada", []),
    2001: ("ada", ["ada", "root"]),
    2002: ("ada", ["grace"]),
    2003: ("ada", ["unknown"]),
}


@pytest.mark.parametrize(
    ("user", "private"),
    [(0, {0}), (1000, {2000, 2001}), (1001, set()), (5000, {5000})],
)
def test_only_the_group_with_the_users_name_is_private(
    monkeypatch: pytest.MonkeyPatch, user: int, private: set[int]
) -> None:
    """The members of other groups cannot be listed, because any group may be the primary group of a user in LDAP."""

    def user_of(key: int | str) -> pwd.struct_passwd:
        numbers = [number for number, name in _USERS.items() if name is not None and key in (number, name)]
        return pwd.struct_passwd((_USERS[numbers[0]], "x", numbers[0], 100, "", "/", "/bin/sh")) if numbers else {}[key]

    def group_of(number: int) -> grp.struct_group:
        name, members = _GROUPS[number]
        return grp.struct_group((name, "x", number, members))

    monkeypatch.setattr(pwd, "getpwuid", user_of)
    monkeypatch.setattr(pwd, "getpwnam", user_of)
    monkeypatch.setattr(pwd, "getpwall", lambda: pytest.fail("listing a large user directory takes minutes"))
    monkeypatch.setattr(grp, "getgrgid", group_of)
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(os, "getgid", lambda: user)
    assert {number for number in (*_GROUPS, 5000, 5001) if guarded_files._is_private_group(number)} == private


@as_root
@pytest.mark.parametrize("group", [50, 100, 54_321])
def test_a_folder_that_another_group_can_write_to_is_not_the_users(tmp_path: Path, group: int) -> None:
    tmp_path.chmod(0o770)
    os.chown(tmp_path, -1, group)
    with pytest.raises(guarded_files.ForeignFileError, match=f"users can replace files in {tmp_path}, .* chmod g-w"):
        guarded_files.check_folder(tmp_path)


@as_root
def test_only_files_of_the_user_or_of_root_are_trusted(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert guarded_files.read_limited(file, 5, own=True) == b"12345"
    (tmp_path / "link").symlink_to(file)
    assert guarded_files.read_limited(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="not a regular file"):
        guarded_files.read_limited(tmp_path / "link", 5, own=True)
    os.chown(file, NOBODY, NOBODY)
    assert guarded_files.read_limited(file, 5) == b"12345"
    with pytest.raises(guarded_files.ForeignFileError, match="belongs to"):
        guarded_files.read_limited(file, 5, own=True)


def test_endless_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"123456")
    for name in ("pipe", "zero", "."):
        with pytest.raises(OSError, match="not a regular file"):
            guarded_files.read_limited(tmp_path / name, 5)
    with pytest.raises(ValueError, match="has 6 bytes; at most 5"):
        guarded_files.read_limited(tmp_path / "large", 5)


@pytest.mark.parametrize(
    "data",
    [b"[" * 1_000_000, b'{"a":' * 1_000_000, b"[" + b"[]," * 1_000_000 + b"0]", b"[" + b"{}," * 1_000_000 + b"0]"],
)
def test_json_that_needs_far_more_memory_than_disk_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="lists and objects"):
        guarded_files.parse_json(data)


def test_brackets_in_strings_are_not_lists() -> None:
    value = ["[" * 500_000, '"[' * 100_000, "\\" * 9 + "[" * 100_000]
    assert guarded_files.parse_json(json.dumps(value).encode()) == value


def test_an_unterminated_string_takes_no_time() -> None:
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
    with pytest.raises(ValueError, match="nested" if sys.version_info < (3, 14) else "Expecting value"):
        guarded_files.parse_json(b"[" * 60_000)
