"""The cards that can be simulated: facts from `cards.csv`, found by the names people type, and their contexts."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from autoaccum.devices.card_memory import CardMemory
from autoaccum.errors import UsageError
from autoaccum.units import GIB, KIB, MIB, format_bytes, parse_size

_GENERATIONS = ("Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "another generation")
_BY_MAJOR = {7: "Volta", 8: "Ampere", 9: "Hopper", 10: "Blackwell", 12: "Blackwell"}
_BY_CAPABILITY = {(7, 5): "Turing", (8, 9): "Ada"}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_NOISE = re.compile("[^a-z0-9]|nvidia|geforce|tesla|rtx|gtx|generation|edition|gpu")
_GIGABYTES = re.compile(r"(\d)gi?b")
_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*([kmgt]i?b|b|%)\s*", re.IGNORECASE | re.ASCII)
_NO_UNIT = re.compile(r"\s*(\d{1,3}(\.\d+)?)\s*g?\s*", re.IGNORECASE | re.ASCII)
_LEAST, _MOST = GIB, 1024 * GIB
_LONGEST_SHOWN = 40
_WAY_OUT = "name a card, or a size such as 24GiB"


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card as PyTorch on Linux sees it.

    Attributes:
        name: As people type it: `rtx3090`, `a100-80gb`.
        title: As the driver calls it: `NVIDIA GeForce RTX 3090`.
        total_bytes: What `torch.cuda.get_device_properties` tells: the least seen, since newer drivers show less.
        source: Where `total_bytes` comes from.
        measured: Whether it was read from such a card, and not taken over from one of the same size.
        aliases: Other names; one that several cards share is ambiguous.
        nominal_gb: The memory it is sold with, which may follow any of its names.
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

    @property
    def architecture(self) -> str:
        """NVIDIA's name for the generation."""
        return _BY_CAPABILITY.get(self.capability) or _BY_MAJOR.get(self.capability[0], _GENERATIONS[-1])

    @property
    def threads_per_multiprocessor(self) -> int:
        """Most threads resident on one (CUDA C++ Programming Guide, technical specifications per capability)."""
        return _THREADS.get(self.capability, 2048)

    @property
    def spellings(self) -> Iterator[str]:
        """All names that mean it."""
        for name in (self.name, self.title, *self.aliases):
            yield name
            if self.nominal_gb is not None:
                yield f"{name} {self.nominal_gb}GB"


@cache
def all_cards() -> tuple[Card, ...]:
    """All cards that are known: by generation, whole ones before slices, then by memory."""
    with (files(__package__) / "cards.csv").open(encoding="utf-8") as lines:
        cards = [_read(row) for row in csv.DictReader(lines)]
    return tuple(sorted(cards, key=_place))


def find_card(text: str) -> Card:
    """The card that `text` names: in any case, with or without spaces, hyphens and `NVIDIA GeForce`; or a plain size.

    Raises:
        UsageError: No card or several cards have this name, or the size is none.

    >>> find_card("GeForce RTX 4090").name, find_card("A100 80GB").name
    ('rtx4090', 'a100-80gb')
    """
    if _SIZE.fullmatch(text):
        return _card_of_size(text)
    found = _named().get(_key(text), ())
    if len(found) == 1:
        return found[0]
    seen = repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
    if found:
        listed = ", ".join(f"{card.name} ({format_bytes(card.total_bytes)})" for card in found)
        raise UsageError(f"{seen} is the name of {len(found)} cards", hint=f"write one of {listed}")
    near = _near(text)
    guess = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"there is no {seen} among the {len(all_cards())} cards that can be simulated",
        hint=f"{guess}`autoaccum gpus` lists them; a size with its unit, such as 24GiB, stands for any other",
    )


def matching_cards(text: str) -> tuple[Card, ...]:
    """The cards that have `text` in one of their names or are of this generation; none for a size."""
    wanted = "" if _SIZE.fullmatch(text) else _key(text)
    return tuple(
        card
        for card in all_cards()
        if wanted and (wanted == card.architecture.lower() or any(wanted in _key(name) for name in card.spellings))
    )


def installed_card(memory: CardMemory) -> Card:
    """The card of this machine, to be simulated."""
    return Card(
        name=memory.name,
        title=memory.name,
        total_bytes=memory.total_bytes,
        capability=memory.capability,
        multiprocessors=memory.multiprocessors,
        source=f"cuda:{memory.index} itself",
    )


