"""Everything a checkpoint holds of a training, put together and put back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoaccum.accumulation.planned import unwrapped
from autoaccum.accumulation.randomness import Generator
from autoaccum.devices.companions import Averages
from autoaccum.training.checkpoints import random_states
from autoaccum.training.checkpoints.module_state import capture_module, restore_module
from autoaccum.training.checkpoints.state import capture_training, restore_training
from autoaccum.training.data.windows import Source
from autoaccum.training.evaluation.evaluating import Evaluator
from autoaccum.training.events import Noted
from autoaccum.training.progress import Progress
from autoaccum.training.subjects.micro_batches import Choice
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.training.updates.stepping import Stepper


@dataclass(frozen=True, kw_only=True)
class WholeState:
    """The parts of a training that change while it goes on.

    Attributes:
        run: What must be the same when it is resumed (`resuming.describe_run`).
        digest: Of the workload's source files; empty where there are none.
        choice: The micro-batch it was planned with.
        progress: How far it is.
        trainee: Model, its companions, optimizer, scheduler, scaler, and the average of its weights.
        source: Its place in the data.
        stepper: The ceiling, its calm counter, and the noise scale's estimate.
        evaluator: The micro-batch of evaluations.
    """

    run: Mapping[str, Any]
    digest: str
    choice: Choice
    progress: Progress
    trainee: Trainee
    source: Source
    stepper: Stepper
    evaluator: Evaluator

    def compose(self) -> dict[str, Any]:
        """What a checkpoint holds: plain values and tensors, as of the last whole update."""
        trainee, plan = self.trainee, self.choice.plan
        return {
            "run": dict(self.run),
            "digest": self.digest,
            "progress": self.progress.state(),
            "plan": None if plan is None else plan.to_json(),
            "micro_batch": self.choice.micro_batch,
            "ceiling": self.stepper.ceiling.state(),
            "noise_scale": self.stepper.noise_state(),
            "evaluation": self.evaluator.state(),
            "data": self.source.state_dict(),
            "training": capture_training(
                trainee.model,
                trainee.companions,
                trainee.optimizer,
                trainee.scheduler,
                trainee.scaler,
                trainee.settings,
            ),
            "ema": _captured(trainee.averages),
            "random": random_states.capture(trainee.devices, self._generators()),
        }

    def restore(self, record: Mapping[str, Any], tell: Callable[[Any], Any]) -> None:
        """Put everything where `record` has it; nothing is changed when it is of another model or optimizer.

        Random states come last of all, by `restore_randomness`.

        Raises:
            UsageError: It does not fit what is here: says what differs.
        """
        trainee = self.trainee
        for sentence in restore_training(
            record["training"],
            trainee.model,
            trainee.companions,
            trainee.optimizer,
            trainee.scheduler,
            trainee.scaler,
            trainee.settings,
        ):
            tell(Noted(f"in the resumed run, {sentence}"))
        if trainee.averages is not None and not _put_back(record.get("ema"), trainee.averages, trainee.model):
            tell(Noted("the average of the weights begins anew: the checkpoint has none"))
        self.progress.restore(record["progress"])
        if record["micro_batch"] == self.choice.micro_batch:
            self.stepper.restore_ceiling(record["ceiling"])
        self.stepper.restore_noise(record["noise_scale"])
        self.evaluator.restore(record["evaluation"])
        how = self.source.load_state_dict(record["data"])
        if how is not None:
            tell(Noted(how, warns=False))

    def restore_randomness(self, record: Mapping[str, Any], tell: Callable[[Any], Any]) -> None:
        """Go on drawing where the interrupted run did; what cannot be put back is told."""
        for sentence in random_states.restore(record["random"], self.trainee.devices, self._generators()):
            tell(Noted(f"the resumed run draws other random numbers: {sentence}"))

    def _generators(self) -> dict[str, Generator]:
        return random_states.named_generators(self.trainee.model, self.trainee.companions)


def _captured(averages: Averages | None) -> dict[str, Any] | None:
    return None if averages is None else {"updates": averages.updates, "model": capture_module(averages.model)}


def _put_back(record: Mapping[str, Any] | None, averages: Averages, model: nn.Module) -> bool:
    """Whether the checkpoint has an average; without one it begins at the weights as they are now."""
    restore_module(capture_module(unwrapped(model)) if record is None else record["model"], averages.model)
    averages.updates = 0 if record is None else record["updates"]
    return record is not None
