"""Checkpoints that any mode, world size and EP degree can read.

[Note: logical tensors] A checkpoint stores the FP32 main weights of every parameter, and the state
tensors of the update rule (both moments with AdamW). A key is a kind and the parameter's name,
without the prefix of any wrapper: ``model.norm.weight``, ``exp_avg.norm.weight``. Each tensor is
1-D and has the parameter's number of elements over the whole run; routed experts are in the order
of their global ids. Each rank writes and reads the ranges that it owns. torch's distributed
checkpoint (DCP) finds the files that hold a range. Router buffers are stored whole.
"""

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from olmo_shard.data.loader import LoaderState
from olmo_shard.distributed.agree import on_first_rank
from olmo_shard.errors import CheckpointError, TrainingError
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.optim.update_rule import WEIGHTS_KEY
from olmo_shard.train import checkpoint_folder as folders
from olmo_shard.train.checkpoint_fit import check_same_model, first_few, saved_keys
from olmo_shard.train.logical_tensor import LogicalTensor
from olmo_shard.train.state import TrainState


class Checkpointer:
    """Saves and loads the slices of an optimizer and the buffers of its model.

    All methods are collective.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        model = optimizer.parallel_model.model
        assert isinstance(model, LanguageModel)
        self.model = model
        self.control = optimizer.mesh.control
        parameters = optimizer.parallel_model.parameters
        self._shapes = {parameter.name: parameter.shape for parameter in parameters}

    def save(
        self, run_dir: Path, train: TrainState, loader: LoaderState, keep: int | None = None
    ) -> Path:
        """Write a checkpoint. Returns on every rank after the checkpoint is complete.

        :param keep: number of complete checkpoints to keep; ``None`` keeps all.
        :raises TrainingError: on every rank, if any rank cannot write.
        """
        # Every rank writes the tensors that it owns, into a folder with a temporary name.
        self._use_main_weights()
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

        # Rank 0 adds the state and renames the folder, after which the checkpoint counts.
        state = folders.SavedState(
            train=train,
            loader=loader,
            model=self.model.config.model_dump(),
            optimizer_steps=int(self.optimizer.step_count),
            shapes={name: list(shape) for name, shape in self._shapes.items()},
        )

        def commit() -> None:
            """Complete this checkpoint, then remove older ones and leftovers."""
            folders.commit(partial, final, state)
            folders.keep_last(run_dir, keep)
            folders.remove_leftovers(run_dir)

        on_first_rank(self.control, commit)
        return final

    def load(self, path: Path) -> folders.SavedState:
        """Restore weights, optimizer state and buffers. Returns the trainer's state.

        :raises CheckpointError: naming tensors that are missing, unexpected or of another shape.
        """
        state = self._load(path, with_optimizer=True)
        self.optimizer.step_count.fill_(state.optimizer_steps)
        return state

    def load_weights(self, path: Path) -> None:
        """Restore only main weights and router biases, as the start of a new run.

        :raises CheckpointError: naming tensors that are missing, unexpected or of another shape.
        """
        self._load(path, with_optimizer=False)

    def _load(self, path: Path, *, with_optimizer: bool) -> folders.SavedState:
        state = on_first_rank(self.control, lambda: self._checked_state(path, with_optimizer))
        self._use_main_weights()
        try:
            dcp.load(
                self._tensors(with_optimizer=with_optimizer),
                storage_reader=dcp.FileSystemReader(path),
                process_group=self.control,
            )
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {path}: {_first_cause(error)}") from error
        # As after a step: round the main weights, and send them to every model.
        for part in self.optimizer.slices:
            part.owned.update_model()
            self.optimizer.parallel_model.gather(part.owned)
        return state

    def _use_main_weights(self) -> None:
        """Make main weights safe to read and write: no gather in flight, no gathered copy."""
        self.optimizer.parallel_model.wait_for_weights()
        self.optimizer.parallel_model.release_gathered_weights()

    def _tensors(self, *, with_optimizer: bool) -> dict[str, Tensor]:
        """The tensors that this rank owns, and all buffers, by their keys in the checkpoint."""
        tensors: dict[str, Tensor] = {}
        kinds = self._kinds(with_optimizer=with_optimizer)
        for part in self.optimizer.slices:
            # Views: a load writes through them into main weights and state.
            flats = part.tensors()
            for shard in part.owned.shards:
                for kind in kinds:
                    tensors[f"{kind}.{shard.name}"] = LogicalTensor.from_shard(
                        shard.of(flats[kind]), shard.chunks, shard.shape.numel()
                    )
        # Router biases belong to the weights; the other buffers are state of the training.
        for name, buffer in self.model.named_buffers():
            if with_optimizer or name.endswith("expert_bias"):
                tensors[f"buffer.{name}"] = buffer
        return tensors

    def _keys(self, *, with_optimizer: bool) -> set[str]:
        """The keys of all ranks together."""
        kinds = self._kinds(with_optimizer=with_optimizer)
        keys = {f"{kind}.{name}" for kind in kinds for name in self._shapes}
        names = [name for name, _ in self.model.named_buffers()]
        return keys | {
            f"buffer.{name}" for name in names if with_optimizer or name.endswith("expert_bias")
        }

    def _kinds(self, *, with_optimizer: bool) -> tuple[str, ...]:
        """The kinds of tensors per parameter: the first part of their keys."""
        state_names = self.optimizer.rule.state_names if with_optimizer else ()
        return (WEIGHTS_KEY, *state_names)

    def _checked_state(self, path: Path, with_optimizer: bool) -> folders.SavedState:
        """Read the trainer's state, and check keys and shapes (DCP ignores unexpected keys)."""
        # Shapes first: a parameter of another shape is the clearest sign of another model.
        state = folders.read_state(path)
        saved = {name: torch.Size(shape) for name, shape in state.shapes.items()}
        different = [
            f"{name} {list(saved[name])} instead of {list(shape)}"
            for name, shape in self._shapes.items()
            if name in saved and saved[name] != shape
        ]
        if different:
            raise CheckpointError(f"checkpoint {path} is of another model: {first_few(different)}")
        if with_optimizer:
            check_same_model(path, state.model, self.model.config)

        # A load of weights alone may leave optimizer state and buffers unread, but no weights.
        expected, present = self._keys(with_optimizer=with_optimizer), saved_keys(path)
        missing = sorted(expected - present)
        unexpected = sorted(
            key for key in present - expected if with_optimizer or key.startswith(f"{WEIGHTS_KEY}.")
        )
        if missing or unexpected:
            raise CheckpointError(
                f"checkpoint {path} does not fit the model and optimizer: "
                f"missing {first_few(missing)}; unexpected {first_few(unexpected)}"
            )
        return state


def _first_cause(error: CheckpointException) -> str:
    """The failure of the lowest rank that failed."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
