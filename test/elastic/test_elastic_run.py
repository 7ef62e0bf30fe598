"""elastic.run: ranks die at any moment, and the others go on with the bits of a run without a death."""

import contextlib
import functools
import os
import random
import signal
import tempfile
import unittest
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_mortal_ranks
from one_process import Dense, adamw, bits, in_one_process, loss_of, sharded, tokens_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from torch_ragged import checkpoint, elastic
from torch_ragged._ranks import peers
from torch_ragged.elastic import _run
from torch_ragged.fsdp import SameBits
from torch_ragged.fsdp.bits._sums import CorruptionFound
from torch_ragged.fsdp.elastic import _neighbour_copies

PIECES, STEPS = 4, 6
MOMENTS = ("forward", "backward", "reduction", "optimizer", "copy", "save", "recovery")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def expected(steps=STEPS):
    torch.manual_seed(0)
    model = Dense()
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    numbers, average = [], average_of(model)
    for step in range(steps):
        numbers += in_one_process(model, optimizer, PIECES, steps=[step])
        scheduler.step()
        add_to(average, model)
    return numbers, bits_of(model, average)


def average_of(model):
    return {f"average.{name}": param.detach().clone() for name, param in model.named_parameters()}


def add_to(average, model):
    for name, param in model.named_parameters():  # A step may write to what is in extra, or replace it.
        value = average[f"average.{name}"].mul_(0.5)
        average[f"average.{name}"] = value + param.detach() if param.ndim > 1 else value.add_(param.detach())


def bits_of(model, average):
    found = {**dict(model.named_parameters()), **{name: average[name] for name in average if name.startswith("average.")}}
    return {name: bits(value) for name, value in found.items()}


