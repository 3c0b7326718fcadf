"""Constants of a workload file get other values, and whatever is computed of them follows."""

from __future__ import annotations

import json
import runpy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import invoke

from autoaccum.errors import UsageError
from autoaccum.sources.overrides import find_constants, replace_constants
from autoaccum.sources.source import FileSource, find_source, read_source

FILE = """
import torch
from torch import nn

WIDTH = 8  # Hidden units.
SIZES = (2, 3)
RATE: float = 1e-3
BIAS, NAME = True, "net"
LONG = 4 * \\
    1024; AFTER = 1
DEEP = None
doubled = WIDTH * 2
again = 1
again = 2
if NAME:
    PLACE = 3
CHAIN = LINK = 3
GROWN = 3; CUT = 4; KIND = "sum"
GROWN += 1
if KIND == "sum":
    KIND = sum

def model():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, doubled))

def batch(size):
    return torch.randn(size, 4), torch.randn(size, doubled)

criterion = nn.MSELoss()
"""


def values_with(**overrides: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(replace_constants(FILE, overrides, "m.py"), namespace)
    return namespace


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("WIDTH", "16", 16),
        ("WIDTH", 16, 16),
        ("SIZES", "[5, 6, 7]", (5, 6, 7)),
        ("RATE", "1", 1.0),
        ("RATE", "1e999", float("inf")),
        ("LONG", "7", 7),
        ("AFTER", "-1", -1),
        ("DEEP", "3", 3),
        ("DEEP", "deep", "deep"),
    ],
)
def test_a_value_has_the_type_of_the_constant(name: str, given: Any, value: Any) -> None:
    found = values_with(**{name: given})
    assert (found[name], type(found[name])) == (value, type(value))
    others = values_with()
    assert {key for key in ("WIDTH", "SIZES", "RATE", "LONG", "AFTER", "DEEP") if found[key] != others[key]} == {name}


def test_what_is_computed_of_a_constant_follows() -> None:
    assert values_with(WIDTH="16", AFTER="2")["doubled"] == 32
    found = values_with(KIND="a longer text", CUT="5")
    assert (found["KIND"], found["CUT"]) == ("a longer text", 5)
    assert values_with(KIND="sum")["KIND"] is sum


@pytest.mark.parametrize("given", ["wide", "true", "1.5", True, 1.5])
def test_a_value_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="is an int"):
        values_with(WIDTH=given)


@pytest.mark.parametrize("name", ["doubled", "again", "width", "BIAS", "model", "PLACE", "LINK", "GROWN"])
def test_only_what_is_assigned_once_as_a_constant_can_be_set(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        values_with(**{name: "1"})


def test_constants_are_listed_with_their_comments(file: Path) -> None:
    shown = [line.split(maxsplit=2) for line in invoke("plan", str(file), "--help-model").stdout.splitlines()]
    assert ["WIDTH", "8", "Hidden units."] in shown
    assert not {"doubled", "again", "model"} & {line[0] for line in shown if line}


def test_the_parameters_of_a_model_by_name_are_listed_without_its_name() -> None:
    shown = find_source("torchvision:resnet50").constants
    assert list(shown)[:3] == ["image_size", "classes", "frames"]
    assert not {"name", "TASKS"} & set(shown)


def test_a_constant_knows_the_comment_on_its_line() -> None:
    constant = find_constants(FILE)["WIDTH"]
    assert constant is not None
    assert (constant.value, constant.comment) == (8, "Hidden units.")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "m.py").write_text(FILE)
    return tmp_path / "m.py"


def test_a_file_is_loaded_with_its_overrides_and_has_another_digest(file: Path) -> None:
    source = find_source(file, {"WIDTH": "16"})
    assert type(source) is FileSource
    workload = read_source(json.loads(json.dumps(source.to_record()))).load()
    assert [len(layer.bias) for layer in workload.build_model().children()] == [16, 32]  # type: ignore[arg-type]
    assert workload.digest == source.digest != find_source(file).digest == find_source(file).load().digest


def test_a_file_is_written_in_the_encoding_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("# coding: latin-1\nBOTH = 'ä', 'a'\nTITLE = 'b'\n", "latin-1")
    path.write_bytes(find_source(path, {"TITLE": "ü→"}).encoded_text)
    values = runpy.run_path(str(path))
    assert (values["BOTH"], values["TITLE"]) == (("ä", "a"), "ü→")


def test_the_name_of_a_model_by_name_cannot_be_set() -> None:
    with pytest.raises(UsageError, match="name cannot be set"):
        find_source("timm:resnet50", {"name": "vit_base_patch16_224"})


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("hf:gpt2", {"length": 0, "lora_dropout": 0, "gradient_checkpointing": False}, None),
        ("hf:gpt2", {"length": "-64"}, "length of hf:gpt2 is -64: give 0 or more"),
        ("hf:gpt2", {"seconds": -1}, "seconds of hf:gpt2 is -1.0: give a number above 0, such as 10.0"),
        ("torchvision:r3d_18", {"frames": 0}, "frames of torchvision:r3d_18 is 0: give a number above 0, such as 16"),
    ],
)
def test_a_size_of_a_model_by_name_is_no_negative_number(name: str, values: dict[str, Any], told: str | None) -> None:
    with pytest.raises(UsageError, match=told) if told else nullcontext():
        find_source(name, values).check_overrides()


def test_a_file_of_a_package_is_loaded_with_its_overrides(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name, text in (("__init__", ""), ("sizes", "FACTOR = 1"), ("m", f"from .sizes import FACTOR{FILE}")):
        (package / f"{name}.py").write_text(text)
    for given, width in (({"WIDTH": "16"}, 16), ({}, 8)):
        workload = find_source(package / "m.py", given).load()
        assert len(next(workload.build_model().parameters())) == width


@pytest.mark.usefixtures("warm_children")
def test_all_that_a_plan_leaves_has_its_overrides_and_unknown_ones_are_refused(file: Path) -> None:
    arguments = ("plan", str(file), "--target-batch", "4", "--gpu", "1GiB", "--json", "-q")
    written, step = file.with_name("written.py"), file.with_name("step.py")
    files = ("--write-workload", str(written), "--emit", str(step))
    plan = json.loads(invoke(*arguments, "--set", "WIDTH=16", *files).stdout)
    assert plan["workload"]["overrides"] == {"WIDTH": "16"}
    assert plan["workload"]["parameters"] == 4 * 16 + 16 + 16 * 32 + 32
    assert written.read_text() == FILE.replace("WIDTH = 8", "WIDTH = 16")
    assert "WIDTH=16" in step.read_text()
    done = invoke(*arguments, "--set", "HEIGHT=16")
    assert (done.exit_code, "HEIGHT" in done.stderr) == (2, True)


def test_no_name_is_set_twice() -> None:
    done = invoke("plan", "m.py", "--target-batch", "4", "--set", "WIDTH=8", "--set", "WIDTH=16")
    assert (done.exit_code, "--set names something twice" in done.stderr) == (2, True)
