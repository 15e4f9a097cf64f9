"""What Megatron-LM's schedules run for each micro-batch: a batch, a forward and a loss, for GPT, BERT and T5.

Batches are those of transformers' models: `input_ids`, `attention_mask` (1: a token, 0: filling), `labels` (-100: no
loss), so that the loss is the one that the model has when it is trained alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""The label of tokens that have no part in the loss."""


@dataclass
class MegatronOutput:
    """What a model returned for a batch, as transformers' outputs: by name or by position."""

    loss: torch.Tensor
    """The loss, averaged over micro-batches and over ranks with data of their own."""
    logits: torch.Tensor | None = None
    """Shape `[samples, tokens, vocabulary]`, or `[samples, labels]`; None unless the plugin has `return_logits`."""

    def __getitem__(self, key: int | str) -> torch.Tensor | None:
        if isinstance(key, str):
            return getattr(self, key)  # type: ignore[no-any-return]
        return [value for value in (self.loss, self.logits) if value is not None][key]


def summed(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the losses of tokens.

    Args:
        losses: Shape `[samples, tokens]`.
        mask: The same shape; 1 where a token counts.

    Returns:
        The sum, and the number of tokens that count, as an integer tensor.
    """
    mask = mask.float()
    return (losses.float() * mask).sum(), mask.sum().to(torch.int)


def of_tokens(losses: torch.Tensor, mask: torch.Tensor, name: str = "lm loss", **more: Any) -> tuple[Any, ...]:
    """Make of the losses of tokens what Megatron's schedules take.

    Args:
        losses: Shape `[samples, tokens]`.
        mask: The same shape; 1 where a token counts.
        name: Name of the loss.
        more: What else the engine gets.

    Returns:
        The sum, the number of tokens, and sum and number for the engine's average.
    """
    total, count = summed(losses, mask)
    return total, count, {name: torch.stack([total.detach(), count.to(total.dtype)]), **more}


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses `[samples, tokens]` of logits whose vocabulary is split over the ranks that share tensors."""
    parallel: Any = import_module("megatron.core.tensor_parallel")
    turned = logits.float().transpose(0, 1).contiguous()
    return parallel.vocab_parallel_cross_entropy(turned, labels.transpose(0, 1).contiguous()).transpose(0, 1)  # type: ignore[no-any-return]


def whole_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Return logits over the whole vocabulary, without what fills it up; ranks that share tensors must call this.

    Args:
        logits: Shape `[..., vocabulary of this rank]`.
        size: Tokens of the vocabulary.
    """
    parallel: Any = import_module("megatron.core.tensor_parallel")
    return parallel.gather_from_tensor_model_parallel_region(logits.detach())[..., :size]  # type: ignore[no-any-return]


def _counted(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels that are all tokens, and 1 where they count."""
    mask = labels != IGNORED
    return labels.masked_fill(~mask, 0), mask


class AbstractTrainStep:
    """The base class of train steps; derive one and pass it as `custom_train_step_class`.

    Args:
        name: Name of the step.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.model_output_class: type[MegatronOutput] | None = None

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that takes the next micro-batch from an iterator and makes the model's inputs of it.

        Args:
            accelerator: An object with the `state` of the world.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        raise NotImplementedError(f"{type(self).__name__} must have get_batch_func(accelerator, megatron_dataset_flag)")

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function of an iterator and a model, which returns the model's output and a function of it.

        That function returns the loss, and a dict of what is averaged over ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must have get_forward_step_func()")

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return a function that computes the loss of a model's output.

        Args:
            accelerator: An object with the `state` of the world.
        """
        raise NotImplementedError(f"{type(self).__name__} must have get_loss_func(accelerator)")


class _TrainStep(AbstractTrainStep):
    """What the steps of the three kinds of models have in common."""

    def __init__(self, name: str, accelerator: Any, args: Any) -> None:
        super().__init__(name)
        self.args = args
        self.plugin = accelerator.state.megatron_lm_plugin
        self.return_logits = bool(self.plugin.return_logits)
        self.get_batch = self.plugin.custom_get_batch_function or self.get_batch_func(
            accelerator, self.plugin.megatron_dataset_flag
        )
        if getattr(args, "model_return_dict", False) or self.return_logits:
            self.model_output_class = MegatronOutput

    def _vocabulary(self) -> int:
        return int(getattr(self.args, "orig_vocab_size", 0) or self.args.padded_vocab_size)


class _TokenTrainStep(_TrainStep):
    """What the steps whose loss is that of single tokens have in common."""

    loss_func: Callable[..., Any]

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return a function of loss mask and losses of tokens.

        Args:
            accelerator: An object with the `state` of the world.
        """

        def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, ...]:
            return of_tokens(output_tensor, loss_mask)

        return loss_func

    def _loss_of_logits(self, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor) -> tuple[Any, ...]:
        *parts, told = self.loss_func(loss_mask, _cross_entropy(logits, labels))
        return *parts, {**told, "logits": whole_vocabulary(logits, self._vocabulary())}


class GPTTrainStep(_TokenTrainStep):
    """A step of a decoder: each token predicts the next one.

    Args:
        accelerator: An object with the `state` of the world.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("GPTTrainStep", accelerator, args)
        self.loss_func = self.plugin.custom_loss_function or self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that makes tokens, labels, loss mask, attention mask and positions of a micro-batch.

        Args:
            accelerator: An object with the `state` of the world.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets, which have all of them.
        """
        return _gpt_batch_of_megatron if megatron_dataset_flag else _gpt_batch

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function of an iterator and a model that the schedules call."""

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(data_iterator)
            if self.return_logits:
                return model(tokens, positions, attention_mask), partial(self._loss_of_logits, labels, loss_mask)
            return model(tokens, positions, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def _gpt_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    tokens = batch["input_ids"].long()
    real = batch.get("attention_mask")
    targets = batch["labels"].long() if "labels" in batch else tokens
    if "labels" not in batch and real is not None:
        targets = targets.masked_fill(real == 0, IGNORED)
    following = torch.full_like(targets, IGNORED)
    following[:, :-1] = targets[:, 1:]
    labels, loss_mask = _counted(following)
    length = tokens.shape[1]
    masked = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
    if real is not None:
        masked = masked | (real == 0)[:, None, None, :]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    return tokens, labels, loss_mask, masked, positions


def _gpt_batch_of_megatron(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    masked = batch.get("attention_mask")
    if masked is None:
        length = batch["tokens"].shape[1]
        masked = torch.ones(length, length, dtype=torch.bool, device=batch["tokens"].device).triu(1)[None, None]
    return batch["tokens"].long(), batch["labels"].long(), batch["loss_mask"], masked, batch["position_ids"]


class BertTrainStep(_TrainStep):
    """A step of an encoder: masked tokens and the order of sentences in pretraining, or labels of whole samples.

    Args:
        accelerator: An object with the `state` of the world.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep", accelerator, args)
        pretraining = getattr(args, "pretraining_flag", True)
        self.loss_func = self.plugin.custom_loss_function or self.get_loss_func(
            accelerator, pretraining, getattr(args, "num_labels", 2)
        )
        self.forward_step = self.get_forward_step_func(pretraining, getattr(args, "bert_binary_head", False))

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that makes tokens, types, sentence order, loss mask, labels and padding mask of a batch.

        Args:
            accelerator: An object with the `state` of the world.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        return _bert_batch_of_megatron if megatron_dataset_flag else _bert_batch

    def get_loss_func(  # type: ignore[override]
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return a function of loss mask, sentence order (or labels) and the model's output.

        Args:
            accelerator: An object with the `state` of the world.
            pretraining_flag: Whether masked tokens are predicted; otherwise samples are labelled.
            num_labels: How many labels there are; 1: a number is predicted.
        """

        def pretrain(
            loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output_tensor: Any
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses, order_logits = output_tensor
            total, count = summed(losses, loss_mask)
            parts = {"lm loss": total / count.clamp(min=1)}
            if order_logits is not None and sentence_order is not None:
                parts["sop loss"] = torch.nn.functional.cross_entropy(order_logits.view(-1, 2).float(), sentence_order)
            return sum(parts.values()), {name: loss.detach() for name, loss in parts.items()}  # type: ignore[return-value]

        def classify(labels: torch.Tensor, output_tensor: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logits = output_tensor[1].float()
            if num_labels == 1:
                loss = torch.nn.functional.mse_loss(logits.view(-1), labels.view(-1).float())
            elif labels.is_floating_point():
                loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
            else:
                loss = torch.nn.functional.cross_entropy(logits.view(-1, num_labels), labels.view(-1))
            told = {"loss": loss.detach().clone()}  # the schedule divides the loss in place
            return loss, {**told, "logits": logits.detach()} if self.return_logits else told

        return pretrain if pretraining_flag else classify

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the function of an iterator and a model that the schedules call.

        Args:
            pretraining_flag: Whether masked tokens are predicted; otherwise samples are labelled.
            bert_binary_head: Whether the order of sentences is predicted too.
        """

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Any, Any]:
            tokens, types, sentence_order, loss_mask, labels, padding = self.get_batch(data_iterator)
            kinds = types if bert_binary_head or not pretraining_flag else None
            if pretraining_flag:
                output = model(tokens, padding, tokentype_ids=kinds, lm_labels=labels)
                return output, partial(self.loss_func, loss_mask, sentence_order)
            return model(tokens, padding, tokentype_ids=kinds), partial(self.loss_func, labels)

        return forward_step


def _bert_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor | None, ...]:
    batch = next(data_iterator)
    tokens = batch["input_ids"].long()
    padding = batch.get("attention_mask", torch.ones_like(tokens)).long()
    types = batch.get("token_type_ids", torch.zeros_like(tokens)).long()
    order = batch.get("next_sentence_label")
    labels = batch["labels"]
    if labels.dim() < 2 or labels.is_floating_point():
        return tokens, types, order, None, labels, padding
    counted, mask = _counted(labels.long())
    return tokens, types, None if order is None else order.view(-1).long(), mask, counted, padding


def _bert_batch_of_megatron(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    names = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    tokens, types, order, mask, labels, padding = (batch[name] for name in names)
    return tokens.long(), types.long(), order.long(), mask, labels.long(), padding.long()


class T5TrainStep(_TokenTrainStep):
    """A step of an encoder with a decoder.

    Args:
        accelerator: An object with the `state` of the world.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep", accelerator, args)
        self.loss_func = self.plugin.custom_loss_function or self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return which tokens of a sample do not see each other.

        Args:
            attention_mask: Shape `[samples, tokens]`; 1: a token, 0: filling.

        Returns:
            Shape `[samples, tokens, tokens]`; True: not seen.
        """
        return (attention_mask[:, None, :] * attention_mask[:, :, None]) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return which tokens of the decoder do not see each other: each sees itself and those before it.

        Args:
            seq_length: Tokens of the decoder.
            device: Where the mask is made.

        Returns:
            Shape `[1, tokens, tokens]`; True: not seen.
        """
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> torch.Tensor:
        """Return which tokens of the encoder are not seen by those of the decoder.

        Args:
            attention_mask: The encoder's, of shape `[samples, encoder's tokens]`; 1: a token, 0: filling.
            dec_seq_length: Tokens of the decoder.
            device: Where the mask is made.

        Returns:
            Shape `[samples, decoder's tokens, encoder's tokens]`; True: not seen.
        """
        hidden = attention_mask.to(device)[:, None, :] < 0.5
        return hidden.expand(-1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that makes both sides' tokens, loss mask, labels and the three masks of a batch.

        Args:
            accelerator: An object with the `state` of the world.
            megatron_dataset_flag: Whether batches are those of Megatron's datasets.
        """
        if megatron_dataset_flag:
            return _t5_batch_of_megatron
        return partial(self._batch, start=int(getattr(self.args, "pad_token_id", 0)))

    @classmethod
    def _batch(cls, data_iterator: Iterator[Batch], start: int) -> tuple[torch.Tensor, ...]:
        batch = next(data_iterator)
        tokens, targets = batch["input_ids"].long(), batch["labels"].long()
        labels, loss_mask = _counted(targets)
        shifted = batch.get("decoder_input_ids")
        if shifted is None:
            shifted = torch.full_like(targets, start)
            shifted[:, 1:] = targets[:, :-1].masked_fill(targets[:, :-1] == IGNORED, start)
        real = batch.get("attention_mask", torch.ones_like(tokens))
        length, device = shifted.shape[1], tokens.device
        masks = (cls.attn_mask_postprocess(real), cls.get_decoder_mask(length, device))
        return tokens, shifted, loss_mask, labels, *masks, cls.get_enc_dec_mask(real, length, device)

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function of an iterator and a model that the schedules call."""

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            wide = [mask.unsqueeze(1) if mask.dim() == 3 else mask for mask in masks]
            if self.return_logits:
                return model(encoder, decoder, *wide), partial(self._loss_of_logits, labels, loss_mask)
            return model(encoder, decoder, *wide, lm_labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def _t5_batch_of_megatron(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    names = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask")
    encoder, decoder, loss_mask, labels, *masks = (batch[name] for name in names)
    return encoder.long(), decoder.long(), loss_mask, labels.long(), *(mask < 0.5 for mask in masks)


TRAIN_STEPS: dict[str, Callable[[Any, Any], AbstractTrainStep]] = {
    "gpt": GPTTrainStep,
    "bert": BertTrainStep,
    "t5": T5TrainStep,
}
"""The train steps by `model_type_name` of the arguments."""

__all__ = [
    "TRAIN_STEPS",
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronOutput",
    "T5TrainStep",
]
