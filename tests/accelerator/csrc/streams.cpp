// Streams, events and the scheduler: which queued entry runs next, on whichever host thread waits.
//
// No thread runs entries of its own accord but one: a device makes progress although its host is elsewhere (in a collective
// of the CPU, say), so after 20 ms without a call to the device, what a collective needs is run by `pump`.
#include "accel.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

namespace accel {

namespace {

using Clock = std::chrono::steady_clock;
constexpr double kLaunchUs = 1.0;
constexpr auto kIdle = std::chrono::milliseconds(20);

// Note: [Poison]
// Freed memory belongs to the stream it was allocated on: what that stream queues later may overwrite it. So freed ranges are
// filled with NaN by the owner, no earlier than CUDA's allocator could give them to a kernel that overwrites them: ahead of the
// next kernel that the owner queues, and behind what it was told to wait for in between. A range that is allocated again before
// that is not filled: its new owner writes it, perhaps by a stream that was ordered long before.
struct Range {
  char* address;
  size_t nbytes;
};

struct Queued {
  Entry entry;
  Mark waits_for;  // set: this entry is an event's wait
  Mark record;     // set: this entry is an event's record
  double issued_us;
};

}  // namespace

struct Stream {
  c10::DeviceIndex device;
  int64_t id;
  std::deque<Queued> entries;
  double clock_us = 0;
  uint64_t priority = 0;
  bool begun = false;  // the head is a collective that has started
  std::vector<Range> freed;  // see Note [Poison]
};

namespace {

struct Scheduler {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, int64_t>, std::unique_ptr<Stream>> lines;
  Mode mode = Mode::Lazy;
  uint64_t seed = 0;
  uint64_t host_priority = 0;
  uint64_t lowest = 0;
  int64_t steps = 0;
  std::vector<int64_t> changes;
  std::map<c10::DeviceIndex, int64_t> next_id;
  double host_us = 0;
  std::map<std::string, int64_t> waits;
  bool tracing = false;
  std::vector<Ran> trace;
  std::string failure;
  int64_t fail_in = 0;
  int64_t hang_in = 0;
  double down_nbytes_per_us = 25000, up_nbytes_per_us = 25000;
  std::atomic<int64_t> last_call{0};
  std::atomic<int64_t> collectives{0};
  bool pumping = false;
  std::atomic<bool> closed{false};
};

// What has run; see `destroy_done`.
struct Done {
  std::mutex mutex;
  std::vector<Entry> entries;
  std::atomic<bool> any{false};
};

Done& done() {
  static auto* made = new Done();
  return *made;
}

void keep_done(Entry entry) {
  std::lock_guard<std::mutex> lock(done().mutex);
  done().entries.push_back(std::move(entry));
  done().any = true;
}

Scheduler& scheduler() {
  static auto* made = new Scheduler();
  return *made;
}

thread_local c10::DeviceIndex t_device = 0;
thread_local std::map<c10::DeviceIndex, int64_t> t_stream;

uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

void touch(Scheduler& all) { all.last_call = Clock::now().time_since_epoch().count(); }

// Streams that the seed gives a priority lie above 2^32; each change point puts one below all others.
uint64_t priority_of(const Scheduler& all, uint64_t key) { return (mixed(all.seed * 1000003 + key) | (1ULL << 63)); }

Stream& line_of(Scheduler& all, c10::DeviceIndex device, int64_t id) {
  auto& slot = all.lines[{device, id}];
  if (!slot) {
    slot = std::make_unique<Stream>();
    slot->device = device;
    slot->id = id;
    slot->priority = priority_of(all, static_cast<uint64_t>(device) * 4096 + static_cast<uint64_t>(id) + 1);
  }
  return *slot;
}

Stream& line_of(Scheduler& all, const c10::Stream& stream) { return line_of(all, stream.device_index(), stream.id()); }

enum class Advance { Ran, Blocked };

Advance advance(Scheduler& all, Stream& line);

void ran(Scheduler& all, Stream& line, const std::string& name, double start_us, double end_us) {
  line.clock_us = end_us;
  if (all.tracing) all.trace.push_back({line.device, line.id, name, start_us, end_us});
}

void run_kernel(Scheduler& all, const std::function<void()>& call, const std::string& name) {
  if (!all.failure.empty()) return;  // a failed device does nothing more
  if (all.fail_in > 0 && --all.fail_in == 0) {
    all.failure = "accel error: an illegal memory access was encountered (in " + name + ", injected)";
    return;
  }
  try {
    call();
  } catch (const c10::Error& error) {
    all.failure = "accel error: " + name + ": " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    all.failure = "accel error: " + name + ": " + error.what();
  }
}

// The head of a collective: starts it if its group's turn has come, and lands it if it has ended.
Advance advance_collective(Scheduler& all, Stream& line, Queued& head) {
  auto& entry = head.entry;
  if (!line.begun) {
    if (entry.after_start && !entry.after_start->done) {
      auto* before = entry.after_start->stream;
      return before == &line ? Advance::Blocked : advance(all, *before);
    }
    run_kernel(all, entry.run, entry.name);
    line.begun = true;
    entry.started->done = true;
    return Advance::Ran;
  }
  bool over = true;
  if (all.failure.empty()) {
    try {
      over = entry.over();
    } catch (const std::exception& error) {
      all.failure = "accel error: " + entry.name + ": " + error.what();
    }
  }
  if (!over) return Advance::Blocked;
  double start = std::max(line.clock_us, head.issued_us);
  ran(all, line, entry.name, start, start + entry.cost_us);
  line.begun = false;
  keep_done(std::move(entry));
  line.entries.pop_front();
  --all.collectives;
  return Advance::Ran;
}

// Runs the head of a line, or what the head waits for.
Advance advance(Scheduler& all, Stream& line) {
  auto& head = line.entries.front();
  if (head.waits_for) {
    auto& mark = *head.waits_for;
    if (!mark.done) return advance(all, *mark.stream);
    line.clock_us = std::max(line.clock_us, mark.time_us);
    line.entries.pop_front();
    return Advance::Ran;
  }
  if (head.record) {
    head.record->done = true;
    head.record->time_us = line.clock_us = std::max(line.clock_us, head.issued_us);
    line.entries.pop_front();
    return Advance::Ran;
  }
  if (head.entry.over) return advance_collective(all, line, head);
  Queued queued = std::move(head);
  line.entries.pop_front();
  run_kernel(all, queued.entry.run, queued.entry.name);
  double start = std::max(line.clock_us, queued.issued_us);
  ran(all, line, queued.entry.name, start, start + queued.entry.cost_us);
  keep_done(std::move(queued.entry));
  return Advance::Ran;
}

bool runnable(const Stream& line) {
  if (line.entries.empty()) return false;
  auto& head = line.entries.front();
  return !head.waits_for || head.waits_for->done;
}

Stream* first_runnable(Scheduler& all) {
  Stream* best = nullptr;
  for (auto& [key, line] : all.lines) {
    if (runnable(*line) && (best == nullptr || line->priority > best->priority)) best = line.get();
  }
  return best;
}

void count_step(Scheduler& all, Stream* line) {
  ++all.steps;
  for (auto at : all.changes) {
    if (at != all.steps) continue;
    auto& priority = line == nullptr ? all.host_priority : line->priority;
    priority = --all.lowest;
  }
}

// After each call of the host: the streams above it run.
void let_run(Scheduler& all) {
  if (all.mode == Mode::Lazy) return;
  if (all.mode == Mode::Eager) {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& [key, line] : all.lines) {
        while (runnable(*line) && advance(all, *line) == Advance::Ran) moved = true;
      }
    }
    return;
  }
  count_step(all, nullptr);
  for (Stream* next = first_runnable(all); next != nullptr && next->priority > all.host_priority; next = first_runnable(all)) {
    if (advance(all, *next) == Advance::Blocked) return;
    count_step(all, next);
  }
}

