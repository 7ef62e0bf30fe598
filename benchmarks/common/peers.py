"""Other packages, where they are installed and run: Megatron-FSDP and DeepSpeed ZeRO-3, set up to do what the others do."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.stacks import Case
from benchmarks.common.systems import POLICIES, Training, adamw

__all__ = ["PEERS"]


def _megatron(case: Case, policy: MixedPrecisionPolicy) -> Training:
    if not torch.cuda.is_available():
        raise RuntimeError("it needs CUDA")
    from megatron_fsdp import MixedPrecisionPolicy as Precision
    from megatron_fsdp import fully_shard

    model = case.model()
    model, optimizer = fully_shard(
        model,
        adamw(model.parameters()),
        device_mesh=init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("shard",)),
        dp_shard_dim="shard",
        fsdp_unit_modules=[type(model[0])],
        zero_dp_strategy=3,
        mixed_precision_policy=Precision(main_params_dtype=torch.float32, main_grads_dtype=policy.reduce_dtype),
    )
    return Training(model, optimizer, case.inputs(dist.get_rank()).cuda())


class _Engine(Training):
    """DeepSpeed's engine runs backward and the optimizer."""

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def optimize(self) -> None:
        self.model.step()


def _deepspeed(case: Case, policy: MixedPrecisionPolicy) -> Training:
    ranks = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    os.environ.update(
        {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(dist.get_world_size())}, **{k: str(v) for k, v in ranks.items()}
    )
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = case.model()
    settings = {
        "train_micro_batch_size_per_gpu": case.batch,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": policy is POLICIES["bf16"]},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)
    inputs = case.inputs(dist.get_rank())
    return _Engine(engine, optimizer, inputs.to(policy.param_dtype or inputs.dtype))


def _if_it_runs(make: Callable[[Case, MixedPrecisionPolicy], Training]) -> Callable[..., Training | str]:
    """A training that has made a step, or why there is none."""

    def attempt(case: Case, policy: MixedPrecisionPolicy) -> Training | str:
        try:
            training = make(case, policy)
            training.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return training

    return attempt


PEERS = {"Megatron-FSDP": _if_it_runs(_megatron), "DeepSpeed ZeRO-3": _if_it_runs(_deepspeed)}
"""By name: what makes a training of a case, or says why it does not run here."""
