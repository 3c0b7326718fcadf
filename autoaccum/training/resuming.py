"""Going on from a checkpoint: which one, and whether it is of this run.

What may change when a run is resumed: `epochs` and `steps`, how it is evaluated, kept and told, what reads the data,
the micro-batch, the plan, the device and its budget, `clip_norm`, `skip_nonfinite`, the workload's code (which is
told). A schedule goes on as it was kept. Everything else has to be the same, and is refused otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoaccum.accumulation.planned import unwrapped
from autoaccum.errors import UsageError
from autoaccum.planning.records import Plan
from autoaccum.training.data.source import Source
from autoaccum.training.events import Noted
from autoaccum.training.request import FitRequest
from autoaccum.training.run_folder import RunFolder
from autoaccum.training.trainee import Trainee


@dataclass(frozen=True)
class Saved:
    """A checkpoint to go on from.

    Attributes:
        path: Its file.
        record: What it holds.
    """

    path: Path
    record: Mapping[str, Any]

    @property
    def plan(self) -> Plan | None:
        """The plan of the run so far; None where its micro-batch was given."""
        text = self.record["plan"]
        return None if text is None else Plan.from_json(text, source=f"the plan in {self.path}")

    @property
    def micro_batch(self) -> int:
        """The planned micro-batch of the run so far."""
        return int(self.record["micro_batch"])


def find_saved(folder: RunFolder | None, resume: str, tell: Callable[[Any], Any]) -> Saved | None:
    """The newest whole checkpoint of the folder, as `resume` has it; None for a run that begins anew.

    Raises:
        UsageError: The folder holds a run that is not to be resumed, or none that is.
        CheckpointError: There are checkpoints, and none is whole; or the newest is of another format.
    """
    if folder is None:
        return None
    if resume == "never":
        if folder.checkpoints.paths():
            raise UsageError(
                f"{folder.path} holds a run already, and resume is never", hint="choose another folder, or resume it"
            )
        return None
    found = folder.checkpoints.newest(tell)
    if found is None and resume == "must":
        raise UsageError(f"{folder.path} holds no checkpoint to resume", hint="begin the run without --resume must")
    return None if found is None else Saved(*found)


def describe_request(request: FitRequest, source: Source) -> dict[str, Any]:
    """What of a request and its data must be the same for a run to be resumed, in plain values."""
    return {"target batch": request.target_batch, "seed": request.seed, "data": source.fingerprint()}


def describe_run(request: FitRequest, trainee: Trainee, source: Source) -> dict[str, Any]:
    """All that must be the same, but for the names and settings that `restore_training` compares."""
    return {
        **describe_request(request, source),
        "model": type(unwrapped(trainee.model)).__name__,
        "optimizer": type(trainee.optimizer).__name__,
        "schedule": None if trainee.scheduler is None else type(trainee.scheduler).__name__,
        "loss": f"{trainee.objective.reduction} over {trainee.objective.source}",
        "precision": trainee.precision,
        "batchnorm": trainee.batchnorm,
        "accumulate_in": trainee.accumulate_in,
        "ema_decay": None if trainee.averages is None else trainee.averages.decay,
    }


def check_same_run(saved: Saved, here: Mapping[str, Any]) -> None:
    """Refuse to go on with another training than the one that was interrupted.

    Raises:
        UsageError: Names all that differs.
    """
    then = saved.record["run"]
    different = "; ".join(_differences("", then, here))
    if different:
        raise UsageError(
            f"{saved.path} is of another training: {different}",
            hint="give what was given then, or choose another run folder",
        )


def _differences(of: str, then: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for name, value in here.items():
        was = then.get(name)
        if isinstance(value, Mapping) and isinstance(was, Mapping) and was.keys() == value.keys():
            yield from _differences(f"{name}: ", was, value)
        elif was != value:
            yield f"{of}{name} was {was!r}, is {value!r}"


def tell_of_changes(saved: Saved, name: str, digest: str, tell: Callable[[Any], Any]) -> None:
    """Say so where the workload's files are not those the run began with."""
    then = saved.record["digest"]
    if then and digest and then != digest:
        tell(Noted(f"{name} was changed since the checkpoint was written: what follows trains what it says now"))
