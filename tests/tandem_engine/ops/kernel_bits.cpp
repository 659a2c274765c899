// Prints a line for each function of a kernels library: its name, and a hash of the bits that it computes from fixed
// inputs. Libraries for CPUs of one numerics class print equal lines.
//
//     kernel_bits LIBRARY.so [THREADS]
//
// The inputs are made of whole numbers and exact products, so that this program itself rounds nothing. It ends with 3 if
// a kernel writes a number that is not finite: a hash of NaN would compare nothing.
#include "kernel_bits_inputs.hpp"

static void packing() {
  constexpr int64_t kOutputs = 70, kInputs = 37, kSpace = 96 * kInputs;
  const Floats weight = numbers(1, kOutputs * kInputs);
  const std::vector<uint16_t> half = halves(weight);
  Floats packed(kSpace), back(kOutputs * kInputs), rows(3 * kInputs);
  std::vector<uint16_t> small(kSpace), small_back(kOutputs * kInputs);
  const Longs ids = {69, 0, 33};
  {
    Line line("tandem_pack_f32");
    call("tandem_pack_f32", weight.data(), kInputs, kOutputs, kInputs, packed.data());
    line.add(packed);
  }
  {
    Line line("tandem_pack_bf16");
    call("tandem_pack_bf16", half.data(), kInputs, kOutputs, kInputs, small.data());
    line.add(small);
  }
  {
    Line line("tandem_unpack_f32");
    call("tandem_unpack_f32", packed.data(), kOutputs, kInputs, back.data());
    line.add(back);
  }
  {
    Line line("tandem_unpack_bf16");
    call("tandem_unpack_bf16", small.data(), kOutputs, kInputs, small_back.data());
    line.add(small_back);
  }
  {
    Line line("tandem_embed_f32");
    call("tandem_embed_f32", ids.data(), int64_t{3}, packed.data(), kInputs, rows.data());
    line.add(rows);
  }
  Line line("tandem_embed_bf16");
  call("tandem_embed_bf16", ids.data(), int64_t{3}, small.data(), kInputs, rows.data());
  line.add(rows);
}

static void linear_layers() {
  Line line("tandem_linear");
  for (const bool is_half : {false, true})
    for (const auto& [inputs, outputs] : {std::pair<int64_t, int64_t>{1, 1}, {17, 33}, {96, 100}, {1300, 70}}) {
      const Packed packed(inputs, outputs, inputs, is_half);
      for (const int64_t rows : {1, 2, 5, 14, 15, 29, 113}) {
        const Floats x = numbers(rows, rows * (inputs + 3));
        Floats y(rows * outputs);
        call("tandem_linear", x.data(), inputs + 3, rows, &packed.weights, y.data());
        line.add(y);
      }
    }
}

// Calls body(rows, size) for shapes whose last vector is full, or not.
template <class Body>
static void each_shape(Body&& body) {
  for (const int64_t size : {1, 15, 16, 31, 64, 100, 1280})
    for (const int64_t rows : {1, 23}) body(rows, size);
}

static void norms() {
  Line root("tandem_rms_norm"), layer("tandem_layer_norm");
  each_shape([&](int64_t rows, int64_t size) {
    const Floats weight = numbers(2, size), bias = numbers(3, size), more = numbers(4, rows * size);
    for (const float* added : {(const float*)nullptr, more.data()}) {
      Floats x = numbers(5, rows * size), y(rows * size);
      call("tandem_rms_norm", x.data(), size, added, size, rows, size, weight.data(), 0x1p-17f, y.data());
      root.add(x), root.add(y);
      call("tandem_layer_norm", x.data(), size, added, size, rows, size, weight.data(), bias.data(), 0x1p-17f, y.data());
      layer.add(x), layer.add(y);
    }
  });
}

static void activations() {
  for (const char* name : {"tandem_silu_gated", "tandem_gelu_tanh_gated", "tandem_gelu", "tandem_gelu_tanh"}) {
    Line line(name);
    each_shape([&](int64_t rows, int64_t size) {
      Floats x = numbers(6, rows * 2 * size, 4.0f), y(rows * size);
      x[0] = 200.0f;
      x[x.size() - 1] = -200.0f;
      call(name, x.data(), 2 * size, rows, size, y.data());
      line.add(y);
    });
  }
}

static void cache_writes() {
  Line turned("tandem_rope_and_kv_write"), written("tandem_kv_write");
  for (const int64_t block_size : {8, 16, 64})
    for (const int64_t half : {0, 8, 40}) {
      constexpr int64_t kHeads = 6, kKeyHeads = 2, kDim = 80, kWidth = (kHeads + 2 * kKeyHeads) * kDim;
      World world(kKeyHeads, kDim, block_size);
      const Turn turn(kDim, half);
      Floats qkv = numbers(12, world.num_tokens() * kWidth);
      call("tandem_rope_and_kv_write", qkv.data(), kWidth, kHeads, &turn.transform, &world.step, &world.cache);
      turned.add(qkv), turned.add(world.pool);
      const float* key = qkv.data() + kHeads * kDim;
      call("tandem_kv_write", key, kWidth, kDim, key + kKeyHeads * kDim, kWidth, kDim, &world.step, &world.cache);
      written.add(world.pool);
    }
}

static void attention() {
  Line line("tandem_paged_attention");
  struct Shape {
    int64_t heads, key_heads, dim, block_size, window;
    float softcap;
  };
  for (const Shape& shape : {Shape{6, 2, 32, 16, 0, 0}, Shape{6, 2, 32, 8, 13, 0}, Shape{6, 2, 16, 12, 0, 0},
                             Shape{6, 2, 96, 64, 0, 3}, Shape{4, 4, 80, 16, 100, 0}, Shape{7, 1, 128, 16, 0, 0},
                             Shape{16, 1, 256, 16, 600, 5}, Shape{2, 1, 20, 16, 0, 0}, Shape{2, 2, 7, 5, 0, 0}}) {
    World world(shape.key_heads, shape.dim, shape.block_size);
    const Floats query = numbers(13, world.num_tokens() * shape.heads * shape.dim);
    Floats out(query.size());
    call("tandem_paged_attention", query.data(), shape.heads * shape.dim, out.data(), shape.heads, &world.step,
         &world.cache, shape.window, 0.1875f, shape.softcap);
    line.add(out);
  }
}

static void decoder_layers() {
  constexpr int64_t kHidden = 72, kInner = 100, kHeads = 6, kKeyHeads = 2, kDim = 16;
  World world(kKeyHeads, kDim, 16);
  const Turn turn(kDim, 8);
  const Packed qkv(20, (kHeads + 2 * kKeyHeads) * kDim, kHidden, true), output(22, kHidden, kHeads * kDim, false),
      gate_up(24, 2 * kInner, kHidden, true), down(26, kHidden, kInner, false);
  const Floats norm = numbers(28, kHidden);
  std::vector<DenseLayer> layers;
  for (const int64_t is_gelu : {0, 1}) {
    DenseLayer layer = {};
    layer.qkv = &qkv.weights, layer.output = &output.weights, layer.gate_up = &gate_up.weights;
    layer.down = &down.weights, layer.input_norm = layer.mlp_norm = norm.data();
    layer.attention_output_norm = layer.mlp_output_norm = is_gelu ? norm.data() : nullptr;
    layer.transform = &turn.transform, layer.cache = &world.cache;
    layer.num_heads = kHeads, layer.window = is_gelu ? 40 : 0, layer.is_gelu = is_gelu;
    layer.epsilon = 0x1p-17f, layer.scale = 0.25f, layer.softcap = is_gelu ? 5.0f : 0.0f;
    layers.push_back(layer);
  }
  const Step* steps[] = {&world.step};
  const Longs sampled = {59, 60, 61};
  Floats x = numbers(29, world.num_tokens() * kHidden), queries(3 * kHeads * kDim), rows(3 * kHidden), more(3 * kHidden);
  {
    Line line("tandem_layers");
    call("tandem_layers", layers.data(), (int64_t)layers.size(), steps, x.data(), sampled.data(), int64_t{3},
         queries.data());
    line.add(x), line.add(queries), line.add(world.pool);
  }
  for (int i = 0; i < 3; i++) memcpy(&rows[i * kHidden], &x[sampled[i] * kHidden], kHidden * sizeof(float));
  Line line("tandem_finish_layer");
  call("tandem_finish_layer", &layers.back(), steps, sampled.data(), int64_t{3}, queries.data(), rows.data(),
       more.data());
  line.add(rows), line.add(more);
}

