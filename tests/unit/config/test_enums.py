"""Enums: values, membership, text and older names."""

from __future__ import annotations

import json
import pickle

import pytest

from notebook_accelerate.config import enums


def test_membership_accepts_values() -> None:
    assert "bf16" in enums.PrecisionType
    assert enums.PrecisionType.BF16 in enums.PrecisionType
    assert "bf61" not in enums.PrecisionType
    assert None not in enums.PrecisionType
    assert enums.PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]


def test_members_compare_print_and_pickle_as_their_values() -> None:
    member = enums.LoggerType.TENSORBOARD
    assert member == "tensorboard"
    assert f"{member}/{member!s}" == "tensorboard/tensorboard"
    assert json.dumps([member]) == '["tensorboard"]'
    assert {"tensorboard": 1}[member] == 1
    assert pickle.loads(pickle.dumps(member)) is member


def test_distributed_types_print_with_their_class_and_equal_their_values() -> None:
    assert str(enums.DistributedType.MULTI_GPU) == "DistributedType.MULTI_GPU"
    assert enums.DistributedType.MULTI_GPU == "MULTI_GPU"
    assert enums.DistributedType("XLA") is enums.DistributedType.XLA


def test_the_older_name_tpu_warns_and_means_xla() -> None:
    with pytest.warns(FutureWarning, match=r"DistributedType\.TPU is deprecated: use DistributedType\.XLA"):
        assert enums.DistributedType.TPU is enums.DistributedType.XLA
    with pytest.warns(FutureWarning, match="TPU"):
        assert enums.DistributedType("TPU") is enums.DistributedType.XLA
    with pytest.raises(AttributeError, match="'DistributedType' has no attribute 'GPU'"):
        enums.DistributedType.GPU  # noqa: B018
    with pytest.raises(ValueError, match="'GPU'"):
        enums.DistributedType("GPU")


def test_the_deprecated_backend_ipex_is_still_a_member() -> None:
    assert enums.DynamoBackend("IPEX") is enums.DynamoBackend.IPEX
