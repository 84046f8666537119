"""Predicted peak of a training step against torch.cuda.max_memory_allocated; rehearsed on a CPU against its own allocator.

The GPU's kernels have other temporaries than the CPU's reference, and libraries take workspace from the same allocator, 8 to 32
MiB a stream and thread: the models here are large enough that a tenth of the peak is more than that. Every phase is printed.
Asserted are the peak and what passes within a quarter, and within a tenth the optimizer's phase, of tensors whose size is known.
"""

import gc

import pytest
import torch

from surokit.bench.memory import MIB, PHASES, Setting, measure, predicted

LARGE = {
    "width": 1024,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 2816,
    "vocab": 32768,
    "layers": 12,
    "batch": 4,
    "length": 1024,
}
WITHIN = {"forward": 0.25, "backward": 0.25, "optimizer": 0.1, "peak": 0.25}
WORKSPACES = 128 * MIB  # of libraries, two threads and two streams: in a phase of few tensors more than a quarter
SETTINGS = [
    Setting("bf16"),
    Setting("fp32", dtype="fp32"),
    Setting("bf16, tied", tied=True),
    Setting("fp8", recipe="fp8"),
    Setting("fp8-rowwise", recipe="fp8-rowwise"),
    Setting("bf16 + LoRA", recipe="bf16", rank=8),
    Setting("qfp8 + LoRA", recipe="qfp8", rank=8),
    Setting("qnf4 + LoRA", recipe="qnf4", rank=8),
    Setting("adamw8bit", optimizer="adamw8bit"),
    Setting("float32 moments", states="fp32"),
    Setting("accumulate", accumulate=2),
    Setting("llama bf16", family="llama"),
    Setting("llama fp32", family="llama", dtype="fp32"),  # no fused attention: it keeps its scores
    Setting("qwen3 bf16, recompute", family="qwen3", recompute="full"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_the_peak_of_a_step(device, setting):
    if setting.theirs:
        pytest.importorskip("transformers")  # not wherever there is a GPU
    if device.type == "cuda":
        setting = Setting(**{**setting.__dict__, **LARGE})
        torch.cuda.empty_cache()
    else:
        setting = Setting(**{**setting.__dict__, "layers": 2, "length": 128})
    measured, planned = measure(setting, device.type), predicted(setting, device.type)
    found = {**{phase: measured.phases[phase] for phase in PHASES}, "peak": measured.peak}
    said = ", ".join(f"{name} {planned[name] / MIB:.0f} / {found[name] / MIB:.0f}" for name in found)
    print(f"{setting.name}, planned / measured MiB: {said}")
    for name, share in WITHIN.items():
        workspaces = WORKSPACES if device.type == "cuda" and name != "peak" else 0
        assert abs(planned[name] - found[name]) < share * found[name] + workspaces, (name, said)


def test_the_meter_counts_what_the_device_allocates(device):
    from surokit.profiler.record.allocations import Meter

    meter = Meter(device)
    gc.collect()  # what other tests left would go meanwhile
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with meter.listening():
        held = torch.empty(1024, 256, device=device)
        meter.mark("first")
        passing = torch.empty(512, 256, device=device)
        del passing
        meter.mark("second")
        meter.mark("end")
    assert held.nbytes == 2**20
    assert meter.peaks == [("first", before + 2**20 + 2**19), ("second", before + 2**20)]
