"""Programs whose results differ on purpose, by the reason; the tests assert that they still do."""

from __future__ import annotations

_BY_REASON: dict[str, list[str]] = {
    "Accelerate fails with IndexError; no objects give an empty tuple here": [
        "preparing: Accelerator().prepare()",
    ],
    "Accelerate joins ranks on GPUs only; CPU ranks are joined here, too": [
        "preparing.join_uneven_inputs_sets_even_batches",
    ],
    "Accelerate refuses AcceleratorState() before an Accelerator; here it reads the environment": [
        "preparing.reset_states_have_no_values",
    ],
    "Accelerate calls a forward that is a plain function with the model as an additional argument and fails": [
        "protocols.forward_replaced_by_the_user",
    ],
    "Accelerate takes a new dataset, sampler or batch size of a prepared loader and ignores it; torch's error here": [
        "protocols.loader_set_attribute",
    ],
    "Accelerate drops the loss that the optimizer's step returns": [
        "protocols.optimizer_closure",
    ],
    "Accelerate drops a tensor that is a part of another one, and its values are lost": [
        "utilities: _cleaned(lambda t: {'b': t, 'a': t[:1], 'c': t.clone()})",
    ],
    "Accelerate takes floats in get_max_memory only": [
        "utilities: utils.convert_file_size_to_int(1.5)",
        "utilities: utils.convert_file_size_to_int(2.0e9)",
    ],
    "Accelerate looks at the first item only, and fails where that is no tensor": [
        "utilities: utils.find_batch_size([1, ones(2, 2)])",
    ],
    "an empty variable is a variable that is not set": [
        "utilities: _with({'FLAG': ''}, lambda: utils.parse_flag_from_env('FLAG'))",
    ],
    "Accelerate fails with TypeError on values that are not text": [
        "utilities: utils.convert_dict_to_env_variables({'A': 1, 'B': 'x y'})",
    ],
    "Accelerate fails with FileNotFoundError on a machine without nvidia-smi": [
        "utilities: utils.get_gpu_info()",
    ],
    "Accelerate fails with an assertion of torch on a machine without GPUs": [
        "utilities: utils.check_cuda_fp8_capability()",
    ],
    "Accelerate reports CUDA on a machine without devices": [
        "utilities: utils.get_current_device_type()",
    ],
    "Accelerate calls a function that huggingface_hub has removed": [
        "utilities: utils.shard_checkpoint(STATES, max_shard_size=50)",
        "utilities: utils.shard_checkpoint(STATES)",
        "utilities: utils.shard_checkpoint(STATES, max_shard_size=1, weights_name='w.bin')",
    ],
    "Accelerate does not load the arrays of NumPy 2.4, whose names it does not allow": [
        "utilities: _loaded()",
    ],
    "Accelerate returns None without an index; here a new index": [
        "utilities: utils.offload_weight(ones(2, 2), 'w', '.'), files()",
    ],
    "Accelerate ignores a reduction that it does not know": [
        "collectives.reduce_with_an_unknown_reduction",
    ],
    "names of precisions are taken in any case here": [
        "collectives: Accelerator(mixed_precision='BF16').mixed_precision",
    ],
    "settings that fail in the first step are refused at once here": [
        "collectives: Accelerator(rng_types=['nonsense'])",
        "collectives: Accelerator(gradient_accumulation_steps=0)",
    ],
    "Accelerate sums with reduction='none'": [
        "collectives, 2 ranks: _reduced('none')",
    ],
    "Accelerate's strict=True accepts a checkpoint that lacks weights": [
        "bigmodels.missing_keys",
    ],
    "Accelerate ignores dtype without a device map, against its documentation": [
        "bigmodels.checkpoints_in_another_dtype",
    ],
    "Accelerate counts the entries of a device map, not its devices": [
        "bigmodels.prepare_of_a_dispatched_model",
    ],
    "Accelerate does not write the files of a model that is offloaded as one module": [
        "bigmodels: _run(dispatch_model(model(), {'': 'disk'}, offload_dir='off'))",
    ],
    "Accelerate's strict=True fails with AttributeError where it should list the unexpected keys": [
        "bigmodels.unexpected_keys_of_a_dispatched_model",
    ],
    "Accelerate fails on a defaultdict": [
        "utilities: utils.recursively_apply(lambda t: t + 1, collections.defaultdict(list, a=ones(1)))",
    ],
    "Accelerate fails where Transformer Engine is not installed": [
        "utilities: utils.has_transformer_engine_layers(model())",
    ],
    "Accelerate writes JSON whatever the suffix is": [
        "utilities: utils.write_basic_config(save_location='config.yml'), Path('config.yml').read_text()",
    ],
    "the pass after a resumed one is the next epoch here; Accelerate repeats the first (accelerate#2016)": [
        "loaders.skipping_a_shuffled_loader",
    ],
    "Accelerate does not notice that a pass was left early": [
        "loaders.leaving_a_pass_early",
    ],
    "Accelerate does not count the samples of divided streams, and gathers padding as results": [
        "loaders.remainders_of_streams",
    ],
    "Accelerate reports a negative length beyond the end": [
        "loaders: list(SkipBatchSampler(_batches(3), 20))",
        "loaders: list(skip_first_batches(DataLoader(torch.arange(7), batch_size=2), 20))",
    ],
    "Accelerate does not support loaders without batches": [
        "loaders: list(skip_first_batches(DataLoader(torch.arange(7), batch_size=None), 2))",
        "loaders: type(get_sampler(DataLoader(torch.arange(3), batch_size=None)))",
        "loaders, 2 ranks: _read(batch_size=None)",
    ],
}
KNOWN_DIFFERENCES = {name: reason for reason, names in _BY_REASON.items() for name in names}
