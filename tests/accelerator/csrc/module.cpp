// The generator, torch's hooks, and the functions of the Python module.
#include "accel.h"
#include "operators.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/Generator.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace accel {

void bind_collectives(pybind11::module& module);

namespace {

// As CUDA's: a seed and an offset that moves on with every kernel that draws, fixed at issue.
struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex device)
      : GeneratorImpl(c10::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() && state.device().is_cpu(),
                "accel: a generator's state is uint8 [16] on the CPU");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }
  GeneratorImpl* clone_impl() const override {
    auto* made = new Random(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_of(c10::DeviceIndex device) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) all->push_back(at::make_generator<Random>(index));
    return all;
  }();
  return (*made)[device < 0 ? current_device() : device];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_of(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Device getDeviceFromPtr(void* data) const override { return {kType, device_of(data)}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize_storage_bytes(storage, nbytes); }
};

}  // namespace

at::Generator default_generator(c10::DeviceIndex device) { return default_of(device); }
at::Generator new_generator(c10::DeviceIndex device) { return at::make_generator<Random>(device < 0 ? current_device() : device); }

uint64_t next_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device) {
  auto generator = given.value_or(default_of(device));
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto offset = generator.get_offset();
  generator.set_offset(offset + 4);
  uint64_t mixed = generator.current_seed() * 0x9e3779b97f4a7c15ULL + offset * 0xbf58476d1ce4e5b9ULL;
  return (mixed ^ (mixed >> 29)) & 0x7fffffffffffffffULL;
}

namespace py = pybind11;

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  using Free = py::call_guard<py::gil_scoped_release>;

  module.def("device_count", [] { return int(device_count()); });
  module.def("current_device", [] { return int(current_device()); });
  module.def("set_device", [](int device) { exchange_device(static_cast<c10::DeviceIndex>(device)); });
  module.def("exchange_device", [](int device) { return int(exchange_device(static_cast<c10::DeviceIndex>(device))); });
  module.def("synchronize", [](int device) { host_wait_device(static_cast<c10::DeviceIndex>(device), "device"); }, Free());
  module.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_of(static_cast<c10::DeviceIndex>(device))));
  });

  module.def("close", &close);
  module.def("set_schedule", &set_schedule, py::arg("mode"), py::arg("seed") = 0, py::arg("changes") = 3, py::arg("length") = 2000, Free());
  module.def("host_waits", &host_waits);
  module.def("reset_host_waits", &reset_host_waits);
  module.def("synchronous_operators", &synchronous_operators);
  module.def("set_tracing", &set_tracing);
  module.def("take_trace", [] {
    py::list rows;
    for (const auto& ran : take_trace()) rows.append(py::make_tuple(int(ran.device), ran.stream, ran.name, ran.start_us, ran.end_us));
    return rows;
  });

  module.def("fail_kernel_in", &fail_kernel_in);
  module.def("forget_failure", &forget_failure);
  module.def("fail_allocation_in", &fail_allocation_in);
  module.def("hang_collective_in", &hang_collective_in);
  module.def("set_copy_nbytes_per_us", &set_copy_nbytes_per_us);

  module.def("register_host", [](uintptr_t address, size_t nbytes) { return register_host(reinterpret_cast<void*>(address), nbytes); });
  module.def("unregister_host", [](uintptr_t address) { return unregister_host(reinterpret_cast<void*>(address)); }, Free());
  module.def("pinned_nbytes", &pinned_nbytes);

  module.def("set_memory_limit", [](int device, size_t nbytes) { set_memory_limit(static_cast<c10::DeviceIndex>(device), nbytes); });
  module.def("segments", [] {
    py::list all;
    for (const auto& segment : segments()) {
      py::list blocks;
      for (const auto& block : segment.blocks) {
        blocks.append(py::dict(py::arg("address") = block.address, py::arg("size") = block.nbytes,
                               py::arg("requested_size") = block.requested, py::arg("state") = block.state, py::arg("frames") = py::list()));
      }
      all.append(py::dict(py::arg("device") = int(segment.device), py::arg("address") = segment.address, py::arg("total_size") = segment.nbytes,
                          py::arg("allocated_size") = segment.allocated, py::arg("active_size") = segment.active,
                          py::arg("requested_size") = segment.requested, py::arg("stream") = segment.stream,
                          py::arg("segment_type") = segment.large ? "large" : "small", py::arg("segment_pool_id") = py::make_tuple(0, 0),
                          py::arg("is_expandable") = false, py::arg("frames") = py::list(), py::arg("blocks") = blocks));
    }
    return all;
  });
  module.def("record_history", &record_history);
  module.def("history", [](int device) {
    py::list rows;
    for (const auto& row : history(static_cast<c10::DeviceIndex>(device))) {
      rows.append(py::dict(py::arg("action") = row.action, py::arg("addr") = row.address, py::arg("size") = row.nbytes,
                           py::arg("stream") = row.stream, py::arg("time_us") = row.time_us, py::arg("frames") = py::list()));
    }
    return rows;
  });
  bind_collectives(module);
}

}  // namespace accel
