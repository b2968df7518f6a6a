// NCCL between the processes of one machine: ranks meet in shared memory, data really moves and is really reduced, and a
// collective ends on all ranks a set time after the last of them came.
#include <cuda_runtime_api.h>
#include <cupti.h>
#include "nccl_api.h"
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>

#include "device.h"
#include "meeting.h"
#include "reduce.h"

using namespace stand_in;

struct ncclComm {
  std::string id;
  Region region;
  int rank = 0, size = 0, device = 0;
  std::atomic<bool> aborted{false};
  std::atomic<int> error{ncclSuccess};
  std::uint64_t collectives = 0;  // that the host has launched
  std::uint64_t splits = 0;
  bool connected = false;
  std::uint64_t launches = 0;              // kernels of this communicator: each runs behind the one before,
  std::atomic<std::uint64_t> finished{0};  // whatever streams they are in
  Nanoseconds last_end = 0;
  std::map<int, std::uint64_t> sent_to, received_from;
  std::mutex lock;
  std::map<int, Reduction> reductions;  // made by ncclRedOpCreatePreMulSum
};

namespace {

enum class Operation_ { all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, send, receive };
const char* const names[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "SendRecv",
                             "SendRecv"};

struct Request {
  Operation_ operation;
  const void* send = nullptr;
  void* receive = nullptr;
  std::size_t count = 0;
  ncclDataType_t type = ncclInt8;
  Reduction reduction;
  int peer = 0;  // or root
  ncclComm* communicator = nullptr;
  void* stream = nullptr;
  std::uint64_t number = 0;

  bool is_p2p() const { return operation == Operation_::send || operation == Operation_::receive; }
  std::size_t bytes() const { return count * size_of(type); }
};

enum class Connects { lazily, at_every_launch, never };

Connects connects() {
  static const Connects found = [] {
    const std::string text = text_from_environment("STAND_IN_CONNECT");
    return text == "every" ? Connects::at_every_launch : text == "never" ? Connects::never : Connects::lazily;
  }();
  return found;
}

thread_local int group_depth = 0;
thread_local std::vector<Request> group;

// Bytes that one rank moves of a collective, by which its time follows from the bandwidth.
double moved_bytes(const Request& request) {
  const double bytes = static_cast<double>(request.bytes()), ranks = request.communicator->size;
  switch (request.operation) {
    case Operation_::all_reduce: return bytes * 2 * (ranks - 1) / ranks;
    case Operation_::all_gather: case Operation_::reduce_scatter: case Operation_::all_to_all: return bytes * (ranks - 1);
    default: return bytes;
  }
}

Nanoseconds communication_time(double bytes) {
  static const double latency = number_from_environment("STAND_IN_NCCL_LATENCY_US", 20) * 1e3;
  static const double bytes_per_ns = number_from_environment("STAND_IN_NCCL_GBPS", 100);
  return static_cast<Nanoseconds>(latency + bytes / bytes_per_ns);
}

// STAND_IN_SLOW_LINKS: `A-B=FACTOR` separated by semicolons: what goes between GPUs A and B, by their numbers on the
// machine, takes so many times as long.
double slowness(int one, int other) {
  static const std::map<std::pair<int, int>, double> table = [] {
    std::map<std::pair<int, int>, double> found;
    std::istringstream text(text_from_environment("STAND_IN_SLOW_LINKS"));
    for (std::string row; std::getline(text, row, ';');) {
      int from = 0, to = 0;
      double factor = 1;
      if (std::sscanf(row.c_str(), "%d-%d=%lf", &from, &to, &factor) == 3) {
        found[std::minmax(from, to)] = factor;
      }
    }
    return found;
  }();
  const auto found = table.find(std::minmax(one, other));
  return found == table.end() ? 1 : found->second;
}

// A collective goes round a ring: its slowest link counts.
double slowest_link(const ncclComm& own) {
  double found = 1;
  for (int rank = 0; rank < own.size; ++rank) {
    found = std::max(found, slowness(own.region.member(rank).device, own.region.member((rank + 1) % own.size).device));
  }
  return found;
}

Nanoseconds times(double factor, Nanoseconds time) { return static_cast<Nanoseconds>(factor * static_cast<double>(time)); }

// --- what runs in a stream -------------------------------------------------------------------------------------------

// The data that a rank needs of the others, and what becomes of it.
bool move_data(const Request& request) {
  ncclComm& own = *request.communicator;
  const std::size_t bytes = request.bytes();
  auto* output = static_cast<char*>(request.receive);
  const auto fetch = [&](int rank, std::size_t offset, void* target, std::size_t size) {
    const Member& member = own.region.member(rank);
    return read_from(member.pid, member.post.send + offset, target, size);
  };
  std::vector<std::vector<char>> inputs;
  const auto own_part = static_cast<std::size_t>(own.rank) * bytes;
  const bool is_block = request.operation == Operation_::reduce_scatter || request.operation == Operation_::all_to_all;
  const bool receives = (request.operation != Operation_::reduce && request.operation != Operation_::broadcast) ||
                        own.rank == request.peer || request.operation == Operation_::broadcast;
  for (int rank = 0; receives && rank < own.size; ++rank) {
    if (request.operation == Operation_::broadcast && rank != request.peer) continue;
    inputs.emplace_back(bytes);
    if (!fetch(rank, is_block ? own_part : 0, inputs.back().data(), bytes)) return false;
  }
  own.region.member(own.rank).post.read = request.number;
  const auto all_have_read = [&] {
    for (int rank = 0; rank < own.size; ++rank) {
      if (own.region.member(rank).post.read < request.number) return false;
    }
    return true;
  };
  // What is written now may be what others read.
  if (!wait_for(all_have_read, [&] { return own.aborted.load(); })) return false;
  if (!receives) return true;
  switch (request.operation) {
    case Operation_::all_gather:
    case Operation_::all_to_all:
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) std::memcpy(output + rank * bytes, inputs[rank].data(), bytes);
      break;
    case Operation_::broadcast: std::memcpy(output, inputs[0].data(), bytes); break;
    default: reduce(inputs, output, request.count, request.type, request.reduction);
  }
  return true;
}

