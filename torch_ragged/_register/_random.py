"""The hook on ``torch/distributed/tensor/_random.py``: the random state from which ragged DTensors are drawn."""

from __future__ import annotations

from typing import Any

from torch._guards import TracingContext
from torch._subclasses.fake_tensor import UnsupportedOperatorException
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import _random as dtensor_random
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torch_ragged import _random
from torch_ragged._register._hook import OPERATORS, has, hook


@hook(
    "_random._rng_tracker",
    "random ops on ragged DTensors draw what a single device would; torch's own way counts the elements of Shard's shards",
    OPERATORS,
    lambda: (
        hasattr(dtensor_random, "_rng_tracker")
        and has(dtensor_random.is_rng_supported_mesh, "device_mesh")
        and has(dtensor_random.OffsetBasedRNGTracker, "device_mesh", "run_state_sync")
    ),
)
def _install_random() -> None:
    _random.register_rules()


def before_draw(op: Any, op_info: Any) -> None:
    """See to it that ranks draw from equal states: on accelerators, make torch's tracker, which gives all of them rank 0's.

    Raises:
        UnsupportedOperatorException: under torch.compile, which breaks the graph there, so that the op runs as it does
            without. In a graph, inductor would draw other numbers, and a rank that owns none would drop the op and its draw.
    """
    if TracingContext.try_get() is not None or get_proxy_mode() is not None:
        raise UnsupportedOperatorException(op)
    mesh, nothing_to_share = op_info.compute_mesh, op_info.local_args[0].device.type in ("cpu", "meta")
    if nothing_to_share or dtensor_random._rng_tracker or _are_we_tracing():  # The last: fake tensors, which draw nothing.
        return
    if dtensor_random.is_rng_supported_mesh(mesh):
        dtensor_random._rng_tracker = dtensor_random.OffsetBasedRNGTracker(mesh)
