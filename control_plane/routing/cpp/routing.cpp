// What a routing decision does with all workers and all places of a prompt, in one pass each: compiled_library.py calls
// it. scoring.py and sample_points.py do the same in numpy, and tests compare the two. Nothing here allocates or throws.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

// As in sample_points.py.
constexpr int kWays = 8;
constexpr int kNumPools = 4;
constexpr int kNumPlaces = 8;
constexpr int64_t kSpacing = 16;
constexpr uint16_t kId = 0x7FFF;
constexpr uint16_t kIsStore = 0x8000;
constexpr int kPrefetched = 16;

// As in scoring.py and rendezvous.py.
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLast = 1e12;
constexpr double kMaxShare = 1.25;
constexpr int kMostPicked = 8;
constexpr uint64_t kOdd1 = 0xFF51AFD7ED558CCD, kOdd2 = 0xC4CEB9FE1A85EC53;

// As in worker_table.py.
enum Column {
  kRate, kBeat, kReported, kPool, kBlock, kLargest, kStep, kWaits, kAnswerRate, kMyPrompts, kMyQueue, kHeld, kAnswers,
  kDelay, kRoom
};

}  // namespace

extern "C" {

struct Index {
  const uint64_t* keys;    // [num_buckets, 8]; 0: the slot is empty
  const uint16_t* places;  // [num_buckets * 8, 8]: pools, then stores
  uint64_t num_buckets;
  int32_t* found;  // out: [32768, 2]; a place (with kIsStore: a store), and how many leading blocks it has
};

struct Table {
  const double* values;  // [columns, capacity]
  int64_t capacity, num_rows, num_hosts;
  const int64_t* host_numbers;    // [num_rows]
  const uint64_t* host_hashes;    // [num_hosts]
  const uint64_t* worker_hashes;  // [num_rows]
  double* score;                  // out: [num_rows]
  double* weights;                // scratch: [num_rows]
  double* loads;                  // scratch: [num_rows]
  double* local_ms;               // scratch: [num_rows]
  double* of_hosts;               // scratch: [num_hosts]
};

enum HandOver : int64_t { kNever, kIfSooner, kAlways };

struct Asked {
  double num_prompt_tokens, num_tokens;  // prompt; prompt and answer
  double answer_ms;                      // of the whole pool's tokens in flight
  double now;                            // monotonic seconds
  double typical_rate;                   // where a worker's is not known
  int64_t is_short;                      // the table is: nobody reads what the prompt takes, and hand_over is kNever
  int64_t hand_over;                     // HandOver
  double prefill_ms, num_bytes, num_last_bytes, overlap_ms;
  const double *ms_per_byte, *fixed_ms;   // [num_hosts]
  const double *free_bytes, *window_bytes;  // [num_hosts]; null: every arena has room
  int64_t from_host;                      // its number; -1: none of these
  int64_t has_key;
  uint64_t key;
  double light_load;        // share of all weights
  const int64_t *avoid, *out;  // rows: never; no home of a key
  int64_t num_avoid, num_out;
  int64_t most_picked;  // at most kMostPicked
  double tie, draw;     // draw: at least 0, below 1
  double same_load;     // by which loads of workers that are as good may differ, beside the share; inf: by any
  // Out:
  int64_t home;  // row; -1: none
  int64_t num_picked, picked[kMostPicked];
};

}  // extern "C"

