// The kernel that records every c10d operation, compiled against the torch and the Python that it runs in.
//
// It does the work of `Recorder.before` and `after` without the interpreter's lock: it identifies a call, gives it its
// numbers, and puts a row into a ring, and another row for each wait. Python handles new process groups, new source
// lines, and things that few calls need (a marker for a tool, a range in a window). The kernel calls Python through our
// own torch operations, so that an exception of a script's signal handler passes through.
//
// A call looks up its data in tables of its thread. They are filled from shared tables under a lock, and cleared as a
// whole when a shared table loses an entry: `generation` counts that.
#include <Python.h>

#include <pthread.h>

#include "answer.h"
#include "flight.h"
#include "kernel.h"

namespace crossrank {
namespace {

std::vector<int> integers(PyObject *sequence) {
  std::vector<int> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); i++)
    found.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(sequence, i))));
  return found;
}

template <typename Made, typename... Arguments>
void add_kernel(const std::string &name, Arguments &&...arguments) {
  auto kernel = std::make_unique<Made>(std::forward<Arguments>(arguments)...);
  kernels.emplace_back(name, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)));
}

// install(ops, functional, describe, batch_code, batch_requests): `ops` are (name, arguments, is_p2p, is_send, places,
// values, tensors), with the places of group, reduce, peer, tag, in_split, out_split and dummy. `functional` has the
// names of the functional collectives, `wait_tensor` last.
PyObject *install(PyObject *, PyObject *args) {
  PyObject *ops, *functional, *callback, *code;
  int requests;
  if (!PyArg_ParseTuple(args, "O!O!OOi", &PyTuple_Type, &ops, &PyTuple_Type, &functional, &callback, &code, &requests))
    return nullptr;
  Py_INCREF(callback);
  Py_XSETREF(describe, callback);
  batch_code = code;
  batch_requests = requests;
  bool first = kernels.empty();
  for (Py_ssize_t i = 0; first && i < PyTuple_GET_SIZE(ops); i++) {
    const char *name;
    Py_ssize_t arguments;
    int is_p2p, is_send;
    PyObject *places, *values, *tensors;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(ops, i), "snppO!O!O!", &name, &arguments, &is_p2p, &is_send, &PyTuple_Type,
                          &places, &PyTuple_Type, &values, &PyTuple_Type, &tensors))
      return nullptr;
    auto at = integers(places);
    Op op{i, static_cast<size_t>(arguments), is_p2p != 0, is_send != 0, at[0], at[1], at[2], at[3], at[4], at[5],
          at[6], integers(values), integers(tensors)};
    add_kernel<Kernel>(name, std::move(op));
  }
  for (Py_ssize_t i = 0, count = PyTuple_GET_SIZE(functional); first && i < count; i++) {
    const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(functional, i));
    if (name == nullptr) return nullptr;
    if (i + 1 < count)
      add_kernel<FunctionalKernel>(name);
    else
      add_kernel<WaitTensorKernel>(name);
  }
  std::string failure;
  Py_BEGIN_ALLOW_THREADS  // a thread that waits for the interpreter's lock may hold the dispatcher's
  try {
    for (const auto &[name, kernel] : kernels)
      registrations.push_back(c10::Dispatcher::singleton().registerImpl({name, ""}, c10::DispatchKey::BackendSelect,
                                                                        kernel, std::nullopt, nullptr, kDebug));
  } catch (const std::exception &error) {
    registrations.clear();
    failure = error.what();
  }
  Py_END_ALLOW_THREADS
  if (!failure.empty()) {
    PyErr_SetString(PyExc_RuntimeError, failure.c_str());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject *uninstall(PyObject *, PyObject *) {
  Py_BEGIN_ALLOW_THREADS
  registrations.clear();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

// begin(capacity): starts a session with empty tables; `set` turns its recording on.
PyObject *begin(PyObject *, PyObject *args) {
  let_dropped_go();
  Py_ssize_t capacity;
  if (!PyArg_ParseTuple(args, "n", &capacity)) return nullptr;
  to.active = false;
  to.session++;
  to.step = to.ids = to.dropped = to.spans_dropped = to.errors = 0;
  to.coalescing = 0;
  // The old ring is never freed, because another thread may still use it: sessions with another capacity are rare.
  if (auto *ring = to.ring.load(); ring == nullptr || ring->capacity() != static_cast<size_t>(capacity)) {
    to.ring = new Ring<Row>(static_cast<size_t>(capacity));
    to.spans = new Ring<Span>(static_cast<size_t>(capacity));
  }
  call_of_work.clear();
  call_of_storage.clear();
  std::lock_guard<std::mutex> guard(to.lock);
  to.first_error.clear();
  to.groups.clear();
  to.codes.clear();
  to.sites.clear();
  to.new_objects.clear();
  to.forget_kinds();
  generation.fetch_add(1);
  Py_RETURN_NONE;
}

// set(active, marks, opens, timing, step): whether calls are recorded, a tool gets the launches, Python opens ranges
// around each launch, and ends of calls are recorded; and the step.
PyObject *set(PyObject *, PyObject *args) {
  int active, marks, opens, timing;
  long long step;
  if (!PyArg_ParseTuple(args, "ppppL", &active, &marks, &opens, &timing, &step)) return nullptr;
  to.timing = timing != 0;
  to.step = step;
  to.marks = marks != 0;
  to.opens = opens != 0;
  to.active = active != 0;
  Py_RETURN_NONE;
}

// has_nvtx(): whether the kernel was built with NVTX's headers, and so can mark launches.
PyObject *has_nvtx(PyObject *, PyObject *) {
#ifdef CROSSRANK_NVTX
  Py_RETURN_TRUE;
#else
  Py_RETURN_FALSE;
#endif
}

// set_marker(kind, text, final): the text of the range around the launches of a kind, None = no range.
PyObject *set_marker(PyObject *, PyObject *args) {
  long long number;
  const char *text;
  int is_final;
  if (!PyArg_ParseTuple(args, "Lzp", &number, &text, &is_final)) return nullptr;
  auto *kind = reinterpret_cast<Kind *>(number);
  if (text != nullptr) kind->message = registered(text);
  if (is_final) kind->marker.store(text == nullptr ? Marker::kNone : Marker::kRange, std::memory_order_release);
  Py_RETURN_NONE;
}

PyObject *know_code(PyObject *, PyObject *args) {
  PyObject *code;
  long long kind;
  if (!PyArg_ParseTuple(args, "OL", &code, &kind)) return nullptr;
  std::lock_guard<std::mutex> guard(to.lock);
  to.codes[code] = kind;
  Py_RETURN_NONE;
}

// forget_code(id(code)): a code object has died, and another one may get its address.
PyObject *forget_code(PyObject *, PyObject *args) {
  let_dropped_go();
  unsigned long long address;
  if (!PyArg_ParseTuple(args, "K", &address)) return nullptr;
  auto *code = reinterpret_cast<const void *>(address);
  std::lock_guard<std::mutex> guard(to.lock);
  to.codes.erase(code);
  auto called = static_cast<int64_t>(address);
  for (auto at = to.sites.begin(); at != to.sites.end();)
    at = at->first.code == code || at->first.called == called ? to.sites.erase(at) : std::next(at);
  generation.fetch_add(1);
  Py_RETURN_NONE;
}

// add_site(site), add_group(state): returns the number by which the kernel takes the object over.
PyObject *add_object(PyObject *, PyObject *object) {
  let_dropped_go();
  static std::atomic<int64_t> numbers{0};
  int64_t number = ++numbers;
  std::lock_guard<std::mutex> guard(to.lock);
  to.new_objects.emplace(number, std::make_shared<Object>(object));
  return PyLong_FromLongLong(number);
}

PyObject *clear_sites(PyObject *, PyObject *) {
  std::lock_guard<std::mutex> guard(to.lock);
  to.sites.clear();
  to.codes.clear();
  generation.fetch_add(1);
  Py_RETURN_NONE;
}

PyObject *forget_group(PyObject *, PyObject *value) {
  let_dropped_go();
  int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  std::lock_guard<std::mutex> guard(to.lock);
  for (auto at = to.groups.begin(); at != to.groups.end();)
    at = at->second->number == number ? to.groups.erase(at) : std::next(at);
  for (Kinds *kinds : {&to.kinds, &to.older_kinds}) kinds->forget_group(number);
  generation.fetch_add(1);
  Py_RETURN_NONE;
}

PyObject *start_coalescing(PyObject *, PyObject *) {
  auto &tables = tables_of_thread();
  if (tables.batch == kNone) to.coalescing.fetch_add(1);
  tables.batch = -1;
  Py_RETURN_NONE;
}

// end_coalescing(): returns the id of the first call of the batch; -1 = no calls, None = no batch.
PyObject *end_coalescing(PyObject *, PyObject *) {
  auto &tables = tables_of_thread();
  int64_t batch = tables.batch;
  if (batch == kNone) Py_RETURN_NONE;
  tables.batch = kNone;
  to.coalescing.fetch_sub(1);
  return PyLong_FromLongLong(batch);
}

PyObject *number_or_none(int64_t value) {
  if (value == kNone) Py_RETURN_NONE;
  return PyLong_FromLongLong(value);
}

PyObject *device_of(const Kind &kind) {
  int64_t word = kind.words[kDevice];
  if (word == kNone) Py_RETURN_NONE;
  c10::Device device(static_cast<c10::DeviceType>(word >> 32), static_cast<c10::DeviceIndex>((word & 0xffffffff) - 1));
  return PyUnicode_FromString(device.str().c_str());
}

// The descriptor of a kind, borrowed; NULL if an exception is set.
PyObject *descriptor_of(Kind &kind) {
  if (kind.descriptor == nullptr) {
    auto count = static_cast<Py_ssize_t>(kind.words.size() - kBefore - kBehind);
    PyObject *words = PyTuple_New(count);
    if (words == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
      PyObject *word = number_or_none(kind.words[kBefore + i]);
      if (word == nullptr) {
        Py_DECREF(words);
        return nullptr;
      }
      PyTuple_SET_ITEM(words, i, word);
    }
    PyObject *made = PyObject_CallFunction(describe, "LOONNN", kind.op->number, kind.group->state->object, kind.site->object,
                                           device_of(kind),
                                           number_or_none(kind.words[kReduce]), words);
    if (made == nullptr) return nullptr;
    if (kind.descriptor == nullptr) kind.descriptor = std::make_unique<Object>(made);
    Py_DECREF(made);
  }
  return kind.descriptor->object;
}

PyObject *descriptor(PyObject *, PyObject *value) {
  auto *kind = reinterpret_cast<Kind *>(PyLong_AsLongLong(value));
  if (kind == nullptr || PyErr_Occurred()) return nullptr;
  PyObject *found = descriptor_of(*kind);
  Py_XINCREF(found);
  return found;
}

PyObject *device(PyObject *, PyObject *value) {
  auto *kind = reinterpret_cast<Kind *>(PyLong_AsLongLong(value));
  return kind == nullptr || PyErr_Occurred() ? nullptr : device_of(*kind);
}

// scalar_types(): the names of the scalar types, in the order of their numbers in the words of calls.
PyObject *scalar_types(PyObject *, PyObject *) {
  PyObject *names = PyList_New(0);
  for (int i = 0; names != nullptr && i < static_cast<int>(c10::ScalarType::NumOptions); i++) {
    PyObject *name = PyUnicode_FromString(c10::toString(static_cast<c10::ScalarType>(i)));
    if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

// take(most): up to `most` calls as (descriptor, id, number, time, step, batch, tag, thread).
PyObject *take(PyObject *, PyObject *value) {
  Py_ssize_t most = PyLong_AsSsize_t(value);
  if (most == -1 && PyErr_Occurred()) return nullptr;
  let_dropped_go();
  PyObject *list = PyList_New(0);
  auto *ring = to.ring.load();
  if (list == nullptr || ring == nullptr) return list;
  Row row;
  while (PyList_GET_SIZE(list) < most && ring->take(row)) {
    if (row.kind->session != to.session) continue;  // from a thread that missed the end of the last session
    PyObject *found = descriptor_of(*row.kind);
    PyObject *call = nullptr;
    if (found != nullptr)
      call = Py_BuildValue("OLLLLNNL", found, row.id, row.number, row.time, row.step, number_or_none(row.batch),
                           number_or_none(row.tag), row.thread);
    if (call == nullptr || PyList_Append(list, call) < 0) {
      Py_XDECREF(call);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(call);
  }
  return list;
}

// take_spans(most): up to `most` spans as (id, begin, end, thread, type, raised); id -1 = unknown call.
PyObject *take_spans(PyObject *, PyObject *value) {
  Py_ssize_t most = PyLong_AsSsize_t(value);
  if (most == -1 && PyErr_Occurred()) return nullptr;
  PyObject *list = PyList_New(0);
  auto *ring = to.spans.load();
  if (list == nullptr || ring == nullptr) return list;
  Span span;
  while (PyList_GET_SIZE(list) < most && ring->take(span)) {
    if (span.session != to.session) continue;
    PyObject *row = Py_BuildValue("LLLLLN", span.id, span.begin, span.end, span.thread, static_cast<int64_t>(span.of),
                                  PyBool_FromLong(span.raised));
    if (row == nullptr || PyList_Append(list, row) < 0) {
      Py_XDECREF(row);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(row);
  }
  return list;
}

// watch_backward(code): the code of the function in which Python starts a backward pass.
PyObject *watch_backward(PyObject *, PyObject *code) {
  backward_code = code;
  Py_RETURN_NONE;
}

PyObject *unbound_wait = nullptr, *unbound_future_wait = nullptr;

// The value that pybind11 stores after the head of its object: for a Work, the address of the C++ object.
const void *value_of(PyObject *object) { return reinterpret_cast<void **>(reinterpret_cast<char *>(object) + sizeof(PyObject))[0]; }

PyObject *call_method(PyObject *unbound, PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  std::vector<PyObject *> all{self};
  all.insert(all.end(), args, args + count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)));
  return PyObject_Vectorcall(unbound, all.data(), count + 1, names);
}

// Whether a call of `Work.wait` has a timeout: its only argument. A timedelta of 0, which is false, stands for none.
bool has_timeout(PyObject *const *args, Py_ssize_t count, PyObject *names) {
  if (count == 0 && (names == nullptr || PyTuple_GET_SIZE(names) == 0)) return false;
  int is_true = PyObject_IsTrue(args[0]);
  if (is_true < 0) PyErr_Clear();
  return is_true > 0;
}

// Replaces `Work.wait`.
PyObject *wait(PyObject *work, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  bool active = to.active;
  int64_t id = active ? call_of_work.find(value_of(work)) : CallOf::kNoCall, begin = now_ns();
  const WaitUnderWay guard(id, tables_of_thread().thread, has_timeout(args, count, names));
  PyObject *result = call_method(unbound_wait, work, args, count, names);
  if (active) waited(id, begin, Of::kWork, result == nullptr);
  return result;
}

PyMethodDef wait_method = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait)),
                           METH_FASTCALL | METH_KEYWORDS, nullptr};

// Replaces `Future.wait`. The call of a future is unknown, so its wait is not recorded.
PyObject *future_wait(PyObject *future, PyObject *const *args, Py_ssize_t count, PyObject *names) {
  const WaitUnderWay guard(CallOf::kNoCall, tables_of_thread().thread);
  return call_method(unbound_future_wait, future, args, count, names);
}

PyMethodDef future_wait_method = {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(future_wait)),
                                  METH_FASTCALL | METH_KEYWORDS, nullptr};

