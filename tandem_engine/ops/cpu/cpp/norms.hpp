// Layer norms and activations without a gate: each row by itself, in a fixed order.
#pragma once
#include <algorithm>
#include <cmath>

#include "elementwise.hpp"

namespace tandem {

// to = (from - mean) / sqrt(variance + epsilon) * weight + bias; `to` may be `from`.
static inline void layer_norm_row(const float* from, int64_t size, const float* weight, const float* bias,
                                  float epsilon, float* to) {
  Wide total = wide_splat(0), squares = wide_splat(0);
  by_wides(size, [&](int64_t i, int count) {
    const Wide x = load_wide(from + i, count);
    for (int p = 0; p < kParts; p++) total.part[p] += x.part[p];
  });
  const float mean = sum_of(total) / (float)size;
  by_wides(size, [&](int64_t i, int count) {
    float padded[kWide];
    std::fill_n(padded, kWide, mean);  // lanes beyond the row differ by nothing
    if (count < kWide) memcpy(padded, from + i, count * sizeof(float));
    const Wide x = load_wide(count < kWide ? padded : from + i, kWide);
    for (int p = 0; p < kParts; p++) {
      const Vec off = x.part[p] - mean;
      squares.part[p] = multiply_add(off, off, squares.part[p]);
    }
  });
  const float scale = 1.0f / std::sqrt(sum_of(squares) / (float)size + epsilon);
  by_wides(size, [&](int64_t i, int count) {
    Wide x = load_wide(from + i, count);
    const Wide w = load_wide(weight + i, count), b = load_wide(bias + i, count);
    for (int p = 0; p < kParts; p++) x.part[p] = multiply_add((x.part[p] - mean) * scale, w.part[p], b.part[p]);
    store_wide(to + i, x, count);
  });
}

// y [rows][size] = x normed; if `more` is not null, x += more before. `y` may be x where x_stride is `size`.
static void layer_norm(float* x, int64_t x_stride, const float* more, int64_t more_stride, int64_t num_rows,
                       int64_t size, const float* weight, const float* bias, float epsilon, float* y) {
  in_parallel_rows(num_rows, size, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) {
      float* at = x + row * x_stride;
      if (more) add_row(more + row * more_stride, size, at);
      layer_norm_row(at, size, weight, bias, epsilon, y + row * size);
    }
  });
}

// x * (1 + erf(x / sqrt 2)) / 2 = max(x, 0) - |x| * h(|x|), h(a) = erfc(a / sqrt 2) / 2 = e^(-a^2 / 2) * q(t) with
// t = 1 / (1 + 0.35 a). q is our own fit of degree 7 by least squares, reweighted until its errors were even: |x| * h
// is within 6e-9 before rounding.
static inline Vec gelu(Vec x) {
  const Vec a = larger(x, -x);
  const Vec t = 1.0f / multiply_add(a, splat(0.35f), splat(1.0f));
  Vec q = splat(0.036507789f);
  q = multiply_add(q, t, splat(-0.146856979f));
  q = multiply_add(q, t, splat(0.139382184f));
  q = multiply_add(q, t, splat(0.0809723884f));
  q = multiply_add(q, t, splat(0.103003524f));
  q = multiply_add(q, t, splat(0.14862372f));
  q = multiply_add(q, t, splat(0.138367385f)) * t;
  return larger(x, Vec{}) - a * (exp_of(-0.5f * (a * a)) * q);
}

// y[rows, size] = activation(x); `y` may be x.
template <Vec (*activation)(Vec)>
static void activate(const float* x, int64_t x_stride, int64_t num_rows, int64_t size, float* y) {
  in_parallel_rows(num_rows, 2 * size, [&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
      by_wides(size, [&](int64_t i, int count) {
        Wide value = load_wide(x + row * x_stride + i, count);
        for (int p = 0; p < kParts; p++) value.part[p] = activation(value.part[p]);
        store_wide(y + row * size + i, value, count);
      });
  });
}

}  // namespace tandem
