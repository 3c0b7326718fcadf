"""The functions of the emitted file, line by line: `cut`, `move` and `train_step`, with only what one plan needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from autoaccum.reporting.emitted.batches import WIDTH, Form, changed, entry, inline, render, rows_in
from autoaccum.reporting.emitted.choices import CALLS, Choices
from autoaccum.reporting.emitted.shares import loop_lines, share_lines, terms_lines, weight_lines

_INDENT = "    "
_DEEPEST = 12
"""How deep the loop's body stands where something is put back after it."""

_ONE_PART = """\
if len(parts) > 1:  # half precision would lose small gradients in their sum
    raise ValueError(f"at most {MICRO_BATCH} samples make an update")"""

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
        hook.remove()"""

_FREEZE = """\
frozen = [m for m in model.modules() if isinstance(m, BATCHNORMS) and m.training]
for module in frozen:
    module.training = False  # normalise by the running statistics, and leave them as they are"""

_THAW = """\
    for module in frozen:
        module.training = True"""

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

_CLIP_SCALED = """\
if clip_norm is not None:  # once, the whole batch's gradient, at its true scale
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, clip_norm)"""

_STEP_SCALED = """\
scaler.step(optimizer)  # no update where a gradient is not finite
scaler.update()"""


def own_lines(choices: Choices) -> Iterator[str]:
    """The function `loss`, where the model computes it."""
    if choices.own is not None:
        yield "def loss(model: nn.Module, batch: Batch) -> Tensor:"
        yield '    """Let the model compute it from the labels in the batch."""'
        yield f"    value: Tensor = model(**batch){choices.own}"
        yield "    return value"


def weight_function_lines(choices: Choices) -> Iterator[str]:
    """The function `weight`, where it is known."""
    if choices.own_weight is not None:
        yield "def weight(batch: Batch) -> int:"
        yield '    """Count what the mean of the loss divides by."""'
        yield f"    return int({choices.own_weight})"


def cut_lines(choices: Choices, *, multiple_of: int = 1) -> Iterator[str]:
    """The function `cut`."""
    yield "def cut(batch: Batch) -> list[Batch]:"
    yield '    """Cut a batch of any size into the fewest micro-batches that fit, evenly."""'
    yield f"    size = len({rows_in(choices.form, 'batch')})"
    if multiple_of > 1:
        yield "    if size % MULTIPLE_OF:"
        yield '        raise ValueError(f"{size} samples are no multiple of {MULTIPLE_OF}")'
    yield "    count = math.ceil(size / MICRO_BATCH)"
    if multiple_of > 1:
        yield "    whole = size // MULTIPLE_OF"
        yield "    bounds = [math.ceil(whole * i / count) * MULTIPLE_OF for i in range(count + 1)]"
    else:
        yield "    bounds = [math.ceil(size * i / count) for i in range(count + 1)]"
    part = changed(choices.form, "batch", "cut")
    simple = f"    return [{inline(part)} for a, b in pairwise(bounds)]"
    if len(simple) <= WIDTH:
        yield simple
        return
    yield "    parts: list[Batch] = []"
    yield "    for a, b in pairwise(bounds):"
    yield from render(part, "        ", "part: Batch = ")
    yield "        parts.append(part)"
    yield "    return parts"


def move_lines(choices: Choices) -> Iterator[str]:
    """The function `move`, where there is one."""
    if choices.needs_move:
        yield "def move(part: Batch, device: torch.device) -> Batch:"
        yield '    """Put a micro-batch where the model is."""'
        yield from render(changed(choices.form, "part", "move"), _INDENT, "return ")


def step_lines(choices: Choices) -> Iterator[str]:
    """The function `train_step`."""
    yield from _signature(choices)
    yield from _indented(_body(choices))


def _signature(choices: Choices) -> Iterator[str]:
    yield "def train_step("
    yield "    model: nn.Module,"
    yield "    optimizer: Optimizer,"
    if choices.own is None and choices.call is None:
        returned = "Mapping[str, Tensor]" if choices.has_terms else "Tensor"
        yield f"    loss: Callable[[nn.Module, Batch], {returned}],"
    elif choices.own is None:
        yield f"    criterion: {'nn.Module' if choices.divisor == 'class weights' else 'Callable[..., Tensor]'},"
    yield "    batch: Batch,"
    yield "    *,"
    if choices.takes_weight:
        returned = "Mapping[str, float | Tensor]" if choices.weighs_terms else "float | Tensor"
        yield f"    weight: Callable[[Batch], {returned}],"
    if choices.precision == "fp16":
        yield "    scaler: GradScaler,"
    yield "    clip_norm: float | None = None,"
    yield ") -> float:"
    if choices.weighs:
        yield '    """Make one update from `batch`, and return its loss.'
        yield ""
        yield "    Where nothing in it has any weight, no update is made and the loss is NaN."
        yield '    """'
    else:
        yield '    """Make one update from `batch`, and return its loss."""'


