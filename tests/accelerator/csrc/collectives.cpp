// A backend of c10d around Gloo: collectives are entries of streams. `wait()` orders the current stream, not the host.
//
// An asynchronous collective runs on the group's stream, a synchronous one on the current stream, as NCCL's. It reads its inputs
// when it starts and writes its outputs when it ends. Collectives of one group start in the order of issue.
#include "accel.h"
#include "operators.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace accel {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using Milliseconds = std::chrono::milliseconds;
using Gloo = c10::intrusive_ptr<c10d::Backend>;

// What a group's collectives and their works share; it outlives the group.
struct Shared {
  std::mutex mutex;
  std::string error;
  bool aborted = false;
  std::string failed() {
    std::lock_guard<std::mutex> lock(mutex);
    return error;
  }
  void fail(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex);
    if (error.empty()) error = text;
  }
};

[[noreturn]] void raise(const std::string& text) {
  throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

struct AccelWork final : c10d::Work {
  AccelWork(int rank, OpType type, Tensors kept, Tensors results, c10::Stream stream, std::shared_ptr<Shared> shared)
      : Work(rank, type), kept_(std::move(kept)), results_(std::move(results)), stream_(stream), shared_(std::move(shared)) {}

  bool isCompleted() override { return !shared_->failed().empty() || passed(end); }
  bool isSuccess() const override { return shared_->failed().empty(); }
  std::exception_ptr exception() const override {
    auto text = shared_->failed();
    if (text.empty()) return nullptr;
    return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text));
  }
  bool wait(Milliseconds = kNoTimeout) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    auto text = shared_->failed();
    if (!text.empty()) raise(text);
    accel::wait(current_stream(stream_.device_index()), end);
    if (opType_ == OpType::BARRIER) {
      host_wait(end, "barrier");
      text = shared_->failed();
      if (!text.empty()) raise(text);
    }
    // The current stream is ordered behind it now, and the tensors were allocated for that one.
    kept_.clear();
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{stream_.device()});
      c10::StreamGuard on(stream_);
      future_->markCompleted(c10::IValue(results_));
    }
    return future_;
  }
  void abort() override { shared_->fail("accel: the collective was aborted"); }

  Mark end;

 private:
  Tensors kept_, results_;
  c10::Stream stream_;
  std::shared_ptr<Shared> shared_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A Gloo call under way. Gloo's point-to-point works end only when somebody waits for them: a thread of their own does.
struct Running {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::shared_ptr<std::atomic<int>> waited = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<std::string> error = std::make_shared<std::string>();
  bool by_thread = false;
  void add(const c10::intrusive_ptr<c10d::Work>& work, bool point_to_point) {
    works.push_back(work);
    if (!point_to_point) return;
    by_thread = true;
    ++*waited;
    std::thread([work, waited = waited, error = error] {
      try {
        work->wait();
      } catch (const std::exception& failure) {
        *error = failure.what();
      }
      --*waited;
    }).detach();
  }
  // Whether all have ended; raises what one failed with.
  bool over() const {
    if (by_thread) {
      if (*waited > 0) return false;
      TORCH_CHECK(error->empty(), *error);
      return true;
    }
    for (const auto& work : works) {
      if (!work->isCompleted()) return false;
    }
    for (const auto& work : works) work->wait();
    return true;
  }
};

// One collective between issue and end: host copies of what it reads, Gloo's calls, and what lands.
struct Call {
  Tensors inputs, outputs;  // aliases
  std::function<void(Call&)> start;
  std::function<void(Call&)> land;
  Tensors given, read, written;  // host tensors: the inputs as they were, the same for Gloo to work on, what is to land
  Running running;
  bool point_to_point = false;
  bool hangs = false;
  std::chrono::steady_clock::time_point began;
};

class Group final : public c10d::Backend {
 public:
  Group(Gloo gloo, int rank, int size, Milliseconds timeout) : Backend(rank, size), gloo_(std::move(gloo)), timeout_(timeout) {}

