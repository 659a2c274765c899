// Compares a few workers of a table with all that is known, as shortlist.py, cost_model.py, block_stores.py,
// hand_over_ways.py and router.py do.
#pragma once
#include <cmath>

#include "scoring.hpp"

namespace tandem {

constexpr int kMostCompared = 16;
// As in scoring.py and shortlist.py.
constexpr int64_t kNumCandidates = 4, kNumOthers = 2;
// As in router.py, groups.py and cost_model.py.
constexpr double kAffinitySlack = 1.25, kSlackMs = 5.0, kSameQueue = 0.02;
constexpr double kAssumedStepMs = 50.0, kTokensOfPeers = 2048.0;
// As in worker_health.py and answer_times.py.
constexpr double kSlowTimes = 5.0, kSlowSeconds = 0.05, kShortestPrediction = 0.001;
// As in block_stores.py and hand_overs.py.
constexpr double kMemoryBytesPerSecond = 5e9, kHalfLifeSeconds = 60.0;

// Where a prompt is cached.
struct Cached {
  int64_t num_pools, num_hosts;
  const int64_t *pool_rows, *pool_blocks;    // [num_pools]
  const int64_t *host_numbers, *host_blocks;  // [num_hosts]
  int64_t num_there;                         // blocks in the store that other hosts fetch from; 0: there is none
  double block_tokens;
  const double *has_store, *hit_rates;  // [hosts of the table]
  // Of fetches from that store; [hosts of the table]:
  const double *latency_ms, *bytes_per_second, *missed, *missed_at;
};

struct Estimate {  // tokens and milliseconds; numbers of one kind, which Python reads at once
  double row, own, host, remote, num_computed, queue_ms, load_ms, compute_ms;

  double wait_ms() const { return queue_ms + load_ms; }
  double total_ms() const { return queue_ms + load_ms + compute_ms; }
};

struct Ranked {  // of a decode worker
  double is_tight, cost_ms, local_ms, load, is_handed_over;
  double prefill;  // its number; -1: the prompt cannot be handed over there
  double hand_over_ms;
};

struct Compared {
  Cached cached;
  int64_t last;             // the row of the session's last worker; -1: it has none
  double health_now;        // seconds, as of kBegan
  double usual_ratio;       // of the seconds until a first token to those predicted; inf: not known
  // Of decode workers:
  double seconds_of_peers;  // for kTokensOfPeers; 0: not known; below 0: there are none, and a worker's own count
  double num_steps;         // of the answer
  int64_t hand_over;        // HandOver
  const Compared* prefills;
  int64_t prefill;          // the number of the best of these
  // Of hand-overs from the hosts of the prefill workers' table; [its hosts]:
  const int64_t* source_places;  // their numbers in this table; below 0, and another for each: they are not in it
  const double *const *source_ms_per_byte, *const *source_fixed_ms;  // [its hosts][hosts of the table]
  const double* const* source_latency_ms;
  const double* source_until;    // when these are to be made anew
  const double *free_bytes, *window_bytes;  // [hosts of the table]
  // Out:
  int64_t lacks_sources;         // whether some of these have to be made before the rest can be answered
  int64_t num_overdue;           // candidates at which a call waits for too long
  int64_t num_found;
  Estimate found[kMostCompared];
  int64_t hosts[kMostCompared];  // the numbers of their hosts
  int64_t order[kMostCompared];  // numbers of these, the best first
  int64_t favoured;              // the number of the session's or the key's worker; -1: it is not among these
  int64_t num_ties;              // of the first in order, so many are about as good
  // Of prefill workers:
  int64_t is_near;                  // whether the favoured one is about as soon as the soonest
  int64_t ties[kMostCompared];      // numbers
  double num_last_tokens[kMostCompared], overlap_ms[kMostCompared];
  // Of decode workers:
  Ranked ranked[kMostCompared];
  int64_t all_wait, is_one_idle;  // whether a request would wait at all of these; and at each of the table
};

// The rows of a table that a request may go to.
class Candidates {
 public:
  Candidates(const Table& table, Compared& compared) : table_(table), compared_(compared) {}

  int64_t number() const { return compared_.num_found; }

