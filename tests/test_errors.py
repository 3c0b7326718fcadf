from __future__ import annotations

import inspect

import pytest

from autoaccum import errors
from autoaccum.errors import AutoaccumError, DoesNotFitError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_has_one_root_and_an_exit_code(kind: type[AutoaccumError]) -> None:
    assert issubclass(kind, AutoaccumError)
    assert kind.exit_code in (1, 2, 3)


def test_the_text_is_the_message_then_the_hint() -> None:
    error = DoesNotFitError("micro-batch 1 needs 21.3 GiB, 15.0 GiB are free", hint="try --precision bf16")
    assert str(error) == "micro-batch 1 needs 21.3 GiB, 15.0 GiB are free: try --precision bf16"
    assert (error.message, error.hint) == ("micro-batch 1 needs 21.3 GiB, 15.0 GiB are free", "try --precision bf16")
