"""Sharded parameters in files: the bits of parameters in memory, few pages in memory, and errors that name the file."""

import errno
import gc
import os
import shutil
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from common import error_of, ranks
from offload_cases import ADAMW, BLOCKS, POLICY, assert_equal, build, check, folder_of_ranks, make, train
from tested_device import DEVICE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.step.offload import mapped_nbytes
from torch_ragged import checkpoint
from torch_ragged.fsdp import Offload, fully_shard, memory_report, offloaded
from torch_ragged.fsdp.files import _scratch_file
from torch_ragged.optim import AdamW8bit


def in_files(folder):
    return Offload(parameters="files", to=folder)


def stack(policy, blocks=8, size=256):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(blocks)))
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    return fully_shard(model, mesh=mesh, offload_policy=policy)


def await_writes():
    for writing in _scratch_file._fetch_order._writes:
        writing.result()


class BitsTest(unittest.TestCase):
    @unittest.skipUnless(DEVICE == "cpu", "what is stepped on the CPU is compared with what is stepped on the device")
    @ranks(2)
    def test_files_change_no_bit_and_leave_nothing_behind():
        with folder_of_ranks() as folder:
            check(*ADAMW, (in_files(folder),))
            check(*ADAMW, (in_files(folder),), dtype=torch.bfloat16, how={"passes": 2, "clip": 0.1})
            check(AdamW8bit, {"lr": 0.05, "policy": POLICY}, (in_files(folder),), **BLOCKS)
            gc.collect()

    @unittest.skipUnless(DEVICE == "cpu", "what is stepped on the CPU is compared with what is stepped on the device")
    @ranks(4)
    def test_replicas_and_tensor_parallelism_change_no_bit():
        with folder_of_ranks() as folder:
            check(*ADAMW, (in_files(folder),), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
            check(*ADAMW, (in_files(folder),), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), tp=True)

    @ranks(2)
    def test_steps_in_backward_and_ordinary_optimizers_change_no_bit():
        with folder_of_ranks() as folder:
            reference = make(plain := build(Offload(parameters=True)), *ADAMW[:1], None, **ADAMW[1])
            train(plain, reference)
            for in_backward in (False, True):
                model = build(in_files(folder))
                mine = make(model, ADAMW[0], in_files(folder), in_backward=in_backward, **ADAMW[1])
                train(model, mine)
                assert_equal(mine, reference)
            model = build(in_files(folder))
            mine = make(model, ADAMW[0], None, **ADAMW[1])
            train(model, mine)
            assert_equal(mine, reference)

    @ranks(2)
    def test_writes_of_every_kind_reach_the_next_forward():
        with folder_of_ranks() as folder:
            models = [stack(policy, blocks=3) for policy in (Offload(parameters=True), in_files(folder))]
            x = torch.ones(2, 256, device=DEVICE)
            for model in models:
                model(x)
                with torch.no_grad():
                    model[0].weight.mul_(2)
                    model[1].weight.to_local().fill_(0.01)
                    model[2].bias.data.add_(1)
                model[2].weight.data = model[2].weight.data * 3
            assert torch.equal(models[0](x), models[1](x))
            states = {name: value * 2 for name, value in models[0].state_dict().items()}
            for model in models:
                model.load_state_dict(states)
            assert torch.equal(models[0](x), models[1](x))
            for model in models:
                model.to(torch.bfloat16)
            assert torch.equal(models[0](x.bfloat16()), models[1](x.bfloat16()))

    @ranks(2)
    def test_checkpoints_and_models_from_meta():
        with folder_of_ranks() as folder, folder_of_ranks() as kept:
            optimizer = offloaded(torch.optim.AdamW, first := stack(in_files(folder)), lr=0.1)
            x = torch.ones(2, 256, device=DEVICE)
            first(x).sum().backward()
            optimizer.step()
            checkpoint.save(os.path.join(kept, "run"), checkpoint.TrainState(first, optimizer, step=1))
            with torch.device("meta"):
                second = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
            for module in (*second, second):
                mesh = init_device_mesh(DEVICE, (2,))
                fully_shard(module, mesh=mesh, offload_policy=in_files(folder))
            second.to_empty(device="cpu")
            resumed = offloaded(torch.optim.AdamW, second, lr=0.1)
            checkpoint.load(os.path.join(kept, "run"), checkpoint.TrainState(second, resumed))
            for model, each in ((first, optimizer), (second, resumed)):
                each.zero_grad()
                model(x).square().sum().backward()
                each.step()
            assert_equal(resumed, optimizer)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(os.path.join(kept, "run"))