namespace {

uint64_t key_at(const uint8_t* hashes, int64_t position, uint64_t space) {
  uint64_t key;
  std::memcpy(&key, hashes + 16 * position, sizeof key);
  key ^= space;
  return key ? key : 1;
}

uint64_t bucket(const Index& index, uint64_t half) { return half * index.num_buckets >> 32; }

void prefetch(const Index& index, uint64_t key) {
  __builtin_prefetch(index.keys + kWays * bucket(index, key & 0xFFFFFFFF));
  __builtin_prefetch(index.keys + kWays * bucket(index, key >> 32));
}

// Returns the places of a key; null: the index does not have it.
const uint16_t* places_of(const Index& index, uint64_t key) {
  for (uint64_t half : {key & 0xFFFFFFFF, key >> 32}) {
    const uint64_t first = kWays * bucket(index, half);
    for (int way = 0; way < kWays; ++way)
      if (index.keys[first + way] == key) return index.places + kNumPlaces * (first + way);
  }
  return nullptr;
}

int64_t num_points(int64_t num_blocks) {
  if (num_blocks >= kSpacing) return 4 + num_blocks / kSpacing;
  int64_t number = 0;
  for (; num_blocks; num_blocks >>= 1) ++number;
  return number;
}

int64_t point(int64_t number) { return number < 4 ? (int64_t{1} << number) - 1 : (number - 3) * kSpacing - 1; }

// Collects places, each with the most blocks that it was seen with: the deepest rows come first.
class Places {
 public:
  explicit Places(int32_t* found) : found_(found) {}

  // at_base: only places of this row count; null: all do.
  void add(int64_t position, const uint16_t* row, const uint16_t* at_base) {
    uint16_t ids[kNumPlaces];
    for (int column = 0; column < kNumPlaces; ++column) ids[column] = row[column] & kId;
    if (!std::memcmp(ids, previous_, sizeof ids)) return;
    std::memcpy(previous_, ids, sizeof ids);
    for (int column = 0; column < kNumPlaces; ++column) {
      const uint16_t place = ids[column];
      if (!place || (at_base && !is_in(at_base, place)) || seen_[place / 64] >> place % 64 & 1) continue;
      seen_[place / 64] |= uint64_t{1} << place % 64;
      found_[2 * count_] = column < kNumPools ? place : place | kIsStore;
      found_[2 * count_++ + 1] = static_cast<int32_t>(position + 1);
    }
  }

  int64_t count() const { return count_; }

 private:
  static bool is_in(const uint16_t* row, uint16_t place) {
    for (int column = 0; column < kNumPlaces; ++column)
      if ((row[column] & kId) == place) return true;
    return false;
  }

  int32_t* found_;
  int64_t count_ = 0;
  uint16_t previous_[kNumPlaces] = {};
  uint64_t seen_[(kId + 1) / 64] = {};
};

const double* column(const Table& table, Column which) { return table.values + which * table.capacity; }

double rate_of(const Table& table, const Asked& asked, int64_t row) {
  const double rate = column(table, kRate)[row];
  return rate > 0 ? rate : asked.typical_rate;
}

// The logarithm of a number between 0 and 1 that is drawn from a hash and a key.
double logarithm(uint64_t hash, uint64_t key) {
  uint64_t mixed = (hash ^ key) * kOdd1;
  mixed ^= mixed >> 33;
  mixed *= kOdd2;
  return std::log((static_cast<double>(mixed >> 11) + 0.5) * 0x1p-53);
}

int64_t least(const double* values, int64_t count) { return std::min_element(values, values + count) - values; }

// Returns the row of a key's worker, as rendezvous.py says.
int64_t home_of(const Table& table, const Asked& asked) {
  const int64_t rows = table.num_rows, hosts = table.num_hosts;
  double total = 0, load = 0;
  std::fill(table.of_hosts, table.of_hosts + hosts, 0.0);
  for (int64_t row = 0; row < rows; ++row) {
    table.of_hosts[table.host_numbers[row]] += table.weights[row];
    total += table.weights[row];
    load += table.loads[row];
  }
  const double share = total / kMaxShare;
  load = std::max(asked.light_load * total, load);
  for (int64_t host = 0; host < hosts; ++host) table.of_hosts[host] /= logarithm(table.host_hashes[host], asked.key);

  const auto is_open = [&](int64_t row) {
    if (!(table.score[row] < kLast / 2) || !(table.loads[row] * share <= table.weights[row] * load)) return false;
    return std::find(asked.out, asked.out + asked.num_out, row) == asked.out + asked.num_out;
  };
  const auto best_on = [&](int64_t host) {
    int64_t found = -1;
    double rank = 0;
    for (int64_t row = 0; row < rows; ++row) {
      if (table.host_numbers[row] != host || !is_open(row)) continue;
      const double own = table.weights[row] / logarithm(table.worker_hashes[row], asked.key);
      if (found < 0 || own < rank) found = row, rank = own;
    }
    return found;
  };

  const int64_t found = best_on(least(table.of_hosts, hosts));
  if (found >= 0) return found;
  int64_t best = -1;  // the first host in rank that has an open row
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t host = table.host_numbers[row];
    if (best >= 0 && !(table.of_hosts[host] < table.of_hosts[best])) continue;
    if (is_open(row)) best = host;
  }
  return best < 0 ? -1 : best_on(best);
}