// One step towards `mark`; false if a collective must be waited for.
bool step_towards(Scheduler& all, const Record& mark) {
  if (all.mode == Mode::Random) {
    Stream* next = first_runnable(all);
    if (next != nullptr && advance(all, *next) == Advance::Ran) {
      count_step(all, next);
      return true;
    }
  }
  return advance(all, *mark.stream) == Advance::Ran;
}

// What a device does while a collective waits for other ranks: all that any stream can.
bool step_anywhere(Scheduler& all) {
  bool moved = false;
  for (auto& [key, line] : all.lines) {
    if (!line->entries.empty() && advance(all, *line) == Advance::Ran) moved = true;
  }
  return moved;
}

void run_until(Scheduler& all, Locked& lock, const Record& mark) {
  auto blocked_since = Clock::time_point::max();
  while (!mark.done) {
    touch(all);
    if (step_towards(all, mark)) {
      blocked_since = Clock::time_point::max();
      continue;
    }
    auto now = Clock::now();
    if (blocked_since == Clock::time_point::max()) blocked_since = now;
    // The other ranks may need another collective of ours first; a real device would run it.
    if (now - blocked_since > std::chrono::milliseconds(1) && step_anywhere(all)) continue;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
}

void pump() {
  auto& all = scheduler();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (all.closed) return;
    if (all.collectives == 0) continue;
    if (Clock::now().time_since_epoch() - Clock::duration(all.last_call) < kIdle) continue;
    auto lock = locked(all.mutex);
    if (all.closed) return;
    for (auto& [key, line] : all.lines) {
      bool needed = false;
      for (const auto& queued : line->entries) needed = needed || queued.entry.over;
      while (needed && !line->entries.empty() && advance(all, *line) == Advance::Ran) {
      }
    }
  }
}

void poison(Stream& line, std::vector<Range>& ranges, double issued_us) {
  if (ranges.empty()) return;
  Entry entry;
  entry.name = "poison";
  entry.run = [ranges = std::exchange(ranges, {})] {
    for (const auto& range : ranges) std::memset(kernel_address(range.address), 0xff, range.nbytes);
  };
  line.entries.push_back({std::move(entry), nullptr, nullptr, issued_us});
}

void push(Scheduler& all, Stream& line, Queued queued) {
  if (!queued.waits_for && !queued.record) poison(line, line.freed, all.host_us);
  all.host_us += kLaunchUs;
  queued.issued_us = all.host_us;
  line.entries.push_back(std::move(queued));
  touch(all);
}

std::string failure_of(Scheduler& all) {
  auto lock = locked(all.mutex);
  return all.failure;
}

}  // namespace

void destroy_done() {
  if (!done().any) return;
  std::vector<Entry> entries;
  {
    std::lock_guard<std::mutex> lock(done().mutex);
    entries.swap(done().entries);
    done().any = false;
  }
}

void check_failed() {
  auto failure = failure_of(scheduler());
  if (!failure.empty()) {
    throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 700, failure);
  }
}

bool has_failed() { return !failure_of(scheduler()).empty(); }

void forget_failure() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.failure.clear();
}

void enqueue(const c10::Stream& stream, Entry entry) {
  check_failed();
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  if (entry.over) {
    ++all.collectives;
    entry.started->stream = &line_of(all, stream);
    if (!all.pumping) {
      all.pumping = true;
      std::thread(pump).detach();
    }
  }
  push(all, line_of(all, stream), {std::move(entry), nullptr, nullptr, 0});
  let_run(all);
}

void freed(const c10::Stream& stream, char* address, size_t nbytes) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  line_of(all, stream).freed.push_back({address, nbytes});
}

void reused(const c10::Stream& stream, char* address, size_t nbytes) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  auto& line = line_of(all, stream);
  std::vector<Range> still;
  for (const auto& range : line.freed) {
    auto* first = std::max(range.address, address);
    auto* last = std::min(range.address + range.nbytes, address + nbytes);
    if (first >= last) {
      still.push_back(range);
      continue;
    }
    if (range.address < first) still.push_back({range.address, static_cast<size_t>(first - range.address)});
    if (last < range.address + range.nbytes) still.push_back({last, static_cast<size_t>(range.address + range.nbytes - last)});
  }
  line.freed = std::move(still);
}

Mark mark(const c10::Stream& stream) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  auto& line = line_of(all, stream);
  auto made = std::make_shared<Record>();
  made->stream = &line;
  push(all, line, {{}, nullptr, made, 0});
  let_run(all);
  return made;
}

void wait(const c10::Stream& stream, const Mark& mark) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  push(all, line_of(all, stream), {{}, mark, nullptr, 0});
  let_run(all);
}

bool passed(const Mark& mark) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  touch(all);
  return mark->done;
}

void host_wait(const Mark& mark, const char* why) {
  auto& all = scheduler();
  {
    WithoutPython without;
    auto lock = locked(all.mutex);
    ++all.waits[why];
    run_until(all, lock, *mark);
    all.host_us = std::max(all.host_us, mark->time_us);
  }
  check_failed();
}

namespace {

void drain(Scheduler& all, Locked& lock, c10::DeviceIndex device) {
  std::vector<Mark> ends;
  for (auto& [key, line] : all.lines) {
    if (key.first != device || line->entries.empty()) continue;
    auto end = std::make_shared<Record>();
    end->stream = line.get();
    // Past `push`, which would poison what may still be read.
    all.host_us += kLaunchUs;
    line->entries.push_back({{}, nullptr, end, all.host_us});
    ends.push_back(end);
  }
  for (const auto& end : ends) {
    run_until(all, lock, *end);
    all.host_us = std::max(all.host_us, end->time_us);
  }
}

}  // namespace

