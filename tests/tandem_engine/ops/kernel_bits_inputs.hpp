// Makes the fixed inputs of kernel_bits.cpp, calls the library's functions, and hashes what they write.
#pragma once
#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "encoder.hpp"
#include "layers.hpp"
#include "masks.hpp"
#include "sampling.hpp"

using namespace tandem;

static void* library;

template <class Result = void, class... Arguments>
static Result call(const char* name, Arguments... arguments) {
  void* function = dlsym(library, name);
  if (function == nullptr) std::fprintf(stderr, "%s\n", dlerror()), std::exit(2);
  return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
}

// SplitMix64: the same numbers on every machine.
struct Chance {
  explicit Chance(uint64_t seed) : state(seed) {}
  uint64_t word() {
    uint64_t z = state += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
  }
  // Four numbers of 16 bits, summed: bell-shaped, deviation 1.15 * scale, exact for a scale that is a power of two.
  float number(float scale = 1.0f) {
    const uint64_t w = word();
    const int64_t sum = (w & 0xffff) + (w >> 16 & 0xffff) + (w >> 32 & 0xffff) + (w >> 48);
    return (float)(sum - 2 * 65535) * (1.0f / 32768) * scale;
  }
  uint64_t state;
};

using Floats = std::vector<float>;
using Longs = std::vector<int64_t>;

static Floats numbers(uint64_t seed, int64_t count, float scale = 1.0f) {
  Chance chance(seed);
  Floats made(count);
  for (float& one : made) one = chance.number(scale);
  return made;
}

static std::vector<uint16_t> halves(const Floats& wide) {
  std::vector<uint16_t> made;
  for (const float one : wide) {
    uint32_t bits;
    memcpy(&bits, &one, sizeof bits);
    made.push_back(bits >> 16);
  }
  return made;
}

// FNV-1a over bytes; a kernel's line has the hash of everything that it wrote.
class Line {
 public:
  explicit Line(const char* name) : name_(name) {}
  ~Line() { std::printf("%s %016llx\n", name_, (unsigned long long)hash_); }
  Line(const Line&) = delete;
  template <class T>
  void add(const std::vector<T>& values) { add(values.data(), values.size() * sizeof(T)); }
  void add(const Floats& values) {
    for (const float one : values)
      if (!std::isfinite(one)) std::fprintf(stderr, "%s writes a number that is not finite\n", name_), std::exit(3);
    add(values.data(), values.size() * sizeof(float));
  }
  void add(const void* from, size_t num_bytes) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    for (size_t i = 0; i < num_bytes; i++) hash_ = (hash_ ^ bytes[i]) * 0x100000001b3;
  }

 private:
  const char* name_;
  uint64_t hash_ = 0xcbf29ce484222325;
};

// A linear layer's packed weights, with the memory that they point to.
struct Packed {
  Packed(uint64_t seed, int64_t outputs, int64_t inputs, bool is_half) {
    const int64_t tiles = (outputs + kTile - 1) / kTile;
    const Floats weight = numbers(seed, outputs * inputs, 1.0f / 16);
    bias = numbers(seed + 1, outputs);
    bias.resize(tiles * kTile);
    if (is_half) {
      small.resize(tiles * kTile * inputs);
      call("tandem_pack_bf16", halves(weight).data(), inputs, outputs, inputs, small.data());
    } else {
      wide.resize(tiles * kTile * inputs);
      call("tandem_pack_f32", weight.data(), inputs, outputs, inputs, wide.data());
    }
    weights = {is_half ? (const void*)small.data() : wide.data(), bias.data(), inputs, outputs, is_half};
  }
  std::vector<uint16_t> small;
  Floats wide, bias;
  Weights weights;
};

// Keys and values of one layer, and a step of a prefill chunk and two decodes over blocks in no order.
struct World {
  World(int64_t heads, int64_t dim, int64_t block_size) : heads(heads) {
    const int64_t row = 2 * heads * dim * block_size, num_blocks = 1600 / block_size + 4;
    pool = numbers(7, num_blocks * row);
    cache = {};
    cache.pool = pool.data(), cache.block_stride = row, cache.layer_offset = 0;
    cache.num_kv_heads = heads, cache.head_dim = dim, cache.block_size = block_size;
    const int64_t lengths[][2] = {{0, 60}, {700, 1}, {530, 1}};  // {start, count} of a run
    for (const auto& [start, count] : lengths) {
      runs.push_back({(int64_t)positions.size(), start, count, (int64_t)tables.size()});
      for (int64_t block = 0; block * block_size < start + count; block++)
        tables.push_back(num_blocks - 1 - (int64_t)tables.size());
      for (int64_t t = start; t < start + count; t++) {
        positions.push_back(t);
        slots.push_back(tables[runs.back().first_block + t / block_size] * block_size + t % block_size);
      }
    }
    step = {positions.data(), slots.data(), num_tokens(), runs.data(), (int64_t)runs.size(), tables.data()};
  }
  int64_t num_tokens() const { return positions.size(); }
  int64_t heads;
  Floats pool;
  Cache cache;
  Longs positions, slots, tables;
  std::vector<Run> runs;
  Step step;
};

// Tables as of a rotary embedding; the numbers are no cosines, since a libm may round them otherwise.
struct Turn {
  Turn(int64_t dim, int64_t half)
      : cosines(numbers(8, 800 * half, 0.25f)), sines(numbers(9, 800 * half, 0.25f)), query(numbers(10, dim)),
        key(numbers(11, dim)), transform{cosines.data(), sines.data(), half, query.data(), key.data(), 0x1p-17f} {}
  Floats cosines, sines, query, key;
  QKTransform transform;
};
