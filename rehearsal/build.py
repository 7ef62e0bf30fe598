"""Builds the stand-ins with the system's compiler, against the headers of the CUDA build of torch that runs this script."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE / "build"
SITE = Path(sysconfig.get_paths()["purelib"])

C = ["gcc", "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fPIC", "-shared"]


def headers() -> list[Path]:
    """The folders of CUDA's, NCCL's and torch's headers."""
    found = [*SITE.glob("nvidia/cu1*/include"), SITE / "nvidia/nccl/include"]
    if len(found) != 2 or not (found[0] / "crt/host_defines.h").exists():
        version = metadata.version("nvidia-cuda-runtime")
        raise SystemExit(
            f"{sys.executable} needs a CUDA 13 build of torch and nvidia-cuda-crt (the runtime is {version}): "
            "use `make rehearsal`, or install them"
        )
    return found


def library(name: str, sources: list[str], *options: str) -> list[str]:
    """The command that links one stand-in under the name that torch's libraries load."""
    includes = [f"-I{path}" for path in headers()]
    return [*C, *includes, f"-Wl,-soname,{name}", "-o", str(BUILD / name), *(str(HERE / each) for each in sources), *options]


def main() -> None:
    start = time.monotonic()
    BUILD.mkdir(exist_ok=True)
    runtime = str(BUILD / "libcudart.so.13")
    torch = SITE / "torch"
    sources = ["cudart.c", "streams.c", "memory.c", "sanitizer.c", "trace.c", "driver.c"]
    includes = [torch / "include", torch / "include/torch/csrc/api/include", *headers(), sysconfig.get_paths()["include"]]
    linked = ["c10", "c10_cuda", "torch_cpu", "torch_cuda", "torch_python"]
    commands = [
        library("libcudart.so.13", sources, f"-Wl,--version-script={HERE / 'libcudart.map'}", "-lpthread"),
        library("libcuda.so.1", ["cuda.c", "cuda_rest.c"]),
        library("libnccl.so.2", ["nccl.c"], f"-Wl,--version-script={HERE / 'libnccl.map'}", runtime, "-lpthread"),
        ["g++", "-std=c++17", "-O1", "-Wall", "-fPIC", "-shared", *(f"-I{path}" for path in includes)]
        + ["-o", str(BUILD / "operators.so"), str(HERE / "operators.cpp"), f"-L{torch / 'lib'}"]
        + [*(f"-l{name}" for name in linked), runtime],
    ]
    newest = max(path.stat().st_mtime for path in HERE.glob("*.h"))
    for command in commands:
        target = Path(command[command.index("-o") + 1])
        sources_of = [Path(each) for each in command if each.endswith((".c", ".cpp"))]
        if not target.exists() or target.stat().st_mtime < max([newest, *(each.stat().st_mtime for each in sources_of)]):
            subprocess.run(command, check=True)
    # torch imports what the installed packages name as its backends. The folder is on the path in a rehearsal only.
    package = BUILD / "rehearsal.egg-info"
    package.mkdir(exist_ok=True)
    (package / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: rehearsal\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\nrehearsal = rehearsal.operators:install\n")
    print(f"built {BUILD} in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
