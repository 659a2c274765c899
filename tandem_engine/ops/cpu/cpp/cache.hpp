// Writes keys and values of a step's tokens into their slots of KV blocks.
//
//     block of one layer   K [num_kv_heads][head_dim][block_size], then V [num_kv_heads][block_size][head_dim]
//
// K is transposed inside its block, so that the scores of sixteen tokens are one vector, summed over the dimensions.
#pragma once
#include <algorithm>

#include "elementwise.hpp"
#include "threads.hpp"

namespace tandem {

struct Cache {
  float* pool;
  int64_t block_stride, layer_offset, num_kv_heads, head_dim, block_size;

  float* keys(int64_t block, int64_t head) const {
    return pool + block * block_stride + layer_offset + head * head_dim * block_size;
  }
  float* values(int64_t block, int64_t head) const { return keys(block, num_kv_heads + head); }

  void write(int64_t slot, int64_t head, const float* key, const float* value) const {
    const int64_t block = slot / block_size, token = slot % block_size;
    float* to = keys(block, head) + token;
    for (int64_t d = 0; d < head_dim; d++) to[d * block_size] = key[d];
    memcpy(values(block, head) + token * head_dim, value, head_dim * sizeof(float));
  }
};

// Tokens per piece. Neighbouring tokens share cache lines of a block's keys. Tokens of different requests share none:
// each waits for as many lines as a key has numbers.
constexpr int64_t kMostTokens = 16, kFewestTokens = 4;

template <class Body>
static void by_tokens(int64_t num_tokens, Body&& body) {
  const int64_t num_threads = threads()->num_threads();
  const int64_t tokens = std::clamp((num_tokens + num_threads - 1) / num_threads, kFewestTokens, kMostTokens);
  in_parallel((int)((num_tokens + tokens - 1) / tokens), [&](int piece) {
    const int64_t first = piece * tokens, end = std::min(num_tokens, first + tokens);
    for (int64_t token = first; token < end; token++) body(token);
  });
}

// Tokens and heads may have any strides; a head's numbers are contiguous.
static void kv_write(const float* key, int64_t key_token_stride, int64_t key_head_stride, const float* value,
                     int64_t value_token_stride, int64_t value_head_stride, int64_t num_tokens, const int64_t* slots,
                     const Cache& cache) {
  by_tokens(num_tokens, [&](int64_t token) {
    for (int64_t head = 0; head < cache.num_kv_heads; head++)
      cache.write(slots[token], head, key + token * key_token_stride + head * key_head_stride,
                  value + token * value_token_stride + head * value_head_stride);
  });
}

struct QKTransform {
  const float* cosines;  // [num_positions][half]; half is 0 without rotary embeddings
  const float* sines;
  int64_t half;
  const float* query_norm;  // [head_dim], or null
  const float* key_norm;
  float epsilon;

  void rotate(float* head, int64_t position) const {
    const float* __restrict cosine = cosines + position * half;
    const float* __restrict sine = sines + position * half;
    float* __restrict low = head;
    float* __restrict high = head + half;
    for (int64_t i = 0; i < half; i++) {
      const float a = low[i], b = high[i];
      low[i] = a * cosine[i] - b * sine[i];
      high[i] = b * cosine[i] + a * sine[i];
    }
  }
};

// Norms queries and keys of qkv [rows][(num_heads + 2 num_kv_heads) * head_dim] in place, rotates the first 2 * half
// dimensions of each head (GPT-NeoX's halves), and writes keys and values into `slots`.
static void rope_and_kv_write(float* qkv, int64_t stride, int64_t num_tokens, int64_t num_heads,
                              const QKTransform& transform, const int64_t* positions, const int64_t* slots,
                              const Cache& cache) {
  const int64_t dim = cache.head_dim, num_keys = cache.num_kv_heads;
  by_tokens(num_tokens, [&](int64_t token) {
    float* row = qkv + token * stride;
    for (int64_t head = 0; head < num_heads + num_keys; head++) {
      float* x = row + head * dim;
      const float* norm = head < num_heads ? transform.query_norm : transform.key_norm;
      if (norm) rms_norm_row(x, dim, norm, transform.epsilon, x);
      transform.rotate(x, positions[token]);
    }
    const float* key = row + num_heads * dim;
    for (int64_t head = 0; head < num_keys; head++)
      cache.write(slots[token], head, key + head * dim, key + (num_keys + head) * dim);
  });
}

}  // namespace tandem
