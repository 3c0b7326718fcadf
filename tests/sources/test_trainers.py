"""Trainers are recognised without their library, and a file that trains when it is imported is refused before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoaccum.errors import WorkloadError
from autoaccum.sources.loading import check_import, workload_of


def test_an_object_of_another_kind_is_no_trainer_and_loads_no_library() -> None:
    before = set(sys.modules)
    assert workload_of(lambda: None) is None
    assert not {"transformers", "lightning"} & (set(sys.modules) - before)


@pytest.mark.parametrize("call", ["trainer.train()", "result = trainer.fit(module)"])
def test_training_on_import_is_refused(tmp_path: Path, call: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"trainer = Trainer()\n{call}")
    with pytest.raises(WorkloadError, match=r"importing train.py trains: line 2 calls trainer"):
        check_import(path, "trainer")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ('trainer = Trainer()\nif __name__ == "__main__":\n    trainer.train()', "trainer"),
        ("model = Net()\nmodel.train()", "model"),
        ("trainer = (", "trainer"),
    ],
)
def test_other_files_are_imported(tmp_path: Path, lines: str, name: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(lines)
    check_import(path, name)
