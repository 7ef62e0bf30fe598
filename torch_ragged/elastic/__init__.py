"""Training that goes on when ranks die: a loop around the program's step, and the samples of a step by piece."""

from torch_ragged.elastic._loader import PieceLoader
from torch_ragged.elastic._run import run

__all__ = ["PieceLoader", "run"]
