"""Training with transformers, trl, peft and diffusers; models loaded with device maps."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.clients.programs.tiny import (
    TIED_MODELS,
    language_model,
    logged_losses,
    sentence,
    sequence_classifier,
    shared_folder,
    tied_config,
    tokenizer,
    weight_sums,
)


def _trainer(folder: str, data: Any, **options: Any) -> Any:
    """Return a Trainer that evaluates on the first rows of ``data``."""
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    words = tokenizer()
    defaults = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "report_to": "none", "seed": 1, "save_strategy": "no",
    }  # fmt: skip
    settings = TrainingArguments(output_dir=folder, **{**defaults, **options})
    collate = DataCollatorForLanguageModeling(words, mlm=False)
    rows = [words(sentence(number)) for number in range(12)]
    return Trainer(language_model(), settings, collate, train_dataset=data, eval_dataset=rows)


def _trained(folder: str, data: Any, **options: Any) -> dict[str, Any]:
    """Train with a Trainer. Return the losses, the weights and the number of steps."""
    made = _trainer(folder, data, **options)
    made.train()
    return {"losses": logged_losses(made), "weights": weight_sums(made.model), "steps": made.state.global_step}


def _rows(lengths: Sequence[int] = (8,)) -> list[Any]:
    words = tokenizer()
    return [words(sentence(number, lengths[number % len(lengths)])) for number in range(48)]


def trainer() -> dict[str, Any]:
    """Train, evaluate, save, and resume from the first epoch's checkpoint."""
    folder = shared_folder()
    options = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    made = _trainer(folder, _rows(), **options)
    made.train()
    found = {"losses": logged_losses(made), "evaluated": made.evaluate()["eval_loss"]}
    found["weights"] = weight_sums(made.model)
    again = _trainer(folder, _rows(), **options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{made.state.max_steps // 2}")
    return {**found, "resumed": weight_sums(again.model), "steps": again.state.global_step}


def trainer_accumulation() -> dict[str, Any]:
    """Train with accumulated gradients."""
    return _trained(shared_folder(), _rows(), gradient_accumulation_steps=2)


def trainer_bf16() -> dict[str, Any]:
    """Train in mixed precision."""
    return _trained(shared_folder(), _rows(), bf16=True, use_cpu=True)


def trainer_workers() -> dict[str, Any]:
    """Train on batches that worker processes load."""
    return _trained(shared_folder(), _rows(), dataloader_num_workers=1, num_train_epochs=1)


def trainer_group_by_length() -> dict[str, Any]:
    """Train on batches whose samples have similar lengths."""
    rows = _rows(range(3, 10))
    return _trained(shared_folder(), rows, train_sampling_strategy="group_by_length")


def trainer_sharded_stream() -> dict[str, Any]:
    """Train on an iterable dataset with enough shards for four ranks."""
    from datasets import Dataset

    words = tokenizer()
    rows = Dataset.from_list([dict(words(sentence(number))) for number in range(48)])
    return _trained(shared_folder(), rows.to_iterable_dataset(num_shards=4), max_steps=10)


def _settings_of_trl(kind: Any, **options: Any) -> Any:
    """Return the settings for one of trl's trainers."""
    return kind(
        output_dir=shared_folder(), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2,
        logging_steps=1, report_to="none", save_strategy="no", bf16=False, seed=1, **options,
    )  # fmt: skip


def _trained_by_trl(made: Any) -> dict[str, Any]:
    """Train with one of trl's trainers, and evaluate if there are rows for it. Return the losses, weights and steps."""
    made.train()
    found = {"losses": logged_losses(made), "weights": weight_sums(made.model), "steps": made.state.global_step}
    return {**found, "evaluated": made.evaluate()["eval_loss"]} if made.eval_dataset is not None else found


def _preferences(count: int = 30) -> Any:
    """Return rows with a prompt, a chosen answer and a rejected one. The last batch of each rank is short."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {"prompt": sentence(number, 3), "chosen": sentence(number + 1, 3), "rejected": sentence(number + 2, 3)}
            for number in range(count)
        ]
    )


def sft() -> dict[str, Any]:
    """Train all weights with trl's SFTTrainer; evaluate with a short last batch."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": [sentence(number, 4 + number % 5) for number in range(30)]})
    return _trained_by_trl(
        SFTTrainer(
            language_model(), _settings_of_trl(SFTConfig, max_length=16), train_dataset=data,
            eval_dataset=data.select(range(10)), processing_class=tokenizer(),
        )
    )  # fmt: skip


def reward() -> dict[str, Any]:
    """Train a classifier of answers with trl's RewardTrainer; evaluate with a short last batch."""
    from trl import RewardConfig, RewardTrainer

    data = _preferences()
    return _trained_by_trl(
        RewardTrainer(
            sequence_classifier(), _settings_of_trl(RewardConfig, max_length=16), train_dataset=data,
            eval_dataset=data.select(range(10)), processing_class=tokenizer(),
        )
    )  # fmt: skip


def kto() -> dict[str, Any]:
    """Train with trl's KTOTrainer; evaluate with a short last batch."""
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = [
        {"prompt": sentence(number, 3), "completion": sentence(number + 1, 3), "label": number % 3 > 0}
        for number in range(30)
    ]
    data = Dataset.from_list(rows)
    return _trained_by_trl(
        KTOTrainer(
            language_model(), language_model(), _settings_of_trl(KTOConfig, max_length=16), train_dataset=data,
            eval_dataset=data.select(range(10)), processing_class=tokenizer(),
        )
    )  # fmt: skip


def sft_lora() -> dict[str, Any]:
    """Train a peft LoRA with trl's SFTTrainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": [sentence(number) for number in range(32)]})
    settings = SFTConfig(
        output_dir=shared_folder(), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=1e-2,
        logging_steps=1, report_to="none", save_strategy="no", max_length=16, bf16=False, seed=1,
    )  # fmt: skip
    torch.manual_seed(0)
    made = SFTTrainer(
        language_model(), settings, train_dataset=data, processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True),
    )  # fmt: skip
    made.train()
    return {"losses": logged_losses(made), "weights": weight_sums(made.model), "steps": made.state.global_step}


def dpo() -> dict[str, Any]:
    """Train with trl's DPOTrainer; evaluate with a short last batch."""
    from trl import DPOConfig, DPOTrainer

    data = _preferences()
    return _trained_by_trl(
        DPOTrainer(
            language_model(), language_model(), _settings_of_trl(DPOConfig), train_dataset=data,
            eval_dataset=data.select(range(10)), processing_class=tokenizer(),
        )
    )  # fmt: skip


def peft_loop() -> dict[str, Any]:
    """Train a LoRA in an Accelerator loop, as peft's examples do. Save it and load it again."""
    from accelerate import Accelerator
    from peft import LoraConfig, PeftModel, get_peft_model

    folder = shared_folder()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = get_peft_model(
        language_model(), LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    words = tokenizer()
    rows: Any = [torch.tensor(words(sentence(number))["input_ids"]) for number in range(32)]
    loader = DataLoader(rows, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
        accelerator.log({"loss": losses[-1]}, step=len(losses))
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(folder)
    accelerator.wait_for_everyone()
    loaded = PeftModel.from_pretrained(language_model(), folder)
    return {"losses": losses, "weights": weight_sums(model), "loaded": weight_sums(loaded), "steps": len(losses)}


def _denoiser() -> tuple[Any, Any, Any, Any]:
    """Return a diffusers model, its optimizer and schedule, and images."""
    from diffusers import UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup

    torch.manual_seed(0)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    images: Any = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 16)
    return model, optimizer, schedule, DataLoader(images, batch_size=4)


def ddpm() -> dict[str, Any]:
    """Train like diffusers' DDPM example, with accumulation, EMA, a schedule and saved states, and load one of them."""
    from accelerate import Accelerator
    from diffusers import DDPMScheduler
    from diffusers.training_utils import EMAModel
    from tqdm.auto import tqdm

    folder = shared_folder()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, schedule, loader = accelerator.prepare(*_denoiser())
    noise = DDPMScheduler(num_train_timesteps=20)
    ema = EMAModel(accelerator.unwrap_model(model).parameters())
    accelerator.register_for_checkpointing(ema)
    losses: list[float] = []
    steps = 0
    generator = torch.Generator().manual_seed(2)
    for epoch in range(2):
        for clean in tqdm(loader, desc=f"Epoch {epoch}", disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                added = torch.randn(clean.shape, generator=generator)
                times = torch.randint(0, 20, (len(clean),), generator=generator)
                predicted = model(noise.add_noise(clean, added, times), times, return_dict=False)[0]
                loss = torch.nn.functional.mse_loss(predicted, added)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                steps += 1
                accelerator.log({"loss": loss.item(), "lr": schedule.get_last_lr()[0]}, step=steps)
            losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.save_state(f"{folder}/epoch-{epoch}")
    found = {"losses": losses, "weights": weight_sums(model), "rate": schedule.get_last_lr(), "steps": steps}
    averages = [each.double().sum().item() for each in ema.shadow_params]
    accelerator.load_state(f"{folder}/epoch-0")
    return {**found, "averages": averages, "loaded": weight_sums(model), "loaded rate": schedule.get_last_lr()}


def tied_weights() -> dict[str, Any]:
    """Use `save_model` on models with tied weights. Load each model twice: whole, and without its head."""
    import transformers
    from accelerate import Accelerator
    from safetensors import safe_open

    folder = shared_folder()
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for name, (whole, base) in TIED_MODELS.items():
        torch.manual_seed(0)
        kind = getattr(transformers, whole)
        model = kind(tied_config(name))
        place = f"{folder}/{name}"
        accelerator.save_model(accelerator.prepare(model), place)
        if accelerator.is_main_process:
            model.config.save_pretrained(place)
        accelerator.wait_for_everyone()
        with safe_open(f"{place}/model.safetensors", "pt") as file:
            found[f"{name}: names"] = sorted(file.keys())
        loaded, body = kind.from_pretrained(place), getattr(transformers, base).from_pretrained(place)
        found[f"{name}: weights"] = weight_sums(loaded)
        found[f"{name}: same"] = weight_sums(loaded) == weight_sums(model)
        embedding = body.get_input_embeddings().weight
        found[f"{name}: same embeddings"] = torch.equal(embedding, model.get_input_embeddings().weight)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folder)
    return found


def device_maps() -> dict[str, Any]:
    """Load a model with every kind of device map."""
    from accelerate import PartialState

    folder = shared_folder()
    state = PartialState()
    model = language_model(4)
    model.save_pretrained(folder, max_shard_size="20kB")  # Only rank 0 writes.
    state.wait_for_everyone()
    batch = torch.arange(3, 11).reshape(1, 8)
    found: dict[str, Any] = {"whole": model(batch).logits.double().sum().item()}
    split = {f"transformer.h.{number}": "cpu" if number < 2 else "disk" for number in range(4)}
    split |= dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"), "cpu")
    maps: dict[str, dict[str, Any]] = {
        "auto": {"device_map": "auto"},
        "balanced": {"device_map": "balanced"},
        "balanced_low_0": {"device_map": "balanced_low_0"},
        "sequential": {"device_map": "sequential"},
        "device": {"device_map": "cpu"},
        "torch.device": {"device_map": torch.device("cpu")},
        "everything": {"device_map": {"": "cpu"}},
        "limited": {
            "device_map": "auto",
            "max_memory": {"cpu": "30KB"},
            "offload_folder": f"{folder}/limited-{state.process_index}",
        },
        "disk": {"device_map": split, "offload_folder": f"{folder}/disk-{state.process_index}"},
    }
    for name, options in maps.items():
        loaded = type(model).from_pretrained(folder, **options)
        found[name] = loaded(batch).logits.double().sum().item()
        found[f"{name}: map"] = {key: str(value) for key, value in getattr(loaded, "hf_device_map", {}).items()}
    return found
