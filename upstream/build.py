"""Make the patch series from the package's sources: ``make patches``, or ``python upstream/build.py --out FOLDER``.

It must not change the installed torch. Git keeps no patch, because making them takes seconds.

A patch adds files of the package, under torch's names (``series.py``), and edits torch's own files as ``core/`` says. An edit
in ``core/`` is a hunk without line numbers. Its context lines and removed lines must occur together exactly once in the file,
so that one text serves every release. Patches are made in a temporary repository with a fixed author and date: the same inputs
give the same bytes.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from series import FIRST, ROOT, SERIES, Step, torch_name

TESTS = "test/distributed/tensor/ragged"
DOCUMENTS = "docs/source"

_AUTHOR = "torch_ragged contributors"
_DATE = "2026-01-01T00:00:00+0000"
_IDENTITY = {
    **{f"GIT_{role}_NAME": _AUTHOR for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "torch_ragged@users.noreply.github.com" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_DATE": _DATE for role in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


# --- from the package's names to torch's ---------------------------------------------------------------------------


def in_torch(text: str) -> str:
    """The text of one of the package's files, with torch's names for its modules; long imports are split into lines."""
    text = re.sub(r"\btorch_ragged(?:\.[A-Za-z_]\w*)*", lambda match: _module_and_rest(match[0]), text)
    return re.sub(r"^( *)from (\S+) import ([^(\n]+)$", _broken, text, flags=re.MULTILINE)


def _module_and_rest(name: str) -> str:
    """A dotted name with its longest prefix that is a module of the package replaced by torch's name for that module."""
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


def _with_present(text: str, present: set[Path]) -> str:
    """The text of an ``__init__`` without its imports of modules that are not in ``present``, and their names."""
    lines, absent = text.splitlines(keepends=True), set()
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch_ragged."):
            continue
        path = ROOT.joinpath(*(node.module or "").split("."))
        if path.with_suffix(".py") not in present and path / "__init__.py" not in present:
            absent |= {alias.asname or alias.name for alias in node.names}
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)  # type: ignore[operator]
    return "".join(line for line in lines if line.strip().strip('",') not in absent or not line.strip().startswith('"'))


def new_files(step: Step) -> Iterator[tuple[str, str]]:
    """The path in torch's repository and the text of each file that a patch adds, except files that ``core/`` has in full.

    So far as a package's ``__init__`` imports what a later patch adds, that patch adds these lines of it.
    """
    before = {path for each in SERIES[: SERIES.index(step)] for path in each.source_files()} if step in SERIES else set()
    present = {*before, *step.source_files()}
    for path in sorted({*step.source_files(), *(path for path in before if path.name == "__init__.py")}):
        text = path.read_text()
        if path.name == "__init__.py":
            whole, text = text, _with_present(text, present)
            if path in before and text == _with_present(whole, before):
                continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = torch_name(".".join(parts[:-1] if is_package else parts)).replace(".", "/")
        yield name + ("/__init__.py" if is_package else ".py"), in_torch(text)
    for test in step.tests:
        yield f"{TESTS}/{Path(test).name}", in_torch((ROOT / "test" / test).read_text())
    for document in step.documents:
        yield f"{DOCUMENTS}/{document}", (ROOT / "upstream" / document).read_text()


# --- edits of torch's own files ------------------------------------------------------------------------------------


def message(step: Step) -> str:
    """The commit message."""
    return step.core.read_text().split("\n--- ")[0].strip() + "\n"


def edits(step: Step) -> list[tuple[str, list[list[str]]]]:
    """The path and the hunks, as lists of lines, of each file of torch that a patch edits or adds in full."""
    result = []
    for block in step.core.read_text().split("\n--- ")[1:]:
        path, _, body = block.partition("\n")
        hunks = [hunk.strip("\n").split("\n") for hunk in re.split(r"^@@\n", body, flags=re.MULTILINE) if hunk.strip()]
        result.append((path, hunks))
    return result


def apply_hunk(text: str, hunk: list[str], where: str) -> str:
    """``text`` with one edit.

    Raises:
        ValueError: the context and removed lines do not occur in the text exactly once.
    """
    old = "\n".join(line[1:] for line in hunk if line[:1] != "+")
    new = "\n".join(line[1:] for line in hunk if line[:1] != "-")
    if not old:
        return text + new + "\n"
    times = f"\n{text}\n".count(f"\n{old}\n")
    if times != 1:
        raise ValueError(f"{where}: these lines occur {times} times, but must occur once. Give the hunk other context:\n{old}")
    return f"\n{text}\n".replace(f"\n{old}\n", f"\n{new}\n")[1:-1]


def changed_lines() -> dict[str, dict[str, tuple[int, int]]]:
    """The lines added and removed, for each patch and each file that torch already has."""
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


def build(site_packages: Path, series: Sequence[Step] = SERIES) -> dict[str, str]:
    """The name and text of each patch, made against the torch in ``site_packages``."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        _git(repository, "init", "-q")
        for path in {path for step in series for path, _ in edits(step) if (site_packages / path).exists()}:
            _write(repository / path, (site_packages / path).read_text())
        _commit(repository, "The files of torch that the series edits\n")
        for step in series:
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
        _git(repository, "format-patch", "-q", *options, "-o", ".patches", f"HEAD~{len(series)}")
        made = sorted((repository / ".patches").iterdir())
        return {f"{step.name}.patch": path.read_text() for step, path in zip(series, made, strict=True)}


def write(folder: Path, series: Sequence[Step] = SERIES) -> list[Path]:
    """Make the patches against the installed torch and write them to ``folder``; returns their paths in series order."""
    _, site_packages = installed()
    patches = build(site_packages, series)
    for path in folder.glob("*.patch"):  # Older patches may have other names.
        path.unlink()
    for name, text in patches.items():
        _write(folder / name, text)
    return [folder / name for name in patches]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _commit(repository: Path, text: str) -> None:
    _git(repository, "add", "-A")
    _git(repository, "commit", "-q", "--allow-empty", "-F", "-", stdin=text)


def _git(folder: Path, *arguments: str, stdin: str | None = None) -> None:
    command = ["git", "-c", "core.autocrlf=false", "-c", "init.defaultBranch=main", *arguments]
    subprocess.run(command, cwd=folder, check=True, input=stdin, text=True, env={**os.environ, **_IDENTITY})


def installed() -> tuple[str, Path]:
    """The version of this Python's torch, and the folder that contains it. Torch is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    site_packages = Path(spec.origin).parents[1]
    version = re.search(r"__version__ = '([0-9.]+)", (site_packages / "torch/version.py").read_text())
    assert version is not None
    return version[1], site_packages


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out/patches", help="the folder for the patches")
    folder = parser.parse_args().out
    write(folder)
    write(folder / "first", [FIRST])
    for step, files in changed_lines().items():
        for path, (plus, minus) in files.items():
            print(f"{step:32} {path:56} +{plus} -{minus}")
    version, _ = installed()
    print(f"{len(SERIES)} patches, made against torch {version}, are in {folder}")


if __name__ == "__main__":
    main()
