"""The options of a run reach the process that runs the trials, and invalid values are refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from click.testing import CliRunner

import autoaccum
from autoaccum.cli import flags, main
from autoaccum.devices.base import TrialSettings
from autoaccum.errors import NotMeasuredError, UsageError
from autoaccum.options import Command, OptionArguments, Options, make_options
from autoaccum.planning import plan_setup
from autoaccum.spec import SPEC_FIELDS, read_savers
from autoaccum.units import MemorySize

OPTIONS: Mapping[str, tuple[str, Any]] = {
    "optimizer": ("sgd", "sgd"),
    "precision": ("bf16", "bf16"),
    "batchnorm": ("running", "running"),
    "coupled": ("", True),
    "accumulate_in": ("parameters", "parameters"),
    "savers": ("recompute=2", ("recompute=2",)),
    "ema": ("", True),
    "hold_outputs": ("", True),
    "evaluation_batch": ("6", 6),
    "longest_of": ("7", 7),
    "multiple_of": ("2", 2),
    "device": ("cpu", "cpu"),
    "gpu": ("rtx3090", "rtx3090"),
    "values": ("cpu", "cpu"),
    "memory": ("80%", MemorySize(fraction=0.8)),
    "reserve": ("1GiB", MemorySize(bytes=1024**3)),
    "world_size": ("3", 3),
    "parallel": ("ddp", "ddp"),
    "mesh": ("1", (1,)),
    "equal": ("", True),
    "time_limit": ("50", 50.0),
    "trial_limit": ("5", 5.0),
    "updates": ("4", 4),
    "overrides": ("length=9", {"length": "9"}),
}
"""The value of each option on the command line and in the record."""


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_reaches_the_trial_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrialSettings] = []

    def make_device(settings: TrialSettings) -> Any:
        seen.append(settings)
        raise NotMeasuredError("far enough")

    monkeypatch.setattr(plan_setup, "make_device", make_device)
    text, value = OPTIONS[name]
    flag = ["--set" if name == "overrides" else f"--{name.replace('_', '-')}", *([text] if text else [])]
    of_command = name == "updates"
    workload = ["--", "python", "a.py", "{micro_batch}", "{iter_size}"] if of_command else ["model.py"]
    done = CliRunner().invoke(main, ["plan", "--target-batch", "12", "-q", *flag, *workload])
    assert str(done.exception) == "far enough" or "far enough" in done.output, done.output
    request = json.loads(json.dumps(seen[0].to_request()))
    assert make_options(**request["options"]) == seen[0].options == make_options(**{"equal": of_command, name: value})


def test_every_option_has_a_flag_an_argument_and_a_test() -> None:
    machine = {field.name for field in dataclasses.fields(Options)} - {"spec", "chooses_savers"}
    assert machine | set(SPEC_FIELDS) == set(OPTIONS) == set(flags._FLAGS) == set(get_type_hints(OptionArguments))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"precision": "fp8"}, "there is no precision 'fp8'"),
        ({"batchnorm": "whole"}, "there is no batchnorm mode 'whole': choose micro"),
        ({"coupled": "twice"}, "coupled is 'twice': give True or False"),
        ({"savers": "checkpoint"}, "'checkpoint' is no saver"),
        ({"savers": ["none", "recompute"]}, "none is given with savers: give none alone"),
        ({"savers": ["auto", "recompute"]}, "savers are auto, which stands alone and is for a plan to choose"),
        ({"values": "cuda"}, "there is no values 'cuda': choose cpu"),
        ({"accumulate_in": "fp16"}, "no accumulate_in 'fp16'"),
        ({"ema": "logs"}, "ema is 'logs': give True or False"),
        ({"evaluation_batch": 0}, "evaluation_batch is 0: give a whole number of at least 1"),
        ({"longest_of": 1.5}, "longest_of is 1.5"),
        ({"world_size": True}, "world_size is True"),
        ({"memory": "10"}, "'10' is not a memory size"),
        ({"reserve": 10}, "reserve is 10: write a size with its unit"),
        ({"gpu": 24}, 'gpu is 24: give the name of a card or a size with its unit, such as "rtx3090"'),
        ({"gpu": "rtx3090", "device": "cpu"}, "both --device cpu and --gpu rtx3090 are given: choose one"),
        ({"parallel": "tp"}, "there is no parallel 'tp': choose ddp or fsdp2"),
        ({"mesh": "2x2x2"}, "mesh is '2x2x2': write one or two numbers of ranks, such as 8 or 2x8"),
        ({"mesh": (2, 0)}, r"mesh is \(2, 0\)"),
        ({"mesh": (2, 8), "parallel": "ddp"}, "the mesh 2x8 has two dimensions, and ddp replicates in one: leave"),
        ({"equal": 1}, "equal is 1: give True or False"),
        ({"time_limit": float("inf")}, "the time limit is inf: give a number of seconds above 0"),
        ({"trial_limit": 0}, "the trial limit is 0"),
    ],
)
def test_refuses_invalid_values(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_options(**given)


def test_unknown_arguments_raise_a_type_error() -> None:
    for given in ({"bachnorm": "micro"}, {"share": 3}):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            autoaccum.plan("model.py", target_batch=8, **given)
    with pytest.raises(TypeError, match=r"verify\(\) got an unexpected keyword argument 'gpu'"):
        Options.of("verify", {"gpu": "rtx3090"})
    with pytest.raises(UsageError, match="there is no precision 'fp64': choose fp32, bf16 or fp16"):
        Options.of("plan", {"precision": "fp64"})


def test_a_mesh_of_two_dimensions_shards() -> None:
    assert (Options(mesh=(2, 8)).parallel, Options(mesh=(8,)).parallel) == ("fsdp2", None)


def test_savers_are_chosen_by_commands_that_plan_and_the_workload_has_none_until_then() -> None:
    choosing: tuple[Command, ...] = ("plan", "fit")
    others: tuple[Command, ...] = ("verify", "tune", "guard")
    for command in choosing:
        options = Options.of(command, {"savers": ("auto",)})
        assert options.chooses_savers
        assert options.spec["savers"] == ()
        assert make_options(**options.to_record()) == options
    for command in others:
        with pytest.raises(UsageError, match=f"a plan chooses, and {command} makes none with savers: plan with --sav"):
            Options.of(command, {"savers": "auto"})
    with pytest.raises(UsageError, match="savers are auto, which stands alone and is for a plan to choose"):
        read_savers("auto")
