// Attention over KV blocks, prefill chunks and decodes in one call.
//
// A context is read in parts of 512 tokens, counted from its first token; each part has a softmax of its own, and the
// parts are joined in order. So a token's result depends on its position, its query and the keys it sees. It does not
// depend on the other tokens of the step, the chunks of its prompt, the block size, or which thread reads which part.
// Where threads outnumber heads and runs, several threads share a context and keep its parts until all can be joined.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_blocks.hpp"
#include "cache.hpp"

namespace tandem {

constexpr int kPartTokens = 512;
constexpr int kSoon = 2;            // chunks: prefetched while one is read
constexpr int kQueriesPerItem = 60;  // their scores of a part, 120 KB, stay in L2
constexpr int kPiecesPerThread = 2;

struct Run {  // tokens [start, start + count) of one request, at `row` and after; its blocks from table[first_block]
  int64_t row, start, count, first_block;
};

struct Step {
  const int64_t* positions;
  const int64_t* slots;
  int64_t num_tokens;
  const Run* runs;
  int64_t num_runs;
  const int64_t* tables;
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
    static std::vector<Piece> pieces;
    items.clear();
    const int64_t per_head = num_heads / cache.num_kv_heads;
    const int64_t rows = std::max<int64_t>(1, kQueriesPerItem / per_head);
    for (int64_t r = 0; r < num_runs; r++)
      for (int64_t first = (runs[r].count - 1) / rows * rows; first >= 0; first -= rows)  // the longest work first
        for (int64_t head = 0; head < cache.num_kv_heads; head++)
          items.push_back(item_of(runs[r], head, first, std::min(rows, runs[r].count - first)));
    cut(items, pieces);
    in_parallel((int)pieces.size(), [&](int i) { Worker(*this, *pieces[i].item).run(pieces[i].first, pieces[i].end); });
    items.erase(std::remove_if(items.begin(), items.end(), [](const Item& item) { return !item.parts; }), items.end());
    in_parallel((int)items.size(), [&](int i) { Worker(*this, items[i]).join_parts(); });
  }

 private:
  struct Item {
    const Run* run;
    int64_t head, first, rows;
    int64_t first_part, end_part;
    float* parts;  // results of the parts; null if one thread reads all parts and joins them at once
  };

  struct Piece {
    const Item* item;
    int64_t first, end;  // parts
  };

  Item item_of(const Run& run, int64_t head, int64_t first, int64_t rows) const {
    const int64_t position = run.start + first, low = window ? std::max<int64_t>(0, position - window + 1) : 0;
    return {&run, head, first, rows, low / kPartTokens, (position + rows - 1) / kPartTokens + 1, nullptr};
  }

  int64_t padded_dim() const { return (cache.head_dim + kWide - 1) / kWide * kWide; }

  // Of one part, for each query: maximum, sum, and weighted sum of values.
  int64_t floats_per_part(const Item& item) const {
    return item.rows * (num_heads / cache.num_kv_heads) * (padded_dim() + 2);
  }

  // Cuts items that are longer than a piece should be, if there are several threads.
  void cut(std::vector<Item>& items, std::vector<Piece>& pieces) const {
    static std::vector<float> space;
    const int64_t num_threads = threads()->num_threads();
    int64_t num_parts = 0;
    for (const Item& item : items) num_parts += item.end_part - item.first_part;
    const int64_t share = std::max<int64_t>(1, num_parts / (kPiecesPerThread * num_threads));
    const int64_t longest = num_threads == 1 ? num_parts : share;
    pieces.clear();
    size_t need = 0;
    for (const Item& item : items) {
      const int64_t length = item.end_part - item.first_part, num_pieces = (length + longest - 1) / longest;
      const auto bound = [&](int64_t piece) { return item.first_part + length * piece / num_pieces; };
      for (int64_t i = 0; i < num_pieces; i++) pieces.push_back({&item, bound(i), bound(i + 1)});
      if (num_pieces > 1) need += length * floats_per_part(item);
    }
    if (space.size() < need) space.resize(need);
    float* at = space.data();
    for (Item& item : items)
      if (item.end_part - item.first_part > longest)
        item.parts = std::exchange(at, at + (item.end_part - item.first_part) * floats_per_part(item));
  }

  // One head's queries of some rows of a run.
  class Worker {
   public:
    Worker(const Attention& all, const Item& item)
        : a_(all), item_(item), table_(all.tables + item.run->first_block), dim_(all.cache.head_dim),
          padded_(all.padded_dim()), per_head_(all.num_heads / all.cache.num_kv_heads),
          num_(item.rows * per_head_), first_(item.run->start + item.first), last_(first_ + item.rows - 1) {
      static thread_local std::vector<float> space;
      const size_t need = num_ * (dim_ + kPartTokens + 2 * (padded_ + 2)) + kChunk * dim_;
      if (space.size() < need) space.resize(need);
      float* at = space.data();
      const auto take = [&](int64_t size) { return std::exchange(at, at + size); };
      queries_ = take(num_ * dim_);
      scores_ = take(num_ * kPartTokens);
      part_ = result_at(take(num_ * (padded_ + 2)));
      total_ = result_at(take(num_ * (padded_ + 2)));
      chunk_ = take(kChunk * dim_);
    }

