"""Asks the allocator of an installed CUDA build of torch, without a card, and prints what it did.

`python tests/shared/real_allocator/record.py SITE_PACKAGES` wants g++ and the headers of CUDA (CUDA_INCLUDE, else
/usr/local/cuda/include). It gives the table in tests/devices/simulated/allocator/test_real_allocator.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from allocator_requests import CAPACITIES, CASES, make_requests

HERE = Path(__file__).parent
ANY_NUMBER = 1 << 50


def build(site_packages: Path, folder: Path, program: str = "ask") -> None:
    """Compile a runtime that is not there, and the program that asks, or another one beside it."""
    torch = site_packages / "torch"
    includes = include_flags(site_packages)
    _run("g++", "-O1", "-fPIC", "-c", "-w", *includes, HERE / "cuda_runtime.cpp", "-o", folder / "runtime.o")
    wanted = _run("nm", "-D", "--undefined-only", torch / "lib/libc10_cuda.so")
    present = set(_run("nm", "--defined-only", folder / "runtime.o").split())
    missing = sorted(set(re.findall(r"\b(cuda\w+)@libcudart", wanted)) - present)
    (folder / "rest.c").write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    (folder / "versions").write_text("libcudart.so.13 { *; };\n")
    _run("gcc", "-fPIC", "-c", folder / "rest.c", "-o", folder / "rest.o")
    library = folder / "libcudart.so.13"
    linked = (folder / "runtime.o", folder / "rest.o")
    named = ("-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={folder}/versions")
    _run("g++", "-shared", *linked, "-o", library, *named)
    libraries = (f"-L{torch}/lib", "-lc10", "-lc10_cuda", library, f"-Wl,-rpath,{torch}/lib")
    source = HERE / f"{program}.cpp"
    flags = ("-O1", "-std=c++20", "-w", f"-I{torch}/include", *includes)
    _run("g++", *flags, source, "-o", folder / program, *libraries)


def include_flags(site_packages: Path) -> list[str]:
    """Where the compiler finds CUDA's headers."""
    return [
        f"-I{site_packages}/nvidia/cu13/include",
        f"-I{os.environ.get('CUDA_INCLUDE', '/usr/local/cuda/include')}",
    ]


def ask(folder: Path, text: str, capacity: int | None, total: int, seed: int) -> str:
    """The statistics after every request, a line each."""
    requests = "".join(f"{'f' if size is None else 'm'} {block} {size or 0}\n" for block, size in make_requests(seed))
    environment = {"LD_PRELOAD": f"{folder}/libcudart.so.13", "STUB_TOTAL": str(total)}
    environment |= {"STUB_CAP": str(capacity or ANY_NUMBER), "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run([folder / "ask"], input=requests, capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print, case by case and capacity by capacity, the last line and a digest of all."""
    with tempfile.TemporaryDirectory() as name:
        build(Path(sys.argv[1]), Path(name))
        for text, number in CASES.items():
            print(f"    {text!r}: (")
            for index, (capacity, total) in enumerate(CAPACITIES):
                lines = ask(Path(name), text, capacity, total, 10 * number + index)
                last = tuple(map(int, lines.splitlines()[-1].split()))
                print(f'        ({last}, "{hashlib.sha256(lines.encode()).hexdigest()[:16]}"),')
            print("    ),")


if __name__ == "__main__":
    main()
