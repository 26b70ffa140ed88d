"""Checkpoints that any mode, world size and EP degree reads.

[Note: logical tensors] Every parameter is stored as its FP32 main weight and, with Adam, both
moments, under a name without any wrapper's prefix, as a 1-D tensor of the parameter's size over the
whole run (routed experts under global ids). Each rank writes and reads the ranges that it owns.
torch's distributed checkpoint (DCP) finds out which ranges lie in which file. Router buffers are
stored whole.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from olmo_shard.distributed import collectives
from olmo_shard.errors import CheckpointError
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.train import checkpoint_folder as folders
from olmo_shard.train.logical_tensor import LogicalTensor


class Checkpointer:
    """Saves and loads the shards of an optimizer and the buffers of its model.

    All methods are collective.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        self.model = optimizer.data_parallel.model
        self.control = optimizer.mesh.control
        self.is_first = optimizer.mesh.rank == 0
        self._shapes = self._logical_shapes()

    def save(self, run_dir: Path, step: int, state: dict[str, Any], keep: int | None) -> Path:
        """Write a checkpoint; returns on all ranks after it has its name.

        :param state: JSON values of the trainer.
        :param keep: complete checkpoints to keep, null for all.
        :raises CheckpointError: on every rank, where one of them cannot write.
        """
        final = folders.folder_of(run_dir, step)
        partial = self._on_first(lambda: str(folders.begin(final)), final)
        try:
            dcp.save(
                self._tensors(with_optimizer=True),
                storage_writer=dcp.FileSystemWriter(partial),
                process_group=self.control,
            )
        except CheckpointException as error:
            raise CheckpointError(f"cannot save {final}: {_first_cause(error)}") from error
        state = {
            **state,
            "optimizer_steps": int(self.optimizer.step_count),
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
        }

        def commit() -> str:
            folders.commit(Path(partial), final, state)
            folders.keep_last(run_dir, keep)
            return ""

        self._on_first(commit, final)
        return final

    def load(self, path: Path) -> dict[str, Any]:
        """Restore weights, moments and buffers; returns the trainer's state.

        :raises CheckpointError: naming what is missing, unexpected or of another shape.
        """
        state = self._checked_state(path)
        tensors = self._tensors(with_optimizer=True)
        self._check_keys(path, self._keys(with_optimizer=True), strict=True)
        self._read(path, tensors)
        self.optimizer.step_count.fill_(state["optimizer_steps"])
        return state

    def load_weights(self, path: Path) -> None:
        """Restore main weights and router biases alone: a new run starts from them."""
        self._checked_state(path)
        self._check_keys(path, self._keys(with_optimizer=False), strict=False)
        self._read(path, self._tensors(with_optimizer=False))

    def _read(self, path: Path, tensors: dict[str, Tensor]) -> None:
        try:
            dcp.load(
                tensors,
                storage_reader=dcp.FileSystemReader(path),
                process_group=self.control,
            )
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {path}: {_first_cause(error)}") from error
        self.optimizer.data_parallel.gather()

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Whatever this rank owns, by its key in the checkpoint."""
        found: dict[str, Tensor] = {}
        optimizer = self.optimizer
        for index, shard in enumerate(optimizer.shards):
            if not shard.chunks:
                continue
            parts = {"model": shard.main}
            if with_optimizer and optimizer.adam:
                parts |= {
                    "exp_avg": optimizer.exp_avgs[index],
                    "exp_avg_sq": optimizer.exp_avg_sqs[index],
                }
            for kind, local in parts.items():
                found[f"{kind}.{shard.name}"] = LogicalTensor.of(
                    local, shard.chunks, shard.shape.numel()
                )
        for name, buffer in self.model.named_buffers():
            if with_optimizer or name.endswith("expert_bias"):
                found[f"buffer.{name}"] = buffer
        return found

    def _keys(self, *, with_optimizer: bool) -> set[str]:
        """The keys of all ranks together."""
        kinds = ["model"]
        if with_optimizer and self.optimizer.adam:
            kinds += ["exp_avg", "exp_avg_sq"]
        keys = {f"{kind}.{name}" for kind in kinds for name in self._shapes}
        names = [name for name, _ in self.model.named_buffers()]
        return keys | {
            f"buffer.{name}" for name in names if with_optimizer or name.endswith("expert_bias")
        }

    def _logical_shapes(self) -> dict[str, torch.Size]:
        """Of every parameter of the run (a rank may own no part of some)."""
        own = {shard.name: shard.shape for shard in self.optimizer.shards}
        merged: dict[str, torch.Size] = {}
        for shapes in collectives.gather_objects(own, self.control):
            assert isinstance(shapes, dict)
            merged |= shapes
        return merged

    def _checked_state(self, path: Path) -> dict[str, Any]:
        state = folders.read_state(path)
        saved = {name: torch.Size(shape) for name, shape in state["shapes"].items()}
        other = [
            f"{name} {list(saved[name])} instead of {list(shape)}"
            for name, shape in self._shapes.items()
            if name in saved and saved[name] != shape
        ]
        if other:
            raise CheckpointError(f"checkpoint {path} is of another model: {_some(other)}")
        return state

    def _check_keys(self, path: Path, expected: set[str], *, strict: bool) -> None:
        """DCP is silent about keys that nobody asks for."""
        try:
            saved = set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)
        except (OSError, EOFError) as error:
            raise CheckpointError(
                f"checkpoint {path}: its metadata cannot be read: {error}"
            ) from error
        missing = sorted(expected - saved)
        unexpected = (
            sorted(saved - expected)
            if strict
            else [key for key in sorted(saved - expected) if key.startswith("model.")]
        )
        if missing or unexpected:
            raise CheckpointError(
                f"checkpoint {path} does not fit the model and optimizer: "
                f"missing {_some(missing)}; unexpected {_some(unexpected)}"
            )

    def _on_first(self, action: Any, final: Path) -> str:
        """Run on the first rank; every rank gets the result, or the error."""
        outcome: tuple[str, str | None] = ("", None)
        if self.is_first:
            try:
                outcome = (action(), None)
            except OSError as error:
                outcome = ("", f"{error.strerror}: {error.filename}")
        result, problem = collectives.broadcast_object(outcome, self.control)  # type: ignore[misc]
        if problem is not None:
            raise CheckpointError(f"cannot save {final}: {problem}")
        return result


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
