"""Products: what is native for which operands, and stored weights that are decoded on the way."""

import pytest
import torch

import surokit as sk
from surokit import product
from surokit.quantized import sqnr_db
from surokit.quantizer import kind_of

E4M3_ROW, E5M2_ROW = (sk.Quantizer(f, sk.PerRow()) for f in (sk.E4M3, sk.E5M2))


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (sk.Quantizer(sk.E5M2, sk.PerTensor()), sk.Quantizer(sk.E4M3, sk.PerTensor()), "tensor"),
        (E4M3_ROW, E4M3_ROW, "row"),
        (E5M2_ROW, E5M2_ROW, None),
        (E4M3_ROW, None, None),
        (sk.Quantizer(sk.E4M3, sk.Block(1, 128)), sk.Quantizer(sk.E4M3, sk.Block(128, 128)), "block"),
        (sk.Quantizer(sk.E4M3, sk.Block(1, 64)), sk.Quantizer(sk.E4M3, sk.Block(64, 64)), None),
        (sk.Quantizer(sk.E4M3, sk.MX(32)), sk.Quantizer(sk.E4M3, sk.MX(32)), "mx"),
        (sk.Quantizer(sk.E2M1, sk.MX(32)), sk.Quantizer(sk.E2M1, sk.MX(32)), None),
        (sk.Quantizer(sk.E2M1, sk.NV(16)), sk.Quantizer(sk.E2M1, sk.NV(16, 16)), "nv"),
        (sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=16), sk.Quantizer(sk.E2M1, sk.NV(16)), None),
    ],
    ids=str,
)
def test_tensor_cores_have_a_name_for_the_pair(a, b, kind):
    assert kind_of(a, b) == kind
    assert not product.computes(a, b, torch.device("cpu"))


def test_operands_in_different_bases_are_turned_back():
    x, w = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((8, 64), (16, 64)))
    rotated = sk.quantize(x, sk.Quantizer(sk.E2M1, sk.NV(16), hadamard=16))
    plain = sk.quantize(w, sk.Quantizer(sk.E2M1, sk.NV(16)))
    y = product.product(rotated, plain, torch.float32)
    torch.testing.assert_close(y, rotated.dequantize() @ plain.dequantize().t())


@pytest.mark.parametrize("q", [(None, None), (E4M3_ROW, E4M3_ROW), (E4M3_ROW, None), (None, E4M3_ROW)], ids=str)
def test_a_product_is_added_in_place(q):
    generator = torch.Generator().manual_seed(1)
    sums, *operands = (torch.randn(s, generator=generator) for s in ((8, 16), (8, 64), (16, 64)))
    a, b = (x if each is None else sk.quantize(x, each) for x, each in zip(operands, q))
    expected = sums + product.product(a, b, torch.float32)
    assert product.product(a, b, torch.float32, onto=sums) is sums
    torch.testing.assert_close(sums, expected)


@pytest.mark.parametrize("name", ["qfp8", "qfp4", "qnf4"])
def test_a_weight_decoded_on_the_way_gives_the_same_product(name, monkeypatch):
    x, w = (torch.randn(s, generator=torch.Generator().manual_seed(1)).bfloat16() for s in ((5, 192), (33, 192)))
    storage = sk.recipes[name].storage
    assert storage
    stored = sk.quantize(w, storage)
    expected = product.product(x, stored, torch.bfloat16)
    assert not product.decodes_on_the_way(x, stored)  # not on a CPU
    monkeypatch.setattr(product, "decodes_on_the_way", lambda x, W: W.can_multiply)
    assert sqnr_db(expected, product.product(x, stored, torch.bfloat16)) > 45
    assert not sk.quantize(w, sk.Quantizer(sk.E4M3, sk.MX(32))).can_multiply
    assert not sk.quantize(w, sk.Quantizer(sk.E5M2, sk.PerRow())).can_multiply  # its codes would be read as E4M3


def test_what_is_decoded_on_the_way_is_asked_of_the_dtype_that_is_multiplied(monkeypatch):
    """sk.compare asks for float32 products of bfloat16 operands, which no kernel decodes a weight in."""
    stored = sk.quantize(torch.randn(33, 192, generator=torch.Generator().manual_seed(1)), E4M3_ROW)
    asked: list[torch.dtype] = []

    def note(x: torch.Tensor, W: object) -> bool:
        asked.append(x.dtype)
        return False

    monkeypatch.setattr(product, "decodes_on_the_way", note)
    product.product(torch.ones(5, 192, dtype=torch.bfloat16), stored, torch.float32)
    assert asked == [torch.float32]
