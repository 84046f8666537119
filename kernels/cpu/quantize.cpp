// Quantize, decode and round at random on a CPU: the formulas of kernels/reference, with the same roundings in the same order.
//
// Plain C functions over contiguous rows, compiled without contracting products and sums, so that every operation rounds as
// torch's does. Each returns 0; or 1 where it met what is not finite, and the definition has to say what that becomes; or 2 where
// there is no memory.
//
// M rows, K columns, blocks of `rows` x 16 (NVFP4) or 1 x 32 (MX). x is bfloat16 (two bytes) or float32.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the order of two codes in a byte is little-endian's");

namespace {

inline float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float number(uint16_t x) { return as_float(uint32_t(x) << 16); }
inline float number(float x) { return x; }
inline uint32_t magnitude(uint16_t x) { return uint32_t(x & 0x7fff) << 16; }
inline uint32_t magnitude(float x) { return as_bits(x) & 0x7fffffff; }

constexpr uint32_t INFINITE = 0x7f800000;

// The draw at a position: kernels/reference/random.py
inline uint32_t drawn_bits(uint32_t position, const int32_t* key) {
  uint32_t x = position ^ uint32_t(key[0]);
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= uint32_t(key[1]);
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// 24 bits of it, in [0, 1)
inline float uniform(uint32_t position, const int32_t* key) {
  return float(int32_t(drawn_bits(position, key) >> 8)) * 0x1p-24f;
}

// A float of few bits. `rounded` and `drawn` take numbers in its range and return one of its own.
template <int mantissa, int bias, uint32_t sign_bit>
struct Small {
  static constexpr bool nibbles = sign_bit == 8;
  static constexpr uint32_t not_finite = mantissa == 2 ? 0x7c : 0x7f;  // magnitudes from here on
  static inline float binade(float y) {
    return std::max(as_float(as_bits(y) & INFINITE), as_float(uint32_t(128 - bias) << 23));
  }
  static inline float signed_as(float r, float y) {
    return as_float((as_bits(r) & 0x7fffffff) | (as_bits(y) & 0x80000000));
  }
  // to nearest, ties to even: float32 has no room for lower bits after the addition
  static inline float rounded(float y) {
    const float shift = binade(y) * as_float((uint32_t(127 + 23 - mantissa) << 23) | 0x400000);
    return signed_as((y + shift) - shift, y);
  }
  static inline float drawn(float y, float draw, float largest) {
    const float step = binade(y) * as_float(uint32_t(127 - mantissa) << 23);
    const float steps = as_float(as_bits(y) & 0x7fffffff) / step + draw;
    return signed_as(std::min(float(int32_t(steps)) * step, largest), y);
  }
  static inline uint32_t code(float r) {
    const uint32_t bits = as_bits(r) & 0x7fffffff;
    const float subnormal = as_float(bits) * as_float(uint32_t(126 + bias + mantissa) << 23);
    const uint32_t normal = (bits >> (23 - mantissa)) - (uint32_t(127 - bias) << mantissa);
    const bool small = bits < (uint32_t(128 - bias) << 23);
    return (small ? uint32_t(int32_t(small ? subnormal : 0.0f)) : normal) | (as_bits(r) >> 31) * sign_bit;
  }
  static inline float value(uint32_t code) {
    const uint32_t kept = code & (sign_bit - 1);
    const float subnormal = float(int32_t(kept)) * as_float(uint32_t(128 - bias - mantissa) << 23);
    const float normal = as_float((kept << (23 - mantissa)) + (uint32_t(127 - bias) << 23));
    return signed_as(kept < (1u << mantissa) ? subnormal : normal, code & sign_bit ? -1.0f : 1.0f);
  }
};

using E2M1 = Small<1, 1, 8>;
using E4M3 = Small<3, 7, 0x80>;
using E5M2 = Small<2, 15, 0x80>;

inline float clamped(float y, float largest) { return std::min(std::max(y, -largest), largest); }

// Gives each thread some of the rows. What is computed does not depend on how many there are.
template <class Rows>
void shared(int64_t rows, int64_t elements, int threads, const Rows& work) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>({threads, rows, elements >> 17}));
  std::atomic<bool> failed{false};
  const auto do_part = [&](int64_t part) {
    try {
      work(rows * part / parts, rows * (part + 1) / parts);
    } catch (...) {
      failed = true;
    }
  };
  std::vector<std::thread> others;
  int64_t begun = 1;
  try {
    for (; begun < parts; ++begun) others.emplace_back(do_part, begun);
  } catch (...) {  // no more threads are to be had: the rest is done here
  }
  do_part(0);
  for (; begun < parts; ++begun) do_part(begun);
  for (auto& other : others) other.join();
  if (failed) throw std::bad_alloc();
}

