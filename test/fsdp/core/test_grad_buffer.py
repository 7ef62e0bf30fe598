"""The gradient buffer on a device with streams, which stand here as strings: rehearsal/ and test/gpu have real ones."""

import unittest
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from common import enter_fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.core import _grad_buffer

WIDTH = 8


class Counted(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class Streams:
    """The current stream, and the orders (stream, behind) that were made."""

    def __init__(self):
        self.current, self.orders = "main", []

    def order(self, stream, other):
        if stream != other:
            self.orders.append((stream, other))


@contextmanager
def with_streams():
    streams = Streams()
    with (
        mock.patch.object(_grad_buffer, "current_stream", lambda device: streams.current),
        mock.patch.object(_grad_buffer, "order_behind", streams.order),
    ):
        yield streams


def make():
    torch.manual_seed(0)
    return nn.Sequential(*[each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))])


class GradBufferTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 1)
        self.mesh = init_device_mesh("cpu", (1,))

    def gradients(self, steps, counted=None):
        model, x = fully_shard(make(), mesh=self.mesh), torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        with counted or nullcontext():
            for _ in range(steps):
                model(x).pow(2).sum().backward()
        return [parameter.grad.to_local() for parameter in model.parameters()]

    def test_a_borrowed_gradient_is_dropped_when_the_buffer_gets_its_own_memory(self):
        (group,) = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=self.mesh)._ragged_groups(False)
        buffer, gradient = group.reduction.buffer, torch.ones(WIDTH, WIDTH)
        buffer._log.start()
        self.assertTrue(buffer.borrow(gradient))
        (view,) = buffer.views()
        view.mul_(2)
        self.assertEqual(gradient.sum(), gradient.numel())
        self.assertEqual([nbytes for _, nbytes in buffer._log.events], [gradient.nbytes, gradient.nbytes, -gradient.nbytes])

    def test_a_dropped_gradient_leaves_nothing(self):
        (group,) = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), mesh=self.mesh)._ragged_groups(False)
        buffer, (param,) = group.reduction.buffer, group.params
        buffer.add(0, torch.ones(WIDTH, WIDTH))
        param.pending, param.unsharded.grad = (0,), torch.ones(WIDTH, WIDTH)
        buffer.drop()
        found = (buffer.holds_gradients, param.has_gradient, param.was_used, param.pending, param.unsharded.grad)
        self.assertEqual(found, (False, False, False, None, None))

    def test_small_gradients_are_copied_by_one_operation(self):
        for steps in (1, 3):
            expected, counted = self.gradients(steps), Counted()
            with with_streams() as streams:
                found = self.gradients(steps, counted)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            self.assertEqual(counted.counts["aten::_foreach_copy_"], steps)
            self.assertEqual(streams.orders, [])

    def test_a_parameter_that_is_used_twice_is_added_to_its_first_gradient(self):
        def trained():
            model = fully_shard(make(), mesh=self.mesh)
            # Each call has a graph of its own, so that the second gradient finds the first one in the buffer.
            weight = model[0].weight
            model.unshard()
            for factor in (1.0, 2.0):
                (model[0].weight * factor).sum().backward()
            model(torch.ones(2, WIDTH)).sum().backward()
            return weight.grad.to_local()

        expected = trained()
        with with_streams():
            found = trained()
        self.assertTrue(torch.equal(found, expected))
        self.assertTrue(bool((found[0] != 0).any()))

    def test_writers_wait_for_the_allocation_and_the_reduction_for_all_writers(self):
        model, x = fully_shard(make(), mesh=self.mesh), torch.ones(4, WIDTH)
        with with_streams() as streams:
            loss = model(x).pow(2).sum()
            # Backward runs the last layer first, then the second one on another stream.
            model[2].bias.register_hook(lambda gradient: setattr(streams, "current", "side"))
            model[1].weight.register_hook(lambda gradient: setattr(streams, "current", "main"))
            loss.backward()
        self.assertEqual(streams.orders[:2], [("side", "main"), ("main", "side")])
        self.assertEqual(Counter(streams.orders), Counter([("side", "main"), ("main", "side"), ("side", "main")]))


if __name__ == "__main__":
    unittest.main()
