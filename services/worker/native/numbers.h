// The number formats that weights and activations may have, the KV cache too but for integers, and vector arithmetic on
// them.
//
// Everything is made of 4-byte lanes: one float, or two neighbouring bfloat16 values, or four 8-bit integers, whose products
// with as many others the CPU adds up in one instruction. Sums are float, those of integers 32-bit integers.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace stallfree {

constexpr int kWidth = 16;  // lanes of a vector

// Which lanes of the vector that begins at `first` lie before `end`.
inline __mmask16 lanes_of(int first, int end) {
  return end - first < kWidth ? static_cast<__mmask16>((1u << (end - first)) - 1) : static_cast<__mmask16>(0xffff);
}

struct Bf16 {
  std::uint16_t bits;
};
struct Int8 {};

template <class T>
struct Numbers;

template <>
struct Numbers<float> {
  static constexpr int kPerLane = 1;
  using Sum = __m512;

  static __m512 dot(__m512 sum, __m512i x, __m512i y) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(y), sum);
  }
  static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, __m512 values) { _mm512_storeu_ps(to, values); }
};

template <>
struct Numbers<Bf16> {
  static constexpr int kPerLane = 2;
  using Sum = __m512;

  static __m512 dot(__m512 sum, __m512i x, __m512i y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
  static __m512 load(const Bf16* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static void store(Bf16* to, __m512 values) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(values));
  }
};

template <>
struct Numbers<Int8> {
  static constexpr int kPerLane = 4;
  // As the intrinsics have it inside: arrays of __m512i the compiler keeps in memory.
  using Sum = int __attribute__((vector_size(64)));

  // x is signed, y is not.
  static Sum dot(Sum sum, __m512i x, __m512i y) { return (Sum)_mm512_dpbusd_epi32((__m512i)sum, y, x); }
};

// All lanes hold the lane at `from`.
inline __m512i broadcast_lane(const void* from) {
  std::int32_t lane;
  std::memcpy(&lane, from, sizeof lane);
  return _mm512_set1_epi32(lane);
}

// e^x to about 2 units in the last place; 0 from -104 down and infinite from 89 up, as float has nothing beyond. NaN
// stays NaN: where one operand is, these instructions give the second.
inline __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(89.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
  }
  return _mm512_scalef_ps(sum, n);
}

// Both of eight angles, to about a unit in the last place, and to 1e-10 for angles of a million, near the places where they
// are 0. Whole quarters of a turn are taken off in double.
inline void sine_and_cosine(__m256 angles, __m256* sine, __m256* cosine) {
  const __m512d angle = _mm512_cvtps_pd(angles);
  const __m512d quarters = _mm512_roundscale_pd(_mm512_mul_pd(angle, _mm512_set1_pd(0.63661977236758134)),
                                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512d rest = _mm512_fnmadd_pd(quarters, _mm512_set1_pd(1.57079632679489662), angle);
  const __m512d square = _mm512_mul_pd(rest, rest);
  __m512d odd = _mm512_set1_pd(1.0 / 362880), even = _mm512_set1_pd(-1.0 / 3628800);
  for (const double coefficient : {-1.0 / 5040, 1.0 / 120, -1.0 / 6, 1.0}) {
    odd = _mm512_fmadd_pd(odd, square, _mm512_set1_pd(coefficient));
  }
  for (const double coefficient : {1.0 / 40320, -1.0 / 720, 1.0 / 24, -0.5, 1.0}) {
    even = _mm512_fmadd_pd(even, square, _mm512_set1_pd(coefficient));
  }
  const __m256 sine_of_rest = _mm512_cvtpd_ps(_mm512_mul_pd(odd, rest)), cosine_of_rest = _mm512_cvtpd_ps(even);
  const __m256i quarter = _mm512_cvtpd_epi32(quarters), next = _mm256_add_epi32(quarter, _mm256_set1_epi32(1));
  const __m256 minus = _mm256_set1_ps(-0.0f);
  const __mmask8 are_swapped = _mm256_test_epi32_mask(quarter, _mm256_set1_epi32(1));
  const __m256 first = _mm256_mask_blend_ps(are_swapped, sine_of_rest, cosine_of_rest);
  const __m256 second = _mm256_mask_blend_ps(are_swapped, cosine_of_rest, sine_of_rest);
  *sine = _mm256_mask_xor_ps(first, _mm256_test_epi32_mask(quarter, _mm256_set1_epi32(2)), first, minus);
  *cosine = _mm256_mask_xor_ps(second, _mm256_test_epi32_mask(next, _mm256_set1_epi32(2)), second, minus);
}

inline __m512 tangent_hyperbolic(__m512 x) {
  // 1 - 2 / (e^2x + 1) is exact enough at both ends, where e^2x is 0 or infinite.
  const __m512 power = exponential(_mm512_add_ps(x, x));
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

// What keeps scores and logits within `cap`.
inline __m512 soft_capped(__m512 x, float cap) {
  const __m512 most = _mm512_set1_ps(cap);
  return _mm512_mul_ps(most, tangent_hyperbolic(_mm512_div_ps(x, most)));
}

}  // namespace stallfree
