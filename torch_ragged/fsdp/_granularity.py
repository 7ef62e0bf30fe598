"""What ``orig_param_policy`` returns: :mod:`torch_ragged.granularity`, which the optimizers share."""

from torch_ragged.granularity import Granularity, OrigParamPolicy, blocks, elements, rows, tensor

__all__ = ["Granularity", "OrigParamPolicy", "blocks", "elements", "rows", "tensor"]
