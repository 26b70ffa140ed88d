"""What bench_parallel.py found: tables in Markdown, a plot, and the raw figures.

python scripts/bench_report.py docs/bench/parallel-1gbit.json    # again from the raw figures
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Row = dict[str, Any]

TARGETS = (("fsdp, reshard forward", 8, 2.7), ("fsdp, reshard window", 8, 1.0))
"""How many times as fast as a mode ddp is to be, at a window."""


def write(rows: list[Row], network: str, command: str, out: Path | None) -> None:
    """Print the tables; with ``out`` also write them, the plot and the figures there.

    :param out: a folder that exists.
    """
    text = f"`{command}`\n\n{table(rows)}\n\n{checks(rows, network)}\n"
    print(f"\n{text}")
    if out is None:
        return
    stem = out / f"parallel-{network}"
    figures = {"network": network, "command": command, "rows": rows}
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    stem.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")
    plot(rows, network, stem.with_suffix(".png"))
    print(f"written: {stem}.md, .json, .png")


def table(rows: list[Row]) -> str:
    """One line a (ranks, window, mode); MB are 10^6 bytes that rank 0 sends in a step.

    Exposed is the time in which the computation of rank 0 waits for a collective, compute the rest.
    """
    names = (
        "ranks", "window", "mode", "tokens/s", "time / ddp's", "step s", "exposed s", "compute s",
        "sent MB", "on the link MB",
    )  # fmt: skip
    lines = _header(names)
    for key in dict.fromkeys(_key(row) for row in rows):
        mine = _turns(rows, key)
        link = None if mine[0]["link_bytes"] is None else lambda row: row["link_bytes"] / 1e6
        ratio = _ratio(rows, key, (*key[:2], "ddp"))
        cells = [
            *(str(part) for part in key),
            f"{_median(mine, lambda row: row['tokens_per_second']):,.0f}",
            "" if ratio is None else f"{ratio:.2f}",
            f"{_median(mine, lambda row: row['seconds']):.2f}",
            f"{_median(mine, lambda row: row['exposed_seconds']):.2f}",
            f"{_median(mine, lambda row: row['seconds'] - row['exposed_seconds']):.2f}",
            f"{_median(mine, _sent) / 1e6:.1f}",
            "" if link is None else f"{_median(mine, link):.1f}",
        ]
        lines.append(_line(cells))
    return "\n".join(lines)


def checks(rows: list[Row], network: str) -> str:
    """What ``ddp`` is to reach on links of 1 Gbit/s, and what it does here."""
    lines = _header(("ranks", "check", "wanted", "found"))
    for ranks in sorted({row["ranks"] for row in rows}):
        windows = sorted({row["window"] for row in rows if row["ranks"] == ranks})
        for check in _byte_checks(rows, ranks, windows):
            lines.append(_line([str(ranks), *check]))
        for name, wanted, found in _speed_checks(rows, ranks, windows):
            lines.append(_line([str(ranks), name, wanted if network == "1gbit" else "", found]))
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
            turns = [_turns(rows, (size, window, mode)) for window in windows]
            rates = [_median(each, lambda row: row["tokens_per_second"]) for each in turns]
            axes.plot(windows, rates, "o-", label=mode)
        axes.set(xlabel="micro-batches a window", title=f"{size} ranks, {network}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(window) for window in windows])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s, all ranks")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _byte_checks(rows: list[Row], ranks: int, windows: list[int]) -> list[list[str]]:
    turns = [_turns(rows, (ranks, window, "ddp")) for window in windows]
    if not all(turns):
        return []
    sent = [_median(each, lambda row: _sent(row) / row["optimal_bytes"]) for each in turns]
    growth = f"{sent[-1] / sent[0] - 1:+.1%}"
    found = [
        ["bytes sent / 8 (N-1)/N a parameter, own counter", "within 2 %", f"{max(sent) - 1:+.1%}"],
        [f"the same, window {windows[-1]} against {windows[0]}", "no growth", growth],
    ]
    if turns[0][0]["link_bytes"] is not None:
        links = [
            _median(each, lambda row: row["link_bytes"] / row["optimal_bytes"]) for each in turns
        ]
        wire = "the same, the link's counter"
        found.insert(1, [wire, "within 5 %", f"{max(links, key=lambda x: abs(x - 1)) - 1:+.1%}"])
    return found


def _speed_checks(rows: list[Row], ranks: int, windows: list[int]) -> list[list[str]]:
    def faster(mode: str, window: int) -> float | None:
        return _ratio(rows, (ranks, window, mode), (ranks, window, "ddp"))

    found: list[list[str]] = []
    first = [faster(mode, 1) for mode, _, _ in TARGETS if 1 in windows]
    known = [ratio for ratio in first if ratio is not None]
    if known:
        found.append(["speed of ddp / best fsdp, window 1", "1.0", f"{min(known):.2f}"])
    for mode, window, wanted in TARGETS:
        ratio = faster(mode, window)
        if ratio is not None:
            found.append([f"speed of ddp / {mode}, window {window}", f"{wanted}", f"{ratio:.2f}"])
    for window in windows:
        ratio = faster("ddp, overlap off", window)
        if ratio is not None:
            found.append([f"speed with overlap / without, window {window}", "1.1", f"{ratio:.2f}"])
    return found


def _sent(row: Row) -> float:
    return sum(row["bytes"].values())


def _key(row: Row) -> tuple[int, int, str]:
    return row["ranks"], row["window"], row["mode"]


def _turns(rows: list[Row], key: tuple[int, int, str]) -> dict[int, Row]:
    return {row["turn"]: row for row in rows if _key(row) == key}


def _median(turns: dict[int, Row], figure: Callable[[Row], float]) -> float:
    return statistics.median(figure(row) for row in turns.values())


def _ratio(
    rows: list[Row], slower: tuple[int, int, str], faster: tuple[int, int, str]
) -> float | None:
    """Of step times, the median over the turns; null where one was not measured."""
    above, below = _turns(rows, slower), _turns(rows, faster)
    if not above or not below:
        return None
    return statistics.median(above[turn]["seconds"] / below[turn]["seconds"] for turn in above)


def _header(names: tuple[str, ...]) -> list[str]:
    return [_line(list(names)), "|" + "---|" * len(names)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        write(**json.loads(path.read_text(encoding="utf-8")), out=path.parent)
