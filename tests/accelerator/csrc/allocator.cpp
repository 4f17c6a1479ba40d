// A caching allocator as CUDA's: segments, blocks split from them and joined again, a cache a stream, `record_stream`.
//
// A freed block is filled with NaN by the stream that owns it (Note [Poison] in streams.cpp): whoever reads it on another stream
// without being ordered before that computes NaN.
#include "accel.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <set>
#include <unordered_map>

namespace accel {
namespace {

constexpr size_t kRound = 512;
constexpr size_t kSmall = 1 << 20;
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kMiddle = 10 << 20;
constexpr size_t kMiddleSegment = 20 << 20;
constexpr size_t kLargeRound = 2 << 20;

struct Block {
  c10::DeviceIndex device;
  int64_t stream;
  char* address;
  size_t nbytes;
  size_t requested = 0;
  bool large;
  bool allocated = false;
  bool leaving = false;  // freed, but another stream may still use it
  Block* before = nullptr;
  Block* after = nullptr;
  std::set<int64_t> users;
  std::vector<Mark> ends;
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const {
    return a->nbytes != b->nbytes ? a->nbytes < b->nbytes : a->address < b->address;
  }
};

struct Caching final : c10::DeviceAllocator {
  std::mutex mutex;
  // Free blocks by device, stream and whether they are of large segments.
  std::map<std::tuple<c10::DeviceIndex, int64_t, bool>, std::set<Block*, Smaller>> free_blocks;
  std::unordered_map<void*, Block*> allocated;
  std::map<char*, Block*> all;
  std::vector<Block*> leaving;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats;
  std::vector<size_t> limits, reserved;
  int64_t fail_in = 0;
  bool recording = false;
  size_t most_rows = 0;
  std::vector<std::deque<HistoryRow>> rows;

  Caching() : stats(device_count()), limits(device_count(), capacity()), reserved(device_count()), rows(device_count()) {}

  static void add(c10::CachingAllocator::StatArray& array, bool large, int64_t by) {
    for (auto type : {c10::CachingAllocator::StatType::AGGREGATE,
                      large ? c10::CachingAllocator::StatType::LARGE_POOL : c10::CachingAllocator::StatType::SMALL_POOL}) {
      auto& stat = array[static_cast<size_t>(type)];
      if (by >= 0) {
        stat.increase(static_cast<size_t>(by));
      } else {
        stat.decrease(static_cast<size_t>(-by));
      }
    }
  }

  void note(const char* action, c10::DeviceIndex device, const void* address, size_t nbytes, int64_t stream) {
    if (!recording) return;
    auto now = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    auto& kept = rows[device];
    kept.push_back({action, reinterpret_cast<size_t>(address), nbytes, stream, now});
    if (kept.size() > most_rows) kept.pop_front();
  }

  std::set<Block*, Smaller>& pool(const Block* block) { return free_blocks[{block->device, block->stream, block->large}]; }

  static size_t rounded(size_t nbytes) { return std::max(kRound, (nbytes + kRound - 1) / kRound * kRound); }

  Block* cached(c10::DeviceIndex device, int64_t stream, size_t nbytes, bool large) {
    auto& blocks = free_blocks[{device, stream, large}];
    Block least{device, stream, nullptr, nbytes, 0, large};
    auto found = blocks.lower_bound(&least);
    if (found == blocks.end()) return nullptr;
    auto* block = *found;
    blocks.erase(found);
    return block;
  }

  Block* segment(c10::DeviceIndex device, int64_t stream, size_t nbytes, bool large) {
    size_t whole = !large ? kSmallSegment : nbytes < kMiddle ? kMiddleSegment : (nbytes + kLargeRound - 1) / kLargeRound * kLargeRound;
    if (reserved[device] + whole > limits[device]) return nullptr;
    auto* address = static_cast<char*>(reserve(device, whole));
    if (address == nullptr) return nullptr;
    reserved[device] += whole;
    auto* block = new Block{device, stream, address, whole, 0, large};
    all[address] = block;
    auto& stat = stats[device];
    add(stat.segment, large, 1);
    add(stat.reserved_bytes, large, static_cast<int64_t>(whole));
    ++stat.num_device_alloc;
    note("segment_alloc", device, address, whole, stream);
    return block;
  }

  void split(Block* block, size_t nbytes) {
    size_t left = block->nbytes - nbytes;
    if (left < (block->large ? kSmall + 1 : kRound)) return;
    auto* rest = new Block{block->device, block->stream, block->address + nbytes, left, 0, block->large};
    rest->before = block;
    rest->after = block->after;
    if (rest->after != nullptr) rest->after->before = rest;
    block->after = rest;
    block->nbytes = nbytes;
    all[rest->address] = rest;
    pool(rest).insert(rest);
    add(stats[block->device].inactive_split, block->large, 1);
    add(stats[block->device].inactive_split_bytes, block->large, static_cast<int64_t>(left));
  }

