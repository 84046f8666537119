"""List the kernels of a linear layer's step: its products, the quantization of their operands, the decoding of a stored weight.

    y_TN = x_TK w_NK'     dx_TK = dy_TN w_NK     dw_NK = dy_TN' x_TK

A kernel is its FLOPs, the least bytes that it can move, and how often it is launched. What is quantized where, and in how many
passes over an operand, is that of surokit/nn/linear_gemms.py and of the kernels behind it:

- a scale that is known before (delayed scaling) or that one tile decides takes one read of the operand; a scale of the whole
  tensor two; scales of rows and columns two, where both orientations are wanted;
- an operand whose codes are the same in both orientations is quantized once. Where the GPU computes the product itself, the kernel
  that makes 8-bit codes writes those of the transpose too; else, and in 4 bits, they are transposed for the product that contracts
  the other dimension;
- x is quantized in forward, in both orientations where the weight trains; dy in backward, likewise; the weight in both passes;
- a product that the GPU does not compute itself is emulated: both operands are decoded into 16 bits and multiplied there;
- a stored weight is decoded before each product, unless the product takes its codes as they are.

`linear_times` says by planning, never by measuring, whether a format pays for a layer. T tokens, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from surokit.formats import Kind
from surokit.hardware.gpus import Gpu
from surokit.hardware.rates import GAP_US

Pass = Literal["forward", "recompute", "backward", "optimizer"]


@dataclass(frozen=True)
class Kernel:
    """A Kernel is one kind of kernel: model FLOPs and bytes of one launch or group of launches, and the kind of its product.

    `part` is forward, grad_input or grad_weight for a product; quantize, turn (transpose codes) or decode for a kernel around it,
    which works on the operand `role`: x, w or dy ("" where both are meant).
    """

    step: Pass
    part: str
    flop: float
    bytes: float
    launches: float = 1
    kind: Kind | None = None
    role: str = ""


def linear_kernels(
    recipe: Any, n: int, k: int, tokens: float, *, trains: bool, gpu: Gpu, width: int = 2, stored: bool = False
) -> Iterator[Kernel]:
    """Yield the kernels of one layer for `tokens` rows of x: forward, gradient of the input, and of the weight where it `trains`.

    `recipe` None computes in the model's dtype of `width` bytes; `stored` takes the weight as `recipe.storage` holds it.
    """
    layer = _Layer(recipe, n, k, tokens, trains, gpu, width, stored)
    yield from layer.forward()
    yield from layer.backward()


def linear_seconds(recipe: Any, n: int, k: int, tokens: float, *, trains: bool, gpu: Gpu) -> float:
    """Return the seconds of a layer's kernels on `gpu`: the sum of `linear_times` without what is between kernels."""
    return sum(linear_times(recipe, n, k, tokens, trains=trains, gpu=gpu, gap_us=0.0).values())


def check_peak(gpu: Gpu) -> Gpu:
    """Return the GPU. Raises ValueError where its peak is not known."""
    if gpu.plain_tflops is None:
        raise ValueError(f"Nobody vouched for a peak of {gpu.name}: give Gpu({gpu.name!r}, bf16_tflops=...).")
    return gpu


PARTS = ("forward", "grad_input", "grad_weight", "quantize")


def linear_times(
    recipe: Any,
    n: int,
    k: int,
    tokens: float,
    *,
    trains: bool,
    gpu: Gpu,
    stored: bool = False,
    gap_us: float = GAP_US,
) -> dict[str, float]:
    """Return the seconds of the `PARTS` of a layer's step on `gpu`: its products, and all that is around them.

    A kernel takes the larger of FLOPs over its dense peak and bytes over its bandwidth, and `gap_us` a launch. The fusion of
    quantization into other kernels is left out. stored: as for `linear_kernels`. Raises ValueError where the GPU's peak is not
    known.
    """
    check_peak(gpu)
    rate = (gpu.bandwidth_tb_s or float("inf")) * 1e12
    times = dict.fromkeys(PARTS, 0.0)
    for kernel in linear_kernels(recipe, n, k, tokens, trains=trains, gpu=gpu, stored=stored):
        tflops, _ = gpu.peak(kernel.kind)
        assert tflops is not None, "a GPU with a peak of plain products has one for every product"
        part = kernel.part if kernel.part in PARTS else "quantize"
        times[part] += max(kernel.flop / (tflops * 1e12), kernel.bytes / rate) + kernel.launches * gap_us * 1e-6
    return times