template <class Function>
int tried(const Function& function) {
  try {
    return function();
  } catch (...) {
    return 2;
  }
}

template <class T>
inline uint32_t largest_of(const T* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t j = 0; j < n; ++j) most = std::max(most, magnitude(x[j]));
  return most;
}

// The largest magnitude of each tile, as bits, and of all of them.
template <class T>
uint32_t amax(const T* x, int64_t M, int64_t K, int64_t rows, int64_t columns, uint32_t* out, int threads) {
  const int64_t R = (M + rows - 1) / rows, C = (K + columns - 1) / columns;
  std::atomic<uint32_t> all{0};
  const auto raise_to = [&all](uint32_t most) {
    uint32_t seen = all.load();
    while (seen < most && !all.compare_exchange_weak(seen, most)) {
    }
  };
  if (R * C == 1) {
    shared(M * K, M * K, threads, [&](int64_t begin, int64_t end) { raise_to(largest_of(x + begin, end - begin)); });
    return *out = all.load();
  }
  shared(R, M * K, threads, [&](int64_t begin, int64_t end) {
    uint32_t most = 0;
    for (int64_t r = begin; r < end; ++r) {
      uint32_t* tiles = out + r * C;
      std::fill(tiles, tiles + C, 0);
      for (int64_t i = r * rows; i < std::min(M, (r + 1) * rows); ++i)
        for (int64_t c = 0; c < C; ++c) {
          const T* from = x + i * K + c * columns;
          const int64_t n = std::min(columns, K - c * columns);
          tiles[c] = std::max(tiles[c], n == 16 ? largest_of(from, 16) : n == 32 ? largest_of(from, 32) : largest_of(from, n));
        }
      most = std::max(most, C ? *std::max_element(tiles, tiles + C) : 0);
    }
    raise_to(most);
  });
  return all.load();
}

// Elements at a time: a compiler makes more of one loop over many than of many over the 16 of a block, and these stay in the cache.
constexpr int64_t SOME = 4096;

// What the tiles of a row have, for each of its n elements from column `first` on. of(tile): of the tile with that number.
template <class Of>
inline void spread(int64_t first, int64_t n, int64_t columns, const Of& of, float* out) {
  for (int64_t at = 0, tile = first / columns; at < n; ++tile) {
    const int64_t stop = std::min(n, (tile + 1) * columns - first);
    const float value = of(tile);
    if (stop - at == 16)
      std::fill(out + at, out + at + 16, value);
    else
      std::fill(out + at, out + stop, value);
    at = stop;
  }
}

// Calls piece(row, column, n, scales) for parts of the rows from `begin` to `end`: several whole rows where they are short and may
// go together, some columns of one where it is long. n: elements, and their scales; of(row, tile): the scale of a tile of a row.
template <class Of, class Piece>
inline void in_pieces(int64_t begin, int64_t end, int64_t K, int64_t columns, bool together, const Of& of, const Piece& piece) {
  float scales[SOME];
  const int64_t rows = together ? std::max<int64_t>(1, SOME / std::max<int64_t>(1, K)) : 1;
  for (int64_t i = begin; i < end; i += rows) {
    const int64_t r = std::min(rows, end - i);
    for (int64_t first = 0; first < K; first += SOME) {  // once where rows go together
      const int64_t n = std::min(SOME, K - first);
      for (int64_t q = 0; q < r; ++q)
        spread(first, n, columns, [&, row = i + q](int64_t tile) { return of(row, tile); }, scales + q * K);
      piece(i, first, n * r, scales);
    }
  }
}

