"""A study's events as they come: one line per finished trial, and a live one for the trial that runs."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from autoaccum.reporting.consoles import PlainConsole
from autoaccum.reporting.progress import PlanProgress
from autoaccum.reporting.tune_table import (
    STYLES,
    counted,
    format_loss,
    row_cells,
    setting_words,
    space_words,
)
from autoaccum.tuning.records import Noted, Reported, Row, SearchBegan, Space, StudyOpened, TrialBegan, TrialEnded

_TRIAL = "{:>5}  {:<13}  {:>9}  {:>8}  {}"


class TuneProgress(PlanProgress):
    """Draws the events of a study and of its planner; a console that breaks ends the drawing, not the study.

    Args:
        console: Where to, stderr as a rule.
        quiet: Draw nothing but warnings.
    """

    _space: Space
    _finished = _trials = 0
    _running = ""
    _headed = False

    def __init__(self, console: PlainConsole, *, quiet: bool = False) -> None:
        super().__init__(console, quiet=quiet, outlives_console=True)

    def tell(self, event: Any) -> None:
        """Draw one event."""
        match event:
            case StudyOpened():
                self._open(event)
            case SearchBegan(space, throughput, remembered):
                self._space = space
                how = "was measured for this study before" if remembered else "is measured once for a study"
                self.say(f"throughput {how}: knee at {throughput.knee}, fastest is {throughput.fastest}")
                self.say(f"searching {space_words(space)}")
            case TrialBegan(number, setting):
                again = "" if event.confirms is None else f", trial {event.confirms} again with seed {event.seed}"
                done = f"{self._finished} of {self._trials} are done"
                self._running = f"trial {number}{again}, {done}: {setting_words(setting, self._space)}"
                self.show(f"{self._running} ...")
            case Reported(_, percent, loss):
                self.show(f"{self._running}, loss {format_loss(loss)} after {percent} % ...")
            case TrialEnded(row):
                self._end_run(row)
            case Noted(text):
                self.warn(text)
            case _:
                super().tell(event)

    def _open(self, event: StudyOpened) -> None:
        facts, self._finished, self._trials = event.facts, event.finished, event.trials
        schedule = f" with {facts.schedule}" if facts.schedule else ""
        self.say(
            f"{facts.name}: {facts.model}, {facts.parameters:,} parameters, {facts.precision}, {facts.optimizer} at a"
            f" learning rate of {facts.learning_rate:.3g}{schedule}; on {facts.card or facts.device}; losses on"
            f" {facts.held_out}"
        )
        done = f"; going on after {event.finished} of {counted(event.trials, 'trial')}" if event.finished else ""
        self.say(f"study {event.name} in {event.storage}{done}")

    def _end_run(self, row: Row) -> None:
        if row.confirms is None and not row.lost:
            self._finished += 1
        if not self._headed:
            self._headed = True
            self.say(_TRIAL.format("trial", "outcome", "loss", "time", "with"), "dim")
        line = Text(_TRIAL.format(*row_cells(row, self._space)))
        line.stylize(STYLES[row.state], 7, 20)
        self.say(line)