PyObject *method_around(PyObject *args, PyMethodDef *method, PyObject *&unbound) {
  PyTypeObject *of;
  PyObject *original;
  if (!PyArg_ParseTuple(args, "O!O", &PyType_Type, &of, &original)) return nullptr;
  Py_INCREF(original);
  Py_XSETREF(unbound, original);
  return PyDescr_NewMethod(of, method);
}

// recording_wait(Work, wait): returns a method for that class, which calls `wait` and records its duration.
PyObject *recording_wait(PyObject *, PyObject *args) { return method_around(args, &wait_method, unbound_wait); }

// noting_wait(Future, wait): the same, but the method only notes the current wait.
PyObject *noting_wait(PyObject *, PyObject *args) {
  return method_around(args, &future_wait_method, unbound_future_wait);
}

// note_work(work, id): waits for `work` are waits for that call.
PyObject *note_work(PyObject *, PyObject *args) {
  PyObject *work;
  long long id;
  if (!PyArg_ParseTuple(args, "OL", &work, &id)) return nullptr;
  call_of_work.note(value_of(work), id);
  Py_RETURN_NONE;
}

PyObject *state(PyObject *, PyObject *) {
  auto *ring = to.ring.load();
  std::string error;
  {
    std::lock_guard<std::mutex> guard(to.lock);
    error = to.first_error;
  }
  return Py_BuildValue("{sLsnsLsLsLsN}", "calls", to.ids.load(), "waiting",
                       static_cast<Py_ssize_t>(ring == nullptr ? 0 : ring->length()), "dropped", to.dropped.load(),
                       "spans_dropped", to.spans_dropped.load(), "errors", to.errors.load(), "first_error",
                       PyUnicode_DecodeUTF8(error.data(), static_cast<Py_ssize_t>(error.size()), "replace"));
}

