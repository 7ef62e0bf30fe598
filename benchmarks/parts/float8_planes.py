"""What a rank sends and holds of a block of GPT-OSS-20B's shapes: in bfloat16, as float8, as codes of 8 and 4 bits in modules.

    python -m benchmarks.parts.float8_planes [--ranks 8] [--json PATH]

On the meta device with a fake process group: nothing is computed, and no time is measured. "sent" is what the all-gathers of a
block bring to this rank, in forward and in backward. "gathered" is what the rank holds of the block's parameters between their
all-gather and reshard, and "while decoded" the most in between. The values that an operation dequantizes for itself are
temporary, and not in it. "all-gathers" counts those of backward.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.common.fake_world import fake_world, make_mesh
from benchmarks.common.measure import print_table, write_json
from torch_ragged.fsdp import Float4Policy, Float8Policy, float8_weight, fully_shard

HIDDEN, EXPERTS, QUERIES, KEYS = 2880, 32, 4096, 512


class Block(nn.Module):
    """The parameters of a block of GPT-OSS-20B."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ParameterList(nn.Parameter(torch.empty(HIDDEN)) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, size) for size in (QUERIES, KEYS, KEYS))
        self.o, self.router = nn.Linear(QUERIES, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, HIDDEN, 2 * HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, HIDDEN))
        self.biases = nn.ParameterList([torch.empty(EXPERTS, 2 * HIDDEN), torch.empty(EXPERTS, HIDDEN)])


def rows(ranks: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    narrow, wide = torch.bfloat16, torch.float32
    policies = {
        "bfloat16": MixedPrecisionPolicy(narrow, wide),
        "Float8Policy": Float8Policy(narrow, wide),
        "Float8Policy, weight_factory": Float8Policy(narrow, wide, weight_factory=float8_weight),
        "Float4Policy": Float4Policy(narrow, wide),
        "Float4Policy, backward=Float8Policy()": Float4Policy(narrow, wide, backward=Float8Policy()),
        "the same, recomputes=False": Float4Policy(narrow, wide, backward=Float8Policy(), recomputes=False),
    }
    found = []
    with fake_world(ranks):
        for name, policy in policies.items():
            with torch.device("meta"):
                block = Block()
            fully_shard(block, mesh=make_mesh(ranks), mp_policy=policy)
            groups = block._get_fsdp_state().groups  # type: ignore[operator]
            sent, held, most, number = [0, 0], [0, 0], [0, 0], 0
            for group in groups:
                buffers, own = group.encoding.buffers(), slice(None)
                if group.encoding.has_phases:  # Codes and scales of forward, then those of backward.
                    own = slice(0 if policy.recomputes else 2, None)
                for phase, used in enumerate((buffers[:2] if group.encoding.has_phases else buffers, buffers[own])):
                    codes = [buffer.nbytes for buffer in used if buffer.flat.dtype == torch.uint8]
                    values = [buffer.nbytes for buffer in used if buffer.flat.dtype == narrow]
                    # Float8Policy sends codes alone and decodes them to bfloat16; planes are codes and scales, both sent.
                    travels = [buffer.nbytes for buffer in used if not codes or buffer.flat.dtype != narrow]
                    sent[phase] += sum(travels) * (ranks - 1) // ranks
                    held[phase] += sum(values or codes)
                    most[phase] += sum(buffer.nbytes for buffer in used)
                number += len(travels)
            numbers = {"sent in forward MB": sent[0] / 1e6, "in backward MB": sent[1] / 1e6}
            numbers |= {"gathered MB": max(held) / 1e6, "while decoded MB": max(most) / 1e6}
            elements = sum(parameter.numel() for parameter in block.parameters())
            found.append({"policy": name, "all-gathers": number, **numbers, "bytes per element": max(held) / elements})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--json")
    options = parser.parse_args()
    found = rows(options.ranks)
    largest = 2 * HIDDEN * HIDDEN * 2 / 1e6
    print_table(
        f"A block of GPT-OSS-20B's shapes on {options.ranks} ranks; largest matrix in bfloat16: {largest:.1f} MB", found
    )
    write_json(options.json, {"ranks": options.ranks, "rows": found})


if __name__ == "__main__":
    main()
