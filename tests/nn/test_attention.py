"""Attention for CUDA, as far as a CPU can tell: documents by a stand-in for torch's varlen_attn that does what its page says,
shapes and strides by meta tensors through torch's own operators, and which kernel is chosen when.
"""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import varlen

import surokit as sk
from surokit.kernels import converting
from surokit.models import decoder
from surokit.nn import attention as module
from surokit.nn.attention import Documents, attention, visibility, visible
from tests.refusals import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
T, H, G, D = 12, 4, 2, 8
STARTS = torch.tensor([[0, 5, 9], [0, 12, 12]], dtype=torch.int32)  # the second row is one document
POSITIONS = torch.tensor([[*range(5), *range(4), *range(3)], [*range(12)]])


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """https://docs.pytorch.org/docs/stable/nn.attention.varlen.html: sequences [N, H, D] one after the other."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    assert (cu_seq_q.diff() >= 0).all()
    assert cu_seq_q.diff().max() <= max_q
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[2] % 8 == 0  # the kernel's
    left, right = window_size
    parts = []
    for (a, b), (c, d) in zip(*(cu.unfold(0, 2, 1).tolist() for cu in (cu_seq_q, cu_seq_k))):
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        seen = torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance <= left) if left >= 0 else True
        seen &= (distance >= -right) if right >= 0 else True
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(y[0].transpose(0, 1))
    return torch.cat(parts)


def torch_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """Its kernel shares key heads, and the function does not ask."""
    kinds = {"scale": scale, "window_size": window_size, "enable_gqa": True}
    return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **kinds)


def torch_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    raise AssertionError


@pytest.fixture
def installed(monkeypatch):
    """Puts a function in the place of torch's varlen_attn."""

    def install(function):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        module._looked_up.cache_clear()

    yield install
    module._looked_up.cache_clear()


def qkv(joint=False, dtype=torch.float32, grad=True, device="cpu", D=D):
    """[B, heads, T, D] as the decoder makes them: seen through [B, T, heads, D], alone or as parts of one tensor."""
    torch.manual_seed(0)
    whole = torch.randn(2, T, H + 2 * G, D, dtype=dtype, device=device)
    parts = [x if joint else x.contiguous() for x in whole.split([H, G, G], dim=2)]
    return [x.transpose(1, 2).requires_grad_(grad) for x in parts]


@pytest.mark.parametrize("window", [None, 1, 3, 12, 99])
@pytest.mark.parametrize(
    ("joint", "function", "D"), [(False, torch_2_11, 8), (True, stand_in, 8), (False, stand_in, 5)]
)
def test_documents_give_what_a_mask_gives(installed, window, joint, function, D):
    installed(function)
    q, k, v = qkv(joint, D=D)
    documents = visibility(T, 0, window, None, CUDA, torch.bfloat16, STARTS)
    mask = visibility(T, 0, window, POSITIONS, CPU, torch.bfloat16)
    assert isinstance(documents, Documents)
    assert isinstance(mask, torch.Tensor)
    y, expected = attention(q, k, v, mask=documents), attention(q, k, v, mask=mask)
    torch.testing.assert_close(y, expected)
    assert D % 8 or y.transpose(1, 2).is_contiguous()  # what the projection after it reads
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
    scaled = attention(q, k, v, mask=documents, scale=0.7)
    torch.testing.assert_close(scaled, attention(q, k, v, mask=mask, scale=0.7))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_decoder_gives_the_same_by_documents_and_by_a_mask(installed, monkeypatch, fused, window):
    """The whole way through the model, as on CUDA: only the device is not one."""
    installed(stand_in)
    torch.manual_seed(0)
    config = sk.DecoderConfig(
        layers=2, width=32, heads=4, kv_heads=2, vocab=64, ffn=48, max_length=T, qk_norm=True, sliding_window=window
    )
    model = sk.Decoder(config)
    if fused:
        sk.fuse(model)
    ids = torch.randint(64, (2, T))
    batch = {"input_ids": ids, "labels": ids, "position_ids": POSITIONS, "documents": STARTS}
    found = []

    def on_cuda(T, start, window, position_ids, device, dtype, documents):
        found.append(visibility(T, start, window, position_ids, CUDA, torch.bfloat16, documents))
        return found[-1]

    results = []
    for look in (visibility, on_cuda):
        monkeypatch.setattr(decoder, "visibility", look)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert found
    assert all(isinstance(mask, Documents) for mask in found)
    (by_mask, gradients), (by_documents, others) = results
    torch.testing.assert_close(by_documents, by_mask, atol=1e-6, rtol=1e-6)
    for a, b in zip(others, gradients):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_lengths_are_cumulative_with_empty_documents_at_the_rows_ends():
    documents = Documents.of(STARTS.long(), T)
    assert documents.ends.tolist() == [0, 5, 9, 12, 24, 24, 24]
    assert documents.ends.dtype == torch.int32
    assert documents.ends.is_contiguous()
    with FakeTensorMode():  # nothing may ask a value of the device
        fake = Documents.of(torch.empty(8, 5, dtype=torch.int32, device="cuda"), 2048)
    assert fake.ends.shape == (41,)
    assert fake.ends.device == CUDA


