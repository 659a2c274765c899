// The small ops between products: each row by itself, in a fixed order.
#pragma once
#include <cmath>

#include "threads.hpp"
#include "vectors.hpp"

namespace tandem {

// Calls body(i, count, ...) for sixteen floats at a time; the last few of a row pass through padded copies.
template <class Body>
static inline void by_wides(int64_t size, Body&& body) {
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) body(i, kWide);
  if (i < size) body(i, (int)(size - i));
}

static inline Wide load_wide(const float* from, int count) {
  Wide value;
  if (count == kWide) {
    for (int i = 0; i < kParts; i++) value.part[i] = load(from + i * kLanes);
    return value;
  }
  float padded[kWide] = {};
  memcpy(padded, from, count * sizeof(float));
  memcpy(&value, padded, sizeof padded);
  return value;
}

static inline void store_wide(float* to, const Wide& value, int count) {
  if (count == kWide) {
    for (int i = 0; i < kParts; i++) store(to + i * kLanes, value.part[i]);
    return;
  }
  float padded[kWide];
  memcpy(padded, &value, sizeof padded);
  memcpy(to, padded, count * sizeof(float));
}

// to = from / sqrt(mean(from^2) + epsilon) * weight; `to` may be `from`.
static inline void rms_norm_row(const float* from, int64_t size, const float* weight, float epsilon, float* to) {
  Wide squares = wide_splat(0);
  by_wides(size, [&](int64_t i, int count) {
    const Wide x = load_wide(from + i, count);
    for (int p = 0; p < kParts; p++) squares.part[p] = multiply_add(x.part[p], x.part[p], squares.part[p]);
  });
  const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)size + epsilon);
  by_wides(size, [&](int64_t i, int count) {
    Wide x = load_wide(from + i, count);
    const Wide w = load_wide(weight + i, count);
    for (int p = 0; p < kParts; p++) x.part[p] = x.part[p] * scale * w.part[p];
    store_wide(to + i, x, count);
  });
}

static inline void add_row(const float* from, int64_t size, float* to) {
  by_wides(size, [&](int64_t i, int count) {
    Wide sum = load_wide(to + i, count);
    const Wide one = load_wide(from + i, count);
    for (int p = 0; p < kParts; p++) sum.part[p] += one.part[p];
    store_wide(to + i, sum, count);
  });
}

// y = x normed; if `more` is not null, x += more before.
static void rms_norm(float* x, int64_t x_stride, const float* more, int64_t more_stride, int64_t num_rows, int64_t size,
                     const float* weight, float epsilon, float* y, int64_t y_stride) {
  in_parallel_rows(num_rows, size, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      float* at = x + row * x_stride;
      if (more) add_row(more + row * more_stride, size, at);
      rms_norm_row(at, size, weight, epsilon, y + row * y_stride);
    }
  });
}

static inline Vec silu(Vec x) { return x / (1.0f + exp_of(-x)); }
static inline Vec gelu_tanh(Vec x) {  // x / 2 * (1 + tanh(y)) = x / (1 + e^-2y), which loses no digits to a difference
  const Vec inner = multiply_add(x * x * x, splat(0.044715f), x);
  return x / (1.0f + exp_of(-1.5957691216057308f * inner));
}

// y[rows, size] = activation(x[rows, :size]) * x[rows, size:]
template <Vec (*activation)(Vec)>
static void gated(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* y, int64_t y_stride) {
  in_parallel_rows(num_rows, 4 * size, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      const float* gate = x + row * x_stride;
      by_wides(size, [&](int64_t i, int count) {
        Wide value = load_wide(gate + i, count);
        const Wide up = load_wide(gate + size + i, count);
        for (int p = 0; p < kParts; p++) value.part[p] = activation(value.part[p]) * up.part[p];
        store_wide(y + row * y_stride + i, value, count);
      });
    }
  });
}

}  // namespace tandem
