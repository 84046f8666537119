"""Predicted peak of a training step against torch.cuda.max_memory_allocated; rehearsed on a CPU against its own allocator.

The GPU's kernels have other temporaries than the CPU's reference, and libraries take workspace from the same allocator, 8 to 32
MiB each: the models here are large enough that a tenth of the peak is more than that.
"""

import pytest
import torch

from surokit.bench.memory import Setting, measure, planned

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
    if device.type == "cuda":
        setting = Setting(**{**setting.__dict__, **LARGE})
        torch.cuda.empty_cache()
    else:
        setting = Setting(**{**setting.__dict__, "layers": 2, "length": 64, "vocab": 1024})
    measured, memory = measure(setting, device.type), planned(setting, device.type).memory
    phases = {
        p.name: round(p.bytes / measured.phases.get(p.name, measured.phases["forward"]), 3) for p in memory.phases
    }
    assert memory.peak_gib * 2**30 == pytest.approx(measured.peak, rel=0.10), (memory.peak_phase, phases, measured)


def test_the_meter_counts_what_the_device_allocates(device):
    from surokit.bench.memory import Meter

    meter = Meter(device)
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