  void uncount_split(const Block* block) {
    if (block->before == nullptr && block->after == nullptr) return;
    add(stats[block->device].inactive_split, block->large, -1);
    add(stats[block->device].inactive_split_bytes, block->large, -static_cast<int64_t>(block->nbytes));
  }

  // Nobody uses it any more: into the cache, joined with free neighbours.
  void cache(Block* block) {
    auto& stat = stats[block->device];
    note("free_completed", block->device, block->address, block->requested, block->stream);
    add(stat.active, block->large, -1);
    add(stat.active_bytes, block->large, -static_cast<int64_t>(block->nbytes));
    freed(c10::Stream(c10::Stream::UNSAFE, {kType, block->device}, block->stream), block->address, block->nbytes);
    block->leaving = false;
    block->requested = 0;
    for (Block* other : {block->before, block->after}) {
      if (other == nullptr || other->allocated || other->leaving) continue;
      pool(other).erase(other);
      uncount_split(other);
      Block* first = other == block->before ? other : block;
      Block* second = other == block->before ? block : other;
      first->nbytes += second->nbytes;
      first->after = second->after;
      if (first->after != nullptr) first->after->before = first;
      all.erase(second->address);
      delete second;
      block = first;
    }
    pool(block).insert(block);
    if (block->before != nullptr || block->after != nullptr) {
      add(stat.inactive_split, block->large, 1);
      add(stat.inactive_split_bytes, block->large, static_cast<int64_t>(block->nbytes));
    }
  }

  void reap() {
    std::vector<Block*> still;
    for (auto* block : leaving) {
      std::erase_if(block->ends, [](const Mark& end) { return passed(end); });
      if (block->ends.empty()) {
        cache(block);
      } else {
        still.push_back(block);
      }
    }
    leaving = std::move(still);
  }

  void give_back(c10::DeviceIndex device) {
    for (auto& [key, blocks] : free_blocks) {
      if (device >= 0 && std::get<0>(key) != device) continue;
      for (auto at = blocks.begin(); at != blocks.end();) {
        auto* block = *at;
        if (block->before != nullptr || block->after != nullptr) {
          ++at;
          continue;
        }
        at = blocks.erase(at);
        all.erase(block->address);
        release(block->address, block->nbytes);
        reserved[block->device] -= block->nbytes;
        auto& stat = stats[block->device];
        add(stat.segment, block->large, -1);
        add(stat.reserved_bytes, block->large, -static_cast<int64_t>(block->nbytes));
        ++stat.num_device_free;
        note("segment_free", block->device, block->address, block->nbytes, block->stream);
        delete block;
      }
    }
  }

  Block* find(c10::DeviceIndex device, int64_t stream, size_t nbytes, bool large) {
    if (auto* block = cached(device, stream, nbytes, large)) {
      uncount_split(block);
      return block;
    }
    return segment(device, stream, nbytes, large);
  }

  Block* take(c10::DeviceIndex device, size_t requested) {
    check_failed();
    auto lock = locked(mutex);
    reap();
    auto stream = current_stream(device).id();
    size_t nbytes = rounded(requested);
    bool large = nbytes > kSmall;
    bool refused = fail_in > 0 && --fail_in == 0;
    Block* block = refused ? nullptr : find(device, stream, nbytes, large);
    if (block == nullptr && !refused) {
      // As CUDA's: wait for what other streams still use, free the cache, and try once more.
      ++stats[device].num_alloc_retries;
      host_wait_device(device, "allocation");
      reap();
      host_wait_device(device, "allocation");  // poisons what `reap` freed, before its memory goes to another stream
      give_back(device);
      block = find(device, stream, nbytes, large);
    }
    auto& stat = stats[device];
    if (block == nullptr) {
      ++stat.num_ooms;
      size_t free = limits[device] - std::min(limits[device], reserved[device]);
      note("oom", device, reinterpret_cast<void*>(free), nbytes, stream);
      auto in_use = stat.allocated_bytes[0].current;
      throw c10::OutOfMemoryError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
          c10::str("accel out of memory. Tried to allocate ", text(nbytes), ". GPU ", int(device), " has a total capacity of ",
                   text(limits[device]), " of which ", text(free), " is free. Of the allocated memory ", text(in_use),
                   " is allocated by PyTorch, and ", text(reserved[device] - in_use),
                   " is reserved by PyTorch but unallocated."));
    }
    split(block, nbytes);
    reused(current_stream(device), block->address, block->nbytes);
    block->allocated = true;
    block->requested = requested;
    allocated[block->address] = block;
    add(stat.allocation, large, 1);
    add(stat.active, large, 1);
    add(stat.allocated_bytes, large, static_cast<int64_t>(block->nbytes));
    add(stat.active_bytes, large, static_cast<int64_t>(block->nbytes));
    add(stat.requested_bytes, large, static_cast<int64_t>(requested));
    note("alloc", device, block->address, requested, stream);
    return block;
  }

  static std::string text(size_t nbytes) {
    char out[32];
    bool large = nbytes >= (size_t(1) << 30);
    std::snprintf(out, sizeof(out), "%.2f %s", static_cast<double>(nbytes) / (large ? 1073741824.0 : 1048576.0), large ? "GiB" : "MiB");
    return out;
  }

