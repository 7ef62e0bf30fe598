"""Training that goes on when ranks die: a loop around the program's step, and the samples of a step by piece."""

from torch_ragged.elastic._loader import PieceLoader
from torch_ragged.elastic._run import run
from torch_ragged.fsdp.elastic._neighbour_copies import CopiesLost

__all__ = ["CopiesLost", "PieceLoader", "run"]
