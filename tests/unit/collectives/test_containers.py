from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict
from typing import Any, NamedTuple

import pytest
import torch

from notebook_accelerate import collectives
from notebook_accelerate.config.kwargs_handlers import TensorInformation
from notebook_accelerate.utils import operations


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    x: Any
    extra: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    derived: Any = dataclasses.field(init=False, default=None)


class Output(OrderedDict):
    """A mapping with attributes and its own constructor, like the outputs of transformers' models."""

    def __init__(self, items: Any = (), **kwargs: Any) -> None:
        super().__init__(items, **kwargs)
        self.note = "kept" if not items else "made"


NESTED = {
    "list": [torch.ones(2), (torch.ones(3), Pair(torch.ones(1), "text"))],
    "user": UserDict(a=torch.ones(2, 2)),
    "batch": Batch(torch.ones(4), {"deep": torch.ones(5)}),
    "frozen": Frozen(torch.ones(6)),
    "output": Output(a=torch.ones(7)),
    "none": None,
}


def test_recursively_apply_keeps_every_type() -> None:
    doubled = collectives.recursively_apply(lambda tensor: tensor * 2, NESTED)
    assert isinstance(doubled["list"][1], tuple)
    assert isinstance(doubled["list"][1][1], Pair)
    assert doubled["list"][1][1].right == "text"
    assert isinstance(doubled["user"], UserDict)
    assert isinstance(doubled["batch"], Batch)
    assert isinstance(doubled["frozen"], Frozen)
    assert isinstance(doubled["output"], Output)
    assert doubled["none"] is None
    assert [float(leaf.sum()) for leaf in collectives.leaves_of(doubled)] == [4, 6, 2, 8, 8, 10, 12, 14]
    assert NESTED["batch"].x.sum() == 4


def test_leaves_are_replaced_in_order() -> None:
    leaves = collectives.leaves_of(NESTED)
    numbered = collectives.with_tensors(NESTED, map(torch.tensor, range(len(leaves))))
    found = [int(leaf) for leaf in collectives.leaves_of(numbered)]
    assert found == list(range(len(leaves)))


def test_other_types_are_kept_or_refused() -> None:
    assert collectives.recursively_apply(torch.neg, ["text"]) == ["text"]
    with pytest.raises(TypeError, match=r"str cannot be passed to 'neg'.*'is_torch_tensor'"):
        collectives.recursively_apply(torch.neg, ["text"], error_on_other_type=True)


def test_additional_arguments_reach_the_function() -> None:
    assert collectives.recursively_apply(lambda t, a, b=0: t + a + b, [torch.zeros(1)], 1, b=2)[0].item() == 3


def test_listify_converts_tensors() -> None:
    data = {"a": torch.tensor([1.5], dtype=torch.bfloat16), "b": [torch.arange(2)], "c": torch.tensor(True)}
    assert operations.listify(data) == {"a": [1.5], "b": [[0, 1]], "c": True}


def test_the_batch_size_is_found() -> None:
    assert operations.find_batch_size({"a": [torch.ones(3, 2)]}) == 3
    assert operations.find_batch_size(Batch(torch.ones(5))) == 5
    assert collectives.ignorant_find_batch_size({"a": "text"}) is None
    for nothing in ({"a": "text"}, torch.tensor(1.0), 3, []):
        with pytest.raises(ValueError, match="no batch size"):
            operations.find_batch_size(nothing)


def test_the_device_is_found() -> None:
    assert collectives.find_device({"a": 1, "b": [torch.ones(1)]}) == torch.device("cpu")
    assert collectives.find_device("text") is None


def test_slices_can_be_concatenated_again() -> None:
    data = Batch({"a": torch.arange(6).view(3, 2)}, [torch.arange(3)])
    first = collectives.slice_tensors(data, slice(0, 1))
    rest = collectives.slice_tensors(data, slice(1, None))
    whole = collectives.concatenate([first, rest])
    assert torch.equal(whole.x["a"], data.x["a"])
    assert torch.equal(whole.extra[0], data.extra[0])
    assert collectives.concatenate([Pair(torch.ones(1, 1), torch.ones(1, 1))] * 2, dim=1).left.shape == (1, 2)
    with pytest.raises(TypeError, match="only tensors can be concatenated; got str"):
        collectives.concatenate(["a", "b"])


