"""Record which thread does what when in a step of each way to train: without offload, with OffloadAdamW, with ZenFlow, as
spans and as a picture.

The device is emulated: it computes a step by sleeping, so that the cores are free for the host's threads, as they are
beside a GPU. The link is a ThrottledLink. Gradients that travel, threads that add them up, AdamW, and all waits are real.
It shows the order of things and no GPU's speed: `surokit.bench offload` measures that in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.result import fingerprint, markdown, result, save_picture

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from surokit.offload.timeline import Timeline

LAYERS, SIZE = 4, 1024  # weights [SIZE, SIZE]
TRAINING = "MainThread"  # the lane of the training thread


def run(steps: int = 8, compute_ms: float = 150.0, link_gb_s: float = 0.1) -> dict[str, Any]:
    """Return the raw result: "spans" has those of `steps` steps by way, after as many that are not recorded. Raises
    ValueError for steps < 1."""
    import torch

    import surokit as sk
    from surokit.offload.link import ThrottledLink

    if steps < 1:
        raise ValueError(f"--steps {steps}: there is at least one to record.")
    ways: dict[str, Callable[[list[torch.Tensor]], Any] | None] = {
        "no offload": None,
        # one thread, as ZenFlow's AdamW has here
        "OffloadAdamW": lambda w: sk.OffloadAdamW(w, link=ThrottledLink(link_gb_s), pt_reserved_cores_perc=0.5),
        "ZenFlow, k = 0.1, S = 4": lambda w: sk.ZenFlow(w, link=ThrottledLink(link_gb_s), update_interval=4),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of the training thread: a core is left for the workers
    try:
        found = {way: _recorded(make, steps, compute_ms / 1e3) for way, make in ways.items()}
    finally:
        torch.set_num_threads(threads)
    settings = {"weights": f"{LAYERS} x {SIZE}^2, bfloat16", "steps": steps, "compute": f"{compute_ms:g} ms, slept"}
    raw = result("spans of an emulated device", {**settings, "link": f"{link_gb_s:g} GB/s each way"}, [], "")
    return raw | {"spans": {way: _plain(timeline) for way, timeline in found.items()}}


def _recorded(make: Callable[[list[torch.Tensor]], Any] | None, steps: int, compute_s: float) -> Timeline:
    import torch

    from surokit.offload.timeline import recorded, span

    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    weights: list[torch.Tensor] = [torch.nn.Parameter((0.02 * normal(SIZE, SIZE)).bfloat16()) for _ in range(LAYERS)]
    grads = [(normal(SIZE, SIZE) * normal(SIZE).abs() ** 4).bfloat16() for _ in weights]  # skewed, as ZenFlow needs it
    optimizer = make(weights) if make is not None else None

    def step() -> None:
        with span("compute"):
            time.sleep(compute_s)
            for weight, grad in zip(weights, grads):
                weight.grad = grad
        if optimizer is not None:
            with span("update"):
                optimizer.step()

    for _ in range(steps if optimizer is not None else 0):
        step()
    with recorded() as timeline:
        for _ in range(steps):
            step()
    if optimizer is not None:
        optimizer.link.close()
    return timeline


def _plain(timeline: Timeline) -> list[list[Any]]:
    """Return lane, what, start and stop in seconds, to a hundredth of a millisecond."""
    return [[s.lane, s.what, round(s.start_s, 5), round(s.stop_s, 5)] for s in timeline.spans]


def timelines(data: Mapping[str, Any]) -> dict[str, Timeline]:
    """Return the timelines by way, with the step's milliseconds."""
    from surokit.offload.timeline import Span, Timeline

    found = {way: Timeline(Span(*each) for each in spans) for way, spans in data["spans"].items()}
    return {f"{way}: {step_ms(data, timeline):.0f} ms a step": timeline for way, timeline in found.items()}


def step_ms(data: Mapping[str, Any], timeline: Timeline) -> float:
    """Return the milliseconds of a step of the training thread."""
    mine = [each for each in timeline.spans if each.lane == TRAINING]
    return 1e3 * (mine[-1].stop_s - mine[0].start_s) / int(data["settings"]["steps"])


def table(data: Mapping[str, Any]) -> str:
    """Make a row a way, in milliseconds a step: the work of each thread, and the waits of the training thread."""
    rows = []
    for way, timeline in timelines(data).items():
        steps = data["settings"]["steps"]
        update_s = sum(each.seconds for each in timeline.spans if (each.lane, each.what) == (TRAINING, "update"))
        own_s = timeline.busy_s(TRAINING, "update")
        lanes = [timeline.busy_s(lane) for lane in ("link down", "accumulator", "adam", "link up")]
        cells = (step_ms(data, timeline) / 1e3 * steps, own_s, update_s - own_s, *lanes)
        rows.append([way.partition(": ")[0], *(f"{1e3 * seconds / steps:.0f}" for seconds in cells)])
    head: Sequence[str] = ("way", "step ms", "device's update", "waits", "link, down", "adding", "Adam", "link, up")
    return markdown(data, head, rows)


def digest(data: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data that the picture shows."""
    return fingerprint(data["spans"])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, with the fingerprint of its data."""
    save_picture(figure(data), path, digest(data))


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw a row a thread, the ways one above the other."""
    from matplotlib import rc_context

    from surokit.offload.timeline import plot

    with rc_context({"font.family": "DejaVu Sans"}):
        picture = plot(timelines(data))
        picture.draw_without_rendering()  # texts take their font from here
    return picture
