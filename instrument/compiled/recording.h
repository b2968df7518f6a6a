// What is recorded, and the tables in which a call looks up what it shares with others.
#pragma once

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

#include <sys/syscall.h>
#include <unistd.h>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "ring.h"

// A thread that is ended while it waits for the interpreter's lock unwinds its stack, which nothing may stop.
#ifdef __GLIBCXX__
#include <cxxabi.h>
#define FORCED_UNWIND catch (abi::__forced_unwind &) { throw; }
#else
#define FORCED_UNWIND
#endif

namespace crossrank {

constexpr int64_t kNone = INT64_MIN;
constexpr const char *kDebug = "crossrank";

// --- Python objects, which are only let go by a thread that has the interpreter's lock -------------------------------

// Never destroyed, as all that threads may still use while the process exits.
inline std::mutex &dropped_lock = *new std::mutex;
inline std::vector<PyObject *> &dropped = *new std::vector<PyObject *>;

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

inline void let_dropped_go() {
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

inline uint64_t hash_of(const int64_t *words, size_t count) {
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
      : words(std::move(words)), counter(counter), session(session), op(&op), group(std::move(group)),
        site(std::move(site)) {}
  Words words;  // first, with all that a call needs of its kind
  Counter *counter;
  uint64_t session;
  std::atomic<Marker> marker{Marker::kUnknown};
  const Op *op;
  std::shared_ptr<Group> group;
  std::shared_ptr<Object> site;
  std::unique_ptr<Object> descriptor;  // made under the interpreter's lock by whoever needs it first
  std::atomic<const void *> message{nullptr};  // of NVTX
};

// One call; a batch or tag that it has none of is kNone.
struct Row {
  std::shared_ptr<Kind> kind;
  int64_t id, number, time, step, batch, tag, thread;
};

// What a time of a call is: that of a thread that waited in `Work.wait`, in `wait_tensor`, in the launch itself or at the
// end of a backward pass; or that from the launch to the end of the communication.
enum class Of : int64_t { kWork, kTensor, kLaunch, kBackward, kCommunication };

// A time of a call; an id of -1 = of one that is not known.
struct Span {
  uint64_t session = 0;
  int64_t id = 0, begin = 0, end = 0, thread = 0;
  Of of = Of::kWork;
  bool raised = false;
};

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

constexpr size_t kMostKinds = 1024;
constexpr size_t kMostWords = 1 << 17;

// Kinds by the hash of their words.
class Kinds {
 public:
  // Takes out the kind of these words; NULL where it is not there.
  std::shared_ptr<Kind> take(uint64_t hash, const Words &words) {
    auto found = find(hash, words);
    if (found == kinds_.end()) return nullptr;
    std::shared_ptr<Kind> kind = std::move(found->second);
    kinds_.erase(found);
    words_ -= words.size();
    return kind;
  }
  const std::shared_ptr<Kind> *at(uint64_t hash, const Words &words) {
    auto found = find(hash, words);
    return found == kinds_.end() ? nullptr : &found->second;
  }
  void add(uint64_t hash, const std::shared_ptr<Kind> &kind) {
    kinds_.emplace(hash, kind);
    words_ += kind->words.size();
  }
  bool is_full() const { return kinds_.size() >= kMostKinds || words_ > kMostWords; }
  void forget_group(int64_t number) {
    for (auto at = kinds_.begin(); at != kinds_.end();)
      at = at->second->group->number == number ? kinds_.erase(at) : std::next(at);
  }

 private:
  using ByHash = std::unordered_multimap<uint64_t, std::shared_ptr<Kind>>;
  ByHash::iterator find(uint64_t hash, const Words &words) {
    auto [found, end] = kinds_.equal_range(hash);
    while (found != end && found->second->words != words) ++found;
    return found == end ? kinds_.end() : found;
  }
  ByHash kinds_;
  size_t words_ = 0;
};

// What is recorded now. There is one, which every session begins anew.
// What every call needs stands first, in one cache line.
struct alignas(64) Recording {
  std::atomic<bool> active{false};
  std::atomic<bool> marks{false};  // a tool is attached
  std::atomic<bool> timing{false};  // when a call of a CPU backend is over is recorded
  std::atomic<bool> opens{false};  // Python is to open something around every launch
  std::atomic<int> coalescing{0};  // threads that gather a batch
  std::atomic<int64_t> step{0};
  std::atomic<uint64_t> session{0};
  Counter ids{0};
  std::atomic<Ring<Row> *> ring{nullptr};
  std::atomic<Ring<Span> *> spans{nullptr};
  Counter dropped{0}, spans_dropped{0}, errors{0};
  std::mutex lock;  // of what follows; never held while Python runs
  std::string first_error;
  std::unordered_map<const void *, std::shared_ptr<Group>> groups;
  std::unordered_map<const void *, int64_t> codes;
  std::unordered_map<Place, std::shared_ptr<Object>, HashOfPlace> sites;
  std::unordered_map<int64_t, std::shared_ptr<Object>> new_objects;  // by the number that Python was given
  Kinds kinds, older_kinds;

  void forget_kinds() { kinds = older_kinds = {}; }
  // The kind of these words, from now on one of the newer ones; NULL where it is not there. Calls that repeat
  // themselves so outlive those that are made once, as those of experts with splits of their own.
  std::shared_ptr<Kind> keep_kind(uint64_t hash, const Words &words) {
    if (auto *found = kinds.at(hash, words)) return *found;
    std::shared_ptr<Kind> kind = older_kinds.take(hash, words);
    if (kind != nullptr) add_kind(hash, kind);
    return kind;
  }
  void add_kind(uint64_t hash, const std::shared_ptr<Kind> &kind) {
    if (kinds.is_full()) older_kinds = std::exchange(kinds, {});
    kinds.add(hash, kind);
  }
};

inline Recording &to = *new Recording;
inline std::atomic<uint64_t> generation{0};

inline PyObject *describe = nullptr;
inline const void *batch_code = nullptr;
inline int batch_requests = -1;
inline const void *backward_code = nullptr;  // of the function in which Python starts a backward pass

// What a thread has looked up before. A key is kept where its hash says, over what was there.
struct ThreadTables {
  // What every call needs stands first, in two cache lines.
  uint64_t generation = UINT64_MAX, session = 0;
  Words words;
  uint64_t python_calls = 0;
  int64_t batch = kNone;      // of coalesced calls: the id of the first; -1 before that
  int64_t p2p_batch = kNone;  // of `batch_isend_irecv`
  int64_t thread = 0;         // as the system numbers it
  int64_t last = kNone;       // the call that this thread has launched last
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
  std::shared_ptr<Object> passing_site;  // one that is not kept, for its code has died meanwhile
};

inline ThreadTables &tables_of_thread() {
  thread_local std::unique_ptr<ThreadTables> tables;
  if (tables == nullptr) tables = std::make_unique<ThreadTables>();
  uint64_t now = generation.load(std::memory_order_acquire);
  if (tables->generation != now) {
    // In place: a call on this thread that Python runs within holds on to it.
    tables->groups.fill({});
    tables->codes.fill({});
    tables->sites.fill({});
    tables->kinds.fill({});
    tables->thread = syscall(SYS_gettid);  // another one in a forked child
    tables->generation = now;
    if (uint64_t session = to.session; tables->session != session) {
      tables->session = session;
      tables->batch = tables->p2p_batch = kNone;
    }
  }
  return *tables;
}

inline size_t slot(const void *pointer, size_t count) {
  return (reinterpret_cast<uintptr_t>(pointer) >> 4) * 0x9e3779b1u % count;
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

inline void failed(const char *what) {
  to.errors.fetch_add(1);
  std::lock_guard<std::mutex> guard(to.lock);
  if (to.first_error.empty()) to.first_error = what;
}

}  // namespace crossrank
