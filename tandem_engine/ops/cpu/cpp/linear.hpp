// y = x W^T over weights packed once.
//
//     packed   [num_tiles][in][32]: the weights of 32 outputs side by side, tile after tile; fp32 or bf16
//     rows     in groups of at most 14, transposed to [in][rows]: 28 sums and their operands fill 32 registers
//
// Every sum starts at the bias and runs over the inputs from first to last, whatever else is in the batch: a row's
// result depends on the row alone. bf16 weights are widened in registers, so they give the bits that fp32 weights of
// the same values give.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "threads.hpp"
#include "vectors.hpp"

namespace tandem {

constexpr int kTile = 32;                                 // outputs
constexpr int kHalf = kTile / 2;
constexpr int kGroup = kRegisters == 32 ? 14 : 6;         // rows
constexpr int kRowsAtOnce = kRegisters == 32 ? 112 : 96;  // their inputs stay in L2 beside a tile
constexpr int kNearBytes = 560 << 10;                     // of inputs, a tile and the next one, of L2's 1 MB
constexpr int kInputsTransposed = 256;                    // inputs of a group that are transposed at once
constexpr int kAhead = 192;                               // inputs, when a tile is read for the first time
constexpr int kNextInputs = 16;                           // from L2 into L1

// What to prefetch meanwhile: `step` bytes per input.
struct Prefetch {
  const char* at;
  int64_t step;
};

// Returns the place of output `o` of a tile among the 32 weights of one input. bf16 outputs i and 16 + i are
// interleaved, so that a shift and a mask widen both.
template <class Weight>
static inline int position_in_tile(int o) {
  return sizeof(Weight) == sizeof(float) ? o : o % kHalf * 2 + o / kHalf;
}

// The weights of outputs [at, at + lanes) and [16 + at, 16 + at + lanes).
static inline void load_pair(const float* weights, int at, Vec pair[2]) {
  pair[0] = load(weights + at);
  pair[1] = load(weights + kHalf + at);
}
static inline void load_pair(const uint16_t* weights, int at, Vec pair[2]) {  // a bf16 is the upper half of an fp32
  const BitsVec both = *reinterpret_cast<const UnalignedBitsVec*>(weights + 2 * at);
  pair[0] = (Vec)(both << 16);
  pair[1] = (Vec)(both & 0xffff0000u);
}

// Prefetches all weights of one input into L1.
template <class Weight>
static inline void bring_near(const Weight* weights) {
  for (int i = 0; i < kTile; i += 64 / sizeof(Weight)) __builtin_prefetch(weights + i, 0, 3);
}

// Prefetches the place of the sums, so that stores do not wait for cache lines.
static inline void bring_near(float* y, int64_t y_stride, int rows) {
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < 2; v++) __builtin_prefetch(y + r * y_stride + v * kHalf, 1, 3);
}

template <int rows, class Weight>
static void tile_times_rows(const float* x, const Weight* weight, int64_t num_inputs, const float* start,
                            int64_t start_stride, float* y, int64_t y_stride, Prefetch ahead) {
  // One or two rows wait for memory only and gain from L1; the inputs of more rows are in L1 (measured: 10 to 30 %).
  constexpr int kNear = rows <= 2 ? 3 : 2;
  for (int column = 0; column < kHalf; column += kLanes) {
    Vec sum[rows][2];
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < 2; v++) sum[r][v] = load(start + r * start_stride + v * kHalf + column);
    const float* input = x;
    const Weight* weights = weight;
    const char* at = ahead.at;
    for (int64_t i = 0; i < num_inputs; i++, input += rows, weights += kTile, at += ahead.step) {
      Vec pair[2];
      load_pair(weights, column, pair);
      if (rows > 2) bring_near(weights + kNextInputs * kTile);
      __builtin_prefetch(at, 0, kNear);
      if (sizeof(Weight) == sizeof(float)) __builtin_prefetch(at + 64, 0, kNear);
#pragma GCC unroll 14
      for (int r = 0; r < rows; r++) {
        const Vec one = splat(input[r]);
        sum[r][0] = multiply_add(one, pair[0], sum[r][0]);
        sum[r][1] = multiply_add(one, pair[1], sum[r][1]);
      }
    }
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < 2; v++) store(y + r * y_stride + v * kHalf + column, sum[r][v]);
  }
}

