"""Measure a training script on a CUDA card: this one file, Python 3.10 and PyTorch 2.1 are enough.

    python measured_run.py [OPTIONS] train.py --batch-size 8 ...
    python measured_run.py [OPTIONS] -m package.train ...
    torchrun --nproc-per-node 2 measured_run.py [OPTIONS] train.py ...

The script runs as it is until its third update (optimizer step), and is then ended. What its memory did is written to
measured_run.json. Predictions are compared with such files: `python tests/benchmarks/accuracy.py FOLDER` in autoaccum.

The file holds the card's name, versions, the command line, and the sizes of what PyTorch's allocator was asked for. It
holds no data, no addresses, no lines of code, and the text of the script only with --include-script.

Exit codes:
  0  measured
  1  CUDA ran out of memory; that is written, too
  2  wrong usage, or there is no CUDA card
  3  not measured: the script failed, or made too few updates on the card

The file is a JSON object. All sizes are in bytes, those of the allocator as PyTorch counts them:
  schema, kind      1, "measured_run"
  outcome           "ok", or "oom": then the last of the updates was not finished
  oom               null, or the "phase" in which memory ran out, and the error's "message"
  command, module   the words after the options, *** for secrets, and whether they are those after -m
  script            the text of the script, or null
  micro_batch, iter_size   as given: samples per micro-batch, micro-batches per update; or null
  world_size        the number of ranks; the file is of the first
  optimizer         the class of the optimizer that made the last step
  card              "name", "total_bytes", "capability", "multiprocessors"; "driver", its version, and
                    "in_use_before_bytes", both by nvidia-smi before the script began, or null; "cards_used" by it
  versions          "python", "system", "torch", "cuda", "cudnn"
  libraries         versions of the installed libraries that the script imported
  environment       variables that the allocator or the libraries of CUDA read
  allocator         its "backend", and its "settings" as it names them itself
  updates           for each, from the end of the one before, and for the first from the start of the process:
                    "peak_allocated_bytes", "peak_reserved_bytes"; "phases", the peak of allocated bytes in forward,
                    backward, and update, which is all after the last backward pass; "backwards", the number of these;
                    "alloc_retries", "ooms"; and at its end "allocated_bytes", "reserved_bytes", and "in_use_bytes",
                    all that is in use on the card, with other processes
  history           the last update: base64 of xz of a JSON object; null without one or xz, or if longer than 200 KB:
    segments        at its start, by address: [pool, blocks]; a block in use has its size, a free one minus its size
    events          in order. Blocks are numbered: those in use at the start, then each new one. A size is a request for
                    a new block; -n gives the block back that is n numbers before the next new one
    segment_events  [position, size]: before that event a segment was reserved, or, with minus, given back
"""

from __future__ import annotations

