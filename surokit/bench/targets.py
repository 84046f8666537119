"""List the bars of speed on one H200, as data. Nothing here was measured by this package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

DEVICE = "H200"
MEANING = (
    f"Bars, in tokens/s on one {DEVICE}: the gate is the least that is asked for, the target what is aimed at, the stretch what a "
    "roofline allows; `0.9 x BF16` is a share of what the same model makes in BF16."
)
SOURCE = (
    "Gates at 0.6B: 2.5 x what Surogate's docs/reference/benchmarks.md gives for Unsloth BF16 on an H200; the others: Surogate's "
    "own figures on an H100. Targets and stretch goals: a roofline at 790 TFLOPS bf16 and 4.3 TB/s. Steps of 2 x 2048 x 4 tokens, "
    "LoRA of rank 16; all weights at 8B with bfloat16 states."
)


@dataclass(frozen=True)
class Target:
    """A Target is one row: k tokens/s, or shares of the same model's own bfloat16 where `share` says so: of the gate, or of
    all three."""

    model: str
    train: Literal["lora", "full"]
    recipe: str
    gate: float
    target: float
    stretch: float
    share: Literal["", "gate", "all"] = ""

    def bars(self, own_bf16: float | None) -> tuple[float | None, ...]:
        """Return (gate, target, stretch) in tokens/s; None where one is a share and bfloat16's tokens/s are not known."""
        shares = {"": (False,) * 3, "gate": (True, False, False), "all": (True,) * 3}[self.share]
        return tuple(
            1e3 * bar if not share else None if own_bf16 is None else bar * own_bf16
            for bar, share in zip((self.gate, self.target, self.stretch), shares)
        )

    def words(self) -> tuple[str, ...]:
        """Return the three bars as a table shows them."""
        absolute = [f"{bar:g}k" for bar in (self.gate, self.target, self.stretch)]
        shares = [f"{bar:g} x BF16" for bar in (self.gate, self.target, self.stretch)]
        return tuple({"": absolute, "gate": [shares[0], *absolute[1:]], "all": shares}[self.share])


def _targets() -> Iterator[Target]:
    yield Target("0.6b", "lora", "bf16", 54, 90, 115)
    yield Target("0.6b", "lora", "fp8", 1.0, 95, 128, "gate")
    yield Target("0.6b", "lora", "qfp8", 0.9, 90, 125, "gate")
    yield Target("1.7b", "lora", "bf16", 36, 50, 60)
    yield Target("1.7b", "lora", "fp8", 38, 56, 72)
    yield Target("1.7b", "lora", "qfp8", 36, 54, 70)
    yield Target("4b", "lora", "bf16", 17, 22, 27)
    yield Target("4b", "lora", "fp8", 20, 27, 36)
    yield Target("4b", "lora", "qfp8", 20, 27, 36)
    yield Target("8b", "lora", "bf16", 10.2, 14, 16.4)
    yield Target("8b", "lora", "fp8", 11.6, 18, 22.8)
    yield Target("8b", "lora", "qfp8", 11.6, 18, 22.8)
    yield Target("0.6b", "full", "bf16", 70, 100, 115)
    yield Target("0.6b", "full", "fp8", 70, 110, 125)
    yield Target("8b", "full", "bf16", 8, 10.5, 12.5)
    yield Target("8b", "full", "fp8", 9.5, 14, 17)
    for model in ("0.6b", "8b"):
        for recipe in ("qfp4", "qnf4"):
            yield Target(model, "lora", recipe, 0.5, 0.8, 1.0, "all")


TARGETS = tuple(_targets())
#: Another estimate, of one H200: (least, most) k tokens/s by (model, what trains, recipe).
ESTIMATES: dict[tuple[str, str, str], tuple[float, float]] = {
    ("0.6b", "lora", "bf16"): (85, 105),
    ("0.6b", "lora", "fp8"): (80, 105),
    ("0.6b", "lora", "qfp8"): (80, 105),
    ("8b", "lora", "bf16"): (14, 16.5),
    ("8b", "lora", "fp8"): (17, 20),
    ("8b", "lora", "qfp8"): (17, 20),
}
ESTIMATED = (
    "An engineer read every CUDA path and estimated the step kernel by kernel, with CUDA graphs on; nothing was run. It is of the "
    "code before the loss took 2,048 rows at a time, FP8's siblings became one product, and the scales of blocks were written as "
    "products read them. Where recording a step was refused, as the rule of that time would have done for FP8 and QFP8, it said "
    "40k to 55k at 0.6B."
)
#: Times Unsloth's bfloat16 in the same run at equal settings, mean over the models: (bar, goal).
OVER_UNSLOTH = {"bf16": (1.4, 1.7), "fp8": (1.6, 2.1), "qfp8": (1.5, 2.0)}
LEAST_OF_BF16 = {"qfp8": 0.9}
MOST_IDLE, MOST_DRIFT = 0.02, 0.03
