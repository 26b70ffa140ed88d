"""FSDP2 and parameters that a micro-batch does not use: their gradient is zero, on every rank.

[Note: unused parameters] FSDP2 reduces the parameters of a module in one buffer, and leaves out
those without a gradient. That goes wrong in two ways:

- A parameter has a gradient on some ranks only. The buffers of the ranks then differ in size, and
  the reduce-scatter aborts the processes.
- Gradients of earlier micro-batches wait in FP32 (``reshard: window``, compute type bf16), and a
  parameter is first used in the last micro-batch. Its gradient is bf16, and FSDP2 refuses a buffer
  of two types.

So every parameter takes part in every reduce, with zeros where it has no gradient.
"""

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def reduce_unused(module: FSDPModule) -> None:
    """Let a module reduce zeros for parameters without a gradient.

    torch 2.11 and 2.12 have no such switch: there every rank must use the same parameters.
    """
    switch = getattr(module, "set_reduce_scatter_unused_params", None)
    if switch is not None:
        switch(True, recurse=False)


def fill_accumulated(module: FSDPModule) -> None:
    """Give each parameter that earlier micro-batches did not use an accumulated gradient of zeros.

    FSDP2 adds the last micro-batch's gradient to the accumulated one, in the type of the reduce.
    Without mixed precision gradients accumulate in their own type, and nothing is to be done.
    """
    for parameter in _parameters(module):
        dtype, sharded = parameter.reduce_dtype, parameter.sharded_param
        if dtype is None or not sharded.requires_grad:
            continue
        if parameter.unsharded_accumulated_grad is None:
            zeros = torch.zeros(parameter._orig_size, dtype=dtype, device=sharded.device)
            parameter.unsharded_accumulated_grad = zeros


def _parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of a module's parameters; torch 2.11 keeps one group per module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [parameter for group in groups for parameter in group.fsdp_params]
