"""The forms that current collate functions make: how many samples they hold, and that their parts train as the whole.

Literal structures of transformers 5.24, sentence-transformers 6.2, MONAI 1.6, torchvision's references/detection and
torchaudio's recipes; `tests/libraries` builds those of the libraries that are installed there.
"""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from batch_rows import rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

import autoaccum
from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.step_result import AccumulationWarning
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, join_batches, split_batch, wrap_batch
from autoaccum.sources.pytree import unwrap_batch
from autoaccum.sources.readings import Readings

N = 6
Pair = namedtuple("Pair", ["first", "second"])


class Encoding(UserDict[str, Any]):
    """As `transformers.BatchEncoding`."""


class MetaTensor(Tensor):
    """As MONAI's, a subclass that its collate functions return."""


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def boxes(*counts: int) -> list[dict[str, Tensor]]:
    return [{"boxes": rows(count, 4) + number, "labels": rows(count)} for number, count in enumerate(counts)]


def images(count: int = N) -> list[Tensor]:
    return [rows(3, 8, 8) * number for number in range(1, count + 1)]


def columns(count: int = N) -> list[dict[str, Tensor]]:
    return [{"x": rows(count, 5)}, {"x": rows(count, 5) + 1}]


def flat(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors], 1)


def stack(*samples: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([torch.stack([tensor.sum() for tensor in tensors]) for tensors in samples])


def of_detection(batch: Any) -> Tensor:
    return stack(*((image, *target.values()) for image, target in zip(batch[0], batch[1], strict=True)))


class Form(NamedTuple):
    """A batch of `N` samples, what a loss reads of it (one row for each sample), and whether it could be samples."""

    batch: Any
    read: Callable[[Any], Tensor]
    guessed: bool = False


FORMS = {
    "default_collate of pairs of dicts": Form(columns(), lambda b: flat(b[0]["x"], b[1]["x"]), guessed=True),
    "default_collate of pairs of pairs": Form(
        [[rows(N, 5), rows(N, 5)], [rows(N, 2), rows(N)]], lambda b: flat(*b[0], *b[1])
    ),
    "default_collate of named tuples of pairs of dicts": Form(
        Pair(columns(), rows(N)), lambda b: flat(b.first[0]["x"], b.first[1]["x"], b.second)
    ),
    "pairs of named tuples": Form(
        [Pair(rows(N, 5), rows(N)), Pair(rows(N, 4), rows(N))], lambda b: flat(*b[0], *b[1]), guessed=True
    ),
    "transformers with padding": Form(
        Encoding({"input_ids": rows(N, 7), "attention_mask": torch.ones(N, 7), "labels": rows(N)}),
        lambda b: flat(b["input_ids"], b["labels"]),
    ),
    "transformers for detection": Form(
        Encoding({"pixel_values": rows(N, 3, 8, 8), "labels": [Encoding(one) for one in boxes(*[2] * N)]}),
        lambda b: of_detection((b["pixel_values"], b["labels"])),
    ),
    "sentence-transformers smart batching": Form(
        ([{"input_ids": rows(N, 5), "modality": "text"}, {"input_ids": rows(N, 3), "modality": "text"}], rows(N)),
        lambda b: flat(b[0][0]["input_ids"], b[0][1]["input_ids"], b[1]),
    ),
    "sentence-transformers without labels": Form(
        ([{"input_ids": rows(N, 5)}, {"input_ids": rows(N, 3)}], None),
        lambda b: flat(b[0][0]["input_ids"], b[0][1]["input_ids"]),
        guessed=True,
    ),
    "torchvision detection": Form((tuple(images()), tuple(boxes(1, 2, 3, 4, 1, 3))), of_detection),
    "torchvision detection, equal counts": Form((images(), boxes(*[2] * N)), of_detection),
    "torchvision detection, as many boxes as images": Form((torch.stack(images()), boxes(*[4] * N)), of_detection),
    "images of one shape": Form({"x": images(), "y": rows(N)}, lambda b: flat(torch.stack(list(b["x"])), b["y"])),
    "samples with numbers": Form(
        [{"x": image, "y": number} for number, image in enumerate(images())],
        lambda b: torch.stack([one["x"].flatten() * one["y"] for one in b]),
    ),
    "torchaudio samples": Form(
        [(rows(1, 40), 16000, "text", number) for number in range(N)],
        lambda b: torch.stack([wave.flatten() * number for wave, _, _, number in b]),
    ),
    "MONAI": Form(
        {
            "image": rows(N, 1, 4, 4).as_subclass(MetaTensor),
            "label": rows(N, 1).as_subclass(MetaTensor),
            "name": ["a"] * N,
        },
        lambda b: flat(b["image"], b["label"]).as_subclass(Tensor),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_counts_splits_and_joins(form: str) -> None:
    batch, read, guessed = FORMS[form]
    readings = Readings()
    wrapped = readings.wrap(batch)
    assert batch_size(wrapped) == N
    assert bool(readings.guesses) is guessed
    parts = split_batch(wrapped, [1, 2, 3])
    assert [batch_size(part) for part in parts] == [1, 2, 3]
    assert torch.equal(torch.cat([read(unwrap_batch(part)) for part in parts]), read(batch))
    assert rows_of(unwrap_batch(join_batches(parts))) == rows_of(batch)


@pytest.mark.parametrize("form", FORMS)
def test_parts_have_the_gradient_of_the_full_batch(form: str) -> None:
    batch, read, guessed = FORMS[form]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor(model(read(batch)).square().mean())

    full = nn.Linear(read(batch).shape[1], 2).double()
    parts = copy.deepcopy(full)
    loss(full, batch).backward()  # type: ignore[no-untyped-call]
    accumulator = Accumulator(parts, torch.optim.SGD(parts.parameters(), lr=1.0), loss, micro_batch=4)
    if guessed:
        with pytest.warns(AccumulationWarning, match=rf"read as {N} samples; if every entry is one sample, "):
            result = accumulator.step(batch)
    else:
        result = accumulator.step(batch)
    assert (result.samples, result.micro_batches) == (N, (3, 3))
    for before, after in zip(full.parameters(), parts.parameters(), strict=True):
        gradient = before.grad
        assert gradient is not None
        assert torch.allclose(before - after, gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))
    accumulator.step(batch)  # Without a second warning.


def test_the_promised_size_decides() -> None:
    frames = [{"image": rows(3, 8, 8)} for _ in range(5)]
    assert batch_size(wrap_batch(frames, None, 5)) == 5
    assert batch_size(wrap_batch(frames, None, 3)) == 3
    assert batch_size(wrap_batch(columns(), None, 2)) == 2
    assert batch_size(Readings(5).wrap(frames)) == 5
    batch = wrap_batch(columns(2), None, 2, columns)  # Both readings have 2 samples, but a batch of 3 has one.
    assert [len(part[0]["x"]) for part in split_batch(batch, [1, 1])] == [1, 1]
    targets = wrap_batch(boxes(2, 2), None, 2, lambda size: boxes(*[2] * size))
    assert [len(part) for part in split_batch(targets, [1, 1])] == [1, 1]


def test_as_many_rows_as_entries_decide_nothing_for_later_batches() -> None:
    readings = Readings()
    counts = [batch_size(readings.wrap({"x": [torch.zeros(2, 5)] * size, "text": ["a"] * size})) for size in (2, 8, 2)]
    assert counts == [2, 8, 2]


def test_what_was_read_as_samples_stays_so_when_counts_are_equal_by_chance() -> None:
    readings = Readings()
    assert batch_size(readings.wrap(boxes(3, 1, 2))) == 3
    assert [batch_size(readings.wrap(boxes(*counts))) for counts in ((5, 5), (2, 2), (3, 3, 3), (7,))] == [2, 2, 3, 1]
    assert not readings.guesses
    readings = Readings()
    assert batch_size(readings.wrap((columns(8), rows(8)))) == 8
    parts = split_batch(readings.wrap((columns(2), rows(2))), [1, 1])
    assert [len(part[0][1]["x"]) for part in parts] == [1, 1]


def test_what_was_read_as_rows_is_not_read_as_samples_later() -> None:
    readings = Readings()
    readings.wrap(boxes(3, 3))
    with pytest.raises(WorkloadError, match=r"batch\[1\]\['boxes'\] has the length 2, .* write split\(batch, sizes\)"):
        batch_size(readings.wrap(boxes(3, 2)))


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ([{"image": image} for image in images(2)], r"batch is a list of 2 whose tensors all have 3 rows"),
        (boxes(2, 2), r"batch is a list of 2 whose tensors all have 2 rows"),
        ((torch.stack(images(2)), boxes(2, 2)), r"batch\[1\] is a list of 2"),
        (({"x": columns(2)}, rows(2)), r"batch\[0\]\['x'\] is a list of 2"),
    ],
)
def test_refuses_what_nothing_decides(batch: Any, path: str) -> None:
    model = nn.Linear(1, 1)
    accumulator = Accumulator(model, torch.optim.SGD(model.parameters()), lambda model, batch: None, micro_batch=1)
    with pytest.raises(WorkloadError, match=rf"{path}.*: define split\(batch, sizes\) and size\(batch\)"):
        accumulator.step(batch)


