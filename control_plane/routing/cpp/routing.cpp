// What a routing decision does with all workers and all places of a prompt, in one pass each: compiled_library.py calls
// it. Python does the same without this library, and tests compare the two. Nothing here allocates or throws.

#include "comparing.hpp"
#include "places.hpp"
#include "scoring.hpp"

using namespace tandem;

extern "C" {

int64_t tandem_find_places(const Index* index, const uint8_t* hashes, int64_t num_blocks, uint64_t space) {
  return find_places(*index, hashes, num_blocks, space);
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
