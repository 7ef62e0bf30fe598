"""TRL trains with ours as with torch's FSDP2, and sends weights by stream(); skipped where it is not installed."""

import collections
import importlib.util
import unittest

import torch
import torch.distributed as dist
from case import both
from common import ranks, run_ranks
from doc_pages import run_page
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from torch_ragged.fsdp import fully_shard

HAS_TRL = all(importlib.util.find_spec(name) for name in ("trl", "accelerate", "transformers", "peft"))


class Server:
    """What TRL sends weights to, in the place of its client of a vLLM server."""

    def __init__(self, fails):
        self.fails, self.received, self.issued = fails, [], []

    def pause(self):
        self.received.clear()

    def resume(self):
        self.received.append(("resumed", None))

    def send_weights(self, weights):
        with CommDebugMode() as mode:
            for name, tensor in weights:
                if self.fails and len(self.received) == 2:
                    raise RuntimeError("the server is gone")
                self.received.append((name, tensor.clone()))
                self.issued.append(mode.get_total_counts())


def make_trainer(max_bytes, fails):
    """TRL's trainer as far as its weight synchronization reads it: the rest needs a vLLM server."""
    from accelerate import Accelerator
    from trl.experimental.async_grpo import AsyncGRPOTrainer
    from trl_cases import enter_ranks, make_model

    from torch_ragged.integrations.trl import StreamedWeights

    class Trainer(StreamedWeights, AsyncGRPOTrainer):
        max_stream_bytes = max_bytes

    enter_ranks()
    trainer = Trainer.__new__(Trainer)
    trainer.accelerator, trainer.model = Accelerator(cpu=True), make_model()
    trainer.model.lm_head.weight.requires_grad_(False)  # TRL does not send frozen parameters.
    fully_shard(trainer.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trainer.weight_transfer = Server(fails) if dist.get_rank() == 0 else None
    trainer._lora_sync, trainer.rollout_worker, trainer.model_version = False, None, 0
    trainer._metrics = {"train": collections.defaultdict(list)}
    return trainer


def check_sync(max_bytes, all_ahead):
    from trl_cases import make_model

    trainer = make_trainer(max_bytes, fails=False)
    trainer._sync_weight()
    assert trainer.model_version == (1 if dist.get_rank() == 0 else 0)
    if dist.get_rank() == 0:
        *received, last = trainer.weight_transfer.received
        wanted = {name: param for name, param in make_model().named_parameters() if name != "lm_head.weight"}
        assert last == ("resumed", None) and [name for name, _ in received] == list(wanted)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in received)
        first, last = trainer.weight_transfer.issued[0], trainer.weight_transfer.issued[-1]
        assert last >= len(wanted) and first == (last if all_ahead else 1), trainer.weight_transfer.issued


@unittest.skipUnless(HAS_TRL, "trl, accelerate, transformers and peft are not installed")
class TRLTest(unittest.TestCase):
    def test_losses_and_norms_are_those_of_fsdp2(self):
        from trl_cases import CASES

        for number, case in enumerate(CASES):
            with self.subTest(case=case.what):
                for theirs, ours in run_ranks(2, both, "trl", number):
                    self.assertEqual(len(ours), 20)  # A loss and a norm per step.
                    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6, atol=1e-6)

    def test_weights_are_sent_with_the_next_ones_in_flight(self):
        for max_bytes, all_ahead in ((1, False), (1 << 20, True)):
            run_ranks(3, check_sync, max_bytes, all_ahead)

    @ranks(3)
    def test_a_transfer_that_fails_on_rank_0_leaves_no_rank_in_a_collective():
        trainer, failed = make_trainer(1 << 20, fails=True), None
        try:
            trainer._sync_weight()
        except RuntimeError as error:
            failed = error
            trainer.accelerator.wait_for_everyone()  # The others wait here after the transfer.
        assert (failed is not None) == (dist.get_rank() == 0)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()

    def test_the_mixin_is_refused_where_it_would_do_nothing(self):
        from trl.experimental.async_grpo import AsyncGRPOTrainer

        from torch_ragged.integrations.trl import StreamedWeights

        for bases in ((StreamedWeights,), (StreamedWeights, torch.nn.Module), (AsyncGRPOTrainer, StreamedWeights)):
            with self.assertRaisesRegex(TypeError, r"write class T\(StreamedWeights, AsyncGRPOTrainer\)"):
                type("T", bases, {})

    def test_the_commands_of_the_page_run(self):
        self.assertIn("sharded by torch_ragged: True", run_page("integrations/trl.md")[0])
