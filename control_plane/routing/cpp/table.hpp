// A table of workers and what is asked of it; compiled_library.py has the same structures.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>

namespace tandem {

// As in scoring.py and rendezvous.py.
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kLast = 1e12;
constexpr double kMaxShare = 1.25, kMaxSessions = 1.1;
constexpr int kMostPicked = 8;
constexpr uint64_t kOdd1 = 0xFF51AFD7ED558CCD, kOdd2 = 0xC4CEB9FE1A85EC53;

// As in worker_table.py.
enum Column {
  kRate, kBeat, kReported, kPool, kBlock, kLargest, kStep, kWaits, kAnswerRate, kMyPrompts, kMyQueue, kHeld, kAnswers,
  kDelay, kRoom, kFree, kOwnTokens, kOwnSeconds, kKv, kChunk, kBytes, kBegan,
  kPredicted, kSessions
};

struct Table {
  const double* values;  // [columns, capacity]
  int64_t capacity, num_rows, num_hosts;
  const int64_t* host_numbers;    // [num_rows]
  const uint64_t* host_hashes;    // [num_hosts]
  const uint64_t* worker_hashes;  // [num_rows]
  const int64_t* name_ranks;      // [num_rows]: the places of the workers' names in their order
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
  const double *ms_per_byte, *fixed_ms, *latency_ms;  // [num_hosts]
  const double *free_bytes, *window_bytes;  // [num_hosts]; null: every arena has room
  int64_t from_host;                      // its number; -1: none of these
  int64_t has_key;
  uint64_t key;
  int64_t is_new_session;   // the key's
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

inline const double* column(const Table& table, Column which) { return table.values + which * table.capacity; }

inline double rate_of(const Table& table, const Asked& asked, int64_t row) {
  const double rate = column(table, kRate)[row];
  return rate > 0 ? rate : asked.typical_rate;
}

inline int64_t least(const double* values, int64_t count) { return std::min_element(values, values + count) - values; }

}  // namespace tandem
