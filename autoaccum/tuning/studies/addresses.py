"""Where a study is kept, as it was asked for: a file of SQLite, a journal, or a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from autoaccum.errors import UsageError

DEFAULT_NAME = "tune.db"
_DATABASES = (".db", ".sqlite", ".sqlite3")
_JOURNALS = (".journal", ".log")
_JOURNAL_SCHEME = "journal://"
_SECRETS = ("pass", "pwd", "secret", "token")
_FORMS = "give a file like tune.db or tune.journal, or a URL like postgresql://user@host/name"


@dataclass(frozen=True)
class Address:
    """Where a study is kept.

    Attributes:
        kind: A file of SQLite, a journal of Optuna's, or a server's database.
        path: The file, absolute; None for a server.
        url: What SQLAlchemy is given, with passwords; None for a journal.
        shown: What a person sees, without passwords.
        command_url: What Optuna's commands and its dashboard are given, without passwords.
    """

    kind: Literal["sqlite", "journal", "server"]
    path: Path | None
    url: URL | None
    shown: str
    command_url: str


def read_address(name: str | None) -> Address:
    """The address that `name` means; a file's is made absolute, so that it holds wherever the process goes.

    >>> read_address("/data/tune.db").command_url, read_address("journal:///data/tune").kind
    ('sqlite:////data/tune.db', 'journal')

    Raises:
        UsageError: It means none.
    """
    name = DEFAULT_NAME if name is None else name
    if "\0" in name:
        raise UsageError(f"storage is {name!r}", hint=_FORMS)
    if name.startswith(_JOURNAL_SCHEME):
        return _journal(name[len(_JOURNAL_SCHEME) :])
    if "://" in name:
        return _by_url(name)
    ending = Path(name).suffix.lower()
    if ending in _DATABASES:
        return _sqlite(name)
    if ending in _JOURNALS:
        return _journal(name)
    if Path(name).is_dir():
        raise _folder(name)
    raise UsageError(f"storage is {name!r}", hint=_FORMS)


def _folder(name: str) -> UsageError:
    return UsageError(f"storage is the folder {name}", hint=f"give the name of a file in it: {Path(name) / 'tune.db'}")


def _journal(name: str) -> Address:
    path = _file(name)
    return Address("journal", path, None, _near(path), _near(path))


def _sqlite(name: str) -> Address:
    if "?" in name:
        raise UsageError(f"storage is {name!r}", hint="the name of a database holds no question mark")
    return sqlite_at(_file(name))


def sqlite_at(path: Path) -> Address:
    """The address of a file of SQLite's."""
    near = _near(path)
    return Address("sqlite", path, URL.create("sqlite", database=str(path)), near, f"sqlite:///{near}")


def _by_url(name: str) -> Address:
    try:
        url = make_url(name)
        url.get_backend_name()
    except (ArgumentError, ValueError):
        raise UsageError(f"storage is no URL: it begins with {name.partition('://')[0]}://", hint=_FORMS) from None
    if url.get_backend_name() != "sqlite":
        return Address("server", None, url, *[shown_url(url)] * 2)
    if not url.database or url.database.startswith((":memory:", "file:")):
        raise UsageError("a study in memory is gone when the search ends", hint="give a file: sqlite:///tune.db")
    if url.query:
        raise UsageError(f"storage is {shown_url(url)}", hint="leave away what follows the question mark")
    return _sqlite(url.database)


def shown_url(url: URL) -> str:
    """The URL with three stars for each password, in its query, too."""
    query = {
        name: "***" if any(word in name.lower() for word in _SECRETS) else value for name, value in url.query.items()
    }
    return url.set(query=query).render_as_string(hide_password=True)


def secrets_in(url: URL | None) -> tuple[str, ...]:
    """What must not be shown."""
    if url is None:
        return ()
    found = [str(url.password)] if url.password else []
    for name, value in url.query.items():
        if any(word in name.lower() for word in _SECRETS):
            found += [value] if isinstance(value, str) else list(value)
    return tuple(secret for secret in found if secret)


def _file(name: str) -> Path:
    if not name.strip("/"):
        raise UsageError("storage names no file", hint=_FORMS)
    if name.endswith("/"):
        raise _folder(name)
    return Path(os.path.abspath(os.path.expanduser(name)))  # noqa: PTH100, PTH111 (Path keeps "..")


def _near(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)
