"""Triton kernels: equal to their torch twins by the interpreter and on a GPU, compiled for sm_90, chosen where they can run.

Without triton (CPU builds of torch do not bring it) the twins are tested only, by the tests of what uses them.
"""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch
from common import error_of
from processes import answers_of

from torch_ragged._kernels import _choice, symmetric
from torch_ragged._kernels.casts import scaled_copy_
from torch_ragged._kernels.tiles import TileRun, TileTable, matrix_runs

has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


FOLDER = Path(__file__).parent


def _check_by_the_interpreter(*names):
    answers = answers_of("kernel_cases.py", *names, TRITON_INTERPRET="1")
    assert set(answers) == set(names)
    assert not any(answers.values()), "\n".join(f"{name}: {text}" for name, text in answers.items() if text)


@has_triton
def test_kernels_equal_their_twins_by_the_interpreter():
    """Training runs those of float8 and of 8-bit Adam, too."""
    _check_by_the_interpreter(*kernel_cases.QUICK)


@has_triton
@pytest.mark.slow
def test_all_kernels_equal_their_twins_by_the_interpreter():
    _check_by_the_interpreter(*kernel_cases.CASES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", list(kernel_cases.CASES))
def test_kernels_equal_their_twins_on_a_gpu(name):
    kernel_cases.CASES[name]("cuda")


@has_triton
@pytest.mark.slow
def test_kernels_compile_for_hopper():
    """With no GPU; nothing is spilled where rows are aligned, memory is accessed 16 bytes at a time, products use wgmma."""
    answers = answers_of("kernel_compile_cases.py", TRITON_INTERPRET="0")
    assert len(answers) > 30 and not any("error" in each for each in answers.values()), answers
    for name, each in answers.items():
        is_aligned = not name.endswith("False") or name.startswith("casts")
        if is_aligned:
            assert each.get("stack", 0) == 0, (name, each)
        if is_aligned and not name.startswith("philox"):
            # A program takes as many elements as 16 bytes of its widest tensor have: of bfloat16 beside float32, 8.
            store = "st.global.v2.b32" if "bf16 fp32" in name or name.startswith("float4 quantize") else "st.global.v4.b32"
            # Half a byte per element: 16 elements have 8 bytes of codes.
            load = "ld.global.v2.b32" if name.startswith("float4 dequantize") else "ld.global.v4.b32"
            assert {load, store} <= set(each["access"]), (name, each)
        if name.startswith("symmetric"):
            assert each["wgmma"] > 0 and each["registers"] <= 168, (name, each)
        if name.startswith("adam8bit (32, 32)") and is_aligned:
            assert each["registers"] <= 96, (name, each)


def test_what_runs_is_chosen(monkeypatch):
    monkeypatch.setattr(_choice, "_mode", "auto")
    flat = torch.zeros(4)
    assert not _choice.runs_triton(flat)
    _choice.choose("triton")
    assert _choice.runs_triton(flat) and not _choice.runs_triton(torch.zeros(4, device="meta"))
    _choice.choose("torch")
    assert not _choice.runs_triton(flat)
    assert error_of(_choice.choose, "cuda").startswith("ValueError: kernels are chosen by one of")


def test_copies_are_torchs_on_the_cpu():
    """The twin: bitwise what copy_ and add_ give; scaled in float32; of any dtypes; shapes are checked."""
    source = torch.randn(100)
    out = torch.ones(100, dtype=torch.bfloat16)
    assert scaled_copy_(out, source) is out and torch.equal(out, source.bfloat16())
    wide = torch.ones(100)
    assert torch.equal(scaled_copy_(wide, out, accumulate=True), torch.ones(100) + out.float())
    assert torch.equal(scaled_copy_(wide, out, 0.3), out.float() * 0.3)
    assert torch.equal(
        scaled_copy_(wide.double(), source.double(), 0.5, accumulate=True), wide.double() + source.double() * 0.5
    )
    assert torch.equal(scaled_copy_(torch.zeros(3, dtype=torch.int64), torch.arange(3)), torch.arange(3))
    assert "one shape" in error_of(scaled_copy_, wide, source[1:])


def test_symmetric_products_are_torchs_on_the_cpu():
    x = torch.randn(3, 20, 30).bfloat16()
    gram = symmetric.gram(x)
    assert torch.equal(gram, torch.bmm(x, x.mT)) and torch.equal(symmetric.gram(x[0]), x[0] @ x[0].mT)
    wanted = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
    assert torch.equal(symmetric.polynomial(gram, -4.775, 2.0315), wanted)
    for bad, text in ((x[0, 0], "takes a matrix"), (x, "square")):
        assert text in error_of(symmetric.polynomial, bad, 1.0, 1.0)


def test_runs_of_matrices_cover_an_interval():
    rows, columns = 5, 3
    for start in range(0, 46, columns):
        for stop in range(start, 46, columns):
            place = start
            for first, (count, height, width) in matrix_runs(start, stop, rows, columns):
                assert first == place and width == columns and (count == 1 or height == rows)
                assert first % 15 + height * columns <= 15 and math.prod((count, height)) > 0
                place += count * height * width
            assert place == stop


def test_tables_name_the_run_of_every_program():
    runs = [TileRun(16, 32, 0, (2, 130, 256)), TileRun(100, 0, 9, (1, 1, 5))]
    owners, numbers = TileTable(runs, (128, 128)).on(torch.device("cpu"))
    assert owners.tolist() == [0] * 8 + [1] and numbers.tolist() == [[0, 16, 32, 0, 130, 256], [8, 100, 0, 9, 1, 5]]
    owners, _ = TileTable(runs, (1, 128)).on(torch.device("cpu"))
    assert owners.tolist() == [0] * 12 + [1]
    assert TileTable(runs[:1], (128, 128)).is_aligned and not TileTable(runs, (128, 128)).is_aligned


@pytest.mark.slow
def test_benchmark_runs(tmp_path):
    file = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "benchmarks.gpu.gpu_kernels", "--device", "cpu", "--smoke", "--json", str(file)]
    subprocess.run(command, check=True, timeout=200, cwd=FOLDER.parents[1])
    results = json.loads(file.read_text())
    assert [row["target"] for row in results["targets"]] == ["of copy", "8-bit Adam of 32-bit fused", "symmetric speedup"]
    assert len(results["memory"]) == 11 and all(row["us"] > 0 for row in (*results["memory"], *results["adam"]))
    assert [row["product"] for row in results["products"]] == [
        f"{n}, 64 x 96" for n in ("X X^T", "b A + c A A", "Newton-Schulz")
    ]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, "-q"]))
