// Every operator of aten: shapes from the meta device at once, values later, by a queued call of the CPU's kernel on aliases
// that own nothing. Memory that is freed under a queued kernel is therefore really free.
#include "accel.h"
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace accel {

std::mutex g_counts_mutex;
std::map<std::string, int64_t> g_synchronous;

std::map<std::string, int64_t> synchronous_operators() {
  std::lock_guard<std::mutex> lock(g_counts_mutex);
  return g_synchronous;
}

at::Tensor kernel_alias(const at::Tensor& tensor) {
  at::Tensor alias;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  if (tensor.storage().data_ptr().get() == nullptr) {
    alias = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  } else {
    alias = at::from_blob(kernel_address(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
  }
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

namespace {

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// ---- what is known of an operator, once ----

struct Facts {
  std::string name;
  bool sizes_by_value;  // its results' sizes depend on values
  bool random;
  bool indexes;
  bool half_in_float;   // the CPU's kernel keeps statistics in the half type, where the meta kernel says float
  int generator = -1;   // the place of its generator among the arguments
  bool only_writes;     // every result is an argument
  bool has_out;
  // Another operator that does this one's work on the CPU.
  std::optional<c10::OperatorHandle> instead;
  bool wants_bias_sizes;
};

std::optional<c10::OperatorHandle> operator_named(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findOp({name, overload});
}

const std::unordered_set<std::string> kHalfInFloat = {
    "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm", "aten::native_group_norm_backward",
    "aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_with_update", "aten::batch_norm_backward",
    "aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"};

const Facts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, Facts> known;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(op.operator_name());
  if (found != known.end()) return found->second;
  const auto& schema = op.schema();
  Facts facts{};
  facts.name = schema.name().substr(schema.name().find("::") + 2);
  for (auto tag : op.getTags()) {
    facts.sizes_by_value |= tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output;
    facts.random |= tag == at::Tag::nondeterministic_seeded;
  }
  facts.indexes = facts.name == "index" || facts.name == "index_put_" || facts.name == "_index_put_impl_" ||
                  facts.name == "_unsafe_index" || facts.name == "_unsafe_index_put" || facts.name == "index_put";
  facts.sizes_by_value &= !facts.indexes;
  facts.half_in_float = kHalfInFloat.count(schema.name()) > 0;
  facts.only_writes = true;
  for (const auto& result : schema.returns()) {
    facts.only_writes &= result.alias_info() != nullptr && result.alias_info()->isWrite();
  }
  const auto& arguments = schema.arguments();
  for (size_t place = 0; place < arguments.size(); ++place) {
    if (arguments[place].name() == "generator") facts.generator = static_cast<int>(place);
    facts.has_out |= arguments[place].is_out();
  }
  if (facts.name == "convolution_overrideable") facts.instead = operator_named("aten::convolution");
  if (facts.name == "convolution_backward_overrideable") {
    facts.instead = operator_named("aten::convolution_backward");
    facts.wants_bias_sizes = true;
  }
  return known.emplace(op.operator_name(), std::move(facts)).first->second;
}

// ---- arguments of one device in place of those of another ----

template <typename Convert>
c10::IValue converted(const c10::IValue& value, Convert convert, c10::Device device) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(convert(tensor));
    return made;
  }
  if (value.isOptionalTensorList() || value.isList()) {
    auto type = value.isList() ? value.toList().elementType() : nullptr;
    if (!value.isOptionalTensorList() && !(type && type->kind() == c10::TypeKind::OptionalType)) return value;
    c10::List<std::optional<at::Tensor>> made;
    for (const c10::IValue& element : value.toListRef()) {
      made.push_back(element.isTensor() ? std::optional<at::Tensor>(convert(element.toTensor())) : std::nullopt);
    }
    return made;
  }
  if (value.isDevice() && value.toDevice().type() == kType) return device;
  return value;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  if (!ours(tensor)) return tensor;
  auto made = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// What a kernel reads from the host is read at issue: the program may change it afterwards.
at::Tensor as_kernel(const at::Tensor& tensor) {
  if (ours(tensor)) return kernel_alias(tensor);
  if (!tensor.defined()) return tensor;
  auto made = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

template <typename Visit>
void each_tensor(const std::vector<c10::IValue>& values, Visit visit) {
  for (const auto& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor() && element.toTensor().defined()) visit(element.toTensor());
      }
    }
  }
}

c10::Device device_of_call(const Facts& facts, const std::vector<c10::IValue>& values) {
  std::optional<c10::Device> device;
  each_tensor(values, [&](const at::Tensor& tensor) {
    if (!ours(tensor)) return;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                *device, " and ", tensor.device(), "! (in ", facts.name, ")");
    device = tensor.device();
  });
  for (const auto& value : values) {
    if (!device && value.isDevice() && value.toDevice().type() == kType) device = value.toDevice();
  }
  if (!device || !device->has_index()) device = c10::Device(kType, current_device());
  if (!facts.indexes) {
    each_tensor(values, [&](const at::Tensor& tensor) {
      TORCH_CHECK(ours(tensor) || (tensor.device().is_cpu() && tensor.dim() == 0),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  tensor.device(), "! (in ", facts.name, ")");
    });
  }
  return *device;
}

