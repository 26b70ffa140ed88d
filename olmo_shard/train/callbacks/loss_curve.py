"""loss.png: training and validation loss over tokens, drawn at the end of a run."""

from pathlib import Path

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import EVAL_FILE, LOSS_PICTURE, METRICS_FILE, read_records


class LossCurve(Callback):
    """Draws the losses of the whole run, earlier starts included, from the records."""

    def __init__(self) -> None:
        self._run_dir: Path | None = None

    def on_start(self, run: RunInfo) -> None:
        """Keep the run's folder."""
        self._run_dir = run.run_dir

    def on_end(self) -> list[tuple[str, str]]:
        """Draw the picture."""
        assert self._run_dir is not None
        return [("loss curve", str(draw(self._run_dir)))]


def draw(run_dir: Path) -> Path:
    """Draw the loss curves of a run's records; returns the path of the picture."""
    # Imported here, since matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # The evaluations' x axis is tokens, too, by way of the step's record.
    steps, evals = read_records(run_dir / METRICS_FILE), read_records(run_dir / EVAL_FILE)
    tokens = {record["step"]: record["tokens_total"] for record in steps}
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    known = [r for r in steps if r["loss"] is not None]
    axes.plot([r["tokens_total"] for r in known], [r["loss"] for r in known], lw=1, label="train")
    for name in sorted({key for record in evals for key in record if key.startswith("eval/")}):
        drawn = [r for r in evals if r["step"] in tokens and r.get(name) is not None]
        axes.plot(
            [tokens[r["step"]] for r in drawn], [r[name] for r in drawn], "o-", ms=4, label=name
        )
    axes.set(xlabel="tokens", ylabel="cross-entropy (nats)", title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / LOSS_PICTURE
    figure.savefig(path, dpi=120)
    return path
