"""Convolutions in cuDNN: what is asked of it, what it answers without a card, and what a card took."""

from __future__ import annotations

import _ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoaccum.simulation.cards import find_card
from autoaccum.simulation.operators import cudnn, workspace_sizes
from autoaccum.simulation.operators.cudnn import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Convolution,
    plan_workspaces,
)
from autoaccum.simulation.operators.workspace_sizes import Estimate, estimate
from autoaccum.simulation.trace_records import EMPTY_CACHE_ONCE, Workspace
from autoaccum.simulation.tracing.recorder import Recorder
from autoaccum.simulation.tracing.simulation import simulate
from tests.gpu.convolutions import convolution_of, read_rows

MEASURED = Path(__file__).parents[2] / "gpu" / "data" / "h100_convolutions.csv"
"""By torch 2.11.0+cu130 with cuDNN 9.19 (`tests/gpu/convolutions.py`)."""
ROWS = read_rows(MEASURED)
STRIDED = (8, 3, 33, 30, 16, 3, 3, 5, 2, 1, 1, 2, 1, 2)
PLAIN = (32, 64, 56, 56, 64, 64, 3, 3, 1, 1, 1, 1, 1, 1)
PRODUCT = (32, 64, 56, 56, 64, 64, 1, 1, 1, 1, 0, 0, 1, 1)
IMAGES, WEIGHT = 32 * 64 * 56 * 56, 64 * 64 * 9
COPIES = 2 * IMAGES + WEIGHT
HALF, FP32 = 2, 0


def asked(kind: int, geometry: tuple[int, ...], data_type: int = 2, channels_last: int = 0) -> Convolution:
    return Convolution(kind, data_type, channels_last, 1, 0, geometry)


def estimated(convolution: Convolution, benchmark: int = 0, card: str = "h100-80gb") -> Estimate:
    *flags, geometry = convolution
    return estimate(Workspace("convolution", (*flags, benchmark, *geometry)), find_card(card), (2, 11))


def convolutions_of(module: nn.Module, *sizes: int) -> list[tuple[int, ...]]:
    """Return the numbers of the convolutions of a forward and backward pass."""
    recorder = Recorder()
    with simulate(find_card("rtx3090"), recorder):
        module.to("cuda")
        recorder.begin(lambda: "forward")
        module(torch.randn(*sizes, device="cuda", requires_grad=True)).sum().backward()
    sizes_of_blocks = recorder.trace((1,)).sizes
    return [size.numbers for size in sizes_of_blocks if isinstance(size, Workspace) and size.rule == "convolution"]


