// Products of a few or many rows with matrices that lie in tiles.
//
// A tile is 16 rows of a matrix, or 16 columns of its transpose, as [lanes of k][16]: one vector load gives the same
// lane of 16 outputs. Weights are packed so once; the keys and values of a KV block are kept so. Every sum runs over k in
// order, in one accumulator (integers: one for each group of k): a row's result is the same to the bit whatever other rows
// are in the batch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

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

// Adds to `sums` the products of a lane of so many rows, `x_stride` bytes apart, with the same lane of so many tiles, whose
// lanes `ahead` bytes further on are called for.
template <class T, int ROWS, int TILES>
[[gnu::always_inline]] inline void add_lane(const char* x, std::ptrdiff_t x_stride, const char* tiles,
                                            std::ptrdiff_t tile_stride, std::ptrdiff_t ahead,
                                            typename Numbers<T>::Sum (&sums)[ROWS][TILES]) {
  __m512i weights[TILES];
#pragma GCC unroll 4
  for (int t = 0; t < TILES; ++t) {
    weights[t] = _mm512_loadu_si512(tiles + t * tile_stride);
    _mm_prefetch(tiles + t * tile_stride + ahead, kPrefetchHint);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    const __m512i lane = broadcast_lane(x + r * x_stride);
#pragma GCC unroll 4
    for (int t = 0; t < TILES; ++t) {
      sums[r][t] = Numbers<T>::dot(sums[r][t], lane, weights[t]);
    }
  }
}

// out[r][t * 16 ...] (+)= sum over k of x[r][k] * tile t's [k]; strides of x in bytes, of `out` in floats.
template <class T, int ROWS, int TILES, bool ADDS>
void multiply_pass(const char* x, std::ptrdiff_t x_stride, const Tiles& tiles, float* out, int out_stride) {
  typename Numbers<T>::Sum sums[ROWS][TILES];
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
        add_lane<T>(x + k * 4, x_stride, base + k * 64, tiles.tile_stride, ahead, sums);
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

// A row of activations as 8-bit integers: after the integers themselves, 4 to a lane, their groups.
constexpr int kGroupLanes = 16;
struct Group {
  float scale;
  std::int32_t offset;  // what the sum of its products lacks, because weights are kept 128 too large: unsigned
};

constexpr int groups_of(int lanes) { return (lanes + kGroupLanes - 1) / kGroupLanes; }

// Bytes of such a row.
constexpr std::ptrdiff_t integer_row_bytes(int lanes) {
  return std::ptrdiff_t{lanes} * 4 + groups_of(lanes) * std::ptrdiff_t{sizeof(Group)};
}

// The same for integers, but for the scales of the weights. Products of one group are summed up exactly.
template <int ROWS, int TILES>
void multiply_integer_pass(const char* x, std::ptrdiff_t x_stride, const Tiles& tiles, float* out, int out_stride) {
  const char* group = x + std::ptrdiff_t{tiles.lanes} * 4;
  for (int first = 0; first < tiles.lanes; first += kGroupLanes, group += sizeof(Group)) {
    const int end = std::min(tiles.lanes, first + kGroupLanes);
    const bool is_last = end + kPrefetchLanes > tiles.lanes;
    const std::ptrdiff_t ahead = kPrefetchLanes * 64 + (is_last ? (TILES - 1) * tiles.tile_stride : 0);
    Numbers<Int8>::Sum sums[ROWS][TILES];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int t = 0; t < TILES; ++t) {
        sums[r][t] = (Numbers<Int8>::Sum)broadcast_lane(group + r * x_stride + offsetof(Group, offset));
      }
    }
    for (int k = first; k < end; ++k) {
      add_lane<Int8>(x + k * 4, x_stride, tiles.base[0] + k * 64, tiles.tile_stride, ahead, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const __m512 scale = _mm512_castsi512_ps(broadcast_lane(group + r * x_stride + offsetof(Group, scale)));
#pragma GCC unroll 4
      for (int t = 0; t < TILES; ++t) {
        float* at = out + r * out_stride + t * kWidth;
        const __m512 before = first == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(at);
        _mm512_storeu_ps(at, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)sums[r][t]), scale, before));
      }
    }
  }
}

using Pass = void (*)(const char*, std::ptrdiff_t, const Tiles&, float*, int);

template <class T, int ROWS, int TILES, bool ADDS>
constexpr Pass pass_of() {
  if constexpr (std::is_same_v<T, Int8>) {
    return multiply_integer_pass<ROWS, TILES>;
  } else {
    return multiply_pass<T, ROWS, TILES, ADDS>;
  }
}

// The pass for this many rows and tiles. There are 32 vector registers: 8 rows go with up to 3 tiles, 6 with 4.
template <class T, bool ADDS>
Pass choose_pass(int rows, int tiles) {
  static constexpr Pass kPasses[kMostRows][kMostTiles] = {
#define STALLFREE_ROW(R)                                                                                   \
  {                                                                                                        \
    pass_of<T, R, 1, ADDS>(), pass_of<T, R, 2, ADDS>(), pass_of<T, R, 3, ADDS>(),                          \
        pass_of<T, R, (R <= 6 ? 4 : 3), ADDS>()                                                            \
  }
      STALLFREE_ROW(1), STALLFREE_ROW(2), STALLFREE_ROW(3), STALLFREE_ROW(4),
      STALLFREE_ROW(5), STALLFREE_ROW(6), STALLFREE_ROW(7), STALLFREE_ROW(8),
#undef STALLFREE_ROW
  };
  return kPasses[rows - 1][tiles - 1];
}

