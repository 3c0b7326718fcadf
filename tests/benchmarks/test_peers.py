"""The pure parts of the comparison with other libraries, none of which need be installed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contenders import Contender, Counter
from peer_child import Done, Task
from peers import Result, verdicts
from torch import nn
from torch.utils.data import default_collate

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.sources.loading import load_workload

OF_TRANSFORMERS = ("bert_base", "resnet50")
"""They need that library, and the benchmark itself counts their samples."""
MODELS = sorted(path for path in Path(__file__).with_name("models").glob("*.py") if path.stem not in OF_TRANSFORMERS)
TASK = Task(contender="nobody", workload="none.py", budget_bytes=2**20, target=96, updates=2)


def trained(*parts: int) -> Done:
    return Done(micro_batches=(parts, parts))


def result(contender: str, size: int, seconds: float, parts: tuple[int, ...]) -> Result:
    search = Done(attempts=(1, size), size=size, start_seconds=1.0, seconds=seconds - 1, version="1.0")
    task = replace(TASK, contender=contender)
    return Result(model="net", task=task, search=search, training=trained(*parts))


OWN = result("autoaccum", 40, 10, (32, 32, 32))
LIGHTNING = result("Lightning", 38, 20, (38, 38))
ACCELERATE = result("accelerate", 35, 50, (35, 35))
FAILED = Done(failure="out of memory")


@pytest.mark.parametrize(
    ("results", "sentence"),
    [
        (
            [OWN, LIGHTNING, ACCELERATE],
            "net: fewest micro-batches for 96 samples: yes; exact effective batch: yes; 0.50 of the time of Lightning, "
            "the fastest peer",
        ),
        ([OWN, replace(LIGHTNING, search=Done(size=48, seconds=16))], "samples: no; .*; 0.62 "),
        ([replace(OWN, training=FAILED), LIGHTNING], "samples: no"),
        ([replace(OWN, training=LIGHTNING.training), LIGHTNING], "exact effective batch: no"),
        ([replace(OWN, search=FAILED), LIGHTNING], "nothing to compare"),
        ([OWN, replace(LIGHTNING, search=FAILED)], "nothing to compare"),
    ],
)
def test_the_verdict_is_read_off_the_results(results: list[Result], sentence: str) -> None:
    (said,) = verdicts(results)
    assert said == sentence or re.search(sentence, said)


def test_samples_are_counted_where_they_pass_whatever_a_contender_says() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counter = Counter(model, optimizer)
    accumulator = Accumulator(model, optimizer, nn.MSELoss(), micro_batch=4)
    for samples in (10, 3):
        accumulator.step((torch.ones(samples, 2), torch.zeros(samples, 2)))
    assert counter.updates == [(4, 3, 3), (3,)]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_model_gives_peers_the_samples_it_gives_autoaccum_and_a_loss(path: Path) -> None:
    workload = load_workload(str(path))
    batch = default_collate([workload.dataset[index] for index in range(3)])
    torch.testing.assert_close(batch, type(batch)(workload.build_batch(3)))
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters())
    counter = Counter(model, optimizer)
    assert Contender(workload, TASK).loss(model, batch).ndim == 0
    optimizer.step()
    assert counter.updates == [(3,)]
