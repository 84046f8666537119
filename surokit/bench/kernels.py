"""Measure each kernel beside its bound: bytes over time against a copy, products against bfloat16's.

On a CUDA device every operation of `surokit.kernels` and every fused Triton kernel is timed by the device's own events, and the
products of tensor cores with and without the quantization of one operand. Without one, the reference quantizers are timed, FP8
with current scaling beside torchao's.

Kernels take turns: a round times each once, so a ratio is taken within its round. Before a timing on a GPU two passes over a
large buffer push the operands out of the L2 cache and keep the device busy until the host has launched the kernel. A kernel
that does not give the reference's result gets no speed.

Bytes are the least that an operation can move: what it reads and writes once, and x twice where a scale for the whole tensor
(or for its columns) has to be known before the first code is written.

M rows, K columns, n = M K elements; T tokens, N output features.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from surokit.bench.result import markdown
from surokit.statistics import spread
from surokit.units import three_digits

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surokit.quantized import Quantized
    from surokit.quantizer import Quantizer

BANDWIDTH_GATE = 0.8  # of a copy's, for quantizers
PRODUCT_GATE = 1.25  # x bfloat16 at 4096^3 on Hopper, quantization of one operand included
TORCHAO_GATE = 1.5  # x torchao's time, FP8 with current scaling on a CPU

# tokens, in features, out features: a cube, then the projections of Llama-3-8B
PRODUCTS = [(4096, 4096, 4096), (8192, 4096, 6144), (8192, 4096, 28672), (8192, 14336, 4096)]
COPY, BF16, TORCHAO = "copy", "bf16", "torchao"


@dataclass
class Kernel:
    """A Kernel is a call to time. `wrong()` says how far its result is from the reference's: 0 bit for bit, else relative."""

    name: str
    call: Callable[[], Any]
    wrong: Callable[[], float] = lambda: 0.0
    allowed: float = 0.0
    backend: str = "torch"
    nbytes: float = 0.0
    flops: float = 0.0
    against: str = ""  # the name of the kernel that it is compared with
    gate: float = 0.0  # least ratio (to a copy, to bfloat16), or most (of torchao's time)
    op: str = ""  # its name among the operations


def run(rounds: int = 20, shape: tuple[int, int] | None = None, only: str = "") -> dict[str, Any]:
    """Time the kernels of the device at hand whose name contains `only`, and return the raw result."""
    import torch

    cuda = torch.cuda.is_available()
    shape = shape or ((16384, 8192) if cuda else (4096, 4096))
    notes: list[str] = []
    if cuda:
        device = torch.device("cuda", torch.cuda.current_device())
        hopper = torch.cuda.get_device_capability(device) == (9, 0)
        kernels = [*operations(shape, device), *fused(shape, device), *products(PRODUCTS, device, hopper)]
    else:
        device = torch.device("cpu")
        kernels = list(cpu(shape, notes))
    kernels = [k for k in kernels if only in k.name or k.name in _baselines(kernels, only)]
    if not kernels:
        raise ValueError(f"No kernel has {only!r} in its name: leave --only out to see all names.")
    rows = measured(kernels, rounds, device)
    settings = {"x": f"{shape[0]} x {shape[1]} bf16", "rounds": rounds}
    if not cuda:
        settings["threads"] = torch.get_num_threads()
    return result("kernels: " + ("CUDA" if cuda else "quantizers on a CPU"), settings, rows, notes)


