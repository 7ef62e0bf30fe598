"""reshard_to: a model that trains goes to another mesh, with its optimizers, as through a checkpoint but without one."""

import gc
import tempfile
import time
import unittest
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from soon import soon
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_ragged import checkpoint, transfer
from torch_ragged.fsdp import HIERARCHICAL, ZERO1, ZERO2, fully_shard, reshard_to, rows
from torch_ragged.optim import AdamW8bit, Muon, Shampoo, matrix_groups

WIDTH, LAYERS, BATCH = 72, 2, 120


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 90), nn.Linear(90, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Matrices, vectors, a scalar, a frozen parameter, one without gradient, a buffer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "muon": lambda model: Muon(matrix_groups(model, adamw=[model.head], lr=0.01), lr=0.02),
    "8bit": lambda model: AdamW8bit(model.parameters(), lr=0.01),
    "shampoo": lambda model: Shampoo(matrix_groups(model, adamw=[model.head], lr=0.01), lr=0.02, interval=2),
}


def is_in(mesh):
    return mesh.get_coordinate() is not None


def build(mesh, optimizer="adamw", policy=None, seed=0, **knobs):
    """The model and its optimizer; on the meta device on ranks that are not in the mesh."""
    torch.manual_seed(seed)
    with torch.device("cpu" if is_in(mesh) else "meta"):
        model = Model()
    knobs = {"mesh": mesh, "orig_param_policy": AdamW8bit.policy if optimizer == "8bit" else policy, **knobs}
    for layer in model.layers:
        fully_shard(layer, **knobs)
    return fully_shard(model, **knobs), OPTIMIZERS[optimizer](model)