size_t nbytes_of(const std::vector<c10::IValue>& values) {
  size_t nbytes = 0;
  each_tensor(values, [&](const at::Tensor& tensor) { nbytes += tensor.nbytes(); });
  return nbytes;
}

// ---- the CPU's kernel ----

bool is_half(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         (value.toTensor().scalar_type() == at::kBFloat16 || value.toTensor().scalar_type() == at::kHalf);
}

// torch's own convolution says its bias's sizes, which stand after gradient, input and weight: as many as there are channels.
void insert_bias_sizes(const Facts& facts, std::vector<c10::IValue>& values) {
  if (facts.wants_bias_sizes) values.insert(values.begin() + 3, c10::IValue(c10::List<int64_t>{values[0].toTensor().size(1)}));
}

// Runs an operator on the CPU; `seed` is what its random numbers follow from.
torch::jit::Stack run_on_cpu(const c10::OperatorHandle& op, const Facts& facts, std::vector<c10::IValue> values,
                             std::optional<uint64_t> seed) {
  std::vector<std::pair<at::Tensor, at::Tensor>> in_float;
  if (facts.half_in_float) {
    for (auto& value : values) {
      if (!is_half(value)) continue;
      auto half = value.toTensor();
      value = half.to(at::kFloat);
      in_float.emplace_back(half, value.toTensor());
    }
  }
  insert_bias_sizes(facts, values);
  auto host = at::detail::getDefaultCPUGenerator();
  at::Tensor before;
  if (seed) {
    if (facts.generator >= 0) {
      values[facts.generator] = at::detail::createCPUGenerator(*seed);
    } else {
      std::lock_guard<std::mutex> lock(host.mutex());
      before = host.get_state();
      host.set_current_seed(*seed);
    }
  }
  torch::jit::Stack stack(values.begin(), values.end());
  auto restore = [&] {
    if (!before.defined()) return;
    std::lock_guard<std::mutex> lock(host.mutex());
    host.set_state(before);
  };
  try {
    (facts.instead ? *facts.instead : op).callBoxed(&stack);
  } catch (...) {
    restore();
    throw;
  }
  restore();
  if (op.schema().is_mutable()) {
    for (auto& [half, computed] : in_float) half.copy_(computed);
  }
  return stack;
}

void land(const c10::IValue& into, const c10::IValue& computed) {
  if (into.isTensor()) {
    if (into.toTensor().defined() && into.toTensor().numel() > 0) into.toTensor().copy_(computed.toTensor());
  } else if (into.isTensorList()) {
    auto targets = into.toTensorVector(), sources = computed.toTensorVector();
    for (size_t i = 0; i < targets.size(); ++i) land(targets[i], sources[i]);
  }
}

