"""What the samples of a batch cost in tokens, and how a batch is cut to its longest sample.

A workload says it by `lengths` and `trim`. Without, the tensors of the names that collators of transformers use are
known: a row is as long as its last column that counts, by the attention mask or by labels other than -100. Columns
behind the last one that counts are cut; those before the first are kept, since positions are counted from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from autoaccum.checks import check_function, read_count
from autoaccum.errors import WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import batch_size
from autoaccum.sources.pytree import unwrap_batch
from autoaccum.spec import Padding

_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_IGNORED: Final = -100
"""The label that PyTorch's cross-entropy ignores, which collators pad labels with."""
_DIMENSIONS: Final = {
    **dict.fromkeys(
        ["input_ids", "token_type_ids", "position_ids", "special_tokens_mask", "completion_mask", "labels"], 2
    ),
    **dict.fromkeys(["attention_mask", "decoder_input_ids", "decoder_attention_mask", "input_values"], 2),
    **dict.fromkeys(["inputs_embeds", "decoder_inputs_embeds", "input_features"], 3),
}
"""Names of tensors whose second dimension is the position in the sample, and the number of their dimensions."""
_WRITE: Final = "write def lengths(batch): return the tokens of each sample of a batch"


@dataclass(frozen=True, kw_only=True)
class TokenCosts:
    """How the samples of batches are measured in tokens, and their padding is cut.

    Attributes:
        padding: How micro-batches are laid out.
        lengths: `lengths(batch)` returns the tokens of each sample of a batch; None: by the standard names.
        length: `length(sample)` returns those of a sample of the dataset; None: by `lengths` of a batch of it.
        trim: `trim(batch)` returns the batch cut to its longest sample; None: by the standard names.

    Raises:
        WorkloadError: One of them is no such function.
    """

    padding: Padding = "longest"
    lengths: Callable[[Any], Any] | None = None
    length: Callable[[Any], Any] | None = None
    trim: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, arguments in (("lengths", "(batch)"), ("length", "(sample)"), ("trim", "(batch)")):
            if (function := getattr(self, name)) is not None:
                check_function(function, name, arguments)

    def of_batch(self, batch: Any) -> list[int]:
        """Return the tokens of each sample of a batch.

        Raises:
            WorkloadError: They are not known, or `lengths` returns something else.
        """
        if self.lengths is None:
            return _row_lengths(batch)
        returned = self.lengths(unwrap_batch(batch))
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != (size := batch_size(batch)):
            raise WorkloadError(
                f"lengths(batch) returned {returned!r:.60} for {batch_size(batch)} samples",
                hint="return a whole number for each sample",
            )
        assert size is not None
        return [_read_length(value, "lengths(batch)") for value in values]

    def of_sample(self, sample: Any, collate: Callable[[list[Any]], Any]) -> int:
        """Return the tokens of a sample of a dataset, of which `collate` makes a batch; raises as `of_batch`."""
        if self.length is not None:
            return _read_length(self.length(sample), "length(sample)")
        return self.of_batch(collate([sample]))[0]

    def cut(self, batch: Any) -> Any:
        """Return the batch cut to its longest sample, if it is padded; what is not cut is not copied.

        Raises:
            WorkloadError: It has other tensors of the same width, so that it is not known what to cut.
        """
        if self.padding == "none":
            return batch
        if self.trim is None:
            return _cut_columns(batch)
        return self.trim(unwrap_batch(batch))


def is_length_sequence(value: Any) -> bool:
    """Return whether `value` gives the lengths of a dataset's samples: whole numbers in a sequence, array or tensor."""
    first = value[:1] if isinstance(value, Sequence | np.ndarray | Tensor) and len(value) else None
    return first is not None and not isinstance(value, str | bytes) and isinstance(first[0], int | np.integer | Tensor)


def _read_length(value: Any, source: str) -> int:
    return read_count(int(value) if isinstance(value, Tensor) else value, source, least=0, error=WorkloadError)


def _row_lengths(batch: Any) -> list[int]:
    """Return the number of columns of each row up to the last that counts: the most of the batch's named tensors."""
    rows = [columns for record in _records(batch) for columns in _columns(record).values()]
    if not rows:
        raise WorkloadError("the tokens of a batch's samples are not known", hint=_WRITE)
    return torch.stack(rows).amax(0).tolist()


def _cut_columns(batch: Any) -> Any:
    kept: dict[int, int] = {}
    """The columns to keep, by the `id` of a tensor that has more."""
    widths = set[int]()
    for record in _records(batch):
        for width, columns in _columns(record).items():
            most = max(1, int(columns.amax()))
            alike = [tensor for tensor in record.values() if tensor.shape[1] == width > most]
            kept |= dict.fromkeys(map(id, alike), most)
            widths |= {width} if alike else set()
    for tensor in pytree.tensors(batch):
        if id(tensor) not in kept and not widths.isdisjoint(tensor.shape[1:]):
            raise WorkloadError(
                f"a batch is padded, and it holds a tensor of shape {tuple(tensor.shape)} of which it is not known"
                " whether it is padded, too",
                hint="write def trim(batch): return the batch without the columns that no sample needs",
            )
    if not kept:
        return batch
    return pytree.map_tensors(batch, lambda tensor: tensor[:, : kept[id(tensor)]] if id(tensor) in kept else tensor)


def _columns(record: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return, by the width of a record's tensors, for each row the number of columns up to the last that counts."""
    found = {}
    for width in {tensor.shape[1] for tensor in record.values()}:
        alike = {name: tensor for name, tensor in record.items() if tensor.shape[1] == width}
        counts = [alike[name] != 0 for name in _MASKS if name in alike]
        if "labels" in alike and (counts or "input_ids" not in alike):  # Without a mask, padding is attended to.
            counts.append(alike["labels"] != _IGNORED)
        rows = len(next(iter(alike.values())))
        numbers = torch.arange(1, width + 1, device=counts[0].device) if counts else None
        found[width] = (
            torch.full((rows,), width) if numbers is None else (torch.stack(counts).any(0) * numbers).amax(1).cpu()
        )
    return found


def _records(node: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of the standard names, with at least two dimensions, of each mapping or record of a batch."""
    named = {}
    for step, child in pytree.children(node) or ():
        name = step.strip("[].'\"")
        if not isinstance(child, Tensor):
            yield from _records(child)
        elif child.ndim == _DIMENSIONS.get(name):
            named[name] = child
    if named:
        yield named
