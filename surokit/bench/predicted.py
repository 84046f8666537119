"""Predict the fused step on an H100 and an H200 with the planner, beside the bars of speed. Nothing here is measured.

Every configuration of the targets' table is planned with fusing, CUDA graphs and the codes of frozen weights kept, at three
sets of rates: assumed ones, which make the prediction; those that large products and copies are said to reach; and the
datasheet's, which few runs reach. The assumed ones fit a model of 8B: the products of small ones reach less. Attention is
taken as FlashAttention-2's in all three. All assumptions go into the raw file. Where a step does not fit the GPU, it is
planned with the first recompute that makes it fit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surokit.bench.configurations import MODELS, BenchWork
from surokit.bench.result import fingerprint, markdown, save_picture
from surokit.bench.targets import DEVICE, ESTIMATED, ESTIMATES, MEANING, TARGETS, Target
from surokit.hardware.rates import ATTENTION_SHARE, GAP_US
from surokit.planner import Ceilings, Gpu, Plan, find_gpu
from surokit.planner.times.roofline import Estimate
from surokit.tables import markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEVICES = ("H200", "H100")
#: Shares of the datasheet's rates: (bf16 products, fp8 products, bandwidth), and where they come from.
RATES: dict[str, tuple[tuple[float, float, float], str]] = {
    "assumed": (
        (622 / 989, 1054 / 1979, 0.8),
        "622 TFLOPS of bf16 products (63 % of the peak) and 1,054 of fp8 products (53 %), from an estimate for a model of 8B; 80 % "
        "of the bandwidth",
    ),
    "large products'": (
        (790 / 989, 790 / 989, 4.3 / 4.8),
        "about 790 of 989 TFLOPS and 4.3 of 4.8 TB/s, reported of an H200 for large square products and copies, by others; fp8 "
        "by the same share",
    ),
}
#: What else is assumed, in words.
ASSUMED = {
    "peak rates": "the datasheet's for products and bandwidth; no bound where attention is faster than assumed",
    "attention": f"{dict(ATTENTION_SHARE)[9, 0]:.0%} of the bf16 peak, FlashAttention-2's on an H100 (arXiv 2407.08608); cuDNN's "
    "there is 1.6 to 1.7 times as fast",
    "launches": f"none but a gap of {GAP_US:g} us after each kernel of a CUDA graph, a guess",
    "overlap": "none: kernels run one after the other; batches come on a stream of their own and cost nothing",
    "shapes": "products of all shapes and scales at one rate: those of small models reach less, and so may fp8 ones with a scale a "
    "block, which are QFP8's",
}


def run(devices: Sequence[str] = DEVICES, measured: Path | None = None) -> dict[str, Any]:
    """Return the raw result: a row for each device and target.

    measured: the file of `bench gpu` on one of the devices; its rows have "measured" then, of tokens/s the median, least
    and most. Raises ValueError for a file that is none or was measured on a device that nothing is predicted for.
    """
    from surokit.environment import environment

    rows = [row for device in devices for row in _rows(find_gpu(device))]
    if measured is not None:
        _beside(rows, measured)
    return {
        "benchmark": "predicted by the planner, not measured",
        "settings": {
            "step": f"{BenchWork()} tokens, LoRA of rank {BenchWork().rank}, fused, CUDA graphs, codes of frozen weights kept"
        },
        "environment": environment(),
        "assumed": {**{f"{name} rates": words for name, (_, words) in RATES.items()}, **ASSUMED},
        "predicted": rows,
    }


def _beside(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Put the figures of a file of `bench gpu` beside the predictions for its device."""
    from surokit.bench import gpu_table

    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        device, groups, rehearsal = data["environment"]["device"], gpu_table.rows(data), data["rehearsal"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is no file of `bench gpu`: give the gpu.json of an hour.") from None
    mine = [row for row in rows if row["gpu"] in device.split()]
    if rehearsal or not mine:
        where = "in a rehearsal" if rehearsal else f"on {device}"
        raise ValueError(f"{file} was measured {where}, of which nothing is predicted: give the gpu.json of an hour.")
    for found in (found for group in groups.values() for found in group if found.turns):
        c = found.configuration
        for row in mine:
            if (
                not c.peer
                and not c.changes
                and (c.model, c.train, c.recipe) == (row["model"], row["train"], row["recipe"])
            ):
                row["measured"] = {
                    "tokens_per_s": found.tokens_per_s,
                    "least": min(found.rates),
                    "most": max(found.rates),
                }
                doubts = {"unchecked": found.unchecked, "no CUDA graphs": found.no_graphs}
                row["measured"] |= {name: why for name, why in doubts.items() if why}


def at(rates: str, gpu: Gpu) -> Gpu:
    """Return the GPU with ceilings from one of RATES, a set of assumptions on which share of its peaks it reaches."""
    (bf16, fp8, bandwidth), words = RATES[rates]
    assert gpu.bf16_tflops is not None
    assert gpu.fp8_tflops is not None
    assert gpu.bandwidth_tb_s is not None
    ceilings = Ceilings(
        measured=f"nothing, but assumed: {words}",
        bf16_tflops=gpu.bf16_tflops * bf16,
        fp8_tflops=gpu.fp8_tflops * fp8,
        bandwidth_tb_s=gpu.bandwidth_tb_s * bandwidth,
    )
    return replace(gpu, ceilings=ceilings)


def planned(target: Target, gpu: Gpu, **options: Any) -> Plan:
    """Return the plan of a target's configuration on a GPU; options are those of `sk.plan`."""
    import surokit as sk
    from surokit.recipe import find_recipe

    work = BenchWork()
    recipe = find_recipe(target.recipe)
    if target.train == "lora":
        recipe = recipe.lora(work.rank, work.alpha)
    config = sk.DecoderConfig(**MODELS[target.model], max_length=work.length)
    options = {"batch": work.batch, "length": work.length, "accumulate": work.accumulate, **options}
    return sk.plan(config, recipe=recipe, gpu=gpu, **options)


def _rows(gpu: Gpu) -> Iterator[dict[str, Any]]:
    bf16: dict[tuple[str, str], float | None] = {}
    for target in TARGETS:
        row = _row(target, gpu)
        key = target.model, target.train
        if target.recipe == "bf16":
            bf16[key] = row["tokens_per_s"]
        if gpu.name == DEVICE:
            row["bars"] = dict(zip(("gate", "target", "stretch"), target.bars(bf16[key])))
            row["bars in words"] = list(target.words())
            if found := ESTIMATES.get((*key, target.recipe)):
                row["estimated k tokens/s"] = list(found)
        yield row


def _row(target: Target, gpu: Gpu) -> dict[str, Any]:
    assumed = at("assumed", gpu)
    plan = planned(target, assumed, fusion="fused", graphs=True)
    recompute = next((how for how in ("none", "selective") if plan.but(recompute=how).fits()), "full")
    plan, unfused = plan.but(recompute=recompute), planned(target, assumed, recompute=recompute)
    cached = plan.but(transposed="cached")
    step, kernels, fits = _estimate(plan), _kernels(plan), plan.fits()
    return {
        "gpu": gpu.name,
        **{name: getattr(target, name) for name in ("model", "train", "recipe")},
        "recompute": recompute,
        "fits": fits,
        "tokens_per_s": step.tokens_per_s if fits else None,
        "tokens_per_s at large products' rates": _estimate(plan.but(gpu=at("large products'", gpu))).tokens_per_s
        if fits
        else None,
        "tokens_per_s at peak rates": _estimate(plan.but(gpu=gpu, graphs=False)).tokens_per_s if fits else None,
        "step_ms": step.step_ms,
        "mfu": step.mfu,
        "ms by phase": {**step.by_pass(), "gaps": step.gaps_ms},
        "ms by group": step.by_group(),
        "ms unfused, of the device": _estimate(unfused).device_ms,
        "gib": plan.memory.gib,
        "peak_gib": plan.memory.peak_gib,
        "kernels": kernels,
        "kernels unfused": _kernels(unfused),
        "W' cached": {
            "adds_gib": cached.memory.gib - plan.memory.gib,
            "saves_ms": step.step_ms - _estimate(cached).step_ms,
        },
    }


def _estimate(plan: Plan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def _kernels(plan: Plan) -> int:
    return round(sum(row.launches for row in _estimate(plan).rows))


def table(data: Mapping[str, Any]) -> str:
    """Make Markdown: predicted speed beside the bars, time and memory by part, and the assumptions."""
    rows = data["predicted"]
    measured = any("measured" in row for row in rows)
    speed = [
        *(
            *_NAMES,
            *["measured k tokens/s"] * measured,
            "predicted k tokens/s",
            "at large products' rates",
            "at peak rates",
            "estimated by a reader",
        ),
        *("gate", "target", "stretch", "predicted to reach"),
    ]
    step = [
        *(*_NAMES, "MFU", "ms a step", *_PHASES, "GiB"),
        *("kernels a step", "kernels unfused", "with W' cached"),
    ]
    return "\n\n".join(
        [
            markdown(data, speed, [_speed(row, measured) for row in rows]),
            MEANING,
            f"The reader's estimates: {ESTIMATED}",
            markdown_table([_step(row) for row in rows], header=step),
            "\n".join(_assumptions(data)),
        ]
    )


_NAMES = ("GPU", "model", "trains", "recipe")
_PHASES = ("forward", "recompute", "backward", "optimizer", "gaps")


def digest(data: Mapping[str, Any]) -> str:
    """Return the fingerprint of what is drawn."""
    return fingerprint(data["predicted"])


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Write the picture as PNG, with the fingerprint of its data."""
    save_picture(figure(data), path, digest(data))


def figure(data: Mapping[str, Any]) -> Figure:
    """Draw a line a target, on one H200: tokens/s as predicted, from assumed rates to peak rates, as a reader estimated
    them and as measured, and the gate."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [row for row in data["predicted"] if row["gpu"] == DEVICE and row["tokens_per_s"] is not None]
    with rc_context({"font.family": "DejaVu Sans"}):
        picture = Figure(figsize=(8.0, 0.28 * len(rows) + 1.4), layout="constrained")
        axes = picture.subplots()
        for y, row in enumerate(rows):
            low, high = row["tokens_per_s"] / 1e3, row["tokens_per_s at peak rates"] / 1e3
            axes.plot([low, high], [y, y], color="tab:blue", linewidth=6, alpha=0.35, solid_capstyle="butt")
            axes.plot(
                low, y, "|", color="tab:blue", markersize=12, label="predicted, to peak rates" if y == 0 else None
            )
            if read := row.get("estimated k tokens/s"):
                axes.plot(
                    read,
                    [y + 0.28] * 2,
                    color="tab:orange",
                    linewidth=2,
                    label="estimated by a reader" if y == 0 else None,
                )
            gate = row.get("bars", {}).get("gate")
            if gate is not None:
                axes.plot(gate / 1e3, y, "x", color="gray", label="gate" if y == 0 else None)
            if found := row.get("measured"):
                middle, least, most = (found[name] / 1e3 for name in ("tokens_per_s", "least", "most"))
                marks = [name for name in ("unchecked", "no CUDA graphs") if name in found]
                spread = [[middle - least], [most - middle]]
                axes.errorbar(middle, y, xerr=spread, fmt="o", color="tab:red" if marks else "black")
                axes.annotate(f"  {', '.join(['measured', *marks])}", (middle, y), va="center", fontsize=8)
        axes.set_yticks(range(len(rows)), [" ".join(_name(row)[1:]).replace("`", "") for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xticks(scale := [10, 20, 50, 100, 200], map(str, scale))
        axes.minorticks_off()
        axes.set_xlabel(f"k tokens/s on one {DEVICE}")
        axes.legend(loc="lower right", fontsize=8)
        picture.draw_without_rendering()  # texts take their font from here
    return picture


def _name(row: Mapping[str, Any]) -> list[str]:
    return [row["gpu"], row["model"], row["train"], f"`{row['recipe']}`"]


def _speed(row: Mapping[str, Any], measured: bool) -> list[str]:
    rates = ("tokens_per_s", "tokens_per_s at large products' rates", "tokens_per_s at peak rates")
    bars = row.get("bars in words", ["", "", ""])
    read = " to ".join(f"{k:g}" for k in row.get("estimated k tokens/s", ()))
    return [*_name(row), *[_measured(row)] * measured, *(_k(row[name]) for name in rates), read, *bars, _passes(row)]


def _step(row: Mapping[str, Any]) -> list[str]:
    cached = row["W' cached"]
    return [
        *(*_name(row), f"{row['mfu']:.0%}", f"{row['step_ms']:,.1f}"),
        *(f"{row['ms by phase'][name]:,.1f}" if row["ms by phase"][name] else "" for name in _PHASES),
        f"{row['gib']:.1f}" + ("" if row["recompute"] == "none" else f", recompute {row['recompute']}"),
        *(f"{row[name]:,}" for name in ("kernels", "kernels unfused")),
        f"{cached['adds_gib']:+.1f} GiB, {-cached['saves_ms']:+.1f} ms" if cached["adds_gib"] else "",
    ]


def _measured(row: Mapping[str, Any]) -> str:
    if "measured" not in row:
        return "not measured"
    found = row["measured"]
    marks = [f"**{name.upper()}**" for name in ("unchecked", "no CUDA graphs") if name in found]
    least, most = (f"{found[name] / 1e3:.1f}" for name in ("least", "most"))
    return " ".join([f"{found['tokens_per_s'] / 1e3:.1f} ({least} to {most})", *marks])


def _k(tokens_per_s: float | None) -> str:
    return "does not fit" if tokens_per_s is None else f"{tokens_per_s / 1e3:.1f}"


def _passes(row: Mapping[str, Any]) -> str:
    """Return the highest bar that the prediction passes."""
    if "bars" not in row or row["tokens_per_s"] is None:
        return ""
    passed = [name for name, bar in row["bars"].items() if bar is not None and row["tokens_per_s"] >= bar]
    return passed[-1] if passed else "none"


def _assumptions(data: Mapping[str, Any]) -> list[str]:
    head = (
        "Every figure is a prediction: milliseconds of forward, of what backward computes again, of backward, of the optimizer and "
        "of the gaps between kernels; MFU of the dense bf16 peak whatever the recipe; with W' cached, the transpose of frozen "
        "weights is kept. Assumed are:"
    )
    return [head, ""] + [f"- {k}: {v}" for k, v in data["assumed"].items()]
