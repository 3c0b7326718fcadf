"""Whether a trial that is behind at a milestone may yet be the best at the end.

Steps go with the learning rate, and for a given number of samples the inverse of the effective batch: their quotient
is a setting's pace. At a fixed pace, a loss first falls and then stays where the noise of the updates holds it; the
slower the pace, the later and the lower. So the best pace falls with the length of a training, and one that looks too
slow at a quarter of the budget may be the best of the whole; one that is too fast at a quarter stays so.

That is for rates that stay as they are. Under a schedule that lowers them towards the end, one that is too fast at a
quarter may be the best of the whole, too: what is behind there is not the worse for it (`judging.bracket`).
"""

from __future__ import annotations

from collections.abc import Iterable

from autoaccum.tuning.runner import END
from autoaccum.tuning.settings import Setting


def pace(setting: Setting) -> float:
    """How far a setting goes with a sample."""
    return setting.learning_rate / setting.target_batch


def may_catch_up(setting: Setting, best: Setting, ahead: Iterable[Setting], percent: int) -> bool:
    """Whether a setting that is behind may yet win.

    Not if one that is ahead goes at its pace or slower; nor if it is so slow that the whole budget takes it no further
    than the best there has come already.

    Args:
        setting: The one that is behind.
        best: The one with the lowest loss at that milestone.
        ahead: All with a lower loss there.
        percent: The milestone, of the budget.

    >>> slow, fast = (Setting(learning_rate=rate, target_batch=8, micro_batch=8) for rate in (0.1, 0.3))
    >>> may_catch_up(slow, fast, [fast], 25), may_catch_up(slow, fast, [fast], 50), may_catch_up(fast, slow, [slow], 25)
    (True, False, False)
    """
    own = pace(setting)
    return own * END > pace(best) * percent and all(pace(other) > own for other in ahead)
