"""autoaccum beside Lightning's BatchSizeFinder and accelerate's find_executable_batch_size, on the CPU.

    pip install -e ".[bench]"
    python tests/benchmarks/peers.py

Every contender gets the same models, the same budget of memory, the same target batch and a process of its own, with
the same settings of malloc and threads. It is held to its budget as autoaccum's trials are: RLIMIT_DATA at VmData
after a warm-up, plus the budget. `trials` are the sizes it tried. `seconds until known` is what a user waits from the
start of Python on, imports included: for autoaccum until `autoaccum.plan` returns, with the start of all its own
processes, for Lightning until `scale_batch_size` returns, for accelerate until the first of its attempts, which are
training runs, has made its updates. `trains`: whether that size then makes the updates in
a fresh process under the same limit, accumulating to the target as each one's documentation has it. `samples per
update` is counted by hooks on model and optimizer.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from contenders.launch import BENCHMARKS, compete
from contenders.records import Result, Task
from contenders.table import NAMES, describe_ceilings, format_table, verdicts

from autoaccum.units import MIB, format_bytes, parse_size

MODELS = {"conv_net": 192 * MIB, "transformer": 192 * MIB}
"""The budget of each: a little less than half of the target batch fits."""

TARGET, UPDATES = 80, 20
NEEDED = {"by_lightning": "lightning", "by_accelerate": "accelerate"}


def main() -> None:
    """Run everything, and print the table."""
    options = parse_options()
    missing = [package for package in NEEDED.values() if find_spec(package) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed: pip install -e '.[bench]'", file=sys.stderr)
        sys.exit(2)
    results: list[Result] = []
    for model in options.model or MODELS:
        for contender in NAMES:
            print(f"{model}: {NAMES[contender]} …", file=sys.stderr)
            results.append(compete(make_task(contender, model, options), model))
    if options.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return
    print(f"`python {shlex.join(sys.argv)}`", end="\n\n")
    print(format_table(results), end="\n\n")
    for sentence in [*describe_conditions(results), *describe_ceilings(results), *verdicts(results)]:
        print(f"- {sentence}")


def parse_options() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="one of them only; may be repeated")
    parser.add_argument("--budget", type=parse_size, help="memory, such as 256MiB (default: one for each model)")
    parser.add_argument("--target", type=int, default=TARGET, help=f"samples per update (default: {TARGET})")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"of a training run (default: {UPDATES})")
    parser.add_argument("--json", action="store_true", help="everything that was measured, instead of the table")
    return parser.parse_args()


def make_task(contender: str, model: str, options: argparse.Namespace) -> Task:
    """The same for all contenders, but for their name."""
    budget = MODELS[model] if options.budget is None else options.budget.resolve(0)
    return Task(
        contender=contender,
        deed="search",
        workload=str(BENCHMARKS / "models" / f"{model}.py"),
        budget_bytes=budget,
        target=options.target,
        updates=options.updates,
    )


def describe_conditions(results: list[Result]) -> list[str]:
    """What the numbers hold for."""
    first = results[0]
    threads = {result.search.threads for result in results if result.search.threads is not None}
    budgets = dict.fromkeys(f"{result.model} {format_bytes(result.budget_bytes)}" for result in results)
    training = [result for result in results if result.search.useful_seconds]
    return [
        f"target batch {first.target}, budget {', '.join(budgets)}; torch {version('torch')}, Python "
        f"{platform.python_version()}, threads {', '.join(map(str, sorted(threads)))}",
        *(
            f"{result.model}: {result.search.useful_seconds:.1f} s of {NAMES[result.contender]}'s time are the "
            f"{result.updates} updates of its last attempt, which are training already"
            for result in training
        ),
    ]


if __name__ == "__main__":
    main()
