"""Whatever a user can get wrong: one clear message, the right exit code, nothing on stdout, nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import ROOT, Command, Done
from small_classifier import layers_file

GOOD = layers_file(4, 2, classes=True)


@dataclass(frozen=True)
class Case:
    """A workload (`GOOD` with `extra` at its end) and flags; what must be said, and the exit code."""

    name: str
    says: str
    code: int = 2
    extra: str = ""
    flags: str = "--target-batch 4 --memory 200MiB"
    reference: str = "model.py"
    users_traceback: bool = False
    crashes: bool = False


CASES = [
    Case("missing file", r"nowhere\.py", reference="nowhere.py"),
    Case("missing name", "nonsense", reference="model.py:nonsense"),
    Case("raises at import", "boom at import", extra="raise RuntimeError('boom at import')", users_traceback=True),
    Case("model is no model", "model", extra="model = 3"),
    Case("another size", r"\b3\b", extra="def batch(size): return torch.randn(3, 4), torch.zeros(3).long()"),
    Case("loss is NaN", r"nan|NaN", extra="criterion = None\ndef loss(m, b): return m(b[0]).sum() * float('nan')"),
    Case("shapes do not match", "mat1", extra="def model(): return nn.Linear(5, 2)", users_traceback=True),
    Case("unknown optimizer", "adamww.*(adamw|AdamW)", flags="--target-batch 4 --memory 200MiB --optimizer adamww"),
    Case(
        "raises at one size only",
        r"boom at 5",
        extra="criterion = None\ndef loss(m, b):\n    if len(b[0]) == 5: raise RuntimeError('boom at 5')\n"
        "    return m(b[0]).mean()\n",
        flags="--target-batch 5 --memory 200MiB",
        users_traceback=True,
    ),
    Case("is killed", r"SIGSEGV", 3, extra="import os\ndef model(): os.kill(os.getpid(), 11)", crashes=True),
    Case(
        "hangs",
        r"3(\.0)? s",
        3,
        extra="import time\ncriterion = None\ndef loss(m, b):\n"
        "    if len(b[0]) >= 4: time.sleep(600)\n    return m(b[0]).mean()\n",
        flags="--target-batch 4 --memory 200MiB --trial-limit 3",
    ),
    Case(
        "budget smaller than one sample",
        r"micro-batch 1",
        1,
        extra="criterion = None\ndef loss(m, b): return m(b[0].repeat_interleave(300_000, 0)).relu().exp().mean()",
        flags="--target-batch 4 --memory 6MiB",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*.tmp*")), "a temporary file was left behind"


def snapshot(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def check(case: Case, done: Done) -> None:
    stderr = done.stderr
    assert done.returncode == case.code, stderr
    assert done.stdout == ""
    errors = [line for line in stderr.splitlines() if re.match("error: ", line, re.IGNORECASE)]
    assert len(errors) == 1, stderr
    assert re.search(case.says, errors[0]), errors[0]
    if case.crashes:
        assert 'model.py", line' in stderr, "where the interpreter stood is worth showing, ours or theirs"
        return
    assert f"{ROOT / 'autoaccum'}/" not in stderr, "a traceback of ours"
    assert ("Traceback" in stderr) == case.users_traceback, stderr
    if case.users_traceback:
        assert re.search(r'File ".*(model|linear)\.py", line', stderr), "their frame, or the module of torch's"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_input(case: Case, folder: Path, command: Command) -> None:
    (folder / "model.py").write_text(GOOD + case.extra)
    before = snapshot(folder)
    check(case, command(folder, "plan", case.reference, *case.flags.split()))
    assert snapshot(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "plan model.py --target-batch 4 --device cpu",
        "verify model.py",
        "fit model.py --target-batch 4 --micro-batch 2 --steps 1 --device cpu --run-dir run",
    ],
    ids=lambda words: words.split()[0] + words.split()[-1],
)
def test_a_batch_without_values(words: str, folder: Path, command: Command) -> None:
    shapeless = "torch.randn(size, 4), torch.empty(size, dtype=torch.long"
    extra = f"def batch(size): return {shapeless}, device='meta')\ndataset = [batch(1)] * 8"
    case = Case(
        "meta", r"holds a tensor on the meta device, which has no values: give a tensor on the CPU", extra=extra
    )
    (folder / "model.py").write_text(GOOD + case.extra)
    check(case, command(folder, *words.split()))
