"""The functions of the file that `autoaccum plan --emit` writes, line by line, with only what one plan needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from autoaccum.errors import UsageError

Form: TypeAlias = "str | Mapping[str, Any]"
"""A batch, as `workload.recipes` describes it."""

_PRECISIONS = {"fp32": "", "bf16": "bfloat16", "fp16": "float16"}

_FEW = 3
"""So many tensors in a tuple are written out; more of them by a comprehension."""

LONGEST_LINE = 120
_LONGEST_IN_LOOP = 100


def refused_form() -> UsageError:
    """The error for a batch of a form that cannot be written down."""
    return UsageError(
        "the batch is of a form that cannot be cut and moved in a line of plain PyTorch",
        hint="make it of tensors in tuples, lists and dicts, or train with autoaccum.Accumulator",
    )


@dataclass(frozen=True)
class Step:
    """The parts of one plan's training step.

    Attributes:
        precision: `fp32`, `bf16` or `fp16`.
        accumulates: An update takes more than one micro-batch.
        recipe: As `workload.recipes.describe_recipe` has recorded it.
        freezes: BatchNorms are in eval mode for the step.
        accumulate_in: What gradients of half-precision parameters are summed in: `fp32` or `parameters`.
        multiple_of: Of which the parts are multiples.

    Raises:
        UsageError: The recipe records what cannot be emitted.
    """

    precision: str
    accumulates: bool
    recipe: Mapping[str, Any]
    freezes: bool = False
    accumulate_in: str = "fp32"
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if self.divisor == "class weights":
            raise UsageError(
                "the criterion's mean is over class weights, which --emit does not write down",
                hint="write loss(model, batch) and weight(batch), or train with autoaccum.Accumulator",
            )
        if misweighted := self.recipe.get("misweighted"):
            raise UsageError(
                f"the emitted step would weigh its parts wrongly: {misweighted}",
                hint="write what the loss divides by into the workload, and plan again",
            )
        if self.recipe.get("weights") and not self.has_terms:
            raise UsageError(
                "weight(batch) returns a mapping, and the loss is one number", hint="return a number from both"
            )
        if self.form == "own":
            raise UsageError(
                "the batch is cut by the workload's own split(batch, sizes), which --emit does not write down",
                hint="train with autoaccum.Accumulator(split=split, size=size)",
            )
        kinds = _check_form(self.form)
        if self.call is None and not self.own and "mapping" in kinds:
            raise refused_form()  # A loss may look at attributes, which a dict has not.

    @property
    def divisor(self) -> str:
        """What the loss's mean divides by: see `workload.recipes.Divisor`."""
        return str(self.recipe.get("divisor"))

    @property
    def call(self) -> str | None:
        """How the criterion is called; None for a `loss(model, batch)`."""
        return self.recipe.get("call")

    @property
    def own(self) -> Mapping[str, str | None]:
        """Where the model computes its loss: how that is got from what it returns, and what counts its weight."""
        return self.recipe.get("own") or {}

    @property
    def takes_weight(self) -> bool:
        """Whether the step is given the workload's function."""
        return self.divisor == "weight" and self.own.get("weight") is None

    @property
    def form(self) -> Form:
        """The form of the batch."""
        form = self.recipe.get("batch")
        return form if isinstance(form, Mapping) else str(form)

    @property
    def has_terms(self) -> bool:
        """Whether the loss is a mapping of terms."""
        return bool(self.recipe.get("terms"))

    @property
    def weighs_terms(self) -> bool:
        """Whether each term has a weight of its own."""
        return self.divisor == "weight" and bool(self.recipe.get("weights"))

    @property
    def weighs(self) -> bool:
        """Whether weights are counted, and may be zero."""
        return self.divisor in ("weight", "targets")

    @property
    def is_half(self) -> bool:
        """Whether trained parameters are of half precision."""
        return bool(self.recipe.get("half"))

    @property
    def sums_wide(self) -> bool:
        """Whether gradients are summed in float32, beside `.grad`."""
        return self.is_half and self.accumulates and self.accumulate_in == "fp32"


# --- batches ---------------------------------------------------------------------------------------------------------


