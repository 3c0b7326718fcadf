"""A training command as a source: its words, in which the sizes of a trial are filled in."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autoaccum.checks import check_alone, join_words
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.sources.source import FileSource, Source

MICRO_BATCH: Final = "{micro_batch}"
ITER_SIZE: Final = "{iter_size}"
TOTAL_ITER_SIZE: Final = "{total_iter_size}"
"""The micro-batches of all ranks per update, for scripts that divide their option by the number of ranks."""
TARGET_BATCH: Final = "{target_batch}"
"""The samples of an update, over all ranks, for scripts that derive the micro-batches of an update from it."""
_PLACES: Final = (MICRO_BATCH, ITER_SIZE, "{world_size}", TOTAL_ITER_SIZE, TARGET_BATCH)
_OF_PARTS: Final = (ITER_SIZE, TOTAL_ITER_SIZE, TARGET_BATCH)
_OWN_TRAINING: Final = (
    "is for a workload, and a command trains by itself",
    "run the command that `autoaccum plan` prints",
)
_REFUSING: Final = {
    "fit": _OWN_TRAINING,
    "tune": (
        "trains a workload, and cannot tell a command its learning rates",
        "call the script from an Optuna study of your own, or write a workload file",
    ),
    "--emit": _OWN_TRAINING,
    "--for": _OWN_TRAINING,
    "--write-workload": ("writes a workload file, and a command has none", "save the command that is planned"),
    "--help-model": ("lists what can be set in a workload", "--set fills {name} wherever the command has it"),
    "explain": (
        "compares a snapshot with a workload, not with a command",
        "`autoaccum plan --gpu NAME --explain -- COMMAND` shows where its memory goes",
    ),
}
"""Why some commands and flags of autoaccum take no training command, and what does it instead."""


@dataclass(frozen=True)
class CommandSource(Source):
    """A command, such as `python train.py --batch_size={micro_batch}`; its `name` is its words as a shell reads them.

    Attributes:
        folder: The folder that it runs in.

    >>> source = CommandSource.of(["python", "train.py", "--bs={micro_batch}", "--accum", "{iter_size}"], "/work")
    >>> source.name
    'python train.py --bs={micro_batch} --accum {iter_size}'
    >>> source.fill(micro_batch=20, iter_size=24)
    ['python', 'train.py', '--bs=20', '--accum', '24']
    """

    folder: str

    @classmethod
    def of(
        cls,
        words: Sequence[str],
        folder: str | os.PathLike[str] = ".",
        overrides: Mapping[str, Any] | None = None,
    ) -> CommandSource:
        """Make the source of a command, with the overrides in their places, such as `{length}`.

        Raises:
            UsageError: It has no word, or no place for the micro-batch or for an override.
        """
        texts = [str(word) for word in words]
        for name, value in (overrides or {}).items():
            place = f"{{{name}}}"
            if place in _PLACES:
                raise UsageError(f"{name} is what the plan finds", hint=f"leave --set {name} out")
            if not any(place in text for text in texts):
                raise UsageError(f"the command has no {place}", hint=f"write {place} where it takes its {name}")
            texts = [text.replace(place, str(value)) for text in texts]
        source = cls(" ".join(map(_quote, texts)), str(Path(folder).absolute()))
        if MICRO_BATCH not in source.name:
            raise UsageError(
                describe_missing(source.name, MICRO_BATCH),
                hint=f"write {MICRO_BATCH} where the command takes its batch size: --batch-size {MICRO_BATCH}",
            )
        return source

    @property
    def words(self) -> list[str]:
        """The words of the command, with their places for sizes."""
        return shlex.split(self.name)

    @property
    def takes_iter_size(self) -> bool:
        """Whether the command is told how many micro-batches an update has."""
        return self.iter_place is not None

    @property
    def iter_place(self) -> str | None:
        """The place by which it is told; None if there is none."""
        return next((place for place in _OF_PARTS if place in self.name), None)

    def fill(self, *, micro_batch: int, iter_size: int, world_size: int = 1) -> list[str]:
        """Return the words with sizes in their places; other braces stay as they are."""
        total = iter_size * world_size
        sizes = (micro_batch, iter_size, world_size, total, total * micro_batch)
        return fill_places(self.words, dict(zip(_PLACES, sizes, strict=True)))

    @property
    def files(self) -> list[Path]:
        """The Python and shell scripts among its words, as they lie in its folder."""
        paths = [Path(self.folder, word) for word in self.words if word.endswith((".py", ".sh"))]
        return [path for path in paths if path.is_file()]

    @property
    def title(self) -> str:
        """The first of its scripts, or its program."""
        return self.files[0].name if self.files else self.words[0]

    @property
    def digest(self) -> str:
        """SHA-256 of its scripts, with the modules that they import from their folders; empty if there are none."""
        digests = [FileSource(str(path)).digest for path in self.files]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""

    def load(self) -> Any:
        """Raise UsageError: a command has no workload, and runs by itself."""
        raise UsageError(f"`{self.name}` is a command, and a workload is needed", hint="give a file, such as model.py")


def fill_places(words: Sequence[str], sizes: Mapping[str, int | None]) -> list[str]:
    """Return words with sizes in their places; raise UsageError where one is None."""
    filled = list(words)
    for place, size in sizes.items():
        if size is None and any(place in word for word in filled):
            flag = f"--{place.strip('{}').replace('_', '-')}"
            raise UsageError(f"the command has {place}, and its value is not given", hint=f"add {flag} N")
        filled = [word.replace(place, str(size)) for word in filled]
    return filled


def read_command(
    workload: Any, options: Options, *, verb: str, live: Mapping[str, Any] | None = None, **others: Any
) -> tuple[Any, Options]:
    """Return a command, maybe given as a list of words, and the options for it; of anything else, what was given.

    The parts of its updates are equal, since that is what its options can say.

    Args:
        workload: The words, a source, or anything else.
        options: The options of the call.
        verb: The command of autoaccum, for messages.
        live: Arguments of the call that only a workload in Python can have; None: not given.
        others: Further options that the command itself decides; None: not given.

    Raises:
        UsageError: An option is given that the command itself decides, or that only a command has; or the command has
            no place for the micro-batch, or this process is one of several ranks.
    """
    is_words = isinstance(workload, list | tuple)
    source = CommandSource.of(workload, overrides=options.overrides) if is_words else workload
    if not isinstance(source, CommandSource):
        if workload is not None and options.updates != Options.updates:
            raise UsageError("--updates is for a training command, and a workload is given", hint="leave it out")
        return workload, options
    launched = f"autoaccum {verb} ... -- torchrun --nproc-per-node 2 train.py ..."
    check_alone(f"{verb} of a command", hint=f"write the launcher into the command: {launched}")
    asked = {**options.spec, "parallel": options.parallel, "mesh": options.mesh, **others, "multiple_of": None}
    flags = {f"--{name.replace('_', '-')}": value for name, value in asked.items()}
    for name, value in {**flags, **(live or {})}.items():
        if value is not None:
            raise UsageError(
                f"{name} is given, and {verb} runs a command, which decides that itself",
                hint="leave it out, or write it in the command",
            )
    return source, dataclasses.replace(options, equal=True)


def refuse_command(workload: Any, verb: str) -> None:
    """Raise UsageError if the words of a command are given to a command or flag of autoaccum that takes none."""
    if isinstance(workload, list | tuple) and verb in _REFUSING:
        why, instead = _REFUSING[verb]
        raise UsageError(f"{verb} {why}", hint=instead)


def check_target(source: Any, target_batch: int | None, *, prefer: str = "largest", simulates: bool = True) -> None:
    """Raise UsageError unless a target is given where parts of an update can be told of, and only there.

    So it is if the fastest micro-batch is preferred, and nothing tells their speeds.
    """
    is_command = isinstance(source, CommandSource)
    takes_target = not is_command or source.takes_iter_size
    if takes_target and target_batch is None:
        if is_command and any(word.partition("=")[0] == "--target-batch" for word in source.words):
            raise _misplaced("--target-batch")
        raise UsageError("no target batch is given", hint="say how many samples make an update (--target-batch N)")
    if not takes_target and (target_batch is not None or prefer == "fastest"):
        raise UsageError(
            f"{describe_missing(source.name, ITER_SIZE)}: an update is one micro-batch",
            hint=f"write {ITER_SIZE} where the command takes its accumulation steps; or leave --target-batch and"
            " --prefer out, to find the largest batch that trains",
        )
    if is_command and prefer == "fastest" and not simulates:
        raise UsageError(
            "prefer fastest (--prefer fastest) times updates of a workload, not of a command",
            hint="predict for a card, where speeds are estimated (--gpu NAME); or time the script with a few sizes",
        )


def describe_missing(command: str, place: str) -> str:
    """Return that a command has no `place`; or, where it has braces of another name, that these are none."""
    others = [other for other in re.findall(r"(?<!\$)\{\w+\}", command) if other not in _PLACES]
    kind = "which is no placeholder" if len(others) == 1 else "which are no placeholders"
    return f"the command has {join_words(others)}, {kind}" if others else f"the command has no {place}"


def cannot_run(program: str, error: OSError) -> UsageError:
    """Return the error for a command whose first word cannot be run."""
    if program.startswith("-"):
        return _misplaced(program.partition("=")[0])
    if program.endswith(".py"):
        return UsageError(f"{program} is a script, and no program", hint=f"write python {program}")
    return UsageError(
        f"`{program}` cannot be run ({error.strerror})",
        hint="the first word after -- must be a program; put NAME=value before autoaccum",
    )


def _misplaced(flag: str) -> UsageError:
    return UsageError(f"{flag} stands after --, and so belongs to your command", hint="move it before --")


def _quote(word: str) -> str:
    """Quote a word for a shell, but not for its places."""
    plain = re.sub(r"\{\w+\}", "", word)
    return word if plain == shlex.quote(plain) or (word and not plain) else shlex.quote(word)
