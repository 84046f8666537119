"""The planner: FLOPs, memory, time and money of a run, before a GPU is touched. No torch here.

what is planned     subject.py   a number of parameters, a config, a model: read once
                    live.py      what a live model or a session says of itself
                    catalogue.py well-known models by name (models.csv)
                    configs.py   every family's config.json as a Shape
                    shape.py     the sizes of a decoder, and the matrices they make
                    typical.py   the shape that so many parameters typically have
                    fusion.py    which operations of a step are one
what it computes    flops.py     FLOPs a token, product by product
what it holds       memory.py    bytes of one GPU, term by term, at the fullest moment of a step
                    activations.py, tape.py     that step, replayed operation by operation; fused_activations.py: a fused one,
                    their_activations.py: transformers'
what it takes       hardware.py  GPUs, their peaks with sources (hardware.csv), what a calibration reached
                    cost.py      time and money of a run at a rate; goodput
                    roofline.py  a step's time from rates and bandwidths
                    traffic.py   what it asks of them; fused_traffic.py: a fused one
                    layers.py    one linear layer of it
                    communication.py, energy.py
                    offload.py, streaming.py    with the optimizer's states, or weights, on the host
asked backwards     questions.py what is the most that fits, how many GPUs, how many tokens
                    on_host.py   which optimizer on the host, by memory and time; streamed weights
                    choices.py   which recipe; remedies.py: what binds, what makes it fit; faster.py: what makes it faster
beside reality      check.py     a plan beside a measurement (measured.py reads it)
                    published.py published runs (published.csv)
how loss scales     scaling.py   published laws; scaling_fit.py: a fit to your own runs
put together        planning.py  plan() and Plan; lines.py, figures.py, picture.py show it
"""

from surokit.hardware.gpus import GPUS, Ceilings, Gpu, find_gpu, load_hardware, register
from surokit.planner.check import Check
from surokit.planner.communication import efficiency, fit_speedup, loss_at_doublings
from surokit.planner.configs import read_shape
from surokit.planner.cost import Price, expected_goodput
from surokit.planner.flops import count_flops
from surokit.planner.memory import count_memory
from surokit.planner.offload import Host, predict_offload
from surokit.planner.picture import plot_memory
from surokit.planner.planning import Plan, plan
from surokit.planner.published import judge_hours
from surokit.planner.roofline import recipe_gain
from surokit.planner.scaling import CHINCHILLA, CHINCHILLA_REPLICATED, KAPLAN, ScalingLaw
from surokit.planner.scaling_fit import ScalingFit, fit_scaling
from surokit.planner.shape import Shape

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
    "read_shape",
    "recipe_gain",
    "register",
]
