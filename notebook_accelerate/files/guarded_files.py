"""Safe access to files and folders that other users may have created, or that may be damaged.

Folders are checked before use, and reads are limited in size. A folder counts as the user's only if no other user can
replace it: every folder in its path must belong to the user or to root, and other users must not be able to write to
any of them. In a folder with the sticky bit, such as /tmp, others can create entries but cannot replace the user's
entries.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import LaunchError

MAX_LINKS = 40
"""The maximum number of symbolic links in the path of a folder, as in Linux."""
MAX_DEPTH = 50
"""The maximum nesting depth of JSON."""
MIN_CONTAINERS = 1 << 16
"""The number of lists and objects that is always allowed. Long JSON may have more, one per eight bytes."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""Matches a JSON string, terminated or not. Matching unterminated strings keeps the time of a search linear."""


class ForeignFileError(PermissionError):
    """Raised if another user owns a file or folder, or can replace it."""


# ---- folders


def make_folder(folder: Path, *, private: bool = True) -> None:
    """Create a folder with mode 0700, including missing parents, or check an existing folder.

    Args:
        folder: The folder to create or check.
        private: Whether to require that other users cannot read the folder either.

    Raises:
        OSError: The folder cannot be created, belongs to another user, or has contents that other users can replace.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)
    check_folder(folder, private=private)


def check_folder(folder: Path, *, private: bool = False) -> None:
    """Check that a folder belongs to the user, and that no other user can replace it or its contents.

    Args:
        folder: The folder to check.
        private: Whether to require that other users cannot read the folder either.

    Raises:
        FileNotFoundError: There is no such folder.
        ForeignFileError: Another user can modify or replace the folder. The message suggests a solution.
    """
    here = Path(folder.absolute().anchor)
    found = here.stat()
    _check_writers(here, found)
    waiting, links = list(reversed(folder.absolute().parts[1:])), 0
    while waiting:
        name = waiting.pop()
        path = here.parent if name == ".." else here / name
        entry = path.lstat()
        if not _is_trusted(entry.st_uid, shared=bool(found.st_mode & 0o022)):
            raise ForeignFileError(f"{path} belongs to {_user_name(entry.st_uid)}")
        if stat.S_ISLNK(entry.st_mode):
            links += 1
            if links > MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = path.readlink()
            if target.is_absolute():
                here = Path(target.anchor)
                found = here.stat()
            waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
        else:
            _check_writers(path, entry)
            here, found = path, entry
    if found.st_uid != os.getuid():
        raise ForeignFileError(f"{folder} belongs to {_user_name(found.st_uid)}")
    if found.st_mode & (0o077 if private else 0o022):
        raise ForeignFileError(f"other users can enter {folder}: chmod 700 {folder}")


def state_folder() -> Path:
    """Return the user's folder for data that outlives a process.

    Raises:
        LaunchError: The user has no home directory, and XDG_STATE_HOME is not set.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    home = os.environ.get("HOME", os.path.expanduser("~"))  # noqa: PTH111 - "~" if the user database has no home
    if base.startswith("/"):
        return Path(base) / "notebook-accelerate"
    if not home.startswith("/"):
        raise LaunchError("runs are recorded in the user's home directory, which does not exist; set XDG_STATE_HOME")
    return Path(home) / ".local" / "state" / "notebook-accelerate"


def is_own_folder(folder: Path) -> bool:
    """Return whether a folder exists that only the user can replace or modify; see `check_folder`."""
    try:
        check_folder(folder)
    except OSError:
        return False
    return True


def _check_writers(folder: Path, found: os.stat_result) -> None:
    """Check that only the owner of a folder can replace its entries."""
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    if found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & 0o002:
        raise ForeignFileError(f"other users can replace files in {folder}: chmod go-w {folder}")
    if found.st_mode & 0o020 and (_has_access_list(folder) or not _is_private_group(found.st_gid)):
        raise ForeignFileError(f"other users can replace files in {folder}, because its group can: chmod g-w {folder}")


def _is_trusted(owner: int, *, shared: bool) -> bool:
    """Return whether an owner is the user or root.

    In a user namespace without root, as in some containers, root's files belong to the "overflow" user, and so do the
    files of other users. In a folder that only root can write to, they must be root's.
    """
    return owner in (0, os.getuid()) or (not shared and owner == _overflow_user())


