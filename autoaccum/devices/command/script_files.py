"""The files of the user, which stay as they are while a script runs for a few updates: it writes to a mirror of them.

In each process, a layer over `open` and `os`, and so over `pathlib`, `shutil`, `logging` and the like. Each path P of
the user's has a place in the run's own folder, `<files>/P`: there it is written, and read if it is there. What the
script removes is marked by a file in `<files>.removed`. All processes of the run see the same, runs at the same time
do not meet, and all is removed with the run's folder. Caches, temporary files and `__pycache__` are left alone.

Not covered are programs that are no Python, and C++ code that opens a path by itself (but for `torch.save` and
`_LIBRARIES`): they do not find what only the mirror has, nor are they kept from writing.
"""

from __future__ import annotations

import errno
import functools
import glob
import io
import os
import pathlib
import posix
import shutil
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import machinery, util
from posixpath import basename, dirname, join, normpath
from stat import S_ISDIR
from types import SimpleNamespace
from typing import Any, Final

_OS: Final[Any] = posix  # Its functions stay as they are.
_OPEN: Final[Any] = io.open
_LEFT_ALONE: Final = (
    *("/dev", "/proc", "/sys", "/run", sys.prefix, tempfile.gettempdir(), "~/.cache", "$XDG_CACHE_HOME", "$HF_HOME"),
    *("$HF_HUB_CACHE", "$HF_DATASETS_CACHE", "$TORCH_HOME", "$TORCHINDUCTOR_CACHE_DIR", "$TRITON_CACHE_DIR"),
    "$MPLCONFIGDIR",
)
_USES: Final = {  # Of a path: it is read or, by `c`, made if it is not there, by `x` only then, by `k` changed.
    "": ("access", "getxattr", "listxattr", "lstat", "readlink", "stat", "statvfs"),
    "k": ("chmod", "chown", "lchown", "removexattr", "setxattr", "truncate", "utime"),
    "cx": ("mkdir", "mkfifo", "mknod", "symlink"),
}
_LIBRARIES: Final = {  # Functions that open a path by themselves, the position of the path, and its use.
    "cv2": (("imwrite", 0, "c"), ("imread", 0, "")),
    "safetensors": (("serialize_file", 1, "c"), ("safe_open", 0, "")),
    "sqlite3": (("connect", 0, "ck"),),
}
_UNTOUCHED: Final = {"_io", "posix", "zipimport", "_frozen_importlib", "_frozen_importlib_external", __name__}


def protect(files: pathlib.Path) -> None:
    """Keep the files of the user as they are, in this process and its forks; what is written goes below `files`."""
    own = _Mirror(join(os.path.realpath(files.parent), files.name))
    table: dict[Any, Any] = {_OPEN: own.io_open, _OS.rmdir: functools.partial(own.unlink, real=_OS.rmdir)}
    table[_OS.getcwd] = lambda: own.as_users(_OS.getcwd())
    for use, names in _USES.items():
        table |= {real: own.at(use, real, int(real is _OS.symlink)) for real in (getattr(_OS, name) for name in names)}
    for name in ("chdir", "link", "listdir", "open", "remove", "rename", "replace", "scandir", "unlink"):
        table[getattr(_OS, name)] = getattr(own, name)
    _replace(table)
    vars(shutil)["_use_fd_functions"] = False  # Removes by path, by which content is found.
    for name in _LIBRARIES.keys() & sys.modules.keys():
        own.enter(sys.modules[name])
    sys.meta_path.insert(0, own)
    if "torch" in sys.modules:
        writer, storage = sys.modules["torch"]._C.PyTorchFileWriter, sys.modules["torch"].UntypedStorage
        writer.__init__ = own.at("c", writer.__init__, 1)
        storage.from_file = staticmethod(own.at("", storage.from_file, 0))