def test_the_output_follows_from_the_geometry() -> None:
    convolution = asked(FORWARD, STRIDED)
    assert [tuple(sizes) for sizes in convolution.tensors] == [(16, 3, 3, 5), (8, 3, 33, 30), (8, 16, 17, 26)]
    assert convolution.windows == [(2, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize(
    ("module", "sizes", "kinds", "geometry"),
    [
        (
            nn.Conv2d(8, 16, (3, 5), stride=(2, 1), padding=1, groups=2),
            (4, 8, 9, 10),
            (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
            (4, 8, 9, 10, 16, 4, 3, 5, 2, 1, 1, 1, 1, 1),
        ),
        (
            nn.Conv1d(8, 16, 3, padding=1),
            (4, 8, 20),
            (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT),
            (4, 8, 1, 20, 16, 8, 1, 3, 1, 1, 0, 1, 1, 1),
        ),
        (
            nn.ConvTranspose2d(16, 8, 2, stride=2),
            (4, 16, 5, 5),
            (INPUT_GRADIENT, FORWARD, WEIGHT_GRADIENT),
            (4, 8, 10, 10, 16, 8, 2, 2, 2, 2, 0, 0, 1, 1),
        ),
    ],
)
def test_what_is_asked_of_cudnn(
    module: nn.Module, sizes: tuple[int, ...], kinds: tuple[int, ...], geometry: tuple[int, ...]
) -> None:
    numbers = convolutions_of(module, *sizes)
    assert [row[0] for row in numbers] == list(kinds)
    assert {row[6:] for row in numbers} == {geometry}


def test_cudnn_answers_without_a_card_where_it_is_installed() -> None:
    answers = plan_workspaces((8, 6), asked(FORWARD, PLAIN))
    assert answers == ((2 * COPIES + 16,) if find_spec("nvidia") else ())


def recorded(rows: list[dict[str, str]]) -> dict[Convolution, tuple[int, ...]]:
    return {convolution_of(row): (int(row["answer_bytes"]),) for row in rows if row["answer_bytes"]}


def outside(rows: list[dict[str, str]]) -> set[tuple[str, str, str]]:
    """Return the rows whose estimates do not cover what was measured."""
    missed = set()
    for row in rows:
        estimate = estimated(convolution_of(row))
        if abs(estimate.bytes - int(row["measured_bytes"])) > estimate.uncertainty_bytes:
            missed.add((row["shape"], row["dtype"], row["kind"]))
    return missed


def test_answers_cover_what_a_card_took(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = recorded(ROWS)
    monkeypatch.setattr(workspace_sizes, "plan_workspaces", lambda _, convolution, __: answers.get(convolution, ()))
    assert outside(ROWS) == {("resnext 128 of 32 groups", "float16", "weight")}, "it took a later plan, with nothing"


@pytest.mark.parametrize(
    ("card", "kind", "data_type", "channels_last", "expected"),
    [
        ("t4", FORWARD, HALF, 0, 2 * COPIES),
        ("t4", FORWARD, HALF, 1, 0),
        ("t4", FORWARD, FP32, 0, 0),
        ("h100-80gb", FORWARD, FP32, 0, 4 * COPIES),
        ("h100-80gb", WEIGHT_GRADIENT, FP32, 1, 0),
        ("rtx3090", FORWARD, FP32, 0, 4 * (IMAGES + WEIGHT)),
        ("rtx3090", INPUT_GRADIENT, FP32, 0, 4 * COPIES),
        ("rtx3090", INPUT_GRADIENT, FP32, 1, 4 * (IMAGES + WEIGHT)),
        ("rtx3090", WEIGHT_GRADIENT, FP32, 1, 4 * COPIES),
    ],
)
def test_tensor_cores_want_copies(
    card: str, kind: int, data_type: int, channels_last: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace_sizes, "plan_workspaces", lambda *_: ())
    assert estimated(asked(kind, PLAIN, data_type, channels_last), card=card).bytes == expected


def test_a_product_copies_nothing() -> None:
    sizes = [estimated(asked(kind, PRODUCT)).bytes for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)]
    assert sizes == [0, 0, 4 << 20]


def test_guesses_cover_most_of_what_a_card_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_sizes, "plan_workspaces", lambda *_: ())
    assert len(outside(ROWS)) < len(ROWS) / 10


def test_benchmarking_takes_the_smallest_of_several_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_sizes, "plan_workspaces", lambda _, __, count: (100, 10, 5000)[:count])
    usual, timed = (estimated(asked(FORWARD, PLAIN), benchmark) for benchmark in (0, 1))
    assert (usual.bytes, timed.bytes, usual.optional) == (100, 10, True)
    assert timed.uncertainty_bytes - usual.uncertainty_bytes == 4990


def test_benchmarking_empties_the_cache_at_the_first_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    recorder = Recorder()
    with simulate(find_card("rtx3090"), recorder):
        layers = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]).to("cuda")
        recorder.begin(lambda: "forward")
        for batch, size in ((2, 5), (2, 7), (3, 7)):
            layers(torch.randn(batch, 8, size, size, device="cuda", requires_grad=True)).sum().backward()
    trace = recorder.trace((2,))
    empties = [block for block, size in enumerate(trace.sizes) if size == Workspace("empty_cache", (EMPTY_CACHE_ONCE,))]
    assert len(empties) == 2 * 3, "forward, and the gradients of input and weight, for images of two sizes"
    assert all(trace.events[trace.events.index(block) + 1] == ~block for block in empties)


@pytest.mark.parametrize("content", [b"", Path(_ctypes.__file__).read_bytes()])
def test_a_library_that_is_broken_or_has_no_heuristics_is_not_asked(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cublasLt", "cudnn"):
        library = tmp_path / name / "lib" / f"lib{name}.so.7"
        library.parent.mkdir(parents=True)
        library.write_bytes(content)
    monkeypatch.setitem(sys.modules, "nvidia", SimpleNamespace(__path__=[tmp_path]))
    monkeypatch.setattr(cudnn, "_library", cudnn._library.__wrapped__)
    assert cudnn.plan_workspaces.__wrapped__((8, 6), asked(FORWARD, PLAIN), 1) == ()