def backward(model, mesh, step):
    """This rank's part of the same global batch on any mesh; its loss. Nothing on a rank that is not in the mesh."""
    if not is_in(mesh):
        return None
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    index, ranks = mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size()
    loss = (model(data[index * BATCH // ranks : (index + 1) * BATCH // ranks]) - 1).square().mean()
    loss.backward()
    return loss.item()


def train(model, optimizer, mesh, *steps):
    for step in steps:
        backward(model, mesh, step)
        optimizer.step()
        optimizer.zero_grad()


def states_of(model, optimizer):
    """Parameters, gradients and states by name, as they are."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        found[f"{name}.grad"] = param.grad
        found |= {f"{name}.{key}": value for key, value in optimizer.state.get(param, {}).items()}
    return found


def wholes(found):
    """The same, copied out of the mesh: it must exist on all ranks that call."""
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def assert_equal(found, expected, what, same_placements=False):
    """Bitwise equality on the ranks of the mesh, also of placements."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in found.items():
        other = expected[name]
        if not isinstance(value, DTensor):
            assert value == other if not isinstance(value, torch.Tensor) else torch.equal(value, other), (what, name)
            continue
        assert isinstance(other, DTensor) and value.dtype == other.dtype, (what, name)
        if same_placements:
            assert value.placements == other.placements, (what, name, value.placements, other.placements)
        assert torch.equal(value.full_tensor(), other.full_tensor()), (what, name)


def bytes_of(model, optimizer):
    """Bytes of all parameters, gradients and states, and of the groups' buffers, on this rank."""
    tensors = [t for t in states_of(model, optimizer).values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    local = sum((t.to_local() if isinstance(t, DTensor) else t).untyped_storage().nbytes() for t in tensors)
    buffers = [buffer for group in model._ragged_groups(recurse=True) for part in group.buffers().values() for buffer in part]
    return local + sum(buffer.flat.untyped_storage().nbytes() for buffer in buffers if not buffer.flat.is_meta)


# -- 8 ranks -------------------------------------------------------------------------------------------------------------


def as_through_checkpoints(names, folder):
    """8 -> 5 -> 8, with steps between. On each mesh, all values are those that a checkpoint brings to a new model there."""
    whole, fewer = init_device_mesh("cpu", (8,)), DeviceMesh("cpu", [0, 1, 3, 4, 6])
    for name in names:
        model, optimizer = build(whole, name)
        mesh, step = whole, 0
        for target in (fewer, whole):
            train(model, optimizer, mesh, step, step + 1)
            step += 2
            if is_in(mesh):
                state = checkpoint.TrainState(model, optimizer, step=step)
                checkpoint.save(f"{folder}/{name}", state, process_group=mesh.get_group())
            reshard_to(model, optimizer, target)
            mesh = target
            dist.barrier()
            twin, its_optimizer = build(mesh, name, seed=1)
            if is_in(mesh):
                checkpoint.load(f"{folder}/{name}", checkpoint.TrainState(twin, its_optimizer), process_group=mesh.get_group())
                same = name != "shampoo"  # Its next step places states at their roots.
                assert_equal(states_of(model, optimizer), states_of(twin, its_optimizer), f"{name} on {mesh}", same)
                train(model, optimizer, mesh, step)
                train(twin, its_optimizer, mesh, step)
                assert_equal(states_of(model, optimizer), states_of(twin, its_optimizer), f"{name} later on {mesh}", True)
                assert set(getattr(optimizer, "_roots", {})) <= set(model.parameters())  # Roots of the new parameters only.
            else:
                assert not optimizer.state and bytes_of(model, optimizer) == 0, name
            step += 1
        assert [layer.calls.item() for layer in model.layers] == [6] * LAYERS  # Ranks that return get what they missed.


# -- 4 ranks -------------------------------------------------------------------------------------------------------------


def training_goes_on(name, raf):
    """1 -> 3 -> HSDP 2 x 2 -> 4 -> HSDP 1 x 3 -> 2 others. The largest difference to a run on 4 ranks without interruption."""
    steady = init_device_mesh("cpu", (4,))
    meshes = [
        DeviceMesh("cpu", [2]),
        DeviceMesh("cpu", [0, 1, 3]),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        init_device_mesh("cpu", (4,)),
        DeviceMesh("cpu", [[0, 1, 3]]),
        DeviceMesh("cpu", [1, 3]),
    ]
    expected, its_optimizer = build(steady, name)
    model, optimizer = build(meshes[0], name, reshard_after_forward=raf)
    differences = []
    for index, mesh in enumerate(meshes):
        if index:
            reshard_to(model, optimizer, mesh)
        for step in (2 * index, 2 * index + 1):
            train(model, optimizer, mesh, step)
            train(expected, its_optimizer, steady, step)
        for (fqn, param), want in zip(model.named_parameters(), expected.parameters(), strict=True):
            kinds = [Replicate] * (mesh.ndim - 1)
            assert param.device_mesh == mesh and [type(each) for each in param.placements[:-1]] == kinds, fqn
            want = want.full_tensor()
            if is_in(mesh):
                differences.append((param.full_tensor() - want).abs().max().item())
    moved = (expected.head.weight.full_tensor() - build(steady)[0].head.weight.full_tensor()).abs().max().item()
    return max(differences, default=0.0), moved


def dormant_models():
    """On a rank outside of the mesh: names, shapes and placements as on the others, no bytes, no collective, no forward."""
    mesh = DeviceMesh("cpu", [1, 2])
    model, optimizer = build(mesh, policy=lambda fqn, p: rows(2) if p.ndim == 2 else None)
    shapes = [(name, p.shape, p.dtype, p.placements, p.requires_grad) for name, p in model.named_parameters()]
    every = [None] * 4
    dist.all_gather_object(every, repr(shapes))
    assert len(set(every)) == 1
    optimizer.step()
    offloaded, _ = build(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert all(param.to_local().is_cpu for param in offloaded.parameters())
    if is_in(mesh):
        return ["", "", "", 0]
    model.to_empty(device="cpu")
    model.set_gradient_divide_factor(2.0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert list(model.state_dict()) and not optimizer.state
    data = torch.zeros(2, WIDTH)
    return [error_of(model, data), error_of(model.unshard), error_of(model.half), bytes_of(model, optimizer)]


class Replicated(torch.optim.Optimizer):
    """Each parameter has a state of two numbers, which every rank holds."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for number, param in enumerate(self.param_groups[0]["params"]):
            numbers = torch.tensor([number, 7.0])
            self.state[param]["numbers"] = DTensor.from_local(numbers, param.device_mesh, [Replicate()], run_check=False)


class Blind(torch.optim.Optimizer):
    """Its state has a shape of its own."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.ndim == 2:
                mesh = param.device_mesh
                self.state[param]["rows"] = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)


@soon()
def errors():
    """Each is raised on all ranks before anything moves, and the model trains on as if the call had not been made."""
    rank, mesh, fewer = dist.get_rank(), init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1, 2])
    model, optimizer = build(mesh)
    twin, its_optimizer = build(mesh)
    train(model, optimizer, mesh, 0)
    train(twin, its_optimizer, mesh, 0)
    params = list(model.parameters())
    found = {
        "plain model": error_of(reshard_to, nn.Linear(2, 2), None, fewer),
        "no mesh": error_of(reshard_to, model, optimizer, [0, 1]),
        "one rank": error_of(reshard_to, model, optimizer, fewer if rank else None),
        "meshes differ": error_of(reshard_to, model, optimizer, fewer if rank else mesh),
        "3-D": error_of(reshard_to, model, optimizer, init_device_mesh("cpu", (2, 2, 1))),
        "inner module": error_of(reshard_to, model.layers[0], optimizer, fewer),
        "optimizer": error_of(reshard_to, model, "adamw", fewer),
        "foreign": error_of(reshard_to, model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0), fewer),
    }
    model.set_requires_gradient_sync(False)
    backward(model, mesh, 1)
    found["unreduced"] = error_of(reshard_to, model, optimizer, fewer)
    model.reset_iter_state()
    assert not any(state.calls for state in model._ragged_states(recurse=True))
    groups = model._ragged_groups(recurse=True)
    assert not any(each.needs_reduction or each.is_pending for each in groups)
    model.set_requires_gradient_sync(True)
    hook = model.head.register_forward_hook(lambda *_: found.update(forward=error_of(reshard_to, model, optimizer, fewer)))
    model(torch.zeros(1, WIDTH))
    hook.remove()
    loss = model(torch.zeros(1, WIDTH)).sum()
    handle = model.head.weight.register_hook(lambda g: found.update(backward=error_of(reshard_to, model, optimizer, fewer)))
    loss.backward()
    handle.remove()
    model.zero_grad()
    model.set_persistent_buffers()
    found["persistent"] = error_of(reshard_to, model, optimizer, fewer)
    model.set_persistent_buffers(False)
    blind = Blind(params)
    blind.step()
    found["blind"] = error_of(reshard_to, model, blind, fewer)
    weight, step = model.head.weight, optimizer.state[model.head.weight]["step"]
    if rank == 2:
        optimizer.state[weight]["step"] = torch.ones(3)
    found["plain state"] = error_of(reshard_to, model, optimizer, fewer)
    optimizer.state[weight]["step"] = step
    weight.grad = torch.zeros_like(weight) if rank == 2 else None
    found["gradients differ"] = error_of(reshard_to, model, optimizer, fewer)
    weight.grad = None
    last = optimizer.state[list(model.parameters())[-1]]
    for having, case in (((2,), "a state more"), ((0, 1, 3), "a state less")):
        if rank in having:
            last["more"] = 1.0
        found[case] = error_of(reshard_to, model, optimizer, fewer)
        last.pop("more", None)
    group = dist.new_group([0, 1, 2])
    found["group"] = error_of(reshard_to, model, optimizer, fewer, group=group)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found["unordered"] = error_of(reshard_to, model, optimizer, DeviceMesh("cpu", [1, 0, 2, 3]))
    neighbours = build(init_device_mesh("cpu", (4,)), reshard_after_forward=2)
    with torch.device("meta"):
        found["meta"] = error_of(reshard_to, fully_shard(nn.Linear(4, 4), mesh=mesh), None, fewer)
    found["neighbours"] = error_of(reshard_to, *neighbours, fewer)
    found["replicas"] = error_of(reshard_to, *build(mesh, placements=ZERO2), square)
    found["hierarchical"] = error_of(reshard_to, *build(square, placements=HIERARCHICAL), fewer)
    parallel = Model()
    parallelize_module(parallel.layers[0], square["b"], {"up": ColwiseParallel()})
    found["tensor parallel"] = error_of(reshard_to, fully_shard(parallel, mesh=square["a"]), None, fewer)
    with mock.patch.object(transfer.Plan, "run", side_effect=KeyError("network")):  # While elements are on their way.
        found["move"] = error_of(reshard_to, model, optimizer, fewer)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    train(model, optimizer, mesh, 1)
    train(twin, its_optimizer, mesh, 1)
    assert_equal(states_of(model, optimizer), states_of(twin, its_optimizer), "after errors", True)
    loss = model(torch.zeros(1, WIDTH)).sum()
    reshard_to(model, optimizer, fewer)
    found["stale graph"] = error_of(loss.backward)
    train(model, optimizer, fewer, 2)
    return found


def a_smaller_group(reference):
    """A rank that has left may end: the others pass a group without it."""
    three, two, whole = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 2]), init_device_mesh("cpu", (4,))
    model, optimizer = build(whole)
    train(model, optimizer, whole, 0)
    reshard_to(model, optimizer, three)
    if dist.get_rank() == 3:
        return None
    train(model, optimizer, three, 1)
    reshard_to(model, optimizer, two, group=three.get_group())
    train(model, optimizer, two, 2)
    return is_in(two) and torch.isfinite(model.head.weight.full_tensor()).all().item()


