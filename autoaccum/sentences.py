"""The sentences of messages, each once: what people read.

A sentence is a template of `str.format`, whose format specifications are those of `_Sentence`, or, where it depends on
more than the facts' values, a function of the facts. It is plain English, says what was seen and the way out, and has
no full stop.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from autoaccum.checks import counted, join_words, list_names
from autoaccum.units import format_bytes, format_parts, format_rate, percent, precise_bytes, signed_bytes


class _Sentence(string.Formatter):
    """Formats facts: `bytes`, `precise`: a size, `parts`: micro-batches, `names`: a list, `count WORD`: so many."""

    def format_field(self, value: Any, format_spec: str) -> str:
        kind, _, word = format_spec.partition(" ")
        known: dict[str, Callable[[Any], str]] = {
            "bytes": format_bytes,
            "precise": precise_bytes,
            "parts": format_parts,
            "names": list_names,
            "count": lambda number: counted(number, word),
        }
        return known[kind](value) if kind in known else str(super().format_field(value, format_spec))


WHOLE_MODEL: Final = "the model itself"
"""The name of the model among those of its modules."""

_NOT_FULL = "the gradient is not the full batch's"
_WITHOUT_SUM = ' without reduction = "sum"'
_AS_ONE = "coupled=True (with a criterion, or with outputs and coupled_loss) computes it from the whole batch"


def describe_modules(names: Iterable[str]) -> str:
    """Return the names of modules in words.

    >>> describe_modules(["0"]), describe_modules(["0", "2"])
    ('module 0', 'modules 0 and 2')
    """
    given = list(names)
    inner = [name for name in given if name != WHOLE_MODEL]
    if not inner:
        return WHOLE_MODEL
    outer = f", and {WHOLE_MODEL}" if len(inner) < len(given) else ""
    return f"module{'s' * (len(inner) > 1)} {list_names(inner)}{outer}"


def _batchnorm(modules: Iterable[str], mode: str) -> str:
    cures = {
        "micro": f'{_NOT_FULL}; batchnorm="exact" corrects that, batchnorm="running" only the running statistics',
        "running": f'only running statistics are exact, {_NOT_FULL}; batchnorm="exact" corrects that',
    }
    return f"BatchNorm normalises by the micro-batch in {list_names(modules)}: {cures[mode]}"


def name_term(name: str) -> str:
    """Return a term of the loss in words."""
    return "the loss" if name == "loss" else f"the loss's term {name!r}"


def _retried(size: int, unit: str, how: str, phase: str) -> str:
    seen = f"out of memory ({phase}) with micro-batches of {counted(size, unit)}"
    return f"{seen}: the update was rolled back; it and later ones run {how}"


def _mismatch(term: str, sizes: list[int], whole: float, combined: float, divisor: str | None, advice: object) -> str:
    how = "added up" if divisor is None else f"weighted by {divisor}"
    return (
        f"the weighting does not match the loss ({name_term(term)} of {sum(sizes)} samples is {whole:.6g}; its parts "
        f"of {' and '.join(map(str, sizes))}, {how}, give {combined:.6g})" + ("" if advice is None else f": {advice}")
    )


def _learning_rate(target_batch: int, iter_size: int, reduction: str | None) -> str:
    if iter_size == 1:
        why = "one micro-batch is the whole update"
    elif reduction is None:
        why = f"the script must divide the loss of each micro-batch by {iter_size}"
    elif reduction == "sum":
        why = "the loss is a sum, to which micro-batches add up"
    else:
        why = "accumulation needs no rescaling"
    return f"use the learning rate you would use for a batch of {target_batch}: {why}"


def _equal_parts(samples: int, iter_size: int, uneven: list[int], world_size: int) -> str:
    each = f" on each of {world_size} ranks" if world_size > 1 else ""
    return (
        f"{samples} samples take {iter_size} equal micro-batches per update, or {len(uneven)} uneven ones: a target "
        f"batch of {len(uneven) * uneven[0] * world_size} is {len(uneven)} x {uneven[0]}{each}, and {samples} "
        f"in uneven ones (without --equal or --for) is {format_parts(uneven)}"
    )


def _narrow_fit(room_bytes: int, uncertainty_bytes: int, reserve: str | None, measurable: bool) -> str:
    ways = ["measure on the card (--device cuda)"] if measurable else []
    ways += [f"keep more free (--reserve {reserve})"] if reserve else []
    return (
        f"the plan needs all but {format_bytes(room_bytes)} of the budget, and the prediction may be off "
        f"by {format_bytes(uncertainty_bytes)}: {', or '.join(ways or ['take a smaller --max-micro-batch'])}"
    )


def _covered(
    uncertainty_bytes: int, context_bytes: int, workspace_bytes: int, rules: list[str], nccl_bytes: int
) -> str:
    causes = [f"the CUDA context ({format_bytes(context_bytes)} assumed)"]
    if workspace_bytes:
        guessed = ", ".join(rule.replace("_", " ") for rule in rules) or "libraries"
        causes.append(f"workspaces that were not measured ({guessed}: {format_bytes(workspace_bytes)})")
    if nccl_bytes:
        source = "as reported for each group of four A100s with NVLink: NVIDIA/nccl#964"
        causes.append(f"NCCL's own memory ({format_bytes(nccl_bytes)}, {source})")
    return (
        f"the uncertainty of {format_bytes(uncertainty_bytes)} covers {join_words(causes)}, but not other programs on "
        "the card, or samples larger than those of the trials"
    )


def _speeds(
    kind: str, fastest: int, chosen: int, rates: Mapping[str, float], share: float, largest: int, spread: float
) -> str:
    def rate(size: int) -> str:
        return f"{format_rate(rates[str(size)])} samples/s"

    words = f"micro-batch {chosen} is the fastest, with {rate(chosen)}"
    if chosen != fastest:
        words = (
            f"micro-batch {chosen} makes {rate(chosen)}, within {100 * share:g} % of the fastest, {fastest} with "
            f"{rate(fastest)}"
        )
    if largest not in (chosen, fastest):
        words += f"; the largest that fits, {largest}, makes {rate(largest)}"
    if kind == "estimated":
        return f"{words}, an estimate from FLOPs, bytes and kernels: compare sizes by it, do not expect these rates"
    if spread > share:
        words += f"; the middle half of these updates spans {percent(spread, 1)}, so another run may choose differently"
    return words


def _savers_chosen(
    savers: str, size: int, peak_bytes: int | None, flops: float | None, moved_bytes: int, seconds: float
) -> str:
    would = "ran out of memory" if peak_bytes is None else f"would take {format_bytes(peak_bytes)}"
    why = f"{savers} chosen, since micro-batch {size} {would} without savers"
    if flops is None:
        return f"{why}; only recompute was tried: on this device its memory alone can be compared"
    costs = [f"{flops:.0%} more FLOPs"] if flops else []
    costs += [f"{format_bytes(moved_bytes)} moved between card and host per update"] if moved_bytes > 0 else []
    return f"{why}; it costs {join_words([*costs, f'an estimated {seconds:.0%} more time'])}"


def _refuted(parts: list[int], outcome: str, larger: int, predicted: bool) -> str:
    if predicted:
        return f"an estimate said {larger} fits; a trace of {format_parts(parts)} says it does not ({outcome})"
    return (
        f"{larger} ran, but {format_parts(parts)} in a fresh process did not ({outcome}): memory differs from run to "
        "run, so keep some headroom (--reserve)"
    )


def _stopped(limit: str, largest_fit: int, first_fail: int | None) -> str:
    fails = "" if first_fail in (None, largest_fit + 1) else f" and below {first_fail}"
    return f"{limit} ended the search: not all sizes above {largest_fit}{fails} were tried; larger ones may fit"


def _modules(sizes: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} ({format_bytes(size)})" for name, size in sizes.items())
    return f"modules outside the model that are on its device: {named}"


def _predicted(uncertainty_bytes: int, measurable: bool) -> str:
    measured = "; the same command without --gpu, on the card, measures it" if measurable else ""
    return f"nothing ran on a card: memory is predicted, give or take {format_bytes(uncertainty_bytes)}{measured}"


_QUANTITIES = {
    "peak": "the peak",
    "min_budget": "the smallest budget",
    "tokens": "what micro-batches by tokens hold",
}


def name_memory(category: str, module: str = "") -> str:
    """Return a category of memory and its module, if any, in words.

    >>> name_memory("optimizer_state", "blocks.{0..11}.mlp")
    'optimizer state of blocks.{0..11}.mlp'
    """
    return f"{category.replace('_', ' ')}{f' of {module}' if module else ''}"


def _memory_grew(quantity: str, bytes: int, before_bytes: int, tolerance: str) -> str:
    share = percent(bytes, before_bytes)
    return f"{_QUANTITIES[quantity]} grew by {precise_bytes(bytes)} ({share}), {tolerance} is allowed"


def _memory_changed(quantity: str, bytes: int, before_bytes: int) -> str:
    of = {"peak": "", "held": " held at the peak", "min_budget": " of the smallest budget", "tokens": " by tokens"}[
        quantity
    ]
    return f"{signed_bytes(bytes)} ({percent(bytes, before_bytes, sign=True)}){of}"


def _wrong_weights(sizes: list[int], losses: Mapping[str, list[float]], divisor: str | None) -> str:
    return "; ".join(
        _mismatch(term, sizes, whole, combined, divisor, None) for term, (whole, combined) in losses.items()
    )


_MISTAKES = {
    "undivided": "the losses of micro-batches are added up without being divided",
    "divided twice": "the losses of micro-batches are divided twice",
    "mean of means": "the mean of every micro-batch counts the same, but they divide by different counts (tokens?)",
    "last window": "a shorter window is divided like a full one",
    "weights": "micro-batches have wrong weights",
}


def _parts_count(mistake: str, factors: list[float], shares: list[float]) -> str:
    def numbers(values: list[float]) -> str:  # What is only rounding is written as 0.
        return join_words(f"{0.0 if abs(value) <= 1e-12 else value:.4g}" for value in values)

    return f"{_MISTAKES[mistake]}: they count for {numbers(factors)}, but should count for {numbers(shares)}"


def _scaled(factor: float, parts: int, tensors: list[str]) -> str:
    of = f" of {list_names(tensors)}" if tensors else ""
    if math.isclose(factor, parts, rel_tol=1e-2):
        return f"the gradient{of} is {parts} times that of the whole batch: {_MISTAKES['undivided']}"
    if math.isclose(factor, 1 / parts, rel_tol=1e-2):
        why = f"{_MISTAKES['divided twice']}, or are sums and divided"
        return f"the gradient{of} is 1/{parts} of that of the whole batch: {why}"
    return f"the gradient{of} is {factor:.4g} times that of the whole batch"


def _divide_parts(divisor: str | None, over_ranks: bool) -> str:
    line = "loss(model, part).backward(), without dividing: the loss is a sum"
    if divisor is not None:
        line = (
            f"(loss(model, part) * count / total).backward(), where count is the part's ({divisor}) and total is the "
            "sum over all parts of the window"
        )
    of_all_ranks = (
        "; sum the total over all ranks first (dist.all_reduce), and multiply by dist.get_world_size(), since DDP and "
        "FSDP divide by it"
    )
    return line + of_all_ranks * over_ranks


_BATCHNORM_MODES = {
    "exact": 'batchnorm="exact", which normalises by the whole batch; batchnorm="frozen" (by running statistics, as '
    'with eval()) and GroupNorm are exact too; batchnorm="running" corrects running statistics only',
    "frozen": 'batchnorm="frozen" (by running statistics, as with eval()) or GroupNorm; batchnorm="exact", where it '
    "runs, needs the Accumulator",
}


def _counts_samples(name: str, micro_batch: int, balances: bool, trainer: bool, target_tokens: int | None) -> str:
    of = "of any length" if target_tokens is None else f"of any length, and no target of {target_tokens:,} tokens"
    text = f"{name} has no token budget: it takes {counted(micro_batch, 'sample')} {of}"
    if balances:
        text += '; "batch_rebalance" sorts an update by length, and limits no micro-batch'
    if trainer:
        text += "; in TRL padding_free=True leaves padding out, and packing=True changes the samples of an update"
    other = "autoaccum.integrations.transformers.AccumulatorTrainer" if trainer else "autoaccum.Accumulator"
    return f"{text}; {other} keeps to the budget"


SENTENCES: Final[Mapping[str, str | Callable[..., str]]] = {
    # What makes the gradient of an update in parts differ from the full batch's.
    "batchnorm_of_parts": _batchnorm,
    "compares_samples": "the loss compares samples with each other (in-batch negatives?) and sees one micro-batch at a "
    f"time: {_NOT_FULL}; {_AS_ONE}, and `autoaccum verify` proves it",
    "module_mixes_samples": lambda modules: (
        f"the output of {describe_modules(modules)} for a sample depends on the others of its micro-batch: the "
        "gradient is not the full batch's; compute it from autoaccum.whole_batch(x), or use a layer that looks at one "
        "sample at a time (GroupNorm)"
    ),
    "loss_mixes_inputs": "the loss mixes samples before it calls the model (mixup, CutMix?), but sees one micro-batch "
    f"at a time: {_NOT_FULL}; mix in batch(size) or collate_fn, before the batch is split, and put the mixed inputs "
    "and both targets (or soft targets) into the batch, one row per sample",
    "loss_mixes_samples": "the loss mixes the samples of a batch (a contrastive loss?), or adds to a sum what does not "
    f"grow with the batch (weight decay?): {_NOT_FULL}; {_AS_ONE}, and autoaccum.whole_batch(x) a term of it; or make "
    "it a mean over samples",
    "experts_of_parts": "the loss that balances experts (output_router_logits) is computed from the tokens of a "
    "micro-batch, not of the effective batch, so that the gradient is not quite the full batch's: "
    "output_router_logits=False leaves it out",
    "buffers_written": "forward updates the buffers {buffers:names}, once per micro-batch instead of once per update: "
    "where outputs depend on them (as in spectral_norm), the gradient is not the full batch's; freeze them with eval() "
    "on these modules",
    "forward_not_repeated": "a repeated forward of a micro-batch gives other outputs, since it changes what it reads: "
    "the gradient is not the full batch's; keep state in buffers (register_buffer)",
    "statistics_unset": 'batchnorm="frozen" normalises by running statistics, and these were never estimated (mean 0, '
    "variance 1): load trained weights, or start with another mode",
    "sums_rounded": lambda dtypes: (
        f'gradients are summed in {" and ".join(dtypes)}, as accumulate_in="parameters" asks: each micro-batch is '
        "rounded, and the gradient is the full batch's only to that (after 256 micro-batches in bfloat16 1.6 % off, "
        '0.1 % with accumulate_in="fp32")'
    ),
    # What the parts of a batch are weighted by.
    "weight_mismatch": _mismatch,
    "write_sum": lambda has_weight: f'the loss is a sum; write reduction = "sum"{" and no weight" * has_weight}',
    "make_terms_means": "some terms of the loss are sums and others are means; make all of them means",
    "write_weight": lambda code, is_sum: (
        f"the right weight{_WITHOUT_SUM * is_sum} is probably: def weight(batch): return {code}"
    ),
    "divisors_likely": lambda divisors: "; ".join(
        f"{name_term(name)} likely divides by {code}" for name, code in divisors.items()
    ),
    "divisor_likely": "it likely divides by {code}",
    "no_weight_fits": "no usual weight fits: run autoaccum verify to find the cause",
    "weight_infinite": "the weighting could not be checked: the loss of a small batch is infinite",
    "weight_random": "the weighting could not be checked: the loss differs from run to run",
    "labels_ignored": "{labels} has ignored entries (-100), but micro-batches are weighted by samples, not by the "
    "entries that count: the right weight is probably: def weight(batch): return {code}",
    "weight_assumed": "the divisor of the loss, {divisor}, was inferred from the model's class, since nothing was "
    "computed: `autoaccum verify` checks it",
    "batch_guessed": "{what}: read as {samples} samples; if every entry is one sample, {way_out}",
    # Verification: what it did beside the comparison.
    "verified_in_float32": "verified in float32: the workload does not run in float64 ({error})",
    "samples_shortened": "all samples are equally long: also compared with {paths:names} shortened",
    "window_left_out": "the shorter window of {parts:parts} was left out: {error}",
    "tokens_alike": "micro-batches by a token budget were not compared: all samples have {tokens} tokens",
    "loop_left_out": "accumulate() was not called with {parts:parts}: a rank with fewer micro-batches would keep the "
    "others waiting",
    "random_neutral": lambda method, parts, reason: (
        "random numbers were replaced by neutral values, in the full batch's update and in "
        f"{'the Accumulator' if method == 'accumulator' else 'accumulate()'}'s by {format_parts(parts)}: {reason}"
    ),
    "draws_of_loop": "a loop may draw in any order",
    "draws_of_ranks": "each rank draws its own",
    "draws_unmatched": lambda sites: (
        f"the shapes drawn in {', '.join(sites)} do not show which sample each row belongs to"
    ),
    "draws_not_replayed": "{error}",
    "search_failed": "the search for the cause failed: {error}",
    # Verification: causes, and what makes both updates equal.
    "batchnorm_by_parts": lambda modules: (
        f"BatchNorm normalises by the micro-batch, not by the whole batch, in {describe_modules(modules)}"
    ),
    "take_batchnorm_mode": lambda mode: _BATCHNORM_MODES[mode],
    "sample_depends_on_others": lambda modules: (
        f"a sample's output depends on the others of its micro-batch in {describe_modules(modules)}"
    ),
    "look_at_one_sample": "compute what it needs of other samples from autoaccum.whole_batch(x), or in "
    "coupled_loss(outputs, batch) with coupled = True; or make it look at one sample at a time, as LayerNorm and "
    "GroupNorm do; or call eval() on it if that changes it",
    "loss_of_whole_batch": "the loss compares samples with each other or is a function of the whole batch (in-batch "
    "negatives, mixup, a statistic of the batch, the root of a mean, outputs of shape (n, 1) with targets of shape "
    "(n,)), or it adds up terms that divide by different counts; a micro-batch has only its own samples",
    "compute_loss_once": "give outputs and targets the same shape, mix inputs before the batch is split, and return "
    "terms that divide by different counts as a dict; otherwise use coupled = True with outputs(model, batch) and "
    "coupled_loss(outputs, batch) in place of loss, which computes the loss once, from all outputs, or compare "
    "autoaccum.whole_batch(x)",
    "wrong_weights": _wrong_weights,
    "draws_mix_samples": "random numbers drawn in {sites:names} mix samples, as a random permutation does, or decide "
    "how many entries a mean has",
    "draw_for_each_sample": "draw for each sample separately, or mix samples before the batch is split",
    "not_repeatable": "the full batch gives a different result when it runs again",
    "keep_state_in_model": "keep counters in buffers of the model, not in globals, closures or classes, which are not "
    "reset between runs; draw random numbers from torch, NumPy or random; do not depend on time, os.urandom or files "
    "that change",
    "parts_count": _parts_count,
    "divide_parts": _divide_parts,
    "padding_counts": "the gradient depends on padding: cutting micro-batches of {parts:parts} to their longest sample "
    "changes it",
    "mask_padding": "mask padding in the model (pass its attention mask) and in the loss, and let trim(batch) keep all "
    "tokens that count; or remove `length` and `lengths` from the workload: micro-batches by count keep the padding",
    "unexplained": lambda tensor, reason: (
        f"no experiment makes both updates equal{f' ({reason})' if reason else ''}; the first tensor that differs is "
        f"{tensor}"
    ),
    "search_stopped": "the search for the cause stopped at the time limit of {limit_seconds:g} s; the first tensor "
    "that differs is {tensor}",
    "narrow_down": "try a smaller model, or one term of the loss at a time, until the updates are equal",
    # Verification of a command.
    "command_scaled": _scaled,
    "command_divide_once": "divide the loss of each micro-batch once by the number of micro-batches per update if it "
    "is a mean, (loss / n).backward(), and not at all if it is a sum; frameworks that accumulate already divide it",
    "command_scale_some": "leave how the loss is divided, since all other gradients are right: correct only "
    "those of {tensors:names}",
    "command_ignored": "the script's first update has {passes:count backward pass}, not {expected}: {option} is "
    "ignored",
    "command_heed": "let the script take an optimizer step only after that many micro-batches",
    "command_other_samples": "the two runs read different samples ({same} of {samples} are the same), so their "
    "gradients cannot be compared: make the order of the data, and random augmentation, depend on the seed and not on "
    "the batch size",
    "command_unseen_samples": "the gradients differ, but the model is called with no tensors that identify samples, so "
    "it is unknown whether both runs read the same ones",
    "command_draws": "the model draws random numbers in its forward pass, which differ between micro-batches and the "
    "whole batch, so the gradients cannot be compared: disable this randomness while you verify",
    "command_no_gradient": "the gradient of the whole batch is {seen}, so there is nothing to compare",
    # Running out of memory in training.
    "repeated_smaller": lambda size, lowered, unit, **facts: _retried(
        size, unit, f"in micro-batches of at most {counted(lowered, unit)}", **facts
    ),
    "repeated_with_saver": lambda size, saver, unit, **facts: _retried(size, unit, f"with {saver}", **facts),
    "sample_over_budget": "a sample of {length:count token} is over the token budget (micro_tokens={micro_tokens}): it "
    "runs alone, and may not fit; drop or truncate such samples",
    "batch_changed": "memory ran out, and forward has changed the batch in place: the update cannot be retried",
    # Plans.
    "command_catches_oom": "at micro-batch {size} the script ran out of memory, caught the error, and continued with "
    "batches of {rows}, which changes its effective batch",
    "data_ends": "the script has too little data for micro-batches of {size}: the search went no higher than {largest}",
    "command_updates_differ": lambda passes, iter_size: (
        f"the script's updates had {', '.join(map(str, passes))} backward passes, not {iter_size} each: do not carry "
        "what is left over at the end of an epoch into the next update (zero_grad()), and divide the loss of a short "
        "update by its own number"
    ),
    "command_batchnorm": "BatchNorm normalises by the micro-batch in {layers:names}: the gradient is not the full "
    "batch's",
    "not_verified": "gradient equivalence was not checked: run `autoaccum verify`",
    "random_memory": "random numbers decide what runs (skipped layers, for example): an update that skips less than "
    "the trials did takes more memory",
    "idle_ranks": "{idle} of {world_size} ranks have no samples: the target batch is smaller than the number of ranks",
    "equal_parts": _equal_parts,
    "nearby_target": "equal micro-batches of a target batch of {target_batch} have {micro_batch} or {above} "
    "samples, and nothing between: with --target-batch {nearby} there are more sizes",
    "multiple_found": "micro-batches are even: 2 and 4 samples run, 1 and 3 raise ({error})",
    "modules_beside": _modules,
    "learning_rate": _learning_rate,
    "refuted": _refuted,
    "tight": lambda size, predicted: (
        f"micro-batch {size} {'fits only if' if predicted else 'ran only because'} the allocator released its cache "
        "and tried again, which is slow"
    ),
    "stopped": _stopped,
    "nccl_memory": "trials do not include NCCL's own memory, some hundred MiB on each card: leave room for it "
    "(--reserve)",
    "outputs_of_ranks": "each rank computes the coupled loss from the outputs of all ranks, but trials in lock step "
    "held those of one rank: leave room for them (--reserve)",
    "objects_on_host": "your model and optimizer ({bytes:bytes}) waited in host memory while trials used the card",
    "not_monotone": "memory does not always grow with {name}: {larger:,} takes less than {smaller:,}, so "
    "values that were not tried may behave differently",
    "not_timed": "updates were not {done}, so the plan has the largest micro-batch, not the fastest: {error}",
    "fastest": _speeds,
    "grad_sync_unusable": 'grad_sync="last" cannot be used: {error}',
    "savers_not_needed": "no savers are needed: micro-batch {size} fits without them",
    "savers_chosen": _savers_chosen,
    "saver_unusable": "{savers} cannot be used: {error}",
    "shared_traces": "planned from traces that cards share: `autoaccum plan --gpu NAME` traces this plan's own "
    "micro-batches",
    "memory_unknown": "where memory goes is known only for simulated cards: --gpu NAME",
    # Plans for other frameworks.
    "framework_means": "{name} averages the means of micro-batches, and this loss divides by {divisor}: if that "
    "differs between micro-batches, the gradient is not the full batch's; autoaccum.Accumulator's is",
    "framework_adds_means": "{model} ignores num_items_in_batch, so a transformers Trainer without a compute_loss_func "
    "adds up the means of {iter_size} micro-batches: {iter_size} times the batch's gradient. Set loss_is_scaled_for_ga "
    "= False in the Trainer's class, or use autoaccum.integrations.transformers.AccumulatorTrainer",
    "framework_shards": "to shard the model in {name}: {settings}",
    "framework_copies_gradients": "{name} uses DistributedDataParallel, which holds another copy of the gradients, up "
    "to {bytes:bytes}, that the trials did not: leave room for it (--reserve), or set its gradient_as_bucket_view",
    "framework_rounds": lambda name, dtypes: (
        f"{name} sums the gradients of {join_words(dtypes)} parameters in {join_words(dtypes)}, which takes less "
        "memory than the fp32 of the trials, and rounds with each micro-batch: plan with --accumulate-in parameters"
    ),
    "framework_counts_samples": _counts_samples,
    # Trainings and studies.
    "planned_elsewhere": "the run was planned for {there}, and this is {here}: planning again",
    "tuned_rate": "the learning rate is {rate:.6g}, which the plan was tuned with",
    "code_changed": "{name} has changed since the run began: training continues with the new code",
    "ceiling_known": "micro-batches of more than {size:count {unit}} ran out of memory before (ceiling.json)",
    "ranks_changed": "the run had {before} ranks, and has {now} now: random numbers, such as dropout's, are drawn anew",
    "order_changed": "the sampler's order has changed: this epoch may omit or repeat samples",
    "data_resumed": "the data resumed from its own state_dict",
    "read_forward": lambda windows, has_state: (
        f"{'its state_dict could not be saved' if has_state else 'the data has no state_dict'}: {windows:,} windows "
        "were read forward"
    ),
    "samples_dropped": "{samples} samples left over at the end of an epoch are dropped: micro-batches are multiples of "
    "{multiple_of}",
    "update_skipped": "update {update} is skipped: {reason}",
    "retried_smaller": "update {update}: out of memory in {phase} with {size:count {unit}}, retried with {lowered}",
    "retried_with_saver": "update {update}: out of memory in {phase} with {size:count {unit}}: this and later "
    "updates run with {saver}",
    "checkpoint_not_written": "no checkpoint was written after update {update}: {error}",
    "metrics_not_written": "{path} cannot be written ({error}): some lines are missing",
    # Simulated cards.
    "predicted": _predicted,
    "uncertainty": _covered,
    "narrow_fit": _narrow_fit,
    "card_assumed": "{card}: {source}",
    "compiled": "the model is compiled (torch.compile), but its eager step is predicted: a compiled one usually takes "
    "less memory",
    "check_assumed": "the check at {place} was assumed to pass",
    "values_assumed": "values that the script reads are unknown on a simulated card, and were replaced by 1, True or "
    "zeros: at {places:names} (--values cpu computes them)",
    "values_read": lambda reads, samples: (
        f"values were read {'once' if reads == 1 else f'{reads} times'}, and the CPU computed them from a batch of "
        f"{counted(samples, 'sample')}: other samples, or a card's random numbers, may take more or less memory"
    ),
    "trace_differs": lambda parts, sizes: (
        f"the trace of {' + '.join(map(str, parts))} differs from the one extrapolated from sizes "
        f"{', '.join(map(str, sizes))}: later sizes were traced separately, and earlier peaks may be slightly off"
    ),
    "not_extrapolated": "every size is traced separately, since memory is not affine in the batch ({error})",
    "not_simulated": "the search began without a simulation of the card ({error})",
    "no_token_budget": "no token budget was found ({error}): micro-batches are counted in samples",
    "not_explained": "where the memory goes is not known ({error})",
    "changes_unknown": "what would change the peak is not fully known ({error})",
    "change_not_simulated": "the time limit ended before {change} was simulated",
    # An error of one case or trial, beside which others go on.
    "error": "{text}",
    # What a guard finds.
    "not_locked": lambda lock, exists: f"{lock} has no entry for it" if exists else f"there is no {lock}",
    "other_schedule": "the earlier measurement has micro-batches of {before:parts}, this one has {now:parts}",
    "other_card": "the lock was measured on {before}, this is {now}",
    "other_setting": lambda name, before, now: (
        f"the lock was written {f'without {name}' if before is None else f'with {name} {before}'}, here it is "
        f"{'not set' if now is None else now}"
    ),
    "fits_no_more": "micro-batch {micro_batch} no longer fits: it needs at least {min_budget_bytes:precise}, "
    "{limit_bytes:precise} are available",
    "largest_fell": "the largest micro-batch that fits fell from {before} to {now}",
    "memory_grew": _memory_grew,
    "memory_changed": _memory_changed,
    "module_changed": lambda category, module, bytes, change: (
        f"{name_memory(category, module)} {signed_bytes(bytes)}{f' ({change})' if change else ''}"
    ),
    "peak_moved": "the peak moved from {before} to {now}",
    "setting_changed": "{name} {before} -> {now}",
    "largest_changed": lambda gpu, before, now: f"{gpu} now holds {now or 'none'} instead of {before or 'none'}",
    "summary_not_written": "the step's summary cannot be written ({error})",
    "lock_if_meant": "if the change is intended, lock it",
    "lock_on_good_branch": "lock it on a branch that is known to be good",
    "compare_or_lock_anew": "compare with a revision (--baseline REV), or lock again on a branch that is known to be "
    "good",
    # Studies.
    "held_out_loss_not_finite": "the loss on held-out data is {loss} after update {update}",
    "trial_warning": "trial {number}: {warning}",
    "study_out_of_time": "its time of {seconds:g} s is used up",
    "best_not_planned": "the best setting has no plan: {error}",
    "rate_near_end": "the best learning rate lies near the end of the range, {end:.3g}: search beyond it",
}


def fill(sentence: str | Callable[..., str], facts: Mapping[str, Any]) -> str:
    """Return a sentence with its facts."""
    return sentence(**facts) if callable(sentence) else _Sentence().vformat(sentence, (), facts)
