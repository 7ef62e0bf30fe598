"""The bits of an optimizer do not depend on addresses: neither on those of the parameters, nor on the position in a stack."""

import unittest

import torch
from optim_common import assert_same, value, wholes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.optim import AdamW8bit, BlockPolicy, Muon, Shampoo, matrix_groups
from torch_ragged.optim._aligned import aligned

SHAPES = ((6, 9), (9, 6), (5, 7), (13, 25), (33, 65), (24, 16), (1, 7), (3, 6, 9), (17,), (1000,))
ALIGNMENT = 64  # Of torch's allocations on the CPU, in bytes.
ORDERED = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "linalg_vector_norm", "sum", "mean", "_linalg_eigh"}


def make(name, params):
    if name == "AdamW8bit":
        return AdamW8bit(params, lr=0.01, policy=BlockPolicy((4, 4), min_numel=1000))
    groups = matrix_groups(nn.ParameterList(params), matrices=[param for param in params if param.ndim in (2, 3)])
    return Muon(groups, lr=0.02) if name == "Muon" else Shampoo(groups, lr=0.01, interval=2)


def placed_at(offset, tensor):
    """A copy whose first element is ``offset`` elements behind an allocation."""
    buffer = tensor.new_empty(offset + tensor.numel())
    return buffer[offset:].view(tensor.shape).copy_(tensor)


def trained(name, offset, dtype):
    params = [nn.Parameter(placed_at(offset, value(index, 0, shape, dtype))) for index, shape in enumerate(SHAPES)]
    optimizer = make(name, params)
    for step in range(1, 3):
        for index, param in enumerate(params):
            param.grad = placed_at(offset, value(index, step, param.shape, dtype))
        optimizer.step()
    return wholes(params, optimizer)


class Inputs(TorchDispatchMode):
    """Records the addresses and strides of the inputs of operations that add numbers in an order of their own."""

    def __init__(self):
        super().__init__()
        self.addresses, self.strides = [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name in ORDERED:
            inputs = [each for each in args if isinstance(each, torch.Tensor)]
            self.addresses += [each.data_ptr() % ALIGNMENT for each in inputs]
            shapes = tuple(tuple(each.shape) for each in inputs)
            self.strides.setdefault((name, shapes), set()).add(tuple(each.stride() for each in inputs))
        return func(*args, **(kwargs or {}))


class AlignmentTest(unittest.TestCase):
    def test_the_bits_of_a_step_do_not_depend_on_the_addresses_of_parameters_and_gradients(self):
        for name in ("Muon", "Shampoo", "AdamW8bit"):
            for dtype in (torch.float32, torch.bfloat16):
                expected = trained(name, 0, dtype)
                for offset in range(1, 16):
                    assert_same(trained(name, offset, dtype), expected, f"{name}, {dtype}, offset {offset}")

    def test_equal_matrices_of_a_stack_get_equal_bits(self):
        for name in ("Muon", "Shampoo"):
            for shape in SHAPES[:7]:
                param = nn.Parameter(value(0, 0, shape).expand(16, *shape).clone())
                optimizer = make(name, [param])
                for step in range(1, 4):
                    param.grad = value(0, step, shape).expand(16, *shape).clone()
                    optimizer.step()
                for index, each in enumerate(wholes([param], optimizer)):
                    if each.ndim == 3:
                        self.assertTrue(torch.equal(each, each[:1].expand_as(each)), (name, shape, index))

    def test_the_inputs_of_products_and_norms_are_aligned_and_of_one_stride_for_each_shape(self):
        for name in ("Muon", "Shampoo"):
            param = nn.Parameter(value(0, 0, (5, 6, 9)))
            optimizer = make(name, [param])
            for step in range(1, 4):
                param.grad = value(0, step, (5, 6, 9))
                with Inputs() as inputs:
                    optimizer.step()
                self.assertIn("mm" if name == "Shampoo" else "addmm", {operation for operation, _ in inputs.strides})
                self.assertEqual(set(inputs.addresses), {0}, name)
                self.assertEqual({key: 1 for key in inputs.strides}, {key: len(each) for key, each in inputs.strides.items()})

    def test_only_what_is_not_aligned_is_copied_and_keeps_its_strides(self):
        tensor = torch.randn(2, 16)
        self.assertEqual(aligned(tensor[1]).data_ptr(), tensor[1].data_ptr())
        for offset in range(1, 16):
            tall = placed_at(offset, torch.randn(6, 9)).mT
            copy = aligned(tall)
            self.assertEqual((copy.data_ptr() % ALIGNMENT, copy.stride()), (0, (1, 9)))
            self.assertTrue(torch.equal(copy, tall))
