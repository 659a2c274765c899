// Attention without a mask and without a cache: every token of a run attends to all tokens of the run.
//
// A piece is one head of one run: it lays out the head's keys and values once, then takes some queries at a time. Every
// sum runs over the run's tokens from first to last, so a token's result depends on its own run alone, however the
// queries are cut. Where threads outnumber pieces, a piece is a part of the queries, and lays out the keys anew.
#pragma once
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_blocks.hpp"
#include "elementwise.hpp"
#include "threads.hpp"

namespace tandem {

constexpr int kScoresAtOnce = 24576;  // 96 KB, in L2 beside keys and values
constexpr int kMostQueries = 48;      // a multiple of kScoreQueries

struct SelfAttention {
  const float* qkv;  // [num_tokens][3][num_heads][dim]
  float* out;        // [num_tokens][num_heads][dim]
  int64_t num_heads, dim;
  const int64_t* starts;  // run r is tokens [starts[r], starts[r + 1])
  int64_t num_runs;
  float scale;

  void run() const {
    const int64_t num_heads_of_runs = num_runs * num_heads, wanted = 2 * threads()->num_threads();
    const int64_t cuts = threads()->num_threads() == 1 ? 1 : (wanted + num_heads_of_runs - 1) / num_heads_of_runs;
    in_parallel((int)(num_heads_of_runs * cuts), [&](int piece) {
      const int64_t first = starts[piece / cuts / num_heads], end = starts[piece / cuts / num_heads + 1];
      const int64_t cut = piece % cuts, num = end - first;
      Worker(*this, first, num, piece / cuts % num_heads).run(num * cut / cuts, num * (cut + 1) / cuts);
    });
  }

 private:
  int64_t stride() const { return 3 * num_heads * dim; }

  class Worker {
   public:
    Worker(const SelfAttention& all, int64_t first_token, int64_t num_tokens, int64_t head)
        : a_(all), first_(first_token), num_(num_tokens), head_(head), dim_(all.dim),
          padded_((num_tokens + kChunk - 1) / kChunk * kChunk),
          at_once_(std::clamp<int64_t>(kScoresAtOnce / padded_ / kScoreQueries * kScoreQueries, kScoreQueries,
                                       kMostQueries)) {
      static thread_local std::vector<float> space;
      const size_t need = padded_ * dim_ * 2 + at_once_ * (2 * dim_ + padded_ + 1);
      if (space.size() < need) space.resize(need);
      float* at = space.data();
      const auto take = [&](int64_t size) { return std::exchange(at, at + size); };
      keys_ = take(padded_ * dim_);
      values_ = take(padded_ * dim_);
      queries_ = take(at_once_ * dim_);
      gathered_ = take(at_once_ * dim_);
      scores_ = take(at_once_ * padded_);
      sums_ = take(at_once_);
    }

    void run(int64_t begin, int64_t end) {
      if (begin == end) return;
      lay_out();
      for (int64_t query = begin; query < end; query += at_once_) attend(query, std::min(at_once_, end - query));
    }

   private:
    const float* row_of(int64_t token, int64_t part) const {
      return a_.qkv + (first_ + token) * a_.stride() + (part * a_.num_heads + head_) * dim_;
    }

    // Keys to [chunk][dim][16], zeros beyond the last token; values to [token][dim].
    void lay_out() {
      for (int64_t chunk = 0; chunk < padded_; chunk += kChunk) {
        float* to = keys_ + chunk * dim_;
        const int64_t count = std::min<int64_t>(kChunk, num_ - chunk);
        if (count < kChunk) std::fill_n(to, kChunk * dim_, 0.0f);
        for (int64_t t = 0; t < count; t++) {
          const float* from = row_of(chunk + t, 1);
          for (int64_t d = 0; d < dim_; d++) to[d * kChunk + t] = from[d];
        }
      }
      for (int64_t t = 0; t < num_; t++) memcpy(values_ + t * dim_, row_of(t, 2), dim_ * sizeof(float));
    }

    void attend(int64_t query, int64_t count) {
      for (int64_t i = 0; i < count; i++)
        memcpy(queries_ + i * dim_, row_of(query + i, 0), dim_ * sizeof(float));
      for (int64_t chunk = 0; chunk < padded_; chunk += kChunk) {
        const float* keys = keys_ + chunk * dim_;
        scores_of_all(count, queries_, dim_, keys, kChunk, a_.scale, scores_ + chunk, padded_, keys);
      }
      for (int64_t i = 0; i < count; i++) sums_[i] = soften(scores_ + i * padded_);
      gather(count);
      for (int64_t i = 0; i < count; i++) {
        float* to = a_.out + (first_ + query + i) * a_.num_heads * dim_ + head_ * dim_;
        const float share = 1.0f / sums_[i];
        for (int64_t d = 0; d < dim_; d++) to[d] = gathered_[i * dim_ + d] * share;
      }
    }

    // Scores to e^(score - maximum), zeros beyond the last token; returns their sum.
    float soften(float* scores) const {
      std::fill(scores + num_, scores + padded_, -INFINITY);
      Wide largest = wide_splat(-INFINITY), sum = wide_splat(0);
      for (int64_t t = 0; t < padded_; t += kWide)
        for (int p = 0; p < kParts; p++)
          largest.part[p] = larger(largest.part[p], load(scores + t + p * kLanes));
      const float maximum = largest_of(largest);
      for (int64_t t = 0; t < padded_; t += kWide)
        for (int p = 0; p < kParts; p++) {
          float* at = scores + t + p * kLanes;
          const Vec score = load(at);
          const Vec e = score == splat(-INFINITY) ? Vec{} : exp_of(score - maximum);
          store(at, e);
          sum.part[p] += e;
        }
      return sum_of(sum);
    }

    void gather(int64_t count) {
      std::fill_n(gathered_, count * dim_, 0.0f);
      for (int64_t token = 0; token < num_; token += kValueChunks * kChunk) {
        Values values = {};
        for (int i = 0; i < kValueChunks; i++) values.chunks[i] = values.soon[i] = values_ + (token + i * kChunk) * dim_;
        values.num_tokens = std::min<int64_t>(kValueChunks * kChunk, num_ - token);
        values_of_all(count, scores_ + token, padded_, values, dim_, gathered_, dim_);
      }
    }

    const SelfAttention& a_;
    const int64_t first_, num_, head_, dim_, padded_, at_once_;
    float *keys_, *values_, *queries_, *gathered_, *scores_, *sums_;
  };
};

}  // namespace tandem
