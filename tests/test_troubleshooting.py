"""The page that is headed by messages quotes what autoaccum says, and what PyTorch says when memory runs out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from autoaccum.accumulation.out_of_memory import find_out_of_memory, is_context_dead

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "examples" / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """A string as it reads; names in capitals, which are placeholders of commands, stay in braces."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        name = ast.unparse(node.value)
        return f"{{{name.lower()}}}" if name.isupper() else "\0"
    return str(node.value) if isinstance(node, ast.Constant) else ""


@pytest.fixture(scope="module")
def said() -> str:
    """All strings of the sources and all sentences, a line each."""
    nodes = (node for path in ROOT.glob("autoaccum/**/*.py") for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    texts = (text_of(node).replace("\n", " ") for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant))
    return "\n".join([*texts, (ROOT / "tests" / "sentences.txt").read_text(encoding="utf-8")])


def test_it_answers_what_users_meet_most() -> None:
    assert len(QUOTED) >= 25
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_it_quotes_is_said(quoted: str, said: str) -> None:
    error = RuntimeError(quoted)
    pattern = ".*".join(re.escape(part.strip()) for part in quoted.split("..."))
    assert find_out_of_memory(error) or is_context_dead(error) or re.search(pattern, said)
