"""Newton-Schulz orthogonalisation of batches of matrices, bitwise equal to ``torch.optim.Muon`` for each matrix.

The result for a matrix must not depend on the other matrices of its batch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Union

import torch

from torch_ragged._kernels.symmetric import gram, polynomial

__all__ = [
    "COEFFICIENTS",
    "EPS",
    "STEPS",
    "Coefficients",
    "newton_schulz",
    "newton_schulz_cost",
    "newton_schulz_exchanges",
    "newton_schulz_rows",
    "schedule_of",
]

Triple = tuple[float, float, float]
Coefficients = Union[str, Triple, Sequence[Triple]]
"""One triple for all steps, one per step, or a name."""

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
STEPS = 5

_OPTIMAL = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFETY = 1.01  # Rounding to bfloat16 may lift a singular value above 1, where the polynomials would let it grow.
NAMED = {"polar_express": (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _OPTIMAL), (1.875, -1.25, 0.375))}
"""Named coefficients. Source of polar_express: Amsel, Persson, Musco, Gower, "The Polar Express" (2025), algorithm 1."""


def schedule_of(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """The triple (a, b, c) of each step: x becomes ``a x + b x x^T x + c (x x^T)^2 x``. The last one given is repeated.

    Raises:
        ValueError: ``coefficients`` are neither a triple of numbers, nor some of them, nor a name.
    """
    given = NAMED.get(coefficients, ()) if isinstance(coefficients, str) else tuple(coefficients)
    triples = tuple(tuple(each) if isinstance(each, Sequence) else (each,) for each in given)
    if triples and all(len(each) == 1 for each in triples):
        triples = (tuple(each[0] for each in triples),)
    if not triples or any(len(each) != 3 or not all(isinstance(n, (int, float)) for n in each) for each in triples):
        raise ValueError(
            f"ns_coefficients must be three numbers, a sequence of such triples, one per step, or one of {sorted(NAMED)}, got "
            f"{coefficients!r}"
        )
    return (triples + triples[-1:] * steps)[:steps]  # type: ignore[return-value]


def newton_schulz_cost(rows: int, columns: int, steps: int = STEPS) -> float:
    """Floating-point operations of the iteration: with m <= n, each step has two products of 2 m m n and one of 2 m m m."""
    m, n = min(rows, columns), max(rows, columns)
    return float(steps * (4 * m * m * n + 2 * m**3))


def newton_schulz(
    matrices: torch.Tensor,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    batched: bool = True,
) -> torch.Tensor:
    """Muon's quintic iteration on each matrix. The result approximates the orthogonal factor of its polar decomposition.

    The operations and their order are those of ``torch.optim.Muon``, in bfloat16. Source: K. Jordan, "Muon", 2024.

    Args:
        matrices: (B, rows, columns), of any floating dtype; not changed.
        coefficients: ``ns_coefficients`` of ``torch.optim.Muon``; also one triple per step, or a name.
        steps, eps: ``ns_steps`` and ``eps`` of ``torch.optim.Muon``.
        batched: on CUDA, one product for all matrices, and half the work for symmetric products of large matrices
            (:func:`~torch_ragged._kernels.symmetric.gram`). The library may choose another kernel for another number of
            matrices, so bits may differ. If False, and always on CPU, one matrix after the other, with the kernels of
            ``torch.optim.Muon``: the bits of a matrix do not depend on the other ones.

    Returns:
        (B, rows, columns) in bfloat16.
    """
    if (not batched or matrices.is_cpu) and len(matrices) > 1:
        return torch.cat([newton_schulz(one, coefficients, steps, eps, batched) for one in matrices.split(1)])
    rows, columns = matrices.shape[-2:]
    x = matrices.to(torch.bfloat16, copy=True)
    if rows > columns:
        x = x.mT
    for one in x:  # One norm at a time: in a batched reduction the order of additions may depend on the batch.
        one.div_(one.norm().clamp(min=eps))
    is_single = len(x) == 1
    # Without the dimension of the batch, as torch.optim.Muon calls it: baddbmm may choose another kernel, with other bits.
    x, add_product = (x[0], torch.addmm) if is_single else (x, torch.baddbmm)
    for a, b, c in schedule_of(coefficients, steps):
        x = add_product(x, polynomial(gram(x, batched), b, c, batched), x, beta=a)
    x = x.unsqueeze(0) if is_single else x
    return x.mT if rows > columns else x


def newton_schulz_exchanges(rows: int, columns: int, steps: int = STEPS) -> tuple[int, ...]:
    """The elements of a row of each tensor that :func:`newton_schulz_rows` yields, for a matrix of these sizes."""
    m, n = min(rows, columns), max(rows, columns)
    return (m, n) * (steps - 1) + (m,) * min(steps, 1)


def newton_schulz_rows(
    matrix: torch.Tensor, schedule: Sequence[Triple], eps: float, blocks: int, rows: tuple[int, int]
) -> Generator[torch.Tensor, None, torch.Tensor]:
    """Some rows of Muon's iteration, in blocks of rows, so that several ranks can share a matrix.

    With m <= n, each step needs x (m, n) and its Gram matrix g (m, m) whole, and computes both by blocks of rows::

        g[block] = x[block] x^T        x[block] = a x[block] + (b g[block] + c g[block] g) x

    The blocks follow from ``blocks`` and m alone, and each is computed by products of its own. So the bits are the same
    for any number of ranks. They may differ from those of :func:`newton_schulz`, whose products are not cut.

    Args:
        matrix: (rows, columns), of any floating dtype, whole; not changed.
        schedule, eps: as in :func:`newton_schulz`, one triple per step.
        blocks: the number of blocks of ceil(m / blocks) rows; the last ones may be smaller or empty.
        rows: the first row to compute and the one behind the last: bounds of blocks. A row lies along the larger size.

    Yields:
        tensors of m rows, of which ``rows`` are computed: the caller fills in the others before it goes on.

    Returns:
        (rows, columns) in bfloat16, of which only ``rows`` are valid.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if is_tall else matrix).to(torch.bfloat16, memory_format=torch.contiguous_format, copy=True)
    # Each rank that shares the matrix has it whole, in the same memory order: its norm has the same bits everywhere, without an
    # exchange.
    x.div_(x.norm().clamp(min=eps))
    m, size = len(x), -(-len(x) // blocks)
    mine = [slice(start, min(start + size, m)) for start in range(rows[0], rows[1], max(size, 1))]
    for step, (a, b, c) in enumerate(schedule):
        product = x.new_empty(m, m)
        # Into the rows of one tensor: what is exchanged lies there, and rows of other ranks arrive in place.
        for block in mine:
            torch.mm(x[block], x.mT, out=product[block])
        yield product
        updated = torch.empty_like(x)
        for block in mine:
            polynomials = torch.addmm(product[block], product[block], product, beta=b, alpha=c)
            torch.addmm(x[block], polynomials, x, beta=a, out=updated[block])
        x = updated
        # Rows of the last step are not exchanged: the scatter sends them to those who hold them.
        if step + 1 < len(schedule):
            yield x
    return x.mT if is_tall else x
