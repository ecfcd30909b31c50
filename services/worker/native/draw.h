// One token of a row of logits: the likeliest, or one by the row's own distribution.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "numbers.h"

namespace stallfree {

constexpr std::int64_t kNoToken = -1;  // where a row has NaN, +inf or nothing but -inf

// Calls `see(first, values)` for every vector of a row; what lies behind its end is -inf.
template <class See>
void for_vectors(const float* row, int begin, int end, See&& see) {
  int id = begin;
  for (; id + kWidth <= end; id += kWidth) {
    see(id, _mm512_loadu_ps(row + id));
  }
  if (id < end) {
    const auto rest = static_cast<__mmask16>((1u << (end - id)) - 1);
    see(id, _mm512_mask_loadu_ps(_mm512_set1_ps(-std::numeric_limits<float>::infinity()), rest, row + id));
  }
}

// The largest of a row, or NaN where there is one.
inline float largest(const float* row, int num_ids) {
  __m512 best = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  __mmask16 has_nan = 0;
  for_vectors(row, 0, num_ids, [&](int, __m512 values) {
    has_nan |= _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    best = _mm512_max_ps(best, values);
  });
  return has_nan ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(best);
}

// The lowest id that has this value.
inline std::int64_t first_with(const float* row, int num_ids, float value) {
  const __m512 wanted = _mm512_set1_ps(value);
  for (int id = 0; id < num_ids; id += kWidth) {
    const auto rest = static_cast<__mmask16>(num_ids - id < kWidth ? (1u << (num_ids - id)) - 1 : 0xffff);
    const __mmask16 found = _mm512_mask_cmp_ps_mask(rest, _mm512_maskz_loadu_ps(rest, row + id), wanted, _CMP_EQ_OQ);
    if (found) {
      return id + __builtin_ctz(found);
    }
  }
  return kNoToken;
}

// The id whose weight carries the sum of the weights exp((logit - best) / temperature) past `share`, in [0, 1), of them
// all. First the block of ids, then the id in it, so that no running sum over all ids is kept.
inline std::int64_t at_share(const float* row, int num_ids, float best, float temperature, double share) {
  constexpr int kBlock = 1024;
  const __m512 top = _mm512_set1_ps(best), per = _mm512_set1_ps(1 / temperature);
  const auto weight = [=](__m512 values) { return exponential(_mm512_mul_ps(_mm512_sub_ps(values, top), per)); };
  const auto sum_of = [&](int begin) {
    __m512 sum = _mm512_setzero_ps();
    for_vectors(row, begin, std::min(begin + kBlock, num_ids),
                [&](int, __m512 values) { sum = _mm512_add_ps(sum, weight(values)); });
    return static_cast<double>(_mm512_reduce_add_ps(sum));
  };
  double total = 0;
  for (int begin = 0; begin < num_ids; begin += kBlock) {
    total += sum_of(begin);
  }
  double left = share * total;
  int block = 0;
  for (int begin = 0; begin < num_ids; begin += kBlock) {
    const double sum = sum_of(begin);
    if (sum > 0) {  // else nothing in it can be drawn
      block = begin;
      if (left < sum) {
        break;
      }
      left -= sum;
    }
  }
  std::int64_t token = kNoToken;
  bool is_found = false;
  alignas(64) float weights[kWidth];
  for_vectors(row, block, std::min(block + kBlock, num_ids), [&](int first, __m512 values) {
    if (is_found) {
      return;
    }
    _mm512_store_ps(weights, weight(values));
    for (int lane = 0; lane < kWidth && !is_found; ++lane) {
      if (weights[lane] > 0) {
        token = first + lane;  // the last one that can be drawn, where rounding leaves nothing behind it
        is_found = left < weights[lane];
        left -= weights[lane];
      }
    }
  });
  return token;
}

// `temperature` 0 draws the likeliest, of equal ones that with the lowest id.
inline std::int64_t draw(const float* row, int num_ids, float temperature, double share) {
  const float best = largest(row, num_ids);
  if (!std::isfinite(best)) {
    return kNoToken;
  }
  return temperature == 0 ? first_with(row, num_ids, best) : at_share(row, num_ids, best, temperature, share);
}

}  // namespace stallfree