  bool add(int64_t row) {
    if (row < 0 || !(table_.score[row] < kInfinity)) return false;
    for (int64_t each = 0; each < number(); ++each)
      if (compared_.found[each].row == static_cast<double>(row)) return false;
    compared_.found[compared_.num_found++].row = static_cast<double>(row);
    return true;
  }

  // Adds those with the most blocks, at most two.
  template <class RowOf>
  void add_deepest(int64_t count, const int64_t* blocks, RowOf row_of) {
    int64_t first = -1, second = -1;
    for (int64_t each = 0; each < count; ++each) {
      if (first < 0 || blocks[each] > blocks[first]) second = first, first = each;
      else if (second < 0 || blocks[each] > blocks[second]) second = each;
    }
    if (first >= 0) add(row_of(first));
    if (second >= 0) add(row_of(second));
  }

 private:
  const Table& table_;
  Compared& compared_;
};

inline int64_t best_row_on(const Table& table, int64_t host) {
  int64_t best = -1;
  for (int64_t row = 0; row < table.num_rows; ++row)
    if (table.host_numbers[row] == host && (best < 0 || table.score[row] < table.score[best])) best = row;
  return best;
}

// Whether a call waits at a worker for much longer than is usual.
inline bool is_overdue(const Table& table, const Compared& compared, int64_t row) {
  const double waited = compared.health_now - column(table, kBegan)[row];
  const double usual = compared.usual_ratio * std::max(kShortestPrediction, column(table, kPredicted)[row]);
  return waited >= kSlowSeconds && waited >= kSlowTimes * usual && waited >= usual + kSlowSeconds;
}

inline void find_candidates(const Table& table, const Asked& asked, Compared& compared, bool is_decode) {
  const Cached& cached = compared.cached;
  const int64_t favoured = asked.home >= 0 ? asked.home : compared.last;
  compared.num_found = 0;
  Candidates candidates(table, compared);
  if (table.num_rows <= kMostPicked) {
    for (int64_t each = 0; each < asked.num_picked; ++each) candidates.add(asked.picked[each]);
  } else {
    candidates.add(favoured);
    candidates.add_deepest(cached.num_pools, cached.pool_blocks, [&](int64_t each) { return cached.pool_rows[each]; });
    candidates.add_deepest(cached.num_hosts, cached.host_blocks,
                           [&](int64_t each) { return best_row_on(table, cached.host_numbers[each]); });
    int64_t left = is_decode ? std::max(kNumOthers, kNumCandidates - candidates.number()) : kNumCandidates;
    for (int64_t each = 0; each < asked.num_picked && left > 0; ++each) left -= candidates.add(asked.picked[each]);
  }
  compared.favoured = -1;
  compared.num_overdue = 0;
  for (int64_t each = 0; each < compared.num_found; ++each) {
    const int64_t row = static_cast<int64_t>(compared.found[each].row);
    compared.hosts[each] = table.host_numbers[row];
    if (row == favoured) compared.favoured = each;
    compared.num_overdue += is_overdue(table, compared, row);
  }
}

inline int64_t blocks_of(int64_t which, int64_t count, const int64_t* numbers, const int64_t* blocks) {
  for (int64_t each = 0; each < count; ++each)
    if (numbers[each] == which) return blocks[each];
  return 0;
}

// Writes what a worker finds of the prompt, and what it takes to load that. rate: tokens per second that it computes.
inline void look_into_caches(const Table& table, const Asked& asked, const Cached& cached, double rate,
                             Estimate& found) {
  const int64_t row = static_cast<int64_t>(found.row), to_host = table.host_numbers[row];
  const double size = cached.block_tokens, bytes_per_token = column(table, kBytes)[row];
  const int64_t own = blocks_of(row, cached.num_pools, cached.pool_rows, cached.pool_blocks);
  const int64_t there = blocks_of(to_host, cached.num_hosts, cached.host_numbers, cached.host_blocks);
  const int64_t host = std::max<int64_t>(0, there - own), remote = cached.num_there - own - host;
  double num_found = 0;
  found.own = size * static_cast<double>(own);
  found.host = size * static_cast<double>(host);
  if (host > 0) {
    num_found = found.host * cached.hit_rates[to_host];
    found.load_ms = 1000.0 * num_found * bytes_per_token / kMemoryBytesPerSecond;
  }
  if (remote > 0 && cached.num_there > 0 && cached.has_store[to_host] > 0) {
    const double num_tokens = size * static_cast<double>(remote), missed = cached.missed[to_host];
    const double still = missed > 0 ? std::pow(0.5, (asked.now - cached.missed_at[to_host]) / kHalfLifeSeconds) : 0.0;
    const double num_fetched = num_tokens * (1.0 - still * missed);
    const double fetch_ms =
        cached.latency_ms[to_host] + 1000.0 * num_tokens * bytes_per_token / cached.bytes_per_second[to_host];
    if (fetch_ms < 1000.0 * num_fetched / rate) {
      found.remote = num_tokens;
      found.load_ms += fetch_ms;
      num_found += num_fetched;
    }
  }
  found.num_computed = std::max(1.0, std::nearbyint(asked.num_prompt_tokens - found.own - num_found));
}

inline void estimate(const Table& table, const Asked& asked, const Cached& cached, double rate, double queued,
                     Estimate& found) {
  found.own = found.host = found.remote = found.load_ms = 0;
  found.queue_ms = 1000.0 * queued / rate;
  look_into_caches(table, asked, cached, rate, found);
  found.compute_ms = 1000.0 * found.num_computed / rate;
}

// Sorts numbers of candidates; is_before compares two of them.
template <class IsBefore>
void sort(int64_t* order, int64_t count, IsBefore is_before) {
  for (int64_t number = 0; number < count; ++number) {
    int64_t place = number;
    for (; place > 0 && is_before(number, order[place - 1]); --place) order[place] = order[place - 1];
    order[place] = number;
  }
}

inline void compare_prefills(const Table& table, Asked& asked, Compared& compared) {
  score_prefills(table, asked);
  find_candidates(table, asked, compared, false);
  const double *mine = column(table, kMyPrompts), *reported = column(table, kReported), *beat = column(table, kBeat);
  for (int64_t each = 0; each < compared.num_found; ++each) {
    Estimate& found = compared.found[each];
    const int64_t row = static_cast<int64_t>(found.row);
    const double rate = rate_of(table, asked, row);
    double queued = mine[row];
    if (reported[row] > queued) {
      const double since = std::nearbyint((asked.now - beat[row]) * rate);
      queued = std::max(queued, reported[row] - std::max(0.0, since));
    }
    estimate(table, asked, compared.cached, rate, queued, found);
    const double chunk = column(table, kChunk)[row], computed = found.num_computed;
    compared.num_last_tokens[each] = std::min(chunk, computed);
    compared.overlap_ms[each] = computed <= chunk ? 0.0 : found.compute_ms * (1 - chunk / computed);
  }
  const auto ms = [&](int64_t each) { return compared.found[each].total_ms(); };
  const auto rank = [&](int64_t each) { return table.name_ranks[static_cast<int64_t>(compared.found[each].row)]; };
  sort(compared.order, compared.num_found, [&](int64_t one, int64_t other) {
    return ms(one) < ms(other) || (ms(one) == ms(other) && rank(one) < rank(other));
  });
  compared.is_near = compared.num_ties = 0;
  if (!compared.num_found) return;
  const Estimate& soonest = compared.found[compared.order[0]];
  const double least_ms = soonest.total_ms(), most_ms = std::max(kAffinitySlack * least_ms, least_ms + kSlackMs);
  compared.is_near = compared.favoured >= 0 && ms(compared.favoured) <= most_ms;
  const double tie_ms = asked.tie * least_ms, wait_ms = asked.tie * soonest.wait_ms() + kSameQueue * soonest.compute_ms;
  for (int64_t place = 0; place < compared.num_found; ++place) {
    const int64_t each = compared.order[place];
    if (ms(each) <= tie_ms && compared.found[each].wait_ms() <= wait_ms) compared.ties[compared.num_ties++] = each;
  }
}

// The hand-overs of a prompt to one decode worker.
class Ways {
 public:
  Ways(const Table& table, const Asked& asked, const Compared& compared, const Estimate& decode)
      : compared_(compared), prefills_(*compared.prefills) {
    const int64_t row = static_cast<int64_t>(decode.row);
    to_host_ = table.host_numbers[row];
    bytes_per_token_ = column(table, kBytes)[row];
    num_bytes_ = std::max(0.0, asked.num_prompt_tokens - decode.own) * bytes_per_token_;
    const double free = compared.free_bytes[to_host_], window = compared.window_bytes[to_host_];
    if (num_bytes_ > free) num_lacking_ = std::max(0.0, std::min(num_bytes_, 2 * window) - free);
  }

