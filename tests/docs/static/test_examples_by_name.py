"""The API reference has an executed example for each of the names that training code uses most."""

from __future__ import annotations

import re

from tests.support import pages

MOST_USED = {
    "accelerator": (
        *("prepare", "backward", "accumulate", "no_sync", "clip_grad_norm_", "gather", "gather_for_metrics", "reduce"),
        *("pad_across_processes", "print", "is_main_process", "main_process_first", "split_between_processes"),
        *("unwrap_model", "save_model", "save_state", "load_state", "log", "autocast", "set_trigger", "check_trigger"),
    ),
    "launching": ("notebook_launcher", "LaunchConfig", "configure", "debug_launcher"),
    "run": ("Run", "Run.metrics", "Run.logs", "Run.report", "Run.wait", "Run.ask", "Run.stacks", "Run.stop", "runs"),
    "state": ("PartialState",),
    "collectives": ("gather_object", "broadcast_object_list"),
    "data": ("skip_first_batches", "set_seed", "find_batch_size", "send_to_device"),
    "big_models": (
        *("init_empty_weights", "infer_auto_device_map", "load_checkpoint_and_dispatch", "dispatch_model"),
        *("compute_module_sizes", "find_executable_batch_size"),
    ),
    "hooks": ("add_hook_to_module", "remove_hook_from_module"),
    "configuration": (
        *("ProjectConfiguration", "GradientAccumulationPlugin", "FullyShardedDataParallelPlugin"),
        "ParallelismConfig",
    ),
    "logging": ("get_logger",),
}
"""The names that need an example, by page: those that libraries use most (client_names.json), and those of a launch."""


def test_the_most_used_names_have_an_example() -> None:
    assert sum(map(len, MOST_USED.values())) >= 40
    for page, names in MOST_USED.items():
        text = (pages.DOCS / "api" / f"{page}.md").read_text()
        examples = re.split(r"^### ", text.partition("\n## Examples\n")[2], flags=re.MULTILINE)[1:]
        by_name = {name: example for example in examples for name in example.partition("\n")[0].split(" and ")}
        assert set(names) <= set(by_name), page
        for name in names:
            assert pages.blocks(by_name[name]), f"{name} has no block of code"
            source = "".join(block.source for block in pages.blocks(by_name[name])).lower()
            assert name.rpartition(".")[2].lower() in source, name
