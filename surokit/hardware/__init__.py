"""Describe hardware without torch: GPUs and this machine, the rates that they reach, the time of one linear layer on them.

gpus.py     Gpu, the table of GPUs with its sources (gpus.csv), Ceilings: what a calibration reached
machine.py  the memory that this process may have
rates.py    the rates that a GPU is taken to reach, measured ones first
linear.py   the kernels of one linear layer, and their time
"""