// Writes the rows of the least scores: some of them, spread evenly, if more are about as good as the best.
void pick(const Table& table, Asked& asked) {
  const int64_t rows = table.num_rows, most = std::min<int64_t>(asked.most_picked, kMostPicked);
  const double* score = table.score;
  asked.num_picked = 0;
  const int64_t first_row = least(score, rows);
  const double best = score[first_row];
  if (best == kInfinity) return;
  if (rows <= most) {
    for (int64_t row = 0; row < rows; ++row)
      if (score[row] < kInfinity) asked.picked[asked.num_picked++] = row;
    return;
  }
  const double limit = asked.tie * best, most_load = asked.tie * table.loads[first_row] + asked.same_load;
  const auto is_tie = [&](int64_t row) { return score[row] <= limit && table.loads[row] <= most_load; };
  int64_t num_ties = 0;
  for (int64_t row = 0; row < rows; ++row) num_ties += is_tie(row);
  if (num_ties > most) {
    const int64_t first = static_cast<int64_t>(asked.draw * static_cast<double>(num_ties)), stride = num_ties / most;
    int64_t wanted[kMostPicked], tie = 0;
    for (int64_t each = 0; each < most; ++each) wanted[each] = (first + each * stride) % num_ties;
    for (int64_t row = 0; row < rows; ++row) {
      if (!is_tie(row)) continue;
      for (int64_t each = 0; each < most; ++each)
        if (wanted[each] == tie) asked.picked[each] = row;
      ++tie;
    }
    asked.num_picked = most;
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {  // kept in order, the first of equals first
    if (score[row] == kInfinity) continue;
    int64_t place = asked.num_picked;
    if (place == most && !(score[row] < score[asked.picked[most - 1]])) continue;
    if (place == most) --place;
    for (; place > 0 && score[row] < score[asked.picked[place - 1]]; --place) asked.picked[place] = asked.picked[place - 1];
    asked.picked[place] = row;
    if (asked.num_picked < most) ++asked.num_picked;
  }
}

// Goes on once all rows have their scores, weights and loads.
void choose(const Table& table, Asked& asked) {
  for (int64_t each = 0; each < asked.num_avoid; ++each) table.score[asked.avoid[each]] = kInfinity;
  asked.home = asked.has_key ? home_of(table, asked) : -1;
  pick(table, asked);
}

// Writes what a hand-over to each host takes, were nothing cached there.
void score_hand_overs(const Table& table, const Asked& asked) {
  for (int64_t host = 0; host < table.num_hosts; ++host) {
    const double per_byte = asked.ms_per_byte[host];
    double ms = per_byte * asked.num_bytes;
    if (asked.num_last_bytes < asked.num_bytes) ms = std::max(ms - asked.overlap_ms, per_byte * asked.num_last_bytes);
    ms += asked.fixed_ms[host];
    if (asked.free_bytes && host != asked.from_host) {
      const double wanted = std::min(asked.num_bytes, 2 * asked.window_bytes[host]);
      ms += std::max(0.0, wanted - asked.free_bytes[host]) * per_byte;
    }
    table.of_hosts[host] = ms + asked.prefill_ms;
  }
}

}  // namespace