// Until the communicator is aborted: as the kernels of NCCL wait for a peer that does not come.
Nanoseconds hang(ncclComm& own) {
  wait_for([] { return false; }, [&] { return own.aborted.load(); });
  return now();
}

Nanoseconds run_collective(const Request& request, Nanoseconds begin) {
  ncclComm& own = *request.communicator;
  const auto stopped = [&] { return own.aborted.load(); };
  if (is_lost()) return hang(own);
  if (const double failing = number_from_environment("STAND_IN_NCCL_ERROR", 0); failing > 0 && request.number >= failing) {
    own.error = ncclRemoteError;  // which the program finds when it asks, and the kernel waits until it aborts
    return hang(own);
  }
  Post& post = own.region.member(own.rank).post;
  post.ready = begin;
  post.operation = static_cast<std::int32_t>(request.operation), post.type = request.type;
  post.reduction = request.reduction.kind, post.factor = request.reduction.factor;
  post.root = request.peer, post.count = request.count;
  post.send = reinterpret_cast<std::uint64_t>(request.send);
  post.number = request.number;
  const auto all_came = [&] {
    for (int rank = 0; rank < own.size; ++rank) {
      if (own.region.member(rank).post.number < request.number) return false;
    }
    return true;
  };
  if (!wait_for(all_came, stopped)) return now();
  Nanoseconds last = begin;
  for (int rank = 0; rank < own.size; ++rank) {
    const Post& other = own.region.member(rank).post;
    const bool fits = other.operation == post.operation && other.count * size_of(ncclDataType_t(other.type)) == request.bytes() &&
                      other.root == post.root;
    if (!fits) return hang(own);  // NCCL reads what is not there, or waits for ever
    last = std::max(last, other.ready);
  }
  if (!move_data(request)) return hang(own);
  return last + times(slowest_link(own), communication_time(moved_bytes(request)));
}

