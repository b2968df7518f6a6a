#include "device.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <regex>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace stand_in {

Nanoseconds now() {
  timespec read;
  clock_gettime(CLOCK_MONOTONIC, &read);
  return Nanoseconds{read.tv_sec} * 1'000'000'000 + read.tv_nsec;
}

void sleep_until(Nanoseconds moment) {
  timespec until{moment / 1'000'000'000, static_cast<long>(moment % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

double number_from_environment(const char* name, double otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atof(text) : otherwise;
}

std::string text_from_environment(const char* name) {
  const char* text = std::getenv(name);
  return text ? text : "";
}

// --- the log ---------------------------------------------------------------------------------------------------------

namespace {

std::string escaped(const std::string& text) {
  std::string found;
  for (char one : text) {
    if (one == '"' || one == '\\') found += '\\';
    if (static_cast<unsigned char>(one) >= 0x20) found += one;
  }
  return found;
}

int log_file() {
  static std::mutex lock;
  static int file = -1;
  static pid_t owner = 0;
  std::lock_guard guard(lock);
  if (owner != getpid()) {  // a forked child has a log of its own
    owner = getpid();
    const std::string folder = text_from_environment("STAND_IN_LOG");
    file = -1;
    if (!folder.empty()) {
      const std::string path = folder + "/" + std::to_string(owner) + ".jsonl";
      file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    }
  }
  return file;
}

const char* kind_names[] = {"kernel", "copy", "set", "host", "communication"};

}  // namespace

void log_line(const std::string& line) {
  const int file = log_file();
  if (file < 0) return;
  const std::string whole = line + "\n";
  if (write(file, whole.data(), whole.size()) < 0) return;  // a full disk ends the log, not the job
}

void log_activity(const Activity& activity, const Stream& stream, Nanoseconds begin, Nanoseconds end) {
  if (log_file() < 0) return;
  std::ostringstream line;
  line << "{\"kind\":\"" << kind_names[static_cast<int>(activity.kind)] << "\",\"name\":\"" << escaped(activity.name)
       << "\",\"device\":" << stream.device << ",\"stream\":" << stream.id << ",\"begin\":" << begin << ",\"end\":" << end
       << ",\"bytes\":" << activity.bytes << ",\"correlation\":" << activity.correlation << activity.details << "}";
  log_line(line.str());
}

void log_missing(const char* function) {
  static std::mutex lock;
  static std::map<std::string, std::uint64_t> counts;
  std::lock_guard guard(lock);
  const std::uint64_t count = ++counts[function];
  if ((count & (count - 1)) == 0) {  // at each power of two
    log_line(std::string("{\"kind\":\"missing\",\"name\":\"") + function + "\",\"count\":" + std::to_string(count) + "}");
  }
}

// --- times -----------------------------------------------------------------------------------------------------------

namespace {

std::atomic<bool> lost{false};
constexpr std::chrono::milliseconds look_again{50};  // whether the GPU is lost, for a thread that waits for it

}  // namespace

void lose_device() { lost = true; }
bool is_lost() { return lost; }

bool loses_device(const std::string& name) {
  const std::string expression = text_from_environment("STAND_IN_LOST");
  return !expression.empty() && std::regex_search(name, std::regex(expression));
}

Nanoseconds kernel_time(const std::string& name) {
  // STAND_IN_KERNELS: `expression=microseconds` separated by semicolons; the first whose expression is found counts.
  struct Row {
    std::regex expression;
    Nanoseconds time;
  };
  static const std::vector<Row> table = [] {
    std::vector<Row> rows;
    std::istringstream text(text_from_environment("STAND_IN_KERNELS"));
    for (std::string row; std::getline(text, row, ';');) {
      const auto equals = row.rfind('=');
      if (equals == std::string::npos) continue;
      rows.push_back({std::regex(row.substr(0, equals)),
                      static_cast<Nanoseconds>(std::atof(row.c_str() + equals + 1) * 1000)});
    }
    return rows;
  }();
  static std::mutex lock;
  static std::unordered_map<std::string, Nanoseconds> known;
  std::lock_guard guard(lock);
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  Nanoseconds time = 5'000;
  for (const Row& row : table) {
    if (std::regex_search(name, row.expression)) {
      time = row.time;
      break;
    }
  }
  known.emplace(name, time);
  return time;
}

Nanoseconds copy_time(std::uint64_t bytes, int copy_kind) {
  const double bytes_per_ns = copy_kind == 3 ? 1500 : 25;  // within the device, or to and from the host
  return 2'000 + static_cast<Nanoseconds>(static_cast<double>(bytes) / bytes_per_ns);
}

// --- devices and streams ---------------------------------------------------------------------------------------------

int all_devices() {
  static const int all = static_cast<int>(number_from_environment("STAND_IN_GPUS", 1));
  return all;
}

namespace {

const std::vector<int>& visible() {
  static const std::vector<int> found = [] {
    std::vector<int> numbers;
    const char* chosen = std::getenv("CUDA_VISIBLE_DEVICES");
    std::istringstream text(chosen ? chosen : "");
    for (std::string number; std::getline(text, number, ',');) {
      const int device = number.empty() ? -1 : std::atoi(number.c_str());
      if (device < 0 || device >= all_devices()) break;  // CUDA takes those before one that is not there
      numbers.push_back(device);
    }
    for (int device = 0; !chosen && device < all_devices(); ++device) numbers.push_back(device);
    return numbers;
  }();
  return found;
}

}  // namespace

int device_count() { return static_cast<int>(visible().size()); }
int number_of(int device) { return visible()[static_cast<std::size_t>(device)]; }

namespace {

thread_local int device_of_thread = 0;
std::mutex devices_lock;
std::map<int, std::vector<Stream*>> streams_of_device;
std::atomic<std::uint32_t> next_stream{7};  // CUDA's default stream has this number in traces
const Nanoseconds early = 50'000;           // how much before its end an operation may be taken for over

void run_stream(Stream* stream) {
  std::unique_lock hold(stream->lock);
  while (true) {
    stream->changed.wait(hold, [&] { return !stream->queue.empty(); });
    Operation operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    const Nanoseconds begin = std::max(stream->time, operation.enqueued);
    hold.unlock();
    const Nanoseconds end = operation.run ? operation.run(begin) : begin;
    if (end > now() + early) sleep_until(end);
    if (operation.activity) {
      log_activity(*operation.activity, *stream, begin, end);
      if (operation.activity->traced) trace_activity(*operation.activity, *stream, begin, end);
    }
    operation = {};
    hold.lock();
    stream->time = std::max(stream->time, end);
    ++stream->finished;
    stream->changed.notify_all();
  }
}

}  // namespace

int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

Stream* create_stream(int device, unsigned flags, int priority) {
  auto* stream = new Stream;  // never freed: a thread may still look at it
  stream->device = device;
  stream->flags = flags;
  stream->priority = priority;
  std::lock_guard guard(devices_lock);
  auto& all = streams_of_device[device];
  stream->id = all.empty() ? 7 : next_stream += 4;
  all.push_back(stream);
  return stream;
}

void destroy_stream(Stream* stream) {
  std::lock_guard guard(devices_lock);
  auto& all = streams_of_device[stream->device];
  for (auto one = all.begin(); one != all.end(); ++one) {
    if (*one == stream) {
      all.erase(one);
      return;
    }
  }
}

Stream* stream_of(void* handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) > 2) return static_cast<Stream*>(handle);
  static std::mutex lock;
  static std::map<int, Stream*> defaults;
  std::lock_guard guard(lock);
  Stream*& found = defaults[current_device()];
  if (!found) found = create_stream(current_device(), 0, 0);
  return found;
}

