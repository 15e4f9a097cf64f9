"""The private names of torch that this package uses behave as expected in the installed torch."""

from __future__ import annotations

import gc
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from itertools import starmap

import pytest
import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate import torch_internals
from notebook_accelerate.state.process_group import end_group


@pytest.fixture
def group() -> Iterator[None]:
    store = torch_internals.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(minutes=9))
    yield
    end_group()
    gc.collect()


@pytest.mark.parametrize("name", torch_internals.NAMES)
def test_torch_has_the_name(name: str) -> None:
    assert getattr(torch_internals, name) is not None


def test_exports_are_complete() -> None:
    functions = {name for name, value in vars(torch_internals).items() if type(value) is types.FunctionType}
    public = {name for name in functions if not name.startswith("_") and name not in torch_internals.NAMES}
    mine = {name for name in public if vars(torch_internals)[name].__module__ == torch_internals.__name__}
    assert set(torch_internals.__all__) == mine | set(torch_internals.NAMES) | {"MODULE_TABLES", "NAMES", "PrivateName"}


def test_a_missing_name_is_reported_with_the_versions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_internals.NAMES, "gone", torch_internals.PrivateName("torch:_gone", "nothing"))
    with pytest.raises(ImportError, match=rf"torch {torch.__version__.split('+')[0]}.* has no torch\._gone.*2\.9 to"):
        _ = torch_internals.gone
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        _ = torch_internals.never


def test_importing_the_module_does_not_import_torch() -> None:
    code = "import notebook_accelerate.torch_internals, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- process groups


def test_groups_are_listed(group: None) -> None:
    assert torch_internals.process_groups() == [dist.group.WORLD]
    other = dist.new_group([0])
    assert torch_internals.process_groups() == [dist.group.WORLD, other]


