// Products of a few or many rows with matrices that lie in tiles.
//
// A tile is 16 rows of a matrix, or 16 columns of its transpose, as [lanes of k][16]: one vector load gives the same
// lane of 16 outputs. Weights are packed so once; the keys and values of a KV block are kept so. Every sum runs over k in
// order, in one accumulator: a row's result is the same to the bit whatever other rows are in the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>

#include "numbers.h"
#include "team.h"

namespace stallfree {

constexpr int kMostRows = 8;   // of one pass
constexpr int kMostTiles = 4;  // of one pass
constexpr int kPassStride = kMostTiles * kWidth;
// So far ahead that memory keeps up while eight rows are multiplied, and into the second cache only: the first one's few
// outstanding misses are left to what is loaded now.
constexpr int kPrefetchLanes = 32;
constexpr _mm_hint kPrefetchHint = _MM_HINT_T1;

// The tiles of one pass: tile `t` of segment `s` begins at `base[s] + t * tile_stride`, in bytes. A product may run over
// several segments, as along the blocks of a sequence.
struct Tiles {
  const char* const* base;
  std::ptrdiff_t tile_stride;
  int num_segments;
  int lanes;  // of k in every segment
};

// out[r][t * 16 ...] (+)= sum over k of x[r][k] * tile t's [k]; strides of x in bytes, of `out` in floats.
template <class T, int ROWS, int TILES, bool ADDS>
void multiply_pass(const char* x, std::ptrdiff_t x_stride, const Tiles& tiles, float* out, int out_stride) {
  __m512 sums[ROWS][TILES];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < TILES; ++t) {
      sums[r][t] = ADDS ? _mm512_loadu_ps(out + r * out_stride + t * kWidth) : _mm512_setzero_ps();
    }
  }
  for (int s = 0; s < tiles.num_segments; ++s) {
    const char* base = tiles.base[s];
    const int lanes = tiles.lanes;
    const int first_ahead = std::max(0, lanes - kPrefetchLanes);
    std::ptrdiff_t ahead = kPrefetchLanes * 64;
    for (int k = 0, end = first_ahead; k < lanes; end = lanes, ahead += (TILES - 1) * tiles.tile_stride) {
      for (; k < end; ++k) {
        __m512i weights[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; ++t) {
          const char* from = base + t * tiles.tile_stride + k * 64;
          weights[t] = _mm512_loadu_si512(from);
          _mm_prefetch(from + ahead, kPrefetchHint);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const __m512i lane = broadcast_lane(x + r * x_stride + k * 4);
#pragma GCC unroll 4
          for (int t = 0; t < TILES; ++t) {
            sums[r][t] = Numbers<T>::dot(sums[r][t], lane, weights[t]);
          }
        }
      }
    }
    x += static_cast<std::ptrdiff_t>(lanes) * 4;
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
    for (int t = 0; t < TILES; ++t) {
      _mm512_storeu_ps(out + r * out_stride + t * kWidth, sums[r][t]);
    }
  }
}

using Pass = void (*)(const char*, std::ptrdiff_t, const Tiles&, float*, int);

// The pass for this many rows and tiles. There are 32 vector registers: 8 rows go with up to 3 tiles, 6 with 4.
template <class T, bool ADDS>
Pass choose_pass(int rows, int tiles) {
  static constexpr Pass kPasses[kMostRows][kMostTiles] = {
#define STALLFREE_ROW(R)                                                                                   \
  {                                                                                                        \
    multiply_pass<T, R, 1, ADDS>, multiply_pass<T, R, 2, ADDS>, multiply_pass<T, R, 3, ADDS>,              \
        multiply_pass<T, R, (R <= 6 ? 4 : 3), ADDS>                                                        \
  }
      STALLFREE_ROW(1), STALLFREE_ROW(2), STALLFREE_ROW(3), STALLFREE_ROW(4),
      STALLFREE_ROW(5), STALLFREE_ROW(6), STALLFREE_ROW(7), STALLFREE_ROW(8),
#undef STALLFREE_ROW
  };
  return kPasses[rows - 1][tiles - 1];
}

