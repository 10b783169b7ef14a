#include "core/caching/free_set.h"

#include <algorithm>
#include <bit>

#include "core/caching/block.h"

namespace mybackend::caching {

FreeSet::Key FreeSet::key(const Block* block) noexcept {
  return {block->bytes, block->address};
}

FreeSet::StreamSet* FreeSet::find_stream(StreamHandle stream) const noexcept {
  for (const auto& set : streams_) {
    if (set->stream == stream) return set.get();
  }
  return nullptr;
}

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
  std::size_t page = std::min(index, kBinCount) / kPageBins;
  if (page < kPageCount && index % kPageBins != 0) {
    const std::uint64_t here = used_bins[page] & ((std::uint64_t{1} << (index % kPageBins)) - 1);
    if (here != 0) return page * kPageBins + 63 - static_cast<std::size_t>(std::countl_zero(here));
  }
  const std::uint64_t earlier = page == kPageCount ? used_pages : used_pages & ((std::uint64_t{1} << page) - 1);
  if (earlier == 0) return kBinCount;
  page = 63 - static_cast<std::size_t>(std::countl_zero(earlier));
  return page * kPageBins + 63 - static_cast<std::size_t>(std::countl_zero(used_bins[page]));
}

Block* FreeSet::StreamSet::highest_of(std::size_t index) const noexcept {
  const Bin& b = bin(index);
  return b.others == nullptr || b.others->empty() ? b.lowest.block : b.others->back().block;
}

void FreeSet::StreamSet::insert(std::size_t bytes, std::uintptr_t address, Block* block) {
  if (!has_bin(bytes)) {
    large.insert({bytes, address, block});
    return;
  }
  const std::size_t index = bin_of(bytes);
  std::unique_ptr<Page>& page = pages[index / kPageBins];
  if (page == nullptr) page = std::make_unique<Page>();
  Bin& b = bin(index);
  const BinEntry entry{address, block};
  if (b.lowest.block == nullptr) {
    b.lowest = entry;
    used_bins[index / kPageBins] |= std::uint64_t{1} << (index % kPageBins);
    used_pages |= std::uint64_t{1} << (index / kPageBins);
    return;
  }
  if (b.others == nullptr) b.others = std::make_unique<ChunkedList<BinEntry>>();
  if (entry < b.lowest) {
    b.others->insert(b.lowest);
    b.lowest = entry;
  } else {
    b.others->insert(entry);
  }
}

bool FreeSet::StreamSet::erase(std::size_t bytes, std::uintptr_t address) noexcept {
  if (!has_bin(bytes)) {
    const auto place = large.lower_bound({bytes, address, nullptr});
    if (large.is_end(place) || large.at(place).bytes != bytes || large.at(place).address != address) return false;
    large.erase(place);
    return true;
  }
  const std::size_t index = bin_of(bytes);
  if (!is_used(index)) return false;
  Bin& b = bin(index);
  const bool has_others = b.others != nullptr && !b.others->empty();
  if (b.lowest.address == address) {
    if (has_others) {
      b.lowest = b.others->front();
      b.others->erase({0, 0});
      return true;
    }
    b.lowest = {};
    used_bins[index / kPageBins] &= ~(std::uint64_t{1} << (index % kPageBins));
    if (used_bins[index / kPageBins] == 0) used_pages &= ~(std::uint64_t{1} << (index / kPageBins));
    return true;
  }
  if (!has_others) return false;
  const auto place = b.others->lower_bound({address, nullptr});
  if (b.others->is_end(place) || b.others->at(place).address != address) return false;
  b.others->erase(place);
  return true;
}

const Block* FreeSet::StreamSet::find(std::size_t bytes, std::uintptr_t address) const noexcept {
  if (!has_bin(bytes)) {
    const auto place = large.lower_bound({bytes, address, nullptr});
    if (large.is_end(place)) return nullptr;
    const LargeEntry& entry = large.at(place);
    return entry.bytes == bytes && entry.address == address ? entry.block : nullptr;
  }
  if (!is_used(bin_of(bytes))) return nullptr;
  const Bin& b = bin(bin_of(bytes));
  if (b.lowest.address == address) return b.lowest.block;
  if (b.others == nullptr) return nullptr;
  const auto place = b.others->lower_bound({address, nullptr});
  return !b.others->is_end(place) && b.others->at(place).address == address ? b.others->at(place).block : nullptr;
}

// --- All streams ------------------------------------------------------------------------------

void FreeSet::insert(Block* block) {
  StreamSet* set = find_stream(block->stream());
  if (set == nullptr) {
    const auto position =
        std::lower_bound(streams_.begin(), streams_.end(), block->stream(), [](const auto& s, StreamHandle h) { return s->stream < h; });
    set = streams_.insert(position, std::make_unique<StreamSet>(block->stream()))->get();
  }
  set->insert(block->bytes, block->address, block);
  ++count_;
}

