// What routing does with all workers, all places of a prompt and all changes of block events, in one pass each:
// compiled_library.py calls it. Python does the same without this library, and tests compare the two. Nothing here
// allocates or throws.

#include "comparing.hpp"
#include "places.hpp"
#include "scoring.hpp"

using namespace tandem;

extern "C" {

int64_t tandem_find_places(const Index* index, const uint8_t* hashes, int64_t num_blocks, uint64_t space) {
  return find_places(*index, hashes, num_blocks, space);
}

// step: 1 if the first key is the newest and all are different, else 0.
void tandem_add_places(const Index* index, const uint64_t* keys, const uint16_t* places, int64_t number,
                       uint32_t newest, uint32_t step) {
  add_places(*index, keys, places, number, newest, step);
}

void tandem_remove_places(const Index* index, const uint64_t* keys, const uint16_t* places, int64_t number,
                          int64_t only_unconfirmed) {
  remove_places(*index, keys, places, number, only_unconfirmed != 0);
}

void tandem_score_prefills(const Table* table, Asked* asked) { score_prefills(*table, *asked); }

void tandem_score_decodes(const Table* table, Asked* asked) { score_decodes(*table, *asked); }

void tandem_compare_prefills(const Table* table, Asked* asked, Compared* compared) {
  compare_prefills(*table, *asked, *compared);
}

void tandem_compare_decodes(const Table* table, Asked* asked, Compared* compared) {
  compare_decodes(*table, *asked, *compared);
}

}  // extern "C"
