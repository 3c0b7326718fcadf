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
from autoaccum.accumulation.coupling import list_names
from autoaccum.accumulation.out_of_memory import release_memory
from autoaccum.accumulation.reachable_objects import all_modules, find_reachable
from autoaccum.accumulation.rng_state import RngState, module_generators
from autoaccum.accumulation.step_result import WeightingWarning, warn_caller
from autoaccum.accumulation.transaction import AttributesCopy, ModuleState
from autoaccum.accumulation.whole_batch.lockstep import IN_SEQUENCE, parts_run
from autoaccum.errors import WorkloadError
from autoaccum.sources.batches import batch_size, join_batches, split_batch
from autoaccum.sources.model_loss import IGNORED
from autoaccum.sources.objective import AS_ONE_MODULE, Objective
from autoaccum.sources.pytree import CustomBatch
from autoaccum.sources.weight_candidates import find_leaves, ignored_labels_warning, is_integer
from autoaccum.sources.weight_check import Advice, LossComparison, Unchecked, explain_mismatch

if TYPE_CHECKING:
    from autoaccum.accumulation.backpropagation import Backpropagation

_FACTORS = ("router_aux_loss_coef", "router_z_loss_coef")
"""The factors of load-balancing losses, which models of transformers or their configurations have as attributes."""


def load_balancing_warning(model: nn.Module) -> list[str]:
    """Return a warning if the loss of `model` has a load-balancing term for its experts."""
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    owners = [*model.modules(), *configs, *(getattr(config, "text_config", None) for config in configs)]
    is_on = any(getattr(owner, "output_router_logits", False) for owner in owners)
    has_factor = any(getattr(owner, name, None) for owner in owners for name in _FACTORS)
    message = (
        "the loss that balances experts (output_router_logits) is computed from the tokens of a micro-batch, not of the"
        " effective batch, so that the gradient is not quite the full batch's: output_router_logits=False leaves it out"
    )
    return [message] if is_on and has_factor else []


def check_gradients(model: nn.Module, trained: Sequence[Tensor], sums: Collection[Tensor]) -> None:
    """Raise WorkloadError unless one of the parameters of `model` that are `trained` has a gradient, or one of `sums`.

    A gradient of zeros is one.
    """
    own = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    expected = [parameter for parameter in trained if id(parameter) in own]
    if expected and not any(one.grad is not None or one in sums for one in expected):
        raise WorkloadError(
            "no gradient reaches the model: the loss does not use the model it is given, or detaches its outputs",
            hint=f"call the model that is passed to loss(model, batch); {AS_ONE_MODULE}",
        )


