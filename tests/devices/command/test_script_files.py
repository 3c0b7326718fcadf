"""Scripts that write, run in real processes: they see what they wrote, and the user's files are as they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from autoaccum.devices.command import script_files

BEGIN = """
import importlib.util, json, os, shutil, subprocess, sys
from pathlib import Path
{imports}
spec = importlib.util.spec_from_file_location("script_files", os.environ["SCRIPT_FILES"])
script_files = sys.modules["script_files"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script_files)
script_files.protect(Path(os.environ["FILES"]))
def text(path):
    with open(path) as file:
        return file.read()
"""
PYTHON = os.environ.get("SCRIPT_FILES_PYTHON", sys.executable)

SCRIPTS = {
    "open for writing": """
        with open("checkpoint.pt", "wb") as file:
            file.write(b"new")
        assert Path("checkpoint.pt").read_bytes() == b"new"
        assert os.path.getsize("checkpoint.pt") == os.stat(b"checkpoint.pt").st_size == 3
        with open("checkpoint.pt", "wb") as file:
            file.write(b"newer")
        assert open("checkpoint.pt", "rb").read() == b"newer"
    """,
    "pathlib": """
        Path("log.csv").write_text("new")
        assert Path("log.csv").read_text() == "new" == Path("log.csv").resolve().read_text()
        Path("out/best.pt").touch()
        Path("made.txt").touch()
        Path("made.txt").unlink()
        assert not Path("made.txt").exists() and Path("log.csv").exists()
        Path("a/b/c").mkdir(parents=True)
        Path("a/b/c/d").write_text("")
        assert [path.name for path in Path("a").rglob("*")] == ["b", "c", "d"]
        Path("checkpoint.pt").rename("a/old.pt")
        assert Path("a/old.pt").read_text() == "checkpoint" and not Path("checkpoint.pt").exists()
        assert sorted(path.name for path in Path("a").glob("*")) == ["b", "old.pt"]
        Path("log.csv").unlink()
        assert "log.csv" not in [path.name for path in Path().iterdir()]
        assert "log.csv" not in [path.name for path in Path().glob("*")]
        Path("log.csv").symlink_to("a/old.pt")
        assert Path("log.csv").read_text() == "checkpoint"
    """,
    "replaced by a temporary file": """
        for round in "12":
            with open("checkpoint.pt.tmp", "w") as file:
                file.write(round)
            os.replace("checkpoint.pt.tmp", "checkpoint.pt")
            assert text("checkpoint.pt") == round and not os.path.exists("checkpoint.pt.tmp")
            assert sorted(os.listdir()) == ["checkpoint.pt", "kept", "latest", "log.csv", "out"]
        with open("checkpoint.pt", "a") as file:
            file.write("3")
        assert text("checkpoint.pt") == "23"
        with open("new.pt.tmp", "w") as file:
            file.write("new")
        os.rename("new.pt.tmp", "new.pt")
        assert text("new.pt") == "new"
    """,
    "replaced by a file of the temporary folder": """
        import tempfile
        with tempfile.NamedTemporaryFile("w", delete=False) as file:
            file.write("new")
        shutil.move(file.name, "checkpoint.pt")
        assert text("checkpoint.pt") == "new" and not os.path.exists(file.name)
        shutil.move("log.csv", tempfile.gettempdir() + "/log.csv")
        assert not os.path.exists("log.csv") and text(tempfile.gettempdir() + "/log.csv") == "a,b"
        os.remove(tempfile.gettempdir() + "/log.csv")
    """,
    "appended, read and written, truncated": """
        with open("log.csv", "a") as file:
            file.write("1,2")
        assert text("log.csv") == "a,b1,2"
        with open("out/best.pt", "r+") as file:
            file.write("B")
        assert text("out/best.pt") == "Best"
        os.truncate("checkpoint.pt", 5)
        assert text("checkpoint.pt") == "check"
        file = os.open("kept/deep/data.txt", os.O_WRONLY | os.O_APPEND)
        os.write(file, b"!")
        os.close(file)
        assert text("kept/deep/data.txt") == "data!"
        file = os.open("out/lock", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        os.close(file)
        for path in ("out/lock", "kept/deep/data.txt", "log.csv"):
            try:
                open(path, "x")
                raise AssertionError
            except FileExistsError:
                pass
    """,
    "removed": """
        os.remove("log.csv")
        assert not os.path.exists("log.csv") and "log.csv" not in os.listdir()
        for use in (os.remove, os.stat, open, os.listdir):
            try:
                use("log.csv")
                raise AssertionError
            except FileNotFoundError as error:
                assert Path(error.filename).name == "log.csv"
        with open("log.csv", "x") as file:
            file.write("new")
        assert text("log.csv") == "new" and "log.csv" in os.listdir()
        os.unlink("log.csv")
        assert not os.path.lexists("log.csv")
    """,
    "a folder removed": """
        shutil.rmtree("out")
        assert not os.path.exists("out") and not os.path.exists("out/best.pt")
        os.makedirs("out/samples")
        with open("out/samples/1.txt", "w") as file:
            file.write("one")
        assert [(top, names, files) for top, names, files in os.walk("out")] == [
            ("out", ["samples"], []), ("out/samples", [], ["1.txt"])]
        assert [entry.path for entry in os.scandir("out/samples")] == ["out/samples/1.txt"]
        import glob
        assert glob.glob("out/**/*.txt", recursive=True) == ["out/samples/1.txt"]
        shutil.rmtree("out")
        assert not os.path.exists("out")
        try:
            os.rmdir("kept")
            raise AssertionError
        except OSError:
            pass
        shutil.rmtree("kept", ignore_errors=True)
        assert sorted(os.listdir()) == ["checkpoint.pt", "latest", "log.csv"]
    """,
    "folders renamed": """
        os.rename("out", "out.bak")
        assert not os.path.exists("out") and text("out.bak/best.pt") == "best"
        os.makedirs("out")
        with open("out/best.pt", "w") as file:
            file.write("new")
        with open("out.bak/best.pt", "w") as file:
            file.write("old")
        with open("out.bak/more.pt", "w") as file:
            file.write("more")
        assert text("out/best.pt") == "new" and text("out.bak/best.pt") == "old"
        assert sorted(os.listdir("out.bak")) == ["best.pt", "more.pt"] and os.listdir("out") == ["best.pt"]
        os.mkdir("tmp")
        with open("tmp/best.pt", "w") as file:
            file.write("newest")
        shutil.rmtree("out")
        os.rename("tmp", "out")
        assert text("out/best.pt") == "newest" and not os.path.exists("tmp")
        os.replace("out.bak", "out.older")
        assert text("out.older/best.pt") == "old" and text("out.older/more.pt") == "more"
        shutil.copytree("kept", "copied")
        shutil.move("checkpoint.pt", "copied")
        assert text("copied/checkpoint.pt") == "checkpoint" and text("copied/deep/data.txt") == "data"
        shutil.rmtree("copied")
        shutil.rmtree("out.older")
        assert not os.path.exists("out.older")
    """,
    "links": """
        with open("latest", "w") as file:
            file.write("through a link")
        assert text("out/best.pt") == text("latest") == "through a link"
        os.remove("latest")
        assert text("out/best.pt") == "through a link" and not os.path.lexists("latest")
        os.symlink("kept", "latest")
        assert os.readlink("latest") == "kept" and text("latest/deep/data.txt") == "data"
        with open("latest/deep/data.txt", "w") as file:
            file.write("new")
        assert text("kept/deep/data.txt") == "new"
        os.link("log.csv", "linked.csv")
        with open("linked.csv", "a") as file:
            file.write("more")
        assert text("linked.csv") == "a,bmore"
        os.mkdir("run")
        os.symlink(os.path.abspath("kept"), "run/data")
        with open("run/data/deep/new.txt", "w") as file:
            file.write("new")
        assert text("kept/deep/new.txt") == "new"
    """,
    "times and modes": """
        os.chmod("log.csv", 0o600)
        os.utime("log.csv", (0, 0))
        os.utime("out", (0, 0))
        assert os.stat("log.csv").st_mtime == 0 and os.stat("log.csv").st_mode & 0o777 == 0o600
        shutil.copy2("log.csv", "checkpoint.pt")
        assert text("checkpoint.pt") == "a,b" and os.stat("checkpoint.pt").st_mtime == 0
    """,
    "places": """
        os.chdir("kept/deep")
        with open("../../log.csv", "w") as file:
            file.write("new")
        assert text("../../log.csv") == text("../../../work/log.csv") == "new"
        with open("../../../elsewhere/notes.txt", "a") as file:
            file.write("!")
        os.mkdir("../../../elsewhere/runs")
        assert text("../../../elsewhere/notes.txt") == "notes!"
        folder = os.open("../../out", os.O_RDONLY)
        file = os.open("best.pt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder)
        os.write(file, b"by folder")
        assert text("../../out/best.pt") == "by folder" and os.stat("best.pt", dir_fd=folder).st_size == 9
        os.unlink("best.pt", dir_fd=folder)
        assert not os.path.exists("../../out/best.pt")
        with open(os.devnull, "w") as file:
            file.write("nothing")
        name = os.fsdecode(b"name \\xff\\n")
        with open(os.fsencode(name), "w") as file:
            file.write("no UTF-8")
        assert text(name) == "no UTF-8" and os.fsencode(name) in os.listdir(b".")
        os.rename(name, "name")
    """,
    "a folder of the run": """
        os.makedirs("runs/1")
        os.chdir("runs/1")
        assert os.getcwd() == os.path.abspath(".") == str(Path(__file__).parent / "work/runs/1")
        Path("a").write_text("a")
        Path("../../log.csv").write_text("new")
        assert text("../../log.csv") == "new" and text(os.path.abspath("a")) == "a"
        Path("../../out/a").write_text("a")
        os.chdir("../../out")
        assert text("best.pt") == "best" and os.listdir() == ["best.pt", "a"] and os.stat(".").st_mode
        assert subprocess.check_output(["cat", "best.pt"]) == b"best"
        assert list(Path("../out").glob("*")) == [Path("../out/best.pt"), Path("../out/a")]
    """,
    "logging, json, zipfile, pickles": """
        import logging, pickle, zipfile
        logging.basicConfig(handlers=[logging.FileHandler("log.csv"), logging.FileHandler("new.log")], force=True)
        logging.warning("said")
        logging.shutdown()
        assert text("log.csv") == "a,bWARNING:root:said\\n" and text("new.log") == "WARNING:root:said\\n"
        with open("checkpoint.pt", "w") as file:
            json.dump({"a": 1}, file)
        assert json.loads(text("checkpoint.pt")) == {"a": 1}
        with zipfile.ZipFile("out/best.pt", "w") as file:
            file.write("checkpoint.pt")
        assert zipfile.ZipFile("out/best.pt").read("checkpoint.pt") == b'{"a": 1}'
        assert pickle.loads(pickle.dumps([open, os.stat, os.rename])) == [open, os.stat, os.rename]
        class Disk:
            open = open
            stat = os.stat
        assert json.loads(Disk().open("checkpoint.pt").read()) and Disk().stat("checkpoint.pt")
    """,
    "sqlite": """
        import sqlite3
        for path in ("log.csv", "new.db"):
            if path == "log.csv":
                open(path, "w").close()
            with sqlite3.connect(path) as base:
                base.execute("create table t (a)")
                base.execute("insert into t values (1)")
            base.close()
            assert sqlite3.connect(path).execute("select a from t").fetchall() == [(1,)]
        sqlite3.connect(":memory:").execute("create table t (a)")
    """,
    "processes": """
        open("log.csv", "w").close()
        for worker in range(4):
            if not os.fork():
                for number in range(50):
                    with open("log.csv", "a") as file:
                        file.write(f"{worker}\\n")
                    os.makedirs(f"run/{worker}", exist_ok=True)
                    with open(f"{worker}.txt", "w") as file:
                        file.write("of a fork")
                os._exit(0)
        assert all(os.wait()[1] == 0 for _ in range(4))
        assert sorted(text("log.csv").split()) == sorted("0123" * 50)
        assert text("3.txt") == "of a fork" and sorted(os.listdir("run")) == ["0", "1", "2", "3"]
        code = text(__file__).split("# The script")[0]
        code += "assert text('../3.txt') == 'of a fork' and len(text('../log.csv')) == 400\\n"
        code += "Path('best.pt').write_text('of a child')"
        subprocess.run([sys.executable, "-c", code], check=True, cwd="out")
        assert text("out/best.pt") == "of a child"
    """,
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of a user, as large as a test can see."""
    for folder in ("work/out", "work/kept/deep", "elsewhere", "t", "scratch/run"):
        (tmp_path / folder).mkdir(parents=True)
    files = {"checkpoint.pt": "checkpoint", "log.csv": "a,b", "out/best.pt": "best", "kept/deep/data.txt": "data"}
    for name, text in files.items():
        (tmp_path / "work" / name).write_text(text)
    (tmp_path / "work" / "latest").symlink_to("out/best.pt")
    (tmp_path / "elsewhere" / "notes.txt").write_text("notes")
    return tmp_path


def snapshot(home: Path) -> dict[str, tuple[int, int, bytes]]:
    """The names, kinds, times and contents of the user's files."""
    found = {}
    for path in sorted(home.rglob("*")):
        if path.relative_to(home).parts[0] not in ("scratch", "script.py"):
            status = path.lstat()
            content = (
                os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
            )
            found[str(path)] = (status.st_mode, 0 if path.is_dir() else status.st_mtime_ns, content)
    return found


def run(home: Path, script: str, imports: str = "", python: str = PYTHON, **environment: str) -> int:
    """Run a script in the user's folder, and return its exit code; what it made is left."""
    (home / "script.py").write_text(BEGIN.format(imports=imports) + "# The script\n" + textwrap.dedent(script))
    environment = {
        **os.environ,
        "FILES": str(home / "scratch" / "run" / "files"),
        "SCRIPT_FILES": script_files.__file__,
        "TMPDIR": str(home / "t"),
        **environment,
    }
    command = [python, "-W", "ignore::ResourceWarning", str(home / "script.py")]
    return subprocess.run(command, cwd=home / "work", env=environment, timeout=60).returncode


def check(home: Path, script: str, imports: str = "", **how: str) -> None:
    """Run a script, and hold the tree to what it was."""
    before = snapshot(home)
    assert run(home, script, imports, **how) == 0
    assert snapshot(home) == before


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_files_of_the_user_stay(home: Path, script: str) -> None:
    check(home, script)


def test_libraries(home: Path) -> None:
    script = """
        model = torch.nn.Linear(2, 2)
        for path in ("checkpoint.pt", "out/new.pt", Path("log.csv")):
            for state in ({"a": 1}, model.state_dict()):
                torch.save(state, path)
                assert torch.load(path).keys() == torch.load(path, mmap=True).keys() == state.keys()
        with open("out/best.pt", "wb") as file:
            torch.save({"b": 1}, file)
        assert torch.load("out/best.pt") == {"b": 1}
        numpy.save("kept/deep/data.txt", numpy.ones(2))
        numpy.save("array.npy", numpy.ones(2))
        numpy.zeros(2).tofile("log.csv")
        assert numpy.load("kept/deep/data.txt.npy").sum() == numpy.load("array.npy").sum() == 2
        assert numpy.fromfile("log.csv").sum() == 0
        figure = pyplot.figure()
        for path in ("out/best.pt", "figure.png", "figure.pdf"):
            figure.savefig(path, format=path[-3:] if "figure" in path else "png")
            assert os.path.getsize(path) > 500
        Image.new("RGB", (4, 4)).save("checkpoint.pt", format="png")
        assert Image.open("checkpoint.pt").size == (4, 4)
        for folder in ("runs/one", "out"):
            with SummaryWriter(folder) as writer:
                writer.add_scalar("loss", 1.0)
            assert any("tfevents" in name for name in os.listdir(folder))
        class Logs(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                with open(f"kept/{index}.txt", "w") as file:
                    file.write("of a worker")
                with open(f"log.csv.{index}", "w") as file:
                    file.write("of a worker")
                os.replace(f"log.csv.{index}", "log.csv")
                return len(text("log.csv"))
        for batch in torch.utils.data.DataLoader(Logs(), num_workers=2):
            assert batch == len(text("log.csv")) == len("of a worker")
        assert text("kept/3.txt") == "of a worker"
    """
    imports = """
import numpy, torch
from matplotlib import pyplot
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
"""
    check(home, script, imports, MPLBACKEND="agg")


@pytest.mark.parametrize("imports", ["import torch", "import torch, safetensors.torch"])
def test_files_of_safetensors(home: Path, imports: str) -> None:
    pytest.importorskip("safetensors")
    script = """
        from safetensors.torch import load_file, save_file, save_model
        for path in ("checkpoint.pt", "out/new.pt", Path("log.csv")):
            save_file({"a": torch.ones(3)}, path)
            assert load_file(path)["a"].sum() == 3 == load_file(filename=path)["a"].sum()
        save_model(torch.nn.Linear(2, 2), "out/best.pt")
        assert load_file("out/best.pt").keys() == {"weight", "bias"}
    """
    check(home, script, imports)


def test_images_of_opencv(home: Path) -> None:
    pytest.importorskip("cv2")
    script = """
        import cv2, numpy
        os.rename("log.csv", "sample.png")
        for path in ("sample.png", "out/new.png"):
            assert cv2.imwrite(path, numpy.zeros((2, 3, 3), "uint8"))
            assert cv2.imread(filename=path).shape == (2, 3, 3)
    """
    check(home, script)


def test_a_script_that_is_killed(home: Path) -> None:
    script = """
        os.makedirs("runs/1")
        for path in ("runs/1/log.txt", "log.csv", "new.txt"):
            file = open(path, "w")
            file.write("begun")
            file.flush()
        if not os.fork():
            shutil.rmtree("kept")
            os.symlink(os.path.abspath("out"), "runs/link")
            os.replace("new.txt", "checkpoint.pt")
        else:
            os.wait()
        os.kill(os.getpid(), 9)
    """
    before = snapshot(home)
    assert run(home, script) == -signal.SIGKILL
    assert snapshot(home) == before


@pytest.mark.parametrize("variable", ["HF_HOME", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TMPDIR"])
def test_caches_and_temporary_files_are_left_alone(home: Path, variable: str) -> None:
    cache = home / "work" / "cache"
    cache.mkdir()
    (cache / "old").write_text("old")
    script = """
        Path("cache/new").write_text("new")
        Path("cache/old").write_text("new")
        Path("other").write_text("new")
        Path("out/__pycache__").mkdir()
    """
    assert run(home, script, **{variable: str(cache)}) == 0
    assert {path.name: path.read_text() for path in cache.iterdir()} == {"old": "new", "new": "new"}
    assert not (home / "work" / "other").exists()
    assert (home / "work" / "out" / "__pycache__").exists()


def test_a_command_that_works_in_the_temporary_folder(home: Path) -> None:
    script = """
        Path("log.csv").write_text("new")
        Path("new").write_text("new")
        Path("../elsewhere/notes.txt").write_text("new")
        os.chdir("..")
        code = text(__file__).split("# The script")[0] + "Path('work/checkpoint.pt').write_text('new')"
        subprocess.run([sys.executable, "-c", code], check=True)
    """
    before = snapshot(home / "work")
    assert run(home, script, TMPDIR=str(home)) == 0
    assert (home / "elsewhere" / "notes.txt").read_text() == "new"
    assert snapshot(home / "work") == before


def test_two_runs_do_not_meet(home: Path) -> None:
    script = """
        assert not os.path.exists("made") and text("log.csv") == "a,b"
        os.mkdir("made")
        os.replace("checkpoint.pt", "log.csv")
    """
    before = snapshot(home)
    for folder in ("one", "two"):
        (home / "scratch" / folder).mkdir()
        assert run(home, script, FILES=str(home / "scratch" / folder / "files")) == 0
    assert snapshot(home) == before


def test_reading_is_as_it_was_where_nothing_was_written(home: Path) -> None:
    script = """
        import _io, posix
        assert repr(os.listdir("out")) == repr(posix.listdir("out"))
        assert type(os.scandir("out")) is type(posix.scandir("out")) and os.stat("out") == posix.stat("out")
        assert open("log.csv").name == "log.csv" and type(open("log.csv")) is type(_io.open("log.csv"))
        assert not posix.access(os.environ["FILES"], os.F_OK)
    """
    check(home, script)


def test_an_error_of_a_script_is_its_own(home: Path) -> None:
    script = """
        from autoaccum.devices.command.script_files import protect
        from autoaccum.devices.child.failures import describe_failure
        Path("log.csv").write_text("new")
        for use in (open, os.remove, os.rmdir, os.stat):
            try:
                use("nowhere")
            except OSError as error:
                failure = describe_failure(error, "the script")
                assert failure.fault == "user" and "inside of" not in failure.message, failure
                assert "script.py" in failure.traceback and "script_files" not in failure.traceback
    """
    check(home, script, "import torch")
