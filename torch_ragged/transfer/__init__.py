"""Moving tensors between meshes: to an inference engine, to another mesh in one program, or out of it one after another.

==================  ==============================================================================
``plan()``          how tensors get from some ranks and placements to any others; ``Plan.run()``
``EngineLayout``    what an inference engine holds, as the target of a plan
``PullLayout``      what an engine reads, as its own loader says, as the target of a plan
``Spec``            what a plan must know of a tensor on a mesh
``BoxSpec``         the same of a tensor that ranks hold as boxes
``Plan.tiles()``    the plan as regular tiles, for many-to-many collectives: ``Tiles``, ``Tile``, ``TileSide``
``stream()``        the whole tensors of a sharded model one after another, in bounded memory
``Baseline``        what receivers hold, so that a run sends only the changed elements
``visualize()``     who sends how many bytes to whom
==================  ==============================================================================

This package never imports ``fsdp`` or ``optim``: it reads DTensors under any placements.
"""

from torch_ragged.transfer._background import Handle
from torch_ragged.transfer._elements import Baseline
from torch_ragged.transfer._engine_layout import EngineLayout
from torch_ragged.transfer._errors import TransferError
from torch_ragged.transfer._plan import Plan, plan
from torch_ragged.transfer._pulls import PullLayout
from torch_ragged.transfer._sides import BoxSpec, Spec
from torch_ragged.transfer._stream import stream
from torch_ragged.transfer._tiles import Tile, Tiles, TileSide
from torch_ragged.transfer._visualize import visualize

__all__ = [
    "Baseline",
    "BoxSpec",
    "EngineLayout",
    "Handle",
    "Plan",
    "PullLayout",
    "Spec",
    "Tile",
    "TileSide",
    "Tiles",
    "TransferError",
    "plan",
    "stream",
    "visualize",
]
