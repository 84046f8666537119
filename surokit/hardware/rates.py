"""Find the rates that a GPU is assumed to reach: those that a calibration measured where there is one, else its datasheet's.

Fused attention reaches less than products do, by a published share of the dense peak: FlashAttention-2, which torch takes, 35 % on
an H100 and FlashAttention-3 up to 75 % (arXiv 2407.08608), FlashAttention-2 50 to 73 % on an A100 (arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass

from surokit.formats import TENSOR_CORES, Kind
from surokit.hardware.gpus import Gpu

#: Share of the dense BF16 peak that fused attention reaches, from a compute capability on: 35 % where it does not use the tensor
#: cores' own instructions (Hopper; data-center Blackwell is taken alike), the middle of 50 to 73 % where it does (Ampere, Ada, and
#: GeForce Blackwell, which has Ampere's instructions). Without a capability attention is taken as fast as products.
ATTENTION_SHARE: tuple[tuple[tuple[int, int], float], ...] = (((12, 0), 0.6), ((9, 0), 0.35), ((8, 0), 0.6))
#: What newer kernels reach where they use those instructions.
NEWER_SHARE = 0.75
#: Microseconds that a GPU waits from one kernel to the next; assumed.
GAP_US = 1.0
#: Microseconds of the host for a launch where nobody measured it: about the least that CUDA takes.
LAUNCH_US = 2.0
#: How many times the memory's bandwidth a cache has at least, where half of it holds what a kernel reads and writes; assumed.
L2_SPEED = 2.0


@dataclass(frozen=True)
class Rates:
    """Rates holds the rates that a GPU is assumed to reach: TFLOPS of products by kind and of attention, TB/s, and microseconds a
    launch (None: unknown).

    `measured` says whether products and bandwidth were calibrated; `ahead` whether the host launches ahead of the device, as a
    GPU's does; `how` says in words where they come from. With `graphs` a launch costs the host nothing. `gap_us` is the time that
    the device waits from one kernel to the next. `l2_mib` is the cache before the memory, 0 where it is not known;
    `launch_assumed` says that nobody measured a launch.
    """

    products: dict[Kind | None, float]
    attention_tflops: float
    bandwidth_tb_s: float
    launch_us: float | None
    measured: bool
    how: str
    ahead: bool = True
    graphs: bool = False
    l2_mib: float = 0.0
    launch_assumed: bool = False

    def memory_ms(self, moved: float, kernels: float, *, passing: bool) -> float:
        """Return the ms that so many kernels take to move so many bytes. passing: the kernel before wrote them, so that the cache
        may hold those of a small micro-batch."""
        cached = passing and moved <= kernels * self.l2_mib * 2**19
        return moved / self.bandwidth_tb_s / 1e9 / (L2_SPEED if cached else 1.0)

    @property
    def gap_us(self) -> float:
        return GAP_US if self.ahead else 0.0


def rates_of(gpu: Gpu, dtype: str = "bf16", attention_kernel: str = "sdpa") -> Rates | str:
    """Return the rates that `gpu` is assumed to reach in a model of `dtype`, or a sentence that says which figure is missing.

    attention_kernel: torch's own, or "flash3" for newer ones.
    """
    c = gpu.ceilings
    full = dtype in ("fp32", "float32")
    measured = {"BF16": "bf16_tflops", "FP32": "fp32_tflops"}.get("FP32" if full else gpu.plain)
    plain = getattr(c, measured) if c and measured else None
    bandwidth = c.bandwidth_tb_s if c else None
    reached = [name for name, rate in (("products", plain), ("bandwidth", bandwidth)) if rate is not None]
    plain = plain or (gpu.fp32_tflops if full else gpu.plain_tflops)
    bandwidth = bandwidth or gpu.bandwidth_tb_s
    if plain is None or bandwidth is None:
        if gpu.device == "cpu":
            return f"How fast {gpu.name} computes and copies was not measured: plan with gpu=sk.calibrate('cpu')."
        if plain is None and full:
            return f"The float32 rate of {gpu.name} is not known: calibrate it with sk.calibrate()."
        field, what = "bandwidth_tb_s", "memory bandwidth"
        if plain is None:
            field, what = f"{gpu.plain.lower()}_tflops", f"{gpu.plain} rate"
        return f"The {what} of {gpu.name} is not known: give Gpu({gpu.name!r}, {field}=...) or calibrate it with sk.calibrate()."
    how = f"rates of the datasheet of {gpu.name}, which few runs reach"
    if c and reached:
        rest = "" if len(reached) == 2 else f", the rest of the datasheet of {gpu.name}, which few runs reach"
        how = f"{reached[0] if rest else 'rates'} measured on {c.measured}{rest}"
    products: dict[Kind | None, float] = {None: plain}
    assumed: dict[str, None] = {}
    for kind, cores in TENSOR_CORES.items():
        own, guessed = _own_rate(gpu, kind)
        products[kind] = own or plain
        assumed.update({f"{cores.bits}-bit": None} if guessed else {})
    if assumed:
        how += f"; {' and '.join(assumed)} products, not measured, at their peak times the share of its peak that bf16 reached"
    attention = _attention_rate(gpu, plain, full, newer=attention_kernel == "flash3")
    if attention < plain:
        how += (
            f"; attention at the {attention / (gpu.plain_tflops or attention):.0%} of the peak that is published for it"
        )
    return Rates(
        products=products,
        attention_tflops=attention,
        bandwidth_tb_s=bandwidth,
        launch_us=c.launch_us if c and c.launch_us is not None else LAUNCH_US if gpu.device != "cpu" else None,
        measured=len(reached) == 2,
        how=how,
        ahead=gpu.device != "cpu",
        # a measured bandwidth is that of the memory, and what a cache adds was not measured
        l2_mib=0.0 if c and c.bandwidth_tb_s else gpu.l2_mib or 0.0,
        launch_assumed=gpu.device != "cpu" and (c is None or c.launch_us is None),
    )


def _own_rate(gpu: Gpu, kind: Kind) -> tuple[float | None, bool]:
    """Return (TFLOPS of products of a kind, True if they are their peak times the share of its peak that bf16 was measured at).

    A whole peak beside a measured rate would make a format look faster than it can be.
    """
    if not gpu.multiplies(kind):
        return None, False
    c = gpu.ceilings
    if c and (found := c.fp4_tflops if TENSOR_CORES[kind].bits == 4 else c.fp8_tflops):
        return found, False
    peak, _ = gpu.peak(kind)
    if c is None or c.bf16_tflops is None or gpu.bf16_tflops is None or peak is None:
        return peak, False
    return peak * c.bf16_tflops / gpu.bf16_tflops, peak != gpu.bf16_tflops


def _attention_rate(gpu: Gpu, plain: float, full: bool, newer: bool) -> float:
    if full or gpu.capability is None or gpu.plain_tflops is None:
        return plain
    share = next((share for first, share in ATTENTION_SHARE if gpu.capability >= first), 1.0)
    if newer and (9, 0) <= gpu.capability < (12, 0):
        share = NEWER_SHARE
    return min(plain, share * gpu.plain_tflops)
