from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate.config.config_file import ClusterConfig
from notebook_accelerate.config.deepspeed_config import HfDeepSpeedConfig
from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin

FILE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
}


class TestTheConfiguration:
    def test_values_are_read_by_dotted_keys(self) -> None:
        config = HfDeepSpeedConfig(FILE)
        assert config.get_value("zero_optimization.offload_optimizer.device") == "cpu"
        assert config.get_value("zero_optimization.offload_param.device", "none") == "none"
        assert config.find_config_node("fp16.enabled") == (None, "enabled")
        assert config.is_zero3()
        assert not config.is_zero2()
        assert config.is_offload()
        assert not config.is_true("fp16.enabled")
        assert not config.is_false("fp16.enabled")

    def test_a_dict_is_copied(self) -> None:
        config = HfDeepSpeedConfig(FILE)
        config.config["zero_optimization"]["stage"] = 1
        assert FILE["zero_optimization"]["stage"] == 3

    def test_it_reads_files_and_base64(self, tmp_path: Path) -> None:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(FILE))
        packed = base64.urlsafe_b64encode(json.dumps(FILE).encode()).decode()
        assert HfDeepSpeedConfig(str(path)) == HfDeepSpeedConfig(path) == HfDeepSpeedConfig(packed)
        assert HfDeepSpeedConfig(packed) == HfDeepSpeedConfig(FILE)

    @pytest.mark.parametrize("given", ["no/such/file.json", 3, None])
    def test_other_types_raise(self, given: Any) -> None:
        with pytest.raises(
            ValueError, match="is not a DeepSpeed configuration; pass a dict, the path of an existing JSON file"
        ):
            HfDeepSpeedConfig(given)

    def test_a_file_that_is_not_json_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "ds.json").write_text("{stage: 3")
        with pytest.raises(ValueError, match=r"ds\.json is not JSON"):
            HfDeepSpeedConfig(tmp_path / "ds.json")

    def test_sections_are_removed(self) -> None:
        config = HfDeepSpeedConfig(FILE)
        config.del_config_sub_tree("optimizer")
        assert "optimizer" not in config.config
        config.del_config_sub_tree("optimizer.params")
        with pytest.raises(ValueError, match="has no optimizer"):
            config.del_config_sub_tree("optimizer", must_exist=True)


