"""What is run, as a child process rebuilds it: a workload file, a model by name, or objects that were pickled.

A further kind of source is one more class here; everything behind it knows only what `Source` has.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import pickle
import re
import tokenize
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autoaccum.errors import UsageError, WorkloadError, first_line
from autoaccum.sources.module_names import package_root
from autoaccum.sources.overrides import Constant, find_constants, replace_constants

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
    def title(self) -> str:
        """A short name."""
        return self.name

    @property
    def digest(self) -> str:
        """SHA-256 of the source files; empty if there are none."""
        return ""

    def to_record(self) -> dict[str, Any]:
        """Return plain data for `read_source`."""
        return {"kind": type(self).__name__, **vars(self)}


@dataclass(frozen=True)
class FileSource(Source):
    """A workload file, by a name such as `model.py` or `model.py:small`.

    Attributes:
        overrides: Values in place of constants at its top level (see `sources.overrides`).

    >>> source = FileSource("model.py:small")
    >>> source.file, source.variable, source.at("nets/model.py").name
    ('model.py', 'small', 'nets/model.py:small')
    >>> FileSource("C:/model.py").variable, FileSource("model.py:").variable
    (None, '')
    """

    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)

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
        return FileSource(str(file) if self.variable is None else f"{file}:{self.variable}", self.overrides)

    @property
    def text(self) -> str:
        """The text of the file, with the overrides in place."""
        return replace_constants(self._content, self.overrides, Path(self.file).name)

    def check_overrides(self) -> None:
        """Raise UsageError for an override that cannot be set; a file that cannot be read is for `load` to tell of."""
        with suppress(OSError, SyntaxError, ValueError):
            _ = self.text

    @property
    def constants(self) -> dict[str, Constant]:
        """What can be set in it, by name.

        Raises:
            WorkloadError: The file cannot be read, or is not Python.
        """
        try:
            constants = find_constants(self._content, self.file)
        except (OSError, SyntaxError, ValueError) as error:
            raise WorkloadError(f"{self.name} cannot be read ({first_line(error)})", hint="check the file") from None
        return {name: constant for name, constant in constants.items() if constant is not None}

    @property
    def encoded_text(self) -> bytes:
        """The text in the encoding that the file declares."""
        with tokenize.open(Path(self.file).expanduser()) as file:
            return self.text.encode(file.encoding, "backslashreplace")

    @property
    def _content(self) -> str:
        with tokenize.open(Path(self.file).expanduser()) as file:
            return file.read()

    def load(self) -> Workload:
        """Import the file; see `loading.load_workload`."""
        from autoaccum.sources.loading import load_workload

        workload = load_workload(self.file, self.variable, self.overrides)
        return dataclasses.replace(workload, digest=self.at(workload.path or self.file).digest)

    @property
    def digest(self) -> str:
        """SHA-256 of the file and all modules it imports from its directory or package, transitively, and overrides.

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
        for name, value in sorted(self.overrides.items()):
            digest.update(f"{name}\0{value}\n".encode())
        return digest.hexdigest()


_MODELS: Final = Path(__file__).parents[1] / "models"
_LIBRARIES: Final = {
    "hf": "pip install transformers, with peft for lora and bitsandbytes for 4-bit or 8-bit weights",
    "timm": "pip install timm",
    "torchvision": "pip install torchvision",
}
"""The prefixes of models by name, for each of which we have a file `PREFIX_model.py`, and how to get its library."""


@dataclass(frozen=True)
class NamedSource(FileSource):
    """A model by name, such as `hf:Qwen/Qwen2.5-7B`: a workload file of ours, with an override of its constant `name`.

    >>> source = find_source("timm:resnet50", {"image_size": 160})
    >>> Path(source.file).name, source.overrides
    ('timm_model.py', {'name': 'resnet50', 'image_size': 160})
    """

    @property
    def file(self) -> str:
        """The path of our file."""
        return str(_MODELS / f"{self.name.partition(':')[0]}_model.py")

    @property
    def variable(self) -> None:
        """None: the file as a whole is the workload."""

    @property
    def text(self) -> str:
        """The text of our file, with the overrides in place."""
        return replace_constants(self._content, self.overrides, self.name)

    @property
    def constants(self) -> dict[str, Constant]:
        """Its parameters: the constants in lower case, without the name of the model."""
        return {name: known for name, known in super().constants.items() if name.islower() and name != "name"}

    def check_overrides(self) -> None:
        """Also raise UsageError for a negative number, or for 0 where the default is above 0."""
        super().check_overrides()
        for name, parameter in self.constants.items():
            default = parameter.value
            if name in self.overrides and isinstance(default, int | float) and not isinstance(default, bool):
                value = parameter.convert(self.overrides[name], self.name)
                if value < 0 or value == 0 < default:
                    hint = f"give a number above 0, such as {default}" if default else "give 0 or more"
                    raise UsageError(f"{name} of {self.name} is {value}", hint=hint)

    def load(self) -> Workload:
        """Import our file with the overrides in place.

        Raises:
            UsageError: It has no such parameter.
            WorkloadError: The library is not installed, or has no such model, or no configuration of it can be read.
        """
        self.check_overrides()  # By the name of the model, not by that of our file.
        try:
            workload = super().load()
        except WorkloadError as error:
            cause = error.__cause__
            if isinstance(cause, ImportError):
                way_out = _LIBRARIES[self.name.partition(":")[0]]
                raise WorkloadError(f"{self.name} cannot be built ({first_line(cause)})", hint=way_out) from None
            if isinstance(cause, ValueError | OSError):  # What our files raise on purpose.
                raise WorkloadError(f"{self.name}: {first_line(cause)}") from None
            raise
        return dataclasses.replace(workload, name=self.name)


def find_source(reference: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> FileSource:
    """Return the source of a file or of a model by name.

    Raises:
        UsageError: `name` is among the overrides of a model by name.

    >>> type(find_source("model.py")).__name__, type(find_source("hf:gpt2")).__name__
    ('FileSource', 'NamedSource')
    """
    name = os.fspath(reference)
    prefix, colon, model = name.partition(":")
    if not (prefix in _LIBRARIES and colon and model):
        return FileSource(name, dict(overrides or {}))
    if "name" in (overrides or {}):
        raise UsageError(f"name cannot be set (--set): {name} has it", hint="plan the model of the other name")
    return NamedSource(name, {"name": model, **(overrides or {})})


@dataclass(frozen=True)
class PickledSource(Source):
    """Objects made in code, which `devices.child.pickling.pack` wrote to a file."""

    file: str

    def load(self) -> Workload:
        """Return the workload without its data; a model that was an instance is built by each call of it."""
        workload: Workload = pickle.loads(Path(self.file).read_bytes())
        return workload


_KINDS = {kind.__name__: kind for kind in (FileSource, NamedSource, PickledSource)}


def read_source(record: Mapping[str, Any]) -> Source:
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
