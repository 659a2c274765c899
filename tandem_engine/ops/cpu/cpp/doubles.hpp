// Logarithms and exponentials in double, for sampling: the same bits on every machine.
//
// Sums, products and quotients alone, none of them fused: no libm, and no difference between machines that fuse
// products and those that do not.
#pragma once
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "vectors.hpp"

namespace tandem {

constexpr int kDoubles = kLanes / 2;

typedef double DoubleVec __attribute__((vector_size(8 * kDoubles)));
typedef int64_t LongVec __attribute__((vector_size(8 * kDoubles)));
typedef float NarrowVec __attribute__((vector_size(4 * kDoubles)));
typedef float UnalignedNarrowVec __attribute__((vector_size(4 * kDoubles), aligned(4), may_alias));

constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;  // their sum is ln 2; n * high is exact

static inline DoubleVec widened(const float* from) {
  return __builtin_convertvector((NarrowVec) * reinterpret_cast<const UnalignedNarrowVec*>(from), DoubleVec);
}

// e^x for x <= 0; beneath -700 it stays at e^-700. 2^n * p(r), Taylor's polynomial of degree 12 on |r| <= ln 2 / 2.
static inline DoubleVec exp_of(DoubleVec x) {
  const DoubleVec low = DoubleVec{} - 700.0;
  x = x < low ? low : x;
  const DoubleVec shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52;  // its last bits are the integer next to x / ln 2
  const DoubleVec n = shifted - 0x1.8p52;
  const DoubleVec r = x - n * kLn2High - n * kLn2Low;
  DoubleVec p = DoubleVec{} + 1.0 / 479001600;
  for (const double one : {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                           1.0 / 24, 1.0 / 6, 1.0 / 2, 1.0, 1.0})
    p = p * r + one;
  return p * (DoubleVec)(((LongVec)shifted + 1023) << 52);
}

// ln x for a positive, normal x: 2 artanh((m - 1) / (m + 1)) by its series, m within a factor of sqrt 2 of 1.
static inline double log_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  int64_t n = (int64_t)(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
  double m;
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    n++;
  }
  const double s = (m - 1) / (m + 1), z = s * s;
  double p = 1.0 / 21;
  for (int odd = 19; odd >= 3; odd -= 2) p = p * z + 1.0 / odd;
  return (double)n * kLn2High + (2 * s + (2 * s * (z * p) + (double)n * kLn2Low));
}

}  // namespace tandem
