"""The tables of measured runs: what their rows say, how each run is predicted, and how the two compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from truths import models
from truths.language_models import loss_of_tokens
from truths.loops import Loop, predict_loop
from truths.scores import Case, Predicted, UnknownModel, Verdict
from truths.trainer import trainer_loop

from autoaccum.simulation.cards import find_card
from autoaccum.sources.source import find_source
from autoaccum.units import MIB

_GIB: Final = 1 << 30
_ZERO_GRAD: Final = ("start", "before backward", "after step")
_CONFIGURATIONS: Final = Path(__file__).parents[2] / "libraries" / "configs"
_RTX3090_BYTES: Final = 24_268 << 20
"""The memory that PyTorch reported of the measured card."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One file of measurements.

    Attributes:
        name: The file's, without its ending.
        about: What was measured, as the heading of its scores.
        model: The model of a row.
        batches: The batches of a row.
        predict: One prediction for a row with one of its batches; raises UnknownModel.
        judge: Compares a row with the predictions of its batches.
    """

    name: str
    about: str
    model: Callable[[Mapping[str, str]], str]
    batches: Callable[[Mapping[str, str]], tuple[int, ...]]
    predict: Callable[[Case, int], Predicted]
    judge: Callable[[Case, Sequence[Predicted]], Verdict]

    def read(self, rows: Sequence[Mapping[str, str]]) -> list[Case]:
        """One case for each row."""
        return [Case(table=self.name, row=row, model=self.model(row), batches=self.batches(row)) for row in rows]


def _predict_timm(case: Case, batch: int) -> Predicted:
    models.check_timm(case.model)
    loop = Loop(
        model=partial(models.build_timm, case.model),
        batch=partial(models.images, batch, int(case.row["img_size"])),
        forward=models.loss_of_images,
        optimizer=partial(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=False),
        precision=torch.float16,
        set_to_none=False,
        keeps=False,
        resident_batch=True,
        channels_last=case.row["channels_last"] == "1",
        benchmark=True,
        updates=2,
    )
    card = replace(find_card("rtx3090"), total_bytes=_RTX3090_BYTES)
    return predict_loop(loop, card, batch, eager=True)  # torch 1.12 with CUDA 11.3: neither loads kernels late.


def _judge_timm(case: Case, predicted: Sequence[Predicted]) -> Verdict:
    """Return whether the two batches of the bracket, where given, are predicted to behave as measured."""
    trains = {run.batch: run.trains for run in predicted}
    fits, fails = case.row["fits"], case.row["fails"]
    return Verdict(
        would_crash=trains[int(fails)] if fails else None,
        too_timid=not trains[int(fits)] if fits else None,
        complete=bool(fits and fails),
    )


def _predict_xmem(case: Case, batch: int) -> Predicted:
    """Where the table does not say when gradients were cleared, the run behaved like `start`."""
    subject = {"CNN": models.find_torchvision, "Transformer": models.find_language_model}[case.row["family"]]
    model, make_batch, forward = subject(case.model)
    loop = Loop(
        model=model,
        batch=partial(make_batch, batch),
        forward=forward,
        optimizer=partial(getattr(torch.optim, case.row["optimizer"]), lr=1e-3),
        zero_grad=_ZERO_GRAD[int(case.row["zero_grad_position"] or 0)],
    )
    return predict_loop(loop, replace(find_card(case.row["gpu"]), total_bytes=int(case.row["gpu_total_bytes"])), batch)


def _judge_xmem(case: Case, predicted: Sequence[Predicted]) -> Verdict:
    """The least against both caps; the peak against the process's growth, where the card did not cut that short.

    What grew is what the allocator held on the card and the kernels that were loaded. A run that found no memory on the
    card must be predicted to find none there, and none at the caps it was tried with.
    """
    (run,) = predicted
    went, failed = (int(case.row[cap]) if case.row[cap] else None for cap in ("min_cap_ok_bytes", "max_cap_oom_bytes"))
    if case.row["real_oom"] == "true":
        return Verdict(would_crash=run.trains or (failed is not None and run.min_budget_bytes <= failed))
    grown_bytes, ground_bytes = run.shown_bytes + run.modules_bytes, int(case.row["ground_bytes"])
    contradicts = went is not None and failed is not None and went <= failed
    return Verdict(
        would_crash=None if failed is None or contradicts else run.min_budget_bytes <= failed,
        too_timid=None if went is None or contradicts else run.min_budget_bytes > went,
        complete=went is not None and failed is not None and not contradicts,
        peak_error=grown_bytes / ground_bytes - 1,
    )


def _predict_bert(case: Case, batch: int) -> Predicted:
    loop = trainer_loop(
        batch=batch,
        length=int(case.row["seq_len"]),
        micro_batches=micro_batches(case.row["setting"]),
        checkpoints="grad ckpt" in case.row["setting"],
        half="fp16" in case.row["dtype"],
        optimizer=case.row["optimizer"],
    )
    return predict_loop(loop, find_card("v100-16gb"), batch, eager=True)


def _judge_bert(case: Case, predicted: Sequence[Predicted]) -> Verdict:
    """Return the memory of a whole process after training, by the documentation's page on one card."""
    (run,) = predicted
    held_bytes = run.shown_bytes + run.start_bytes + run.modules_bytes
    measured_bytes = round(float(case.row["process_gib"]) * _GIB)
    return Verdict(
        too_timid=not run.trains,
        peak_error=held_bytes / measured_bytes - 1,
    )