Nanoseconds run_transfers(const std::vector<Request>& requests, Nanoseconds begin) {
  ncclComm& own = *requests.front().communicator;
  std::vector<bool> posted(requests.size()), done(requests.size());
  std::vector<Nanoseconds> ends(requests.size(), begin);
  const auto advance = [&](std::size_t index) {
    const Request& request = requests[index];
    const bool sends = request.operation == Operation_::send;
    const double factor = slowness(own.region.member(own.rank).device, own.region.member(request.peer).device);
    const Nanoseconds takes = times(factor, communication_time(static_cast<double>(request.bytes())));
    Pair& pair = sends ? own.region.pair(own.rank, request.peer) : own.region.pair(request.peer, own.rank);
    if (sends && !posted[index]) {
      if (pair.copied + 1 != request.number) return;  // the message before it
      pair.sender_ready = begin, pair.bytes = request.bytes();
      pair.address = reinterpret_cast<std::uint64_t>(request.send);
      pair.sent = request.number;
      posted[index] = true;
    }
    if (sends && pair.copied >= request.number) {
      ends[index] = std::max(begin, pair.receiver_ready) + takes;
      done[index] = true;
    }
    if (!sends && pair.sent >= request.number && pair.copied + 1 == request.number) {
      if (pair.bytes != request.bytes()) return;  // hangs, as it does with NCCL
      if (!read_from(own.region.member(request.peer).pid, pair.address, request.receive, request.bytes())) return;
      ends[index] = std::max(begin, pair.sender_ready) + takes;
      pair.receiver_ready = begin;
      pair.copied = request.number;
      done[index] = true;
    }
  };
  const auto all_done = [&] {
    bool whole = true;
    for (std::size_t index = 0; index < requests.size(); ++index) {
      if (!done[index]) advance(index);
      whole = whole && done[index];
    }
    return whole;
  };
  if (!wait_for(all_done, [&] { return own.aborted.load(); })) return now();
  return *std::max_element(ends.begin(), ends.end());
}

// --- launches --------------------------------------------------------------------------------------------------------

