// The kernels at the dispatcher: what happens before a launch and after it.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "nvtx.h"
#include "read_call.h"
#include "works.h"

namespace crossrank {

// The ranges that were opened before a launch.
struct Opened {
  bool range = false;
  bool by_python = false;
};

inline void close(Opened opened) {
  if (opened.range) pop_range();
  if (!opened.by_python) return;
  try {
    call_python("crossrank::close", {});
  } catch (const FromPython &script) {
    std::rethrow_exception(script.error);
  } catch (const std::exception &error) {
    failed(error.what());
  }
}

inline Opened open(const std::shared_ptr<Kind> &kind, int64_t id) {
  Opened opened;
  bool marks = to.marks.load(std::memory_order_relaxed), opens = to.opens.load(std::memory_order_relaxed);
  if (!marks && !opens) return opened;
  std::shared_ptr<Kind> held = kind;
  c10::IValue number(reinterpret_cast<int64_t>(held.get()));
  if (marks) {
    Marker marker = held->marker.load(std::memory_order_acquire);
    if (marker == Marker::kUnknown) marker = call_python("crossrank::mark", {number}) ? Marker::kRange : Marker::kNone;
    if (marker == Marker::kRange) {
      push_range(held->message, id);
      opened.range = true;
    }
  }
  try {
    opened.by_python = opens && call_python("crossrank::open", {number, c10::IValue(id)});
  } FORCED_UNWIND catch (...) {
    close(opened);
    throw;
  }
  return opened;
}

// A recorded call; its id is kNone if the recording failed.
struct Launch {
  int64_t id = kNone, time = 0;
  bool on_cpu = false;
  Opened opened;
};

inline bool on_cpu(const Kind &kind) {
  int64_t device = kind.words[kDevice];
  return device != kNone && static_cast<c10::DeviceType>(device >> 32) == c10::DeviceType::CPU;
}

// The last call that C++ made in each backward pass, by the number of the pass. Another pass may replace an entry.
struct LastOfPass {
  std::atomic<int64_t> pass{-1}, call{kNone};
};
inline std::array<LastOfPass, 16> &last_of_pass = *new std::array<LastOfPass, 16>;

inline void leave_span(Span span);

// Records the wait at the end of the backward pass that made this call without Python, as DDP's reducer does. The
// computation of the pass has ended when its first callback, ours, runs. The reducer's callback, which waits, was
// queued after it. Our last callback is queued after the reducer's.
inline void follow_backward(int64_t id) {
  int64_t pass = torch::autograd::get_current_graph_task_id();
  if (pass < 0) return;
  LastOfPass &last = last_of_pass[pass % last_of_pass.size()];
  last.call.store(id, std::memory_order_relaxed);
  if (last.pass.exchange(pass) == pass) return;
  try {
    auto &engine = torch::autograd::Engine::get_default_engine();
    engine.queue_callback([&engine, &last, pass, session = to.session.load()] {
      int64_t begin = now_ns(), call = last.call.load(std::memory_order_relaxed);
      if (last.pass.load() != pass || session != to.session || !to.active) return;
      try {
        Span span{session, call, begin, 0, tables_of_thread().thread, Of::kBackward, false};
        // If the reducer's callback throws, the last one never runs and is destroyed.
        auto wait = std::make_shared<WaitUnderWay>(call, span.thread);
        engine.queue_callback([span, wait] { leave_span(span); });
      } catch (const std::exception &) {  // as below
      }
    });
  } catch (const std::exception &) {  // no callback can be queued here: the wait is not recorded
  }
}

// Records a call before its launch.
inline Launch record(const Op &op, const torch::jit::Stack &stack) {
  if (!to.active.load(std::memory_order_relaxed)) return {};
  const c10::IValue *args = stack.data() + stack.size() - op.arguments;
  ThreadTables &tables = tables_of_thread();
  auto *ring = to.ring.load(std::memory_order_acquire);
  if (ring != nullptr) ring->expect_row();
  try {
    const auto *group = group_of(tables, args[op.group]);
    if (group == nullptr) return {};
    uint64_t before = tables.python_calls;
    Above above;
    const auto *site = site_of(tables, op, args, above);
    if (site == nullptr) return {};
    std::shared_ptr<Object> kept;
    if (tables.python_calls != before) {  // Python may have cleared the tables of this thread
      kept = *site;
      site = &kept;
      group = group_of(tables, args[op.group]);
      if (group == nullptr || kept == nullptr) return {};
    }
    if (!read_call(tables.words, op, args)) return {};
    const auto &kind = kind_of(tables, op, *group, *site, args);
    int64_t id = to.ids.fetch_add(1, std::memory_order_relaxed);
    Row row{kind, id, kind->counter->fetch_add(1, std::memory_order_relaxed) + 1, 0,
            to.step.load(std::memory_order_relaxed), kNone, kNone, tables.thread};
    if (op.is_p2p) {
      if (op.tag >= 0) row.tag = number_of(args[op.tag]);
      if (above.api != nullptr && crossrank_code(above.api) == batch_code) {
        if (tables.p2p_batch == kNone || begins_batch(above.api)) tables.p2p_batch = id;
        row.batch = tables.p2p_batch;
      }
    }
    if (to.coalescing.load(std::memory_order_relaxed) && tables.batch != kNone) {
      if (tables.batch < 0) tables.batch = id;
      row.batch = tables.batch;
    }
    Launch launch{id, now_ns(), on_cpu(*kind), {}};
    row.time = launch.time;
    tables.last = id;
    if (above.first == nullptr || above.first == backward_code) follow_backward(id);
    if (ring == nullptr || !ring->put(std::move(row))) to.dropped.fetch_add(1);
    launch.opened = open(kind, id);
    return launch;
  } catch (const FromPython &script) {
    std::rethrow_exception(script.error);
  } catch (const c10::Error &error) {
    failed(error.what_without_backtrace());
    return {};
  } catch (const std::exception &error) {
    failed(error.what());
    return {};
  }
}

// Keeps an exception that Python raised in the launch, while Python runs for the recorder.
class AsideError {
 public:
  explicit AsideError(bool python_runs) : python_runs_(python_runs) {
    if (!python_runs_) return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyErr_Fetch(&type_, &value_, &traceback_);
    PyGILState_Release(state);
  }
  ~AsideError() {
    if (type_ == nullptr) return;
    PyGILState_STATE state = PyGILState_Ensure();
    PyErr_Restore(type_, value_, traceback_);
    PyGILState_Release(state);
  }

