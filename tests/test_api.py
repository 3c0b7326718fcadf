"""The public functions take what the requests hold, with the same defaults, and are quiet when told to be."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from small_classifier import layers_file
from torch import nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.training.fit_request import FitRequest


def test_it_has_the_arguments_of_a_request_but_two_and_one_more() -> None:
    given = dict(inspect.signature(autoaccum.fit).parameters)
    assert given.pop("progress").default is True
    held = {field.name: field.default for field in dataclasses.fields(FitRequest)}
    assert held.pop("eval_due") is held.pop("micro_tokens") is None
    assert given.pop("options").kind is inspect.Parameter.VAR_KEYWORD
    del held["options"]
    assert set(given) == set(held)
    assert {
        name: parameter.default for name, parameter in given.items() if parameter.default is not inspect.Parameter.empty
    } == {name: default for name, default in held.items() if default is not dataclasses.MISSING}


@pytest.mark.parametrize("progress", [True, False])
def test_it_is_drawn_on_stderr_alone(progress: bool, capfd: pytest.CaptureFixture[str]) -> None:
    data = TensorDataset(torch.ones(16, 3), torch.ones(16, 2))
    options = {"target_batch": 8, "micro_batch": 4, "epochs": 1}
    autoaccum.fit(nn.Linear(3, 2), data, loss=nn.MSELoss(), progress=progress, **options)  # type: ignore[arg-type]
    told = capfd.readouterr()
    assert told.out == ""
    assert ("training Linear on cpu: 8 samples per update" in told.err) is progress


@pytest.mark.slow
@pytest.mark.usefixtures("warm_children")
def test_a_guard_locks_compares_and_refuses_what_contradicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(layers_file(4, 2))
    autoaccum.guard("model.py", gpus=["rtx3090", "t4"], target_batch=8, update=True)
    report = autoaccum.guard()
    assert (report.exit_code, len(report.verdicts)) == (0, 2)
    for wrong in ({"gpus": "t4"}, {"gpus": ["t4"], "gpu": "t4"}):
        with pytest.raises(UsageError, match="given"):
            autoaccum.guard("model.py", target_batch=8, **wrong)
