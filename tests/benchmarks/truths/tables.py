"""The tables of measured runs: what their rows say, how each run is predicted, and what is compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from truths import models
from truths.adapters import fitcheck_loop, load_config, peft_loop
from truths.language_models import configuration_of
from truths.loops import Loop, predict_loop, with_parameters
from truths.measured_runs import card_of_run, predict_run, read_run
from truths.own_runs import loop_of_run
from truths.peers import accelerate_mib, fitcheck_mib
from truths.scores import FITS, UNKNOWN_LENGTHS, Predicted, Score, class_of
from truths.trainer import bert_large, trainer_loop

from autoaccum.simulation.cards import Card, find_card
from autoaccum.units import MIB

_ZERO_GRAD: Final = ("start", "before backward", "after step")
_OLDER: Final = (2, 10)
"""The release that is taken for fitcheck's session `sweep`, which names 2.14.

Its runs take free blocks of equal size by address, and cuBLASLt takes a workspace of its own. PyTorch does neither from
2.13 and 2.12 on (`simulation/releases.py`), so they ran an older one; fitcheck's other sessions name 2.10. What the
release that is named gives stands beside it.
"""
_PHASES: Final = {"peak_forward": "forward", "peak_backward": "backward", "peak_optimizer": "update"}
_PARTS: Final = {"forward": ("batch", "forward"), "backward": ("backward",), "update": ("clip", "update")}
"""The phases of a user's run, and those of a trace that are a part of each."""

Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of a table.

    Attributes:
        table: The table's name: its file's, without the ending.
        key: The number of the row.
        row: The row, by column.
        card: That the run was on.
        model: As the row names it.
        run: What else tells it from other runs.
        group: Runs that are scored together.
        batches: The batches of the row, in samples, that are to be predicted, ascending.
    """

    table: str
    key: int
    row: Row
    card: Card
    model: str
    run: str
    group: str
    batches: tuple[int, ...]

    def score(self, quantity: str = "", measured: float | None = None, predicted: float | None = None) -> Score:
        """A measurement of the row; without a quantity, that there is none to compare."""
        return Score(
            table=self.table,
            card=self.card.title,
            group=self.group,
            model=self.model,
            run=self.run,
            quantity=quantity,
            measured=measured,
            predicted=predicted,
        )


@dataclass(frozen=True, kw_only=True)
class Table:
    """One file of measurements.

    Attributes:
        name: The file's, without its ending.
        card: That a row was measured on.
        about: What was measured, as the heading of its scores.
        model: The model of a row.
        run: The words that tell the run from other runs of the model.
        group: The runs that a row is scored with.
        batches: The batches of a row.
        predict: One prediction for a row with one of its batches; raises NotBuilt.
        compare: The measurements of a row beside the predictions of its batches.
    """

    name: str
    card: Callable[[Row], Card]
    about: str
    model: Callable[[Row], str]
    run: Callable[[Row], str]
    group: Callable[[Row], str]
    batches: Callable[[Row], tuple[int, ...]]
    predict: Callable[[Case, int], Predicted]
    compare: Callable[[Case, Sequence[Predicted]], Iterator[Score]]

    def read(self, rows: Sequence[Row]) -> list[Case]:
        """One case for each row."""
        return [
            Case(
                table=self.name,
                key=key,
                row=row,
                card=self.card(row),
                model=self.model(row),
                run=self.run(row),
                group=self.group(row),
                batches=self.batches(row),
            )
            for key, row in enumerate(rows)
        ]


def _predict_timm(case: Case, batch: int) -> Predicted:
    loop = Loop(
        model=partial(models.build_timm, case.model),
        batch=partial(models.images, batch, int(case.row["img_size"])),
        forward=models.loss_of_images,
        optimizer=with_parameters(torch.optim.SGD, lr=1e-4, momentum=0.9, nesterov=True, foreach=False),
        precision=torch.float16,
        set_to_none=False,
        keeps=False,
        resident_batch=True,
        channels_last=case.row["channels_last"] == "1",
        benchmark=True,
        updates=2,
    )
    # torch 1.12 with CUDA 11.3: neither loads kernels late.
    return predict_loop(loop, case.card, batch, eager=True, release=(1, 12))


def _compare_timm(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """Whether the two batches of the bracket, where given, go through."""
    runs = {run.batch: run for run in predicted}
    for side in ("fits", "fails"):
        if case.row[side]:
            run = runs[int(case.row[side])]
            score = case.score(FITS, side == "fits", run.trains)
            least, most = run.min_budget_bytes / MIB, run.capacity_bytes / MIB
            yield replace(score, note=f"batch {run.batch}: {run.outcome}, needs {least:.0f} of {most:.0f} MiB")


def _predict_xmem(case: Case, batch: int) -> Predicted:
    """The loops of `exp/trainer/train_loop.py` in xMem's artifact: four iterations in fp32.

    The container that measured a run then made xMem's estimate, and trained again under that as a cap, in the same
    process, after `empty_cache` (`run_group_truth` and `_verify_est_mem` in `exp/run.py`). By then the workspaces of
    cuBLAS exist, and parameters come to lie beside them; in a new process, activations do, and leave larger gaps. The
    estimates of other tools, which a row does not tell apart, were tried in processes of their own. Where the table
    does not say when gradients were cleared, the run behaved like `start`.
    """
    subject = {"CNN": models.find_torchvision, "Transformer": models.find_language_model}[case.row["family"]]
    model, make_batch, forward = subject(case.model)
    loop = Loop(
        model=model,
        batch=partial(make_batch, batch),
        forward=forward,
        optimizer=with_parameters(getattr(torch.optim, case.row["optimizer"]), lr=1e-3),
        zero_grad=_ZERO_GRAD[int(case.row["zero_grad_position"] or 0)],
        updates=4,
        twice=True,
    )
    card = replace(find_card(case.row["gpu"]), total_bytes=int(case.row["gpu_total_bytes"]))
    return predict_loop(loop, card, batch, release=(2, 6))


def _compare_xmem(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """The least against both caps; the peak against the process's growth, where the card did not cut that short.

    What grew is what the allocator held on the card and the kernels that were loaded. A run that found no memory on the
    card must be predicted to find none there, and none at the cap it was tried with. Caps that contradict each other
    are left out.
    """
    (run,) = predicted
    went, failed = (int(case.row[cap]) if case.row[cap] else None for cap in ("min_cap_ok_bytes", "max_cap_oom_bytes"))
    least = f"needs {run.min_budget_bytes / MIB:.0f} MiB"
    if case.row["real_oom"] == "true":
        fits = run.trains or (failed is not None and run.min_budget_bytes <= failed)
        yield replace(case.score(FITS, False, fits), note=f"the card: {least}")
        return
    if went is None or failed is None or went > failed:
        for cap in (went, failed):
            if cap is not None:
                score = case.score(FITS, cap == went, run.min_budget_bytes <= cap)
                yield replace(score, note=f"capped at {cap / MIB:.0f} MiB: {least}")
    grown_bytes, ground_bytes = run.shown_bytes + run.modules_bytes, int(case.row["ground_bytes"])
    states = case.row["family"] == "Transformer" and "Adam" in case.row["optimizer"]
    adam = accelerate_mib(configuration_of(case.model), "float32") if states else None
    yield replace(case.score("growth of the process", ground_bytes / MIB, grown_bytes / MIB), accelerate=adam)


def _predict_bert(case: Case, batch: int) -> Predicted:
    loop = trainer_loop(
        batch=batch,
        length=int(case.row["seq_len"]),
        micro_batches=micro_batches(case.row["setting"]),
        checkpoints="grad ckpt" in case.row["setting"],
        half="fp16" in case.row["dtype"],
        optimizer=case.row["optimizer"],
    )
    return predict_loop(loop, case.card, batch, eager=True, release=(1, 10))  # As `trainer.softmax` has it.


def _compare_bert(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """The memory of a whole process after training, by the documentation's page on one card."""
    (run,) = predicted
    held_bytes = run.shown_bytes + run.start_bytes + run.modules_bytes
    yield case.score(FITS, True, run.trains)
    dtype = "float16" if "fp16" in case.row["dtype"] else "float32"
    adam = accelerate_mib(bert_large(), dtype) if "AdamW" in case.row["optimizer"] else None
    yield replace(case.score("process", float(case.row["process_gib"]) * 1024, held_bytes / MIB), accelerate=adam)