def test_documents_are_a_mask_on_a_gpu_without_flash_attention(monkeypatch, installed):
    """A T4 has compute capability 7.5, and torch's kernel for packed rows begins with 8.0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("surokit.nn.attention.visible", lambda *_: STARTS)
    for capability, kind in (((7, 5), "Tensor"), ((8, 0), "Documents")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        with FakeTensorMode():
            starts = torch.zeros(STARTS.shape, dtype=torch.int64, device="cuda")
            mask = visibility(T, 0, None, None, CUDA, torch.float16, starts)
        assert type(mask).__name__ == kind


def test_documents_are_a_mask_where_there_is_no_kernel(monkeypatch, installed):
    for device, dtype in ((CPU, torch.bfloat16), (CPU, torch.float32)):
        mask, expected = visibility(T, 0, None, None, device, dtype, STARTS), visible(T, 0, None, POSITIONS, CPU)
        assert isinstance(mask, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(mask, expected)
    monkeypatch.setattr(module, "visible", lambda T, start, window, position_ids, device: position_ids)
    with FakeTensorMode():
        starts = torch.empty(2, 3, dtype=torch.int32, device="cuda")
        assert isinstance(visibility(T, 0, None, None, CUDA, torch.float16, starts), Documents)
        assert isinstance(visibility(T, 0, None, None, CUDA, torch.float32, starts), torch.Tensor)
        installed(torch_2_10)
        assert isinstance(visibility(T, 0, None, None, CUDA, torch.float16, starts), torch.Tensor)
    q, k, v = qkv()
    with refused(RuntimeError):
        attention(q, k, v, mask=Documents.of(STARTS, T))
    monkeypatch.undo()
    module._looked_up.cache_clear()
    # with a cache only what follows is new: as before, documents are of the first tokens
    assert visibility(1, 4, None, None, CPU, torch.float32, STARTS) is None


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("window", "documents"), [(None, True), (3, False), (5, True)])
def test_a_masked_gradient_through_float32(window, documents, compiled):
    torch.manual_seed(0)
    mask = visible(T, 0, window, POSITIONS if documents else None, CPU)
    given = [torch.randn(2, heads, T, D).bfloat16() for heads in (H, G, G)]
    dy = torch.randn(2, H, T, D).bfloat16()

    def run(dtype, function=attention):
        q, k, v = (t.to(dtype).requires_grad_() for t in given)
        y = function(q, k, v, mask=mask)
        return [y, *torch.autograd.grad(y, (q, k, v), dy.to(dtype))]

    with converting(True):
        found = run(torch.bfloat16, torch.compile(attention, backend="aot_eager") if compiled else attention)
    for ours, exact in zip(found, run(torch.float64)):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - exact).norm() < 0.004 * exact.norm()


def test_a_mask_that_is_added_gets_torchs_attention():
    """It may have a dtype of its own and want a gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, D).bfloat16().requires_grad_() for heads in (H, G, G))
    bias = torch.randn(T, T).bfloat16().requires_grad_()
    with converting(True):
        ours = torch.autograd.grad(attention(q, k, v, mask=bias).float().sum(), (q, k, v, bias))
    theirs = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    for a, b in zip(ours, torch.autograd.grad(theirs.float().sum(), (q, k, v, bias))):
        assert torch.equal(a, b)


