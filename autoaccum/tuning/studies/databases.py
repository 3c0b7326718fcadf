"""Databases: looked into before Optuna touches them, so that what is not Optuna's stays as it is."""

from __future__ import annotations

import os
import secrets
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from sqlalchemy import create_engine, inspect
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from autoaccum.errors import StudyError, UsageError
from autoaccum.tuning.studies.addresses import Address, secrets_in, sqlite_at
from autoaccum.tuning.studies.files import lock_on_begin, look_at_file, make_no_other
from autoaccum.tuning.studies.troubles import storage_trouble

_OPTUNA_TABLES = {"studies", "trials", "version_info", "alembic_version"}
_ALL_TABLES = _OPTUNA_TABLES | {
    "study_directions",
    "study_user_attributes",
    "study_system_attributes",
    "trial_user_attributes",
    "trial_system_attributes",
    "trial_params",
    "trial_values",
    "trial_intermediate_values",
    "trial_heartbeats",
}
_PATIENCE_SECONDS = 60
"""How long a write waits for those of other workers."""
_CONNECT_SECONDS = 10
_POLL_SECONDS = 0.1
_WITH_TIMEOUT = ("psycopg2", "psycopg", "pymysql", "mysqldb")


def open_database(address: Address, patience_seconds: float) -> RDBStorage:
    """Optuna's storage in a database that is Optuna's, or empty.

    Raises:
        UsageError: Its driver is not installed, or there is no such kind of database.
        StudyError: It is somebody else's, damaged, locked, out of reach, or of another version of Optuna.
    """
    with storage_trouble(address.shown, secrets_in(address.url), opening=True):
        try:
            storage = _open(address, patience_seconds)
        except RuntimeError:
            raise StudyError(
                f"{address.shown} was made by another version of Optuna",
                hint=f"take another storage, or: optuna storage upgrade --storage {address.command_url}",
            ) from None
        except (ImportError, NoSuchModuleError) as error:
            raise UsageError(
                f"nothing that is installed opens {address.shown} ({error})", hint="install the database's driver"
            ) from None
    if address.path is not None:
        lock_on_begin(storage.engine)
        make_no_other(storage.engine, address.path)
    weakref.finalize(storage, storage.engine.dispose)
    return storage


def _open(address: Address, patience_seconds: float) -> RDBStorage:
    """Open or make it.

    Another worker may be making it at the same moment, table by table. Where that is cut off, as a file of SQLite's
    cannot be, the rest is made.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        tables = _tables(address, patience_seconds)
        late = time.monotonic() > deadline
        try:
            if tables >= _OPTUNA_TABLES:
                return _storage(address, make=False)
            if address.path is not None and not address.path.exists():
                _make_file(address.path)
                continue
            if not tables or (late and tables < _ALL_TABLES and address.kind == "server"):
                return _storage(address, make=True)
        except SQLAlchemyError:
            if late:
                raise
        if late or not tables < _ALL_TABLES:
            raise _foreign(tables, address.shown)
        time.sleep(_POLL_SECONDS)


def _foreign(tables: set[str], shown: str) -> StudyError:
    some = ", ".join(sorted(tables)[:3])
    return StudyError(f"{shown} holds tables that are not Optuna's ({some})", hint="take another database by --storage")


def _storage(address: Address, *, make: bool) -> RDBStorage:
    assert address.url is not None
    return RDBStorage(
        # Optuna fills a template with its version; braces of a name or a password are no part of one.
        address.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
        engine_kwargs=_engine_settings(address, _PATIENCE_SECONDS),
        skip_table_creation=not make,
    )


def _make_file(path: Path) -> None:
    """Make a database that is whole as soon as it is there: beside its place, then given its name, unless one came."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _storage(sqlite_at(temporary), make=True)
        with suppress(FileExistsError):
            _name(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _name(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # A file system without hard links.
        if not path.exists():
            temporary.rename(path)


def _engine_settings(address: Address, patience_seconds: float) -> dict[str, Any]:
    if address.kind == "sqlite":
        return {"connect_args": {"timeout": patience_seconds}, "poolclass": NullPool}
    assert address.url is not None
    known = address.url.get_driver_name() in _WITH_TIMEOUT
    return {"connect_args": {"connect_timeout": _CONNECT_SECONDS} if known else {}, "pool_pre_ping": True}


def _tables(address: Address, patience_seconds: float) -> set[str]:
    """The names of the tables that are there."""
    if address.path is not None and not look_at_file(address.path, address.shown, patience_seconds):
        return set()
    assert address.url is not None
    engine = create_engine(address.url, **_engine_settings(address, patience_seconds))
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()
