"""The table of what trains on which card, and its place in a file."""

from __future__ import annotations

import re
import shlex
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from small_locks import a_case, a_lock, a_measurement

from autoaccum.errors import UsageError
from autoaccum.reporting.lock_table import lock_table, write_lock_table
from autoaccum.units import GIB

PLACE = "<!-- autoaccum -->\n<!-- /autoaccum -->"


def test_rows_are_what_is_trained_and_columns_cards_by_their_memory() -> None:
    command = "-- python train.py --bs={micro_batch}"
    lock = {
        a_case(gpu="t4"): a_measurement(limit_bytes=15 * GIB, largest=100, micro_batches=(86, 85, 85)),
        a_case(gpu="a100-80gb"): a_measurement(limit_bytes=79 * GIB, largest=1024, micro_batches=(1024,)),
        a_case(gpu="t4", precision="bf16"): a_measurement(limit_bytes=9, environment={"torch": "2.14.1"}),
        a_case(command, gpu="rtx3090", target_batch=None, micro_batch=8): a_measurement(largest=8),
    }
    assert lock_table(lock).splitlines() == [
        "| Training | t4 | rtx3090 | a100-80gb |",
        "| --- | --: | --: | --: |",
        "| `train.py --micro-batch 8` |  | 8 |  |",
        "| `train.py --target-batch 256` | 100 (3) |  | 1,024 (1) |",
        "| `train.py --target-batch 256 --precision bf16` | 32 (8) |  |  |",
        "",
        "The largest micro-batch that fits, with the number of micro-batches per update in parentheses, as predicted by"
        " `autoaccum guard` with torch 2.13.0 and 2.14.1.",
    ]


def test_commands_are_told_apart_by_the_arguments_that_differ() -> None:
    words = "-- torchrun --nproc-per-node {} train.py --batch-size={{micro_batch}} --data /data/of/text --size {}"
    commands = [
        words.format(2, "large"),
        words.format(2, "small"),
        words.format(4, "small"),
        "-- python -m my.train {x}",
        *(f"-- python mixed.py --bs={{micro_batch}}{amp}" for amp in ("", " --amp")),
        *(f"-- python size.py {sizes}" for sizes in ("2 64", "64 2")),
        *(f"-- python wide.py --width {width} --depth {depth}" for width, depth in ((2, 64), (64, 2))),
    ]
    labels = re.findall(r"^\| `(.*)`", lock_table({a_case(name): a_measurement() for name in commands}), re.MULTILINE)
    assert labels == [
        "my.train --target-batch 256",
        "mixed.py --target-batch 256",
        "mixed.py --amp --target-batch 256",
        "--target-batch 256 -- python size.py 2 64",
        "--target-batch 256 -- python size.py 64 2",
        "wide.py --width 2 --depth 64 --target-batch 256",
        "wide.py --width 64 --depth 2 --target-batch 256",
        "--nproc-per-node 2 train.py --size large --target-batch 256",
        "--nproc-per-node 2 train.py --size small --target-batch 256",
        "--nproc-per-node 4 train.py --size small --target-batch 256",
    ]


@pytest.mark.parametrize("name", ["a|b.py", "a`b|c.py", "`a`.py", "*a*.py:b", "<b>.py", "a\nb.py"])
def test_a_name_is_no_markup(name: str) -> None:
    html = str(MarkdownIt("commonmark").enable("table").render(lock_table(a_lock(a_case(name)))))
    (cell,) = re.findall(r"<td><code>(.*?)</code></td>\n<td[^>]*>32 \(8\)</td>", html)
    assert unescape(cell).startswith(shlex.quote(name).replace("\n", " ")), html


@pytest.mark.parametrize(
    ("before", "after", "newline"), [("", "", "\n"), ("# Mine\n\n", "\nmore", "\n"), ("", "\r\nmore", "\r\n")]
)
def test_only_the_region_changes_and_only_once(tmp_path: Path, before: str, after: str, newline: str) -> None:
    file = tmp_path / "README.md"
    file.write_bytes(f"{before}{PLACE}{after}".encode())
    assert write_lock_table(file, a_lock())
    first = file.read_bytes()
    table = lock_table(a_lock()).replace("\n", newline)
    region = f"<!-- autoaccum -->{2 * newline}{table}{2 * newline}<!-- /autoaccum -->"
    assert first.decode() == f"{before}{region}{after}"
    assert not write_lock_table(file, a_lock())
    assert file.read_bytes() == first
    assert write_lock_table(file, a_lock(a_case(gpu="t4")))
    assert write_lock_table(file, a_lock())
    assert file.read_bytes() == first


@pytest.mark.parametrize(
    "content",
    [b"", b"<!-- autoaccum -->", b"<!-- /autoaccum --><!-- autoaccum -->", 2 * PLACE.encode()],
    ids=["no markers", "no end", "reversed", "twice"],
)
def test_a_file_without_a_place_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "README.md"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="write <!-- autoaccum --> and <!-- /autoaccum --> around it"):
        write_lock_table(file, a_lock())
    assert file.read_bytes() == content


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"\xff")
    for name in ("image.png", "nowhere/README.md"):
        with pytest.raises(UsageError, match=f"{name} cannot be read"):
            write_lock_table(tmp_path / name, a_lock())