def _predict_lora(case: Case, batch: int) -> Predicted:
    """As the model by name, with parameters and nothing more."""
    row, folder = case.row, _CONFIGURATIONS / case.model.rpartition("/")[2]
    if not folder.exists():
        raise UnknownModel(case.model)
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
    workload = find_source(f"hf:{folder}", parameters).load()
    loop = Loop(
        model=workload.build_model,
        batch=partial(workload.batch, batch),
        forward=loss_of_tokens,
        optimizer=torch.optim.AdamW,
        keeps=False,
        resident_batch=True,
    )
    return predict_loop(loop, find_card("t4"), batch)


def _judge_lora(case: Case, predicted: Sequence[Predicted]) -> Verdict:
    """Both peaks that PyTorch counted; every row trained."""
    (run,) = predicted
    return Verdict(
        too_timid=not run.trains,
        peak_error=run.shown_bytes / (float(case.row["peak_reserved_mib"]) * MIB) - 1,
        allocated_error=run.allocated_bytes / (float(case.row["peak_allocated_mib"]) * MIB) - 1,
    )


def micro_batches(setting: str) -> int:
    """The number of micro-batches per update.

    >>> micro_batches("fp16 + grad-accum 4 + grad ckpt"), micro_batches("vanilla")
    (4, 1)
    """
    found = re.search(r"grad-accum (\d+)", setting)
    return int(found[1]) if found else 1


RTX3090: Final = Table(
    name="timm_rtx3090",
    about="RTX 3090, timm, fp16 autocast: does the batch that trained fit, and the one that did not, not",
    model=lambda row: row["model"],
    batches=lambda row: tuple(int(row[side]) for side in ("fits", "fails") if row[side]),
    predict=_predict_timm,
    judge=_judge_timm,
)
RTX4060: Final = Table(
    name="xmem_rtx4060",
    about="RTX 4060, fp32: does the least that is needed lie between the measured caps, and how far off is the peak",
    model=lambda row: row["model"],
    batches=lambda row: (int(row["batch"]),),
    predict=_predict_xmem,
    judge=_judge_xmem,
)
V100: Final = Table(
    name="bert_large_v100",
    about="V100 16 GB, bert-large-uncased fine-tuned by the Trainer: the whole process",
    model=lambda row: "bert-large-uncased",
    batches=lambda row: (int(row["batch"]),),
    predict=_predict_bert,
    judge=_judge_bert,
)
T4: Final = Table(
    name="fitcheck_t4_dev",
    about="T4, LoRA and QLoRA: how far off are the peaks of reserved and of allocated memory",
    model=lambda row: row["model_id"],
    batches=lambda row: (int(row["batch_size"]),),
    predict=_predict_lora,
    judge=_judge_lora,
)
TABLES: Final = {table.name: table for table in (RTX3090, RTX4060, V100, T4)}
