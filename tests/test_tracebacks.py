from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoaccum import tracebacks
from autoaccum.sources.workload import Workload
from autoaccum.tracebacks import blame_workload, format_user_traceback, raised_by_autoaccum


def multiply(size: int) -> torch.Tensor:
    out: torch.Tensor = nn.Linear(3, 2)(torch.zeros(size, 4))
    return out


def test_keeps_the_users_frames_and_the_error() -> None:
    workload = Workload(model=nn.Linear(3, 2), batch=multiply, loss=lambda model, batch: batch.sum())
    with pytest.raises(RuntimeError) as caught:
        workload.build_batch(5)
    shown = format_user_traceback(caught.value)
    assert "in multiply" in shown
    assert "mat1 and mat2 shapes cannot be multiplied" in shown
    assert str(Path("torch") / "nn") not in shown
    assert str(Path("workload") / "spec.py") not in shown


def test_keeps_torchs_frames_if_none_is_the_users() -> None:
    workload = Workload(
        model=nn.Linear(3, 2), batch=lambda size: (torch.zeros(size, 4), torch.zeros(size, 2)), loss=nn.MSELoss()
    )
    with pytest.raises(RuntimeError) as caught:
        workload.objective.terms(workload.build_model(), (torch.zeros(2, 4), torch.zeros(2, 2)))
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # this test's own frame
    shown = format_user_traceback(error)
    assert str(Path("torch") / "nn") in shown
    assert str(Path("workload") / "weights.py") not in shown


@pytest.mark.parametrize(
    ("filename", "own"),
    [(Path(tracebacks.__file__).with_name("made_up.py"), True), (Path("model.py"), False)],
    ids=["own", "user"],
)
def test_an_error_in_the_standard_library_belongs_to_its_caller(filename: Path, own: bool) -> None:
    code = compile("import json; json.loads('{')", str(filename), "exec")
    with pytest.raises(ValueError, match="Expecting") as caught:
        exec(code)
    assert raised_by_autoaccum(caught.value) == own


class Odd(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError(f"item {index} is odd")


def test_an_error_of_a_dataloader_worker_keeps_its_traceback() -> None:
    loader = torch.utils.data.DataLoader(Odd(), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(KeyError) as caught:
        next(iter(loader))
    error = blame_workload(caught.value, "training")
    assert str(error) == "training raised KeyError: 'item 0 is odd' (in a DataLoader worker)"
    assert "in __getitem__" in (error.user_traceback or "")
