"""A Trainer of transformers is planned as it trains and stays as it was; its accumulation can be made exact."""

from __future__ import annotations

import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Command, environment
from factories import make_plan, make_token_budget
from quiet_frameworks import largest_difference
from small_trainers import LONGEST, Texts, make_trainer, wide_loss
from state_digests import state_digest
from tiny_transformers import NO_DROPOUT, bert, hf, llama
from torch import Tensor, nn
from warm_children import WarmRanks

import autoaccum
from autoaccum import Plan
from autoaccum.errors import PlanFileError, UsageError, WorkloadError
from autoaccum.integrations.transformers import AccumulatorTrainer
from autoaccum.integrations.transformers_workload import free_card
from autoaccum.simulation.tracing.placement import REPLACED_BY
from autoaccum.sources.loading import workload_of
from autoaccum.spec import DeviceFacts

pytestmark = pytest.mark.usefixtures("warm_children")
IMPORTED = ("transformers.trainer", "transformers.models.llama.modeling_llama")
CHECKPOINTED: dict[str, Any] = {"bf16": True, "activation_checkpointing": True}
EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "per_device_eval_batch_size": 8}


def metrics(predictions: Any) -> dict[str, float]:
    return {"count": float(len(predictions.predictions))}


def picture(trainer: Any) -> tuple[Any, ...]:
    """All of a Trainer that a plan could change."""
    model = trainer.model
    return (
        state_digest(model, torch.optim.SGD(model.parameters())),
        [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()],
        [(len(module._forward_hooks), "forward" in vars(module)) for module in model.modules()],
        {name: id(value) for name, value in vars(trainer).items()},
        [type(callback) for callback in trainer.callback_handler.callbacks],
        (len(trainer.accelerator._dataloaders), len(trainer.accelerator._models)),
        [parameter.grad is None for parameter in model.parameters()],
        sorted(Path(trainer.args.output_dir).rglob("*")),
        trainer.args.to_dict(),
        torch.get_rng_state().tolist(),
    )


def test_a_trainer_is_planned_and_verified_as_it_trains_and_stays_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, further={"eval_dataset": Texts(20)}, **CHECKPOINTED, **EVALUATED)
    trainer.model.eval()  # As `from_pretrained` returns it.
    before = picture(trainer)
    plan = autoaccum.plan(trainer=trainer, target_batch=16, max_micro_batch=4, device="cpu")
    assert plan.micro_batches == (4, 4, 4, 4)
    found = {name: getattr(plan.spec, name) for name in ("precision", "evaluation_batch", "longest_of")}
    assert found == {"precision": "bf16", "evaluation_batch": 8, "longest_of": 256}
    assert plan.workload.optimizer == "AdamW"
    assert plan.workload.recipe.checkpointing
    assert autoaccum.verify(trainer=trainer, target_batch=8).equivalent
    assert picture(trainer) == before
    trainer.train()
    assert trainer.state.global_step == 3
    workload = workload_of(trainer)
    assert workload is not None
    assert "forward" in vars(trainer.model)  # Training has wrapped it in autocast, which a trial brings itself.
    assert "forward" not in vars(workload.make_model())


class Logging(hf.Trainer):  # type: ignore[misc]
    """Logs from its loss, as many do, and needs what it gathers, as KTO of TRL."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.log({"seen": 1.0})
        loss = super().compute_loss(*args, **kwargs)
        return loss * self.accelerator.gather_for_metrics(loss.detach()).mean()


class Old(hf.Trainer):  # type: ignore[misc]
    """Has the `compute_loss` of transformers 4.45."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return super().compute_loss(model, inputs, return_outputs)


def test_batches_loss_and_optimizer_are_the_trainers_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Logging, weight_decay=0.1, learning_rate=3e-3)
    workload = workload_of(trainer)
    assert workload is not None
    batch = workload.batch(5)
    assert batch["input_ids"].shape == (5, LONGEST)
    counted = (batch["labels"][:, 1:] != -100).sum()
    assert workload.weight is not None
    assert workload.weight(batch) == counted
    model = workload.build_model()
    torch.testing.assert_close(
        workload.loss(model, dict(batch)), trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=counted)
    )
    made, own = workload.build_optimizer(model), trainer.create_optimizer()
    names = {id(one): name for each in (model, trainer.model) for name, one in each.named_parameters()}
    for group, expected in zip(made.param_groups, own.param_groups, strict=True):
        assert [names[id(one)] for one in group.pop("params")] == [names[id(one)] for one in expected["params"]]
        assert group == {name: value for name, value in expected.items() if name != "params"}