// Codes of n elements of a row, a byte each; `position` is that of the first.
template <class F, class T>
inline void codes_of(const T* __restrict x, int64_t n, const float* __restrict factors, float largest, uint32_t position,
                     const int32_t* key, uint8_t* __restrict out) {
  if (key)
    for (int64_t j = 0; j < n; ++j)
      out[j] = uint8_t(
          F::code(F::drawn(clamped(number(x[j]) * factors[j], largest), uniform(position + uint32_t(j), key), largest)));
  else
    for (int64_t j = 0; j < n; ++j) out[j] = uint8_t(F::code(F::rounded(clamped(number(x[j]) * factors[j], largest))));
}

// Two codes a byte, the even one in the low half.
inline void pack(const uint8_t* __restrict codes, int64_t n, uint8_t* __restrict out) {
  for (int64_t j = 0; j < n / 2; ++j) {
    uint16_t both;
    std::memcpy(&both, codes + 2 * j, 2);
    out[j] = uint8_t(both | both >> 4);  // little-endian, as the definition takes it
  }
  if (n % 2) out[n / 2] = codes[n - 1];
}

inline void unpack(const uint8_t* __restrict packed, int64_t bytes, uint8_t* __restrict codes) {
  for (int64_t j = 0; j < bytes; ++j) {
    const uint16_t both = uint16_t((packed[j] | packed[j] << 4) & 0x0f0f);
    std::memcpy(codes + 2 * j, &both, 2);
  }
}

// In bfloat16, which has them exactly.
inline void values_of(const uint8_t* __restrict codes, int64_t n, const float* __restrict scales, uint16_t* __restrict out) {
  for (int64_t j = 0; j < n; ++j) out[j] = uint16_t(as_bits(E2M1::value(codes[j]) * scales[j]) >> 16);
}

template <class F, class T>
void encode_tiles(const T* x, int64_t M, int64_t K, int64_t rows, int64_t columns, const float* factors, float largest,
                  const int32_t* key, uint8_t* out, int threads) {
  const int64_t C = (K + columns - 1) / columns, bytes = F::nibbles ? (K + 1) / 2 : K;
  shared(M, M * K, threads, [=](int64_t begin, int64_t end) {
    uint8_t of_nibbles[SOME];
    const auto factor = [=](int64_t row, int64_t tile) { return factors[row / rows * C + tile]; };
    const bool together = !F::nibbles || K % 2 == 0;
    in_pieces(begin, end, K, columns, together, factor, [&](int64_t i, int64_t first, int64_t n, const float* of_elements) {
      uint8_t* to = out + i * bytes + (F::nibbles ? first / 2 : first);
      uint8_t* codes = F::nibbles ? of_nibbles : to;
      codes_of<F>(x + i * K + first, n, of_elements, largest, uint32_t(i * K + first), key, codes);
      if (F::nibbles) pack(codes, n, to);
    });
  });
}

// The sums over blocks of 16, each in the order of its elements: `sums` are added to.
inline void add_blocks(const float* __restrict x, int64_t blocks, float* __restrict sums) {
  for (int j = 0; j < 16; ++j)
    for (int64_t b = 0; b < blocks; ++b) sums[b] += x[b * 16 + j];
}