def test_the_mask_of_positions_is_the_mask_of_documents_with_a_window():
    for window in (None, 2, 30):
        found, expected = (
            visibility(T, 0, window, positions, CPU, torch.float32, starts)
            for positions, starts in ((None, STARTS), (POSITIONS, None))
        )
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(found, expected)


def test_torch_takes_the_call():
    """torch's own operator with its own gradient, on tensors without memory."""
    q, k, v = qkv(joint=True, dtype=torch.bfloat16, device="meta")
    y = attention(q, k, v, mask=Documents.of(STARTS.to("meta"), T, 3))
    assert y.shape == (2, H, T, D)
    assert y.transpose(1, 2).is_contiguous()
    grads = torch.autograd.grad(y, (q, k, v), torch.empty_like(y))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


def test_a_compiled_model_has_documents_in_one_graph():
    q, k, v = qkv(dtype=torch.bfloat16, device="meta")

    def apart(q, k, v, starts):
        return attention(q, k, v, mask=Documents.of(starts, T))

    torch._dynamo.reset()
    y = torch.compile(apart, backend="eager", fullgraph=True)(q, k, v, STARTS.to("meta"))
    assert y.shape == (2, H, T, D)
    assert [g.shape for g in torch.autograd.grad(y.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_the_function_is_told_of_shared_key_heads_only_where_it_asks(installed):
    known = inspect.signature(varlen.varlen_attn).parameters
    assert module._varlen_form() == ("told" if "enable_gqa" in known else "untold")
    for function, form in ((stand_in, "told"), (torch_2_11, "untold"), (torch_2_10, None)):
        installed(function)
        assert module._varlen_form() == form


# cuDNN -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """A CUDA device of which only shapes exist, and what torch is asked about it."""
    asked = []

    def can_use(params):
        asked.append((tuple(params.query.shape), tuple(params.key.shape), params.is_causal, params.enable_gqa))
        return params.query.shape[-1] <= 128

    module._cudnn_serves.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(torch.backends.cuda, "can_use_cudnn_attention", can_use)
    yield asked
    module._cudnn_serves.cache_clear()


def kernels(q_shape=(2, H, 256, 64), k_shape=(2, G, 256, 64), dtype=torch.bfloat16, **keywords):
    """The operators that attention calls for such CUDA tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    called = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(s, dtype=dtype, device="cuda") for s in (q_shape, k_shape, k_shape))
        with Names():
            y = attention(q, k, v, **keywords)
    assert y.shape == q_shape
    return called


CUDNN = "_scaled_dot_product_cudnn_attention"


def test_cudnn_serves_hopper_and_torch_is_asked_once_a_shape(hopper):
    for _ in range(3):
        assert CUDNN in kernels()
    assert hopper == [((2, H, 256, 64), (2, G, 256, 64), True, True)]
    assert CUDNN in kernels((1, H, 256, 64), (1, G, 256, 64))
    assert len(hopper) == 2


def test_cudnn_is_left_alone_where_it_does_not_serve(hopper, monkeypatch):
    assert CUDNN not in kernels(dtype=torch.float32)
    assert CUDNN not in kernels((2, H, 1, 64), causal=False)  # a token after a cache
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda q, *rest, **keywords: q)
        assert CUDNN not in kernels(mask=torch.empty(256, 256))
    assert hopper == []
    assert CUDNN not in kernels((1, 2, 128, 256), (1, 2, 128, 256))  # as torch says
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    module._cudnn_serves.cache_clear()
    assert CUDNN not in kernels()


def test_old_cudnn_gets_whole_tiles_only(hopper, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert CUDNN in kernels()
    assert CUDNN not in kernels((2, H, 200, 64), (2, G, 200, 64))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91501)
    module._cudnn_serves.cache_clear()
    assert CUDNN in kernels((2, H, 200, 64), (2, G, 200, 64))


def test_torchs_own_switch_turns_cudnn_off(hopper):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # a torch for CPUs may have no other than the last
        assert CUDNN not in kernels()
    assert CUDNN in kernels()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert CUDNN not in kernels()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_cudnn_takes_the_call_and_its_gradient():
    q, k, v = qkv(joint=True, dtype=torch.bfloat16, device="meta")
    y = module._by_cudnn(q, k, v, 0.3, True)
    assert y.shape == (2, H, T, D)
    assert y.transpose(1, 2).flatten(2).is_contiguous()
    grads = torch.autograd.grad(y, (q, k, v), torch.empty_like(y))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
