"""loss.png: training and validation loss over tokens, drawn at the end of a run."""

from pathlib import Path

from olmo_shard.train.callbacks.base import Callback, RunInfo
from olmo_shard.train.records import EVAL_FILE, FILE, PICTURE, read_records


class LossCurve(Callback):
    def __init__(self) -> None:
        self._run_dir: Path | None = None

    def on_start(self, run: RunInfo) -> None:
        self._run_dir = run.run_dir

    def on_end(self) -> list[tuple[str, str]]:
        assert self._run_dir is not None
        return [("loss curve", str(draw(self._run_dir)))]


def draw(run_dir: Path) -> Path:
    """Draw the curves of a run's records."""
    # Here, not at the top: matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, evals = read_records(run_dir / FILE), read_records(run_dir / EVAL_FILE)
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
    path = run_dir / PICTURE
    figure.savefig(path, dpi=120)
    return path
