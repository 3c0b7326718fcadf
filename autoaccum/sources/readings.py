"""Decide how each sequence of a batch is read, and keep to it: a chance equality of sizes in a later batch is no news.

A *record* holds the whole batch in each entry (`[x, y]`, as a `DataLoader` yields it), *samples* have one entry per
sample (captions, images of unequal shape, a list of dicts). All samples have the same structure. The reading that
agrees with the rest of the batch is taken. If both do, tensors that share their first dimension are one batch, lists of
plain values are samples, and so are mappings with numbers of their own, and images beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from autoaccum.checks import describe_type
from autoaccum.errors import WorkloadError
from autoaccum.messages import Message, message
from autoaccum.sources import pytree

ANY = -1
"""The size of a value that belongs to all samples; it agrees with every size."""
_CHANNELS = (1, 3, 4)
_WAY_OUT = "define split(batch, sizes) and size(batch)"
_UNLIKELY = 10
_ROWS = (0, 1)
"""The costs of reading records as one batch and as samples: the first, if nothing else decides."""
_Choice: TypeAlias = Callable[[Any, Any, bool], "bool | None"]
"""Of a sequence's key, the sequence, and whether it is the batch: is it samples? None: it stays undecided."""


class Readings:
    """Reads the batches of one training: a sequence that was read in one way is read so again.

    Args:
        expected: The number of samples that a batch probably has, if it is known.

    Attributes:
        guesses: Warnings of batches that were read as rows, but could be samples.
    """

    def __init__(self, expected: int | None = None) -> None:
        self.guesses = list[Message]()
        self._expected, self._known = expected, dict[Any, bool]()

    def wrap(self, batch: Any, size: int | None = None, again: Callable[[int], Any] | None = None) -> Any:
        """Return `batch` with its sequences marked (`pytree.MarkedList`), so that its parts are read as it is.

        Args:
            batch: The batch.
            size: The number of samples that it was asked for, which decides.
            again: Makes a batch of another size, which decides if both readings have `size` samples.

        Raises:
            WorkloadError: It can be read in two ways, and nothing decides.
        """
        batch = _mark(batch, lambda key, *_: self._known.get(key))
        sizes = reading_sizes(batch, top=True)
        if size is None and self._expected in sizes:
            size = self._expected
        if size is not None and size not in sizes:
            return batch
        samples = size or min(sizes.keys() - {ANY}, key=lambda likely: (sizes[likely], -likely), default=ANY)
        choices, shown, rows = dict[Any, bool](), dict[Any, bool](), dict[Any, Any]()

        def decide(key: Any, node: Any, top: bool) -> bool:
            if all(map(pytree.is_record, node)) and _reading_costs(node, top=top) == _ROWS:
                rows[key] = node
            if (read := choices.setdefault(key, is_samples(node, samples, top=top))) or len(node) != samples:
                shown[key] = read  # Else as many rows as entries, which may be chance.
            return read

        marked = _mark(batch, decide)
        if samples < 2:
            return marked
        for key, node in rows.items():
            other = {**choices, key: not choices[key]}
            flipped = reading_sizes(_mark(batch, lambda key, *_, other=other: other.get(key)), top=True)
            rivals = {rival for rival, cost in flipped.items() if rival != ANY and cost < _UNLIKELY}
            rivals &= rivals if size is None else {size}
            if rivals and again is not None:
                with suppress(Exception):  # Some sizes cannot be made.
                    self.wrap(again(samples + 1), samples + 1)
                return self.wrap(batch, size)
            if rivals:
                leaves = [*pytree.tensors(node)]
                what = f"{key[0]} is {describe_type(node)} of {len(node)} whose tensors all have {len(leaves[0])} rows"
                if samples in rivals or any(map(_looks_like_image, leaves)):
                    raise WorkloadError(f"{what}: an entry may be one sample, or hold values of all", hint=_WAY_OUT)
                self.guesses.append(message("batch_guessed", what=what, samples=samples, way_out=_WAY_OUT))
        self._known |= shown
        return marked


def _mark(node: Any, choose: _Choice, path: str = "batch", *, top: bool = True) -> Any:
    """Return `node` with the sequences marked that `choose` decides; those in samples are not looked at."""
    children = pytree.children(node)
    if not children or (isinstance(node, pytree.MarkedList) and node.samples):
        return node
    reading = None
    is_open = type(node) in (list, tuple) and None not in _reading_costs(node, top=top)
    may_vary = pytree.is_record if top else lambda entry: pytree.is_record(entry) or pytree.has_batch_dimension(entry)
    if is_open and all(map(may_vary, node)):
        reading = choose((path, pytree.structure(node[0])), node, top)
    if reading:
        return pytree.MarkedList(node, type(node), samples=True)
    content = [_mark(child, choose, path + step, top=False) for step, child in children]
    if reading is False:
        return pytree.MarkedList(content, type(node), samples=False)
    return pytree.rebuild_changed(node, content)


