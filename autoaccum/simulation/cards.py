"""The cards that can be simulated: a catalogue in `cards.csv`, search by name, and an estimate of the CUDA context.

To add a card, add a row to `cards.csv`, and nothing else. `.github/CONTRIBUTING.md` explains its columns.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar

from autoaccum.checks import close_names
from autoaccum.errors import UsageError
from autoaccum.units import GIB, KIB, MIB, format_bytes, parse_size

GENERATIONS = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "another generation")
_BY_MAJOR = {7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}
_BY_CAPABILITY = {(7, 5): "Turing", (8, 9): "Ada"}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_IGNORED = re.compile("[^a-z0-9]|nvidia|geforce|tesla|rtx|gtx|generation|edition|gpu")
_GIGABYTES = re.compile(r"(\d)gi?b")
_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*([kmgt]i?b|b|%)\s*", re.IGNORECASE | re.ASCII)
_NO_UNIT = re.compile(r"\s*(\d{1,3}(\.\d+)?)\s*g?\s*", re.IGNORECASE | re.ASCII)
_MIN_BYTES, _MAX_BYTES = GIB, 1024 * GIB
_MAX_SHOWN_LENGTH = 40
ALL = "all"
_HINT = "name a card, or a size such as 24GiB"
_ROW_HINT = ".github/CONTRIBUTING.md explains the columns"
_FORMS: Mapping[str, str] = {
    "name": r"[a-z0-9]+([-.][a-z0-9]+)*",
    "capability": r"\d+\.\d",
    "measured": "yes|no",
    "size_gb": r"([1-9]\d*)?",
    **dict.fromkeys(("total_mib", "multiprocessors"), r"[1-9]\d*"),
    **dict.fromkeys(("tensor_tflops", "fp32_tflops", "bandwidth_gb_s"), r"\d+(\.\d+)?"),
    **dict.fromkeys(("title", "source", "rates"), r"\S(.*\S)?"),
}
"""What the columns of `cards.csv` hold; `aliases` may be anything."""
_BYTES_PER_THREAD = 2 * KIB
_LAZY_BYTES_PER_THREAD = 3 * KIB // 4
_LAZY_BYTES = 32 * MIB
_OTHER_KERNELS_BYTES = 64 * MIB
_ESTIMATE_ERROR_DIVISOR = 8
REPORTED: Mapping[str, tuple[int, int | None, str]] = {
    "NVIDIA GeForce RTX 3090": (256 * MIB, None, "torch 2.7, https://github.com/invoke-ai/InvokeAI/issues/9413"),
    "NVIDIA GeForce RTX 4090": (428 * MIB, None, "an empty program, driver 580; 384 MiB for an idle torch elsewhere"),
    "NVIDIA RTX 6000 Ada Generation": (426 * MIB, None, "https://github.com/unslothai/unsloth-zoo/pull/1053"),
    "Tesla T4": (107_392 * KIB, 144_256 * KIB, "torch 2.10, https://github.com/Anassbzdd/fitcheck"),
    "NVIDIA H100 80GB HBM3": (523 * MIB, 758 * MIB, "torch 2.11 with driver 580, tests/gpu/data/h100_runs.csv"),
}
"""By the driver's name of the card, the context that nvidia-smi showed before any other work, what it showed outside
PyTorch's allocator after training steps (None: not reported), and the source."""


