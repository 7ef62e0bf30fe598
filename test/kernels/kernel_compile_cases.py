"""Compile every kernel for sm_90, down to machine code, with no GPU.

``python test/kernels/kernel_compile_cases.py`` prints, as JSON, what the compiler made of each: registers, stack (spills) per
thread, shared memory, instructions that access global memory, by width, and those that multiply matrices.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))


def compiled(kernel, types, constants, alignment=16, **options):
    """What ``kernel`` compiles to, its arguments of ``types``; pointers, and integers named here, divisible by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = [name for name in names if alignment and (signature[name].startswith("*") or signature[name] in ("i32", "i64"))]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    binary = compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False, **options})
    ptx = binary.asm["ptx"]
    access = {}
    for op in re.findall(r"\b((?:ld|st)\.global[\w.:]*)", ptx):
        access[op] = access.get(op, 0) + 1
    return {**_usage(binary.asm["cubin"]), "shared": binary.metadata.shared, "access": access, "wgmma": ptx.count("wgmma.mma")}


def _usage(cubin):
    """Registers and stack (spills) per thread of machine code; nothing where cuobjdump is not there."""
    from triton import knobs

    tool = os.path.join(os.path.dirname(knobs.nvidia.ptxas.path), "cuobjdump")
    if not os.path.exists(tool):
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {"registers": int(found[1]), "stack": int(found[2])} if found else {}


def casts():
    from torch_ragged._kernels import _triton_casts as kernels

    types = {"numel": "i64", "scale": "fp32"}
    for out, source in (("*bf16", "*fp32"), ("*fp32", "*bf16"), ("*fp32", "*fp32"), ("*fp16", "*fp32")):
        for scales in (False, True):
            constants = {"scales": scales, "accumulates": scales, "block": kernels._CAST_BLOCK}
            every = {**types, "out_ptr": out, "source_ptr": source}
            yield (
                f"casts {out} {source} {scales}",
                compiled(kernels.scaled_copy_kernel, every, constants, num_warps=kernels._CAST_WARPS),
            )


def float8():
    from torch_ragged._kernels import _triton_float8 as kernels

    types = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "owners_ptr": "*i32", "numbers_ptr": "*i64"}
    for values in ("*fp32", "*bf16"):
        for height in (64, 128):
            for aligned in (True, False):
                constants = {"aligned": aligned, "per_row": height == 64, "height": height, "width": 128}
                every, text = {**types, "values_ptr": values}, f"{values} {height} {aligned}"
                yield f"quantize {text}", compiled(kernels.quantize_kernel, every, constants, num_warps=kernels._WARPS)
                constants["step"] = kernels._STEP_ROWS
                yield f"dequantize {text}", compiled(kernels.dequantize_kernel, every, constants, num_warps=4)


def float4():
    from torch_ragged._kernels import _triton_float4 as kernels

    types = {"codes_ptr": "*u8", "scales_ptr": "*i8", "owners_ptr": "*i32", "numbers_ptr": "*i64"}
    for values in ("*fp32", "*bf16"):
        for aligned in (True, False):
            constants = {"aligned": aligned, "height": 64, "width": 32}
            every, text = {**types, "values_ptr": values}, f"{values} {aligned}"
            yield f"float4 quantize {text}", compiled(kernels.quantize_float4_kernel, every, constants, num_warps=4)
            yield f"float4 dequantize {text}", compiled(kernels.dequantize_float4_kernel, every, constants, num_warps=4)


def adam8bit():
    from triton import language as tl

    from torch_ragged._kernels import _triton_adam8bit as kernels

    def size(dtype):
        return dtype.primitive_bitwidth // 8

    types = {name: "*fp32" for name in kernels.step_kernel.arg_names} | {"owners_ptr": "*i32", "integers_ptr": "*i64"}
    for block in ((32, 32), (1, 256)):
        for param, gradient in ((tl.float32, tl.float32), (tl.bfloat16, tl.bfloat16), (tl.bfloat16, tl.float32)):
            for dynamic, stochastic, aligned in ((True, False, True), (False, param == tl.bfloat16, False)):
                constants = {
                    **{"param_type": param, "gradient_type": gradient, "dynamic": dynamic},
                    **{"param_bytes": size(param), "gradient_bytes": size(gradient)},
                    "vector": 16 // max(size(param), size(gradient)) if aligned else 1,
                    **{"stochastic": stochastic, "height": block[0], "width": block[1], "tile_height": block[0]},
                    **{"tile_width": block[1], "per_program": kernels.PER_PROGRAM},
                }
                text = f"adam8bit {block} {param} {gradient} {dynamic} {aligned}"
                yield text, compiled(kernels.step_kernel, types, constants, num_warps=kernels.warps(block))


def symmetric():
    from torch_ragged._kernels import _triton_symmetric as kernels

    pointers = {"x_ptr": "*bf16", "addend_ptr": "*bf16", "out_ptr": "*bf16", "beta": "fp32", "alpha": "fp32"}
    strides = {name: "i64" for name in kernels.product_kernel.arg_names if name.endswith("_stride")}
    for configuration in kernels.CONFIGURATIONS:
        tile, step, group, warps, stages = configuration
        for unit in ("x_column_stride", "x_row_stride"):  # as it is, and transposed
            constants = {"has_addend": True, "tile": tile, "step": step, "group": group, unit: 1, "addend_column_stride": 1}
            constants["inner"] = 4096 + 8 * (unit == "x_row_stride")
            every = {**pointers, **strides, "size": "i32"}
            options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
            yield f"symmetric {tuple(configuration)} {unit}", compiled(kernels.product_kernel, every, constants, **options)


def philox():
    from triton import language as tl

    from torch_ragged._kernels import _triton_philox as kernels

    kernel, out = kernels.draw_kernel, {4: ("*fp32", "*bf16", "*fp16"), 2: ("*fp64",)}
    annotated = {param.name: param.annotation_type for param in kernel.params if param.annotation_type}
    kinds = [(kind, lanes, dtype) for kind in ("uniform", "normal", "bernoulli") for lanes in (4, 2) for dtype in out[lanes]]
    kinds += [
        ("integers", 4, "*i8"),
        ("integers", 4, "*bf16"),
        ("integers", 2, "*i64"),
        ("integers", 2, "*i32"),
        ("bernoulli", 4, "*u8"),
    ]
    for kind, lanes, dtype in kinds:
        for dims, vector, index in ((1, 0, tl.int32), (4, 8, tl.int64)):
            constants = {"dims": dims, "index": index, "kind": kind, "lanes": lanes, "vector": vector, "is_bool": False}
            constants["block"] = kernels._DRAW_BLOCK
            options = {"num_warps": kernels._DRAW_WARPS, "enable_reflect_ftz": False, "alignment": 0}
            types = {**annotated, "out_ptr": dtype}
            yield f"philox {kind} {lanes} {dtype} {dims}", compiled(kernel, types, constants, **options)


CASES = (casts, float4, float8, adam8bit, symmetric, philox)


def main(names):
    results = {}
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        try:
            results.update(case())
        except Exception:
            results[case.__name__] = {"error": traceback.format_exc()[-3000:]}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        main(sys.argv[1:])