// How many rows of `num_rows` go through each pass: all while they fit one, so that weights come from memory once.
struct Passes {
  explicit constexpr Passes(int num_rows) : most_rows(num_rows <= kMostRows ? num_rows : 6), tiles(most_rows <= 6 ? 4 : 3) {}

  int rows(int num_left) const {
    return num_left <= most_rows ? num_left : num_left < 2 * most_rows ? (num_left + 1) / 2 : most_rows;
  }

  const int most_rows;
  const int tiles;
};

// A matrix [16 * num_tiles, num_inputs] with its first `num_outputs` rows in use.
struct Matrix {
  const char* tiles;
  const float* bias;    // or null
  const float* scales;  // of each output, where weights are 8-bit integers, kept 128 too large; or null
  int num_outputs;
  int num_tiles;
  int num_inputs;
};

constexpr float kLeastMagnitude = 1e-30f;  // its inverse is still a number

// Rounds `num_inputs` numbers to integers, each group by its own scale. Where one is NaN or infinite the scale is NaN, and
// so is every product.
template <class T>
void quantize_row(const T* x, int num_inputs, char* to) {
  char* groups = to + num_inputs;
  const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
  for (int first = 0; first < num_inputs; first += kGroupLanes * 4, groups += sizeof(Group)) {
    const int end = std::min(num_inputs, first + kGroupLanes * 4);
    __m512i most = _mm512_setzero_si512();  // as integers magnitudes are in the same order, and NaN is the largest
    for (int i = first; i < end; i += kWidth) {
      most = _mm512_max_epu32(most, _mm512_and_si512(no_sign, _mm512_castps_si512(Numbers<T>::load(x + i))));
    }
    const std::uint32_t bits = _mm512_reduce_max_epu32(most);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const __m512 inverse = _mm512_set1_ps(largest > kLeastMagnitude ? 127.0f / largest : 0.0f);
    __m512i total = _mm512_setzero_si512();
    for (int i = first; i < end; i += kWidth) {
      __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(Numbers<T>::load(x + i), inverse));
      rounded = _mm512_max_epi32(rounded, _mm512_set1_epi32(-127));  // what NaN is rounded to is far below
      total = _mm512_add_epi32(total, rounded);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(rounded));
    }
    const Group group{0 * largest + largest / 127.0f, -128 * _mm512_reduce_add_epi32(total)};
    std::memcpy(groups, &group, sizeof group);
  }
}

// A stage that multiplies x, `num_rows` rows that lie `x_stride` bytes apart, with a matrix of so many lanes. `take(row,
// rows, tile, tiles, sums)` is given float sums, [rows][kPassStride], as they come.
template <class T, class Take>
void multiply_rows(Member& member, const char* x, std::ptrdiff_t x_stride, int num_rows, const Matrix& matrix,
                   int lanes, int tile_multiple, Take&& take) {
  const std::ptrdiff_t tile_stride = std::ptrdiff_t{lanes} * 64;
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
  member.share_parts(num_passes_of, [&](int part, int number) {
    const Range own = tiles_of(part);
    const int tile = own.begin + number * widest;
    const int num_tiles = std::min(widest, own.end - tile);
    const char* base = matrix.tiles + tile * tile_stride;
    const Tiles tiles{&base, tile_stride, 1, lanes};
    for (int row = 0, rows = 0; row < num_rows; row += rows) {
      rows = passes.rows(num_rows - row);
      choose_pass<T, false>(rows, num_tiles)(x + row * x_stride, x_stride, tiles, sums, kPassStride);
      take(row, rows, tile, num_tiles, sums);
    }
  });
}

// Multiplies x, [num_rows, num_inputs], with a matrix, in a stage, or in two where it is of integers: `integers` has room
// for all of x then.
template <class T, class Take>
void multiply(Member& member, const T* x, int num_rows, const Matrix& matrix, int tile_multiple, char* integers,
              Take&& take) {
  if (matrix.scales == nullptr) {
    constexpr int kPer = Numbers<T>::kPerLane;
    multiply_rows<T>(member, reinterpret_cast<const char*>(x), std::ptrdiff_t{matrix.num_inputs} * sizeof(T), num_rows,
                     matrix, matrix.num_inputs / kPer, tile_multiple, take);
    return;
  }
  const int lanes = matrix.num_inputs / 4;
  const std::ptrdiff_t stride = integer_row_bytes(lanes);
  member.share_small(num_rows, [&](int row) {
    quantize_row(x + std::int64_t{row} * matrix.num_inputs, matrix.num_inputs, integers + row * stride);
  });
  multiply_rows<Int8>(member, integers, stride, num_rows, matrix, lanes, tile_multiple,
                      [&](int row, int rows, int tile, int num_tiles, float* sums) {
                        const float* scales = matrix.scales + tile * kWidth;
                        for (int r = 0; r < rows; ++r) {
                          for (int t = 0; t < num_tiles; ++t) {
                            float* at = sums + r * kPassStride + t * kWidth;
                            const __m512 scale = _mm512_loadu_ps(scales + t * kWidth);
                            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), scale));
                          }
                        }
                        take(row, rows, tile, num_tiles, sums);
                      });
}

}  // namespace stallfree