static void encoder_layers() {
  constexpr int64_t kHidden = 72, kInner = 100, kHeads = 4, kDim = 18;
  const Longs starts = {0, 1, 40, 141};
  {
    Line line("tandem_self_attention");
    const Floats qkv = numbers(30, 141 * 3 * kHidden);
    Floats out(141 * kHidden);
    call("tandem_self_attention", qkv.data(), kHeads, kDim, starts.data(), int64_t{3}, 0.25f, out.data());
    line.add(out);
  }
  const Packed qkv(31, 3 * kHidden, kHidden, true), output(33, kHidden, kHidden, false), up(35, kInner, kHidden, true),
      down(37, kHidden, kInner, false);
  const Floats norm = numbers(39, kHidden), bias = numbers(40, kHidden);
  std::vector<EncoderLayer> layers;
  for (const int64_t is_tanh : {0, 1}) {
    EncoderLayer layer = {};
    layer.qkv = &qkv.weights, layer.output = &output.weights, layer.up = &up.weights, layer.down = &down.weights;
    layer.attention_norm = layer.mlp_norm = norm.data(), layer.attention_bias = layer.mlp_bias = bias.data();
    layer.num_heads = kHeads, layer.is_tanh = is_tanh, layer.epsilon = 0x1p-17f, layer.scale = 0.25f;
    layers.push_back(layer);
  }
  Line line("tandem_encoder_layers");
  Floats x = numbers(41, 141 * kHidden);
  call("tandem_encoder_layers", layers.data(), (int64_t)layers.size(), starts.data(), int64_t{3}, x.data());
  line.add(x);
}

static void samples() {
  Line line("tandem_sample");
  constexpr int64_t kSize = 4097, kSeeds = 40, kTop = 20;
  const Longs changed = {0, 5, 4000, 77};
  const std::vector<double> bias = {1.5, -2.0, 0.25, 100.0}, minus = {0.5, 0.0, 0.0, 2.0};
  const std::vector<uint8_t> is_seen = {1, 0, 1, 1};
  std::vector<uint32_t> allowed(kSize / 32);
  std::vector<uint64_t> seeds(kSeeds);
  Chance chance(42);
  for (uint32_t& word : allowed) word = chance.word();
  for (uint64_t& seed : seeds) seed = chance.word() >> 1;
  for (int variant = 0; variant < 96; variant++) {
    Floats logits = numbers(43 + variant % 4, kSize, variant % 4 ? 1.0f : 8.0f);
    if (variant % 4 == 3) logits[17] = NAN;
    SamplingRow row = {};
    const double temperatures[] = {0, 1e-9, 0.1, 0.8, 1.0, 100.0}, top_ps[] = {1.0, 0.9, 0.3, 1e-12};
    row.temperature = temperatures[variant % 6], row.top_p = top_ps[variant / 6 % 4];
    row.min_p = variant % 5 == 4 ? 0.05 : 0.0, row.top_k = variant % 7 == 6 ? 50 : 0;
    row.repetition_penalty = variant % 3 ? 1.0 : 1.25, row.position = 1000 * variant;
    row.seeds = seeds.data(), row.num_seeds = kSeeds;
    if (variant % 2)
      row.changed = changed.data(), row.bias = bias.data(), row.is_seen = is_seen.data(), row.minus = minus.data(),
      row.num_changed = changed.size();
    if (variant / 2 % 2) row.allowed = allowed.data(), row.num_allowed_words = allowed.size();
    row.has_logprobs = 1, row.num_top = kTop;
    Longs token_ids(kSeeds + kTop, -1), ranks(kSeeds + kTop, -1);
    std::vector<double> logprobs(kSeeds + kTop);
    row.token_ids = token_ids.data(), row.ranks = ranks.data(), row.logprobs = logprobs.data();
    call("tandem_sample", logits.data(), kSize, kSize, &row, int64_t{1});
    line.add(&row.status, sizeof row.status), line.add(&row.num_top, sizeof row.num_top);
    line.add(token_ids), line.add(ranks), line.add(logprobs);
  }
}