 private:
  bool python_runs_;
  PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

// Puts a row about a time span into the ring.
inline void leave_span(Span span) {
  auto *ring = to.spans.load(std::memory_order_acquire);
  span.end = now_ns();
  if (ring == nullptr || !ring->put(std::move(span))) to.spans_dropped.fetch_add(1);
}

inline void waited(int64_t id, int64_t begin, Of of, bool raised = false) {
  leave_span({to.session, id, begin, 0, tables_of_thread().thread, of, raised});
}

// Makes the communicating thread record the end of a call on a CPU backend. On a GPU that thread does not know the end.
inline void follow(const Launch &launch, c10d::Work &work) {
  try {
    work.getFuture()->addCallback([span = Span{to.session, launch.id, launch.time, 0, 0, Of::kCommunication, false}](
                                      c10::ivalue::Future &future) mutable {
      span.raised = future.hasError();
      leave_span(span);
    });
  } catch (const std::exception &) {  // the Work of this backend has no future
  }
}

// A launch that takes longer, in ns, has waited: for a new communicator or for the other ranks.
constexpr int64_t kLongLaunch = 1000000;

// Notes the Work of a launched call. An operation that returns none waits in the launch.
inline void launched(const Launch &launch, bool gives_work, const torch::jit::Stack &stack) {
  if (gives_work && stack.back().isObject()) {
    auto *work = held_by(stack.back());
    call_of_work.note(work, launch.id);
    if (launch.on_cpu && work != nullptr && to.timing.load(std::memory_order_relaxed))
      follow(launch, *static_cast<c10d::Work *>(work));
  }
  if (!gives_work || now_ns() - launch.time > kLongLaunch) waited(launch.id, launch.time, Of::kLaunch);
}

// The keys of the kernels that would run without ours.
inline const c10::DispatchKeySet kBehindOurs(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(Op op) : op_(std::move(op)) {}

  void operator()(const c10::OperatorHandle &handle, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    Launch launch = record(op_, *stack);
    bool gives_work = !handle.schema().returns().empty();
    try {
      std::optional<WaitUnderWay> guard;
      if (!gives_work && launch.id != kNone) guard.emplace(launch.id, tables_of_thread().thread);
      handle.redispatchBoxed(keys & kBehindOurs, stack);
    } FORCED_UNWIND catch (...) {
      AsideError aside(launch.opened.by_python);
      close(launch.opened);
      throw;
    }
    close(launch.opened);
    if (launch.id != kNone) launched(launch, gives_work, *stack);
  }

 private:
  Op op_;
};

// The storage of a tensor with data; NULL for all else.
inline const void *storage_of(const c10::IValue &value) {
  if (!value.isTensor()) return nullptr;
  const at::Tensor &tensor = value.toTensor();
  if (!tensor.defined() || !is_real(tensor) || !tensor.has_storage()) return nullptr;
  return tensor.storage().unsafeGetStorageImpl();
}

// Runs around a communicating operation of `_c10d_functional`: notes the call of its result tensors.
class FunctionalKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle &handle, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    bool active = to.active.load(std::memory_order_relaxed);
    if (active) tables_of_thread().last = kNone;
    handle.redispatchBoxed(keys & kBehindOurs, stack);
    if (!active || stack->empty()) return;
    if (int64_t id = tables_of_thread().last; id != kNone) note(stack->back(), id);
  }

 private:
  static void note(const c10::IValue &result, int64_t id) {
    if (const void *storage = storage_of(result)) {
      call_of_storage.note(storage, id);
    } else if (result.isList()) {
      for (const c10::IValue &item : result.toListRef()) note(item, id);
    }
  }
};

// Runs around `_c10d_functional::wait_tensor`. Without a call of the tensor there is no wait.
class WaitTensorKernel : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle &handle, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    const void *storage = to.active.load(std::memory_order_relaxed) ? storage_of(stack->back()) : nullptr;
    int64_t id = storage == nullptr ? CallOf::kNoCall : call_of_storage.take(storage);
    if (id == CallOf::kNoCall) {
      handle.redispatchBoxed(keys & kBehindOurs, stack);
      return;
    }
    const WaitUnderWay guard(id, tables_of_thread().thread);
    int64_t begin = now_ns();
    try {
      handle.redispatchBoxed(keys & kBehindOurs, stack);
    } FORCED_UNWIND catch (...) {
      waited(id, begin, Of::kTensor, true);
      throw;
    }
    waited(id, begin, Of::kTensor);
  }
};

// Functors are never freed: a call may be running one. The exit of the process does not free them either: a forked
// child would need a lock for it that a thread of its parent may hold.
inline auto &kernels = *new std::vector<std::pair<std::string, c10::KernelFunction>>;
inline auto &registrations = *new std::vector<c10::RegistrationHandleRAII>;

}  // namespace crossrank
