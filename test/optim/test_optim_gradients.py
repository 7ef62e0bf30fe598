"""A gradient that one rank cannot use is an error on every rank, before any rank waits for another."""

import unittest
import warnings

import torch
import torch.distributed as dist
from common import error_of, run_ranks
from optim_common import set_gradients, value, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged import RaggedShard
from torch_ragged.optim import AdamW8bit, Muon, Shampoo
from torch_ragged.optim._base import names_peers

OPTIMIZERS = {"Muon": Muon, "Shampoo": Shampoo, "AdamW8bit": AdamW8bit}
CUTS_BLOCKS = RaggedShard((0, 1), (1, 63, 0, 0))  # So that AdamW8bit communicates as well.


def parameter(index, mesh=None, placement=None, shape=(64, 64)):
    full = value(index, 0, shape)
    return nn.Parameter(full if mesh is None else distribute_tensor(full, mesh, [placement], src_data_rank=None))


def texts_of_step(optimizer, params):
    """The error of a step that must change nothing."""
    before = [whole(param.detach()).clone() for param in params]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That AdamW8bit redistributes blocks.
        text = error_of(optimizer.step)
    dist.barrier()  # Ranks are still in step with each other.
    assert all(torch.equal(whole(param.detach()), old) for param, old in zip(params, before, strict=True))
    assert not optimizer.state or all(not state for state in optimizer.state.values())
    return text


def check_plain(name, at_the_end):
    """The plain parameter stands before or behind the others, so that some were stepped before it was looked at."""
    mesh = init_device_mesh("cpu", (4,))
    params = [parameter(index, mesh, CUTS_BLOCKS) for index in range(3)]
    plain = parameter(3)
    params.insert(3 if at_the_end else 0, plain)
    optimizer = OPTIMIZERS[name](params, lr=0.1)
    set_gradients(params, 1)
    if dist.get_rank() == 2:
        plain.grad = plain.grad.to_sparse()
    text = texts_of_step(optimizer, params)
    set_gradients(params, 2)
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.simplefilter("ignore")
        optimizer.step()  # With other gradients it goes on.
    return text, {str(op): count for op, count in mode.get_comm_counts().items() if "reduce" in str(op)}


def check_nested_meshes(name, mesh_of_sparse):
    """The ranks of a mesh hear of a parameter on another, larger or smaller, whichever comes first."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    meshes = {"all": init_device_mesh("cpu", (4,)), "part": world["dp"]}
    params = [parameter(0, meshes["all"], CUTS_BLOCKS), parameter(1, meshes["part"], RaggedShard((0, 1), (1, 63)))]
    params += [parameter(2, meshes["all"], Shard(0)), parameter(3, meshes["part"], RaggedShard((0, 1), (5, 59)))]
    optimizer = OPTIMIZERS[name](params, lr=0.1)
    set_gradients(params, 1)
    if dist.get_rank() == 3:
        index = {"all": 0, "part": 3}[mesh_of_sparse]
        params[index].grad = torch.eye(64).to_sparse()
    return texts_of_step(optimizer, params)


class ItemMode(TorchDispatchMode):
    """Counts the numbers that are read from tensors, for which a GPU is waited for, except those of ``ignored`` tensors."""

    def __init__(self, ignored):
        super().__init__()
        self.ignored, self.count = {tensor.data_ptr() for tensor in ignored}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].data_ptr() not in self.ignored:
            self.count += 1
        return func(*args, **(kwargs or {}))


def items_of_step(cls, count):
    """The numbers that a step of ``count`` parameters reads, with a tensor as lr."""
    params = [parameter(index) for index in range(count)]
    optimizer = cls(params, lr=torch.tensor(0.01 / count))
    for _ in range(2):
        set_gradients(params, 0)
        steps = [state["step"] for state in optimizer.state.values() if "step" in state]
        with ItemMode(steps) as mode:
            optimizer.step()
    return mode.count


class GradientsTest(unittest.TestCase):
    def test_a_sparse_gradient_of_a_plain_parameter_is_an_error_on_every_rank(self):
        for name in OPTIMIZERS:
            for at_the_end in (False, True):
                with self.subTest(name=name, at_the_end=at_the_end):
                    answers = run_ranks(4, check_plain, name, at_the_end)
                    index = 3 if at_the_end else 0
                    for rank, (text, reductions) in enumerate(answers):
                        pattern = (
                            f"parameter {index} of shape .* sparse gradient"
                            if rank == 2
                            else f"parameter {index}: no rank steps"
                        )
                        self.assertRegex(text, f"^RuntimeError: .*{pattern}")
                        self.assertEqual(sum(reductions.values()), 1, reductions)  # Ranks agree by one all-reduce, as before.

    def test_ranks_hear_of_parameters_on_other_meshes(self):
        for name in OPTIMIZERS:
            for mesh_of_sparse in ("all", "part"):
                with self.subTest(name=name, mesh_of_sparse=mesh_of_sparse):
                    answers = run_ranks(4, check_nested_meshes, name, mesh_of_sparse)
                    self.assertTrue(all(text.startswith("RuntimeError") for text in answers), answers)
                    self.assertIn("sparse", answers[3])
                    if mesh_of_sparse == "part":
                        self.assertTrue(all("no rank steps" in answers[rank] for rank in (0, 2)), answers)


class NamedStepTest(unittest.TestCase):
    def test_a_step_whose_errors_name_ranks_returns_the_loss(self):
        class Optimizer:
            param_groups = ()

            @names_peers
            def step(self, closure, *, times):
                return closure() * times

        self.assertEqual((Optimizer().step(lambda: 3.0, times=2), Optimizer.step.__name__), (6.0, "step"))


class LearningRateTest(unittest.TestCase):
    def test_a_tensor_as_lr_is_read_once_per_group(self):
        for name, cls in OPTIMIZERS.items():
            with self.subTest(name):
                self.assertEqual(items_of_step(cls, 1), items_of_step(cls, 6))
                self.assertLessEqual(items_of_step(cls, 3), 3)
