"""Tensor types that say what is gathered (fsdp_pre_all_gather, fsdp_post_all_gather), against FSDP2 with the same type."""

import gc
import unittest
import weakref
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from common import collectives_seen, error_of, fake_group, ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_ragged.fsdp import fully_shard, memory_report, monitor, rows
from torch_ragged.fsdp.grads._weight_gradient import ComputeParameter


class Halved(torch.Tensor):
    """A float32 tensor that is gathered as bfloat16, in two tensors: its values, and one number of each rank."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self.data_ = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = pytree.tree_map_only(cls, lambda t: t.data_, (args, kwargs or {}))
        out = func(*unwrapped[0], **unwrapped[1])
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.mul_.Scalar, torch.ops.aten.add_.Tensor):
            return args[0]
        keeps = {"split", "slice", "view", "as_strided", "clone", "detach", "new_zeros", "empty_like", "_to_copy", "zeros_like"}
        keeps |= {"narrow", "alias", "view_as"}
        if func.overloadpacket.__name__ in keeps:
            return pytree.tree_map_only(torch.Tensor, cls, out)
        return out

    def __tensor_flatten__(self):
        return ["data_"], None

    @staticmethod
    def __tensor_unflatten__(inner, metadata, size, stride):
        return Halved(inner["data_"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert mesh.ndim == 1 and isinstance(module, nn.Linear)
        assert outer_size == module.weight.shape and outer_stride == (outer_size[1], 1)
        return (self.data_.bfloat16(), torch.tensor([float(mesh.get_local_rank())])), "metadata"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        values, ranks = outputs
        assert metadata == "metadata" and ranks.tolist() == list(range(dist.get_world_size()))
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):  # FSDP2 needs both.
                out.copy_(values.float())
            return None
        made = values.float()
        return made, (made,)


class Direct(Halved):
    """Computes with the gathered tensor itself."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.data_.bfloat16().float(),), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], outputs)


class Broken(Halved):
    fsdp_post_all_gather = property()