// waits(): the current waits as (call, thread, whether the script gave it a timeout); call -1 = unknown.
PyObject *waits(PyObject *, PyObject *) {
  PyObject *list = PyList_New(0);
  auto add = [&list](int64_t call, int64_t thread, bool limited) {
    PyObject *one = list == nullptr ? nullptr : Py_BuildValue("LLO", call, thread, limited ? Py_True : Py_False);
    if (one == nullptr || PyList_Append(list, one) < 0) Py_CLEAR(list);
    Py_XDECREF(one);
  };
  for (auto &place : waits_under_way)
    if (int64_t call = place.call.load(std::memory_order_relaxed); call != WaitOfThread::kFree)
      add(call, place.thread.load(std::memory_order_relaxed), place.limited.load(std::memory_order_relaxed));
  return list;
}

// nccl_recorder(): torch's flight recorder of NCCL calls as JSON, empty if this process has none.
PyObject *nccl_recorder(PyObject *, PyObject *) {
  std::string found;
  Py_BEGIN_ALLOW_THREADS
  try {
    found = dump_nccl_recorder();
  } catch (...) {
    found.clear();
  }
  Py_END_ALLOW_THREADS
  return PyBytes_FromStringAndSize(found.data(), static_cast<Py_ssize_t>(found.size()));
}

