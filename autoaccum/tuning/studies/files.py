"""Files of SQLite's: what is in them, and how transactions lock them."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from autoaccum.errors import StudyError, UsageError
from autoaccum.tuning.studies.troubles import GONE, locked

_MAGIC = b"SQLite format 3\x00"


def look_at_file(path: Path, shown: str, patience_seconds: float) -> bool:
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
    if not os.access(path, os.W_OK):  # A transaction that writes nothing begins, on a file system that is read-only.
        raise StudyError(f"{shown} cannot be written", hint="take another file by --storage")
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
        StudyError: Nothing can be written there.
    """
    if path.is_dir():
        raise UsageError(f"storage is the folder {shown}", hint="give the name of a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint="make it, or take another file by --storage")
    if not os.access(path.parent, os.W_OK):
        raise StudyError(f"no file can be written in {path.parent}", hint="take another file by --storage")


def lock_on_begin(engine: Engine) -> None:
    """Let a transaction of SQLite lock what it reads.

    Optuna reads a trial's state and then writes it; SQLite has no SELECT ... FOR UPDATE, so that two workers could take
    up the same waiting trial. The two events are SQLAlchemy's own way to set how pysqlite begins a transaction
    (docs.sqlalchemy.org, dialects/sqlite, "Serializable isolation / Savepoints / Transactional DDL").
    """
    event.listen(engine, "connect", _leave_transactions_alone)
    event.listen(engine, "begin", _begin_immediate)


def make_no_other(engine: Engine, path: Path) -> None:
    """Let the engine fail where its file is gone: SQLite would make an empty one in its place."""

    def look(dialect: Any, record: Any, arguments: Any, settings: Any) -> None:
        if not path.exists():
            raise sqlite3.OperationalError(GONE)

    event.listen(engine, "do_connect", look)


def _leave_transactions_alone(connection: Any, record: Any) -> None:
    connection.isolation_level = None


def _begin_immediate(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