const char* type_name(ncclDataType_t type) {
  static const char* const all[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16", "f8e4m3", "f8e5m2"};
  return all[type];
}

std::string kernel_name(const Request& request) {
  const std::string end = "(ncclDevKernelArgsStorage<4096ul>)", begin = "ncclDevKernel_";
  switch (request.operation) {
    case Operation_::send: case Operation_::receive: case Operation_::all_to_all: return begin + "SendRecv" + end;
    case Operation_::all_gather: case Operation_::broadcast:
      return begin + names[static_cast<int>(request.operation)] + "_RING_LL" + end;
    default: {
      static const char* const kinds[] = {"Sum", "Prod", "Max", "Min", "SumPostDiv"};
      const int kind = request.reduction.kind;
      return begin + names[static_cast<int>(request.operation)] + "_" + (kind < 5 ? kinds[kind] : "PreMulSum") + "_" +
             type_name(request.type) + "_RING_LL" + end;
    }
  }
}

// The first call of a communicator, or between two ranks, sets up connections on the host: it blocks until the others
// are in it.
ncclResult_t connect(const std::vector<Request>& requests) {
  if (connects() == Connects::never) return ncclSuccess;
  const bool every = connects() == Connects::at_every_launch;
  for (const Request& request : requests) {
    ncclComm& own = *request.communicator;
    if (request.operation == Operation_::send) own.region.pair(own.rank, request.peer).send_called = request.number;
    else if (request.operation == Operation_::receive) own.region.pair(request.peer, own.rank).receive_called = request.number;
    else own.region.member(own.rank).called = request.number;
  }
  for (const Request& request : requests) {
    ncclComm& own = *request.communicator;
    const std::uint64_t needed = every ? request.number : 1;
    if (!every && request.number > 1 && (request.is_p2p() || own.connected)) continue;
    const auto others_came = [&] {
      if (request.operation == Operation_::send) return own.region.pair(own.rank, request.peer).receive_called >= needed;
      if (request.operation == Operation_::receive) return own.region.pair(request.peer, own.rank).send_called >= needed;
      for (int rank = 0; rank < own.size; ++rank) {
        if (own.region.member(rank).called < needed) return false;
      }
      return true;
    };
    if (!wait_for(others_came, [&] { return own.aborted.load(); })) return ncclInternalError;
    if (!request.is_p2p()) own.connected = true;
  }
  return ncclSuccess;
}

// The requests get their numbers: how many of their kind the communicator, or the pair of ranks, has seen.
void number(std::vector<Request>& requests, bool counts) {
  for (Request& request : requests) {
    ncclComm& own = *request.communicator;
    std::lock_guard guard(own.lock);
    std::uint64_t& last = request.operation == Operation_::send      ? own.sent_to[request.peer]
                          : request.operation == Operation_::receive ? own.received_from[request.peer]
                                                                     : own.collectives;
    request.number = last + 1;
    if (counts) last = request.number;
  }
}

Operation operation_of(const std::vector<Request>& requests, std::uint32_t correlation) {
  const Request& first = requests.front();
  ncclComm& own = *first.communicator;
  Activity activity;
  activity.kind = Kind::communication;
  activity.name = kernel_name(first);
  activity.correlation = correlation;
  activity.grid[0] = 24, activity.block[0] = 544;
  std::string members;
  for (const Request& request : requests) {
    activity.bytes += request.bytes();
    members += members.empty() ? "{" : ",{";
    members += std::string("\"op\":\"") + (request.operation == Operation_::send ? "Send" : request.operation == Operation_::receive ? "Recv" : names[static_cast<int>(request.operation)]) +
               "\",\"number\":" + std::to_string(request.number) + ",\"bytes\":" + std::to_string(request.bytes()) +
               ",\"peer\":" + std::to_string(request.peer) + "}";
  }
  activity.details = ",\"comm\":\"" + own.id + "\",\"rank\":" + std::to_string(own.rank) + ",\"ranks\":" +
                     std::to_string(own.size) + ",\"calls\":[" + members + "]";
  const std::uint64_t place = ++own.launches;
  return {activity, [requests, &own, place](Nanoseconds begin) {
    if (!wait_for([&] { return own.finished + 1 == place; }, [&] { return own.aborted.load(); })) return now();
    begin = std::max(begin, own.last_end);
    std::vector<Request> transfers;
    for (const Request& request : requests) {
      if (request.is_p2p()) transfers.push_back(request);
      else begin = run_collective(request, begin);
    }
    own.last_end = transfers.empty() ? begin : run_transfers(transfers, begin);
    own.finished = place;
    return own.last_end;
  }};
}

void launch(const std::vector<Request>& requests) {
  Call call(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernelEx, true);
  Stream* stream = stream_of(requests.front().stream);
  if (!stream->capture) return stream->enqueue(operation_of(requests, call.correlation()));
  Operation captured;
  captured.launch_again = [requests] {
    std::vector<Request> now_run = requests;
    number(now_run, true);
    return operation_of(now_run, 0);
  };
  stream->enqueue(std::move(captured));
}

ncclResult_t submit(std::vector<Request> requests) {
  for (const Request& request : requests) {
    if (request.communicator->aborted) return ncclInvalidUsage;
  }
  // What is captured runs when its graph is launched, but its connections are made now.
  number(requests, !stream_of(requests.front().stream)->capture);
  if (const ncclResult_t failed = connect(requests)) return failed;
  std::map<std::pair<ncclComm*, void*>, std::vector<Request>> launches;
  for (const Request& request : requests) launches[{request.communicator, request.stream}].push_back(request);
  for (const auto& [_, those] : launches) launch(those);
  return ncclSuccess;
}

ncclResult_t ask(Request request) {
  if (!request.communicator) return ncclInvalidArgument;
  if (const auto found = request.communicator->reductions.find(request.reduction.kind);
      found != request.communicator->reductions.end()) {
    request.reduction = found->second;
  }
  if (group_depth) {
    group.push_back(request);
    return ncclSuccess;
  }
  return submit({request});
}

// By this NCCL tells whether two ranks are on one host.
std::uint64_t host() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  const std::string chosen = text_from_environment("NCCL_HOSTID");
  return std::hash<std::string>()(chosen.empty() ? name : chosen);
}

