"""Derive the patch series from the package's sources: ``python upstream/build.py``; ``--check`` tells whether it is stale.

A patch adds files of the package, under torch's names (``series.py``), and edits torch's own files as ``core/`` says. An edit
there is a hunk without line numbers: its lines of context and those that it takes away must stand together in the file
exactly once, so that one text serves every release. Patches are made in a repository of their own with fixed author and
date: the same inputs give the same bytes. What they were made from is written down beside them, so that ``--check`` needs
no torch to find them stale, and makes them again where the torch that they were made against is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from series import ROOT, SERIES, Step, torch_name

PATCHES = ROOT / "upstream/patches"
BUILT_FROM = PATCHES / "built_from.txt"
TESTS = "test/distributed/tensor/ragged"
DOCUMENTS = "docs/source"

_AUTHOR = "torch_ragged contributors"
_DATE = "2026-01-01T00:00:00+0000"
_IDENTITY = {
    **{f"GIT_{who}_NAME": _AUTHOR for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "torch_ragged@users.noreply.github.com" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": _DATE for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


# --- from the package's names to torch's ---------------------------------------------------------------------------


def in_torch(text: str) -> str:
    """The text of one of the package's files, with torch's names for its modules; long imports are broken."""
    text = re.sub(r"\btorch_ragged(?:\.[A-Za-z_]\w*)*", lambda match: _module_and_rest(match[0]), text)
    return re.sub(r"^( *)from (\S+) import ([^(\n]+)$", _broken, text, flags=re.MULTILINE)


def _module_and_rest(name: str) -> str:
    """The longest beginning of a dotted name that is a module of the package, in torch, and what follows it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.is_dir() or path.with_suffix(".py").is_file():
            return ".".join([torch_name(".".join(parts[:length])), *parts[length:]])
    return name


def _broken(match: re.Match[str]) -> str:
    indent, module, names = match.groups()
    names, _, comment = names.partition("  #")
    if len(match[0]) <= 88:
        return match[0]
    lines = [f"{indent}    {name.strip()}," for name in names.split(",")]
    return "\n".join([f"{indent}from {module} import ({comment and '  #' + comment}", *lines, f"{indent})"])


def new_files(step: Step) -> Iterator[tuple[str, str]]:
    """Path in torch's repository and text of each file that a patch adds, but for those that ``core/`` has whole."""
    for path in step.source_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = torch_name(".".join(parts[:-1] if is_package else parts)).replace(".", "/")
        yield name + ("/__init__.py" if is_package else ".py"), in_torch(path.read_text())
    for test in step.tests:
        yield f"{TESTS}/{test}", in_torch((ROOT / "test" / test).read_text())
    for document in step.documents:
        yield f"{DOCUMENTS}/{document}", (ROOT / "upstream" / document).read_text()


# --- edits of torch's own files ------------------------------------------------------------------------------------


def message(step: Step) -> str:
    """The commit message."""
    return step.core.read_text().split("\n--- ")[0].strip() + "\n"


def edits(step: Step) -> list[tuple[str, list[list[str]]]]:
    """Path and hunks, as lists of lines, for each file of torch's that a patch edits, or adds in whole."""
    result = []
    for block in step.core.read_text().split("\n--- ")[1:]:
        path, _, body = block.partition("\n")
        hunks = [hunk.strip("\n").split("\n") for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE) if hunk.strip()]
        result.append((path, hunks))
    return result


def apply_hunk(text: str, hunk: list[str], where: str) -> str:
    """``text`` with one edit.

    Raises:
        ValueError: the lines that it looks for do not stand in the text exactly once.
    """
    old = "\n".join(line[1:] for line in hunk if line[:1] != "+")
    new = "\n".join(line[1:] for line in hunk if line[:1] != "-")
    if not old:
        return text + new + "\n"
    times = f"\n{text}\n".count(f"\n{old}\n")
    if times != 1:
        raise ValueError(f"{where}: these lines stand there {times} times, must be once:\n{old}")
    return f"\n{text}\n".replace(f"\n{old}\n", f"\n{new}\n")[1:-1]


