"""Look at the first updates in parts: what accumulation changes in the model, and whether the parts' weights fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.accumulation.batchnorm import BATCHNORMS, normalises_by_batch, uncompiled
from autoaccum.accumulation.gradients import rounding_warning
from autoaccum.accumulation.out_of_memory import release_memory
from autoaccum.accumulation.reachable_objects import all_modules, find_reachable
from autoaccum.accumulation.rng_state import RngState, module_generators
from autoaccum.accumulation.step_result import WeightingWarning, warn_caller
from autoaccum.accumulation.transaction import StateCopy
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, parts_run
from autoaccum.errors import WorkloadError
from autoaccum.messages import Message, message
from autoaccum.sources.batches import batch_size, join_batches, split_batch
from autoaccum.sources.model_loss import balances_experts
from autoaccum.sources.objective import AS_ONE_MODULE, Objective
from autoaccum.sources.weight_candidates import ignored_labels_warning
from autoaccum.sources.weight_check import LossComparison, explain_mismatch, suggests_weight

if TYPE_CHECKING:
    from autoaccum.accumulation.backpropagation import Backpropagation, UpdateParts


class FirstSteps:
    """Warns of what the first updates of a training show, once of each.

    Args:
        check: What is done about a wrong weighting, as the Accumulator's argument.
        objective: The loss.
        multiple_of: The number that the samples of every part are a multiple of.
        trim: Cuts the padding of the parts, which a loss may count by mistake.
    """

    def __init__(self, check: str, objective: Objective, multiple_of: int, trim: Callable[[Any], Any]) -> None:
        self._weighting = WeightingCheck(check, objective, multiple_of, trim)
        self._is_first, self._has_warned, self._has_accumulated = True, False, False

    @contextmanager
    def watching(
        self,
        backpropagation: Backpropagation,
        modules: Sequence[nn.Module],
        update: UpdateParts,
        trained: Sequence[Tensor],
        compared: Sequence[Any],
        most: int,
        *,
        is_split: bool,
    ) -> Iterator[None]:
        """Look at an update in parts of at most `most` samples, which runs within; then warn of what it shows.

        `trained` are the parameters that it trains, and `compared` batches of its samples. `is_split` tells whether the
        effective batch, over all ranks, has several parts.

        Raises:
            WorkloadError: No gradient reaches the model; or parts are wrongly weighted, and the check is strict.
        """
        if is_split:
            self._weighting.look(backpropagation, modules, compared, most)
        model, messages = backpropagation.model, list[Message]()
        if not self._has_warned:
            messages += backpropagation.warnings(modules, accumulates=is_split)
        accumulates_first = is_split and not self._has_accumulated
        versions = _buffer_versions(model) if accumulates_first else {}
        yield
        buffers = update.buffers
        if self._is_first and update.losses.entries:
            _check_gradients(model, trained, () if buffers is None else buffers.sums)
        self._has_warned, self._is_first = self._has_warned or bool(messages), False
        if accumulates_first:
            self._has_accumulated = True
            messages += [message("experts_of_parts")] if balances_experts(model) else []
            messages += _written(versions)
            messages += [] if buffers is None or not buffers.rounds else [rounding_warning(trained)]
        for warning in messages:
            warn_caller(warning)
        self._weighting.tell(backpropagation, update.parts, is_split=is_split)


def _check_gradients(model: nn.Module, trained: Sequence[Tensor], sums: Collection[Tensor]) -> None:
    """Raise WorkloadError unless a parameter of `model` that is `trained` has a gradient, be it of zeros."""
    of_model = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    expected = [parameter for parameter in trained if id(parameter) in of_model]
    if expected and not any(parameter.grad is not None or parameter in sums for parameter in expected):
        raise WorkloadError(
            "no gradient reaches the model: the loss does not use the model it is given, or detaches its outputs",
            hint=f"call the model that is passed to loss(model, batch); {AS_ONE_MODULE}",
        )


def _buffer_versions(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return floating-point buffers by name, with their versions; BatchNorm's have a warning of their own."""
    return {
        f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
        for prefix, module in model.named_modules()
        if not isinstance(module, BATCHNORMS)
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_floating_point() and not buffer.is_inference()
    }


def _written(versions: Mapping[str, tuple[Tensor, int]]) -> list[Message]:
    """Return a warning that names the buffers that forward has written to; it may replace one, such as a table."""
    names = [name for name, (buffer, version) in versions.items() if buffer._version != version]
    return [message("buffers_written", buffers=names)] if names else []


_UPDATES, _SAMPLES = 64, 5
"""The last update at which samples are compared, and the most samples (or multiples) that are."""
_CARD_TOLERANCE = 5e-4
"""The relative difference up to which losses on a card count as equal: products may be rounded to 10 bits (TF32)."""


