"""Where the memory of a step goes, as small tables: by what it is for, by module, and what would change it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from autoaccum.accumulation.schedule import format_parts
from autoaccum.devices.explanation import Change, Explanation, ModuleShare
from autoaccum.reporting.plain_text import one_line
from autoaccum.units import format_bytes, percent, signed_bytes

_NONE = "-"
_NO_MODULE = "(no module)"
_MODULE_WIDTHS = (5, 11, 12)
_LEAST_WIDTH = 24
_INDENT = " " * 4


def print_explanation(console: Console, explanation: Explanation, measured_bytes: int | None = None) -> None:
    """Draw an explanation; all figures in it are of a simulation, and said to be.

    Args:
        console: Where to.
        explanation: What to draw.
        measured_bytes: The peak of real trials, to be set beside.
    """
    for line in _heading(explanation, measured_bytes):
        line.plain = one_line(line.plain)
        _print(console, line)
    console.print()
    for line in category_lines(explanation):
        _print(console, line)
    if explanation.modules:
        console.print()
        for line in module_lines(explanation.modules, console.width):
            _print(console, line)
    if explanation.changes:
        console.print()
        for line in change_lines(console, explanation.changes):
            _print(console, line)


def category_lines(explanation: Explanation) -> Iterator[Text]:
    """What the bytes of the peak are for, without what takes none; what they add up to, and the context on top."""
    width = max(map(len, explanation.categories))
    peak_bytes = explanation.peak_bytes
    yield Text(f"{'at the peak':<{width}}{'bytes':>12}{'share':>9}", "bold")
    for category, held in explanation.categories.items():
        if held:
            label, share = category.replace("_", " "), _share(held, peak_bytes)
            yield Text(f"{label:<{width}}{format_bytes(held):>12}{share:>9}")
    yield Text(f"{'in all':<{width}}{format_bytes(peak_bytes):>12}{_share(peak_bytes, peak_bytes):>9}", "bold")
    yield Text(f"{'context':<{width}}{format_bytes(explanation.context_bytes):>12}{'on top':>9}")


def module_lines(modules: Sequence[ModuleShare], width: int) -> Iterator[Text]:
    """The modules that hold most; long names and kinds lose their beginnings where `width` is too small."""
    room = max(_LEAST_WIDTH, width - sum(_MODULE_WIDTHS) - 3)
    kinds = min(max(len("class"), *(len(share.kind) for share in modules)), room // 2)
    names = min(max(len("module"), *(len(_module(share)) for share in modules)), room - kinds)
    heading = ("module", "class", "count", "bytes", "per sample")
    rows = [
        (_module(share), one_line(share.kind) or _NONE, str(share.count), format_bytes(share.bytes), _optional(share))
        for share in modules
    ]
    for number, (name, kind, *figures) in enumerate([heading, *rows]):
        columns = "".join(f"{figure:>{column}}" for figure, column in zip(figures, _MODULE_WIDTHS, strict=True))
        line = f"{_cut(name, names):<{names}}  {_cut(kind, kinds):<{kinds}} {columns}"
        yield Text(line, "bold" if number == 0 else "")


def change_lines(console: Console, changes: Iterable[Change]) -> Iterator[Text]:
    """What would change the peak, each by its own; words that find no room beside the figures stand below them."""
    changes = list(changes)
    width = max(len("change"), *(len(change.name) for change in changes))
    before = f"{'change':<{width}}{'peak':>11}{'least budget':>14}  "
    yield Text(f"{before}what", "bold")
    for change in changes:
        least = _NONE if change.least_bytes is None else format_bytes(change.least_bytes)
        figures = f"{one_line(change.name):<{width}}{change_words(change.saved_bytes):>11}{least:>14}  "
        said = change.what if change.message is None else f"{change.what}: not simulated ({change.message})"
        style = "green" if (change.saved_bytes or 0) > 0 else ""
        # No word is broken: settings are copied.
        longest, room = max(map(len, said.split())), max(_LEAST_WIDTH, console.width - len(before))
        beside = longest <= room
        if not beside:
            yield Text(figures, style)
            room = max(longest, console.width - len(_INDENT))
        for number, part in enumerate(Text(one_line(said)).wrap(console, room)):
            part.rstrip()
            indent = " " * len(before) if beside else _INDENT
            yield Text.assemble((figures, style) if beside and number == 0 else indent, part)


def change_words(saved_bytes: int | None) -> str:
    """How a peak changes that is less by `saved_bytes`.

    >>> change_words(3 * 2**30), change_words(-2 * 2**30), change_words(0), change_words(None)
    ('-3.00 GiB', '+2.00 GiB', 'as it is', '-')
    """
    if saved_bytes is None:
        return _NONE
    return signed_bytes(-saved_bytes) if saved_bytes else "as it is"


def _heading(explanation: Explanation, measured_bytes: int | None) -> Iterator[Text]:
    yield Text("where the memory goes", "bold")
    peak = f"{format_bytes(explanation.peak_bytes)} (predicted)"
    measured = "" if measured_bytes is None else f"; measured: {format_bytes(measured_bytes)}"
    yield Text(f"{explanation.card}, micro-batches of {format_parts(explanation.parts)}: {peak}{measured}")
    of = f" of {explanation.module}" if explanation.module else ""
    yield Text(f"the peak stands in {explanation.phase}, at {explanation.op or 'what is there from the start'}{of}")


def _share(held: int, peak_bytes: int) -> str:
    return percent(held, peak_bytes) if peak_bytes else _NONE


def _print(console: Console, line: Text) -> None:
    line.rstrip()
    console.print(line, soft_wrap=True)


def _module(share: ModuleShare) -> str:
    if share.name:
        return one_line(share.name)
    return "(the model itself)" if share.kind else _NO_MODULE


def _optional(share: ModuleShare) -> str:
    return _NONE if share.bytes_per_sample is None else format_bytes(share.bytes_per_sample)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"
