"""Brute force for the planners: over all orders and all offsets of tensors."""

import functools


def is_cut(one, cut):
    """Whether a boundary ``cut`` elements into the tensor falls inside one of its blocks."""
    return 0 < cut < one.numel and (cut % one.period if one.period else cut) % one.block != 0


def fits(tensors, edges):
    """Whether tensors fit into shards between ``edges``, of which the first is 0 and the last the end of the buffer."""
    end = edges[-1]
    offsets = [
        [o for o in range(end - one.numel + 1) if not any(is_cut(one, edge - o) for edge in edges[:-1])] for one in tensors
    ]

    @functools.cache
    def search(left, position):
        if sum(tensors[index].numel for index in left) > end - position:
            return False
        return not left or any(
            search(left - {index}, offset + tensors[index].numel)
            for index in left
            for offset in offsets[index]
            if offset >= position
        )

    return search(frozenset(range(len(tensors))), 0)