// What MS-EDEN makes of the scales: kernels/reference/nvfp4.py
template <class T>
void correct_scales(const T* x, int64_t blocks, float encode, const uint8_t* codes, const int32_t* key, float* scales,
                    int threads) {
  constexpr int64_t BLOCKS = 32;  // at a time
  shared(blocks, blocks * 16, threads, [=](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += BLOCKS) {
      const int64_t n = std::min(BLOCKS, end - first);
      uint8_t of_blocks[BLOCKS * 16];
      float of_elements[BLOCKS * 16], squares[BLOCKS * 16], products[BLOCKS * 16], lengths[BLOCKS] = {}, kept[BLOCKS] = {};
      unpack(codes + first * 8, n * 8, of_blocks);
      spread(0, n * 16, 16, [=](int64_t tile) { return scales[first + tile]; }, of_elements);
      for (int64_t j = 0; j < n * 16; ++j) {
        const float y = number(x[first * 16 + j]) * encode;
        squares[j] = y * y;
        products[j] = y * (E2M1::value(of_blocks[j]) * of_elements[j]);
      }
      add_blocks(squares, n, lengths);
      add_blocks(products, n, kept);
      for (int64_t b = 0; b < n; ++b) {
        const float corrected = std::min(scales[first + b] * (kept[b] == 0 ? 1.0f : lengths[b] / kept[b]), 448.0f);
        scales[first + b] = E4M3::drawn(corrected, uniform(uint32_t(first + b), key), 448.0f);
      }
    }
  });
}

// A scale for each tile: kernels/reference/quantize.py. Rows and columns of tiles lie `step_r` and `step_c` apart in `out`.
template <class T>
int quantize_tiles(const T* x, int64_t M, int64_t K, int64_t rows, int64_t columns, bool pow2, float floor, const float* given,
                   int bits, const int32_t* key, uint8_t* codes, float* out, int64_t step_r, int64_t step_c, int threads) {
  const int64_t R = (M + rows - 1) / rows, C = (K + columns - 1) / columns;
  const float largest = bits == 4 ? 448.0f : 57344.0f;
  std::vector<uint32_t> amaxes(R * C);
  if (amax(x, M, K, rows, columns, amaxes.data(), threads) >= INFINITE) return 1;
  std::vector<float> factors(R * C);
  for (int64_t t = 0; t < R * C; ++t) {
    float most = given ? given[t] : as_float(amaxes[t]);
    if (!(std::abs(most) <= FLT_MAX)) return 1;
    if (floor > 0) most = std::max(most, floor);
    float scale = std::min(largest / most, FLT_MAX);
    if (pow2) scale = as_float(as_bits(scale) & INFINITE);
    if (!(most > 0)) scale = 1.0f;
    factors[t] = scale;
    out[t / C * step_r + t % C * step_c] = 1.0f / scale;
  }
  if (bits == 4)
    encode_tiles<E4M3>(x, M, K, rows, columns, factors.data(), largest, key, codes, threads);
  else
    encode_tiles<E5M2>(x, M, K, rows, columns, factors.data(), largest, key, codes, threads);
  return 0;
}

inline float factor_of(float scale, float decode) { return std::min(1.0f / (scale * decode), FLT_MAX); }

// The errors of a row whose elements have these factors and these scales back.
template <class T>
inline void errors_of(const T* __restrict x, int64_t n, const float* __restrict factors, const float* __restrict backs,
                      bool squared, float* __restrict out) {
  for (int64_t j = 0; j < n; ++j) {
    const float y = number(x[j]), error = E2M1::rounded(clamped(y * factors[j], 6.0f)) * backs[j] - y;
    out[j] = squared ? error * error : as_float(as_bits(error) & 0x7fffffff);
  }
}

