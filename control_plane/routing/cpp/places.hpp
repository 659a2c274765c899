// The places of a prompt's blocks, as sample_points.py finds them.
#pragma once
#include "point_arrays.hpp"

namespace tandem {

constexpr int64_t kSpacing = 16;
constexpr uint16_t kIsStore = 0x8000;
constexpr int kPrefetched = 16;

inline uint64_t key_at(const uint8_t* hashes, int64_t position, uint64_t space) {
  uint64_t key;
  std::memcpy(&key, hashes + 16 * position, sizeof key);
  key ^= space;
  return key ? key : 1;
}

// Returns the places of a key; null: the index does not have it.
inline const uint16_t* places_of(const Index& index, uint64_t key) {
  const uint64_t slot = slot_of(index, key);
  return slot == kNoSlot ? nullptr : index.places + kNumPlaces * slot;
}

inline int64_t num_points(int64_t num_blocks) {
  if (num_blocks >= kSpacing) return 4 + num_blocks / kSpacing;
  int64_t number = 0;
  for (; num_blocks; num_blocks >>= 1) ++number;
  return number;
}

inline int64_t point(int64_t number) { return number < 4 ? (int64_t{1} << number) - 1 : (number - 3) * kSpacing - 1; }

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

// Finds the places of a prompt's leading blocks; returns how many. hashes: 16 bytes of each block.
inline int64_t find_places(const Index& index, const uint8_t* hashes, int64_t num_blocks, uint64_t space) {
  int64_t number = num_points(num_blocks), base = -1;
  const uint16_t* at_base = nullptr;
  while (number > 0 && !at_base) {
    const int64_t first = std::max<int64_t>(0, number - kPrefetched);
    for (int64_t each = number; each-- > first;) prefetch(index, key_at(hashes, point(each), space));
    for (; number > first && !at_base; --number) {
      base = point(number - 1);
      at_base = places_of(index, key_at(hashes, base, space));
    }
  }
  if (!at_base) return 0;
  Places places(index.found);
  const int64_t end = base + 1, next = end < kSpacing ? 2 * end : end + kSpacing;
  for (int64_t position = std::min(num_blocks, next - 1) - 1; position > base; --position)
    if (const uint16_t* row = places_of(index, key_at(hashes, position, space))) places.add(position, row, at_base);
  places.add(base, at_base, nullptr);
  for (; number > 0; --number) {
    const int64_t position = point(number - 1);
    if (const uint16_t* row = places_of(index, key_at(hashes, position, space))) places.add(position, row, nullptr);
  }
  return places.count();
}

}  // namespace tandem
