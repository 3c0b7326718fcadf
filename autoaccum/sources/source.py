"""What is run, as a child process rebuilds it: a workload file, or objects that were pickled.

A further kind of source is one more class here; everything behind it knows only what `Source` has.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum.sources.module_names import package_root

if TYPE_CHECKING:
    from autoaccum.sources.workload import Workload


@dataclass(frozen=True)
class Source(ABC):
    """What a process needs to rebuild a workload: texts, which reach a child as JSON.

    Attributes:
        name: What plans, locks and messages call it.
    """

    name: str

    @abstractmethod
    def load(self) -> Workload:
        """Return the workload, made anew.

        Raises:
            WorkloadError: It cannot be loaded, or is not usable.
        """

    @property
    def digest(self) -> str:
        """SHA-256 of the source files; empty if there are none."""
        return ""

    def to_record(self) -> dict[str, str]:
        """Return plain data for `read_source`."""
        return {"kind": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class FileSource(Source):
    """A workload file, by a name such as `model.py` or `model.py:small`.

    >>> source = FileSource("model.py:small")
    >>> source.file, source.variable, source.at("nets/model.py").name
    ('model.py', 'small', 'nets/model.py:small')
    >>> FileSource("C:/model.py").variable, FileSource("model.py:").variable
    (None, '')
    """

    @property
    def file(self) -> str:
        """The path of the file."""
        return self.name if self.variable is None else self.name.rpartition(":")[0]

    @property
    def variable(self) -> str | None:
        """What follows the colon; None if there is none."""
        file, _, variable = self.name.rpartition(":")
        return variable if file and re.fullmatch(r"\w*", variable) else None

    def at(self, file: str | Path) -> FileSource:
        """Return the same variable of another file."""
        return FileSource(str(file) if self.variable is None else f"{file}:{self.variable}")

    def load(self) -> Workload:
        """Import the file; see `loading.load_workload`."""
        from autoaccum.sources.loading import load_workload

        workload = load_workload(self.file, self.variable)
        return dataclasses.replace(workload, digest=self.at(workload.path or self.file).digest)

    @property
    def digest(self) -> str:
        """SHA-256 of the file and all modules it imports from its directory or package, transitively.

        The modules are found by reading import statements, so the digest depends neither on what the process has
        imported nor on where the directory lies. Modules imported by other means do not count.
        """
        path = Path(self.file).expanduser().resolve()
        top = package_root(path) or path.parent
        contents, waiting = dict[str, bytes](), [path]
        while waiting:
            file = waiting.pop()
            place = file.relative_to(top).as_posix() if top in file.parents else ""
            if not place or place in contents or "-packages" in place or not file.is_file():
                continue
            contents[place] = file.read_bytes()
            waiting += [folder / "__init__.py" for folder in file.parents if top in folder.parents]
            waiting += _imported(contents[place], file, top)
        digest = hashlib.sha256()
        for place, content in sorted(contents.items()):
            digest.update(os.fsencode(f"{place}\0{hashlib.sha256(content).hexdigest()}\n"))
        return digest.hexdigest()


@dataclass(frozen=True)
class PickledSource(Source):
    """Objects made in code, which `devices.child.pickling.pack` wrote to a file."""

    file: str

    def load(self) -> Workload:
        """Return the workload without its data; a model that was an instance is built by each call of it."""
        workload: Workload = pickle.loads(Path(self.file).read_bytes())
        return workload


_KINDS = {kind.__name__: kind for kind in (FileSource, PickledSource)}


def read_source(record: Mapping[str, str]) -> Source:
    """Return the source that `Source.to_record` gave."""
    fields = dict(record)
    return _KINDS[fields.pop("kind")](**fields)


def _imported(content: bytes, file: Path, top: Path) -> Iterator[Path]:
    """Yield the paths at which the modules imported by a file with this content would lie."""
    try:
        nodes = ast.walk(ast.parse(content))
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            names, level = [alias.name for alias in node.names], 0
        elif isinstance(node, ast.ImportFrom):
            base, level = node.module or "", node.level
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        folders = file.parents[level - 1 : level] if level else [top, file.parent]
        for stem in (folder.joinpath(*name.split(".")) for folder in folders for name in names):
            yield stem / "__init__.py"
            yield stem.parent / f"{stem.name}.py"
