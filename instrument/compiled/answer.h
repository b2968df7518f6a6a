// Answers for a rank whose Python does not run, because a thread is in C code and keeps the interpreter's lock.
//
// Python beats a few times a second. If it has not for a while, and another rank has asked what all ranks do, a thread
// here writes that this process lives, how much CPU time it uses, and the frames of its main thread. It needs neither the
// interpreter's lock nor the store.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>

#include "frames.h"

namespace crossrank {

struct Answering {
  std::atomic<int64_t> beats{0}, answered{0};  // `answered`: when the question was asked that Python has answered
  std::atomic<bool> active{false};
  std::mutex lock;
  std::string asked, answer, head;  // paths of the question and of the answer; first fields of the answer
  void *main_thread = nullptr;  // its thread state of Python
  bool started = false;
};

// Never freed: its thread runs until the process ends.
inline auto &answering = *new Answering();

constexpr int kMostFrames = 32;
constexpr useconds_t kAnswerTick = 250'000;
constexpr int kSilentTicks = 6, kBetweenTicks = 4;  // Python has not beaten for 1.5 s; 1 s between two looks

inline int64_t read_clock(clockid_t which) {
  timespec now{};
  clock_gettime(which, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// When a file was changed, in ns since 1970; 0 if there is none.
inline int64_t changed_at(const std::string &path) {
  struct stat found {};
  if (path.empty() || stat(path.c_str(), &found) != 0) return 0;
  return int64_t{found.st_mtim.tv_sec} * 1'000'000'000 + found.st_mtim.tv_nsec;
}

// A text of printable ASCII as JSON.
inline std::string quoted(const char *text) {
  std::string found = "\"";
  for (; *text != '\0'; text++) {
    if (*text == '"' || *text == '\\') found += '\\';
    found += *text < ' ' || *text > '~' ? '?' : *text;
  }
  return found + '"';
}

inline std::string frames_as_json(void *thread) {
  static crossrank_place places[kMostFrames];  // of the one thread that answers
  std::string found;
  for (int i = 0, count = crossrank_copy_frames(thread, kMostFrames, places); i < count; i++)
    found += (i > 0 ? ",{\"name\":" : "{\"name\":") + quoted(places[i].name) + ",\"filename\":" + quoted(places[i].file) +
             ",\"line\":" + std::to_string(places[i].line) + "}";
  return found;
}

inline void write_answer(const std::string &path, const std::string &head, void *thread, int64_t ns, int64_t cpu_ns) {
  char rest[256];
  int length = snprintf(rest, sizeof rest,
                        ",\"time_ns\":%" PRId64 ",\"seconds\":%.3f,\"process\":%d,\"state\":\"R\",\"cpu_ns\":%" PRId64,
                        read_clock(CLOCK_REALTIME), static_cast<double>(ns) / 1e9, getpid(), cpu_ns);
  std::string content = head + std::string(rest, static_cast<size_t>(length));
  size_t name = path.rfind('/') + 1;  // as `temporary_name` of crossrank/recording.py
  std::string temporary = path.substr(0, name) + "." + path.substr(name) + ".part";
  content += ",\"frames\":[" + frames_as_json(thread) + "]}\n";
  unlink(temporary.c_str());
  int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (file < 0) return;
  bool is_whole = write(file, content.data(), content.size()) == static_cast<ssize_t>(content.size());
  close(file);
  if (!is_whole || rename(temporary.c_str(), path.c_str()) != 0) unlink(temporary.c_str());
}

inline void answer_for_python() {
  int64_t beat = -1, began = 0, cpu = 0;
  int silent = 0;
  pthread_setname_np(pthread_self(), "crossrank");
  sigset_t signals;  // as in signal_mask.py
  sigfillset(&signals);
  for (int one : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&signals, one);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  for (;;) {
    usleep(kAnswerTick);
    std::string asked, answer, head;
    void *thread;
    {
      std::lock_guard<std::mutex> guard(answering.lock);
      asked = answering.asked, answer = answering.answer, head = answering.head, thread = answering.main_thread;
    }
    int64_t now = answering.beats.load();
    if (now != beat || !answering.active.load()) {
      beat = now, silent = 0;
      continue;
    }
    if (++silent == kSilentTicks) began = read_clock(CLOCK_MONOTONIC), cpu = read_clock(CLOCK_PROCESS_CPUTIME_ID);
    if (silent < kSilentTicks + kBetweenTicks) continue;
    if (int64_t last = changed_at(asked); last != 0 && last != answering.answered.load()) {
      answering.answered = last;
      int64_t used = read_clock(CLOCK_PROCESS_CPUTIME_ID) - cpu;
      write_answer(answer, head, thread, read_clock(CLOCK_MONOTONIC) - began, used);
      silent = kSilentTicks - 1;  // the next answer has looks of its own
    }
  }
}

// A child has no such thread.
inline void forget_answering() {
  answering.active = false;
  answering.started = false;
}

}  // namespace crossrank
