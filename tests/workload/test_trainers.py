"""Trainers are recognised without their library, and a file that trains when it is imported is refused before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoaccum.errors import WorkloadError
from autoaccum.workload.trainers import check_import, workload_of


def test_an_object_of_another_kind_is_no_trainer_and_loads_no_library() -> None:
    before = set(sys.modules)
    assert workload_of(lambda: None) is None
    assert not {"transformers", "lightning"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ("trainer = hf.Trainer(model)\ntrainer.train()", 2),
        ("trainer = make_trainer()\nif long:\n    result = trainer.train(resume_from_checkpoint=True)", 3),
        ("trainer: object = Trainer()\ntrainer.train()", 2),
        ("trainer = L.Trainer()\ntry:\n    trainer.fit(module)\nfinally:\n    pass", 3),
    ],
)
def test_training_on_import_is_refused(tmp_path: Path, lines: str, number: int) -> None:
    path = tmp_path / "train.py"
    path.write_text(lines)
    with pytest.raises(WorkloadError, match=f"importing train.py trains: line {number} calls trainer"):
        check_import(path, "trainer")


@pytest.mark.parametrize(
    "lines",
    [
        'trainer = Trainer()\nif __name__ == "__main__":\n    trainer.train()',
        "trainer = Trainer()\ndef main():\n    trainer.train()",
        "trainer = Net()\ntrainer.train()",
        "trainer = Trainer()\nother.train()",
        "trainer = (",
    ],
)
def test_other_files_are_imported(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(lines)
    check_import(path, "trainer")
