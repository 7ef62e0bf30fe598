"""Optimizer steps in a CUDA graph: replays have the bits of steps, at learning rates that change between them."""

import pytest
import torch
from torch import nn

from torch_ragged.optim import Adam8bit, AdamW8bit, BlockPolicy, Muon, matrix_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL = BlockPolicy((16, 16), min_numel=64)
KINDS = {
    "AdamW8bit": lambda model: AdamW8bit(model.parameters(), policy=SMALL, capturable=True),
    "Adam8bit": lambda model: Adam8bit(model.parameters(), policy=SMALL, weight_decay=0.1, capturable=True),
    "Muon": lambda model: Muon(matrix_groups(model), capturable=True),
    "NorMuon": lambda model: Muon(
        matrix_groups(model), neuron_beta=0.9, cautious_weight_decay=True, momentum_block=(8, 16), capturable=True
    ),
    "shared rows": lambda model: Muon(matrix_groups(model), row_blocks=4, capturable=True),
}


class Training:
    def __init__(self, make, dtype):
        torch.manual_seed(0)
        layers = nn.Linear(80, 64, dtype=dtype), nn.Tanh(), nn.Linear(64, 96, bias=False, dtype=dtype)
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer, self.lr = make(self.model), torch.zeros((), device="cuda")
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        self.x = torch.zeros(6, 80, dtype=dtype, device="cuda")

    def step(self):
        self.optimizer.zero_grad()
        self.model(self.x).float().square().sum().backward()
        self.optimizer.step()

    def set(self, number):
        self.lr.fill_(0.01 / (1 + number))
        self.x.copy_(torch.randn(6, 80, generator=torch.Generator().manual_seed(number)))

    def tensors(self):
        states = [each for state in self.optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
        return [*self.model.parameters(), *states]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_have_the_bits_of_steps(kind, dtype):
    make = KINDS[kind]
    if kind == "AdamW8bit" and dtype == torch.bfloat16:
        make = lambda model: AdamW8bit(model.parameters(), policy=SMALL, stochastic_rounding=True, capturable=True)  # noqa: E731
    plain, captured = Training(make, dtype), Training(make, dtype)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(2):
            captured.set(number)
            captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    captured.set(2)
    with torch.cuda.graph(graph):
        captured.step()
    for number in range(6):
        plain.set(number)
        plain.step()
    for number in range(2, 6):
        captured.set(number)
        junk = torch.full((1 << 16,), float("nan"), device="cuda"), torch.full((1 << 12,), -1, dtype=torch.int64).pin_memory()
        graph.replay()
        del junk  # Memory that the step has freed is others' now.
    for p, q in zip(plain.tensors(), captured.tensors(), strict=True):
        assert torch.equal(p, q), kind
    names = {name for state in captured.optimizer.state.values() for name in state}
    assert kind in ("Muon", "shared rows") or any(name.endswith("_codes") for name in names), names
    assert {state["step"].device.type for state in captured.optimizer.state.values() if "step" in state} <= {"cuda"}


def test_a_capture_without_a_step_before_it_raises():
    training = Training(KINDS["AdamW8bit"], torch.float32)
    training.model(training.x).sum().backward()
    with pytest.raises(RuntimeError, match="take a step before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        training.optimizer.step()
