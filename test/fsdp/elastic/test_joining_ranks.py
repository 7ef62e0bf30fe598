"""reshard_to with ranks that join: what is beside the model and its optimizers goes on there as elsewhere, or is an error."""

import unittest
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from delays import delays
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import lr_scheduler as schedulers

from torch_ragged.fsdp import fully_shard, reshard_to
from torch_ragged.optim import Muon, matrix_groups


class Custom:
    """A scheduler that knows the step from its own counter only."""

    def __init__(self, optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self):
        self.count += 1
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.count)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Plateau(schedulers.ReduceLROnPlateau):
    """The loss never improves."""

    def step(self):
        super().step(1.0)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 1 / (1 + step)),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.1),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=40),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)], [7]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 2, 0.5), schedulers.ExponentialLR(o, 0.9)]),
    "ReduceLROnPlateau": lambda o: Plateau(o, patience=4, factor=0.5),
    "Custom": Custom,
}


def build(mesh, optimizer=torch.optim.SGD, **options):
    """A model on ``mesh``, on the meta device on ranks that are not in it, and its optimizer."""
    torch.manual_seed(0)
    with torch.device("cpu" if mesh.get_coordinate() is not None else "meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer(model.parameters(), **{"lr": 0.1, **options})


def train_step(model, optimizer, scheduler=None):
    """One step on each rank of the model's mesh. The options with which it was made."""
    if next(model.parameters()).device_mesh.get_coordinate() is None:
        return None
    model(torch.ones(2, 6)).square().mean().backward()
    used = {key: value for key, value in optimizer.param_groups[0].items() if key in ("lr", "momentum", "betas")}
    optimizer.step()
    optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return used


def rates_after_a_rank_joins(make, passed, steps=4, before=5):
    """What three ranks use in the steps after the last of them has joined, and what one process uses in all steps."""
    old, new = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    model, optimizer = build(old, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(before):
        train_step(model, optimizer, scheduler)
    reshard_to(model, optimizer, new, stateful=[scheduler] if passed else [])
    used = [train_step(model, optimizer, scheduler) for _ in range(steps)]
    alone = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler, expected = make(alone), []
    for _ in range(before + steps):
        expected.append({"lr": alone.param_groups[0]["lr"], "momentum": alone.param_groups[0]["momentum"]})
        alone.step()
        scheduler.step()
    return used, expected[before:]


def delayed_join(seed):
    """A rank leaves, another joins, and trains on; the parameters and the rates."""
    with delays(seed):
        one, two = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
        model, optimizer = build(one, torch.optim.AdamW)
        scheduler = SCHEDULERS["OneCycleLR"](optimizer)
        for mesh in (two, one, two):
            train_step(model, optimizer, scheduler)
            reshard_to(model, optimizer, mesh, stateful=[scheduler])
        used = train_step(model, optimizer, scheduler)
        text = ""
        if two.get_coordinate() is not None:
            scheduler = SCHEDULERS["LambdaLR"](optimizer) if dist.get_rank() == 1 else scheduler
            text = error_of(train_step, model, optimizer, scheduler)
            optimizer.zero_grad()
        return text, used, [p.full_tensor().tolist() for p in model.parameters()] if used else None


class JoiningRanksTest(unittest.TestCase):
    @ranks(3)
    def test_tied_buffers_and_ignored_parameters_reach_ranks_that_join():
        """Also if the joining rank, here with another tie, has them on the meta device."""
        old, new = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
        for of_tie in ("everywhere", "where they are", "on the rank that joins"):
            with torch.device("meta" if dist.get_rank() == 2 else "cpu"):
                model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
                table, frozen = torch.full((4,), 1.0), nn.Parameter(torch.full((4,), 4.0), requires_grad=False)
                for layer in model:
                    layer.register_buffer("table", table)
                    layer.register_parameter("frozen", frozen)
                    layer.register_buffer("own", torch.full((4,), 3.0))
                if (of_tie == "where they are") if dist.get_rank() == 2 else (of_tie == "on the rank that joins"):
                    model[1].table = torch.full((4,), 1.0)
            fully_shard(model, mesh=old, ignored_params={frozen})
            reshard_to(model, torch.optim.AdamW([p for p in model.parameters() if p is not frozen]), new)
            for layer in model:
                for name, number in (("table", 1.0), ("frozen", 4.0), ("own", 3.0)):
                    assert getattr(layer, name).tolist() == [number] * 4, (of_tie, name)

    @ranks(3)
    def test_schedulers_that_are_passed_go_on_on_ranks_that_join():
        for name, make in SCHEDULERS.items():
            used, expected = rates_after_a_rank_joins(make, passed=True)
            assert used == expected, (name, used, expected)

    @ranks(3)
    def test_schedulers_that_are_forgotten_never_train_with_several_rates():
        """Either all ranks use equal options in all steps, or all of them raise before they use others."""
        differing = []
        for name, make in SCHEDULERS.items():
            found, answers = [], [None] * 3
            text = error_of(lambda make=make, found=found: found.append(rates_after_a_rank_joins(make, passed=False)))
            dist.all_gather_object(answers, (text, found))
            assert all(answer == answers[0] for answer in answers), (name, answers)
            if text:
                assert text.startswith("ValueError: the steps of SGD differ between ranks in call "), text
                assert "pass schedulers to reshard_to as stateful" in text, text
                differing.append(name)
        assert {"LambdaLR", "StepLR", "OneCycleLR", "SequentialLR", "ReduceLROnPlateau", "Custom"} <= set(differing), differing

    @ranks(3)
    def test_a_difference_of_a_few_steps_is_found_after_many_equal_ones():
        """The rates differ in steps 66 to 70 after the call only."""
        milestone = lambda optimizer: schedulers.MultiStepLR(optimizer, [70])  # noqa: E731
        text = error_of(rates_after_a_rank_joins, milestone, passed=False, steps=130)
        assert (
            "the steps of SGD differ between ranks in call 66: lr is [0.010000000000000002] on rank 0 and [0.1] on rank 2"
            in text
        ), text

    @ranks(4)
    def test_ranks_that_leave_come_back_and_join_at_once_take_the_state_of_the_others():
        meshes = [DeviceMesh("cpu", some) for some in ([0, 1], [1, 2, 3], [0, 2], [0, 1, 2, 3])]
        model, optimizer = build(meshes[0])
        scheduler, scaler = SCHEDULERS["SequentialLR"](optimizer), torch.amp.GradScaler("cpu", init_scale=8.0)
        rates = []
        for mesh in (*meshes[1:], None):
            rates.append(train_step(model, optimizer, scheduler))
            if rates[-1]:
                scaler.load_state_dict({**scaler.state_dict(), "scale": scaler.get_scale() / 2})
            if mesh is not None:
                reshard_to(model, optimizer, mesh, stateful=[scheduler, scaler])
        answers = [None] * 4
        dist.all_gather_object(answers, (rates, scheduler.state_dict()["last_epoch"], scaler.get_scale()))
        for index, mesh in enumerate(meshes):
            used = [answer[0][index] for answer in answers]
            assert [each is not None for each in used] == [rank in mesh.mesh.tolist() for rank in range(4)]
            assert len({each["lr"] for each in used if each}) == 1, used
        assert {answer[1:] for answer in answers} == {(4, 0.5)}, answers

    @ranks(3)
    def test_what_a_joining_rank_has_set_differently_is_an_error_on_all_ranks():
        rank, old, new = dist.get_rank(), DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
        for method, value, words in (
            ("set_gradient_divide_factor", 3.0, "divisor=3.0"),
            ("set_requires_all_reduce", False, "requires_all_reduce=False"),
            ("set_requires_gradient_sync", False, "requires_gradient_sync=False"),
            ("set_reduce_wire", torch.bfloat16, "reduce_wire=torch.bfloat16"),
            ("set_gradient_view", "pending", "gradient_view=PendingView"),
        ):
            model, optimizer = build(old)
            if rank < 2:
                getattr(model, method)(value)
            text = error_of(reshard_to, model, optimizer, new)
            assert text.startswith("ValueError: reshard_to was called differently on different ranks: rank 0 has"), text
            assert words in text, text
        model, optimizer = build(old, torch.optim.SGD if rank < 2 else torch.optim.Adam)
        text = error_of(reshard_to, model, optimizer, new)
        assert "rank 0 has optimizer SGD ['0.weight'" in text and "rank 2 has optimizer Adam" in text, text
        model, optimizer = build(old)
        text = error_of(reshard_to, model, optimizer, new, stateful=[Custom(optimizer)] if rank < 2 else [])
        assert "rank 0 has stateful Custom, rank 2 has" in text, text

    @ranks(2)
    def test_what_is_no_state_and_wrapped_optimizers_are_refused():
        class Wrapper(torch.optim.Optimizer):
            """As that of accelerate, and ZeroRedundancyOptimizer's kin."""

            def __init__(self, optimizer):
                self.optimizer = optimizer

            @property
            def state(self):
                return self.optimizer.state

            @property
            def param_groups(self):
                return self.optimizer.param_groups

        mesh = DeviceMesh("cpu", [0, 1])
        model, optimizer = build(mesh)
        text = error_of(reshard_to, model, Wrapper(optimizer), mesh)
        assert text == "TypeError: reshard_to got Wrapper, which wraps another optimizer: pass the wrapped one", text
        text = error_of(reshard_to, model, SimpleNamespace(optimizer=optimizer), mesh)
        assert text == "TypeError: reshard_to expects a torch.optim.Optimizer, or a list of them, got SimpleNamespace", text
        for wrong in (model, [optimizer], [nn.Linear(2, 2)], [3]):
            text = error_of(reshard_to, model, optimizer, mesh, stateful=wrong)
            assert text.startswith("TypeError: reshard_to(stateful=) takes a list of objects with state_dict"), text
        train_step(model, optimizer)

    @ranks(2)
    def test_an_optimizer_that_is_not_passed_warns_at_its_next_step():
        mesh = DeviceMesh("cpu", [0, 1])
        for passes in (False, True):
            model, first = build(mesh)
            second = Muon(matrix_groups(model, lr=0.01), lr=0.02)
            train_step(model, first)
            second.step()
            reshard_to(model, [first] if passes else None, mesh, weights=[3, 1])
            for optimizer, is_passed in ((first, passes), (second, False)):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    train_step(model, optimizer)
                texts = [str(each.message) for each in caught if "reshard_to has replaced" in str(each.message)]
                assert len(texts) == (0 if is_passed else 1), texts
                for text in texts:
                    assert text.startswith(f"{type(optimizer).__name__} has parameters that reshard_to has replaced"), text
                    assert text.endswith("after reshard_to, or pass it to reshard_to"), text

    def test_delays_change_nothing(self):
        self.check_delays(range(2))

    @pytest.mark.slow
    def test_no_delays_change_anything(self):
        self.check_delays(range(50))

    def check_delays(self, seeds):
        found = [run_ranks(3, delayed_join, seed) for seed in seeds]
        for answers in found:
            self.assertEqual(answers, found[0])
        (text, none, _), (text_1, used, _), (text_2, its, _) = found[0]
        self.assertEqual((text, none, used), ("", None, its))
        self.assertRegex(text_1, "^ValueError: the steps of AdamW differ between ranks in call 2: ")
        self.assertEqual(text_1, text_2)


if __name__ == "__main__":
    unittest.main()
