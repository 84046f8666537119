"""Predict by formulas what a step takes when the optimizer's states or the weights are on the host."""

from surokit.planner.offload.formulas import Host, Offload, largest_on_host, predict_offload, stall_gain

__all__ = ["Host", "Offload", "largest_on_host", "predict_offload", "stall_gain"]