bool FreeSet::erase(const Block* block) noexcept {
  StreamSet* set = find_stream(block->stream());
  if (set == nullptr || !set->erase(block->bytes, block->address)) return false;
  --count_;
  return true;
}

void FreeSet::replace(Key member, Block* block) {
  StreamSet& set = *find_stream(block->stream());
  if (!has_bin(member.bytes) && !has_bin(block->bytes)) {
    set.large.replace(set.large.lower_bound({member.bytes, member.address, nullptr}), {block->bytes, block->address, block});
    return;
  }
  set.erase(member.bytes, member.address);
  set.insert(block->bytes, block->address, block);
}

bool FreeSet::contains(const Block* block) const noexcept {
  const StreamSet* set = find_stream(block->stream());
  return set != nullptr && set->find(block->bytes, block->address) == block;
}

Block* FreeSet::lower_bound(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamSet* set = find_stream(stream);
  if (set == nullptr) return nullptr;
  if (has_bin(bytes)) {
    const std::size_t index = set->used_from(bytes == 0 ? 0 : bin_of(bytes + kBinStepBytes - 1));
    if (index != kBinCount) return set->bin(index).lowest.block;
    return set->large.empty() ? nullptr : set->large.front().block;
  }
  const auto place = set->large.lower_bound({bytes, 0, nullptr});
  return set->large.is_end(place) ? nullptr : set->large.at(place).block;
}

Block* FreeSet::below(StreamHandle stream, std::size_t bytes) const noexcept {
  const StreamSet* set = find_stream(stream);
  if (set == nullptr || bytes == 0) return nullptr;
  if (!has_bin(bytes) && !set->large.empty()) {
    const auto place = set->large.lower_bound({bytes, 0, nullptr});
    if (set->large.is_end(place)) return set->large.back().block;
    const auto smaller = set->large.before(place);
    if (!set->large.is_end(smaller)) return set->large.at(smaller).block;
  }
  const std::size_t index = set->used_before(has_bin(bytes) ? bin_of(bytes + kBinStepBytes - 1) : kBinCount);
  return index == kBinCount ? nullptr : set->highest_of(index);
}

Block* FreeSet::after(const Block* block) const noexcept {
  const StreamSet* set = find_stream(block->stream());
  if (set == nullptr) return nullptr;
  if (!has_bin(block->bytes)) {
    const auto next = set->large.after(set->large.lower_bound({block->bytes, block->address, nullptr}));
    return set->large.is_end(next) ? nullptr : set->large.at(next).block;
  }
  const std::size_t index = bin_of(block->bytes);
  const Bin& b = set->bin(index);
  if (b.others != nullptr && !b.others->empty()) {
    if (b.lowest.address == block->address) return b.others->front().block;
    const auto next = b.others->after(b.others->lower_bound({block->address, nullptr}));
    if (!b.others->is_end(next)) return b.others->at(next).block;
  }
  const std::size_t larger = set->used_from(index + 1);
  if (larger != kBinCount) return set->bin(larger).lowest.block;
  return set->large.empty() ? nullptr : set->large.front().block;
}

Block* FreeSet::before(const Block* block) const noexcept {
  const StreamSet* set = find_stream(block->stream());
  if (set == nullptr) return nullptr;
  std::size_t index = kBinCount;
  if (has_bin(block->bytes)) {
    index = bin_of(block->bytes);
    const Bin& b = set->bin(index);
    if (b.lowest.address != block->address) {
      const auto smaller = b.others->before(b.others->lower_bound({block->address, nullptr}));
      return b.others->is_end(smaller) ? b.lowest.block : b.others->at(smaller).block;
    }
  } else {
    const auto smaller = set->large.before(set->large.lower_bound({block->bytes, block->address, nullptr}));
    if (!set->large.is_end(smaller)) return set->large.at(smaller).block;
  }
  const std::size_t smaller = set->used_before(index);
  return smaller == kBinCount ? nullptr : set->highest_of(smaller);
}

std::vector<Block*> FreeSet::blocks() const {
  std::vector<Block*> result;
  result.reserve(count_);
  for (const auto& set : streams_) {
    for (std::size_t index = set->used_from(0); index != kBinCount; index = set->used_from(index + 1)) {
      const Bin& b = set->bin(index);
      result.push_back(b.lowest.block);
      if (b.others != nullptr) b.others->for_each([&](const BinEntry& entry) { result.push_back(entry.block); });
    }
    set->large.for_each([&](const LargeEntry& entry) { result.push_back(entry.block); });
  }
  return result;
}

}  // namespace mybackend::caching