@dataclass(frozen=True, kw_only=True)
class CardRates:
    """The most that a card can do in a second, by its maker; training reaches a part of it.

    Attributes:
        capability: The compute capability.
        tensor_flops: FLOPs of dense products in fp16 or bf16 that are summed in fp32.
        fp32_flops: The same in fp32, without TF32.
        memory_bytes: Bytes from and to its memory.
        source: Where the numbers are from.
    """

    capability: tuple[int, int]
    tensor_flops: float
    fp32_flops: float
    memory_bytes: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card as PyTorch on Linux sees it.

    Attributes:
        name: A short name such as `rtx3090` or `a100-80gb`.
        title: The name in the driver, such as `NVIDIA GeForce RTX 3090`.
        total_bytes: `total_memory` in `torch.cuda.get_device_properties`: the lowest seen, as newer drivers show less.
        source: The source of `total_bytes`.
        measured: True if `total_bytes` was read from such a card, not estimated from a card of the same size.
        aliases: Other names; an alias of several cards is ambiguous.
        nominal_gb: The memory in GB that the card is sold with, which may follow any of its names.
        rates: What it can do in a second; None: not known (see `card_rates`).
    """

    name: str
    title: str
    total_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    source: str
    measured: bool = True
    aliases: tuple[str, ...] = ()
    nominal_gb: int | None = None
    rates: CardRates | None = None

    @property
    def architecture(self) -> str:
        """NVIDIA's name of the GPU generation."""
        return _BY_CAPABILITY.get(self.capability) or _BY_MAJOR.get(self.capability[0], GENERATIONS[-1])

    @property
    def threads_per_multiprocessor(self) -> int:
        """Maximum number of resident threads (CUDA C++ Programming Guide, technical specifications per capability)."""
        return _THREADS.get(self.capability, 2048)

    @property
    def spellings(self) -> Iterator[str]:
        """All names of the card."""
        for name in (self.name, self.title, *self.aliases):
            yield name
            if self.nominal_gb is not None:
                yield f"{name} {self.nominal_gb}GB"


@cache
def all_cards() -> tuple[Card, ...]:
    """Return all cards of the catalogue, ordered by generation, whole cards before MIG slices, then memory."""
    with (files(__package__) / "cards.csv").open(encoding="utf-8") as lines:
        return tuple(sorted(read_cards(lines), key=_sort_key))


def read_cards(lines: Iterable[str]) -> Iterator[Card]:
    """Read a catalogue of cards, one for each line below that of the columns' names.

    Raises:
        UsageError: A row has another number of columns than the first one, or a value that its column cannot have.
    """
    rows = csv.DictReader(lines)
    for row in rows:
        place = f"line {rows.line_num} of cards.csv ({row['name']})"
        if None in row or None in row.values():
            many = "many" if None in row else "few"
            raise UsageError(f"{place} has too {many} columns", hint=f"quote a text with commas; {_ROW_HINT}")
        for column, form in _FORMS.items():
            if not re.fullmatch(form, row[column]):
                raise UsageError(f"{place} has {column} {row[column]!r}", hint=_ROW_HINT)
        yield _read(row)


def find_card(text: str) -> Card:
    """Return the card with a name, ignoring case, spaces, hyphens and `NVIDIA GeForce`; or a card of a given size.

    Raises:
        UsageError: No card or several cards have this name, or the size is not one of a card.

    >>> find_card("GeForce RTX 4090").name, find_card("A100 80GB").name
    ('rtx4090', 'a100-80gb')
    """
    if _SIZE.fullmatch(text):
        return _card_of_size(text)
    cards = _cards_by_key().get(_key(text), ())
    if len(cards) == 1:
        return cards[0]
    shown = repr(text if len(text) <= _MAX_SHOWN_LENGTH else f"{text[:_MAX_SHOWN_LENGTH]}...")
    if cards:
        listed = ", ".join(f"{card.name} ({format_bytes(card.total_bytes)})" for card in cards)
        raise UsageError(f"{shown} is the name of {len(cards)} cards", hint=f"write one of {listed}")
    close = _close_names(text)
    guess = f"did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        f"there is no {shown} among the {len(all_cards())} cards that can be simulated",
        hint=f"{guess}`autoaccum gpus` lists them; for any other card give a size with its unit, such as 24GiB",
    )


def find_cards(text: str) -> tuple[Card, ...]:
    """Return the cards of a list of names or sizes with commas in between, each once; `all` is the whole catalogue.

    Raises:
        UsageError: As `find_card`.
    """
    if text.strip().casefold() == ALL:
        return all_cards()
    names = [name for name in map(str.strip, text.split(",")) if name] or [text]
    return tuple({card.name: card for card in map(find_card, names)}.values())


