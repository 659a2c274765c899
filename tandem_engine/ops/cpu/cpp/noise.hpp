// Gumbel noise, a function of (seed, position, token id) and nothing else.
//
// Philox4x64-10 (Salmon et al., 2011) keyed by (seed, position), as numpy.random.Philox counts: the word of token n is
// number n % 4 of the block at counter n / 4 + 1.
#pragma once
#include <cstdint>

#include "doubles.hpp"

namespace tandem {

constexpr int kWordsPerBlock = 4;
constexpr int kNoiseBits = 53;

static inline uint64_t product(uint64_t a, uint64_t b, uint64_t& high) {
  const unsigned __int128 whole = (unsigned __int128)a * b;
  high = (uint64_t)(whole >> 64);
  return (uint64_t)whole;
}

// The words of one seed and position.
class Noise {
 public:
  Noise(uint64_t seed, uint64_t position) {
    for (int round = 0; round < kRounds; round++) {
      keys_[round][0] = seed + round * 0x9E3779B97F4A7C15;
      keys_[round][1] = position + round * 0xBB67AE8584CAA73B;
    }
  }

  void block(uint64_t number, uint64_t* words) const {
    uint64_t a = number + 1, b = 0, c = 0, d = 0;
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; round++) {
      uint64_t high_a, high_c;
      const uint64_t low_a = product(0xD2E7470EE14C6C93, a, high_a), low_c = product(0xCA5A826395121157, c, high_c);
      a = high_c ^ b ^ keys_[round][0];
      b = low_c;
      c = high_a ^ d ^ keys_[round][1];
      d = low_a;
    }
    words[0] = a;
    words[1] = b;
    words[2] = c;
    words[3] = d;
  }

 private:
  static constexpr int kRounds = 10;
  uint64_t keys_[kRounds][2];
};

// -ln(-ln u) for u the word's upper 53 bits as a number above 0 and below 1.
static inline double gumbel(uint64_t word) {
  const double u = ((double)(word >> 11) + 0.5) * 0x1p-53;
  return -log_of(-log_of(u < 1 - 0x1p-53 ? u : 1 - 0x1p-53));
}

// Returns the number of leading ones of the word, at most 52. With n leading ones, 1 - u is at least 2^-(n + 1), and as
// -ln u is at least 1 - u, the noise is at most (n + 1) ln 2.
static inline int leading_ones(uint64_t word) { return __builtin_clzll(~word | 1 << 11); }
static inline double largest_gumbel(int leading_ones) { return (leading_ones + 1) * 0.6931471805599454; }

}  // namespace tandem
