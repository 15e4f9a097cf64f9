"""The train steps of GPT, BERT and T5: the batch, the forward pass and the loss of a micro-batch in Megatron-LM.

Batches have the format of transformers models: `input_ids`, `attention_mask` (1 for a token, 0 for padding) and
`labels` (-100 for tokens without a loss). The loss is therefore the same as when training without Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from notebook_accelerate.strategies.accelerator_properties import HasState
from notebook_accelerate.strategies.megatron.megatron_setup import active_plugin

Batch = dict[str, torch.Tensor]
IGNORED = -100
"""The label of tokens that do not contribute to the loss."""


@dataclass
class MegatronOutput:
    """A model's output for a batch. Like transformers' outputs, it can be accessed by name or by position."""

    loss: torch.Tensor
    """The loss, averaged over micro-batches and over the ranks that read different data."""
    logits: torch.Tensor | None = None
    """Logits of shape `[samples, tokens, vocabulary]` or `[samples, labels]`, or None if `return_logits` is not set."""

    def __getitem__(self, key: int | str) -> torch.Tensor | None:
        if isinstance(key, str):
            return getattr(self, key)  # type: ignore[no-any-return]
        return [value for value in (self.loss, self.logits) if value is not None][key]


def masked_sum(losses: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the losses of unmasked tokens.

    Args:
        losses: Losses of shape `[samples, tokens]`.
        mask: A tensor of the same shape with 1 for each token that contributes to the loss, and 0 otherwise.

    Returns:
        The sum, and the number of tokens that contribute to it, as an integer tensor.
    """
    mask = mask.float()
    return (losses.float() * mask).sum(), mask.sum().to(torch.int)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return losses of shape `[samples, tokens]` for logits whose vocabulary is split across ranks."""
    parallel: Any = import_module("megatron.core.tensor_parallel")
    sequence_first = logits.float().transpose(0, 1).contiguous()
    return parallel.vocab_parallel_cross_entropy(sequence_first, labels.transpose(0, 1).contiguous()).transpose(0, 1)  # type: ignore[no-any-return]


def whole_vocabulary(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Return logits for the whole vocabulary, without padding; all ranks that share tensors must call this.

    Args:
        logits: Logits of shape `[..., vocabulary of this rank]`.
        size: The number of tokens in the vocabulary.
    """
    parallel: Any = import_module("megatron.core.tensor_parallel")
    return parallel.gather_from_tensor_model_parallel_region(logits.detach())[..., :size]  # type: ignore[no-any-return]


def causal_mask(length: int, device: torch.device) -> torch.Tensor:
    """Return a mask that lets each token attend to itself and to earlier tokens.

    Args:
        length: The number of tokens.
        device: The device of the mask.

    Returns:
        A mask of shape `[1, 1, tokens, tokens]`. Masked positions are True.
    """
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def vocabulary_size(args: Any) -> int:
    """Return the number of tokens in the vocabulary without its padding.

    Args:
        args: Megatron's arguments.
    """
    return int(getattr(args, "orig_vocab_size", 0) or args.padded_vocab_size)


