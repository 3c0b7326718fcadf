from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from small_studies import PureRunner, small_space, small_study, small_terms
from sqlalchemy.engine import make_url

from autoaccum.errors import AutoaccumError, StudyError, UsageError
from autoaccum.tuning.studies.addresses import read_address, shown_url
from autoaccum.tuning.studies.searching import search
from autoaccum.tuning.studies.storage import open_storage
from autoaccum.tuning.studies.study import open_study

ROOT = Path(__file__).parents[3]


def refusal(name: str | Path, kind: type[AutoaccumError], *, patience_seconds: float = 0.1) -> str:
    """What is said of a storage that cannot be used."""
    with pytest.raises(kind) as caught:
        open_storage(str(name), heartbeat=20.0, patience_seconds=patience_seconds)
    assert caught.value.hint
    return caught.value.message


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_database_beside_the_run_is_the_default(here: Path) -> None:
    storage = open_storage(None, heartbeat=20.0)
    assert (here / "tune.db").stat().st_size > 0
    assert (storage.shown, storage.command_url) == ("tune.db", "sqlite:///tune.db")


def test_a_storage_stays_where_it_was_when_the_process_goes_elsewhere(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "other").mkdir()
    databases = [open_storage(name, heartbeat=20.0) for name in ("tune.db", "tune.journal")]
    monkeypatch.chdir(here / "other")
    for storage in databases:
        open_study(storage, "valley", small_terms())
    assert list((here / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind", "command_url"),
    [
        ("runs/a.sqlite3", "sqlite", "sqlite:///runs/a.sqlite3"),
        ("sqlite:///runs/a.anything", "sqlite", "sqlite:///runs/a.anything"),
        ("/data/a.DB", "sqlite", "sqlite:////data/a.DB"),
        ("runs/../a.log", "journal", "a.log"),
        ("journal:///data/study", "journal", "/data/study"),
        ("postgresql://me:secret@host/name", "server", "postgresql://me:***@host/name"),
        ("mysql+pymysql://me@host/name?ssl=1", "server", "mysql+pymysql://me@host/name?ssl=1"),
    ],
)
def test_names_mean_storages(name: str, kind: str, command_url: str) -> None:
    address = read_address(name)
    assert (address.kind, address.command_url) == (kind, command_url)


@pytest.mark.parametrize(
    "name", ["tune", "tune.json", "journal://", "sqlite://", "sqlite:///:memory:", "nothing://x", "a?b.db", "a\0.db"]
)
def test_what_means_no_storage_is_bad_usage(here: Path, name: str) -> None:
    refusal(name, UsageError)
    assert list(here.iterdir()) == []


def test_passwords_are_not_shown() -> None:
    shown = shown_url(make_url("postgresql://me:geheim@host/name?sslpassword=geheim&password=geheim&a=1"))
    assert "geheim" not in shown
    assert "a=1" in shown


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = refusal(f"mysql+missingdriver://me:geheim@127.0.0.1:{port}/name", UsageError)
    assert "geheim" not in said
    assert "***" in said


@pytest.mark.parametrize("name", ["100% {odd} näme.db", "it's #1 {SCHEMA_VERSION}.db", "100% {odd}.journal"])
def test_names_are_taken_literally(here: Path, name: str) -> None:
    study = small_study(name)
    assert (here / name).stat().st_size > 0
    assert study.finished == 0
    assert sorted(path.name for path in here.iterdir()) == [name]


def test_a_folder_that_is_not_there_and_one_that_is_are_bad_usage(here: Path) -> None:
    for ending in ("db", "journal"):
        (here / f"folder.{ending}").mkdir()
        assert "there is no folder" in refusal(f"nowhere/tune.{ending}", UsageError)
        assert "storage is the folder" in refusal(f"folder.{ending}", UsageError)
        assert "storage is the folder" in refusal(f"new.{ending}/", UsageError)
        said = refusal(f"/proc/tune.{ending}", StudyError)
        # Root may write there, and cannot; to others, the folder says so.
        assert said.startswith((f"the storage /proc/tune.{ending} cannot be used (", "no file can be written in /proc"))
        assert "/proc/." not in said
    assert refusal("folder.db/..", UsageError) == "storage is the folder folder.db/.."


def make_database(path: Path, tables: tuple[str, ...]) -> None:
    with sqlite3.connect(path) as connection:
        for table in tables:
            connection.execute(f"CREATE TABLE {table} (name TEXT)")
    connection.close()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut_off.db", ("studies", "trials"), "cut_off.db holds tables that are not Optuna's (studies, trials)"),
        ("invoices.db", ("invoices", "studies"), "invoices.db holds tables that are not Optuna's (invoices, studies)"),
        ("notes.db", b"Some notes, no database", "notes.db is no SQLite database"),
        ("cut.db", b"SQLite format 3\x00" + b"\x10\x00" + b"\x00" * 2000, "cut.db"),
        ("train.log", b"epoch 1: loss 2.3\n", "train.log is no journal of Optuna's"),
        ("events.log", b'{"event": "began"}\n', "events.log is no journal of Optuna's"),
        (
            "broken.journal",
            b'{"op_code":0,"worker_id":"a","study_name":"x","directions":[1]}\n{"op\n{}\n',
            "is damaged",
        ),
    ],
)
def test_what_is_somebody_elses_stays_as_it_is(here: Path, name: str, content: Any, said: str) -> None:
    path = here / name
    if isinstance(content, tuple):
        make_database(path, content)
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    assert said in refusal(name, StudyError)
    assert path.read_bytes() == before
    assert list(here.iterdir()) == [path]