std::optional<uint64_t> seed_of(const Facts& facts, const std::vector<c10::IValue>& values, c10::Device device) {
  if (!facts.random && facts.generator < 0) return std::nullopt;
  std::optional<at::Generator> given;
  if (facts.generator >= 0 && !values[facts.generator].isNone()) given = values[facts.generator].toGenerator();
  return next_seed(given, device.index());
}

at::Tensor fresh(const at::Tensor& shape, c10::Device device) {
  if (!shape.defined()) return {};
  return empty_strided(shape.sizes(), shape.strides(), shape.scalar_type(), device);
}

// Pushes the results: arguments that were written, and `made` for the others.
void push_results(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& values, const std::vector<c10::IValue>& made,
                  torch::jit::Stack* stack) {
  const auto& arguments = schema.arguments();
  for (size_t result = 0; result < schema.returns().size(); ++result) {
    const auto* alias = schema.returns()[result].alias_info();
    if (alias == nullptr || !alias->isWrite()) {
      stack->push_back(made[result]);
      continue;
    }
    for (size_t place = 0; place < arguments.size(); ++place) {
      const auto* other = arguments[place].alias_info();
      if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) {
        stack->push_back(values[place]);
        break;
      }
    }
  }
}

// The program learns sizes or values from the device: it waits, as on CUDA.
void run_now(const c10::OperatorHandle& op, const Facts& facts, const std::vector<c10::IValue>& values, c10::Device device,
             torch::jit::Stack* stack) {
  {
    std::lock_guard<std::mutex> lock(g_counts_mutex);
    ++g_synchronous[facts.name];
  }
  auto seed = seed_of(facts, values, device);
  host_wait(mark(current_stream(device.index())), facts.name.c_str());
  std::vector<c10::IValue> made;
  {
    Quiet quiet;
    std::vector<c10::IValue> inputs;
    for (const auto& value : values) inputs.push_back(converted(value, as_kernel, at::kCPU));
    made = run_on_cpu(op, facts, std::move(inputs), seed);
  }
  auto uploaded = [&](const at::Tensor& tensor) -> at::Tensor {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    auto result = fresh(tensor, device);
    if (tensor.numel() == 0) return result;
    // By an entry: what the stream queued before, poison of the memory's last owner among it, comes first.
    enqueue(current_stream(device.index()), {facts.name, kernel_cost(tensor.nbytes()), [to = kernel_alias(result), tensor] {
              Quiet quiet;
              to.copy_(tensor);
            }});
    return result;
  };
  for (auto& value : made) value = converted(value, uploaded, device);
  push_results(op.schema(), values, made, stack);
}

