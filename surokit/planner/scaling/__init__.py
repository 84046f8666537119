"""Scaling laws: published ones, and a fit to runs of your own."""

from surokit.planner.scaling.fit import ScalingFit, fit_scaling
from surokit.planner.scaling.laws import CHINCHILLA, CHINCHILLA_REPLICATED, KAPLAN, ScalingLaw

__all__ = ["CHINCHILLA", "CHINCHILLA_REPLICATED", "KAPLAN", "ScalingFit", "ScalingLaw", "fit_scaling"]
