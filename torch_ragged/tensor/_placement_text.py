"""The text of placements, as plans and checkpoints have it: the call that makes them.

It must not evaluate text: what it reads becomes a literal, or a value of a table, or an error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from torch_ragged.tensor._cut_placement import own_types

__all__ = ["maker_names", "placement_text", "placement_types", "read_call", "read_placement"]

_MOST_RANKS = 10**7  # In text, so that a short one, perhaps a forged one, cannot fill the memory.


def placement_types() -> dict[str, type[Placement]]:
    """By name, the types of placements that a text may have. Strided views are missing: no saved tensor has their placement."""
    own = {name: own_types[name] for name in sorted(own_types) if own_types[name].redistribute_view is None}
    stock: tuple[type[Placement], ...] = (Shard, Replicate, Partial, _StridedShard)
    return {**{kind.__name__: kind for kind in stock}, **own}


def placement_text(placement: Placement) -> str:
    """The call that makes ``placement``. (The ``repr`` of torch's placements is no Python.)"""
    if isinstance(placement, _StridedShard):
        return f"_StridedShard({placement.dim}, split_factor={placement.split_factor})"
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    if isinstance(placement, Partial):
        return "Partial()" if placement.reduce_op == "sum" else f'Partial("{placement.reduce_op}")'
    return "Replicate()" if isinstance(placement, Replicate) else repr(placement)


def read_placement(text: str) -> Placement:
    """The placement whose :func:`placement_text` is ``text``.

    Raises:
        ValueError: ``text`` is no call of a placement.
    """
    kinds = placement_types()
    placement = read_call(text, kinds)
    if not isinstance(placement, Placement):
        raise ValueError(f"{text!r} is no placement: write one of {maker_names(kinds)} with its arguments, such as Shard(0)")
    return placement


def read_call(text: str, makers: Mapping[str, Callable[..., Any]]) -> Any:
    """The value of a call of one of ``makers``. Its arguments are literals, such calls, and sums and multiples of tuples.

    Raises:
        ValueError: ``text`` is something else, or the maker refuses the arguments.
    """

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in makers:
            keywords = {str(keyword.arg): read(keyword.value) for keyword in node.keywords}
            return makers[node.func.id](*[read(argument) for argument in node.args], **keywords)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return (*read(node.left), *read(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):  # As in the repr of many units: (1,) * 64 + (0,) * 64
            values, count = tuple(read(node.left)), read(node.right)
            if len(values) * count > _MOST_RANKS:
                raise ValueError(f"{len(values) * count} ranks are more than {_MOST_RANKS}")
            return values * count
        if isinstance(node, ast.List):
            return [read(element) for element in node.elts]
        try:
            return ast.literal_eval(node)
        except ValueError:  # Its text has an address of memory.
            raise ValueError(f"{ast.unparse(node)} is no literal") from None

    try:
        return read(ast.parse(text, mode="eval").body)
    except (TypeError, ValueError) as error:
        reason = str(error)
    except SyntaxError:  # Its text differs between versions of Python.
        reason = "it is no Python"
    except (RecursionError, MemoryError):
        reason = "it is nested too deeply"
    raise ValueError(f"cannot read {text!r}: {reason}. Write a call of {maker_names(makers)} with literals")


def maker_names(makers: Mapping[str, Callable[..., Any]]) -> str:
    """The names of torch's and our own ``makers``, for an error. Placements of others are legal, too."""
    return ", ".join(
        [name for name, maker in makers.items() if maker.__module__.partition(".")[0] in ("torch", "torch_ragged")]
    )