def test_structures_are_described_without_values() -> None:
    data = {"a": torch.ones(2, 3, dtype=torch.float64), "b": (torch.ones(1),)}
    described = collectives.get_data_structure(data)
    assert described["a"] == TensorInformation(shape=torch.Size([2, 3]), dtype=torch.float64)
    assert collectives.is_tensor_information(described["b"][0])
    made = collectives.initialize_tensors(described)
    assert made["a"].shape == (2, 3)
    assert made["a"].dtype == torch.float64
    assert isinstance(made["b"], tuple)


def test_a_batch_is_padded_for_a_split() -> None:
    data = {"a": torch.ones(5, 2), "other": torch.ones(3)}
    padded = operations.pad_input_tensors(data, batch_size=5, num_processes=2)
    assert padded["a"].shape == (6, 2)
    assert padded["a"][5].tolist() == [0, 0]
    assert padded["other"].shape == (3,)
    assert operations.pad_input_tensors(data, batch_size=6, num_processes=2) is data


def test_padding_keeps_sparse_tensors() -> None:
    sparse = operations.pad_input_tensors(torch.eye(3).to_sparse(), batch_size=3, num_processes=2)
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.eye(4)[:, :3])


class TestSendToDevice:
    def test_nested_structures_are_moved(self) -> None:
        moved = collectives.send_to_device(NESTED, "meta")
        assert {leaf.device.type for leaf in collectives.leaves_of(moved)} == {"meta"}
        assert isinstance(moved["frozen"], Frozen)
        assert isinstance(moved["user"], UserDict)

    def test_keys_are_skipped_at_every_depth(self) -> None:
        data = {"a": {"keep": torch.ones(1)}, "keep": torch.ones(1), "move": torch.ones(1)}
        moved = collectives.send_to_device(data, "meta", skip_keys="keep")
        assert (moved["a"]["keep"].device.type, moved["keep"].device.type, moved["move"].device.type) == (
            "cpu",
            "cpu",
            "meta",
        )

    def test_objects_with_a_to_method_move_themselves(self) -> None:
        class Encoding:
            def __init__(self, device: str = "cpu") -> None:
                self.device = device

            def to(self, device: str) -> Encoding:
                return Encoding(device)

        assert collectives.send_to_device([Encoding()], "meta", non_blocking=True)[0].device == "meta"

    def test_packed_sequences_are_moved(self) -> None:
        packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])
        assert collectives.send_to_device(packed, "cpu").data.shape == (3, 1)


class TestFloat32:
    def test_half_precision_becomes_float32(self) -> None:
        data = {
            "a": torch.ones(1, dtype=torch.bfloat16),
            "b": torch.ones(1, dtype=torch.int8),
            "c": torch.ones(1).half(),
        }
        dtypes = {key: value.dtype for key, value in collectives.convert_to_fp32(data).items()}
        assert dtypes == {"a": torch.float32, "b": torch.int8, "c": torch.float32}

    def test_a_converted_forward_keeps_its_signature_and_pickles(self) -> None:
        import inspect
        import pickle

        converted = operations.convert_outputs_to_fp32(halve)
        assert converted(torch.ones(1)).dtype == torch.float32
        assert list(inspect.signature(converted).parameters) == ["tensor"]
        assert converted.__name__ == "halve"
        assert pickle.loads(pickle.dumps(converted))(torch.ones(1)).dtype == torch.float32


def halve(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half()


def test_one_process_changes_nothing() -> None:
    data = {"a": torch.ones(2)}
    assert collectives.gather(data) is data
    assert collectives.reduce(data) is data
    assert collectives.broadcast(data) is data
    assert collectives.pad_across_processes(data) is data
    assert collectives.gather_object(["x"]) == ["x"]
    assert collectives.broadcast_object_list(["x"]) == ["x"]
    assert operations.copy_tensor_to_devices(torch.ones(2)).tolist() == [1, 1]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"gather\(\) got str \('text'\).*gather_object"):
        collectives.gather(["text"])
    with pytest.raises(ValueError, match="reduction='median' is not known; pass 'mean', 'sum', 'max' or 'none'"):
        collectives.reduce(torch.ones(1), "median")


def test_shapes_and_numbers_of_dtypes_are_consistent() -> None:
    assert operations.get_shape({"a": torch.ones(2, 3)}) == {"a": [2, 3]}
    for dtype, number in operations.TENSOR_TYPE_TO_INT.items():
        assert operations.TENSOR_INT_TO_DTYPE[number] == dtype
    assert operations.gather_tensor_shape(torch.ones(2)) == (torch.Size([2]), 1)
    assert not operations.is_torch_xpu_tensor(torch.ones(1))
