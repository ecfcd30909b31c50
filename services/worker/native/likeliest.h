// The likeliest id of a row without the row's logits. A sketch of the output matrix, its weights rounded to 8 bits, tells
// how large each logit can be at most; the matrix itself, twice as large, is read only where an id may be the likeliest.
// The token is that of the logits, to the bit: what is computed is computed as they are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "draw.h"
#include "matmul.h"
#include "numbers.h"

namespace stallfree {

// What of each output the bound on its products is made of (Cauchy and Schwarz): with w rounded to w' and x to x',
// |w x - w' x'| <= |w - w'| |x| + |w'| |x - x'|, and the rounding of sums besides.
struct Sketch {
  Matrix rounded;
  const float* per_input;  // goes with |x|
  const float* per_error;  // goes with |x - x'|
};

// Of a row of inputs.
struct Sizes {
  float input;
  float error;
};

// Products are added up in float, in whatever order: their sum is off by less than this share of |w| |x|.
constexpr float sum_error(int num_inputs) { return num_inputs * std::numeric_limits<float>::epsilon(); }
constexpr float kSlack = 1.001f;  // for what the bounds themselves are rounded
// On top of every norm: where squares are so small that they become 0, and where the CPU takes numbers for 0.
constexpr float kNothing = 1e-16f;

// At least the root of their sum.
inline float norm_of(__m512 squares) { return kSlack * std::sqrt(_mm512_reduce_add_ps(squares)) + kNothing; }
inline __m512 norms_of(__m512 squares) {
  return _mm512_fmadd_ps(_mm512_set1_ps(kSlack), _mm512_sqrt_ps(squares), _mm512_set1_ps(kNothing));
}

// Of a row and the integers that `quantize_row` has made of it. NaN where it has NaN or an infinity.
template <class T>
Sizes sizes_of(const T* x, int num_inputs, const char* integers) {
  const char* groups = integers + num_inputs;
  __m512 of_input = _mm512_setzero_ps(), of_error = _mm512_setzero_ps();
  for (int i = 0; i < num_inputs; i += kWidth) {
    float scale;
    std::memcpy(&scale, groups + i / (kGroupLanes * 4) * sizeof(Group) + offsetof(Group, scale), sizeof scale);
    const __m512 value = Numbers<T>::load(x + i);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(integers + i));
    const __m512 rounded = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(scale));
    const __m512 error = _mm512_sub_ps(value, rounded);
    of_input = _mm512_fmadd_ps(value, value, of_input);
    of_error = _mm512_fmadd_ps(error, error, of_error);
  }
  return {norm_of(of_input), norm_of(of_error)};
}

// Calls `see(inputs)` for the 4 inputs of each lane of an integer tile, 16 outputs each, of a tile of bfloat16.
template <class See>
void for_inputs(const char* tile, int num_inputs, See&& see) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  for (int lane = 0; lane < num_inputs / 4; ++lane) {
    const __m512i first = _mm512_loadu_si512(tile + lane * 128), second = _mm512_loadu_si512(tile + lane * 128 + 64);
    const __m512 inputs[4] = {
        _mm512_castsi512_ps(_mm512_slli_epi32(first, 16)), _mm512_castsi512_ps(_mm512_and_si512(first, upper)),
        _mm512_castsi512_ps(_mm512_slli_epi32(second, 16)), _mm512_castsi512_ps(_mm512_and_si512(second, upper))};
    see(lane, inputs);
  }
}

// Rounds one tile of a matrix of bfloat16, each output by its own scale. An output that is not all finite has the scale
// NaN.
inline void sketch_tile(const char* tile, int num_inputs, char* rounded, float* scales, float* per_input,
                        float* per_error) {
  const __m512 most_int = _mm512_set1_ps(127.0f);
  __m512 largest = _mm512_setzero_ps(), all = _mm512_setzero_ps();
  for_inputs(tile, num_inputs, [&](int, const __m512* inputs) {
    for (int i = 0; i < 4; ++i) {
      largest = _mm512_max_ps(largest, _mm512_abs_ps(inputs[i]));
      all = _mm512_fmadd_ps(inputs[i], _mm512_setzero_ps(), all);  // NaN where one is no finite number
    }
  });
  const __mmask16 are_large = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kLeastMagnitude), _CMP_GT_OQ);
  const __m512 inverse = _mm512_maskz_div_ps(are_large, most_int, largest);
  const __m512 scale = _mm512_add_ps(_mm512_div_ps(largest, most_int), all);
  __m512 of_error = _mm512_setzero_ps(), of_rounded = _mm512_setzero_ps();
  for_inputs(tile, num_inputs, [&](int lane, const __m512* inputs) {
    __m512i packed = _mm512_setzero_si512();
    for (int i = 3; i >= 0; --i) {
      __m512i integer = _mm512_cvtps_epi32(_mm512_mul_ps(inputs[i], inverse));
      integer = _mm512_max_epi32(_mm512_set1_epi32(-127), _mm512_min_epi32(_mm512_set1_epi32(127), integer));
      const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(integer), scale);
      const __m512 error = _mm512_sub_ps(inputs[i], value);
      of_error = _mm512_fmadd_ps(error, error, of_error);
      of_rounded = _mm512_fmadd_ps(value, value, of_rounded);
      packed = _mm512_or_si512(_mm512_slli_epi32(packed, 8), _mm512_add_epi32(integer, _mm512_set1_epi32(128)));
    }
    _mm512_storeu_si512(rounded + lane * 64, packed);
  });
  const __m512 error = norms_of(of_error), norm = norms_of(of_rounded);
  const __m512 of_sums = _mm512_mul_ps(_mm512_set1_ps(2 * sum_error(num_inputs)), _mm512_add_ps(norm, error));
  _mm512_storeu_ps(scales, scale);
  _mm512_storeu_ps(per_input, _mm512_add_ps(error, of_sums));
  _mm512_storeu_ps(per_error, norm);
}

