"""What is said of the best setting: its loss, the workload's own rate, rates like it, its micro-batch."""

from __future__ import annotations

from autoaccum.reporting.tune_words import LABELS, counted, format_loss, format_rate
from autoaccum.tuning.judging.knee import KNEE_SHARE
from autoaccum.tuning.records import Bracket, Standing, Throughput, Tuning
from autoaccum.tuning.settings import Setting, Space
from autoaccum.units import percent


def tolerance_words(tuning: Tuning, bracket: Bracket) -> str:
    """Which rates cannot be told from the best, and at which effective batch: rates at others were not compared."""
    setting, space = None if tuning.best is None else tuning.best.setting, tuning.space
    where = []
    if setting is not None and not space.target_batches.single:
        where.append(f"effective batch {setting.target_batch}")
    if setting is not None and space.coupled is not None and len(space.micro_batches) > 1:
        where.append(f"micro-batch {setting.micro_batch}")
    return f"at {', '.join(where)}: {bracket_words(bracket)}" if where else bracket_words(bracket)


def bracket_words(bracket: Bracket) -> str:
    """Which rates the study cannot tell from the best, and under what premise."""
    low, high = bracket.low, bracket.high
    if low is None and high is None:
        return "no rate that was tried is clearly worse: the study cannot tell one from the other"
    if low is not None and high is not None:
        where = f"the best rate lies between {format_rate(low)} and {format_rate(high)}, which are clearly worse"
    elif high is not None:
        where = f"the best rate lies below {format_rate(high)}, and no lower one that was tried is clearly worse"
    else:
        where = f"the best rate lies above {format_rate(low or 0)}, and no higher one that was tried is clearly worse"
    return f"{where}{_noise_words(bracket)}, if the loss has one valley"


def _noise_words(bracket: Bracket) -> str:
    if bracket.noise is None:
        return " (by any difference: no setting was repeated)"
    return f" (by more than {format_loss(bracket.noise)}, which may be chance)"


def loss_words(best: Standing) -> str:
    """The best setting's loss, and of how many runs it is."""
    if best.failed:
        came = "came to no finite loss"
        return f"{format_loss(best.losses[0])} on held-out data, in one run; of its {_runs(best)}, {best.failed} {came}"
    if best.mean is None or len(best.losses) < 2:
        return f"{format_loss(best.losses[0] if best.losses else None)} on held-out data, in one run"
    spread = "" if best.spread is None else f", standard deviation {format_loss(best.spread)}"
    return f"{format_loss(best.mean)} on held-out data, the mean of {counted(len(best.losses), 'seed')}{spread}"


def _runs(standing: Standing) -> str:
    return counted(len(standing.losses) + standing.failed, "run")


def own_words(tuning: Tuning, best: Standing) -> str:
    """The workload's own rate beside the best: the same number of seeds where both have it, else run beside run."""
    own = tuning.own
    rate = format_rate(tuning.space.own_rate)
    if own is None:
        # The last one: it takes up the parameters of those whose workers were lost.
        tried = [row for row in tuning.rows if row.own and row.confirms is None and not row.lost]
        ran = tried[-1] if tried else None
        why = f"its trial is {LABELS[ran.state]}" if ran is not None else "it was not run"
        return f"{rate}: {why}"
    if own.trial == best.trial:
        return f"{rate}: none that was tried is better"
    like = len(own.losses) == len(best.losses) and own.mean is not None and best.mean is not None
    theirs = own.mean if like else own.losses[0] if own.losses else None
    ours = best.mean if like else best.losses[0]
    if theirs is None or ours is None:
        return f"{rate}: its trial did not end well"
    runs = "" if like and len(own.losses) > 1 else " with the same seed" if len(best.losses) > 1 else ""
    change = f" ({percent(ours - theirs, theirs, sign=True)})" if theirs > 0 else ""
    where = _elsewhere(own.setting, best.setting, tuning.space)
    return f"{rate}{where}: loss {format_loss(theirs)}, the best has {format_loss(ours)}{runs}{change}"


def _elsewhere(own: Setting, best: Setting, space: Space) -> str:
    """What else the workload's own trial had, where that was not the best's."""
    other = [f"effective batch {own.target_batch}"] if own.target_batch != best.target_batch else []
    if space.coupled is not None and own.micro_batch != best.micro_batch:
        other.append(f"micro-batch {own.micro_batch}")
    return f" at {', '.join(other)}" if other else ""


def micro_batch_words(tuning: Tuning) -> str:
    """The one to train with, and what it changes; the trials may have had another one, which no clock decides."""
    space = tuning.space
    if space.coupled is not None:
        size = space.micro_batch if tuning.best is None else tuning.best.setting.micro_batch
        return f"{size}, searched with the learning rate: {space.coupled}, which changes the training"
    size = tuning.throughput.knee if tuning.plan is None else tuning.plan.micro_batch
    ran = space.micro_batch if tuning.best is None else tuning.best.setting.micro_batch
    trials = "" if ran == size else f" (trials ran with {ran})"
    return (
        f"{size}, {_why(size, tuning.throughput)}; with exact accumulation it changes speed and memory, not the"
        f" gradient, and no trial was spent on it{trials}"
    )


def _why(size: int, known: Throughput) -> str:
    """What speaks for a micro-batch: it is the knee, or the parts of another effective batch are as near to it."""
    which = "the fastest"
    if known.fastest != known.knee:
        which = f"the smallest within {100 * KNEE_SHARE:g} % of the fastest, {known.fastest}"
    return which if size == known.knee else f"as {known.knee} is {which} in updates of {known.target_batch}"
