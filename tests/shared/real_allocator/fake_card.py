"""PyTorch's CUDA build on a fake card: its own code runs with the real allocator, but no kernel runs.

`PYTHONPATH=.:tests/shared python tests/shared/real_allocator/fake_card.py SITE_PACKAGES FOLDER` builds it (with g++ and
CUDA's headers, in CUDA_INCLUDE, else /usr/local/cuda/include) and prints the environment in which that torch finds the
card. Without cuDNN, `python -m tests.gpu.measure --only constants` then runs as on a card and shows what PyTorch's
sources decide: reductions, attention, embeddings, sorting, workspaces. It does not show what libraries and drivers
decide, nor how much memory a real card has free, so that nothing of it belongs into `tests/gpu/data`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CARDS = {
    "H100": {"TOTAL": 85_000_000_000, "CAPABILITY": 90, "PROCESSORS": 132, "THREADS": 2048, "SHARED_KIB": 227},
    "RTX 3090": {"TOTAL": 25_300_000_000, "CAPABILITY": 86, "PROCESSORS": 82, "THREADS": 1536, "SHARED_KIB": 99},
}


def build(site_packages: Path, folder: Path) -> None:
    """Build the libraries with all symbols that PyTorch needs; those without a definition here do nothing."""
    runtime, driver, cublas = folder / "runtime.o", folder / "driver.o", folder / "cublas.o"
    includes = include_flags(site_packages)
    run("g++", "-O1", "-fPIC", "-c", "-w", *includes, HERE / "fake_card.cpp", "-o", runtime)
    for name, made in (("driver", driver), ("cublas", cublas)):
        run("gcc", "-O1", "-fPIC", "-c", "-w", HERE / f"fake_{name}.c", "-o", made)
    run("gcc", "-shared", driver, "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1")
    own = {"cudart": runtime, "cublas": cublas, "cublasLt": cublas}
    for name, made in own.items():
        link(f"lib{name}.so.13", made, site_packages, folder)


def include_flags(site_packages: Path) -> list[str]:
    """Return the compiler flags for CUDA's headers."""
    installed = os.environ.get("CUDA_INCLUDE", "/usr/local/cuda/include")
    return [f"-I{site_packages}/nvidia/cu13/include", f"-I{installed}"]


def link(library: str, made: Path, site_packages: Path, folder: Path) -> None:
    """Link a shared library of an object and of what else PyTorch wants of that library, which does nothing."""
    users = [*site_packages.glob("torch/lib/*.so"), *site_packages.glob("nvidia/*/lib/*.so*")]
    wanted = {name for user in users for name in _symbols("--undefined-only", user, rf"(\w+)@{re.escape(library)}")}
    missing = sorted(wanted - set(_symbols("--defined-only", made, r" [TtBbDdVvW] (\w+)")))
    rest, versions = folder / f"{library}.c", folder / f"{library}.versions"
    rest.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in missing))
    versions.write_text(f"{library} {{ *; }};\n")
    named = (f"-Wl,-soname,{library}", f"-Wl,--version-script={versions}")
    run("gcc", "-fPIC", "-w", "-c", rest, "-o", rest.with_suffix(".o"))
    run("g++", "-shared", made, rest.with_suffix(".o"), "-o", folder / library, *named)


def _symbols(which: str, library: Path, pattern: str) -> list[str]:
    dynamic = () if library.suffix == ".o" else ("-D",)
    return re.findall(pattern, run("nm", *dynamic, which, library))


def environment(folder: Path, card: str) -> str:
    """Return the environment variables with which torch finds the card, for a shell."""
    preload = ":".join(f"{folder}/lib{name}.so.13" for name in ("cudart", "cublas", "cublasLt"))
    properties = " ".join(f"STUB_{name}={value}" for name, value in CARDS[card].items())
    return f"LD_LIBRARY_PATH={folder} LD_PRELOAD={preload} {properties}"


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Build the libraries, and print how to use them."""
    site_packages, folder = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(site_packages, folder)
    for card in CARDS:
        print(f"{card}: {environment(folder, card)}")


if __name__ == "__main__":
    main()
