// Where the ranks of a communicator meet: memory that their processes share, without a name in any file system. The
// process that made the communicator's id hands it out over a socket in the abstract namespace, and both are gone with
// the processes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

#include "device.h"

namespace stand_in {

// What a rank says of the collective that it is in. It is the only one of the rank until all have read it.
struct Post {
  std::atomic<std::uint64_t> number;
  Nanoseconds ready;
  std::int32_t operation, type, reduction, root;
  double factor;
  std::uint64_t count, send;
  std::atomic<std::uint64_t> read;  // the last collective of which this rank has read what it needs
};

struct Member {
  std::atomic<std::int32_t> pid;  // set when what follows it is
  std::uint64_t host;             // as NCCL tells hosts apart
  std::int32_t device;            // of all of the machine
  std::atomic<std::uint64_t> called;  // collectives that the host has launched
  Post post;
  std::atomic<std::uint64_t> split;  // how often this rank has called split or shrink
  std::int32_t color, key;
  char child[64];
  std::atomic<std::uint64_t> child_of;  // the split that `child` is of
};

// From one rank to another.
struct Pair {
  std::atomic<std::uint64_t> send_called, receive_called;  // that the hosts have launched
  std::atomic<std::uint64_t> sent, copied;                 // numbers of messages
  Nanoseconds sender_ready, receiver_ready;
  std::uint64_t address, bytes;
};

struct Region {
  int size = 0;
  char* base = nullptr;

  Member& member(int rank) const;
  Pair& pair(int from, int to) const;
  static std::size_t bytes_for(int ranks);
};

// A new id, which this process hands memory out for.
std::string make_id();

// The memory of an id, for a communicator of so many ranks; null where nobody hands it out.
Region join(const std::string& id, int ranks);

// Waits until a condition of shared memory holds, or `stopped` does; whether it holds.
bool wait_for(const std::function<bool()>& condition, const std::function<bool()>& stopped);

// Copies from the memory of another process; false where it is gone.
bool read_from(int pid, std::uint64_t address, void* target, std::size_t bytes);

}  // namespace stand_in
