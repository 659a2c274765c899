// Weights [out][in] to tiles [num_tiles][in][32] and back; outputs beyond the last are zeros.
#pragma once
#include <algorithm>

#include "linear.hpp"
#include "threads.hpp"

namespace tandem {

constexpr int kInputsPerStrip = 64;  // of 32 outputs: source and result fit into L1

template <class Number>
static void pack(const Number* weight, int64_t stride, int64_t num_outputs, int64_t num_inputs, Number* packed) {
  in_parallel((int)((num_outputs + kTile - 1) / kTile), [&](int tile) {
    const int outputs = (int)std::min<int64_t>(kTile, num_outputs - (int64_t)tile * kTile);
    const Number* from = weight + (int64_t)tile * kTile * stride;
    Number* to = packed + (int64_t)tile * kTile * num_inputs;
    for (int64_t strip = 0; strip < num_inputs; strip += kInputsPerStrip)
      for (int64_t i = strip; i < std::min(num_inputs, strip + kInputsPerStrip); i++) {
        for (int o = 0; o < outputs; o++) to[i * kTile + position_in_tile<Number>(o)] = from[o * stride + i];
        for (int o = outputs; o < kTile; o++) to[i * kTile + position_in_tile<Number>(o)] = 0;
      }
  });
}

template <class Number>
static void unpack(const Number* packed, int64_t num_outputs, int64_t num_inputs, Number* weight) {
  in_parallel((int)((num_outputs + kTile - 1) / kTile), [&](int tile) {
    const int outputs = (int)std::min<int64_t>(kTile, num_outputs - (int64_t)tile * kTile);
    const Number* from = packed + (int64_t)tile * kTile * num_inputs;
    Number* to = weight + (int64_t)tile * kTile * num_inputs;
    for (int64_t strip = 0; strip < num_inputs; strip += kInputsPerStrip)
      for (int o = 0; o < outputs; o++)
        for (int64_t i = strip; i < std::min(num_inputs, strip + kInputsPerStrip); i++)
          to[o * num_inputs + i] = from[i * kTile + position_in_tile<Number>(o)];
  });
}

static inline float widened(float value) { return value; }
static inline float widened(uint16_t value) {
  const uint32_t bits = (uint32_t)value << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// y[row] = weight[ids[row]], widened: embeddings that are also the output layer are in memory once.
template <class Number>
static void embed(const int64_t* ids, int64_t num_rows, const Number* packed, int64_t num_inputs, float* y) {
  in_parallel_rows(num_rows, 16 * num_inputs, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      const Number* from = packed + ids[row] / kTile * kTile * num_inputs + position_in_tile<Number>(ids[row] % kTile);
      for (int64_t i = 0; i < num_inputs; i++) y[row * num_inputs + i] = widened(from[i * kTile]);
    }
  });
}

}  // namespace tandem
