"""Run the allocator of an installed CUDA build of torch without a card, and print its statistics.

`python tests/shared/real_allocator/record_statistics.py SITE_PACKAGES` needs g++ and the headers of CUDA (in
CUDA_INCLUDE, else /usr/local/cuda/include). It prints the table of
tests/simulation/allocator/test_real_allocator.py.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from allocator_requests import CAPACITIES, CASES, STREAMS, make_requests, stream_of

HERE = Path(__file__).parent
ANY_NUMBER = 1 << 50


def build(site_packages: Path, folder: Path, program: str = "allocator_statistics") -> None:
    """Compile a fake CUDA runtime and a program that drives the allocator."""
    torch = site_packages / "torch"
    includes = include_flags(site_packages)
    _run("g++", "-O1", "-fPIC", "-c", "-w", *includes, HERE / "fake_cuda_runtime.cpp", "-o", folder / "runtime.o")
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
    """Return the compiler flags for CUDA's headers."""
    return [
        f"-I{site_packages}/nvidia/cu13/include",
        f"-I{os.environ.get('CUDA_INCLUDE', '/usr/local/cuda/include')}",
    ]


def run_requests(folder: Path, text: str, capacity: int | None, total: int, seed: int, streams: int) -> str:
    """Return the statistics after each request, one line each."""
    requests = "".join(
        f"{'f' if size is None else 'm'} {block} {size or 0} {stream_of(block, streams)}\n"
        for block, size in make_requests(seed)
    )
    environment = {"LD_PRELOAD": f"{folder}/libcudart.so.13", "STUB_TOTAL": str(total)}
    environment |= {"STUB_CAP": str(capacity or ANY_NUMBER), "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(
        [folder / "allocator_statistics"], input=requests, capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


def _run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print a digest of all lines for each capacity, by case, for one stream and for several."""
    with tempfile.TemporaryDirectory() as name:
        build(Path(sys.argv[1]), Path(name))
        for text, number in CASES.items():
            print(f'    "{text}": (')
            for streams in (1, STREAMS):
                digests = []
                for index, (capacity, total) in enumerate(CAPACITIES):
                    lines = run_requests(Path(name), text, capacity, total, 10 * number + index, streams)
                    digests.append(hashlib.sha256(lines.encode()).hexdigest()[:16])
                print(f'        "{" ".join(digests)}",')
            print("    ),")


if __name__ == "__main__":
    main()