std::string last_error;

ncclResult_t begin_communicator(ncclComm_t* found, int ranks, const std::string& id, int rank) {
  auto* own = new ncclComm;  // never freed: its kernels may run
  own->id = id, own->rank = rank, own->size = ranks;
  cudaGetDevice(&own->device);
  own->region = join(id, ranks);
  if (!own->region.base) return ncclSystemError;
  Member& member = own->region.member(rank);
  member.host = host(), member.device = number_of(own->device);
  member.pid = getpid();
  const auto all_came = [&] {
    for (int other = 0; other < ranks; ++other) {
      if (!own->region.member(other).pid) return false;
    }
    return true;
  };
  *found = own;
  if (!wait_for(all_came, [&] { return own->aborted.load(); })) return ncclInternalError;
  for (int other = 0; other < ranks; ++other) {
    const Member& that = own->region.member(other);
    if (other != rank && that.host == member.host && that.device == member.device) {
      last_error = "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " + std::to_string(other) +
                   " both on CUDA device " + std::to_string(member.device);
      return ncclInvalidUsage;
    }
  }
  return ncclSuccess;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  const std::string found = make_id();
  std::memcpy(id->internal, found.data(), found.size());
  return found.empty() ? ncclSystemError : ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* found, int ranks, ncclUniqueId id, int rank, ncclConfig_t*) {
  return begin_communicator(found, ranks, id.internal, rank);
}
ncclResult_t ncclCommInitRank(ncclComm_t* found, int ranks, ncclUniqueId id, int rank) {
  return begin_communicator(found, ranks, id.internal, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t* found, int ranks, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return begin_communicator(found, ranks, ids[0].internal, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* child, ncclConfig_t*) {
  const std::uint64_t number = ++parent->splits;
  Member& own = parent->region.member(parent->rank);
  own.color = color, own.key = key;
  own.split = number;
  const auto stopped = [&] { return parent->aborted.load(); };
  const auto all_came = [&] {
    for (int rank = 0; rank < parent->size; ++rank) {
      if (parent->region.member(rank).split < number) return false;
    }
    return true;
  };
  if (!wait_for(all_came, stopped)) return ncclInternalError;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (int rank = 0; rank < parent->size; ++rank) {
    const Member& other = parent->region.member(rank);
    if (other.color == color) members.push_back({other.key, rank});
  }
  std::sort(members.begin(), members.end());
  int leader = members.front().second, rank = 0;
  for (std::size_t index = 0; index < members.size(); ++index) {
    if (members[index].second == parent->rank) rank = static_cast<int>(index);
  }
  if (color == NCCL_SPLIT_NOCOLOR) leader = parent->rank;  // of none: only says that it has come this far
  Member& first = parent->region.member(leader);
  if (leader == parent->rank) {
    if (color != NCCL_SPLIT_NOCOLOR) std::strncpy(own.child, make_id().c_str(), sizeof own.child - 1);
    own.child_of = number;
  }
  // Also so that nobody's next split changes what others still read.
  const auto all_have_ids = [&] { return first.child_of >= number; };
  if (!wait_for(all_have_ids, stopped)) return ncclInternalError;
  *child = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  return begin_communicator(child, static_cast<int>(members.size()), first.child, rank);
}

ncclResult_t ncclCommShrink(ncclComm_t parent, int* excluded, int count, ncclComm_t* child, ncclConfig_t*, int) {
  const std::uint64_t number = ++parent->splits;
  std::vector<int> members;
  for (int rank = 0; rank < parent->size; ++rank) {
    if (std::find(excluded, excluded + count, rank) == excluded + count) members.push_back(rank);
  }
  Member &own = parent->region.member(parent->rank), &first = parent->region.member(members.front());
  if (members.front() == parent->rank) {
    std::strncpy(own.child, make_id().c_str(), sizeof own.child - 1);
    own.child_of = number;
  }
  if (!wait_for([&] { return first.child_of >= number; }, [&] { return parent->aborted.load(); })) return ncclInternalError;
  const auto rank = std::find(members.begin(), members.end(), parent->rank) - members.begin();
  return begin_communicator(child, static_cast<int>(members.size()), first.child, static_cast<int>(rank));
}

ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  if (!communicator) return ncclSuccess;
  communicator->aborted = true;
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(communicator->error.load());
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t communicator, int* count) {
  *count = communicator->size;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t communicator, int* device) {
  *device = communicator->device;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t error) {
  static const char* const all[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                    "invalid argument", "invalid usage", "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  return error >= 0 && error <= ncclInProgress ? all[error] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (!group_depth) return ncclInvalidUsage;
  if (--group_depth) return ncclSuccess;
  std::vector<Request> requests;
  requests.swap(group);
  return requests.empty() ? ncclSuccess : submit(std::move(requests));
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                           ncclComm_t communicator, cudaStream_t stream) {
  return ask({Operation_::all_reduce, send, receive, count, type, {reduction}, 0, communicator, stream});
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t communicator, cudaStream_t stream) {
  return ask({Operation_::broadcast, send, receive, count, type, {}, root, communicator, stream});
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t communicator,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t reduction,
                        int root, ncclComm_t communicator, cudaStream_t stream) {
  return ask({Operation_::reduce, send, receive, count, type, {reduction}, root, communicator, stream});
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  return ask({Operation_::all_gather, send, receive, count, type, {}, 0, communicator, stream});
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t reduction, ncclComm_t communicator, cudaStream_t stream) {
  return ask({Operation_::reduce_scatter, send, receive, count, type, {reduction}, 0, communicator, stream});
}
#if NCCL_VERSION_CODE >= 22800
ncclResult_t ncclAlltoAll(const void* send, void* receive, size_t count, ncclDataType_t type, ncclComm_t communicator,
                          cudaStream_t stream) {
  return ask({Operation_::all_to_all, send, receive, count, type, {}, 0, communicator, stream});
}
#endif
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return ask({Operation_::send, send, nullptr, count, type, {}, peer, communicator, stream});
}
ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  return ask({Operation_::receive, nullptr, receive, count, type, {}, peer, communicator, stream});
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* made, void* scalar, ncclDataType_t type, ncclScalarResidence_t,
                                      ncclComm_t communicator) {
  Reduction reduction;
  if (type == ncclFloat64) reduction.factor = *static_cast<double*>(scalar);
  else if (type == ncclFloat32) reduction.factor = *static_cast<float*>(scalar);
  else if (type == ncclFloat16) reduction.factor = static_cast<float>(*static_cast<_Float16*>(scalar));
  else if (type == ncclBfloat16) reduction.factor = from_bfloat16(*static_cast<std::uint16_t*>(scalar));
  else return ncclInvalidArgument;
  const int number = 64 + static_cast<int>(communicator->reductions.size());
  communicator->reductions[number] = reduction;
  *made = static_cast<ncclRedOp_t>(number);
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclMemAlloc(void** pointer, size_t size) {
  return cudaMalloc(pointer, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* pointer) { return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }

}  // extern "C"
