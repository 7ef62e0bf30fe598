"""What a process and its store hold, for tests and runs in which it must stay flat."""

import collections
import gc
import os
import threading

import torch.distributed as dist
from torch.distributed.tensor import debug

from torch_ragged._register._torch import process_groups

__all__ = ["held"]


def held():
    """What this process and the store hold: objects by their types, and the numbers of everything that is no object."""
    debug._clear_sharding_prop_cache()  # torch's, which holds meshes.
    gc.collect()
    found = collections.Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    store = dist.distributed_c10d._get_default_store()
    found["threads"] = threading.active_count()
    found["threads of the process"] = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    found["descriptors"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    found["process groups"] = len(process_groups())
    dist.barrier()
    found["keys of the store"] = store.num_keys()
    dist.barrier()
    return found
