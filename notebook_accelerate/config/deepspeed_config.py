"""Read a DeepSpeed configuration, and access its values by dotted keys."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AUTO = "auto"


class HfDeepSpeedConfig:
    """A DeepSpeed configuration with access by dotted keys such as ``zero_optimization.stage``.

    Args:
        config_file_or_dict: A dict, which is copied; the path of a JSON file; or the text of such a file in base64.

    Attributes:
        config: The configuration as a dict.

    Raises:
        ValueError: The argument is something else, or the file does not contain a JSON object.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config = _read(config_file_or_dict)
        self._source = None if isinstance(config_file_or_dict, Mapping) else config_file_or_dict
        self.set_stage_and_offload()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HfDeepSpeedConfig) and self.config == other.config

    __hash__ = object.__hash__  # Otherwise __eq__ would make instances unhashable.

    def __repr__(self) -> str:
        # Return code that a plugin accepts as hf_ds_config, so that forms can generate code from a plugin.
        return repr(self.config if self._source is None else os.fspath(self._source))

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage and the offloading from `config` again. Call this after changing `config`."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [self.get_value(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")]
        self._offload = self._stage in {2, 3} and any(device in {"cpu", "nvme"} for device in devices)

    def find_config_node(self, ds_key_long: str) -> tuple[Any, str]:
        """Find the dict that contains, or could contain, a value.

        Args:
            ds_key_long: The dotted key.

        Returns:
            The dict, or None if it does not exist, and the last part of the key.
        """
        *path, key = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part)
            if not isinstance(node, dict):
                return None, key
        return node, key

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a dotted key.

        Args:
            ds_key_long: The dotted key.
            default: The value to return if the key is missing.
        """
        node, key = self.find_config_node(ds_key_long)
        return default if node is None else node.get(key, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a value, or a section with all its values.

        Args:
            ds_key_long: The dotted key.
            must_exist: Whether a missing key is an error.

        Raises:
            ValueError: The key is missing, and ``must_exist`` is True.
        """
        node, key = self.find_config_node(ds_key_long)
        if node is not None and key in node:
            del node[key]
        elif must_exist:
            raise ValueError(f"the DeepSpeed configuration has no {ds_key_long}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Return whether a value is set and true.

        Args:
            ds_key_long: The dotted key.
        """
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Return whether a value is set and false.

        Args:
            ds_key_long: The dotted key.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Return whether gradients and optimizer states are sharded, but not parameters."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Return whether parameters are sharded, in addition to gradients and optimizer states."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Return whether anything is offloaded to CPU memory or to a disk."""
        return self._offload


class DerivedConfig(HfDeepSpeedConfig):
    """A configuration derived from a plugin's other fields. Any two are equal, because plugins compare those fields."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DerivedConfig) or super().__eq__(other)

    __hash__ = object.__hash__


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given))
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        try:
            is_file = path.is_file()
        except OSError:  # The text is longer than a path can be, so it must be base64.
            is_file = False
        if is_file:
            return _parsed(path.read_text(encoding="utf-8"), path)
        if isinstance(given, str):
            try:
                return _parsed(base64.urlsafe_b64decode(given).decode("utf-8"), "the decoded text")
            except (binascii.Error, UnicodeDecodeError):
                pass
    raise ValueError(
        f"{given!r} is not a DeepSpeed configuration; pass a dict, the path of an existing JSON file, or the text of "
        "such a file in base64"
    )


def _parsed(text: str, source: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{source} contains a {type(found).__name__}; a DeepSpeed configuration is a JSON object")
    return found
