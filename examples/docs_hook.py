"""What the documentation's site takes from the repository while it is built: help texts, and the examples' sources."""

import posixpath
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import click

_EXAMPLES = Path(__file__).parent
_GALLERY = "examples.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill `<!-- help: COMMAND -->` and `<!-- sources -->`, and point links to examples at their sources."""
    gallery = posixpath.relpath(_GALLERY, posixpath.dirname(page.file.src_uri) or ".")
    markdown = re.sub(r"^<!-- help: (\w+) -->$", lambda found: _help(found[1]), markdown, flags=re.MULTILINE)
    markdown = re.sub(r"\]\((?:\.\./)+(\w+)\.(py|yml)\)", rf"]({gallery}#\1\2)", markdown)
    return markdown.replace("<!-- sources -->", _sources())


def _help(name: str) -> str:
    command = import_module(f"autoaccum.cli.{name}").command
    context = click.Context(command, info_name=f"autoaccum {name}", max_content_width=90, terminal_width=90)
    return f"```text\n{command.get_help(context)}\n```"


def _sources() -> str:
    files = sorted([*_EXAMPLES.glob("*.py"), *_EXAMPLES.glob("*_workflow.yml")])
    return "\n".join(
        f"### {path.name}\n\n```{'python' if path.suffix == '.py' else 'yaml'}\n{path.read_text('utf-8')}```\n"
        for path in files
        if path != Path(__file__)
    )
