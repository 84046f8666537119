"""Hold ZenFlow here against DeepSpeed's: losses over steps of a small decoder, from the same weights on the same batches, with the
same schedule of warm-up, windows and hot columns. One process on a CPU; DeepSpeed's runs are launched, each in one of its own.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.result import fingerprint, markdown, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from surokit.train import Session

LENGTH, BATCH, VOCAB, LR = 64, 4, 512, 2e-3
#: Of ZenFlow, in both; docs/offload.md has what they mean.
SCHEDULE: Mapping[str, Any] = {
    "topk_ratio": 0.1,
    "update_interval": 4,
    "select_strategy": "step",
    "select_interval": 48,
    "full_warm_up_rounds": 20,
}
LAST = 50  # steps, over which the loss at the end is a mean
ADAMW, OFFLOAD = "AdamW", "DeepSpeed, ZeRO-2 with AdamW on the host"
OURS, SHIPPED, TURNED = "ZenFlow", "DeepSpeed's ZenFlow", "DeepSpeed's ZenFlow, layout corrected"
#: Each way with whether the host's update overlaps; None where there is nothing to overlap.
RUNS: tuple[tuple[str, bool | None], ...] = (
    (ADAMW, None),
    (OFFLOAD, None),
    *((way, overlap) for overlap in (True, False) for way in (OURS, SHIPPED, TURNED)),
)


def run(steps: int = 400, seeds: int = 3) -> dict[str, Any]:
    """Return the raw result: "zenflow" has the losses of each way and seed. ValueError where there are too few steps."""
    import surokit as sk
    from surokit.environment import environment, installed_version

    if steps < LAST or seeds < 1:
        raise ValueError(f"--steps {steps} --seeds {seeds}: give {LAST} steps or more, and a seed or more.")
    version = installed_version("deepspeed")
    if version is None:
        raise ImportError("The zenflow benchmark needs DeepSpeed, which is not installed; docs/dissecting.md says how.")
    rows = []
    for seed, (way, overlap) in itertools.product(range(seeds), RUNS):
        if way in (ADAMW, OURS):
            session = session_of(seed, steps, overlap)
            session.run(steps)
            losses = session.records.column("loss").tolist()
        else:
            losses = sk.launch(_theirs, way, overlap, seed, steps, gpus=1, output="none")
        rows.append({"way": way, "overlap": overlap, "seed": seed, "losses": [round(loss, 5) for loss in losses]})
    return {
        "benchmark": "losses of ZenFlow here and in DeepSpeed, in one process",
        "settings": {
            "model": f"decoder 2 x 64, vocab {VOCAB}, float32",
            "tokens a step": f"{BATCH} x {LENGTH} of Shakespeare",
            "steps": steps,
            "lr": f"{LR:g}, no decay, clipped at 1",
            "seeds": seeds,
            **SCHEDULE,
            "DeepSpeed": version,
        },
        "environment": environment(),
        "zenflow": rows,
    }


def session_of(seed: int, steps: int, overlap: bool | None) -> Session:
    """Return a session of AdamW, or of ZenFlow where `overlap` says how; the same weights and batches for a seed."""
    import torch

    import surokit as sk
    from surokit import texts

    tokenizer = sk.train_tokenizer(texts.SHAKESPEARE, vocab_size=VOCAB)
    data = sk.text(texts.SHAKESPEARE, tokenizer, length=LENGTH, batch=BATCH, seed=seed)
    batches = [{name: each[name] for name in ("input_ids", "labels")} for each in itertools.islice(iter(data), steps)]
    torch.manual_seed(seed)
    config = sk.DecoderConfig(layers=2, width=64, heads=4, kv_heads=2, vocab=VOCAB, ffn=176, max_length=LENGTH)
    optimizer: Any = sk.AdamW(lr=LR, weight_decay=0.0)
    if overlap is not None:
        optimizer = sk.ZenFlow(lr=LR, weight_decay=0.0, overlap_step=overlap, **SCHEDULE)
    return sk.Session(sk.Decoder(config), batches, optimizer=optimizer, schedule=None, seed=seed, compile=False)


def _theirs(way: str, overlap: bool | None, seed: int, steps: int) -> list[float]:
    """Return the losses of DeepSpeed's engine, with the weights, batches and schedule of a session."""
    from transformers import AutoModelForCausalLM

    from surokit.dissection.deepspeed_engine import DeepSpeedLoop
    from surokit.models import save

    session = session_of(seed, steps, overlap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on what DeepSpeed does otherwise, which is what is shown
        block = session.to_deepspeed()["zero_optimization"].get("zenflow")
    with tempfile.TemporaryDirectory() as folder:
        save(session.model, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=next(session.model.parameters()).dtype)
    loop = DeepSpeedLoop(model.train(), LR, batch=BATCH, zero=2, offload=True, zenflow=block, decay=0.0)
    if way == TURNED:
        correct_layout(loop.optimizer)
    batches: list[Mapping[str, Tensor]] = list(session.data.source)
    return [float(loop.step([batch])) for batch in batches]


def correct_layout(optimizer: Any) -> None:
    """Let the matrices of DeepSpeed's ZenFlow be what its flat buffer holds: their columns one after the other, as it lays
    gradients out too. It reads them as rows. DeepSpeed 0.19, ZeRO-2."""

    def place(group: int) -> None:
        parameters, shapes = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_meta[group]
        for p, like, at in zip(parameters, shapes, optimizer.round_robin_bit16_offsets[group]):
            held = optimizer.bit16_groups_flat[group][at : at + like.numel()]
            p.data = held.unflatten(0, like.shape[::-1]).t() if like.ndim == 2 else held

    optimizer._update_model_bit16_weights = place  # called after each update of the flat buffer
    for group in range(len(optimizer.bit16_groups_flat)):
        place(group)


def losses_of(data: Mapping[str, Any], way: str, overlap: bool | None) -> list[list[float]]:
    """Return the losses of each seed."""
    return [row["losses"] for row in data["zenflow"] if (row["way"], row["overlap"]) == (way, overlap)]


def at_end(losses: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean loss of the last steps, of each seed."""
    return [statistics.mean(each[-LAST:]) for each in losses]


def table(data: Mapping[str, Any]) -> str:
    """Make a row a way: the first loss, the mean of the last, and how far it is from AdamW's, over seeds."""
    base = at_end(losses_of(data, ADAMW, None))
    rows = []
    for way, overlap in RUNS:
        found = losses_of(data, way, overlap)
        ends = at_end(found)
        gaps = [end / least - 1 for end, least in zip(ends, base)]
        rows.append(
            [
                way,
                {None: "", True: "yes", False: "no"}[overlap],
                f"{statistics.mean(each[0] for each in found):.4f}",
                f"{statistics.mean(ends):.4f}",
                "" if way == ADAMW else f"{statistics.mean(gaps):+.2%}",
                "" if way == ADAMW else f"{min(gaps):+.2%} to {max(gaps):+.2%}",
            ]
        )
    head = ("way", "overlap", "loss, step 1", f"loss, last {LAST} steps", "against AdamW", "over seeds")
    return markdown(data, head, rows)


def digest(data: Mapping[str, Any]) -> str:
    """Return a fingerprint of the data that the picture shows."""
    return fingerprint(data["zenflow"])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, with the fingerprint of its data."""
    save_picture(figure(data), path, digest(data))


_COLORS = {ADAMW: "#1c1f23", OFFLOAD: "#8a929c", OURS: "#0072B2", SHIPPED: "#D55E00", TURNED: "#009E73"}
_INK, _SOFT = "#1c1f23", "#5f6670"
_SMOOTH = 20  # steps of a running mean


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw the losses over steps, a running mean of each seed: with overlap on the left, without on the right."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Picture

    with rc_context({"font.family": "DejaVu Sans", "font.size": 9}):
        picture = Picture(figsize=(9, 4), layout="constrained")
        for axes, overlap in zip(picture.subplots(1, 2, sharey=True), (True, False)):
            for way, color in _COLORS.items():
                dashes = (0, (4, 3)) if way == OFFLOAD else "-"  # it lies on AdamW
                for seed, each in enumerate(losses_of(data, way, None if way in (ADAMW, OFFLOAD) else overlap)):
                    smooth = np.convolve(each, np.full(_SMOOTH, 1 / _SMOOTH), mode="valid")
                    steps = np.arange(len(smooth)) + _SMOOTH
                    label = None if seed else way
                    axes.plot(steps, smooth, color=color, linewidth=1.1, linestyle=dashes, label=label)
            axes.set_title("with overlap" if overlap else "without overlap", loc="left", fontsize=10, color=_INK)
            axes.set_xlabel("step", color=_SOFT)
            axes.tick_params(colors=_SOFT, length=0)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.grid(axis="y", color="#e4e7ea", linewidth=0.8)
        first = picture.axes[0]
        first.set_ylabel(f"loss, mean of {_SMOOTH} steps, a line a seed", color=_SOFT)
        picture.axes[1].legend(labelcolor=_INK, loc="upper right", framealpha=1, edgecolor="none")
        picture.draw_without_rendering()  # texts take their font from here
    return picture
