"""Whatever a user can get wrong: one clear message, the right exit code, nothing on stdout, nothing left behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import ROOT, autoaccum
from kept_child import KeptChild

from autoaccum.cli import main

GOOD = """
import torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def batch(size):
    return torch.randn(size, 4), torch.randint(0, 2, (size,))

criterion = nn.CrossEntropyLoss()
"""


@dataclass(frozen=True)
class Case:
    """A workload (`GOOD` with `extra` at its end, or `text` whole) and flags; what must be said, and the exit code.

    `tried`: it gets as far as trials, or ends its process.
    """

    name: str
    says: str
    code: int = 2
    extra: str = ""
    text: str | None = None
    flags: str = "--target-batch 4 --memory 200MiB"
    reference: str = "model.py"
    users_traceback: bool = False
    crashes: bool = False
    tried: bool = False
    files: dict[str, str] = field(default_factory=dict)


CASES = [
    # The workload file.
    Case("missing file", r"nowhere\.py", reference="nowhere.py"),
    Case("a folder", "directory", reference="."),
    Case("no Python file", "not a Python file", reference="model.txt", files={"model.txt": "x"}),
    Case("missing name", "nonsense", reference="model.py:nonsense"),
    Case("missing package", "nonsense", reference="nonsense.package:name"),
    Case("syntax error", r"line 2", text="import torch\ndef model(:\n"),
    Case(
        "raises at import",
        "boom at import",
        extra="raise RuntimeError('boom at import')",
        users_traceback=True,
        tried=True,
    ),
    Case("imports what is not there", "not_installed", extra="import not_installed", users_traceback=True),
    Case("no model", "model", text=GOOD.replace("def model", "def other")),
    Case("no batch", "batch", text=GOOD.replace("def batch", "def other")),
    Case("no loss", "loss", text=GOOD.replace("criterion", "other")),
    Case("loss and criterion", "criterion", extra="def loss(model, batch): return model(batch[0]).sum()"),
    Case("model is no model", "model", extra="model = 3"),
    Case("model() returns no module", "Module", extra="def model(): return 3"),
    Case(
        "model() raises", "boom in model", extra="def model(): raise ValueError('boom in model')", users_traceback=True
    ),
    Case("model() takes arguments", "model", extra="def model(depth): return nn.Linear(4, 2)"),
    # Batches.
    Case("another size", r"\b3\b", extra="def batch(size): return torch.randn(3, 4), torch.zeros(3).long()"),
    Case(
        "leaves disagree",
        r"rows|samples|size",
        extra="def batch(size): return torch.randn(size, 4), torch.zeros(size + 1).long()",
    ),
    Case("no tensors", "batch", extra="def batch(size): return 'text'"),
    Case("batch() raises", "boom", extra="def batch(size): raise KeyError('boom')", users_traceback=True),
    # Losses.
    Case("loss is no scalar", r"scalar", extra="criterion = None\ndef loss(m, b): return m(b[0])"),
    Case("loss is no tensor", r"float", extra="criterion = None\ndef loss(m, b): return 3.0"),
    Case(
        "loss is not connected",
        r"require|connected|gradient",
        extra="criterion = None\ndef loss(m, b): return m(b[0]).detach().sum()",
    ),
    Case("loss is NaN", r"nan|NaN", extra="criterion = None\ndef loss(m, b): return m(b[0]).sum() * float('nan')"),
    Case("reduction none", "none", extra="criterion = nn.CrossEntropyLoss(reduction='none')"),
    Case("unknown reduction", "median", extra="reduction = 'median'"),
    Case(
        "loss raises", "boom", extra="criterion = None\ndef loss(m, b): raise ValueError('boom')", users_traceback=True
    ),
    Case("shapes do not match", "mat1", extra="def model(): return nn.Linear(5, 2)", users_traceback=True),
    Case("negative weight", "weight", extra="def weight(batch): return -1"),
    Case("weight raises", "boom", extra="def weight(batch): raise ValueError('boom')", users_traceback=True),
    Case(
        "terms do not match",
        "extra|missing|match|terms",
        extra="criterion = None\ndef loss(m, b): return {'a': m(b[0]).sum()}\ndef weight(b): return {'b': 1.0}",
    ),
    # What is trained.
    Case("no trainable parameters", "trainable", extra="def model(): return nn.Linear(4, 2).requires_grad_(False)"),
    Case("no parameters", "trainable|parameters", extra="def model(): return nn.Flatten()"),
    Case(
        "several optimizers",
        "optimizer",
        extra="def optimizer(p): p = list(p); return [torch.optim.SGD(p), torch.optim.SGD(p)]",
    ),
    Case("needs a closure", "LBFGS|closure", extra="def optimizer(p): return torch.optim.LBFGS(p)"),
    Case("unknown optimizer", "adamww.*(adamw|AdamW)", flags="--target-batch 4 --memory 200MiB --optimizer adamww"),
    Case("unknown precision", "fp8", flags="--target-batch 4 --memory 200MiB --precision fp8"),
    Case("unknown precision in the file", "fp8", extra="precision = 'fp8'"),
    # One size only: shown as theirs, never taken for a shortage of memory.
    Case(
        "raises at one size only",
        r"boom at 5",
        extra="criterion = None\ndef loss(m, b):\n    if len(b[0]) == 5: raise RuntimeError('boom at 5')\n"
        "    return m(b[0]).mean()\n",
        flags="--target-batch 5 --memory 200MiB",
        users_traceback=True,
        tried=True,
    ),
    Case("dies", r"status 7", 3, extra="import os\ndef model(): os._exit(7)", tried=True),
    Case(
        "is killed",
        r"SIGSEGV",
        3,
        extra="import os\ndef model(): os.kill(os.getpid(), 11)",
        crashes=True,
        tried=True,
    ),
    Case(
        "hangs",
        r"2(\.0)? s",
        3,
        extra="import time\ncriterion = None\ndef loss(m, b):\n"
        "    if len(b[0]) >= 4: time.sleep(600)\n    return m(b[0]).mean()\n",
        flags="--target-batch 4 --memory 200MiB --trial-limit 2",
        tried=True,
    ),
    # Flags.
    Case("no target", "target-batch", flags="--memory 200MiB"),
    Case("target 0", r"\b0\b", flags="--target-batch 0"),
    Case("target negative", r"-3", flags="--target-batch -3"),
    Case("target is no number", "many", flags="--target-batch many"),
    Case("world size 0", r"\b0\b", flags="--target-batch 4 --world-size 0"),
    Case("more ranks than samples", "8", flags="--target-batch 4 --world-size 8 --equal"),
    Case("budget without a unit", "10GiB", flags="--target-batch 4 --memory 10"),
    Case("budget over the total", "101%", flags="--target-batch 4 --memory 101%"),
    Case("device cuda without CUDA", "CUDA|cuda", flags="--target-batch 4 --device cuda"),
    Case("unknown device", "tpu", flags="--target-batch 4 --device tpu"),
    Case("output in no folder", "nowhere", flags="--target-batch 4 -o nowhere/plan.json"),
    Case("output is there", r"--force", flags="--target-batch 4 -o there.json", files={"there.json": "precious"}),
    Case("output is a folder", "there", flags="--target-batch 4 -o there", files={"there/inside": "precious"}),
    Case("unknown flag", "memry", flags="--target-batch 4 --memry 1GiB"),
    # A clear no.
    Case(
        "budget smaller than the model",
        r"MiB|GiB",
        1,
        extra="def model(): return nn.Sequential(nn.Linear(4, 4000), nn.Linear(4000, 4000), nn.Linear(4000, 2))",
        flags="--target-batch 4 --memory 30MiB",
        tried=True,
    ),
    Case(
        "budget smaller than one sample",
        r"micro-batch 1",
        1,
        extra="criterion = None\ndef loss(m, b): return m(b[0].repeat_interleave(1_000_000, 0)).relu().exp().mean()",
        flags="--target-batch 4 --memory 20MiB",
        tried=True,
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*.tmp*")), "a temporary file was left behind"


def snapshot(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def kept_child() -> Iterator[KeptChild]:
    child = KeptChild()
    yield child
    child.close()


def write(case: Case, folder: Path) -> None:
    (folder / "model.py").write_text(case.text if case.text is not None else GOOD + case.extra)
    for name, text in case.files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def check(case: Case, code: object, stdout: str, stderr: str) -> None:
    assert code == case.code, stderr
    assert stdout == ""
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


@pytest.mark.parametrize("case", [case for case in CASES if case.tried], ids=lambda case: case.name.replace(" ", "-"))
def test_bad_input_from_a_terminal(case: Case, folder: Path) -> None:
    write(case, folder)
    before = snapshot(folder)
    done = autoaccum(folder, "plan", case.reference, *case.flags.split())
    check(case, done.returncode, done.stdout, done.stderr)
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.tried], ids=lambda case: case.name.replace(" ", "-")
)
def test_bad_input(
    case: Case,
    folder: Path,
    kept_child: KeptChild,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write(case, folder)
    before = snapshot(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr("autoaccum.devices.worker.start_child", kept_child.start)
    with pytest.raises(SystemExit) as leaving:
        main(["plan", case.reference, *case.flags.split()])
    check(case, leaving.value.code, *capfd.readouterr())
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    "words",
    [
        "plan model.py --target-batch 4 --device cpu",
        "plan model.py --target-batch 4 --gpu rtx3090",
        "verify model.py",
        "fit model.py --target-batch 4 --micro-batch 2 --steps 1 --device cpu --run-dir run",
    ],
    ids=lambda words: words.split()[0] + words.split()[-1],
)
def test_a_batch_without_values(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shapeless = "torch.randn(size, 4), torch.empty(size, dtype=torch.long"
    extra = f"def batch(size): return {shapeless}, device='meta')\ndataset = [batch(1)] * 8"
    case = Case("meta", r"holds a tensor on the meta device, which has no values: give a real one", extra=extra)
    write(case, folder)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as leaving:
        main(words.split())
    check(case, leaving.value.code, *capfd.readouterr())


def test_a_workload_may_print_and_json_stays_clean(folder: Path) -> None:
    (folder / "model.py").write_text(GOOD.replace("return nn.", "print('hello from model')\n    return nn."))
    done = autoaccum(folder, "plan", "model.py", "--target-batch", "4", "--memory", "200MiB", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
    assert "hello from model" not in done.stdout
    assert "hello from model" in done.stderr