// Four over six, by errors that are summed as kernels/reference/nvfp4.py says; what lies outside of the matrix counts as zeros.
template <class T>
void choose_scales(const T* x, int64_t M, int64_t K, int64_t rows, const uint32_t* amaxes, float encode, float amax, bool squared,
                   float* scales, int threads) {
  const int64_t C = (K + 15) / 16;
  const float decode = 1.0f / encode;
  shared((M + rows - 1) / rows, M * K, threads, [=](int64_t begin, int64_t end) {
    std::vector<float> choices[2], sums[2], errors(16 * C), factors(K), backs(K);
    for (auto& each : choices) each.resize(C);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < C; ++c) {
        const float six = as_float(amaxes[r * C + c]) / 6.0f * encode;
        choices[0][c] = E4M3::rounded(std::min(six, 448.0f));
        choices[1][c] = E4M3::rounded(std::min(six * 1.5f, 448.0f));
      }
      for (int larger = 0; larger < 2; ++larger) {
        const float* chosen = choices[larger].data();
        spread(0, K, 16, [=](int64_t tile) { return factor_of(chosen[tile], decode); }, factors.data());
        spread(0, K, 16, [=](int64_t tile) { return chosen[tile] * amax * float(1.0 / (6.0 * 256.0)); }, backs.data());
        sums[larger].assign(rows * C, 0.0f);
        for (int64_t i = 0; i < std::min(rows, M - r * rows); ++i) {
          errors_of(x + (r * rows + i) * K, K, factors.data(), backs.data(), squared, errors.data());
          add_blocks(errors.data(), C, sums[larger].data() + i * C);
        }
        for (int64_t half = rows / 2; half; half /= 2)
          for (int64_t t = 0; t < half * C; ++t) sums[larger][t] += sums[larger][half * C + t];
      }
      for (int64_t c = 0; c < C; ++c) scales[r * C + c] = choices[sums[1][c] < sums[0][c]][c];
    }
  });
}

// How the scales of blocks are made.
enum Scales { NEAREST, EDEN, FOUR_OVER_SIX_SQUARED, FOUR_OVER_SIX_ABSOLUTE };

template <class T>
int quantize_nv(const T* x, int64_t M, int64_t K, int64_t rows, float bound, float per_reach, const float* given,
                const int32_t* key, int how, uint8_t* out, uint8_t* scales, float* scale, int threads) {
  const int64_t tiles = (M + rows - 1) / rows * ((K + 15) / 16);
  std::vector<uint32_t> amaxes(tiles);
  const uint32_t most = amax(x, M, K, rows, int64_t(16), amaxes.data(), threads);
  const float of_all = given ? *given : as_float(most);
  if (most >= INFINITE || !(std::abs(of_all) <= FLT_MAX)) return 1;
  float encode = std::min(bound / of_all, FLT_MAX);
  if (of_all == 0 || encode == 0) encode = 1.0f;
  *scale = std::max(of_all / bound, 0x1p-128f);
  const float per_amax = encode * per_reach, decode = 1.0f / encode;
  std::vector<float> rounded(tiles), factors(tiles);
  if (how >= FOUR_OVER_SIX_SQUARED)
    choose_scales(x, M, K, rows, amaxes.data(), encode, of_all, how == FOUR_OVER_SIX_SQUARED, rounded.data(), threads);
  else
    shared(tiles, M * K, threads, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) rounded[t] = E4M3::rounded(std::min(as_float(amaxes[t]) * per_amax, 448.0f));
    });
  shared(tiles, M * K, threads, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) factors[t] = factor_of(rounded[t], decode);
  });
  encode_tiles<E2M1>(x, M, K, rows, 16, factors.data(), 6.0f, how == EDEN ? nullptr : key, out, threads);
  if (how == EDEN) correct_scales(x, tiles, encode, out, key, rounded.data(), threads);
  for (int64_t t = 0; t < tiles; ++t) scales[t] = uint8_t(E4M3::code(rounded[t]));
  return 0;
}

// The rules for the scale of an MX block: kernels/reference/mx.py. 255 where there is none.
inline uint32_t scale_byte(uint32_t amax, float largest, int max_exponent, int mantissa, int rule) {
  int exponent;
  if (rule == 0) {
    const uint32_t bits = as_bits(as_float(amax) / largest);
    exponent = int((bits + (bits > 0x00400000 ? 0x7fffff : 0)) >> 23);
  } else {
    const uint32_t bits = amax + (rule == 2 ? 1u << (22 - mantissa) : 0);
    if (bits >= INFINITE) return 255;
    exponent = int(bits >> 23) - max_exponent;
  }
  return uint32_t(std::max(exponent, 0));
}

