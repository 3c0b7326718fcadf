"""`fit` averages the weights as torch does: exact when resumed, evaluated, planned and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories import Classifier, labelled_rows
from small_fit import Interrupted, interrupt_after, of_kind
from small_fit import fit as fit_small
from state_digests import digest as digest_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import autoaccum
from autoaccum.errors import UsageError
from autoaccum.sources.workload import Workload
from autoaccum.training.fit_events import Evaluated, Updated
from autoaccum.training.run_folder import read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:BatchNorm normalises by the micro-batch")
DATA = TensorDataset(*labelled_rows(48, torch.float32))
WITHOUT: dict[str, Any] = {"ema": None, "ema_decay": None}


def build() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(norm=True, dropout=0.3)


def fit(model_or_workload: Any = None, **options: Any) -> tuple[autoaccum.FitResult, list[Any]]:
    settings: dict[str, Any] = {"target_batch": 12, "micro_batch": 5, "epochs": 2, "ema": True, "ema_decay": 0.9}
    if isinstance(model_or_workload, Workload):
        return fit_small(model_or_workload, **settings | options)
    return fit_small(model_or_workload or build(), **{"loss": nn.CrossEntropyLoss(), "data": DATA} | settings | options)


def digest(result: autoaccum.FitResult) -> str:
    assert result.ema_model is not None
    return digest_of([result.model.state_dict(), result.ema_model.state_dict(), result.optimizer.state_dict()])


def test_it_is_torch_s_average_of_the_weights_and_is_evaluated_beside_them() -> None:
    expected: list[AveragedModel] = []
    model = build()

    def follow(event: Any) -> None:
        if isinstance(event, Updated):
            if not expected:
                expected.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)))  # type: ignore[no-untyped-call]
            expected[0].update_parameters(model)

    result, events = fit(model, callbacks=[follow], eval_data=DATA)
    evaluations = of_kind(Evaluated, events)
    assert (result.updates, len(evaluations)) == (8, 2)
    assert result.ema_model is not None
    trained, (without, _) = result.model.state_dict(), fit(**WITHOUT)
    assert digest_of(dict(result.ema_model.state_dict())) == digest_of(dict(expected[0].module.state_dict()))
    assert digest_of(without.model.state_dict()) == digest_of(trained)
    assert without.ema_model is None
    for name, evaluated in (("loss", result.model), ("ema_loss", result.ema_model)):
        with torch.no_grad():
            loss = nn.functional.cross_entropy(evaluated.eval()(DATA.tensors[0]), DATA.tensors[1])
        assert evaluations[-1].values[name] == pytest.approx(float(loss), rel=1e-5)


def test_it_resumes_bit_for_bit_and_is_saved_with_the_weights(tmp_path: Path) -> None:
    whole, _ = fit(run_dir=tmp_path / "whole")
    with pytest.raises(Interrupted):
        fit(callbacks=[interrupt_after(3)], run_dir=tmp_path / "cut")
    resumed, _ = fit(run_dir=tmp_path / "cut")
    assert resumed.resumed_from is not None
    assert digest(resumed) == digest(whole)
    assert resumed.ema_path == tmp_path / "cut" / "ema.pt"
    assert resumed.ema_model is not None
    saved = torch.load(resumed.ema_path, weights_only=True)
    assert digest_of(saved) == digest_of(dict(resumed.ema_model.state_dict()))
    assert whole.checkpoint is not None
    assert read_checkpoint(whole.checkpoint)["training"]["ema"]["updates"] == 8
    for other in ({"ema_decay": 0.99}, WITHOUT):
        with pytest.raises(UsageError, match=r"ema_decay was 0\.9, is"):
            fit(run_dir=tmp_path / "cut", epochs=3, **other)


@pytest.mark.usefixtures("warm_children")
def test_a_workload_names_it_and_it_is_planned() -> None:
    workload = Workload(
        model=build,
        batch=lambda size: labelled_rows(size, torch.float32),
        criterion=nn.CrossEntropyLoss(),
        dataset=DATA,
        ema=True,
    )
    result, _ = fit(workload, **WITHOUT, micro_batch=None, steps=1)
    assert result.plan is not None
    assert result.plan.spec.ema
    assert result.ema_model is not None
    assert result.warnings == ()
    assert fit(workload, ema=False, ema_decay=None, steps=1)[0].ema_model is None