template <class Weight>
using TileTimesRows = void (*)(const float*, const Weight*, int64_t, const float*, int64_t, float*, int64_t, Prefetch);

template <class Weight, int... n>
static inline TileTimesRows<Weight> tile_times(int rows, std::integer_sequence<int, n...>) {
  static constexpr TileTimesRows<Weight> by_rows[] = {tile_times_rows<n + 1, Weight>...};
  return by_rows[rows - 1];
}

// [rows][num], `stride` apart, to [num][rows].
template <int rows>
static void transpose_rows(const float* from, int64_t stride, int64_t num, float* to) {
  for (int64_t i = 0; i < num; i++, to += rows)
#pragma GCC unroll 14
    for (int r = 0; r < rows; r++) to[r] = from[r * stride + i];
}

using TransposeRows = void (*)(const float*, int64_t, int64_t, float*);

template <int... n>
static inline TransposeRows transpose_by_rows(int rows, std::integer_sequence<int, n...>) {
  static constexpr TransposeRows by_rows[] = {transpose_rows<n + 1>...};
  return by_rows[rows - 1];
}

// Shares rows evenly: 16 rows are 8 and 8, not 14 and 2.
struct Groups {
  explicit Groups(int64_t num_rows)
      : count((int)((num_rows + kGroup - 1) / kGroup)), base((int)num_rows / count), extra((int)num_rows % count) {}
  int first(int group) const { return group * base + std::min(group, extra); }
  int rows(int group) const { return base + (group < extra); }
  const int count, base, extra;
};

template <class Weight>
struct Linear {
  const float* x;
  int64_t x_stride, num_rows, num_inputs;
  const Weight* packed;
  int64_t num_outputs;
  const float* bias;  // [num_tiles * 32]
  float* y;
  int64_t y_stride;

  void run() const {
    static std::vector<float> space;
    for (int64_t row = 0; row < num_rows; row += kRowsAtOnce) {
      const int64_t rows = std::min<int64_t>(num_rows - row, kRowsAtOnce);
      const Groups groups(rows);
      const float* transposed = x + row * x_stride;
      if (rows > 1) {
        if ((int64_t)space.size() < rows * num_inputs) space.resize(rows * num_inputs);
        transpose(groups, row, space.data());
        transposed = space.data();
      }
      multiply(groups, row, transposed);
    }
  }

 private:
  void transpose(const Groups& groups, int64_t row, float* transposed) const {
    const int parts = (int)((num_inputs + kInputsTransposed - 1) / kInputsTransposed);
    in_parallel(groups.count * parts, [&](int piece) {
      const int group = piece / parts, first = groups.first(group), rows = groups.rows(group);
      const int64_t begin = piece % parts * kInputsTransposed, end = std::min(begin + kInputsTransposed, num_inputs);
      const auto transpose = transpose_by_rows(rows, std::make_integer_sequence<int, kGroup>{});
      float* to = transposed + first * num_inputs + begin * rows;
      transpose(x + (row + first) * x_stride + begin, x_stride, end - begin, to);
    });
  }

