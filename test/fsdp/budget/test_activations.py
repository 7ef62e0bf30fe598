"""Activations in a tier: gradients, memory and errors are those of autograd without it."""

import errno
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from common import enter_fake_group
from tested_device import DEVICE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torch_ragged.fsdp.budget import _activations
from torch_ragged.fsdp.budget._activations import ActivationOffload
from torch_ragged.fsdp.files import _scratch_file

sys.path.append(str(Path(__file__).parents[3]))  # Of the benchmarks.

from benchmarks.common.peak import peak_of

SIZE = 64  # A square of it has 16 KiB: enough to leave.


class Unit(nn.Module):
    """Saves what shares memory, is strided, of several types, small, its own output and its input."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE * SIZE).view(SIZE, SIZE))

    def forward(self, x):
        one, other = self.up(x).chunk(2, dim=-1)
        made = self.down(F.silu(one) * other.exp().clamp(max=3.0))
        picked = made.t().contiguous().t().double()[torch.arange(SIZE)].float()
        mask = made > 0
        return torch.where(mask, picked * self.scale, x.sin()).tanh()


def gradients(units, run, x=None):
    """Of a run of the units one after the other, where ``run(unit, x)`` is a forward."""
    x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).requires_grad_() if x is None else x
    y = x
    for unit in units:
        y = run(unit, y)
    y.square().sum().backward()
    found = [x.grad, *(param.grad for unit in units for param in unit.parameters())]
    for unit in units:
        unit.zero_grad()
    return found


class ActivationsTest(unittest.TestCase):
    copy = "_FileCopy"

    def setUp(self):
        enter_fake_group(self, 1)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.offload = ActivationOffload(torch.device("cpu"), folder.name, [])
        torch.manual_seed(0)
        self.units = [Unit() for _ in range(4)]
        self.moved = []

    def run_unit(self, unit, *args):
        output, nbytes = self.offload.run(unit, unit.forward, args, {})
        self.moved.append(nbytes)
        return output

    def files(self):
        return len(self.offload.tier._free)

    def test_gradients_have_the_bits_of_those_without_it(self):
        expected = gradients(self.units, nn.Module.__call__)
        for staging in (_scratch_file.BLOCK, 3 * _scratch_file.BLOCK, _activations.STAGING):  # Tensors are cut in files.
            with mock.patch.object(_activations, "STAGING", staging):
                self.assertTrue(all(map(torch.equal, gradients(self.units, self.run_unit), expected)), staging)
        self.assertEqual(len(set(self.moved)), 1)
        # 16 KiB each: what was cut into halves, and silu, exp, clamp and a product of them have 2 or 4 of these.
        self.assertGreaterEqual(self.moved[0], 12 * 4 * SIZE * SIZE)

    def test_memory_that_is_free_is_not_read(self):
        expected = gradients(self.units, nn.Module.__call__)
        kind = getattr(_activations, self.copy)
        settle = kind.settle

        def overwrite(copy):
            sources = copy._sources
            settle(copy)
            for source in sources:
                source.fill_(255)

        with mock.patch.object(kind, "settle", overwrite):
            self.assertTrue(all(map(torch.equal, gradients(self.units, self.run_unit), expected)))

    def test_a_part_may_be_larger_than_what_moves(self):
        expected = gradients(self.units, nn.Module.__call__)
        self.offload.tier.reserve([1 << 20] * 4)
        self.assertTrue(all(map(torch.equal, gradients(self.units, self.run_unit), expected)))
        self.assertLess(max(self.moved), 1 << 20)
        self.assertEqual(self.files(), 4)

    def test_steps_use_the_same_files(self):
        gradients(self.units, self.run_unit)
        files = self.files()
        self.assertEqual(files, len(self.units))
        for _ in range(3):
            gradients(self.units, self.run_unit)
        self.assertEqual(self.files(), files)
        self.offload.tier.keep(self.moved[:2])
        self.assertEqual(self.files(), 2)
        self.offload.tier.reserve(self.moved[:2])
        self.assertEqual(self.files(), 4)

    def test_memory_holds_two_units_of_any_number(self):
        """Of each other one, its input. In backward, one more comes back."""

        class Wide(nn.Module):
            def forward(self, x):
                return x.repeat(8, 1).exp().sin().cos().mean(0, keepdim=True) + x

        def peak(count, run):
            def step():
                y = torch.ones(SIZE, SIZE, requires_grad=True)
                for _ in range(count):
                    y = run(Wide(), y)
                y.sum().backward()

            return min(peak_of(step) for _ in range(3))

        square = 4 * SIZE * SIZE
        self.assertGreater(peak(9, nn.Module.__call__) - peak(4, nn.Module.__call__), 5 * 2 * 8 * square - 1)
        self.assertLess(peak(9, self.run_unit) - peak(4, self.run_unit), 5 * 2 * square)
        self.assertLess(peak(9, self.run_unit), peak(2, nn.Module.__call__) + 2 * 8 * square)

    def test_a_unit_that_keeps_its_own_frees_that_of_the_one_before(self):
        x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).requires_grad_()
        y = self.run_unit(self.units[0], x)
        call = self.offload._last()
        y = self.units[1](y)
        self.offload.end_forward((y, None))
        self.assertTrue(call._is_away and not call._is_back and self.offload._last is None)
        seen = []
        y.register_hook(lambda gradient: seen.append(call._is_back))  # Behind the hook that brings it back.
        y.sum().backward()
        self.assertEqual(seen, [True])

    def test_what_is_read_ahead_is_what_backward_needs_next(self):
        order, copies = [], []
        kind = getattr(_activations, self.copy)
        read = kind.read
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        with mock.patch.object(kind, "read", lambda copy: order.append(copies.index(copy)) or read(copy)):
            y = x
            for unit in self.units[:3]:
                y = self.run_unit(unit, y)
                copies.append(self.offload._last()._copy)
            y.sum().backward()
        self.assertEqual(order, [1, 0])  # The last one has stayed.

    def test_two_graphs_at_a_time(self):
        """As in a pipeline: the first forward's backward follows the second one's forward, or its backward."""
        for order in ((0, 1), (1, 0)):
            found = []
            for run in (nn.Module.__call__, self.run_unit):
                inputs = [torch.full((SIZE, SIZE), 0.1 * at, requires_grad=True) for at in range(2)]
                outputs = []
                for x in inputs:
                    y = x
                    for unit in self.units[:2]:
                        y = run(unit, y)
                    outputs.append(y)
                for at in order:
                    outputs[at].sum().backward()
                found.append([x.grad for x in inputs])
            self.assertTrue(all(map(torch.equal, *found)), order)

    def test_several_backwards_of_a_graph(self):
        found = []
        for run in (nn.Module.__call__, self.run_unit):
            x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).requires_grad_()
            y = run(self.units[1], run(self.units[0], x))
            y.sum().backward(retain_graph=True)
            y.square().sum().backward()
            (second,) = torch.autograd.grad(run(self.units[1], run(self.units[0], x)).sum(), x, create_graph=True)
            second.square().sum().backward()
            found.append(x.grad)
        self.assertTrue(torch.equal(*found))

    def test_a_checkpoint_inside(self):
        def run(call, unit, x):
            inside = lambda x: checkpoint(unit.forward, x, use_reentrant=False).cos()  # noqa: E731
            return call(inside, unit, x)

        expected = gradients(self.units, lambda unit, x: run(lambda inside, unit, x: inside(x), unit, x))
        offloaded = lambda inside, unit, x: self.offload.run(unit, inside, (x,), {})[0]  # noqa: E731
        self.assertTrue(all(map(torch.equal, gradients(self.units, lambda unit, x: run(offloaded, unit, x)), expected)))

    def test_a_graph_that_is_dropped_gives_its_file_back(self):
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        y = self.run_unit(self.units[1], self.run_unit(self.units[0], x))
        self.assertEqual(self.files(), 0)
        del y
        for thread in [self.offload.tier.writer] if self.copy == "_FileCopy" else []:
            thread.submit(int).result()  # It has written.
        self.assertEqual(self.files(), 2)
        y = self.run_unit(self.units[2], self.run_unit(self.units[1], self.run_unit(self.units[0], x)))
        y.register_hook(lambda gradient: {}[0])  # Reads are in flight.
        self.assertRaises(KeyError, y.sum().backward)
        del y
        expected = gradients(self.units, nn.Module.__call__)
        self.assertTrue(all(map(torch.equal, gradients(self.units, self.run_unit), expected)))

    def test_parameters_buffers_inputs_and_outputs_stay(self):
        weight = nn.Linear(SIZE, SIZE, bias=False)
        weight.register_buffer("scale", torch.ones(SIZE, SIZE))
        forward = lambda x: (x @ weight.weight * weight.scale).exp()  # noqa: E731
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        _, nbytes = self.offload.run(weight, forward, (x,), {})
        self.assertEqual(nbytes, 0)
        spare = lambda x: (x.exp().sin().detach(), x.sin())[1]  # noqa: E731
        self.assertEqual(self.offload.run(weight, spare, (x,), {})[1], 0)

    def test_a_tensor_that_is_written_after_forward_is_an_error(self):
        """As without it: where torch would raise, no gradient may be wrong. Be it in memory, on its way, away, or an input."""

        class Leaky(nn.Module):
            def forward(self, x):
                self.inner = x * 2
                return self.inner.exp() * self.inner + x * x

        for writes_input in (False, True):
            for after in (0, 1, 2):
                for run in (nn.Module.__call__, self.run_unit):
                    x = torch.ones(SIZE, SIZE, requires_grad=True)
                    unit, others = Leaky(), [Unit(), Unit()]
                    start = x * 1
                    y = run(unit, start)
                    for other in others[:after]:
                        y = run(other, y)
                    if after == 2:  # The next forward has ended: it may be away.
                        y = y * 1
                    with torch.no_grad():
                        (start if writes_input else unit.inner).add_(1)
                    is_away = after > 0 and run is not nn.Module.__call__ and not writes_input
                    if is_away:
                        y.sum().backward()  # The values that were saved are in the file.
                        self.assertTrue(x.grad.isfinite().all())
                    else:
                        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                            y.sum().backward()

    def test_written_while_it_leaves_is_an_error(self):
        class Leaky(nn.Module):
            def forward(self, x):
                self.inner = x * 2
                return self.inner.exp() * self.inner

        unit = Leaky()
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        y = self.run_unit(unit, x)
        with torch.no_grad():
            unit.inner.add_(1)
        y = self.run_unit(self.units[0], y)
        with self.assertRaisesRegex(RuntimeError, r"a tensor of shape \(64, 64\) .* modified by an inplace operation"):
            y.sum().backward()

    def test_a_disk_without_space_is_an_error(self):
        def full(*args):
            raise OSError(errno.ENOSPC, "No space left on device")

        with mock.patch.object(_scratch_file, "_fallocate", full), self.assertRaisesRegex(OSError, "could not reserve"):
            self.offload.tier.reserve([1])
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        self.offload.tier.reserve([1 << 20] * 2)
        with mock.patch.object(_scratch_file, "_pwritev", full):
            y = self.run_unit(self.units[1], x)
            with self.assertRaisesRegex(OSError, "could not write"):
                self.run_unit(self.units[2], y)

    def test_tensors_that_are_no_memory_of_their_own_stay(self):
        class Odd(nn.Module):
            def forward(self, x):
                conjugated = torch.complex(x, x.sin()).conj()
                sparse = x.relu().to_sparse()
                return (conjugated * conjugated).abs() + torch.sparse.mm(sparse, x) + x[:0].sum()

        unit = Odd()
        expected = gradients([unit], nn.Module.__call__)
        self.assertTrue(all(map(torch.equal, gradients([unit], self.run_unit), expected)))


class LateStream(TorchDispatchMode):
    """A stream whose copies run as late as they may: when another one waits for them."""

    def __init__(self, device=None):
        super().__init__()
        self.queue = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def wait_event(self, event):
        event.run()

    def wait_stream(self, other):
        while other.queue:
            other.queue.pop(0)()


class LateEvent:
    def __init__(self, device=None):
        self._upto = []

    def record(self, stream):
        self._stream, self._upto = stream, list(stream.queue)

    def run(self):
        while any(each in self._upto for each in self._stream.queue):
            self._stream.queue.pop(0)()


class StreamsTest(ActivationsTest):
    """The same in host memory, by streams. Here, host memory and the device's are one."""

    def setUp(self):
        super().setUp()
        self.main = LateStream()
        for target, name, value in (
            (torch, "Stream", LateStream),
            (torch, "Event", LateEvent),
            (torch.accelerator, "current_stream", lambda device: self.main),
            (_activations._HostTier, "_allocate", lambda tier, nbytes: torch.empty(nbytes, dtype=torch.uint8)),
        ):
            patch = mock.patch.object(target, name, value)
            patch.start()
            self.addCleanup(patch.stop)
        self.offload = ActivationOffload(torch.device("cpu"), None, [])

    copy = "_HostCopy"
    test_a_disk_without_space_is_an_error = test_memory_holds_two_units_of_any_number = None


@unittest.skipIf(DEVICE == "cpu", "its copies are on streams of a device")
class AcceleratorTest(ActivationsTest):
    """The same in page-locked host memory, on a GPU or its simulator (``make rehearse CHECK=fail``)."""

    def setUp(self):
        torch.set_default_device(DEVICE)
        self.addCleanup(torch.set_default_device, None)
        super().setUp()
        self.offload = ActivationOffload(torch.device(DEVICE), None, [])

    copy = "_HostCopy"
    test_a_disk_without_space_is_an_error = test_memory_holds_two_units_of_any_number = None
    test_tensors_that_are_no_memory_of_their_own_stay = None  # It has no products of sparse matrices.
    test_memory_that_is_free_is_not_read = None  # The simulator of CUDA finds such a read itself.
    # Nor does it allow a write while a copy reads: each of them makes such a gradient an error.
    test_a_tensor_that_is_written_after_forward_is_an_error = test_written_while_it_leaves_is_an_error = None


if __name__ == "__main__":
    unittest.main()
