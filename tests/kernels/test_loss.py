"""Linear + cross-entropy in chunks: against float64, at sizes that do not divide, with ignored rows."""

import pytest
import torch

from surokit.kernels.reference import loss


def problem(T, K, V, dtype, ignored=0.3, size=1.0):
    torch.manual_seed(0)
    x = torch.randn(T, K).mul(size).to(dtype)
    w = torch.randn(V, K).mul(K**-0.5).to(dtype)
    labels = torch.randint(V, (T,))
    labels[torch.rand(T) < ignored] = -100
    return x, w, labels


def exact(x, w, labels):
    x, w = (t.double().requires_grad_() for t in (x, w))
    value = torch.nn.functional.cross_entropy(x @ w.t(), labels, ignore_index=-100)
    value.backward()
    return value, x.grad, w.grad


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 50.0])
def test_loss_and_gradients(rows, dtype, size, monkeypatch):
    monkeypatch.setattr(loss, "chunk_rows", lambda *_: rows)
    x, w, labels = problem(100, 24, 130, dtype, size=size)
    labels[0], labels[3] = 1, -100
    tolerance = 1e-5 if dtype == torch.float32 else 6e-3
    value, dx, dw = loss.forward(x, w, labels, True, True)
    assert value.dtype == torch.float32
    assert dx.dtype == dw.dtype == dtype
    for ours, theirs in zip((value, dx, dw), exact(x, w, labels)):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    assert dx[3].abs().max() == 0
    assert loss.forward(x, w, labels, False, False) == (value, None, None)
    assert loss.forward(x, w, labels, True, False)[2] is None
    assert torch.equal(loss.forward(x, w, labels, False, True)[2], dw)


def test_all_ignored_and_extreme_logits():
    x, w, labels = problem(10, 8, 20, torch.float32, ignored=2.0)
    value, dx, dw = loss.forward(x, w, labels, True, True)
    assert value == 0
    assert dx.abs().max() == 0
    assert dw.abs().max() == 0
    x, w, labels = problem(10, 8, 20, torch.float32, ignored=0.0, size=1e4)
    for ours, theirs in zip(loss.forward(x, w, labels, True, True), exact(x, w, labels)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_chunks_are_bounded():
    assert loss.chunk_rows(10, 8192, "cpu") == 10
    assert loss.chunk_rows(4096, 8192, "cpu") * 8192 * 4 <= loss.CHUNK_BYTES["cpu"]
    assert loss.chunk_rows(4096, 10**6, "cpu") == loss.MIN_ROWS
    assert loss.chunk_rows(4096, 10**8, "cuda") == loss.MIN_ROWS


@pytest.mark.parametrize("tokens", [1, 127, 128, 2047, 2048, 2049, 4096, 5000, 8192])
@pytest.mark.parametrize("vocabulary", [1000, 32_000, 151_936, 262_144])
@pytest.mark.parametrize("itemsize", [2, 4, 12])
def test_chunks_of_a_gpu_are_whole_tiles(tokens, vocabulary, itemsize):
    rows = loss.chunk_rows(tokens, vocabulary, "cuda", itemsize)
    assert rows * vocabulary * itemsize <= loss.CHUNK_BYTES["cuda"]
    assert rows == tokens or rows % loss.TILE_ROWS == 0
    assert rows <= loss.MAX_ROWS
    assert rows in (tokens, loss.MAX_ROWS) or (rows + loss.TILE_ROWS) * vocabulary * itemsize > loss.CHUNK_BYTES["cuda"]


def test_a_chunk_at_the_vocabulary_of_the_benchmark():
    assert loss.chunk_rows(8192, 151_936, "cuda", 2) == 2048  # 594 MiB, sixteen tiles of rows