  // With many rows a piece is one tile; else a piece is a few tiles, so few that threads end together.
  void multiply(const Groups& groups, int64_t row, const float* transposed) const {
    const int num_tiles = (int)((num_outputs + kTile - 1) / kTile);
    const int tiles = groups.count > 1 ? 1 : std::clamp(num_tiles / (8 * threads()->num_threads()), 1, 8);
    const int64_t at_once = kNearBytes / (groups.first(groups.count) * sizeof(float) + 2 * kTile * sizeof(Weight));
    const int num_parts = groups.count > 1 ? (int)((num_inputs + at_once - 1) / at_once) : 1;
    const int64_t part = (num_inputs + num_parts - 1) / num_parts;
    in_parallel((num_tiles + tiles - 1) / tiles, [&](int piece) {
      const int begin = piece * tiles, end = std::min(begin + tiles, num_tiles);
      static thread_local const Weight* brought = nullptr;  // the tile that this thread prefetched last
      bool is_near = brought == weights_of(begin, 0);
      for (int64_t input = 0; input < num_inputs; input += part)
        for (int tile = begin; tile < end; tile++) {
          const int64_t num = std::min(part, num_inputs - input);
          const Weight* next = tile + 1 < end              ? weights_of(tile + 1, input)
                               : input + num < num_inputs ? weights_of(begin, input + num)
                               : end < num_tiles          ? weights_of(end, 0)
                                                          : nullptr;
          for (int group = 0; group < groups.count; group++) {
            const Prefetch ahead = what_next(groups, group, weights_of(tile, input), next, num, is_near);
            const float* from = transposed + groups.first(group) * num_inputs + input * groups.rows(group);
            tile_and_rows(from, tile, input, num, row + groups.first(group), groups.rows(group), ahead);
          }
          is_near = true;
        }
      brought = end < num_tiles ? weights_of(end, 0) : nullptr;
    });
  }

  const Weight* weights_of(int tile, int64_t input) const {
    return packed + ((int64_t)tile * num_inputs + input) * kTile;
  }

  void tile_and_rows(const float* from, int tile, int64_t input, int64_t num, int64_t row, int rows,
                     Prefetch ahead) const {
    const auto times = tile_times<Weight>(rows, std::make_integer_sequence<int, kGroup>{});
    float* to = y + row * y_stride + (int64_t)tile * kTile;
    const float* start = input ? to : bias + (int64_t)tile * kTile;
    const int64_t start_stride = input ? y_stride : 0;
    if (input == 0) bring_near(to, y_stride, rows);
    const int64_t columns = std::min<int64_t>(kTile, num_outputs - (int64_t)tile * kTile);
    if (columns == kTile) {
      times(from, weights_of(tile, input), num, start, start_stride, to, y_stride, ahead);
      return;
    }
    float whole[kGroup][kTile] = {};  // the last outputs, when they do not fill a tile
    for (int r = 0; r < rows; r++) memcpy(whole[r], start + r * start_stride, columns * sizeof(float));
    times(from, weights_of(tile, input), num, whole[0], kTile, whole[0], kTile, ahead);
    for (int r = 0; r < rows; r++) memcpy(to + r * y_stride, whole[r], columns * sizeof(float));
  }

  // The first group prefetches a tile from memory somewhat ahead of its own reads. Then, group by group, the next tile
  // is prefetched while this tile is multiplied from L2.
  Prefetch what_next(const Groups& groups, int group, const Weight* tile, const Weight* next, int64_t num,
                     bool is_near) const {
    constexpr int64_t kBytes = kTile * sizeof(Weight);
    if (groups.count == 1 || (group == 0 && !is_near))
      return {reinterpret_cast<const char*>(tile) + kAhead * kBytes, kBytes};
    if (next == nullptr) return {reinterpret_cast<const char*>(tile), 0};
    const int64_t step = kBytes / groups.count;
    return {reinterpret_cast<const char*>(next) + group * num * step, step};
  }
};

struct Weights {
  const void* packed;
  const float* bias;
  int64_t inputs, outputs, is_half;
};

static void linear(const float* x, int64_t x_stride, int64_t rows, const Weights& weights, float* y) {
  const auto [packed, bias, inputs, outputs, is_half] = weights;
  if (is_half)
    Linear<uint16_t>{x, x_stride, rows, inputs, static_cast<const uint16_t*>(packed), outputs, bias, y, outputs}.run();
  else
    Linear<float>{x, x_stride, rows, inputs, static_cast<const float*>(packed), outputs, bias, y, outputs}.run();
}

}  // namespace tandem
