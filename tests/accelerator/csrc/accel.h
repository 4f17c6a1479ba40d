// What the accelerator's files share: addresses, streams, events, the scheduler, the allocator.
//
// The device is a simulation that computes: its kernels run on the CPU, in an order that a seeded scheduler chooses.
// A program that orders its work by events and streams gets the same bits under every order; one that forgot a wait does not.
#pragma once

#include <Python.h>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace accel {

// Without Python's lock while it lives, if this thread has it. What runs on the device may need Python's lock (Gloo's flight
// recorder does), so nobody may wait for the device, nor for a lock of ours, and keep Python's.
class WithoutPython {
 public:
  WithoutPython() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutPython(const WithoutPython&) = delete;
  WithoutPython& operator=(const WithoutPython&) = delete;

 private:
  PyThreadState* state_;
};

// What has run is destroyed here, not where it ran: it may own the last reference to an object of Python's, or to memory of the device
// (a work of Gloo's keeps its thread's state, hooks of autograd included), and freeing these takes locks of ours.
void destroy_done();

// A lock of ours. When a thread has left the last one, it destroys what has run.
class Locked {
 public:
  explicit Locked(std::mutex& mutex) : lock_(mutex, std::try_to_lock) {
    if (!lock_.owns_lock()) {
      WithoutPython without;
      lock_.lock();
    }
    ++depth();
  }
  ~Locked() {
    if (lock_.owns_lock()) unlock();
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  void lock() {
    lock_.lock();
    ++depth();
  }
  void unlock() {
    lock_.unlock();
    if (--depth() == 0) destroy_done();
  }

 private:
  static int& depth() {
    static thread_local int of_this_thread = 0;
    return of_this_thread;
  }
  std::unique_lock<std::mutex> lock_;
};

inline Locked locked(std::mutex& mutex) { return Locked(mutex); }

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Stream;

// One `record` of an event: the place in a stream up to which whoever waits must see the work done.
struct Record {
  Stream* stream = nullptr;
  bool done = false;
  double time_us = 0;
};
using Mark = std::shared_ptr<Record>;

// ---- memory.cpp -------------------------------------------------------------------------------------------------

c10::DeviceIndex device_count();
size_t capacity();

// The address by which a kernel reaches what a tensor calls `device_address`.
void* kernel_address(const void* device_address);
bool on_device(const void* address);
c10::DeviceIndex device_of(const void* address);
// Device memory in whole pages, as cudaMalloc and cudaFree; null if there is none.
void* reserve(c10::DeviceIndex device, size_t nbytes);
void release(void* address, size_t nbytes);

c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
// Host memory of the program's own that copies may use without staging, as cudaHostRegister; false if it is known already.
bool register_host(void* address, size_t nbytes);
bool unregister_host(void* address);
size_t pinned_nbytes();
// A copy uses this pinned memory until `user` has passed.
void use_pinned(const void* address, const Mark& user);

// ---- streams.cpp ------------------------------------------------------------------------------------------------

// What a stream does at one place: a kernel, a copy, or a collective, which starts and is over later.
struct Entry {
  std::string name;
  double cost_us = 0;
  std::function<void()> run;
  // A collective: `run` starts it, `over` asks whether it has ended and then lands its values.
  std::function<bool()> over;
  // What must have started before this one may start (collectives of one group start in the order of issue).
  Mark after_start;
  Mark started;
};

enum class Mode { Eager, Lazy, Random };

void enqueue(const c10::Stream& stream, Entry entry);
Mark mark(const c10::Stream& stream);
void wait(const c10::Stream& stream, const Mark& mark);
bool passed(const Mark& mark);
// The host waits; entries run in the scheduler's order until the mark is passed. `why` is counted.
void host_wait(const Mark& mark, const char* why);
void host_wait_device(c10::DeviceIndex device, const char* why);

// Memory of `stream`'s that the program gave back, and took again; see Note [Poison].
void freed(const c10::Stream& stream, char* address, size_t nbytes);
void reused(const c10::Stream& stream, char* address, size_t nbytes);
// The process ends: nothing runs any more, as its device's work would end with it.
void close();

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
// Raises the error of a kernel that failed earlier; like a CUDA context, the device stays failed.
void check_failed();
bool has_failed();
void forget_failure();

void set_schedule(const std::string& mode, uint64_t seed, int changes, int length);
std::map<std::string, int64_t> host_waits();
void reset_host_waits();

struct Ran {
  c10::DeviceIndex device;
  int64_t stream;
  std::string name;
  double start_us;
  double end_us;
};
void set_tracing(bool on);
std::vector<Ran> take_trace();

// Faults. Each counts down from `n`; 0 turns it off.
void fail_kernel_in(int64_t n);
void hang_collective_in(int64_t n);
bool this_collective_hangs();
void set_copy_nbytes_per_us(double device_to_host, double host_to_device);
double copy_cost(size_t nbytes, bool to_device);
double kernel_cost(size_t nbytes);

// ---- allocator.cpp ----------------------------------------------------------------------------------------------

c10::DeviceAllocator* allocator();
void set_memory_limit(c10::DeviceIndex device, size_t nbytes);
void fail_allocation_in(int64_t n);

struct BlockSeen {
  size_t address, nbytes, requested;
  const char* state;
};
struct SegmentSeen {
  c10::DeviceIndex device;
  size_t address, nbytes, allocated, active, requested;
  int64_t stream;
  bool large;
  std::vector<BlockSeen> blocks;
};
struct HistoryRow {
  const char* action;
  size_t address, nbytes;
  int64_t stream;
  int64_t time_us;
};
std::vector<SegmentSeen> segments();
void record_history(bool on, size_t most);
std::vector<HistoryRow> history(c10::DeviceIndex device);

}  // namespace accel
