"""The report of ``scripts.bench.parallel``: tables in Markdown, a plot, and the raw figures.

Write the report again from the raw figures::

    python -m scripts.bench.parallel_report docs/bench/parallel-1gbit.json
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.bench.tables import header, line

Row = dict[str, Any]
"""Figures per step of one mode in one round; ``scripts.bench.parallel`` builds them."""

TARGETS = (("fsdp, reshard forward", 8, 2.7), ("fsdp, reshard window", 8, 1.0))
"""Mode, window, and the factor by which ``ddp`` is to be faster than the mode."""


def write(rows: list[Row], network: str, origin: str, out: Path | None) -> None:
    """Print the tables below their origin; write them, a plot and the raw figures to files.

    :param network: rate of the links, or ``loopback``; part of the names of the files.
    :param origin: command, date and machine that made the rows; see ``tables.origin``.
    :param out: an existing folder; ``None`` writes no file.
    """
    text = f"{origin}\n\n{table(rows)}\n\n{checks(rows, network)}\n"
    print(f"\n{text}")
    if out is None:
        return
    stem = out / f"parallel-{network}"
    figures = {"network": network, "origin": origin, "rows": rows}
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")
    plot(rows, network, stem.with_suffix(".png"))
    print(f"written: {stem}.md, .json, .png")


def table(rows: list[Row]) -> str:
    """Markdown table with one line per number of ranks, window and mode.

    MB are 10^6 bytes that rank 0 sends per step. *Exposed* is the time in which rank 0 computes
    nothing because it waits for a collective; *compute* is the rest of the step.
    """
    names = (
        "ranks", "window", "mode", "tokens/s", "time / ddp's", "step s", "exposed s", "compute s",
        "sent MB", "on the link MB",
    )  # fmt: skip
    lines = header(*names)
    for key in dict.fromkeys(_key(row) for row in rows):
        rounds = _by_round(rows, key)
        link = None if rounds[0]["link_bytes"] is None else lambda row: row["link_bytes"] / 1e6
        ratio = _ratio(rows, key, (*key[:2], "ddp"))
        cells = [
            *(str(part) for part in key),
            f"{_median(rounds, lambda row: row['tokens_per_second']):,.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{_median(rounds, lambda row: row['seconds']):.2f}",
            f"{_median(rounds, lambda row: row['exposed_seconds']):.2f}",
            f"{_median(rounds, lambda row: row['seconds'] - row['exposed_seconds']):.2f}",
            f"{_median(rounds, _sent) / 1e6:.1f}",
            "" if link is None else f"{_median(rounds, link):.1f}",
        ]
        lines.append(line(*cells))
    return "\n".join(lines)


def checks(rows: list[Row], network: str) -> str:
    """Markdown table of the targets of ``ddp`` (for links of 1 Gbit/s), and the measured values."""
    lines = header("ranks", "check", "target", "measured")
    for ranks in sorted({row["ranks"] for row in rows}):
        windows = sorted({row["window"] for row in rows if row["ranks"] == ranks})
        for check in _byte_checks(rows, ranks, windows):
            lines.append(line(str(ranks), *check))
        for name, target, measured in _speed_checks(rows, ranks, windows):
            target = target if network == "1gbit" else ""
            lines.append(line(str(ranks), name, target, measured))
    return "\n".join(lines)


def plot(rows: list[Row], network: str, path: Path) -> None:
    """Plot tokens/s over the window: one line per mode, one panel per number of ranks."""
    sizes = sorted({row["ranks"] for row in rows})
    figure = Figure(figsize=(5.5 * len(sizes), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(sizes), squeeze=False)[0]
    windows = sorted({row["window"] for row in rows})
    for axes, size in zip(panels, sizes, strict=True):
        for mode in dict.fromkeys(row["mode"] for row in rows):
            by_window = [_by_round(rows, (size, window, mode)) for window in windows]
            rates = [_median(rounds, lambda row: row["tokens_per_second"]) for rounds in by_window]
            axes.plot(windows, rates, "o-", label=mode)
        axes.set(xlabel="micro-batches per window", title=f"{size} ranks, {network}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(window) for window in windows])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s, all ranks")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _byte_checks(rows: list[Row], ranks: int, windows: list[int]) -> list[list[str]]:
    """Bytes that ``ddp`` sends, relative to the fewest possible: name, target, measured value."""
    by_window = [_by_round(rows, (ranks, window, "ddp")) for window in windows]
    if not all(by_window):
        return []

    def shares(key: Callable[[Row], float]) -> list[float]:
        return [
            _median(rounds, lambda row: key(row) / row["optimal_bytes"]) for rounds in by_window
        ]

    sent = shares(_sent)
    checks = [
        ["bytes sent / 8 (N-1)/N per parameter, own counter", "within 2 %", f"{max(sent) - 1:+.1%}"]
    ]
    if by_window[0][0]["link_bytes"] is not None:
        farthest = max(shares(lambda row: row["link_bytes"]), key=lambda share: abs(share - 1))
        checks.append(["the same, counter of the link", "within 5 %", f"{farthest - 1:+.1%}"])
    growth = f"{sent[-1] / sent[0] - 1:+.1%}"
    name = f"bytes sent, window {windows[-1]} against {windows[0]}, own counter"
    return [*checks, [name, "no growth", growth]]


def _speed_checks(rows: list[Row], ranks: int, windows: list[int]) -> list[list[str]]:
    """Speed of ``ddp`` relative to other modes: name, target, measured value."""

    def faster(mode: str, window: int) -> float | None:
        return _ratio(rows, (ranks, window, mode), (ranks, window, "ddp"))

    checks: list[list[str]] = []
    # ddp against the better of the two fsdp modes, without accumulation.
    ratios = [faster(mode, 1) for mode, _, _ in TARGETS if 1 in windows]
    known = [ratio for ratio in ratios if ratio is not None]
    if known:
        checks.append(["speed of ddp / best fsdp, window 1", "1.0", f"{min(known):.2f}"])
    # ddp against each fsdp mode, with accumulation.
    for mode, window, target in TARGETS:
        ratio = faster(mode, window)
        if ratio is not None:
            checks.append([f"speed of ddp / {mode}, window {window}", f"{target}", f"{ratio:.2f}"])
    # ddp against itself without overlap.
    for window in windows:
        ratio = faster("ddp, overlap off", window)
        if ratio is not None:
            checks.append([f"speed with overlap / without, window {window}", "1.1", f"{ratio:.2f}"])
    return checks


def _sent(row: Row) -> float:
    return sum(row["bytes"].values())


def _key(row: Row) -> tuple[int, int, str]:
    return row["ranks"], row["window"], row["mode"]


def _by_round(rows: list[Row], key: tuple[int, int, str]) -> dict[int, Row]:
    return {row["round"]: row for row in rows if _key(row) == key}


def _median(rounds: dict[int, Row], figure: Callable[[Row], float]) -> float:
    return statistics.median(figure(row) for row in rounds.values())


def _ratio(
    rows: list[Row], slower: tuple[int, int, str], faster: tuple[int, int, str]
) -> float | None:
    """Median over the rounds of the ratio of step times; ``None`` if a mode was not measured."""
    above, below = _by_round(rows, slower), _by_round(rows, faster)
    if not above or not below:
        return None
    return statistics.median(above[i]["seconds"] / below[i]["seconds"] for i in above)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        write(**json.loads(path.read_text(encoding="utf-8")), out=path.parent)
