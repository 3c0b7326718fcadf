"""Within the loop of a `transformers.Trainer`: exact accumulation.

trainer = AccumulatorTrainer(..., plan="plan.json")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from autoaccum.accumulation.accumulator import Accumulator
from autoaccum.accumulation.argument_checks import check_plan, model_facts, read_micro_batch, unwrap_optimizer
from autoaccum.errors import UsageError
from autoaccum.integrations.transformers_workload import PRECISIONS, TrainerLoss, check_supported, counts_rows
from autoaccum.planning.plan_record import Plan
from autoaccum.spec import RECOMPUTE

_KEPT = ("offload-gradients", "offload-optimizer")
"""Savers that take the update from the framework's own optimizer."""
_UNDIVIDED: Any = {
    **{"size": lambda batch: 1, "split": lambda batch, sizes: [batch]},
    **{"micro_batch": 1, "micro_tokens": None, "padding": None},
}
"""How packed sequences are counted: the Trainer collated them, so that they are not split further."""


class AccumulatorMixin:
    """Makes a Trainer accumulate by the Accumulator: put it before the Trainer's class among the bases.

    The samples of an update, `per_device_train_batch_size` x `gradient_accumulation_steps` on each rank, are one
    effective batch. It is split into parts of at most the plan's micro-batch, whose sizes may differ; each counts by
    its labels (`num_items_in_batch`), or as the model's class divides its loss. A short last window, padding of any
    length, and memory that runs out (the update is repeated in smaller parts) leave the gradient the full batch's.
    Clipping, the optimizer, the scheduler, callbacks, logging and checkpoints are the Trainer's own. The logged loss is
    that of the effective batch. Callbacks see one gradient per update, and `on_substep_end` before it is there.

    Args:
        args: Those of the Trainer.
        plan: A plan, or its file: its micro-batch, multiple, savers and way to sum gradients are used. The file is read
            when training begins: the Trainer may be planned first.
        micro_batch: The most samples to run at once, in place of a plan.
        kwargs: Those of the Trainer.

    Raises:
        UsageError: Neither or both are given, the plan has a saver that takes the Trainer's update over, or the
            Trainer computes in fp16, whose scaler belongs to it.
        WorkloadError: The Trainer trains by DeepSpeed, FSDP, DataParallel or parts of the model.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any

    def __init__(
        self, *args: Any, plan: Plan | str | Path | None = None, micro_batch: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if (plan is None) == (micro_batch is None):
            seen = "neither plan nor micro_batch is given" if plan is None else "both plan and micro_batch are given"
            raise UsageError(seen, hint="give one: plan=Plan.load('plan.json'), or micro_batch=8")
        check_supported(self)
        if self.args.mixed_precision == "fp16":
            raise UsageError(
                "the Trainer computes in fp16, whose gradient scaler would count each part as an update",
                hint="take bf16=True, or autoaccum.fit(precision='fp16')",
            )
        # The Accumulator sums weights over ranks itself.
        self.args.average_tokens_across_devices = False
        self._plan = plan
        self._settings = _settings_of(plan) if isinstance(plan, Plan) else {}
        if plan is None:
            self._settings["micro_batch"] = read_micro_batch(micro_batch)
        self._window: list[Any] = []
        self._gradients: _Gradients | None = None
        self._accumulator: Accumulator | None = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; what an interrupted update has left is forgotten.

        Raises:
            PlanFileError: There is no plan in the file.
            UsageError: The plan has a saver that takes the Trainer's update over, or is for another training.
        """
        self._window = []
        if self._plan is not None:
            self._plan = self._plan if isinstance(self._plan, Plan) else Plan.load(self._plan)
            self._settings = _settings_of(self._plan)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep the batch; with the last one of the update, leave the full batch's gradient and return its loss."""
        if self.accelerator.gradient_state.sync_gradients is False:
            self._window.append(inputs)
            return torch.zeros((), device=self.args.device)
        window, self._window = [*self._window, inputs], []
        model.train()
        if callable(switch := getattr(self.optimizer, "train", None)):
            switch()
        accumulator, gradients = self._made_for(model, window[0])
        result = accumulator.step_parts([self._prepare_inputs(batch) for batch in window])  # type: ignore[attr-defined]
        gradients.restore()
        return torch.tensor(result.loss, device=self.args.device)

    def _made_for(self, model: nn.Module, batch: Any) -> tuple[Accumulator, _Gradients]:
        """Return the Accumulator of this call of `train`, which has an optimizer and a prepared model of its own."""
        optimizer = unwrap_optimizer(self.optimizer)
        if self._accumulator is None or self._gradients is None or self._gradients.of != (model, optimizer):
            if isinstance(self._plan, Plan):
                precision = PRECISIONS.get(self.args.mixed_precision)
                check_plan(self._plan, model_facts(model, optimizer, precision))
            loss = TrainerLoss(self, self.model)
            self._gradients = _Gradients(model, optimizer)
            settings = self._settings if counts_rows(batch) else {**self._settings, **_UNDIVIDED}
            self._accumulator = Accumulator(model, self._gradients, loss.compute, **loss.divides, **settings)
        return self._accumulator, self._gradients


def _settings_of(plan: Plan) -> dict[str, Any]:
    """Return an Accumulator's arguments; raise UsageError if the plan has a saver that takes the update over."""
    savers = tuple(plan.spec.savers or ())
    if taken := [word for word in savers if word in _KEPT]:
        raise UsageError(
            f"the plan has {' and '.join(taken)}, and the update is the Trainer's",
            hint=f"plan with --savers {RECOMPUTE}, or train by autoaccum.fit",
        )
    known: dict[str, Any] = {"micro_batch": plan.micro_batch, "multiple_of": plan.multiple_of, "savers": savers}
    if plan.tokens is not None:
        known |= {"micro_batch": None, "micro_tokens": plan.tokens.micro_tokens, "padding": plan.tokens.padding}
    return {**known, "accumulate_in": plan.spec.accumulate_in}


class AccumulatorTrainer(AccumulatorMixin, Trainer):  # type: ignore[misc]
    """A Trainer whose update has the full batch's gradient; see `AccumulatorMixin`."""


class _Gradients(Optimizer):
    """Stands for an optimizer in an Accumulator: an update keeps the gradients, which `restore` hands over."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.of = model, optimizer
        self._kept: list[tuple[Tensor, Tensor | None]] = []
        super().__init__([one for group in optimizer.param_groups for one in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep the gradients."""
        self._kept = [(one, one.grad) for group in self.param_groups for one in group["params"]]

    def restore(self) -> None:
        """Put the gradients where the framework's own optimizer looks for them."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []
