// Memory that every step reuses: it grows to the largest request and is never freed.
#pragma once
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>

namespace tandem {

constexpr int64_t kHugeBytes = 2 << 20;

static inline void prefer_huge_pages(void* from, int64_t num_bytes) {
  const uintptr_t begin = ((uintptr_t)from + kHugeBytes - 1) & ~(kHugeBytes - 1);
  const uintptr_t end = ((uintptr_t)from + num_bytes) & ~(kHugeBytes - 1);
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
}

class Space {
 public:
  // Previous contents are lost.
  float* of(int64_t num_floats) {
    if (num_floats <= size_) return at_;
    const int64_t bytes = num_floats * (int64_t)sizeof(float), unit = bytes < kHugeBytes ? 64 : kHugeBytes;
    const int64_t whole = (bytes + unit - 1) / unit * unit;
    free(at_);
    at_ = static_cast<float*>(aligned_alloc(unit, whole));
    if (at_ == nullptr) abort();
    prefer_huge_pages(at_, whole);
    size_ = whole / (int64_t)sizeof(float);
    return at_;
  }

 private:
  float* at_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace tandem
