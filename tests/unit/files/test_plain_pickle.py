"""Files of plain data can be read, whichever Python and torch wrote them. Files that would run code are refused."""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import io
import pickle
import struct
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.files import untrusted_files, weight_files


class Kind(enum.Enum):
    SMALL = 1
    LARGE = "large"


class Name(str, enum.Enum):
    FIRST = "a"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Outer:
    class Inner(enum.IntEnum):
        ONE = 1


class Pair(NamedTuple):
    first: int
    second: Any


DATA: dict[str, Any] = {
    "date and time": dt.datetime(2025, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone(dt.timedelta(hours=2))),
    "dates": (dt.date(2025, 1, 2), dt.time(1, 2), dt.timedelta(days=1, microseconds=5)),
    "paths": (Path("a") / "b", PurePosixPath("/c")),
    "members": (Kind.SMALL, Kind.LARGE, Name.FIRST, Outer.Inner.ONE, Access.READ, Access.READ | Access.WRITE),
    "deque": collections.deque([1, torch.Size([2])], maxlen=3),
    "defaultdict": collections.defaultdict(list, {"a": [1], 2: [dt.date(2025, 1, 1)]}),
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=slice(1, None, 2)),
    "sets": ({1, "a"}, frozenset({2.5, (1, 2)})),
    "range": range(1, 9, 2),
    "numbers": (decimal.Decimal("1.50"), 1j, 10**30, -1.5, True, None),
    "texts": ("\N{SNOWMAN}", b"\xff", bytearray(b"x"), uuid.UUID(int=7)),
    "named tuple": Pair(1, Pair(2, Kind.LARGE)),
    "torch": (torch.float16, torch.device("cpu"), torch.Size([1, 2])),
    "numpy": (np.float64(1.5), np.dtype("int32"), np.bool_(True)),
}


@pytest.mark.parametrize("what", DATA)
def test_plain_data_is_read(what: str, tmp_path: Path) -> None:
    torch.save({"value": DATA[what], "beside": torch.arange(3)}, tmp_path / "x.bin")
    found = weight_files.read_torch(tmp_path / "x.bin")
    assert found["value"] == DATA[what]
    assert type(found["value"]) is type(DATA[what])
    assert repr(found["value"]) == repr(DATA[what])
    assert found["beside"].tolist() == [0, 1, 2]
    assert untrusted_files.unreadable_classes(DATA[what]) == set()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_each_protocol_are_read(protocol: int) -> None:
    values = {name: value for name, value in DATA.items() if name not in {"torch", "numpy"}}
    values["ordered"] = [1]
    known = {"torch.Size": torch.Size, "_codecs.encode": weight_files.codecs.encode}
    assert untrusted_files.load_plain(io.BytesIO(pickle.dumps(values, protocol)), known) == values


def test_enum_members_pickled_by_name_are_read() -> None:
    """Python 3.11.0 pickles members this way, and later versions do so with `enum.pickle_by_enum_name`."""
    member = _reduced(getattr, (Kind, "LARGE"))
    assert untrusted_files.load_plain(io.BytesIO(pickle.dumps(member, 2)), {}) is Kind.LARGE


class _Reduced:
    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced = reduced

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.reduced

    def __call__(self) -> None:
        """Do nothing. The method only makes objects callable, as picklers require of everything that a file calls."""


def _reduced(*reduced: Any) -> Any:
    return _Reduced(reduced)


def mark(path: str) -> None:
    """Record that code has run."""
    Path(path).touch()


class Marking:
    def __init__(self, path: str = "") -> None:
        mark(path)

    def __setstate__(self, state: Any) -> None:
        mark(state["path"])