  // Finds the best prefill worker: the best of all, unless one on another host is sooner by so much.
  void find_best(double slack, double slack_ms) {
    best = compared_.prefill;
    best_ms = ms(best);
    double limit = std::min(best_ms / slack, best_ms - slack_ms);
    for (int64_t place = 0; place < prefills_.num_found; ++place) {
      const int64_t other = prefills_.order[place];
      if (prefills_.found[other].total_ms() >= limit) break;
      if (is_seen(place)) continue;
      const double other_ms = ms(other);
      if (other_ms < limit) best = other, best_ms = limit = other_ms;
    }
  }

  int64_t best = -1;
  double best_ms = 0;

 private:
  // Whether the host of the prefill worker at a place in order is that of the best one, or of one before.
  bool is_seen(int64_t place) const {
    const int64_t* hosts = prefills_.hosts;
    const int64_t host = hosts[prefills_.order[place]];
    if (host == hosts[compared_.prefill]) return true;
    for (int64_t before = 0; before < place; ++before)
      if (hosts[prefills_.order[before]] == host) return true;
    return false;
  }

  double ms(int64_t prefill) const {
    const int64_t from_host = prefills_.hosts[prefill];
    const double ms_per_byte = compared_.source_ms_per_byte[from_host][to_host_];
    const double num_last = prefills_.num_last_tokens[prefill] * bytes_per_token_;
    double num_left = num_bytes_;
    if (num_last < num_bytes_) num_left = std::max(num_last, num_bytes_ - prefills_.overlap_ms[prefill] / ms_per_byte);
    if (compared_.source_places[from_host] != to_host_) num_left += num_lacking_;
    const double total_ms = prefills_.found[prefill].total_ms();
    const double asking_ms = std::max(0.0, compared_.source_latency_ms[from_host][to_host_] - total_ms);
    const double hand_over_ms = compared_.source_fixed_ms[from_host][to_host_] + ms_per_byte * num_left + asking_ms;
    return total_ms + hand_over_ms;
  }

