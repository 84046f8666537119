"""CUDA C++: built on first use where there is a compiler (build.py), with Triton or the reference where there is none."""
