#include "core/caching/expandable_range.h"

#include <utility>
#include <vector>

#include "base/units.h"

namespace mybackend::caching {

Status ExpandableRange::create(Driver* driver, int device, std::size_t page_bytes, std::unique_ptr<ExpandableRange>* out) {
  DeviceInfo info;
  if (Status status = driver->device_info(device, &info); !status.ok()) return status;
  const std::size_t wanted = info.total_bytes + info.total_bytes / 8;  // 1.125 x
  const std::size_t page_count = (wanted + page_bytes - 1) / page_bytes;
  auto range = std::unique_ptr<ExpandableRange>(new ExpandableRange(driver, device, page_bytes));
  void* address = nullptr;
  if (Status status = driver->address_reserve(device, page_count * page_bytes, &address); !status.ok()) return status;
  range->address_ = reinterpret_cast<std::uintptr_t>(address);
  range->pages_.resize(page_count);
  *out = std::move(range);
  return {};
}

ExpandableRange::~ExpandableRange() {
  for (std::size_t page = 0; page < pages_.size(); ++page) {
    if (pages_[page].mapped) (void)unmap_page(page);
  }
  release_idle_pages();
  if (address_ != 0) (void)driver_->address_free(device_, reinterpret_cast<void*>(address_), bytes());
}

Status ExpandableRange::unmap_page(std::size_t page) {
  Page& p = pages_[page];
  if (Status status = driver_->memory_unmap(device_, page_address(page), p.handle); !status.ok()) return status;
  release(p.handle);
  p.mapped = false;
  --(std::exchange(p.idle, false) ? idle_page_count_ : mapped_page_count_);
  return {};
}

// First the memory of all pages, then the mappings: running out of memory maps nothing.
Status ExpandableRange::map(AddressSpan span, AddressSpan* mapped) {
  const std::size_t first = (span.address - address_) / page_bytes_;
  const std::size_t end = (span.address + span.bytes - address_ + page_bytes_ - 1) / page_bytes_;
  Status status;
  std::size_t created = first, done = first;
  for (; created < end; ++created) {
    if (pages_[created].mapped) continue;  // idle
    status = driver_->physical_create(device_, page_bytes_, &pages_[created].handle);
    if (!status.ok()) break;
  }
  for (; status.ok() && done < end; ++done) {
    Page& page = pages_[done];
    if (!page.mapped) {
      status = driver_->memory_map(device_, page_address(done), page.handle);
      if (!status.ok()) break;
    }
    page.mapped = true;
    if (std::exchange(page.idle, false)) --idle_page_count_;
    ++mapped_page_count_;
  }
  if (!status.ok()) {
    for (std::size_t page = first; page < created; ++page) {
      if (page >= done) {
        if (!pages_[page].mapped) release(pages_[page].handle);
      } else if (!unmap_page(page).ok()) {
        pages_[page].idle = true;
        --mapped_page_count_;
        ++idle_page_count_;
      }
    }
    return status;
  }
  *mapped = {span.address, (end - first) * page_bytes_};
  return {};
}

void ExpandableRange::release(PhysicalHandle handle) noexcept {
  if (!driver_->physical_release(device_, handle).ok()) unreleased_.push_back(handle);
}

void ExpandableRange::release_idle_pages() noexcept {
  std::erase_if(unreleased_, [&](PhysicalHandle handle) { return driver_->physical_release(device_, handle).ok(); });
  for (std::size_t page = 0; idle_page_count_ > 0 && page < pages_.size(); ++page) {
    if (pages_[page].idle && !unmap_page(page).ok()) return;
  }
}

Status ExpandableRange::unmap(AddressSpan span, StreamHandle stream, AddressSpan* unmapped) {
  const std::size_t first = (span.address - address_ + page_bytes_ - 1) / page_bytes_;
  const std::size_t end = (span.address + span.bytes - address_) / page_bytes_;
  *unmapped = {};
  if (first >= end) return {};
  if (Status status = driver_->stream_synchronize(device_, stream); !status.ok() && status.code() != StatusCode::kFailed) return status;
  std::size_t page = first;
  Status status;
  for (; page < end && status.ok(); ++page) status = unmap_page(page);
  if (!status.ok()) --page;  // this one is still mapped
  if (page > first) *unmapped = {address_ + first * page_bytes_, (page - first) * page_bytes_};
  return page > first ? Status() : status;
}

}  // namespace mybackend::caching
