"""From the parts of a training to its loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum.errors import UsageError
from autoaccum.training.checkpoints.keeping import Keeper
from autoaccum.training.coupling_watch import CompanyCheck
from autoaccum.training.data.windows import Source
from autoaccum.training.evaluation.evaluating import Evaluator
from autoaccum.training.evaluation.evaluation import Evaluation
from autoaccum.training.evaluation.evaluation_data import EvaluationData
from autoaccum.training.events import Noted
from autoaccum.training.loop import Loop
from autoaccum.training.progress import Goal, Progress
from autoaccum.training.request import FitRequest
from autoaccum.training.run_folder.run_folder import RunFolder
from autoaccum.training.seeds import mix
from autoaccum.training.stopping import Stopping
from autoaccum.training.subjects.micro_batches import Choice
from autoaccum.training.subjects.subject import Subject
from autoaccum.training.subjects.trainee import Trainee
from autoaccum.training.telling import Teller
from autoaccum.training.updates.peaks import PeakMeter
from autoaccum.training.updates.stepping import Stepper
from autoaccum.training.whole_state import WholeState


def assemble(
    request: FitRequest,
    subject: Subject,
    trainee: Trainee,
    source: Source,
    choice: Choice,
    *,
    folder: RunFolder | None,
    run: Mapping[str, Any],
    stopping: Stopping,
    teller: Teller,
) -> tuple[Loop, WholeState]:
    """The loop of a training that has not begun, and the state it changes.

    Args:
        request: What is asked for.
        subject: Where it is from.
        trainee: What is trained.
        source: Its data.
        choice: Its micro-batch.
        folder: Where checkpoints go; None: nowhere.
        run: What must be the same when it is resumed.
        stopping: Whether it is asked to stop.
        teller: Told of every event.

    Raises:
        UsageError: The plan is for something else, or the evaluation data cannot be used.
    """
    progress = Progress()
    source.part_size, source.multiple_of = choice.micro_batch, choice.multiple_of
    source.interruptible = stopping.interruptible
    source.keeps_place = folder is not None
    stepper = Stepper(
        trainee,
        progress,
        plan=choice.plan,
        micro_batch=choice.micro_batch,
        clip_norm=request.clip_norm,
        skip_nonfinite=request.skip_nonfinite,
        multiple_of=choice.multiple_of,
        noise_scale=request.noise_scale,
        check=stopping.check,
        tell=teller.tell,
    )
    evaluation = _evaluation(request, subject, trainee, choice, stopping, teller)
    averaged = None if trainee.averages is None else trainee.averages.model
    evaluator = Evaluator(
        evaluation, trainee.model, progress, request.eval_every, teller.tell, request.eval_due, averaged
    )
    state = WholeState(
        run=run,
        digest=subject.digest,
        choice=choice,
        progress=progress,
        trainee=trainee,
        source=source,
        stepper=stepper,
        evaluator=evaluator,
    )
    keeper = Keeper(
        None if folder is None else folder.checkpoints,
        every=request.checkpoint_every,
        progress=progress,
        compose=state.compose,
        tell=teller.tell,
    )
    loop = Loop(
        source=source,
        stepper=stepper,
        evaluator=evaluator,
        keeper=keeper,
        progress=progress,
        goal=Goal(request.epochs, request.steps, _updates_per_epoch(source, request.target_batch)),
        stopping=stopping,
        peaks=PeakMeter(trainee.device),
        company=CompanyCheck(trainee, None if choice.plan is None else choice.plan.coupling, teller.tell),
        teller=teller,
    )
    return loop, state


def _evaluation(
    request: FitRequest, subject: Subject, trainee: Trainee, choice: Choice, stopping: Stopping, teller: Teller
) -> Evaluation | None:
    if subject.eval_data is None:
        asked = {"eval_every": request.eval_every, "eval_due": request.eval_due}
        for name in (name for name, value in asked.items() if value is not None):
            seen = f"is {request.eval_every}" if name == "eval_every" else "is given"
            raise UsageError(
                f"{name} {seen}, and there is nothing to evaluate on",
                hint="give eval_data, or define evaluation_dataset in the workload",
            )
        return None
    return Evaluation(
        trainee.objective,
        trainee.evaluate,
        trainee.precision,
        EvaluationData(subject.eval_data, collate=subject.collate, workers=request.workers, trained_on=subject.data),
        micro_batch=subject.evaluation_batch or choice.micro_batch,
        beside=trainee.companions.values(),
        seed=mix(request.seed, "evaluation"),
        note=lambda text: teller.tell(Noted(text)),
        interruptible=stopping.interruptible,
    )


def _updates_per_epoch(source: Source, target_batch: int) -> int | None:
    samples = source.samples_per_epoch
    return None if samples is None else -(-(samples - samples % source.multiple_of) // target_batch)
