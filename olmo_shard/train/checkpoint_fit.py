"""Whether a checkpoint is whole, and of the model at hand."""

import pickle
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from olmo_shard.config import ModelConfig, flatten
from olmo_shard.errors import CheckpointError

_FREE = {
    "init_std",
    "loss_chunk_tokens",
    "z_loss_weight",
    "moe.router.lb_loss_weight",
    "moe.router.lb_loss_scope",
    "moe.router.z_loss_weight",
    "moe.router.bias_gamma",
}
"""Fields of the model section that may change at a resume: they do not change what weights mean."""


def check_same_model(path: Path, saved: dict[str, Any], config: ModelConfig) -> None:
    """:raises CheckpointError: naming fields whose change would give weights another meaning."""
    # A field that is missing in the checkpoint did not exist then, and has its default.
    fields = ModelConfig.model_fields.items()
    defaults = {name: field.default for name, field in fields if not field.is_required()}
    before, now = flatten(defaults | saved), flatten(config.model_dump())
    changed = [
        f"model.{name} = {now.get(name)!r} instead of {before.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if name not in _FREE and before.get(name) != now.get(name)
    ]
    if changed:
        raise CheckpointError(f"checkpoint {path} is of another model: {first_few(changed)}")


def saved_keys(path: Path) -> set[str]:
    """Keys of the tensors in a checkpoint.

    :raises CheckpointError: where a file of it is missing, cut short or unreadable.
    """
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its .metadata cannot be read: {error}"
        ) from error
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    for name, end in sorted(ends.items()):
        file = path / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes instead of {end}"
            raise CheckpointError(
                f"checkpoint {path} is damaged: its file {name} {found}; resume from another one"
            )
    return set(metadata.state_dict_metadata)


def first_few(names: list[str]) -> str:
    """The first few of a list, for a message."""
    shown = ", ".join(names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