def type_of(form: Form) -> str:
    """The type annotation of a batch of this form."""
    if isinstance(form, str):
        return "Tensor"
    kind, inner = next(iter(form)), list(map(type_of, _entries(form).values()))
    common = inner[0] if len(set(inner)) == 1 else "Any"
    if kind == "tuple":
        return f"tuple[{', '.join(inner) if len(inner) <= _FEW else f'{common}, ...'}]"
    return {"list": f"list[{common}]", "dict": f"dict[str, {common}]"}.get(kind, "Any")


def _entries(form: Mapping[str, Any]) -> Mapping[Any, Form]:
    """The forms in a container, by key or index."""
    ((_, content),) = form.items()
    return content if isinstance(content, Mapping) else dict(enumerate(content))


def _check_form(form: Form) -> set[str]:
    """The kinds of containers; all but tensors in tuples, lists and dicts is refused, and dicts of anything else."""
    if isinstance(form, str):
        if form != "tensor":
            raise refused_form()
        return set()
    kind, entries = next(iter(form)), _entries(form).values()
    if kind in ("dict", "mapping") and not all(isinstance(inner, str) for inner in entries):
        raise refused_form()
    return {kind, *(found for inner in entries for found in _check_form(inner))}


def _changed(form: Form, name: str, *, cut: bool) -> str:
    """Code for the batch `name`, cut to its samples `a:b`, or else moved to `device`; of other mappings a dict."""
    if isinstance(form, str):
        return f"{name}[a:b]" if cut else f"{name}.to(device)"
    kind = next(iter(form))
    if kind in ("dict", "mapping"):
        return f"{{k: {_changed('tensor', 'v', cut=cut)} for k, v in {name}.items()}}"
    entries = _entries(form)
    if len(entries) > _FEW and set(map(str, entries.values())) == {"tensor"}:
        each = f"{_changed('tensor', 'v', cut=cut)} for v in {name}"
        return f"[{each}]" if kind == "list" else f"tuple({each})"
    inner = ", ".join(_changed(entry, f"{name}[{index}]", cut=cut) for index, entry in entries.items())
    return f"[{inner}]" if kind == "list" else f"({inner}{',' * (len(entries) == 1)})"


def _rows_in(form: Form, name: str) -> str:
    """Code for the first tensor in the batch `name`, whose length is the number of samples."""
    if isinstance(form, str):
        return name
    key, inner = next(iter(_entries(form).items()))
    return _rows_in(inner, f'{name}["{key}"]' if next(iter(form)) in ("dict", "mapping") else f"{name}[{key}]")


# --- functions -------------------------------------------------------------------------------------------------------


def function_lines(step: Step) -> Iterator[list[str]]:
    """The functions of the file, each as its lines."""
    if step.own:
        yield [
            "def loss(model: nn.Module, batch: Batch) -> Tensor:",
            '    """Let the model compute it from the labels in the batch."""',
            f"    value: Tensor = model(**batch){step.own['loss']}",
            "    return value",
        ]
    if step.own.get("weight") is not None:
        yield [
            "def weight(batch: Batch) -> int:",
            '    """Count what the mean of the loss divides by."""',
            f"    return int({step.own['weight']})",
        ]
    yield list(_cut_lines(step))
    yield [*_signature(step), *_indented(_body(step))]


def _cut_lines(step: Step) -> Iterator[str]:
    yield "def cut(batch: Batch) -> list[Batch]:"
    yield '    """Cut a batch of any size into the fewest micro-batches that fit, evenly."""'
    yield f"    size = len({_rows_in(step.form, 'batch')})"
    if step.multiple_of > 1:
        yield "    if size % MULTIPLE_OF:"
        yield '        raise ValueError(f"{size} samples are no multiple of {MULTIPLE_OF}")'
    yield "    count = math.ceil(size / MICRO_BATCH)"
    if step.multiple_of > 1:
        yield "    whole = size // MULTIPLE_OF"
        yield "    bounds = [math.ceil(whole * i / count) * MULTIPLE_OF for i in range(count + 1)]"
    else:
        yield "    bounds = [math.ceil(size * i / count) for i in range(count + 1)]"
    part, each = _changed(step.form, "batch", cut=True), "for a, b in pairwise(bounds)"
    line = f"    return [{part} {each}]"
    yield from [line] if len(line) <= LONGEST_LINE else ["    return [", f"        {part}", f"        {each}", "    ]"]


