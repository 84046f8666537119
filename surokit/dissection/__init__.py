"""Say what each optimization of a step brings, switched on alone and together, by step, phase, module and operator.

run.py         surokit.dissect: one cell after the other, in a folder that a second call goes on from
settings.py    how one cell computes; which settings contradict each other; the grid of settings
job.py         what a process needs to measure a cell, and its model
measure.py     one cell: within the limit of memory, or why it does not fit; the search for the largest batch
work.py        what every kind of work shares: training.py, generating.py, foreign.py (other libraries: loop.py,
               deepspeed_engine.py; changed.py: whether they leave the weights as they are)
memory.py      what a process holds, the limit that it shall fit into; planned.py, summed.py: the plan and the profile of a cell
cell.py        what became of one cell, as plain values; brought.py: cells that others measured
dissection.py  Dissection: tables; effect.py: what a switch brings; picture.py, report.py
"""
