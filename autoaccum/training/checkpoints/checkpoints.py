"""Checkpoints of a training: one file each, the last few kept, the newest whole one found again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autoaccum.accumulation.recovery import find_shortage
from autoaccum.errors import CheckpointError, UsageError
from autoaccum.training.checkpoints.contents import digest, portable, revived
from autoaccum.training.checkpoints.verified_files import (
    DamagedFileError,
    is_file,
    load_plain,
    remove_leftovers,
    sync_folder,
    write_verified,
)

FORMAT = "autoaccum checkpoint"
VERSION = 1
_NAME = re.compile(r"checkpoint-(\d{8,})\.pt")

PassedOver = Callable[[Path, str], None]
"""Told a checkpoint that is not whole, and why."""


def write_checkpoint(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` whole, synced and read back, or not at all.

    `torch.load(path, weights_only=True)` gives `format`, `version`, `digest` and `record`. The digest is over every
    value: PyTorch's reader does not compare the checksums that are in its files. What is on a card is copied to host
    memory first, once.

    Raises:
        NotPortableError: Something in `record` could be loaded only by running code; says where.
        CheckpointError: It cannot be written, or does not read back as it was.
    """
    try:
        content = portable(dict(record), numpy=True)
        found = digest(content)
        written = {"format": FORMAT, "version": VERSION, "digest": found, "record": content}
        write_verified(path, written, lambda read: _is_whole(read) and read["digest"] == found, checksums=False)
    except (MemoryError, RuntimeError) as error:
        if find_shortage(error) is None and not isinstance(error, MemoryError):
            raise
        raise CheckpointError(f"there is too little host memory to write {path}", hint="free some") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The record in a checkpoint, its tensors in host memory.

    Raises:
        DamagedFileError: What is in the file is not what was written.
        CheckpointError: It comes from a newer autoaccum, or cannot be read now.
    """
    content = load_plain(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(path, "it is no checkpoint of autoaccum")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} is of format {version}, this autoaccum reads up to {VERSION}", hint="update autoaccum"
        )
    if version != VERSION or not _is_whole(content):
        raise DamagedFileError(path, "its content does not have the digest that was written with it")
    record: dict[str, Any] = revived(content["record"])
    return record


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one in `folder`, whole or not."""
    return any(True for _ in _numbered(folder))


class CheckpointStore:
    """The checkpoints in a folder that no other process writes to.

    Args:
        folder: Where they are; what a process that was killed had begun to write is removed from it.
        keep: How many are kept.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"{keep} checkpoints are to be kept", hint="keep at least 1")
        self.folder = folder
        self._keep = keep
        if has_checkpoint(folder):
            remove_leftovers(folder)

    def paths(self) -> list[Path]:
        """Of every checkpoint, whole or not, the newest first."""
        return [path for _, path in sorted(_numbered(self.folder), reverse=True)]

    def write(self, update: int, record: Mapping[str, Any]) -> Path:
        """Write the checkpoint after `update`; then the oldest go, beyond those that are kept.

        One that cannot be removed stays, until the next time. `record` gets `update`, by which a file that was given
        another name is known.

        Raises:
            NotPortableError: As `write_checkpoint`.
            CheckpointError: It cannot be written; those that are there stay.
        """
        path = self.folder / f"checkpoint-{update:08}.pt"
        write_checkpoint(path, {**record, "update": update})
        remove_leftovers(self.folder)
        earlier = sorted((number, other) for number, other in _numbered(self.folder) if number < update)
        for _, other in earlier[: max(len(earlier) + 1 - self._keep, 0)]:
            with suppress(OSError):
                other.unlink(missing_ok=True)
        return path

    def newest(self, on_passed_over: PassedOver) -> tuple[Path, dict[str, Any]] | None:
        """The newest whole checkpoint and its record; None where there is no checkpoint.

        Newer ones that are damaged, or were renamed, are told to `on_passed_over` and set aside, as `*.damaged`.

        Raises:
            CheckpointError: All there are are damaged, and stay; or one comes from a newer autoaccum, or cannot be
                read now.
        """
        damaged: list[tuple[Path, str]] = []
        for path in self.paths():
            try:
                record = _read_unrenamed(path)
            except DamagedFileError as error:
                damaged.append((path, error.reason))
                continue
            for other, reason in damaged:
                on_passed_over(other, f"{reason}; it is kept as {_set_aside(other).name}")
            return path, record
        if not damaged:
            return None
        raise CheckpointError(
            f"no checkpoint in {self.folder} is whole: {'; '.join(f'{path.name} ({why})' for path, why in damaged)}",
            hint="copy one back, or train anew in another folder",
        )


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.glob("checkpoint-*.pt"):
        if (match := _NAME.fullmatch(path.name)) and is_file(path):
            yield int(match[1]), path


def _read_unrenamed(path: Path) -> dict[str, Any]:
    """Refuse one that was given another name: as long as it seemed the newest, training would begin there again."""
    record = read_checkpoint(path)
    match, update = _NAME.fullmatch(path.name), record.get("update")
    if match is not None and isinstance(update, int) and update != int(match[1]):
        raise DamagedFileError(path, f"it was renamed: it is of update {update}")
    return record


def _is_whole(content: Any) -> bool:
    try:
        return "record" in content and content.get("digest") == digest(content["record"])
    except RecursionError:  # Of a flipped bit a list may contain itself.
        return False


def _set_aside(path: Path) -> Path:
    names = [path.with_name(f"{path.name}.damaged{number}") for number in ("", *range(2, 100))]
    other = next((name for name in names if not name.exists()), names[-1])
    try:
        path.rename(other)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be renamed ({error.strerror})", hint="see that it can") from None
    return other