    void run(int64_t first_part, int64_t end_part) {
      for (int64_t i = 0; i < num_; i++)
        memcpy(queries_ + i * dim_, a_.query + row_of(i) * a_.query_stride + head_of(i) * dim_, dim_ * sizeof(float));
      if (!item_.parts) begin();
      for (int64_t number = first_part; number < end_part; number++) {
        if (item_.parts) part_ = kept(number);
        meet(number * kPartTokens);
        if (!item_.parts) join();
      }
      if (!item_.parts) end();
    }

    void join_parts() {
      begin();
      for (int64_t number = item_.first_part; number < item_.end_part; number++) {
        part_ = kept(number);
        join();
      }
      end();
    }

   private:
    struct Result {  // of each query
      float *maximum, *sum, *gathered;
    };

    Result result_at(float* at) const { return {at, at + num_, at + 2 * num_}; }
    Result kept(int64_t number) const {
      return result_at(item_.parts + (number - item_.first_part) * a_.floats_per_part(item_));
    }

    void begin() {
      std::fill_n(total_.maximum, num_, -INFINITY);
      std::fill_n(total_.sum, num_, 0.0f);
      std::fill_n(total_.gathered, num_ * padded_, 0.0f);
    }

    void meet(int64_t part) {
      const int64_t low = a_.window ? std::max<int64_t>(0, first_ - a_.window + 1) : 0;
      const int64_t from = std::max(low, part), end = std::min(last_ + 1, part + kPartTokens);
      score(part, from, end);
      for (int64_t i = 0; i < num_; i++) soften(i, part, from / kChunk * kChunk, end);
      std::fill_n(part_.gathered, num_ * padded_, 0.0f);
      gather(part, from, end);
    }

    void end() {
      for (int64_t i = 0; i < num_; i++) {
        float* to = a_.out + row_of(i) * a_.out_stride + head_of(i) * dim_;
        const float share = 1.0f / total_.sum[i];
        for (int64_t d = 0; d < dim_; d++) to[d] = total_.gathered[i * padded_ + d] * share;
      }
    }

    int64_t row_of(int64_t i) const { return item_.run->row + item_.first + i / per_head_; }
    int64_t head_of(int64_t i) const { return item_.head * per_head_ + i % per_head_; }

    // Keys of the chunk of `token` and how far apart their dimensions lie. Blocks without a token of [token, end) may
    // belong to other requests by now and are not read.
    std::pair<const float*, int64_t> keys_of(int64_t token, int64_t end) {
      const int64_t chunk = token / kChunk * kChunk;
      const int64_t size = a_.cache.block_size;
      if (size % kChunk == 0) return {a_.cache.keys(table_[chunk / size], item_.head) + chunk % size, size};
      std::fill_n(chunk_, kChunk * dim_, 0.0f);  // blocks whose size sixteen does not divide are gathered
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

    // Prefetches while the keys of `chunk` are read: later keys, and after the last keys the first values.
    const float* soon_after_keys(int64_t chunk, int64_t from, int64_t end, const float* otherwise) const {
      const int64_t next = chunk + kSoon * kChunk;
      if (next < end) return at_of(next, 0, otherwise);
      const int64_t token = (from + next - end) / kChunk * kChunk;
      return token < end ? at_of(token, a_.cache.num_kv_heads, otherwise) : otherwise;
    }

    // Prefetches while the values of `token` are read: later values, and after the last the next part's keys.
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

    // Scores to weights e^(score - maximum), 0 where the query does not see the key.
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
      const float maximum = part_.maximum[i] = largest_of(largest);
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
      part_.sum[i] = sum_of(sum);
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
        values_of_all(num_, scores_ + first - part, kPartTokens, values, dim_, part_.gathered, padded_);
      }
    }

    void join() {
      for (int64_t i = 0; i < num_; i++) {
        if (part_.maximum[i] == -INFINITY) continue;
        const float higher = std::max(total_.maximum[i], part_.maximum[i]);
        const float old = total_.maximum[i] == -INFINITY ? 0.0f : exp_of(total_.maximum[i] - higher);
        const float weight = exp_of(part_.maximum[i] - higher);
        total_.maximum[i] = higher;
        total_.sum[i] = total_.sum[i] * old + part_.sum[i] * weight;
        for (int64_t d = i * padded_; d < (i + 1) * padded_; d += kLanes) {
          float* total = total_.gathered + d;
          store(total, multiply_add(load(part_.gathered + d), splat(weight), load(total) * old));
        }
      }
    }

    const Attention& a_;
    const Item& item_;
    const int64_t* table_;
    const int64_t dim_, padded_, per_head_, num_, first_, last_;
    float *queries_, *scores_, *chunk_;
    Result part_, total_;
  };
};

}  // namespace tandem