@dataclass(frozen=True)
class _Layer:
    recipe: Any
    n: int
    k: int
    tokens: float
    trains: bool
    gpu: Gpu
    width: int
    stored: bool

    def elements(self, role: str) -> float:
        return {"x": self.tokens * self.k, "w": float(self.n * self.k), "dy": self.tokens * self.n}[role]

    def forward(self) -> Iterator[Kernel]:
        gemm = getattr(self.recipe, "forward", None)
        a, b = getattr(gemm, "a", None), getattr(gemm, "b", None)
        x_t = self._gemm("grad_weight").b if self.trains and self._gemm("grad_weight") else None
        yield from self._both_ways("forward", "x", a, x_t)
        yield from self._weight("forward", b, transposed=False)
        yield from self._product("forward", "forward", gemm, ("x", "w"), self.tokens * self.n)

    def backward(self) -> Iterator[Kernel]:
        into_x, into_w = self._gemm("grad_input"), self._gemm("grad_weight")
        a, a_t = getattr(into_x, "a", None), getattr(into_w, "a", None)
        yield from self._both_ways("backward", "dy", a, a_t)
        yield from self._weight("backward", getattr(into_x, "b", None), transposed=True)
        yield from self._product("backward", "grad_input", into_x, ("dy", "w"), self.tokens * self.k)
        if self.trains:
            yield from self._product("backward", "grad_weight", into_w, ("dy", "x"), float(self.n * self.k))

    def _gemm(self, name: str) -> Any:
        return getattr(self.recipe, name, None)

    def _native(self, gemm: Any) -> bool:
        return self.gpu.multiplies(getattr(gemm, "kind", None))

    def _product(self, step: Pass, part: str, gemm: Any, roles: tuple[str, str], out: float) -> Iterator[Kernel]:
        native = self._native(gemm)
        operands = tuple(zip(roles, (getattr(gemm, "a", None), getattr(gemm, "b", None))))
        if not native:
            decoded = sum(self.elements(role) * (q.bits / 8 + self.width) for role, q in operands if q)
            if decoded:
                yield Kernel(step, "decode", 0.0, decoded, sum(q is not None for _, q in operands))
        read = sum(self.elements(role) * (q.bits / 8 if native and q else self.width) for role, q in operands)
        flop = 2.0 * self.n * self.k * self.tokens
        yield Kernel(step, part, flop, read + out * self.width, kind=gemm.kind if native else None)

    def _both_ways(self, step: Pass, role: str, q: Any, q_t: Any) -> Iterator[Kernel]:
        """Yield the kernels that quantize an operand for one product and, where the weight trains, its transpose for another."""
        size, same = self.elements(role), q is not None and q == q_t
        in_rows = same and self._in_rows(q, "grad_weight")
        if self.trains and same and (q.both_in_one_pass or in_rows):
            yield quantize(step, role, q, size, self.width, ways=2)
            return
        if q is not None:
            yield quantize(step, role, q, size, self.width)
        if self.trains and q_t is not None:
            if same and q_t.transposable:
                yield turn(step, role, q_t, size)
            else:
                yield quantize(step, role, q_t, size, self.width)

    def _in_rows(self, q: Any, product: str) -> bool:
        """True if the kernel that makes codes for this product writes those of the transpose too."""
        return q.transposable and not q.packed and self._native(self._gemm(product))

    def _weight(self, step: Pass, q: Any, *, transposed: bool) -> Iterator[Kernel]:
        size = self.elements("w")
        storage = self.recipe.storage if self.stored else None
        if storage is not None:
            as_stored = q is not None and storage.same_codes(q) and (not transposed or storage.transposable)
            if as_stored:
                if transposed:
                    yield turn(step, "w", storage, size)
                return
            kept = self.recipe.keeps_decoded and not self.recipe.takes_codes(storage)
            if not kept or (step != "backward" and self.gpu.device != "cpu"):
                yield Kernel(step, "decode", 0.0, size * (storage.bits / 8 + self.width), role="w")
        if q is not None:
            yield quantize(step, "w", q, size, self.width)
            if transposed and q.transposable and (storage is not None or not self._in_rows(q, "grad_input")):
                yield turn(step, "w", q, size)


def quantize(step: Pass, role: str, q: Any, elements: float, width: int, ways: int = 1) -> Kernel:
    """Return the kernel that makes one operand's codes and scales, in `ways` orientations."""
    reads = _reads(q, ways)
    # a delayed scale's first launch reads the operand only where no amax is in force yet (kernels/triton/delayed.py)
    launches = 2 if q.delayed else reads + _clears(q, ways)
    return Kernel(step, "quantize", 0.0, elements * (reads * width + ways * q.bits / 8), launches, role=role)


def _reads(q: Any, ways: int) -> int:
    """Return the number of passes over an operand: 2 where a scale for more than a program's tile must be known first."""
    match type(q.scaling).__name__:  # by name: quantizers stand above this part
        case "PerTensor":
            return 1 if q.delayed else 2
        case "NV":
            return 2
        case "PerRow":
            return ways
        case _:
            return 1


def _clears(q: Any, ways: int) -> int:
    """Return the number of launches that clear the largest magnitudes of a tensor, or of columns, before many programs raise
    them."""
    kind = type(q.scaling).__name__
    return int(kind == "PerTensor" or (kind == "PerRow" and ways == 2))


def turn(step: Pass, role: str, q: Any, elements: float) -> Kernel:
    """Return the kernel that transposes codes, which reads and writes them once, in their own width."""
    return Kernel(step, "turn", 0.0, elements * 2 * q.format.bits / 8, role=role)
