"""Programs whose results differ on purpose, by reason. The tests check that their results still differ."""

from __future__ import annotations

_BY_REASON: dict[str, list[str]] = {
    "torch's batched PowerSGD stops with an AssertionError when compression starts; this is fixed here": [
        "features, 2 ranks: _communication_hook('BATCHED_POWER_SGD')",
    ],
    "a tracker that fails does not stop the training here; Accelerate raises its error": [
        "trackers.trackers_that_fail_to_log",
    ],
    "values that TensorBoard's table does not accept are recorded as text here; Accelerate raises an error": [
        "trackers.tensorboard_configurations_that_it_does_not_take",
    ],
    "Accelerate closes trackers twice, and keeps the trackers of an earlier init_trackers, so everything is logged twice": [
        "trackers: _ended_twice()",
        "trackers: _again()",
    ],
    "Accelerate ignores ACCELERATE_USE_CPU if a PartialState is created first: every rank then trains independently": [
        "documentation.prompts_are_split_where_no_device_is_named",
    ],
    "on ranks without trackers, get_tracker returns an object that accepts every call here; Accelerate's lacks images, name and run": [
        "trackers: raised(lambda: Accelerator().get_tracker('tensorboard'))",
        "trackers, 2 ranks: type(_started(Kept('x')).get_tracker('kept')).__name__",
        "trackers, 2 ranks: raised(lambda: type(_started(Kept('x')).get_tracker('absent')).__name__)",
        "trackers, 2 ranks: raised(lambda: type(_started(Kept('x')).get_tracker('kept', unwrap=True)).__name__)",
        "trackers, 2 ranks: _started(Everywhere('x')).get_tracker('everywhere').tracker",
        "documentation.tracker_of_the_guide_on_two_ranks",
        "features, 2 ranks: _tracked()",
    ],
    "prepared optimizers and schedulers have all attributes of the wrapped objects here": [
        "protocols.optimizer_private_attributes",
        "protocols.scheduler_attributes",
    ],
    "Accelerate does not find the offloaded weights of a model that consists of a single module": [
        "bigmodels: utils.has_offloaded_params(cpu_offload(nn.Linear(2, 2), torch.device('cpu')))",
    ],
    "saving a model raises an error here if its folder is a file; Accelerate logs an error and saves nothing": [
        "messages: _called(lambda: Accelerator().save_model(model(), Path(__file__)))",
    ],
    "a MegatronLMPlugin's numbers of samples are used together with a schedule here; Accelerate ignores them": [
        "messages: _called(lambda: _scheduled(train_samples=8, lr_warmup_samples=8))",
    ],
    "a folder megatron that does not belong to a package is ignored here; Accelerate warns that it cannot parse its version": [
        "messages: _called(lambda: with_variables({'ACCELERATE_USE_MEGATRON_LM': 'true'}, _is_megatron_available))",
    ],
    "a state dict that would lack weights raises an error here; Accelerate omits them, with a warning": [
        "messages: _called(lambda: modeling.get_state_dict_offloaded_model(_without_buffers()))",
    ],
    "with tensor parallelism, a model without a plan is refused here; Accelerate trains all of it on each rank, with a warning": [
        "messages, 2 ranks: _called(lambda: on_gpus(parallelism_config=ParallelismConfig(tp_size=2)).prepare(model(), optimizer()))",
    ],
    "context parallelism without a plugin uses FSDP 2 here; Accelerate refuses it, unless ACCELERATE_ALLOW_CP_STANDALONE is set": [
        "conditions, 2 ranks: _context_parallel('false')",
    ],
    "models can be prepared for FSDP 2 before their optimizers here; Accelerate requires both in one call": [
        "conditions, 2 ranks: on_gpus(fsdp_plugin=_fsdp2()).prepare_model(model())",
        "conditions, 2 ranks: on_gpus(fsdp_plugin=_fsdp2()).prepare(model())",
    ],
    "with tensor parallelism, split_batches gives each rank the whole batch here; Accelerate splits it, with a warning": [
        "messages, 2 ranks: _split_on_a_mesh()",
    ],
    "dispatched loaders support tensor parallelism together with data parallelism here": [
        "conditions, 2 ranks: _dispatched_on_a_mesh()",
    ],
    "pippy_forward only checks the arguments of pipelines here, and passes them to other functions": [
        "conditions, 2 ranks: raised(lambda: pippy_forward(lambda *_: 1, 2, False, 'text'))",
    ],
    "a kernel that has imported bitsandbytes, or used a device, launches here; Accelerate refuses it": [
        "conditions.a_launch_after_bitsandbytes",
    ],
    "in debug mode, Accelerate first starts processes that do nothing, and reports if they fail": [
        "conditions.a_launch_on_a_port_that_is_taken",
    ],
    "batches of several sizes that are dispatched raise a ValueError here, and a RuntimeError in Accelerate": [
        "conditions.dispatched_batches_of_several_sizes",
    ],
    "a full state that lacks a weight raises torch's RuntimeError here, and a KeyError in Accelerate": [
        "conditions.a_full_state_without_a_weight",
    ],
    "a decorator of a PartialState that was reset raises an error at the call here; Accelerate raises it when the function is decorated": [
        "conditions: _kept_partial_state().on_main_process(len)",
    ],
    "set_device selects the device of the machine here, whatever the type of training": [
        "conditions: _device_of_another_type()",
    ],
    "load_fsdp_model loads full weights on every rank here, whether sync_module_states is set or not": [
        "conditions: _full_weights_on_another_rank()",
    ],
    "the functions for launchers neither check ports nor look for mpirun here: the launcher reports what is missing": [
        "conditions: _simple('--cpu --mpirun_hostfile hosts')",
        "conditions: _several('', taken=True)",
        "conditions: _by_deepspeed('', taken=True)",
        "conditions: _several('--num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1', taken=True)",
        "conditions: _by_deepspeed('--num_machines 2 --deepspeed_multinode_launcher standard', taken=True)",
    ],
    "quantization of a model on the meta device without weights_location raises a ValueError here, and a RuntimeError in Accelerate": [
        "conditions: utils.load_and_quantize_model(model().to('meta'), BnbQuantizationConfig(load_in_8bit=True))",
    ],
    "modules that are not quantized may be offloaded from a model in 4 bits here; Accelerate refuses device maps with the CPU or a disk": [
        "conditions: _device_map({'first': 'disk', 'second': 0}, load_in_4bit=True, skip_modules=[], keep_in_fp32_modules=[])",
    ],
    "a BnbQuantizationConfig is checked when it is created, and not again when modules are replaced": [
        "conditions: _quantized_with_neither()",
    ],
    "a tensor of a module that is None raises torch's AttributeError here, and a ValueError in Accelerate": [
        "conditions: modeling.set_module_tensor_to_device(_without_module(), 'first.weight', 'cpu')",
    ],
    "Accelerate drops tensors that are logged to MLflow": [
        "trackers.mlflow_in_files",
    ],
    "Accelerate drops tensors that are logged to DVCLive": [
        "trackers.dvclive_keeps_values",
    ],
    "Accelerate accepts the names of hooks but ignores them; here they are converted to members of the enum": [
        "handlers: DistributedDataParallelKwargs(comm_hook='bf16')",
        "handlers: DistributedDataParallelKwargs(comm_wrapper='bf16', comm_state_option={'matrix_approximation_rank': 2})",
    ],
    "Accelerate requires Transformer Engine for an MS-AMP recipe": [
        "handlers: FP8RecipeKwargs(backend='MSAMP')",
    ],
    "Accelerate does not notice until a model is prepared that MS-AMP is not installed": [
        "handlers: Accelerator(mixed_precision='fp8', kwargs_handlers=[MSAMPRecipeKwargs()])",
    ],
    "dicts of dtypes are accepted as policies in FSDP 1, too; Accelerate accepts them in FSDP 2 only": [
        "handlers: _fsdp(mixed_precision_policy={'param_dtype': torch.bfloat16, 'reduce_dtype': torch.float32})",
    ],
    "Accelerate treats a string as a list of letters, and keeps the space after a comma": [
        "handlers: _fsdp(transformer_cls_names_to_wrap='A,B')",
        "handlers: _with({'FSDP_TRANSFORMER_CLS_TO_WRAP': 'A, B', 'FSDP_AUTO_WRAP_POLICY': 'TRANSFORMER_BASED_WRAP'}, _fsdp)",
    ],
    "Accelerate needs a GPU to broadcast the weights of FSDP 1": [
        "handlers: _fsdp(sync_module_states=False, cpu_ram_efficient_loading=True)",
        "handlers: _fsdp(sync_module_states=True)",
        "handlers: _with(_FSDP_ENVIRONMENT, _fsdp)",
    ],
    "losses are computed from float32 outputs in FSDP 2, as in every other strategy; Accelerate's outputs are bf16 or fp16": [
        "handlers: _fsdp(mixed_precision_policy='fp16', fsdp_version=2)",
    ],
    "compilation of regions keeps the model's class and the names of its parameters": [
        "handlers.type_of_compiled_regions",
    ],
    "a plugin without a mixed precision policy is valid here": [
        "handlers: FullyShardedDataParallelPlugin().validate_mixed_precision_policy()",
    ],
    "Accelerate's to_json returns None": [
        "handlers: ParallelismConfig(tp_size=2).to_json()",
    ],
    "Accelerate ignores the documented variable PARALLELISM_CONFIG_SP_SEQ_LENGTH": [
        "handlers: _with({'PARALLELISM_CONFIG_SP_SEQ_LENGTH': '16'}, DeepSpeedSequenceParallelConfig)",
    ],
    "on the CPU, Accelerate trains in fp16 without scaling losses": [
        "training.fp16_on_a_cpu",
    ],
    "pipelines with one process, and stages on any device, work here": [
        "training: raised(lambda: prepare_pippy(model()))",
        "training: generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_processes=2)",
        "training: generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), num_processes=1)",
    ],
    "a launch returns its Run here": [
        "training: notebook_launcher(_nothing, num_processes=1)",
        "training: notebook_launcher(_nothing, (1,), num_processes=1, mixed_precision='bf16')",
    ],
    "Accelerate runs one process if there is no GPU, whatever num_processes is": [
        "guides.a_notebook_launches_two_processes",
    ],
    "Accelerate does not launch from a kernel that has an Accelerator; here, ranks start without its state": [
        "guides.a_notebook_with_an_accelerator_launches_nothing",
    ],
    "without num_processes, a launch uses all devices here; Accelerate raises an error": [
        "guides: notebook_launcher(_nothing)",
    ],
    "if the first process fails in Accelerate, the other processes wait forever or lose their connection": [
        "guides.an_error_of_the_process_that_goes_first",
    ],
    "Accelerate ignores a hook that cannot wrap other hooks": [
        "guides, 2 ranks: _hooked('FP16', 'POWER_SGD')",
    ],
    "Accelerate's TPU guide names a member that DistributedType no longer has": [
        "guides: utils.DistributedType.TPU",
    ],
    "Accelerate clips DeepSpeed's gradients at 1.0 if no norm is set; here clip_grad_norm_ decides": [
        "deepspeed.clipping_that_nothing_names",
    ],
    "DeepSpeed's stage 3 gathers the weights to save them, unless this is switched off": [
        "deepspeed.an_open_file_without_fields",
    ],
    "a DeepSpeedPlugin sets the number of accumulation steps; Accelerate warns even if the Accelerator has the default": [
        "deepspeed.stage_2_accumulates",
    ],
    "a model without an optimizer never becomes the one that backward trains; Accelerate warns about each further model": [
        "deepspeed.a_student_learns_from_a_teacher",
    ],
    "DeepSpeed engines can be prepared without a loader, and several in one call": [
        "deepspeed.a_model_without_a_loader",
        "deepspeed.two_models_at_once",
    ],
    "Hooks of save_state get a folder with the checkpoint's name, which is moved when it is complete: use the argument of save_state for the final location": [
        "checkpoints: _folder_of_a_hook(lambda folder: folder.absolute() == Path('out').absolute())",
    ],
    "Accelerate executes code in files that load_custom_state reads; here it reads plain data only. Use torch.load(file, weights_only=False) for trusted files": [
        "checkpoints: _object_in_a_custom_state()",
    ],
    "Accelerate's save_model drops tensors that overlap others in memory": [
        "checkpoints: _overlapping()",
    ],
    "after loading the newest checkpoint, Accelerate numbers new ones from 0, and fails when it saves": [
        "checkpoints.projects_reopened",
    ],
    "without objects, prepare returns an empty tuple here; Accelerate fails with an IndexError": [
        "preparing: Accelerator().prepare()",
    ],
    "Accelerate joins uneven inputs on GPUs only; here they are joined on CPU ranks, too": [
        "preparing.join_uneven_inputs_sets_even_batches",
    ],
    "Accelerate counts a metric once per rank, so ReduceLROnPlateau runs out of patience earlier by that factor": [
        "preparing.a_plateau_on_two_ranks",
    ],
    "with several ranks on the CPU, Accelerate's device is cpu:0, which differs from the device of every parameter; here it is cpu": [
        "preparing.the_device_of_two_ranks_on_the_cpu",
    ],
    "Accelerate ignores keep_torch_compile=False for a model that was compiled by hand and prepared on several ranks": [
        "preparing.a_model_compiled_by_hand_on_two_ranks",
    ],
    "Accelerate refuses AcceleratorState() before an Accelerator; here it reads the environment": [
        "preparing.reset_states_have_no_values",
    ],
    "if a forward is a plain function, Accelerate passes it the model as an additional argument and fails": [
        "protocols.forward_replaced_by_the_user",
    ],
    "Accelerate accepts a new dataset, sampler or batch size for a prepared loader but ignores it; here torch's error is raised": [
        "protocols.loader_set_attribute",
    ],
    "Accelerate drops the loss that the optimizer's step returns": [
        "protocols.optimizer_closure",
    ],
    "Accelerate drops a tensor that is part of another one, and loses its values": [
        "utilities: _cleaned(lambda t: {'b': t, 'a': t[:1], 'c': t.clone()})",
    ],
    "Accelerate accepts floats in get_max_memory only": [
        "utilities: utils.convert_file_size_to_int(1.5)",
        "utilities: utils.convert_file_size_to_int(2.0e9)",
    ],
    "Accelerate's find_batch_size checks only the first item, and fails if that item is not a tensor": [
        "utilities: utils.find_batch_size([1, ones(2, 2)])",
    ],
    "an empty environment variable counts as unset": [
        "utilities: _with({'FLAG': ''}, lambda: utils.parse_flag_from_env('FLAG'))",
    ],
    "Accelerate's convert_dict_to_env_variables fails with a TypeError on values that are not strings": [
        "utilities: utils.convert_dict_to_env_variables({'A': 1, 'B': 'x y'})",
    ],
    "Accelerate fails with a FileNotFoundError on a machine without nvidia-smi": [
        "utilities: utils.get_gpu_info()",
    ],
    "Accelerate fails with an AssertionError from torch on a machine without GPUs": [
        "utilities: utils.check_cuda_fp8_capability()",
    ],
    "Accelerate supports TPUs through torch_xla only; here torch_tpu is supported, too": [
        "utilities: 'MULTI_TPU' in accelerate_dataclasses.DistributedType.__members__",
    ],
    "Accelerate reports CUDA on a machine without devices": [
        "utilities: utils.get_current_device_type()",
    ],
    "Accelerate calls a function that was removed from huggingface_hub": [
        "utilities: utils.shard_checkpoint(STATES, max_shard_size=50)",
        "utilities: utils.shard_checkpoint(STATES)",
        "utilities: utils.shard_checkpoint(STATES, max_shard_size=1, weights_name='w.bin')",
    ],
    "Accelerate does not load arrays of NumPy 2.4, because it does not allow their type names": [
        "utilities: _loaded()",
    ],
    "without an index, Accelerate returns None; here a new index is returned": [
        "utilities: utils.offload_weight(ones(2, 2), 'w', '.'), files()",
    ],
    "Accelerate ignores an unknown reduction": [
        "collectives.reduce_with_an_unknown_reduction",
    ],
    "names of precisions are case-insensitive here": [
        "collectives: Accelerator(mixed_precision='BF16').mixed_precision",
    ],
    "settings that would fail in the first step are refused immediately here": [
        "collectives: Accelerator(rng_types=['nonsense'])",
        "collectives: Accelerator(gradient_accumulation_steps=0)",
        "handlers: DistributedDataParallelKwargs(comm_hook='nonsense')",
        "handlers: GradientAccumulationPlugin(num_steps=0)",
        "handlers: TorchDynamoPlugin(mode='nonsense')",
        "handlers: _fsdp(fsdp_version=3)",
        "handlers: _fsdp(fsdp_version='2')",
        "handlers: TorchTensorParallelPlugin(tp_size=0)",
        "handlers: _deepspeed(zero_stage=4)",
        "handlers: _with({'MEGATRON_LM_SEQUENCE_PARALLELISM': 'true', 'MEGATRON_LM_RECOMPUTE_ACTIVATIONS': '1'}, _megatron)",
        "handlers: raised(lambda: Accelerator(dataloader_config=5))",
        "training: Accelerator().prepare_scheduler(5)",
        "training: LocalSGD(Accelerator(), model(), 0)",
        "guides: ParallelismConfig(sp_size=2, sp_handler=TorchContextParallelConfig())",
        "checkpoints: _limited(0)",
        "conditions, 2 ranks: Accelerator(parallelism_config=ParallelismConfig(tp_size=4))",
    ],
    "Accelerate sums with reduction='none'": [
        "collectives, 2 ranks: _reduced('none')",
    ],
    "Accelerate gathers the letters of a string and the keys of a dict, and fails on None; here each rank's object is gathered": [
        "collectives, 2 ranks: utils.gather_object({'rank': _rank()})",
        "collectives, 2 ranks: utils.gather_object('text')",
        "collectives, 2 ranks: utils.gather_object(None)",
    ],
    "Accelerate's strict=True accepts a checkpoint that lacks weights": [
        "bigmodels.missing_keys",
    ],
    "Accelerate ignores dtype without a device map, contrary to its documentation": [
        "bigmodels.checkpoints_in_another_dtype",
    ],
    "Accelerate counts the entries of a device map, not its devices": [
        "bigmodels.prepare_of_a_dispatched_model",
    ],
    "Accelerate does not write the files of a model that is offloaded as one module": [
        "bigmodels: _run(dispatch_model(model(), {'': 'disk'}, offload_dir='off'))",
    ],
    "Accelerate's strict=True fails with an AttributeError instead of listing the unexpected keys": [
        "bigmodels.unexpected_keys_of_a_dispatched_model",
    ],
    "Accelerate's recursively_apply fails on a defaultdict": [
        "utilities: utils.recursively_apply(lambda t: t + 1, collections.defaultdict(list, a=ones(1)))",
    ],
    "Accelerate's has_transformer_engine_layers fails if Transformer Engine is not installed": [
        "utilities: utils.has_transformer_engine_layers(model())",
    ],
    "Accelerate's write_basic_config writes JSON, whatever the file's suffix": [
        "utilities: utils.write_basic_config(save_location='config.yml'), Path('config.yml').read_text()",
    ],
    "the epoch after a resumed one is the next epoch here; Accelerate repeats the first (accelerate#2016)": [
        "loaders.skipping_a_shuffled_loader",
    ],
    "Accelerate skips the batches of a loaded state again in the next epoch, which is then incomplete": [
        "loaders.stateful_epoch_after_a_resumed_one",
    ],
    "Accelerate resumes a shuffled epoch in a different order, so that some samples are read twice and others never": [
        "loaders.stateful_resuming_a_shuffled_pass",
        "features, 2 ranks: _checkpoints('4')",
        "features, 2 ranks: _checkpoints('3')",
    ],
    "Accelerate does not notice that a loop over a loader was left early": [
        "loaders.leaving_a_pass_early",
    ],
    "Accelerate does not count the samples of divided streams, and gathers padding as results": [
        "loaders.remainders_of_streams",
        "loaders.results_of_a_stream_that_is_not_dispatched",
    ],
    "Accelerate truncates results to the length that a stream announces, even if it is wrong": [
        "loaders.results_of_a_stream_with_a_wrong_length",
    ],
    "Accelerate truncates results of the last batch if batches differ in size": [
        "loaders.results_of_batches_of_several_sizes",
    ],
    "Accelerate truncates results of the last batch if a batch sampler dropped an incomplete one": [
        "loaders.results_of_a_batch_sampler_that_drops",
    ],
    "Accelerate truncates results to the length of the dataset, even if the sampler is shorter": [
        "loaders.results_of_a_sampler_that_is_shorter_than_the_dataset",
    ],
    "Accelerate fails on dispatched loaders without a batch": [
        "loaders: _read({'dispatch_batches': True}, batch_size=20, drop_last=True)",
    ],
    "Accelerate gathers padding as results after skip_first_batches": [
        "loaders.results_of_skipped_batches",
    ],
    "with a seedable sampler on ranks that were seeded differently, Accelerate reads some samples twice and others never": [
        "loaders.results_of_ranks_that_were_seeded_apart",
    ],
    "Accelerate splits batches of one sample, and ranks get empty batches": [
        "loaders.batches_of_one_sample_that_are_split",
    ],
    "with split_batches and uneven batches, Accelerate counts batches that a rank does not receive": [
        "loaders.lengths_of_split_batches_that_are_uneven",
        "loaders: _shares(4, 9, split_batches=True, even_batches=False)",
    ],
    "Accelerate fails on strings in dispatched batches; here lists with one entry per sample are divided": [
        "loaders.texts_of_dispatched_batches",
    ],
    "Accelerate draws the order of a dispatched loader on rank 0 only, and the ranks' random numbers differ from then on": [
        "loaders.random_numbers_of_a_shuffled_dispatched_loader",
    ],
    "Accelerate drops the generator of a dispatched loader, which then draws from torch's generator and shuffles in a different order from torch": [
        "loaders.random_numbers_of_a_dispatched_loader_with_a_generator",
    ],
    "No random numbers are drawn by skip_first_batches here, so a resumed run continues with the saved ones": [
        "loaders.random_numbers_of_the_rest_of_a_pass",
    ],
    "Accelerate reports a negative length if more batches are skipped than exist": [
        "loaders: list(SkipBatchSampler(_batches(3), 20))",
        "loaders: list(skip_first_batches(DataLoader(torch.arange(7), batch_size=2), 20))",
    ],
    "Accelerate does not support loaders without batches": [
        "loaders: list(skip_first_batches(DataLoader(torch.arange(7), batch_size=None), 2))",
        "loaders: type(get_sampler(DataLoader(torch.arange(3), batch_size=None)))",
        "loaders, 2 ranks: _read(batch_size=None)",
    ],
    "Accelerate checks the type of deepspeed_plugin only if DeepSpeed is installed": [
        "refusals: Accelerator(deepspeed_plugin=3)",
    ],
    "saving a model without weights raises a ValueError here, and a RuntimeError in Accelerate": [
        "refusals: Accelerator().save_model(nn.Linear(1, 1, device='meta'), 'folder')",
    ],
    "an AcceleratorState with other settings changes them here, with a warning; Accelerate refuses it": [
        "refusals: _again(mixed_precision='bf16')",
    ],
    "checkpointed activations can be offloaded in FSDP 1, too; Accelerate offloads them in FSDP 2 only": [
        "refusals: FullyShardedDataParallelPlugin(fsdp_version=1, activation_checkpointing=True, activation_checkpointing_offload=True)",
    ],
    "wrappers that convert outputs to float32 can be pickled here": [
        "refusals: pickle.dumps(operations.ConvertOutputsToFp32(len))",
    ],
    "Incomplete device maps are refused by check_device_map here; Accelerate also refuses them when it checks tied parameters": [
        "refusals: modeling.check_tied_parameters_on_same_device([['a.b', 'c']], {'a': 0})",
    ],
    "The decorator deepspeed_required checks first whether DeepSpeed is installed; Accelerate's checks first whether it is enabled": [
        "refusals: Accelerator().prepare(optimizer()).optimizer and utils.deepspeed_required(print)()",
    ],
    "A set_to_none that the optimizer's zero_grad does not accept raises a TypeError here, and a ValueError in Accelerate": [
        "refusals: _zero_grad()",
    ],
}
KNOWN_DIFFERENCES = {name: reason for reason, names in _BY_REASON.items() for name in names}
