"""Stand-ins for the collectives of a group: late, logged, counted, or none at all.

They have the methods of the protocol ``Collectives`` and no others, so that a call that is new to it fails in them.
"""

from collections import Counter

from torch_ragged.fsdp.comm._collectives import ReduceScatterTraits, WrappedCollectives, done

__all__ = ["LoggedCollectives", "NoCollectives", "counted_calls", "delay_collectives"]


class LateCollectives(WrappedCollectives):
    """The collectives of ``inner``, which read and write nothing before ``wait()``."""

    def issue(self, name, largest, *arguments):
        return Late(getattr(self.inner, name), arguments)

    def reduce_scatter_traits(self, device):
        return super().reduce_scatter_traits(device)._replace(holds_second_buffer=False)  # Waiting issues.


class Late:
    def __init__(self, collective, tensors):
        self.collective, self.tensors = collective, tensors

    def wait(self):
        self.collective(*self.tensors).wait()


class LoggedCollectives(WrappedCollectives):
    """The collectives of ``inner``, which note in ``log`` when they are issued, with ``of`` behind their name."""

    def __init__(self, inner, log, of=""):
        super().__init__(inner)
        self.log, self.of = log, of

    def issue(self, name, *arguments):
        self.log.append(f"{name} {self.of}".rstrip())
        return super().issue(name, *arguments)


class NoCollectives:
    """Collectives that count calls and bytes, and do nothing."""

    def __init__(self):
        self.calls, self.bytes = Counter(), Counter()

    def count(self, name, *tensors):
        self.calls[name] += 1
        self.bytes[name] += max(tensor.nbytes for tensor in tensors)
        return done

    def all_gather(self, output, shard, group=None):
        return self.count("all_gather", output, shard)

    def reduce_scatter(self, output, buffer, reduction, group=None):
        return self.count("reduce_scatter", output, buffer)

    def all_reduce(self, tensor, reduction, group=None):
        return self.count("all_reduce", tensor)

    def all_reduce_max(self, tensor):
        return self.count("all_reduce_max", tensor)

    def reduce_scatter_traits(self, device):
        return ReduceScatterTraits(adds_wide=False, holds_second_buffer=False)

    def memory_of_passes(self):
        return ()


def delay_collectives(model):
    for module in model.modules():
        if hasattr(module, "_ragged_fsdp_state"):
            for group in module._ragged_fsdp_state.groups:
                group.collectives = LateCollectives(group.collectives)
    return model


def counted_calls(groups, function):
    """(all-gathers, reduce-scatters, all-reduces) that ``function`` starts in the groups."""
    seen, before = [], [group.collectives for group in groups]
    for group, inner in zip(groups, before, strict=True):
        group.collectives = LoggedCollectives(inner, seen)
    function()
    for group, inner in zip(groups, before, strict=True):
        group.collectives = inner
    return tuple(seen.count(name) for name in ("all_gather", "reduce_scatter", "all_reduce"))
