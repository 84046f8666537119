"""Run benchmarks that anyone can repeat: `python -m surokit.bench cpu` and `python -m surokit.bench gpu`.

Systems that are compared run in turn (A B A B ...) in one invocation, warm-up excluded, and every result carries the
device, the versions and the spread. Raw results are JSON; tables in the docs are generated from them.
"""
