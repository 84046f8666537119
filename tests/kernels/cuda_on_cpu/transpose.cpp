// kernels/cuda/transpose.cu on a CPU: reads cases from standard input and writes the transposes to standard output.
//
// A case is five int64: bits, M, K, and how far the input and the result begin behind a multiple of 16 bytes; then the input.
// Buffers end where the matrices end, so that the address sanitizer sees an access beyond either end.
// `transpose banks` prints instead the most accesses of a warp to shared memory that fall into one bank at a time.

#include "transpose.cu"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace {

// A buffer of `size` bytes that begins `offset` bytes behind a multiple of 16.
struct Buffer {
    uint8_t* memory;
    uint8_t* data;
    Buffer(size_t size, size_t offset, int fill) : memory(nullptr) {
        if (posix_memalign(reinterpret_cast<void**>(&memory), 16, size + offset)) std::abort();
        data = memory + offset;
        std::memset(data, fill, size);
    }
    ~Buffer() { std::free(memory); }
};

// Words at once: one a lane when a warp writes; four a lane when it reads, eight lanes at a time.
template <int N>
int conflicts() {
    int most = 0;
    auto count = [&](const std::vector<int>& words) {
        std::array<int, 32> bank{};
        for (int word : std::set<int>(words.begin(), words.end())) most = std::max(most, ++bank[word % 32]);
    };
    for (int first = 0; first < THREADS; first += 32) {
        for (int word = 0; word < 4 * N; ++word) {
            std::vector<int> written;
            for (int t = first; t < first + 32; ++t) {
                const int k = t % CHUNKS * 4 * N + word;
                written.push_back(k * WORDS + slot<N>(k, t / CHUNKS));
            }
            count(written);
        }
        for (int i = 0; i < N; ++i)
            for (int quarter = first; quarter < first + 32; quarter += 8) {
                std::vector<int> fetched;
                for (int t = quarter; t < quarter + 8; ++t) {
                    const int k = i * WORDS + t / CHUNKS;
                    for (int w = 0; w < 4; ++w) fetched.push_back(k * WORDS + slot<N>(k, t % CHUNKS * 4) + w);
                }
                count(fetched);
            }
    }
    return most;
}

}  // namespace

int main(int argc, char**) {
    if (argc > 1) {
        std::printf("%d %d\n", conflicts<4>(), conflicts<8>());
        return 0;
    }
    int64_t head[5];
    while (std::fread(head, sizeof head, 1, stdin) == 1) {
        const auto [bits, M, K, offset_in, offset_out] = head;
        const size_t size_in = M * ((K * bits + 7) / 8), size_out = K * ((M * bits + 7) / 8);
        Buffer in(size_in, offset_in, 0), out(size_out, offset_out, 0xA5);
        if (std::fread(in.data, 1, size_in, stdin) != size_in) return 2;
        if (const char* error = transpose(in.data, out.data, M, K, static_cast<int>(bits), nullptr)) {
            std::fprintf(stderr, "%s\n", error);
            return 3;
        }
        if (std::fwrite(out.data, 1, size_out, stdout) != size_out) return 4;
    }
    return 0;
}
