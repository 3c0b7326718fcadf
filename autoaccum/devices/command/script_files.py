"""The files of the user, which stay as they are while a script runs for a few updates, and the files that it makes.

In each process, a layer over `open` and `os`, and so over `pathlib`, `shutil`, `zipfile`, `logging` and the like:

- What is not there is made where the script wants it; its path is noted first, so that it is removed afterwards.
- What was there before is written, renamed and removed only as the run sees it: its new content is a copy.

Not seen is a path that other code opens by itself: programs that are no Python, and C++ (but `torch.save` and
`_LIBRARIES` are seen), nor what happens before PyTorch was imported. What such code makes in a folder that the run made
is removed with the folder. Caches and temporary files are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import io
import json
import os
import pathlib
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

_OS: Final[Any] = SimpleNamespace(**vars(os))
_OPEN: Final[Any] = io.open

_SYSTEM: Final = ("/dev", "/proc", "/sys", "/run")
_CACHES: Final = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "MPLCONFIGDIR", "TORCH_HOME"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"),
)
_READ: Final = ("access", "chdir", "getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs")
_MADE: Final = ("mkdir", "mkfifo", "mknod")
_CHANGED: Final = ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime")
_UNFOLLOWED: Final = ("lchown", "lstat", "readlink")
_LIBRARIES: Final = {
    "cv2": (("imwrite", 0, "replaced"), ("imread", 0, "read")),
    "safetensors": (("serialize_file", 1, "replaced"), ("safe_open", 0, "read")),
    "sqlite3": (("connect", 0, "appended"),),
}
"""Functions that open a path by themselves, by module: the position of the path, and what they do with it."""

_UNTOUCHED: Final = {"_io", "posix", "zipimport", "_frozen_importlib", "_frozen_importlib_external", __name__}
"""Modules whose functions stay: imports are none of the script's writes."""


class _Place(NamedTuple):
    """A path: as the script sees it, where its content is (None: it was removed), and the real function's argument."""

    key: str
    actual: str | None
    argument: Any


class _Journal(NamedTuple):
    """The journal as far as it was read: its size, what was made, where other content is, how often it was removed."""

    size: int = 0
    made: frozenset[str] = frozenset()
    moved: dict[str, str | None] = {}
    removals: dict[str, int] = {}


class _Entry:
    """As an `os.DirEntry`, under the path by which the script knows its folder."""

    def __init__(self, name: Any, path: Any) -> None:
        self.name, self.path = name, path

    def __fspath__(self) -> Any:
        return self.path

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)  # noqa: PTH116 (a name of bytes)

    def _is(self, kind: int, follow: bool) -> bool:
        try:
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_IFLNK, False)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_junction(self) -> bool:
        return False