def is_samples(node: Any, size: int, *, top: bool = False) -> bool:
    """Return whether `node` is a sequence with one entry per sample; with `top`, `node` is the batch itself."""
    if not pytree.is_sequence(node) or len(node) != size:
        return False
    record_cost, sample_cost = _reading_costs(node, top=top)
    if sample_cost is None or record_cost is None:
        return record_cost is None
    as_record = agree([reading_sizes(child) for _, child in pytree.children(node) or []])
    cost = as_record.get(size, as_record.get(ANY))
    return cost is None or sample_cost < cost + record_cost


def reading_sizes(node: Any, *, top: bool = False) -> dict[int, int]:
    """Return every size that `node` can be read as, with the cost of that reading; the least cost wins."""
    if isinstance(node, pytree.CustomBatch):
        return {node.samples: 0}
    if pytree.is_leaf(node):
        return {int(node.shape[0]): 0} if pytree.has_batch_dimension(node) else {ANY: 0}
    children = pytree.children(node)
    if children is None:
        return {} if pytree.contains_tensors(node) else {ANY: 0}
    as_record = agree([reading_sizes(child) for _, child in children])
    if not pytree.is_sequence(node):
        return as_record
    record_cost, sample_cost = _reading_costs(node, top=top)
    sizes = {} if record_cost is None else {size: cost + record_cost for size, cost in as_record.items()}
    if sample_cost is not None and sample_cost < sizes.get(len(node), sample_cost + 1):
        sizes[len(node)] = sample_cost
    return sizes


def agree(children: Iterable[dict[int, int]]) -> dict[int, int]:
    """Return the sizes that all children share, with their costs added; `ANY` agrees with every size."""
    agreed: dict[int, int] = {ANY: 0}
    for sizes in children:
        merged = {}
        for size in agreed.keys() | sizes.keys():
            left, right = agreed.get(size, agreed.get(ANY)), sizes.get(size, sizes.get(ANY))
            if left is not None and right is not None:
                merged[size] = left + right
        agreed = merged
    return agreed


def _reading_costs(node: Sequence[Any], *, top: bool) -> tuple[int | None, int | None]:
    """Return the costs of reading a sequence as a record and as samples; None if it cannot be read so."""
    if isinstance(node, pytree.MarkedList):
        return (None, 0) if node.samples else (0, None)
    if top and any(pytree.has_batch_dimension(entry) for entry in node):
        return 0, None  # [x, y], as a DataLoader yields it.
    if all(map(_is_value, node)):
        if isinstance(node, tuple) and any(pytree.is_plain(entry) and not isinstance(entry, str) for entry in node):
            return 0, None  # (224, 224) is one value, not two samples.
        return (3, 0) if node else (0, 1)
    if len({pytree.structure(entry) for entry in node}) > 1:
        return 0, None
    are_lists = isinstance(node, list) and all(isinstance(entry, list) for entry in node)
    if are_lists and all(isinstance(item, int | float) for entry in node for item in entry) and (any(node) or not top):
        return 3, 0  # Token ids before padding.
    if top and isinstance(node, tuple):
        return 0, _UNLIKELY
    if _have_own_values(node) or (not top and all(map(_looks_like_image, node))):
        return 2, 0
    return _ROWS if not top or all(map(pytree.is_record, node)) else (0, _UNLIKELY)


def _have_own_values(entries: Sequence[Any]) -> bool:
    """Return whether the entries have what belongs to one sample: numbers, or texts that differ between records."""
    fields = [dict(pytree.children(entry) or ()) for entry in entries]
    texts = [{name: value for name, value in values.items() if isinstance(value, str)} for values in fields]
    if all(map(pytree.is_record, entries)) and texts.count(texts[0]) < len(texts):
        return True
    return any(
        isinstance(value, int | float) or (pytree.is_leaf(value) and value.ndim == 0)
        for values in fields
        for value in values.values()
    )


def _looks_like_image(node: Any) -> bool:
    return pytree.has_batch_dimension(node) and node.ndim == 3 and node.shape[0] in _CHANNELS


def _is_value(node: Any) -> bool:
    """Return whether `node` cannot be split: a plain value, a tensor without dimensions, an object without tensors."""
    if pytree.is_plain(node) or pytree.is_leaf(node):
        return not pytree.has_batch_dimension(node)
    return pytree.children(node) is None and not pytree.contains_tensors(node)