class BufferVersions:
    """Finds floating-point buffers that forward writes to; BatchNorm's are left out, since they have a warning.

    Buffers that forward replaces, such as a table it enlarges, do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = {
            f"{prefix}{'.' if prefix else ''}{name}": (buffer, buffer._version)
            for prefix, module in model.named_modules()
            if not isinstance(module, BATCHNORMS)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point() and not buffer.is_inference()
        }

    def warnings(self) -> list[str]:
        """Return a warning that names the buffers written to since, if there are any."""
        names = [name for name, (buffer, version) in self._versions.items() if buffer._version != version]
        if not names:
            return []
        return [
            f"forward updates the buffers {list_names(names)}, once per micro-batch instead of once per update: where"
            " outputs depend on them (as in spectral_norm), the gradient is not the full batch's; freeze them with"
            " eval() on these modules"
        ]


class FirstSteps:
    """Warns of what the first steps of a training show, once each."""

    def __init__(self) -> None:
        self._is_first, self._has_warned, self._has_accumulated = True, False, False

    def watch(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], *, is_split: bool
    ) -> Callable[[Sequence[Tensor], Collection[Tensor], str | None], None]:
        """Look at a step before its parts run; return a function to warn of what it has shown, and of another text.

        `is_split` tells whether the effective batch, over all ranks, has several parts. The function takes the
        parameters that are trained and were used here, and those whose gradients are summed elsewhere.
        """
        model = backpropagation.model
        versions = BufferVersions(model) if is_split and not self._has_accumulated else None
        messages = [] if self._has_warned else backpropagation.warnings(modules, accumulates=is_split)

        def warn(trained: Sequence[Tensor], sums: Collection[Tensor], rounding: str | None) -> None:
            if self._is_first:
                check_gradients(model, trained, sums)
            self._has_warned, self._is_first = self._has_warned or bool(messages), False
            found = list(messages)
            if versions is not None:
                self._has_accumulated = True
                found += [*load_balancing_warning(model), *versions.warnings()]
                found += [] if rounding is None else [rounding]
            for text in found:
                warn_caller(text)

        return warn


_UPDATES, _COMPARISONS, _SAMPLES = 64, 4, 5
"""The first updates, in which uneven samples are looked for; the most comparisons, since losses that are almost equal
show nothing; and the samples (or multiples) in each."""
_VOID = 255
"""What stands for no class in segmentation maps."""
_CARD_TOLERANCE = 5e-4
"""The relative difference up to which losses on a card count as equal: products may be rounded to 10 bits (TF32)."""


class WeightingCheck:
    """Compares the loss of a few samples with the weighted losses of two parts of them, until that has shown something.

    It does so at the first update in several parts, and again where two parts differ in what counts in a sample. No
    more than a micro-batch is run, or two samples where that has one. A comparison that raises, draws random numbers
    or waits for other ranks is the last.
    """

    def __init__(self, mode: str, objective: Objective, multiple_of: int) -> None:
        criterion = objective.criterion
        is_known = criterion is not None and criterion.divisor is not None and objective.weight_function is None
        self._updates = 0 if mode == "off" or is_known or objective.coupled else _UPDATES
        self._comparisons, self._each = 0, multiple_of
        self._is_strict, self._is_told, self._is_checked = mode == "strict", False, False
        self._found: list[str] = []

    def look(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], batches: Sequence[Any], most: int
    ) -> None:
        """Compare samples of `batches`, which run in parts of at most `most`; change nothing."""
        needs_others = backpropagation.run_parts is not None or backpropagation.sharded is not None
        if not self._updates or needs_others or backpropagation.ranks.rank or not batches:
            return
        self._updates, compared = self._updates - 1, self._comparisons
        try:
            is_last = self._compare(backpropagation, modules, batches, most)
        except Exception:  # Memory may have run out; and what the loss raises, it raises in training, too.
            is_last = True
        if self._comparisons > compared and backpropagation.device.type != "cpu":
            release_memory(backpropagation.device)
        if is_last or self._comparisons == _COMPARISONS:
            self._updates = 0

    def tell(self, backpropagation: Backpropagation, parts: Sequence[Any], *, is_split: bool) -> None:
        """Warn of what was found, or raise it as a WorkloadError, after `parts` have run."""
        found, self._found = self._found, []
        if backpropagation.compares_samples or load_balancing_warning(backpropagation.model):  # These are warned of.
            found = [text for text in found if isinstance(text, Advice)]
        if found and self._is_strict:
            raise WorkloadError("; ".join(found))
        if is_split and not (self._is_told or self._is_checked):
            text = ignored_labels_warning(backpropagation.objective, backpropagation.model, parts)
            found = [] if text is None else [text]
        self._is_told = self._is_told or is_split
        for text in found:
            warn_caller(text, WeightingWarning)

    def _compare(
        self, backpropagation: Backpropagation, modules: Sequence[nn.Module], batches: Sequence[Any], most: int
    ) -> bool:
        """Compare, unless parts are alike again, and return whether there is no more to be learnt."""
        model, objective, each = backpropagation.model, backpropagation.objective, self._each
        large = next((one for one in batches if batch_size(one) >= 2 * each), None)
        batch = join_batches(batches[:2]) if large is None else large
        units = min(batch_size(batch) // each, max(most // each, 2), _SAMPLES)
        if units < 2:
            return False
        first = max((units - 1) // 2, 1)
        sizes = [each * first, each * (units - first)]
        batch = split_batch(batch, [sum(sizes), batch_size(batch) - sum(sizes)])[0]
        parts = split_batch(batch, sizes)
        one, other = (dict(_counts(part)) for part in parts)
        counts = [(one[path], other[path]) for path in one if path in other]
        uneven = [pair for pair in counts if pair[0] * sizes[1] != pair[1] * sizes[0]]
        if counts and not uneven and self._comparisons:
            return False
        self._comparisons += 1
        with _evaluating(backpropagation, modules) as random_digest:
            if any(map(normalises_by_batch, modules)):
                return True
            before = random_digest()
            comparison = LossComparison(model, objective, lambda one: objective.terms(model, one), batch, sizes)
            if backpropagation.device.type != "cpu":
                comparison.tolerance = max(comparison.tolerance, _CARD_TOLERANCE)
            if not all(math.isfinite(comparison.declared(name)) for name in comparison.whole):
                return False
            found = explain_mismatch(comparison, coupled=False)
            if random_digest() != before or any(module.training for module in modules):
                return True
        self._found = [text for text in found if not isinstance(text, Unchecked)]
        others = [(name, comparison.combined(name, one)) for name in comparison.whole for one in (sizes, *uneven)]
        shows = any(not comparison.agrees(*other) for other in others)
        self._is_checked = bool(found or not counts or (uneven and shows))
        return self._is_checked


def _counts(batch: Any) -> Iterator[tuple[str, float]]:
    """Yield, by path, how many ones a mask has, entries that are neither ignored nor padding, or a sum of integers."""
    for path, leaf in () if isinstance(batch, CustomBatch) else find_leaves(batch):
        if not isinstance(leaf, Tensor):
            yield path, sum(len(entry) if hasattr(entry, "__len__") else 1 for entry in leaf)
        elif leaf.ndim > 1 and not leaf.is_complex():
            is_mask = bool(((leaf == 0) | (leaf == 1)).all())
            if not is_mask and not leaf.is_floating_point():
                rows = leaf.flatten(1)
                ends = (rows == rows[:, -1:]).flip(1).long().cumprod(1).flip(1)
                padding = ends * (ends.sum(1, keepdim=True) > 1) if leaf.ndim == 2 else rows == _VOID
                yield path, float(((rows != IGNORED) & (padding == 0)).sum())
            elif is_mask:
                yield path, float(leaf.sum())
        elif is_integer(leaf):  # Classes may have weights; lengths.
            yield path, float(leaf.sum())


@contextmanager
def _evaluating(backpropagation: Backpropagation, modules: Sequence[nn.Module]) -> Iterator[Callable[[], bytes]]:
    """Run in evaluation mode, without graph, autocast and talk between ranks; then restore all that a forward changes.

    Yields:
        A function that returns a digest of all random generators.
    """
    objective = backpropagation.objective
    functions = (*objective.user_functions, objective.weight_function, objective.criterion_module)
    used, generators = find_reachable([one for one in functions if one is not None])
    every = all_modules(*modules, *used.values())
    generators += module_generators(every)
    state, attributes = ModuleState(every), AttributesCopy(every)
    random, is_fast = RngState([backpropagation.device], generators), torch.backends.mha.get_fastpath_enabled()
    has_others = backpropagation.ranks.size > 1
    alone = _OneRank() if has_others else nullcontext()  # type: ignore[no-untyped-call]
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # It cuts padding off, so that shapes are others.
        for module in every:
            module.training = False
        with warnings.catch_warnings(), torch.no_grad(), uncompiled(), parts_run(IN_SEQUENCE), alone:
            warnings.simplefilter("ignore")
            with torch.autocast(backpropagation.device.type, enabled=False):
                yield lambda: RngState([backpropagation.device], generators).digest()
    finally:
        torch.backends.mha.set_fastpath_enabled(is_fast)
        state.restore()
        attributes.restore()
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
