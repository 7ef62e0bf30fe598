"""SameBits(verify_every=): bits that memory or a processor changes are found, by name, on all ranks."""

import itertools
import logging
import os
import random
import unittest

import pytest
import torch
import torch.distributed as dist
from common import error_of, ranks, run_ranks
from one_process import Dense, adamw, adamw8bit, in_one_process, loss_of, muon, sgd, sharded, tokens_of, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ragged.fsdp import SameBits
from torch_ragged.fsdp.bits._sums import StillTensors, lines_of, sums_of

PIECES = 4


def made(make=adamw, verify_every=2, **options):
    """A model with a buffer, on all ranks, after one step."""
    torch.manual_seed(0)
    model = Dense()
    model.register_buffer("scale", torch.ones(7))
    policy = options.pop("on_corruption", "raise")
    model = sharded(model, **options)
    optimizer = make(model.parameters())
    same = SameBits(model, optimizer, pieces=PIECES, seed=7, verify_every=verify_every, on_corruption=policy)
    train(same, model, optimizer, PIECES, range(1))
    return model, optimizer, same


def flip(tensor, bit=62):
    """As memory does: torch counts no write."""
    raw = getattr(tensor, "_local_tensor", tensor).data.view(-1).view(torch.uint8)
    if raw.numel():
        raw[bit // 8] ^= 1 << bit % 8


def single_errors(steps):
    """How many computations were wrong, the steps in which one was found, and those in which one should be."""
    choice, planned = random.Random(0), {}
    for step in choice.sample(range(1, steps), steps // 2):
        planned[step] = choice.randrange(2), choice.randrange(PIECES // 2)
    model, optimizer, same = made(verify_every=4, on_corruption="log")
    found, now = [], [0, 0]
    handler = logging.Handler()
    handler.emit = lambda record: found.append(now[0])
    logging.getLogger("torch_ragged.fsdp").addHandler(handler)

    def compute(module, inputs, output):
        return output * (1 + 2**-20) if planned.get(now[0]) == (dist.get_rank(), now[1]) else output

    model.layers[0].register_forward_hook(compute)
    for now[0] in range(1, steps):
        for now[1], piece in enumerate(same.pieces()):
            loss_of(model, tokens_of(now[0], PIECES)[piece]).backward()
        same.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("torch_ragged.fsdp").removeHandler(handler)
    return len(planned), found, [step for step in sorted(planned) if step % 4 == 3 and planned[step][1] == 0]


class CorruptionTest(unittest.TestCase):
    def test_each_bit_is_in_the_sums(self):
        for dtype, count, start in (
            (torch.float32, 70_001, 1),
            (torch.bfloat16, 13, 0),
            (torch.uint8, 5, 3),
            (torch.int64, 9, 0),
        ):
            tensor = torch.arange(count + start).to(dtype)[start:]
            before, lines = sums_of(tensor), lines_of(tensor)
            raw = tensor.view(torch.uint8)
            self.assertEqual(sums_of(tensor.clone()), before)
            for place in {0, 1, raw.numel() // 2, raw.numel() - 2, raw.numel() - 1}:
                for bit in range(8):
                    raw[place] ^= 1 << bit
                    self.assertNotEqual(sums_of(tensor), before, (dtype, place, bit))
                    self.assertFalse(lines_of(tensor).equal(lines), (dtype, place, bit))
                    raw[place] ^= 1 << bit
            self.assertEqual(sums_of(tensor), before)
        for count, pairs in ((9, ([2, 5],)), (70_001, ([2, 5], [2, 2 + 256], [300, -300], [0, -1]))):
            words = torch.arange(count)
            for bit, pair in itertools.product(range(64), pairs):  # As a broken line of a memory changes it.
                changed = words.clone()
                changed[pair] ^= 1 << bit if bit < 63 else -(2**63)
                self.assertNotEqual(sums_of(changed), sums_of(words), (bit, pair))
                self.assertFalse(lines_of(changed).equal(lines_of(words)), (bit, pair))
        values = torch.tensor([1, 2, 3])
        self.assertNotEqual(sums_of(values), sums_of(values.flip(0)))
        raw = torch.arange(40, dtype=torch.uint8)
        for start in range(20):  # Words begin at each byte of a line.
            self.assertEqual(sums_of(raw[start : start + 16]), sums_of(raw[start : start + 16].clone()))
        self.assertEqual(sums_of(torch.empty(0)), (0, 0))
        self.assertLess(lines_of(torch.empty(2**20)).nbytes, 2**20 * 4 / 200)

    def test_a_note_of_some_keeps_those_of_others(self):
        still, tensors = StillTensors(), {name: torch.ones(2) for name in "abc"}
        still.note(tensors.items())
        still.note([("a", tensors["a"])])
        flip(tensors["b"])
        tensors["c"].add_(1)
        self.assertEqual(still.changed(tensors.items()), ["b"])
        flip(tensors["a"])
        flip(tensors["c"])
        self.assertEqual(still.changed(tensors.items()), ["a", "b", "c"])

    @ranks(3)
    def test_a_bit_that_memory_changes_is_found_at_the_next_read():
        rank = dist.get_rank()
        model, optimizer, same = made()
        weight = model.layers[1][1].weight
        cases = {
            "layers.1.1.weight": lambda: weight,
            "exp_avg_sq of layers.1.1.weight": lambda: optimizer.state[weight]["exp_avg_sq"],
            "the buffer scale": lambda: model.scale,
        }
        for name, find in cases.items():
            same.verify()
            if rank == 1:
                flip(find())
            # It is found until it is mended. A forward reads no state.
            for look in (same.verify, same.verify if "exp_avg" in name else lambda: next(same.pieces())):
                text = error_of(look)
                assert f"memory of rank 1 has changed, and nothing has written to it: {name}" in text, text
                assert text.startswith("CorruptionFound: SameBits: " if rank == 1 else "RuntimeError: SameBits: "), text
            if rank == 1:
                flip(find())
        for is_mended in (False, True):
            for param in (weight, model.head.weight) if rank == 1 else ():  # Two of one kind, of one element each.
                flip(optimizer.state[param]["step"], 20)
            text = error_of(same.verify)
            assert ("nothing has written to it: step of layers.1.1.weight, step of head.weight" in text) != is_mended, text
        for is_after_clip in (False, True):
            for _ in same.pieces():
                model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
            if rank == 1 and not is_after_clip:
                flip(weight.grad)
            same.clip_grad_norm_(1e-3)  # It writes to all gradients.
            if rank == 1 and is_after_clip:
                flip(weight.grad)
            optimizer.step()
            for _ in range(2):
                text = error_of(same.verify)
                assert "rank 1 has changed, and nothing has written to it: the gradient of layers.1.1.weight" in text, text
            optimizer.zero_grad()
            same.note()  # The gradient was applied.
        with torch.no_grad():
            weight.mul_(2.0)  # A program may write.
            model.scale.add_(1.0)
        same.verify()

    @ranks(3)
    def test_writes_that_torch_does_not_count_are_no_alarm():
        """All ranks write, or the program says so."""
        model, optimizer, same = made(verify_every=50)
        params = list(model.parameters())
        moments = [value for state in optimizer.state.values() for value in state.values()]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def backward(scale=1.0):
            for _ in same.pieces():
                (model(torch.zeros(1, 2, dtype=torch.long)).sum() * scale).backward()

        def scaled():
            backward(4.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        def clipped():
            backward()
            nn.utils.clip_grad_value_(params, 1e-3)
            optimizer.step()
            optimizer.zero_grad()

        writes = {
            "data": lambda: [param.data.to_local().mul_(1.5) for param in params],
            "local": lambda: [param.detach().to_local().add_(0.5) for param in params],
            "foreach": lambda: torch._foreach_mul_([param.detach() for param in params], 1.5),
            "moments": lambda: [getattr(value, "_local_tensor", value).data.mul_(0.5) for value in moments],
            "one weight": lambda: params[2].data.to_local().mul_(1.5),
            "reduced buffer": lambda: dist.all_reduce(model.scale),
            "scaler": scaled,
            "clipped": clipped,
        }
        for name, write in writes.items():
            with torch.no_grad() if name not in ("scaler", "clipped") else torch.enable_grad():
                write()
            assert not (text := error_of(same.verify)), (name, text)
            same.verify()
        model.load_state_dict(model.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())
        same.verify()
        if dist.get_rank() == 1:  # One rank alone must say so.
            params[2].data.to_local().mul_(1.5)
            same.note()
        same.verify()
        if dist.get_rank() == 2:
            flip(next(param for param in params if param.to_local().numel()))
        assert "memory of rank 2 has changed" in error_of(same.verify)

    @ranks(2)
    def test_a_compiled_step_of_the_optimizer():
        model, optimizer, same = made(verify_every=5)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(2):
            for _ in same.pieces():
                model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
            step()
            optimizer.zero_grad()
            same.verify()
        if dist.get_rank() == 0:
            flip(model.embed.weight)
        text = error_of(same.verify)
        assert "memory of rank 0 has changed, and nothing has written to it: embed.weight" in text, text

    @ranks(2)
    def test_what_each_of_several_optimizers_has_written_lies_still():
        model = sharded(Dense())
        params = list(model.parameters())
        optimizers = [adamw(params[::2]), adamw(params[1::2])]
        same = SameBits(model, optimizers, pieces=2, verify_every=5)
        for _ in same.pieces():
            model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            flip(params[1])
        assert "memory of rank 0 has changed" in error_of(same.verify)

    @ranks(2)
    def test_a_bit_that_changes_in_a_backward_is_found_before_the_step_writes_it():
        cases = {
            "exp_avg_sq of embed.weight": lambda model, optimizer: optimizer.state[model.embed.weight]["exp_avg_sq"],
            "the buffer scale": lambda model, optimizer: model.scale,
        }
        for name, find in cases.items():
            model, optimizer, same = made(verify_every=5)
            for _ in same.pieces():
                model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
            if dist.get_rank() == 0:
                flip(find(model, optimizer))
            optimizer.step()
            text = error_of(same.verify)
            assert f"memory of rank 0 has changed, and nothing has written to it: {name}" in text, text

    @ranks(3)
    def test_a_rank_that_computes_wrong_is_found_in_the_next_verified_step():
        rank = dist.get_rank()
        model, optimizer, same = made(verify_every=3)
        if rank == 1:
            model.layers[0].register_forward_hook(lambda module, inputs, output: output * (1 + 2**-20))
        train(same, model, optimizer, PIECES, range(1, 2))
        text = error_of(train, same, model, optimizer, PIECES, range(2, 3))
        assert "ranks 0 and 1, ranks 1 and 2 compute other bits of one piece: the gradient of" in text, text
        assert "more; so rank 1 computes wrong" in text and text.count("the gradient of") == 8, text
        assert text.startswith("CorruptionFound" if rank == 1 else "RuntimeError"), text

    @ranks(2)
    def test_a_backward_that_is_wrong_on_one_of_two_ranks():
        """It is not known on which one."""
        model, optimizer, same = made(verify_every=1)
        hook = lambda module, gradients, _: (gradients[0] * (1 + 2**-20),)  # noqa: E731
        if dist.get_rank() == 1:
            model.layers[1].register_full_backward_hook(hook)
        text = error_of(train, same, model, optimizer, PIECES, range(1, 2))
        assert text.startswith("CorruptionFound: SameBits: ranks 0 and 1, ranks 1 and 0 compute other bits of one piece"), text
        assert "the gradient of layers.0.0.weight" in text and "layers.1" not in text and "the loss" not in text, text
        assert "so rank" not in text, text

    @pytest.mark.slow
    def test_single_wrong_computations_are_found_where_a_piece_is_repeated(self):
        """One in each second step: 1 of 8 is in the fourth step and in a rank's first piece. No other step has an alarm."""
        steps = int(os.environ.get("TORCH_RAGGED_TEST_STEPS", 100))
        planted, found, wanted = run_ranks(2, single_errors, steps, timeout=3600)[0]
        self.assertEqual(found, wanted)
        print(f"{planted} wrong computations in {steps} steps, {len(found)} found")

    @ranks(2)
    def test_what_differs_is_named_and_nothing_else():
        model, _, same = made(verify_every=1)

        def step(more=0):
            for _ in same.pieces():
                loss = model(torch.zeros(1, 2, dtype=torch.long)).sum()
                loss.backward()
                same.add_loss(loss + more)

        text = error_of(step, dist.get_rank())
        assert text.endswith("compute other bits of one piece: the loss"), text
        model.zero_grad()
        if dist.get_rank() == 1:  # The output is the same.
            more = lambda module, _, output: output + (module.weight - module.weight.detach()).sum()  # noqa: E731
            model.layers[1][1].register_forward_hook(more)
        text = error_of(step)
        assert text.endswith("compute other bits of one piece: the gradient of layers.1.1.weight"), text

    @ranks(2)
    def test_ranks_that_hold_other_tensors_are_told():
        model, _, same = made()
        if dist.get_rank() == 1:
            model.register_buffer("own", torch.ones(1))
        text = error_of(same.verify)
        assert "SameBits.verify was called differently on different ranks" in text, text

    @ranks(2)
    def test_the_log_names_it_and_training_goes_on():
        model, optimizer, same = made(on_corruption="log")
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("torch_ragged.fsdp").addHandler(handler)
        if dist.get_rank() == 1:
            flip(model.head.weight)
        train(same, model, optimizer, PIECES, range(1, 2))
        logging.getLogger("torch_ragged.fsdp").removeHandler(handler)
        assert [line for line in lines if "memory of rank 1" in line and "head.weight" in line] == lines
        assert len(lines) == 1

    @ranks(4)
    def test_no_alarm_and_the_same_bits_without_corruption():
        replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        for make, options in ((adamw, {}), (adamw, {"mesh": replicas}), (adamw8bit, {}), (muon, {}), (sgd, {})):
            torch.manual_seed(0)
            model = Dense()
            expected = in_one_process(model, make(model.parameters()), 5, steps=range(3))
            torch.manual_seed(0)
            model = sharded(Dense(), **options)
            optimizer = make(model.parameters())
            same = SameBits(model, optimizer, pieces=5, seed=7, verify_every=2)
            assert train(same, model, optimizer, 5, range(3)) == expected
            same.verify()

    @ranks(2)
    def test_arguments_are_checked():
        model = sharded(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        assert "verify_every=0 is no positive" in error_of(SameBits, model, adamw(model.parameters()), pieces=2, verify_every=0)
        assert "on_corruption='stop'" in error_of(SameBits, model, adamw(model.parameters()), pieces=2, on_corruption="stop")


if __name__ == "__main__":
    unittest.main()