def test_the_limit_of_a_group_is_read_and_set_without_a_warning(group: None) -> None:
    assert torch_internals.group_timeouts(dist.group.WORLD) == {"gloo": timedelta(minutes=9)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_internals.set_group_timeout(timedelta(minutes=4))
        assert torch_internals.group_timeouts(dist.group.WORLD) == {"gloo": timedelta(minutes=4)}
        torch_internals.set_group_timeout(timedelta(minutes=5), dist.group.WORLD)
    assert torch_internals.group_timeouts(dist.group.WORLD) == {"gloo": timedelta(minutes=5)}


def test_the_default_store_belongs_to_the_default_group(group: None) -> None:
    torch_internals.default_store().set("key", "value")
    assert torch_internals.default_store().get("key") == b"value"


def test_an_all_gather_starts_and_ends(group: None) -> None:
    options = dist.distributed_c10d.AllgatherOptions()  # type: ignore[attr-defined]
    rows = torch.zeros(3)
    torch_internals.start_all_gather(dist.group.WORLD, rows, torch.arange(3.0), options).wait()
    assert rows.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.leaks_ok("dropped groups stay open")
def test_dropped_groups_stay_alive_and_another_can_be_created() -> None:
    dist.init_process_group("gloo", store=torch_internals.HashStore(), rank=0, world_size=1)
    first = dist.group.WORLD
    kept = torch_internals.drop_process_groups()
    assert kept[0] is first
    assert not dist.is_initialized()
    assert torch_internals.process_groups() == []
    dist.init_process_group("gloo", store=torch_internals.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def test_the_flight_recorder_dumps(group: None) -> None:
    recorders = torch_internals.flight_recorders()
    assert set(recorders) == ({"gloo", "nccl"} if dist.is_nccl_available() else {"gloo"})
    assert all(b'"version"' in dump(True, False) for dump in recorders.values())


# ---- devices, meshes and tensors


def test_the_seed_of_cuda_is_known_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = type(torch.cuda._lazy_seed_tracker)()  # type: ignore[attr-defined]
    for module in (torch.cuda, sys.modules["torch.cuda.random"]):
        monkeypatch.setattr(module, "_lazy_seed_tracker", tracker, raising=False)
    assert torch_internals.cuda_seed() is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        assert torch_internals.cuda_seed() == 11


def test_the_default_device_belongs_to_the_thread() -> None:
    assert torch_internals.default_device() == ""
    with torch.device("meta"):
        assert torch_internals.default_device() == "meta"
    assert torch_internals.default_device() == ""


def test_a_mesh_is_flattened(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    torch_internals.flatten_mesh(mesh["dp", "tp"], "all")
    assert mesh["all"].size() == 1
    tensor = distribute_tensor(torch.ones(2, 3), mesh["dp"], [Replicate()])
    assert torch_internals.local_tensor(tensor).shape == (2, 3)


def test_views_and_storages_are_recognised() -> None:
    whole = torch.zeros(4)
    assert torch_internals.viewed_tensor(whole[1:]) is whole
    assert torch_internals.viewed_tensor(whole) is whole
    keys = [torch_internals.storage_key(each.untyped_storage()) for each in (whole, whole[1:], torch.zeros(4))]
    assert keys[0] == keys[1] != keys[2]
    before = torch_internals.tensor_version(whole)
    whole[1:].add_(1)
    assert torch_internals.tensor_version(whole) > before
    with torch.inference_mode():
        assert torch_internals.tensor_version(torch.zeros(4)) == 0


def test_lists_of_tensors_are_copied_and_packed() -> None:
    targets = [torch.zeros(2), torch.zeros(1)]
    torch_internals.foreach_copy(targets, [torch.ones(2), torch.ones(1)])
    assert torch_internals.flatten_dense_tensors(targets).tolist() == [1.0, 1.0, 1.0]
    part = torch_internals.narrow_tensor_by_index(torch.arange(6).view(2, 3), (1, 1), (1, 2))
    assert part.tolist() == [[4, 5]]


def test_containers_and_fake_tensors_work() -> None:
    leaves, spec = torch_internals.pytree.tree_flatten({"a": [1, 2]})
    assert torch_internals.pytree.tree_unflatten(leaves, spec) == {"a": [1, 2]}
    with torch_internals.FakeTensorMode():
        assert torch.empty(10**6, 10**6).shape[0] == 10**6


# ---- modules


def test_modules_have_the_tables_of_their_members() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert [set(vars(model[0])[name]) for name in torch_internals.MODULE_TABLES] == [
        {"weight", "bias"}, {"running_mean", "running_var", "num_batches_tracked"}, set(),
    ]  # fmt: skip
    model.register_buffer("here", torch.zeros(1), persistent=False)
    assert torch_internals.non_persistent_buffers(model) == {"here"}
    assert torch_internals.has_own_names(model)
    torch_internals.refresh_parameters(model)


def test_compiled_modules_are_recognised() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model, backend="eager")
    assert torch_internals.is_compiled(compiled)
    assert torch_internals.compiled_module(compiled) is model
    assert not torch_internals.is_compiled(model)
    assert not torch_internals.is_compiled_in_place(model)
    model.compile(backend="eager")
    assert torch_internals.is_compiled_in_place(model)


def test_names_in_compiled_modules_are_translated() -> None:
    inner = nn.Sequential(nn.Linear(1, 1), torch.compile(nn.Linear(1, 1)))
    compiled = torch.compile(inner)
    assert [torch_internals.compiled_name(name) for name in inner.state_dict()] == list(compiled.state_dict())
    plain = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [torch_internals.uncompiled_name(name) for name in compiled.state_dict()] == plain


def test_checkpoint_wrappers_have_their_prefix() -> None:
    unit = torch_internals.checkpoint_wrapper(
        nn.Linear(2, 2), checkpoint_impl=torch_internals.CheckpointImpl.NO_REENTRANT
    )
    names = [name for name, _ in nn.Sequential(torch_internals.offload_wrapper(unit)).named_parameters()]
    assert all(torch_internals.CHECKPOINT_PREFIX in name for name in names)
    assert isinstance(nn.Dropout2d(), torch_internals.Dropout)


def test_ddp_knows_whether_it_has_recorded_the_graph(group: None) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
    assert not torch_internals.recorded_static_graph(model)
    model(torch.ones(1, 2)).sum().backward()
    assert torch_internals.recorded_static_graph(model)
    assert torch_internals.recorded_static_graph(nn.Linear(1, 1))


@pytest.mark.leaks_ok("FSDP 1 keeps its group, and a socket with it")
def test_flat_parameters_of_fsdp_are_found(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 2)), device_id=torch.device("cpu"))
    assert torch_internals.hybrid_zero2() in ShardingStrategy
    flat = torch_internals.flat_parameter(model.module)
    assert torch_internals.names_in_flat_parameter(flat) == ("0.weight", "0.bias")
    assert torch_internals.flat_parameter_sizes(flat) == (8, 8)
    assert torch_internals.flat_parameter_handle(model).flat_param is flat
    assert torch_internals.flat_parameter(nn.Linear(1, 1)) is None


