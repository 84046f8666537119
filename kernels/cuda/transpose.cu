// Codes transposed, [M, K] to [K, M]: 8-bit codes as they are, 4-bit codes unpacked and packed again along M.
//
// Float8 products of Hopper want both operands contiguous along the contracted dimension, so a frozen weight W needs W'
// for grad_input. Only bytes move: every access to memory is 16 bytes wide and a warp's accesses fill whole 128-byte lines.
//
//   1. A thread reads 16 bytes of as many rows as a 32-bit word holds codes: N = 4 (8 bits) or 8 (4 bits) rows.
//   2. It transposes squares of N x N codes in registers. Then each word is N consecutive codes of one column.
//   3. Words go to shared memory in the place they have in the result; 16 bytes at a time they leave from there.
//
// A tile is 32 N x 32 N codes, its rows are 128 bytes in either direction: 32 words, one for each bank. Unswizzled, the
// words that a warp writes in step 3 would meet in four banks; with the exclusive or in `slot` each has its own.
//
// M rows, K columns, in codes; `pitch` is the bytes of a row. A row that ends inside a byte leaves zero in its high nibble.

#include <cstdint>

#include <cuda_runtime.h>

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 16;  // bytes of one access
constexpr int CHUNKS = 8;  // of a row of a tile
constexpr int WORDS = 32;  // of a row of a tile

// where word `word` of row k of the transposed tile lies: chunks of four words change places, differently for every chunk of k
template <int N>
__host__ __device__ constexpr int slot(int k, int word) {
    return word ^ (k / (4 * N) * 4);
}

// One step of a square's transpose: [A B] over [C D] becomes [A C] over [B D], in every field of 2 * `shift` bits.
__device__ inline void exchange(uint32_t& above, uint32_t& below, int shift, uint32_t low) {
    const uint32_t first = (above & low) | ((below & low) << shift);
    below = ((above >> shift) & low) | (below & ~low);
    above = first;
}

// N words of N codes, transposed in place: halves of the square, then halves of its quarters, down to single codes.
template <int N>
__device__ inline void transpose_square(uint32_t (&word)[N]) {
#pragma unroll
    for (int half = N / 2, shift = 16; half > 0; half /= 2, shift /= 2) {
        const uint32_t low = shift == 16 ? 0x0000FFFFu : shift == 8 ? 0x00FF00FFu : 0x0F0F0F0Fu;
#pragma unroll
        for (int i = 0; i < N; ++i)
            if ((i & half) == 0) exchange(word[i], word[i + half], shift, low);
    }
}

// 16 bytes of a row from `byte` on, zeros where the matrix has none. WIDE: rows begin and end on a multiple of 16 bytes.
template <bool WIDE>
__device__ inline uint4 read(const uint8_t* matrix, int64_t row, int64_t rows, int64_t byte, int64_t pitch) {
    if (row >= rows || byte >= pitch) return uint4{0, 0, 0, 0};
    const uint8_t* at = matrix + row * pitch + byte;
    if (WIDE) return *reinterpret_cast<const uint4*>(at);
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (byte + i < pitch) word[i / 4] |= static_cast<uint32_t>(at[i]) << (i % 4 * 8);
    return uint4{word[0], word[1], word[2], word[3]};
}

template <bool WIDE>
__device__ inline void write(uint8_t* matrix, int64_t row, int64_t rows, int64_t byte, int64_t pitch, uint4 value) {
    if (row >= rows || byte >= pitch) return;
    uint8_t* at = matrix + row * pitch + byte;
    if (WIDE) {
        *reinterpret_cast<uint4*>(at) = value;
        return;
    }
    const uint32_t word[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < CHUNK; ++i)
        if (byte + i < pitch) at[i] = static_cast<uint8_t>(word[i / 4] >> (i % 4 * 8));
}

template <int BITS, bool WIDE_IN, bool WIDE_OUT>
__global__ void __launch_bounds__(THREADS)
    transpose_tile(const uint8_t* in_MK, uint8_t* out_KM, int64_t M, int64_t K, uint32_t tiles_K) {
    constexpr int N = 32 / BITS;    // codes of a word
    constexpr int SIDE = WORDS * N;  // codes of a tile's side
    __shared__ uint4 tile[SIDE][CHUNKS];

    const int64_t pitch_in = (K * BITS + 7) / 8, pitch_out = (M * BITS + 7) / 8;
    const int64_t m0 = static_cast<int64_t>(blockIdx.x / tiles_K) * SIDE;
    const int64_t k0 = static_cast<int64_t>(blockIdx.x % tiles_K) * SIDE;
    const int chunk = threadIdx.x % CHUNKS;  // eight threads share a row's 128 bytes
    const int group = threadIdx.x / CHUNKS;

    uint4 read_N[N];
#pragma unroll
    for (int i = 0; i < N; ++i)
        read_N[i] = read<WIDE_IN>(in_MK, m0 + group * N + i, M, k0 * BITS / 8 + chunk * CHUNK, pitch_in);

#pragma unroll
    for (int w = 0; w < 4; ++w) {
        uint32_t word[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            word[i] = w == 0 ? read_N[i].x : w == 1 ? read_N[i].y : w == 2 ? read_N[i].z : read_N[i].w;
        transpose_square<N>(word);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int k = (chunk * 4 + w) * N + i;
            reinterpret_cast<uint32_t*>(tile[k])[slot<N>(k, group)] = word[i];
        }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int k = i * (SIDE / N) + group;
        const uint4 value = tile[k][slot<N>(k, chunk * 4) / 4];
        write<WIDE_OUT>(out_KM, k0 + k, K, m0 * BITS / 8 + chunk * CHUNK, pitch_out, value);
    }
}

template <int BITS>
cudaError_t launch(const uint8_t* in_MK, uint8_t* out_KM, int64_t M, int64_t K, cudaStream_t stream) {
    constexpr int64_t SIDE = WORDS * 32 / BITS;
    const int64_t tiles_M = (M + SIDE - 1) / SIDE, tiles_K = (K + SIDE - 1) / SIDE;
    if (tiles_M > INT32_MAX / tiles_K) return cudaErrorInvalidConfiguration;
    const auto wide = [](const void* matrix, int64_t columns) {
        return (reinterpret_cast<uintptr_t>(matrix) | static_cast<uintptr_t>((columns * BITS + 7) / 8)) % CHUNK == 0;
    };
    const bool wide_in = wide(in_MK, K), wide_out = wide(out_KM, M);
    const auto kernel = wide_in ? (wide_out ? transpose_tile<BITS, true, true> : transpose_tile<BITS, true, false>)
                                : (wide_out ? transpose_tile<BITS, false, true> : transpose_tile<BITS, false, false>);
    cudaLaunchConfig_t grid = {};
    grid.gridDim = dim3(static_cast<unsigned>(tiles_M * tiles_K));
    grid.blockDim = dim3(THREADS);
    grid.stream = stream;
    return cudaLaunchKernelEx(&grid, kernel, in_MK, out_KM, M, K, static_cast<uint32_t>(tiles_K));
}

}  // namespace

// Null, or what went wrong. in_MK and out_KM are contiguous and do not overlap; bits: 4 or 8; M, K > 0.
extern "C" const char* transpose(
    const uint8_t* in_MK, uint8_t* out_KM, int64_t M, int64_t K, int bits, cudaStream_t stream) {
    const cudaError_t error = (bits == 8 ? launch<8> : launch<4>)(in_MK, out_KM, M, K, stream);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