def _body(choices: Choices) -> Iterator[str]:
    yield "device = next(model.parameters()).device"
    yield "parts = cut(batch)"
    if choices.is_half and not choices.accumulates:
        yield from _ONE_PART.splitlines()
    yield from weight_lines(choices)
    yield "optimizer.zero_grad()"
    if choices.sums_wide:
        yield from _WIDE_SUMS.splitlines()
    yield "losses: list[Tensor] = []"
    if choices.freezes:
        yield from _FREEZE.splitlines()
    yield from _tidied_loop(choices)
    if choices.sums_wide:
        yield from _SETTLE.splitlines()
    else:
        yield from (_CLIP_SCALED if choices.precision == "fp16" else _CLIP).splitlines()
    yield from (_STEP_SCALED if choices.precision == "fp16" else "optimizer.step()").splitlines()
    yield "return float(sum(losses))"


def _tidied_loop(choices: Choices) -> Iterator[str]:
    if not choices.tidies_up:
        yield from _loop(choices)
        return
    yield "try:"
    yield from _indented(_loop(choices))
    yield "finally:"
    if choices.sums_wide:
        yield from _UNHOOK.splitlines()
    if choices.freezes:
        yield from _THAW.splitlines()


def _loop(choices: Choices) -> Iterator[str]:
    yield from loop_lines(choices)
    yield from _indented(share_lines(choices))
    if choices.call is not None:
        yield from _indented(_inputs(choices))
    yield from _indented(_forward(choices))
    yield from _indented(_backward(choices))


def _inputs(choices: Choices) -> Iterator[str]:
    """Names for what a criterion's batch holds, on the model's device."""
    moved = [changed(entry(choices.form, index), f"part[{index}]", "move") for index in (0, 1)]
    both = f"inputs, targets = {inline(moved[0])}, {inline(moved[1])}"
    if len(both) + _DEEPEST <= WIDTH:
        yield both
        return
    for name, code in zip(("inputs", "targets"), moved, strict=True):
        depth = " " * (_DEEPEST if choices.tidies_up else _DEEPEST - len(_INDENT))
        yield from (line[len(depth) :] for line in render(code, depth, f"{name} = "))


def _forward(choices: Choices) -> Iterator[str]:
    if choices.precision == "fp32":
        yield from _loss(choices)
        return
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[choices.precision]
    yield f"with torch.autocast(device.type, dtype=torch.{dtype}):"
    yield from _indented(_loss(choices))


def _loss(choices: Choices) -> Iterator[str]:
    if choices.call is not None:
        inputs = _given(entry(choices.form, 0))
        if choices.call == "mean and variance":
            yield f"mean, variance = model({inputs})"
        yield f"part_loss = {CALLS[choices.call].format(inputs=inputs)}"
        return
    moved = "move(part, device)" if choices.needs_move else inline(changed(choices.form, "part", "move"))
    if not choices.has_terms:
        yield f"part_loss = loss(model, {moved})"
        return
    yield f"terms = loss(model, {moved})"
    yield from terms_lines(choices)


def _backward(choices: Choices) -> Iterator[str]:
    has_share = choices.divisor != "nothing"
    is_shared = has_share and not choices.sums_wide and not choices.weighs_terms
    loss = "part_loss * share" if is_shared else "part_loss"
    if has_share:
        yield "# At once: the graph of this part is freed before the next forward."
    else:
        yield "# At once, which frees this part's graph; parts of a sum are not divided."
    yield f"torch.autograd.backward({f'scaler.scale({loss})' if choices.precision == 'fp16' else loss})"
    kept = " * share" if is_shared or (has_share and choices.sums_wide) else ""
    yield f"losses.append(part_loss.detach(){kept})"
    yield f"del {', '.join(_named(choices))}  # lest they live on beside the next part's"


def _named(choices: Choices) -> Iterator[str]:
    yield "part_loss"
    if choices.has_terms:
        yield "terms"
    if choices.weighs_terms and choices.sums_wide:
        yield "scaled"
    if choices.call is not None:
        yield "inputs, targets"
    if choices.call == "mean and variance":
        yield "mean, variance"


def _given(form: Form) -> str:
    """How the model is given its inputs: several by position, named ones by name."""
    kind = next(iter(form)) if isinstance(form, Mapping) else ""
    if kind in ("tuple", "list", "namedtuple"):
        return "*inputs"
    return "**inputs" if kind in ("dict", "mapping") else "inputs"


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"{_INDENT}{line}" if line else line for line in lines)
