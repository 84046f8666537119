"""Train, watch and compare low-precision recipes in a notebook.

Importing surokit changes nothing and loads nothing but this table: a name is imported from its module when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_NAMES: dict[str, str] = {
    name: f"surokit.{module}"
    for module, names in {
        "formats": "E4M3 E5M2 E2M1 E8M0 NF4 BNB_FP4",
        "quantizer": "PerTensor PerRow Block MX NV NFBlock Quantizer",
        "quantized": "Quantized quantize",
        "recipe": "Gemm Recipe Lora recipes BF16 FP8 FP8_CURRENT FP8_ROWWISE FP8_BLOCK MXFP8 FP4 NVFP4 MXFP4 QUARTET_II "
        "QFP8 QFP4 QNF4",
        "convert": "apply precision",
        "accuracy": "compare",
        "tuning": "tune",
        "agreement": "parity Parity",
        "environment": "doctor",
        "models": "Decoder DecoderConfig load save load_adapter save_adapter merge unmerge generate",
        "models.fuse": "fuse",
        "fusion": "Fusion",
        "data": "text chat train_tokenizer load_tokenizer",
        "train": "Session AdamW AdamW8bit Muon Cosine Record fit_to_time numerics",
        "offload": "ZenFlow OffloadAdamW offload_weights offload_activations",
        "dissection.run": "dissect",
        "dissection.dissection": "Dissection",
        "serving.bench": "serve_bench",
        "serving.served": "ServeBench",
        "serving.starting": "ServerProcess",
        "serving.workload": "Workload",
        "efficiency.measure": "scale",
        "efficiency.scaling": "Scaling",
        "launching.launch": "launch",
        "launching.outcome": "LaunchError",
        "parallel.layout": "Parallel",
        "parallel.spread": "parallelize",
        "tasks": "Task Score Addition Copying Recall Brackets Classification",
        "texts.grammar": "stories",
        "live": "Live",
        "racing": "race Race Goal",
        "widgets": "plot_runs plot_errors",
        "widgets.follow": "watch",
        "profiler": "profile Profile RankProfiles Monitor activity",
        "planner": "plan Plan Gpu Price plot_memory fit_scaling KAPLAN CHINCHILLA CHINCHILLA_REPLICATED",
        "calibration": "calibrate",
    }.items()
    for name in names.split()
}
_MODULES = {
    "formats",
    "hardware",
    "integrations",
    "kernels",
    "models",
    "nn",
    "offload",
    "parallel",
    "optim",
    "planner",
    "profiler",
    "racing",
    "runs",
    "serving",
    "tasks",
    "texts",
    "train",
    "widgets",
    "bench",
}

__all__ = ["__version__", *_NAMES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return import_module(f"surokit.{name}")
    raise AttributeError(f"module 'surokit' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def load_ipython_extension(ipython: Any) -> None:
    """Register %surogate_profile and %%surogate_profile: `%load_ext surokit` calls this."""
    import_module("surokit.profiler.magic").load_ipython_extension(ipython)