class TestThePlugin:
    def test_its_fields_become_a_configuration(self) -> None:
        plugin = DeepSpeedPlugin(zero_stage=1, gradient_clipping=0.5, gradient_accumulation_steps=4)
        assert plugin.deepspeed_config is plugin.hf_ds_config.config
        assert plugin.deepspeed_config["zero_optimization"]["stage"] == 1
        assert plugin.deepspeed_config["gradient_clipping"] == 0.5
        assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
        assert plugin.is_auto("train_micro_batch_size_per_gpu")
        assert DeepSpeedPlugin().is_auto("gradient_accumulation_steps")

    def test_a_configuration_becomes_its_fields(self) -> None:
        plugin = DeepSpeedPlugin(FILE)
        assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (3, 2, None)
        assert (plugin.offload_optimizer_device, plugin.offload_param_device) == ("cpu", "none")
        assert plugin.is_zero3_init_enabled()

    def test_a_configuration_object_is_kept(self) -> None:
        given = HfDeepSpeedConfig(FILE)
        assert DeepSpeedPlugin(hf_ds_config=given).hf_ds_config is given

    def test_variables_fill_auto_values_of_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "cpu")
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
        zero = {"stage": "auto", "offload_param": {"device": "auto"}, "offload_optimizer": {"device": "auto"}}
        found = {"zero_optimization": zero, "gradient_clipping": 2.0, "gradient_accumulation_steps": "auto"}
        plugin = DeepSpeedPlugin(hf_ds_config=found)
        filled = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "none"}}
        assert plugin.deepspeed_config == {
            "zero_optimization": filled, "gradient_clipping": 2.0, "gradient_accumulation_steps": "auto",
        }  # fmt: skip
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_param_device) == (3, 2.0, "cpu")

    def test_a_launch_has_no_fields_in_addition_to_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero_stage,zero3_init_flag")
        with pytest.raises(ValueError, match="so zero_stage would be ignored"):
            DeepSpeedPlugin(hf_ds_config=FILE)
        section = {"deepspeed_config_file": "ds.json", "gradient_clipping": 1.0}
        with pytest.raises(ValueError, match="so gradient_clipping would be ignored"):
            ClusterConfig.from_dict({"distributed_type": "DEEPSPEED", "deepspeed_config": section})
        ClusterConfig.from_dict({"deepspeed_config": {**section, "deepspeed_config_file": "none"}})

    def test_fields_fill_auto_values(self) -> None:
        plugin = DeepSpeedPlugin(FILE, gradient_clipping=1.0, offload_param_device="cpu", gradient_accumulation_steps=2)
        assert plugin.deepspeed_config["gradient_clipping"] == 1.0
        assert plugin.get_value("zero_optimization.offload_param.device") == "cpu"

    def test_one_error_lists_all_contradicting_fields(self) -> None:
        with pytest.raises(ValueError, match="does not agree with fields of the DeepSpeedPlugin") as caught:
            DeepSpeedPlugin(FILE, zero_stage=2, gradient_accumulation_steps=8)
        assert "gradient_accumulation_steps is 2 in the configuration, but 8 here" in str(caught.value)
        assert "zero_optimization.stage is 3 in the configuration, but 2 here" in str(caught.value)

    def test_a_configuration_without_zero_raises(self) -> None:
        with pytest.raises(ValueError, match='has no "zero_optimization"'):
            DeepSpeedPlugin({"train_batch_size": 8})

    @pytest.mark.parametrize(
        ("values", "match"),
        [
            ({"zero_stage": 2, "offload_param_device": "cpu"}, "needs zero_stage=3, but zero_stage=2"),
            ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage=1 or more"),
            ({"offload_optimizer_device": "nvme"}, "pass offload_optimizer_nvme_path"),
            ({"zero_stage": 3, "enable_msamp": True}, "MS-AMP does not work with ZeRO stage 3"),
        ],
    )
    def test_contradicting_fields_are_refused(self, values: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            DeepSpeedPlugin(**values)

    def test_zero3_init_needs_stage_3(self) -> None:
        assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag
        with pytest.warns(UserWarning, match="only with ZeRO stage 3, but the stage is 2"):
            assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag

    def test_it_reads_its_variables(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.25")
        monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
        plugin = DeepSpeedPlugin()
        assert (plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (0.25, None)
        (tmp_path / "ds.json").write_text(json.dumps(FILE))
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
        assert DeepSpeedPlugin().zero_stage == 3

    def test_it_can_be_pickled(self) -> None:
        plugin = pickle.loads(pickle.dumps(DeepSpeedPlugin(FILE)))
        assert plugin.deepspeed_config is plugin.hf_ds_config.config
        assert plugin == DeepSpeedPlugin(FILE)

    def test_the_state_alone_selects_one_of_several(self) -> None:
        plugin = DeepSpeedPlugin()
        assert not plugin.selected
        with pytest.raises(ValueError, match="select_deepspeed_plugin"):
            plugin.select()
        plugin.select(_from_accelerator_state=True)
        assert plugin.selected


class TestAutos:
    def test_auto_values_are_filled(self) -> None:
        plugin = DeepSpeedPlugin(FILE)
        known = {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 1.0,
            "zero_optimization.reduce_bucket_size": 64,
            "optimizer.params.lr": 1e-3,
        }
        plugin.deepspeed_config_process(**known)
        assert {key: plugin.get_value(key) for key in known} == known
        assert plugin.deepspeed_config["optimizer"]["params"]["weight_decay"] == 0.1

    def test_one_error_lists_all_differences(self) -> None:
        plugin = DeepSpeedPlugin(FILE)
        with pytest.raises(ValueError, match="'auto' takes the values of the training run") as caught:
            plugin.deepspeed_config_process(
                gradient_accumulation_steps=4, train_micro_batch_size_per_gpu=4, **{"optimizer.params.weight_decay": 0}
            )
        lines = [line.partition(", ")[0] for line in str(caught.value).splitlines() if line.startswith("- ")]
        assert lines == [
            "- train_batch_size is 'auto'",
            "- gradient_accumulation_steps is 2 in the configuration",
            "- gradient_clipping is 'auto'",
            "- zero_optimization.reduce_bucket_size is 'auto'",
            "- optimizer.params.lr is 'auto'",
            "- optimizer.params.weight_decay is 0.1 in the configuration",
        ]

    def test_values_need_not_match(self) -> None:
        plugin = DeepSpeedPlugin(FILE)
        plugin.fill_match("gradient_accumulation_steps", must_match=False, gradient_accumulation_steps=4)
        assert plugin.deepspeed_config["gradient_accumulation_steps"] == 2
        with pytest.raises(ValueError, match="is 2 in the configuration, but 4 here"):
            plugin.fill_match("gradient_accumulation_steps", gradient_accumulation_steps=4)

    def test_a_section_can_be_processed(self) -> None:
        plugin, found = DeepSpeedPlugin(FILE), []
        section = plugin.deepspeed_config["optimizer"]
        plugin.deepspeed_config_process("optimizer.", found, section, **{"optimizer.params.weight_decay": 0})
        assert len(found) == 2


class TestPrecision:
    @pytest.mark.parametrize(("name", "half"), [("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "bf16"), ("no", None)])
    def test_precision_is_written_into_the_configuration(self, name: str, half: str | None) -> None:
        plugin = DeepSpeedPlugin(FILE)
        plugin.set_mixed_precision(name)
        assert plugin.precision == half
        for other in {"bf16", "fp16"} - {half}:
            assert plugin.deepspeed_config[other] == {"enabled": False}

    def test_auto_is_filled(self) -> None:
        plugin = DeepSpeedPlugin({**FILE, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
        plugin.set_mixed_precision("bf16")
        assert (plugin.get_value("bf16.enabled"), plugin.get_value("fp16.enabled")) == (True, False)

    def test_two_precisions_are_refused(self) -> None:
        plugin = DeepSpeedPlugin({**FILE, "fp16": {"enabled": True}})
        with pytest.raises(ValueError, match="mixed_precision='bf16', but the DeepSpeed configuration enables fp16"):
            plugin.set_mixed_precision("bf16")
