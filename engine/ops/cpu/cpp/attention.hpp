// Attention over KV blocks, prefill chunks and decodes in one call.
//
// A context is walked in parts of 512 tokens, counted from its first; each part has a softmax of its own and the parts
// are joined in order. So a token's result depends on its position, its query and what it sees, never on how many
// others were computed beside it, how its prompt was cut into chunks, or how long a block is.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_blocks.hpp"
#include "cache.hpp"

namespace tandem {

constexpr int kPartTokens = 512;
constexpr int kSoon = 2;            // chunks: what is prefetched while one is read
constexpr int kQueriesPerItem = 60;  // their scores of a part, 120 KB, stay in L2

struct Run {  // tokens [start, start + count) of one request, at `row` and after; its blocks from table[first_block]
  int64_t row, start, count, first_block;
};

struct Attention {
  const float* query;
  int64_t query_stride;
  float* out;
  int64_t out_stride, num_heads;
  const Cache& cache;
  const Run* runs;
  int64_t num_runs;
  const int64_t* tables;
  int64_t window;  // 0: all
  float scale, softcap;  // 0: none

  void run() const {
    static std::vector<Item> items;
    items.clear();
    const int64_t per_head = num_heads / cache.num_kv_heads;
    const int64_t rows = std::max<int64_t>(1, kQueriesPerItem / per_head);
    for (int64_t r = 0; r < num_runs; r++)
      for (int64_t first = (runs[r].count - 1) / rows * rows; first >= 0; first -= rows)  // the longest work first
        for (int64_t head = 0; head < cache.num_kv_heads; head++)
          items.push_back({&runs[r], head, first, std::min(rows, runs[r].count - first)});
    in_parallel((int)items.size(), [&](int i) { Worker(*this, items[i]).run(); });
  }

 private:
  struct Item {
    const Run* run;
    int64_t head, first, rows;
  };

  // One head's queries of some rows of a run.
  class Worker {
   public:
    Worker(const Attention& all, const Item& item)
        : a_(all), item_(item), table_(all.tables + item.run->first_block), dim_(all.cache.head_dim),
          padded_((dim_ + kWide - 1) / kWide * kWide), per_head_(all.num_heads / all.cache.num_kv_heads),
          num_(item.rows * per_head_), first_(item.run->start + item.first), last_(first_ + item.rows - 1) {
      static thread_local std::vector<float> space;
      const size_t need = num_ * (dim_ + kPartTokens + 2 * padded_ + 3) + kChunk * dim_;
      if (space.size() < need) space.resize(need);
      float* at = space.data();
      const auto take = [&](int64_t size) { return std::exchange(at, at + size); };
      queries_ = take(num_ * dim_);
      scores_ = take(num_ * kPartTokens);
      part_ = take(num_ * padded_);
      total_ = take(num_ * padded_);
      maximum_ = take(num_);
      sum_ = take(num_);
      weight_ = take(num_);
      chunk_ = take(kChunk * dim_);
    }

    void run() {
      for (int64_t i = 0; i < num_; i++) {
        memcpy(queries_ + i * dim_, a_.query + row_of(i) * a_.query_stride + head_of(i) * dim_, dim_ * sizeof(float));
        maximum_[i] = -INFINITY;
        sum_[i] = 0;
      }
      std::fill_n(total_, num_ * padded_, 0.0f);
      const int64_t low = a_.window ? std::max<int64_t>(0, first_ - a_.window + 1) : 0;
      for (int64_t part = low / kPartTokens * kPartTokens; part <= last_; part += kPartTokens) {
        const int64_t from = std::max(low, part), chunk = from / kChunk * kChunk;
        const int64_t end = std::min(last_ + 1, part + kPartTokens);
        score(part, from, end);
        for (int64_t i = 0; i < num_; i++) soften(i, part, chunk, end);
        std::fill_n(part_, num_ * padded_, 0.0f);
        gather(part, from, end);
        for (int64_t i = 0; i < num_; i++) join(i);
      }
      for (int64_t i = 0; i < num_; i++) {
        float* to = a_.out + row_of(i) * a_.out_stride + head_of(i) * dim_;
        const float share = 1.0f / sum_[i];
        for (int64_t d = 0; d < dim_; d++) to[d] = total_[i * padded_ + d] * share;
      }
    }

   private:
    int64_t row_of(int64_t i) const { return item_.run->row + item_.first + i / per_head_; }
    int64_t head_of(int64_t i) const { return item_.head * per_head_ + i % per_head_; }

    // Keys of the chunk of `token` and how far apart their dimensions lie. Blocks without a token of [token, end) may
    // be others' by now, and are not touched.
    std::pair<const float*, int64_t> keys_of(int64_t token, int64_t end) {
      const int64_t chunk = token / kChunk * kChunk;
      const int64_t size = a_.cache.block_size;
      if (size % kChunk == 0) return {a_.cache.keys(table_[chunk / size], item_.head) + chunk % size, size};
      std::fill_n(chunk_, kChunk * dim_, 0.0f);  // blocks that sixteen does not divide are gathered
      for (int64_t t = token; t < std::min(end, chunk + kChunk); t++) {
        const float* from = a_.cache.keys(table_[t / size], item_.head) + t % size;
        for (int64_t d = 0; d < dim_; d++) chunk_[d * kChunk + t - chunk] = from[d * size];
      }
      return {chunk_, kChunk};
    }

