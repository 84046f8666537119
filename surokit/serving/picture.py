"""Draw distributions of latency as cumulative shares, and throughput and latencies over a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from surokit.serving import measures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surokit.serving.point import Point
    from surokit.serving.served import ServeBench

_WIDE = 8  # the last of a sweep over the first, from which its axis is logarithmic
_SWEPT = {"rate": "requests that arrive a second", "concurrency": "requests at once"}


def distributions(found: ServeBench) -> Figure:
    """Draw one curve a point: the share of answers below a time to the first token, and below a time of the whole request."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    for axis, name, words in zip(axes, ("ttft", "e2e"), ("time to the first token, s", "time of the whole answer, s")):
        for color, (label, p) in enumerate(found.named.items()):
            if name in p.unknown or not p.answers:
                continue
            values = np.sort(measures.SPREADS[name](measures.answered(p.answers))) / 1e3
            # answers that were lost keep a curve below 1
            share = np.arange(1, len(values) + 1) / max(1, len(p.answers))
            axis.step(
                values, share, where="post", label=label, color=f"C{color % 10}", ls=("-", "--", ":")[color // 10 % 3]
            )
        axis.set(xlabel=words, ylabel="share of all requests", ylim=(0, 1.02))
        axis.set_xlim(0, 1.03 * axis.get_xlim()[1])
        axis.grid(alpha=0.3)
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3, fontsize=8)
    return figure


def sweep(found: ServeBench) -> Figure:
    """Draw output tokens a second, and the median and 99th percentile of ttft and tpot, over what each server's sweep changes."""
    from matplotlib import pyplot as plt

    by, servers = _swept(found)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    plt.close(figure)  # the caller shows what is returned; pyplot would show it a second time
    for server, points in servers.items():
        at = [getattr(p.workload, by) for p in points]
        (line,) = axes[0].plot(at, [p.throughput()["output_tokens_per_s"] for p in points], "o-", ms=4, label=server)
        for axis, name in zip(axes[1:], ("ttft", "tpot")):
            for q, style in ((0.5, "o-"), (0.99, "o:")):
                axis.plot(at, [p.spread(name, q).mid for p in points], style, ms=4, color=line.get_color())
    swept = sorted({getattr(p.workload, by) for points in servers.values() for p in points})
    words = ("output tokens a second", "time to the first token, ms", "time per output token, ms")
    for axis, ylabel in zip(axes, words):
        axis.set(xlabel=_SWEPT[by], ylabel=ylabel, ylim=(0, 1.06 * axis.get_ylim()[1]))
        if swept[-1] >= _WIDE * swept[0]:
            axis.set_xscale("log")
            axis.minorticks_off()
        axis.set_xticks(swept, [f"{value:g}" for value in swept])
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    axes[1].set_title("median, and 99th percentile dotted", fontsize=9)
    axes[2].set_title("median, and 99th percentile dotted", fontsize=9)
    return figure


def _swept(found: ServeBench) -> tuple[str, dict[str, list[Point]]]:
    """Return what the sweeps change, "rate" or "concurrency", and the points of each server in that order."""
    for by in _SWEPT:
        servers: dict[str, list[Point]] = {}
        for p in found.points:
            if getattr(p.workload, by) is not None:
                servers.setdefault(p.server, []).append(p)
        if any(len(points) > 1 for points in servers.values()):
            return by, {name: sorted(points, key=lambda p: getattr(p.workload, by)) for name, points in servers.items()}
    raise ValueError(
        "plot_sweep() needs a server under several rates or several numbers at once: give serve_bench workload=work.rates(1, 2, 4)."
    )


__all__ = ["distributions", "sweep"]