def _overflow_user() -> int | None:
    """Return the owner of root's files in a user namespace without root, or None elsewhere."""
    try:
        ranges = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        return None if any(first == "0" for first, *_ in ranges) else int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return None


_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def _has_access_list(folder: Path) -> bool:
    """Return whether a folder has an access list. If so, the group's permission bits cover all users in the list."""
    # The file system does not support access lists, or the system is not Linux.
    with suppress(OSError, AttributeError):
        return "system.posix_acl_access" in os.listxattr(folder)
    return False


def _is_private_group(number: int) -> bool:
    """Return whether a group is the user's private one, which has no members except the user and root.

    Many systems create such a group for each user. A group does not list the users whose primary group it is, and the
    users of a directory such as LDAP cannot always be listed. Any other group is therefore considered shared, whatever
    members it has on this machine.
    """
    user = os.getuid()
    try:
        group = grp.getgrgid(number)
    except KeyError:  # For example, a container may run with an arbitrary user ID.
        return number == os.getgid() == user
    is_users = (number == 0) if user == 0 else _name_of(user) == group.gr_name
    return is_users and all(_uid_of(name) in (user, 0) for name in group.gr_mem)


def _name_of(number: int) -> str | None:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return None


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _user_name(number: int) -> str:
    name = _name_of(number)
    return f"user {number}" if name is None else f"the user {name}"


# ---- files


def read_limited(path: Path, most: int, *, own: bool = False) -> bytes:
    """Read a regular file of limited size.

    Args:
        path: The file to read.
        most: The maximum size in bytes.
        own: Whether to require that the file belongs to the user or root, and is not a symbolic link.

    Raises:
        ForeignFileError: The file belongs to another user.
        OSError: The path is not a regular file, or the file cannot be read.
        ValueError: The file is larger than the maximum.
    """
    descriptor = open_regular(path, own=own)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:
        raise ValueError(f"{path} has {max(size, len(data)):,} bytes; at most {most:,} are allowed")
    return data


def open_regular(path: Path, *, own: bool = False) -> int:
    """Open a file for reading. Only regular files are allowed, because pipes would block, and some devices never end.

    The open file is checked, so that it cannot be replaced between the check and the read.

    Args:
        path: The file to open.
        own: Whether to require that the file belongs to the user or root, and is not a symbolic link.

    Returns:
        The descriptor of the open file.

    Raises:
        ForeignFileError: The file belongs to another user.
        OSError: The path is not a regular file, or the file cannot be opened.
    """
    # Check before opening, too, because opening some devices changes their state.
    if not stat.S_ISREG((path.lstat() if own else path.stat()).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    follow = os.O_NOFOLLOW if own else 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | follow)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if own and found.st_uid not in (os.getuid(), 0):
            raise ForeignFileError(f"{path} belongs to {_user_name(found.st_uid)}")
        os.set_blocking(descriptor, True)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def parse_json(data: bytes, most_containers: int | None = None) -> Any:
    """Parse JSON, limiting the memory in proportion to the length of the data.

    Args:
        data: The JSON, in UTF-8.
        most_containers: The maximum number of lists and objects. If None, only the limit that depends on the length
            applies.

    Raises:
        ValueError: The data is not JSON, is nested too deeply, or contains too many lists and objects, which take
            up at least 64 bytes each.
    """
    limit = max(MIN_CONTAINERS, len(data) // 8)
    limit = limit if most_containers is None else min(limit, most_containers)
    if data.count(b"[") + data.count(b"{") > limit:
        bare = _STRING.sub(b"", data)  # Strings may contain any number of brackets.
        if bare.count(b"[") + bare.count(b"{") > limit:
            raise ValueError(f"it has more than {limit:,} lists and objects")
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Check that a value from JSON is not nested too deeply.

    Args:
        value: The value to check.
        most: The maximum nesting depth.

    Raises:
        ValueError: The value is nested more deeply than allowed.
    """
    level = [value]
    for _ in range(most + 1):
        level = [
            item
            for each in level
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise ValueError(f"its JSON is nested more than {most} levels deep")
