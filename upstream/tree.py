"""A copy of the installed torch, made of hard links, with patches of the series. The installed torch must not change."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from build import installed

__all__ = ["patched_tree"]


def patched_tree(folder: Path, patches: Sequence[Path]) -> Path:
    """Make ``folder`` anew with torch and ``patches``, for use in PYTHONPATH.

    Files are linked, or copied if links are impossible (another file system). Files that patches name are always copied, so
    no tool writes through a link to the installed torch. ``git apply``, and Python for compiled files, make new files anyway.
    """
    _, site_packages = installed()
    shutil.rmtree(folder, ignore_errors=True)
    patched = {line[6:].strip() for patch in patches for line in patch.read_text().splitlines() if line.startswith("--- a/")}

    def link(source: str, target: str) -> None:
        if str(Path(source).relative_to(site_packages)) in patched:
            shutil.copy2(source, target)
            return
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    for name in ["torch", "functorch", "torchgen", *(path.name for path in site_packages.glob("torch-*.dist-info"))]:
        if (site_packages / name).is_dir():
            shutil.copytree(site_packages / name, folder / name, copy_function=link)
    for patch in patches:
        apply(patch, folder)
    return folder


def apply(patch: Path, folder: Path, *options: str) -> None:
    """Run ``git apply`` in ``folder``. If git saw a repository around ``folder``, it would resolve the patch's paths there.

    Raises:
        RuntimeError: the patch does not apply.
    """
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
    command = ["git", "apply", "--whitespace=nowarn", *options, str(patch.resolve())]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{patch.name} does not apply to the torch in {folder}:\n{done.stderr}")
