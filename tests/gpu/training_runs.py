"""`python -m tests.gpu.training_runs -o runs.csv`: training runs on the first card, and the memory that each took.

A process for each run, of plain training code without autoaccum: LoRA and QLoRA of language models, whole language
models, image models. Their weights are random. Needs transformers, peft, bitsandbytes, timm and nvidia-ml-py.
`tests/benchmarks/accuracy.py` predicts the same runs, by this code on a simulated card.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from autoaccum.devices.meters import read_card
from autoaccum.devices.nvml import ask_nvml

CONFIGURATIONS: Final = Path(__file__).parents[1] / "libraries" / "configs"
LANGUAGE_MODELS: Final = ("TinyLlama-1.1B-Chat-v1.0", "SmolLM2-1.7B", "Qwen2.5-1.5B-Instruct")
IMAGE_MODELS: Final = (
    *("resnet50", "vgg16", "vit_base_patch16_224", "efficientnet_lite1", "legacy_seresnext26_32x4d", "convnext_tiny"),
    *("mobilenetv3_large_100", "densenet121", "mixer_b16_224"),
)
LORA_RANK: Final = 32
LORA_TARGETS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Run = dict[str, Any]
"""What one run trains: see `list_runs`."""
Step = Callable[[], tuple[Tensor, Any]]
"""One forward pass: the loss, and the outputs that stay alive until the update."""


def list_runs() -> Iterator[Run]:
    """Yield all runs: a kind, a model, and what differs from the others of its kind."""
    shapes = (("eager", 2, 1024), ("sdpa", 2, 1024), ("eager", 1, 2048), ("eager", 2, 512))
    for model in LANGUAGE_MODELS:
        for quantization, chosen in (("none", shapes), ("nf4", shapes[:3])):
            for attention, batch, length in chosen:
                sizes = {"attention": attention, "batch": batch, "length": length}
                yield {"kind": "lora", "model": model, "precision": "fp16", "quantization": quantization, **sizes}
    for attention in ("eager", "sdpa"):
        for model, precision, batch, length in (
            ("gpt2", "bf16", 8, 1024),
            ("bert-base-uncased", "fp32", 32, 512),
            ("TinyLlama-1.1B-Chat-v1.0", "bf16", 1, 1024),
            *([("t5-base", "fp32", 8, 256)] if attention == "eager" else []),
        ):
            sizes = {"attention": attention, "batch": batch, "length": length}
            yield {"kind": "language", "model": model, "precision": precision, **sizes}
    for model in IMAGE_MODELS:
        for precision, layout, benchmark in (("fp32", 0, 0), ("fp16", 1, 1), ("bf16", 1, 0), ("fp16", 0, 1)):
            settings = {"channels_last": layout, "benchmark": benchmark, "batch": 64}
            yield {"kind": "image", "model": model, "precision": precision, **settings}


def prepare(run: Run, checkpoints: Path) -> tuple[nn.Module, Step]:
    """Put the model and one batch on the card."""
    if run["kind"] == "image":
        return _prepare_image_model(run)
    model = _load_with_lora(run, checkpoints) if run["kind"] == "lora" else _build_language_model(run)
    model.config.use_cache = False
    model.train()
    tokens = torch.randint(0, 1000, (run["batch"], run["length"]), device="cuda")

    def step() -> tuple[Tensor, Any]:
        autocast = run["kind"] == "language" and run["precision"] != "fp32"
        with torch.autocast("cuda", DTYPES["bf16"], enabled=autocast):
            outputs = model(input_ids=tokens, labels=tokens)
        return outputs.loss, outputs

    return model, step


def _prepare_image_model(run: Run) -> tuple[nn.Module, Step]:
    import timm

    torch.backends.cudnn.benchmark = bool(run["benchmark"])
    layout = torch.channels_last if run["channels_last"] else torch.contiguous_format
    model = timm.create_model(run["model"]).to("cuda")
    model = model.to(memory_format=layout).train()
    shape = (run["batch"], *model.default_cfg["input_size"])
    images = torch.randn(shape, device="cuda").contiguous(memory_format=layout)
    labels = torch.randint(0, 1000, (run["batch"],), device="cuda")
    autocast = run["precision"] != "fp32"

    def step() -> tuple[Tensor, Any]:
        with torch.autocast("cuda", DTYPES[run["precision"]] if autocast else DTYPES["fp16"], enabled=autocast):
            outputs = model(images)
            return nn.functional.cross_entropy(outputs, labels), outputs

    return model, step


def _build_language_model(run: Run) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(CONFIGURATIONS / run["model"])
    kinds = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
    kind = kinds.get(config.model_type, transformers.AutoModelForCausalLM)
    return kind.from_config(config, attn_implementation=run["attention"]).float().to("cuda")


def _load_with_lora(run: Run, checkpoints: Path) -> Any:
    import peft
    import transformers

    four_bits = run["quantization"] == "nf4"
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float16
    )
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints / run["model"],
        dtype=torch.float16,
        device_map={"": 0},
        attn_implementation=run["attention"],
        **({"quantization_config": quantization} if four_bits else {}),
    )
    checkpointing = {"use_reentrant": False}
    if four_bits:
        model = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=checkpointing)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.enable_input_require_grads()
    adapters = peft.LoraConfig(r=LORA_RANK, task_type="CAUSAL_LM", target_modules=list(LORA_TARGETS))
    return peft.get_peft_model(model, adapters)  # The adapters are in fp32: `autocast_adapter_dtype`.


def save_checkpoint(model: str, checkpoints: Path) -> None:
    """Write a checkpoint of the model with random weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(CONFIGURATIONS / model)
    with torch.device("cuda"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config)
    made.half().save_pretrained(checkpoints / model)


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of what is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if run["kind"] == "image":
        return torch.optim.SGD(trained, lr=1e-4, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(trained, lr=1e-4)


def train(run: Run, checkpoints: Path, mark: Callable[[int, str], None] = lambda update, phase: None) -> None:
    """Train for three updates; `mark` hears of the number of the update and of the phase that has just ended."""
    model, step = prepare(run, checkpoints)
    optimizer = make_optimizer(run, model)
    mark(0, "load")
    for update in range(1, 4):
        optimizer.zero_grad()
        loss, outputs = step()
        mark(update, "forward")
        torch.autograd.backward(loss)
        mark(update, "backward")
        optimizer.step()
        mark(update, "optimizer")
        del loss, outputs


def measure(run: Run, checkpoints: Path) -> dict[str, Any]:
    """Train, and return the bytes that PyTorch and NVML counted: peaks of the second update, by phase."""
    measured: dict[str, Any] = {}
    torch.zeros(1, device="cuda")
    measured["context_at_start"] = _process_bytes() - torch.cuda.memory_reserved()

    def mark(update: int, phase: str) -> None:
        torch.cuda.synchronize()
        if update == 0:
            measured["loaded_allocated"], measured["loaded_reserved"] = _held()
        elif update == 2:
            measured[f"peak_{phase}"] = torch.cuda.max_memory_allocated()
            measured["peak_reserved"] = torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()

    train(run, checkpoints, mark)
    measured["context_at_end"] = _process_bytes() - torch.cuda.memory_reserved()
    return measured


def _held() -> tuple[int, int]:
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def _process_bytes() -> int:
    processes = ask_nvml(read_card(0).uuid).processes or ()
    return next(process.used_bytes or 0 for process in processes if process.pid == os.getpid())


def _run_apart(run: Run, checkpoints: Path, about: Mapping[str, str]) -> dict[str, Any]:
    """Measure in a process; a run that fails has the last line of its error in place of figures."""
    command = [sys.executable, "-m", "tests.gpu.training_runs", "--run", json.dumps(run), "--checkpoints", checkpoints]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    measured = {"error": lines[-1] if lines else "no output"} if done.returncode else json.loads(lines[-1])
    print(*run.values(), "failed" if done.returncode else "done", flush=True)
    return {**run, **measured, **about}


COLUMNS: Final = (
    *("kind", "model", "precision", "quantization", "attention", "channels_last", "benchmark", "batch", "length"),
    *("context_at_start", "context_at_end", "loaded_allocated", "loaded_reserved"),
    *("peak_forward", "peak_backward", "peak_optimizer", "peak_reserved", "error"),
    *("card", "driver", "torch", "transformers", "peft", "bitsandbytes", "timm"),
)


def main() -> None:
    """Measure all runs, some at a time, into a table of bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs.csv"))
    parser.add_argument("--at-once", type=int, default=4, help="processes at a time, which share the card's memory")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoints", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(measure(options.run, options.checkpoints)))
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        for model in LANGUAGE_MODELS:
            save_checkpoint(model, Path(folder))
        torch.cuda.empty_cache()
        rows = list(pool.map(lambda run: _run_apart(run, Path(folder), _describe()), list_runs()))
    with options.output.open("w", newline="", encoding="utf-8") as lines:
        table = csv.DictWriter(lines, COLUMNS, restval="")
        table.writeheader()
        table.writerows(rows)


def _describe() -> dict[str, str]:
    libraries = {name: version(name) for name in ("torch", "transformers", "peft", "bitsandbytes", "timm")}
    card = read_card(0)
    return {"card": card.name, "driver": ask_nvml(card.uuid).driver or "", **libraries}


if __name__ == "__main__":
    main()
