"""Compile the native decoder into `src/deepenough/decoding/_native.so`.

    python native/build.py [--sanitize TARGET]

With `--sanitize`, a build that stops at reads and writes out of bounds and at undefined behaviour.

Kernels are compiled once for every instruction set, everything else for the oldest CPU, so that one
file serves all; which kernels are used is decided when it is loaded.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE.parent / "src" / "deepenough" / "decoding" / "_native.so"
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-Wno-unknown-pragmas"),
]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
KERNELS = {"avx2": AVX2, "avx512": AVX512, "avx512vnni": [*AVX512, "-mavx512vnni"]}
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]


def compiler() -> str | None:
    """Return the C++ compiler, `$CXX` first."""
    given = os.environ.get("CXX")
    return next(
        filter(None, map(shutil.which, filter(None, (given, "c++", "g++", "clang++")))), None
    )


def build(target: Path = TARGET, sanitize: bool = False) -> bool:
    """Compile and link; return whether there is a compiler."""
    command = compiler()
    if command is None:
        return False
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = {name: [] for name in ("api", "matrix", "model", "threads", "kernels_portable")}
    if is_x86:
        sources |= {f"kernels_{name}": flags for name, flags in KERNELS.items()}
    flags = FLAGS + (SANITIZE if sanitize else [])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(folder) / f"{name}.o") for name in sources]

        def compile_one(pair: tuple[str, str]) -> None:
            name, out = pair
            source = str(HERE / f"{name}.cpp")
            subprocess.run([command, *flags, *sources[name], "-c", source, "-o", out], check=True)

        list(pool.map(compile_one, zip(sources, objects, strict=True)))
        linked = Path(folder) / "library.so"
        link = [command, "-shared", *(SANITIZE if sanitize else []), "-o", str(linked), *objects]
        subprocess.run([*link, "-lpthread"], check=True)
        shutil.move(linked, target)
    return True


if __name__ == "__main__":
    sanitizes = sys.argv[1:2] == ["--sanitize"]
    target = Path(sys.argv[2]) if sanitizes else TARGET
    if not build(target, sanitizes):
        sys.exit("No C++ compiler was found: install g++ or clang++, or set CXX.")
    print(target)
