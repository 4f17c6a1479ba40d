// Device memory: one memfd mapped twice. Tensors carry addresses of a mapping nobody may touch; kernels use the other.
// Host memory: what is pinned, by torch's allocator interface or registered by the program.
#include "accel.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>

namespace accel {
namespace {

constexpr size_t kPage = 4096;
constexpr const char* kNbytes = "ACCEL_NBYTES";
constexpr const char* kDevices = "ACCEL_DEVICES";

struct sigaction g_before;
char* g_device_base = nullptr;
char* g_kernel_base = nullptr;
size_t g_nbytes = 0;

void write_hex(char* out, uintptr_t value) {
  for (int place = 15; place >= 0; --place, value >>= 4) out[place] = "0123456789abcdef"[value & 15];
}

// Async-signal-safe: says what the fault was, then lets whoever came before us (faulthandler, or the default) end the process.
void on_fault(int number, siginfo_t* info, void* context) {
  const char* at = static_cast<char*>(info->si_addr);
  if (at >= g_device_base && at < g_device_base + g_nbytes) {
    char text[] = "accel: the host touched device memory at 0x0000000000000000; it may be reached by kernels and copies only\n";
    write_hex(std::strstr(text, "0x") + 2, reinterpret_cast<uintptr_t>(at));
    [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof(text) - 1);
  }
  sigaction(SIGSEGV, &g_before, nullptr);
  if (g_before.sa_flags & SA_SIGINFO) {
    g_before.sa_sigaction(number, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(number);
  }
  // Returning repeats the access, which now faults under the handler of before.
}

size_t from_environment(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Arena {
  Arena() {
    count = static_cast<c10::DeviceIndex>(from_environment(kDevices, 2));
    each = (from_environment(kNbytes, size_t(4) << 30) + kPage - 1) / kPage * kPage;
    g_nbytes = each * count;
    file = memfd_create("accel", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(g_nbytes)) == 0, "accel: no memory file of ", g_nbytes, " B");
    void* device = mmap(nullptr, g_nbytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void* kernel = mmap(nullptr, g_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(device != MAP_FAILED && kernel != MAP_FAILED, "accel: cannot map ", g_nbytes, " B twice");
    g_device_base = static_cast<char*>(device);
    g_kernel_base = static_cast<char*>(kernel);
    for (c10::DeviceIndex index = 0; index < count; ++index) gaps.push_back({{index * each, each}});
    struct sigaction ours {};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, &g_before);
  }
  int file;
  c10::DeviceIndex count;
  size_t each;
  std::mutex mutex;
  // Free ranges of each device by their offset in the file.
  std::vector<std::map<size_t, size_t>> gaps;
};

Arena& arena() {
  static Arena* made = new Arena();
  return *made;
}

// ---- pinned memory ----

struct Pinned {
  size_t nbytes;
  bool ours;
  std::vector<Mark> users;
};

struct PinnedTable {
  std::mutex mutex;
  std::map<uintptr_t, Pinned> ranges;
  // Freed by the program while a copy was still under way; reused by nobody before its users have passed.
  std::deque<std::pair<void*, std::vector<Mark>>> leaving;
  size_t nbytes = 0;
};

PinnedTable& pinned() {
  static PinnedTable* made = new PinnedTable();
  return *made;
}

std::map<uintptr_t, Pinned>::iterator find_pinned(PinnedTable& table, const void* address) {
  auto at = reinterpret_cast<uintptr_t>(address);
  auto found = table.ranges.upper_bound(at);
  if (found == table.ranges.begin()) return table.ranges.end();
  --found;
  return at < found->first + found->second.nbytes ? found : table.ranges.end();
}

void reap(PinnedTable& table) {
  while (!table.leaving.empty()) {
    for (const auto& user : table.leaving.front().second) {
      if (!passed(user)) return;
    }
    std::free(table.leaving.front().first);
    table.leaving.pop_front();
  }
}

void free_pinned(void* address) {
  if (address == nullptr) return;
  auto& table = pinned();
  auto lock = locked(table.mutex);
  auto found = table.ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == table.ranges.end()) return;
  table.nbytes -= found->second.nbytes;
  table.leaving.emplace_back(address, std::move(found->second.users));
  table.ranges.erase(found);
  reap(table);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    size_t whole = std::max<size_t>((nbytes + kPage - 1) / kPage * kPage, kPage);
    void* address = std::aligned_alloc(kPage, whole);
    TORCH_CHECK(address != nullptr, "accel: no ", nbytes, " B of host memory to pin");
    auto& table = pinned();
    auto lock = locked(table.mutex);
    reap(table);
    table.ranges[reinterpret_cast<uintptr_t>(address)] = Pinned{whole, true, {}};
    table.nbytes += whole;
    return {address, address, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const final { std::memcpy(to, from, nbytes); }
};

}  // namespace

c10::DeviceIndex device_count() { return arena().count; }
size_t capacity() { return arena().each; }

void* kernel_address(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  return g_kernel_base + (static_cast<const char*>(device_address) - g_device_base);
}

bool on_device(const void* address) {
  auto at = static_cast<const char*>(address);
  return g_device_base != nullptr && at >= g_device_base && at < g_device_base + g_nbytes;
}

c10::DeviceIndex device_of(const void* address) {
  return static_cast<c10::DeviceIndex>((static_cast<const char*>(address) - g_device_base) / arena().each);
}

void* reserve(c10::DeviceIndex device, size_t nbytes) {
  auto& here = arena();
  auto lock = locked(here.mutex);
  auto& gaps = here.gaps[device];
  for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
    if (gap->second < nbytes) continue;
    auto [offset, length] = *gap;
    gaps.erase(gap);
    if (length > nbytes) gaps[offset + nbytes] = length - nbytes;
    return g_device_base + offset;
  }
  return nullptr;
}

void release(void* address, size_t nbytes) {
  auto& here = arena();
  auto lock = locked(here.mutex);
  auto offset = static_cast<size_t>(static_cast<char*>(address) - g_device_base);
  fallocate(here.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
  auto& gaps = here.gaps[offset / here.each];
  auto [gap, fresh] = gaps.emplace(offset, nbytes);
  auto next = std::next(gap);
  if (next != gaps.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    gaps.erase(next);
  }
  if (gap != gaps.begin()) {
    auto before = std::prev(gap);
    if (before->first + before->second == gap->first) {
      before->second += gap->second;
      gaps.erase(gap);
    }
  }
}

c10::Allocator* pinned_allocator() {
  static auto* made = new PinnedAllocator();
  return made;
}

bool is_pinned(const void* address) {
  auto& table = pinned();
  auto lock = locked(table.mutex);
  return find_pinned(table, address) != table.ranges.end();
}

size_t pinned_nbytes() {
  auto& table = pinned();
  auto lock = locked(table.mutex);
  return table.nbytes;
}

bool register_host(void* address, size_t nbytes) {
  auto& table = pinned();
  auto lock = locked(table.mutex);
  if (find_pinned(table, address) != table.ranges.end()) return false;
  table.ranges[reinterpret_cast<uintptr_t>(address)] = Pinned{nbytes, false, {}};
  table.nbytes += nbytes;
  return true;
}

bool unregister_host(void* address) {
  // As the driver does: nothing may be under way in memory that stops being known.
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) host_wait_device(device, "unregister");
  auto& table = pinned();
  auto lock = locked(table.mutex);
  auto found = table.ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == table.ranges.end() || found->second.ours) return false;
  table.nbytes -= found->second.nbytes;
  table.ranges.erase(found);
  return true;
}

// A copy uses this pinned memory until `user` has passed; see operators.cpp.
void use_pinned(const void* address, const Mark& user) {
  auto& table = pinned();
  auto lock = locked(table.mutex);
  auto found = find_pinned(table, address);
  if (found == table.ranges.end()) return;
  auto& users = found->second.users;
  std::erase_if(users, [](const Mark& other) { return passed(other); });
  users.push_back(user);
}

}  // namespace accel