// How many rows of `num_rows` go through each pass: all while they fit one, so that weights come from memory once.
struct Passes {
  explicit Passes(int num_rows) : most_rows(num_rows <= kMostRows ? num_rows : 6), tiles(most_rows <= 6 ? 4 : 3) {}

  int rows(int num_left) const {
    return num_left <= most_rows ? num_left : num_left < 2 * most_rows ? (num_left + 1) / 2 : most_rows;
  }

  const int most_rows;
  const int tiles;
};

// A matrix [16 * num_tiles, lanes] with its first `num_outputs` rows in use.
struct Matrix {
  const char* tiles;
  const float* bias;    // or null
  const float* scales;  // of each output, where weights are 8-bit integers; or null
  int num_outputs;
  int num_tiles;
  int lanes;
};

// Integers as bfloat16, which holds all of them exactly: `num_lanes` vectors of 16 lanes.
inline void widen(const char* from, char* to, std::ptrdiff_t num_lanes) {
  for (std::ptrdiff_t lane = 0; lane < num_lanes; ++lane) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + lane * 32));
    _mm_prefetch(from + lane * 32 + kPrefetchLanes * 64, kPrefetchHint);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    _mm512_storeu_si512(to + lane * 64, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
}

// A thread's own memory, kept from call to call; whole cache lines.
inline char* own_bytes(std::size_t num_bytes) {
  thread_local std::unique_ptr<char, decltype(&std::free)> bytes(nullptr, &std::free);
  thread_local std::size_t size = 0;
  if (size < num_bytes) {
    bytes.reset(static_cast<char*>(std::aligned_alloc(64, num_bytes)));
    size = num_bytes;
  }
  return bytes.get();
}

inline void scale(const float* scales, int rows, int num_tiles, float* sums) {
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < num_tiles; ++t) {
      float* at = sums + r * kPassStride + t * kWidth;
      _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_loadu_ps(scales + t * kWidth)));
    }
  }
}

// A stage that multiplies x, `num_rows` rows that lie `x_stride` bytes apart, with a matrix. `take(row, rows, tile, tiles,
// sums)` is given float sums, [rows][kPassStride], as they come. Integer weights are widened a pass's tiles at a time,
// which stay in the cache for all rows.
template <class T, class Take>
void multiply(Member& member, const void* x, std::ptrdiff_t x_stride, int num_rows, const Matrix& matrix,
              int tile_multiple, Take&& take) {
  const std::ptrdiff_t tile_stride = std::ptrdiff_t{matrix.lanes} * 64;
  const Passes passes(num_rows);
  const int widest = passes.tiles / tile_multiple * tile_multiple;
  const int num_units = (matrix.num_tiles + tile_multiple - 1) / tile_multiple;
  const auto tiles_of = [&](int part) {
    const Range units = part_of(num_units, part, member.num_threads);
    return Range{units.begin * tile_multiple, std::min(matrix.num_tiles, units.end * tile_multiple)};
  };
  const auto num_passes_of = [&](int part) {
    const Range own = tiles_of(part);
    return (own.end - own.begin + widest - 1) / widest;
  };
  alignas(64) float sums[kMostRows * kPassStride];
  char* widened = matrix.scales == nullptr ? nullptr : own_bytes(widest * tile_stride);
  member.share_parts(num_passes_of, [&](int part, int number) {
    const Range own = tiles_of(part);
    const int tile = own.begin + number * widest;
    const int num_tiles = std::min(widest, own.end - tile);
    const char* base = matrix.tiles + tile * tile_stride;
    if (matrix.scales != nullptr) {
      widen(matrix.tiles + tile * tile_stride / 2, widened, std::ptrdiff_t{num_tiles} * matrix.lanes);
      base = widened;
    }
    const Tiles tiles{&base, tile_stride, 1, matrix.lanes};
    for (int row = 0, rows = 0; row < num_rows; row += rows) {
      rows = passes.rows(num_rows - row);
      const char* first = static_cast<const char*>(x) + row * x_stride;
      choose_pass<T, false>(rows, num_tiles)(first, x_stride, tiles, sums, kPassStride);
      if (matrix.scales != nullptr) {
        scale(matrix.scales + tile * kWidth, rows, num_tiles, sums);
      }
      take(row, rows, tile, num_tiles, sums);
    }
  });
}

}  // namespace stallfree
