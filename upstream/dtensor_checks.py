"""A program with torch's own DTensor checks (``torch.testing._internal``): it prints the results of ops and models as JSON.

``check.py`` runs it on the stock torch and on the patched torch. Both must print the same values, placements, collectives, and
errors of unsupported calls. The program must not import ``torch_ragged``. As in torch's tests, models are compared with a
single device.
"""

from __future__ import annotations

import json
import os
import tempfile
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorConverter,
    DTensorTestBase,
    MLPModule,
    ModelArgs,
    Transformer,
    with_comms,
)
from torch.utils import _pytree as pytree

RANKS = 2
OUTCOMES = "DTENSOR_CHECKS"
"""The environment variable that names the file to which rank 0 writes the outcomes."""

# Ops of every family: element-wise, reductions, matmuls, views, indexing, softmax and norms, sorting, random.
OPS = set(
    "abs add addmm all amax argmax baddbmm bmm cat chunk clamp clone cumsum diagonal div dot eq exp expand flatten gather "
    "index index_add index_select isfinite le linalg.vector_norm log_softmax logsumexp masked_fill matmul max mean min mm mul "
    "native_layer_norm neg nn.functional.embedding nn.functional.gelu nn.functional.layer_norm nn.functional.linear "
    "nn.functional.mse_loss nn.functional.relu nn.functional.scaled_dot_product_attention nn.functional.softmax_with_dtype "
    "permute pow prod repeat reshape rsqrt rsub select sigmoid slice softmax sort split sqrt squeeze std stack sub sum t take "
    "tanh topk transpose tril triu unbind unsqueeze var view where zeros_like".split()
)
SAMPLES = 4  # of each op


def described(result: Any) -> list[Any]:
    """The placements and the full values of every output. One all-gather per sharded output."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [
        [str(leaf.placements), leaf.full_tensor().tolist()] if isinstance(leaf, DTensor) else ["", leaf.tolist()]
        for leaf in leaves
    ]


def outcome(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """The result of a call and its collectives, or the type of its error."""
    try:
        with CommDebugMode() as mode:
            result = function(*arguments, **keywords)
        return [described(result), {str(op): n for op, n in mode.get_comm_counts().items()}]
    except Exception as error:
        return type(error).__name__


class DTensorChecks(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return RANKS

    def found(self, name: str, outcomes: Any) -> None:
        if self.rank == 0:
            with open(os.environ[OUTCOMES], "a") as file:
                file.write(json.dumps([name, outcomes]) + "\n")

    @with_comms
    def test_ops_under_all_placements(self) -> None:
        mesh = self.build_device_mesh()
        for op in op_db:
            if op.name not in OPS or torch.float32 not in op.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            samples = [sample for _, sample in zip(range(SAMPLES), op.sample_inputs("cpu", torch.float32))]
            for number, sample in enumerate(samples):
                arguments = (sample.input, *sample.args)
                converter = DTensorConverter(mesh, arguments, sample.kwargs)
                outcomes = []
                for args, kwargs in converter:
                    torch.manual_seed(1)
                    with sdpa_kernel(SDPBackend.MATH):  # The series gives the CPU's own attention a rule, which torch lacks.
                        outcomes.append(outcome(op.op, *args, **kwargs))
                self.found(f"{op.name}.{op.variant_test_name} {number}", outcomes)

    @with_comms
    def test_tensor_parallel_mlp_trains_as_one_device_does(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        one, parallel = MLPModule("cpu"), MLPModule("cpu")
        parallel.load_state_dict(one.state_dict())
        parallelize_module(parallel, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        batch, losses = torch.randn(8, 10), []
        dist.broadcast(batch, src=0)
        for model in (one, parallel):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
            for _ in range(3):
                loss = model(batch).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        self.assertEqual(losses[0], losses[1], atol=1e-4, rtol=1e-4)
        self.found("mlp", [losses, {name: described(p) for name, p in parallel.named_parameters()}])

    @with_comms
    def test_tensor_parallel_transformer(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        arguments = ModelArgs(dropout_p=0.0, use_attn_mask=False)
        one = Transformer(arguments)
        parallel = Transformer(arguments)
        parallel.load_state_dict(one.state_dict())
        parallel = Transformer.parallelize(parallel, mesh, use_seq_parallel=False)
        tokens = torch.randint(arguments.vocab_size, (2, arguments.max_seq_len))
        dist.broadcast(tokens, src=0)
        with sdpa_kernel(SDPBackend.MATH):  # DTensor has no rule for the CPU's attention, nor for its mask.
            expected, result = one(tokens), parallel(tokens)
            self.assertEqual(expected, result, atol=1e-4, rtol=1e-4)
            result.sum().backward()
        gradients = {name: described(p.grad) for name, p in parallel.named_parameters() if p.grad is not None}
        self.found("transformer", [described(result), gradients])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[OUTCOMES] = os.path.join(folder, "outcomes")
        program = unittest.main(exit=False)
        with open(os.environ[OUTCOMES]) as file:
            print("RESULT " + json.dumps(dict(map(json.loads, file))))
    raise SystemExit(not program.result.wasSuccessful())


if __name__ == "__main__":
    main()
