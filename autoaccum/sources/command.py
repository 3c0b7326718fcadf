"""A training command as a source: its words, in which the sizes of a trial are filled in."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from autoaccum.checks import check_alone
from autoaccum.errors import UsageError
from autoaccum.options import Options
from autoaccum.sources.source import FileSource, Source

MICRO_BATCH: Final = "{micro_batch}"
ITER_SIZE: Final = "{iter_size}"
WORLD_SIZE: Final = "{world_size}"
TOTAL_ITER_SIZE: Final = "{total_iter_size}"
"""The micro-batches of all ranks per update, for scripts that divide their option by the number of ranks."""
_REFUSING: Final = {
    "fit": ("trains a workload, and a command trains by itself", "run the command that `autoaccum plan` prints"),
    "tune": (
        "trains a workload by other learning rates and batches, of which it cannot tell a command",
        "call the script from an Optuna study of your own, or write a workload file",
    ),
    "explain": (
        "compares a snapshot with a workload, not with a command",
        "`autoaccum plan --gpu NAME --explain -- COMMAND` shows where its memory goes",
    ),
}
"""Why some verbs take no command, and what does it instead."""


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
    def of(cls, words: Sequence[str], folder: str | os.PathLike[str] = ".") -> CommandSource:
        """Make the source of a command.

        Raises:
            UsageError: It has no word, or no place for the micro-batch.
        """
        source = cls(" ".join(map(_quote, words)), str(Path(folder).absolute()))
        if not any(MICRO_BATCH in word for word in words):
            raise UsageError(
                f"the command has no {MICRO_BATCH}",
                hint=f"write it where the command takes its batch size: python train.py --batch-size {MICRO_BATCH}",
            )
        return source

    @property
    def words(self) -> list[str]:
        """The words of the command, with their places for sizes."""
        return shlex.split(self.name)

    @property
    def takes_iter_size(self) -> bool:
        """Whether the command is told how many micro-batches an update has."""
        return takes_iter_size(self.words)

    def fill(self, *, micro_batch: int, iter_size: int, world_size: int = 1) -> list[str]:
        """Return the words with sizes in their places; other braces stay as they are."""
        return fill_sizes(self.words, micro_batch=micro_batch, iter_size=iter_size, world_size=world_size)

    @property
    def files(self) -> list[Path]:
        """The Python and shell scripts among its words, as they lie in its folder."""
        paths = [Path(self.folder, word) for word in self.words if word.endswith((".py", ".sh"))]
        return [path for path in paths if path.is_file()]

    @property
    def digest(self) -> str:
        """SHA-256 of its scripts, with the modules that they import from their folders; empty if there are none."""
        digests = [FileSource(str(path)).digest for path in self.files]
        return hashlib.sha256("\n".join(digests).encode()).hexdigest() if digests else ""

    def load(self) -> Any:
        """Raise UsageError: a command has no workload, and runs by itself."""
        raise UsageError(f"`{self.name}` is a command, and a workload is needed", hint="give a file, such as model.py")


def takes_iter_size(words: Sequence[str]) -> bool:
    """Return whether a command is told how many micro-batches an update has."""
    return any(place in word for place in (ITER_SIZE, TOTAL_ITER_SIZE) for word in words)


def fill_sizes(words: Sequence[str], *, micro_batch: int, iter_size: int, world_size: int = 1) -> list[str]:
    """Return the words of a command with each size in the place of its name."""
    filled = list(words)
    sizes = {"micro_batch": micro_batch, "iter_size": iter_size, "world_size": world_size}
    for name, size in {**sizes, "total_iter_size": iter_size * world_size}.items():
        filled = [word.replace(f"{{{name}}}", str(size)) for word in filled]
    return filled


def read_command(
    workload: Any, options: Options, *, verb: str, folder: str | os.PathLike[str] = ".", **others: Any
) -> tuple[Any, Options]:
    """Return the source of a command that is given as a list of words, and the options for it; else what was given.

    The parts of its updates are equal, since that is what its options can say.

    Args:
        workload: The words, or anything else.
        options: The options of the call.
        verb: The command of autoaccum, for messages.
        folder: The folder that the command runs in.
        others: Further arguments of the call that the command itself decides; None: not given.

    Raises:
        UsageError: An option is given that the command itself decides, or the command has no place for the micro-batch,
            or this process is one of several ranks.
    """
    if not isinstance(workload, list | tuple):
        return workload, options
    source = CommandSource.of([str(word) for word in workload], folder)
    launched = f"autoaccum {verb} ... -- torchrun --nproc-per-node 2 train.py ..."
    check_alone(f"{verb} of a command", hint=f"write the launcher into the command: {launched}")
    others = {**others, **{name: getattr(options, name) for name in ("parallel", "mesh")}}
    refused = [*options.spec, *(name for name, value in others.items() if value is not None)]
    refused += ["savers"] if options.chooses_savers else []
    for name in refused:
        if name != "multiple_of":
            raise UsageError(
                f"--{name.replace('_', '-')} is given, and {verb} runs a command, which decides that itself",
                hint="leave it out" if name == "fit_micro_batch" else "write it in the command",
            )
    return source, dataclasses.replace(options, equal=True)


def refuse_command(workload: Any, verb: str) -> None:
    """Raise UsageError if the words of a command are given to a verb that takes none."""
    if isinstance(workload, list | tuple) and verb in _REFUSING:
        why, instead = _REFUSING[verb]
        raise UsageError(f"{verb} {why}", hint=instead)


def check_prefer(source: Any, prefer: str, options: Options) -> None:
    """Raise UsageError if the fastest of a command's micro-batches is wanted, and nothing tells their speed."""
    if prefer != "fastest" or not isinstance(source, CommandSource):
        return
    if options.gpu is None:
        raise UsageError(
            "prefer fastest (--prefer fastest) times updates of a workload, not of a command",
            hint="predict for a card, where speeds are estimated (--gpu NAME); or time the script with a few sizes",
        )
    if not source.takes_iter_size:
        raise UsageError(
            f"prefer fastest (--prefer fastest) compares updates of equal samples, and the command has no {ITER_SIZE}",
            hint=f"write {ITER_SIZE} where the command takes its accumulation steps",
        )


def check_target(workload: Any, target_batch: int | None) -> None:
    """Raise UsageError unless a target is given where parts of an update can be told of, and only there."""
    takes_target = not isinstance(workload, CommandSource) or workload.takes_iter_size
    if takes_target and target_batch is None:
        raise UsageError("no target batch is given", hint="say how many samples make an update (--target-batch N)")
    if not takes_target and target_batch is not None:
        raise UsageError(
            f"the target batch is {target_batch}, and the command has no {ITER_SIZE}: an update is one micro-batch",
            hint=f"write {ITER_SIZE} where the command takes its accumulation steps; or leave --target-batch out, to"
            " find the largest batch that trains",
        )


def _quote(word: str) -> str:
    """Quote a word for a shell, but not for its places."""
    plain = word
    for place in (MICRO_BATCH, ITER_SIZE, WORLD_SIZE, TOTAL_ITER_SIZE):
        plain = plain.replace(place, "")
    return word if plain == shlex.quote(plain) or not plain else shlex.quote(word)
