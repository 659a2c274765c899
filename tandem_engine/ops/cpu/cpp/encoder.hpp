// Runs encoder layers, whose norms follow the sums, one after the other without returning in between.
//
//     qkv | attend, each run to all of itself | x = norm(x + output) | x = norm(x + down(gelu(up)))
//
// Everything but attention takes some rows at a time, so that activations between two linear layers stay in the caches.
// No bit depends on how rows are cut, nor on the runs beside a run.
#pragma once
#include <algorithm>

#include "layers.hpp"
#include "linear.hpp"
#include "norms.hpp"
#include "self_attention.hpp"
#include "space.hpp"

namespace tandem {

struct EncoderLayer {
  const Weights *qkv, *output, *up, *down;
  const float *attention_norm, *attention_bias, *mlp_norm, *mlp_bias;
  int64_t num_heads, is_tanh;
  float epsilon, scale;

  int64_t hidden() const { return qkv->inputs; }
  int64_t width() const { return output->inputs; }
};

// Calls body(first, rows) for parts of nearly equal size: a short last part would read all weights for few rows.
template <class Body>
static void by_parts(int64_t num_rows, Body&& body) {
  const int64_t num_parts = (num_rows + rows_at_once() - 1) / rows_at_once();
  for (int64_t part = 0; part < num_parts; part++) {
    const int64_t first = num_rows * part / num_parts;
    body(first, num_rows * (part + 1) / num_parts - first);
  }
}

// Runs the rest of a layer for some rows, and leaves its result in x. `more` [rows][hidden], `wide` [rows][inner].
static void behind_self_attention(const EncoderLayer& layer, float* x, const float* attended, int64_t rows, float* more,
                                  float* wide) {
  const int64_t size = layer.hidden(), inner = layer.up->outputs;
  linear(attended, layer.width(), rows, *layer.output, more);
  layer_norm(x, size, more, size, rows, size, layer.attention_norm, layer.attention_bias, layer.epsilon, x);
  linear(x, size, rows, *layer.up, wide);
  (layer.is_tanh ? activate<gelu_tanh> : activate<gelu>)(wide, inner, rows, inner, wide);
  linear(wide, inner, rows, *layer.down, more);
  layer_norm(x, size, more, size, rows, size, layer.mlp_norm, layer.mlp_bias, layer.epsilon, x);
}

// Overwrites x [starts[num_runs]][hidden] with the last layer's result.
static void run_encoder(const EncoderLayer* layers, int64_t num_layers, const int64_t* starts, int64_t num_runs,
                        float* x) {
  static Space space;
  const int64_t num_tokens = starts[num_runs], at_once = std::min(rows_at_once(), num_tokens);
  for (const EncoderLayer* layer = layers; layer != layers + num_layers; layer++) {
    const int64_t size = layer->hidden(), width = layer->width();
    float* qkv = space.of(num_tokens * 4 * width + at_once * (size + layer->up->outputs));
    float *attended = qkv + num_tokens * 3 * width, *more = attended + num_tokens * width, *wide = more + at_once * size;
    by_parts(num_tokens, [&](int64_t first, int64_t rows) {
      linear(x + first * size, size, rows, *layer->qkv, qkv + first * 3 * width);
    });
    SelfAttention{qkv, attended, layer->num_heads, width / layer->num_heads, starts, num_runs, layer->scale}.run();
    by_parts(num_tokens, [&](int64_t first, int64_t rows) {
      behind_self_attention(*layer, x + first * size, attended + first * width, rows, more, wide);
    });
  }
}

}  // namespace tandem