def _signature(step: Step) -> Iterator[str]:
    yield "def train_step("
    yield "    model: nn.Module,"
    yield "    optimizer: Optimizer,"
    if not step.own and step.call is None:
        returned = "Mapping[str, Tensor]" if step.has_terms else "Tensor"
        yield f"    loss: Callable[[nn.Module, Batch], {returned}],"
    elif not step.own:
        yield "    criterion: Callable[..., Tensor],"
    yield "    batch: Batch,"
    yield "    *,"
    if step.takes_weight:
        returned = "Mapping[str, float | Tensor]" if step.weighs_terms else "float | Tensor"
        yield f"    weight: Callable[[Batch], {returned}],"
    if step.precision == "fp16":
        yield "    scaler: GradScaler,"
    yield "    clip_norm: float | None = None,"
    yield ") -> float:"
    if step.weighs:
        yield '    """Make one update from `batch`, and return its loss; none, and NaN, where nothing has weight."""'
    else:
        yield '    """Make one update from `batch`, and return its loss."""'


def _body(step: Step) -> Iterator[str]:
    yield "device = next(model.parameters()).device"
    yield "parts = cut(batch)"
    if step.is_half and not step.accumulates:
        yield from _ONE_PART.splitlines()
    if step.weighs:
        yield from _WHY.splitlines()
        yield from (_BY_TERM if step.weighs_terms else _COUNTS[step.divisor] + _TOTAL).splitlines()
    yield "optimizer.zero_grad()"
    if step.sums_wide:
        yield from _WIDE_SUMS.splitlines()
    yield "losses: list[Tensor] = []"
    if step.freezes:
        yield from _FREEZE.splitlines()
    if step.sums_wide or step.freezes:
        yield "try:"
        yield from _indented(_loop(step))
        yield "finally:"
        yield from (_UNHOOK * step.sums_wide + _THAW * step.freezes).splitlines()
    else:
        yield from _loop(step)
    scaled = step.precision == "fp16"
    yield from (_SETTLE if step.sums_wide else _CLIP_SCALED if scaled else _CLIP).splitlines()
    yield from (_STEP_SCALED if scaled else "optimizer.step()").splitlines()
    yield "return float(sum(losses))"


def _loop(step: Step) -> Iterator[str]:
    """The loop over the parts; those without weight are left out, since their mean is 0/0."""
    yield "for part, own in zip(parts, weights, strict=True):" if step.weighs else "for part in parts:"
    if step.weighs_terms:
        yield "    if not any(own.values()):"
        yield "        continue  # its means over nothing are NaN"
        yield "    shares = {k: own[k] / totals[k] for k in own if own[k] > 0}"
        if step.sums_wide:
            yield "    share = max(shares.values())  # collect multiplies by it, in float32"
    elif step.weighs:
        yield "    if own == 0:"
        yield "        continue  # its mean over nothing is NaN"
        yield "    share = own / total"
    elif step.divisor == "samples":
        yield f"    share = len({_rows_in(step.form, 'part')}) / len({_rows_in(step.form, 'batch')})"
    if step.call is not None:
        yield from _indented(_inputs(step))
    if step.precision == "fp32":
        yield from _indented(_forward(step))
    else:
        yield f"    with torch.autocast(device.type, dtype=torch.{_PRECISIONS[step.precision]}):"
        yield from _indented(_indented(_forward(step)))
    yield from _indented(_backward(step))


def _inputs(step: Step) -> Iterator[str]:
    """Names for what a criterion's batch holds, on the model's device."""
    assert isinstance(step.form, Mapping)
    moved = [_changed(entry, f"part[{index}]", cut=False) for index, entry in _entries(step.form).items()]
    both = f"inputs, targets = {', '.join(moved)}"
    if len(both) <= _LONGEST_IN_LOOP:
        yield both
    else:
        yield f"inputs = {moved[0]}"
        yield f"targets = {moved[1]}"


