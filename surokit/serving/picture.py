"""Draw distributions of latency as cumulative shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from surokit.serving import measures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from surokit.serving.served import ServeBench


def picture(found: ServeBench) -> Figure:
    """Draw one curve a point: the share of answers below a time to the first token, and below a time of the whole request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, name, words in zip(axes, ("ttft", "e2e"), ("time to the first token, s", "time of the whole answer, s")):
        for p in found.points:
            values = np.sort(measures.SPREADS[name](measures.answered(p.answers))) / 1e3
            # answers that were lost keep a curve below 1
            share = np.arange(1, len(values) + 1) / max(1, len(p.answers))
            axis.step(values, share, where="post", label=p.name)
        axis.set(xlabel=words, ylabel="share of all requests", ylim=(0, 1.02), xlim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return figure


__all__ = ["picture"]
