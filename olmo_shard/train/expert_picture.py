"""A heat map of expert load: MoE layers x experts, each against its layer's mean."""

from pathlib import Path
from typing import IO, Any


def draw(line: dict[str, Any], target: Path | IO[bytes]) -> None:
    """Draw one line of experts.jsonl as PNG.

    :param line: ``first_step``, ``step``, ``layers`` and ``counts`` (routes by layer and expert).
    """
    # Here, not at the top: matplotlib takes a second to import.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts: list[list[int]] = line["counts"]
    # A layer without a single route (no token had a label) is drawn at 0.
    loads = [[each / max(1e-9, sum(row) / len(row)) for each in row] for row in counts]
    fullest = max(max(row) for row in loads)
    figure = Figure(figsize=(8, min(12.0, 2.2 + 0.25 * len(loads))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # White is the mean: blue experts have less than it, red experts more.
    norm = TwoSlopeNorm(vcenter=1.0, vmin=0.0, vmax=max(2.0, fullest))
    image = axes.imshow(loads, aspect="auto", cmap="RdBu_r", norm=norm, interpolation="nearest")
    every = -(-len(loads) // 30)  # at most 30 names fit on the axis
    axes.set_yticks(range(0, len(loads), every), [str(each) for each in line["layers"][::every]])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(
        xlabel="expert",
        ylabel="layer",
        title=f"expert load, steps {line['first_step']} to {line['step']}",
    )
    figure.colorbar(image, label="routes / layer's mean")
    figure.savefig(target, dpi=120, format="png")