bool by_mask(const std::vector<c10::IValue>& values) {
  if (values.size() < 2) return false;
  bool found = false;
  std::vector<c10::IValue> indices{values[1]};
  each_tensor(indices, [&](const at::Tensor& tensor) { found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte; });
  return found;
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& facts = facts_of(op);
  auto count = schema.arguments().size();
  std::vector<c10::IValue> values(stack->end() - static_cast<int64_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  auto device = device_of_call(facts, values);
  c10::DeviceGuard on(device);
  check_failed();
  if (facts.sizes_by_value || (facts.indexes && by_mask(values))) return run_now(op, facts, values, device, stack);

  std::vector<c10::IValue> meta;
  torch::jit::Stack shapes;
  {
    Quiet quiet;
    for (const auto& value : values) meta.push_back(converted(value, as_meta, at::kMeta));
    if (facts.generator >= 0) meta[facts.generator] = c10::IValue();
    shapes.assign(meta.begin(), meta.end());
    insert_bias_sizes(facts, shapes);
    try {
      (facts.instead ? *facts.instead : op).callBoxed(&shapes);
    } catch (const c10::NotImplementedError&) {
      if (!facts.only_writes || facts.has_out) return run_now(op, facts, values, device, stack);
      shapes.assign(schema.returns().size(), c10::IValue());
    }
  }
  // An `out` of another size is given its result's.
  for (size_t place = 0; facts.has_out && place < count; ++place) {
    if (!schema.arguments()[place].is_out() || !values[place].isTensor()) continue;
    const auto& wanted = meta[place].toTensor();
    const auto& given = values[place].toTensor();
    if (wanted.sizes() != given.sizes()) given.resize_(wanted.sizes());
  }
  std::vector<c10::IValue> made(shapes.begin(), shapes.end()), targets(made.size());
  for (size_t result = 0; result < made.size(); ++result) {
    const auto* alias = schema.returns()[result].alias_info();
    if (alias != nullptr && alias->isWrite()) continue;
    TORCH_CHECK(alias == nullptr, "accel: the view ", facts.name, " has no kernel of its own");
    made[result] = converted(made[result], [&](const at::Tensor& tensor) { return fresh(tensor, device); }, device);
    targets[result] = converted(made[result], [](const at::Tensor& tensor) { return ours(tensor) ? kernel_alias(tensor) : tensor; }, at::kCPU);
  }
  std::vector<c10::IValue> inputs;
  {
    Quiet quiet;
    for (const auto& value : values) inputs.push_back(converted(value, as_kernel, at::kCPU));
  }
  // Some of the CPU's kernels resize an `out` on the way; a view of the device's memory cannot be, so it is given an empty one.
  std::vector<std::pair<size_t, at::Tensor>> outs;
  for (size_t place = 0; facts.has_out && place < count; ++place) {
    if (schema.arguments()[place].is_out() && inputs[place].isTensor()) outs.emplace_back(place, inputs[place].toTensor());
  }
  auto seed = seed_of(facts, values, device);
  auto kernel = [op, &facts, inputs = std::move(inputs), outs = std::move(outs), targets = std::move(targets), seed]() mutable {
    Quiet quiet;
    for (auto& [place, out] : outs) inputs[place] = at::empty({0}, out.options());
    auto computed = run_on_cpu(op, facts, inputs, seed);
    for (auto& [place, out] : outs) land(out, inputs[place]);
    for (size_t result = 0; result < targets.size(); ++result) land(targets[result], computed[result]);
  };
  enqueue(current_stream(device.index()), {facts.name, kernel_cost(nbytes_of(values) + nbytes_of(made)), std::move(kernel)});
  push_results(schema, values, made, stack);
}

// ---- memory and views ----

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(c10::Device(kType, device && device->has_index() ? device->index() : current_device()));
  return at::detail::empty_generic(sizes, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())), format);
}

