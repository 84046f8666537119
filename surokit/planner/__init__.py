"""The planner predicts FLOPs, memory, time and cost of a run before a GPU is touched; it does not import torch.

planning.py  plan() and Plan: reads the question, counts, and puts the answer together
inputs/      what is planned: a number of parameters, a config, a live model or its session, read as a Shape
counts/      what a step computes, moves, holds and sends, from the shape alone
times/       how long that takes at a GPU's rates, and what it costs
offload/     a step whose optimizer states or weights are on the host
inverse/     a plan asked backwards: what fits, what makes it fit, what is faster
compare/     a plan beside a measurement (check) and beside published runs
scaling/     the loss that parameters and tokens should reach; a law fitted to your own runs
words.py, picture.py  a plan as text and as a picture
"""

from surokit.hardware.gpus import GPUS, Ceilings, Gpu, find_gpu, load_hardware, register
from surokit.planner.compare.check import Check
from surokit.planner.compare.published import judge_hours
from surokit.planner.compare.runs import PublishedRun, read_runs
from surokit.planner.counts.communication import efficiency, fit_speedup, loss_at_doublings
from surokit.planner.counts.flops import count_flops
from surokit.planner.counts.memory import count_memory
from surokit.planner.inputs.configs import read_shape
from surokit.planner.inputs.shape import Shape
from surokit.planner.offload.formulas import Host, predict_offload
from surokit.planner.picture import plot_memory
from surokit.planner.planning import Plan, plan
from surokit.planner.scaling.fit import ScalingFit, fit_scaling
from surokit.planner.scaling.laws import CHINCHILLA, CHINCHILLA_REPLICATED, KAPLAN, ScalingLaw
from surokit.planner.times.cost import Price, expected_goodput
from surokit.planner.times.roofline import recipe_gain

__all__ = [
    "CHINCHILLA",
    "CHINCHILLA_REPLICATED",
    "GPUS",
    "KAPLAN",
    "Ceilings",
    "Check",
    "Gpu",
    "Host",
    "Plan",
    "Price",
    "PublishedRun",
    "ScalingFit",
    "ScalingLaw",
    "Shape",
    "count_flops",
    "count_memory",
    "efficiency",
    "expected_goodput",
    "find_gpu",
    "fit_scaling",
    "fit_speedup",
    "judge_hours",
    "load_hardware",
    "loss_at_doublings",
    "plan",
    "plot_memory",
    "predict_offload",
    "read_runs",
    "read_shape",
    "recipe_gain",
    "register",
]
