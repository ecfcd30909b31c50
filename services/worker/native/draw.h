// One token of a row of logits: the likeliest, or one by the row's own distribution.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "numbers.h"

namespace stallfree {

constexpr std::int64_t kNoToken = -1;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// A row, and which of its ids may be drawn.
struct Logits {
  const float* values;
  int num_ids;
  const char* allowed;  // a bit for each id, or null: all

  // Calls `see(first, values)` for every vector from `begin` to `end`; where not all ids are allowed, `begin` is a multiple
  // of 16. What is not allowed, or lies behind the end, is -inf.
  template <class See>
  void for_vectors(int begin, int end, See&& see) const {
    const __m512 never = _mm512_set1_ps(kNever);
    for (int id = begin; id < end; id += kWidth) {
      __mmask16 lanes = 0xffff;
      if (allowed != nullptr) {
        std::memcpy(&lanes, allowed + id / 8, sizeof lanes);
      }
      lanes &= lanes_of(id, end);
      see(id, _mm512_mask_loadu_ps(never, lanes, values + id));
    }
  }
};

// The largest that is allowed.
inline float largest(const Logits& logits) {
  __m512 best = _mm512_set1_ps(kNever);
  logits.for_vectors(0, logits.num_ids, [&](int, __m512 values) { best = _mm512_max_ps(best, values); });
  return _mm512_reduce_max_ps(best);
}

// Gathers the largest of some values, and whether one of them is NaN or +inf: then the row's model has gone wrong.
class SoundLargest {
 public:
  void add(__m512 values) {
    is_unsound_ |= _mm512_cmp_ps_mask(values, _mm512_set1_ps(std::numeric_limits<float>::infinity()), _CMP_NLT_UQ);
    best_ = _mm512_max_ps(best_, values);
  }

  // NaN where one is unsound.
  float value() const {
    return is_unsound_ ? std::numeric_limits<float>::quiet_NaN() : _mm512_reduce_max_ps(best_);
  }

 private:
  __m512 best_ = _mm512_set1_ps(kNever);
  __mmask16 is_unsound_ = 0;
};

inline float sound_largest(const Logits& logits) {
  SoundLargest most;
  logits.for_vectors(0, logits.num_ids, [&](int, __m512 values) { most.add(values); });
  return most.value();
}

// The lowest id from `begin` to `end` that has this value.
inline std::int64_t first_with(const Logits& logits, int begin, int end, float value) {
  constexpr int kStep = 64 * kWidth;
  const __m512 wanted = _mm512_set1_ps(value);
  for (; begin < end; begin += kStep) {
    std::int64_t found = kNoToken;
    logits.for_vectors(begin, std::min(begin + kStep, end), [&](int first, __m512 values) {
      const __mmask16 equal = _mm512_cmp_ps_mask(values, wanted, _CMP_EQ_OQ);
      if (equal && found == kNoToken) {
        found = first + __builtin_ctz(equal);
      }
    });
    if (found != kNoToken) {
      return found;
    }
  }
  return kNoToken;
}

// The id whose weight carries the sum of the weights exp((logit - best) / temperature) past `share`, in [0, 1), of them
// all. First the block of ids, then the id in it, so that no running sum over all ids is kept.
inline std::int64_t at_share(const Logits& logits, float best, float temperature, double share) {
  constexpr int kBlock = 64 * kWidth;
  const __m512 top = _mm512_set1_ps(best), per = _mm512_set1_ps(1 / temperature);
  const auto weight = [=](__m512 values) { return exponential(_mm512_mul_ps(_mm512_sub_ps(values, top), per)); };
  const auto sum_of = [&](int begin) {
    __m512 sum = _mm512_setzero_ps();
    logits.for_vectors(begin, std::min(begin + kBlock, logits.num_ids),
                       [&](int, __m512 values) { sum = _mm512_add_ps(sum, weight(values)); });
    return static_cast<double>(_mm512_reduce_add_ps(sum));
  };
  double total = 0;
  for (int begin = 0; begin < logits.num_ids; begin += kBlock) {
    total += sum_of(begin);
  }
  double left = share * total, behind = 0;  // the sum of the block so far
  int block = 0;
  for (int begin = 0; begin < logits.num_ids && left >= behind; begin += kBlock) {
    const double sum = sum_of(begin);
    if (sum > 0) {  // else nothing in it can be drawn
      left -= behind;
      block = begin;
      behind = sum;
    }
  }
  std::int64_t token = kNoToken;
  bool is_found = false;
  alignas(64) float weights[kWidth];
  logits.for_vectors(block, std::min(block + kBlock, logits.num_ids), [&](int first, __m512 values) {
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

// `maxima` are the `SoundLargest` of every `ids_per_maximum` ids, allowed or not: of one each where nobody found them before.
// `temperature` 0 draws the likeliest, of equal ones that with the lowest id.
inline std::int64_t draw(const Logits& logits, const float* maxima, int ids_per_maximum, float temperature, double share) {
  const Logits blocks{maxima, (logits.num_ids + ids_per_maximum - 1) / ids_per_maximum, nullptr};
  const float of_all = sound_largest(blocks);
  if (!std::isfinite(of_all)) {
    return kNoToken;
  }
  const float best = logits.allowed == nullptr ? of_all : largest(logits);
  if (!std::isfinite(best)) {
    return kNoToken;
  }
  if (temperature != 0) {
    return at_share(logits, best, temperature, share);
  }
  if (logits.allowed != nullptr) {
    return first_with(logits, 0, logits.num_ids, best);
  }
  const int begin = static_cast<int>(first_with(blocks, 0, blocks.num_ids, best)) * ids_per_maximum;
  return first_with(logits, begin, std::min(begin + ids_per_maximum, logits.num_ids), best);
}

}  // namespace stallfree