void host_wait_device(c10::DeviceIndex device, const char* why) {
  auto& all = scheduler();
  {
    WithoutPython without;
    auto lock = locked(all.mutex);
    ++all.waits[why];
    drain(all, lock, device);
    // Now that nothing on the device can still read it: before, only what the owner was told to wait for would have been done.
    for (auto& [key, line] : all.lines) {
      if (key.first != device) continue;
      poison(*line, line->freed, all.host_us);
    }
    drain(all, lock, device);
  }
  check_failed();
}

c10::DeviceIndex current_device() { return t_device; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "accel: no device ", int(device), "; there are ", int(device_count()));
  return std::exchange(t_device, device);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = t_device;
  auto found = t_stream.find(device);
  return c10::Stream(c10::Stream::UNSAFE, {kType, device}, found == t_stream.end() ? 0 : found->second);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  if (device < 0) device = t_device;
  return c10::Stream(c10::Stream::UNSAFE, {kType, device}, ++all.next_id[device]);
}

void set_schedule(const std::string& mode, uint64_t seed, int changes, int length) {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) host_wait_device(device, "schedule");
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  TORCH_CHECK(mode == "eager" || mode == "lazy" || mode == "random", "accel: a schedule is eager, lazy or random, not ", mode);
  all.mode = mode == "eager" ? Mode::Eager : mode == "lazy" ? Mode::Lazy : Mode::Random;
  all.seed = seed;
  all.steps = 0;
  all.lowest = 1ULL << 32;
  all.host_priority = priority_of(all, 0);
  all.changes.clear();
  for (int i = 0; i < changes; ++i) all.changes.push_back(1 + static_cast<int64_t>(mixed(seed * 77 + i) % length));
  for (auto& [key, line] : all.lines) {
    line->priority = priority_of(all, static_cast<uint64_t>(key.first) * 4096 + static_cast<uint64_t>(key.second) + 1);
    line->clock_us = 0;
  }
  all.next_id.clear();
  all.host_us = 0;
  all.waits.clear();
  all.trace.clear();
}

void close() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.closed = true;
}

std::map<std::string, int64_t> host_waits() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  return all.waits;
}

void reset_host_waits() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.waits.clear();
}

void set_tracing(bool on) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.tracing = on;
}

std::vector<Ran> take_trace() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  return std::exchange(all.trace, {});
}

void fail_kernel_in(int64_t n) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.fail_in = n;
}

void hang_collective_in(int64_t n) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.hang_in = n;
}

bool this_collective_hangs() {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  return all.hang_in > 0 && --all.hang_in == 0;
}

void set_copy_nbytes_per_us(double device_to_host, double host_to_device) {
  auto& all = scheduler();
  auto lock = locked(all.mutex);
  all.down_nbytes_per_us = device_to_host;
  all.up_nbytes_per_us = host_to_device;
}

double copy_cost(size_t nbytes, bool to_device) {
  auto& all = scheduler();
  return 5.0 + static_cast<double>(nbytes) / (to_device ? all.up_nbytes_per_us : all.down_nbytes_per_us);
}

double kernel_cost(size_t nbytes) { return 2.0 + static_cast<double>(nbytes) / 1e6; }

// ---- what torch asks of a device with streams ----

namespace {

struct Event {
  Mark mark;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override { return {kType, exchange_device(device.index())}; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) t_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    t_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    check_failed();
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->mark = mark(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_failed();
    if (event != nullptr) wait(stream, static_cast<Event*>(event)->mark);
  }
  bool queryEvent(void* event) const override {
    check_failed();
    return event == nullptr || passed(static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) host_wait(static_cast<Event*>(event)->mark, "event");
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "accel: both events must be recorded before their times are compared");
    auto& begin = static_cast<Event*>(first)->mark;
    auto& end = static_cast<Event*>(second)->mark;
    TORCH_CHECK(passed(begin) && passed(end), "accel: both events must be completed before their times are compared");
    return (end->time_us - begin->time_us) / 1e3;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const c10::Stream& stream) const override {
    check_failed();
    auto& all = scheduler();
    auto lock = locked(all.mutex);
    return line_of(all, stream).entries.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_wait(mark(stream), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_wait_device(device < 0 ? t_device : device, "device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace accel