class _Mirror:
    def __init__(self, files: str) -> None:
        self.files, self.marks = files, files + ".removed"
        with suppress(FileExistsError):  # The first process of the run is where the command was started.
            _OS.symlink(_OS.getcwd(), files + ".working")
        left = [pathlib.Path(os.path.expandvars(path) or "/dev").expanduser().resolve() for path in _LEFT_ALONE]
        left.append(pathlib.Path(files).parents[1])  # The temporary folder; the run has one of its own.
        self.covered = {"/": True} | {str(path): False for path in left}
        self.covered |= {_OS.readlink(files + ".working"): True, dirname(files): False}
        spec: Any = util.find_spec("posixpath")
        spec.loader.exec_module(paths := util.module_from_spec(spec))
        vars(paths)["os"] = links = SimpleNamespace(**vars(posix))
        links.lstat = lambda path: _OS.lstat(self.found(path))
        links.readlink = lambda path: _OS.readlink(self.found(path))
        self.realpath = paths.realpath  # It follows links as the script sees them.

    def as_users(self, path: str) -> str:
        return path.removeprefix(self.files) or "/" if f"{path}/".startswith(self.files + "/") else path

    def key(self, path: Any, folder: int | None = None, follow: bool = True) -> str | None:
        """Return the path that the script means, absolute and without links; None: it is left alone."""
        if not path or not isinstance(path, str | bytes | os.PathLike):
            return None
        base = _OS.getcwd() if folder is None else _OS.readlink(f"/proc/self/fd/{folder}")
        key = self.as_users(join(base, os.fsdecode(path))).rstrip("/")
        last = "" if follow or basename(key) in (".", "..") else basename(key)
        key = normpath(join(self.as_users(self.realpath((dirname(key) if last else key) or "/")), last))
        covers = next(self.covered[at] for at in map(str, pathlib.Path(key, "_").parents) if at in self.covered)
        return key if covers and "/__pycache__" not in key else None

    def hides(self, key: str) -> bool:  # Whether the script has removed what the user has there.
        around = pathlib.Path(key, "_").parents if _mode(self.marks) else ()
        return any(_mode(f"{self.marks}{at}/=removed") for at in around)

    def found(self, key: str) -> str:  # Where the content of a path is, or would be.
        return self.files + key if _mode(self.files + key) or self.hides(key) else key

    def place(self, path: Any, folder: int | None = None, follow: bool = True, use: str = "") -> Any:
        """Return the path to read or, by `use`, to write; it is prepared."""
        key = self.key(path, folder, follow) if use or _mode(self.files) else None
        if key is None or not use and self.found(key) == normpath(join(_OS.getcwd(), os.fsdecode(path))):
            return path
        at, there = self.files + key if use else self.found(key), _mode(self.found(key))
        if use:
            _check(errno.EEXIST if there and "x" in use else 0, path)
            _check(0 if (there or "c" in use) and S_ISDIR(_mode(self.found(dirname(key)))) else errno.ENOENT, path)
            self.bring(key, deep=False) if "k" in use or S_ISDIR(there) else _make_folder(dirname(at))
        elif at != key:
            _check(0 if there else errno.ENOENT, path)
        return os.fsencode(at) if isinstance(path, bytes) else at

    def bring(self, key: str, deep: bool = True) -> None:
        """Copy what is at a path into the mirror, unless it is there; at once, since other processes may do so too."""
        at = self.found(key)
        _make_folder(self.files + key if S_ISDIR(_mode(at)) else dirname(self.files + key))
        if S_ISDIR(_mode(at)):
            for name in self.entries(key) if deep else ():
                self.bring(join(key, name))
        elif at == key and _mode(key):
            shutil.copy2(key, copy := f"{self.files}.{os.getpid()}-{threading.get_ident()}", follow_symlinks=False)
            with suppress(FileExistsError):
                _OS.link(copy, self.files + key, follow_symlinks=False)
            _OS.unlink(copy)

    def hide(self, key: str) -> None:
        if _mode(key):
            _make_folder(self.files)
            _make_folder(self.marks + key)
            _OPEN(f"{self.marks}{key}/=removed", "w").close()

    def entries(self, key: str) -> dict[str, Any]:
        found = {entry.name: entry for entry in _OS.scandir(at)} if (at := self.found(key)) != key else {}
        if at == key or S_ISDIR(_mode(key)):
            found = {entry.name: entry for entry in _OS.scandir(key) if not self.hides(join(key, entry.name))} | found
        return found

    def at(self, use: str, real: Any, position: int) -> Any:  # Instead of a function of which the path is another.
        follows = use != "cx" and real not in (_OS.lstat, _OS.readlink, _OS.lchown)

        def call(*args: Any, **kwargs: Any) -> Any:
            word = next((word for word in ("path", "dst", "filename", "database") if word in kwargs), position)
            given: Any = kwargs if isinstance(word, str) else list(args)
            is_named = real.__name__ != "connect" or not str(given[word]).startswith((":memory:", "file:"))
            if (word in kwargs or len(args) > position) and is_named:
                follow = follows and kwargs.get("follow_symlinks", True)
                given[word] = self.place(given[word], kwargs.get("dir_fd"), follow, use)
            return real(*args, **kwargs) if given is kwargs else real(*given, **kwargs)

        return call

    def io_open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        use = "x" * ("x" in mode) + "c" * ("r" not in mode) + "k" * ("w" not in mode) if set(mode) & set("wax+") else ""
        return _OPEN(self.place(file, use=use), mode, *args, **kwargs)

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
        use = ("cx" if flags & os.O_EXCL else "c" if flags & os.O_TRUNC else "ck") if flags & os.O_CREAT else "k"
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        path = self.place(path, dir_fd, not flags & os.O_NOFOLLOW, use if writes else "")
        return _OS.open(path, flags, mode, dir_fd=dir_fd)

    def chdir(self, path: Any) -> None:
        key = self.key(path)
        _OS.chdir(key if key and S_ISDIR(_mode(key)) and not self.hides(key) else self.place(path))

    def listdir(self, path: Any = None) -> Any:
        return [entry.name for entry in self.scandir(path)] if _mode(self.files) else _OS.listdir(path)

    def scandir(self, path: Any = None) -> Any:
        key = self.key(path or ".") if _mode(self.files) else None
        if key is None:
            return _OS.scandir(path)
        folder, name = os.fspath(path or "."), os.fsencode if isinstance(path, bytes) else os.fsdecode
        entries = (_Entry(of=entry, folder=folder, name=name(entry.name)) for entry in self.entries(key).values())
        return type("Entries", (io.IOBase,), {"__next__": lambda _: next(entries)})()  # For `with` and `close` too.

    def link(self, src: Any, dst: Any, **_: Any) -> None:
        with self.io_open(src, "rb") as source, self.io_open(dst, "xb") as copy:
            shutil.copyfileobj(source, copy)  # What is written by the new name is not for the file of the user.

    def unlink(self, path: Any, *, dir_fd: int | None = None, real: Any = posix.unlink) -> Any:
        if (key := self.key(path, dir_fd, follow=False)) is None:
            return real(path, dir_fd=dir_fd)
        is_rmdir, mode = real is _OS.rmdir, _mode(self.found(key))
        _check(errno.ENOENT if not mode else errno.EISDIR if S_ISDIR(mode) and not is_rmdir else 0, path)
        _check(errno.ENOTEMPTY if is_rmdir and self.entries(key) else 0, path)  # Raises for what is no folder.
        self.hide(key)
        return real(self.files + key) if _mode(self.files + key) else None

    def rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self.key(src, src_dir_fd, follow=False), self.key(dst, dst_dir_fd, follow=False)
        os.lstat(src, dir_fd=src_dir_fd)  # Raises for what is not there.
        if target is None:
            _check(errno.EXDEV if source else 0, dst)  # As between disks, where `shutil.move` copies.
            _OS.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        else:
            is_full = S_ISDIR(_mode(self.found(target))) and self.entries(target)
            place = self.place(dst, dst_dir_fd, follow=False, use="c")
            _check(errno.ENOTEMPTY if is_full else 0, dst)
            if source is not None:
                self.bring(source)
                self.hide(source)
            _OS.rename(src if source is None else self.files + source, place, src_dir_fd=src_dir_fd)

    remove, replace = unlink, rename

    def enter(self, library: Any) -> Any:
        for name, position, use in _LIBRARIES[library.__name__]:
            _replace({getattr(library, name): self.at(use, getattr(library, name), position)})

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec: Any = machinery.PathFinder.find_spec(name, path) if name in _LIBRARIES else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: load(module) or self.enter(module)
        return spec