// A stage that finds the largest that a logit of each tile can be, float [num_rows, num_tiles]. NaN where one of the tile is
// not known to be a number.
inline void bound_logits(Member& member, const char* integers, int num_rows, const Sketch& sketch, const Sizes* sizes,
                         float* bounds) {
  const Matrix& matrix = sketch.rounded;
  const int lanes = matrix.num_inputs / 4;
  multiply_rows<Int8>(
      member, integers, integer_row_bytes(lanes), num_rows, matrix, lanes, 1,
      [&](int row, int rows, int tile, int num_tiles, const float* sums) {
        for (int t = 0; t < num_tiles; ++t) {
          const int first = (tile + t) * kWidth;
          const __m512 scale = _mm512_loadu_ps(matrix.scales + first);
          const __m512 per_input = _mm512_loadu_ps(sketch.per_input + first);
          const __m512 per_error = _mm512_loadu_ps(sketch.per_error + first);
          const __mmask16 lanes_in_use = lanes_of(first, matrix.num_outputs);
          for (int r = 0; r < rows; ++r) {
            const Sizes& own = sizes[row + r];
            __m512 bound = _mm512_mul_ps(_mm512_load_ps(sums + r * kPassStride + t * kWidth), scale);
            bound = _mm512_fmadd_ps(per_input, _mm512_set1_ps(own.input), bound);
            bound = _mm512_fmadd_ps(per_error, _mm512_set1_ps(own.error), bound);
            SoundLargest most;
            most.add(_mm512_mask_mov_ps(_mm512_set1_ps(kNever), lanes_in_use, bound));
            bounds[std::int64_t{row + r} * matrix.num_tiles + tile + t] = most.value();
          }
        }
      });
}

// Looks for the likeliest id of a row, x [num_inputs], among those that are allowed (a bit for each id, or null: all).
template <class T>
class Search {
 public:
  Search(const T* x, const Matrix& matrix, const char* allowed)
      : x_(reinterpret_cast<const char*>(x)), matrix_(matrix), allowed_(allowed) {}

  // By the bounds of each tile, which it may lower. The lowest of equally likely ones; kNoToken where a bound, or a logit
  // that was computed, is NaN or infinite, or nothing is allowed.
  std::int64_t run(float* bounds) {
    const Logits of_tiles{bounds, matrix_.num_tiles, nullptr};
    float most = sound_largest(of_tiles);
    if (!std::isfinite(most)) {
      return kNoToken;
    }
    if (allowed_ != nullptr) {
      for (int tile = 0; tile < matrix_.num_tiles; ++tile) {
        bounds[tile] = ids_of(tile) == 0 ? kNever : bounds[tile];
      }
      most = sound_largest(of_tiles);
    }
    if (most == kNever) {
      return kNoToken;
    }
    // The tile that promises most is likely the best, and spares all but a few of the others.
    look_at(static_cast<int>(first_with(of_tiles, 0, matrix_.num_tiles, most)));
    if (!is_sound_) {
      return kNoToken;
    }
    of_tiles.for_vectors(0, matrix_.num_tiles, [&](int first, __m512 values) {
      unsigned left = _mm512_cmp_ps_mask(values, _mm512_set1_ps(best_), _CMP_GE_OQ);
      for (; left != 0; left &= left - 1) {
        const int tile = first + __builtin_ctz(left);
        if (bounds[tile] >= best_) {  // which may have grown
          look_at(tile);
        }
      }
    });
    return is_sound_ ? token_ : kNoToken;
  }

 private:
  // Those of a tile that are allowed.
  __mmask16 ids_of(int tile) const {
    __mmask16 ids = lanes_of(tile * kWidth, matrix_.num_outputs);
    if (allowed_ != nullptr) {
      __mmask16 allowed;
      std::memcpy(&allowed, allowed_ + tile * kWidth / 8, sizeof allowed);
      ids &= allowed;
    }
    return ids;
  }

  void look_at(int tile) {
    const int lanes = matrix_.num_inputs / Numbers<T>::kPerLane;
    const char* base = matrix_.tiles + std::ptrdiff_t{tile} * lanes * 64;
    alignas(64) float sums[kPassStride];
    choose_pass<T, false>(1, 1)(x_, 0, Tiles{&base, 0, 1, lanes}, sums, kPassStride);
    const __m512 values = _mm512_mask_mov_ps(_mm512_set1_ps(kNever), ids_of(tile), _mm512_load_ps(sums));
    SoundLargest most;
    most.add(values);
    const float largest = most.value();
    if (!std::isfinite(largest)) {
      is_sound_ = false;
      return;
    }
    const int id = tile * kWidth + __builtin_ctz(_mm512_cmp_ps_mask(values, _mm512_set1_ps(largest), _CMP_EQ_OQ));
    if (largest > best_ || (largest == best_ && id < token_)) {
      best_ = largest;
      token_ = id;
    }
  }

  const char* x_;
  const Matrix& matrix_;
  const char* allowed_;
  float best_ = kNever;
  std::int64_t token_ = kNoToken;
  bool is_sound_ = true;
};

}  // namespace stallfree
