"""This folder has CUDA C++, built on first use where there is a compiler (build.py); else Triton or the reference serve."""
