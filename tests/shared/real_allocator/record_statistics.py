"""Run the allocator of an installed CUDA build of torch without a card, and print its statistics.

`PYTHONPATH=tests/shared python tests/shared/real_allocator/record_statistics.py SITE_PACKAGES` prints the table of
tests/simulation/allocator/test_real_allocator.py. It needs what `fake_card.py` needs.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from allocator_requests import CAPACITIES, CASES, STREAMS, make_requests, stream_of
from real_allocator.fake_card import include_flags, link, run

HERE = Path(__file__).parent
LIBRARY = "libcudart.so.13"
ANY_NUMBER = 1 << 50


def build(site_packages: Path, folder: Path) -> None:
    """Compile a fake CUDA runtime and a program that drives the allocator."""
    torch, runtime = site_packages / "torch", folder / "runtime.o"
    flags = ("-O1", "-std=c++20", "-w", *include_flags(site_packages))
    run("g++", *flags, "-fPIC", "-c", HERE / "fake_cuda_runtime.cpp", "-o", runtime)
    link(LIBRARY, runtime, site_packages, folder)
    libraries = (f"-L{torch}/lib", "-lc10", "-lc10_cuda", folder / LIBRARY, f"-Wl,-rpath,{torch}/lib")
    source, program = HERE / "allocator_statistics.cpp", folder / "allocator_statistics"
    run("g++", *flags, f"-I{torch}/include", source, "-o", program, *libraries)


def run_requests(folder: Path, text: str, capacity: int | None, total: int, seed: int, streams: int) -> str:
    """Return the statistics after each request, one line each."""
    requests = "".join(
        f"{'f' if size is None else 'm'} {block} {size or 0} {stream_of(block, streams)}\n"
        for block, size in make_requests(seed)
    )
    environment = {"LD_PRELOAD": f"{folder}/{LIBRARY}", "STUB_TOTAL": str(total)}
    environment |= {"STUB_CAP": str(capacity or ANY_NUMBER), "PYTORCH_CUDA_ALLOC_CONF": text}
    done = subprocess.run(
        [folder / "allocator_statistics"], input=requests, capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout


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
