"""Files and folders behind the URLs that fsspec knows (s3://, gs://, ...), with the methods of pathlib in use here."""

from __future__ import annotations

import os
import random
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import CheckpointError

_URL = re.compile(r"([a-z][a-z0-9+.\-]*)(::[a-z][a-z0-9+.\-]*)*://", re.IGNORECASE)
_ON_DISK = {"file", "local"}
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "oss": "ossfs",
    "oci": "ocifs",
}
"""What to install for a protocol. These stores have no folders; to "make" one may make a bucket."""
_AZURE = "AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in ~/.aws",
    "s3a": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the profile in ~/.aws",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "abfs": _AZURE,
    "abfss": _AZURE,
    "az": _AZURE,
}
_REFUSALS = (
    "AccessDenied",
    "Access Denied",
    "Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
)


class RemotePath:
    """A file or folder behind a URL; what is there is asked anew each time, other ranks change it.

    Args:
        url: The URL, as fsspec takes it.
    """

    def __init__(self, url: str) -> None:
        match = _URL.match(url)
        assert match is not None
        rest = url[match.end() :]
        self._scheme = match[0] + "/" * rest.startswith("/")  # as in hdfs:///folder
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
        """The last part."""
        return self._parts[-1] if self._parts else ""

    @property
    def suffix(self) -> str:
        """The end of the name, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder it is in."""
        return RemotePath(self._scheme + "/".join(self._parts[:-1]))

    @property
    def protocol(self) -> str:
        """What comes before ``://``, and before ``::`` where protocols are chained."""
        return re.split(r"::|:", self._scheme)[0].lower()

    def absolute(self) -> RemotePath:
        """Return the path itself."""
        return self

    # -- looking ------------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        """Tell whether there is a file of that name, or files below it."""
        with self._asking("look for") as (fs, path):
            return bool(fs.exists(path))

    def is_file(self) -> bool:
        """Tell whether it is a file."""
        with self._asking("look for") as (fs, path):
            return bool(fs.isfile(path))

    def is_dir(self) -> bool:
        """Tell whether it is a folder."""
        with self._asking("look for") as (fs, path):
            return bool(fs.isdir(path))

    def iterdir(self) -> Iterator[RemotePath]:
        """Iterate over what is in the folder; nothing where there is none."""
        with self._asking("list") as (fs, path):
            try:
                found = fs.ls(path, detail=False)
            except FileNotFoundError:
                found = []
        names = {entry.rstrip("/").rpartition("/")[2] for entry in found if entry.rstrip("/") != path.rstrip("/")}
        yield from (self / name for name in sorted(names))

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of all files below the folder, by path relative to it."""
        with self._asking("list") as (fs, path):
            try:
                found = fs.find(path, detail=True)
            except FileNotFoundError:
                return {}
        start = len(path.rstrip("/")) + 1
        return {key[start:]: int(info.get("size") or 0) for key, info in found.items() if len(key) > start}

    def version(self) -> str:
        """Return a text that is another one once the file is another one.

        Raises:
            FileNotFoundError: It is not there.
        """
        with self._asking("read") as (fs, path):
            return str(fs.ukey(path))

    # -- reading and writing ------------------------------------------------------------------------------------------

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the text of the file.

        Raises:
            FileNotFoundError: It is not there.
        """
        with self._asking("read") as (fs, path):
            return bytes(fs.cat_file(path)).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write a small file at once."""
        with self._asking("write") as (fs, path):
            self._make_parent(fs, path)
            fs.pipe_file(path, text.encode(encoding))

    def download(self, place: Path) -> None:
        """Copy the file to the disk.

        Args:
            place: The file's path there; its folder exists.

        Raises:
            FileNotFoundError: It is not there.
        """
        with self._asking("read") as (fs, path):
            fs.get_file(path, str(place))

    def upload(self, place: Path) -> None:
        """Copy a file from the disk; on an object store it is there once it is whole.

        Args:
            place: The file's path there.
        """
        with self._asking("write") as (fs, path):
            self._make_parent(fs, path)
            fs.put_file(str(place), path)
            fs.invalidate_cache()
            found, want = fs.info(path)["size"], place.stat().st_size
        if found != want:
            raise CheckpointError(f"{self} has {found:,} bytes after {want:,} were written.")

    def copy_files(self, names: Sequence[str], target: RemotePath) -> None:
        """Copy files of this folder to another one in the same store.

        Args:
            names: Their paths relative to the folder.
            target: The other folder.
        """
        for name in names:
            with (target / name)._asking("write") as (fs, path):
                self._make_parent(fs, path)
                fs.cp_file((self / name)._in(fs), path)

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the file.

        Args:
            missing_ok: Say nothing where it is not there.
        """
        with self._asking("remove") as (fs, path):
            try:
                fs.rm_file(path)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files below the folder, all at once; those that are not there are no matter.

        Args:
            names: Their paths relative to it.
        """
        doomed = sorted(self.files().keys() & set(names))
        if doomed:
            with self._asking("remove") as (fs, _):
                fs.rm([(self / name)._in(fs) for name in doomed])

    def remove_tree(self) -> None:
        """Remove the folder and all that is in it; nothing where there is none."""
        with self._asking("remove") as (fs, path):
            try:
                fs.rm(path, recursive=True)
            except FileNotFoundError:
                return

    # -- fsspec -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See that the protocol is one that fsspec can use here.

        Raises:
            ImportError: It needs a package that is not installed.
            ValueError: Nobody knows it.
        """
        self._filesystem()

    def _filesystem(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it; asked each time, since a forked process needs its own."""
        try:
            with _same_randomness():
                import fsspec.core

                fs, path = fsspec.core.url_to_fs(str(self))
        except ImportError as error:
            package = _PACKAGES.get(self.protocol)
            line = f"pip install {package}" if package else str(error)
            raise ImportError(f"{self} needs a package that is not installed: {line}") from error
        except ValueError as error:
            raise ValueError(
                f"{self}: {error}. Known are for instance s3://, gs://, abfs:// and file://, each by its package of "
                "fsspec"
            ) from error
        return fs, str(path)

    def _in(self, fs: Any) -> str:
        return str(fs._strip_protocol(str(self)))

    @contextmanager
    def _asking(self, what: str) -> Iterator[tuple[Any, str]]:
        """Give the file system and the path, and say in one kind of error what the store's packages raise in many."""
        fs, path = self._filesystem()
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
        if self.protocol not in _PACKAGES:
            fs.makedirs(fs._parent(path), exist_ok=True)

    def _explained(self, what: str, error: Exception) -> CheckpointError:
        text = f"Cannot {what} {self}: "
        raised = f"{type(error).__name__}: {error}"
        refused = isinstance(error, PermissionError) or "Credential" in type(error).__name__
        if refused or any(word in raised for word in _REFUSALS):
            line = _CREDENTIALS.get(self.protocol, "its credentials")
            text += f"the store does not let this process ({raised}). On every machine, set {line}."
        elif isinstance(error, FileNotFoundError):
            text += f"there is no {self._scheme}{self._parts[0] if self._parts else ''} ({raised}). Make it first."
        elif isinstance(error, OSError) and error.errno == 28:
            text += f"the disk is full ({raised})."
        else:
            text += f"{raised}."
        return CheckpointError(text)


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Give Python's random numbers back to the training: packages of stores draw some, while imported and to wait.

    In another thread than the training's it would take back what the training has drawn.
    """
    here = threading.current_thread() is threading.main_thread()
    state = random.getstate() if here else None
    try:
        yield
    finally:
        if state is not None:
            random.setstate(state)


AnyPath = Path | RemotePath


def path_of(place: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return a path on the disk, or one behind a URL.

    Args:
        place: A path, or a URL; ``file://`` is the disk.

    Raises:
        ImportError: The URL's protocol needs a package that is not installed.
        ValueError: Nobody knows the protocol.
    """
    if isinstance(place, RemotePath):
        return place
    text = os.fspath(place)
    match = _URL.match(text)
    if match is None:
        return Path(text)
    if match[0][:-3].lower() in _ON_DISK:
        return Path(text[match.end() :])
    remote = RemotePath(text)
    remote.check()
    return remote


__all__ = ["AnyPath", "RemotePath", "path_of"]