  const std::string getBackendName() const override { return "accel"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void abort() override { shared_->fail("accel: the group was aborted"); }
  // What was issued ends first, as NCCL's does; `abort` is for what shall not.
  void shutdown() override {
    if (shared_->failed().empty() && last_started_ && !has_failed()) host_wait_device(last_device_, "shutdown");
    shared_->fail("accel: the group was shut down");
  }
  c10d::ErrorType getError() override {
    return shared_->failed().empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  void startCoalescing() override { coalescing_ = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing_ = false;
    auto calls = std::exchange(coalesced_, {});
    TORCH_CHECK(!calls.empty(), "accel: nothing was coalesced");
    return issue("coalesced", OpType::COALESCED, std::move(calls), true);
  }

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return all("broadcast", OpType::BROADCAST, tensors, tensors, options.asyncOp, [=, this](Call& call) {
      for (size_t i = 0; i < call.read.size(); ++i) {
        call.written.push_back(call.read[i]);
        Tensors one{call.read[i]};
        c10d::BroadcastOptions each;
        each.rootRank = options.rootRank;
        call.running.add(gloo_->broadcast(one, each), false);
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all("allreduce", OpType::ALLREDUCE, tensors, tensors, options.asyncOp, [=, this](Call& call) {
      for (auto& tensor : call.read) call.written.push_back(reduced(call, tensor, options.reduceOp));
    }, finish(options.reduceOp));
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    bool root = getRank() == options.rootRank;
    auto landing = finish(options.reduceOp);
    return all("reduce", OpType::REDUCE, tensors, tensors, options.asyncOp, [=, this](Call& call) {
      for (auto& tensor : call.read) call.written.push_back(reduced(call, tensor, options.reduceOp));
    }, [=](Call& call) {
      if (root) landing(call);
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return gather_into("all_gather", OpType::_ALLGATHER_BASE, outputs, inputs, options.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return gather_into("all_gather", OpType::ALLGATHER_COALESCED, outputs, inputs, options.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors flat;
    for (auto& each : outputs) flat.insert(flat.end(), each.begin(), each.end());
    return all("all_gather", OpType::ALLGATHER, flat, inputs, options.asyncOp, [=, this](Call& call) {
      for (auto& tensor : call.read) {
        std::vector<Tensors> gathered(1);
        for (int rank = 0; rank < getSize(); ++rank) gathered[0].push_back(at::empty_like(call.outputs[call.written.size() + rank], at::MemoryFormat::Contiguous));
        Tensors one{tensor};
        call.running.add(gloo_->allgather(gathered, one), false);
        call.written.insert(call.written.end(), gathered[0].begin(), gathered[0].end());
      }
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return scatter_from("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return scatter_from("reduce_scatter", OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& each : inputs) flat.insert(flat.end(), each.begin(), each.end());
    auto size = static_cast<size_t>(getSize());
    return all("reduce_scatter", OpType::REDUCE_SCATTER, outputs, flat, options.asyncOp, [=, this](Call& call) {
      for (size_t i = 0; i < call.read.size(); ++i) {
        auto sum = reduced(call, call.read[i], options.reduceOp);
        if (i % size == static_cast<size_t>(getRank())) call.written.push_back(sum);
      }
    }, finish(options.reduceOp));
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                               std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return all("all_to_all", OpType::ALLTOALL_BASE, outputs, inputs, options.asyncOp,
               [=, this](Call& call) mutable {
                 call.written.push_back(at::empty_like(call.outputs[0], at::MemoryFormat::Contiguous));
                 call.running.add(gloo_->alltoall_base(call.written[0], call.read[0], output_sizes, input_sizes), false);
               });
  }
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return all("all_to_all", OpType::ALLTOALL, outputs, inputs, options.asyncOp, [=, this](Call& call) {
      auto lengths = [](const Tensors& tensors) {
        std::vector<int64_t> found;
        for (const auto& tensor : tensors) found.push_back(tensor.numel());
        return found;
      };
      auto to = lengths(call.read), from = lengths(call.outputs);
      Tensors flat;
      for (const auto& tensor : call.read) flat.push_back(tensor.reshape(-1));
      int64_t count = 0;
      for (auto length : from) count += length;
      auto sent = at::cat(flat), received = at::empty({count}, sent.options());
      int64_t at = 0;
      for (size_t i = 0; i < from.size(); at += from[i++]) call.written.push_back(received.narrow(0, at, from[i]).view(call.outputs[i].sizes()));
      call.running.add(gloo_->alltoall_base(received, sent, from, to), false);  // takes the lengths for itself
    });
  }

  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    Tensors flat;
    if (!outputs.empty()) flat = outputs[0];
    return all("gather", OpType::GATHER, flat, inputs, options.asyncOp, [=, this](Call& call) {
      std::vector<Tensors> gathered;
      if (getRank() == options.rootRank) {
        gathered.emplace_back();
        for (auto& output : call.outputs) gathered[0].push_back(at::empty_like(output, at::MemoryFormat::Contiguous));
        call.written = gathered[0];
      }
      c10d::GatherOptions each;
      each.rootRank = options.rootRank;
      call.running.add(gloo_->gather(gathered, call.read, each), false);
    });
  }
  c10::intrusive_ptr<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    Tensors flat;
    if (!inputs.empty()) flat = inputs[0];
    return all("scatter", OpType::SCATTER, outputs, flat, options.asyncOp, [=, this](Call& call) {
      call.written.push_back(at::empty_like(call.outputs[0], at::MemoryFormat::Contiguous));
      std::vector<Tensors> from;
      if (getRank() == options.rootRank) from.push_back(call.read);
      c10d::ScatterOptions each;
      each.rootRank = options.rootRank;
      call.running.add(gloo_->scatter(call.written, from, each), false);
    });
  }

  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    Tensors none;
    return all("send", OpType::SEND, none, tensors, true, [=, this](Call& call) { call.running.add(gloo_->send(call.read, to, tag), true); });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    Tensors none;
    return all("recv", OpType::RECV, tensors, none, true, [=, this](Call& call) {
      call.written.push_back(at::empty_like(call.outputs[0], at::MemoryFormat::Contiguous));
      call.running.add(gloo_->recv(call.written, from, tag), true);
    });
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    Tensors token{at::zeros({1}, at::TensorOptions().device(c10::Device(kType, current_device())))};
    return all("barrier", OpType::BARRIER, token, token, options.asyncOp, [=, this](Call& call) {
      call.written.push_back(call.read[0]);
      Tensors one{call.read[0]};
      call.running.add(gloo_->allreduce(one), false);
    });
  }

 private:
  using Step = std::function<void(Call&)>;

  static void land(Call& call) {
    for (size_t i = 0; i < call.written.size(); ++i) call.outputs[i].copy_(call.written[i].view_as(call.outputs[i]));
  }

  // Gloo has no mean: a sum, and the division as it lands, which is what NCCL computes.
  at::Tensor reduced(Call& call, at::Tensor tensor, const c10d::ReduceOp& op) {
    c10d::AllreduceOptions each;
    each.reduceOp = op;
    if (op == c10d::ReduceOp::AVG) each.reduceOp = c10d::ReduceOp::SUM;
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      auto* factor = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      tensor.mul_(factor->tensor_factor.defined() ? factor->tensor_factor.cpu() : at::scalar_tensor(factor->double_factor, tensor.options()));
      each.reduceOp = c10d::ReduceOp::SUM;
    }
    Tensors one{tensor};
    call.running.add(gloo_->allreduce(one, each), false);
    return tensor;
  }
  Step finish(const c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return land;
    return [size = getSize()](Call& call) {
      for (auto& tensor : call.written) tensor.div_(size);
      land(call);
    };
  }

  c10::intrusive_ptr<c10d::Work> gather_into(const char* name, OpType type, Tensors& outputs, Tensors& inputs, bool async) {
    return all(name, type, outputs, inputs, async, [this](Call& call) {
      for (auto& input : call.read) {
        call.written.push_back(at::empty({input.numel() * getSize()}, input.options()));
        auto sent = input.reshape(-1);
        call.running.add(gloo_->_allgather_base(call.written.back(), sent, {}), false);
      }
    });
  }

  // Gloo's own reduce-scatter is over only when somebody waits for it; the sum of all, of which a rank keeps its share, is not.
  c10::intrusive_ptr<c10d::Work> scatter_from(const char* name, OpType type, Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
    return all(name, type, outputs, inputs, options.asyncOp, [=, this](Call& call) {
      auto count = call.read.size();
      for (size_t i = 0; i < count; ++i) {
        auto sum = reduced(call, call.read[i].reshape(-1), options.reduceOp);
        auto share = sum.numel() / getSize();
        call.written.push_back(sum.narrow(0, share * getRank(), share));
      }
    }, finish(options.reduceOp));
  }

  c10::intrusive_ptr<c10d::Work> all(const char* name, OpType type, const Tensors& outputs, const Tensors& inputs, bool async, Step start, Step landing = land) {
    auto text = shared_->failed();
    if (!text.empty()) raise(text);
    Pending pending;
    pending.outputs = outputs;
    pending.inputs = inputs;
    pending.call = std::make_shared<Call>();
    for (const auto& tensor : outputs) pending.call->outputs.push_back(alias(tensor));
    for (const auto& tensor : inputs) pending.call->inputs.push_back(alias(tensor));
    pending.call->start = std::move(start);
    pending.call->land = std::move(landing);
    if (coalescing_) {
      coalesced_.push_back(std::move(pending));
      return nullptr;
    }
    std::vector<Pending> calls;
    calls.push_back(std::move(pending));
    return issue(name, type, std::move(calls), async);
  }

  struct Pending {
    Tensors outputs, inputs;
    std::shared_ptr<Call> call;
  };

  static at::Tensor alias(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kType, "accel: No backend type associated with device type ", tensor.device());
    return kernel_alias(tensor);
  }

  c10::intrusive_ptr<c10d::Work> issue(const char* name, OpType type, std::vector<Pending> calls, bool async) {
    const auto& first = calls[0].outputs.empty() ? calls[0].inputs[0] : calls[0].outputs[0];
    auto device = last_device_ = first.device().index();
    c10::DeviceGuard on(first.device());
    auto current = current_stream(device);
    if (!stream_) stream_ = new_stream(device);
    auto stream = async ? *stream_ : current;
    if (async) accel::wait(stream, mark(current));
    Tensors kept, results;
    std::vector<std::shared_ptr<Call>> running;
    size_t nbytes = 0;
    for (auto& pending : calls) {
      kept.insert(kept.end(), pending.inputs.begin(), pending.inputs.end());
      kept.insert(kept.end(), pending.outputs.begin(), pending.outputs.end());
      results.insert(results.end(), pending.outputs.begin(), pending.outputs.end());
      for (const auto& tensor : pending.outputs) nbytes += tensor.nbytes();
      running.push_back(pending.call);
    }
    ++sequence_;
    Entry entry;
    entry.name = name;
    entry.cost_us = 10.0 + static_cast<double>(nbytes) / 100000.0;
    entry.started = std::make_shared<Record>();
    entry.after_start = std::exchange(last_started_, entry.started);
    bool hangs = this_collective_hangs();
    entry.run = [running, hangs, shared = shared_, keep = gloo_] {
      Quiet quiet;
      for (const auto& call : running) {
        call->began = std::chrono::steady_clock::now();
        call->hangs = hangs;
        if (hangs || !shared->failed().empty()) continue;
        for (const auto& input : call->inputs) {
          call->given.push_back(input.clone(at::MemoryFormat::Contiguous));
          call->read.push_back(call->given.back().clone());
        }
        try {
          call->start(*call);
        } catch (const std::exception& error) {
          shared->fail(error.what());
        }
      }
    };
    entry.over = [running, shared = shared_, timeout = timeout_, name = entry.name] {
      Quiet quiet;
      for (const auto& call : running) {
        if (!shared->failed().empty()) return true;  // a broken group: nothing lands
        bool over = false;
        try {
          over = !call->hangs && call->running.over();
        } catch (const std::exception& error) {
          shared->fail(error.what());
          return true;
        }
        if (over) continue;
        if (std::chrono::steady_clock::now() - call->began > timeout) {
          shared->fail("accel: " + name + " did not end within " + std::to_string(timeout.count()) + " ms: Timed out");
          return true;
        }
        return false;
      }
      // A network reads its inputs until the end: what has been put in their place meanwhile may have been sent.
      for (const auto& call : running) {
        for (size_t i = 0; i < call->inputs.size(); ++i) {
          auto now = call->inputs[i].contiguous();
          if (std::memcmp(now.data_ptr(), call->given[i].data_ptr(), now.nbytes()) == 0) continue;
          shared->fail("accel: an input of " + name + " was overwritten before that was over");
          return true;
        }
      }
      for (const auto& call : running) call->land(*call);
      return true;
    };
    auto work = c10::make_intrusive<AccelWork>(getRank(), type, std::move(kept), std::move(results), stream, shared_);
    enqueue(stream, std::move(entry));
    work->end = mark(stream);
    return work;
  }

  Gloo gloo_;
  Milliseconds timeout_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  std::optional<c10::Stream> stream_;
  Mark last_started_;
  c10::DeviceIndex last_device_ = 0;
  bool coalescing_ = false;
  std::vector<Pending> coalesced_;
  uint64_t sequence_ = 0;
};

}  // namespace

void bind_collectives(pybind11::module& module) {
  pybind11::module_::import("torch.distributed");
  pybind11::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(module, "Group")
      .def(pybind11::init([](const Gloo& gloo, int rank, int size, double timeout_s) {
        return c10::make_intrusive<Group>(gloo, rank, size, Milliseconds(static_cast<int64_t>(timeout_s * 1e3)));
      }))
      .def("get_error", &Group::getError);
}

}  // namespace accel