// answer_for(asked, answer, head, main): from now on a thread answers for this rank while Python does not run. `asked`
// changes when a rank asks, `answer` is the file to write, `head` are its first fields, and `main` is Python's number of
// the main thread. Empty paths end it.
PyObject *answer_for(PyObject *, PyObject *args) {
  const char *asked, *answer, *head;
  unsigned long main;
  if (!PyArg_ParseTuple(args, "yysk", &asked, &answer, &head, &main)) return nullptr;
  PyThreadState *thread = PyInterpreterState_ThreadHead(PyInterpreterState_Main());
  while (thread != nullptr && thread->thread_id != main) thread = PyThreadState_Next(thread);
  std::lock_guard<std::mutex> guard(answering.lock);
  answering.asked = asked, answering.answer = answer, answering.head = head;
  answering.main_thread = thread;
  answering.answered = changed_at(asked);
  answering.active = *asked != '\0';
  if (answering.active && !answering.started) {
    std::thread(answer_for_python).detach();
    answering.started = true;
  }
  Py_RETURN_NONE;
}

// beat(): Python runs.
PyObject *beat(PyObject *, PyObject *) {
  answering.beats.fetch_add(1);
  Py_RETURN_NONE;
}

// note_answer(asked_at): Python has answered the question that was asked at this time, in ns since 1970.
PyObject *note_answer(PyObject *, PyObject *moment) {
  answering.answered = PyLong_AsLongLong(moment);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

// Wraps a function for Python: a C++ exception becomes a Python exception.
template <PyObject *(*function)(PyObject *, PyObject *)>
PyObject *entry(PyObject *self, PyObject *arguments) {
  try {
    return function(self, arguments);
  } catch (const std::bad_alloc &) {
    return PyErr_NoMemory();
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

PyMethodDef methods[] = {
    {"install", entry<install>, METH_VARARGS, nullptr},
    {"uninstall", entry<uninstall>, METH_NOARGS, nullptr},
    {"begin", entry<begin>, METH_VARARGS, nullptr},
    {"set", entry<set>, METH_VARARGS, nullptr},
    {"has_nvtx", entry<has_nvtx>, METH_NOARGS, nullptr},
    {"set_marker", entry<set_marker>, METH_VARARGS, nullptr},
    {"know_code", entry<know_code>, METH_VARARGS, nullptr},
    {"forget_code", entry<forget_code>, METH_VARARGS, nullptr},
    {"add_site", entry<add_object>, METH_O, nullptr},
    {"add_group", entry<add_object>, METH_O, nullptr},
    {"clear_sites", entry<clear_sites>, METH_NOARGS, nullptr},
    {"forget_group", entry<forget_group>, METH_O, nullptr},
    {"start_coalescing", entry<start_coalescing>, METH_NOARGS, nullptr},
    {"end_coalescing", entry<end_coalescing>, METH_NOARGS, nullptr},
    {"descriptor", entry<descriptor>, METH_O, nullptr},
    {"device", entry<device>, METH_O, nullptr},
    {"scalar_types", entry<scalar_types>, METH_NOARGS, nullptr},
    {"take", entry<take>, METH_O, nullptr},
    {"take_spans", entry<take_spans>, METH_O, nullptr},
    {"recording_wait", entry<recording_wait>, METH_VARARGS, nullptr},
    {"noting_wait", entry<noting_wait>, METH_VARARGS, nullptr},
    {"waits", entry<waits>, METH_NOARGS, nullptr},
    {"nccl_recorder", entry<nccl_recorder>, METH_NOARGS, nullptr},
    {"note_work", entry<note_work>, METH_VARARGS, nullptr},
    {"watch_backward", entry<watch_backward>, METH_O, nullptr},
    {"answer_for", entry<answer_for>, METH_VARARGS, nullptr},
    {"beat", entry<beat>, METH_NOARGS, nullptr},
    {"note_answer", entry<note_answer>, METH_O, nullptr},
    {"state", entry<state>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_crossrank_recorder", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

// A thread that forks holds these locks, because the child has no thread that would release them.
std::mutex *const held_by_fork[] = {&to.lock, &dropped_lock, &call_of_work.lock, &call_of_storage.lock,
                                    &answering.lock};

void before_fork() {
  for (auto *lock : held_by_fork) lock->lock();
}

void after_fork() {
  for (auto *lock : held_by_fork) lock->unlock();
}

void in_child() {
  to.active = false;
  to.ring = nullptr;  // not freed: a thread of the parent may have been putting a row in
  to.spans = nullptr;
  for (auto &place : waits_under_way) place.call = WaitOfThread::kFree;
  generation.fetch_add(1);
  forget_answering();
  after_fork();
}

}  // namespace
}  // namespace crossrank

PyMODINIT_FUNC PyInit__crossrank_recorder() {
  // Register only once per process: a second handler would lock what the first one holds.
  static const int registered = pthread_atfork(crossrank::before_fork, crossrank::after_fork, crossrank::in_child);
  (void)registered;
  return PyModule_Create(&crossrank::module);
}