import argparse
import base64
import builtins
import json
import multiprocessing
import os
import platform
import re
import runpy
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_UNEVEN = 20
"""An optimizer that has made so many times the steps of another waits for it no longer."""
_LONGEST_HISTORY = 200_000
ENVIRONMENT = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_MODULE_LOADING"),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "NVIDIA_TF32_OVERRIDE"),
)
SECRET = "(?i:token|secret|password|api[-_]?key)"
_ELSEWHERE = "run it on the machine with the card; there, devices/measured_run.py is enough"
_OUT_OF_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_SEGMENT_EVENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class MeasuredRun:
    """Counts the updates of this process, and measures them from the import of PyTorch on.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._pid = options, os.getpid()
        self._torch: Any = None
        self._card: int | None = None
        self._cards_before = ask_nvidia_smi()
        self._phase, self._in_backward, self._optimizer = "forward", False, ""
        self._steps: Counter[int] = Counter()
        self._updates: list[dict[str, Any]] = []
        self._counted = (0, 0)
        self._begin_update()

    def begin(self) -> None:
        """Set the hooks; called when the script has imported PyTorch, whose cards are not touched before it does."""
        import torch
        from torch.optim import optimizer

        self._torch, self._script = torch, Path(str(sys.modules["__main__"].__file__)).absolute()
        if torch.version.cuda is None:
            leave(2, f"no CUDA card can be used: PyTorch {torch.__version__} is built without CUDA: {_ELSEWHERE}")
        optimizer.register_optimizer_step_pre_hook(self._before_step)
        optimizer.register_optimizer_step_post_hook(self._after_step)
        self._run_backward, torch.autograd.backward = torch.autograd.backward, self._backward

    def _begin_update(self) -> None:
        self._update: dict[str, Any] = {"peak_allocated_bytes": 0, "peak_reserved_bytes": 0, "phases": {}}
        self._update["backwards"] = 0

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_backward or os.getpid() != self._pid:  # Of checkpointing, within another.
            return self._run_backward(tensors, *args, **kwargs)
        device = (tensors if hasattr(tensors, "device") else tensors[0]).device
        if self._card is None and device.type == "cuda":
            self._card = device.index
        self._end_phase("forward")
        self._in_backward, self._phase = True, "backward"
        try:
            done = self._run_backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        self._end_phase("backward")
        self._update["backwards"] += 1
        self._phase = "forward"
        return done

    def _before_step(self, *_: Any) -> None:
        self._phase = "update"

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        """Count a step; an update ends when all optimizers have made one."""
        self._phase = "forward"
        if os.getpid() != self._pid or skips_step(optimizer):
            return
        self._steps[id(optimizer)] += 1
        if count_updates(self._steps) <= len(self._updates):
            return
        self._optimizer = type(optimizer).__name__
        if self._card is None:
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            self._card = next((weight.device.index for weight in weights if weight.is_cuda), None)
        if self._card is None:
            self._refuse("the script trains on the CPU: let it use the card, by an option of its own")
        self._end_update("update")
        left = self._options.updates - len(self._updates)
        if left == 1 and self._torch.cuda.get_allocator_backend() == "native":
            segments = self._torch.cuda.memory_snapshot()
            self._segments = [segment for segment in segments if segment["device"] == self._card]
            self._torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
        if not left:
            self._finish()

    def _end_phase(self, phase: str) -> None:
        """Add the peaks since the last call to those of a phase."""
        if self._card is None:
            return
        stats, update = self._torch.cuda.memory_stats(self._card), self._update
        allocated, reserved = (stats.get(f"{name}_bytes.all.peak", 0) for name in ("allocated", "reserved"))
        update["phases"][phase] = max(allocated, update["phases"].get(phase, 0))
        update["peak_allocated_bytes"] = max(allocated, update["peak_allocated_bytes"])
        update["peak_reserved_bytes"] = max(reserved, update["peak_reserved_bytes"])
        self._torch.cuda.reset_peak_memory_stats(self._card)

    def _end_update(self, phase: str) -> None:
        self._end_phase(phase)
        stats = self._torch.cuda.memory_stats(self._card)
        free, total = self._torch.cuda.mem_get_info(self._card)
        for name in ("allocated_bytes", "reserved_bytes"):
            self._update[name] = stats.get(f"{name}.all.current", 0)
        counted = stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0)
        retries, ooms = (now - before for now, before in zip(counted, self._counted, strict=True))
        self._updates.append({**self._update, "in_use_bytes": total - free, "alloc_retries": retries, "ooms": ooms})
        self._counted = counted
        self._begin_update()

    def _finish(self, oom: Any = None) -> NoReturn:
        """Write the file, if this is the first rank, and end the process."""
        code, ranks = int(oom is not None), self._torch.distributed
        has_ranks = ranks.is_available() and ranks.is_initialized()
        if has_ranks and ranks.get_rank():
            leave(code)
        record = self._describe(oom, ranks.get_world_size() if has_ranks else 1)
        path, text = self._options.output, json.dumps(record, indent=1)
        partial = path.with_name(f".{path.name}.{self._pid}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
        last, where = self._updates[-1], f"update {len(self._updates)} on {record['card']['name']}"
        peaks = [f"{last[f'peak_{name}_bytes'] / 2**30:.2f} GiB {name}" for name in ("allocated", "reserved")]
        seen = f"{where}: peaks of {' and '.join(peaks)}" + f"; CUDA ran out of memory ({self._phase})" * code
        script = "" if self._options.include_script else ", without the script's text (--include-script)"
        held = f"the card, versions, the command line, sizes of requests for memory{script}"
        leave(code, f"{seen}\nwrote {path} ({len(text) // 1000 + 1} KB): {held}")

    def _describe(self, oom: Any, world_size: int) -> dict[str, Any]:
        torch, asked = self._torch, self._options
        cuda, settings, history = torch.cuda, {}, None
        if oom is None and cuda.get_allocator_backend() == "native":
            snapshot = cuda.memory._snapshot(self._card)
            settings = snapshot.get("allocator_settings", {})
            history = reduce_history(self._segments, snapshot["device_traces"][self._card])
        card = cuda.get_device_properties(self._card)
        uuid, before = str(getattr(card, "uuid", "no uuid")), self._cards_before
        mine = [cells for cells in before if cells[0].endswith(uuid)] or before
        used = mine[0][2] if len(mine) == 1 else ""
        return {
            "schema": 1,
            "kind": "measured_run",
            "outcome": "ok" if oom is None else "oom",
            "oom": oom,
            "command": without_secrets(asked.words),
            "module": asked.module,
            "script": self._script.read_text(encoding="utf-8") if asked.include_script else None,
            "micro_batch": asked.micro_batch,
            "iter_size": asked.iter_size,
            "world_size": world_size,
            "optimizer": self._optimizer,
            "card": {
                "name": card.name,
                "total_bytes": card.total_memory,
                "capability": [card.major, card.minor],
                "multiprocessors": card.multi_processor_count,
                "driver": before[0][1] if before else None,
                "in_use_before_bytes": int(used) << 20 if used.isdigit() else None,
                "cards_used": sum(cuda.memory_reserved(index) > 0 for index in range(cuda.device_count())),
            },
            "versions": {
                "python": platform.python_version(),
                "system": platform.platform(),
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            },
            "libraries": imported_libraries(),
            "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
            "allocator": {"backend": cuda.get_allocator_backend(), "settings": settings},
            "updates": self._updates,
            "history": history,
        }

    def end_by(self, error: BaseException) -> NoReturn:
        """End as the script did, by an exception; by SystemExit where it came to its end."""
        seen = f"{len(self._updates)} of {self._options.updates} updates"
        if isinstance(error, KeyboardInterrupt):
            leave(130, f"interrupted after {seen}, and nothing was written")
        if isinstance(error, SystemExit) and error.code:
            self._refuse(f"the script left with exit status {error.code} after {seen}")
        if isinstance(error, SystemExit):
            hint = "give it more data, or a lower --updates" if self._updates else "name the script that trains itself"
            self._refuse(f"this process ended after {seen}: {hint}")
        if is_out_of_memory(error):
            self._card = self._torch.cuda.current_device() if self._card is None else self._card
            self._end_update(self._phase)
            self._finish({"phase": self._phase, "message": str(error)[:400]})
        shown = traceback.TracebackException.from_exception(error)
        own = (__file__, runpy.__file__, "<frozen runpy>")
        shown.stack = traceback.StackSummary.from_list([frame for frame in shown.stack if frame.filename not in own])
        print("".join(shown.format()), file=sys.stderr)
        self._refuse(f"the script failed after {seen}, and nothing was written")

    def _refuse(self, text: str) -> NoReturn:
        """End for this reason, unless there is no card."""
        torch = self._torch
        if torch is not None and not torch.cuda.is_available():
            leave(2, f"PyTorch {torch.__version__} finds no CUDA card: nvidia-smi should list one; {_ELSEWHERE}")
        leave(3, text)


def skips_step(optimizer: Any) -> bool:
    """Return whether a GradScaler has told an optimizer that skips steps itself, as fused ones do, to skip this one."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def count_updates(steps: Counter[int]) -> int:
    """Return the updates that all optimizers have made, by the steps of each."""
    most = max(steps.values())
    return min(count for count in steps.values() if count * _UNEVEN >= most)


