"""Megatron-LM's settings, training steps and loaders, as far as they work without megatron-core."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from notebook_accelerate import Accelerator
from notebook_accelerate.config.megatron_plugin import MODEL_CONFIGS_TO_MEGATRON_PARSERS
from notebook_accelerate.strategies.megatron.megatron_loaders import window_loader
from notebook_accelerate.strategies.megatron.megatron_setup import check_degrees
from notebook_accelerate.utils import (
    AbstractTrainStep,
    GPTTrainStep,
    MegatronLMPlugin,
    T5TrainStep,
    add_model_config_to_megatron_parser,
)


def _model(**config: Any) -> Any:
    model = nn.Linear(1, 1)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return model


class TestPlugin:
    def test_unset_fields_come_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"TP_DEGREE": "2", "PP_DEGREE": "4", "SEQUENCE_PARALLELISM": "true"}.items():
            monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
        plugin = MegatronLMPlugin(pp_degree=2)
        assert (plugin.tp_degree, plugin.pp_degree, plugin.sequence_parallelism) == (2, 2, True)
        assert (plugin.num_micro_batches, plugin.gradient_clipping, plugin.use_distributed_optimizer) == (1, 1.0, False)

    def test_arguments_have_the_names_of_megatron_and_the_users_come_last(self) -> None:
        plugin = MegatronLMPlugin(tp_degree=2, gradient_clipping=0.3, other_megatron_args={"clip_grad": 0.7, "mine": 1})
        arguments = plugin.megatron_lm_default_args
        assert arguments["tensor_model_parallel_size"] == 2
        assert (arguments["clip_grad"], arguments["mine"]) == (0.7, 1)

    def test_earlier_names_of_megatron_are_translated_for_its_core(self) -> None:
        given = {"position_embedding_type": "rotary", "attention_head_type": "multiquery"}
        plugin = MegatronLMPlugin(other_megatron_args=given)
        assert (
            plugin.megatron_lm_default_args.items()
            >= {"position_embedding_type": "rope", "num_query_groups": 1}.items()
        )
        assert "attention_head_type" not in plugin.megatron_lm_default_args
        with pytest.raises(ValueError, match="position_embedding_type='alibi' is not allowed"):
            MegatronLMPlugin(other_megatron_args={"position_embedding_type": "alibi"})

    def test_the_shape_of_a_gpt2_comes_from_its_configuration(self) -> None:
        plugin = MegatronLMPlugin(seq_length=8)
        config = {"n_layer": 3, "n_embd": 8, "n_head": 2, "n_positions": 32, "vocab_size": 11}
        plugin.set_network_size_args(_model(model_type="gpt2", tie_word_embeddings=False, **config))
        arguments = plugin.megatron_lm_default_args
        shape = [arguments[name] for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")]
        assert shape == [3, 8, 2, 32]
        assert (arguments["seq_length"], arguments["max_position_embeddings"]) == (8, 32)
        assert arguments["untie_embeddings_and_output_weights"] is True

    def test_a_type_of_model_can_be_added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "notebook_accelerate.config.megatron_plugin.MODEL_CONFIGS_TO_MEGATRON_PARSERS",
            kinds := dict(MODEL_CONFIGS_TO_MEGATRON_PARSERS),
        )

        @add_model_config_to_megatron_parser("mine")
        def parse(plugin: MegatronLMPlugin, model: Any, batch_data: Any) -> None:
            plugin.megatron_lm_default_args["num_layers"] = model.config.depth

        assert "mine" in kinds
        plugin = MegatronLMPlugin()
        plugin.set_network_size_args(_model(model_type="mine", depth=7))
        assert plugin.megatron_lm_default_args["num_layers"] == 7

    def test_an_unknown_type_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ValueError, match=r"model_type='opt'.*gpt2, llama, megatron-bert, t5"):
            MegatronLMPlugin().set_network_size_args(_model(model_type="opt"))

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"sequence_parallelism": True}, "set tp_degree above 1"),
            ({"context_parallel_size": 2}, r"ParallelismConfig\(cp_size"),
            ({"num_micro_batches": 0}, "whole number of at least 1"),
        ],
    )
    def test_wrong_settings_are_refused(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            MegatronLMPlugin(**settings)

    def test_fp8_is_not_available(self) -> None:
        with pytest.raises(ValueError, match=r"'fp8' is not available with Megatron-LM.*'bf16'"):
            MegatronLMPlugin().set_mixed_precision("fp8")


class TestDegrees:
    def test_the_degrees_must_fit_the_world(self) -> None:
        assert check_degrees(MegatronLMPlugin(tp_degree=2, pp_degree=2), 8) == 2
        with pytest.raises(ValueError, match=r"tp_degree=2 x pp_degree=2 = 4 ranks .* number of ranks \(6\)"):
            check_degrees(MegatronLMPlugin(tp_degree=2, pp_degree=2), 6)
        with pytest.raises(ValueError, match=r"num_processes=4"):
            check_degrees(MegatronLMPlugin(tp_degree=2, pp_degree=2), 2)

    @pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="megatron-core is installed")
    def test_a_missing_library_is_reported_with_the_line_to_type(self) -> None:
        with pytest.raises(ImportError, match=r"pip install 'megatron-core>=0.16,<0.17'"):
            Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())

    def test_two_numbers_of_micro_batches_are_refused(self) -> None:
        with pytest.raises(ValueError, match="gradient_accumulation_steps=2 and num_micro_batches=4 contradict"):
            Accelerator(
                cpu=True, gradient_accumulation_steps=2, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=4)
            )


def _world(**settings: Any) -> Any:
    return SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=MegatronLMPlugin(**settings)))


class TestTrainSteps:
    def test_a_decoder_predicts_the_next_token(self) -> None:
        step = GPTTrainStep(_world(), SimpleNamespace(orig_vocab_size=9))
        rows = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
        tokens, labels, loss_mask, hidden, positions = step.get_batch(iter([rows]))
        assert tokens.tolist() == [[5, 6, 7, 8]]
        assert labels.tolist() == [[6, 7, 8, 0]]
        assert loss_mask.tolist() == [[True, True, True, False]]
        assert hidden[0, 0].int().tolist() == [[1, 1, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1], [1, 0, 0, 0]]
        assert positions.tolist() == [[0, 1, 2, 3]]

    def test_ignored_labels_and_padding_have_no_loss(self) -> None:
        step = GPTTrainStep(_world(), SimpleNamespace(orig_vocab_size=9))
        rows = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[-100, 6, -100, 8]])}
        _, labels, loss_mask, *_ = step.get_batch(iter([rows]))
        assert labels.tolist() == [[6, 0, 8, 0]]
        assert loss_mask.tolist() == [[True, False, True, False]]
        total, count, reported = step.loss_func(loss_mask, torch.tensor([[1.0, 9.0, 2.0, 9.0]]))
        assert (total.item(), count.item(), reported["lm loss"].tolist()) == (3.0, 2, [3.0, 2.0])

    def test_the_decoder_of_a_t5_starts_with_the_padding_token(self) -> None:
        step = T5TrainStep(_world(), SimpleNamespace(orig_vocab_size=9, pad_token_id=0))
        rows = {
            "input_ids": torch.tensor([[5, 6, 0]]),
            "attention_mask": torch.tensor([[1, 1, 0]]),
            "labels": torch.tensor([[7, 8, -100, -100]]),
        }
        _, shifted, loss_mask, labels, encoder, decoder, across = step.get_batch(iter([rows]))
        assert shifted.tolist() == [[0, 7, 8, 0]]
        assert labels.tolist() == [[7, 8, 0, 0]]
        assert loss_mask.int().tolist() == [[1, 1, 0, 0]]
        assert encoder[0].int().tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 1]]
        assert decoder[0].int().tolist() == [[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
        assert across[0].int().tolist() == [[0, 0, 1]] * 4

    def test_custom_functions_replace_the_defaults(self) -> None:
        def batch(_: Any) -> None: ...

        def loss(*_: Any) -> None: ...

        world = _world(custom_get_batch_function=batch, custom_loss_function=loss)
        step = GPTTrainStep(world, SimpleNamespace(orig_vocab_size=9))
        assert step.get_batch is batch
        assert step.loss_func is loss

    def test_an_incomplete_train_step_names_the_missing_method(self) -> None:
        with pytest.raises(NotImplementedError, match="must define get_forward_step_func"):
            AbstractTrainStep("mine").get_forward_step_func()


def test_windows_keep_the_order_and_settings_of_a_loader() -> None:
    generator = torch.Generator()
    loader: Any = DataLoader(range(10), batch_size=2, shuffle=True, generator=generator, drop_last=True)  # type: ignore[arg-type]
    windows: Any = window_loader(loader, 2)
    assert isinstance(windows.sampler, RandomSampler)
    assert (windows.batch_size, windows.drop_last) == (4, True)
    generator.manual_seed(1)
    batches = [row for batch in loader for row in batch.tolist()]
    generator.manual_seed(1)
    rows = [row for batch in windows for row in batch.tolist()]
    assert rows == batches[:8]
    assert window_loader(loader, 1) is loader
