// Makes the masks of several grammars at once, by llguidance's C functions, beside the engine's thread: helper threads
// take one answer after the other while no op needs them; the caller makes the remaining masks when it collects them.
#pragma once
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "threads.hpp"

namespace tandem {

// Of llguidance's C interface, parser/llguidance.h. Those that return a number return -1 on an error.
struct GrammarCalls {
  int32_t (*consume_tokens)(void* matcher, const uint32_t* tokens, size_t num_tokens);
  int32_t (*validate_tokens)(void* matcher, const uint32_t* tokens, size_t num_tokens);
  int32_t (*compute_mask_into)(void* matcher, uint32_t* mask, size_t num_bytes);
  bool (*is_accepting)(void* matcher);
  int32_t (*rollback)(void* matcher, size_t num_tokens);
  const uint32_t* ends;  // a mask of the tokens that end an answer
  int64_t num_words;     // of a mask
};

enum MaskStatus : int64_t { kMade, kNotFollowed, kNoWayOn, kNothingFits, kDraftRefused, kNotBack };

// One answer: its tokens are the new ones, then drafts; its masks are one, and one after each allowed draft.
struct MaskRow {
  void* matcher;
  const uint32_t* tokens;
  uint32_t* masks;
  int64_t num_new, num_drafts;
  int64_t num_masks;  // set, as is `status`
  int64_t status;
};

class MaskJob {
 public:
  // All pointers stay valid until `finish_aside`.
  void begin(const GrammarCalls* calls, MaskRow** rows, int64_t num_rows) {
    threads()->finish_aside();
    calls_ = calls, rows_ = rows;
    threads()->begin_aside((int)num_rows, [](void* job, int i) { static_cast<MaskJob*>(job)->make(i); }, this);
  }

 private:
  // The first mask is made last. llguidance caches the newest mask and, after a rollback, may return it for another
  // place that is as many words on. From the first mask's place answers only go forward.
  void make(int index) {
    MaskRow& row = *rows_[index];
    const uint32_t* drafts = row.tokens + row.num_new;
    row.num_masks = 0;
    if (calls_->consume_tokens(row.matcher, row.tokens, row.num_new))
      return void(row.status = row.num_new ? kNotFollowed : kNoWayOn);
    int64_t num_allowed = row.num_drafts ? calls_->validate_tokens(row.matcher, drafts, row.num_drafts) : 0;
    if (num_allowed < 0) return void(row.status = kNoWayOn);
    for (int64_t i = 0; i < num_allowed; i++) {
      if (calls_->consume_tokens(row.matcher, drafts + i, 1)) return void(row.status = kDraftRefused);
      if ((row.status = mask(row.matcher, row.masks + (i + 1) * calls_->num_words))) return;
    }
    if (num_allowed && calls_->rollback(row.matcher, num_allowed)) return void(row.status = kNotBack);
    if ((row.status = mask(row.matcher, row.masks)) == kMade) row.num_masks = 1 + num_allowed;
  }

  MaskStatus mask(void* matcher, uint32_t* words) {
    if (calls_->compute_mask_into(matcher, words, calls_->num_words * sizeof *words)) return kNoWayOn;
    uint32_t any = 0, ends = 0;
    for (int64_t i = 0; i < calls_->num_words; i++) any |= words[i], ends |= words[i] & calls_->ends[i];
    // Where no token continues the answer, llguidance lets the answer end although it is not complete.
    return any && (!ends || calls_->is_accepting(matcher)) ? kMade : kNothingFits;
  }

  const GrammarCalls* calls_ = nullptr;
  MaskRow** rows_ = nullptr;
};

// Caches a tokenizer that needs the interpreter's lock: the texts that grammars force are few.
class RememberedTokens {
 public:
  using Ask = size_t (*)(const void*, const uint8_t* text, size_t num_bytes, uint32_t* tokens, size_t num_tokens);

  explicit RememberedTokens(Ask ask) : ask_(ask) {}

  // Returns the number of tokens and writes as many as there is room for.
  size_t tokenize(const uint8_t* text, size_t num_bytes, uint32_t* tokens, size_t room) {
    const std::string key((const char*)text, num_bytes);
    std::vector<uint32_t> known;
    if (!find(key, known)) {
      known.resize(num_bytes + 8);
      const size_t num_tokens = ask_(nullptr, text, num_bytes, known.data(), known.size());  // without the mutex
      known.resize(std::min(num_tokens, known.size()));
      const std::lock_guard lock(mutex_);
      if (known_.size() >= kMostTexts) known_.clear();
      known_.emplace(key, known);
    }
    std::copy_n(known.begin(), std::min(known.size(), room), tokens);
    return known.size();
  }

 private:
  static constexpr size_t kMostTexts = 16384;

  bool find(const std::string& key, std::vector<uint32_t>& tokens) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(key);
    if (found == known_.end()) return false;
    tokens = found->second;
    return true;
  }

  Ask ask_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::vector<uint32_t>> known_;
};

}  // namespace tandem
