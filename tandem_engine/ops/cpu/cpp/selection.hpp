// Finds the k largest logits of a row, or the fewest that hold a share p of the probability.
//
// Both are a prefix of one order: falling logits, the lower id first among equals. So the result is the smallest logit
// that is in, and how many of the logits equal to it are in.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "doubles.hpp"

namespace tandem {

// Logits by groups of sixteen; what the last one lacks is -infinity.
class Logits {
 public:
  Logits(const float* logits, int64_t size) : logits_(logits), size_(size) {
    std::fill_n(last_, kWide, -INFINITY);
    const int64_t whole = size / kWide * kWide;
    std::copy(logits + whole, logits + size, last_);
  }

  int64_t size() const { return size_; }
  float at(int64_t i) const { return logits_[i]; }
  const float* group(int64_t first) const { return first + kWide <= size_ ? logits_ + first : last_; }

  // Calls body(first, logits) for each group of which `is_wanted(vector)` is true in any lane.
  template <class IsWanted, class Body>
  void each_group(IsWanted&& is_wanted, Body&& body) const {
    for (int64_t first = 0; first < size_; first += kWide) {
      const float* x = group(first);
      IntVec any = {};
      for (int p = 0; p < kParts; p++) any |= is_wanted(load(x + p * kLanes));
      if (any_of(any)) body(first, x);
    }
  }

  // The largest; is_number says whether all are below infinity and none is NaN.
  float largest(bool& is_number) const {
    Wide most = wide_splat(-INFINITY);
    IntVec is_fine = ~IntVec{};
    for (int64_t first = 0; first < size_; first += kWide)
      for (int p = 0; p < kParts; p++) {
        const Vec x = load(group(first) + p * kLanes);
        is_fine &= x < splat(INFINITY);
        most.part[p] = larger(most.part[p], x);
      }
    is_number = !any_of(~is_fine);
    return largest_of(most);
  }

  // The id of the `count`-th logit that equals `value`; there are as many.
  int64_t find(float value, int64_t count = 1) const {
    for (int64_t first = 0;; first += kWide) {
      const float* x = group(first);
      IntVec any = {};
      for (int p = 0; p < kParts; p++) any |= load(x + p * kLanes) == splat(value);
      if (!any_of(any)) continue;
      for (int i = 0; i < kWide; i++)
        if (x[i] == value && --count == 0) return first + i;
    }
  }

  int64_t count_above(float value) const {
    int64_t count = 0;
    each_group([&](Vec x) { return x > splat(value); },
               [&](int64_t, const float* x) { count += std::count_if(x, x + kWide, [&](float y) { return y > value; }); });
    return count;
  }

 private:
  const float* logits_;
  int64_t size_;
  float last_[kWide];
};

struct Selection {
  float smallest = -INFINITY;
  int64_t num_equal = std::numeric_limits<int64_t>::max();  // how many of the logits equal to it are in
};

// The k largest logits, in no order; fewer if fewer are above -infinity.
static const std::vector<float>& largest_logits(const Logits& row, int64_t k) {
  static thread_local std::vector<float> found;
  found.clear();
  float least = -INFINITY;
  const size_t most = k, too_many = 2 * most + 64;
  const auto forget_the_rest = [&] {
    std::nth_element(found.begin(), found.begin() + most - 1, found.end(), std::greater<float>());
    found.resize(most);
    least = found.back();
  };
  row.each_group([&](Vec x) { return x > splat(least); },
                 [&](int64_t, const float* x) {
                   for (int i = 0; i < kWide; i++)
                     if (x[i] > least) found.push_back(x[i]);
                   if (found.size() >= too_many) forget_the_rest();
                 });
  if (found.size() > most) forget_the_rest();
  return found;
}

static Selection select_all_of(const std::vector<float>& chosen) {
  Selection selection;
  selection.smallest = *std::min_element(chosen.begin(), chosen.end());
  selection.num_equal = std::count(chosen.begin(), chosen.end(), selection.smallest);
  return selection;
}

// The fewest logits that hold a share of at least `top_p`: a logit is in while those before it hold less.
//
// A probability is a whole number, 2^40 for the largest: sums are exact in any order. Logits are sorted into classes by
// their distance from the largest, and only the class in which the share is reached is sorted further.
class MassSelection {
 public:
  MassSelection(const Logits& row, float largest, double temperature)
      : row_(row), largest_(largest), temperature_(temperature), per_class_((kClasses - 1) / (float)(kFar * temperature)) {}

  Selection select(double top_p) const {
    int64_t masses[kClasses] = {}, total = 0;
    row_.each_group([&](Vec x) { return splat(largest_) - x <= splat((float)(kFar * temperature_)); },
                    [&](int64_t, const float* x) {
                      int32_t classes[kWide];
                      int64_t weights[kWide];
                      classify(x, classes);
                      weigh(x, weights);
                      for (int i = 0; i < kWide; i++) {
                        masses[classes[i]] += weights[i];
                        total += weights[i];
                      }
                    });
    const double share = top_p * (double)total;
    int32_t last = 0;
    int64_t before = 0, before_last = 0;
    for (int32_t c = 0; c < kClasses && (double)before < share; before += masses[c++]) {
      if (!masses[c]) continue;
      last = c;
      before_last = before;
    }
    return within(last, before_last, share);
  }

 private:
  static constexpr int kClasses = 1024;
  static constexpr double kFar = 28.5;  // farther off than that a probability rounds to 0

  Selection within(int32_t wanted, int64_t before, double share) const {
    std::vector<float> members;
    row_.each_group(
        [&](Vec x) { return __builtin_convertvector(class_of(x), IntVec) == IntVec{} + wanted; },
        [&](int64_t, const float* x) {
          int32_t classes[kWide];
          classify(x, classes);
          for (int i = 0; i < kWide; i++)
            if (classes[i] == wanted) members.push_back(x[i]);
        });
    std::sort(members.begin(), members.end(), std::greater<float>());
    Selection selection;
    for (const float x : members) {
      if (!((double)before < share)) break;
      selection = {x, x == selection.smallest ? selection.num_equal + 1 : 1};
      before += weight_of(DoubleVec{} + (double)x)[0];
    }
    return selection;
  }

  Vec class_of(Vec x) const {
    const Vec distance = (splat(largest_) - x) * per_class_;
    return distance < splat(kClasses - 1) ? distance : splat(kClasses - 1);
  }

  void classify(const float* x, int32_t* classes) const {
    for (int p = 0; p < kParts; p++) {
      const IntVec number = __builtin_convertvector(class_of(load(x + p * kLanes)), IntVec);
      memcpy(classes + p * kLanes, &number, sizeof number);
    }
  }

  LongVec weight_of(DoubleVec x) const {
    const DoubleVec e = exp_of(x / temperature_ - largest_ / temperature_);
    return (LongVec)(e * 0x1p40 + 0x1p52) - (LongVec)(DoubleVec{} + 0x1p52);  // to the nearest whole, even on ties
  }

  void weigh(const float* x, int64_t* weights) const {
    for (int i = 0; i < kWide; i += kDoubles) {
      const LongVec weight = weight_of(widened(x + i));
      memcpy(weights + i, &weight, sizeof weight);
    }
  }

  const Logits& row_;
  const float largest_;
  const double temperature_;
  const float per_class_;
};

}  // namespace tandem
