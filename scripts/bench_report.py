"""What bench_parallel.py found: a table in Markdown, a plot, and the raw figures."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = dict[str, Any]


def write(rows: list[Row], network: str, command: str, out: Path | None) -> None:
    """Print the table; with ``out`` also write it, the plot and the figures there."""
    text = f"`{command}`\n\n{table(rows)}\n"
    print(f"\n{text}")
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    stem = out / f"parallel-{network}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
    plot(rows, network, stem.with_suffix(".png"))
    print(f"written: {stem}.md, .json, .png")


def table(rows: list[Row]) -> str:
    """One line a (ranks, window, mode); MB are 10^6 bytes that one rank sends in a step."""
    names = (
        "ranks", "window", "mode", "tokens/s", "ddp is faster by", "step s", "exposed s",
        "compute s", "sent MB", "on the link MB",
    )  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for ranks, window, mode in _keys(rows):
        mine = _turns(rows, ranks, window, mode)

        def median(figure: Callable[[Row], float], mine: dict[int, Row] = mine) -> float:
            return statistics.median(figure(row) for row in mine.values())

        link = mine[0]["link_bytes"]
        cells = [
            str(ranks),
            str(window),
            mode,
            f"{median(lambda row: row['tokens_per_second']):,.0f}",
            _ratio(mine, _turns(rows, ranks, window, "ddp")),
            f"{median(lambda row: row['seconds']):.2f}",
            f"{median(lambda row: row['exposed_seconds']):.2f}",
            f"{median(lambda row: row['seconds'] - row['exposed_seconds']):.2f}",
            f"{median(lambda row: sum(row['bytes'].values())) / 1e6:.1f}",
            "" if link is None else f"{median(lambda row: row['link_bytes']) / 1e6:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[Row], network: str, path: Path) -> None:
    """Tokens/s over the window, one line a mode, one panel a number of ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(5.5 * len(sizes), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    windows = sorted({row["window"] for row in rows})
    for axes, size in zip(panels, sizes, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            rates = [
                statistics.median(
                    row["tokens_per_second"] for row in _turns(rows, size, w, mode).values()
                )
                for w in windows
            ]
            axes.plot(windows, rates, "o-", label=mode)
        axes.set(xlabel="micro-batches a window", title=f"{size} ranks, {network}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(w) for w in windows])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s, all ranks")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _keys(rows: list[Row]) -> list[tuple[int, int, str]]:
    return list(dict.fromkeys((row["ranks"], row["window"], row["mode"]) for row in rows))


def _turns(rows: list[Row], ranks: int, window: int, mode: str) -> dict[int, Row]:
    key = (ranks, window, mode)
    return {r["turn"]: r for r in rows if (r["ranks"], r["window"], r["mode"]) == key}


def _ratio(mine: dict[int, Row], ddp: dict[int, Row]) -> str:
    if not ddp:
        return ""
    ratios = [mine[turn]["seconds"] / ddp[turn]["seconds"] for turn in mine]
    return f"{statistics.median(ratios):.2f}"
