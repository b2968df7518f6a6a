// The kernel that records every c10d operation, compiled against the torch and the Python that it runs in.
//
// It does what `Recorder.before` and `after` do in Python, without the interpreter's lock: reads what tells a call from
// others, gives it its numbers, and leaves a row in a ring. What is seen for the first time (a process group, a place
// in the code) and what few calls need (a marker for a tool, a range in a window) goes to Python, through operations of
// ours that are called as torch calls any other, so that an exception of a script's signal handler passes through.
//
// Everything a call looks up stands in tables of its thread. They are filled from shared ones under a lock, and thrown
// away as a whole when the shared ones lose something: `generation` counts that.
#include <Python.h>

#include <array>
#include <atomic>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <pthread.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#ifdef CROSSRANK_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

#include "frames.h"

// A thread that is ended while it waits for the interpreter's lock unwinds its stack, which nothing may stop.
#ifdef __GLIBCXX__
#include <cxxabi.h>
#define FORCED_UNWIND catch (abi::__forced_unwind &) { throw; }
#else
#define FORCED_UNWIND
#endif

namespace {

constexpr int64_t kNone = INT64_MIN;
constexpr const char *kDebug = "crossrank";

// --- Python objects, which are only let go by a thread that has the interpreter's lock -------------------------------

// Never destroyed, as all that threads may still use while the process exits.
std::mutex &dropped_lock = *new std::mutex;
std::vector<PyObject *> &dropped = *new std::vector<PyObject *>;

struct Object {
  explicit Object(PyObject *object) : object(object) { Py_INCREF(object); }
  Object(const Object &) = delete;
  Object &operator=(const Object &) = delete;
  ~Object() {
    std::lock_guard<std::mutex> guard(dropped_lock);
    dropped.push_back(object);
  }
  PyObject *object;
};

void let_dropped_go() {
  std::vector<PyObject *> objects;
  {
    std::lock_guard<std::mutex> guard(dropped_lock);
    objects.swap(dropped);
  }
  for (PyObject *object : objects) Py_DECREF(object);
}

// --- what calls are told apart by -------------------------------------------------------------------------------------

// Where the arguments of an operation are, as `op_schema.Reader` found them; -1 = it has none.
struct Op {
  int64_t number;
  size_t arguments;
  bool is_p2p;
  bool is_send;
  int group, reduce, peer, tag, in_split, out_split, dummy;
  std::vector<int> values;
  std::vector<int> tensors;
};

using Counter = std::atomic<int64_t>;

struct Group {
  int64_t number;
  std::shared_ptr<Object> state;  // Python's
  // Held weakly, and so the address is no other group's as long as this one is known.
  c10::weak_intrusive_ptr<torch::CustomClassHolder> pointer;
  Counter calls{0};
  std::map<std::pair<int64_t, bool>, Counter> pairs;  // by peer and direction; under the lock
};

using Words = std::vector<int64_t>;

uint64_t hash_of(const int64_t *words, size_t count) {
  uint64_t hash = 0x9e3779b97f4a7c15u ^ count;
  for (size_t i = 0; i < count; i++) {
    hash = (hash ^ static_cast<uint64_t>(words[i])) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

// Whether a tool is to see the launches of a kind; unknown while Python has not said so for good.
enum class Marker { kUnknown, kNone, kRange };

// Calls that repeat each other: the same operation, group, place in the code and arguments.
struct Kind {
  Kind(uint64_t session, const Op &op, std::shared_ptr<Group> group, std::shared_ptr<Object> site, Words words,
       Counter *counter)
      : session(session), op(&op), group(std::move(group)), site(std::move(site)), words(std::move(words)),
        counter(counter) {}
  uint64_t session;
  const Op *op;
  std::shared_ptr<Group> group;
  std::shared_ptr<Object> site;
  Words words;
  Counter *counter;
  std::unique_ptr<Object> descriptor;  // made under the interpreter's lock by whoever needs it first
  std::atomic<Marker> marker{Marker::kUnknown};
  std::atomic<const void *> message{nullptr};  // of NVTX
};

// One call; a batch or tag that it has none of is kNone.
struct Row {
  std::shared_ptr<Kind> kind;
  int64_t id, number, time, step, batch, tag;
};

// --- the ring: many threads put rows in, any takes them out ------------------------------------------------------------

// D. Vyukov's bounded queue: a place is free for the n-th row when its turn says n, and taken when it says n + 1.
class Ring {
 public:
  explicit Ring(size_t capacity) : capacity_(capacity) {
    while (size_ < capacity) size_ *= 2;
    places_ = std::make_unique<Place[]>(size_);
    for (size_t i = 0; i < size_; i++) places_[i].turn.store(i, std::memory_order_relaxed);
  }

  bool put(Row &&row) {
    if (length() >= capacity_) return false;
    size_t at = put_.load(std::memory_order_relaxed);
    for (;;) {
      Place &place = places_[at & (size_ - 1)];
      auto behind = static_cast<intptr_t>(place.turn.load(std::memory_order_acquire) - at);
      if (behind < 0) return false;
      if (behind == 0 && put_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
        place.row = std::move(row);
        place.turn.store(at + 1, std::memory_order_release);
        return true;
      }
      if (behind > 0) at = put_.load(std::memory_order_relaxed);
    }
  }

  bool take(Row &row) {
    size_t at = taken_.load(std::memory_order_relaxed);
    for (;;) {
      Place &place = places_[at & (size_ - 1)];
      auto behind = static_cast<intptr_t>(place.turn.load(std::memory_order_acquire) - (at + 1));
      if (behind < 0) return false;
      if (behind == 0 && taken_.compare_exchange_weak(at, at + 1, std::memory_order_relaxed)) {
        row = std::move(place.row);
        place.turn.store(at + size_, std::memory_order_release);
        return true;
      }
      if (behind > 0) at = taken_.load(std::memory_order_relaxed);
    }
  }

  size_t capacity() const { return capacity_; }

  size_t length() const {
    size_t taken = taken_.load(std::memory_order_relaxed);
    return put_.load(std::memory_order_relaxed) - taken;
  }

 private:
  struct Place {
    std::atomic<size_t> turn;
    Row row;
  };
  size_t capacity_, size_ = 2;
  std::unique_ptr<Place[]> places_;
  alignas(64) std::atomic<size_t> put_{0};
  alignas(64) std::atomic<size_t> taken_{0};
};

// --- the recording ------------------------------------------------------------------------------------------------------

enum Code : int64_t { kUnknown = -1, kUser = 0, kApi = 1, kTransparent = 2, kPassed = 3, kPartOfApi = 4 };

// A place in the code: the user's frame, and what was called there: a function of the API, or an operation itself.
struct Place {
  const void *code;
  int64_t offset, called;
  bool operator==(const Place &other) const {
    return code == other.code && offset == other.offset && called == other.called;
  }
};

struct HashOfPlace {
  size_t operator()(const Place &place) const {
    int64_t words[] = {reinterpret_cast<int64_t>(place.code), place.offset, place.called};
    return hash_of(words, 3);
  }
};

// What is recorded now. There is one, which every session begins anew.
struct Recording {
  std::atomic<bool> active{false};
  std::atomic<bool> marks{false};  // a tool is attached
  std::atomic<bool> opens{false};  // Python is to open something around every launch
  std::atomic<int64_t> step{0};
  std::atomic<uint64_t> session{0};
  Counter ids{0}, dropped{0}, errors{0};
  std::atomic<int> coalescing{0};  // threads that gather a batch
  std::atomic<Ring *> ring{nullptr};
  std::mutex lock;  // of what follows; never held while Python runs
  std::string first_error;
  std::unordered_map<const void *, std::shared_ptr<Group>> groups;
  std::unordered_map<const void *, int64_t> codes;
  std::unordered_map<Place, std::shared_ptr<Object>, HashOfPlace> sites;
  std::unordered_map<int64_t, std::shared_ptr<Object>> new_objects;  // by the number that Python was given
  std::unordered_multimap<uint64_t, std::shared_ptr<Kind>> kinds;    // by the hash of their words
  size_t words_of_kinds = 0;

  void forget_kinds() {
    kinds.clear();
    words_of_kinds = 0;
  }
};

Recording &to = *new Recording;
std::atomic<uint64_t> generation{0};

constexpr size_t kMostKinds = 4096;
constexpr size_t kMostWords = 1 << 18;

PyObject *describe = nullptr;
const void *batch_code = nullptr;
int batch_requests = -1;

// What a thread has looked up before. A key is kept where its hash says, over what was there.
struct ThreadTables {
  uint64_t generation = UINT64_MAX, session = 0;
  struct OfGroup {
    const void *pointer = nullptr;
    std::shared_ptr<Group> group;
  };
  struct OfCode {
    const void *code = nullptr;
    int64_t kind = kUnknown;
  };
  struct OfPlace {
    Place place{nullptr, 0, 0};
    std::shared_ptr<Object> site;
  };
  std::array<OfGroup, 64> groups;
  std::array<OfCode, 512> codes;
  std::array<OfPlace, 256> sites;
  std::array<std::shared_ptr<Kind>, 1024> kinds;
  Words words;
  uint64_t python_calls = 0;
  std::shared_ptr<Object> passing_site;  // one that is not kept, for its code has died meanwhile
  int64_t batch = kNone;      // of coalesced calls: the id of the first; -1 before that
  int64_t p2p_batch = kNone;  // of `batch_isend_irecv`
};

ThreadTables &tables_of_thread() {
  thread_local std::unique_ptr<ThreadTables> tables;
  if (tables == nullptr) tables = std::make_unique<ThreadTables>();
  uint64_t now = generation.load(std::memory_order_acquire);
  if (tables->generation != now) {
    // In place: a call on this thread that Python runs within holds on to it.
    tables->groups.fill({});
    tables->codes.fill({});
    tables->sites.fill({});
    tables->kinds.fill({});
    tables->generation = now;
    if (uint64_t session = to.session; tables->session != session) {
      tables->session = session;
      tables->batch = tables->p2p_batch = kNone;
    }
  }
  return *tables;
}

size_t slot(const void *pointer, size_t count) {
  return (reinterpret_cast<uintptr_t>(pointer) >> 4) * 0x9e3779b1u % count;
}

// --- Python, called as an operation of torch -----------------------------------------------------------------------------

// What Python threw while it ran for us: it is the script's, and no failure of ours.
struct FromPython {
  std::exception_ptr error;
};

int64_t call_python(const char *name, std::initializer_list<c10::IValue> arguments) {
  tables_of_thread().python_calls++;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack(arguments);
  try {
    // At this key alone: no mode of the user's sees it.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), &stack);
  } FORCED_UNWIND catch (...) {
    throw FromPython{std::current_exception()};
  }
  return stack.at(0).toInt();
}

// What a capsule in an object of torch's holds: of a process group or a reduction that is the thing itself.
torch::CustomClassHolder *held_by(const c10::IValue &boxed) {
  return static_cast<torch::CustomClassHolder *>(const_cast<void *>(boxed.toObjectRef().getSlot(0).internalToPointer()));
}

const std::shared_ptr<Group> *group_of(ThreadTables &tables, const c10::IValue &boxed) {
  auto *pointer = held_by(boxed);
  if (pointer == nullptr) return nullptr;
  auto &known = tables.groups[slot(pointer, tables.groups.size())];
  if (known.pointer == pointer) return &known.group;
  std::shared_ptr<Group> group;
  {
    std::lock_guard<std::mutex> guard(to.lock);
    auto found = to.groups.find(pointer);
    if (found != to.groups.end()) group = found->second;
  }
  if (group == nullptr) {
    int64_t number = call_python("crossrank::group", {boxed});
    if (number < 0) return nullptr;
    c10::weak_intrusive_ptr<torch::CustomClassHolder> weak(boxed.toObjectRef().getSlot(0).toCapsule());
    std::lock_guard<std::mutex> guard(to.lock);
    auto state = to.new_objects.extract(number);
    auto &made = to.groups[pointer];  // unless another thread was faster
    if (made == nullptr && !state.empty()) made.reset(new Group{number, state.mapped(), std::move(weak), {}, {}});
    group = made;
    if (group == nullptr) return nullptr;
  }
  known.pointer = pointer;
  known.group = group;
  return &known.group;
}

int64_t kind_of_code(ThreadTables &tables, const void *code) {
  auto &known = tables.codes[slot(code, tables.codes.size())];
  if (known.code == code) return known.kind;
  std::lock_guard<std::mutex> guard(to.lock);
  auto found = to.codes.find(code);
  if (found == to.codes.end()) return kUnknown;
  known.code = code;
  known.kind = found->second;
  return known.kind;
}

// What `CallSites.find` sees of the frames above the kernel.
struct Above {
  Place place{nullptr, -1, 0};
  crossrank_frame *api = nullptr;
  bool is_known = true;
};

Above look_above(ThreadTables &tables, const Op &op) {
  Above above;
  bool direct = true, running = true;
  for (auto *frame = crossrank_first_frame(); frame != nullptr; frame = crossrank_next_frame(frame)) {
    const void *code = crossrank_code(frame);
    switch (kind_of_code(tables, code)) {
      case kUnknown:
        above.is_known = false;
        return above;
      case kUser:
        above.place.code = code;
        above.place.offset = crossrank_offset(frame);
        if (direct) above.place.called = -1 - op.number;
        return above;
      case kApi:
        if (running) {
          above.place.called = reinterpret_cast<int64_t>(code);
          above.api = frame;
        }
        break;
      case kPassed:
        if (above.api != nullptr) running = false;
        break;
    }
    direct = false;
  }
  return above;
}

// Whether a tensor has data: not one of a fake mode, of a tracer, or on the meta device.
bool is_real(const at::Tensor &tensor) {
  auto keys = tensor.key_set();
  // A fake tensor has the keys of the device that it stands for, and its storage on the meta device.
  return !keys.has_backend(c10::BackendComponent::MetaBit) && !keys.has(c10::DispatchKey::Functionalize) &&
         (!keys.has(c10::DispatchKey::Python) || (tensor.has_storage() && !tensor.storage().device().is_meta()));
}

void add_tensor(Words &words, const at::Tensor &tensor) {
  auto sizes = tensor.sizes();
  words.push_back(static_cast<int64_t>(tensor.scalar_type()) << 32 | static_cast<int64_t>(sizes.size()));
  words.insert(words.end(), sizes.begin(), sizes.end());
}

// The device of the first tensor of an argument; None where it has none.
c10::IValue device_in(const c10::IValue &value) {
  if (value.isTensor()) {
    const at::Tensor &tensor = value.toTensor();
    return tensor.defined() && is_real(tensor) ? c10::IValue(tensor.device().str()) : c10::IValue();
  }
  if (value.isList())
    for (const c10::IValue &item : value.toListRef())
      if (auto found = device_in(item); !found.isNone()) return found;
  return {};
}

const std::shared_ptr<Object> *site_of(
    ThreadTables &tables, const Op &op, const c10::IValue *args, Above &above) {
  above = look_above(tables, op);
  auto &known = tables.sites[HashOfPlace()(above.place) % tables.sites.size()];
  if (above.is_known && known.site != nullptr && known.place == above.place) return &known.site;
  if (above.is_known) {
    std::lock_guard<std::mutex> guard(to.lock);
    auto found = to.sites.find(above.place);
    if (found != to.sites.end()) {
      known.place = above.place;
      known.site = found->second;
      return &known.site;
    }
  }
  c10::IValue device;
  for (size_t i = 0; i < op.tensors.size() && device.isNone(); i++) device = device_in(args[op.tensors[i]]);
  int64_t number = call_python("crossrank::site", {c10::IValue(op.number), device});
  if (number < 0) return nullptr;
  above = look_above(tables, op);
  std::lock_guard<std::mutex> guard(to.lock);
  auto made = to.new_objects.extract(number);
  if (made.empty()) return nullptr;
  if (!above.is_known) {
    tables.passing_site = made.mapped();
    return &tables.passing_site;
  }
  to.sites[above.place] = made.mapped();
  auto &learnt = tables.sites[HashOfPlace()(above.place) % tables.sites.size()];
  learnt.place = above.place;
  learnt.site = made.mapped();
  return &learnt.site;
}

constexpr int64_t kEndOfArgument = -1;

// False where a tensor has no data.
bool add_tensors(Words &words, const c10::IValue &value, int64_t &device) {
  if (value.isTensor()) {
    const at::Tensor &tensor = value.toTensor();
    if (!tensor.defined()) return true;
    if (!is_real(tensor)) return false;
    if (device == kNone) device = static_cast<int64_t>(tensor.device().type()) << 32 | (tensor.device().index() + 1);
    add_tensor(words, tensor);
    return true;
  }
  if (!value.isList()) return true;
  for (const c10::IValue &item : value.toListRef())
    if (!add_tensors(words, item, device)) return false;
  return true;
}

void add_numbers(Words &words, const c10::IValue &value) {
  size_t before = words.size();
  words.push_back(0);
  for (const c10::IValue &item : value.toListRef()) words.push_back(item.toInt());
  words[before] = static_cast<int64_t>(words.size() - before - 1);
}

int64_t number_of(const c10::IValue &value) {
  if (value.isBool()) return value.toBool();
  return value.isInt() ? value.toInt() : kNone;
}

// The words of a call: number of the op, device of the first tensor, reduction; the arguments; group, and site.
constexpr size_t kDevice = 1, kReduce = 2, kBefore = 3, kBehind = 2;

// Puts all but group and site; false where the call is none.
bool read_call(Words &words, const Op &op, const c10::IValue *args) {
  words.clear();
  words.push_back(op.number);
  words.push_back(kNone);
  words.push_back(
      op.reduce < 0 || held_by(args[op.reduce]) == nullptr ? kNone
                    : static_cast<int64_t>(
                          static_cast<c10d::ReduceOp *>(held_by(args[op.reduce]))->op_));
  for (int at : op.values) words.push_back(number_of(args[at]));
  int64_t device = kNone;
  for (int at : op.tensors) {
    if (!add_tensors(words, args[at], device)) return false;
    words.push_back(kEndOfArgument);
  }
  words[kDevice] = device;
  if (op.dummy >= 0) {
    size_t before = words.size();
    if (!add_tensors(words, args[op.dummy], device)) return false;
    words.resize(before);
  }
  for (int at : {op.in_split, op.out_split})
    if (at >= 0) add_numbers(words, args[at]);
  return true;
}

const std::shared_ptr<Kind> &kind_of(
    ThreadTables &tables, const Op &op, const std::shared_ptr<Group> &group, const std::shared_ptr<Object> &site,
    const c10::IValue *args) {
  Words &words = tables.words;
  words.push_back(group->number);
  words.push_back(reinterpret_cast<int64_t>(site.get()));
  uint64_t hash = hash_of(words.data(), words.size());
  auto &known = tables.kinds[hash % tables.kinds.size()];
  if (known != nullptr && known->words == words) return known;
  std::lock_guard<std::mutex> guard(to.lock);
  auto [found, end] = to.kinds.equal_range(hash);
  while (found != end && found->second->words != words) ++found;
  if (found != end) return known = found->second;
  if (to.kinds.size() >= kMostKinds || to.words_of_kinds > kMostWords) {
    to.forget_kinds();
    generation.fetch_add(1);  // threads forget them too, each at its next call
  }
  Counter *counter = &group->calls;
  if (op.is_p2p) counter = &group->pairs[{op.peer < 0 ? kNone : number_of(args[op.peer]), op.is_send}];
  auto made = std::make_shared<Kind>(to.session, op, group, site, words, counter);
  to.kinds.emplace(hash, made);
  to.words_of_kinds += words.size();
  return known = made;
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// Whether `batch_isend_irecv` makes its first call: it keeps the requests of those before in a local list.
bool begins_batch(crossrank_frame *api) {
  if (batch_requests < 0) return true;  // a torch that calls the list otherwise
  auto *requests = static_cast<PyObject *>(crossrank_local(api, batch_requests));
  return requests == nullptr || !PyList_CheckExact(requests) || PyList_GET_SIZE(requests) == 0;
}


void failed(const char *what) {
  to.errors.fetch_add(1);
  std::lock_guard<std::mutex> guard(to.lock);
  if (to.first_error.empty()) to.first_error = what;
}

#ifdef CROSSRANK_NVTX
nvtxDomainHandle_t domain() {
  static nvtxDomainHandle_t made = nvtxDomainCreateA("crossrank");
  return made;
}

void push_range(const void *message, int64_t id) {
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
  attributes.payload.llValue = id;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = static_cast<nvtxStringHandle_t>(const_cast<void *>(message));
  nvtxDomainRangePushEx(domain(), &attributes);
}

void pop_range() { nvtxDomainRangePop(domain()); }

// Each text once: a tool keeps what is registered.
const void *registered(const std::string &text) {
  static auto &lock = *new std::mutex;  // of its own: a tool may do anything, fork included
  static auto &known = *new std::unordered_map<std::string, const void *>;
  std::lock_guard<std::mutex> guard(lock);
  auto &handle = known[text];
  if (handle == nullptr) handle = nvtxDomainRegisterStringA(domain(), text.c_str());
  return handle;
}
#else
void push_range(const void *, int64_t) {}
void pop_range() {}
const void *registered(const std::string &) { return nullptr; }
#endif

// What was opened before a launch.
struct Opened {
  bool range = false;
  bool by_python = false;
};

void close(Opened opened) {
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

Opened open(const std::shared_ptr<Kind> &kind, int64_t id) {
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

// Records the call that is about to be launched; returns what has to be closed after it.
Opened record(const Op &op, const torch::jit::Stack &stack) {
  if (!to.active.load(std::memory_order_relaxed)) return {};
  const c10::IValue *args = stack.data() + stack.size() - op.arguments;
  ThreadTables &tables = tables_of_thread();
  try {
    const auto *group = group_of(tables, args[op.group]);
    if (group == nullptr) return {};
    uint64_t before = tables.python_calls;
    Above above;
    const auto *site = site_of(tables, op, args, above);
    if (site == nullptr) return {};
    std::shared_ptr<Object> kept;
    if (tables.python_calls != before) {  // which may have thrown away what this thread knew
      kept = *site;
      site = &kept;
      group = group_of(tables, args[op.group]);
      if (group == nullptr || kept == nullptr) return {};
    }
    if (!read_call(tables.words, op, args)) return {};
    const auto &kind = kind_of(tables, op, *group, *site, args);
    int64_t id = to.ids.fetch_add(1, std::memory_order_relaxed);
    Row row{kind, id, kind->counter->fetch_add(1, std::memory_order_relaxed) + 1, 0,
            to.step.load(std::memory_order_relaxed), kNone, kNone};
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
    row.time = now_ns();
    Ring *ring = to.ring.load(std::memory_order_acquire);
    if (ring == nullptr || !ring->put(std::move(row))) to.dropped.fetch_add(1);
    return open(kind, id);
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

// What Python raised within the launch, put aside while Python runs for us.
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

class Kernel : public c10::OperatorKernel {
 public:
  explicit Kernel(Op op) : op_(std::move(op)) {}

  void operator()(const c10::OperatorHandle &handle, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
    static const c10::DispatchKeySet after(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    Opened opened = record(op_, *stack);
    try {
      handle.redispatchBoxed(keys & after, stack);
    } FORCED_UNWIND catch (...) {
      AsideError aside(opened.by_python);
      close(opened);
      throw;
    }
    close(opened);
  }

 private:
  Op op_;
};

// Functors are kept for good: a call may be within one that is taken away. Nor does the process's exit take them away,
// for which a forked child would need a lock that a thread of its parent may hold.
auto &kernels = *new std::vector<std::pair<std::string, c10::KernelFunction>>;
auto &registrations = *new std::vector<c10::RegistrationHandleRAII>;

// --- the module ---------------------------------------------------------------------------------------------------------

std::vector<int> integers(PyObject *sequence) {
  std::vector<int> found;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sequence); i++)
    found.push_back(static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(sequence, i))));
  return found;
}

// install(ops, describe, batch_code, batch_requests): `ops` are (name, arguments, is_p2p, is_send, places, values,
// tensors), the places those of group, reduce, peer, tag, in_split, out_split and dummy.
PyObject *install(PyObject *, PyObject *args) {
  PyObject *ops, *callback, *code;
  int requests;
  if (!PyArg_ParseTuple(args, "O!OOi", &PyTuple_Type, &ops, &callback, &code, &requests)) return nullptr;
  Py_INCREF(callback);
  Py_XSETREF(describe, callback);
  batch_code = code;
  batch_requests = requests;
  for (Py_ssize_t i = static_cast<Py_ssize_t>(kernels.size()); i < PyTuple_GET_SIZE(ops); i++) {
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
    kernels.emplace_back(name, c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(op))));
  }
  std::string failure;
  Py_BEGIN_ALLOW_THREADS  // the dispatcher's lock may be held by a thread that waits for the interpreter's
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

// begin(capacity): a session begins, with nothing known; `set_active` lets its calls be recorded.
PyObject *begin(PyObject *, PyObject *args) {
  let_dropped_go();
  Py_ssize_t capacity;
  if (!PyArg_ParseTuple(args, "n", &capacity)) return nullptr;
  to.active = false;
  to.session++;
  to.step = to.ids = to.dropped = to.errors = 0;
  to.coalescing = 0;
  Ring *ring = to.ring.load();
  // One that another thread may still put a row in is never freed: sessions with another capacity are rare.
  if (ring == nullptr || ring->capacity() != static_cast<size_t>(capacity))
    to.ring = new Ring(static_cast<size_t>(capacity));
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

PyObject *set_active(PyObject *, PyObject *value) {
  to.active = PyObject_IsTrue(value) == 1;
  Py_RETURN_NONE;
}

// set_opens(marks, opens): whether a tool is to see the launches, and whether Python opens something around each.
PyObject *set_opens(PyObject *, PyObject *args) {
  int marks, opens;
  if (!PyArg_ParseTuple(args, "pp", &marks, &opens)) return nullptr;
  to.marks = marks != 0;
  to.opens = opens != 0;
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

// set_marker(kind, text, final): what a tool is to see around the launches of a kind, None = nothing; for good if final.
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

PyObject *set_step(PyObject *, PyObject *value) {
  int64_t step = PyLong_AsLongLong(value);
  if (step == -1 && PyErr_Occurred()) return nullptr;
  to.step = step;
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

// forget_code(id(code)): a code object has died, and its address may become another's.
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

// add_site(site), add_group(state): a number for it, by which the kernel takes it over.
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
  for (auto at = to.kinds.begin(); at != to.kinds.end();)
    at = at->second->group->number == number ? to.kinds.erase(at) : std::next(at);
  generation.fetch_add(1);
  Py_RETURN_NONE;
}

PyObject *start_coalescing(PyObject *, PyObject *) {
  auto &tables = tables_of_thread();
  if (tables.batch == kNone) to.coalescing.fetch_add(1);
  tables.batch = -1;
  Py_RETURN_NONE;
}

// end_coalescing(): the id of the first call of the batch; -1 = it had none, None = there was no batch.
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

// The descriptor of a kind, borrowed; NULL with an exception set.
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

// scalar_types(): their names, as the words of calls number them.
PyObject *scalar_types(PyObject *, PyObject *) {
  PyObject *names = PyList_New(0);
  for (int i = 0; names != nullptr && i < static_cast<int>(c10::ScalarType::NumOptions); i++) {
    PyObject *name = PyUnicode_FromString(c10::toString(static_cast<c10::ScalarType>(i)));
    if (name == nullptr || PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

// take(most): up to so many calls as (descriptor, id, number, time, step, batch, tag).
PyObject *take(PyObject *, PyObject *value) {
  Py_ssize_t most = PyLong_AsSsize_t(value);
  if (most == -1 && PyErr_Occurred()) return nullptr;
  let_dropped_go();
  PyObject *list = PyList_New(0);
  Ring *ring = to.ring.load();
  if (list == nullptr || ring == nullptr) return list;
  Row row;
  while (PyList_GET_SIZE(list) < most && ring->take(row)) {
    if (row.kind->session != to.session) continue;  // of a thread that was late to see the end of the last one
    PyObject *found = descriptor_of(*row.kind);
    PyObject *call = nullptr;
    if (found != nullptr)
      call = Py_BuildValue("OLLLLNN", found, row.id, row.number, row.time, row.step, number_or_none(row.batch),
                           number_or_none(row.tag));
    if (call == nullptr || PyList_Append(list, call) < 0) {
      Py_XDECREF(call);
      Py_DECREF(list);
      return nullptr;
    }
    Py_DECREF(call);
  }
  return list;
}

PyObject *state(PyObject *, PyObject *) {
  Ring *ring = to.ring.load();
  std::string error;
  {
    std::lock_guard<std::mutex> guard(to.lock);
    error = to.first_error;
  }
  return Py_BuildValue("{sLsnsLsLsNsi}", "calls", to.ids.load(), "waiting", static_cast<Py_ssize_t>(ring == nullptr ? 0 : ring->length()),
                       "dropped", to.dropped.load(), "errors", to.errors.load(), "first_error",
                       PyUnicode_DecodeUTF8(error.data(), static_cast<Py_ssize_t>(error.size()), "replace"),
                       "coalescing", to.coalescing.load());
}

PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, nullptr},
    {"uninstall", uninstall, METH_NOARGS, nullptr},
    {"begin", begin, METH_VARARGS, nullptr},
    {"set_active", set_active, METH_O, nullptr},
    {"set_opens", set_opens, METH_VARARGS, nullptr},
    {"has_nvtx", has_nvtx, METH_NOARGS, nullptr},
    {"set_marker", set_marker, METH_VARARGS, nullptr},
    {"set_step", set_step, METH_O, nullptr},
    {"know_code", know_code, METH_VARARGS, nullptr},
    {"forget_code", forget_code, METH_VARARGS, nullptr},
    {"add_site", add_object, METH_O, nullptr},
    {"add_group", add_object, METH_O, nullptr},
    {"clear_sites", clear_sites, METH_NOARGS, nullptr},
    {"forget_group", forget_group, METH_O, nullptr},
    {"start_coalescing", start_coalescing, METH_NOARGS, nullptr},
    {"end_coalescing", end_coalescing, METH_NOARGS, nullptr},
    {"descriptor", descriptor, METH_O, nullptr},
    {"device", device, METH_O, nullptr},
    {"scalar_types", scalar_types, METH_NOARGS, nullptr},
    {"take", take, METH_O, nullptr},
    {"state", state, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_crossrank_recorder", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__crossrank_recorder() {
  // A forked child has the locks as they are, and none of the threads that would give them back.
  pthread_atfork(
      [] {
        to.lock.lock();
        dropped_lock.lock();
      },
      [] {
        dropped_lock.unlock();
        to.lock.unlock();
      },
      [] {
        to.active = false;
        to.ring = nullptr;  // left behind: a thread of the parent may have been putting a row in
        dropped_lock.unlock();
        to.lock.unlock();
      });
  return PyModule_Create(&module);
}
