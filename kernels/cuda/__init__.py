"""CUDA C++: built on first use where there is a compiler (build.py), with the reference where there is none."""
