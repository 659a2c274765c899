// The two products of attention, a few queries against some tokens' keys or values.
#pragma once
#include <algorithm>
#include <utility>

#include "vectors.hpp"

namespace tandem {

constexpr int kChunk = kWide;                                                      // tokens whose keys are read at once
constexpr int kScoreQueries = kLanes == 16 ? 12 : kRegisters == 32 ? 6 : 12 / (kParts * 2);  // queries
constexpr int kValueQueries = kLanes == 16 || kRegisters == 32 ? 6 : 3;
constexpr int kValueChunks = 4;  // at once, to spread the cost of loading and storing the sums
constexpr int kValueVecs = 64 / kLanes < 4 ? 64 / kLanes : 4;

// Into L2: into L1 is half as fast on a Zen 4 (measured).
static inline void touch(const float* at) { __builtin_prefetch(at, 0, 2); }

// scores[query][16] = scale * q . k for sixteen tokens; `keys` [head_dim] rows, `stride` apart; `next` is prefetched.
template <int queries>
static void scores_of(const float* q, int64_t head_dim, const float* keys, int64_t stride, float scale, float* scores,
                      int64_t scores_stride, const float* next) {
  Vec sum[queries][kParts] = {};
  for (int64_t d = 0; d < head_dim; d++) {
    Vec key[kParts];
    for (int p = 0; p < kParts; p++) key[p] = load(keys + d * stride + p * kLanes);
    touch(next + d * stride);
#pragma GCC unroll 12
    for (int i = 0; i < queries; i++) {
      const Vec one = splat(q[i * head_dim + d]);
      for (int p = 0; p < kParts; p++) sum[i][p] = multiply_add(one, key[p], sum[i][p]);
    }
  }
  for (int i = 0; i < queries; i++)
    for (int p = 0; p < kParts; p++) store(scores + i * scores_stride + p * kLanes, sum[i][p] * scale);
}

// Values of up to 64 tokens, chunk by chunk of 16; all but the last chunk are whole. Rows are head_dim apart.
struct Values {
  const float* chunks[kValueChunks];
  const float* soon[kValueChunks];  // to be prefetched meanwhile
  int64_t num_tokens;
};

// out[query][vecs * lanes] += sum over tokens of weights[query][token] * values[token], from dimension `d` on.
template <int queries, int vecs>
static void values_of(const float* weights, int64_t weights_stride, const Values& values, int64_t d, int64_t head_dim,
                      float* out, int64_t out_stride) {
  Vec sum[queries][vecs];
  for (int i = 0; i < queries; i++)
    for (int v = 0; v < vecs; v++) sum[i][v] = load(out + i * out_stride + v * kLanes);
  for (int64_t first = 0; first < values.num_tokens; first += kChunk) {
    const float* from = values.chunks[first / kChunk] + d;
    const float* next = values.soon[first / kChunk] + d;
    const int64_t num = std::min<int64_t>(kChunk, values.num_tokens - first);
    for (int64_t t = 0; t < num; t++, from += head_dim, next += head_dim) {
      Vec value[vecs];
      for (int v = 0; v < vecs; v++) value[v] = load(from + v * kLanes);
      for (int v = 0; v < vecs; v += kParts) touch(next + v * kLanes);
#pragma GCC unroll 6
      for (int i = 0; i < queries; i++) {
        const Vec one = splat(weights[i * weights_stride + first + t]);
        for (int v = 0; v < vecs; v++) sum[i][v] = multiply_add(one, value[v], sum[i][v]);
      }
    }
  }
  for (int i = 0; i < queries; i++)
    for (int v = 0; v < vecs; v++) store(out + i * out_stride + v * kLanes, sum[i][v]);
}

using ScoresOf = void (*)(const float*, int64_t, const float*, int64_t, float, float*, int64_t, const float*);
using ValuesOf = void (*)(const float*, int64_t, const Values&, int64_t, int64_t, float*, int64_t);

template <int... n>
static inline ScoresOf scores_by_queries(int queries, std::integer_sequence<int, n...>) {
  static constexpr ScoresOf all[] = {scores_of<n + 1>...};
  return all[queries - 1];
}

template <int vecs, int... n>
static inline ValuesOf values_by_queries(int queries, std::integer_sequence<int, n...>) {
  static constexpr ValuesOf all[] = {values_of<n + 1, vecs>...};
  return all[queries - 1];
}

static inline ValuesOf values_by_size(int queries, int vecs) {
  constexpr auto upto = std::make_integer_sequence<int, kValueQueries>{};
  switch (vecs) {
    case 1: return values_by_queries<1>(queries, upto);
    case 2: return values_by_queries<2>(queries, upto);
    case 3: return values_by_queries<3>(queries, upto);
    default: return values_by_queries<4>(queries, upto);
  }
}

static void scores_of_all(int64_t num_queries, const float* q, int64_t head_dim, const float* keys, int64_t stride,
                          float scale, float* scores, int64_t scores_stride, const float* next) {
  for (int64_t i = 0; i < num_queries; i += kScoreQueries) {
    const int queries = (int)std::min<int64_t>(kScoreQueries, num_queries - i);
    scores_by_queries(queries, std::make_integer_sequence<int, kScoreQueries>{})(
        q + i * head_dim, head_dim, keys, stride, scale, scores + i * scores_stride, scores_stride, next);
  }
}

static void values_of_all(int64_t num_queries, const float* weights, int64_t weights_stride, const Values& values,
                          int64_t head_dim, float* out, int64_t out_stride) {
  for (int64_t i = 0; i < num_queries; i += kValueQueries) {
    const int queries = (int)std::min<int64_t>(kValueQueries, num_queries - i);
    const float* w = weights + i * weights_stride;
    float* to = out + i * out_stride;
    int64_t d = 0;
    while (d + kLanes <= head_dim) {
      const int vecs = (int)std::min<int64_t>(kValueVecs, (head_dim - d) / kLanes);
      values_by_size(queries, vecs)(w, weights_stride, values, d, head_dim, to + d, out_stride);
      d += vecs * kLanes;
    }
    for (; d < head_dim; d++)  // of a head that lanes do not divide
      for (int j = 0; j < queries; j++)
        for (int64_t t = 0; t < values.num_tokens; t++) {
          const float value = values.chunks[t / kChunk][t % kChunk * head_dim + d];
          to[j * out_stride + d] = multiply_add(w[j * weights_stride + t], value, to[j * out_stride + d]);
        }
  }
}

}  // namespace tandem