class MarkingKind(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        mark(value)


class MarkingPair(NamedTuple):
    path: str


def _call_of_attribute(path: str) -> Any:
    """Return a pickle that calls `Path(path).touch()`, which getattr reaches from an instance of an allowed class."""
    return _reduced(_reduced(getattr, (Path(path), "touch")), ())


def _object_with_state(path: str) -> Any:
    made = object.__new__(Marking)
    made.__dict__["path"] = path
    return made


ATTACKS: dict[str, Callable[[str], Any]] = {
    "a function": lambda path: _reduced(mark, (path,)),
    "exec": lambda path: _reduced(exec, (f"open({path!r}, 'w')",)),
    "eval": lambda path: _reduced(eval, (f"open({path!r}, 'w')",)),
    "open": lambda path: _reduced(open, (path, "w")),
    "a class": lambda path: _reduced(Marking, (path,)),
    "a state": _object_with_state,
    "a value that an enum looks for": lambda path: _reduced(MarkingKind, (path,)),
    "a method": _call_of_attribute,
    "a method of an enum": lambda path: _reduced(_reduced(getattr, (MarkingKind, "_missing_")), (path,)),
    "an import": lambda path: [path, _reduced(__import__, ("antigravity",))],
    "a factory": lambda path: _reduced(collections.defaultdict, (Marking,), None, None, iter([(path, 1)])),
    "an attribute of a class": lambda path: _reduced(setattr, (Path, "anchor", path)),
    "a list of functions": lambda path: [_reduced(map, (mark, [path]))],
    "a key": lambda path: {(1, _reduced(mark, (path,))): 1},
}


@pytest.mark.parametrize("what", ATTACKS)
@pytest.mark.parametrize("beside", [None, Path("a")], ids=["alone", "beside a path"])
def test_files_that_would_run_code_are_refused(what: str, beside: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    torch.save([beside, ATTACKS[what](str(tmp_path / "out" / "ran"))], tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"x\.bin (contains more than data|is broken)"):
        weight_files.read_torch(tmp_path / "x.bin")
    assert not list((tmp_path / "out").iterdir())


GLOBAL_PATH = b"cpathlib\nPurePosixPath\n"
RAW: dict[str, bytes] = {
    "an attribute of a known class": GLOBAL_PATH + b"N}X\x04\x00\x00\x00nameX\x01\x00\x00\x00as\x86b.",
    "an old instance": b"(X\x01\x00\x00\x00ainotebook_accelerate.files.weight_files\nread_torch\n.",
    "an object of no class": b"(K\x01K\x02o.",
    "a call of data": b"K\x01)R.",
    "a set of a range": b"cbuiltins\nset\ncbuiltins\nrange\n" + b"J\xff\xff\xff\x7f\x85R\x85R.",
    "a tuple of a range": b"cbuiltins\ntuple\ncbuiltins\nrange\n" + b"J\xff\xff\xff\x7f\x85R\x85\x81.",
    "bytes of a size": b"cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.",
    "an array of a size": b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "an integer of a decimal": b"cbuiltins\nint\ncdecimal\nDecimal\nX\x0b\x00\x00\x001E999999999\x85R\x85R.",
    "a persistent id": b"K\x01Q.",
    "a registered extension": b"\x82\x01.",
    "a module": b"cos\npath\n.",
    "a nested attribute": b"\x8c\x02os\x8c\x0bpath.exists\x93.",
}


@pytest.mark.parametrize("what", RAW)
def test_pickles_that_no_pickler_writes_are_refused(what: str) -> None:
    before = dict(vars(PurePosixPath))
    with pytest.raises((pickle.UnpicklingError, *weight_files.MALFORMED)):
        untrusted_files.load_plain(io.BytesIO(b"\x80\x04" + RAW[what]), {})
    assert dict(vars(PurePosixPath)) == before


def test_a_large_index_needs_no_memory() -> None:
    assert untrusted_files.load_plain(io.BytesIO(b"\x80\x04]r\xff\xff\xff\xff."), {}) == []


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")
def test_a_program_of_torchscript_is_refused(tmp_path: Path) -> None:
    torch.save({"x": Path("a")}, tmp_path / "x.bin")
    with zipfile.ZipFile(tmp_path / "x.bin", "a") as archive:
        archive.writestr("x/constants.pkl", b"\x80\x02).")
    with pytest.raises(CheckpointError, match=r"x\.bin"):
        weight_files.read_torch(tmp_path / "x.bin")


def test_unsupported_classes_are_named() -> None:
    state = {"a": [Marking], "b": {"c": collections.deque([Outer()])}, "d": collections.defaultdict(Pair._make)}
    state["itself"] = state  # type: ignore[assignment]
    assert untrusted_files.unreadable_classes(state) == {type, Outer, type(Pair._make)}


@pytest.mark.parametrize("reader", ["torch.load", "metadata"])
def test_other_libraries_can_read_plain_data_in_the_context(reader: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    if reader == "torch.load":
        torch.save(_reduced(mark, (str(ran),)), tmp_path / "x.bin")
        read: Callable[[], Any] = lambda: torch.load(tmp_path / "x.bin", weights_only=False)  # noqa: E731
    else:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(_reduced(mark, (str(ran),))))
        read = torch.distributed.checkpoint.FileSystemReader(tmp_path).read_metadata
    with weight_files.plain_data_only(), pytest.raises(CheckpointError, match="contains more than data"):
        read()
    assert not ran.exists()
    with weight_files.trusted_files(), weight_files.plain_data_only():
        torch.load(io.BytesIO(_saved(Path("a"))), weights_only=False)
    assert torch.load is weight_files._torch_load


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_metadata_of_another_class_is_broken() -> None:
    for content in (pickle.dumps([1]), b"", b"\x80\x04" + struct.pack("<Q", 1)):
        with pytest.raises(CheckpointError, match=r"metadata is broken"):
            weight_files.read_metadata(io.BytesIO(content))
