// The recorded rows, and the tables with the data that calls share.
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

// A thread that ends while it waits for the interpreter's lock unwinds its stack, and no code may stop this.
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

// Never destroyed, like all data that threads may use while the process exits.
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

// Positions of the arguments of an operation, from `op_schema.Reader`; -1 = no such argument.
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
  // A weak reference, so no other group gets the address while this one is known.
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

// Whether a tool gets the launches of a kind; unknown until Python has made it final.
enum class Marker { kUnknown, kNone, kRange };

// A kind: calls with the same operation, group, source line and arguments.
struct Kind {
  Kind(uint64_t session, const Op &op, std::shared_ptr<Group> group, std::shared_ptr<Object> site, Words words,
       Counter *counter)
      : words(std::move(words)), counter(counter), session(session), op(&op), group(std::move(group)),
        site(std::move(site)) {}
  Words words;  // first, next to the other data that each call needs
  Counter *counter;
  uint64_t session;
  std::atomic<Marker> marker{Marker::kUnknown};
  const Op *op;
  std::shared_ptr<Group> group;
  std::shared_ptr<Object> site;
  std::unique_ptr<Object> descriptor;  // created by its first user, under the interpreter's lock
  std::atomic<const void *> message{nullptr};  // of NVTX
};

// One call; kNone if it has no batch or tag.
struct Row {
  std::shared_ptr<Kind> kind;
  int64_t id, number, time, step, batch, tag, thread;
};

// The type of a time span of a call: a wait in `Work.wait`, in `wait_tensor`, in the launch or at the end of a backward
// pass; or the duration from the launch to the end of the communication.
enum class Of : int64_t { kWork, kTensor, kLaunch, kBackward, kCommunication };

// A time span of a call; id -1 = unknown call.
struct Span {
  uint64_t session = 0;
  int64_t id = 0, begin = 0, end = 0, thread = 0;
  Of of = Of::kWork;
  bool raised = false;
};

enum Code : int64_t { kUnknown = -1, kUser = 0, kApi = 1, kTransparent = 2, kPassed = 3, kPartOfApi = 4 };

// A source line: the user's frame, and the API function or operation that it called.
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
  // Removes and returns the kind of these words; NULL if there is none.
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

// The current recording. There is only one, which every session resets.
// The data that every call needs come first, in one cache line.
struct alignas(64) Recording {
  std::atomic<bool> active{false};
  std::atomic<bool> marks{false};  // a tool is attached
  std::atomic<bool> timing{false};  // the end of calls on a CPU backend is recorded
  std::atomic<bool> opens{false};  // Python opens ranges around every launch
  std::atomic<int> coalescing{0};  // threads that collect a batch
  std::atomic<int64_t> step{0};
  std::atomic<uint64_t> session{0};
  Counter ids{0};
  std::atomic<Ring<Row> *> ring{nullptr};
  std::atomic<Ring<Span> *> spans{nullptr};
  Counter dropped{0}, spans_dropped{0}, errors{0};
  std::mutex lock;  // for the members below; never held while Python runs
  std::string first_error;
  std::unordered_map<const void *, std::shared_ptr<Group>> groups;
  std::unordered_map<const void *, int64_t> codes;
  std::unordered_map<Place, std::shared_ptr<Object>, HashOfPlace> sites;
  std::unordered_map<int64_t, std::shared_ptr<Object>> new_objects;  // by the number that Python was given
  Kinds kinds, older_kinds;

  void forget_kinds() { kinds = older_kinds = {}; }
  // Returns the kind of these words and makes it one of the newer ones; NULL if there is none. So repeated calls
  // stay longer than unique ones, such as those of experts with varying splits.
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
inline const void *backward_code = nullptr;  // the function in which Python starts a backward pass

// The earlier look-ups of a thread. A key is stored at the place of its hash, over the key that was there.
struct ThreadTables {
  // The data that every call needs come first, in two cache lines.
  uint64_t generation = UINT64_MAX, session = 0;
  Words words;
  uint64_t python_calls = 0;
  int64_t batch = kNone;      // id of the first coalesced call; -1 before that
  int64_t p2p_batch = kNone;  // of `batch_isend_irecv`
  int64_t thread = 0;         // the system's number of the thread
  int64_t last = kNone;       // the last call of this thread
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
  std::shared_ptr<Object> passing_site;  // a site that is not kept, because its code has died
};

inline ThreadTables &tables_of_thread() {
  thread_local std::unique_ptr<ThreadTables> tables;
  if (tables == nullptr) tables = std::make_unique<ThreadTables>();
  uint64_t now = generation.load(std::memory_order_acquire);
  if (tables->generation != now) {
    // In place: a call on this thread, in which Python runs, still uses it.
    tables->groups.fill({});
    tables->codes.fill({});
    tables->sites.fill({});
    tables->kinds.fill({});
    tables->thread = syscall(SYS_gettid);  // differs in a forked child
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
