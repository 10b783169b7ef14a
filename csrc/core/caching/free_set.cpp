#include "core/caching/free_set.h"

#include <algorithm>
#include <bit>

namespace mybackend::caching {

// --- One stream -------------------------------------------------------------------------------

std::size_t FreeSet::StreamSet::used_from(std::size_t index) const noexcept {
  if (index >= kBinCount) return kBinCount;
  std::size_t page = index / kPageBins;
  if (const std::uint64_t here = used_bins[page] >> (index % kPageBins); here != 0) {
    return index + static_cast<std::size_t>(std::countr_zero(here));
  }
  if (page + 1 == kPageCount) return kBinCount;
  const std::uint64_t later = used_pages >> (page + 1);
  if (later == 0) return kBinCount;
  page += 1 + static_cast<std::size_t>(std::countr_zero(later));
  return page * kPageBins + static_cast<std::size_t>(std::countr_zero(used_bins[page]));
}

std::size_t FreeSet::StreamSet::used_before(std::size_t index) const noexcept {
  const auto highest = [](std::uint64_t bits) { return 63 - static_cast<std::size_t>(std::countl_zero(bits)); };
  std::size_t page = index / kPageBins;  // index is at most kBinCount
  if (page < kPageCount) {
    const std::uint64_t here = used_bins[page] & ((std::uint64_t{1} << (index % kPageBins)) - 1);
    if (here != 0) return page * kPageBins + highest(here);
  }
  const std::uint64_t earlier = page == kPageCount ? used_pages : used_pages & ((std::uint64_t{1} << page) - 1);
  if (earlier == 0) return kBinCount;
  page = highest(earlier);
  return page * kPageBins + highest(used_bins[page]);
}

FreeSet::Key FreeSet::StreamSet::highest_of(std::size_t index) const noexcept {
  const Bin& b = bin(index);
  return {bytes_of(index), b.others.empty() ? b.lowest : b.others.back()};
}

void FreeSet::StreamSet::insert(Key key) {
  if (!has_bin(key.bytes)) {
    large.insert(key);
    return;
  }
  const std::size_t index = bin_of(key.bytes);
  std::unique_ptr<Page>& page = pages[index / kPageBins];
  if (page == nullptr) page = std::make_unique<Page>();
  Bin& b = bin(index);
  if (b.lowest == 0) {
    b.lowest = key.address;
    used_bins[index / kPageBins] |= std::uint64_t{1} << (index % kPageBins);
    used_pages |= std::uint64_t{1} << (index / kPageBins);
    return;
  }
  b.others.insert(std::max(key.address, b.lowest));
  b.lowest = std::min(key.address, b.lowest);
}

bool FreeSet::StreamSet::erase(Key key) noexcept {
  if (!has_bin(key.bytes)) {
    const auto place = large.lower_bound(key);
    if (large.is_end(place) || large.at(place) != key) return false;
    large.erase(place);
    return true;
  }
  const std::size_t index = bin_of(key.bytes);
  if (!is_used(index)) return false;
  Bin& b = bin(index);
  const bool has_others = !b.others.empty();
  if (b.lowest == key.address) {
    if (has_others) {
      b.lowest = b.others.front();
      b.others.erase({0, 0});
      return true;
    }
    b.lowest = 0;
    used_bins[index / kPageBins] &= ~(std::uint64_t{1} << (index % kPageBins));
    if (used_bins[index / kPageBins] == 0) used_pages &= ~(std::uint64_t{1} << (index / kPageBins));
    return true;
  }
  if (!has_others) return false;
  const auto place = b.others.lower_bound(key.address);
  if (b.others.is_end(place) || b.others.at(place) != key.address) return false;
  b.others.erase(place);
  return true;
}

bool FreeSet::StreamSet::contains(Key key) const noexcept {
  if (!has_bin(key.bytes)) {
    const auto place = large.lower_bound(key);
    return !large.is_end(place) && large.at(place) == key;
  }
  if (!is_used(bin_of(key.bytes))) return false;
  const Bin& b = bin(bin_of(key.bytes));
  if (b.lowest == key.address) return true;
  const auto place = b.others.lower_bound(key.address);
  return !b.others.is_end(place) && b.others.at(place) == key.address;
}

// --- All streams ------------------------------------------------------------------------------

FreeSet::StreamSet* FreeSet::find_stream(StreamHandle stream) const noexcept {
  for (const auto& set : streams_) {
    if (set->stream == stream) return set.get();
  }
  return nullptr;
}

FreeSet::StreamSet& FreeSet::make_stream(StreamHandle stream) {
  const auto position =
      std::lower_bound(streams_.begin(), streams_.end(), stream, [](const auto& set, StreamHandle handle) { return set->stream < handle; });
  return **streams_.insert(position, std::make_unique<StreamSet>(stream));
}

void FreeSet::insert(StreamHandle stream, Key key) {
  StreamSet* set = find_stream(stream);
  (set != nullptr ? *set : make_stream(stream)).insert(key);
  ++count_;
  if (clock_ != 0) entered_[key.address] = clock_;
}

bool FreeSet::erase(StreamHandle stream, Key key) noexcept {
  StreamSet* set = find_stream(stream);
  if (set == nullptr || !set->erase(key)) return false;
  --count_;
  if (!entered_.empty()) entered_.erase(key.address);
  return true;
}

void FreeSet::replace(StreamHandle stream, Key member, Key key) {
  StreamSet& set = *find_stream(stream);
  if (has_bin(member.bytes) || has_bin(key.bytes)) {
    set.erase(member);
    set.insert(key);
  } else {
    set.large.replace(set.large.lower_bound(member), key);
  }
  if (!entered_.empty()) entered_.erase(member.address);
  if (clock_ != 0) entered_[key.address] = clock_;
}

bool FreeSet::contains(StreamHandle stream, Key key) const noexcept {
  const StreamSet* set = find_stream(stream);
  return set != nullptr && set->contains(key);
}

FreeSet::Key FreeSet::lower_bound(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamSet* set = find_stream(stream);
  if (set == nullptr) return {};
  if (has_bin(bytes)) {
    const std::size_t index = set->used_from(bytes == 0 ? 0 : bin_of(bytes + kBinStepBytes - 1));
    if (index != kBinCount) return set->lowest_of(index);
    return set->large.empty() ? Key() : set->large.front();
  }
  const auto place = set->large.lower_bound({bytes, 0});
  return set->large.is_end(place) ? Key() : set->large.at(place);
}

FreeSet::Key FreeSet::below(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamSet* set = find_stream(stream);
  if (set == nullptr || bytes == 0) return {};
  if (!has_bin(bytes)) {
    const auto place = set->large.lower_bound({bytes, 0});
    const auto smaller = set->large.before(place);
    if (!set->large.is_end(smaller)) return set->large.at(smaller);
  }
  const std::size_t index = set->used_before(has_bin(bytes) ? bin_of(bytes + kBinStepBytes - 1) : kBinCount);
  return index == kBinCount ? Key() : set->highest_of(index);
}

FreeSet::Key FreeSet::after(StreamHandle stream, Key member) const noexcept {
  const StreamSet& set = *find_stream(stream);
  if (!has_bin(member.bytes)) {
    const auto next = set.large.after(set.large.lower_bound(member));
    return set.large.is_end(next) ? Key() : set.large.at(next);
  }
  const std::size_t index = bin_of(member.bytes);
  const Bin& b = set.bin(index);
  if (!b.others.empty()) {
    if (b.lowest == member.address) return {member.bytes, b.others.front()};
    const auto next = b.others.after(b.others.lower_bound(member.address));
    if (!b.others.is_end(next)) return {member.bytes, b.others.at(next)};
  }
  const std::size_t larger = set.used_from(index + 1);
  if (larger != kBinCount) return set.lowest_of(larger);
  return set.large.empty() ? Key() : set.large.front();
}

FreeSet::Key FreeSet::before(StreamHandle stream, Key member) const noexcept {
  const StreamSet& set = *find_stream(stream);
  std::size_t index = kBinCount;
  if (has_bin(member.bytes)) {
    index = bin_of(member.bytes);
    const Bin& b = set.bin(index);
    if (b.lowest != member.address) {
      const auto smaller = b.others.before(b.others.lower_bound(member.address));
      return {member.bytes, b.others.is_end(smaller) ? b.lowest : b.others.at(smaller)};
    }
  } else {
    const auto smaller = set.large.before(set.large.lower_bound(member));
    if (!set.large.is_end(smaller)) return set.large.at(smaller);
  }
  const std::size_t smaller = set.used_before(index);
  return smaller == kBinCount ? Key() : set.highest_of(smaller);
}

std::vector<FreeSet::Member> FreeSet::members() const {
  std::vector<Member> result;
  result.reserve(count_);
  for (const auto& set : streams_) {
    for (std::size_t index = set->used_from(0); index != kBinCount; index = set->used_from(index + 1)) {
      const Bin& b = set->bin(index);
      result.push_back({set->stream, {bytes_of(index), b.lowest}});
      b.others.for_each([&](std::uintptr_t address) { result.push_back({set->stream, {bytes_of(index), address}}); });
    }
    set->large.for_each([&](const Key& key) { result.push_back({set->stream, key}); });
  }
  return result;
}

}  // namespace mybackend::caching