def test_a_plan_for_a_card_holds_the_predictions_that_an_evaluation_collects(tmp_path: Path) -> None:
    passes = 2000
    further = {"eval_dataset": Texts(passes * 8), "compute_metrics": metrics}
    trainer = make_trainer(tmp_path, further=further, **EVALUATED)
    before = picture(trainer)
    plan = autoaccum.plan(trainer=trainer, target_batch=16, max_micro_batch=8, gpu="rtx4090")
    assert plan.micro_batches == (8, 8)
    assert picture(trainer) == before
    logits = passes * 8 * LONGEST * 64 * 4
    assert plan.peak_bytes is not None
    assert plan.peak_bytes >= 1.9 * logits  # 94 MB; the step alone takes 23 MB.


FILE = """
from pathlib import Path
import torch
from small_trainers import make_trainer
from tiny_transformers import llama

model = llama()
optimizers = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0), None
given = {"model": model, "optimizers": optimizers}
trainer = make_trainer(Path(__file__).parent, further=given, bf16=True, use_cpu=False)  # Moves the model.
"""


def test_the_command_plans_a_trainer_in_a_file(tmp_path: Path, command: Command) -> None:
    (tmp_path / "train.py").write_text(FILE)
    words = ("train.py:trainer", "--gpu", "rtx4090", "--target-batch", "32")
    done = command(tmp_path, "plan", *words, "-o", "plan.json")
    assert done.returncode == 0, done.stderr
    assert "train:trainer: LlamaForCausalLM" in done.stdout + done.stderr
    found = Plan.load(tmp_path / "plan.json")
    own = autoaccum.plan(trainer=make_trainer(tmp_path, bf16=True), target_batch=32, gpu="rtx4090")
    for name in ("micro_batches", "largest_fit", "peak_bytes", "min_budget_bytes"):
        assert getattr(found, name) == getattr(own, name)
    assert found.workload.optimizer == own.workload.optimizer == "AdamW"
    (tmp_path / "train.py").write_text(FILE + "trainer.train()\n")
    done = command(tmp_path, "plan", *words)
    assert done.returncode == 2
    assert "importing train.py trains: line 11 calls trainer.train()" in done.stderr


def test_what_no_trial_can_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="the Trainer has no train_dataset"):
        workload_of(make_trainer(tmp_path, further={"train_dataset": None}))
    trainer = make_trainer(tmp_path)
    with pytest.raises(UsageError, match="a trainer is given, and batch too"):
        autoaccum.plan(trainer=trainer, batch=[1], target_batch=4)
    with pytest.raises(WorkloadError, match="compute_loss of Old takes no num_items_in_batch"):
        workload_of(make_trainer(tmp_path, Old))
    trainer.loss = HoldsModel(trainer.model)
    with pytest.raises(
        WorkloadError, match="the Trainer's loss .HoldsModel. holds the model itself: define model, batch"
    ):
        workload_of(trainer)
    trainer.args._n_gpu = 2
    with pytest.raises(WorkloadError, match="2 cards by DataParallel"):
        workload_of(trainer)


