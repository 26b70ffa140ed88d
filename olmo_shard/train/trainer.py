"""The training loop.

[Note: late read] On CUDA the host queues a step, and only then reads the tensors of the previous
step: the device never waits for the host. On a CPU nothing is queued, and a step is read at once. A
checkpoint, an evaluation and the end of the run read the pending step first, so that no record is
missing before them.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from olmo_shard.config import Config
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.validation import ValidationSet
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import TrainingError
from olmo_shard.optim.schedule import learning_rate
from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.checkpoint import Checkpointer
from olmo_shard.train.evaluate import evaluate
from olmo_shard.train.metrics import PendingStep, StepMeter
from olmo_shard.train.records import Record
from olmo_shard.train.rewind import rewind
from olmo_shard.train.state import TrainState, seed_step
from olmo_shard.train.step import TrainStep


def reads_late(device: torch.device) -> bool:
    """Whether the host reads a step's tensors only after it has queued the next step."""
    return device.type == "cuda"


class Trainer:
    """Runs steps to the end of the run, and evaluates, saves and reports in between.

    :param config: the whole config, which callbacks see, too.
    :param callbacks: all callbacks on rank 0; none on the other ranks.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        loader: DataLoader,
        validation: list[ValidationSet],
        train_step: TrainStep,
        callbacks: list[Callback],
    ) -> None:
        self.config, self.mesh, self.loader, self.validation = config, mesh, loader, validation
        self.train_step, self.callbacks = train_step, callbacks
        self.total_steps = loader.total_steps()
        self.optimizer = train_step.optimizer
        self.checkpointer = Checkpointer(self.optimizer)
        self.state = TrainState()
        self.meter = StepMeter(
            config.model,
            config.parallel,
            config.data.sequence_length,
            mesh.device,
            mesh.world_size,
        )
        self.run_dir = Path(config.run.dir)
        self.resumed_from: Path | None = None
        self._pending: PendingStep | None = None

    def fit(self, notes: list[str]) -> list[tuple[str, str]]:
        """Train to the end; collective.

        :param notes: lines for the log about what was chosen at the start.
        :returns: lines of the summary as (name, value); on ranks above 0 an empty list.
        :raises TrainingError: after too many skipped steps in a row.
        """
        try:
            # Start: callbacks open their files, and records after the checkpoint are moved away.
            if self.callbacks:
                info = self._info(notes)
                self._notify(lambda callback: callback.on_start(info))
            self.meter.restart()

            # Loop: one step, then whatever is due after it.
            while self.state.step < self.total_steps:
                self._step()
                if self._due(self.config.eval.every):
                    self._evaluate()
                if self._due_to_save():
                    self._save()

            # End: read the last step, and wait for its weights, which no further forward awaits.
            self._report()
            self.optimizer.parallel_model.wait_for_weights()
            return [line for callback in self.callbacks for line in callback.on_end()]
        except BaseException as error:
            # Callbacks close their files and show the error, whatever it is.
            failure = error  # Python unbinds the name after ``as`` at the end of the clause.
            self._notify(lambda callback: callback.on_failure(failure))
            raise

    def load(self, path: Path) -> None:
        """Continue from a checkpoint; collective.

        :raises CheckpointError: if the checkpoint does not fit the model or the optimizer.
        """
        saved = self.checkpointer.load(path)
        self.state, self.resumed_from = saved.train, path
        if self.train_step.spikes is not None:
            self.train_step.spikes.load_state(self.state.spike_window)
        self.loader.load_state(saved.loader)
        self.total_steps = self.loader.total_steps(self.state.step)

    def _step(self) -> None:
        """Run one step, and report one step: the previous one if the host reads late."""
        step = self.state.step + 1
        # Seed, learning rate and data depend on the step alone, so that a resume repeats them.
        seed_step(self.config.run.seed, step, self.mesh.rank)
        lr = learning_rate(step, self.config.optim.lr, self.total_steps, self.config.schedule)
        window = [micro_batch.to(self.mesh.device) for micro_batch in self.loader.next_window()]
        output = self.train_step(window, lr)
        # This step is queued. Now read the previous one; see [Note: late read].
        self._report()
        self._pending = PendingStep(step=step, lr=lr, output=output)
        self.state.step = step
        if not reads_late(self.mesh.device):
            self._report()

    def _report(self) -> None:
        """Read the tensors of the pending step, if there is one, and report them.

        The loop waits for the device here and nowhere else.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        output = pending.output
        self.state.count(int(output.tokens), applied=bool(output.applied))
        record = self.meter.record(pending, self.state)
        self._notify(lambda callback: callback.on_step(record))
        self._report_experts(record["step"])
        if self.state.skipped_in_a_row:
            self._explain_skip(record, pending)

    def _report_experts(self, step: int) -> None:
        """Report the load of the experts, every ``tracking.experts_every`` steps and at the end."""
        every = self.config.tracking.experts_every
        if step != self.total_steps and (not every or step % every):
            return
        record = self.meter.take_expert_counts(step)
        if record is not None:
            self._notify(lambda callback: callback.on_experts(record))

    def _explain_skip(self, record: Record, pending: PendingStep) -> None:
        """Report why a step was skipped; collective. Ends the run after too many in a row."""
        cause = self.train_step.skip_cause(pending.output)
        message = f"step {record['step']} skipped: {cause}"
        self._notify(lambda callback: callback.on_note(message))
        limit = self.config.train.max_skipped_steps
        if self.state.skipped_in_a_row > limit:
            raise TrainingError(
                f"{message}; {self.state.skipped_in_a_row} steps in a row are more than "
                f"train.max_skipped_steps = {limit}"
            )

    def _due(self, every: int) -> bool:
        step = self.state.step
        return bool(every) and (step % every == 0 or step == self.total_steps)

    def _due_to_save(self) -> bool:
        every, step = self.config.checkpoint.every, self.state.step
        if every is None:
            return False
        return step == self.total_steps or (every > 0 and step % every == 0)

    def _evaluate(self) -> None:
        # Read the pending step first, so that its time contains no evaluation.
        self._report()
        losses = evaluate(self.optimizer.parallel_model, self.validation, self.mesh)
        self._notify(lambda callback: callback.on_eval(self.state.step, losses))
        self.meter.restart()

    def _save(self) -> None:
        self._report()
        # The filter's window is on the device. It enters the trainer's state only here.
        spikes = self.train_step.spikes
        self.state.spike_window = spikes.state() if spikes is not None else [[], []]
        keep = self.config.checkpoint.keep_last
        path = self.checkpointer.save(self.run_dir, self.state, self.loader.state, keep)
        self._notify(lambda callback: callback.on_checkpoint(path))
        self.meter.restart()

    def _info(self, notes: list[str]) -> RunInfo:
        """What callbacks see of the run. Moves away records of steps after the checkpoint."""
        return RunInfo(
            config=self.config,
            run_dir=self.run_dir,
            total_steps=self.total_steps,
            state=self.state,
            notes=notes,
            ranks=self.mesh.world_size,
            checkpoint=self.resumed_from,
            rewound=rewind(self.run_dir, self.state.step),
        )

    def _notify(self, call: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            call(callback)