def reduce_history(segments: Iterable[Any], entries: Iterable[Any]) -> str | None:
    """Return `history` of the file, without addresses.

    Args:
        segments: Those at the start, of `torch.cuda.memory_snapshot()`.
        entries: Those of one card in `device_traces` of `torch.cuda.memory._snapshot()`.
    """
    numbers: dict[int, int] = {}
    start, events, segment_events = list[Any](), list[int](), list[list[int]]()
    for segment in sorted(segments, key=lambda segment: segment["address"]):
        address, blocks = segment["address"], []
        for block in segment["blocks"]:
            is_used = block["state"] != "inactive"
            if is_used:
                numbers[address] = len(numbers)
            blocks.append(block["size"] if is_used else -block["size"])
            address += block["size"]
        start.append([segment["segment_type"], blocks])
    count = len(numbers)
    for entry in entries:
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = count
            count += 1
            events.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            events.append(numbers.pop(entry["addr"]) - count)
        elif sign := _SEGMENT_EVENTS.get(entry["action"]):
            segment_events.append([len(events), sign * entry["size"]])
    record = {"segments": start, "events": events, "segment_events": segment_events}
    try:
        import lzma
    except ImportError:  # Some builds of Python lack it.
        return None
    text = base64.b64encode(lzma.compress(json.dumps(record, separators=(",", ":")).encode())).decode()
    return text if len(text) <= _LONGEST_HISTORY else None