class WeightingCheck:
    """Compares the loss of a few samples with the weighted losses of two parts of them, until that has shown something.

    It does so at updates 1, 2, 4, 8 and so on in several parts, since samples may be alike in what counts in them. No
    more than a micro-batch is run, or two samples where that has one. A comparison that raises, draws random numbers
    or waits for other ranks is the last.
    """

    def __init__(self, mode: str, objective: Objective, multiple_of: int, trim: Callable[[Any], Any]) -> None:
        criterion = objective.criterion
        has_divisor = criterion is not None and criterion.divisor is not None and objective.weight_function is None
        self._is_over = mode == "off" or has_divisor or objective.coupled
        self._updates, self._multiple_of, self._trim = 0, multiple_of, trim
        self._is_strict, self._is_told, self._is_checked = mode == "strict", False, False
        self._mistakes: list[Message] = []

    def look(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], batches: Sequence[Any], micro_batch: int
    ) -> None:
        """Compare samples of `batches`, which run in parts of at most `micro_batch`; change nothing."""
        needs_others = backpropagation.run_parts is not None or backpropagation.sharded is not None
        if self._is_over or needs_others or backpropagation.ranks.rank or not batches:
            return
        self._updates += 1
        if self._updates & (self._updates - 1):
            return
        try:
            self._is_over = self._compare(backpropagation, modules, batches, micro_batch) or self._updates == _UPDATES
        except Exception:  # Memory may have run out; and what the loss raises, it raises in training, too.
            self._is_over = True
        if backpropagation.device.type != "cpu":
            release_memory(backpropagation.device)

    def tell(self, backpropagation: Backpropagation, parts: Sequence[Any], *, is_split: bool) -> None:
        """Warn of mistakes, or raise them as a WorkloadError, after `parts` have run."""
        mistakes, self._mistakes = self._mistakes, []
        if mistakes and (backpropagation.compares_samples or balances_experts(backpropagation.model)):  # Warned of.
            mistakes = [warning for warning in mistakes if suggests_weight(warning)]
        if mistakes and self._is_strict:
            raise WorkloadError("; ".join(map(str, mistakes)))
        if is_split and not (self._is_told or self._is_checked):
            warning = ignored_labels_warning(backpropagation.objective, backpropagation.model, parts)
            mistakes = [] if warning is None else [warning]
        self._is_told = self._is_told or is_split
        for warning in mistakes:
            warn_caller(warning, WeightingWarning)

    def _compare(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], batches: Sequence[Any], micro_batch: int
    ) -> bool:
        """Compare, and return whether there is no more to be learnt."""
        model, objective, unit = backpropagation.model, backpropagation.objective, self._multiple_of
        large = next((batch for batch in batches if batch_size(batch) >= 2 * unit), None)
        batch = join_batches(batches[:2]) if large is None else large
        units = min(batch_size(batch) // unit, max(micro_batch // unit, 2), _SAMPLES)
        if units < 2:
            return False
        first = max((units - 1) // 2, 1)
        sizes = [unit * first, unit * (units - first)]
        batch = split_batch(batch, [sum(sizes), batch_size(batch) - sum(sizes)])[0]
        with _evaluating(backpropagation, modules) as random_digest:
            if any(map(normalises_by_batch, modules)):
                return True
            before = random_digest()
            comparison = LossComparison(
                model, objective, lambda part: objective.terms(model, self._trim(part)), batch, sizes
            )
            if backpropagation.device.type != "cpu":
                comparison.tolerance = max(comparison.tolerance, _CARD_TOLERANCE)
            if not all(math.isfinite(comparison.declared(name)) for name in comparison.whole):
                return False
            mistakes = explain_mismatch(comparison, coupled=False)
            if random_digest() != before or any(module.training for module in modules):
                return True
        self._mistakes = [warning for warning in mistakes if warning.code == "weight_mismatch"]
        first_weights, other_weights = comparison.weights
        # Where weights are those of samples, the samples may just be alike in what else the loss divides by.
        differ = any(weight * sizes[1] != other_weights[name] * sizes[0] for name, weight in first_weights.items())
        self._is_checked = bool(mistakes) or objective.reduction == "sum" or differ
        return self._is_checked


@contextmanager
def _evaluating(backpropagation: Backpropagation, modules: Sequence[nn.Module]) -> Iterator[Callable[[], bytes]]:
    """Run in evaluation mode, without graph, autocast and talk between ranks; then restore all that a forward changes.

    Yields:
        A function that returns a digest of all random generators.
    """
    objective, device = backpropagation.objective, backpropagation.device
    functions = (*objective.user_functions, objective.weight_function, objective.criterion_module)
    used, generators = find_reachable([function for function in functions if function is not None])
    every = all_modules(*modules, *used.values())
    generators += module_generators(every)
    parameters = [tensor for module in every for tensor in module._parameters.values() if tensor is not None]
    state = StateCopy([vars(module) for module in every], without=parameters)
    random, is_fast = RngState([device], generators), torch.backends.mha.get_fastpath_enabled()
    alone = _OneRank() if backpropagation.ranks.size > 1 else nullcontext()  # type: ignore[no-untyped-call]
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # It cuts padding off, so that shapes are others.
        for module in every:
            module.training = False
        with warnings.catch_warnings(), torch.no_grad(), uncompiled(), parts_run(IN_SEQUENCE), alone:
            warnings.simplefilter("ignore")
            with torch.autocast(device.type, enabled=False):
                yield lambda: RngState([device], generators).digest()
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        state.restore()
        random.restore()


class _OneRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to talk to other ranks, which do not listen."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`, unless it is a collective."""
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} waits for other ranks")
        return func(*args, **(kwargs or {}))
