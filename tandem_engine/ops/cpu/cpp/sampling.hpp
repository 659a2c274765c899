// Samples tokens: for each row the largest scaled logit plus noise, a pure function of the row and its parameters.
//
//     logits -> changes -> temperature -> top-k -> top-p -> min-p -> plus Gumbel noise -> argmax, the lower id first
//
// Noise costs more than all the rest. It is computed only for logits that could win with the largest possible noise.
// Logarithms are computed only for logits that could win with the leading ones of their word.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "noise.hpp"
#include "selection.hpp"
#include "threads.hpp"

namespace tandem {

struct SamplingRow {  // as in library.py
  double temperature, top_p, min_p, repetition_penalty;  // temperature 0: the largest logit
  int64_t top_k, position;
  const uint64_t* seeds;
  int64_t num_seeds;
  const int64_t* changed;  // ids, all different; may be null, as may `allowed`
  const double* bias;
  const uint8_t* is_seen;
  const double* minus;
  int64_t num_changed;
  const uint32_t* allowed;  // bit i % 32 of word i / 32: token i is allowed
  int64_t num_allowed_words, has_logprobs;
  int64_t num_top;
  // Results: of each seed's token, then of the num_top likeliest, which become fewer where fewer are above -infinity.
  int64_t* token_ids;
  int64_t* ranks;
  double* logprobs;
  int64_t status;  // 0, or why nothing could be sampled
};

enum Status { kSampled = 0, kNotNumbers = 1, kNothingLeft = 2 };

// The logits that are kept: those above `smallest`, and of those equal to it the ones up to id `last_equal`.
struct Kept {
  float smallest = -INFINITY;
  int64_t last_equal = std::numeric_limits<int64_t>::max();

  bool has(float logit, int64_t id) const { return logit > smallest || (logit == smallest && id <= last_equal); }
};

class RowDraw {
 public:
  RowDraw(const Logits& row, float largest, double temperature, const Kept& kept)
      : row_(row), temperature_(temperature), kept_(kept), favourite_(row.find(largest)) {}

  int64_t draw(uint64_t seed, uint64_t position) {
    const Noise noise(seed, position);
    uint64_t words[kWide];
    best_ = -INFINITY;
    noise.block(favourite_ / kWordsPerBlock, words);
    consider(row_.at(favourite_), favourite_, words[favourite_ % kWordsPerBlock]);
    row_.each_group([&](Vec x) { return x >= splat(std::max(kept_.smallest, needed_[kNoiseBits - 1])); },
                    [&](int64_t first, const float* x) {
                      for (int i = 0; i < kWide; i += kWordsPerBlock)
                        noise.block((first + i) / kWordsPerBlock, words + i);
                      for (int i = 0; i < kWide; i++)
                        if (x[i] >= needed_[leading_ones(words[i])] && kept_.has(x[i], first + i))
                          consider(x[i], first + i, words[i]);
                    });
    return chosen_;
  }

 private:
  void consider(float logit, int64_t id, uint64_t word) {
    const double value = logit / temperature_ + gumbel(word);
    if (value < best_ || (value == best_ && id >= chosen_)) return;
    best_ = value;
    chosen_ = id;
    // Slightly below what equals the best, so that rounding never excludes a winner.
    const double slack = 1e-9 * temperature_ * (std::abs(best_) + 40);
    for (int ones = 0; ones < kNoiseBits; ones++) {
      const double needed = temperature_ * (best_ - largest_gumbel(ones)) - slack;
      needed_[ones] = (float)(needed - std::abs(needed) * 0x1p-22 - 1e-30);
    }
  }

