"""Loading a damaged or malicious file takes little memory, and raises one class of error, which names the file."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import random
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_accelerate import load_checkpoint_in_model
from notebook_accelerate.checkpointing.single_files import read_file
from notebook_accelerate.errors import BrokenCheckpointError, CheckpointError
from notebook_accelerate.state import reset_shared_state
from tests.support.trainings import Training

MANIFEST = "checkpoint_manifest.json"
DEEP = b"[" * 200_000


def training() -> Training:
    reset_shared_state()
    return Training()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint of `Training`."""
    trained = training()
    trained.epoch()
    trained.accelerator.save_state(str(tmp_path / "out"))
    return tmp_path / "out"


def torch_file(pickled: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """Return a file in torch's format that contains ``pickled`` as its pickle, and additional entries."""
    plain, changed = io.BytesIO(), io.BytesIO()
    torch.save({"a": 1}, plain)
    with zipfile.ZipFile(plain) as archive, zipfile.ZipFile(changed, "w", compression) as out:
        for name in archive.namelist():
            out.writestr(name, pickled if name.endswith("data.pkl") else archive.read(name))
        for name, content in more.items():
            out.writestr(f"archive/data/{name}", content)
    return changed.getvalue()


def safetensors_file(header: Any, content: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content


def damaged(content: bytes, generator: random.Random) -> bytes:
    """Return ``content`` with some bytes changed, cut off or added."""
    changed = bytearray(content)
    how = generator.random()
    if how < 0.2:
        return content[: generator.randrange(len(content))]
    if how < 0.9:
        for _ in range(generator.choice([1, 3, 10])):
            changed[generator.randrange(min(len(content), generator.choice([3000, 1 << 30])))] = generator.randrange(
                256
            )
        return bytes(changed)
    place = generator.randrange(len(content))
    return content[:place] + os.urandom(8) + content[place:]


STATES: list[Any] = [
    3, None, [], {}, "text", {"state": 3}, {"param_groups": 3, "state": {}}, {"param_groups": [{}], "state": {}},
    {"state": {}, "param_groups": [3]}, {"iteration": "x"}, {"iteration": 1, "generator": 3}, {1: 2}, {"step": [1]},
    {"random_state": 3}, {"torch_manual_seed": 3}, {"numpy_random_seed": (1,)}, {"base_lrs": 1, "lr_lambdas": 3},
]  # fmt: skip
FILES = [
    *(torch_file(pickle.dumps(state, 2)) for state in STATES),
    torch_file(b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b"."),
    torch_file(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00bogus\x86R."),
    torch_file(b"."),
    b"",
    b"PK\x03\x04",
    b"\x80\x04\x95" + b"\xff" * 8 + b".",
    safetensors_file({}),
    safetensors_file([]),
    safetensors_file({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
    safetensors_file({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, b"abcd"),
    safetensors_file(DEEP),
    safetensors_file(b"\xff\xfe"),
    struct.pack("<Q", 2**63),
]


def test_damaged_files_without_a_manifest_raise_a_single_class_that_names_them(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    resumed, generator = training(), random.Random(7)
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        others = [other.read_bytes() for other in folder.iterdir()]
        for changed in (*FILES, *others, *(damaged(content, generator) for _ in range(30))):
            path.write_bytes(changed)
            assert_named(lambda: resumed.accelerator.load_state(str(folder)), path.name)
        path.write_bytes(content)
    resumed.accelerator.load_state(str(folder))


def assert_named(load: Callable[[], object], name: str) -> None:
    """Check that any error of ``load`` is a CheckpointError that names the file, or torch's for wrong parameters."""
    error: Exception | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except (RuntimeError, ValueError) as raised:  # CheckpointError is a subclass of RuntimeError.
            error = raised
    if isinstance(error, CheckpointError):
        assert name in str(error)
    elif error is not None:
        assert "loading state_dict" in str(error) or "loaded state dict" in str(error)


MANIFESTS: dict[str, Any] = {
    "nested deeply": DEEP,
    "not UTF-8": b"\xff\xfe{}",
    "a list": [],
    "a number": 3,
    "a format that is a text": {"format": "1"},
    "a format that is null": {"format": None},
    "no files": {"format": 1, "world_size": 1},
    "files in a list": {"files": []},
    "a record that is a number": {"files": {"a": 3}},
    "a record with another field": {"files": {"a": {"size": 1, "crc32": "0", "x": 1}}},
    "a size that is a text": {"files": {"a": {"size": "1", "crc32": "0"}}},
    "a negative size": {"files": {"a": {"size": -1, "crc32": "0"}}},
    "a size with 4,000 digits": {"files": {"a": {"size": 10**4000, "crc32": "0"}}},
    "an infinite size": b'{"format": 1, "world_size": 1, "files": {"a": {"size": Infinity, "crc32": "0"}}}',
    "a checksum that is a number": {"files": {"a": {"size": 1, "crc32": 0}}},
    "a world size that is a list": {"world_size": []},
    "a layout that is a list": {"layout": []},
    "an empty name": {"files": {"": {"size": 1, "crc32": "0"}}},
    "the folder itself": {"files": {".": {"size": 1, "crc32": "0"}}},
    "a name outside": {"files": {"../a": {"size": 1, "crc32": "0"}}},
    "an absolute name": {"files": {"/etc/passwd": {"size": 1, "crc32": "0"}}},
    "a null character": {"files": {"a\0b": {"size": 1, "crc32": "0"}}},
    "a long name": {"files": {"a" * 5000: {"size": 1, "crc32": "0"}}},
    "its own name": {"files": {MANIFEST: {"size": 1, "crc32": "0"}}},
    "another field": {"surprise": 1},
}


@pytest.mark.parametrize("where", ["", ".committing"], ids=["complete", "committing"])
@pytest.mark.parametrize("what", MANIFESTS)
def test_hostile_manifests_are_reported_by_name(folder: Path, what: str, where: str) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    content = MANIFESTS[what]
    if isinstance(content, dict):
        content = {**json.loads(before[MANIFEST]), **content}
        content.pop("files") if what == "no files" else None
    (folder / where).mkdir(exist_ok=True)
    (folder / where / MANIFEST).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(BrokenCheckpointError, match=rf"(?s)out.* is broken.*{MANIFEST}"):
        training().accelerator.load_state(str(folder))
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {**after, MANIFEST: b""} == {**before, MANIFEST: b""}


def test_a_long_list_of_damage_is_shortened(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_bytes())
    content["files"] = {f"missing_{number}": {"size": 1, "crc32": "0"} for number in range(1000)}
    (folder / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(BrokenCheckpointError, match="and 980 more") as raised:
        training().accelerator.load_state(str(folder))
    assert len(str(raised.value)) < 3000


def test_a_committing_folder_that_is_a_link_moves_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "note").write_text("the user's")
    (folder / ".committing").symlink_to(tmp_path / "private")
    for call in (training().accelerator.load_state, training().accelerator.save_state):
        with pytest.raises(BrokenCheckpointError, match="is a link"):
            call(str(folder))
    assert (tmp_path / "private" / "note").exists()


def test_staging_that_is_a_link_is_not_emptied(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "note").write_text("the user's")
    (folder / ".incomplete").symlink_to(tmp_path / "private")
    training().accelerator.save_state(str(folder))
    assert (tmp_path / "private" / "note").exists()
    training().accelerator.load_state(str(folder))


@pytest.mark.parametrize("name", ["optimizer.bin", "model.safetensors", MANIFEST])
def test_pipes_and_devices_are_not_read(folder: Path, name: str) -> None:
    (folder / MANIFEST).unlink()
    for make in (os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero")):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)
        if name == MANIFEST:
            training().accelerator.load_state(str(folder))
        else:
            with pytest.raises(CheckpointError, match=name.partition(".")[0]):
                training().accelerator.load_state(str(folder))


def overlapping() -> bytes:
    """Return a zip file of 1.2 MB, in which 2,000 entries share one megabyte."""
    plain = io.BytesIO(torch_file(pickle.dumps({}, 2), big=bytes(1 << 20)))
    with zipfile.ZipFile(plain, "a") as archive:
        shared = archive.getinfo("archive/data/big")
        for number in range(2000):
            entry = zipfile.ZipInfo(f"archive/data/{number}")
            entry.file_size = entry.compress_size = shared.file_size
            entry.CRC, entry.header_offset = shared.CRC, shared.header_offset
            archive.filelist.append(entry)
        archive._didModify = True  # type: ignore[attr-defined]
    return plain.getvalue()


BOMBS = {
    "compressed": lambda: torch_file(pickle.dumps({}, 2), zipfile.ZIP_DEFLATED, big=bytes(300 << 20)),
    "overlapping": overlapping,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_zip_bomb_is_refused_before_it_takes_memory(folder: Path, kind: str) -> None:
    (folder / MANIFEST).unlink()
    content = BOMBS[kind]()
    assert len(content) < 4 << 20
    (folder / "optimizer.bin").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenCheckpointError, match=r"optimizer\.bin is broken: it has .* but states"):
        training().accelerator.load_state(str(folder))
    with pytest.raises(BrokenCheckpointError, match="bytes of content"):
        load_checkpoint_in_model(torch.nn.Linear(1, 1), folder / "optimizer.bin")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_large_and_many_tensors_are_not_a_bomb(tmp_path: Path) -> None:
    for number, value in enumerate([{str(n): torch.ones(1) for n in range(3000)}, [torch.ones(1 << 20)] * 3, {}]):
        torch.save(value, tmp_path / f"{number}.bin")
        assert type(read_file(tmp_path / f"{number}.bin")) is type(value)
    torch.save({"a": torch.ones(3)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    assert read_file(tmp_path / "old.bin")["a"].tolist() == [1, 1, 1]


INDEXES: list[Any] = [
    DEEP, b"\xff", b"", [], 3, {"weight_map": []}, {"weight_map": {"weight": 3}}, {"weight_map": 3},
    {"weight_map": {"weight": "a\0b"}}, {"weight_map": {"weight": "a" * 5000}}, {"weight_map": {"a": None}},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(INDEXES)))
def test_hostile_indexes_of_models_are_reported_by_name(tmp_path: Path, number: int) -> None:
    content = INDEXES[number]
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_checkpoint_in_model(torch.nn.Linear(2, 2), tmp_path)


def test_damaged_weights_of_models_are_reported_by_name(tmp_path: Path) -> None:
    model, generator = torch.nn.Linear(30, 30), random.Random(3)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin"
    content = path.read_bytes()
    for changed in itertools.chain(FILES, (damaged(content, generator) for _ in range(150))):
        path.write_bytes(changed)
        assert_named(lambda: load_checkpoint_in_model(model, tmp_path), path.name)


def test_a_folder_whose_number_has_thousands_of_digits_is_not_a_checkpoint(tmp_path: Path) -> None:
    from notebook_accelerate.checkpointing import manifest

    assert not manifest.is_numbered("checkpoint_" + "9" * 5000)
    assert not manifest.is_numbered("checkpoint_\N{ARABIC-INDIC DIGIT ONE}")
    assert manifest.checkpoint_number("checkpoint_12") == 12