def train(mesh_ranks, deaths, folder=None, verify_every=None, steps=STEPS, **options):
    """Ranks die as ``deaths`` say, (rank, step, moment). Returns losses and norms, parameters, the last ranks, rewinds."""
    rank = dist.get_rank()
    peers._PATIENCE = 1.0  # Seconds, for the report of a rank that lives and does not answer.
    names = ("replicas", "shards") if isinstance(mesh_ranks[0], list) else None
    mesh = DeviceMesh("cpu", mesh_ranks, mesh_dim_names=names)
    own = {(step, moment) for victim, step, moment in deaths if victim == rank}
    torch.manual_seed(0)
    model = sharded(Dense(), mesh=mesh)
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    same = SameBits(model, optimizer, pieces=PIECES, seed=7, verify_every=verify_every)
    state = checkpoint.TrainState(model, optimizer, scheduler, extra={"same": same, "seen": 0, **average_of(model)})
    curve, rewound = {}, []

    def at(moment):
        if (state.step, moment) in own:
            die()

    def step(number):
        assert number == state.extra["seen"] and number not in curve
        if (number, "exit") in own:
            raise SystemExit
        tokens = tokens_of(number, PIECES)
        for piece in same.pieces():
            at("forward")
            loss = loss_of(model, tokens[piece])
            handle = model.head.weight.register_hook(lambda _: at("backward")) if own else None
            loss.backward()
            if handle:
                handle.remove()
            same.add_loss(loss)
        at("reduction")
        norm = same.clip_grad_norm_(0.5)
        at("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        add_to(state.extra, model)
        curve[number] = same.loss(), norm
        state.extra["seen"] += 1

    def back(number):
        rewound.append(number)
        for later in range(number, STEPS):
            curve.pop(later, None)

    with contextlib.ExitStack() as stack:
        if own:  # What runs within the package.
            copy, save = _neighbour_copies.NeighbourCopies._fill, checkpoint.save
            recover = _neighbour_copies.NeighbourCopies.recover
            patch = lambda owner, name, moment, of: stack.enter_context(  # noqa: E731
                mock.patch.object(owner, name, lambda *args, **kwargs: (at(moment), of(*args, **kwargs))[1])
            )
            patch(_neighbour_copies.NeighbourCopies, "_fill", "copy", copy)
            patch(checkpoint, "save", "save", save)
            patch(_neighbour_copies.NeighbourCopies, "recover", "recovery", recover)
            patch(_run, "reshard_to", "join", _run.reshard_to)
        elastic.run(step, state, steps, checkpoints=folder, rewound=back, **options)
    left = next(model.parameters()).device_mesh.mesh
    return curve, bits_of(model, state.extra) if rank in left else None, left.tolist(), rewound


def leaves_and_lives(mesh_ranks, deaths):
    """A rank ends run() by SystemExit, and its process goes on. Nobody waits for it: the patience is longer than the test."""
    try:
        return train(mesh_ranks, deaths, patience=1000)
    except SystemExit:
        return "left"


def scaled(mesh_ranks):
    """Rank 1 dies when all ranks have unscaled the gradients of step 2, and before they update the scale."""
    torch.manual_seed(0)
    model = sharded(Dense(), mesh=DeviceMesh("cpu", mesh_ranks))
    optimizer = adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    done = []

    def step(number):
        scaler.scale(loss_of(model, tokens_of(number, 3)[dist.get_rank()])).backward()
        scaler.unscale_(optimizer)
        if number == 2 and dist.get_rank() == 1:
            die()
        model(torch.zeros(1, 2, dtype=torch.long))  # Which others cannot end.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        done.append(number)

    elastic.run(step, checkpoint.TrainState(model, optimizer, extra={"scaler": scaler}), 4)
    return done


def lost_copies(deaths):
    return error_of(train, [0, 1, 2, 3], deaths, distance=1)


def fails_on_one_rank(exception):
    """Rank 1 raises in step 2, and no rank dies. A spare waits."""
    peers._PATIENCE = 1.0  # Seconds, for the report of the rank that does not answer.
    model = sharded(Dense(), mesh=DeviceMesh("cpu", [0, 1]))
    optimizer = adamw(model.parameters())
    done = []

    def step(number):
        if number == 2 and dist.get_rank() == 1:
            raise exception
        loss_of(model, tokens_of(number, 2)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
        done.append(number)

    return error_of(elastic.run, step, checkpoint.TrainState(model, optimizer), 4), done


def corrupt_in_step_3(mesh_ranks):
    """A bit of a parameter of rank 1 changes in step 3, and this rank leaves."""

    class Broken(torch.optim.lr_scheduler.StepLR):
        def step(self):
            super().step()
            if self.last_epoch == 4 and dist.get_rank() == 1:  # It is called last in step 3.
                param = self.optimizer.param_groups[0]["params"][0]
                param._local_tensor.data.view(torch.int32)[3] ^= 1 << 20

    with mock.patch.object(torch.optim.lr_scheduler, "StepLR", Broken):
        try:
            return train(mesh_ranks, [], verify_every=2)
        except CorruptionFound as error:
            return str(error)


def values_of_a_step():
    """The step changes plain values of extra in place, and replaces others; rank 1 dies in step 3."""
    peers._PATIENCE = 1.0
    model = sharded(Dense())
    optimizer = adamw(model.parameters())
    seen, counts = [], {"steps": 0}
    state = checkpoint.TrainState(model, optimizer, extra={"seen": seen, "counts": counts, "history": torch.zeros(0)})

    def step(number):
        seen.append(number)
        counts["steps"] += 1
        assert ("late" in state.extra) == (number > 1)
        state.extra["history"] = torch.cat([state.extra["history"], torch.tensor([float(number)])])
        if number == 1:
            state.extra["late"] = number
        if (number, dist.get_rank()) == (1, 1):
            die()
        loss_of(model, tokens_of(number, 3)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    elastic.run(step, state, 4)
    return seen, counts, state.extra["history"].tolist(), state.extra["seen"] is seen


def random_deaths(seed):
    """The ranks of a run, those of its mesh, and one to three deaths, of which two may be at once."""
    choice = random.Random(seed)
    size, spares = choice.choice([3, 4, 4, 5, 8]), choice.choice([0, 0, 1])
    victims = choice.sample(range(size - spares), choice.choice([1, 1, 2]) if size - spares > 3 else 1)
    step = choice.randrange(STEPS)
    deaths = []
    for victim in victims:
        moment = choice.choice(MOMENTS[:6])
        # Before the first copy is complete, a death ends the run.
        deaths.append((victim, step, "forward" if (step, moment) == (0, "copy") else moment))
        step = choice.choice([step, choice.randrange(step, STEPS)])
    if len(victims) == 2 and choice.random() < 0.3:
        deaths[1] = (victims[1], deaths[0][1], "recovery")
    return size, list(range(size - spares)), deaths


class ElasticRunTest(unittest.TestCase):
    def check(self, size, deaths, mesh_ranks=None, left=None, **options):
        """All ranks that are left have the curve and the parameters of a run without a death."""
        victims = {victim for victim, *_ in deaths}
        mesh_ranks = list(range(size)) if mesh_ranks is None else mesh_ranks
        numbers, params = expected()
        function = functools.partial(train, **options)
        answers = run_mortal_ranks(size, victims, function, mesh_ranks, deaths, seconds=30)
        left = sorted(set(range(size)) - victims) if left is None else left
        for rank, (curve, found, members, rewound) in answers.items():
            self.assertEqual(members, left, (rank, deaths))
            first = 0 if str(rank) in str(mesh_ranks) else rewound[0]
            self.assertEqual(curve, dict(enumerate(numbers[first:], first)), (rank, deaths))
            for name, param in params.items():
                self.assertTrue(found[name].equal(param), (rank, name, deaths))
        return answers

    def test_a_rank_dies(self):
        for *_, rewound in self.check(3, [(1, 3, "backward")], copy_every=2).values():
            self.assertIn(rewound, ([0], [2]))  # The copy of step 2 may be in flight.

    def test_a_spare_takes_the_place(self):
        self.check(4, [(1, 2, "reduction")], mesh_ranks=[0, 1, 2])

    def test_a_replica_dies(self):
        self.check(3, [(1, 2, "backward")], [[0], [1], [2]], left=[[0], [2]])

    @pytest.mark.slow
    def test_a_rank_of_a_replica_dies(self):
        """3 ranks are no whole replicas: they have a 1-D mesh, until a spare joins."""
        self.check(4, [(1, 3, "optimizer")], [[0, 1], [2, 3]], left=[0, 2, 3])
        self.check(5, [(2, 3, "reduction")], [[0, 1], [2, 3]], left=[[0, 1], [3, 4]])

    @pytest.mark.slow
    def test_all_replicas_of_a_shard_die(self):
        deaths = [(1, 5, "forward"), (3, 5, "forward")]
        with tempfile.TemporaryDirectory() as folder:
            answers = self.check(4, deaths, [[0, 1], [2, 3]], folder=folder, save_every=2, left=[0, 2])
        self.assertEqual([rewound for *_, rewound in answers.values()], [[4], [4]])

    @pytest.mark.slow
    def test_a_rank_dies_after_a_spare_has_joined(self):
        self.check(4, [(1, 1, "reduction"), (2, 4, "forward")], mesh_ranks=[0, 1, 2])

    def test_a_spare_takes_the_place_of_a_corrupt_rank(self):
        answers = run_mortal_ranks(4, set(), corrupt_in_step_3, [0, 1, 2], seconds=30)
        self.assertIn("memory of rank 1 has changed", answers.pop(1))
        numbers, _ = expected()
        for rank, (curve, _, left, rewound) in answers.items():
            self.assertEqual(left, [0, 2, 3], rank)
            self.assertIn(rewound, ([2], [3]), rank)
            self.assertEqual(curve, {step: numbers[step] for step in range(3 if rank == 3 else 0, STEPS)}, rank)

    @pytest.mark.slow
    def test_a_rank_and_the_rank_with_its_copy_die(self):
        """The checkpoint of step 4 is loaded, which has two ranks; without one, all ranks raise."""
        deaths = [(1, 5, "forward"), (2, 5, "forward")]
        with tempfile.TemporaryDirectory() as folder:
            answers = self.check(4, deaths, folder=folder, save_every=2, distance=1)
        self.assertEqual([rewound for *_, rewound in answers.values()], [[4], [4]])
        for text in run_mortal_ranks(4, {1, 2}, lost_copies, deaths).values():
            self.assertIn("CopiesLost: recover(): rank 1 with its copy on rank 2 are gone: load a checkpoint", text)

    @pytest.mark.slow
    def test_ranks_die_at_any_moment(self):
        for seed in range(int(os.environ.get("TORCH_RAGGED_TEST_KILLS", 12))):
            size, mesh_ranks, deaths = random_deaths(seed)
            victims = {victim for victim, *_ in deaths}
            left = [rank for rank in mesh_ranks if rank not in victims]
            left += [rank for rank in range(size) if rank not in mesh_ranks][: len(mesh_ranks) - len(left)]
            with self.subTest(seed=seed, size=size, deaths=deaths), tempfile.TemporaryDirectory() as folder:
                # None of two victims keeps the copy of the other, which no rank would survive.
                apart = (max(victims) - min(victims)) % len(mesh_ranks)
                copies = None if len(victims) == 1 else 1 if apart in (2, len(mesh_ranks) - 2) else 2
                self.check(size, deaths, mesh_ranks, left, folder=folder, save_every=1, distance=copies)

    def test_a_rank_whose_memory_changes_a_bit_leaves(self):
        """Before the next copy is made: the others go on with the copy of step 3."""
        answers = run_mortal_ranks(3, set(), corrupt_in_step_3, [0, 1, 2], seconds=30)
        self.assertIn("memory of rank 1 has changed, and nothing has written to it: embed.weight", answers.pop(1))
        numbers, params = expected()
        for curve, found, left, rewound in answers.values():
            self.assertEqual((left, curve), ([0, 2], dict(enumerate(numbers))))
            self.assertIn(rewound, ([2], [3]))
            self.assertTrue(all(found[name].equal(param) for name, param in params.items()))

    def test_a_rank_dies_at_the_end_of_the_last_step(self):
        """No collective of the steps follows. The copy of the last step, beyond copy_every, misses the rank."""
        for *_, rewound in self.check(3, [(1, STEPS, "copy")], copy_every=4).values():
            self.assertIn(rewound, ([0], [4]))

    def test_values_go_back_in_the_objects_that_the_step_holds(self):
        for answer in run_mortal_ranks(3, {1}, values_of_a_step, seconds=30).values():
            self.assertEqual(answer, ([0, 1, 2, 3], {"steps": 4}, [0.0, 1.0, 2.0, 3.0], True))

    def test_a_rank_that_leaves_by_system_exit_is_not_waited_for(self):
        numbers, _ = expected()
        answers = run_mortal_ranks(3, set(), leaves_and_lives, [0, 1, 2], [(1, 3, "exit")], seconds=1000)
        self.assertEqual(answers.pop(1), "left")
        for curve, _, left, rewound in answers.values():
            self.assertEqual((curve, left), (dict(enumerate(numbers)), [0, 2]))
            self.assertIn(rewound, ([2], [3]))  # The copy of step 3 may be in flight.

    def test_a_scaler_forgets_the_step_that_a_death_has_ended(self):
        for done in run_mortal_ranks(3, {1}, scaled, [0, 1, 2], seconds=30).values():
            self.assertEqual(done, [0, 1, 2, 3])

    @pytest.mark.slow
    def test_a_death_before_the_first_copy_is_complete_takes_the_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            run_mortal_ranks(3, set(), functools.partial(train, folder=folder, save_every=2, steps=2), [0, 1, 2], [])
            numbers, params = expected()
            deaths = [(1, 2, "copy")]
            function = functools.partial(train, folder=folder)
            for curve, found, left, _ in run_mortal_ranks(3, {1}, function, [0, 1, 2], deaths, seconds=30).values():
                self.assertEqual((left, curve), ([0, 2], {step: numbers[step] for step in range(2, STEPS)}))
                self.assertTrue(all(found[name].equal(param) for name, param in params.items()))

    @pytest.mark.slow
    def test_a_spare_that_dies_as_it_joins(self):
        """Rank 0 goes on alone: it has the whole model."""
        self.check(3, [(1, 2, "reduction"), (2, 0, "join")], mesh_ranks=[0, 1])

    @pytest.mark.slow
    def test_a_rank_that_dies_while_a_spare_joins(self):
        """The spare waits for the next call."""
        self.check(4, [(1, 2, "reduction"), (2, 2, "join")], mesh_ranks=[0, 1, 2])

    def test_an_error_of_one_rank_ends_the_run_on_all(self):
        for rank, (text, done) in run_mortal_ranks(3, set(), fails_on_one_rank, ValueError("no data"), seconds=30).items():
            expected = ("Error", "ValueError: no data", "elastic.run has failed on the ranks of the mesh")[rank]
            self.assertIn(expected, text)
            self.assertEqual(done, [] if rank == 2 else [0, 1])

    @ranks(2)
    def test_a_step_that_counts_is_refused():
        model = sharded(Dense())
        counted = checkpoint.TrainState(model, adamw(model.parameters()))
        text = error_of(elastic.run, lambda number: setattr(counted, "step", number + 1), counted, 3)
        assert "step 0 has set TrainState.step to 1" in text, text

    @ranks(2)
    def test_what_cannot_be_survived_is_refused():
        model = sharded(Dense())
        optimizer = adamw(model.parameters())
        state = checkpoint.TrainState(model, optimizer)

        def refusal(state=state, steps=3, **options):
            return error_of(elastic.run, lambda _: None, state, steps, **options)

        assert "a number of steps as steps, got -1" in refusal(steps=-1)
        assert "a number of steps as copy_every, got 0" in refusal(copy_every=0)
        assert "a number of steps as steps, got None" in refusal(steps=None)
        for distance in (0, 2, "1"):
            assert f"a distance of copies from 1 to 1, got {distance!r}" in refusal(distance=distance)
        assert "a number of seconds as patience, got 0" in refusal(patience=0)
        rank = dist.get_rank()
        assert "elastic.run" in refusal(steps=2 + rank) and "steps=3" in refusal(steps=2 + rank)
        assert "takes a torch_ragged.checkpoint.TrainState" in refusal(model)
        assert "needs checkpoints=" in refusal(save_every=2)
        assert "does not copy TrainState.per_rank" in refusal(checkpoint.TrainState(model, optimizer, per_rank={"loader": 1}))
        tensor = next(model.parameters()).detach()
        hidden = SimpleNamespace(state_dict=lambda: {0: tensor}, load_state_dict=print)
        for value in ({"weights": [tensor]}, hidden):
            text = refusal(checkpoint.TrainState(model, optimizer, extra={"ema": value}))
            assert "does not copy TrainState.extra['ema'], which has DTensors" in text, text
        other = checkpoint.TrainState(model, optimizer, extra={"ema": distribute_tensor(torch.ones(5), tensor.device_mesh)})
        assert "TrainState.extra['ema'] is a DTensor of shape (5,)" in refusal(other), refusal(other)
        with mock.patch.dict(os.environ, {"TORCH_RAGGED_WATCH": "0"}):
            assert "unset TORCH_RAGGED_WATCH" in refusal()
        text = refusal(checkpoint.TrainState(model, optimizer, extra={"shards": torch.full((2,), float(rank))}))
        assert "extra['shards']" in text, text
        kept = SameBits(model, optimizer, pieces=2)
        assert 'give TrainState extra={"same": same}' in refusal()
        kept.close()
        with mock.patch.dict(os.environ, {"TORCHELASTIC_RUN_ID": "1"}), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not refusal(steps=0)
        assert "torchrun ends all ranks" in str(caught[0].message)
        assert "a number of steps as steps" in refusal(steps=-rank)  # Last: rank 0 finds in the store that rank 1 has refused.


if __name__ == "__main__":
    unittest.main()