def negatives(model: nn.Module, batch: Any) -> Tensor:
    scores = model(batch[0]["x"]) @ model(batch[1]["x"]).T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


def alone(model: nn.Module, batch: Any) -> Tensor:
    return torch.as_tensor((model(batch[0]["x"]) - model(batch[1]["x"]).flip(1)).square().mean())


@pytest.mark.parametrize(
    ("loss", "target", "equivalent"), [(alone, 2, True), (negatives, 2, False), (negatives, 5, False)]
)
def test_verify_compares_parts_of_a_list_of_two_dicts(loss: Any, target: int, equivalent: bool) -> None:
    def batch(size: int) -> Any:
        return [{"x": torch.randn(size, 5)}, {"x": torch.randn(size, 5)}]

    workload = autoaccum.Workload(model=lambda: nn.Linear(5, 4), batch=batch, loss=loss)
    assert autoaccum.verify(workload, target_batch=target, micro_batch=1).equivalent is equivalent


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((1,), float(index))}, {"x": torch.full((1,), 2.0 * index)}


@pytest.mark.parametrize("form", ["dataset", "loader", "batches"])
@pytest.mark.filterwarnings("ignore:batch is a list of 2")
def test_fit_weights_batches_by_their_rows(form: str, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.as_tensor((model(batch[0]["x"]) - batch[1]["x"]).square().mean())

    dataset, model = Pairs(), nn.Linear(1, 1)
    batches = [default_collate([dataset[index] for index in own]) for own in (range(4), range(4, 7))]
    data = {"dataset": dataset, "loader": DataLoader(dataset, batch_size=4), "batches": batches}[form]
    with torch.no_grad():
        expected = float(loss(model, default_collate([dataset[index] for index in range(7)])))
    result = autoaccum.fit(
        model,
        data,
        loss=loss,
        optimizer="SGD",
        target_batch=7,
        micro_batch=2,
        epochs=1,
        run_dir=tmp_path,
        progress=False,
    )
    assert result.samples == 7
    assert result.loss == pytest.approx(expected)