def result(name: str, settings: Mapping[str, Any], rows: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    from surokit.environment import environment

    return {
        "benchmark": name,
        "settings": dict(settings),
        "environment": environment(),
        "kernels": rows,
        "notes": notes,
    }


def _baselines(kernels: Sequence[Kernel], only: str) -> set[str]:
    return {k.against for k in kernels if only in k.name}


# -- measuring


def measured(kernels: Sequence[Kernel], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Return one row a kernel: right or not, and the seconds of its turns."""
    rows = []
    for kernel in kernels:
        row: dict[str, Any] = {
            "name": kernel.name,
            "backend": kernel.backend,
            "bytes": kernel.nbytes,
            "flops": kernel.flops,
            "against": kernel.against,
            "gate": kernel.gate,
        }
        try:  # one that cannot be built or does not fit is a row of the table, and not the end of the others
            row["error"] = kernel.wrong()
            kernel.call()
            row["right"] = row["error"] <= kernel.allowed
        except Exception as problem:
            row |= {"error": None, "right": False, "failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}
        row["seconds"] = []
        rows.append(row)
        print(f"{'ok' if row['right'] else 'WRONG':5} {kernel.name}", file=sys.stderr)
    running = [(kernel, row) for kernel, row in zip(kernels, rows) if row["right"]]
    clock = _clock(device)
    for turn in range(rounds + 2):
        for kernel, row in running:
            if "failed" in row:
                continue
            try:
                seconds = clock(kernel.call)
            except Exception as problem:  # what was timed before it is kept, of all of them
                row["failed"] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                continue
            if turn >= 2:  # two rounds of warm-up
                row["seconds"].append(seconds)
    return rows


def _clock(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """Return a function that calls another and returns its seconds."""
    import torch

    def on_the_host(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    if device.type != "cuda":
        return on_the_host
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(max(4 * l2, 2**29), dtype=torch.int8, device=device)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def on_the_device(call: Callable[[], Any]) -> float:
        buffer.zero_()
        buffer.zero_()
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    return on_the_device


def _parts(out: Any) -> Iterator[Tensor]:
    """Yield all tensors of a result."""
    import torch

    if isinstance(out, torch.Tensor):
        yield out
    elif isinstance(out, tuple | list):
        for part in out:
            yield from _parts(part)


def bits(ours: Callable[[], Any], theirs: Callable[[], Any]) -> Callable[[], float]:
    """Compare bit by bit: 0 where both give the same bytes, else the share of elements that differ."""

    def wrong() -> float:
        import torch

        worst = 0.0
        pairs = list(zip(_parts(ours()), _parts(theirs()), strict=True))
        for a, b in pairs:
            if a.shape != b.shape or a.dtype != b.dtype:
                return math.inf
            a, b = (t.contiguous().view(torch.uint8) for t in (a, b))
            worst = max(worst, float((a != b).float().mean()))
        return worst if pairs else math.inf

    return wrong


def relative(ours: Callable[[], Any], theirs: Callable[[], Any]) -> Callable[[], float]:
    """Compare by |ours - theirs| / |theirs|, the largest over the tensors of a result."""

    def wrong() -> float:
        pairs = list(zip(_parts(ours()), _parts(theirs()), strict=True))
        errors = [float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs]
        return max(errors) if errors and all(e == e for e in errors) else math.inf

    return wrong


def _compared(ours: Callable[[Any], Any], theirs: Callable[[Any], Any], make: Callable[[], Any]) -> float:
    """Return how far two functions that work in place are apart, each on a state of its own."""
    return relative(ours(make()), theirs(make()))()


# -- the kernels


def _gaussian(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).bfloat16()


def _copy(x: Tensor) -> Kernel:
    import torch

    y = torch.empty_like(x)
    return Kernel(COPY, lambda: y.copy_(x), bits(lambda: y.copy_(x), lambda: x), nbytes=2 * x.nbytes)


def operations(shape: tuple[int, int], device: torch.device) -> Iterator[Kernel]:
    """Yield every operation of `surokit.kernels`, several ways where it has several."""
    import torch

    from surokit.kernels.ops import OPERATIONS, serving

    M, K = shape
    n = M * K
    x = _gaussian(M, K, device=device)
    amax = x.abs().amax().float().view(1, 1)
    key = torch.tensor([12345, -678], dtype=torch.int32, device=device)
    yield _copy(x)

    def kernel(op: str, how: str, nbytes: float, *arguments: Any, **options: Any) -> Kernel:
        operation = OPERATIONS[op]
        backend = serving(operation.reference, device)[0]
        ours, theirs = getattr(torch.ops.surokit, op), operation.definition
        return Kernel(
            f"{op} {how}".strip(),
            lambda: ours(*arguments, **options),
            bits(lambda: ours(*arguments, **options), lambda: theirs(*arguments, **options)),
            backend=backend,
            nbytes=nbytes,
            against=COPY,
            gate=BANDWIDTH_GATE if op.startswith("quantize") and backend in ("cuda", "triton") else 0.0,
            op=op,
        )

    yield kernel("amax", "per tensor", 2 * n, x, 0, 0)
    yield kernel("amax", "per row", 2 * n, x, 1, 0)
    yield kernel("quantize", "e4m3 per tensor", 5 * n, x, "e4m3", 0, 0, False)
    yield kernel("quantize", "e5m2 per tensor, amax given", 3 * n, x, "e5m2", 0, 0, False, amax)
    yield kernel("quantize", "e4m3 per row", 3 * n, x, "e4m3", 1, 0, True, floor=1e-12)
    yield kernel("quantize", "e4m3 per row, stochastic", 3 * n, x, "e4m3", 1, 0, True, key=key)
    yield kernel("quantize", "e4m3 1x128", 3 * n, x, "e4m3", 1, 128, True)
    yield kernel("quantize", "e4m3 128x128", 3 * n, x, "e4m3", 128, 128, True)
    yield kernel("quantize", "e4m3 per tensor, of the transpose", 5 * n, x.t(), "e4m3", 0, 0, False)
    yield kernel("quantize_both", "e4m3 per row", 6 * n, x, "e4m3", 1, 0, True)
    yield kernel("quantize_both", "e4m3 1x128", 4 * n, x, "e4m3", 1, 128, True)
    codes, scales = torch.ops.surokit.quantize(x, "e4m3", 128, 128, True)
    yield kernel("dequantize", "e4m3 128x128", 3 * n, codes, scales, 128, 128, torch.bfloat16)
    yield kernel("values", "e4m3", 3 * n, codes)
    yield kernel("transpose_fp8", "", 2 * n, codes)

    for format, size in (("e4m3", 1.0), ("e2m1", 0.5)):
        size += 1 / 32
        rule = "rceil" if format == "e4m3" else "even"
        yield kernel("quantize_mx", format, (2 + size) * n, x, format, rule)
        yield kernel("quantize_mx", f"{format}, stochastic", (2 + size) * n, x, format, rule, key)
        yield kernel("quantize_mx_both", format, (2 + 2 * size) * n, x, format, rule)
        mx = torch.ops.surokit.quantize_mx(x, format, rule)
        yield kernel("dequantize_mx", format, (2 + size) * n, *mx, K, format, torch.bfloat16)

    size = 0.5 + 1 / 16
    yield kernel("quantize_nv", "1x16", (4 + size) * n, x, 1)
    yield kernel("quantize_nv", "1x16, amax given", (2 + size) * n, x, 1, None, amax)
    yield kernel("quantize_nv", "16x16", (4.5 + 1 / 256) * n, x, 16)
    yield kernel("quantize_nv", "1x16, four over six", (4 + size) * n, x, 1, "mse")
    yield kernel("quantize_nv", "1x16, stochastic", (4 + size) * n, x, 1, key=key)
    yield kernel("quantize_nv_rotated", "1x16", (4 + size) * n, x, 16)
    yield kernel("quantize_nv_eden", "1x16", (4 + size) * n, x, 128, key, key)
    nv = torch.ops.surokit.quantize_nv(x, 1)
    yield kernel("dequantize_nv", "1x16", (2 + size) * n, *nv, 1, K, torch.bfloat16)
    yield kernel("factors_nv", "1x16", (2 + size) * n, nv[0], nv[1], 1, K)
    yield kernel("transpose_fp4", "", n, nv[0], K)

    size = 0.5 + 4 / 64
    yield kernel("quantize_nf4", "", (2 + size) * n, x)
    codes, absmax = torch.ops.surokit.quantize_nf4(x)
    yield kernel("dequantize_nf4", "", (2 + size) * n, codes, absmax, [], M, K, torch.bfloat16)
    for block in (16, 32):
        yield kernel("rotate", f"{block}", 4 * n, x, block)
    yield kernel("rotate_drawn", "128", 4 * n, x, 128, key)

    # -- products: emulated, and with frozen weights that are decoded on the way
    N = C = min(M, K, 4096)
    w, one = x[:N, :C].contiguous(), torch.ones(1, 1, device=device)
    stored: list[tuple[str, list[Any], float]] = [
        ("fp8_mm", [*torch.ops.surokit.quantize(w, "e4m3", 128, 128, True), 128, 128], 1.0),
        ("nv_mm", [*torch.ops.surokit.quantize_nv(w, 1), 1, C], 0.5 + 1 / 16),
        ("nf4_mm", [*torch.ops.surokit.quantize_nf4(w), [], N, C], 0.5 + 4 / 64),
    ]
    for T in (min(M, 4096), 16):
        tokens, size_of = x[-T:, :C].contiguous(), _size(T, C, N)
        baseline = Kernel(f"{BF16} {size_of} (frozen weight)", partial(torch.mm, tokens, w.t()), flops=2.0 * T * C * N)
        yield baseline
        made = [kernel("emulated_mm", size_of, 0.0, tokens, one, w, one, torch.bfloat16)]
        for op, arguments, size in stored:
            product = kernel(op, size_of, size * N * C, tokens, *arguments, False)
            whole = partial(getattr(torch.ops.surokit, op), tokens, *arguments, False)
            product.wrong = relative(whole, partial(OPERATIONS[op].definition, tokens, *arguments, False))
            product.allowed = 1e-2
            made.append(product)
        for product in made:
            product.flops, product.against = baseline.flops, baseline.name
            yield product


def fused(shape: tuple[int, int], device: torch.device) -> Iterator[Kernel]:
    """Yield the Triton kernels that do more than one thing in a pass, and those of training."""
    import torch

    from surokit.formats import E4M3
    from surokit.kernels.reference import adamw, adamw8bit, loss, norm, quantize, rope, swiglu
    from surokit.kernels.triton import adamw as t_adamw
    from surokit.kernels.triton import adamw8bit as t_adamw8bit
    from surokit.kernels.triton import loss as t_loss
    from surokit.kernels.triton import norm as t_norm
    from surokit.kernels.triton import rope as t_rope
    from surokit.kernels.triton import swiglu as t_swiglu

    M, K = shape
    n = M * K
    x, dy = _gaussian(M, K, device=device), _gaussian(M, K, device=device, seed=1)
    w = 1 + _gaussian(K, device=device, seed=2) / 4

    def kernel(
        name: str, nbytes: float, ours: Callable[[], Any], theirs: Callable[[], Any] | None = None, **more: Any
    ) -> Kernel:
        wrong = relative(ours, theirs) if theirs else None
        more = {"wrong": wrong, "allowed": 1e-2, "backend": "triton", "against": COPY, **more}
        return Kernel(name, ours, nbytes=nbytes, **more)

    # fused with a quantizer: bit for bit what the kernel's own two steps give, so that only its fusing is judged
    def two_steps(forward: Callable[[], Any], scaling: dict[str, Any]) -> Any:
        y = next(_parts(forward()))
        if "in_force" in scaling:
            return quantize.quantize(y, E4M3, amax=scaling["in_force"].view(1, 1))
        return quantize.quantize(y, E4M3, 1, scaling.get("columns", 0), pow2=True)

    yield kernel("norm", 4 * n, partial(t_norm.forward, x, w, 1e-5), partial(norm.forward, x, w, 1e-5))
    in_force, opened = torch.full((2, 1), 4.0, device=device).unbind()
    scalings: dict[str, dict[str, Any]] = {
        "per row": {"pow2": True},
        "1x128": {"columns": 128, "pow2": True},
        "delayed": {"in_force": in_force, "opened": opened, "record": True},
    }
    pairs: list[tuple[str, float, Callable[..., Any], Callable[..., Any]]] = [
        ("norm", 3, partial(t_norm.forward, x, w, 1e-5), partial(t_norm.forward_quantized, x, w, 1e-5)),
        (
            "sum + norm",
            7,
            partial(t_norm.forward, x + dy, w, 1e-5),
            partial(t_norm.forward_quantized, x, w, 1e-5, delta=dy),
        ),
        ("swiglu", 5, partial(t_swiglu.forward, x, dy), partial(t_swiglu.forward_quantized, x, dy)),
    ]
    for how, scaling in scalings.items():
        for name, size, forward, both in pairs:
            call = partial(both, **scaling)
            yield kernel(
                f"{name} + quantize {how}",
                size * n,
                call,
                wrong=bits(lambda call=call: call()[:2], partial(two_steps, forward, scaling)),  # type: ignore[misc]
                allowed=0.0,
                gate=BANDWIDTH_GATE,
            )
    r = norm.forward(x, w, 1e-5)[1]
    stream: dict[str, Any] = {"residual": x, "need_dw": False}
    forms: list[tuple[str, float, Callable[..., Any], Callable[..., Any], list[Tensor], dict[str, Any]]] = [
        ("norm, once more", 4, t_norm.recompute, norm.recompute, [x, w, r], {}),
        ("norm backward", 6, t_norm.backward, norm.backward, [dy, x, w, r], {}),
        ("norm backward + residual, frozen", 8, t_norm.backward, norm.backward, [dy, x, w, r], stream),
        ("swiglu", 6, t_swiglu.forward, swiglu.forward, [x, dy], {}),
        ("swiglu backward", 10, t_swiglu.backward, swiglu.backward, [x, x, dy], {}),
        ("swiglu backward, joint", 10, t_swiglu.backward, swiglu.backward, [x, x, dy], {"joint": True}),
    ]
    for name, size, ours, theirs, arguments, options in forms:
        yield kernel(name, size * n, partial(ours, *arguments, **options), partial(theirs, *arguments, **options))

    heads = x.view(1, M, K // 128, 128) if K % 128 == 0 else x.view(1, M, 1, K)
    angle = torch.arange(M * (heads.shape[-1] // 2), device=device).view(M, -1) % 100 / 50
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    yield kernel("rope", 4 * n, partial(t_rope.rotate, heads, cos, sin), partial(rope.rotate, heads, cos, sin))

    labels = torch.arange(min(M, 4096), device=device)
    tokens, table = x[: len(labels), : min(K, 1024)].contiguous(), dy[:, : min(K, 1024)].contiguous() / 32
    yield kernel(
        f"linear + cross-entropy {_size(len(labels), tokens.shape[1], M)}",
        0.0,
        partial(t_loss.forward, tokens, table, labels, True, True),
        partial(loss.forward, tokens, table, labels, True, True),
        against="",
        flops=6.0 * len(labels) * tokens.shape[1] * M,
    )

    # -- optimizers work in place: they are compared on copies
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}

    def moments() -> list[Tensor]:
        return [x.clone(), dy, torch.zeros_like(x), torch.zeros_like(x), torch.zeros((), device=device)]

    def moments8() -> list[Tensor]:
        codes = (torch.full(x.shape, byte, dtype=torch.uint8, device=device) for byte in (127, 0))
        scales = (torch.zeros(-(-n // 256), device=device) for _ in range(2))
        return [x.clone(), dy, *codes, *scales, torch.zeros((), device=device)]

    def step(function: Callable[..., None], state: list[Tensor]) -> Callable[[], Any]:
        def call() -> Any:
            function(*([t] for t in state), **options)
            return state[0], *state[2:]  # all but the gradient

        return call

    for name, size, make, ours, theirs in (
        ("adamw", 14.0, moments, t_adamw.adamw_, adamw.adamw_),
        ("adamw8bit", 10 + 16 / 256, moments8, t_adamw8bit.adamw8bit_, adamw8bit.adamw8bit_),
    ):
        wrong = partial(_compared, partial(step, ours), partial(step, theirs), make)
        yield kernel(name, size * n, step(ours, make()), wrong=wrong)


def products(
    sizes: Iterable[tuple[int, int, int]], device: torch.device, hopper: bool = False, emulated: bool = False
) -> Iterator[Kernel]:
    """Yield the products of tensor cores, alone and with x quantized each time; emulated products only where asked for."""
    import torch

    from surokit.formats import E2M1, E4M3
    from surokit.product import computes, product
    from surokit.quantized import quantize
    from surokit.quantizer import MX, NV, Block, PerRow, PerTensor, Quantizer

    pairs = {
        "FP8 per tensor": (Quantizer(E4M3, PerTensor()), Quantizer(E4M3, PerTensor())),
        "FP8 per row": (Quantizer(E4M3, PerRow()), Quantizer(E4M3, PerRow())),
        "FP8 blocks": (Quantizer(E4M3, Block(1, 128)), Quantizer(E4M3, Block(128, 128))),
        "MXFP8": (Quantizer(E4M3, MX()), Quantizer(E4M3, MX())),
        "NVFP4": (Quantizer(E2M1, NV()), Quantizer(E2M1, NV(16, 16))),
    }
    for T, K, N in sizes:
        x, w = _gaussian(T, K, device=device), _gaussian(N, K, device=device, seed=1)
        size, flops = _size(T, K, N), 2.0 * T * K * N
        yield Kernel(f"{BF16} {size}", partial(torch.mm, x, w.t()), flops=flops)
        for name, (q_x, q_w) in pairs.items():
            native = computes(q_x, q_w, device)
            if not native and not emulated:
                continue
            X, W = quantize(x, q_x), quantize(w, q_w)
            fast = isinstance(q_x.scaling, PerTensor)
            rows = min(T, 256)
            some = quantize(x[:rows], q_x, amax=_amax_of(x) if isinstance(q_x.scaling, PerTensor | NV) else None)
            alone = partial(product, X, W, torch.bfloat16, fast)
            whole = partial(_with_quantization, x, q_x, W, fast)
            exact = partial(_exactly, some, W)
            gate = PRODUCT_GATE if hopper and name == "FP8 per tensor" and (T, K, N) == (4096,) * 3 else 0.0
            for how, call, least in (("", alone, 0.0), (" with quantization", whole, gate)):
                yield Kernel(
                    f"{name}{how} {size}",
                    call,
                    relative(partial(_first, call, rows), exact),
                    allowed=1e-2,
                    backend="tensor cores" if native else "emulated",
                    flops=flops,
                    against=f"{BF16} {size}",
                    gate=least,
                )


def _with_quantization(x: Tensor, q: Quantizer, W: Quantized, fast: bool) -> Tensor:
    import torch

    from surokit.product import product
    from surokit.quantized import quantize

    return product(quantize(x, q), W, torch.bfloat16, fast)


def _exactly(X: Quantized, W: Quantized) -> Tensor:
    import torch

    return X.dequantize(torch.float32) @ W.dequantize(torch.float32).t()


def _first(call: Callable[[], Tensor], rows: int) -> Tensor:
    return call()[:rows]


def cpu(shape: tuple[int, int], notes: list[str]) -> Iterator[Kernel]:
    """Yield the quantizers as PyTorch and as C++ have them, and torchao's FP8 with current scaling where it is installed."""
    import torch

    from surokit.formats import E2M1, E4M3
    from surokit.kernels import serving
    from surokit.kernels.reference import mx, nf4, nvfp4, quantize

    device = torch.device("cpu")
    x = _gaussian(*shape, device=device)
    yield _copy(x)

    baseline, current = "", "FP8 per tensor"
    try:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig
    except ImportError:
        notes.append("torchao is not installed (pip install torchao), so there is nothing beside FP8 per tensor.")
    else:
        baseline = f"{TORCHAO} {current}"

        def torchao() -> Any:
            return hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig())._data

        # the scales may differ in their last bit, and a few codes with them
        same = bits(torchao, lambda: quantize.quantize(x, E4M3)[0])
        yield Kernel(baseline, torchao, same, 1e-3, TORCHAO, nbytes=5.0 * x.numel())
    K, key = x.shape[1], torch.tensor([12345, -678], dtype=torch.int32)
    quantizers: dict[str, tuple[float, Callable[..., Any], tuple[Any, ...]]] = {
        current: (5, quantize.quantize, (x, E4M3)),
        "FP8 per row": (3, quantize.quantize, (x, E4M3, 1, 0, True, None, 1e-12)),
        "FP8 1x128": (3, quantize.quantize, (x, E4M3, 1, 128, True)),
        "FP8 128x128": (3, quantize.quantize, (x, E4M3, 128, 128, True)),
        "FP8, decoded": (3, quantize.values, (quantize.quantize(x, E4M3)[0],)),
        "MXFP8": (3 + 1 / 32, mx.quantize, (x, E4M3, "rceil")),
        "MXFP8, of the transpose": (3 + 1 / 32, mx.quantize, (x.t(), E4M3, "rceil")),
        "MXFP8, decoded": (3 + 1 / 32, mx.dequantize, (*mx.quantize(x, E4M3, "rceil"), K, E4M3, torch.bfloat16)),
        "MXFP4": (2.5 + 1 / 32, mx.quantize, (x, E2M1, "even")),
        "NVFP4 1x16": (4.5 + 1 / 16, nvfp4.quantize, (x, 1)),
        "NVFP4 1x16, stochastic": (4.5 + 1 / 16, nvfp4.quantize, (x, 1, None, None, key)),
        "NVFP4 16x16": (4.5 + 1 / 256, nvfp4.quantize, (x, 16)),
        "NVFP4 1x16, four over six": (4.5 + 1 / 16, nvfp4.quantize, (x, 1, "mse")),
        "NVFP4 1x16, MS-EDEN": (4.5 + 1 / 16, nvfp4.quantize_eden, (x, 128, key, key)),
        "NVFP4 1x16, decoded": (2.5 + 1 / 16, nvfp4.factors, (*nvfp4.quantize(x, 1)[:2], 1, K)),
        "NF4": (2.5 + 1 / 16, nf4.quantize, (x,)),
    }
    for name, (size, function, given) in quantizers.items():
        nbytes = size * x.numel()
        defined = partial(function, *given)
        beside: dict[str, Any] = {"against": baseline, "gate": TORCHAO_GATE} if baseline and name == current else {}
        yield Kernel(name, defined, backend="reference", nbytes=nbytes, **beside)
        served = serving(function, device)
        if served.folder != "reference":
            ours = partial(served.function, *given)
            yield Kernel(f"{name}, C++", ours, bits(ours, defined), backend=served.folder, nbytes=nbytes, against=name)


def _amax_of(x: Tensor) -> Tensor:
    return x.abs().amax().float().view(1, 1)


def _size(T: int, K: int, N: int) -> str:
    return f"{T} x {K} x {N}"


# -- what the numbers say


def ratios(data: Mapping[str, Any], row: Mapping[str, Any]) -> list[float]:
    """Return the ratios round by round: of a copy's bandwidth, of bfloat16's speed or the definition's, or of torchao's time (where
    less is better)."""
    other = next((r for r in data["kernels"] if r["name"] == row["against"]), None)
    if other is None:
        return []
    pairs = zip(row["seconds"], other["seconds"])
    if other["name"].startswith(TORCHAO):
        return [mine / theirs for mine, theirs in pairs]
    if other["name"] == COPY:
        return [row["bytes"] / mine / (other["bytes"] / theirs) for mine, theirs in pairs]
    return [theirs / mine for mine, theirs in pairs]


def _unit(row: Mapping[str, Any]) -> str:
    """Return what the ratios of a row are of, in words."""
    if row["against"] == COPY:
        return "of a copy"
    if row["against"].startswith(TORCHAO):
        return "x torchao's time"
    return "x the definition" if row["backend"] == "cpu" else "x bf16"


def gates(data: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return each gate in words, and whether the median holds it; a kernel without a speed holds none."""
    found = []
    for row in data["kernels"]:
        if not row["gate"]:
            continue
        found_ratios = ratios(data, row)
        ratio = statistics.median(found_ratios) if found_ratios else math.nan
        if row["against"].startswith(TORCHAO):
            words, holds = f"at most {row['gate']} x torchao's time", ratio <= row["gate"]
        elif row["against"] == COPY:
            words, holds = f"at least {row['gate']:.0%} of a copy's bandwidth", ratio >= row["gate"]
        else:
            words, holds = f"at least {row['gate']} x bfloat16", ratio >= row["gate"]
        found.append((f"{row['name']}: {words}: {ratio:.2f}", holds))
    return found


def table(data: Mapping[str, Any]) -> str:
    """Make one row a kernel, then the gates."""
    rows = []
    for row in data["kernels"]:
        if not row["seconds"]:
            why = row.get("failed") or f"differs from the reference by {row['error']:.2g}"
            rows.append([row["name"], "", "", why, row["backend"]])
            continue
        low, mid, high = (three_digits(1e3 * s) for s in spread(row["seconds"]))
        median = statistics.median(row["seconds"])
        rate = f"{three_digits(row['bytes'] / median / 1e9)} GB/s"
        if row["flops"]:
            rate = f"{three_digits(row['flops'] / median / 1e12)} TFLOPS"
        ratio = ""
        if found := ratios(data, row):
            least, middle, most = spread(found)
            ratio = f"{middle:.2f} {_unit(row)} ({least:.2f} to {most:.2f})"
        by = [row["backend"], row.get("failed")]
        rows.append([row["name"], f"{mid} ({low} to {high})", rate, ratio, ", until ".join(filter(None, by))])
    text = markdown(data, ["kernel", "ms (median, range)", "rate", "against", "by"], rows)
    held = "\n".join(f"- {words}, {'holds' if holds else 'missed'}" for words, holds in gates(data))
    return "\n\n".join(part for part in (text, held, *data["notes"]) if part)
