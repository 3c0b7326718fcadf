from __future__ import annotations

import json
import pickle
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from torch import nn

from autoaccum.errors import WorkloadError
from autoaccum.sources.loading import check_import, workload_of
from autoaccum.sources.source import FileSource, PickledSource, Source, read_source

Write = Callable[..., Path]

GOOD = """
    import torch
    from torch import nn
    def model(): return nn.Linear(4, 3)
    def batch(size): return torch.randn(size, 4), torch.randint(0, 3, (size,))
    criterion = nn.CrossEntropyLoss()
"""


@pytest.fixture(autouse=True)
def _import_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(source: str, name: str = "model.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return _write


MODELS = {
    "function": "def model(): return nn.Linear(4, 3)",
    "instance": "model = nn.Linear(4, 3)",
    "class": """
class model(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(4, width)
    def forward(self, x): return self.layer(x)
""",
}
LOSSES = {
    "criterion": "criterion = nn.CrossEntropyLoss()",
    "loss is a criterion": "loss = nn.CrossEntropyLoss(label_smoothing=0.1)",
    "loss is functional": "loss = F.cross_entropy",
    "loss": "def loss(model, batch): return F.cross_entropy(model(batch[0]), batch[1])",
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_form_of_model_and_loss_runs(write: Write, model: str, loss: str) -> None:
    head = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    batch = "def batch(size): return torch.randn(size, 4), torch.randint(0, 3, (size,))\n"
    path = write(f"{head}{batch}{MODELS[model]}\n{LOSSES[loss]}\n")
    workload = FileSource(str(path)).load()
    first, second = workload.build_model(), workload.build_model()
    assert first is not second
    term = workload.objective.terms(first, workload.build_batch(6))["loss"]
    term.backward()  # type: ignore[no-untyped-call]
    assert type(workload.build_optimizer(first)).__name__ == "AdamW"
    assert (workload.name, workload.path, len(workload.digest)) == ("model", path, 64)


@pytest.mark.parametrize("line", ["def batchnorm(x): ...", "batchnorm = nn.BatchNorm1d(3)", "import math as batchnorm"])
def test_a_batchnorm_that_is_no_string_is_ignored(write: Write, line: str) -> None:
    write(GOOD + f"\n    {line}\n")
    assert FileSource("model.py").load().batchnorm == "micro"


def test_a_criterion_that_the_loss_calls_is_not_the_workloads(write: Write) -> None:
    loss = "    def loss(model, batch): return criterion(model(batch[0]), batch[1])\n"
    loaded = FileSource(str(write(GOOD + loss))).load()
    assert loaded.criterion is None
    assert loaded.loss is not None
    beside = loss.replace("criterion(", "nn.functional.cross_entropy(")
    with pytest.raises(WorkloadError, match="both loss and criterion, of which loss counts, and neither calls"):
        FileSource(str(write(GOOD + beside))).load()


COUPLED = """
    import torch
    from torch import nn
    model = nn.Linear(4, 3)
    criterion = nn.CrossEntropyLoss()
    def batch(size): return torch.randn(size, 4), torch.randint(0, 3, (size,))
    def outputs(model, batch): return model(batch[0])
    def coupled_loss(outputs, batch): return criterion(outputs, batch[1])
    def loss(model, batch): return coupled_loss(outputs(model, batch), batch)
"""


def test_a_coupled_loss_is_the_workloads_whatever_calls_it(write: Write) -> None:
    loaded = FileSource(str(write(COUPLED))).load()
    assert (loaded.coupled, loaded.loss, loaded.criterion) == (True, None, None)
    assert loaded.objective.coupled is True
    assert FileSource(str(write(COUPLED + "    coupled = False\n"))).load().objective.coupled is False
    of_criterion = FileSource(str(write(GOOD + "    coupled = True\n    def outputs(a): ...\n"))).load()
    assert (of_criterion.coupled, of_criterion.outputs) == (True, None)


@pytest.mark.parametrize(
    ("removed", "added", "text"),
    [
        ("def coupled_loss", "del loss, criterion; coupled = True", "coupled is set, but the loss is a function"),
        ("criterion", "coupled = True; del coupled_loss", "coupled is set, but the loss is a function"),
        ("def loss", "coupled = 'twice'", "coupled is 'twice': give True or False"),
        ("def outputs", "def outputs(batch): ...", r"outputs\(batch\) cannot be called as outputs\(model, batch\)"),
    ],
)
def test_says_what_a_coupled_loss_lacks(write: Write, removed: str, added: str, text: str) -> None:
    kept = [line for line in COUPLED.splitlines() if not line.strip().startswith(removed)]
    with pytest.raises(WorkloadError, match=text):
        FileSource(str(write("\n".join([*kept, f"    {added}", ""])))).load()


def test_loads_a_workload_object(write: Write) -> None:
    write(
        """
        import autoaccum, torch
        from torch import nn
        def make(size): return torch.randn(size, 4)
        def total(model, batch): return model(batch).sum()
        workload = autoaccum.Workload(model=nn.Linear(4, 1), batch=make, loss=total, reduction="sum")
        other = autoaccum.Workload(model=nn.Linear(4, 2), batch=make, loss=total, name="another")
        """
    )
    assert FileSource("model.py").load().reduction == "sum"
    assert FileSource("model.py").load().name == "model"
    assert FileSource("model.py:other").load().name == "another"


def test_a_name_may_be_a_model(write: Write) -> None:
    write(GOOD + "    def wide(): return nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 3))\n")
    workload = FileSource("model.py:wide").load()
    assert workload.name == "model:wide"
    assert isinstance(workload.build_model(), nn.Sequential)


def test_imports_modules_next_to_a_file(write: Write) -> None:
    write("from torch import nn\nclass Net(nn.Linear): pass\n", "nets.py")
    write("SIZE = 4\n", "sizes.py")
    path = write(
        """
        import dataclasses, pickle, torch
        from torch import nn
        from nets import Net
        import sizes
        @dataclasses.dataclass
        class Batch:
            x: torch.Tensor
        def model():
            from nets import Net as Late
            return Net(sizes.SIZE, 1)
        def batch(size): return Batch(torch.randn(size, sizes.SIZE))
        def loss(model, batch): return model(batch.x).mean()
        """
    )
    workload = FileSource(str(path)).load()
    made = workload.build_batch(3)
    assert pickle.loads(pickle.dumps(made)).x.equal(made.x)
    assert workload.build_model()
    assert not list(path.parent.glob("**/__pycache__"))


def test_imports_a_file_in_a_package_under_its_full_name(write: Write) -> None:
    write("", "shop/__init__.py")
    write("", "shop/nets/__init__.py")
    write("WIDTH = 3\n", "shop/common.py")
    path = write("from ..common import WIDTH\nfrom .other import DEPTH\n" + textwrap.dedent(GOOD), "shop/nets/model.py")
    write("DEPTH = 2\n", "shop/nets/other.py")
    workload = FileSource(str(path)).load()
    assert getattr(workload.model, "__module__", None) == "shop.nets.model"
    write("MORE = 1\n", "shop/__init__.py")
    assert FileSource("shop/nets/model.py").load().digest != workload.digest


def test_reads_a_changed_file_again(write: Write) -> None:
    write("from torch import nn\ndef net(): return nn.Linear(4, 3)\n", "nets.py")
    source = textwrap.dedent(GOOD).replace("def model(): return nn.Linear(4, 3)", "from nets import net as model")
    write(source)
    before = FileSource("model.py").load()
    write("from torch import nn\ndef net(): return nn.Linear(4, 5)\n", "nets.py")
    after = FileSource("model.py").load()
    assert before.digest != after.digest
    assert after.build_model().out_features == 5


def test_the_digest_covers_local_modules_but_not_their_folder(write: Write, tmp_path: Path) -> None:
    source = "from deep import nets\n" + textwrap.dedent(GOOD)
    for place in ("one", "two"):
        write(source, f"{place}/model.py")
        write("from . import more\n", f"{place}/deep/nets.py")
        write("A = 1\n", f"{place}/deep/more.py")
        write("A = 1\n", f"{place}/unrelated.py")
    one = FileSource("one/model.py").load().digest
    assert FileSource("two/model.py").load().digest == one
    write("A = 2\n", "two/unrelated.py")
    assert FileSource("two/model.py").load().digest == one
    write("A = 2\n", "two/deep/more.py")
    assert FileSource("two/model.py").load().digest != one


SIZED = GOOD + "    SIZE = 3\n"
BAD = {
    "syntax error": ("def model(:\n", "model.py", r"model\.py, line 1 is not valid Python"),
    "raises": ("def f(): return {}['k']\nf()\n", "model.py", r"importing model\.py raised KeyError: 'k'"),
    "exits": (
        "import sys\nsys.exit(1)\n",
        "model.py",
        r"called sys.exit\(1\): put code that runs as a script under",
    ),
    "missing import": (
        "import no_such_module_at_all\n",
        "model.py",
        r"raised ModuleNotFoundError: No module named 'no_such_module",
    ),
    "no model": (
        "from pathlib import Path\nfrom torch.utils.data import DataLoader as Loader\ndef batch(size): pass\n",
        "model.py",
        r"defines no 'model' \(it defines batch\): write .*; or run it as a command: -- python model.py \.\.\.",
    ),
    "model is a module": ("import torch.nn as model\n", "model.py", r"model in model\.py is a module"),
    "workload is a dict": (
        GOOD + "    workload = {}\n",
        "model.py",
        r"workload in model\.py is a dict, neither a workload nor a model",
    ),
    "missing": ("", "mode.py", r"there is no file mode\.py: check the path /"),
    "directory": ("", ".", r"\. is a directory: name a Python file"),
    "other file": ("", "notes.txt", r"notes\.txt is not a Python file"),
    "unknown name": (
        SIZED,
        "model.py:zzz",
        r"model\.py has no 'zzz': use a name that it defines: model, batch, criterion, SIZE",
    ),
    "name is a number": (SIZED, "model.py:SIZE", r"SIZE in model\.py is an int, neither a workload nor a model"),
    "no name": ("", "model.py:", r"'model\.py:' is not a reference to a workload: write model\.py or model\.py:name"),
    "empty": ("", "", r"'' is not a reference to a workload"),
    "null byte": ("", "a\0b.py", r"'a\\x00b\.py' is not a reference to a workload: write model\.py"),
}


@pytest.mark.parametrize("case", BAD)
def test_says_what_is_wrong(write: Write, case: str) -> None:
    text, reference, message = BAD[case]
    write(text)
    write("", "notes.txt")
    before = list(sys.path)
    with pytest.raises(WorkloadError, match=message) as caught:
        FileSource(reference).load()
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    if case in ("syntax error", "raises", "exits", "missing import"):
        assert sys.path == before


@pytest.mark.parametrize("source", [FileSource("model.py:small"), PickledSource("Net (made in code)", "net.pickle")])
def test_a_source_reaches_a_child_as_plain_data(source: Source) -> None:
    assert read_source(json.loads(json.dumps(source.to_record()))) == source


def test_an_object_of_another_kind_is_no_trainer_and_loads_no_library() -> None:
    before = set(sys.modules)
    assert workload_of(lambda: None) is None
    assert not {"transformers", "lightning"} & (set(sys.modules) - before)


@pytest.mark.parametrize(
    ("lines", "name", "trains"),
    [
        ("trainer = Trainer()\ntrainer.train()", "trainer", True),
        ("trainer = Trainer()\nresult = trainer.fit(module)", "trainer", True),
        ('trainer = Trainer()\nif __name__ == "__main__":\n    trainer.train()', "trainer", False),
        ("model = Net()\nmodel.train()", "model", False),
        ("trainer = (", "trainer", False),
    ],
)
def test_training_on_import_is_refused(tmp_path: Path, lines: str, name: str, trains: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(lines)
    said = r"importing train.py trains: line 2 calls trainer"
    with pytest.raises(WorkloadError, match=said) if trains else nullcontext():
        check_import(path, name)
