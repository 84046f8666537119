"""bfloat16 products through float32: against float64 and torch's own, at odd sizes, in blocks, for every layout."""

import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from surokit import kernels
from surokit.kernels.reference import attention, loss, matmul
from surokit.nn.linear import linear

SIZES = [(64, 64, 64), (33, 2048, 100), (512, 96, 200), (130, 257, 514), (400, 40, 1000)]


@pytest.fixture
def in_scratch(monkeypatch):
    monkeypatch.setattr(matmul, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(matmul, "LEAST_REUSE_WITH_SLOW_BF16", matmul.LEAST_REUSE)  # alike on all processors
    with kernels.converting(True):
        yield


@pytest.fixture(params=["small", "with scratch"])
def through_float32(request, monkeypatch):
    if request.param == "with scratch":
        monkeypatch.setattr(matmul, "SMALL_ELEMENTS", 0)
    monkeypatch.setattr(matmul, "LEAST_REUSE_WITH_SLOW_BF16", matmul.LEAST_REUSE)
    with kernels.converting(True):
        yield


def matrices(M, K, N, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(M, K, generator=generator).mul(size).bfloat16()
    return a, torch.randn(K, N, generator=generator).bfloat16()


def ulps(y, exact):
    """Distance of bfloat16 numbers from float64 ones, in units of the last place of the exact ones."""
    _, exponent = torch.frexp(exact)
    return (y.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponent - 8)


@pytest.mark.parametrize(("M", "K", "N"), SIZES)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_error_is_no_larger_than_torchs(M, K, N, size, through_float32):
    a, b = matrices(M, K, N, size)
    exact = a.double() @ b.double()
    ours, theirs = matmul.mm(a, b), a @ b
    assert ours.dtype == torch.bfloat16
    error, torchs = ((y.double() - exact).norm() for y in (ours, theirs))
    assert error <= 1.001 * torchs
    # where terms cancel, the order of the float32 sums is worth more than the last place of what is left
    cancelled = exact.abs() < 1e-3 * (a.double().abs() @ b.double().abs())
    assert ulps(ours, exact)[~cancelled].max() <= 1.0


@pytest.mark.parametrize("turned", ["a", "b", "y", "aby"])
def test_any_layout(turned, through_float32):
    a, b = matrices(128, 96, 160)
    y = torch.empty(128, 160, dtype=torch.bfloat16)
    expected = matmul.mm(a, b)
    a, b, y = (t.t().contiguous().t() if name in turned else t for name, t in (("a", a), ("b", b), ("y", y)))
    assert torch.equal(matmul.addmm_(y, a, b, beta=0.0), expected)
    wide = torch.full((128, 200), 7.0, dtype=torch.bfloat16)
    assert torch.equal(matmul.addmm_(wide[:, 20:180], a, b, beta=0.0), expected)
    assert (wide[:, :20] == 7).all()
    assert (wide[:, 180:] == 7).all()


def test_a_product_is_added_and_rounded_once(through_float32):
    a, b = matrices(128, 96, 160)
    y = torch.randn(128, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = 0.5 * y.double() + 3 * (a.double() @ b.double())
    result = matmul.addmm_(y.clone(), a, b, beta=0.5, alpha=3.0)
    assert (ulps(result, exact) <= 0.51).double().mean() > 0.999
    bias = y[0]
    exact = a.double() @ b.double() + bias.double()
    assert (ulps(matmul.linear(a, b.t(), bias), exact) <= 0.51).double().mean() > 0.999


def test_what_stood_in_a_result_that_is_not_added_to_does_not_count(through_float32):
    a, b = matrices(128, 96, 160)
    y = torch.full((128, 160), float("nan"), dtype=torch.bfloat16)
    assert torch.equal(matmul.addmm_(y, a, b, beta=0.0), matmul.mm(a, b))


def test_nan_and_inf_reach_what_they_should(through_float32):
    a, b = matrices(128, 96, 160)
    a[3, 5], b[7, 11] = float("inf"), float("nan")
    y = matmul.mm(a, b)
    assert not y[3].isfinite().any()
    assert y[:, 11].isnan().all()
    clean = y[torch.arange(128) != 3][:, torch.arange(160) != 11]
    assert clean.isfinite().all()


def test_large_products_are_cut_and_rounded_once(monkeypatch, in_scratch):
    a, b = matrices(300, 200, 499)
    y = torch.ones(300, 499, dtype=torch.bfloat16)
    whole = matmul.addmm_(y.clone(), a, b)
    monkeypatch.setattr(matmul, "MOST_SIDE", 128)
    monkeypatch.setattr(matmul, "SCRATCH_ELEMENTS", 40_000)  # 128 x 94 x 125: each extent is cut, and not evenly
    monkeypatch.setattr("surokit.kernels.reference.matmul._kept", threading.local())
    cut = matmul.addmm_(y.clone(), a, b)
    assert 0 < matmul._kept.buffer.numel() <= 40_000
    # a float32 product may sum in another order at another size: the last place of a few may differ
    assert (cut != whole).double().mean() < 1e-3
    assert F.mse_loss(cut.double(), whole.double()) < 1e-6 * whole.double().var()


@pytest.mark.parametrize(
    ("M", "K", "N"),
    [(4096, 14336, 4096), (128, 2048, 128_256), (128, 128_256, 2048), (100_000, 64, 64), (64, 10**7, 64)],
)
def test_scratch_is_bounded(M, K, N):
    m, k, n = matmul._block(M, K, N)
    assert m * n + m * k + k * n <= matmul.SCRATCH_ELEMENTS
    assert min(m / min(M, 1024), n / min(N, 512), k / min(K, 1024)) >= 1  # and a block is worth its while


def test_blocks_are_alike():
    assert matmul._block(2048, 512, 1376) == (1024, 512, 688)
    assert matmul._block(128, 576, 1536) == (128, 576, 1536)  # of few rows, in one piece
    assert matmul._block(128, 576, 49_152)[2] == 2048


def test_scratch_is_kept_by_each_thread(in_scratch):
    a, b = matrices(128, 96, 160)
    found = {}

    def address(name):
        matmul.mm(a, b)
        first = matmul._kept.buffer
        matmul.mm(a, b)
        found[name] = first, matmul._kept.buffer

    address("main")
    thread = threading.Thread(target=address, args=["other"])
    thread.start()
    thread.join()
    assert found["main"][0] is found["main"][1]
    assert found["other"][0] is found["other"][1]
    assert found["main"][0] is not found["other"][0]


def test_threads_do_not_write_into_each_others_scratch(in_scratch):
    a, b = matrices(256, 96, 160)
    expected = matmul.mm(a, b)
    wrong: list[int] = []

    def work():
        wrong.extend(n for n in range(50) if not torch.equal(matmul.mm(a, b), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FEW = {
    "AVX512": [(1, 576, 1536), (8, 576, 1536), (128, 576, 8), (0, 64, 64), (64, 0, 64), (16, 16, 16)],
    "AVX2": [(1, 576, 1536), (3, 576, 1536), (128, 576, 2), (0, 64, 64), (64, 0, 64), (8, 8, 8)],
}


@pytest.mark.parametrize("capability", FEW)
def test_few_rows_stay_with_torch(capability, monkeypatch, through_float32):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(matmul, "onednn_multiplies_bf16", matmul.onednn_multiplies_bf16.__wrapped__)
    monkeypatch.setattr(matmul, "_through_float32_", None)  # calling it would fail
    for M, K, N in FEW[capability]:
        a, b = matrices(M, K, N)
        assert torch.equal(matmul.mm(a, b), a @ b)
        bias = torch.ones(N, dtype=torch.bfloat16)
        assert torch.equal(matmul.linear(a, b.t(), bias), F.linear(a, b.t(), bias))
    for dtype in (torch.float32, torch.float64, torch.float16):
        a, b = matrices(128, 128, 128)
        assert torch.equal(matmul.mm(a.to(dtype), b.to(dtype)), a.to(dtype) @ b.to(dtype))
    if capability == "AVX2":  # where oneDNN has no bfloat16
        with pytest.raises(TypeError):
            matmul.mm(*matrices(8, 576, 1536))


def test_results_are_repeatable(through_float32):
    a, b = matrices(300, 200, 500)
    first = matmul.mm(a, b)
    matmul.mm(*matrices(64, 64, 64, size=1e30))  # other numbers in the same scratch
    assert torch.equal(matmul.mm(a, b), first)


# -- with gradients


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(128,), (4, 32), (2, 3, 40)])
def test_gradients(leading, bias, through_float32):
    torch.manual_seed(0)
    inputs = [torch.randn(*leading, 96), torch.randn(160, 96), torch.randn(160)][: 3 if bias else 2]
    dy = torch.randn(*leading, 160).bfloat16()

    def run(f, dtype):
        given = [t.bfloat16().to(dtype).requires_grad_() for t in inputs]
        y = f(*given)
        return [y, *torch.autograd.grad(y, given, dy.to(dtype))]

    for ours, torchs, exact in zip(
        run(linear, torch.bfloat16), run(F.linear, torch.bfloat16), run(F.linear, torch.float64)
    ):
        assert ours.shape == exact.shape
        error, torchs_error = ((t.double() - exact).norm() for t in (ours, torchs))
        assert error <= 1.01 * torchs_error


def test_a_gradient_of_gradients(through_float32):
    torch.manual_seed(0)

    def penalty(dtype):
        x, w = (t.bfloat16().to(dtype).requires_grad_() for t in (X, W))
        dx = torch.autograd.grad(linear(x, w).square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(dx.square().sum(), w)[0].double()

    X, W = torch.randn(128, 96), torch.randn(160, 96)
    exact = penalty(torch.float64)
    assert (penalty(torch.bfloat16) - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_trains_is_left_to_autograd(rows, through_float32):
    a, b = matrices(rows, 128, 160)
    bias, y = (
        torch.randn(160).bfloat16().requires_grad_(),
        torch.zeros(rows, 160, dtype=torch.bfloat16, requires_grad=True),
    )
    matmul.linear(a, b.t(), bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full_like(bias, rows))
    matmul.addmm_(y.clone(), a, b).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, torch.ones_like(y))


def test_autocast(through_float32):
    torch.manual_seed(0)
    x, w = torch.randn(128, 96, requires_grad=True), torch.randn(160, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, matmul.mm(x.detach().bfloat16(), w.detach().bfloat16().t()))
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_autocast_casts_no_operand_back(through_float32):
    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                multiplied.extend(t.dtype for t in args)
            return function(*args, **(kwargs or {}))

    multiplied: list[torch.dtype] = []
    (a, b), bias = matrices(128, 96, 160), torch.randn(160)
    with torch.autocast("cpu", torch.bfloat16), Products():
        linear(a, b.t())
        linear(a, b.t(), bias)
    assert len(multiplied) >= 5
    assert set(multiplied) == {torch.float32}


@pytest.mark.parametrize("op", ["rotate", "emulated_mm"])
def test_an_operation_is_carried_out_as_it_is_defined_under_autocast(op):
    torch.manual_seed(0)
    x, one = torch.randn(64, 64), torch.ones(1, 1)
    given = (x, 16) if op == "rotate" else (x.bfloat16(), 1.1 * one, x.bfloat16(), one, torch.float32)
    expected = getattr(kernels, op)(*given)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(getattr(kernels, op)(*given), expected)


def test_autocast_leaves_float64_alone(through_float32):
    x, w = torch.randn(128, 96, dtype=torch.float64), torch.randn(160, 96, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, w), F.linear(x, w))
    assert linear(x, w).dtype == torch.float64


@pytest.mark.parametrize("other", ["x", "w", "bias"])
def test_other_kinds_of_tensors_are_asked_for_their_own_product(other, through_float32):
    """As quantized weights of torchao and DTensors have one."""

    class Other(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            asked.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    asked = []
    operands = {"x": torch.randn(128, 96), "w": torch.randn(160, 96), "bias": torch.randn(160)}
    operands = {name: t.bfloat16() for name, t in operands.items()}
    operands[other] = operands[other].as_subclass(Other)
    linear(*operands.values())
    assert F.linear in asked


def test_a_bias_is_not_written_into(monkeypatch, through_float32):
    """Of one row it has the result's shape."""
    monkeypatch.setattr(matmul, "_least_reuse", lambda: 1e-9)
    x, w, bias = (torch.randn(size).bfloat16() for size in ((1, 96), (160, 96), (160,)))
    before = bias.clone()
    y = matmul.linear(x, w, bias)
    assert torch.equal(bias, before)
    assert y.data_ptr() != bias.data_ptr()


def test_flops_are_counted(through_float32):
    x, w = torch.randn(128, 96).bfloat16().requires_grad_(), torch.randn(160, 96).bfloat16().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        linear(x, w).float().sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 128 * 96 * 160


def test_a_model_of_any_length_is_exported(through_float32):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(160, 96).bfloat16())

        def forward(self, x):
            return linear(x, self.w)

    lengths = {"x": {0: torch.export.Dim("T", min=2, max=4096)}}
    for strict in (False, True):
        exported = torch.export.export(
            Layer(), (torch.randn(64, 96).bfloat16(),), dynamic_shapes=lengths, strict=strict
        )
        assert exported.module()(torch.randn(4000, 96).bfloat16()).shape == (4000, 160)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch.func.jvp's own
def test_torchs_transforms_get_torchs_products(through_float32):
    torch.manual_seed(0)
    x, w = torch.randn(128, 96).bfloat16(), torch.randn(160, 96).bfloat16()
    dw = torch.func.grad(lambda w: linear(x, w).float().sum())(w)
    assert torch.equal(dw, torch.func.grad(lambda w: F.linear(x, w).float().sum())(w))
    assert torch.equal(torch.vmap(lambda x: linear(x, w))(x), F.linear(x, w))
    both = torch.func.jvp(lambda x: linear(x, w), (x,), (x,))
    assert torch.equal(both[0], both[1])


def test_autograd_never_records_the_scratch(in_scratch):
    a, w = torch.randn(128, 96).bfloat16(), torch.randn(96, 160).bfloat16().requires_grad_()
    y = matmul.mm(a, w)
    y.float().sum().backward()
    assert w.grad is not None
    assert not matmul.mm(a, w.detach()).requires_grad


def test_operands_of_other_dtypes_are_refused_as_torch_does(through_float32):
    x, w = torch.randn(128, 96).bfloat16(), torch.randn(160, 96).bfloat16()
    for product in (matmul.linear, linear):
        with pytest.raises(RuntimeError):
            product(x, w, torch.zeros(160))
    with pytest.raises(RuntimeError):
        matmul.mm(x, w.t().float())


def test_the_gradient_of_attention_is_float32_throughout(through_float32):
    torch.manual_seed(0)
    q, do = (torch.randn(2, 4, 64, 16).mul(s).bfloat16() for s in (4.0, 1.0))
    k, v = (torch.randn(2, 2, 64, 16).mul(s).bfloat16() for s in (2.0, 1.0))
    exact = attention.causal_backward(*(t.double() for t in (do, q, k, v)), 0.25)
    for ours, best in zip(attention.causal_backward(do, q, k, v, 0.25), exact):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - best).norm() < 0.003 * best.norm()  # one rounding: 2^-9 / sqrt(3) and a little


def test_the_loss_and_its_gradients():
    torch.manual_seed(0)
    x, w = torch.randn(200, 64).bfloat16(), torch.randn(300, 64).bfloat16()
    labels = torch.randint(300, (200,))
    labels[::7] = -100
    exact = loss.forward(x.double(), w.double(), labels, True, True)
    for yes in (False, True):
        with kernels.converting(yes):
            found = loss.forward(x, w, labels, True, True)
        assert abs(found[0] - exact[0]) < 1e-3 * exact[0]
        for ours, best in zip(found[1:], exact[1:]):
            assert (ours.double() - best).norm() < 0.01 * best.norm()


# -- which way


@pytest.mark.parametrize(
    ("flags", "limit", "found"),
    [
        ("avx512f avx512_bf16 amx_bf16", None, "amx_bf16"),
        ("avx512f avx512_bf16 amx_bf16", "avx512_core_bf16", "avx512_bf16"),
        ("avx512f avx512_bf16 amx_bf16", "AVX512_CORE_AMX", "amx_bf16"),
        ("avx512f avx512_bf16 amx_bf16", "AVX512_CORE", None),
        ("avx512f avx512_bf16", None, "avx512_bf16"),
        ("avx512f avx512_bf16", "AVX512_CORE_VNNI", None),
        ("avx512f avx512_bf16", "default", "avx512_bf16"),
        ("avx512f avx512_vnni", None, None),
        ("avx2", "ALL", None),
        ("asimd bf16", None, "bf16"),
        ("avx2\nmodel name : bf16", None, None),
    ],
)
def test_what_the_processor_has(monkeypatch, flags, limit, found):
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: f"processor : 0\nflags : fpu {flags}\n")
    if limit is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert matmul.bf16_instructions.__wrapped__() == found


@pytest.mark.parametrize(
    ("vendor", "flags", "slower"),
    [
        ("GenuineIntel", "avx512_bf16", True),
        ("GenuineIntel", "avx512_bf16 amx_bf16", False),
        ("GenuineIntel", "avx512_vnni", False),
        ("AuthenticAMD", "avx512_bf16", False),
    ],
)
def test_intels_bf16_without_amx_is_slower_than_float32(monkeypatch, vendor, flags, slower):
    told = f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n"
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path, **_: told)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name in ("bf16_instructions", "bf16_is_slower"):
        monkeypatch.setattr(matmul, name, getattr(matmul, name).__wrapped__)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(matmul, "onednn_multiplies_bf16", matmul.onednn_multiplies_bf16.__wrapped__)
    assert matmul.bf16_is_slower() is slower
    backend, why = matmul.choice(torch.device("cpu"))
    assert backend == ("float32" if slower or "bf16" not in flags else "torch")
    assert ("slower than its float32" in why) is slower
    converted = []
    monkeypatch.setattr(matmul, "_through_float32_", lambda y, *_: converted.append(len(y)))
    with kernels.converting(True):
        for rows in (8, 16, 32, 64):
            matmul.mm(*matrices(rows, 512, 512))
    assert converted == ([64] if slower else [16, 32, 64])


def test_what_a_system_does_not_say_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for name in ("bf16_instructions", "bf16_is_slower"):
        monkeypatch.setattr(matmul, name, getattr(matmul, name).__wrapped__)
    assert matmul.bf16_instructions() == matmul.UNKNOWN
    assert matmul.choice(torch.device("cpu")) == (
        "torch",
        "the system does not say what instructions this processor has",
    )


def test_kept_memory_is_on_the_cpu_whatever_the_default_device_is(monkeypatch):
    monkeypatch.setattr("surokit.kernels.reference.matmul._kept", threading.local())
    a, b = matrices(512, 512, 512)
    with kernels.converting(True):
        with torch.device("meta"):
            first = matmul.mm(a, b)
        assert torch.equal(matmul.mm(a, b), first)
        assert first.device.type == "cpu"


def test_a_choice_is_told():
    for yes, backend in ((True, "float32"), (False, "torch")):
        with kernels.converting(yes):
            choice = next(c for c in kernels.choices("cpu") if c.op == "product bf16")
            assert choice.backend == backend
            assert kernels.through_float32(torch.zeros(1, dtype=torch.bfloat16)) is yes
    assert not kernels.through_float32(torch.zeros(1))
    assert not kernels.through_float32(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
