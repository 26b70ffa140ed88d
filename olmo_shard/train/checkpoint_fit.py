"""Checks that a checkpoint is complete and belongs to this run's model."""

import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from olmo_shard.config import ModelConfig, flatten
from olmo_shard.errors import CheckpointError

_MAY_CHANGE = {
    "init_std",
    "loss_chunk_tokens",
    "z_loss_weight",
    "moe.router.lb_loss_weight",
    "moe.router.lb_loss_scope",
    "moe.router.z_loss_weight",
    "moe.router.bias_gamma",
}
"""Fields of the section ``model`` that may change at a resume. They affect the loss or the initial
weights, and not the function that given weights compute. Add a new field here if that holds."""


def check_same_model(path: Path, saved: dict[str, Any], config: ModelConfig) -> None:
    """Check that weights mean the same function in both configs.

    :raises CheckpointError: naming the fields of the section ``model`` that differ.
    """
    # A field that only one of the configs has counts as None in the other.
    before, now = flatten(saved), flatten(config.model_dump())
    changed = [
        f"model.{name} = {now.get(name)!r} instead of {before.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if name not in _MAY_CHANGE and before.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(f"checkpoint {path} is of another model: {first_few(changed)}")


def saved_keys(path: Path) -> set[str]:
    """Keys of the tensors in a checkpoint.

    :raises CheckpointError: if a file of the checkpoint is missing, cut short or unreadable.
    """
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its .metadata cannot be read: {error}"
        ) from error
    # Each file must reach at least to the end of its last tensor.
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            problem = "is missing" if size is None else f"has {size} bytes instead of {end}"
            raise CheckpointError(
                f"checkpoint {path} is damaged: its file {name} {problem}; resume from another one"
            )
    return set(metadata.state_dict_metadata)


def first_few(names: list[str]) -> str:
    """The first five names of a list and the number of the others, for a message."""
    shown = ", ".join(names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