at::Tensor empty_strided_kernel(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  return empty_strided(sizes, strides, dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype())),
                       c10::Device(kType, device && device->has_index() ? device->index() : current_device()));
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto device = storage->device();
  c10::DeviceGuard on(device);
  auto data = allocator()->allocate(nbytes);
  auto kept = std::min(nbytes, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr) {
    auto* to = kernel_address(data.get());
    auto* from = kernel_address(storage->data());
    enqueue(current_stream(device.index()), {"resize", kernel_cost(kept), [=] { std::memcpy(to, from, kept); }});
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  auto needed = static_cast<size_t>(impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() > 0 && needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return set_storage(self, none, 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }

// ---- copies ----

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  TORCH_CHECK(source.defined() && target.defined(), "accel: a copy of nothing");
  if (target.numel() == 0) return target;
  auto device = ours(target) ? target.device() : source.device();
  c10::DeviceGuard on(device);
  auto stream = current_stream(device.index());
  Quiet quiet;
  if (ours(source) && ours(target)) {
    if (source.device() != target.device()) {
      auto from = current_stream(source.device().index());
      wait(from, mark(stream));
      stream = from;
    }
    auto from = kernel_alias(source.expand_as(target)), to = kernel_alias(target);
    enqueue(stream, {"copy_", kernel_cost(source.nbytes() + target.nbytes()), [=] { Quiet in; to.copy_(from); }});
    if (source.device() != target.device()) wait(current_stream(target.device().index()), mark(stream));
    return target;
  }
  const auto& host = ours(target) ? source : target;
  bool direct = is_pinned(host.data_ptr()) && host.is_contiguous() && host.scalar_type() == (ours(target) ? target : source).scalar_type() &&
                (ours(target) ? target : source).is_contiguous() && source.sizes() == target.sizes() && !host.is_conj() && !host.is_neg();
  if (ours(target)) {
    auto to = kernel_alias(target);
    auto cost = copy_cost(target.nbytes(), true);
    if (direct) {
      auto* from = host.data_ptr();
      auto* at = kernel_address(target.data_ptr());
      auto nbytes = target.nbytes();
      enqueue(stream, {"copy h2d", cost, [=] { std::memcpy(at, from, nbytes); }});
      auto end = mark(stream);
      use_pinned(from, end);
      if (!non_blocking) host_wait(end, "copy h2d");
      return target;
    }
    // Pageable memory is staged at issue: the program may change it as soon as this returns.
    auto staged = source.expand_as(target).clone();
    enqueue(stream, {"copy h2d", cost, [=] { Quiet in; to.copy_(staged); }});
    return target;
  }
  auto cost = copy_cost(source.nbytes(), false);
  if (direct) {
    auto* from = kernel_address(source.data_ptr());
    auto* at = host.data_ptr();
    auto nbytes = host.nbytes();
    enqueue(stream, {"copy d2h", cost, [=] { std::memcpy(at, from, nbytes); }});
    auto end = mark(stream);
    use_pinned(at, end);
    if (!non_blocking) host_wait(end, "copy d2h");
    return target;
  }
  auto from = kernel_alias(source.expand_as(target));
  auto to = target;
  enqueue(stream, {"copy d2h", cost, [=] { Quiet in; to.copy_(from); }});
  host_wait(mark(stream), "copy d2h");
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  host_wait(mark(current_stream(self.device().index())), "item");
  Quiet quiet;
  return kernel_alias(self).item();
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  host_wait(mark(current_stream(self.device().index())), "equal");
  Quiet quiet;
  return kernel_alias(self).equal(kernel_alias(other));
}

// ---- cells that the CPU has no fused kernel for ----

template <typename Compute>
std::vector<at::Tensor> queued(const char* name, std::vector<at::Tensor> inputs, std::vector<std::vector<int64_t>> shapes, Compute compute) {
  auto device = inputs[0].device();
  c10::DeviceGuard on(device);
  std::vector<at::Tensor> results, targets, sources;
  for (const auto& shape : shapes) {
    results.push_back(shape.empty() ? at::Tensor() : at::empty(shape, inputs[0].options()));
    targets.push_back(shape.empty() ? at::Tensor() : kernel_alias(results.back()));
  }
  for (const auto& input : inputs) sources.push_back(input.defined() ? kernel_alias(input) : input);
  enqueue(current_stream(device.index()), {name, kernel_cost(inputs[0].nbytes() * 4), [=] {
            Quiet quiet;
            auto computed = compute(sources);
            for (size_t i = 0; i < targets.size(); ++i) {
              if (targets[i].defined()) targets[i].copy_(computed[i]);
            }
          }});
  return results;
}

using Tensors = std::vector<at::Tensor>;
at::Tensor or_zero(const at::Tensor& tensor, const at::Tensor& like) { return tensor.defined() ? tensor : at::zeros_like(like); }
at::Tensor plus(const at::Tensor& tensor, const at::Tensor& other) { return other.defined() ? tensor + other : tensor; }
at::Tensor given(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& cell,
                                                         const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto made = queued("_thnn_fused_lstm_cell", {from_input, from_hidden, cell, given(input_bias), given(hidden_bias)},
                     {cell.sizes().vec(), cell.sizes().vec(), from_input.sizes().vec()}, [](const Tensors& in) -> Tensors {
                       auto gates = plus(plus(in[0] + in[1], in[3]), in[4]).chunk(4, 1);
                       auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
                       auto next = f * in[2] + i * g;
                       return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
                     });
  return {made[0], made[1], made[2]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& grad_hidden, const std::optional<at::Tensor>& grad_cell,
                                                                  const at::Tensor& cell, const at::Tensor& next, const at::Tensor& workspace, bool has_bias) {
  auto bias = has_bias ? std::vector<int64_t>{workspace.size(1)} : std::vector<int64_t>{};
  auto made = queued("_thnn_fused_lstm_cell_backward_impl", {cell, next, workspace, given(grad_hidden), given(grad_cell)},
                     {workspace.sizes().vec(), cell.sizes().vec(), bias}, [](const Tensors& in) -> Tensors {
                       auto gates = in[2].chunk(4, 1);
                       auto i = gates[0], f = gates[1], g = gates[2], o = gates[3];
                       auto hidden = or_zero(in[3], in[0]), through = in[1].tanh();
                       auto grad = hidden * o * (1 - through * through) + or_zero(in[4], in[0]);
                       auto all = at::cat({grad * g * i * (1 - i), grad * in[0] * f * (1 - f), grad * i * (1 - g * g), hidden * through * o * (1 - o)}, 1);
                       return {all, grad * f, all.sum(0)};
                     });
  return {made[0], made[1], made[2]};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& from_input, const at::Tensor& from_hidden, const at::Tensor& hidden,
                                            const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  auto made = queued("_thnn_fused_gru_cell", {from_input, from_hidden, hidden, given(input_bias), given(hidden_bias)},
                     {hidden.sizes().vec(), {hidden.size(0), hidden.size(1) * 5}}, [](const Tensors& in) -> Tensors {
                       auto x = plus(in[0], in[3]).chunk(3, 1), h = plus(in[1], in[4]).chunk(3, 1);
                       auto r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid();
                       auto n = (x[2] + r * h[2]).tanh();
                       return {n + z * (in[2] - n), at::cat({r, z, n, in[2], h[2]}, 1)};
                     });
  return {made[0], made[1]};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hidden, const at::Tensor& workspace, bool has_bias) {
  auto rows = grad_hidden.size(0), width = grad_hidden.size(1);
  auto bias = has_bias ? std::vector<int64_t>{3 * width} : std::vector<int64_t>{};
  auto made = queued("_thnn_fused_gru_cell_backward", {grad_hidden, workspace}, {{rows, 3 * width}, {rows, 3 * width}, {rows, width}, bias, bias},
                     [](const Tensors& in) -> Tensors {
                       auto kept = in[1].chunk(5, 1);
                       auto r = kept[0], z = kept[1], n = kept[2], hidden = kept[3], from_hidden = kept[4];
                       auto to_z = in[0] * (hidden - n) * (1 - z) * z, to_n = in[0] * (1 - z) * (1 - n * n);
                       auto to_r = to_n * from_hidden * (1 - r) * r;
                       auto input = at::cat({to_r, to_z, to_n}, 1), state = at::cat({to_r, to_z, to_n * r}, 1);
                       return {input, state, in[0] * z, input.sum(0), state.sum(0)};
                     });
  return {made[0], made[1], made[2], made[3], made[4]};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_memory_format);
  library.impl("empty_strided", empty_strided_kernel);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("equal", equal);
  // What torch would compute of other operators, in another order of sums than the CPU's kernels, or not at all.
  for (const char* name : {"native_layer_norm", "native_group_norm", "convolution_overrideable", "convolution_backward_overrideable"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, c10::Device device) {
  c10::DeviceGuard on(device);
  return at::detail::empty_strided_generic(sizes, strides, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void resize_storage_bytes(const c10::Storage& storage, size_t nbytes) { resize_storage(storage.unsafeGetStorageImpl(), nbytes); }

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace accel

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &accel::math_attention)
}  // namespace at::native
