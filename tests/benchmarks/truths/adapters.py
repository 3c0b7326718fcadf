"""Adapters on a frozen model, as fitcheck's `scripts/measure.py` and peft's `method_comparison` train them.

`peft_methods.json` has the adapters of peft's experiments, less what is peft's default (`adapter_config.json` in
`method_comparison/*/experiments` at commit 5d602fd). The configurations of models are in `tests/libraries/configs`.
That of FLUX.2-klein-base-4B is in diffusers, `scripts/convert_flux2_to_diffusers.py`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from truths.language_models import loss_of_tokens
from truths.loops import Loop, with_parameters
from truths.scores import NotBuilt

from autoaccum.sources.source import find_source

_CONFIGURATIONS: Final = Path(__file__).parents[2] / "libraries" / "configs"
_METHODS: Final = json.loads((Path(__file__).parent / "peft_methods.json").read_text(encoding="utf-8"))
_BUILD_SECONDS: Final = 25
"""Of CPU time for an adapter: some are made element by element on the host, which takes minutes."""
_FLUX_TARGETS: Final = (
    *("linear_in", "linear_out", "to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj"),
    *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
)
_FLUX_IMAGES, _FLUX_TOKENS, _FLUX_CHANNELS, _FLUX_SIDE = 14, 512, 128, 16
"""Of image-gen: images in training, tokens of a prompt, channels of latents, pixels of an image for each latent."""


def folder_of(model: str) -> Path:
    """The folder with the configuration of a model on the hub."""
    folder = _CONFIGURATIONS / model.rpartition("/")[2]
    if not folder.exists():
        raise NotBuilt(f"no configuration of {model} in tests/libraries/configs")
    return folder


def load_config(model: str) -> Any:
    """The configuration of a model on the hub, as transformers has it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder_of(model))


def fitcheck_loop(row: Mapping[str, str]) -> Loop:
    """A row of fitcheck: the model by name, with parameters and nothing more."""
    parameters = {
        "length": int(row["seq_len"]),
        "dtype": "float16",
        "attention": row["attn_impl"],
        "repeat_kv": True,
        "load_in_4bit": row["quantization"] == "nf4",
        "gradient_checkpointing": True,
        "lora": int(row["lora_rank"]),
        "lora_targets": row["lora_targets"],
    }
    workload = find_source(f"hf:{folder_of(row['model_id'])}", parameters).load()

    def batch() -> Any:
        tokens = workload.batch(int(row["batch_size"]))["input_ids"]
        return {"input_ids": tokens, "labels": tokens}

    return Loop(
        model=workload.build_model,
        batch=batch,
        forward=loss_of_tokens,
        optimizer=with_parameters(torch.optim.AdamW, lr=1e-4),
        loads=row["quantization"] == "nf4",
        keeps=False,
        resident_batch=True,
    )


def peft_loop(row: Mapping[str, str]) -> Loop:
    """A row of peft: its training step with the longest samples (MetaMathQA), or with images of one size (image-gen).

    What is not rebuilt is named: compiled models, and steps under autocast.
    """
    if "True" in (row["compile"], row["use_amp"]) or row["dtype"] != "bfloat16":
        raise NotBuilt("compiled, under autocast, or not in bf16")
    folder, of_images = folder_of(row["model_id"]), row["table"] == "image-gen"
    batch = int(row["batch_size"])
    workload = None if of_images else find_source(f"hf:{folder}", _padded(row)).load()
    return Loop(
        model=partial(_add_adapter, row, partial(build_flux, folder) if workload is None else workload.build_model),
        batch=_images if workload is None else partial(workload.batch, batch),
        forward=partial(_loss_of_images, batch) if of_images else _loss_of_answers,
        optimizer=partial(_clipping, row),
        with_values=False,
        keeps=True,
        resident_batch=of_images,
    )


def _padded(row: Mapping[str, str]) -> dict[str, Any]:
    checkpoints = row["gradient_checkpointing"] == "True"
    length = int(row["max_seq_length"])
    return {"length": length, "padding": True, "dtype": "bfloat16", "gradient_checkpointing": checkpoints}


