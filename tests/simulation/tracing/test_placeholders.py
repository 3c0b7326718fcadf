"""Reads of unknown values by a script's own reporting, on a simulated card."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoaccum.simulation.tracing.dispatch_mode import FakeCudaMode
from autoaccum.simulation.tracing.placeholders import UnknownInteger, answer_reads
from autoaccum.simulation.unsupported import UnknownValueError, as_workload_error


class Script:
    """What a script runs, which may be what must not read."""

    def __init__(self) -> None:
        self.is_in_model = False

    def refuses(self) -> bool:
        return self.is_in_model


@pytest.fixture
def script(mode: FakeCudaMode) -> Iterator[Script]:
    script = Script()
    with ExitStack() as stack:
        answer_reads(mode, script.refuses, stack)
        yield script


@pytest.fixture
def unknown(script: Script) -> Tensor:
    """Numbers on the card that nobody knows."""
    return torch.randn(2, 3, device="cuda")


def test_a_float_is_one_in_every_way_that_it_is_read(unknown: Tensor, mode: FakeCudaMode) -> None:
    loss = unknown.sum()

    assert [loss.item(), float(loss), loss.tolist(), int(loss)] == [1.0, 1.0, 1.0, 1]
    assert f"{loss:.2f} {loss}" == "1.00 1.0"
    assert loss < 0.5
    assert {place.partition(":")[0] for place in mode.assumed} == {"test_placeholders.py"}
    assert len(mode.assumed) == 3


def test_an_array_is_zeros_of_its_shape(unknown: Tensor) -> None:
    array = unknown.cpu().numpy()

    assert array.dtype == np.float32
    assert array.tolist() == [[0.0] * 3] * 2
    assert np.asarray(unknown.cpu()).shape == (2, 3)
    assert unknown.tolist() == [[0.0] * 3] * 2
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        unknown.numpy()


def test_a_whole_number_counts_but_is_no_size(unknown: Tensor) -> None:
    count: Any = (unknown > 0).sum().item()

    assert (count, count + 1, 2 * count, count // 1, count / 4, -count) == (1, 2, 2, 1, 0.25, -1)
    assert all(isinstance(number, UnknownInteger) for number in (count + 1, 2 - count, count % 2, sum([count, count])))
    assert (f"{count} {count:3d} {count / 4:.0%}", str(count)) == ("1   1 25%", "1")
    assert json.dumps({"right": count}) == '{"right": 1.0}'
    assert type(pickle.loads(pickle.dumps(count))) is int
    file = io.BytesIO()
    torch.save({"right": count}, file)
    assert torch.load(io.BytesIO(file.getvalue())) == {"right": 1}
    uses: tuple[Callable[[Any], Any], ...] = (range, lambda size: [1, 2][size], lambda size: "ab" * size)
    for use in uses:
        with pytest.raises(UnknownValueError, match="used as a size"):
            use(count)
    with pytest.raises(TypeError) as raised:
        torch.zeros(count)
    assert "used as a size" in str(as_workload_error(raised.value, "a step"))


def test_a_tensor_is_no_size_either(unknown: Tensor) -> None:
    size: Any = unknown.argmax()
    for use in (range, torch.zeros):
        with pytest.raises(UnknownValueError):
            use(size)


def test_known_values_are_told_and_not_noted(script: Script, mode: FakeCudaMode) -> None:
    labels = torch.tensor([1, 2, 0]).cuda()

    assert ((labels == 2).sum().item(), labels.tolist(), bool(labels.any())) == (1, [1, 2, 0], True)
    assert not mode.assumed


def test_reads_of_a_model_are_refused(script: Script, unknown: Tensor) -> None:
    script.is_in_model = True

    reads: tuple[Callable[[Any], Any], ...] = (
        float,
        bool,
        lambda tensor: tensor.item(),
        lambda tensor: tensor.tolist(),
    )
    for read in reads:
        with pytest.raises(UnknownValueError):
            read(unknown.sum())


def test_tensors_are_told_apart_by_their_addresses(unknown: Tensor, script: Script) -> None:
    view, other = unknown[0], torch.randn(3, device="cuda")

    assert unknown.data_ptr() == view.data_ptr() != unknown[1].data_ptr()
    storages = [tensor.untyped_storage().data_ptr() for tensor in (unknown, view, other)]
    assert storages[0] == storages[1] != storages[2]