class MemoryTest(unittest.TestCase):
    @ranks(1)
    def test_few_groups_have_pages_in_memory():
        with folder_of_ranks() as folder:
            model = stack(in_files(folder), blocks=16)
            optimizer = offloaded(torch.optim.AdamW, model, in_backward=True)
            group = 4 * (256 * 256 + 256)
            for _ in range(3):
                model(torch.ones(2, 256, device=DEVICE)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                await_writes()
                # Those in use by passes and by steps, and the next ones.
                assert 0 < mapped_nbytes() < 5.5 * group, mapped_nbytes() / group
            report = memory_report(model, optimizer)
            assert report.total.sharded == 0, report
            assert report.total.host == optimizer.tier_nbytes()["windows"] + 7 * group, report


class FaultTest(unittest.TestCase):
    @ranks(2)
    def test_a_file_that_cannot_be_made_is_an_error_on_all_ranks():
        with folder_of_ranks() as folder:
            model, mesh = nn.Linear(64, 64), init_device_mesh(DEVICE, (2,))
            model.to(DEVICE)
            before = dict(model.named_parameters())

            def full(*_):
                raise OSError(errno.ENOSPC, "No space left on device")

            with mock.patch.object(_scratch_file, "_fallocate", full if dist.get_rank() else _scratch_file._fallocate):
                error = error_of(fully_shard, model, mesh=mesh, offload_policy=in_files(folder))
            assert ("OSError" in error and "reserve" in error) if dist.get_rank() else "rank 1" in error, error
            missing = error_of(fully_shard, model, mesh=mesh, offload_policy=in_files(os.path.join(folder, "missing")))
            assert "could not create" in missing, missing
            assert all(param is before[name] for name, param in model.named_parameters())
            fully_shard(model, mesh=mesh, offload_policy=in_files(folder))
            model(torch.ones(1, 64, device=DEVICE)).sum().backward()

    @ranks(1)
    def test_a_read_that_fails_names_the_file_and_can_be_tried_again():
        with folder_of_ranks() as folder:
            model, real = stack(in_files(folder)), _scratch_file._preadv
            x = torch.ones(2, 256, device=DEVICE)
            expected = model(x)

            def failing(*_):
                raise OSError(errno.EIO, "Input/output error")

            for result in (failing, lambda *_: 0):
                with mock.patch.object(_scratch_file, "_preadv", result):
                    error = error_of(model, x)
                assert "OSError" in error and "offload could not read" in error and folder in error, error
                assert torch.equal(model(x), expected)
            assert _scratch_file._preadv is real

    @ranks(2)
    def test_what_could_not_be_written_ends_the_step_on_all_ranks():
        with folder_of_ranks() as folder:
            model = stack(in_files(folder))
            optimizer = offloaded(torch.optim.AdamW, model)

            def failing(*_):
                raise OSError(errno.EIO, "Input/output error")

            model(torch.ones(2, 256, device=DEVICE)).sum().backward()
            await_writes()
            with mock.patch.object(_scratch_file, "_fdatasync", failing if dist.get_rank() == 0 else _scratch_file._fdatasync):
                errors = [error_of(optimizer.step)]  # The thread may write later than the step looks.
                await_writes()
            errors.append(error_of(optimizer.step))
            text, of_model = "offload could not write a scratch file", error_of(model.state_dict)
            if dist.get_rank() == 0:  # What cannot be trusted goes into no checkpoint.
                assert any(text in each and folder in each for each in errors), errors
                assert text in of_model and text in error_of(model.state_dict), of_model
            else:
                assert any(text in each and "rank 0" in each for each in errors) and not of_model, (errors, of_model)

    @ranks(1)
    def test_an_optimizer_without_states_has_no_file_of_states():
        with folder_of_ranks() as folder:
            model, plain = stack(in_files(folder)), stack(Offload(parameters=True))
            for each, optimizer in (
                (model, offloaded(torch.optim.SGD, model, lr=0.1)),
                (plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
            ):
                each(torch.ones(2, 256, device=DEVICE)).square().sum().backward()
                optimizer.step()
            await_writes()
            assert mapped_nbytes() < 5.5 * 4 * (256 * 256 + 256)
            assert all(torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), plain.parameters()))

    def test_wrong_policies_say_what_is_missing(self):
        assert "needs the folder of the files: give to=folder" in error_of(Offload, parameters="files")
        assert "must be True, False or \"files\", got 'disk'" in error_of(Offload, parameters="disk", to="x")
        assert "optimizer=0.5, parameters='files'" in error_of(Offload, 0.5, "files", "x")


if __name__ == "__main__":
    unittest.main()
