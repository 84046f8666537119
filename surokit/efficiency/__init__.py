"""Say how well one run uses several GPUs, and what is lost at each doubling.

scaling.py    rates of a run by number of processes: efficiency, losses and their parts, table and picture
measure.py    surokit.scale: launch a function on 1, 2, 4 ... processes and measure it
"""