def _labels_and_mask(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels with ignored ones replaced by a valid token, and a mask of the labels that count."""
    mask = labels != IGNORED
    return labels.masked_fill(~mask, 0), mask


class AbstractTrainStep:
    """The base class of train steps; pass a subclass as `custom_train_step_class`.

    The methods raise NotImplementedError. A subclass overrides them and sets `forward_step`.

    Args:
        name: The name of the train step.
    """

    forward_step: Callable[..., Any]
    """The function that runs a micro-batch. Subclasses set it to the result of `get_forward_step_func`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model_output_class: type[MegatronOutput] | None = None

    def get_batch_func(self, accelerator: HasState, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that reads the next micro-batch from an iterator and returns the model's inputs.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
            megatron_dataset_flag: Whether batches come from Megatron's datasets.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define get_batch_func(accelerator, megatron_dataset_flag)"
        )

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function that runs the model on the next micro-batch of an iterator.

        The function takes the iterator and the model, and returns the model's output and a second function. The second
        function takes the output, and returns the loss and a dict of values to average over ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_forward_step_func()")

    def get_loss_func(self, accelerator: HasState) -> Callable[..., Any]:
        """Return a function that computes the loss from a model's output.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define get_loss_func(accelerator)")


class _TrainStep(AbstractTrainStep):
    """The base class of the train steps of GPT, BERT and T5."""

    def __init__(self, name: str, accelerator: HasState, args: Any) -> None:
        super().__init__(name)
        self.args = args
        self.plugin = active_plugin(accelerator.state)
        self.return_logits = bool(self.plugin.return_logits)
        self.get_batch = self.plugin.custom_get_batch_function or self.get_batch_func(
            accelerator, self.plugin.megatron_dataset_flag
        )
        if getattr(args, "model_return_dict", False) or self.return_logits:
            self.model_output_class = MegatronOutput


class _TokenTrainStep(_TrainStep):
    """The base class of train steps that compute one loss per token."""

    def __init__(self, name: str, accelerator: HasState, args: Any) -> None:
        super().__init__(name, accelerator, args)
        self.loss_func = self.plugin.custom_loss_function or self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_loss_func(self, accelerator: HasState) -> Callable[..., Any]:
        """Return a function that sums the losses of tokens.

        The function takes the loss mask and the losses. It returns the sum, the number of tokens, and a dict with both,
        which the engine uses to compute the average.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
        """

        def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, ...]:
            total, count = masked_sum(output_tensor, loss_mask)
            return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}

        return loss_func

    def _loss_of_logits(self, labels: torch.Tensor, loss_mask: torch.Tensor, logits: torch.Tensor) -> tuple[Any, ...]:
        *loss, reported = self.loss_func(loss_mask, _cross_entropy(logits, labels))
        return *loss, {**reported, "logits": whole_vocabulary(logits, vocabulary_size(self.args))}


class GPTTrainStep(_TokenTrainStep):
    """The train step of a decoder, which predicts each token from the ones before it.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: HasState, args: Any) -> None:
        super().__init__("GPTTrainStep", accelerator, args)

    def get_batch_func(self, accelerator: HasState, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that returns the tokens, labels, loss mask, attention mask and positions of a micro-batch.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
            megatron_dataset_flag: Whether batches come from Megatron's datasets, which contain all five.
        """
        return _gpt_dataset_batch if megatron_dataset_flag else _gpt_batch

    def get_forward_step_func(self) -> Callable[..., Any]:

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            tokens, labels, loss_mask, attention_mask, positions = self.get_batch(data_iterator)
            if self.return_logits:
                return model(tokens, positions, attention_mask), partial(self._loss_of_logits, labels, loss_mask)
            return model(tokens, positions, attention_mask, labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def _gpt_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    tokens = batch["input_ids"].long()
    mask = batch.get("attention_mask")
    targets = batch["labels"].long() if "labels" in batch else tokens
    if "labels" not in batch and mask is not None:
        targets = targets.masked_fill(mask == 0, IGNORED)
    following = torch.full_like(targets, IGNORED)
    following[:, :-1] = targets[:, 1:]
    labels, loss_mask = _labels_and_mask(following)
    length = tokens.shape[1]
    masked = causal_mask(length, tokens.device)
    if mask is not None:
        masked = masked | (mask == 0)[:, None, None, :]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    return tokens, labels, loss_mask, masked, positions


def _gpt_dataset_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    masked = batch.get("attention_mask")
    if masked is None:
        masked = causal_mask(batch["tokens"].shape[1], batch["tokens"].device)
    return batch["tokens"].long(), batch["labels"].long(), batch["loss_mask"], masked, batch["position_ids"]


class BertTrainStep(_TrainStep):
    """The train step of an encoder, which predicts masked tokens and sentence order, or labels of whole samples.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: HasState, args: Any) -> None:
        super().__init__("BertTrainStep", accelerator, args)
        pretraining = getattr(args, "pretraining_flag", True)
        self.loss_func = self.plugin.custom_loss_function or self.get_loss_func(
            accelerator, pretraining, getattr(args, "num_labels", 2)
        )
        self.forward_step = self.get_forward_step_func(pretraining, getattr(args, "bert_binary_head", False))

    def get_batch_func(self, accelerator: HasState, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that reads a micro-batch.

        The function returns the tokens, their types, the sentence order, the loss mask, the labels and the padding
        mask.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
            megatron_dataset_flag: Whether batches come from Megatron's datasets.
        """
        return _bert_dataset_batch if megatron_dataset_flag else _bert_batch

    def get_loss_func(  # type: ignore[override]
        self, accelerator: HasState, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Any]:
        """Return a function that computes the loss from the model's output.

        In pretraining, the function takes the loss mask, the sentence order and the output. Otherwise, it takes the
        labels and the output.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
            pretraining_flag: Whether the model predicts masked tokens. If False, it predicts a label for each sample.
            num_labels: The number of labels. If 1, the model predicts a number instead of a label.
        """

        def pretrain(
            loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output_tensor: Any
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            losses, order_logits = output_tensor
            total, count = masked_sum(losses, loss_mask)
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
            reported = {"loss": loss.detach().clone()}  # Clone the loss, because the schedule divides it in place.
            return loss, {**reported, "logits": logits.detach()} if self.return_logits else reported

        return pretrain if pretraining_flag else classify

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """See `AbstractTrainStep.get_forward_step_func`.

        Args:
            pretraining_flag: Whether the model predicts masked tokens. If False, it predicts a label for each sample.
            bert_binary_head: Whether the model also predicts the order of sentences.
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
    counted, mask = _labels_and_mask(labels.long())
    return tokens, types, None if order is None else order.view(-1).long(), mask, counted, padding


def _bert_dataset_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    names = ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    tokens, types, order, mask, labels, padding = (batch[name] for name in names)
    return tokens.long(), types.long(), order.long(), mask, labels.long(), padding.long()


class T5TrainStep(_TokenTrainStep):
    """The train step of an encoder with a decoder.

    Args:
        accelerator: The Accelerator, or another object that has its `state`.
        args: Megatron's arguments.
    """

    def __init__(self, accelerator: HasState, args: Any) -> None:
        super().__init__("T5TrainStep", accelerator, args)

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask that keeps the tokens of a sample from attending to padding.

        Args:
            attention_mask: A mask of shape `[samples, tokens]`, with 1 for a token and 0 for padding.

        Returns:
            A mask of shape `[samples, tokens, tokens]`. Masked positions are True.
        """
        return (attention_mask[:, None, :] * attention_mask[:, :, None]) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask that lets each token of the decoder attend to itself and to earlier tokens.

        Args:
            seq_length: The number of tokens in the decoder.
            device: The device of the mask.

        Returns:
            A mask of shape `[1, tokens, tokens]`. Masked positions are True.
        """
        return causal_mask(seq_length, device)[0]

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask that keeps the decoder from attending to the encoder's padding.

        Args:
            attention_mask: The encoder's mask, of shape `[samples, encoder's tokens]`, with 1 for a token and 0 for
                padding.
            dec_seq_length: The number of tokens in the decoder.
            device: The device of the mask.

        Returns:
            A mask of shape `[samples, decoder's tokens, encoder's tokens]`. Masked positions are True.
        """
        hidden = attention_mask.to(device)[:, None, :] < 0.5
        return hidden.expand(-1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: HasState, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function that reads a micro-batch.

        The function returns the tokens of the encoder and of the decoder, the loss mask, the labels and the three
        attention masks.

        Args:
            accelerator: The Accelerator, or another object that has its `state`.
            megatron_dataset_flag: Whether batches come from Megatron's datasets.
        """
        if megatron_dataset_flag:
            return _t5_dataset_batch
        return partial(self._batch, start=int(getattr(self.args, "pad_token_id", 0)))

    @classmethod
    def _batch(cls, data_iterator: Iterator[Batch], start: int) -> tuple[torch.Tensor, ...]:
        batch = next(data_iterator)
        tokens, targets = batch["input_ids"].long(), batch["labels"].long()
        labels, loss_mask = _labels_and_mask(targets)
        decoder = batch.get("decoder_input_ids")
        if decoder is None:
            decoder = torch.full_like(targets, start)
            decoder[:, 1:] = targets[:, :-1].masked_fill(targets[:, :-1] == IGNORED, start)
        mask = batch.get("attention_mask", torch.ones_like(tokens))
        length, device = decoder.shape[1], tokens.device
        masks = (cls.attn_mask_postprocess(mask), cls.get_decoder_mask(length, device))
        return tokens, decoder, loss_mask, labels, *masks, cls.get_enc_dec_mask(mask, length, device)

    def get_forward_step_func(self) -> Callable[..., Any]:

        def forward_step(data_iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            encoder, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            masks = [mask.unsqueeze(1) if mask.dim() == 3 else mask for mask in masks]
            if self.return_logits:
                return model(encoder, decoder, *masks), partial(self._loss_of_logits, labels, loss_mask)
            return model(encoder, decoder, *masks, lm_labels=labels), partial(self.loss_func, loss_mask)

        return forward_step


def _t5_dataset_batch(data_iterator: Iterator[Batch]) -> tuple[torch.Tensor, ...]:
    batch = next(data_iterator)
    names = ("text_enc", "text_dec", "loss_mask", "labels", "enc_mask", "dec_mask", "enc_dec_mask")
    encoder, decoder, loss_mask, labels, *masks = (batch[name] for name in names)
    return encoder.long(), decoder.long(), loss_mask, labels.long(), *(mask < 0.5 for mask in masks)


TRAIN_STEPS: dict[str, Callable[[HasState, Any], AbstractTrainStep]] = {
    "gpt": GPTTrainStep,
    "bert": BertTrainStep,
    "t5": T5TrainStep,
}
"""The train steps, by Megatron's argument `model_type_name`."""