extern "C" {

// Finds the places of a prompt's leading blocks; returns how many. hashes: 16 bytes of each block.
int64_t tandem_find_places(const Index* index, const uint8_t* hashes, int64_t num_blocks, uint64_t space) {
  int64_t number = num_points(num_blocks), base = -1;
  const uint16_t* at_base = nullptr;
  while (number > 0 && !at_base) {
    const int64_t first = std::max<int64_t>(0, number - kPrefetched);
    for (int64_t each = number; each-- > first;) prefetch(*index, key_at(hashes, point(each), space));
    for (; number > first && !at_base; --number) {
      base = point(number - 1);
      at_base = places_of(*index, key_at(hashes, base, space));
    }
  }
  if (!at_base) return 0;
  Places places(index->found);
  const int64_t end = base + 1, next = end < kSpacing ? 2 * end : end + kSpacing;
  for (int64_t position = std::min(num_blocks, next - 1) - 1; position > base; --position)
    if (const uint16_t* row = places_of(*index, key_at(hashes, position, space))) places.add(position, row, at_base);
  places.add(base, at_base, nullptr);
  for (; number > 0; --number) {
    const int64_t position = point(number - 1);
    if (const uint16_t* row = places_of(*index, key_at(hashes, position, space))) places.add(position, row, nullptr);
  }
  return places.count();
}

// Scores prefill workers: seconds until each would have the prompt.
void tandem_score_prefills(const Table* table, Asked* asked) {
  const double *beat = column(*table, kBeat), *reported = column(*table, kReported);
  const double* mine = column(*table, kMyPrompts);
  for (int64_t row = 0; row < table->num_rows; ++row) {
    const double rate = rate_of(*table, *asked, row);
    const double queued = std::max(mine[row], reported[row] - (asked->now - beat[row]) * rate);
    table->weights[row] = rate;
    table->loads[row] = queued;
    table->score[row] = (queued + asked->num_prompt_tokens) / rate;
  }
  choose(*table, *asked);
}

// Scores decode workers: milliseconds until each would have prompt and answer.
void tandem_score_decodes(const Table* table, Asked* asked) {
  const int64_t rows = table->num_rows;
  const double *pool = column(*table, kPool), *held = column(*table, kHeld), *largest = column(*table, kLargest);
  const double *room = column(*table, kRoom), *delay = column(*table, kDelay), *queue = column(*table, kMyQueue);
  double *score = table->score, *local = table->local_ms;
  for (int64_t row = 0; row < rows; ++row) {
    table->weights[row] = std::max(1.0, pool[row]);
    table->loads[row] = held[row];
    score[row] = (held[row] + asked->num_tokens) / table->weights[row] * asked->answer_ms;
  }
  const bool is_handed_over = asked->hand_over != kNever;
  if (!asked->is_short)
    for (int64_t row = 0; row < rows; ++row)
      local[row] = (delay[row] * asked->num_prompt_tokens + queue[row]) / rate_of(*table, *asked, row);
  if (is_handed_over) {
    score_hand_overs(*table, *asked);
    for (int64_t row = 0; row < rows; ++row) {
      const double ms = table->of_hosts[table->host_numbers[row]];
      score[row] += asked->hand_over == kAlways ? ms : std::min(local[row], ms);
    }
  } else if (!asked->is_short) {
    for (int64_t row = 0; row < rows; ++row) score[row] += local[row];
  }
  int64_t num_late = 0;
  for (int64_t row = 0; row < rows; ++row) num_late += room[row] < asked->num_prompt_tokens;
  if (0 < num_late && num_late < rows)
    for (int64_t row = 0; row < rows; ++row)
      if (room[row] < asked->num_prompt_tokens) score[row] += kLast;
  for (int64_t row = 0; row < rows; ++row)
    if (largest[row] < asked->num_tokens) score[row] = kInfinity;
  if (is_handed_over) {  // what prefill takes is the same for all that are about as good: the rest is compared
    const int64_t best = least(score, rows);
    if (asked->hand_over == kAlways || local[best] >= table->of_hosts[table->host_numbers[best]])
      for (int64_t row = 0; row < rows; ++row) score[row] -= asked->prefill_ms;
  }
  choose(*table, *asked);
}

}  // extern "C"