  void put_back(void* address) {
    auto lock = locked(mutex);
    auto found = allocated.find(address);
    if (found == allocated.end()) return;
    auto* block = found->second;
    allocated.erase(found);
    auto& stat = stats[block->device];
    block->allocated = false;
    add(stat.allocation, block->large, -1);
    add(stat.allocated_bytes, block->large, -static_cast<int64_t>(block->nbytes));
    add(stat.requested_bytes, block->large, -static_cast<int64_t>(block->requested));
    note("free_requested", block->device, block->address, block->requested, block->stream);
    auto users = std::exchange(block->users, {});
    if (users.empty() || has_failed()) return cache(block);
    block->leaving = true;
    auto device = block->device;
    lock.unlock();
    // Without the lock: whatever the scheduler lets run at a mark may need Python's, and its holder this one.
    std::vector<Mark> ends;
    for (auto user : users) ends.push_back(mark(c10::Stream(c10::Stream::UNSAFE, {kType, device}, user)));
    auto again = locked(mutex);
    block->ends = std::move(ends);
    leaving.push_back(block);
  }

  static void deleter(void* address) { static_cast<Caching*>(allocator())->put_back(address); }

  c10::DataPtr allocate(size_t nbytes) override {
    auto device = current_device();
    if (nbytes == 0) return {nullptr, nullptr, &deleter, c10::Device(kType, device)};
    auto* address = take(device, nbytes)->address;
    return {address, address, &deleter, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const final {
    auto* target = kernel_address(to);
    auto* source = kernel_address(from);
    enqueue(current_stream(device_of(to)),
            {"copy", kernel_cost(nbytes), [=] { std::memcpy(target, source, nbytes); }});
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) host_wait_device(device, "empty_cache");
    auto lock = locked(mutex);
    reap();
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) host_wait_device(device, "empty_cache");
    give_back(-1);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto lock = locked(mutex);
    auto found = allocated.find(data.get_context());
    if (found != allocated.end() && found->second->stream != stream.id()) found->second->users.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto lock = locked(mutex);
    return stats[device < 0 ? current_device() : device];
  }
  template <typename Do>
  void each(c10::DeviceIndex device, Do act) {
    auto lock = locked(mutex);
    auto& stat = stats[device < 0 ? current_device() : device];
    for (auto* array : {&stat.allocation, &stat.segment, &stat.active, &stat.inactive_split, &stat.allocated_bytes,
                        &stat.reserved_bytes, &stat.active_bytes, &stat.inactive_split_bytes, &stat.requested_bytes}) {
      for (auto& one : *array) act(one);
    }
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
    stats[device < 0 ? current_device() : device].num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto lock = locked(mutex);
    if (device < 0) device = current_device();
    return {limits[device] - std::min(limits[device], reserved[device]), limits[device]};
  }
};

Caching& caching() { return *static_cast<Caching*>(allocator()); }

}  // namespace

c10::DeviceAllocator* allocator() {
  static auto* made = new Caching();
  return made;
}

void set_memory_limit(c10::DeviceIndex device, size_t nbytes) {
  auto lock = locked(caching().mutex);
  caching().limits[device] = std::min(nbytes, capacity());
}

void fail_allocation_in(int64_t n) {
  auto lock = locked(caching().mutex);
  caching().fail_in = n;
}

std::vector<SegmentSeen> segments() {
  auto& here = caching();
  auto lock = locked(here.mutex);
  std::vector<SegmentSeen> seen;
  for (const auto& [address, first] : here.all) {
    if (first->before != nullptr) continue;
    SegmentSeen one{first->device, reinterpret_cast<size_t>(address), 0, 0, 0, 0, first->stream, first->large, {}};
    for (auto* block = first; block != nullptr; block = block->after) {
      const char* state = block->allocated ? "active_allocated" : block->leaving ? "active_pending_free" : "inactive";
      one.blocks.push_back({reinterpret_cast<size_t>(block->address), block->nbytes, block->requested, state});
      one.nbytes += block->nbytes;
      one.allocated += block->allocated ? block->nbytes : 0;
      one.active += block->allocated || block->leaving ? block->nbytes : 0;
      one.requested += block->allocated ? block->requested : 0;
    }
    seen.push_back(std::move(one));
  }
  return seen;
}

void record_history(bool on, size_t most) {
  auto& here = caching();
  auto lock = locked(here.mutex);
  here.recording = on;
  here.most_rows = most;
  if (on) return;
  for (auto& rows : here.rows) rows.clear();
}

std::vector<HistoryRow> history(c10::DeviceIndex device) {
  auto& here = caching();
  auto lock = locked(here.mutex);
  return {here.rows[device].begin(), here.rows[device].end()};
}

namespace {
struct Registered {
  Registered() { c10::SetAllocator(kType, allocator()); }
} g_registered;
}  // namespace

}  // namespace accel
