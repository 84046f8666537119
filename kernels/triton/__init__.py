"""This folder has the operations of kernels/reference as Triton kernels for CUDA devices: same files, functions and results."""
