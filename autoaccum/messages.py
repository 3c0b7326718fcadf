"""Messages: what autoaccum has to say beside its errors, as a code and facts until somebody reads it.

Code that decides, tests and `--json` take the code and the facts; `str(message)` is the sentence of that code in
`sentences.SENTENCES`. A new message is an entry there, and an example of its facts in `tests/test_messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoaccum.sentences import SENTENCES, fill


@dataclass(frozen=True)
class Message:
    """A warning, a note or a finding.

    Attributes:
        code: What it says; a key of `SENTENCES`.
        facts: What it says that of: by name, JSON values, or a message that stands within the sentence.
    """

    code: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, fact in self.facts.items():  # A message in a message, as JSON has it.
            if (
                isinstance(fact, Mapping)
                and isinstance(fact.get("code"), str)
                and isinstance(fact.get("facts"), Mapping)
            ):
                nested = Message(fact["code"], fact["facts"])
                object.__setattr__(self, "facts", {**self.facts, name: nested})

    def __str__(self) -> str:
        try:
            return fill(SENTENCES[self.code], self.facts)
        except (KeyError, TypeError, ValueError):  # Of another version of autoaccum.
            return f"{self.code}: {dict(self.facts)}"

    def __hash__(self) -> int:
        return hash((self.code, str(self)))


def message(code: str, /, **facts: Any) -> Message:
    """Return the message with this code and these facts.

    >>> print(message("random_memory"))
    random numbers decide what runs (skipped layers, for example): an update that skips less than the trials did takes \
more memory
    """
    assert code in SENTENCES, code
    return Message(code, facts)