class Coded(torch.Tensor):
    """8-bit codes and their scale; it computes as the float32 tensor that they mean."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.size(), codes.stride(), dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].codes), args[0].scale)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.codes.float() * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __tensor_flatten__(self):
        return ["codes"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner, scale, size, stride):
        return Coded(inner["codes"], scale)


class Scaled(Halved):
    """Gathered as 8-bit codes with one scale for all ranks, as torchao's float8 weights are. It has FSDP2's operations only."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("slice", "narrow", "clone"):
            raise NotImplementedError(f"Scaled has no {func}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh):
        largest = self.data_.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        return ((self.data_ / (largest / 127)).round().to(torch.int8),), largest / 127

    def fsdp_post_all_gather(self, outputs, scale, param_dtype, *, out=None):
        if out is None:
            return Coded(outputs[0], scale), outputs
        out.scale = scale
        return None


def build(shard, width, hidden, mesh, **knobs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
    for linear in (model[0], model[2]):
        linear.weight = nn.Parameter(Halved(linear.weight.detach().clone()))
        shard(linear, mesh=mesh, **knobs)
    return shard(model, mesh=mesh, **knobs)


def step(model, x, lr=0.1):
    loss = model(x).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.add_(parameter.grad.to_local(), alpha=-lr)
            parameter.grad = None
    return loss.item()


def batch(number, rank, width):
    return torch.randn(5, width, generator=torch.Generator().manual_seed(100 * number + rank))


def _plain(parameter):
    local = parameter.to_local()
    return local.data_ if isinstance(local, Halved) else parameter.full_tensor()


def check_uneven():
    """Rows that do not divide by the ranks: FSDP2 leaves padding to the type, here the type need not know."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build(fully_shard, 7, 5, init_device_mesh("cpu", (ranks,)))
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 7))
    masters = [parameter.detach().clone() for parameter in single.parameters()]
    for number in range(3):
        with torch.no_grad():
            for parameter, master in zip(single.parameters(), masters, strict=True):
                parameter.copy_(master.bfloat16().float() if parameter.ndim == 2 else master)
        single(torch.cat([batch(number, other, 7) for other in range(ranks)])).pow(2).mean().backward()
        for parameter, master in zip(single.parameters(), masters, strict=True):
            master -= 0.1 * parameter.grad
            parameter.grad = None
        step(model, batch(number, rank, 7))
    for parameter, master in zip(model.parameters(), masters, strict=True):
        local = parameter.to_local()
        if isinstance(local, Halved):
            first = rank * -(-len(master) // ranks)
            torch.testing.assert_close(local.data_, master[first : first + len(local)])
            assert len(local) == max(0, min(-(-len(master) // ranks), len(master) - first))


def check_errors():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def linear(cls):
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(cls(module.weight.detach().clone()))
        return module

    by_columns = error_of(fully_shard, linear(Halved), mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    model = fully_shard(linear(Halved), mesh=mesh, orig_param_policy=lambda f, p: rows(2))
    return [by_columns, error_of(fully_shard, linear(Broken), mesh=mesh), error_of(model.double)]


class Beside(Halved):
    """Gathers two more tensors of each rank, which are no rows, beside its rows."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.data_, torch.ones(len(self.data_)), torch.ones(1, self.data_.size(1))), None

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        self.shapes.append([tuple(output.shape) for output in outputs])
        return None if out is not None else (outputs[0], outputs)

    shapes: "list[list[tuple[int, ...]]]" = []


def build_of_types(shard, types, sizes, mesh):
    """One module with several types, each in a Linear without bias, and a plain parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:])), nn.LayerNorm(sizes[-1]))
    for linear, type_ in zip(model, types):
        linear.weight = nn.Parameter(type_(linear.weight.detach().clone()))
    return shard(model, mesh=mesh)


def check_types_against_one_rank(types, sizes):
    """Each type is padded on its own, and so is its gradient. A type may communicate itself."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_of_types(fully_shard, types, sizes, init_device_mesh("cpu", (ranks,)))
    single = build_of_types(lambda model, mesh: model, types, sizes, None)
    for linear in single[:-1]:
        value, scale = linear.weight.data_, linear.weight.data_.abs().max() / 127
        is_scaled = type(linear.weight) is Scaled
        linear.weight = nn.Parameter((value / scale).round() * scale if is_scaled else value.bfloat16().float())
    inputs = [batch(0, each, sizes[0]) for each in range(ranks)]
    for factor in (1.0, -2.0):  # The second pass fills the same tensors again. Gradients add up in .grad.
        with torch.no_grad():
            for weight in model.parameters():
                weight.to_local().mul_(factor)
            for weight in single.parameters():
                weight.mul_(factor)
        model(inputs[rank]).pow(3).mean().backward()
        single(torch.cat(inputs)).pow(3).mean().backward()
    for mine, wanted in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad, rtol=1e-5, atol=1e-5)


class ReturnsWeight(nn.Linear):
    def forward(self, x):
        return self.weight


class OneRankTest(unittest.TestCase):
    def layer(self, cls, type_, rows=4):
        layer = cls(8, rows, bias=False)
        layer.weight = nn.Parameter(type_(layer.weight.detach()))
        return layer

    def test_a_module_that_returns_its_weight_stays_unsharded(self):
        for type_ in (Halved, Direct, Scaled):
            with self.subTest(type_), fake_group(1):
                layer = self.layer(ReturnsWeight, type_)
                before = layer.weight.data_.clone()
                model = fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
                with torch.no_grad():
                    output = model(torch.ones(1)) + 0
                torch.testing.assert_close(output, before, rtol=2**-6, atol=2**-6)

    def test_the_last_ranks_may_have_no_rows(self):
        for rank in range(4):
            with fake_group(4, rank):
                layer = nn.Linear(3, 2, bias=False)
                layer.weight = nn.Parameter(Halved(torch.arange(6.0).view(2, 3)))
                model = fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
                local = model.weight.to_local()
                self.assertEqual(local.data_.tolist(), [[3.0 * rank, 3.0 * rank + 1, 3.0 * rank + 2]] if rank < 2 else [])
                self.assertEqual(local.shape, (int(rank < 2), 3))
                (group,) = model._ragged_groups(recurse=True)
                self.assertFalse(group.sharded.is_allocated)

    def test_persistent_buffers_leave_the_memory_of_types_alone(self):
        outputs = []
        for is_persistent in (False, True):
            with fake_group(1):
                torch.manual_seed(0)
                model = fully_shard(self.layer(nn.Linear, Direct), mesh=init_device_mesh("cpu", (1,)))
                model.set_persistent_buffers(is_persistent)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    output = model(torch.ones(1, 8))
                    output.sum().backward()
                    optimizer.step()
                outputs.append(output.detach())
        self.assertTrue(torch.equal(*outputs))

    @fake_group(1)
    def test_a_tensor_that_wraps_a_view_of_a_parameter_holds_it(self):
        model = fully_shard(self.layer(nn.Linear, Halved), mesh=init_device_mesh("cpu", (1,)))
        (group,) = model._ragged_groups(recurse=True)
        self.assertFalse(group.encoding.holds(torch.zeros(4, 8)))
        model.unshard()
        self.assertTrue(group.encoding.holds(model.weight))
        self.assertTrue(group.encoding.holds(TwoTensor(torch.zeros(4, 8), model.weight.detach())))
        self.assertFalse(group.encoding.holds(TwoTensor(torch.zeros(4, 8), torch.zeros(4, 8))))

    def test_the_memory_of_gathered_tensors_is_noted(self):
        for type_, nbytes in ((Halved, 2 * 32 + 4 + 4 * 32), (Direct, 4 * 32)):  # All-gathered, and computed with.
            with fake_group(1):
                model = fully_shard(self.layer(nn.Linear, type_), mesh=init_device_mesh("cpu", (1,)))
                log = model._ragged_groups(recurse=True)[0].memory.gathered
                log.start()
                for _ in range(2):
                    model.unshard()
                    self.assertEqual(sum(each for _, each in log.events), nbytes)
                    model.reshard()
                    self.assertEqual(sum(each for _, each in log.events), 0)

    def test_what_is_sent_is_packed_until_it_has_arrived(self):
        for rank in range(2):
            with fake_group(2, rank):
                layers = nn.Sequential(self.layer(nn.Linear, Beside), self.layer(nn.Linear, Beside))
                model = fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
                (group,) = model._ragged_groups(recurse=True)
                log = group.memory.gathered
                sent = 2 * 4 * (2 * 8 + 2 + 8)  # Of each rank, for each layer: its rows, a number for each, and a row.
                for is_first in (True, False):
                    log.start()
                    model.unshard(async_op=True)
                    self.assertEqual(sum(each for _, each in log.events), 2 * sent)
                    self.assertEqual(group.kept_nbytes, 2 * sent)
                    model.unshard()
                    self.assertEqual(sum(each for _, each in log.events), 2 * sent)
                    self.assertEqual(group.kept_nbytes, 2 * sent)
                    self.assertEqual(max(each for _, each in log.events), 2 * sent)
                    mine = [weight.detach()[2 * rank : 2 * rank + 2] for weight in model.parameters()]
                    sharded = [param.sharded.to_local().data_ for param in group.params]
                    self.assertTrue(all(map(torch.equal, mine, sharded)), is_first)
                    model.reshard()
                    self.assertEqual(sum(each for _, each in log.events), 0)

    def test_a_memory_report_predicts_the_gradients_of_types(self):
        for counts in ((4, 4), (3, 5, 1)):  # Rows, also uneven ones.
            with fake_group(2):
                layers = nn.Sequential(*(self.layer(nn.Linear, Direct, rows) for rows in counts))
                model = fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))
                padded = sum(2 * -(-rows // 2) for rows in counts)
                self.assertEqual(memory_report(model).peak.gradients, 4 * 8 * padded)

    def test_types_on_the_meta_device_are_materialized_together(self):
        with fake_group(1):
            layers = nn.Sequential(self.layer(nn.Linear, Direct, 8), self.layer(nn.Linear, Direct))
            for layer in layers:
                layer.weight = nn.Parameter(Direct(layer.weight.data_.to("meta")))
            model = fully_shard(layers, mesh=init_device_mesh("cpu", (1,))).to_empty(device="cpu")
            with torch.no_grad():
                for factor, weight in enumerate(model.parameters(), 2):
                    weight.to_local().data_.fill_(factor)
            output = model(torch.ones(1, 8))
            self.assertEqual(output.tolist(), [[8.0 * 16 * 3] * 4])
            output.sum().backward()
            self.assertEqual([weight.grad.shape for weight in model.parameters()], [(8, 8), (4, 8)])

    def test_an_error_of_one_type_leaves_all_sharded(self):
        with fake_group(1):
            layers = nn.Sequential(self.layer(nn.Linear, Direct), self.layer(nn.Linear, Direct))
            model = fully_shard(layers, mesh=init_device_mesh("cpu", (1,)))
            made = mock.Mock(wraps=Direct.fsdp_post_all_gather, side_effect=[mock.DEFAULT, ZeroDivisionError])
            with mock.patch.object(Direct, "fsdp_post_all_gather", lambda self, *args, **out: made(self, *args, **out)):
                self.assertRaises(ZeroDivisionError, model.unshard)
            self.assertEqual(memory_report(model).total.gathered, 0)
            model.unshard()
            self.assertEqual([type(weight.detach()) for weight in model.parameters()], [torch.Tensor] * 2)

    def test_padding_is_cut_from_gathered_rows_only(self):
        with fake_group(2):
            layer = nn.Linear(4, 3, bias=False)
            layer.weight = nn.Parameter(Beside(torch.zeros(3, 4)))
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))(torch.ones(1, 4))
        self.assertEqual(Beside.shapes, [[(3, 4), (4,), (2, 4)]])

    def test_gradients_of_types_with_their_own_all_gather_are_autograds(self):
        with fake_group(1), mock.patch("torch_ragged.fsdp.core._fsdp_param_group.SMALLEST_WRITTEN_IN_PLACE", 1):
            model = fully_shard(self.layer(nn.Linear, Direct), mesh=init_device_mesh("cpu", (1,)))
            for _ in range(2):
                model(torch.ones(1, 8)).sum().backward()
            (group,) = model._ragged_groups(recurse=True)
            self.assertFalse(any(isinstance(param.unsharded, ComputeParameter) for param in group.params))
            self.assertTrue(torch.equal(model.weight.grad.full_tensor(), torch.full((4, 8), 2.0)))