def _forward(step: Step) -> Iterator[str]:
    if step.call is not None:
        assert isinstance(step.form, Mapping)
        given = _entries(step.form)[0]
        kind = next(iter(given)) if isinstance(given, Mapping) else ""
        inputs = f"{'**' if kind in ('dict', 'mapping') else '*' if kind else ''}inputs"
        yield f"part_loss = criterion(model({inputs}), targets)"
        return
    moved = _changed(step.form, "part", cut=False)
    if moved != "part.to(device)":
        yield f"moved: Batch = {moved}"
        moved = "moved"
    yield f"{'terms' if step.has_terms else 'part_loss'} = loss(model, {moved})"
    if not step.has_terms:
        return
    if step.weighs_terms and step.sums_wide:
        yield "part_loss = torch.stack([terms[k] * (s / share) for k, s in shares.items()]).sum()"
    elif step.weighs_terms:
        yield "part_loss = torch.stack([terms[k] * s for k, s in shares.items()]).sum()"
    else:
        yield "part_loss = torch.stack(list(terms.values())).sum()"


def _backward(step: Step) -> Iterator[str]:
    has_share = step.divisor != "nothing"
    is_shared = has_share and not step.sums_wide and not step.weighs_terms
    loss = "part_loss * share" if is_shared else "part_loss"
    if has_share:
        yield "# At once: the graph of this part is freed before the next forward."
    else:
        yield "# At once, which frees this part's graph; parts of a sum are not divided."
    yield f"torch.autograd.backward({f'scaler.scale({loss})' if step.precision == 'fp16' else loss})"
    yield f"losses.append(part_loss.detach(){' * share' if is_shared or (has_share and step.sums_wide) else ''})"
    named = ["part_loss", *["terms"] * step.has_terms, *["inputs, targets"] * (step.call is not None)]
    named += ["moved"] * (step.call is None and _changed(step.form, "part", cut=False) != "part.to(device)")
    yield f"del {', '.join(named)}  # lest they live on beside the next part's"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" if line else line for line in lines)


_ONE_PART = """\
if len(parts) > 1:  # half precision would lose small gradients in their sum
    raise ValueError(f"at most {MICRO_BATCH} samples make an update")"""

_WHY = """\
# Each part counts by its share of what the mean divides by, so all of that is
# known before the first backward: a mean of means would be another loss."""

_BY_TERM = """\
weights = [{k: float(v) for k, v in weight(part).items()} for part in parts]
totals = {k: sum(own[k] for own in weights) for k in weights[0]}
if not any(totals.values()):
    return math.nan"""

_COUNTS = {
    "weight": "weights = [float(weight(part)) for part in parts]\n",
    "targets": "weights = [int((part[1] != IGNORE_INDEX).sum()) for part in parts]\n",
}

_TOTAL = """\
total = sum(weights)
if total == 0:
    return math.nan"""

_WIDE_SUMS = '''\
parameters = [p for group in optimizer.param_groups for p in group["params"]]
sums: dict[Tensor, Tensor] = {}
share = 1.0

def collect(parameter: Tensor) -> None:
    """Add up in float32: half precision would lose small gradients in their sum."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and parameter in sums:
        sums[parameter].add_(gradient, alpha=share)
    elif gradient is not None:
        sums[parameter] = gradient.float().mul_(share)

trained = [p for p in parameters if p.requires_grad]
hooks = [p.register_post_accumulate_grad_hook(collect) for p in trained]'''

_UNHOOK = """\
    for hook in hooks:
        hook.remove()
"""

_FREEZE = """\
frozen = [m for m in model.modules() if isinstance(m, BATCHNORMS) and m.training]
for module in frozen:
    module.training = False  # normalise by the running statistics, and leave them as they are"""

_THAW = """\
    for module in frozen:
        module.training = True
"""

_SETTLE = """\
scale = 1.0
if clip_norm is not None and sums:  # once, the whole batch's gradient
    norm = float(nn.utils.get_total_norm(list(sums.values())))
    scale = min(1.0, clip_norm / (norm + 1e-6))
while sums:
    parameter, gradient = sums.popitem()
    parameter.grad = gradient.mul_(scale).to(parameter.dtype)"""

_CLIP = """\
if clip_norm is not None:  # once, the whole batch's gradient
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, clip_norm)"""

_CLIP_SCALED = _CLIP.replace("gradient\n", "gradient, at its true scale\n    scaler.unscale_(optimizer)\n")

_STEP_SCALED = """\
scaler.step(optimizer)  # no update where a gradient is not finite
scaler.update()"""