class _Entry(SimpleNamespace):  # As an `os.DirEntry`, under the path by which the script knows its folder.
    def __getattr__(self, name: str) -> Any:
        return join(self.folder, self.name) if name == "path" else getattr(self.of, name)

    def __fspath__(self) -> Any:
        return self.path


class _InPlaceOf(functools.partial[Any]):  # In a class it is no method, and in a pickle it is the function.
    def __reduce__(self) -> Any:
        return self.__name__  # type: ignore[attr-defined]


def _replace(table: dict[Any, Any]) -> None:
    """Put functions in the place of others, under each name that a module has for them."""
    by_id = {id(real): functools.update_wrapper(_InPlaceOf(call), real) for real, call in table.items()}
    for new in by_id.values():
        new.__module__ = {"posix": "os", "_io": "io"}.get(new.__module__, new.__module__)
    owners: list[Any] = [module for name, module in list(sys.modules.items()) if name not in _UNTOUCHED]
    owners += [one for module in (glob, pathlib) for one in vars(module).values() if isinstance(one, type)]
    for owner in owners:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if (key := id(value.__func__ if type(value) is staticmethod else value)) in by_id:
                setattr(owner, name, by_id[key])


def _mode(path: str) -> int:  # What is there, links not followed; 0: nothing.
    with suppress(OSError):
        return int(_OS.lstat(path).st_mode)
    return 0


def _check(number: int, path: Any) -> None:
    if number:
        raise OSError(number, os.strerror(number), path)


def _make_folder(path: str) -> None:
    if not _mode(path):
        _make_folder(dirname(path))
        with suppress(FileExistsError):
            _OS.mkdir(path)
