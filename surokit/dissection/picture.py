"""Draw a dissection: the time of a token in each cell by parts of the decoder, and tokens/s against memory with its frontier."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from surokit.profiler.analysis.parts import ORDER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from surokit.dissection.cell import Cell
    from surokit.dissection.dissection import Dissection

#: What is drawn as one piece of a bar, with a colour that is told apart without seeing red and green apart.
PIECES = {
    "linear layers": ("#0072b2", tuple(name for name in ORDER if name.startswith("Linear"))),
    "attention": ("#d55e00", ("attention",)),
    "RoPE and reshaping": ("#e69f00", ("RoPE and reshaping",)),
    "norms, gate, residual": (
        "#009e73",
        ("RMSNorm", "SiLU and gate", "norm and gate, fused", "residual sum", "router"),
    ),
    "embedding, head, loss": ("#56b4e9", ("embedding", "lm_head", "loss")),
    "optimizer": ("#cc79a7", ("optimizer", "gradient clipping")),
    "communication, copies": ("#f0e442", ("communication", "copies", "data")),
    "other": ("0.55", ("other", "CUDA graph")),
    "idle": ("0.9", ("idle",)),
}

FAR = 5  # times the median, from which a bar is cut short


def picture(found: Dissection) -> Figure:
    """Return the figure; cells without a profile have no bar, and those without memory no point."""
    from matplotlib import pyplot as plt

    profiled = [cell for cell in found.cells if cell.profile]
    height = max(3.4, 0.32 * len(profiled) + 1.6)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, height), layout="constrained", width_ratios=(1.5, 1))
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    several = len({cell.machine for cell in found.cells}) > 1
    names = [f"{cell.name}, {cell.machine}" if several else cell.name for cell in profiled]
    _bars(left, profiled, names, height)
    _points(right, [cell for cell in found.cells if cell.tokens_per_s and cell.peak_gib], several)
    figure.suptitle(found.title, fontsize=10)
    return figure


def _bars(axes: Axes, cells: list[Cell], names: list[str], height: float) -> None:
    at = list(range(len(cells)))
    so_far = [0.0] * len(cells)
    for label, (colour, parts) in PIECES.items():
        widths = []
        for cell in cells:
            times = {row["part"]: row["forward_ms"] + row["backward_ms"] for row in cell.profile["parts"]}
            idle = {row["part"]: row["idle_ms"] for row in cell.profile["parts"]}
            talk = idle.get("communication", 0.0)  # waited for other processes, which is no idle time
            times |= {"communication": times.get("communication", 0.0) + talk, "idle": sum(idle.values()) - talk}
            us = 1e3 * cell.scale / cell.work["tokens_per_step"]  # a token's share, so that batches can be compared
            widths.append(us * sum(times.get(part, 0.0) for part in parts))
        if any(widths):
            axes.barh(at, widths, left=so_far, color=colour, label=label, height=0.7)
            so_far = [a + b for a, b in zip(so_far, widths)]
    _shorten(axes, so_far)
    axes.set_yticks(at, names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("\N{MICRO SIGN}s a token")
    below = -0.6 / (height - 1.3)  # inches under the axes, where the numbers and the label of the axis end
    axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(0.0, below), ncols=3)


def _shorten(axes: Axes, widths: list[float]) -> None:
    """End the axis before bars that are many times as long as the others, and write their length."""
    usual = [width for width in widths if width <= FAR * median(widths)]
    if len(usual) == len(widths):
        return
    edge = 1.25 * max(usual)
    axes.set_xlim(0, edge)
    for y, width in enumerate(widths):
        if width > edge:
            text = f"{width:,.0f} \N{RIGHTWARDS ARROW} "
            axes.text(edge, y, text, ha="right", va="center", fontsize=7, color="white", fontweight="bold")


def _points(axes: Axes, cells: list[Cell], several: bool) -> None:
    machines = list(dict.fromkeys(cell.machine for cell in cells))
    markers = "osD^vP*X"
    points = []
    for cell in cells:
        assert cell.tokens_per_s is not None
        assert cell.peak_gib is not None
        x, y = cell.peak_gib, cell.tokens_per_s.mid
        points.append((x, y))
        axes.plot(x, y, markers[machines.index(cell.machine) % len(markers)], color="#0072b2")
    for place, numbers in _together(points):
        label = ", ".join(map(str, numbers))
        axes.annotate(label, place, textcoords="offset points", xytext=(4, 3), fontsize=7)
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    axes.plot(*zip(*best), "--", color="0.6", linewidth=0.9, zorder=0) if best else None
    said = [f"{n}  {cell.name}{f', {cell.machine}' * several}" for n, cell in enumerate(cells, 1)]
    axes.set(xlabel="peak memory, GiB", ylabel="tokens/s", xlim=(0, 1.08 * max((x for x, _ in points), default=1)))
    axes.set_ylim(0, 1.08 * max((y for _, y in points), default=1))
    axes.text(1.02, 1.0, "\n".join(said), transform=axes.transAxes, fontsize=7, va="top")


def _together(points: list[tuple[float, float]]) -> list[tuple[tuple[float, float], list[int]]]:
    """Return places with the numbers, from 1, of the points there. Points whose numbers would overlap share a place."""
    found: list[tuple[tuple[float, float], list[int]]] = []
    wide, high = (max((p[axis] for p in points), default=0.0) for axis in (0, 1))
    for number, (x, y) in enumerate(points, 1):
        near = (numbers for (u, v), numbers in found if abs(x - u) <= 0.05 * wide and abs(y - v) <= 0.025 * high)
        shared = next(near, None)
        if shared is None:
            found.append(((x, y), [number]))
        else:
            shared.append(number)
    return found


__all__ = ["PIECES", "picture"]
