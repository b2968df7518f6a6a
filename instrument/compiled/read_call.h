// Reads the data that identify a call: its group, source line and arguments.
#pragma once

#include "frames.h"
#include "recording.h"

namespace crossrank {

// --- Python, called as an operation of torch -----------------------------------------------------------------------------

// An exception that Python threw while it ran for the recorder: it belongs to the script, and is not our failure.
struct FromPython {
  std::exception_ptr error;
};

inline int64_t call_python(const char *name, std::initializer_list<c10::IValue> arguments) {
  tables_of_thread().python_calls++;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack(arguments);
  try {
    // Only at this key, so that users' modes do not see it.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), &stack);
  } FORCED_UNWIND catch (...) {
    throw FromPython{std::current_exception()};
  }
  return stack.at(0).toInt();
}

// Returns the content of a capsule in an object of torch: the process group or reduction itself.
inline torch::CustomClassHolder *held_by(const c10::IValue &boxed) {
  return static_cast<torch::CustomClassHolder *>(const_cast<void *>(boxed.toObjectRef().getSlot(0).internalToPointer()));
}

inline const std::shared_ptr<Group> *group_of(ThreadTables &tables, const c10::IValue &boxed) {
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
    auto &made = to.groups[pointer];  // another thread may have been faster
    if (made == nullptr && !state.empty()) made.reset(new Group{number, state.mapped(), std::move(weak), {}, {}});
    group = made;
    if (group == nullptr) return nullptr;
  }
  known.pointer = pointer;
  known.group = group;
  return &known.group;
}

inline int64_t kind_of_code(ThreadTables &tables, const void *code) {
  auto &known = tables.codes[slot(code, tables.codes.size())];
  if (known.code == code) return known.kind;
  std::lock_guard<std::mutex> guard(to.lock);
  auto found = to.codes.find(code);
  if (found == to.codes.end()) return kUnknown;
  known.code = code;
  known.kind = found->second;
  return known.kind;
}

// The data of the frames above the kernel that `CallSites.find` uses.
struct Above {
  Place place{nullptr, -1, 0};
  const void *first = nullptr;  // code of the innermost frame; NULL if the thread runs no Python
  crossrank_frame *api = nullptr;
  bool is_known = true;
};

inline Above look_above(ThreadTables &tables, const Op &op) {
  Above above;
  bool direct = true, running = true;
  for (auto *frame = crossrank_first_frame(); frame != nullptr; frame = crossrank_next_frame(frame)) {
    const void *code = crossrank_code(frame);
    if (above.first == nullptr) above.first = code;
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

// Whether a tensor has data: false for tensors of a fake mode, of a tracer, or on the meta device.
inline bool is_real(const at::Tensor &tensor) {
  auto keys = tensor.key_set();
  // A fake tensor has the keys of the device that it imitates, and its storage on the meta device.
  return !keys.has_backend(c10::BackendComponent::MetaBit) && !keys.has(c10::DispatchKey::Functionalize) &&
         (!keys.has(c10::DispatchKey::Python) || (tensor.has_storage() && !tensor.storage().device().is_meta()));
}

inline void add_tensor(Words &words, const at::Tensor &tensor) {
  auto sizes = tensor.sizes();
  words.push_back(static_cast<int64_t>(tensor.scalar_type()) << 32 | static_cast<int64_t>(sizes.size()));
  words.insert(words.end(), sizes.begin(), sizes.end());
}

// The device of the first tensor of an argument; None without a tensor.
inline c10::IValue device_in(const c10::IValue &value) {
  if (value.isTensor()) {
    const at::Tensor &tensor = value.toTensor();
    return tensor.defined() && is_real(tensor) ? c10::IValue(tensor.device().str()) : c10::IValue();
  }
  if (value.isList())
    for (const c10::IValue &item : value.toListRef())
      if (auto found = device_in(item); !found.isNone()) return found;
  return {};
}

inline const std::shared_ptr<Object> *site_of(
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

// Returns false if a tensor has no data.
inline bool add_tensors(Words &words, const c10::IValue &value, int64_t &device) {
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

inline void add_numbers(Words &words, const c10::IValue &value) {
  size_t before = words.size();
  words.push_back(0);
  for (const c10::IValue &item : value.toListRef()) words.push_back(item.toInt());
  words[before] = static_cast<int64_t>(words.size() - before - 1);
}

inline int64_t number_of(const c10::IValue &value) {
  if (value.isBool()) return value.toBool();
  return value.isInt() ? value.toInt() : kNone;
}

// The words of a call: number of the op, device of the first tensor, reduction; the arguments; group, and site.
constexpr size_t kDevice = 1, kReduce = 2, kBefore = 3, kBehind = 2;

// Writes all words except group and site; returns false if the call has fake tensors.
inline bool read_call(Words &words, const Op &op, const c10::IValue *args) {
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

inline const std::shared_ptr<Kind> &kind_of(
    ThreadTables &tables, const Op &op, const std::shared_ptr<Group> &group, const std::shared_ptr<Object> &site,
    const c10::IValue *args) {
  Words &words = tables.words;
  words.push_back(group->number);
  words.push_back(reinterpret_cast<int64_t>(site.get()));
  uint64_t hash = hash_of(words.data(), words.size());
  auto &known = tables.kinds[hash % tables.kinds.size()];
  if (known != nullptr && known->words == words) return known;
  std::lock_guard<std::mutex> guard(to.lock);
  // The earlier calls of this thread must be found again, even those from long ago.
  if (known != nullptr && known->session == to.session) {
    uint64_t before = hash_of(known->words.data(), known->words.size());
    if (to.keep_kind(before, known->words) == nullptr) to.add_kind(before, known);
  }
  if (std::shared_ptr<Kind> kept = to.keep_kind(hash, words)) return known = kept;
  Counter *counter = &group->calls;
  if (op.is_p2p) counter = &group->pairs[{op.peer < 0 ? kNone : number_of(args[op.peer]), op.is_send}];
  auto kind = std::make_shared<Kind>(to.session, op, group, site, words, counter);
  to.add_kind(hash, kind);
  return known = kind;
}

// Whether `batch_isend_irecv` makes its first call: it keeps the earlier requests in a local list.
inline bool begins_batch(crossrank_frame *api) {
  if (batch_requests < 0) return true;  // in this torch the list has another name
  auto *requests = static_cast<PyObject *>(crossrank_local(api, batch_requests));
  return requests == nullptr || !PyList_CheckExact(requests) || PyList_GET_SIZE(requests) == 0;
}

}  // namespace crossrank
