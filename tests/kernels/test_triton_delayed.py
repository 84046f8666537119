"""Delayed scaling in Triton: codes, scales and slots bit for bit as the definition, whatever is in force."""

import pytest
import torch

from surokit.formats import E4M3, E5M2
from surokit.kernels.reference import delayed as reference
from surokit.kernels.triton import delayed as kernels
from tests.kernels.compiling import FP8, Launches, compiled, matrix
from tests.kernels.interpreter import DEVICE, poisoned
from tests.refusals import refused

pytestmark = pytest.mark.sampled

INF, NAN = float("inf"), float("nan")


def slots(*given, opened=reference.NOTHING):
    """in_force and opened as three-slots-a-layer views, and the whole banks they are in."""
    whole = torch.full((2, 3 * len(given) + 1), 7.0, device=DEVICE)
    views = [row[1::3] for row in whole]
    views[0].copy_(torch.tensor(given))
    views[1].fill_(opened)
    return *views, whole


def launch(format, dtype=torch.bfloat16, siblings=1, **options):
    kernels.quantize(matrix(dtype=dtype), format, torch.ones(siblings), torch.ones(siblings), True, **options)


LAUNCHES: Launches = {
    "e4m3": (FP8, lambda: launch(E4M3)),
    "e4m3, siblings": ((90,), lambda: launch(E4M3, siblings=3)),
    "e5m2": (FP8, lambda: launch(E5M2)),
    "float32": ((90,), lambda: launch(E4M3, torch.float32, pow2=True)),
    "both": (FP8, lambda: kernels.quantize_both(matrix(), E4M3, torch.ones(3), torch.ones(3), True)),
    "both, e5m2": (FP8, lambda: kernels.quantize_both(matrix(), E5M2, torch.ones(1), torch.ones(1), True)),
    "both, float32": (
        (90,),
        lambda: kernels.quantize_both(matrix(dtype=torch.float32), E4M3, torch.ones(1), torch.ones(1), True),
    ),
    "transposed": (
        (90,),
        lambda: kernels.quantize(matrix().t(), E4M3, torch.ones(1), torch.ones(1), False),
    ),
}


def inputs(M, K, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(M * 1000 + K)
    return (torch.randn(M, K, generator=generator) * scale).to(DEVICE, dtype)


def same(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(a.float().signbit() | a.float().isnan(), b.float().signbit() | b.float().isnan())


def check(x, given, format=E4M3, record=True, opened=reference.NOTHING, **options):
    ours, theirs = slots(*given, opened=opened), slots(*given, opened=opened)
    codes, scale_inv = kernels.quantize(x, format, *ours[:2], record, **options)
    expected = reference.quantize(x, format, *theirs[:2], record, **options)
    same(scale_inv, expected[1])
    if scale_inv.isfinite():
        same(codes, expected[0])
    same(ours[2], theirs[2])
    return ours


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (40, 136), (3, 5001)])
@pytest.mark.parametrize("given", [0.0, 3.0])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_is_the_definition(shape, given, format):
    check(inputs(*shape), (given,), format)


def check_both(x, given, format=E4M3, record=True):
    ours, theirs = slots(*given), slots(*given)
    with poisoned():
        found = kernels.quantize_both(x, format, *ours[:2], record)
    for a, b in zip(found, reference.quantize_both(x, format, *theirs[:2], record), strict=True):
        same(a, b)
    same(ours[2], theirs[2])
    for a, b in zip(found, reference.quantize(x, format, *slots(*given)[:2], record)):
        same(a, b)
    assert found[2].is_contiguous()


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (130, 136), (3, 700)])
@pytest.mark.parametrize("given", [(0.0,), (3.0, 3.0)])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_codes_of_the_transpose_are_the_codes_turned(shape, given, format):
    x = inputs(*shape)
    for record in (True, False):
        check_both(x, given, format, record)
    for view in (x.t(), x[:, ::2], x[1:], x[:0], x[:, :0]):
        check_both(view, given, format)


@pytest.mark.parametrize("given", [0.0, 1e-4, 0.01, 1e30, INF])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-41, 1e4, 1e30])
def test_any_sizes_of_the_numbers_and_of_what_is_in_force(given, scale):
    for dtype, options in ((torch.bfloat16, {}), (torch.float32, {"pow2": True, "floor": 1e-12})):
        check(inputs(9, 40, dtype, scale), (given,), **options)


@pytest.mark.parametrize("given", [0.0, 3.0])
@pytest.mark.parametrize("record", [True, False])
def test_what_is_not_finite_decodes_to_nan(given, record):
    for bad, place in ((INF, (0, 0)), (-INF, (32, 70)), (NAN, (0, 5)), (NAN, (32, 0))):  # in one program and in another
        x = inputs(33, 136)
        x[place] = bad
        check(x, (given,), record=record)


@pytest.mark.parametrize("given", [(0.0, 0.0, 0.0), (2.0, 2.0, 2.0), (0.0, 5.0, 0.0), (5.0, 0.0, 0.0)], ids=str)
@pytest.mark.parametrize("opened", [reference.NOTHING, 0.0, 1.0, 1e9, NAN])
def test_slots_of_siblings(given, opened):
    check(inputs(33, 70), given, opened=opened)


def test_a_step_of_several_operands_records_the_largest():
    ours, theirs = slots(0.0), slots(0.0)
    for i in range(4):
        x = inputs(20, 30 + i, scale=(i + 1) % 3 + 0.5)
        same(kernels.quantize(x, E4M3, *ours[:2], True)[0], reference.quantize(x, E4M3, *theirs[:2], True)[0])
        same(ours[2], theirs[2])


@pytest.mark.parametrize("record", [True, False])
def test_strides_and_no_rows(record):
    x = inputs(40, 64)
    for view in (x.t(), x[:, ::2], x[::3], x[3:, 5:], x[:0], x[:, :0]):
        check(view, (0.0,), record=record)
        check(view, (2.0,), record=record)


def test_more_blocks_than_parts(monkeypatch):
    monkeypatch.setattr(kernels, "PARTS", 2)
    x = inputs(70, 136)
    for place in ((0, 0), (69, 135), (30, 3)):
        x[place] = 99.0
        check(x, (0.0,))
        x[place] = 0.0


def test_errors():
    x, one = inputs(4, 8), torch.ones(1, device=DEVICE)
    with refused(ValueError):
        kernels.quantize(x, E4M3, one.double(), one, True)
    with refused(ValueError):
        kernels.quantize(x, E4M3, one, one.view(1, 1), True)
    with refused(ValueError):
        kernels.quantize(x, E4M3, one.expand(2), one.repeat(2), True)


def test_one_wide_pass_over_the_operand():
    """The second launch reads and writes sixteen bytes a thread, and raises a slot only where it has to."""
    for launch, group in (("e4m3", "v4.b32"), ("float32", "v4.b32"), ("both, e5m2", "v4.b32")):
        ptx = compiled()["delayed", launch, 90]["encode_and_record"]
        assert f"ld.global.{group}" in ptx
        assert f"st.global.{group}" in ptx
        assert ptx.count("atom.global") == 1
