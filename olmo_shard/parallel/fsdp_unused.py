"""Parameters that a micro-batch does not use: FSDP2 reduces a gradient of zeros on every rank.

[Note: unused parameters] FSDP2 reduces the parameters of a unit in one buffer, and leaves out
parameters without a gradient. That fails in two cases:

- A parameter has a gradient on some ranks only. The buffers of the ranks then differ in size, and
  the reduce-scatter aborts the processes.
- The gradients of earlier micro-batches wait in FP32 (``reshard: window``, compute type bf16), and
  the last micro-batch is the first that uses a parameter. The gradient of that parameter is bf16,
  and FSDP2 refuses a buffer of two types.

So every parameter takes part in every reduce, with zeros if it has no gradient.
"""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def reduce_unused(module: FSDPModule) -> None:
    """Make a unit reduce zeros for parameters without a gradient.

    torch 2.11 and 2.12 lack this switch. With them, every rank must use the same parameters.
    """
    switch = getattr(module, "set_reduce_scatter_unused_params", None)
    if switch is not None:
        switch(True, recurse=False)


def fill_accumulated(module: FSDPModule) -> None:
    """Set the accumulated gradient of parameters that no earlier micro-batch used to zeros.

    FSDP2 adds the last micro-batch's gradient to the accumulated one, in the type of the reduce.
    Without mixed precision both have one type, and this function does nothing.
    """
    for parameter in _parameters(module):
        dtype, sharded = parameter.reduce_dtype, parameter.sharded_param
        if dtype is None or not sharded.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None:
            zeros = torch.zeros(parameter._orig_size, dtype=dtype, device=sharded.device)
            parameter.unsharded_accumulated_grad = zeros


def _parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's internal state of a unit's parameters. torch 2.11 keeps one group per unit."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [parameter for group in groups for parameter in group.fsdp_params]
