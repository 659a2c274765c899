// The arrays of a prefix index, as point_arrays.py makes them, and what names and takes away places in them.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tandem {

constexpr int kWays = 8;
constexpr int kNumPools = 4;
constexpr int kNumPlaces = 8;
constexpr uint16_t kId = 0x7FFF;
constexpr uint16_t kUnconfirmed = 0x8000;

struct Index {
  uint64_t* keys;          // [num_buckets, 8]; 0: the slot is empty
  uint16_t* places;        // [num_buckets * 8, 8]: pools, then stores
  uint32_t* stamps;        // [num_buckets, 8]: the largest is the newest
  uint64_t num_buckets;
  const uint8_t* is_host;  // [32768]: of a place
  int32_t* found;          // out: [32768, 2]; a place (with kIsStore: a store), and how many leading blocks it has
};

inline uint64_t first_slot(const Index& index, uint64_t half) { return kWays * (half * index.num_buckets >> 32); }

struct Buckets {
  uint64_t first[2];  // slots
};

inline Buckets buckets_of(const Index& index, uint64_t key) {
  return {{first_slot(index, key & 0xFFFFFFFF), first_slot(index, key >> 32)}};
}

inline void prefetch(const Index& index, uint64_t key) {
  for (uint64_t first : buckets_of(index, key).first) __builtin_prefetch(index.keys + first);
}

constexpr uint64_t kNoSlot = ~uint64_t{0};

inline uint64_t slot_of(const Index& index, uint64_t key) {
  for (uint64_t first : buckets_of(index, key).first)
    for (uint64_t slot = first; slot < first + kWays; ++slot)
      if (index.keys[slot] == key) return slot;
  return kNoSlot;
}

// Returns an empty slot of the emptier bucket, or else that of the oldest point; none if all are as new as `oldest`.
inline uint64_t slot_for(const Index& index, uint64_t key, uint32_t oldest) {
  uint64_t best = kNoSlot, least = oldest;
  for (uint64_t first : buckets_of(index, key).first) {
    uint64_t num_used = 0;
    for (uint64_t slot = first; slot < first + kWays; ++slot) num_used += index.keys[slot] != 0;
    for (uint64_t slot = first; slot < first + kWays; ++slot) {
      const uint64_t score = index.keys[slot] ? index.stamps[slot] : num_used;
      if (score < least) {
        least = score;
        best = slot;
      }
    }
  }
  return best;
}

inline uint16_t* four_of(const Index& index, uint64_t slot, uint16_t place) {
  return index.places + kNumPlaces * slot + (index.is_host[place & kId] ? kNumPools : 0);
}

// Puts a place first. What block events have told stays told, whatever a request says.
inline void put_first(uint16_t* four, uint16_t place) {
  int at = 0;
  while (at < kNumPools - 1 && (four[at] & kId) != (place & kId)) ++at;
  const bool is_there = (four[at] & kId) == (place & kId);
  const uint16_t first = is_there && place > kId ? four[at] : place;
  for (; at > 0; --at) four[at] = four[at - 1];
  four[0] = first;
}

inline void take_away(uint16_t* four, uint16_t place, bool only_unconfirmed) {
  const uint16_t unconfirmed = place | kUnconfirmed;
  int at = 0;
  while (at < kNumPools && (only_unconfirmed ? four[at] != unconfirmed : (four[at] & kId) != place)) ++at;
  if (at == kNumPools) return;
  for (; at < kNumPools - 1; ++at) four[at] = four[at + 1];
  four[at] = 0;
}

constexpr int64_t kAhead = 8;

// Names a place at each key, newest first. Key i is as new as newest - i * step; a key without room is dropped.
inline void add_places(const Index& index, const uint64_t* keys, const uint16_t* places, int64_t number,
                       uint32_t newest, uint32_t step) {
  const uint32_t oldest = newest - step * static_cast<uint32_t>(number - 1);
  for (int64_t each = 0; each < std::min(number, kAhead); ++each) prefetch(index, keys[each]);
  for (int64_t each = 0; each < number; ++each) {
    if (each + kAhead < number) prefetch(index, keys[each + kAhead]);
    uint64_t slot = slot_of(index, keys[each]);
    if (slot == kNoSlot) {
      slot = slot_for(index, keys[each], oldest);
      if (slot == kNoSlot) continue;
      index.keys[slot] = keys[each];
      std::memset(index.places + kNumPlaces * slot, 0, kNumPlaces * sizeof(uint16_t));
    }
    index.stamps[slot] = newest - step * static_cast<uint32_t>(each);
    put_first(four_of(index, slot, places[each]), places[each]);
  }
}

// Takes a place away from each key; a point without places is gone.
inline void remove_places(const Index& index, const uint64_t* keys, const uint16_t* places, int64_t number,
                          bool only_unconfirmed) {
  for (int64_t each = 0; each < std::min(number, kAhead); ++each) prefetch(index, keys[each]);
  for (int64_t each = 0; each < number; ++each) {
    if (each + kAhead < number) prefetch(index, keys[each + kAhead]);
    const uint64_t slot = slot_of(index, keys[each]);
    if (slot == kNoSlot) continue;
    take_away(four_of(index, slot, places[each]), places[each], only_unconfirmed);
    uint64_t fours[2];
    std::memcpy(fours, index.places + kNumPlaces * slot, sizeof fours);
    if (!(fours[0] | fours[1])) index.keys[slot] = 0;
  }
}

}  // namespace tandem
