"""What the samples of a batch cost in tokens, and how a batch is cut to its longest sample.

A workload says it by `lengths` and `trim`. Without, the tensors of the names that collators of transformers use are
known, with a prefix, too (`anchor_input_ids`): a row is as long as its last column that counts, by the attention mask
or by labels other than -100. Columns behind the last one that counts are cut; those before the first are kept, since
positions are counted from there, so that nothing is gained where padding is on the left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from autoaccum.checks import check_function, read_count
from autoaccum.errors import WorkloadError
from autoaccum.sources import pytree
from autoaccum.sources.batches import BatchReader, batch_size, read_batch
from autoaccum.sources.pytree import CustomBatch, unwrap_batch
from autoaccum.spec import Padding

_MASKS: Final = ("attention_mask", "decoder_attention_mask")
_OUTPUTS: Final = {"labels", "decoder_input_ids", "decoder_inputs_embeds"}
"""What is predicted, where the inputs are other tensors."""
_IGNORED: Final = -100
"""The label that PyTorch's cross-entropy ignores, which collators pad labels with."""
_DIMENSIONS: Final = {
    **dict.fromkeys(["input_ids", "token_type_ids", "position_ids", "special_tokens_mask", "labels"], 2),
    **dict.fromkeys(["attention_mask", "decoder_input_ids", "decoder_attention_mask", "input_values"], 2),
    **dict.fromkeys(["completion_mask", "assistant_masks"], 2),
    **dict.fromkeys(["inputs_embeds", "decoder_inputs_embeds", "input_features"], 3),
}
"""Names of tensors whose second dimension is the position in the sample, and the number of their dimensions."""
_IMAGES: Final = "pixel_values"
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
        """Return the tokens of each sample of a batch, at least 1.

        Raises:
            WorkloadError: They are not known, or `lengths` returns something else.
        """
        if self.lengths is None:
            return _row_lengths(batch)
        returned, size = self.lengths(unwrap_batch(batch)), batch_size(batch)
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != size:
            raise WorkloadError(
                f"lengths(batch) returned {returned!r:.60} for {size} samples",
                hint="return a whole number for each sample",
            )
        return [_read_length(value, "lengths(batch)") for value in values]

    def of_sample(
        self, sample: Any, collate: Callable[[list[Any]], Any] | None = None, batching: BatchReader = None
    ) -> int:
        """Return the tokens of a sample of a dataset whose batches `collate` makes; raises as `of_batch`."""
        if self.length is not None:
            return _read_length(self.length(sample), "length(sample)")
        return self.of_batch(read_batch((collate or default_collate)([sample]), batching, 1, "collate()"))[0]

    def cut(self, batch: Any) -> Any:
        """Return the batch cut to its longest sample, if it is padded; what is not cut is not copied.

        Raises:
            WorkloadError: It is not known which tensors to cut, or `trim` returns another number of samples.
        """
        if self.padding == "none":
            return batch
        if self.trim is not None:
            trimmed = self.trim(unwrap_batch(batch))
            if isinstance(batch, CustomBatch):
                return batch.with_value(trimmed)
            if (seen := batch_size(trimmed)) != (size := batch_size(batch)):
                raise WorkloadError(f"trim(batch) returned {seen} of {size} samples", hint="return all of them")
            return trimmed
        if self.lengths is not None and not isinstance(batch, CustomBatch) and not any(_records(batch)):
            raise WorkloadError(
                "cannot tell which tensors of the batch are padded",
                hint="write def trim(batch), which cuts the padding (or returns the batch unchanged), or set"
                ' padding = "none" if there is none',
            )
        return _cut_columns(batch)


def is_length_sequence(value: Any) -> bool:
    """Return whether `value` gives the lengths of a dataset's samples: whole numbers in a sequence, array or tensor."""
    first = value[:1] if isinstance(value, Sequence | np.ndarray | Tensor) and len(value) else None
    return first is not None and not isinstance(value, str | bytes) and isinstance(first[0], int | np.integer | Tensor)


def read_lengths(lengths: Any, samples: int) -> list[int]:
    """Return the lengths of a dataset's samples; raise WorkloadError if they are those of another dataset."""
    if len(lengths) != samples:
        raise WorkloadError(
            f"there are {len(lengths):,} lengths, and the dataset has {samples:,} samples",
            hint="give the tokens of each sample of the dataset, in order, or write length(sample)",
        )
    return [_read_length(value, "a length") for value in lengths]


def _read_length(value: Any, source: str) -> int:
    number = int(value) if isinstance(value, Tensor) else value
    return max(1, read_count(number, source, least=0, error=WorkloadError))


def _row_lengths(batch: Any) -> list[int]:
    """Return the number of columns of each row up to the last that counts: the most of the batch's named tensors."""
    rows = [columns for record in _records(batch) for columns in _columns(record).values()]
    if not rows or {len(columns) for columns in rows} != {batch_size(batch)}:
        raise WorkloadError("the tokens of a batch's samples are not known", hint=_WRITE)
    return torch.stack(rows).amax(0).clamp(min=1).tolist()


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
    for name, tensor in _named_tensors(batch):
        if id(tensor) not in kept and not widths.isdisjoint(tensor.shape[1:]) and not name.startswith(_IMAGES):
            raise WorkloadError(
                f"{name or 'a tensor'} of shape {tuple(tensor.shape)} has the width of the padded tensors, but its name"
                " is not known",
                hint="should it be cut with them? write def trim(batch): return the batch without the padding",
            )
    if not kept:
        return batch
    return pytree.map_tensors(  # Contiguous, as before: losses take `labels.view(-1)`.
        batch, lambda tensor: tensor[:, : kept[id(tensor)]].contiguous() if id(tensor) in kept else tensor
    )


def _columns(record: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return, by the width of a record's tensors, for each row the number of columns up to the last that counts."""
    found = {}
    for width in {tensor.shape[1] for tensor in record.values()}:
        alike = {name: tensor for name, tensor in record.items() if tensor.shape[1] == width}
        counts = [alike[name] != 0 for name in _MASKS if name in alike]
        if "labels" in alike and (counts or alike.keys() <= _OUTPUTS):  # Without a mask, padding is attended to.
            counts.append(alike["labels"] != _IGNORED)
        if counts and width:
            last = [(one * torch.arange(1, width + 1, device=one.device)).amax(1).cpu() for one in counts]
            found[width] = torch.stack(last).amax(0)
        elif alike.keys() != {"input_features"}:  # Without a mask, these may be the bins of a spectrum, not positions.
            found[width] = torch.full((len(next(iter(alike.values()))),), width)
    return found


def _records(node: Any) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of the standard names and dimensions of each mapping or record of a batch, by their prefix."""
    named: dict[str, dict[str, Tensor]] = {}
    for step, child in pytree.children(node) or ():
        name = step.strip("[].'\"")
        if not isinstance(child, Tensor):
            yield from _records(child)
            continue
        known = max((known for known in _DIMENSIONS if f"_{name}".endswith(f"_{known}")), key=len, default="")
        # Labels in floating point are scores of the sample, such as those of several classes.
        if child.ndim == _DIMENSIONS.get(known) and not (known == "labels" and child.is_floating_point()):
            named.setdefault(name.removesuffix(known), {})[known] = child
    yield from named.values()


def _named_tensors(node: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield name, node
    for step, child in () if isinstance(node, Tensor) else pytree.children(node) or ():
        yield from _named_tensors(child, step.strip("[].'\""))