    void score(int64_t part, int64_t from, int64_t end) {
      for (int64_t chunk = from / kChunk * kChunk; chunk < end; chunk += kChunk) {
        const auto [keys, stride] = keys_of(std::max(chunk, from), end);
        scores_of_all(num_, queries_, dim_, keys, stride, a_.scale, scores_ + chunk - part, kPartTokens,
                      soon_after_keys(chunk, from, end, keys));
      }
    }

    // What to bring nearer while the keys of `chunk` are read: keys further on, and after the last the first values.
    const float* soon_after_keys(int64_t chunk, int64_t from, int64_t end, const float* otherwise) const {
      const int64_t next = chunk + kSoon * kChunk;
      if (next < end) return at_of(next, 0, otherwise);
      const int64_t token = (from + next - end) / kChunk * kChunk;
      return token < end ? at_of(token, a_.cache.num_kv_heads, otherwise) : otherwise;
    }

    // While the values of `token` are read: values further on, and after the last the next part's keys.
    const float* soon_after_values(int64_t token, int64_t end, const float* otherwise) const {
      const int64_t next = token + kSoon * kChunk;
      if (next < end) return at_of(next, a_.cache.num_kv_heads, otherwise);
      return next <= last_ ? at_of(next, 0, otherwise) : otherwise;
    }

    const float* at_of(int64_t token, int64_t first_head, const float* otherwise) const {
      const int64_t size = a_.cache.block_size, place = token % size;
      if (size % kChunk) return otherwise;
      return a_.cache.keys(table_[token / size], first_head + item_.head) + (first_head ? place * dim_ : place);
    }

    // Scores to weights e^(score - maximum), 0 where the query does not look.
    void soften(int64_t i, int64_t part, int64_t from, int64_t end) {
      float* scores = scores_ + i * kPartTokens - part;  // by token
      const int64_t position = first_ + i / per_head_;
      const int64_t oldest = a_.window ? std::max<int64_t>(0, position - a_.window + 1) : 0;
      Wide largest = wide_splat(-INFINITY);
      for (int64_t token = from; token < end; token += kChunk) {
        if (a_.softcap > 0)
          for (int p = 0; p < kParts; p++) {
            float* at = scores + token + p * kLanes;
            store(at, a_.softcap * tanh_of(load(at) * (1.0f / a_.softcap)));
          }
        if (token + kChunk - 1 > position || token < oldest)
          for (int64_t t = token; t < token + kChunk; t++)
            if (t > position || t < oldest) scores[t] = -INFINITY;
        for (int p = 0; p < kParts; p++) largest.part[p] = larger(largest.part[p], load(scores + token + p * kLanes));
      }
      const float maximum = largest_of(largest);
      weight_[i] = 0;
      if (maximum == -INFINITY) {
        std::fill(scores + from, scores + (end + kChunk - 1) / kChunk * kChunk, 0.0f);
        return;
      }
      Wide sum = wide_splat(0);
      for (int64_t token = from; token < end; token += kChunk)
        for (int p = 0; p < kParts; p++) {
          float* at = scores + token + p * kLanes;
          const Vec score = load(at);
          const Vec e = score == splat(-INFINITY) ? Vec{} : exp_of(score - maximum);
          store(at, e);
          sum.part[p] += e;
        }
      const float higher = std::max(maximum_[i], maximum);
      const float old = maximum_[i] == -INFINITY ? 0.0f : exp_of(maximum_[i] - higher);
      weight_[i] = exp_of(maximum - higher);
      sum_[i] = sum_[i] * old + sum_of(sum) * weight_[i];
      maximum_[i] = higher;
      for (int64_t d = 0; d < padded_; d += kLanes) {
        float* total = total_ + i * padded_ + d;
        store(total, load(total) * old);
      }
    }

    void gather(int64_t part, int64_t from, int64_t end) {
      const int64_t size = a_.cache.block_size;
      for (int64_t token = from; token < end;) {
        Values values = {};
        const int64_t first = token;
        for (int i = 0; i < kValueChunks && token < end; i++) {
          const int64_t num = std::min({end - token, size - token % size, kChunk - token % kChunk});
          values.chunks[i] = a_.cache.values(table_[token / size], item_.head) + token % size * dim_;
          values.soon[i] = soon_after_values(token, end, values.chunks[i]);
          token += num;
          if (num < kChunk) break;
        }
        values.num_tokens = token - first;
        values_of_all(num_, scores_ + first - part, kPartTokens, values, dim_, part_, padded_);
      }
    }

    void join(int64_t i) {
      if (weight_[i] == 0) return;
      const Vec weight = splat(weight_[i]);
      for (int64_t d = 0; d < padded_; d += kLanes) {
        float* total = total_ + i * padded_ + d;
        store(total, multiply_add(load(part_ + i * padded_ + d), weight, load(total)));
      }
    }

    const Attention& a_;
    const Item& item_;
    const int64_t* table_;
    const int64_t dim_, padded_, per_head_, num_, first_, last_;
    float *queries_, *scores_, *part_, *total_, *maximum_, *sum_, *weight_, *chunk_;
  };
};

}  // namespace tandem