def ask_nvidia_smi() -> list[list[str]]:
    """Return the UUID, the driver's version and the MiB in use of each card; nothing without nvidia-smi."""
    query = ("nvidia-smi", "--query-gpu=uuid,driver_version,memory.used", "--format=csv,noheader,nounits")
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [cells for line in lines if len(cells := line.split(", ")) == 3]


def without_secrets(words: Sequence[str]) -> list[str]:
    """Return the words of a command with *** for values of options such as --hub-token, and users of URLs."""
    names = ["", *(word if word.startswith("-") else "" for word in words)]
    shown = [re.sub(rf"^(.*{SECRET})=.*", r"\1=***", word, flags=re.DOTALL) for word in words]
    shown = [re.sub(r"://[^/@\s]+@", "://***@", word) for word in shown]
    return ["***" if re.search(f"{SECRET}$", name) else word for name, word in zip(names, shown, strict=False)]


def imported_libraries() -> dict[str, str]:
    """Return the versions of what was imported from the folders of installed packages."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        version, file = (getattr(module, "__dict__", {}).get(key) for key in ("__version__", "__file__"))
        if "." not in name and isinstance(version, str) and "-packages" in str(file):
            found[name] = version
    return found


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one that it came from, says that the card has no memory left."""
    while error is not None:
        if any(text in str(error) for text in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def leave(code: int, text: str = "") -> NoReturn:
    """End this process and its workers at once: the script is not to save anything on its way out."""
    if text:
        # The script may have left a bar of its progress in the last line.
        print(f"error: {text}" if code > 1 else f"\n{text}", file=sys.stderr if code > 1 else sys.stdout)
    for child in multiprocessing.active_children():
        child.terminate()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def call_after_torch(function: Callable[[], None]) -> None:
    """Call a function once PyTorch has been imported as a whole."""
    load = builtins.__import__

    def load_and_call(*args: Any, **kwargs: Any) -> Any:
        module = load(*args, **kwargs)
        torch: Any = sys.modules.get("torch")
        if torch is not None and not torch.__spec__._initializing and builtins.__import__ is load_and_call:
            builtins.__import__ = load
            function()
        return module

    builtins.__import__ = load_and_call


def read_command_line() -> argparse.Namespace:
    """Return the options, with the words of the script in `words`."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, usage="%(prog)s [OPTIONS] SCRIPT ...")
    parser.add_argument("-o", "--output", type=Path, default=Path("measured_run.json"), metavar="FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--updates", type=int, default=3, metavar="N", help="end after N updates, 2 or more (default: 3)"
    )
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples per micro-batch, to be written down")
    parser.add_argument("--iter-size", type=int, metavar="N", help="micro-batches per update, to be written down")
    parser.add_argument("--include-script", action="store_true", help="write the script's text down as well")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="the script and its arguments")
    options = parser.parse_args()
    if options.updates < 2:
        parser.error(
            f"--updates {options.updates} is too few: the first makes the optimizer's state, so give 2 or more"
        )
    if not options.words or not (options.module or Path(options.words[0]).exists()):
        parser.error(f"there is no script {options.words[0]}" if options.words else "no script is given")
    if options.output.exists() and not options.force:
        parser.error(f"{options.output} exists already: add --force, or choose another name (-o FILE)")
    if not options.output.absolute().parent.is_dir():
        parser.error(f"there is no folder for {options.output}: create it first")
    return options


def main() -> NoReturn:
    """Run the script, and end with it."""
    options = read_command_line()
    run = MeasuredRun(options)
    options.output = options.output.absolute()  # The script may change the folder.
    sys.argv[:] = options.words
    sys.path[0] = str(Path.cwd() if options.module else Path(options.words[0]).absolute().parent)
    call_after_torch(run.begin)
    try:
        if options.module:
            runpy.run_module(options.words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(options.words[0], run_name="__main__")
    except BaseException as error:
        run.end_by(error)
    run.end_by(SystemExit())


if __name__ == "__main__":
    main()