class ExtensionTest(unittest.TestCase):
    @ranks(4)
    def test_extensions_are_gathered_as_fsdp2s():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        for knobs in ({}, {"reshard_after_forward": False}, {"reshard_after_forward": ranks // 2}):
            ours = build(fully_shard, 4 * ranks, 2 * ranks, mesh, **knobs)
            if knobs.get("reshard_after_forward"):
                knobs = {}  # A number of ranks is True here, for types of several gathered tensors an error in FSDP2.
            theirs = build(torch_fully_shard, 4 * ranks, 2 * ranks, mesh, **knobs)
            with torch.inference_mode():  # What is made here serves training too; not so in FSDP2.
                ours(batch(9, rank, 4 * ranks))
            assert ours[0].weight.placements == (Shard(0),) and type(ours[0].weight.to_local()) is Halved
            for number in range(4):
                x = batch(number, rank, 4 * ranks)
                assert torch.allclose(torch.tensor(step(ours, x)), torch.tensor(step(theirs, x)), rtol=1e-5)
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(_plain(mine), _plain(other))
        held = memory_report(ours).total.gathered
        assert held == 0, held  # All memory is freed.

    def test_the_whole_tensor_is_freed_and_what_the_user_has_set_stays(self):
        with fake_group(4):
            model = nn.Linear(8, 4)
            model.weight = nn.Parameter(Halved(torch.ones(4, 8)))
            model.weight.decays, model.weight.scales = False, torch.ones(2)
            whole, scales = weakref.ref(model.weight.data_), model.weight.scales
            fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
            gc.collect()
            self.assertIsNone(whole())
            self.assertIs(model.weight.decays, False)
            self.assertIs(model.weight.scales, scales)

    @ranks(2)
    def test_types_of_one_module_are_gathered_by_one_collective():
        """Types that send different numbers of tensors, of different dtypes."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh, sizes = init_device_mesh("cpu", (ranks,)), [ranks * each for each in (3, 1, 4, 2, 5)]
        models = [
            build_of_types(shard, (Halved, Direct, Halved, Direct), sizes, mesh) for shard in (torch_fully_shard, fully_shard)
        ]
        seen = [[], []]
        for number in range(3):
            losses = []
            for model, calls in zip(models, seen, strict=True):
                for run in (
                    lambda: losses.append(model(batch(number, rank, sizes[0])).pow(3).mean()),
                    lambda: losses[-1].backward(),
                ):
                    with CommDebugMode() as mode:
                        run()
                    calls.append(collectives_seen(mode))
            assert torch.equal(*losses), losses
            for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-6, atol=1e-7)
                for each in (theirs, ours):
                    with torch.no_grad():
                        each.to_local().add_(each.grad.to_local(), alpha=-0.1)
                    each.grad = None
        # One group of types and one of plain parameters. Each is gathered once per pass, and FSDP2's only group, too. The root
        # stays unsharded after forward.
        assert seen == [[(1, 0), (0, 1)] * 3, [(2, 0), (0, 2)] * 3], seen

    def test_types_of_one_module_have_the_gradients_of_one_rank(self):
        run_ranks(2, check_types_against_one_rank, (Halved, Direct, Scaled, Direct), (6, 2, 8, 4, 10))
        for world in (2, 3):  # Uneven rows, and ranks without rows.
            run_ranks(world, check_types_against_one_rank, (Halved, Direct, Halved, Direct), (7, 2, 5, 1, 4))

    def test_rows_of_extensions_need_not_divide_by_the_ranks(self):
        for world in (2, 3):
            run_ranks(world, check_uneven)

    @ranks(2)
    def test_types_that_compute_with_what_was_gathered():
        """A type may compute with what was all-gathered: it is gathered again for backward, and its bytes count once."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False))
        single = nn.Sequential(nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False))
        for linear, other in ((model[0], single[0]), (model[2], single[2])):
            other.weight = nn.Parameter(linear.weight.detach().bfloat16().float())
            linear.weight = nn.Parameter(Direct(linear.weight.detach().clone()))
            fully_shard(linear, mesh=mesh)
        fully_shard(model, mesh=mesh)
        inputs = [batch(0, other, 16) for other in range(ranks)]
        with monitor(model) as watched:
            peaks = []
            for _ in range(3):
                model(inputs[rank]).pow(2).mean().backward()
                peaks.append(watched.step()["buffer_peak_bytes"])
        model.zero_grad()
        model(inputs[rank]).pow(2).mean().backward()
        single(torch.cat(inputs)).pow(2).mean().backward()
        for mine, wanted in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)
        assert len(set(peaks)) == 1, peaks
        model[0].unshard()
        assert memory_report(model).total.gathered == model[0].weight.nbytes

    @ranks(2)
    def test_types_that_keep_numbers_of_an_all_gather_as_attributes():
        """What the type writes to ``out`` is what the model computes with: this all-gather's scale, not the first one's."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for factor in (1.0, -3.0, 0.1):
            if factor == 1.0:
                torch.manual_seed(0)
                model = nn.Linear(16, 8, bias=False)
                whole = model.weight.detach().clone()
                model.weight = nn.Parameter(Scaled(whole.clone()))
                fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)), reshard_after_forward=True)
            whole *= factor
            with torch.no_grad():
                model.weight.to_local().mul_(factor)
            scale = whole.abs().max() / 127
            x = batch(1, rank, 16).requires_grad_()
            out = model(x)
            torch.testing.assert_close(out, x @ ((whole / scale).round() * scale).t(), rtol=0, atol=0)
            out.sum().backward()  # It is all-gathered again: writes to the parameter must not look like writes of the model.
            torch.testing.assert_close(x.grad, ((whole / scale).round() * scale).sum(0).expand_as(x))

    @ranks(4)
    def test_model_parallel_in_inference_mode_first():
        """What the first forward makes in inference mode serves training, also if it is a DTensor."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        part = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)]).to_local().clone()
        model.weight = nn.Parameter(DTensor.from_local(Direct(part), mesh["tp"], [Shard(0)], run_check=False))
        fully_shard(model, mesh=mesh["dp"])
        x = DTensor.from_local(torch.ones(2, 8), mesh["tp"], run_check=False)
        with torch.inference_mode():
            model(x)
        for _ in range(2):
            model(x).to_local().sum().backward()
        assert torch.equal(model.weight.grad.to_local(), torch.full((2, 8), 4.0))

    def test_bad_extensions_are_refused(self):
        words = (
            "does not support the placement Shard(1) of weight: return Shard(0) or None from shard_placement_fn",
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be",
            "convert it before",
        )
        for errors in run_ranks(2, check_errors):
            for error, text in zip(errors, words, strict=True):
                self.assertIn(text, error)
