// The functions that Python calls: plain C, no torch. Strides and sizes count elements; rows are contiguous.
#include "attention.hpp"
#include "cache.hpp"
#include "elementwise.hpp"
#include "encoder.hpp"
#include "layers.hpp"
#include "linear.hpp"
#include "masks.hpp"
#include "packing.hpp"
#include "sampling.hpp"
#include "threads.hpp"

using namespace tandem;

static pid_t owner = getpid();
static MaskJob mask_job;

extern "C" {

// Returns whether a * b + c rounds once. Machines with the same answer give the same bits.
int tandem_has_fma() {
#if defined(__FMA__) || defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}

int tandem_lanes() { return kLanes; }

void tandem_set_num_threads(int num_threads, const int* cpus, int num_cpus) {
  if (owner != getpid()) threads().release();  // forked: the helpers are the parent's
  owner = getpid();
  threads().reset(new ThreadPool(num_threads, std::vector<int>(cpus, cpus + num_cpus)));
}

void tandem_prefer_huge_pages(void* from, int64_t num_bytes) { prefer_huge_pages(from, num_bytes); }

void tandem_pack_f32(const uint32_t* weight, int64_t stride, int64_t outputs, int64_t inputs, uint32_t* packed) {
  pack(weight, stride, outputs, inputs, packed);
}
void tandem_pack_bf16(const uint16_t* weight, int64_t stride, int64_t outputs, int64_t inputs, uint16_t* packed) {
  pack(weight, stride, outputs, inputs, packed);
}
void tandem_unpack_f32(const uint32_t* packed, int64_t outputs, int64_t inputs, uint32_t* weight) {
  unpack(packed, outputs, inputs, weight);
}
void tandem_unpack_bf16(const uint16_t* packed, int64_t outputs, int64_t inputs, uint16_t* weight) {
  unpack(packed, outputs, inputs, weight);
}
void tandem_embed_f32(const int64_t* ids, int64_t rows, const float* packed, int64_t inputs, float* y) {
  embed(ids, rows, packed, inputs, y);
}
void tandem_embed_bf16(const int64_t* ids, int64_t rows, const uint16_t* packed, int64_t inputs, float* y) {
  embed(ids, rows, packed, inputs, y);
}

void tandem_linear(const float* x, int64_t x_stride, int64_t rows, const Weights* weights, float* y) {
  linear(x, x_stride, rows, *weights, y);
}

void tandem_rms_norm(float* x, int64_t x_stride, const float* more, int64_t more_stride, int64_t rows, int64_t size,
                     const float* weight, float epsilon, float* y) {
  rms_norm(x, x_stride, more, more_stride, rows, size, weight, epsilon, y, size);
}
void tandem_silu_gated(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y) {
  gated<silu>(x, x_stride, rows, size, y, size);
}
void tandem_gelu_tanh_gated(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y) {
  gated<gelu_tanh>(x, x_stride, rows, size, y, size);
}

void tandem_rope_and_kv_write(float* qkv, int64_t stride, int64_t heads, const QKTransform* transform, const Step* step,
                              const Cache* cache) {
  rope_and_kv_write(qkv, stride, step->num_tokens, heads, *transform, step->positions, step->slots, *cache);
}
void tandem_kv_write(const float* key, int64_t key_token_stride, int64_t key_head_stride, const float* value,
                     int64_t value_token_stride, int64_t value_head_stride, const Step* step, const Cache* cache) {
  kv_write(key, key_token_stride, key_head_stride, value, value_token_stride, value_head_stride, step->num_tokens,
           step->slots, *cache);
}
void tandem_paged_attention(const float* query, int64_t query_stride, float* out, int64_t heads, const Step* step,
                            const Cache* cache, int64_t window, float scale, float softcap) {
  Attention{query,         query_stride,   out,          heads * cache->head_dim, heads, *cache,
            step->runs,    step->num_runs, step->tables, window,                  scale, softcap}
      .run();
}
void tandem_layers(const DenseLayer* layers, int64_t num_layers, const Step* const* steps, float* x,
                   const int64_t* sampled, int64_t num_sampled, float* queries) {
  run_layers(layers, num_layers, steps, x, sampled, num_sampled, queries);
}
void tandem_finish_layer(const DenseLayer* layer, const Step* const* steps, const int64_t* sampled,
                         int64_t num_sampled, const float* queries, float* x, float* more) {
  finish_layer(*layer, *steps[layer->group], sampled, num_sampled, queries, x, more);
}

void tandem_layer_norm(float* x, int64_t x_stride, const float* more, int64_t more_stride, int64_t rows, int64_t size,
                       const float* weight, const float* bias, float epsilon, float* y) {
  layer_norm(x, x_stride, more, more_stride, rows, size, weight, bias, epsilon, y);
}
void tandem_gelu(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y) {
  activate<gelu>(x, x_stride, rows, size, y);
}
void tandem_gelu_tanh(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y) {
  activate<gelu_tanh>(x, x_stride, rows, size, y);
}
void tandem_self_attention(const float* qkv, int64_t heads, int64_t dim, const int64_t* starts, int64_t num_runs,
                           float scale, float* out) {
  SelfAttention{qkv, out, heads, dim, starts, num_runs, scale}.run();
}
void tandem_encoder_layers(const EncoderLayer* layers, int64_t num_layers, const int64_t* starts, int64_t num_runs,
                           float* x) {
  run_encoder(layers, num_layers, starts, num_runs, x);
}

void tandem_sample(const float* logits, int64_t stride, int64_t size, SamplingRow* rows, int64_t num_rows) {
  sample(logits, stride, size, rows, num_rows);
}

void tandem_begin_masks(const GrammarCalls* calls, MaskRow** rows, int64_t num_rows) {
  mask_job.begin(calls, rows, num_rows);
}
void tandem_finish_masks() { threads()->finish_aside(); }

// Lives as long as the process, like its callers.
void* tandem_remembered_tokens(RememberedTokens::Ask ask) { return new RememberedTokens(ask); }
size_t tandem_tokenize(void* remembered, const uint8_t* text, size_t num_bytes, uint32_t* tokens, size_t room) {
  return static_cast<RememberedTokens*>(remembered)->tokenize(text, num_bytes, tokens, room);
}

}  // extern "C"
