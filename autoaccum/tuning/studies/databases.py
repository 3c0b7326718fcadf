"""Databases: looked into before Optuna touches them, so that what is not Optuna's stays as it is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from optuna.storages import RDBStorage
from sqlalchemy import create_engine, event, inspect
from sqlalchemy.engine import Engine
from sqlalchemy.exc import NoSuchModuleError
from sqlalchemy.pool import NullPool

from autoaccum.errors import StudyError, UsageError
from autoaccum.tuning.studies.addresses import Address, secrets_in
from autoaccum.tuning.studies.troubles import locked, storage_trouble

_MAGIC = b"SQLite format 3\x00"
_OPTUNA_TABLES = {"studies", "trials", "version_info", "alembic_version"}
_PATIENCE_SECONDS = 60
"""How long a write waits for those of other workers."""
_CONNECT_SECONDS = 10
_WITH_TIMEOUT = ("psycopg2", "psycopg", "pymysql", "mysqldb")


def open_database(address: Address, patience_seconds: float) -> RDBStorage:
    """Optuna's storage in a database that is Optuna's, or empty.

    Raises:
        UsageError: Its driver is not installed, or there is no such kind of database.
        StudyError: It is somebody else's, damaged, locked, out of reach, or of another version of Optuna.
    """
    assert address.url is not None
    secrets = secrets_in(address.url)
    with storage_trouble(address.shown, secrets):
        try:
            tables = _tables(address, patience_seconds)
            _check_tables(tables, address.shown)
            storage = RDBStorage(
                # Optuna fills a template with its version; braces of a name or a password are no part of one.
                address.url.render_as_string(hide_password=False).replace("{", "{{").replace("}", "}}"),
                engine_kwargs=_engine_settings(address, _PATIENCE_SECONDS),
                skip_table_creation=bool(tables),
            )
        except RuntimeError:
            raise StudyError(
                f"{address.shown} was made by another version of Optuna",
                hint=f"take another storage, or: optuna storage upgrade --storage {address.command_url}",
            ) from None
        except (ImportError, NoSuchModuleError) as error:
            raise UsageError(
                f"nothing that is installed opens {address.shown} ({error})", hint="install the database's driver"
            ) from None
    if address.kind == "sqlite":
        _lock_on_begin(storage.engine)
    return storage


def _engine_settings(address: Address, patience_seconds: float) -> dict[str, Any]:
    if address.kind == "sqlite":
        return {"connect_args": {"timeout": patience_seconds}, "poolclass": NullPool}
    assert address.url is not None
    known = address.url.get_driver_name() in _WITH_TIMEOUT
    return {"connect_args": {"connect_timeout": _CONNECT_SECONDS} if known else {}, "pool_pre_ping": True}


def _tables(address: Address, patience_seconds: float) -> set[str]:
    """The names of the tables that are there."""
    if address.path is not None and not _look_at_file(address.path, address.shown, patience_seconds):
        return set()
    assert address.url is not None
    engine = create_engine(address.url, **_engine_settings(address, patience_seconds))
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def _check_tables(tables: set[str], shown: str) -> None:
    if tables and not tables >= _OPTUNA_TABLES:
        some = ", ".join(sorted(tables)[:3])
        raise StudyError(
            f"{shown} holds tables that are not Optuna's ({some})", hint="take another database by --storage"
        )


def _look_at_file(path: Path, shown: str, patience_seconds: float) -> bool:
    """Whether there is something in the file; changes nothing.

    Raises:
        UsageError: It is a folder, or lies in none.
        StudyError: It is no database, locked, damaged, or cannot be written.
    """
    check_place(path, shown)
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise StudyError(f"{shown} is no SQLite database", hint="take another file by --storage")
    try:
        with closing(sqlite3.connect(path, timeout=patience_seconds, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise locked(shown) from None
        raise StudyError(f"{shown} cannot be written ({error})", hint="take another file by --storage") from None
    except sqlite3.DatabaseError as error:
        raise StudyError(f"{shown} is damaged ({error})", hint="take another file by --storage") from None
    return True


def check_place(path: Path, shown: str) -> None:
    """Whether a file could be there.

    Raises:
        UsageError: It is a folder, or lies in none.
    """
    if path.is_dir():
        raise UsageError(f"storage is the folder {shown}", hint="give the name of a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="make it, or take another file by --storage")


def _lock_on_begin(engine: Engine) -> None:
    """Let a transaction of SQLite lock what it reads.

    Optuna reads a trial's state and then writes it; SQLite has no SELECT ... FOR UPDATE, so that two workers could take
    up the same waiting trial. The two events are SQLAlchemy's own way to set how pysqlite begins a transaction
    (docs.sqlalchemy.org, dialects/sqlite, "Serializable isolation / Savepoints / Transactional DDL").
    """
    event.listen(engine, "connect", _leave_transactions_alone)
    event.listen(engine, "begin", _begin_immediate)


def _leave_transactions_alone(connection: Any, record: Any) -> None:
    connection.isolation_level = None


def _begin_immediate(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
