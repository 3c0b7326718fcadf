"""Randomness switched off: every random op gives a neutral value, the same for all samples of equal inputs."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autoaccum.accumulation.draws.fused_kernels import open_kernels
from autoaccum.accumulation.draws.random_calls import RandomCall, RandomCalls
from autoaccum.accumulation.randomness import RandomState, seeded_devices

_SEED = 0


@contextmanager
def calm() -> Iterator[set[tuple[str, int]]]:
    """Run without chance, on whatever is run: a whole batch and its parts then see the same.

    Dropout keeps all, still divided by what it would have kept on average. Uniform draws are the middle of their
    range, normal ones the mean, permutations the identity, integers the lowest; Bernoulli draws are 1 unless their
    probability is 0; multinomial ones the likeliest. What no value is known for draws as it does, from a fixed seed.
    Python's and NumPy's global generators start from a fixed seed: parts must rewind them between each other
    (`Draws.begin_part`). All generators are put back afterwards.

    Yields:
        Filled with the operations that draw indices, and of how many rows.
    """
    state = RandomState(seeded_devices())
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(_SEED)
    ranges: set[tuple[str, int]] = set()

    def answer(call: RandomCall) -> None:
        if call.rows is not None:
            ranges.add((str(call.site), call.rows))
        _calm(call)

    try:
        with open_kernels(), RandomCalls(answer):
            yield ranges
    finally:
        state.restore()


def _calm(call: RandomCall) -> None:
    if call.op == "aten.native_dropout":
        call.give([torch.ones_like(call.outputs[1])])
    elif "noise" in call.arguments:
        middle = (call.arguments["lower"] + call.arguments["upper"]) / 2
        call.give([torch.where(call.arguments["noise"] == 1, 1.0, middle)])
    elif call.op.rstrip("_") in _NEUTRAL:
        call.outputs[0].copy_(torch.as_tensor(_NEUTRAL[call.op.rstrip("_")](call.arguments)))


def _bernoulli(arguments: Mapping[str, Any]) -> Any:
    probability = arguments.get("p", arguments["self"])
    return probability > 0 if isinstance(probability, Tensor) else float(probability > 0)


def _normal(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("mean", 0.0)


def _lowest(arguments: Mapping[str, Any]) -> Any:
    return arguments.get("low", arguments.get("from", 0))


def _chosen(arguments: Mapping[str, Any]) -> Tensor:
    """The likeliest of each row: as often as asked with replacement, the next likeliest else."""
    weights, count = arguments["self"], arguments["num_samples"]
    if arguments["replacement"]:
        return torch.as_tensor(weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count))
    return torch.as_tensor(weights.topk(count, dim=-1).indices)


_NEUTRAL: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "aten.bernoulli": _bernoulli,
    "aten.binomial": lambda arguments: (arguments["count"] * arguments["prob"]).round(),
    "aten.cauchy": lambda arguments: arguments["median"],
    "aten.exponential": lambda arguments: 1 / arguments["lambd"],
    "aten.geometric": lambda arguments: 1.0,
    "aten.log_normal": lambda arguments: math.exp(arguments["mean"]),
    "aten.multinomial": _chosen,
    "aten.normal": _normal,
    "aten.poisson": lambda arguments: arguments["self"].round(),
    "aten.rand": lambda arguments: 0.5,
    "aten.rand_like": lambda arguments: 0.5,
    "aten.randint": _lowest,
    "aten.randint_like": _lowest,
    "aten.randn": lambda arguments: 0.0,
    "aten.randn_like": lambda arguments: 0.0,
    "aten.random": _lowest,
    "aten.randperm": lambda arguments: torch.arange(arguments["n"]),
    "aten.uniform": lambda arguments: (arguments["from"] + arguments["to"]) / 2,
    "aten._standard_gamma": lambda arguments: arguments["self"],
    "aten._sample_dirichlet": lambda arguments: arguments["self"] / arguments["self"].sum(-1, keepdim=True),
}