def matching_cards(text: str) -> tuple[Card, ...]:
    """Return the cards with `text` in one of their names or with this generation; none for a size."""
    wanted = "" if _SIZE.fullmatch(text) else _key(text)
    return tuple(
        card
        for card in all_cards()
        if wanted and (wanted == card.architecture.lower() or any(wanted in _key(name) for name in card.spellings))
    )


def card_rates(card: Card) -> CardRates:
    """Return the rates of a card; of one that is not in the catalogue, those of the most similar one that is.

    That is one of the same capability, or else of the next lower one, with the nearest number of multiprocessors, in
    proportion to their number.
    """
    if card.rates is not None:
        return card.rates
    rated = [other for other in all_cards() if other.rates is not None and " MIG " not in other.title]
    older = {other.capability for other in rated if other.capability <= card.capability} or {(7, 0)}
    candidates = [other for other in rated if other.capability == max(older)]
    nearest = min(
        candidates, key=lambda other: (other.title != card.title, abs(other.multiprocessors - card.multiprocessors))
    )
    assert nearest.rates is not None
    share = 1.0 if nearest.title == card.title else card.multiprocessors / nearest.multiprocessors
    return CardRates(
        capability=card.capability,
        tensor_flops=nearest.rates.tensor_flops * share,
        fp32_flops=nearest.rates.fp32_flops * share,
        memory_bytes=nearest.rates.memory_bytes * share,
        source=f"assumed: as the {nearest.name}, in proportion to its multiprocessors",
    )


def _card_of_size(text: str) -> Card:
    """Return a card of a given size, all of it visible to PyTorch; its other properties are an A100's."""
    try:
        size_bytes = parse_size(text).resolve(0)
    except UsageError as error:
        raise UsageError(error.message, hint=_HINT) from None
    if not _MIN_BYTES <= size_bytes <= _MAX_BYTES:
        raise UsageError(
            f"--gpu {text.strip()} is {format_bytes(size_bytes)}",
            hint=f"give a size from {format_bytes(_MIN_BYTES)} to {format_bytes(_MAX_BYTES)}",
        )
    return Card(
        name=" ".join(text.split()),
        title=f"a card with {format_bytes(size_bytes)}",
        total_bytes=size_bytes,
        capability=(8, 0),
        multiprocessors=108,
        source="assumed: all of it visible to PyTorch, the kernels and the 108 multiprocessors of an A100",
        measured=False,
    )


@cache
def _cards_by_key() -> Mapping[str, tuple[Card, ...]]:
    """Return the cards with each spelling; a card's own name belongs to it alone."""
    by_key: dict[str, tuple[Card, ...]] = {}
    for card in all_cards():
        for key in {_key(name) for name in card.spellings}:
            by_key[key] = (*by_key.get(key, ()), card)
    return by_key | {_key(card.name): (card,) for card in all_cards()}


def _close_names(text: str) -> list[str]:
    if size := _NO_UNIT.fullmatch(text):
        return [f"{size[1]}GiB"]
    close = close_names(_key(text)[:_MAX_SHOWN_LENGTH], _cards_by_key())
    return list(dict.fromkeys(card.name for key in close for card in _cards_by_key()[key]))[:3]


def _key(text: str) -> str:
    letters = _IGNORED.sub("", text.casefold().replace("mobile", "laptop"))
    return _GIGABYTES.sub(r"\1g", letters)


def _sort_key(card: Card) -> tuple[int, bool, int, str]:
    return GENERATIONS.index(card.architecture), " MIG " in card.title, card.total_bytes, card.name