def _predict_lora(case: Case, batch: int) -> Predicted:
    release = _OLDER if case.row["session"] == "sweep" else _release(case.row["torch"])
    return predict_loop(fitcheck_loop(case.row), case.card, batch, release=release)


def _compare_lora(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """All that PyTorch counted; every row trained. fitcheck's process has a context, as the measured one has."""
    (run,), row = predicted, case.row
    yield case.score(FITS, True, run.trains)
    if not run.phases_bytes:
        return
    tensors, process = fitcheck_mib(row)
    adam = accelerate_mib(load_config(case.model), "float16") if row["quantization"] == "none" else None
    phases = {phase: held / MIB for phase, held in run.phases_bytes.items()}
    outside = (run.start_bytes + run.modules_bytes) / MIB
    allocated = max(phases[phase] for phase in _PHASES.values())
    score = case.score("allocated", float(row["peak_allocated_mib"]), allocated)
    yield replace(score, fitcheck=tensors)
    yield case.score("reserved", float(row["peak_reserved_mib"]), phases["reserved"])
    if row["session"] == "sweep":
        named = predict_loop(fitcheck_loop(row), case.card, run.batch, release=_release(row["torch"])).phases_bytes
        yield case.score("reserved, by the release it names", float(row["peak_reserved_mib"]), named["reserved"] / MIB)
    score = case.score("process", float(row["process_mib"]), phases["reserved"] + outside)
    yield replace(score, fitcheck=process, accelerate=adam)
    if row["after_load_allocated_mib"]:
        yield case.score("after loading", float(row["after_load_allocated_mib"]), phases["load"])
        for column, phase in _PHASES.items():
            yield case.score(phase, float(row[f"{column}_mib"]), phases[phase])


def _predict_own(case: Case, batch: int) -> Predicted:
    return predict_loop(loop_of_run(case.row), case.card, batch, release=_release(case.row["torch"]))


def _compare_own(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """All that PyTorch counted, and the context that NVML showed; every row trained."""
    (run,), row = predicted, case.row
    yield case.score(FITS, True, run.trains)
    measured = {column: int(row[column]) / MIB for column in (*_PHASES, "peak_reserved", "context_at_end")}
    phases = {phase: held / MIB for phase, held in run.phases_bytes.items()}
    allocated = max(phases.get(phase, 0) for phase in _PHASES.values())  # An update may ask for nothing.
    yield case.score("allocated", max(measured[column] for column in _PHASES), allocated)
    yield case.score("reserved", measured["peak_reserved"], phases["reserved"])
    process = measured["peak_reserved"] + measured["context_at_end"]
    yield case.score("process", process, phases["reserved"] + (run.start_bytes + run.modules_bytes) / MIB)
    for column, phase in _PHASES.items():
        if phase in phases:
            yield case.score(phase, measured[column], phases[phase])


def _predict_measured(case: Case, batch: int) -> Predicted:
    return predict_run(case.row, case.card, _release(read_run(case.row["file"])["versions"]["torch"]))


def _compare_measured(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """The peaks of the last update, and with nvidia-smi the memory of the process, or that memory ran out."""
    (run,), record = predicted, read_run(case.row["file"])
    yield case.score(FITS, record["outcome"] == "ok", run.trains)
    if record["outcome"] != "ok" or not run.phases_bytes:
        return
    update, before = record["updates"][-1], record["card"]["in_use_before_bytes"]
    phases = {phase: held / MIB for phase, held in run.phases_bytes.items()}
    reserved = phases.pop("reserved")
    score = case.score("allocated", update["peak_allocated_bytes"] / MIB, max(phases.values()))
    yield replace(score, note=run.note)
    yield case.score("reserved", update["peak_reserved_bytes"] / MIB, reserved)
    if before is not None:
        outside = update["in_use_bytes"] - update["reserved_bytes"] - before
        process = reserved + (run.start_bytes + run.modules_bytes) / MIB
        yield case.score("process", (update["peak_reserved_bytes"] + outside) / MIB, process)
    for name, parts in _PARTS.items():
        known = [phases[part] for part in parts if part in phases]
        if known and name in update["phases"]:
            yield case.score(name, update["phases"][name] / MIB, max(known))


def _run_of_own(row: Row) -> str:
    if row["kind"] == "image":
        layout = ", channels last" * (row["channels_last"] == "1") + ", cudnn.benchmark" * (row["benchmark"] == "1")
        return f"{row['precision']}, batch {row['batch']}{layout}"
    weights = "NF4 " if row["quantization"] == "nf4" else ""
    return f"{row['kind']}, {weights}{row['precision']} {row['attention']} {row['batch']} x {row['length']}"


def _predict_peft(case: Case, batch: int) -> Predicted:
    return predict_loop(peft_loop(case.row), case.card, batch, release=_release(case.row["torch-version"]))


def _compare_peft(case: Case, predicted: Sequence[Predicted]) -> Iterator[Score]:
    """The most that was reserved at the end of 99 % of the training steps; nobody knows the lengths of texts here."""
    (run,) = predicted
    measured = int(case.row["accelerator_memory_reserved_99th"]) / MIB
    quantity = "reserved" if case.group == "image-gen" else UNKNOWN_LENGTHS
    yield case.score(quantity, measured, run.phases_bytes.get("reserved", run.shown_bytes) / MIB)


def _release(version: str) -> tuple[int, int]:
    """The release of a version of PyTorch.

    >>> _release("2.14.0+cu130")
    (2, 14)
    """
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def micro_batches(setting: str) -> int:
    """The number of micro-batches per update.

    >>> micro_batches("fp16 + grad-accum 4 + grad ckpt"), micro_batches("vanilla")
    (4, 1)
    """
    found = re.search(r"grad-accum (\d+)", setting)
    return int(found[1]) if found else 1


def _lora_run(row: Row) -> str:
    weights = "NF4" if row["quantization"] == "nf4" else "fp16"
    return f"{weights} {row['attn_impl']} {row['batch_size']} x {row['seq_len']}, {row['session']}{row['repeat']}"


RTX3090: Final = Table(
    name="timm_rtx3090",
    card=lambda row: replace(
        find_card("rtx3090"), total_bytes=24_268 << 20
    ),  # As PyTorch reported of the measured card.
    about="RTX 3090: timm's training benchmarks, fp16 autocast, torch 1.12",
    model=lambda row: row["model"],
    run=lambda row: f"{row['img_size']} pixels" + ", channels last" * (row["channels_last"] == "1"),
    group=lambda row: class_of(row["model"]),
    batches=lambda row: tuple(int(row[side]) for side in ("fits", "fails") if row[side]),
    predict=_predict_timm,
    compare=_compare_timm,
)
RTX4060: Final = Table(
    name="xmem_rtx4060",
    card=lambda row: find_card("rtx4060"),
    about="RTX 4060: xMem's runs, fp32, torch 2.6",
    model=lambda row: row["model"],
    run=lambda row: f"batch {row['batch']}, {row['optimizer']}, zero_grad {row['zero_grad_position'] or '-'}",
    group=lambda row: class_of(row["model"]),
    batches=lambda row: (int(row["batch"]),),
    predict=_predict_xmem,
    compare=_compare_xmem,
)
V100: Final = Table(
    name="bert_large_v100",
    card=lambda row: find_card("v100-16gb"),
    about="V100: bert-large-uncased fine-tuned by the Trainer of 2022, whole process",
    model=lambda row: "bert-large-uncased",
    run=lambda row: f"{row['setting']}, batch {row['batch']}",
    group=lambda row: "BERT-large",
    batches=lambda row: (int(row["batch"]),),
    predict=_predict_bert,
    compare=_compare_bert,
)
T4: Final = Table(
    name="fitcheck_t4_dev",
    card=lambda row: find_card("t4"),
    about="Tesla T4: LoRA and QLoRA as fitcheck measured them, torch 2.10 and 2.14",
    model=lambda row: row["model_id"],
    run=_lora_run,
    group=lambda row: f"{'NF4' if row['quantization'] == 'nf4' else 'fp16'}, {row['attn_impl']}",
    batches=lambda row: (int(row["batch_size"]),),
    predict=_predict_lora,
    compare=_compare_lora,
)
L40S: Final = Table(
    name="peft_l40s_dev",
    card=lambda row: find_card("l40s"),
    about="L40S: peft's comparison of methods, bf16, torch 2.12 and 2.13",
    model=lambda row: row["model_id"],
    run=lambda row: row["experiment"],
    group=lambda row: row["table"],
    batches=lambda row: (int(row["batch_size"]),),
    predict=_predict_peft,
    compare=_compare_peft,
)
H100: Final = Table(
    name="h100_runs",
    card=lambda row: replace(
        find_card("h100"), total_bytes=85_017_493_504
    ),  # As PyTorch reported of the measured card.
    about="H100: our own training runs (`tests/gpu/training_runs.py`), torch 2.11",
    model=lambda row: row["model"],
    run=_run_of_own,
    group=lambda row: f"{row['kind']}, {row['attention'] or row['precision']}",
    batches=lambda row: (int(row["batch"]),),
    predict=_predict_own,
    compare=_compare_own,
)
MEASURED: Final = Table(
    name="measured_runs",
    card=card_of_run,
    about="Runs that users measured (`autoaccum/devices/measured_run.py`)",
    model=lambda row: Path(read_run(row["file"])["command"][0]).name,
    run=lambda row: f"{shlex.join(read_run(row['file'])['command'][1:])} ({Path(row['file']).name})".lstrip(),
    group=lambda row: card_of_run(row).title,
    batches=lambda row: (read_run(row["file"])["micro_batch"] or 0,),
    predict=_predict_measured,
    compare=_compare_measured,
)
TABLES: Final = {table.name: table for table in (H100, T4, L40S, RTX4060, V100, RTX3090, MEASURED)}
