"""The steps of fully_shard in one process: which parameters it finds, and which modules may be skipped by a rank."""

import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, fake_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import fully_shard
from torch_ragged.fsdp.comm._call_log import CallLog
from torch_ragged.fsdp.core._fsdp_init import find_params
from torch_ragged.fsdp.core._fsdp_state import state_of
from torch_ragged.fsdp.gates._gate import OptionalGate, RollCall, roll_call_of


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("nothing", None)
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 3)
        self.again = self.first
        self.head = nn.Linear(2, 2)
        self.head.weight = self.first.weight


class FindParamsTest(unittest.TestCase):
    def names(self, modules, ignored=(), managed=()):
        found = find_params(modules, set(ignored), lambda module: module in managed)
        return {fqn: [f"{type(module).__name__}.{name}" for module, name in names] for fqn, (_, names) in found.items()}

    def test_each_parameter_has_its_first_name_and_all_its_places(self):
        model = Tied()
        found = find_params([model], set(), lambda module: False)
        self.assertEqual(list(found), ["first.weight", "second.weight", "second.bias", "head.bias"])
        self.assertEqual(found["first.weight"], (model.first.weight, [(model.first, "weight"), (model.head, "weight")]))
        self.assertEqual(found["second.bias"], (model.second.bias, [(model.second, "bias")]))

    def test_ignored_parameters_and_inner_managed_modules_are_skipped(self):
        model = Tied()
        self.assertEqual(list(self.names([model], ignored=[model.second.weight])), ["first.weight", "second.bias", "head.bias"])
        self.assertEqual(
            list(self.names([model], managed=[model.first])), ["second.weight", "second.bias", "head.weight", "head.bias"]
        )
        self.assertEqual(list(self.names([model], ignored=model.parameters())), [])

    def test_modules_of_a_list_are_numbered(self):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        second.weight = first.weight
        self.assertEqual(self.names([first, second]), {"0.weight": ["Linear.weight"] * 2, "0.bias": ["Linear.bias"]})
        around = nn.Sequential(first, nn.Linear(2, 1))
        self.assertEqual(list(self.names([around, first])), ["0.1.weight", "0.1.bias", "1.weight", "1.bias"])


class RollCallTest(unittest.TestCase):
    """The rank's own votes, and those of another rank in place of an all-reduce."""

    def model(self, optional=("tower",)):
        model = nn.ModuleDict({name: nn.Sequential(nn.Linear(2, 2)) for name in ("tower", "layer")})
        mesh = init_device_mesh("cpu", (2,))
        for name, module in model.items():
            fully_shard(module[0], mesh=mesh)
            fully_shard(module, mesh=mesh, optional=name in optional)
        root = nn.Sequential(model, nn.Linear(2, 2))
        return fully_shard(root, mesh=mesh)

    def states(self, model):
        return [state for state in map(state_of, model.modules()) if state is not None]

    @fake_group(2)
    def test_events_of_optional_modules_and_those_inside_them_are_in_the_order_of_modules(self):
        model = self.model()
        states = self.states(model)
        roll_call = roll_call_of([model], states)
        tower, inside = state_of(model[0]["tower"]), state_of(model[0]["tower"][0])
        self.assertEqual(roll_call._events, [(tower, False), (inside, False), (inside, True), (tower, True)])
        self.assertTrue(inside.is_optional)
        self.assertFalse(state_of(model[0]["layer"]).is_optional)
        self.assertEqual(roll_call._groups, [states[0].groups[0].dp.shard_group])
        self.assertIsNone(roll_call_of([self.model(())], self.states(self.model(()))))

    @fake_group(2)
    def test_a_root_cannot_be_optional(self):
        root = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)), optional=True)
        self.assertRegex(error_of(roll_call_of, [root], self.states(root)), "ValueError: the root, .* cannot be optional")

    @fake_group(2)
    def test_a_list_cannot_be_inside_an_optional_module(self):
        tower = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard([tower[0], tower[2]], mesh=mesh)
        fully_shard(tower, mesh=mesh, optional=True)
        root = fully_shard(nn.Sequential(tower), mesh=mesh)
        error = error_of(roll_call_of, [root], self.states(root))
        self.assertRegex(
            error, "ValueError: the modules .*Linear, .*LayerNorm are inside an optional module and have one group"
        )

    @fake_group(2)
    def test_ranks_agree_on_the_earliest_event_and_on_what_any_of_them_needs(self):
        events, roll_call = self.of_three_events()
        for event in (*events, None):
            own = 3 if event is None else events.index(event)
            for grad in (False, True):
                for stays in (False, True):
                    with torch.set_grad_enabled(grad):
                        self.assertEqual(roll_call.agree(event, stays), (event, (grad, stays)))  # The other rank agrees.
                        for other in ((False, False), (True, False), (False, True), (True, True)):
                            vote = [2 * own + (not needed) for needed in other]
                            with mock.patch.object(dist, "all_reduce", self.another(vote)):
                                needs = grad or other[0], stays or other[1]
                                self.assertEqual(roll_call.agree(event, stays), (event, needs))

    @fake_group(2)
    def test_a_rank_takes_part_in_the_events_of_others(self):
        events, roll_call = self.of_three_events()
        votes = [[1, 1], [3, 2], [2, 2], [2, 3], [100, 100]]
        with mock.patch.object(dist, "all_reduce", self.another(*votes)):
            gate, own = OptionalGate([], mock.Mock(spec=CallLog), roll_call), events[2][0]
            self.assertEqual(gate.after_call(own, False, must_stay=True), (True, True))
        first, second = (state for state, _ in events[:2])
        self.assertEqual(first.method_calls, [mock.call.enter_call(first.context, False)])
        (tower,) = second.modules
        leaves = [mock.call.leave_call(tower, *needs) for needs in ((False, True), (True, True), (True, False))]
        self.assertEqual(second.method_calls, leaves)
        self.assertEqual(events[2][0].method_calls, [])

    def of_three_events(self):
        names = ["enter_call", "leave_call", "is_optional", "context", "modules"]
        states = [mock.Mock(spec_set=names, is_optional=True, modules=(nn.Linear(1, 1),)) for _ in range(3)]
        events = list(zip(states, (False, True, True)))
        return events, RollCall(events, [dist.group.WORLD], torch.device("cpu"))

    def another(self, *votes):
        remaining = list(votes)

        def all_reduce(vote, op, group, async_op):
            self.assertFalse(async_op)  # The fake backend is not gloo.
            self.assertEqual((op, group), (dist.ReduceOp.MIN, dist.group.WORLD))
            vote.copy_(torch.minimum(vote, torch.tensor(remaining.pop(0))))

        return all_reduce
