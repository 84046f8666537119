// The part of CUDA's runtime that our kernels use, on a CPU: a block is a std::thread for each CUDA thread, the barrier is real.
//
// It stands in for <cuda_runtime.h>, so that a .cu file compiles with a C++ compiler as it is, and its arithmetic, its limits
// and its barriers can be tested (and watched by the address sanitizer) where there is no GPU. Blocks run one after another, so
// that shared memory may be static.
#pragma once

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(n)

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
using cudaStream_t = void*;

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

inline const char* cudaGetErrorString(cudaError_t) { return "invalid configuration argument"; }

inline thread_local dim3 threadIdx, blockIdx;
inline std::barrier<>* block_barrier = nullptr;
inline void __syncthreads() { block_barrier->arrive_and_wait(); }

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* grid, void (*kernel)(Parameters...), Arguments... arguments) {
    const unsigned blocks = grid->gridDim.x, size = grid->blockDim.x;
    std::barrier<> barrier(size);
    block_barrier = &barrier;
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < size; ++t)
        threads.emplace_back([=] {
            threadIdx = dim3(t);
            for (unsigned b = 0; b < blocks; ++b) {
                blockIdx = dim3(b);
                kernel(static_cast<Parameters>(arguments)...);
                __syncthreads();  // the next block reuses shared memory
            }
        });
    for (auto& thread : threads) thread.join();
    return cudaSuccess;
}
