"""Without a plan, a training checks for batch coupling before its first update and warns of it."""

from __future__ import annotations

from typing import Any

import coupled_models as small
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.accumulation.coupling import Coupling
from autoaccum.accumulation.state_hash import StateHasher
from autoaccum.training.fit_events import FitResult, Notice, Updated

pytestmark = [
    pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch"),
    pytest.mark.filterwarnings("ignore:teacher.1 ran in training mode and is no part of the model"),
]


def fit(model: nn.Module, loss: Any, *, micro_batch: int = 4, **more: Any) -> FitResult:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, small.WIDTH), torch.randn(16, 3))
    settings: dict[str, Any] = {"target_batch": 8, "steps": 2, "progress": False, "loss": loss, "device": "cpu"}
    return autoaccum.fit(model, data, micro_batch=micro_batch, **settings | more)


def test_warns_once_of_coupling_before_the_first_update() -> None:
    events: list[Any] = []
    done = fit(small.normed_mlp(small.Normaliser()), small.root_loss, callbacks=[events.append])
    notes = [event for event in events if isinstance(event, Notice)]
    assert [note.text for note in notes] == list(done.warnings)
    assert len(notes) == 2
    assert notes[0].text.startswith("the output of module 1 for a sample depends on the others of its micro-batch")
    assert "the loss mixes the samples of a batch" in notes[1].text
    assert events.index(notes[1]) < next(i for i, event in enumerate(events) if isinstance(event, Updated))


@pytest.mark.parametrize(
    ("model", "micro_batch"),
    [(small.mlp, 3), (lambda: small.normed_mlp(small.Normaliser()), 8), (small.mlp, 1)],
    ids=["nothing coupled", "nothing accumulated", "one sample each"],
)
def test_is_silent_without_coupling(model: Any, micro_batch: int) -> None:
    assert fit(model(), small.mean_square, micro_batch=micro_batch).warnings == ()


def test_leaves_batchnorm_to_the_accumulator() -> None:
    assert fit(small.normed_mlp(nn.BatchNorm1d(8)), small.mean_square).warnings == ()


def test_nothing_of_the_training_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the loss reaches the model, a teacher, or a generator by its own ways."""

    def train() -> str:
        torch.manual_seed(0)
        model, teacher = small.normed_mlp(nn.BatchNorm1d(8)), small.normed_mlp(nn.BatchNorm1d(8))
        generator = torch.Generator().manual_seed(3)

        def loss(_: nn.Module, batch: Any) -> Tensor:
            noise = torch.randn(batch[1].shape, generator=generator)
            return nn.functional.mse_loss(model(batch[0]) - teacher(batch[0]).detach(), noise)

        done = fit(model, loss)
        return StateHasher().hash([done.model.state_dict(), teacher.state_dict(), generator.get_state()])

    looked = train()
    monkeypatch.setattr("autoaccum.training.loop._probe_coupling", lambda components, batch: Coupling())
    assert train() == looked
