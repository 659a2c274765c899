// Runs dense decoder layers, one after the other, without returning in between.
//
//     x += more, norm | qkv | rotate and write | attend | more = output | x += more, norm | more = mlp
//
// A layer takes some rows at a time, as many as a linear layer reads at once. They attend to keys and values that they
// and the rows before them have just written. So activations between two linear layers stay in the caches, and a long
// step takes no more memory than a short one. No bit depends on how rows are cut.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.hpp"
#include "cache.hpp"
#include "elementwise.hpp"
#include "linear.hpp"
#include "space.hpp"

namespace tandem {

struct DenseLayer {
  const Weights *qkv, *output, *gate_up, *down;
  const float *input_norm, *attention_output_norm, *mlp_norm, *mlp_output_norm;  // null: there is none
  const float *query_norm, *key_norm;  // of all queries of a token, and of all its keys; null: there is none
  const QKTransform* transform;
  const Cache* cache;
  int64_t group;  // index of its step
  int64_t num_heads, window, is_gelu;
  float epsilon, scale, softcap;

  int64_t hidden() const { return qkv->inputs; }
  int64_t width() const { return num_heads * cache->head_dim; }
};

// Activations between the ops of some rows of one layer. All layers and steps reuse the same memory.
struct Between {
  Between(const DenseLayer* layers, int64_t num_layers, int64_t rows) {
    int64_t normed_size = 0, wide_size = 0;
    for (const DenseLayer* layer = layers; layer != layers + num_layers; layer++) {
      normed_size = std::max({normed_size, layer->hidden(), layer->width()});
      wide_size = std::max({wide_size, layer->qkv->outputs, layer->gate_up->outputs});
    }
    static Space space;
    normed = space.of(rows * (normed_size + layers->hidden() + wide_size));
    more = normed + rows * normed_size;
    wide = more + rows * layers->hidden();
  }
  float *normed, *more, *wide;
};

// More threads share more rows in attention.
static int64_t rows_at_once() { return kRowsAtOnce * std::max(1, threads()->num_threads() / 4); }

static void add_rows(const float* from, int64_t rows, int64_t size, float* to) {
  for (int64_t row = 0; row < rows; row++) add_row(from + row * size, size, to + row * size);
}

// Adds `more` to x in place and returns the sum, or its norm in `normed` if there is a norm.
static const float* added(const DenseLayer& layer, float* x, const float* more, int64_t rows, const float* norm,
                          float* normed) {
  const int64_t size = layer.hidden();
  if (norm) {
    rms_norm(x, size, more, size, rows, size, norm, layer.epsilon, normed, size);
    return normed;
  }
  if (more) add_rows(more, rows, size, x);
  return x;
}

// Runs the rest of a layer for rows whose attention is in `between.normed`; leaves in `more` what is to be added to x.
static void behind_attention(const DenseLayer& layer, float* x, int64_t rows, const Between& between, float* more) {
  const int64_t size = layer.hidden(), inner = layer.down->inputs;
  const auto norm_more = [&](const float* norm) {
    if (norm) rms_norm(more, size, nullptr, 0, rows, size, norm, layer.epsilon, more, size);
  };
  linear(between.normed, layer.width(), rows, *layer.output, more);
  norm_more(layer.attention_output_norm);
  const float* normed = added(layer, x, more, rows, layer.mlp_norm, between.normed);
  linear(normed, size, rows, *layer.gate_up, between.wide);
  (layer.is_gelu ? gated<gelu_tanh> : gated<silu>)(between.wide, 2 * inner, rows, inner, between.wide, 2 * inner);
  linear(between.wide, 2 * inner, rows, *layer.down, more);
  norm_more(layer.mlp_output_norm);
}

// Attends from the rows of `query`, which `runs` name, and leaves the result in `to`.
static void attend(const DenseLayer& layer, const float* query, int64_t stride, const std::vector<Run>& runs,
                   const Step& step, float* to) {
  Attention{query,       stride,               to,          layer.width(), layer.num_heads, *layer.cache,
            runs.data(), (int64_t)runs.size(), step.tables, layer.window,  layer.scale,     layer.softcap}
      .run();
}

// Returns the parts of runs in rows [first, end), with rows counted from `first`.
static void runs_within(const Step& step, int64_t first, int64_t end, std::vector<Run>& runs) {
  runs.clear();
  for (const Run* run = step.runs; run != step.runs + step.num_runs; run++) {
    const int64_t from = std::max(run->row, first), to = std::min(run->row + run->count, end);
    if (from < to) runs.push_back({from - first, run->start + from - run->row, to - from, run->first_block});
  }
}

// Returns the runs that some rows form, with rows counted from 0; neighbouring rows stay in one run.
static void runs_of(const Step& step, const int64_t* rows, int64_t num_rows, std::vector<Run>& runs) {
  runs.clear();
  const Run *run = step.runs, *end = step.runs + step.num_runs;
  for (int64_t i = 0; i < num_rows; i++) {
    const auto has_it = [row = rows[i]](const Run& run) { return run.row <= row && row < run.row + run.count; };
    if (i > 0 && rows[i] == rows[i - 1] + 1 && run != end && has_it(*run)) {
      runs.back().count++;
      continue;
    }
    run = std::find_if(step.runs, end, has_it);
    if (run != end) runs.push_back({i, run->start + rows[i] - run->row, 1, run->first_block});
  }
}

static void norm_projections(const DenseLayer& layer, int64_t rows, float* qkv) {
  if (!layer.query_norm) return;
  const int64_t stride = layer.qkv->outputs, width = layer.width();
  const int64_t key_width = layer.cache->num_kv_heads * layer.cache->head_dim;
  float* keys = qkv + width;
  rms_norm(qkv, stride, nullptr, 0, rows, width, layer.query_norm, layer.epsilon, qkv, stride);
  rms_norm(keys, stride, nullptr, 0, rows, key_width, layer.key_norm, layer.epsilon, keys, stride);
}

// Runs all layers, the last one up to its keys and values; leaves the queries of `sampled` rows in `queries`.
static void run_layers(const DenseLayer* layers, int64_t num_layers, const Step* const* steps, float* x,
                       const int64_t* sampled, int64_t num_sampled, float* queries) {
  const int64_t num_tokens = steps[0]->num_tokens, at_once = std::min(rows_at_once(), num_tokens);
  const bool is_whole = num_tokens <= at_once;  // then the next layer adds this layer's result
  const Between between(layers, num_layers, at_once);
  const DenseLayer* last = layers + num_layers - 1;
  std::vector<Run> runs;
  for (const DenseLayer* layer = layers; layer <= last; layer++) {
    const Step& step = *steps[layer->group];
    const int64_t size = layer->hidden(), qkv_size = layer->qkv->outputs, width = layer->width();
    for (int64_t first = 0; first < num_tokens; first += at_once) {
      const int64_t rows = std::min(at_once, num_tokens - first);
      float* at = x + first * size;
      const float* more = is_whole && layer != layers ? between.more : nullptr;
      const float* normed = added(*layer, at, more, rows, layer->input_norm, between.normed);
      linear(normed, size, rows, *layer->qkv, between.wide);
      norm_projections(*layer, rows, between.wide);
      rope_and_kv_write(between.wide, qkv_size, rows, layer->num_heads, *layer->transform, step.positions + first,
                        step.slots + first, *layer->cache);
      if (layer == last) {
        for (int64_t i = 0; i < num_sampled; i++)
          if (first <= sampled[i] && sampled[i] < first + rows)
            memcpy(queries + i * width, between.wide + (sampled[i] - first) * qkv_size, width * sizeof(float));
        continue;
      }
      runs_within(step, first, first + rows, runs);
      attend(*layer, between.wide, qkv_size, runs, step, between.normed);
      behind_attention(*layer, at, rows, between, between.more);
      if (!is_whole) add_rows(between.more, rows, size, at);
    }
  }
}

// Finishes the last layer for the sampled rows alone, whose residual stream is `x`.
static void finish_layer(const DenseLayer& layer, const Step& step, const int64_t* sampled, int64_t num_sampled,
                         const float* queries, float* x, float* more) {
  const int64_t at_once = std::min(rows_at_once(), num_sampled), size = layer.hidden(), width = layer.width();
  const Between between(&layer, 1, at_once);
  std::vector<Run> runs;
  for (int64_t first = 0; first < num_sampled; first += at_once) {
    const int64_t rows = std::min(at_once, num_sampled - first);
    runs_of(step, sampled + first, rows, runs);
    attend(layer, queries + first * width, width, runs, step, between.normed);
    behind_attention(layer, x + first * size, rows, between, more + first * size);
  }
}

}  // namespace tandem