template <class T>
int quantize_mx(const T* x, int64_t M, int64_t K, int format, int rule, const int32_t* key, uint8_t* out, uint8_t* scales,
                int threads) {
  const int64_t C = (K + 31) / 32;
  std::vector<uint32_t> tiles(M * C);
  if (amax(x, M, K, int64_t(1), int64_t(32), tiles.data(), threads) >= INFINITE) return 1;
  const float largest = format == 0 ? 6.0f : format == 1 ? 448.0f : 57344.0f;
  const int max_exponent = format == 0 ? 2 : format == 1 ? 8 : 15, mantissa = format == 0 ? 1 : format == 1 ? 3 : 2;
  std::vector<float> factors(M * C);
  for (int64_t t = 0; t < M * C; ++t) {
    const uint32_t byte = scale_byte(tiles[t], largest, max_exponent, mantissa, rule);
    if (byte == 255) return 1;
    scales[t] = uint8_t(byte);
    factors[t] = as_float((254 - byte) << 23);
  }
  if (format == 1) encode_tiles<E4M3>(x, M, K, 1, 32, factors.data(), largest, key, out, threads);
  if (format == 2) encode_tiles<E5M2>(x, M, K, 1, 32, factors.data(), largest, key, out, threads);
  if (format == 0) encode_tiles<E2M1>(x, M, K, 1, 32, factors.data(), largest, key, out, threads);
  return 0;
}

