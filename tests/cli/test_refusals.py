"""What no command can do is refused before anything starts: one line with what was seen, and no file is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import invoke
from small_classifier import MODEL

_COMMAND_WORDS = "-- python train.py {micro_batch} {iter_size}"
COMMAND = f"plan --target-batch 8 {_COMMAND_WORDS}"
REFUSED = {
    "": {
        "plam": "no such command 'plam': did you mean plan?",
        "plan": "missing argument 'WORKLOAD|-- COMMAND': see `autoaccum plan --help`",
        "plan model.py": "no target batch is given: say how many samples make an update (--target-batch N)",
        "plan model.py --target-batch 0": "'--target-batch': 0 is not in the range x>=1: see `autoaccum plan --help`",
        "plan model.py --target-batch 2.5": "'2.5' is not a valid integer",
        "plan model.py:MODEL --target-batch 8 --force -o model.py": "-o names the workload itself, model.py",
        "plan ./model.py --target-batch 8 --force --emit link.py": "--emit names the workload itself, link.py",
        "verify modle.py": "there is no file modle.py",
        "verify model.py -o there.svg": "there.svg exists already: add --force",
        "verify model.py -o model.py --force": "-o names the workload itself, model.py",
        "tune model.py": "missing option '--target-batch': see `autoaccum tune --help`",
        "tune model.py --target-batch 64..16": "64..16 is an empty range",
        "plan model.py --target-batch 8 --updates 4": "--updates is for a training command, and a workload is given",
        "plan --target-batch 8 --": "missing argument 'WORKLOAD|-- COMMAND'",
        "plan --target-batch 8 -- python a.py": "the command has no {micro_batch}: write {micro_batch} where",
        "plan -- python a.py {microbatch}": "has {microbatch}, which is no placeholder: write {micro_batch}",
        "plan --target-batch 8 -- a.py {micro_batch} {iter}": "{iter}, which is no placeholder: an update is one",
        "plan -- python a.py {micro_batch} {iter_size} --target-batch=8": "--target-batch stands after --, and so",
        "plan -- python a.py {micro_batch} {iter_size}": "no target batch is given: say how many samples",
        "plan python a.py {micro_batch}": "-- is missing: write -- before the training command, and",
        "compare --gpu t4 -- python a.py {micro_batch} {iter_size}": "no target batch is given",
        "fit -- python a.py {micro_batch}": "fit is for a workload, and a command trains by itself: run the",
        "tune -- python a.py {micro_batch}": "call the script from an Optuna study of your own, or write a workload",
        "explain -- python a.py {micro_batch}": "`autoaccum plan --gpu NAME --explain -- COMMAND` shows where",
        "guard --gpu t4 --target-batch 8 -- python a.py {micro_batch}": "the command has no {iter_size}: an update",
        "train": "no such command 'train': see `autoaccum --help`",
        "gpus rtx4091": "did you mean rtx4090",
        "gpus ampre": "there is no 'ampre' among the names and generations of cards: did you mean ampere?",
        "gpus rtx4091 --json": "there is no 'rtx4091' among the",
    },
    "plan model.py --target-batch 8": {
        "--world-size 4 --parallel fsdp2": "run the whole model, and fsdp2 shards it",
        "--gpu h100 --parallel fsdp2": "and there is one: say how many (--world-size N)",
        "--world-size 4 --gpu h100 --mesh 2x4": "the mesh 2x4 has 8 ranks, and there are 4",
        "--target-tokens 8192": "both target_batch and target_tokens are given",
        "--memry 3": "no such option '--memry'",
        "--trial-limit 0": "'--trial-limit': 0.0 is not in the range x>0",
        "--time-limit inf": "the time limit is inf: give a number of seconds above 0",
        "--equal --world-size 3": "take 6 or 9",
        "--device tpu": "there is no device 'tpu'",
        "--device cpu --values cpu": "--values is for a simulated card",
        "--gpu t4,h100": "run `autoaccum compare`",
        "--gpu all": "run `autoaccum compare`",
        "--gpu h100 --world-size 1..64": "run `autoaccum compare`",
        "--gpu h100 --savers all": "run `autoaccum compare`",
        "--for keras": "'keras' is not one of 'transformers', 'lightning', 'accelerate'",
        "--for lightning --savers auto": "Lightning does not know autoaccum's savers (auto)",
        "--for torchtitan --world-size 3": "a target batch of 8 does not divide equally",
        "-o /nowhere/plan.json": "there is no folder /nowhere",
        "-o ./same --emit same": "--emit names the file of -o, same: choose another name",
        "--emit torch.py": "would hide the module torch",
        "--report nowhere/p.html": "nowhere for p.html: create it first",
        "--emit step.py --world-size 2": "the plan is for 2 ranks",
        "--plot memory.pdf": "memory.pdf ends in .pdf: give a name that ends in .svg or .png",
        "--plot /dev/null": "not a regular file: give a name that ends in .svg or .png",
        "--plot there.svg": "there.svg exists already: add --force to overwrite it, or choose",
    },
    COMMAND: {
        "--updates 1": "'--updates': 1 is not in the range x>=2",
        "--savers recompute": "--savers is given, and plan runs a command, which decides that itself: leave it out, or",
        "--savers auto": "--savers is given, and plan runs a command, which decides that itself",
        "--fit-micro-batch 4": "--fit-micro-batch is given, and plan runs a command, which decides that itself",
        "--batchnorm exact": "--batchnorm is given",
        "--gpu h100 --parallel ddp --world-size 2": "--parallel is given",
        "--prefer fastest": "times updates of a workload, not of a command: predict for a card",
        "--for deepspeed": "--for is for a workload, and a command trains by itself: run the command",
        "--emit step.py": "--emit is for a workload, and a command trains by itself",
    },
    f"compare {COMMAND[5:]} --gpu t4,l4": {
        "--world-size 1..4": "world_size is range(1, 5), and a command starts its own ranks: compare for one number",
        "--savers all": "--savers is given, and compare runs a command, which decides that itself",
    },
    "compare model.py --target-batch 8 --gpu": {
        ",": "there is no ',' among the",
        "t4,nothing": "there is no 'nothing' among the",
        "t4 --parallel fsdp2 --mesh 2x2": "the mesh 2x2 has 4 ranks, and there are 1",
        "t4 --world-size 4..1": "4..1 is an empty range",
        "t4 --world-size 0..4": "0 is not in the range x>=1",
        "t4,l4 --fit-micro-batch 4": "--fit-micro-batch 4 needs --savers auto or --solve",
        "t4,l4 --sort size": "there is no column 'size': choose card, ranks, micro",
        "t4 --set length=1 --sort length": "there is no column 'length'",
        f"t4 --set length={','.join(map(str, range(65)))}": "the values of length have 65 combinations",
        "t4 --world-size 1..2 --sort speed": "speed is estimated for several cards",
        "t4,l4 -o model.py": "-o names the workload itself, model.py",
    },
    "fit model.py --target-batch 8": {
        "": "missing option '--run-dir'",
        "--run-dir a": "neither epochs nor steps are given: give epochs=3",
        "--run-dir a --clip-norm nan": "clip_norm is nan: give a number above 0",
        "--run-dir a --keep 3": "--keep is now --max-checkpoints: see `autoaccum fit",
    },
    "guard": {
        "--tolerance some": "the tolerance 'some' is neither a share up to 100% nor a size",
        "model.py -o model.py --force": "-o names the workload itself, model.py",
        "-o autoaccum.lock --force": "-o names the lock itself, autoaccum.lock",
        "-o a --report ./a": "--report names the file of -o, ./a",
        "model.py --target-batch 0": "0 is not in the range x>=1",
        "model.py other.py": "unexpected extra argument (other.py): see `autoaccum guard --help`",
        "--table README.md --update": "--table measures nothing, and other options are given",
    },
    "tune model.py --target-batch 8": {
        "--learning-rate 0.1": "the learning rate is '0.1': give two numbers above 0",
        "--trials 0": "'--trials': 0 is not in the range x>=1",
        "--storage x.db -o ./x.db": "-o names the study itself, ./x.db",
        "--storage a://b": "the storage is a URL, of a: give an SQLite file",
    },
}
"""What must be said, by the words of the command and those that follow."""


@pytest.mark.parametrize(
    ("words", "text"),
    [(f"{first} {rest}", text) for first, table in REFUSED.items() for rest, text in table.items()],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    words: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "there.svg").write_text("precious")
    (folder / "link.py").symlink_to(folder / "model.py")
    words = words.replace(f" {_COMMAND_WORDS}", "") + f" {_COMMAND_WORDS}" if _COMMAND_WORDS in words else words
    result = invoke(*words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert text in line
    assert sorted(path.name for path in folder.iterdir()) == ["link.py", "model.py", "there.svg"]
    assert (folder / "there.svg").read_text() == "precious"
    assert (folder / "model.py").read_text() == MODEL