class ReshardToTest(unittest.TestCase):
    @pytest.mark.slow
    def test_values_are_those_of_a_checkpoint_at_the_new_size(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(8, as_through_checkpoints, ("adamw", "muon", "8bit"), folder)

    @pytest.mark.slow
    def test_values_of_other_optimizers_are_those_of_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(8, as_through_checkpoints, ("sgd", "fused", "shampoo"), folder)

    def test_training_goes_on_as_without_interruption(self):
        for difference, moved in run_ranks(4, training_goes_on, "adamw", None):
            self.assertLess(difference, 1e-5)
            self.assertGreater(moved, 0.05)

    @pytest.mark.slow
    def test_training_of_other_optimizers_goes_on(self):
        for name, limit in {"sgd": 1e-5, "fused": 1e-5, "8bit": 1e-2, "muon": 1e-2, "shampoo": 1e-2}.items():
            for difference, moved in run_ranks(4, training_goes_on, name, True):
                self.assertLess(difference, limit, name)
                self.assertGreater(moved, 0.02, name)

    @ranks(4)
    def test_gradients_options_and_buffers_move():
        old, new = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])
        model, optimizer = build(old)
        if is_in(old):
            train(model, optimizer, old, 0)
            backward(model, old, 1)
            optimizer.param_groups[0].update(lr=0.125, betas=(0.5, 0.75))
            model.layers[1].up.weight.requires_grad_(False)
        groups = optimizer.param_groups
        before = [wholes(states_of(model, optimizer)) if is_in(old) else None]
        objects = dict(model.named_parameters())
        reshard_to(model, optimizer, new)
        dist.broadcast_object_list(before, src=0)
        assert optimizer.param_groups is groups
        assert all(a is b for a, b in zip(groups[0]["params"], model.parameters(), strict=True)), (
            "the optimizer holds other parameters"
        )
        assert not any(param is objects[name] for name, param in model.named_parameters())
        if is_in(new):
            assert (groups[0]["lr"], groups[0]["betas"]) == (0.125, (0.5, 0.75))
            after = wholes(states_of(model, optimizer))
            assert after.keys() == before[0].keys()
            assert all(torch.equal(value.cpu(), after[name].cpu()) for name, value in before[0].items() if value is not None)
            assert [name for name, value in after.items() if value is None] == [n for n, v in before[0].items() if v is None]
            frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
            assert sorted(frozen) == ["frozen", "layers.1.up.weight"]
            assert [layer.calls.item() for layer in model.layers] == [2] * LAYERS
            before_step = model.head.weight.full_tensor()
            optimizer.step()  # With the gradients that moved.
            assert not torch.equal(model.head.weight.full_tensor(), before_step)
        else:
            assert bytes_of(model, optimizer) == 0

    def test_a_rank_outside_of_the_mesh_has_a_dormant_model(self):
        for rank, (forward, unshard, half, nbytes) in enumerate(run_ranks(4, dormant_models)):
            if rank in (0, 3):
                self.assertRegex(forward, f"RuntimeError: rank {rank} is not in the mesh .*call reshard_to")
                self.assertRegex(unshard, f"RuntimeError: rank {rank} is not in the mesh .*call reshard_to")
                self.assertRegex(half, "cannot become torch.float16 on rank")
            self.assertEqual(nbytes, 0)

    @ranks(4)
    def test_old_shards_are_freed():
        """After the call, nothing holds the old shards: no state, no hook, no cache of an optimizer."""
        old, new = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1, 2])
        for name in ("adamw", "muon", "8bit", "shampoo"):
            model, optimizer = build(old, name)
            train(model, optimizer, old, 0, 1)
            gone = [weakref.ref(group.sharded) for group in model._ragged_groups(recurse=True)]
            gone += [weakref.ref(param) for param in model.parameters()]
            gone += [weakref.ref(v) for v in states_of(model, optimizer).values() if isinstance(v, DTensor) and v.ndim]
            gc.collect()
            gc.disable()
            try:
                reshard_to(model, optimizer, new)
                deadline = time.monotonic() + 10  # A thread that looks where a slow rank is holds its frames for a moment.
                while any(each() is not None for each in gone) and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert len(gone) > 20 and not [each for each in gone if each() is not None], name
            finally:
                gc.enable()

    @ranks(4)
    def test_settings_stay():
        old, new = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [1, 3])
        seen = []
        model, optimizer = build(old, reshard_after_forward=2)
        model.set_gradient_divide_factor(8.0)
        gathered = []

        def gather(output, shard, group, async_op):
            gathered.append(output.numel())
            return dist.all_gather_into_tensor(output, shard, group=group, async_op=async_op)

        model.set_custom_all_gather(gather)
        model.set_all_reduce_hook(lambda shard: seen.append(shard.numel()))
        model.layers[0].set_reshard_after_backward(False)
        weight = model.head.weight
        weight.role = "head"
        train(model, optimizer, old, 0)
        seen.clear()
        names = [group.fqn for group in model._ragged_groups(recurse=True)]
        reshard_to(model, optimizer, new)
        gathered.clear()
        backward(model, new, 1)
        assert model.head.weight.role == "head"
        assert bool(gathered) == is_in(new)
        assert names == [group.fqn for group in model._ragged_groups(recurse=True)] and names[0]
        if is_in(new):
            group = model._ragged_groups(recurse=False)[0]
            assert seen == [group.layout.shard_numel] and group.layout.ranks == 2
            halved = model.head.bias.grad.full_tensor()
            model.zero_grad()
            model.set_gradient_divide_factor(2.0)
            backward(model, new, 1)
            torch.testing.assert_close(model.head.bias.grad.full_tensor(), 4 * halved)
        for placements in (ZERO1, ZERO2):
            model, optimizer = build(DeviceMesh("cpu", [0, 1]), placements=placements)
            reshard_to(model, optimizer, old)
            train(model, optimizer, old, 0)
            assert all(type(group.keeper).__name__ == "Resident" for group in model._ragged_groups(recurse=True))

    @ranks(4)
    def test_shard_placements_and_hsdp():
        """Parameters cut by Shard(d), in buffers of their own; HSDP to plain FSDP."""
        old, new = init_device_mesh("cpu", (2, 2)), DeviceMesh("cpu", [0, 1, 2])
        place = lambda param: Shard(1) if tuple(param.shape) == (90, WIDTH) else None  # noqa: E731
        model, optimizer = build(old, shard_placement_fn=place)
        train(model, optimizer, old, 0)
        before = wholes(states_of(model, optimizer))
        reshard_to(model, optimizer, new)
        if is_in(new):
            assert model.layers[0].up.weight.placements == (Shard(1),)
            after = wholes(states_of(model, optimizer))
            assert all(torch.equal(value, after[name]) for name, value in before.items() if value is not None)
            train(model, optimizer, new, 1)

    @ranks(2)
    def test_a_parameter_that_was_replaced_moves_with_its_new_values():
        """In a model whose root has no parameters of its own."""
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model[0].weight = nn.Parameter(torch.full_like(model[0].weight.detach(), 7.0))
        reshard_to(model, optimizer, mesh, weights=[3, 1])
        assert model[0].weight.full_tensor().eq(7.0).all()
        assert optimizer.param_groups[0]["params"][0] is model[0].weight

    @ranks(2)
    def test_what_is_in_no_group_is_refused_by_name():
        mesh = init_device_mesh("cpu", (2,))
        text = error_of(reshard_to, fully_shard(nn.Identity(), mesh=mesh), None, mesh)
        assert text == "ValueError: fully_shard has found no parameters in FSDPIdentity: there is nothing to move", text
        table = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        for name in ("0", ""):
            model = fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
            model.get_submodule(name).register_buffer("table", table)
            text = error_of(reshard_to, model, None, mesh)
            fqn = f"{name}.table" if name else "table"
            assert text == f"ValueError: {fqn} is a DTensor that is in no group of fully_shard: reshard_to cannot move it", text

    @ranks(4)
    def test_replicated_states_of_other_shapes_move():
        """Replicated states of other shapes than the parameters need no method of the optimizer; new ranks get them too."""
        three, four = DeviceMesh("cpu", [0, 1, 2]), init_device_mesh("cpu", (4,))
        model, _ = build(three)
        optimizer = Replicated(model.parameters())
        optimizer.step()
        reshard_to(model, optimizer, four)
        for number, param in enumerate(model.parameters()):
            numbers = optimizer.state[param]["numbers"]
            assert numbers.device_mesh == four and numbers.placements == (Replicate(),)
            assert numbers.to_local().tolist() == [number, 7.0], (number, numbers)

    def test_a_rank_that_left_may_end(self):
        self.assertEqual(run_ranks(4, a_smaller_group, None), [True, False, True, None])

    def test_errors_change_nothing(self):
        expected = {
            "plain model": "ValueError: expected a module that torch_ragged.fsdp.fully_shard was called on",
            "no mesh": "TypeError: reshard_to expects a DeviceMesh",
            "3-D": "expects a 1-D mesh, or a 2-D one",
            "inner module": "pass the root",
            "optimizer": "TypeError: reshard_to expects a torch.optim.Optimizer",
            "foreign": "not a sharded parameter of the model",
            "unreduced": "RuntimeError: .* has gradients that are not reduced yet",
            "forward": "RuntimeError: .* is in a forward or backward",
            "backward": "RuntimeError: .* is in a forward or backward",
            "persistent": "set_persistent_buffers",
            "blind": r"the state rows .* method empty_state\(param, group, name, shape, dtype\)",
            "meta": "RuntimeError: .* on the meta device: materialize parameters before reshard_to",
            "neighbours": "has reshard_after_forward=2, which does not divide 3 shards: call set_reshard_after_forward",
            "replicas": "was sharded with ZERO1 or ZERO2, which take a 1-D mesh, got DeviceMesh",
            "hierarchical": "reshard_to does not support HIERARCHICAL: save a checkpoint",
            "tensor parallel": "reshard_to does not support the DTensor layers.0.up.weight of tensor",
            "move": "KeyError: 'network'",
            "stale graph": "RuntimeError: reshard_to has moved the parameters after this forward",
        }
        for rank, found in enumerate(run_ranks(4, errors)):
            for case, pattern in expected.items():
                self.assertRegex(found[case], pattern, f"{case} on rank {rank}")
            self.assertRegex(found["one rank"], "rank 0: TypeError" if rank else "TypeError")
            self.assertRegex(found["meshes differ"], r"to a mesh of \(4,\) over ranks \[0, 1, 2, 3\]")
            self.assertRegex(found["unordered"], "ranks in ascending order|rank [01]: ValueError")
            self.assertRegex(found["plain state"], "plain tensors of several elements")
            failed = "" if rank == 2 else "RuntimeError: reshard_to failed on rank 2: "
            for case, words in (
                ("gradients differ", "gradient head.weight torch.float32, its lowest rank has kept [None, None, None]"),
                ("a state more", "state head.bias more float, its lowest rank has nothing more"),
                ("a state less", "nothing more, its lowest rank has state head.bias more float"),
            ):
                self.assertEqual(found[case], f"{failed}ValueError: ranks of the mesh differ: rank 2 has {words}")
            outside = r"has the ranks \[3\], which are not in the group of 3 ranks"
            self.assertRegex(found["group"], outside if rank < 3 else "ValueError: rank 3 is not in the group")