class _Entries(contextlib.AbstractContextManager["_Entries"], Iterator[_Entry]):
    """As the iterator of `os.scandir`."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class _Files:
    """The files of a run, as one process sees them. The journal is common to all processes of the run.

    A record of it is a line of JSON: `[path]` is made; `[path, where]` has its content elsewhere, or nowhere (null).
    """

    def __init__(self, folder: Path, aside: bool = False) -> None:
        self.aside = aside
        _OS.makedirs(folder, exist_ok=True)
        self.folder: str = _OS.path.realpath(folder)
        self._journal = _Journal()
        with contextlib.suppress(FileExistsError):  # The first process of the run is where the command was started.
            _OS.symlink(_OS.getcwd(), self.folder + "/working")
        caches = [_OS.path.expanduser("~/.cache"), *(os.environ[name] for name in _CACHES if os.environ.get(name))]
        left = (*_SYSTEM, sys.prefix, tempfile.gettempdir(), *caches)
        self._covered = {"/": True} | {_OS.path.realpath(path): False for path in left}
        self._covered |= {_OS.readlink(self.folder + "/working"): True, _OS.path.dirname(self.folder): False}

    def journal(self) -> _Journal:
        """The journal as it is now; it is replaced as one, so that threads and forks need no lock."""
        journal, path = self._journal, self.folder + "/journal"
        try:
            if _OS.stat(path).st_size == journal.size:
                return journal
        except FileNotFoundError:
            return journal
        with _OPEN(path, "rb") as file:
            file.seek(journal.size)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        made, moved, removals = set(journal.made), dict(journal.moved), dict(journal.removals)
        for line in lines.splitlines():
            key, *where = json.loads(line)
            if where:
                moved = {other: at for other, at in moved.items() if not _is_in(other, key)} | {key: where[0]}
                removals[key] = removals.get(key, 0) + (where[0] is None)
            else:
                made.add(key)
        self._journal = journal = _Journal(journal.size + len(lines), frozenset(made), moved, removals)
        return journal

    def note(self, *record: str | None) -> None:
        """Add to the journal, in one write."""
        file = _OS.open(self.folder + "/journal", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        _OS.write(file, json.dumps(record).encode() + b"\n")
        _OS.close(file)

    def covers(self, path: str) -> bool:
        """Whether a path is the user's, by the nearest folder around it that is known to be or not to be."""
        return "/__pycache__" not in path and next(self._covered[at] for at in _around(path) if at in self._covered)

    def owns(self, path: str) -> bool:
        """Whether the run may change what is at a path: it made it, or the folder it is in, or it is not the user's."""
        made = self.journal().made
        return not self.covers(path) or any(at in made for at in _around(path))

    def place(self, path: Any, folder: int | None = None, follow: bool = True) -> _Place:
        """Return where a path leads, through symbolic links as the script sees them.

        Raises:
            OSError: The script removed a folder of the path, or links lead in a circle.
        """
        moved = self.journal().moved
        base = _OS.getcwd() if folder is None else _OS.readlink(f"/proc/self/fd/{folder}")
        rest, links, redirected = _parts(_OS.path.join(base, os.fsdecode(path))), 40, False
        trail: list[tuple[str, str | None]] = [("", "")]
        while rest:
            part = rest.pop()
            if part == "..":
                trail = trail[:-1] or trail
                continue
            key, where = (f"{above}/{part}" for above in trail[-1])
            actual = moved.get(key, where)
            redirected |= key in moved
            if actual is None and rest:
                raise _error(errno.ENOENT, path)
            link = ""
            if actual is not None and (rest or follow):
                with contextlib.suppress(OSError):
                    link = _OS.readlink(actual)
            if not link:
                trail.append((key, actual))
                continue
            links -= 1
            if not links:
                raise _error(errno.ELOOP, path)
            rest += _parts(link)
            trail = trail[:1] if link.startswith("/") else trail
        key, actual = trail[-1]
        argument = path
        if redirected and actual is not None:
            argument = os.fsencode(actual) if isinstance(path, bytes) else actual
        return _Place(key or "/", actual and (actual or "/"), argument)

    def read(self, path: Any, folder: int | None = None, follow: bool = True) -> Any:
        """Return the path to read."""
        if isinstance(path, int) or not self.journal().moved:
            return path
        place = self.place(path, folder, follow)
        if place.actual is None:
            raise _error(errno.ENOENT, path)
        return place.argument

    def replaced(self, path: Any, folder: int | None = None, follow: bool = True, how: str = "c") -> Any:
        """Return the path to write: as it was given, or of a copy.

        `how` is what the real function does: `c` makes what is not there, `x` only that; `k` keeps what is there.
        """
        if isinstance(path, int):
            return path
        place = self.place(path, folder, follow)
        if place.actual is None and "c" not in how:
            raise _error(errno.ENOENT, path)
        status = None
        if place.actual is not None:
            status = _status(place.actual)  # Before the journal is read: a path is noted before it is made.
            if self.owns(place.actual):
                return place.argument
            if status is None:
                if "c" in how and not self.aside:
                    self.note(place.actual)
                if "c" not in how or not self.aside or _status(_OS.path.dirname(place.actual)) is None:
                    return place.argument
            elif "x" in how or not stat.S_ISREG(status.st_mode):
                return place.argument
        keeps = place.actual is not None and status is not None and how != "c"
        copy = self.new(place.key, shared=not keeps)
        if keeps:
            _copy(place.actual, copy)
        self.note(place.key, copy)
        return os.fsencode(copy) if isinstance(path, bytes) else copy

    def appended(self, path: Any, folder: int | None = None, follow: bool = True) -> Any:
        """Return the path to write to, with the content that is there."""
        return self.replaced(path, folder, follow, "ck")

    def made(self, path: Any, folder: int | None = None, _: bool = False) -> Any:
        """Return the path to make, where nothing may be yet."""
        return self.replaced(path, folder, False, "cx")

    def changed(self, path: Any, folder: int | None = None, follow: bool = True) -> Any:
        """Return the path of which the mode, the times or the like are changed."""
        if isinstance(path, int):
            return path
        actual = self.place(path, folder, follow).actual
        status = actual and _status(actual)
        if not actual or not status or stat.S_ISREG(status.st_mode) or self.owns(actual):
            return self.replaced(path, folder, follow, "k")
        _OS.mkdir(aside := self.new(actual))  # Those of a folder of the user's stay, and nobody looks for new ones.
        return aside

    def new(self, key: str, shared: bool = False) -> str:
        """Return a path for a copy; `shared`: the same in all processes, which may make it at the same time."""
        once = f"{os.getpid()}-{time.monotonic_ns()}"
        name = hashlib.sha1(f"{key}/{self.journal().removals.get(key, 0)}".encode(errors="surrogateescape")).hexdigest()
        return f"{self.folder}/{name if shared else once}-{_OS.path.basename(key)[-100:]}"

    def shown(self, place: _Place) -> set[str]:
        """Return the names in a folder: those that the script has not removed, and those whose content is elsewhere."""
        if place.actual is None:
            raise _error(errno.ENOENT, place.key)
        within = {key[len(place.key) + 1 :]: at for key, at in self.journal().moved.items() if _is_in(key, place.key)}
        names = {*_OS.listdir(place.actual), *(name for name in within if name and "/" not in name)}
        return {name for name in names if within.get(name, "") is not None}

    # What takes the place of a function, beginning with those of which only the path is another.

    def at(self, position: int, path_of: Callable[..., Any], real: Any, follow: bool = True) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            word = next((word for word in ("path", "dst", "filename", "database") if word in kwargs), position)
            given: Any = kwargs if isinstance(word, str) else list(args)
            if word in kwargs or len(args) > position and isinstance(args[position], str | bytes | os.PathLike):
                given[word] = path_of(given[word], kwargs.get("dir_fd"), follow and kwargs.get("follow_symlinks", True))
            return real(*args, **kwargs) if given is kwargs else real(*given, **kwargs)

        return call

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            how = "x" * ("x" in mode) + "c" * ("r" not in mode) + "k" * ("w" not in mode)
            return _OPEN(self.replaced(file, how=how), mode, *args, **kwargs)
        return _OPEN(self.read(file), mode, *args, **kwargs)

    def os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        follow = not flags & os.O_NOFOLLOW
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            how = ("cx" if flags & os.O_EXCL else "c") if flags & os.O_CREAT else ""
            path = self.replaced(path, dir_fd, follow, how + ("" if flags & os.O_TRUNC else "k"))
        else:
            path = self.read(path, dir_fd, follow)
        return _OS.open(path, flags, mode, dir_fd=dir_fd)

    def listdir(self, path: Any = None) -> Any:
        if isinstance(path, int) or not self.journal().moved:
            return _OS.listdir(path)
        shown = self.shown(self.place(path or "."))
        return [os.fsencode(name) for name in shown] if isinstance(path, bytes) else list(shown)

    def scandir(self, path: Any = None) -> Any:
        if isinstance(path, int) or not self.journal().moved:
            return _OS.scandir(path)
        folder = path or "."
        names = [os.fsencode(name) if isinstance(path, bytes) else name for name in self.shown(self.place(folder))]
        return _Entries([_Entry(name, _OS.path.join(folder, name)) for name in names])

    def link(self, src: Any, dst: Any, **_: Any) -> None:
        """Copy instead: what the script writes under the new name is not for the file of the user."""
        _copy(self.read(src), self.made(dst), "xb")

    def remove(self, path: Any, *, dir_fd: int | None = None, real: Any = _OS.unlink) -> None:
        place = self.place(path, dir_fd, follow=False)
        if not self.covers(place.key):
            real(place.argument, dir_fd=dir_fd)
            return
        status = place.actual and _status(place.actual)
        if not place.actual or not status:
            raise _error(errno.ENOENT, path)
        if real is _OS.rmdir and self.shown(place):  # What is no folder raises its error here.
            raise _error(errno.ENOTEMPTY, path)
        if real is _OS.unlink and stat.S_ISDIR(status.st_mode):
            raise _error(errno.EISDIR, path)
        gone = False
        with contextlib.suppress(OSError):  # A folder in which something is hidden stays, and is hidden itself.
            if self.owns(place.actual):
                real(place.actual)
                gone = True
        if not gone or place.key in self.journal().moved:
            self.note(place.key, None)

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self.place(src, src_dir_fd, follow=False), self.place(dst, dst_dir_fd, follow=False)
        status, replaced = source.actual and _status(source.actual), target.actual and _status(target.actual)
        if not source.actual or not status:
            raise _error(errno.ENOENT, src)
        moved = self.journal().moved
        within = [key for key in moved if _is_in(key, source.key)]
        if self.owns(source.actual) and target.actual and not any(_is_in(key, target.key) for key in moved):
            new = not self.owns(target.actual)
            if not within and not (new and (replaced or self.aside)):
                if new:
                    self.note(target.actual)
                _OS.rename(source.actual, target.actual)
                return
        if source.key == target.key:
            return
        if not self.covers(target.key):
            raise _error(errno.EXDEV, dst)  # As between disks, where `shutil.move` copies.
        is_folder = stat.S_ISDIR(status.st_mode)
        if replaced and stat.S_ISDIR(replaced.st_mode) and (not is_folder or self.shown(target)):
            raise _error(errno.ENOTEMPTY, dst)
        if target.actual and not replaced and not self.aside:  # Something that other code sees under the new name.
            self.note(target.actual)
            _OS.mkdir(target.actual) if is_folder else _OPEN(target.actual, "x").close()
        if not self.covers(source.key):
            _OS.rename(source.actual, copy := self.new(target.key))
            self.note(target.key, copy)
            return
        self.note(target.key, source.actual)
        for key in within:
            if key != source.key:
                self.note(target.key + key[len(source.key) :], moved[key])
        self.note(source.key, None)

    def enter(self, library: Any) -> None:
        """Wrap the functions of a library that open a path by themselves."""
        rows = [(getattr(library, name), at, what) for name, at, what in _LIBRARIES[library.__name__]]
        _replace({real: self.at(position, getattr(self, what), real) for real, position, what in rows})

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find one of `_LIBRARIES`, to be entered when it is imported."""
        spec = PathFinder.find_spec(name, path) if name in _LIBRARIES else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_enter(module: Any) -> None:
                load(module)
                self.enter(module)

            spec.loader.exec_module = load_and_enter  # type: ignore[method-assign]
        return spec


def protect(files: Path, *, aside: bool = False) -> None:
    """Keep the files of the user as they are, in this process and its forks, from now on.

    Args:
        files: A folder for copies and the journal, common to all processes of the run, in the run's own folder.
        aside: Whether what is made is kept there too, so that runs at the same time do not meet; other code than
            Python then does not find it.
    """
    own = _Files(files, aside)
    table = {
        getattr(_OS, name): own.at(0, path_of, getattr(_OS, name), follow=name not in _UNFOLLOWED)
        for names, path_of in ((_READ, own.read), (_MADE, own.made), (_CHANGED, own.changed))
        for name in names
    }
    table |= {_OPEN: own.open, _OS.open: own.os_open, _OS.listdir: own.listdir, _OS.scandir: own.scandir}
    table |= {_OS.symlink: own.at(1, own.made, _OS.symlink), _OS.link: own.link}
    table |= {_OS.rename: own.rename, _OS.replace: own.rename, _OS.remove: own.remove, _OS.unlink: own.remove}
    _replace(table | {_OS.rmdir: functools.partial(own.remove, real=_OS.rmdir)})
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # Removes by path, by which content is found.
    for name in _LIBRARIES.keys() & sys.modules.keys():
        own.enter(sys.modules[name])
    sys.meta_path.insert(0, own)
    if "torch" in sys.modules:
        writer = sys.modules["torch"]._C.PyTorchFileWriter
        writer.__init__ = own.at(1, own.replaced, writer.__init__)


def remove_made(files: Path) -> None:
    """Remove what the processes of a run made, once they have ended; it may be called again.

    Args:
        files: The folder that `protect` was given.
    """
    try:
        lines = (files / "journal").read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in reversed(lines):
        with contextlib.suppress(OSError, ValueError):
            path, *where = json.loads(line)
            folder = _OS.path.dirname(path)
            if where or _OS.path.realpath(folder) != folder:  # A link that has come since would lead elsewhere.
                continue
            if stat.S_ISDIR(_OS.lstat(path).st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                _OS.unlink(path)


class _InPlaceOf:
    """Stands for a function wherever it was, in a class and in a pickle too."""

    def __init__(self, real: Any, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, real, updated=())
        self.__module__ = {"posix": "os", "_io": "io"}.get(real.__module__, real.__module__)
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]


def _replace(table: dict[Any, Callable[..., Any]]) -> None:
    """Put functions in the place of others, under each name that a module has for them."""
    by_id = {id(real): _InPlaceOf(real, call) for real, call in table.items()}
    owners: list[Any] = [module for name, module in list(sys.modules.items()) if name not in _UNTOUCHED]
    owners += [one for module in (glob, pathlib) for one in vars(module).values() if isinstance(one, type)]
    for owner in owners:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            new = by_id.get(id(value.__func__ if type(value) is staticmethod else value))
            if new is not None:
                setattr(owner, name, new)
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_effective_ids, os.supports_follow_symlinks):
        supporting |= {by_id[id(one)] for one in supporting if id(one) in by_id}


def _parts(path: str) -> list[str]:
    """Return the parts of a path, the last first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _around(path: str) -> Iterator[str]:
    """Yield a path and the folders around it, outwards."""
    while path != "/":
        yield path
        path = path[: path.rindex("/")] or "/"
    yield path


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _status(path: str) -> os.stat_result | None:
    try:
        return _OS.lstat(path)  # type: ignore[no-any-return]
    except OSError:
        return None


def _copy(path: Any, copy: Any, mode: str = "wb") -> None:
    with _OPEN(path, "rb") as source, _OPEN(copy, mode) as target:
        shutil.copyfileobj(source, target)
    _OS.chmod(copy, _OS.stat(path).st_mode & 0o777)


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), path)