void Stream::enqueue(Operation operation) {
  if (capture) {
    capture->nodes.push_back(std::make_shared<GraphNode>(GraphNode{std::move(operation)}));
    return;
  }
  if (operation.activity) operation.activity->traced = is_traced(operation.activity->kind);
  std::lock_guard guard(lock);
  if (!has_thread) {
    has_thread = true;
    std::thread([this] {
      pthread_setname_np(pthread_self(), "stand-in-stream");
      run_stream(this);
    }).detach();
  }
  operation.enqueued = now();
  ++enqueued;
  queue.push_back(std::move(operation));
  changed.notify_all();
}

bool Stream::is_idle() {
  std::lock_guard guard(lock);
  return finished == enqueued;
}

void Stream::wait_until_idle() {
  std::unique_lock hold(lock);
  const std::uint64_t last = enqueued;
  while (!changed.wait_for(hold, look_again, [&] { return finished >= last || is_lost(); })) {}
  if (is_lost()) return;
  const Nanoseconds end = time;
  hold.unlock();
  if (last && end > now()) sleep_until(end);
}

void wait_for_device(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard guard(devices_lock);
    all = streams_of_device[device];
  }
  for (Stream* stream : all) stream->wait_until_idle();
}

// --- events ----------------------------------------------------------------------------------------------------------