inline void stored(float x, float* out) { *out = x; }
inline void stored(float x, uint16_t* out) {  // to nearest, ties to even
  const uint32_t bits = as_bits(x);
  *out = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class F, class T>
inline void scaled(const uint8_t* __restrict codes, int64_t n, const float* __restrict scales, T* __restrict out) {
  for (int64_t j = 0; j < n; ++j) stored(F::value(codes[j]) * scales[j], out + j);
}

template <class F>
inline bool all_finite(const uint8_t* codes, int64_t n) {
  uint8_t most = 0;
  for (int64_t j = 0; j < n; ++j) most = std::max<uint8_t>(most, codes[j] & 0x7f);
  return most < F::not_finite;
}

template <class F>
int values(const uint8_t* __restrict codes, int64_t n, uint16_t* __restrict out, int threads) {
  std::atomic<bool> finite{true};
  shared(n, n, threads, [=, &finite](int64_t begin, int64_t end) {
    if (!all_finite<F>(codes + begin, end - begin)) finite = false;
    for (int64_t j = begin; j < end; ++j) out[j] = uint16_t(as_bits(F::value(codes[j])) >> 16);
  });
  return finite ? 0 : 1;
}

// Four rows of four numbers at a time, each row in 64 bits (little-endian). Rows lie `from` and `to` numbers apart.
inline void transpose_4(const uint16_t* x, int64_t from, uint16_t* out, int64_t to) {
  constexpr uint64_t EVEN = 0x0000ffff0000ffff, LOW = 0xffffffff;
  uint64_t a[4], b[4];
  for (int i = 0; i < 4; ++i) std::memcpy(a + i, x + i * from, 8);
  for (int i = 0; i < 4; i += 2) {
    b[i] = (a[i] & EVEN) | (a[i + 1] & EVEN) << 16;
    b[i + 1] = (a[i] >> 16 & EVEN) | (a[i + 1] & ~EVEN);
  }
  for (int i = 0; i < 2; ++i) {
    a[i] = (b[i] & LOW) | b[i + 2] << 32;
    a[i + 2] = b[i] >> 32 | (b[i + 2] & ~LOW);
  }
  for (int i = 0; i < 4; ++i) std::memcpy(out + i * to, a + i, 8);
}

int transpose(const uint16_t* x, int64_t M, int64_t K, uint16_t* out, int threads) {
  constexpr int64_t SIDE = 32;  // of a block, turned in a place of its own: rows of `out` may all fall into one set of a cache
  shared((K + SIDE - 1) / SIDE, M * K, threads, [=](int64_t begin, int64_t end) {
    uint16_t block[SIDE * SIDE];
    for (int64_t i = 0; i < M; i += SIDE)
      for (int64_t j = begin * SIDE; j < std::min(K, end * SIDE); j += SIDE) {
        const int64_t m = std::min(SIDE, M - i), k = std::min(SIDE, K - j);
        const uint16_t* from = x + i * K + j;
        uint16_t* to = out + j * M + i;
        if (m == SIDE && k == SIDE) {
          for (int64_t r = 0; r < SIDE; r += 4)
            for (int64_t c = 0; c < SIDE; c += 4) transpose_4(from + r * K + c, K, block + c * SIDE + r, SIDE);
          for (int64_t c = 0; c < SIDE; ++c) std::memcpy(to + c * M, block + c * SIDE, sizeof(*x) * SIDE);
        } else {
          for (int64_t c = 0; c < k; ++c)
            for (int64_t r = 0; r < m; ++r) to[c * M + r] = from[r * K + c];
        }
      }
  });
  return 0;
}

template <class F, class T>
int dequantize_mx(const uint8_t* codes, int64_t M, int64_t K, const uint8_t* scales, T* out, int threads) {
  const int64_t C = (K + 31) / 32, bytes = F::nibbles ? (K + 1) / 2 : K;
  if (std::count(scales, scales + M * C, 255)) return 1;
  std::atomic<bool> finite{true};
  shared(M, M * K, threads, [=, &finite](int64_t begin, int64_t end) {
    uint8_t of_nibbles[SOME];
    const auto scale = [=](int64_t row, int64_t tile) {
      const uint32_t byte = scales[row * C + tile];
      return byte ? as_float(byte << 23) : 0x1p-127f;
    };
    const bool together = !F::nibbles || K % 2 == 0;
    in_pieces(begin, end, K, 32, together, scale, [&](int64_t i, int64_t first, int64_t n, const float* of_elements) {
      const uint8_t* from = codes + i * bytes + (F::nibbles ? first / 2 : first);
      if (F::nibbles) {
        unpack(from, (n + 1) / 2, of_nibbles);
        from = of_nibbles;
      } else if (!all_finite<F>(from, n)) {
        finite = false;
      }
      scaled<F>(from, n, of_elements, out + i * K + first);
    });
  });
  return finite ? 0 : 1;
}

// q times its block's scale, exactly, in bfloat16
int factors_nv(const uint8_t* codes, int64_t M, int64_t K, int64_t rows, const uint8_t* scales, uint16_t* out, int threads) {
  const int64_t R = (M + rows - 1) / rows, C = (K + 15) / 16, bytes = (K + 1) / 2;
  for (int64_t t = 0; t < R * C; ++t)
    if ((scales[t] & 0x7f) == 0x7f) return 1;
  shared(M, M * K, threads, [=](int64_t begin, int64_t end) {
    uint8_t of_nibbles[SOME];
    const auto scale = [=](int64_t row, int64_t tile) { return E4M3::value(scales[row / rows * C + tile]); };
    in_pieces(begin, end, K, 16, K % 2 == 0, scale, [&](int64_t i, int64_t first, int64_t n, const float* of_elements) {
      unpack(codes + i * bytes + first / 2, (n + 1) / 2, of_nibbles);
      values_of(of_nibbles, n, of_elements, out + i * K + first);
    });
  });
  return 0;
}

}  // namespace

extern "C" {

// x as bfloat16: 16 random bits added below the bits that stay, from position `start` on; nothing that is finite becomes infinite
int surokit_round_bf16(const float* x, int64_t n, const int32_t* key, uint32_t start, uint16_t* out, int threads) {
  constexpr uint32_t largest = 0x7f7f0000;
  return tried([&] {
    std::atomic<bool> finite{true};
    shared(n, n, threads, [&](int64_t begin, int64_t end) {
      bool here = true;
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t bits = as_bits(x[i]), size = bits & 0x7fffffff;
        here &= size < INFINITE;
        const uint32_t sum = std::min(size, largest) + (drawn_bits(start + uint32_t(i), key) >> 16);
        out[i] = uint16_t((sum | (bits & 0x80000000)) >> 16);
      }
      if (!here) finite = false;
    });
    return finite ? 0 : 1;
  });
}