  const Compared& compared_;
  const Compared& prefills_;
  int64_t to_host_;
  double bytes_per_token_, num_bytes_, num_lacking_ = 0;
};

// Orders decode workers by whether the prompt's blocks seem to fit, then by the time of prompt and answer.
inline void rank(const Table& table, const Asked& asked, Compared& compared) {
  const double *pool = column(table, kPool), *held = column(table, kHeld), *step = column(table, kStep);
  const double *delay = column(table, kDelay), *free = column(table, kFree), *kv = column(table, kKv);
  double total_ms = 0, num_steps_known = 0;
  for (int64_t each = 0; each < compared.num_found; ++each) {
    const double ms = step[static_cast<int64_t>(compared.found[each].row)];
    if (ms > 0) total_ms += ms, ++num_steps_known;
  }
  const double answer_ms = compared.num_steps * (num_steps_known ? total_ms / num_steps_known : kAssumedStepMs);
  const Compared* prefills = compared.prefills;
  const bool is_home = prefills && prefills->favoured == compared.prefill;
  for (int64_t each = 0; each < compared.num_found; ++each) {
    const Estimate& found = compared.found[each];
    const int64_t row = static_cast<int64_t>(found.row);
    Ranked& ranked = compared.ranked[each];
    ranked.local_ms = found.queue_ms + (found.load_ms + found.compute_ms) * (delay[row] / 1000);
    ranked.load = (held[row] + asked.num_tokens) / (pool[row] > 0 ? pool[row] : 1.0);
    ranked.is_handed_over = ranked.hand_over_ms = 0;
    ranked.prefill = -1;
    double prompt_ms = ranked.local_ms;
    if (compared.hand_over != kNever && kv[row] > 0) {
      Ways ways(table, asked, compared, found);
      ways.find_best(is_home ? kAffinitySlack : asked.tie, is_home ? kSlackMs : 0.0);
      ranked.prefill = static_cast<double>(ways.best);
      ranked.hand_over_ms = ways.best_ms;
      ranked.is_handed_over = compared.hand_over == kAlways || ways.best_ms < ranked.local_ms;
      if (ranked.is_handed_over > 0) prompt_ms = ways.best_ms;
    }
    ranked.is_tight = free[row] < asked.num_prompt_tokens;
    ranked.cost_ms = prompt_ms + answer_ms * ranked.load;
  }
  const Ranked* ranked = compared.ranked;
  sort(compared.order, compared.num_found, [&](int64_t one, int64_t other) {
    if (ranked[one].is_tight != ranked[other].is_tight) return ranked[one].is_tight < ranked[other].is_tight;
    if (ranked[one].cost_ms != ranked[other].cost_ms) return ranked[one].cost_ms < ranked[other].cost_ms;
    return table.name_ranks[static_cast<int64_t>(compared.found[one].row)] <
           table.name_ranks[static_cast<int64_t>(compared.found[other].row)];
  });
  compared.num_ties = 0;
  if (!compared.num_found) return;
  const Ranked& best = ranked[compared.order[0]];
  const double common = best.is_handed_over > 0 ? prefills->found[static_cast<int64_t>(best.prefill)].total_ms() : 0.0;
  const double limit = best.cost_ms + (asked.tie - 1) * (best.cost_ms - common);
  while (compared.num_ties < compared.num_found) {
    const Ranked& next = ranked[compared.order[compared.num_ties]];
    if (compared.num_ties && (next.is_tight != best.is_tight || next.cost_ms > limit)) break;
    ++compared.num_ties;
  }
}

inline void ask_hand_over(const Table& table, Asked& asked, const Compared& compared) {
  asked.hand_over = table.num_rows <= kMostPicked ? kNever : compared.hand_over;
  if (asked.hand_over == kNever) return;
  const int64_t prefill = compared.prefill;
  const Compared& prefills = *compared.prefills;
  const double bytes_per_token = column(table, kBytes)[0];
  asked.prefill_ms = prefills.found[prefill].total_ms();
  asked.overlap_ms = prefills.overlap_ms[prefill];
  asked.num_bytes = asked.num_prompt_tokens * bytes_per_token;
  asked.num_last_bytes = prefills.num_last_tokens[prefill] * bytes_per_token;
  const int64_t from_host = prefills.hosts[prefill];
  asked.ms_per_byte = compared.source_ms_per_byte[from_host];
  asked.fixed_ms = compared.source_fixed_ms[from_host];
  asked.latency_ms = compared.source_latency_ms[from_host];
  asked.free_bytes = compared.free_bytes;
  asked.window_bytes = compared.window_bytes;
  asked.from_host = compared.source_places[from_host];
}

inline void compare_decodes(const Table& table, Asked& asked, Compared& compared) {
  compared.lacks_sources = false;
  if (compared.hand_over != kNever)
    for (int64_t each = 0; each < compared.prefills->num_found; ++each)
      if (asked.now >= compared.source_until[compared.prefills->hosts[each]]) compared.lacks_sources = true;
  if (compared.lacks_sources) return;
  ask_hand_over(table, asked, compared);
  score_decodes(table, asked);
  find_candidates(table, asked, compared, true);
  const double *mine = column(table, kMyPrompts), *waits = column(table, kWaits);
  const double *tokens = column(table, kOwnTokens), *seconds = column(table, kOwnSeconds);
  compared.all_wait = true;
  for (int64_t each = 0; each < compared.num_found; ++each) {
    const int64_t row = static_cast<int64_t>(compared.found[each].row);
    double rate = asked.typical_rate, of_peers = compared.seconds_of_peers;
    if (of_peers < 0) of_peers = tokens[row] > 0 ? kTokensOfPeers * seconds[row] / tokens[row] : 0.0;
    if (tokens[row] >= 0 && of_peers > 0) rate = (tokens[row] + kTokensOfPeers) / (seconds[row] + of_peers);
    estimate(table, asked, compared.cached, rate, mine[row], compared.found[each]);
    if (!(waits[row] > 0)) compared.all_wait = false;
  }
  compared.is_one_idle = false;
  if (compared.all_wait)
    for (int64_t row = 0; row < table.num_rows && !compared.is_one_idle; ++row)
      compared.is_one_idle = !(waits[row] > 0) && table.score[row] < kInfinity;
  rank(table, asked, compared);
}

}  // namespace tandem
