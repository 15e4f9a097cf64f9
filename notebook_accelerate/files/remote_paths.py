"""Files and folders at URLs that fsspec supports (s3://, gs://, ...), with the methods of pathlib that are needed."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import CheckpointError

_URL = re.compile(r"([a-z][a-z0-9+.\-]*)(::[a-z][a-z0-9+.\-]*)*://", re.IGNORECASE)
_ON_DISK = {"file", "local"}
_AWS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in ~/.aws"
_GOOGLE = "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`"
_AZURE = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_STORES = {
    "s3": ("s3fs", _AWS),
    "s3a": ("s3fs", _AWS),
    "gs": ("gcsfs", _GOOGLE),
    "gcs": ("gcsfs", _GOOGLE),
    "abfs": ("adlfs", _AZURE),
    "abfss": ("adlfs", _AZURE),
    "az": ("adlfs", _AZURE),
    "oss": ("ossfs", "its credentials"),
    "oci": ("ocifs", "its credentials"),
}
"""The package and credentials for each protocol. These stores have no folders, so creating one may create a bucket."""
_REFUSALS = (
    "AccessDenied",
    "Access Denied",
    "Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
)


class RemotePath:
    """A file or folder at a URL. Nothing is cached, because other ranks may change the store.

    Args:
        url: The URL of the file or folder, in a form that fsspec accepts.
    """

    def __init__(self, url: str) -> None:
        match = _URL.match(url)
        assert match is not None
        rest = url[match.end() :]
        self._scheme = match[0] + "/" * rest.startswith("/")  # Keep the third slash of hdfs:///folder.
        self._parts = [part for part in rest.split("/") if part]

    def __str__(self) -> str:
        return self._scheme + "/".join(self._parts)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._scheme}{'/'.join([*self._parts, name])}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._parts[-1] if self._parts else ""

    @property
    def suffix(self) -> str:
        """The end of the name, including the dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder that contains this file or folder."""
        return RemotePath(self._scheme + "/".join(self._parts[:-1]))

    @property
    def protocol(self) -> str:
        """The part before ``://``, or before ``::`` if protocols are chained."""
        return re.split(r"::|:", self._scheme)[0].lower()

    def absolute(self) -> RemotePath:
        """Return this path unchanged, because a URL is always absolute."""
        return self

    # ---- queries

    def exists(self) -> bool:
        """Return whether this is a file, or a folder with files below it."""
        with self._access("look for") as (fs, path):
            return bool(fs.exists(path))

    def is_file(self) -> bool:
        """Return whether this is a file."""
        with self._access("look for") as (fs, path):
            return bool(fs.isfile(path))

    def is_dir(self) -> bool:
        """Return whether this is a folder."""
        with self._access("look for") as (fs, path):
            return bool(fs.isdir(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Iterate over the entries of the folder. A folder that does not exist has no entries."""
        found: list[str] = []
        with self._access("list") as (fs, path), suppress(FileNotFoundError):
            found = fs.ls(path, detail=False)
        names = {entry.rstrip("/").rpartition("/")[2] for entry in found if entry.rstrip("/") != path.rstrip("/")}
        yield from (self / name for name in sorted(names))

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by relative path."""
        found: dict[str, Any] = {}
        with self._access("list") as (fs, path), suppress(FileNotFoundError):
            found = fs.find(path, detail=True)
        start = len(path.rstrip("/")) + 1
        return {key[start:]: int(info.get("size") or 0) for key, info in found.items() if len(key) > start}

    def version(self) -> str:
        """Return a string that changes when the file changes.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        with self._access("read") as (fs, path):
            return str(fs.ukey(path))

    # ---- reading and writing

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        with self._access("read") as (fs, path):
            return bytes(fs.cat_file(path)).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write a small file in one request."""
        with self._access("write") as (fs, path):
            self._make_parent(fs, path)
            fs.pipe_file(path, text.encode(encoding))

    def download(self, target: Path) -> None:
        """Copy the file to the disk.

        Args:
            target: The path on the disk, in an existing folder.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        with self._access("read") as (fs, path):
            fs.get_file(path, str(target))

    def upload(self, source: Path) -> None:
        """Copy a file from the disk to this path. In an object store, a file only exists once it is complete.

        Args:
            source: The path on the disk.

        Raises:
            CheckpointError: The store did not receive all bytes.
        """
        with self._access("write") as (fs, path):
            self._make_parent(fs, path)
            fs.put_file(str(source), path)
            fs.invalidate_cache()
            found, written = fs.info(path)["size"], source.stat().st_size
        if found != written:
            raise CheckpointError(f"{self} has {found:,} bytes after {written:,} were written.")

    def copy_files(self, names: Sequence[str], target: RemotePath) -> None:
        """Copy files from this folder to another folder in the same store.

        Args:
            names: The paths of the files, relative to this folder.
            target: The folder to copy to.
        """
        for name in names:
            with (target / name)._access("write") as (fs, path):
                self._make_parent(fs, path)
                fs.cp_file((self / name)._in(fs), path)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file.

        Args:
            missing_ok: Whether to ignore a file that does not exist.
        """
        with self._access("remove") as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files below the folder in one request, ignoring missing files.

        Args:
            names: The relative paths of the files.
        """
        found = sorted(self.files().keys() & set(names))
        if found:
            with self._access("remove") as (fs, _):
                fs.rm([(self / name)._in(fs) for name in found])

    def remove_tree(self) -> None:
        """Remove the folder and its contents, if it exists."""
        with self._access("remove") as (fs, path), suppress(FileNotFoundError):
            fs.rm(path, recursive=True)

    # ---- fsspec

    def filesystem(self) -> tuple[Any, str]:
        """Return fsspec's file system, and the path within it.

        Neither is cached, because forked processes need their own.

        Raises:
            ImportError: The protocol needs a package that is not installed.
            ValueError: The protocol is unknown.
        """
        try:
            with _same_randomness():
                import fsspec.core

                fs, path = fsspec.core.url_to_fs(str(self))
        except ImportError as error:
            line = f"pip install {_STORES[self.protocol][0]}" if self.protocol in _STORES else str(error)
            raise ImportError(f"{self} needs a package that is not installed: {line}") from error
        except ValueError as error:
            raise ValueError(
                f"{self}: {error}; pass a URL such as s3://bucket/folder, gs://bucket/folder, "
                "abfs://container/folder or file:///folder"
            ) from error
        return fs, str(path)

    def _in(self, fs: Any) -> str:
        return str(fs._strip_protocol(str(self)))

    @contextmanager
    def _access(self, what: str) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path. Convert exceptions of the stores' packages to `CheckpointError`."""
        fs, path = self.filesystem()
        try:
            fs.invalidate_cache()
            with _same_randomness():
                yield fs, path
        except CheckpointError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and what != "write":
                raise
            raise self._explained(what, error) from error

    def _make_parent(self, fs: Any, path: str) -> None:
        if self.protocol not in _STORES:
            fs.makedirs(fs._parent(path), exist_ok=True)

    def _explained(self, what: str, error: Exception) -> CheckpointError:
        text = f"Cannot {what} {self}: "
        raised = f"{type(error).__name__}: {error}"
        refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
        if refused or any(word in raised for word in _REFUSALS):
            _, line = _STORES.get(self.protocol, ("", "its credentials"))
            text += f"the store denied access ({raised}). On every machine, set {line}."
        elif isinstance(error, FileNotFoundError):
            text += f"{self._scheme}{self._parts[0] if self._parts else ''} does not exist ({raised}). Create it first."
        elif isinstance(error, OSError) and error.errno == 28:
            text += f"the disk is full ({raised})."
        else:
            text += f"{raised}."
        return CheckpointError(text)


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Restore Python's random state, because the stores' packages draw random numbers on import and for retries.

    Outside of the main thread, nothing is restored, because this could undo draws that training itself has made.
    """
    is_main = threading.current_thread() is threading.main_thread()
    state = random.getstate() if is_main else None
    try:
        yield
    finally:
        if state is not None:
            random.setstate(state)


AnyPath = Path | RemotePath


def path_of(location: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return a `Path` for a path on the disk, or a `RemotePath` for a URL.

    Args:
        location: A path or a URL. A ``file://`` URL means a path on the disk.

    Raises:
        ImportError: The URL's protocol needs a package that is not installed.
        ValueError: The protocol is unknown.
    """
    if isinstance(location, RemotePath):
        return location
    text = os.fspath(location)
    match = _URL.match(text)
    if match is None:
        return Path(text)
    if match[0][:-3].lower() in _ON_DISK:
        return Path(text[match.end() :])
    remote = RemotePath(text)
    remote.filesystem()  # This raises if fsspec cannot use the protocol.
    return remote
