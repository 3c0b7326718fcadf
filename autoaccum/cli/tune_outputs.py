"""The files that a study leaves behind beside its storage: settled before any trial, written when all is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum.cli.outputs import check_apart
from autoaccum.errors import NotMeasuredError, UsageError

if TYPE_CHECKING:
    from autoaccum.tuning.records import Tuning


class TuneOutputs:
    """What is to be written where.

    Args:
        output: For the plan of the best; None: nowhere, like the other.
        plot: The folder for the pictures.
        force: Overwrite what is there.

    Attributes:
        written: What there is now, by what `print_tuning` calls it.
        unwritten: The file for the plan, where there was no plan for it; None where there was, or none was asked for.
    """

    def __init__(self, output: str | None, plot: str | None, *, force: bool) -> None:
        self._output, self._plot, self._force = output, plot, force
        self.written: dict[str, Path] = {}
        self.unwritten: str | None = None

    def check(self, workload: str, storage: str | None) -> None:
        """Refuse now what could not be written later.

        Args:
            workload: The reference of what is tuned, which is never overwritten.
            storage: As given; neither is the study.

        Raises:
            UsageError: A file is there or cannot be written, one is the workload or the study, the storage is no name
                of one, or matplotlib or Optuna is not installed.
        """
        from autoaccum.planning.files import check_output

        if self._output is not None:
            check_output(self._output, force=self._force, way_out="for the record on stdout, use --json")
            check_apart("-o", self._output, workload)
            _check_beside_study("-o", self._output, storage)
        if self._plot is not None:
            self._check_folder(self._plot, workload, storage)

    def _check_folder(self, plot: str, workload: str, storage: str | None) -> None:
        from autoaccum.planning.files import check_output
        from autoaccum.reporting.pictures.formats import picture_format
        from autoaccum.reporting.pictures.tuning_files import FILES

        if plot in ("", "-"):
            raise UsageError(f"{plot!r} is not the name of a folder", hint="give one: --plot pictures")
        folder = Path(plot)
        check_apart("--plot", plot, workload)
        _check_beside_study("--plot", plot, storage)
        if self._output is not None and Path(self._output).resolve() in (folder.resolve(), *_in(folder, FILES)):
            raise UsageError(f"-o and --plot both name {self._output}", hint="take two names")
        picture_format(str(folder / FILES[0]))
        is_new = _make_folder(folder)
        try:
            for file in FILES:
                check_output(str(folder / file), force=self._force)
        finally:
            if is_new:
                folder.rmdir()

    def write(self, tuning: Tuning) -> None:
        """Write them all, also where one fails: they took their time.

        Raises:
            UsageError: One cannot be written, the first such; `written` has the others.
            NotMeasuredError: There is a best setting without a plan.
        """
        failed: list[Exception] = []
        for write in (self._write_plan, self._write_pictures):
            try:
                write(tuning)
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _write_plan(self, tuning: Tuning) -> None:
        if self._output is None:
            return
        if tuning.best is None:
            self.unwritten = self._output
            return
        if tuning.plan is None:
            raise NotMeasuredError(
                f"{self._output} was not written: the best setting has no plan that was proved",
                hint="plan for it with `autoaccum plan`, and train with `autoaccum fit --learning-rate`",
            )
        tuning.plan.save(self._output, force=self._force)
        self.written["kept"] = Path(self._output)

    def _write_pictures(self, tuning: Tuning) -> None:
        if self._plot is None:
            return
        from autoaccum.planning.files import write_bytes
        from autoaccum.reporting.pictures.formats import cannot_draw

        try:
            from autoaccum.reporting.pictures.tuning_pictures import draw_tuning

            drawn = draw_tuning(tuning)
        except ImportError as error:  # Matplotlib loads parts of itself when it needs them.
            raise cannot_draw(error) from error
        folder = Path(self._plot)
        _make_folder(folder)
        for file, content in drawn.items():
            write_bytes(folder / file, content, force=self._force)
        self.written["pictured"] = folder


def _check_beside_study(option: str, file: str, storage: str | None) -> None:
    """Refuse to write where the study is, or will be."""
    from autoaccum.tuning.studies.addresses import read_address

    study = read_address(storage).path
    if study is not None and Path(file).resolve() == study.resolve():
        raise UsageError(f"{option} names the study itself, {file}", hint="choose another name")


def _make_folder(folder: Path) -> bool:
    """Whether a folder had to be made.

    Raises:
        UsageError: It cannot be.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise UsageError(f"{folder} is a file", hint="give the name of a folder") from None
        return False
    except FileNotFoundError:
        raise UsageError(f"there is no folder {folder.parent} for {folder.name}", hint="create it first") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"the folder {folder} cannot be made ({reason})", hint="choose another place") from None
    return True


def _in(folder: Path, files: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple((folder / file).resolve() for file in files)
