"""A store behind a URL that needs no server: ``shelf:///folder`` is that folder, accessed only through fsspec."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Shelf(LocalFileSystem):  # type: ignore[misc]
    """The local disk under a name that no code recognizes as the disk."""

    protocol: ClassVar[tuple[str, ...]] = ("shelf",)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(str(path).removeprefix("shelf://"))


fsspec.register_implementation("shelf", Shelf, clobber=True)


def load_packages(url: str) -> None:
    """Import the packages that a URL needs, so that forked processes need not do so."""
    if url.startswith("s3:"):
        for name in ("s3fs", "aiobotocore.session"):
            import_module(name)
