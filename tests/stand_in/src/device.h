// A GPU that computes nothing: memory is the host's, a stream is a queue with a thread, and whatever runs in it takes
// the time that a table says. Begin and end are exact; nothing is seen to be over before its end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace stand_in {

using Nanoseconds = std::int64_t;

// CLOCK_MONOTONIC, which all processes of a machine share, and Python's time.monotonic_ns().
Nanoseconds now();

void sleep_until(Nanoseconds moment);

enum class Kind { kernel, copy, set, host, communication };

// What a line of the log says of something that ran, besides its times.
struct Activity {
  Kind kind = Kind::kernel;
  std::string name;
  std::uint64_t bytes = 0;
  std::uint32_t correlation = 0;
  int copy_kind = 0;              // cudaMemcpyKind
  std::uint8_t source_memory = 0, target_memory = 0;  // CUpti_ActivityMemoryKind
  std::uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  std::uint32_t shared_bytes = 0;
  std::uint32_t value = 0;
  bool traced = false;            // CUPTI was asked for it when it was launched
  std::string details;            // more JSON, such as `,"peer":3`
};

struct Graph;
struct Stream;

// Something to run in a stream. `run` gets the moment at which its turn came and returns the one at which it is over; it
// may block for that. Without an activity it is not logged.
struct Operation {
  std::optional<Activity> activity;
  std::function<Nanoseconds(Nanoseconds)> run;
  Nanoseconds enqueued = 0;  // it cannot begin before, however late the stream's thread is
  std::function<Operation()> launch_again;  // of one in a graph: what each launch of the graph runs in its place
};

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  std::uint64_t recorded = 0;   // how often it was recorded; 0 = never, which counts as completed
  std::uint64_t completed = 0;  // the last of them that was reached
  Nanoseconds time = 0;
  bool has_time = true;
  std::uint32_t id = 0;
  std::weak_ptr<Graph> capture;  // the graph in which it was recorded last
};

struct Stream {
  std::uint32_t id = 0;
  int device = 0;
  int priority = 0;
  unsigned flags = 0;
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Operation> queue;
  std::uint64_t enqueued = 0, finished = 0;
  Nanoseconds time = 0;  // the end of what ran last
  bool has_thread = false;
  std::shared_ptr<Graph> capture;  // where operations go while it is captured

  void enqueue(Operation operation);
  bool is_idle();
  void wait_until_idle();
};

struct GraphNode {
  Operation operation;
};

// What a program hands to graphs to be destroyed when the last of them and the program have let go of it.
struct UserObject {
  void* object;
  void (*destroy)(void*);
  std::atomic<long> references;
  void let_go(long count) {
    if ((references -= count) == 0) destroy(object), delete this;
  }
};

struct Graph {
  ~Graph() {
    for (UserObject* one : retained) one->let_go(1);
  }
  std::vector<UserObject*> retained;
  std::uint64_t id = 0;
  std::vector<std::shared_ptr<GraphNode>> nodes;
  Stream* origin = nullptr;  // of the capture that fills it
  std::vector<Stream*> streams;  // that are captured into it
  std::atomic<bool> is_broken{false};
};

int device_count();         // that the program sees, by CUDA_VISIBLE_DEVICES
int all_devices();
int number_of(int device);  // among all, of one that the program sees
int current_device();
void set_current_device(int device);

// The stream of a handle as CUDA has them: null, legacy and per-thread default are the device's first stream.
Stream* stream_of(void* handle);
Stream* create_stream(int device, unsigned flags, int priority);
void destroy_stream(Stream* stream);
void wait_for_device(int device);

// What is in a queue keeps its event: a program may destroy one that is still to be recorded.
void record(const std::shared_ptr<Event>& event, Stream& stream);
void wait_in_stream(const std::shared_ptr<Event>& event, Stream& stream);
bool is_complete(Event& event);
void wait_on_host(Event& event);

// The GPU of this process fails for good: what runs on it does not end, and each call of the runtime says so.
void lose_device();
bool is_lost();

// Memory. `device` of an allocation is -1 for pinned host memory.
struct Allocation {
  std::uintptr_t begin;
  std::size_t size;
  int device;
};
void* allocate(std::size_t size, int device);
bool release(void* pointer);
void note_host_memory(void* pointer, std::size_t size);
bool forget_host_memory(void* pointer);
std::optional<Allocation> find_allocation(const void* pointer);
std::size_t allocated_on(int device);
inline constexpr std::size_t memory_of_device = std::size_t{80} << 30;

// Whether the GPU is lost when a kernel of this name runs.
bool loses_device(const std::string& name);
// Time that a kernel of this name takes.
Nanoseconds kernel_time(const std::string& name);
Nanoseconds copy_time(std::uint64_t bytes, int copy_kind);

// A line in the log of this process: what ran in a stream.
void log_activity(const Activity& activity, const Stream& stream, Nanoseconds begin, Nanoseconds end);
// One that counts a function which is not implemented.
void log_missing(const char* function);
void log_line(const std::string& line);

double number_from_environment(const char* name, double otherwise);
std::string text_from_environment(const char* name);

// cupti.cpp
bool is_traced(Kind kind);
void trace_activity(const Activity& activity, const Stream& stream, Nanoseconds begin, Nanoseconds end);
std::uint32_t next_correlation();

// A call of the runtime by the program: has a correlation id, and is traced with its begin and end.
class Call {
 public:
  explicit Call(std::uint32_t cbid, bool driver = false);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  std::uint32_t correlation() const { return correlation_; }

 private:
  std::uint32_t cbid_, correlation_;
  bool driver_;
  Nanoseconds begin_;
};

// A wait, for CUPTI: `kind` as CUpti_ActivitySynchronizationType has it.
void trace_synchronization(int kind, std::uint32_t correlation, std::uint32_t stream, const Event* event,
                           Nanoseconds begin, Nanoseconds end);
// That an event was recorded, so that a wait for it can be traced to the call.
void trace_event(const Event& event, const Stream& stream, std::uint32_t correlation);

}  // namespace stand_in