// A grammar that allows what was not consumed last.
static void masks() {
  Line line("tandem_begin_masks");
  constexpr int64_t kWords = 4, kRows = 3;
  const uint32_t ends[kWords] = {};
  const GrammarCalls calls = {
      [](void* matcher, const uint32_t* tokens, size_t count) {
        for (size_t i = 0; i < count; i++) *static_cast<uint64_t*>(matcher) += tokens[i];
        return int32_t{0};
      },
      [](void*, const uint32_t*, size_t count) { return (int32_t)count; },
      [](void* matcher, uint32_t* mask, size_t bytes) {
        Chance chance(*static_cast<uint64_t*>(matcher));
        for (size_t i = 0; i < bytes / sizeof *mask; i++) mask[i] = chance.word();
        return int32_t{0};
      },
      [](void*) { return false; },
      [](void* matcher, size_t count) { return *static_cast<uint64_t*>(matcher) -= count, int32_t{0}; },
      ends,
      kWords,
  };
  const uint32_t tokens[] = {3, 1, 4, 1, 5};
  uint64_t matchers[kRows] = {1, 2, 3};
  std::vector<uint32_t> made[kRows];
  MaskRow rows[kRows], *places[kRows];
  for (int i = 0; i < kRows; i++) {
    made[i].resize(3 * kWords);
    rows[i] = {&matchers[i], tokens, made[i].data(), 3, i, 0, 0};
    places[i] = &rows[i];
  }
  call("tandem_begin_masks", &calls, (MaskRow**)places, kRows);
  call("tandem_finish_masks");
  for (int i = 0; i < kRows; i++) line.add(made[i]), line.add(&rows[i].status, sizeof(int64_t));
  Line("tandem_finish_masks").add(matchers, sizeof matchers);
}

static void texts() {
  const RememberedTokens::Ask ask = [](const void*, const uint8_t* text, size_t count, uint32_t* tokens, size_t room) {
    for (size_t i = 0; i < std::min(count, room); i++) tokens[i] = text[i] * 3;
    return count;
  };
  void* remembered = call<void*>("tandem_remembered_tokens", ask);
  Line("tandem_remembered_tokens").add("", remembered == nullptr);
  Line line("tandem_tokenize");
  for (int round = 0; round < 2; round++) {  // the second is answered from memory
    std::vector<uint32_t> tokens(8);
    const size_t count = call<size_t>("tandem_tokenize", remembered, (const uint8_t*)"grammar", size_t{7}, tokens.data(),
                                      size_t{8});
    line.add(tokens), line.add(&count, sizeof count);
  }
}

int main(int count, char** arguments) {
  if (count < 2) return std::fprintf(stderr, "usage: kernel_bits LIBRARY.so [THREADS]\n"), 2;
  library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  call("tandem_set_num_threads", count > 2 ? std::atoi(arguments[2]) : 1, (const int*)nullptr, 0);
  const int has_fma = call<int>("tandem_has_fma");
  Line("tandem_has_fma").add(&has_fma, sizeof has_fma);
  packing();
  linear_layers();
  norms();
  activations();
  cache_writes();
  attention();
  decoder_layers();
  encoder_layers();
  samples();
  masks();
  texts();
}