  const Logits& row_;
  const double temperature_;
  const Kept kept_;
  const int64_t favourite_;
  double best_ = 0;
  int64_t chosen_ = 0;
  float needed_[kNoiseBits];  // the smallest logit that could win, by the leading ones of its word
};

static Kept kept_of(const Logits& row, float largest, const SamplingRow& params) {
  Selection selection;
  if (params.top_k > 0 && params.top_k < row.size()) {
    const std::vector<float>& chosen = largest_logits(row, params.top_k);
    selection = params.top_p < 1
                    ? MassSelection(Logits(chosen.data(), chosen.size()), largest, params.temperature).select(params.top_p)
                    : select_all_of(chosen);
  } else if (params.top_p < 1) {
    selection = MassSelection(row, largest, params.temperature).select(params.top_p);
  }
  Kept kept;
  if (selection.smallest > -INFINITY) kept = {selection.smallest, row.find(selection.smallest, selection.num_equal)};
  if (params.min_p < 1e-300) return kept;
  const double least = largest / params.temperature + log_of(params.min_p);
  float smallest = (float)(least * params.temperature);  // that, to the last bit, is found nearby
  while (smallest / params.temperature >= least) smallest = std::nextafter(smallest, -INFINITY);
  while (smallest / params.temperature < least) smallest = std::nextafter(smallest, INFINITY);
  return smallest > kept.smallest ? Kept{smallest} : kept;
}

static void change(float* logits, const SamplingRow& params) {
  for (int64_t i = 0; i < params.num_changed; i++) {
    double value = logits[params.changed[i]] + params.bias[i];
    if (params.is_seen[i]) value = value > 0 ? value / params.repetition_penalty : value * params.repetition_penalty;
    logits[params.changed[i]] = (float)(value - params.minus[i]);
  }
}

// Lane i of x where bit i is set, else -infinity.
static inline Vec where_set(uint32_t bits, Vec x) {
  IntVec lane_bits;
  for (int i = 0; i < kLanes; i++) lane_bits[i] = 1 << i;
  return ((IntVec{} + (int32_t)bits) & lane_bits) == lane_bits ? x : splat(-INFINITY);
}

// Copies the logits that are allowed, and -infinity for the others; both may be one place.
static void copy_allowed(const float* from, float* to, int64_t size, const SamplingRow& params) {
  const int64_t num_whole = std::min(size / 32, params.num_allowed_words);
  for (int64_t word = 0; word < num_whole; word++)
    for (int p = 0; p < 32; p += kLanes)
      store(to + word * 32 + p, where_set(params.allowed[word] >> p, load(from + word * 32 + p)));
  for (int64_t i = num_whole * 32; i < size; i++)
    to[i] = i / 32 < params.num_allowed_words && params.allowed[i / 32] >> i % 32 & 1 ? from[i] : -INFINITY;
}

// ln of the sum of e^logit: sixteen partial sums, then their sum.
static double log_sum_exp(const Logits& row, double largest) {
  DoubleVec sums[kWide / kDoubles] = {};
  for (int64_t first = 0; first < row.size(); first += kWide)
    for (int p = 0; p < kWide / kDoubles; p++) sums[p] += exp_of(widened(row.group(first) + p * kDoubles) - largest);
  double lanes[kWide];
  memcpy(lanes, sums, sizeof lanes);
  for (int step = kWide / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return largest + log_of(lanes[0]);
}

static void write_logprobs(const Logits& row, float largest, SamplingRow& params) {
  const double sum = log_sum_exp(row, largest);
  const auto write = [&](int64_t place, int64_t rank) {
    params.ranks[place] = rank;
    params.logprobs[place] = row.at(params.token_ids[place]) - sum;
  };
  for (int64_t i = 0; i < params.num_seeds; i++) write(i, 1 + row.count_above(row.at(params.token_ids[i])));
  if (!params.num_top) return;
  const Selection top = select_all_of(largest_logits(row, params.num_top));
  const Kept kept = {top.smallest, row.find(top.smallest, top.num_equal)};
  std::vector<int64_t> ids;
  row.each_group([&](Vec x) { return x >= splat(kept.smallest); },
                 [&](int64_t first, const float* x) {
                   for (int i = 0; i < kWide; i++)
                     if (kept.has(x[i], first + i)) ids.push_back(first + i);
                 });
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t a, int64_t b) { return row.at(a) > row.at(b); });
  for (size_t i = 0, rank = 1; i < ids.size(); i++) {
    if (i && row.at(ids[i]) < row.at(ids[i - 1])) rank = i + 1;
    params.token_ids[params.num_seeds + i] = ids[i];
    write(params.num_seeds + i, rank);
  }
  params.num_top = ids.size();
}

static void sample_row(const float* logits, int64_t size, SamplingRow& params) {
  static thread_local std::vector<float> changed;
  const Logits raw(logits, size);
  bool is_number;
  const float raw_largest = raw.largest(is_number);
  if (!is_number) return void(params.status = kNotNumbers);
  const bool is_changed = params.num_changed || params.allowed;
  if (params.num_changed) {
    changed.assign(logits, logits + size);
    change(changed.data(), params);
  }
  if (params.allowed) {
    changed.resize(size);
    copy_allowed(params.num_changed ? changed.data() : logits, changed.data(), size, params);
  }
  const Logits row(is_changed ? changed.data() : logits, size);
  const float largest = is_changed ? row.largest(is_number) : raw_largest;
  if (largest == -INFINITY) return void(params.status = kNothingLeft);
  if (params.temperature == 0) {
    std::fill_n(params.token_ids, params.num_seeds, row.find(largest));
  } else {
    RowDraw draw(row, largest, params.temperature, kept_of(row, largest, params));
    for (int64_t i = 0; i < params.num_seeds; i++) params.token_ids[i] = draw.draw(params.seeds[i], params.position);
  }
  if (params.has_logprobs) write_logprobs(raw, raw_largest, params);
  params.status = kSampled;
}

static void sample(const float* logits, int64_t stride, int64_t size, SamplingRow* rows, int64_t num_rows) {
  in_parallel((int)num_rows, [&](int i) { sample_row(logits + i * stride, size, rows[i]); });
}

}  // namespace tandem
