"""The operations of kernels/reference as Triton kernels: same files, same functions, same results; for CUDA devices."""
