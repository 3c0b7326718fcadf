"""`autoaccum measure`: the file that measures is put before the script, wherever that stands in a command."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import autoaccum, invoke

from autoaccum.cli.measure import insert_file
from autoaccum.devices import measured_run


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -u train.py -m fast", "python -u FILE train.py -m fast"),
        ("python -m package.train data.py", "python FILE -m package.train data.py"),
        ("torchrun --nproc-per-node 2 -m package.train", "torchrun --nproc-per-node 2 FILE -m package.train"),
        ("python -m torch.distributed.run train.py", "python -m torch.distributed.run FILE train.py"),
        ("env A=1 accelerate launch train.py", "env A=1 accelerate launch FILE train.py"),
    ],
)
def test_the_file_goes_before_the_script(command: str, expected: str) -> None:
    words = insert_file(command.split(), ["-o", "run.json"])
    assert " ".join(words) == expected.replace("FILE", f"{measured_run.__file__} -o run.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.py"], "measure runs a training command: write -- before it: -- python train.py"),
        (["--", "bash", "train.sh"], "`bash` is run, and no Python script is named"),
        (["--", "lost", "train.py"], "`lost` cannot be run (No such file or directory): the first word after -- must"),
        (["--", "--updates", "4", "python", "train.py"], "--updates stands after --, and so belongs to your command"),
        (
            ["--", "python", "train.py", "{iter_size}"],
            "the command has {iter_size}, and its value is not given: add --it",
        ),
        (["-o", "lost/run.json", "--", "python", "train.py"], "there is no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], said: str) -> None:
    done = invoke("measure", *words)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_the_command_ends_as_the_file_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:]); sys.exit('no data')")
    words = ("--json", "--micro-batch", "8", "--", "python3", "train.py", "--bs={micro_batch}")
    done = autoaccum(tmp_path, "measure", *words)
    assert (done.returncode, done.stdout) == (3, "")
    *_, printed, last = done.stderr.splitlines()
    assert (printed, last) == ("['--bs=8']", "error: the script left with exit status no data after 0 of 3 updates")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