class Gradients(hf.TrainerCallback):  # type: ignore[misc]
    """Keeps the gradients of every update, as clipped."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.kept.append({name: one.grad.clone() for name, one in objects["model"].named_parameters()})


def train(folder: Path, kind: Any, *, size: int, steps: int, resume: str | None = None, **given: Any) -> Any:
    """Train a Llama in float64 on 22 texts: an epoch of windows of 8, 8 and 6 samples."""
    torch.manual_seed(0)
    model, gradients = llama().double(), Gradients()
    model.loss_function = wide_loss
    settings: dict[str, Any] = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    settings |= {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}
    settings |= {"max_grad_norm": 0.1, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 1}
    further = {"model": model, "callbacks": [gradients], **given}
    trainer = make_trainer(folder, kind, samples=22, further=further, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, gradients.kept


def test_the_exact_trainer_has_the_full_batchs_gradient_and_resumes(tmp_path: Path) -> None:
    whole, truth = train(tmp_path / "whole", hf.Trainer, size=8, steps=1)
    parts, found = train(tmp_path / "parts", AccumulatorTrainer, size=4, steps=2, micro_batch=3)
    uneven, others = train(tmp_path / "uneven", AccumulatorTrainer, size=8, steps=1, micro_batch=3)
    by_tokens = make_plan(8, 2, tokens=make_token_budget(24))
    tokens, packed = train(tmp_path / "tokens", AccumulatorTrainer, size=8, steps=1, plan=by_tokens)
    assert len(truth) == len(found) == len(others) == len(packed) == 3
    for gradients in (found, others, packed):
        assert max(map(largest_difference, gradients, truth)) <= 1e-10
    expected = [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in whole.state.log_history[:3]]
    for trainer in (parts, uneven, tokens):
        logged = [(log["loss"], log["grad_norm"], log["learning_rate"]) for log in trainer.state.log_history[:3]]
        assert logged == [pytest.approx(each, rel=1e-6) for each in expected]
        assert largest_difference(trainer.model.state_dict(), whole.model.state_dict()) < 1e-10
    at = str(tmp_path / "parts" / "out" / "checkpoint-1")
    again, rest = train(tmp_path / "again", AccumulatorTrainer, size=4, steps=2, micro_batch=3, resume=at)
    assert len(rest) == 2
    for one, other in zip(again.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_exact_trainer_takes_packed_sequences(tmp_path: Path) -> None:
    packing = hf.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def flatten(samples: list[dict[str, Tensor]]) -> Any:
        return packing([{name: one[name].tolist() for name in ("input_ids", "labels")} for one in samples])

    _, truth = train(tmp_path / "whole", hf.Trainer, size=8, steps=1, data_collator=flatten)
    _, found = train(tmp_path / "parts", AccumulatorTrainer, size=4, steps=2, micro_batch=4, data_collator=flatten)
    assert len(truth) == len(found) == 3
    assert max(map(largest_difference, found, truth)) <= 1e-10


class HoldsModel(nn.Module):
    """As a loss of sentence-transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


RANK = """
import sys
from pathlib import Path
import torch
from test_transformers_trainer import train
from autoaccum.integrations.transformers import AccumulatorTrainer

trainer, gradients = train(Path(sys.argv[1]), AccumulatorTrainer, size=4, steps=1, micro_batch=3)
if trainer.is_world_process_zero():
    torch.save(gradients, Path(sys.argv[1]) / "gradients.pt")
"""


def run_on_ranks(script: str, folder: Path, warm_ranks: WarmRanks) -> list[str]:
    (folder / "rank.py").write_text(script)
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ranks = warm_ranks(folder, "rank.py", ".", environment=environment(PYTHONPATH=paths))
    assert not any(done.returncode for done in ranks), ranks
    return [done.stdout for done in ranks]


def test_two_ranks_have_the_gradient_of_one(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    _, truth = train(tmp_path / "whole", hf.Trainer, size=8, steps=1)
    run_on_ranks(RANK, tmp_path, warm_ranks)
    # The third window is not compared: accelerate fills the last batches of ranks up with samples from the start.
    found = torch.load(tmp_path / "gradients.pt")[:2]
    assert max(map(largest_difference, found, truth[:2])) <= 1e-10


COUNTING = """
import json, sys
from pathlib import Path
import torch
from test_arguments_from_plan import Rows, texts, train_with_transformers
from tiny_transformers import llama
from autoaccum import Plan

torch.manual_seed(0)
plan, found = Plan.load("plan.json"), []
for count in (30, 32):
    updates = train_with_transformers(plan, llama(), Rows(texts(count)), Path("out"))
    found.append([updates.samples, updates.ratios])
print(json.dumps(found))
"""


def test_the_arguments_of_a_plan_count_tokens_on_all_ranks(tmp_path: Path, warm_ranks: WarmRanks) -> None:
    """In micro-batches of 3, of which each rank gets as many: of 32 samples the first four are taken twice."""
    plan = make_plan(12, 4, equal=True, world_size=2, workload={"precision": "fp32"}, device=DeviceFacts(kind="cpu"))
    plan.save(tmp_path / "plan.json")
    for printed in run_on_ranks(COUNTING, tmp_path, warm_ranks):
        assert json.loads(printed.splitlines()[-1]) == [[[12, 12, 6], [1, 1, 1]], [[12, 12, 12], [1, 1, 1]]]


class Sentences(Texts):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(8) + index % 8, "labels": index % 2}