def _read(row: Mapping[str, str]) -> Card:
    major, minor = row["capability"].split(".")
    return Card(
        name=row["name"],
        title=row["title"],
        total_bytes=int(row["total_mib"]) * MIB,
        capability=(int(major), int(minor)),
        multiprocessors=int(row["multiprocessors"]),
        source=row["source"],
        measured=row["measured"] == "yes",
        aliases=tuple(filter(None, row["aliases"].split("|"))),
        nominal_gb=int(row["size_gb"]) if row["size_gb"] else None,
        rates=CardRates(
            capability=(int(major), int(minor)),
            tensor_flops=float(row["tensor_tflops"]) * 1e12,
            fp32_flops=float(row["fp32_tflops"]) * 1e12,
            memory_bytes=float(row["bandwidth_gb_s"]) * 1e9,
            source=row["rates"],
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ContextMemory:
    """Memory of a training process outside PyTorch's allocator: the CUDA context and lazily loaded kernel modules.

    Attributes:
        start_bytes: The context before any kernel is loaded.
        modules_bytes: Its growth as kernels are loaded on first use, up to the end of a training step.
        uncertainty_bytes: The possible error of their sum in either direction.
        source: The source of `start_bytes`.
        measured: True if `start_bytes` was read from such a card.
    """

    start_bytes: int
    modules_bytes: int
    uncertainty_bytes: int
    source: str
    measured: bool

    @property
    def bytes(self) -> int:
        """The sum of `start_bytes` and `modules_bytes`."""
        return self.start_bytes + self.modules_bytes


def context_memory(card: Card) -> ContextMemory:
    """Estimate the memory of a training process on `card` outside PyTorch's allocator.

    Most of the context is local memory for every thread that can be resident: 2 KiB per thread gives 246 MiB on an
    RTX 3090 (256 reported), 384 on an RTX 4090 (384 and 428), 426 on an RTX 6000 Ada (426) and 528 on an H100 (523). It
    grows when kernels are first used, by their code and more local memory. 32 MiB and 3/4 KiB per thread make it 142
    MiB on a T4 and 758 on an H100, which had 141 and 742 to 768 after training steps of language models and of networks
    with convolutions; the band covers other kernels. Not covered: under `cudnn.benchmark`, some networks had 390 MiB
    more on the H100. Kernels are assumed to be loaded on first use, PyTorch's default since 1.13.
    """
    threads = card.multiprocessors * card.threads_per_multiprocessor
    start, modules = threads * _BYTES_PER_THREAD, _LAZY_BYTES + threads * _LAZY_BYTES_PER_THREAD
    measured = card.title in REPORTED
    if measured:
        start, trained, report = REPORTED[card.title]
        source = f"reported: {report}"
    else:
        trained = None
        source = "estimated: 2 KiB for each thread that can be resident, as reported for four cards"
    band = min(_OTHER_KERNELS_BYTES, start // 2)
    if trained is None:
        band += modules // 4 + (0 if measured else start // _ESTIMATE_ERROR_DIVISOR)
    else:
        modules = trained - start
    return ContextMemory(
        start_bytes=start, modules_bytes=modules, uncertainty_bytes=band, source=source, measured=measured
    )


_T = TypeVar("_T")


class CardInUse:
    """A card that is asked for what a trace depends on, and the other cards that would have answered alike.

    The traces of all of these are the same: what a kernel takes beside its tensors is a rule in a trace, and worked out
    for each card when the trace is replayed.

    Attributes:
        card: The card.
        alike: The other cards whose answers are the same so far, in order.
        was_asked_by_code: Whether code has asked that may keep the answer, such as the workload or a library; kernels
            of the simulation ask with each call.

    Args:
        card: The card.
        others: The cards that may share its traces.
    """

    def __init__(self, card: Card, others: Iterable[Card] = ()) -> None:
        self.was_asked_by_code = False
        self.switch(card, others)

    def switch(self, card: Card, others: Iterable[Card]) -> None:
        """Simulate another card from now on, which code that has asked before would not notice."""
        self.card, self.alike = card, list(others)

    def answer(self, question: Callable[[Card], _T]) -> _T:
        """Answer a question of code, which may keep the answer."""
        self.was_asked_by_code = True
        answer = question(self.card)
        self.alike = [card for card in self.alike if question(card) == answer]
        return answer

    def choose(self, kernel: Callable[[Card], _T]) -> _T:
        """Return the kernel that is chosen by a card's capability, and by nothing else of the card."""
        chosen = kernel(self.card)
        by_capability = {card.capability: card for card in self.alike}
        others = {capability for capability, card in by_capability.items() if kernel(card) != chosen}
        if others:
            self.alike = [card for card in self.alike if card.capability not in others]
        return chosen
