// Defines a vector: as many floats as one register holds, by the compiler's own vector types.
//
// Bits do not depend on the width: products are fused where the code says `multiply_add` and nowhere else
// (-ffp-contract=off), and every sum across lanes runs over sixteen partial sums, whatever the register.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tandem {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

constexpr int kWide = 16;  // floats in a `Wide`: the unit of every sum across lanes
constexpr int kParts = kWide / kLanes;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float UnalignedVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t BitsVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t UnalignedBitsVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));

static inline Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }

static inline void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }
// Not `Vec{} + value`: that adds a zero first and occupies two multiply units for each row of a product.
static inline Vec splat(float value) { return value - Vec{}; }
static inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// a * b + c, rounded once where the machine can.
static inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns whether any lane of a comparison is true.
static inline bool any_of(IntVec is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_movemask_epi8((__m256i)is_true);
#else
  int32_t all = 0;
  for (int i = 0; i < kLanes; i++) all |= is_true[i];
  return all;
#endif
}

struct Wide {
  Vec part[kParts];
};

static inline Wide wide_splat(float value) {
  Wide all;
  for (int i = 0; i < kParts; i++) all.part[i] = splat(value);
  return all;
}

// Adds in a fixed order: the same sixteen numbers are always the same sum.
static inline float sum_of(const Wide& value) {
  float lane[kWide];
  memcpy(lane, &value, sizeof lane);
  for (int step = kWide / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lane[i] += lane[i + step];
  return lane[0];
}

static inline float largest_of(const Wide& value) {
  float lane[kWide];
  memcpy(lane, &value, sizeof lane);
  for (int step = kWide / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
  return lane[0];
}

// e^x by 2^n * p(f) with a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2]; relative error below 2e-7. Beneath -87.3 it
// stays at e^-87.3, above 88.3 at e^88.3. Every lane is computed alike: no result depends on its neighbours.
static inline Vec exp_of(Vec x) {
  const Vec low = splat(-87.3f), high = splat(88.3f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec rounding = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves an integer
  const Vec n = multiply_add(x, splat(1.44269504088896341f), rounding) - rounding;
  Vec f = multiply_add(n, splat(-0.693359375f), x);
  f = multiply_add(n, splat(2.12194440e-4f), f);
  Vec p = splat(1.9875691500e-4f);
  p = multiply_add(p, f, splat(1.3981999507e-3f));
  p = multiply_add(p, f, splat(8.3334519073e-3f));
  p = multiply_add(p, f, splat(4.1665795894e-2f));
  p = multiply_add(p, f, splat(1.6666665459e-1f));
  p = multiply_add(p, f, splat(5.0000001201e-1f));
  p = multiply_add(p, f * f, f) + 1.0f;
  const IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  return p * (Vec)exponent;
}

static inline float exp_of(float x) { return exp_of(splat(x))[0]; }

// Within 1e-7 of tanh; its error is relative to 1, not to a tiny x.
static inline Vec tanh_of(Vec x) { return 1.0f - 2.0f / (exp_of(2.0f * x) + 1.0f); }

}  // namespace tandem
