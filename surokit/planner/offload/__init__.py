"""Predict what a step takes when optimizer states or weights are on the host: the formulas, and those of streamed weights."""

from surokit.planner.offload.formulas import Host, Offload, largest_on_host, predict_offload, stall_gain

__all__ = ["Host", "Offload", "largest_on_host", "predict_offload", "stall_gain"]
