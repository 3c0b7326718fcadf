"""The storage of studies: opened before anything else starts, so that what is wrong with it is said at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum.tuning.studies.addresses import read_address, secrets_in
from autoaccum.tuning.studies.databases import open_database
from autoaccum.tuning.studies.journals import open_journal
from autoaccum.tuning.studies.troubles import quiet

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class Storage:
    """An open storage.

    Attributes:
        backend: Optuna's.
        shown: What a person sees, without passwords.
        command_url: What Optuna's commands and its dashboard are given, without passwords.
        heartbeat: Seconds after which a worker says again that it lives.
        secrets: What is left out of messages.
    """

    backend: BaseStorage
    shown: str
    command_url: str
    heartbeat: float
    secrets: tuple[str, ...] = ()


def open_storage(name: str | None, *, heartbeat: float, patience_seconds: float = _PATIENCE_SECONDS) -> Storage:
    """Open a storage, made where there is none yet.

    Args:
        name: A file of SQLite (`.db`, `.sqlite`, `.sqlite3`), a journal (`.journal`, `.log`, `journal:///path`), or a
            URL of SQLAlchemy's; None: `tune.db` in the current folder.
        heartbeat: Seconds after which a worker says again that it lives.
        patience_seconds: How long to wait for a database that is locked.

    Raises:
        UsageError: There can be none of that name, or its driver is missing.
        StudyError: It is somebody else's, damaged, locked, out of reach, or of another version of Optuna.
    """
    address = read_address(name)
    with quiet():
        backend = open_journal(address) if address.kind == "journal" else open_database(address, patience_seconds)
    return Storage(backend, address.shown, address.command_url, heartbeat, secrets_in(address.url))
