"""Weight gradients computed into the gradient buffer against those of autograd, which a hook copies or adds there.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.parts.weight_gradient [--json PATH] [--rounds 5] [--dtype float32]

CPU time of forward and backward, on one thread. "first": the gradient buffer holds nothing yet, "later": a gradient to add to.
Megabytes are those of one backward: allocated, and read and written by ops other than matmuls, which is what copies, sums and
zeros take. The cost of the Python code is told from tensors so small that nothing else counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.measure import interleaved, microseconds, print_table, write_json
from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter

EXPERTS, IN, OUT = 8, 512, 2048
Layer = tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], tuple[int, ...], tuple[int, ...]]


def selected(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One matmul per expert on its tokens, with a select each."""
    return torch.cat([x[expert] @ w[expert] for expert in range(len(w))])


def unbound(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """One matmul per expert on its tokens, of an unbound weight."""
    return torch.cat([tokens @ matrix for tokens, matrix in zip(x, w.unbind())])


def layers() -> dict[str, Layer]:
    """The layers: a function of input and weight, and their shapes."""
    found: dict[str, Layer] = {}
    for size, batches in ((1024, (64, 512, 2048)), (2048, (64, 512)), (4096, (64, 512))):
        for batch in batches:
            found[f"linear {size}x{size}, {batch} rows"] = (F.linear, (batch, size), (size, size))
    for tokens in (8, 64, 512):
        shapes = (EXPERTS, tokens, IN), (EXPERTS, IN, OUT)
        name = f"experts {EXPERTS}x{IN}x{OUT}, {tokens} tokens each"
        found[f"{name}, bmm"] = (torch.bmm, *shapes)
        if tokens == 64:
            found[f"{name}, w[e]"] = (selected, *shapes)
            found[f"{name}, unbind"] = (unbound, *shapes)
    return found


class Place:
    """A parameter's part of a gradient buffer, and the hook that moves there what autograd computes."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.view, self.holds_gradient = torch.empty_like(parameter.data), False
        parameter.register_post_accumulate_grad_hook(self.move)

    def begin(self) -> tuple[torch.Tensor, bool]:
        return self.view, self.holds_gradient

    def done(self) -> None:
        self.holds_gradient = True

    def move(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if self.holds_gradient:
            self.view.add_(parameter.grad)
        else:
            self.view.copy_(parameter.grad)
            self.holds_gradient = True
        parameter.grad = None


def parameters(data: torch.Tensor) -> dict[str, tuple[nn.Parameter, Place]]:
    """A parameter whose gradient a hook moves, and one whose gradient is computed into its place."""
    plain, direct = nn.Parameter(data.clone()), ComputeParameter(data.clone())
    places = Place(plain), Place(direct)
    direct.gradient_target = places[1]
    return {"hook": (plain, places[0]), "in place": (direct, places[1])}


class Traffic(TorchDispatchMode):
    """Bytes allocated, and bytes that ops other than matmuls read and write."""

    MATMULS = ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_")

    def __init__(self) -> None:
        super().__init__()
        self.allocated = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        known = {x.untyped_storage().data_ptr() for x in inputs}
        new = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        written = [x for x in new if x.untyped_storage().data_ptr() not in known]
        self.allocated += sum(x.nbytes for x in written)
        if func.overloadpacket.__name__ not in self.MATMULS and not func.is_view:
            self.moved += sum(x.nbytes for x in (*inputs, *written))
        return result


def traffic(step: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Megabytes allocated and moved by the backward of what ``step`` returns."""
    output = step()
    with Traffic() as mode:
        output.backward(torch.ones_like(output))
    return (mode.allocated - output.nbytes) / 1e6, (mode.moved - 2 * output.nbytes) / 1e6  # without ones_like


def compare(layer: Layer, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """Milliseconds and megabytes of a layer, both ways."""
    function, x_shape, w_shape = layer
    x = torch.randn(x_shape, dtype=dtype, requires_grad=True)
    found = parameters(torch.randn(w_shape, dtype=dtype))
    gradient = torch.ones_like(function(x, found["hook"][0])).detach()

    def step(name: str, holds_gradient: bool) -> None:
        parameter, place = found[name]
        place.holds_gradient, x.grad = holds_gradient, None
        function(x, parameter).backward(gradient)

    row: dict[str, Any] = {}
    for when, holds_gradient in (("first", False), ("later", True)):
        times: dict[str, list[float]] = {name: [] for name in found}
        for turn in range(-1, rounds):  # The first is to warm up.
            for name in list(found)[:: 1 if turn % 2 else -1]:
                elapsed = microseconds(lambda name=name, holds=holds_gradient: step(name, holds))
                times[name] += [elapsed / 1e3] * (turn >= 0)
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = statistics.median(mine / base for mine, base in zip(times["in place"], times["hook"]))
        row.update({**{f"{when} ms, {name}": value for name, value in medians.items()}, f"{when} ratio": ratio})
    for name, (parameter, place) in found.items():
        place.holds_gradient, x.grad = False, None
        allocated, moved = traffic(lambda parameter=parameter: function(x, parameter))
        row.update({f"MB allocated, {name}": allocated, f"MB moved, {name}": moved})
    return row


def overhead(rounds: int) -> list[dict[str, Any]]:
    """Microseconds per call on a plain parameter and on a ComputeParameter, all of 4 x 4."""
    x, other = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    x3 = torch.ones(2, 2, 4, requires_grad=True)
    found = {name: parameter for name, (parameter, _) in parameters(torch.ones(4, 4)).items()}

    def backward(function: Callable[[nn.Parameter], torch.Tensor]) -> Callable[[nn.Parameter], None]:
        def step(parameter: nn.Parameter) -> None:
            output = function(parameter)
            output.backward(torch.ones_like(output))
            x.grad = x3.grad = None

        return step

    def without_gradients(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            F.linear(x, parameter)

    calls: dict[str, Callable[[nn.Parameter], Any]] = {
        "p.shape": lambda p: p.shape,
        "p + 1": lambda p: p + other,
        "p.t()": lambda p: p.t(),
        "F.linear(x, p), no_grad": without_gradients,
        "F.linear(x, p)": lambda p: F.linear(x, p),
        "x @ p.t()": lambda p: x @ p.t(),
        "F.linear(x, p), with backward": backward(lambda p: F.linear(x, p)),
        "F.linear(x, p), with backward, 3-D": backward(lambda p: F.linear(x3, p)),
        "x @ p.t(), with backward": backward(lambda p: x @ p.t()),
    }
    rows = []
    for name, call in calls.items():
        times = interleaved({kind: lambda p=p, call=call: call(p) for kind, p in found.items()}, rounds)
        plain, direct = (statistics.median(values) for values in times.values())
        rows.append({"call": name, "nn.Parameter us": plain, "ComputeParameter us": direct, "difference us": direct - plain})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file too")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each layer and way")
    parser.add_argument("--dtype", default="float32", help="of the layers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {"overhead": overhead(rounds=50), "dtype": options.dtype}
    print_table(f"torch {torch.__version__}: CPU microseconds per call on a 4 x 4 parameter", results["overhead"])  # type: ignore[arg-type]
    dtype = getattr(torch, options.dtype)
    results["layers"] = [{"layer": name, **compare(layer, options.rounds, dtype)} for name, layer in layers().items()]
    print_table(f"forward and backward of a layer in {options.dtype}", results["layers"])  # type: ignore[arg-type]
    write_json(options.json, results)


if __name__ == "__main__":
    main()
