"""Say what each optimization of a step brings, switched on alone and together, by step, phase, module and operator.

settings.py   how one cell computes; which settings contradict each other; the grid of settings
measure.py    one cell, in a process of its own: steps, memory, profile, the plan beside them
memory.py     what a process holds, and the limit within which it shall fit
run.py        surokit.dissect: one cell after the other, in a folder that a second call goes on from
cell.py       what became of one cell, as plain values
dissection.py Dissection: tables, effects, cells of other machines; picture.py, report.py
"""
