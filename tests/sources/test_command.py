"""The words of a training command, and the sizes in their places."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoaccum.errors import UsageError
from autoaccum.sources.command import CommandSource


@pytest.mark.parametrize(
    ("word", "filled", "takes"),
    [
        ("--accum={iter_size}", "--accum=3", True),
        ("--accum={total_iter_size}", "--accum=6", True),
        ("nbs={target_batch}", "nbs=24", True),
        ("--nproc={world_size}", "--nproc=2", False),
        ('{"lr": {iter_size}}', '{"lr": 3}', True),
        ("a b", "a b", False),
        ("", "", False),
    ],
)
def test_sizes_are_filled_in(word: str, filled: str, takes: bool) -> None:
    source = CommandSource.of(["python", "train.py", "--bs", "{micro_batch}", word])
    assert source.fill(micro_batch=4, iter_size=3, world_size=2) == ["python", "train.py", "--bs", "4", filled]
    assert source.takes_iter_size is takes


def test_a_command_without_a_place_for_the_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="{microbatch} and {length}, which are no placeholders"):
        CommandSource.of(["python", "train.py", "--bs", "{microbatch}", "{length}", "${LENGTH}"])


def test_the_digest_is_that_of_the_scripts_and_what_they_import(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("width = 1\n")
    source = CommandSource.of(["python", "train.py", "{micro_batch}"], tmp_path)
    before = source.digest
    assert before == CommandSource.of(["python3", "train.py", "{micro_batch}", "-v"], tmp_path).digest
    (tmp_path / "model.py").write_text("width = 2\n")
    assert source.digest != before


def test_overrides_fill_their_places_in_a_command() -> None:
    source = CommandSource.of(["python", "a.py", "--bs={micro_batch}", "--len={len}"], overrides={"len": "9 9"})
    assert source.fill(micro_batch=2, iter_size=1) == ["python", "a.py", "--bs=2", "--len=9 9"]
    for name in ("micro_batch", "length"):
        with pytest.raises(UsageError, match=name):
            CommandSource.of(source.words, overrides={name: "1"})
