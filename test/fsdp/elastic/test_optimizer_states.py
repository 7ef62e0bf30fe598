"""OptimizerStates: what ranks tell each other about an optimizer, and the states that it gets for other parameters."""

import unittest

import torch
from common import enter_fake_group, error_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_ragged.fsdp.elastic._optimizer_states import OptimizerStates, PlacedState, Single


def distributed(mesh, placement, *shape):
    return distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)


class OptimizerStatesTest(unittest.TestCase):
    def setUp(self):
        enter_fake_group(self, 2)
        self.mesh = init_device_mesh("cpu", (2,))
        self.weight, self.bias = (nn.Parameter(distributed(self.mesh, Shard(0), *shape)) for shape in ((4, 3), (6,)))
        self.names = {self.weight: "weight", self.bias: "bias"}
        self.optimizer = torch.optim.SGD([{"params": [self.weight], "lr": 0.5}, {"params": [self.bias]}], lr=torch.tensor(0.25))
        self.states = OptimizerStates(self.optimizer, self.names, "mine")

    def state(self, **values):
        self.optimizer.state[self.weight].update(values)

    def test_every_parameter_must_have_a_name(self):
        self.assertRegex(
            error_of(OptimizerStates, self.optimizer, {self.weight: "weight"}, ""), r"ValueError: SGD .*shape \(6,\)"
        )

    def test_lines_name_the_parameters_of_each_group(self):
        self.assertEqual(self.states.lines, ["SGD ['weight']", "SGD ['bias']"])

    def test_what_is_told(self):
        self.state(
            follows=distributed(self.mesh, Shard(0), 4, 3), all=distributed(self.mesh, Replicate(), 2), step=torch.ones(())
        )
        self.state(count=3, one=torch.ones(1), nested={"a": torch.ones(()), "b": "text"})
        told = self.states.told()
        self.assertEqual([group["lr"] for group in told.options], [0.5, torch.tensor(0.25)])
        self.assertTrue(all("params" not in group and "momentum" in group for group in told.options))
        states = told.states["weight"]
        self.assertEqual(states["follows"], PlacedState((4, 3), torch.float32, "cpu", follows=True, is_replicated=False))
        self.assertEqual(states["all"], PlacedState((2,), torch.float32, "cpu", follows=False, is_replicated=True))
        self.assertIsInstance(states["step"], Single)
        self.assertEqual((states["count"], states["nested"]["b"]), (3, "text"))
        self.assertEqual(told.states["bias"], {})
        self.assertEqual([line.split()[:2] for line in told.lines], [["weight", key] for key in states])
        self.assertTrue(told.lines[0].endswith(str(states["follows"])) and told.lines[2] == "weight step Single")

    def test_what_cannot_be_told_is_refused(self):
        for value, text in (
            (torch.ones(2), "holds plain tensors of several elements"),
            ([torch.ones(()), torch.ones(2)], "holds plain tensors of several elements"),
            ({"a": distributed(self.mesh, Shard(0), 4, 3)}, "holds plain tensors of several elements"),
            (distributed(self.mesh, Shard(1), 4, 3), "the optimizer needs a method empty_state"),
            (distributed(self.mesh, Shard(0), 4, 2), "the optimizer needs a method empty_state"),
        ):
            self.state(thing=value)
            self.assertRegex(error_of(self.states.told), f"ValueError: the state thing of weight in SGD .*{text}")

    def test_a_state_that_is_cut_over_one_of_two_dimensions_is_not_replicated(self):
        mesh = init_device_mesh("cpu", (1, 2))
        for placements, is_refused in (((Replicate(), Shard(0)), True), ((Replicate(), Replicate()), False)):
            self.state(thing=distribute_tensor(torch.zeros(4), mesh, placements, src_data_rank=None))
            self.assertEqual("needs a method empty_state" in error_of(self.states.told), is_refused)

    def test_an_optimizer_with_empty_state_may_have_other_states(self):
        calls = []

        def empty_state(param, group, name, shape, dtype):
            calls.append((group["lr"], name, shape, dtype))
            return param

        self.optimizer.empty_state = empty_state
        self.state(other=distributed(self.mesh, Shard(1), 4, 3))
        told = self.states.told()
        self.assertEqual(told.states["weight"]["other"].follows, False)
        target = self.states.target(told, {"weight": self.weight, "bias": self.bias})
        self.assertEqual((list(target), calls), (["mine.weight.other"], [(0.5, "other", (4, 3), torch.float32)]))

    def test_states_move_to_other_parameters(self):
        self.state(
            follows=distributed(self.mesh, Shard(0), 4, 3), all=distributed(self.mesh, Replicate(), 2), step=torch.ones(())
        )
        told, source = self.states.told(), self.states.source()
        self.assertEqual(list(source), ["mine.weight.follows", "mine.weight.all"])
        params = {
            "weight": nn.Parameter(distributed(self.mesh, Shard(1), 4, 3)),
            "bias": nn.Parameter(distributed(self.mesh, Replicate(), 6)),
        }
        target = self.states.target(told, params)
        self.assertEqual(list(target), list(source))
        self.assertEqual(target["mine.weight.follows"].placements, (Shard(1),))
        self.assertEqual(target["mine.weight.all"].placements, (Replicate(),))
        self.assertEqual(target["mine.weight.all"].to_local().shape, (2,))
        self.assertTrue(all(isinstance(each, DTensor) for each in target.values()))
        step = self.optimizer.state[self.weight]["step"]
        self.states.move_to(params, target, told, was_member=True, is_member=True)
        moved = self.optimizer.state
        self.assertEqual([id(param) for param in moved], [id(params["weight"])])  # No entry for a parameter without states.
        self.assertIs(moved[params["weight"]]["follows"], target["mine.weight.follows"])
        self.assertIs(moved[params["weight"]]["step"], step)
        self.assertEqual(
            [group["params"][0] is params[name] for group, name in zip(self.optimizer.param_groups, params, strict=True)],
            [True] * 2,
        )

    def test_a_rank_that_joins_takes_options_and_states(self):
        self.state(step=torch.full((), 7.0), count=3)
        told = self.states.told()
        joining = torch.optim.SGD([{"params": [self.weight]}, {"params": [self.bias]}], lr=9.0)
        joining.param_groups[1]["lr"] = torch.tensor(9.0, device="meta")
        params = {"weight": self.weight, "bias": self.bias}
        OptimizerStates(joining, self.names, "").move_to(params, {}, told, was_member=False, is_member=True)
        first, second = joining.param_groups
        self.assertEqual((first["lr"], second["lr"].device.type), (0.5, "meta"))  # A tensor stays on its rank's device.
        self.assertEqual((joining.state[self.weight]["step"].item(), joining.state[self.weight]["count"]), (7.0, 3))
        plain = torch.optim.SGD([{"params": [self.weight]}, {"params": [self.bias]}], lr=0.1)
        OptimizerStates(plain, self.names, "").move_to(params, {}, told, was_member=False, is_member=True)
        self.assertEqual(plain.param_groups[1]["lr"], torch.tensor(0.25))

    def test_a_rank_that_leaves_has_no_states_and_keeps_its_options(self):
        self.state(step=torch.ones(()))
        told = self.states.told()
        told.options[0]["lr"] = 100.0
        for was_member in (True, False):
            self.states.move_to({"weight": self.weight, "bias": self.bias}, {}, told, was_member, is_member=False)
            self.assertEqual(len(self.optimizer.state), 0)
            self.assertEqual(self.optimizer.param_groups[0]["lr"], 0.5)