void record(const std::shared_ptr<Event>& event, Stream& stream) {
  if (stream.capture) {
    event->capture = stream.capture;
    return;
  }
  std::uint64_t number;
  {
    std::lock_guard guard(event->lock);
    event->capture.reset();
    number = ++event->recorded;
  }
  stream.enqueue({std::nullopt, [event, number](Nanoseconds begin) {
                    std::lock_guard guard(event->lock);
                    event->completed = std::max(event->completed, number);
                    event->time = begin;
                    event->changed.notify_all();
                    return begin;
                  }});
}

void wait_in_stream(const std::shared_ptr<Event>& event, Stream& stream) {
  if (auto graph = event->capture.lock()) {  // the stream joins the capture in which the event was recorded
    if (!stream.capture) {
      stream.capture = graph;
      graph->streams.push_back(&stream);
    }
    return;
  }
  std::uint64_t number;
  {
    std::lock_guard guard(event->lock);
    number = event->recorded;
    if (event->completed >= number && event->time <= now()) return;
  }
  stream.enqueue({std::nullopt, [event, number](Nanoseconds begin) {
                    std::unique_lock hold(event->lock);
                    event->changed.wait(hold, [&] { return event->completed >= number; });
                    return std::max(begin, event->time);
                  }});
}

bool is_complete(Event& event) {
  std::lock_guard guard(event.lock);
  return event.completed >= event.recorded && (!event.recorded || event.time <= now() + early);
}

void wait_on_host(Event& event) {
  std::unique_lock hold(event.lock);
  const std::uint64_t number = event.recorded;
  while (!event.changed.wait_for(hold, look_again, [&] { return event.completed >= number || is_lost(); })) {}
  if (is_lost()) return;
  const Nanoseconds end = event.time;
  hold.unlock();
  if (number && end > now()) sleep_until(end);
}

// --- memory ----------------------------------------------------------------------------------------------------------

namespace {

std::mutex memory_lock;
std::map<std::uintptr_t, Allocation> allocations;  // by their begin
std::map<int, std::size_t> used;

}  // namespace

void* allocate(std::size_t size, int device) {
  const std::size_t whole = (std::max<std::size_t>(size, 1) + 4095) & ~std::size_t{4095};
  if (device >= 0 && allocated_on(device) + whole > memory_of_device) return nullptr;
  void* found = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return nullptr;
  std::lock_guard guard(memory_lock);
  allocations[reinterpret_cast<std::uintptr_t>(found)] = {reinterpret_cast<std::uintptr_t>(found), whole, device};
  used[device] += whole;
  return found;
}

bool release(void* pointer) {
  std::lock_guard guard(memory_lock);
  const auto found = allocations.find(reinterpret_cast<std::uintptr_t>(pointer));
  if (found == allocations.end()) return false;
  used[found->second.device] -= found->second.size;
  munmap(pointer, found->second.size);
  allocations.erase(found);
  return true;
}

void note_host_memory(void* pointer, std::size_t size) {
  std::lock_guard guard(memory_lock);
  allocations[reinterpret_cast<std::uintptr_t>(pointer)] = {reinterpret_cast<std::uintptr_t>(pointer), size, -1};
}

bool forget_host_memory(void* pointer) {
  std::lock_guard guard(memory_lock);
  return allocations.erase(reinterpret_cast<std::uintptr_t>(pointer)) > 0;
}

std::optional<Allocation> find_allocation(const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  std::lock_guard guard(memory_lock);
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin()) return std::nullopt;
  --found;
  if (address >= found->second.begin + found->second.size) return std::nullopt;
  return found->second;
}

std::size_t allocated_on(int device) {
  std::lock_guard guard(memory_lock);
  return used[device];
}

}  // namespace stand_in
