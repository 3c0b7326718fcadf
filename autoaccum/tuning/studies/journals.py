"""Journals: files to which every change of a study is appended, for folders that several machines share.

Optuna takes over a lock that was held for 30 s. A worker that is killed while it holds one keeps the others from
writing for as long: with a heartbeat below 15 s they may miss three of theirs meanwhile, and be taken for lost.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autoaccum.errors import StudyError
from autoaccum.tuning.studies.addresses import Address
from autoaccum.tuning.studies.files import check_place
from autoaccum.tuning.studies.troubles import GONE, storage_trouble

_FIELDS = {"op_code", "worker_id"}
_LONGEST_LINE = 1 << 20


def open_journal(address: Address) -> JournalStorage:
    """Optuna's storage in a journal that is Optuna's, or empty.

    Raises:
        UsageError: It is a folder, or lies in none.
        StudyError: It is something else, damaged, or cannot be read or written.
    """
    assert address.path is not None
    check_place(address.path, address.shown)
    with storage_trouble(address.shown, opening=True):
        _check_first_line(address.path, address.shown)
        with address.path.open("ab"):
            pass
        try:
            return JournalStorage(_Journal(str(address.path)))
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise StudyError(
                f"the journal {address.shown} is damaged ({error})", hint="take another file by --storage"
            ) from None


class _Journal(JournalFileBackend):
    """Optuna's journal, which is not begun anew in the middle of a study where its file was deleted."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        if not Path(self._file_path).exists():
            raise FileNotFoundError(errno.ENOENT, GONE)
        super().append_logs(logs)


def _check_first_line(path: Path, shown: str) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb") as file:
        line = file.readline(_LONGEST_LINE)
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not record.keys() >= _FIELDS:
        raise StudyError(f"{shown} is no journal of Optuna's", hint="take another file by --storage")