int surokit_amax(const void* x, int wide, int64_t M, int64_t K, int64_t rows, int64_t columns, uint32_t* out, int threads) {
  const auto take = [&](auto* x) {
    amax(x, M, K, rows, columns, out, threads);
    return 0;
  };
  return tried([&] { return wide ? take(static_cast<const float*>(x)) : take(static_cast<const uint16_t*>(x)); });
}

// given: amaxes [R, C] in place of the tiles' own; bits: 4 for E4M3, 5 for E5M2, of exponent
int surokit_quantize(const void* x, int wide, int64_t M, int64_t K, int64_t rows, int64_t columns, int pow2, float floor,
                     const float* given, int bits, const int32_t* key, uint8_t* codes, float* scales, int64_t step_r,
                     int64_t step_c, int threads) {
  const auto quantize = [&](auto* x) {
    return quantize_tiles(x, M, K, rows, columns, pow2 != 0, floor, given, bits, key, codes, scales, step_r, step_c, threads);
  };
  return tried([&] { return wide ? quantize(static_cast<const float*>(x)) : quantize(static_cast<const uint16_t*>(x)); });
}

// What n codes stand for, in bfloat16, which has them exactly
int surokit_values(const uint8_t* codes, int64_t n, int bits, uint16_t* out, int threads) {
  return tried([&] { return bits == 4 ? values<E4M3>(codes, n, out, threads) : values<E5M2>(codes, n, out, threads); });
}

// out [K, M]: x [M, K], transposed
int surokit_transpose(const uint16_t* x, int64_t M, int64_t K, uint16_t* out, int threads) {
  return tried([&] { return transpose(x, M, K, out, threads); });
}

int surokit_quantize_nv(const void* x, int wide, int64_t M, int64_t K, int64_t rows, float bound, float per_reach,
                        const float* given, const int32_t* key, int how, uint8_t* out, uint8_t* scales, float* scale,
                        int threads) {
  const auto quantize = [&](auto* x) {
    return quantize_nv(x, M, K, rows, bound, per_reach, given, key, how, out, scales, scale, threads);
  };
  return tried([&] { return wide ? quantize(static_cast<const float*>(x)) : quantize(static_cast<const uint16_t*>(x)); });
}

// format: 0 E2M1, 1 E4M3, 2 E5M2; rule: 0 rceil, 1 floor, 2 even
int surokit_quantize_mx(const void* x, int wide, int64_t M, int64_t K, int format, int rule, const int32_t* key, uint8_t* out,
                        uint8_t* scales, int threads) {
  const auto quantize = [&](auto* x) { return quantize_mx(x, M, K, format, rule, key, out, scales, threads); };
  return tried([&] { return wide ? quantize(static_cast<const float*>(x)) : quantize(static_cast<const uint16_t*>(x)); });
}

// q times its block's scale, rounded to float32 or bfloat16
int surokit_dequantize_mx(const uint8_t* codes, int64_t M, int64_t K, int format, const uint8_t* scales, void* out, int wide,
                          int threads) {
  const auto dequantize = [&](auto* out) {
    return format == 0   ? dequantize_mx<E2M1>(codes, M, K, scales, out, threads)
           : format == 1 ? dequantize_mx<E4M3>(codes, M, K, scales, out, threads)
                         : dequantize_mx<E5M2>(codes, M, K, scales, out, threads);
  };
  return tried([&] { return wide ? dequantize(static_cast<float*>(out)) : dequantize(static_cast<uint16_t*>(out)); });
}

int surokit_factors_nv(const uint8_t* codes, int64_t M, int64_t K, int64_t rows, const uint8_t* scales, uint16_t* out,
                       int threads) {
  return tried([&] { return factors_nv(codes, M, K, rows, scales, out, threads); });
}

}
