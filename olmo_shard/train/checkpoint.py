"""Checkpoints that any mode, world size and EP degree reads.

[Note: logical tensors] Every parameter is stored as its FP32 main weight and, with Adam, both
moments, under a name without any wrapper's prefix, as a 1-D tensor of the parameter's size over the
whole run (routed experts under global ids). Each rank writes and reads the ranges that it owns.
torch's distributed checkpoint (DCP) finds out which ranges lie in which file. Router buffers are
stored whole.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from olmo_shard.data.loader import LoaderState
from olmo_shard.distributed import collectives
from olmo_shard.distributed.agree import on_first_rank
from olmo_shard.errors import CheckpointError, TrainingError
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.train import checkpoint_folder as folders
from olmo_shard.train.checkpoint_fit import check_same_model, first_few, saved_keys
from olmo_shard.train.logical_tensor import LogicalTensor
from olmo_shard.train.state import TrainState


class Checkpointer:
    """Saves and loads the shards of an optimizer and the buffers of its model.

    All methods are collective.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        model = optimizer.parallel_model.model
        assert isinstance(model, LanguageModel)
        self.model = model
        self.control = optimizer.mesh.control
        self._shapes = self._logical_shapes()

    def save(
        self, run_dir: Path, train: TrainState, loader: LoaderState, keep: int | None = None
    ) -> Path:
        """Write a checkpoint; returns on all ranks after it has its name.

        :param keep: complete checkpoints to keep, null for all.
        :raises TrainingError: on every rank, where one of them cannot write.
        """
        self.optimizer.parallel_model.wait()
        final = folders.folder_of(run_dir, train.step)
        partial = on_first_rank(self.control, lambda: folders.begin(final))
        try:
            dcp.save(
                self._tensors(with_optimizer=True),
                storage_writer=dcp.FileSystemWriter(partial),
                process_group=self.control,
            )
        except CheckpointException as error:
            raise TrainingError(f"cannot save {final}: {_first_cause(error)}") from error
        state = folders.SavedState(
            train=train,
            loader=loader,
            model=self.model.config.model_dump(),
            optimizer_steps=int(self.optimizer.step_count),
            shapes={name: list(shape) for name, shape in self._shapes.items()},
        )

        def commit() -> None:
            folders.commit(partial, final, state)
            folders.keep_last(run_dir, keep)
            folders.remove_leftovers(run_dir)

        on_first_rank(self.control, commit)
        return final

    def load(self, path: Path) -> folders.SavedState:
        """Restore weights, moments and buffers; returns the trainer's state.

        :raises CheckpointError: naming what is missing, unexpected or of another shape.
        """
        state = self._load(path, with_optimizer=True)
        self.optimizer.step_count.fill_(state.optimizer_steps)
        return state

    def load_weights(self, path: Path) -> None:
        """Restore main weights and router biases alone: a new run starts from them."""
        self._load(path, with_optimizer=False)

    def _load(self, path: Path, *, with_optimizer: bool) -> folders.SavedState:
        state = on_first_rank(self.control, lambda: self._checked_state(path, with_optimizer))
        parallel_model = self.optimizer.parallel_model
        parallel_model.wait()
        try:
            dcp.load(
                self._tensors(with_optimizer=with_optimizer),
                storage_reader=dcp.FileSystemReader(path),
                process_group=self.control,
            )
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {path}: {_first_cause(error)}") from error
        for index, part in enumerate(parallel_model.slices):
            part.model.copy_(part.main)
            parallel_model.gather(index)
        return state

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """Whatever this rank owns, by its key in the checkpoint."""
        found: dict[str, Tensor] = {}
        optimizer = self.optimizer
        for index, part in enumerate(optimizer.slices):
            flats = {"model": part.main}
            if with_optimizer and optimizer.adam:
                flats["exp_avg"] = optimizer.exp_avgs[index]
                flats["exp_avg_sq"] = optimizer.exp_avg_sqs[index]
            for shard in part.shards:
                for kind, flat in flats.items():
                    found[f"{kind}.{shard.name}"] = LogicalTensor.of(
                        shard.of(flat), shard.chunks, shard.shape.numel()
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
        own = {shard.name: shard.shape for shard in self.optimizer.parallel_model.shards()}
        merged: dict[str, torch.Size] = {}
        for shapes in collectives.gather_objects(own, self.control):
            assert isinstance(shapes, dict)
            merged |= shapes
        return merged

    def _checked_state(self, path: Path, with_optimizer: bool) -> folders.SavedState:
        """The trainer's state, if keys and shapes fit (DCP ignores keys that nobody asks for)."""
        state = folders.read_state(path)
        saved = {name: torch.Size(shape) for name, shape in state.shapes.items()}
        other = [
            f"{name} {list(saved[name])} instead of {list(shape)}"
            for name, shape in self._shapes.items()
            if name in saved and saved[name] != shape
        ]
        if other:
            raise CheckpointError(f"checkpoint {path} is of another model: {first_few(other)}")
        if with_optimizer:
            check_same_model(path, state.model, self.model.config)
        expected, found = self._keys(with_optimizer=with_optimizer), saved_keys(path)
        missing = sorted(expected - found)
        unexpected = sorted(
            key for key in found - expected if with_optimizer or key.startswith("model.")
        )
        if missing or unexpected:
            raise CheckpointError(
                f"checkpoint {path} does not fit the model and optimizer: "
                f"missing {first_few(missing)}; unexpected {first_few(unexpected)}"
            )
        return state


def _first_cause(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
