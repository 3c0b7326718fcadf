"""Every message has a sentence; `sentences.txt` beside this file shows what people read."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import autoaccum
from autoaccum import errors
from autoaccum.messages import Message
from autoaccum.sentences import SENTENCES
from autoaccum.serialization import read_record, to_plain

_MISMATCH = {"term": "loss", "sizes": [2, 3], "whole": 0.7, "combined": 0.65}
_COSTS = {"savers": "recompute=6", "size": 4, "peak_bytes": 30 * 1024**3}
EXAMPLES: Mapping[str, list[dict[str, Any]]] = {
    "batchnorm_of_parts": [{"modules": ["bn1"], "mode": mode} for mode in ("micro", "running")],
    "module_mixes_samples": [{"modules": ["0", "2"]}],
    "buffers_written": [{"buffers": ["u", "v"]}],
    "statistics_unset": [{}],
    "sums_rounded": [{"dtypes": ["bfloat16"]}],
    "weight_mismatch": [
        {**_MISMATCH, "divisor": "samples", "advice": Message("no_weight_fits")},
        {**_MISMATCH, "term": "tokens", "divisor": None, "advice": None},
    ],
    "write_sum": [{"has_weight": False}, {"has_weight": True}],
    "write_weight": [{"code": "len(batch)", "is_sum": False}, {"code": "len(batch)", "is_sum": True}],
    "divisors_likely": [{"divisors": {"loss": "len(batch)", "tokens": "(batch != 0).sum()"}}],
    "divisor_likely": [{"code": "len(batch)"}],
    "labels_ignored": [{"labels": 'batch["labels"]', "code": '(batch["labels"] != -100).sum()'}],
    "weight_assumed": [{"divisor": "labels[..., 1:] != -100 (LlamaForCausalLM)"}],
    "batch_guessed": [
        {"what": "batch[0] is a list of 4 whose tensors all have 4 rows", "samples": 4, "way_out": "say so"}
    ],
    "verified_in_float32": [{"error": "this kernel takes float32"}],
    "samples_shortened": [{"paths": ['batch["attention_mask"]', 'batch["labels"]']}],
    "window_left_out": [{"parts": [2, 1], "error": "expected more than one sample"}],
    "tokens_alike": [{"tokens": 512}],
    "padding_counts": [{"parts": [4, 4, 8]}],
    "framework_counts_samples": [
        {"name": "transformers", "trainer": True, "balances": True, "micro_batch": 4, "target_tokens": None},
        {"name": "Lightning", "trainer": False, "balances": False, "micro_batch": 1, "target_tokens": 65536},
    ],
    "loop_left_out": [{"parts": [4, 4, 3]}],
    "random_neutral": [
        {"method": method, "parts": [4, 4], "reason": Message(code)}
        for method, code in (("accumulator", "draws_of_ranks"), ("accumulate", "draws_of_loop"))
    ],
    "draws_unmatched": [{"sites": ["aten.bernoulli_ (model.py:12)", "aten.rand"]}],
    "draws_not_replayed": [{"error": "aten.rand draws where aten.randn drew in the recorded run"}],
    "search_failed": [{"error": "the loss raised ValueError"}],
    "command_catches_oom": [{"size": 32, "rows": 16}],
    "data_ends": [{"size": 480, "largest": 240}],
    "command_updates_differ": [{"passes": [4, 4, 6], "iter_size": 4}],
    "command_batchnorm": [{"layers": ["1", "4"]}],
    "command_scale_some": [{"tensors": ["head.weight"]}],
    "command_scaled": [
        {"factor": 4.0, "parts": 4, "tensors": []},
        {"factor": 0.25, "parts": 4, "tensors": ["head.weight"]},
        {"factor": 2.0, "parts": 4, "tensors": []},
    ],
    "command_ignored": [{"passes": 1, "expected": 4, "option": "--accum"}],
    "command_other_samples": [{"same": 3, "samples": 16}],
    "command_no_gradient": [{"seen": "not finite"}],
    "batchnorm_by_parts": [{"modules": ["norm1", "norm2"]}],
    "take_batchnorm_mode": [{"mode": mode} for mode in ("exact", "frozen")],
    "sample_depends_on_others": [{"modules": ["0"]}],
    "wrong_weights": [
        {"sizes": [3, 5], "losses": {"loss": [0.7, 0.65]}, "divisor": "samples"},
        {"sizes": [3, 5], "losses": {"tokens": [0.7, 0.65], "size": [1.2, 1.25]}, "divisor": None},
    ],
    "draws_mix_samples": [{"sites": ["aten.randperm (model.py:12)"]}],
    "parts_count": [
        {"mistake": mistake, "factors": [1.0, 1e-17], "shares": [0.75, 0.25]}
        for mistake in ("undivided", "divided twice", "mean of means", "last window", "weights")
    ],
    "divide_parts": [
        {"divisor": None, "over_ranks": False},
        *({"divisor": "weight(part)", "over_ranks": ranks} for ranks in (False, True)),
    ],
    "unexplained": [{"tensor": "head.weight", "reason": reason} for reason in (None, "the model cannot be copied")],
    "search_stopped": [{"tensor": "head.weight", "limit_seconds": 60.0}],
    "repeated_smaller": [
        {"phase": "backward", "size": 8 * size, "lowered": size, "unit": unit}
        for size, unit in ((1, "sample"), (512, "token"))
    ],
    "repeated_with_saver": [{"phase": "backward", "size": 1, "unit": "sample", "saver": "recompute"}],
    "sample_over_budget": [{"length": 9000, "micro_tokens": 8192}],
    "idle_ranks": [{"idle": 1, "world_size": 4}],
    "nearby_target": [{"target_batch": 257, "micro_batch": 1, "above": 257, "nearby": 256}],
    "equal_parts": [{"samples": 254, "iter_size": 127, "uneven": [85, 85, 84], "world_size": size} for size in (1, 2)],
    "multiple_found": [{"error": "expected an even batch"}],
    "modules_beside": [{"sizes": {"teacher": 1024**3}}],
    "learning_rate": [
        {"target_batch": 256, "iter_size": count, "reduction": reduction}
        for count, reduction in ((1, "mean"), (4, "mean"), (4, "sum"), (4, None))
    ],
    "refuted": [{"parts": [40, 40], "outcome": "oom", "larger": 48, "predicted": known} for known in (False, True)],
    "tight": [{"size": 40, "predicted": known} for known in (False, True)],
    "stopped": [{"limit": "the limit of 3 trials", "largest_fit": 16, "first_fail": fail} for fail in (None, 32)],
    "objects_on_host": [{"bytes": 3 * 1024**3}],
    "not_monotone": [{"name": "length", "smaller": 1920, "larger": 2048}],
    "not_timed": [{"done": "timed", "error": "it ran out of memory"}],
    "fastest": [
        {
            "kind": kind,
            "fastest": 64,
            "chosen": chosen,
            "rates": {"32": 98.0, "64": 100.0, "128": 90.0},
            "share": 0.02,
            "largest": 128,
            "spread": 0.1,
        }
        for kind, chosen in (("measured", 32), ("estimated", 64))
    ],
    "grad_sync_unusable": [{"error": "gradients are added up in bfloat16"}],
    "savers_not_needed": [{"size": 1}],
    "savers_chosen": [
        {**_COSTS, "flops": 0.33, "moved_bytes": 2 * 1024**3, "seconds": 0.28},
        {**_COSTS, "peak_bytes": None, "flops": None, "moved_bytes": 0, "seconds": 0.0},
    ],
    "saver_unusable": [{"savers": "recompute=6", "error": "the blocks have BatchNorms"}],
    "framework_means": [{"name": "accelerate", "divisor": "the workload's weight()"}],
    "framework_adds_means": [{"model": "GPT2LMHeadModel", "iter_size": 4}],
    "framework_shards": [{"name": "DeepSpeed", "settings": "zero_optimization.stage 3"}],
    "framework_copies_gradients": [{"name": "Lightning", "bytes": 2 * 1024**3}],
    "framework_rounds": [{"name": "DeepSpeed", "dtypes": ["bfloat16"]}],
    "planned_elsewhere": [{"there": "a CUDA card", "here": "the CPU"}],
    "tuned_rate": [{"rate": 0.003}],
    "code_changed": [{"name": "model.py"}],
    "ceiling_known": [{"size": 16, "unit": "sample"}],
    "ranks_changed": [{"before": 2, "now": 4}],
    "read_forward": [{"windows": 1200, "has_state": known} for known in (False, True)],
    "samples_dropped": [{"samples": 3, "multiple_of": 4}],
    "update_skipped": [{"update": 7, "reason": "the gradient is not finite"}],
    "retried_smaller": [{"update": 7, "phase": "backward", "size": 64, "unit": "token", "lowered": 16}],
    "retried_with_saver": [{"update": 7, "phase": "backward", "size": 1, "unit": "sample", "saver": "recompute"}],
    "checkpoint_not_written": [{"update": 100, "error": "the disk is full"}],
    "metrics_not_written": [{"path": "runs/a/metrics.jsonl", "error": "No space left on device"}],
    "predicted": [{"uncertainty_bytes": 500 * 1024**2, "measurable": known} for known in (True, False)],
    "uncertainty": [
        {
            "uncertainty_bytes": 2**30,
            "context_bytes": 2**28,
            "workspace_bytes": 2**27,
            "rules": ["conv_forward"],
            "nccl_bytes": 2**29,
        }
    ],
    "narrow_fit": [
        {"room_bytes": 2**27, "uncertainty_bytes": 2**28, "reserve": reserve, "measurable": known}
        for reserve, known in (("300MiB", True), (None, False))
    ],
    "card_assumed": [{"card": "any card of 24 GiB", "source": "assumed: as the RTX 3090"}],
    "check_assumed": [{"place": "model.py:12"}],
    "values_assumed": [{"places": ["train.py:31", "train.py:40"]}],
    "values_read": [{"reads": 1, "samples": 24}, {"reads": 3, "samples": 1}],
    "trace_differs": [{"parts": [20, 20], "sizes": [2, 3, 5]}],
    "not_extrapolated": [{"error": "a block has 3, 5 and 9 bytes at sizes 2, 3 and 5"}],
    "not_simulated": [{"error": "aten::foo has no rule"}],
    "no_token_budget": [{"error": "micro-batches are multiples of 2 samples"}],
    "not_explained": [{"error": "it was interrupted"}],
    "changes_unknown": [{"error": "aten::foo has no rule"}],
    "change_not_simulated": [{"change": "bf16"}],
    "error": [{"error": "workload", "text": "model() raised ValueError: odd"}],
    "not_locked": [{"lock": "autoaccum.lock", "exists": known} for known in (True, False)],
    "other_schedule": [{"before": [32] * 8, "now": [64] * 4}],
    "other_card": [{"before": "NVIDIA GeForce RTX 3090", "now": "NVIDIA A40"}],
    "other_setting": [{"name": "torch", "before": was, "now": "2.14.1"} for was in ("2.13.0", None)],
    "fits_no_more": [{"micro_batch": 22, "min_budget_bytes": 26 * 2**30, "limit_bytes": 23 * 2**30}],
    "largest_fell": [{"before": 22, "now": 19}],
    "memory_grew": [
        {"quantity": quantity, "bytes": 2**30, "before_bytes": 2**33, "tolerance": "1%"}
        for quantity in ("peak", "min_budget")
    ],
    "memory_changed": [
        {"quantity": quantity, "bytes": -(2**20), "before_bytes": 2**33} for quantity in ("peak", "held", "min_budget")
    ],
    "module_changed": [
        {"category": "optimizer_state", "module": "h.{0..11}.mlp", "bytes": 2**30, "change": "new"},
        {"category": "workspace", "module": "", "bytes": -(2**20), "change": ""},
    ],
    "peak_moved": [{"before": "backward", "now": "optimizer step"}],
    "setting_changed": [{"name": "precision", "before": "bf16", "now": "fp32"}],
    "largest_changed": [{"gpu": "rtx3090", "before": 22, "now": 0}],
    "summary_not_written": [{"error": "No such file or directory"}],
    "held_out_loss_not_finite": [{"loss": "nan", "update": 3}],
    "trial_warning": [{"number": 3, "warning": Message("not_verified")}],
    "study_out_of_time": [{"seconds": 60.0}],
    "best_not_planned": [{"error": "micro-batch 1 does not fit"}],
    "rate_near_end": [{"end": 0.1}],
}
"""By code, facts that its sentence needs; a code that is not here needs none."""


def messages() -> list[Message]:
    """Return an example of every message, as its sentence may take other forms several."""
    return [Message(code, facts) for code in SENTENCES for facts in EXAMPLES.get(code, [{}])]


def test_every_code_has_an_example_and_the_snapshot_has_its_sentence() -> None:
    """After a change: `PYTHONPATH=.:tests python -m test_messages`, and read the difference."""
    assert EXAMPLES.keys() <= SENTENCES.keys()
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


def test_every_code_is_used_and_every_message_has_the_facts_of_its_sentence() -> None:
    used: set[str] = set()
    for path in Path(autoaccum.__file__).parent.rglob("*.py"):
        if path.name == "sentences.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.add(node.value)
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "message"):
                continue
            if isinstance(node.args[0], ast.Constant):
                code, names = str(node.args[0].value), {keyword.arg for keyword in node.keywords}
                assert code in SENTENCES, f"{path}:{node.lineno}: {code} has no sentence"
                shown = set(EXAMPLES.get(code, [{}])[0])
                assert None in names or names == shown, f"{path}:{node.lineno}: {code} has an example of {shown} only"
    assert SENTENCES.keys() <= used


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.code)
def test_a_message_survives_json_and_is_one_sentence_without_a_full_stop(message: Message) -> None:
    plain = to_plain(message)
    assert plain["text"] == str(message) != f"{message.code}: {dict(message.facts)}"
    assert read_record(plain, Message) == message
    assert "\n" not in str(message)
    assert not str(message).endswith(".")


def test_a_message_of_another_version_shows_its_code_and_facts() -> None:
    for foreign in (Message("from_tomorrow", {"size": 3}), Message("tight", {"size": 3})):
        assert str(foreign) == f"{foreign.code}: {{'size': 3}}"


@pytest.mark.parametrize("fact", [{"code": "tight", "facts": None}, {"code": 3, "facts": {}}])
def test_a_fact_that_is_no_message_stays_as_it_is(fact: dict[str, object]) -> None:
    assert Message("from_tomorrow", {"cause": fact}).facts == {"cause": fact}


def test_every_error_has_a_code_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    codes = [kind.code for kind in kinds if issubclass(kind, errors.AutoaccumError)]
    assert len(set(codes)) == len(codes) > 10


SNAPSHOT = Path(__file__).with_name("sentences.txt")


def snapshot() -> str:
    """Return all sentences by code."""
    return "".join(f"{message.code}: {message}\n" for message in messages())


if __name__ == "__main__":
    SNAPSHOT.write_text(snapshot(), encoding="utf-8")
