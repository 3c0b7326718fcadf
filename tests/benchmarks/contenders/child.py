"""`python -m contenders.child ANSWER TASK`: does one task and writes its answer to a file."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from contenders.records import Task, write_answer


def main(answer: str, task: str) -> None:
    """Call the deed."""
    asked = Task(**json.loads(task))
    contender = importlib.import_module(f"contenders.{asked.contender}")
    write_answer(Path(answer), getattr(contender, asked.deed)(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
