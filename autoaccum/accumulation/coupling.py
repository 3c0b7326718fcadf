"""Does a model or a loss couple its samples? Told by running four of them together, and in two pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn

from autoaccum.accumulation.company.allotment import TOO_LONG, TooLong
from autoaccum.accumulation.company.divergence import Comparer, Divergence
from autoaccum.accumulation.company.entries import exchanged
from autoaccum.accumulation.company.findings import Coupling
from autoaccum.accumulation.company.interaction import Interactions
from autoaccum.accumulation.company.module_calls import Follower, Measurer, Recorder, following
from autoaccum.accumulation.company.words import ITSELF
from autoaccum.accumulation.draws.calm import calm
from autoaccum.accumulation.draws.draws import Draws
from autoaccum.accumulation.draws.joins import DrawMismatch, IndexMismatch
from autoaccum.workload.batches import split_batch
from autoaccum.workload.experiments import map_tensors, own_randomness
from autoaccum.workload.weights import Objective

Fresh: TypeAlias = "Callable[[], tuple[nn.Module, Objective]]"

_ROUNDING = 1e-9
_ENTRIES = "the loss takes a sample by what the batch holds of others"


def find_coupling(
    fresh: Fresh, batch: Any, sizes: Sequence[int], beside: Mapping[str, nn.Module] = MappingProxyType({})
) -> Coupling:
    """Run the first two parts of a batch together, and each alone, forward only, and compare what all modules give.

    Random draws are the same in all runs; where their shapes forbid that, random operations do nothing. The states of
    Python's, NumPy's and torch's generators on the CPU are put back. Whatever is raised becomes the reason.

    Args:
        fresh: Gives an equal copy of model and objective for every run, in training mode.
        batch: On the device and of the dtype of the copies; it is left as it is.
        sizes: Samples of its parts, in order. Parts of one sample are none that BatchNorm can run.
        beside: Modules that the loss calls and the model does not hold, as a teacher, by name.
    """
    filled = [size for size in sizes if size > 0][:2]
    if len(filled) < 2:
        return Coupling(reason="there is only one part")
    try:
        every = zip(split_batch(batch, list(sizes)), sizes, strict=True)
        parts = [part for part, size in every if size > 0][:2]
        together = split_batch(batch, [sum(filled), sum(sizes) - sum(filled)])[0]
        with own_randomness(), _uncompiled():
            return _Trial(fresh, together, parts, filled, beside).find()
    except TooLong:
        return Coupling(reason=TOO_LONG)
    except (Exception, SystemExit) as error:
        return Coupling(reason=reason_of(error))


def reason_of(error: BaseException) -> str:
    """What was raised, in one line."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _uncompiled() -> AbstractContextManager[object]:
    """Hooks would have a compiled model compiled again. Asked of torch only where that is loaded: it takes a second."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Trial:
    """The runs of one experiment."""

    def __init__(
        self, fresh: Fresh, together: Any, parts: list[Any], sizes: list[int], beside: Mapping[str, nn.Module]
    ) -> None:
        self._beside = beside
        self._fresh, self._together, self._parts, self._sizes = fresh, together, parts, sizes
        self._records_gradients = False
        self._dtype = torch.float32
        self._draws: Draws | None = None
        self._alone = Measurer(), Measurer()

    def find(self) -> Coupling:
        self._learn_how_to_run()
        draws = Draws(self._sizes)
        try:
            with draws.recording():
                for index, part in enumerate(self._parts):
                    draws.begin_part(index)
                    self._run(part, self._alone[index])
            self._draws = draws
            found = self._compare()
        except DrawMismatch as mismatch:
            self._draws = None
            return _unsure_of(self._compare(), mismatch)
        if not (found.found and draws.sites):
            return found
        self._draws = None  # What is whose is guessed where draws are joined: what is due to that ends without chance.
        return _seen_in_both(found, self._compare())

    def _compare(self) -> Coupling:
        divergence = Divergence(Recorder(), self._sizes, self._alone)
        found = self._diverge(divergence)
        giving = {name or ITSELF for name in divergence.pairs()}
        return replace(found, pairs=tuple(name for name in found.modules if name in giving))

    def _diverge(self, divergence: Divergence) -> Coupling:
        terms, again = self._run_together(divergence.whole), self._run_together()
        if any(abs(again[name] - term) > _ROUNDING * abs(term) for name, term in terms.items()):
            return Coupling(reason="the loss differs from run to run")
        for index, part in enumerate(self._parts):
            comparer = Comparer(divergence, index)
            with calm() if self._draws is None else self._draws.of_part(index):
                self._run(part, comparer)
            comparer.finish()
        blamed = divergence.coupled()
        names = tuple(call.name or ITSELF for call in blamed if call is not None)
        coupled = {call.name for call in blamed if call is not None}
        try:
            if None in blamed:
                return Coupling(names, True, _reason(divergence, True))
            interactions = Interactions(self._run_together, terms, divergence, self._dtype)
            loss = interactions.mixes_rows(coupled)
            if loss is not False:
                return Coupling(names, loss, _reason(divergence, loss))
            loss = self._mixes_entries(interactions)
        except TooLong:
            return Coupling(names, None, TOO_LONG)
        return Coupling(names, loss, _ENTRIES if loss is None else _reason(divergence, loss))

    def _mixes_entries(self, interactions: Interactions) -> bool | None:
        """Whether the loss mixes what the batch holds; of counts, only that it is not told, nor that it is not."""
        criterion = self._fresh()[1].criterion
        if criterion is not None and criterion.rule is not None and not criterion.is_elementwise:
            return False  # Torch's own take no statistics of targets; outputs and targets of two shapes are broadcast.
        floating, counted = (
            None if other is None else interactions.mixes_entries(other)
            for other in (
                exchanged(self._together, self._sizes[0], sum(self._sizes), counted=counted)
                for counted in (False, True)
            )
        )
        return None if counted and not floating else bool(floating)

    def _learn_how_to_run(self) -> None:
        """A model may take gradients within its forward."""
        try:
            self._run(self._together)
        except (Exception, SystemExit):
            self._records_gradients = True
            self._run(self._together)

    def _run_together(self, follower: Follower | None = None, batch: Any = None) -> dict[str, float]:
        with calm() if self._draws is None else self._draws.joined():
            return self._run(self._together if batch is None else batch, follower)

    def _run(self, batch: Any, follower: Follower | None = None) -> dict[str, float]:
        model, objective = self._fresh()
        own = map_tensors(batch, lambda tensor: tensor.detach().clone())
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._records_gradients))
            if follower is not None:
                stack.enter_context(following(model, follower, self._beside))
            terms = objective.terms(model, own)
        self._dtype = next(iter(terms.values())).dtype
        return {name: float(term.detach()) for name, term in terms.items()}


def _seen_in_both(joined: Coupling, calmed: Coupling) -> Coupling:
    """What is found under the draws of the parts, and without chance as well."""
    names = tuple(name for name in joined.modules if name in calmed.modules)
    is_kept = names == joined.modules and joined.loss is not True
    loss, reason = (joined.loss, joined.reason) if is_kept else (calmed.loss, calmed.reason)
    return Coupling(names, loss, reason, tuple(name for name in joined.pairs if name in names))


def _unsure_of(calmed: Coupling, mismatch: DrawMismatch) -> Coupling:
    """Without chance, nothing is known of a loss that mixes samples by chance."""
    if calmed.loss is not False or not isinstance(mismatch, IndexMismatch):
        return calmed
    return replace(calmed, loss=None, reason=calmed.reason or str(mismatch))


def _reason(divergence: Divergence, loss: bool | None) -> str | None:
    if divergence.unmatched:
        name = min(divergence.unmatched)
        return f"{name or ITSELF} is called another number of times in other company"
    return "the loss does not depend on what modules return, row by row" if loss is None else None
