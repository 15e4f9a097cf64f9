"""Megatron-LM's model, optimizer and schedule for a training loop written for Accelerate.

Calling the model runs a whole accumulation window: the schedule sends all micro-batches through the pipeline, forward
and backward, and reduces the gradients. If the training loop clips gradients, that call takes the step. Otherwise,
`optimizer.step()` takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from notebook_accelerate.state.warn_once import warn_once
from notebook_accelerate.strategies.accelerator_properties import HasState
from notebook_accelerate.strategies.engine_strategy import EngineOptimizer, EngineScheduler
from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.megatron.forward_steps import TRAIN_STEPS, AbstractTrainStep, vocabulary_size


class MegatronEngine(nn.Module):
    """A model that runs with Megatron's schedules.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.
        model: This rank's part of the model, or a list of its parts.
        optimizer: Megatron's optimizer.
        scheduler: Megatron's schedule of learning rate and weight decay.

    Attributes:
        module: This rank's parts of the model.
        train_step_handler: The train step for this type of model.
        iteration: The number of steps taken.
        grad_norm: The norm of all gradients in the last step, before clipping.
        skipped: Whether the last step was skipped because gradients were infinite.
    """

    def __init__(self, accelerator: HasState, model: Any, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        self.module = nn.ModuleList(model if isinstance(model, (list, tuple)) else [model])
        self.optimizer, self.scheduler = optimizer, scheduler
        self.plugin = megatron_setup.active_plugin(accelerator.state)
        self.device = accelerator.state.device
        self.args = SimpleNamespace(**self.plugin.megatron_lm_default_args)
        self.train_step_handler = self._create_train_step(accelerator)
        self.iteration = 0
        self.grad_norm: float = math.nan
        self.skipped = False
        self.pending = False

    def _create_train_step(self, accelerator: HasState) -> AbstractTrainStep:
        custom = self.plugin.custom_train_step_class
        if custom is not None:
            return custom(self.args, **(self.plugin.custom_train_step_kwargs or {}))  # type: ignore[no-any-return]
        kind = getattr(self.args, "model_type_name", None)
        if kind not in TRAIN_STEPS:
            raise ValueError(
                f"model_type_name={kind!r} has no train step; known: {', '.join(TRAIN_STEPS)}. Set it with "
                "MegatronLMPlugin(other_megatron_args={'model_type_name': 'gpt'}), or pass custom_train_step_class=..."
            )
        return TRAIN_STEPS[kind](accelerator, self.args)

    # ---- forward and backward

    def forward(self, *args: Any, **batch: Any) -> Any:
        """Run a window of micro-batches forward and, in training, backward; every rank must call this.

        Args:
            args: Not allowed.
            batch: Tensors of shape `[samples of a window, ...]`, by name.

        Returns:
            The loss, averaged over the window and the data-parallel group. If the model returns dicts, or the plugin
            has `return_logits`, a `MegatronOutput`.

        Raises:
            ValueError: An argument was passed by position.
        """
        if args or not batch:
            raise ValueError("a model of Megatron-LM takes its batch by name: model(**batch)")
        loss, outputs = self.train_step(**batch) if self.training else self.eval_step(**batch)
        output_class = self.train_step_handler.model_output_class
        return loss if output_class is None else output_class(loss=loss, logits=self._gather_logits(outputs))

    def train_step(self, **batch: Any) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Compute the gradients of a window; every rank must call this.

        Args:
            batch: Tensors of shape `[samples of a window, ...]`, by name.

        Returns:
            The loss, and on the last stage, the train step's dict for each micro-batch.
        """
        if self.pending:
            warn_once(
                "a model of Megatron-LM was called again before optimizer.step(): the gradients of the earlier window "
                "are dropped. To accumulate, set MegatronLMPlugin(num_micro_batches=...)"
            )
        for chunk in self.module:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        self.optimizer.zero_grad()
        outputs = self._run_window(batch, forward_only=False)
        self.pending = True
        return self._average_loss(outputs), outputs

    def eval_step(self, **batch: Any) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Compute the loss of a window; every rank must call this.

        Args:
            batch: Tensors of shape `[samples of a window, ...]`, by name.

        Returns:
            The loss, and on the last stage, the train step's dict for each micro-batch.
        """
        with torch.no_grad():
            outputs = self._run_window(batch, forward_only=True)
        return self._average_loss(outputs), outputs

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens in the vocabulary without its padding."""
        return vocabulary_size(self.args)

    def megatron_generate(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
        max_new_tokens: int | None = None,
        num_beams: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        length_penalty: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Generate text with a GPT.

        Every rank must call this, and the ranks that share a model must pass the same prompts.

        Args:
            inputs: Tokens of shape `[samples, tokens]`, padded on the right.
            attention_mask: A mask of the same shape, with 1 for a token and 0 for padding. If None, there is no
                padding.
            max_length: The maximum number of tokens in a sample, including the prompt.
            max_new_tokens: The maximum number of tokens after the longest prompt. Pass either this or `max_length`.
            num_beams: The number of candidates in a beam search, which takes one prompt. If None, tokens are sampled.
            temperature: The number that divides the logits. If None, it is 1.
            top_k: The number of most probable tokens to sample from. If 1, decoding is greedy.
            top_p: The total probability of the most probable tokens to sample from.
            length_penalty: A candidate's log probability is divided by its length to this power. If None, the power is
                1.
            kwargs: `top_p_decay`, `top_p_bound`, `random_seed`, `add_BOS`, `bos_token_id`, `eos_token_id`.

        Returns:
            The prompts and the generated tokens, of shape `[samples, tokens]`. Samples that end early are padded with
            the end token.

        Raises:
            ValueError: The model is not a GPT, or arguments contradict each other.
        """
        from notebook_accelerate.strategies.megatron.megatron_generation import megatron_generate

        chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        options = {name: value for name, value in chosen.items() if value is not None} | kwargs
        return megatron_generate(
            self, inputs, attention_mask, max_length, max_new_tokens, num_beams, length_penalty, **options
        )

    def _run_window(self, batch: dict[str, Any], forward_only: bool) -> list[dict[str, Any]]:
        batch = {name: item.to(self.device) if torch.is_tensor(item) else item for name, item in batch.items()}
        tensors = [item for item in batch.values() if torch.is_tensor(item) and item.dim()]
        samples = tensors[0].shape[0]
        count = math.gcd(samples, self.plugin.num_micro_batches or 1)
        tokens = next(item for item in tensors if item.dim() > 1)
        target = batch.get("decoder_input_ids", batch.get("labels", tokens))
        return self.run_schedule(
            self.train_step_handler.forward_step,
            lambda: _micro_batches(batch, samples, count),
            num_microbatches=count,
            seq_length=tokens.shape[1],
            micro_batch_size=samples // count,
            decoder_seq_length=target.shape[1] if target.dim() > 1 else tokens.shape[1],
            forward_only=forward_only,
        )

    def run_schedule(
        self, forward_step: Callable[..., Any], micro_batches: Callable[[], Iterator[Any]], **arguments: Any
    ) -> list[Any]:
        """Run Megatron's schedule over this rank's parts of the model; every rank must call this.

        Args:
            forward_step: A function that takes an iterator over micro-batches and a part of the model.
            micro_batches: A function that returns a new iterator over the micro-batches.
            arguments: Further arguments for the schedule.

        Returns:
            On the last stage, the dict or value for each micro-batch. On other stages, an empty list.
        """
        chunks = list(self.module)
        iterators = [micro_batches() for _ in chunks]
        several = len(chunks) > 1  # With several chunks, stages are interleaved.
        run = import_module("megatron.core.pipeline_parallel").get_forward_backward_func()
        return run(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=chunks if several else chunks[0],
            **arguments,
        )

    def _average_loss(self, outputs: list[dict[str, Any]]) -> torch.Tensor:
        """Average the losses over micro-batches and the data-parallel group, and send the result to all stages."""
        groups = megatron_setup.import_parallel_state()
        ratio = torch.zeros(2, dtype=torch.float32, device=self.device)
        if groups.is_pipeline_last_stage():
            for losses in outputs:
                for name, value in losses.items():
                    if name != "logits":
                        ratio += self._loss_ratio(value)
            if not self.plugin.calculate_per_token_loss:
                ratio[1] = len(outputs)
            dist.all_reduce(ratio, group=groups.get_data_parallel_group())
        if groups.get_pipeline_model_parallel_world_size() > 1:
            last = groups.get_pipeline_model_parallel_last_rank()
            dist.broadcast(ratio, src=last, group=groups.get_pipeline_model_parallel_group())
        return ratio[0] / ratio[1]

    def _loss_ratio(self, value: torch.Tensor) -> torch.Tensor:
        """Return a loss as a numerator and a denominator.

        For token losses, these are the sum and the number of tokens.
        """
        value = value.detach().float()
        if value.numel() == 2 and self.plugin.calculate_per_token_loss:
            return value
        loss = value[0] / value[1].clamp(min=1) if value.numel() == 2 else value.view(())
        return torch.stack([loss, torch.ones_like(loss)])

    def _gather_logits(self, outputs: list[dict[str, Any]]) -> torch.Tensor | None:
        """Return the logits of all micro-batches, which the last stage sends to the other stages."""
        if not self.plugin.return_logits:
            return None
        groups = megatron_setup.import_parallel_state()
        logits = torch.cat([part["logits"] for part in outputs]).float() if outputs else None
        if groups.get_pipeline_model_parallel_world_size() == 1:
            return logits
        group, last = groups.get_pipeline_model_parallel_group(), groups.get_pipeline_model_parallel_last_rank()
        shape = [None if logits is None else tuple(logits.shape)]
        dist.broadcast_object_list(shape, src=last, group=group, device=self.device)
        logits = torch.empty(shape[0] or (), device=self.device) if logits is None else logits.contiguous()
        dist.broadcast(logits, src=last, group=group)
        return logits

    # ---- step

    def step(self) -> None:
        """Take the step of a window if it has not been taken yet, and step the schedule; every rank must call this."""
        if not self.pending:
            return
        self.pending = False
        done, norm, _ = self.optimizer.step()
        self.skipped = not done
        self.grad_norm = math.nan if norm is None else float(norm)
        if done:
            self.iteration += 1
            self.scheduler.step(increment=self.plugin.global_batch_size)

    def clip(self, max_norm: float) -> None:
        """Take the step with gradients scaled so that their norm is at most `max_norm`; every rank must call this.

        Args:
            max_norm: The maximum norm. A number in the plugin takes precedence.
        """
        config = self.optimizer.config
        before = config.clip_grad
        try:
            if not self.plugin._clipping_given:
                config.clip_grad = 0.0 if math.isinf(max_norm) else float(max_norm)
            self.step()
        finally:
            config.clip_grad = before


def _micro_batches(batch: dict[str, Any], samples: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of a window."""
    size = samples // count
    for start in range(0, samples, size):
        yield {
            name: item[start : start + size] if torch.is_tensor(item) and item.dim() else item
            for name, item in batch.items()
        }


class MegatronLMOptimizerWrapper(EngineOptimizer):
    """Megatron's optimizer. `step` takes the engine's step, which also clears gradients; `zero_grad` does nothing."""

    library = "Megatron-LM"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were infinite."""
        return self.engine is not None and bool(self.engine.skipped)


class MegatronLMSchedulerWrapper(EngineScheduler):
    """Megatron's schedule. `step` does nothing, because the engine steps and saves the schedule."""

    def get_last_lr(self) -> Any:
        """Return the current learning rates, one per parameter group.

        Returns:
            A list of floats.
        """
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def get_lr(self) -> Any:
        """Return the learning rates that the schedule computes for its current step.

        Returns:
            A list of floats.
        """
        return [self.scheduler.get_lr(group) for group in self.scheduler.optimizer.param_groups]