def changed_lines() -> dict[str, dict[str, tuple[int, int]]]:
    """For each patch and each file that torch has: lines added and removed."""
    return {
        step.name: {
            path: tuple(sum(line[:1] == sign for hunk in hunks for line in hunk) for sign in "+-")  # type: ignore[misc]
            for path, hunks in edits(step)
            if not _is_new(path)
        }
        for step in SERIES
    }


def _is_new(path: str) -> bool:
    return "/_ragged/" in path


# --- patches -------------------------------------------------------------------------------------------------------


def build(site_packages: Path) -> dict[str, str]:
    """Name and text of each patch, made against the torch in ``site_packages``."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        _git(repository, "init", "-q")
        for path in {path for step in SERIES for path, _ in edits(step) if (site_packages / path).exists()}:
            _write(repository / path, (site_packages / path).read_text())
        _commit(repository, "The files of torch that the series edits\n")
        for step in SERIES:
            for name, text in new_files(step):
                _write(repository / name, text)
            for name, hunks in edits(step):
                path = repository / name
                text = path.read_text() if path.exists() else ""
                for hunk in hunks:
                    text = apply_hunk(text, hunk, f"{step.core.name}: {name}")
                _write(path, text)
            _commit(repository, message(step))
        options = ["--zero-commit", "--no-signature", "--no-renames", "--full-index", "--stat=80", "--numbered"]
        _git(repository, "format-patch", "-q", *options, "-o", ".patches", f"HEAD~{len(SERIES)}")
        made = sorted((repository / ".patches").iterdir())
        return {f"{step.name}.patch": path.read_text() for step, path in zip(SERIES, made, strict=True)}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _commit(repository: Path, text: str) -> None:
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "--allow-empty", "-F", "-", stdin=text)


def _git(folder: Path, *arguments: str, stdin: str | None = None) -> None:
    command = ["git", "-c", "core.autocrlf=false", "-c", "init.defaultBranch=main", *arguments]
    subprocess.run(command, cwd=folder, check=True, input=stdin, text=True, env={**os.environ, **_IDENTITY})


# --- up to date? ---------------------------------------------------------------------------------------------------


def inputs_digest() -> str:
    """A digest of all that patches are made of, but for torch, whose releases do not change."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for step in SERIES:
        for name, text in [*new_files(step), (step.name, step.core.read_text())]:
            digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def patches_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(PATCHES.glob("*.patch")):
        digest.update(f"{path.name}\0{path.read_text()}\0".encode())
    return digest.hexdigest()


def built_from(release: str) -> str:
    """What ``built_from.txt`` says of patches that are made now, against a release of torch."""
    return f"torch {release}\nsources {inputs_digest()}\npatches {patches_digest()}\n"


def installed() -> tuple[str, Path]:
    """The version of the torch of this Python, and the folder that it is in. It is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    site_packages = Path(spec.origin).parents[1]
    version = re.search(r"__version__ = '([0-9.]+)", (site_packages / "torch/version.py").read_text())
    assert version is not None
    return version[1], site_packages


def stale() -> str:
    """Why the committed patches are not what the package's sources make now; empty if they are."""
    written = BUILT_FROM.read_text() if BUILT_FROM.exists() else ""
    release = (written.split() or ["", ""])[1]
    if written != built_from(release):
        return "the package, upstream/core or the patches have changed since the patches were made: run upstream/build.py"
    version, site_packages = installed()
    if version == release:
        for name, text in build(site_packages).items():
            if (PATCHES / name).read_text() != text:
                return f"{name} is not what upstream/build.py makes"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="tell whether what is committed is stale, and write nothing")
    arguments = parser.parse_args()
    if arguments.check:
        why = stale()
        print(why or "the patches are up to date")
        return bool(why)
    version, site_packages = installed()
    patches = build(site_packages)
    PATCHES.mkdir(exist_ok=True)
    for path in PATCHES.glob("*.patch"):
        path.unlink()
    for name, text in patches.items():
        (PATCHES / name).write_text(text)
    BUILT_FROM.write_text(built_from(version))
    for step, files in changed_lines().items():
        for path, (plus, minus) in files.items():
            print(f"{step:32} {path:56} +{plus} -{minus}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