def test_sharded_tensors_are_taken_apart_and_joined(group: None) -> None:
    from torch.distributed._shard.metadata import ShardMetadata

    metadata = ShardMetadata([0, 0], [2, 2], "rank:0/cpu")
    shard = torch_internals.Shard(torch.ones(2, 2), metadata)
    whole = torch_internals.ShardedTensor._init_from_local_shards([shard], 2, 2)
    again = torch_internals.sharded_tensor(
        [torch_internals.Shard(torch.zeros(2, 2), metadata)],
        whole.metadata(),
        torch_internals.group_of_sharded_tensor(whole),
    )
    assert again.local_tensor().sum() == 0


def test_the_parts_of_checkpoints_have_their_fields() -> None:
    assert torch_internals.StorageInfo("file", 1, 2).length == 2


# ---- loaders, schedulers and optimizers


def test_samplers_and_iterators_of_loaders_are_recognised() -> None:
    loader = torch.utils.data.DataLoader(range(4), shuffle=True)  # type: ignore[arg-type]
    assert torch_internals.sampler_length(loader.sampler) is None
    assert isinstance(iter(loader), torch_internals.DataLoaderIterator)


def test_steps_of_schedulers_are_counted() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    before = torch_internals.scheduler_steps(scheduler)
    torch_internals.count_scheduler_step(scheduler)
    assert torch_internals.scheduler_steps(scheduler) == before + 1
    torch_internals.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_how_context_parallel_ranks_exchange_is_set() -> None:
    list(starmap(torch_internals.set_rotate_method, [("alltoall",), ("allgather",)]))


def test_functions_can_be_excluded_from_dynamo() -> None:
    assert torch_internals.disable_dynamo(lambda: 3)() == 3


_OPTIMIZER_MEANWHILE = """
import os, threading, time, torch
from notebook_accelerate import torch_internals

def import_later(delay):
    time.sleep(delay)
    torch_internals.import_inductor()

codes = []
for delay in (0.01, 0.06, 0.15):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            thread = threading.Thread(target=import_later, args=(delay,))
            thread.start()
            torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
            thread.join()
            import torch._inductor.config
            code = 0
        finally:
            os._exit(code)
    codes.append(os.waitpid(child, 0)[1])
print(codes)
"""


def test_imports_of_the_profiler_overlap_with_the_first_optimizer() -> None:
    command = [sys.executable, "-c", _OPTIMIZER_MEANWHILE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split("\n")[0] == "[0, 0, 0]", done.stderr


def test_a_function_is_called_before_each_profiler_that_starts() -> None:
    def record() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            assert torch_internals.profiler_enabled()

    called: list[object] = []
    end = torch_internals.before_profilers_start(called.append)
    try:
        record()
        with torch.autograd.profiler.profile():
            torch.ones(1)
    finally:
        end()
    record()
    assert not torch_internals.profiler_enabled()
    assert [type(each) for each in called] == [torch.autograd.profiler.profile] * 2
