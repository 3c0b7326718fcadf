"""What a case is called, and what it may ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from autoaccum.guarding.records import Case

_PLAIN = re.compile(r"[\w./:+-]+")


def case_name(case: Case) -> str:
    """What a case is called, such as `train.py on rtx3090, target 256, bf16`: no two are called alike.

    >>> case_name(Case(workload="train.py", gpu="rtx3090", target_batch=256, precision="bf16"))
    'train.py on rtx3090, target 256, bf16'
    """
    told = [
        ("target {}", case.target_batch),
        ("micro-batch {}", case.micro_batch),
        ("{}", case.precision),
        ("optimizer {}", _plain(case.optimizer)),
        ("memory {}", _plain(case.memory)),
        ("reserve {}", _plain(case.reserve)),
        ("{} ranks", None if case.world_size == 1 else case.world_size),
        ("{}", "equal parts" if case.equal else None),
        ("keeps {}", None if case.keeps is None else "+".join(case.keeps) or "nothing"),
        ("evaluation batch {}", case.evaluation_batch),
        ("worst of {}", case.worst_of),
        ("batchnorm {}", case.batchnorm),
    ]
    where = _plain(case.device if case.gpu is None else case.gpu)
    return ", ".join(
        [f"{_plain(case.workload)} on {where}", *(form.format(value) for form, value in told if value is not None)]
    )


def expand_cases(
    *,
    gpu: str | Sequence[str] | None = None,
    device: str | None = None,
    precision: str | Sequence[str] | None = None,
    **asked: Any,
) -> tuple[Case, ...]:
    """The cases of one workload: one for each card and precision, in the order of these.

    Args:
        gpu: Cards, by any of their names.
        device: In place of them, `cpu`, `cuda` or `cuda:N`.
        precision: One or several; None: the workload's own.
        asked: The other fields of `Case`.

    Raises:
        UsageError: It cannot be asked for so.
    """
    raise NotImplementedError


def _plain(text: str | None) -> str | None:
    """Text that cannot be mistaken for what follows it."""
    return text if text is None or _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
