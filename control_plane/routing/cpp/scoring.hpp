// Scores all workers of a table, as scoring.py and rendezvous.py do.
#pragma once
#include <cmath>

#include "table.hpp"

namespace tandem {

// The logarithm of a number between 0 and 1 that is drawn from a hash and a key.
inline double logarithm(uint64_t hash, uint64_t key) {
  uint64_t mixed = (hash ^ key) * kOdd1;
  mixed ^= mixed >> 33;
  mixed *= kOdd2;
  return std::log((static_cast<double>(mixed >> 11) + 0.5) * 0x1p-53);
}

// Returns the row of a key's worker, as rendezvous.py says.
inline int64_t home_of(const Table& table, const Asked& asked) {
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

  const auto may_take = [&](int64_t row) {
    if (!(table.score[row] < kLast / 2)) return false;
    return std::find(asked.out, asked.out + asked.num_out, row) == asked.out + asked.num_out;
  };
  const double* sessions = column(table, kSessions);
  double num_sessions = 0, of_sessions = 0;
  for (int64_t row = 0; asked.is_new_session && row < rows; ++row)
    if (may_take(row)) num_sessions += sessions[row], of_sessions += table.weights[row];
  const double most_sessions = kMaxSessions * num_sessions;
  const auto is_open = [&](int64_t row) {
    if (!(table.loads[row] * share <= table.weights[row] * load)) return false;
    if (asked.is_new_session && !(sessions[row] * of_sessions <= most_sessions * table.weights[row])) return false;
    return may_take(row);
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
inline void pick(const Table& table, Asked& asked) {
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
    for (; place > 0 && score[row] < score[asked.picked[place - 1]]; --place)
      asked.picked[place] = asked.picked[place - 1];
    asked.picked[place] = row;
    if (asked.num_picked < most) ++asked.num_picked;
  }
}

inline void avoid(const Table& table, const Asked& asked) {
  for (int64_t each = 0; each < asked.num_avoid; ++each) table.score[asked.avoid[each]] = kInfinity;
}

// Goes on once all rows have their scores, weights and loads.
inline void choose(const Table& table, Asked& asked) {
  avoid(table, asked);
  asked.home = asked.has_key ? home_of(table, asked) : -1;
  pick(table, asked);
}

// Writes what a hand-over to each host takes, were nothing cached there.
inline void score_hand_overs(const Table& table, const Asked& asked) {
  for (int64_t host = 0; host < table.num_hosts; ++host) {
    const double per_byte = asked.ms_per_byte[host];
    double ms = per_byte * asked.num_bytes;
    if (asked.num_last_bytes < asked.num_bytes) ms = std::max(ms - asked.overlap_ms, per_byte * asked.num_last_bytes);
    ms += asked.fixed_ms[host];
    ms += std::max(0.0, asked.latency_ms[host] - asked.prefill_ms);
    if (asked.free_bytes && host != asked.from_host) {
      const double wanted = std::min(asked.num_bytes, 2 * asked.window_bytes[host]);
      ms += std::max(0.0, wanted - asked.free_bytes[host]) * per_byte;
    }
    table.of_hosts[host] = ms + asked.prefill_ms;
  }
}

// Scores prefill workers: seconds until each would have the prompt.
inline void score_prefills(const Table& table, Asked& asked) {
  const double *beat = column(table, kBeat), *reported = column(table, kReported);
  const double* mine = column(table, kMyPrompts);
  for (int64_t row = 0; row < table.num_rows; ++row) {
    const double rate = rate_of(table, asked, row);
    const double queued = std::max(mine[row], reported[row] - (asked.now - beat[row]) * rate);
    table.weights[row] = rate;
    table.loads[row] = queued;
    table.score[row] = (queued + asked.num_prompt_tokens) / rate;
  }
  choose(table, asked);
}

// Scores decode workers: milliseconds until each would have prompt and answer.
inline void score_decodes(const Table& table, Asked& asked) {
  const int64_t rows = table.num_rows;
  const double *pool = column(table, kPool), *held = column(table, kHeld), *largest = column(table, kLargest);
  const double *room = column(table, kRoom), *delay = column(table, kDelay), *queue = column(table, kMyQueue);
  double *score = table.score, *local = table.local_ms;
  for (int64_t row = 0; row < rows; ++row) {
    table.weights[row] = std::max(1.0, pool[row]);
    table.loads[row] = held[row];
    score[row] = (held[row] + asked.num_tokens) / table.weights[row] * asked.answer_ms;
  }
  const bool is_handed_over = asked.hand_over != kNever;
  if (!asked.is_short)
    for (int64_t row = 0; row < rows; ++row)
      local[row] = (delay[row] * asked.num_prompt_tokens + queue[row]) / rate_of(table, asked, row);
  if (is_handed_over) {
    score_hand_overs(table, asked);
    for (int64_t row = 0; row < rows; ++row) {
      const double ms = table.of_hosts[table.host_numbers[row]];
      score[row] += asked.hand_over == kAlways ? ms : std::min(local[row], ms);
    }
  } else if (!asked.is_short) {
    for (int64_t row = 0; row < rows; ++row) score[row] += local[row];
  }
  for (int64_t row = 0; row < rows; ++row)
    if (largest[row] < asked.num_tokens) score[row] = kInfinity;
  avoid(table, asked);
  bool has_room = false;
  for (int64_t row = 0; row < rows; ++row)
    has_room |= !(room[row] < asked.num_prompt_tokens) && score[row] < kInfinity;
  if (has_room)
    for (int64_t row = 0; row < rows; ++row)
      if (room[row] < asked.num_prompt_tokens) score[row] += kLast;
  if (is_handed_over) {  // what prefill takes is the same for all that are about as good: the rest is compared
    const int64_t best = least(score, rows);
    if (asked.hand_over == kAlways || local[best] >= table.of_hosts[table.host_numbers[best]])
      for (int64_t row = 0; row < rows; ++row) score[row] -= asked.prefill_ms;
  }
  choose(table, asked);
}

}  // namespace tandem