def _card_of_size(text: str) -> Card:
    """A card of which only the memory is known: all of it visible to PyTorch; the rest is an A100's."""
    try:
        size_bytes = parse_size(text).resolve(0)
    except UsageError as error:
        raise UsageError(error.message, hint=_WAY_OUT) from None
    if not _LEAST <= size_bytes <= _MOST:
        raise UsageError(
            f"--gpu {text.strip()} is {format_bytes(size_bytes)}",
            hint=f"a card has from {format_bytes(_LEAST)} to {format_bytes(_MOST)}, as far as is known here",
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
def _named() -> Mapping[str, tuple[Card, ...]]:
    """Cards by spelling; a card's own name is no one else's."""
    named: dict[str, tuple[Card, ...]] = {}
    for card in all_cards():
        for key in {_key(name) for name in card.spellings}:
            named[key] = (*named.get(key, ()), card)
    return named | {_key(card.name): (card,) for card in all_cards()}


def _near(text: str) -> list[str]:
    if size := _NO_UNIT.fullmatch(text):
        return [f"{size[1]}GiB"]
    close = difflib.get_close_matches(_key(text)[:_LONGEST_SHOWN], _named(), n=3, cutoff=0.7)
    return list(dict.fromkeys(card.name for key in close for card in _named()[key]))[:3]


def _key(text: str) -> str:
    letters = _NOISE.sub("", text.casefold().replace("mobile", "laptop"))
    return _GIGABYTES.sub(r"\1g", letters)


def _place(card: Card) -> tuple[int, bool, int, str]:
    return _GENERATIONS.index(card.architecture), " MIG " in card.title, card.total_bytes, card.name


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
    )


_BYTES_PER_THREAD = 2 * KIB
_LATE_BYTES_PER_THREAD = KIB // 2
_UNSEEN_KERNELS = 64 * MIB
_UNMEASURED_SHARE = 8

REPORTED: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        "NVIDIA GeForce RTX 3090": (
            256 * MIB,
            "torch 2.7 with driver 610, https://github.com/invoke-ai/InvokeAI/issues/9413",
        ),
        "NVIDIA GeForce RTX 4090": (
            428 * MIB,
            "an empty program, driver 580; 384 MiB for an idle torch elsewhere",
        ),
        "NVIDIA RTX 6000 Ada Generation": (426 * MIB, "torch 2.10, https://github.com/unslothai/unsloth-zoo/pull/1053"),
    }
)
"""Contexts that nvidia-smi showed before anything else was done, by what the driver calls the card."""


@dataclass(frozen=True, kw_only=True)
class ContextMemory:
    """Bytes of a training process that PyTorch's allocator knows nothing of.

    Attributes:
        start_bytes: The context, before any kernel was needed.
        modules_bytes: By how much it grows as kernels are first used, by the time a training step is done.
        band_bytes: How far their sum may be off, either way.
        source: How they are known.
        measured: Whether `start_bytes` was seen on such a card.
    """

    start_bytes: int
    modules_bytes: int
    band_bytes: int
    source: str
    measured: bool

    @property
    def bytes(self) -> int:
        """Return what a training process holds outside the allocator."""
        return self.start_bytes + self.modules_bytes


def context_memory(card: Card) -> ContextMemory:
    """Estimate what a process with a context on `card` holds outside PyTorch's allocator.

    The context is, for the most part, local memory for every thread that can be resident: 2 KiB for each gives 246 MiB
    on an RTX 3090 (256 reported), 384 on an RTX 4090 (384 and 428) and 426 on an RTX 6000 Ada (426). It grows as
    kernels are first used, which need more of it and room for their code: by half a KiB for each thread in the forward
    passes of language models (`non_torch_memory` in logs of vLLM 0.6 to 0.10: 10 MiB on a T4, 61 on an RTX 3090, 82 on
    an L40S, 102 on an A100, 164 on an H100). Nobody has told of backward passes and convolutions: a part of the band.
    Kernels are taken to be loaded as they are needed, as PyTorch has it since 1.13, and not all at once.
    """
    threads = card.multiprocessors * card.threads_per_multiprocessor
    start, late = threads * _BYTES_PER_THREAD, threads * _LATE_BYTES_PER_THREAD
    band = late // 2 + min(_UNSEEN_KERNELS, start // 2)
    measured = card.title in REPORTED
    if measured:
        start, report = REPORTED[card.title]
        source = f"reported: {report}"
    else:
        band += start // _UNMEASURED_SHARE
        source = "estimated: 2 KiB for each thread that can be resident, as on three cards where it was reported"
    return ContextMemory(start_bytes=start, modules_bytes=late, band_bytes=band, source=source, measured=measured)