def test_a_locked_database_is_said_to_be_locked(here: Path) -> None:
    small_study("tune.db")
    for lock in ("IMMEDIATE", "EXCLUSIVE"):
        holder = sqlite3.connect("tune.db", isolation_level=None)
        holder.execute(f"BEGIN {lock}")
        assert refusal("tune.db", StudyError) == "tune.db is locked by another process"
        holder.close()
    assert small_study("tune.db").finished == 0


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_where_nothing_can_be_written_nothing_is_tried(
    here: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that is read-only says so to root, too; this one is not, and has to be made up."""
    small_study(f"old.{ending}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for name in ("old", "new"):
        assert refusal(f"{name}.{ending}", StudyError) == f"no file can be written in {here}"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).is_dir())
    if ending == "db":
        assert refusal("old.db", StudyError) == "old.db cannot be written"
    assert [path.name for path in here.iterdir()] == [f"old.{ending}"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_database_that_cannot_be_written_is_refused(here: Path) -> None:
    small_study("tune.db")
    (here / "tune.db").chmod(0o444)
    assert "cannot be written" in refusal("tune.db", StudyError)


def test_another_version_of_optuna_is_named_and_its_database_stays(here: Path) -> None:
    small_study("tune.db")
    with sqlite3.connect("tune.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'v0.9.0.a'")
        connection.execute("UPDATE version_info SET schema_version = 1, library_version = '0.9.0'")
    connection.close()
    before = (here / "tune.db").read_bytes()
    assert refusal("tune.db", StudyError) == "tune.db was made by another version of Optuna"
    assert (here / "tune.db").read_bytes() == before


def test_a_transaction_that_was_cut_off_is_rolled_back(here: Path) -> None:
    """A worker that is killed while it writes leaves a hot journal beside the database."""
    study = small_study("tune.db")
    cut = """
import os, sqlite3
connection = sqlite3.connect("tune.db", isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE studies SET study_name = 'half'")
connection.execute("CREATE TABLE filler (text TEXT)")
connection.executemany("INSERT INTO filler VALUES (hex(randomblob(?)))", [(200,)] * 2000)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", cut], check=True)
    assert (here / "tune.db-journal").exists()
    assert small_study("tune.db").name == study.name
    assert [one.study_name for one in optuna.get_all_study_summaries("sqlite:///tune.db")] == ["valley"]


def test_a_database_that_is_gone_in_the_middle_is_said_in_words(here: Path) -> None:
    """The runs before are lost with it; but nothing is said in Optuna's words, and no trial is run in vain."""
    study = small_study("tune.db")

    def spoil(run: int, setting: object, percent: int) -> None:
        if run == 1:
            Path("tune.db").write_bytes(b"spoiled" * 1000)

    runner = PureRunner(spoil)
    with pytest.raises(StudyError, match=r"the storage tune.db cannot be used \(file is not a database\)"):
        search(study, small_space(), runner, trials=5, time_limit=None, tell=lambda event: None)
    assert len(runner.runs) == 2


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_a_file_that_is_deleted_in_the_middle_is_not_made_anew(here: Path, ending: str) -> None:
    study = small_study(f"tune.{ending}")

    def remove(run: int, setting: object, percent: int) -> None:
        if run == 1 and percent == 0:
            Path(f"tune.{ending}").unlink()

    with pytest.raises(StudyError) as error:
        search(study, small_space(), PureRunner(remove), trials=5, time_limit=None, tell=lambda event: None)
    assert error.value.message == f"tune.{ending} no longer holds the study (the file is gone)"
    assert error.value.hint == "was it deleted? The same command begins it anew"
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("ending", ["db", "journal"])
def test_a_study_that_is_deleted_in_the_middle_is_said_in_words(here: Path, ending: str) -> None:
    study = small_study(f"tune.{ending}")

    def delete(run: int, setting: object, percent: int) -> None:
        if run == 1 and percent == 0:
            optuna.delete_study(study_name="valley", storage=small_study(f"tune.{ending}").storage.backend)

    with pytest.raises(StudyError, match=r"no longer holds all of the study 'valley'|cannot be used"):
        search(study, small_space(), PureRunner(delete), trials=5, time_limit=None, tell=lambda event: None)


def test_a_journal_that_is_damaged_in_the_middle_is_said_in_words(here: Path) -> None:
    study = small_study("tune.journal")

    def spoil(run: int, setting: object, percent: int) -> None:
        if run == 1:
            with Path("tune.journal").open("a") as file:
                file.write("half a li\n")

    with pytest.raises(StudyError, match=r"the storage tune.journal cannot be used \(Expecting value"):
        search(study, small_space(), PureRunner(spoil), trials=5, time_limit=None, tell=lambda event: None)


def test_what_listens_may_fail_and_that_is_no_trouble_of_the_storage(here: Path) -> None:
    def listen(event: object) -> None:
        raise BrokenPipeError("nobody reads")

    with pytest.raises(BrokenPipeError):
        search(small_study("tune.journal"), small_space(), PureRunner(), trials=5, time_limit=None, tell=listen)
    assert [row.state for row in small_study("tune.journal").rows()] == ["failed", "waiting"]


def test_optuna_that_is_missing_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "optuna.py").write_text("raise ModuleNotFoundError(\"No module named 'optuna'\", name='optuna')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    asked = """
from autoaccum.errors import UsageError
try:
    import autoaccum.tuning.studies.storage
except UsageError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout == (
        "tuning needs Optuna, which cannot be imported (No module named 'optuna'): pip install optuna\n"
    )
