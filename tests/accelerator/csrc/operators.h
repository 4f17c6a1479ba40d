// What operators need of each other: aliases of device memory for kernels, and the state in which a kernel runs.
#pragma once

#include "accel.h"

#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

namespace accel {

// A kernel sees none of the program's modes: no autograd, autocast, dispatch mode or functional transformation.
struct Quiet {
  c10::impl::ExcludeDispatchKeyGuard keys{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
                                          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                                               c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                                               c10::DispatchKey::FuncTorchDynamicLayerFrontMode})};
};

// The tensor's memory as kernels reach it; it owns nothing.
at::Tensor kernel_alias(const at::Tensor& tensor);
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, c10::Device device);
void resize_storage_bytes(const c10::Storage& storage, size_t nbytes);
// Operators for which the host had to wait because nothing says their results' sizes, with counts.
std::map<std::string, int64_t> synchronous_operators();

// generator.cpp: what the random numbers of one kernel follow from; the generator's offset moves on.
uint64_t next_seed(const std::optional<at::Generator>& given, c10::DeviceIndex device);
at::Generator default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

}  // namespace accel