def test_the_exact_trainer_averages_a_loss_that_ignores_the_number_of_items(tmp_path: Path) -> None:
    """The Trainer itself adds the means of micro-batches up: its gradient is `gradient_accumulation_steps` as large."""
    norms = []
    for kind, size, steps, given in (
        (hf.Trainer, 8, 1, {}),
        (hf.Trainer, 2, 4, {}),
        (AccumulatorTrainer, 8, 1, {"micro_batch": 2}),
    ):
        torch.manual_seed(0)
        further = {"model": bert(**NO_DROPOUT), "train_dataset": Sentences(8), "data_collator": None, **given}
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 1}
        trainer = make_trainer(tmp_path, kind, further=further, **settings)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[1:] == [pytest.approx(4 * norms[0], rel=1e-4), pytest.approx(norms[0], rel=1e-4)]


def made_plan(micro_batch: int, target: int, **workload: Any) -> Plan:
    facts = {"model": "LlamaForCausalLM", "precision": "fp32", "optimizer": "AdamW", **workload}
    return make_plan(target, micro_batch, workload=facts)


def test_the_exact_trainer_takes_a_plan_of_its_own_training_only(tmp_path: Path) -> None:
    made_plan(4, 8).save(tmp_path / "plan.json")
    given: dict[str, Any] = {"further": {"plan": tmp_path / "plan.json"}, "per_device_train_batch_size": 8}
    trainer = make_trainer(tmp_path, AccumulatorTrainer, **given)
    trainer.train()
    assert trainer.state.global_step == 3
    with pytest.raises(UsageError, match="the plan is for AdamW, fp32; here is SGD, bf16: plan again for what is here"):
        make_trainer(tmp_path, AccumulatorTrainer, **given, bf16=True, optim="sgd").train()


def test_the_exact_trainer_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither plan nor micro_batch"):
        make_trainer(tmp_path, AccumulatorTrainer)
    plan = made_plan(4, 8, savers=("offload-optimizer",))
    with pytest.raises(UsageError, match="the plan has offload-optimizer"):
        make_trainer(tmp_path, AccumulatorTrainer, further={"plan": plan})
    trainer = make_trainer(tmp_path, AccumulatorTrainer, further={"plan": "plan.json"})
    assert workload_of(trainer) is not None  # Its plan is made from it.
    with pytest.raises(PlanFileError, match="there is no file plan.json: make one with `autoaccum plan"):
        trainer.train()
    with pytest.raises(UsageError, match="fp16"):
        make_trainer(tmp_path, AccumulatorTrainer, further={"micro_batch": 2}, fp16=True)


def test_an_optimizer_follows_parameters_that_were_replaced_and_stays_as_it_was_otherwise(tmp_path: Path) -> None:
    model = llama()
    adam = torch.optim.Adam(model.parameters())
    trainer = make_trainer(tmp_path, further={"model": model, "optimizers": (adam, None)})
    held = adam.param_groups[0]["params"]
    first, second, *_ = before = list(held)
    for one in (first, second):
        one.grad = torch.ones_like(one)
    adam.step()
    free_card(trainer)
    assert held is adam.param_groups[0]["params"]
    assert all(one is other for one, other in zip(held, before, strict=True))
    new, state = nn.Parameter(torch.zeros(1)), adam.state[first]
    setattr(first, REPLACED_BY, weakref.ref(new))
    free_card(trainer)
    assert held is adam.param_groups[0]["params"]
    assert (held[0] is new, held[1] is second) == (True, True)
    assert set(adam.state) == {new, second}
    assert adam.state[new] is state


def test_a_module_beside_the_model_is_part_of_the_trials(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.ref_model = nn.Linear(64, 64)
    workload = workload_of(trainer)
    assert workload is not None
    assert list(workload.modules) == ["ref_model"]
