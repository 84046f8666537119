"""The planner: FLOPs, memory, time and money of a run, before a GPU is touched. No torch here.

shape.py      the sizes of a decoder, read from a number, a config or a model
flops.py      FLOPs a token, product by product
memory.py     bytes of one GPU, term by term
hardware.py   GPUs and their peaks, with sources (hardware.csv)
cost.py       time and money
published.py  published runs to compare with (published.csv)
planning.py   plan() puts them together
"""

from surokit.planner.flops import count_flops
from surokit.planner.hardware import GPUS, Gpu, find_gpu, register
from surokit.planner.memory import count_memory
from surokit.planner.planning import Plan, plan
from surokit.planner.published import judge_hours
from surokit.planner.shape import Shape, read_shape

__all__ = [
    "GPUS",
    "Gpu",
    "Plan",
    "Shape",
    "count_flops",
    "count_memory",
    "find_gpu",
    "judge_hours",
    "plan",
    "read_shape",
    "register",
]
