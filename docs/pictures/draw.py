"""Draws the pictures of the documentation: ``python docs/pictures/draw.py`` writes the SVG files.

Each picture is a function that returns its SVG text. A test compares the committed files with it.
"""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

INK, GREY, PAPER = "#1f2933", "#7b8794", "#ffffff"
BLUE, GREEN, ORANGE, VIOLET, RED = "#4c8bd6", "#4fa56b", "#e08e2b", "#9067c6", "#c9473f"
PALE = "#e4e7eb"


@dataclass
class Svg:
    """A drawing of ``width`` x ``height`` pixels on white ground."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = PAPER, *, label: str = "",
        ink: str = INK, size: int = 12, edge: str = INK,
    ) -> None:  # fmt: skip
        """A rectangle with a label in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            f'stroke="{edge}" stroke-width="1"/>'
        )
        if label:
            self.text(x + w / 2, y + h / 2 + size * 0.35, label, size=size, ink=ink, at="middle")

    def text(
        self, x: float, y: float, words: str, *, size: int = 12, ink: str = INK, at: str = "start",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """A line of text; ``at`` is its anchor."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{ink}" text-anchor="{at}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(
        self, x1: float, y1: float, x2: float, y2: float, ink: str = INK, *, dash: bool = False
    ) -> None:
        """A line with a head at its end."""
        dashed = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{ink}" '
            f'stroke-width="1.6"{dashed}/>'
        )
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        corners = [
            (x2, y2),
            (x2 - 8 * ux - 4 * uy, y2 - 8 * uy + 4 * ux),
            (x2 - 8 * ux + 4 * uy, y2 - 8 * uy - 4 * ux),
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{points}" fill="{ink}"/>')

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="Helvetica, Arial, sans-serif">'
            f'\n<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
        )


def floors() -> str:
    """The packages; each imports only from packages below it."""
    rows = [
        ("cli, check, experiment", "commands; experiment.py tells the whole story", PALE),
        ("train", "trainer, step, checkpoint, records", ORANGE),
        ("optim", "update rules, the distributed optimizer", VIOLET),
        ("parallel", "ddp, fsdp, buckets, choice of the dispatcher", BLUE),
        ("nn", "the model on one device; it never sees a rank", GREEN),
        ("dispatch", "plans, transports, mailboxes", BLUE),
        ("kernels", "Triton kernels with plain-torch references", RED),
        ("distributed", "ranks, process groups, collectives", BLUE),
        ("data", "token files, loader", ORANGE),
        ("config", "what a YAML file may say; no torch", PALE),
    ]
    svg = Svg(680, 44 * len(rows) + 40)
    for index, (name, text, color) in enumerate(rows):
        y = 20 + 44 * index
        pale = color == PALE
        svg.box(60, y, 170, 34, color, label=name, ink=INK if pale else PAPER, size=13)
        svg.text(246, y + 22, text, size=13)
    svg.arrow(30, 30, 30, 44 * len(rows) + 4)
    svg.text(16, 44 * len(rows) + 26, "imports go down only", size=12, ink=GREY)
    return str(svg)


def _shares(svg: Svg, x: float, y: float, filled: list[int], of: int, color: str) -> None:
    """One rank's pieces of ``of`` equal ones; without any, the rank gathers block by block."""
    width = 112 / of
    if not filled:
        svg.box(x, y, 112, 20, PAPER, edge=PALE)
        svg.box(x, y, 12, 20, color)
        svg.text(x + 20, y + 14, "block by block", size=11, ink=GREY)
        return
    for piece in range(of):
        inside = piece in filled
        svg.box(
            x + piece * width, y, width, 20, color if inside else PAPER,
            edge=INK if inside else PALE,
        )  # fmt: skip


def where_things_live() -> str:
    """Weights, gradients, optimizer state and experts on four ranks, EP 2, in three modes."""
    everything = [0, 1, 2, 3]
    own, pair = [[0], [1], [2], [3]], [[0, 1], [2, 3], [0, 1], [2, 3]]
    quarter = [[0], [2], [1], [3]]
    blocks: list[list[int]] = [[]] * 4
    modes = [
        ("ddp", [everything] * 4, [everything] * 4, own, pair, pair, quarter),
        ("fsdp, reshard: forward", blocks, own, own, blocks, quarter, quarter),
        ("fsdp, reshard: window", [everything] * 4, [everything] * 4, own, pair, pair, quarter),
    ]
    names = [
        ("dense weights (compute dtype)", GREEN),
        ("dense gradients (FP32)", ORANGE),
        ("dense main weights and moments", VIOLET),
        ("expert weights (compute dtype)", GREEN),
        ("expert gradients (FP32)", ORANGE),
        ("expert main weights and moments", VIOLET),
    ]
    svg = Svg(780, 66 + len(modes) * 214)
    for rank in range(4):
        svg.text(290 + 124 * rank, 26, f"rank {rank}", at="middle", bold=True)
    svg.text(12, 26, "during an accumulation window", size=12, ink=GREY)
    for number, (mode, *parts) in enumerate(modes):
        top = 44 + 214 * number
        svg.text(12, top + 14, mode, size=14, bold=True)
        for row, ((name, color), ranks) in enumerate(zip(names, parts, strict=True)):
            y = top + 26 + 28 * row + (8 if row > 2 else 0)
            svg.text(222, y + 15, name, at="end")
            for rank, filled in enumerate(ranks):
                _shares(svg, 234 + 124 * rank, y, filled, 4, color)
    svg.text(
        12, 56 + len(modes) * 214,
        "A bar is the whole of one kind; the filled pieces are on the rank. expert_parallel = 2.",
        ink=GREY,
    )  # fmt: skip
    return str(svg)


def window() -> str:
    """One step of ``ddp``: what runs on the compute stream, and what travels beside it."""
    svg = Svg(900, 214)
    svg.text(12, 68, "compute", bold=True)
    svg.text(12, 128, "network", bold=True)
    x = 84.0
    for name in ("micro-batch 1", "micro-batch 2", "last micro-batch"):
        svg.box(x, 50, 54, 28, GREEN, label="forward", ink=PAPER, size=11)
        svg.box(x + 54, 50, 90, 28, ORANGE, label="backward", ink=PAPER, size=11)
        svg.text(x + 72, 40, name, size=11, at="middle", ink=GREY)
        x += 150
    for bucket in range(3):
        label, left = f"b{bucket}", x - 96 + 30 * bucket
        svg.box(left, 110, 26, 28, BLUE, label=label, ink=PAPER, size=11)
        left = x + 134 + 30 * bucket
        svg.box(left, 110, 26, 28, BLUE, label=f"b{2 - bucket}", ink=PAPER, size=11)
    svg.box(x + 46, 110, 34, 28, VIOLET, label="norm", ink=PAPER, size=11)
    svg.box(x + 96, 50, 84, 28, VIOLET, label="step", ink=PAPER, size=11)
    svg.text(x + 138, 40, "AdamW on slices", size=11, at="middle", ink=GREY)
    svg.box(x + 196, 50, 120, 28, GREEN, label="forward", ink=PAPER, size=11)
    svg.text(x + 256, 40, "next window", size=11, at="middle", ink=GREY)
    for middle, name, detail in (
        (x - 52, "reduce", "reduce-scatter per bucket"),
        (x + 63, "norm", "one all-reduce"),
        (x + 178, "gather", "all-gather per bucket"),
    ):
        svg.text(middle, 156, name, at="middle", bold=True)
        svg.text(middle, 172, detail, at="middle", ink=GREY, size=11)
    svg.arrow(84, 200, 880, 200, GREY)
    svg.text(50, 204, "time", ink=GREY)
    return str(svg)


def row() -> str:
    """The way of one token's row, top-k 3, from its rank to two experts of another and back."""
    svg = Svg(820, 330)
    for x, name in (
        (20, "rank 0: the token's rank (source)"),
        (440, "rank 1: holds experts 4 to 7"),
    ):
        svg.box(x, 34, 360, 280, "#f7f9fb", edge=GREY)
        svg.text(x + 12, 54, name, bold=True)
    svg.box(40, 76, 150, 34, PALE, label="hidden state of token t")
    svg.box(40, 130, 150, 34, PALE, label="router: experts 1, 4, 6")
    svg.arrow(115, 110, 115, 129)
    svg.box(40, 184, 150, 34, GREEN, label="expert 1, weight 0.5", ink=PAPER)
    svg.arrow(115, 164, 115, 183)
    svg.arrow(190, 147, 459, 112, BLUE)
    svg.text(222, 104, "dispatch: ONE row,", ink=BLUE)
    svg.text(222, 120, "with 2 router weights", ink=BLUE)
    svg.box(460, 90, 140, 34, PALE, label="received row")
    svg.box(640, 76, 140, 30, GREEN, label="expert 4, weight 0.3", ink=PAPER)
    svg.box(640, 120, 140, 30, GREEN, label="expert 6, weight 0.2", ink=PAPER)
    svg.arrow(600, 102, 639, 92)
    svg.arrow(600, 112, 639, 134)
    svg.text(620, 70, "two pairs (row, expert)", ink=GREY, size=11)
    svg.box(560, 196, 180, 34, PALE, label="weighted sum of the pairs")
    svg.arrow(690, 150, 660, 195)
    svg.parts.append(f'<path d="M 780 92 H 792 V 213 H 742" fill="none" stroke="{INK}"/>')
    svg.arrow(750, 213, 741, 213)
    svg.arrow(559, 214, 191, 268, BLUE)
    svg.text(300, 262, "combine: ONE row back", ink=BLUE)
    svg.box(40, 254, 150, 34, PALE, label="output of token t")
    svg.arrow(115, 218, 115, 253)
    svg.text(460, 290, "The weights are applied where the experts are, so one", ink=GREY, size=12)
    svg.text(460, 305, "row per rank travels, and not one row per expert.", ink=GREY, size=12)
    return str(svg)


def mailbox() -> str:
    """The arena of one rank: two buffers, a region and a flag per source."""
    svg = Svg(780, 300)
    svg.text(190, 30, "arena of rank 1 (group of 4 ranks)", bold=True)
    for buffer in range(2):
        x = 190 + 290 * buffer
        epochs = "epochs 2, 4, 6, ..." if buffer == 0 else "epochs 1, 3, 5, ..."
        svg.box(x, 44, 270, 190, "#f7f9fb", edge=GREY)
        svg.text(x + 10, 64, f"buffer {buffer}: {epochs}")
        for index, source in enumerate((0, 2, 3)):
            y = 78 + 50 * index
            svg.box(x + 10, y, 190, 38, GREEN, edge=INK)
            svg.text(x + 105, y + 16, f"region of source {source}", ink=PAPER, at="middle")
            svg.text(x + 105, y + 31, "count, rows, metadata", ink=PAPER, at="middle", size=11)
            value = (4 if source != 3 else 2) if buffer == 0 else 3
            svg.box(x + 208, y, 52, 38, PALE, label=f"flag {value}")
    for index, source in enumerate((0, 2, 3)):
        y = 97 + 50 * index
        late = source == 3
        svg.box(12, y - 17, 90, 34, PALE, label=f"rank {source}")
        svg.arrow(102, y, 198, y, RED if late else BLUE, dash=late)
    svg.text(12, 262, "Epoch 4: ranks 0 and 2 have written their rows and set their flags to 4.")
    svg.text(
        12, 282, "Rank 1 waits until all flags of buffer 0 equal 4: it waits for rank 3.", ink=RED
    )
    return str(svg)


def shards() -> str:
    """One parameter in a checkpoint, and the ranges of it that ranks hold in each mode."""
    svg = Svg(780, 320)
    colors = [BLUE, GREEN, ORANGE, VIOLET]
    svg.text(12, 34, "checkpoint", bold=True)
    svg.box(170, 16, 560, 28, PALE, label="one parameter, flattened, in global order (FP32)")
    rows = [
        ("ddp, 4 ranks", [150, 280, 130], [1, 2, 3], "slices of a bucket ignore parameter borders"),
        ("fsdp, 4 ranks", [140, 140, 140, 140], [0, 1, 2, 3], "dimension 0 in equal parts"),
        ("1 rank", [560], [0], "the whole parameter"),
        ("experts, EP 2", [280, 280], [0, 1], "experts 0 to 3, experts 4 to 7; then as above"),
    ]
    for index, (name, widths, ranks, note) in enumerate(rows):
        y = 72 + 54 * index
        svg.text(12, y + 19, name, bold=True)
        x = 170.0
        for width, rank in zip(widths, ranks, strict=True):
            svg.box(x, y, width, 28, colors[rank], label=f"rank {rank}", ink=PAPER)
            x += width
        svg.text(170, y + 44, note, ink=GREY, size=11)
    svg.text(12, 308, "Every shard is a contiguous range, so any layout reads any other.", ink=GREY)
    return str(svg)


PICTURES = {
    "floors": floors,
    "where-things-live": where_things_live,
    "window": window,
    "row": row,
    "mailbox": mailbox,
    "shards": shards,
}


def main() -> None:
    """Write all pictures beside this file."""
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