def _add_adapter(row: Mapping[str, str], build: Any) -> nn.Module:
    """Build the model with the adapter of the row; its parameters must be as many as there, to 1 %."""
    from peft import get_peft_model
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    model = build()
    if row["peft_type"]:
        settings = _METHODS[row["table"]].get(row["experiment"])
        if settings is None:
            raise NotBuilt("its adapter_config.json is not in peft_methods.json")
        kind, settings = settings["peft_type"], {key: settings[key] for key in settings if key != "peft_type"}
        if settings.get("target_modules") == "FLUX":
            settings["target_modules"] = list(_FLUX_TARGETS)
        if row["table"] == "MetaMathQA":
            settings["task_type"] = "CAUSAL_LM"
        signal.signal(signal.SIGVTALRM, _give_up)
        signal.setitimer(signal.ITIMER_VIRTUAL, _BUILD_SECONDS)
        try:
            model = get_peft_model(model, PEFT_TYPE_TO_CONFIG_MAPPING[kind](**settings), autocast_adapter_dtype=True)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    measured = int(row["num_trainable_params"])
    freezes = row["optimizer"] == "lora-fa"  # It freezes half of them later.
    if abs(trained - measured) > 0.01 * measured and not freezes:
        raise NotBuilt(f"the installed peft trains {trained:,} parameters, and the measured one {measured:,}")
    built: nn.Module = model
    return built


def _give_up(*_: object) -> None:
    raise NotBuilt(f"it takes more than {_BUILD_SECONDS} s of CPU time to build the adapter")


def _clipping(row: Mapping[str, str], model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    if row["optimizer"] == "lora-fa":
        from peft.optimizers import create_lorafa_optimizer

        adapter = _METHODS[row["table"]][row["experiment"]]
        made = create_lorafa_optimizer(model, r=adapter["r"], lora_alpha=adapter["lora_alpha"], lr=1e-4)
    else:
        made = getattr(torch.optim, row["optimizer"])(parameters, lr=1e-4)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made.register_step_pre_hook(clip)
    if row["peft_type"] == "ADALORA":
        base: Any = model.base_model
        made.register_step_post_hook(lambda *_: base.update_and_allocate(1))  # Before `tinit` no rank is cut.
    optimizer: Optimizer = made
    return optimizer


def _loss_of_answers(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """With the count of tokens that peft's loop reads on the host, and keys and values that no one uses."""
    outputs = model(**batch, use_cache=True, num_items_in_batch=batch["labels"].numel())
    return outputs.loss, outputs


def build_flux(folder: Path) -> nn.Module:
    """The transformer of FLUX.2 with its layers recomputed in backward."""
    from diffusers import Flux2Transformer2DModel

    model: Any = Flux2Transformer2DModel.from_config(json.loads((folder / "config.json").read_text("utf-8")))
    model.to(torch.bfloat16).enable_gradient_checkpointing()
    built: nn.Module = model
    return built


def _images() -> tuple[Tensor, ...]:
    """The latents, prompts and places of their tokens of all images, which stay on the card."""
    side = 512 // _FLUX_SIDE
    width = json.loads((_CONFIGURATIONS / "FLUX.2-klein-base-4B" / "config.json").read_text("utf-8"))
    prompts = torch.zeros(_FLUX_IMAGES, _FLUX_TOKENS, width["joint_attention_dim"], dtype=torch.bfloat16)
    latents = torch.zeros(_FLUX_IMAGES, _FLUX_CHANNELS, side, side, dtype=torch.bfloat16)
    return latents, prompts, torch.zeros(_FLUX_IMAGES, _FLUX_TOKENS, 4, dtype=torch.long)


def _loss_of_images(size: int, model: nn.Module, cached: tuple[Tensor, ...]) -> tuple[Tensor, Any]:
    """The loss of flow matching, as `method_comparison/image-gen/run.py` writes it out."""
    chosen = torch.arange(size, device="cuda")
    latents, prompts, places = (each.index_select(0, chosen) for each in cached)
    side = latents.shape[-1]
    ids = torch.zeros(size, side * side, 4, dtype=torch.long).to("cuda")
    noise, times = torch.randn_like(latents), torch.zeros(size).to("cuda")
    sigmas = times.to(latents.dtype).view(-1, 1, 1, 1)
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    packed = noisy.reshape(size, _FLUX_CHANNELS, side * side).permute(0, 2, 1)
    outputs = model(
        hidden_states=packed,
        timestep=times / 1000,
        guidance=None,
        encoder_hidden_states=prompts,
        txt_ids=places,
        img_ids=ids,
        return_dict=False,
    )[0]
    unpacked = outputs.permute(0, 2, 1).reshape(latents.shape)
    target = noise - latents
    loss = F.mse_loss(unpacked.float(), target.float(), reduction="none").reshape(size, -1).mean(1).mean()
    return loss, (latents, prompts, places, ids, noise, noisy, packed, outputs, unpacked, target)
