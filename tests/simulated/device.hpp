// What a simulated device knows: its streams, which of their work is ordered before which, its memory, its counters.
//
// Kernels run at once, on the host's processor. What is simulated is their order: an operation that uses bytes which
// another stream has written, or will still read, without an event between, is an error. A collective is done by
// another thread, and has a gate: what comes after it on a stream begins when the gate is open.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 16;
constexpr int kStreams = 33;  // a device's first one, and as many as CUDA has in its pool
// Beyond the addresses that a processor takes from a program.
constexpr uintptr_t kAway = uintptr_t{1} << 62;

inline void* away(void* real) {
  return real ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(real) | kAway) : nullptr;
}
inline char* real(const void* there) { return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(there) & ~kAway); }

// In the order of `COUNTERS` in records.py.
enum Counter {
  kKernels, kItems, kShapes, kReads, kBlockingWrites, kStreamSyncs, kEventSyncs, kDeviceSyncs,
  kPinnedReads, kReadBytes, kPinnedWrites, kPageableWrites, kWriteBytes, kPins, kPinsBesideKernels, kFaults, kCounters,
};
constexpr int kWaits = kDeviceSyncs + 1;  // those from 1 to here are waits

// One file a process where a test has named a folder: whatever ends the process, they can be read.
inline int64_t* shared_counters() {
  static int64_t own[kCounters];
  const char* folder = std::getenv("SIMULATED_RECORDS");
  if (!folder || !*folder) return own;
  auto path = std::string(folder) + "/counters." + std::to_string(getpid());
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, sizeof own) != 0) return own;
  void* mapped = mmap(nullptr, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return mapped == MAP_FAILED ? own : static_cast<int64_t*>(mapped);
}

struct Gate;
using Gates = std::vector<std::shared_ptr<Gate>>;
struct Gate {
  bool open = false;
  Gates before;
};
inline bool all_open(const Gates& gates) {
  return std::all_of(gates.begin(), gates.end(), [](const auto& gate) { return gate->open; });
}

// A point in time of a stream or of the host: how many operations of each stream are done then.
struct Moment {
  std::array<uint64_t, kDevices * kStreams> done{};
  Gates gates;

  void join(const Moment& other) {
    for (size_t at = 0; at < done.size(); ++at) done[at] = std::max(done[at], other.done[at]);
    gates.erase(std::remove_if(gates.begin(), gates.end(), [](auto& gate) { return gate->open; }), gates.end());
    for (const auto& gate : other.gates) {
      if (!gate->open && std::find(gates.begin(), gates.end(), gate) == gates.end()) gates.push_back(gate);
    }
  }
};

struct Access {
  char *first, *last;
  int stream;
  uint64_t number;
  bool writes;
  const std::string* name;
};

struct Block {
  size_t bytes;
  int device, stream;
  std::vector<Access> accesses;
  std::set<int> recorded;
};

struct Freed {  // memory that a stream gets again, while others may still use it
  int stream;
  size_t bytes;
  std::vector<Access> accesses;
};

struct Delivery {  // a copy to pinned memory, which is there after a wait; or from it, until which it must stay
  int stream;
  uint64_t number;
  char* host;
  std::vector<int64_t> sizes, strides;
  at::Tensor content;
  bool to_host;
};

struct Event {
  Moment at;
  bool asked = false;
  std::chrono::steady_clock::time_point time;
};

struct Memory {
  int64_t current = 0, peak = 0, most = int64_t{80} << 30;
};

struct Simulation {
  std::mutex lock;
  std::condition_variable opened;
  std::array<Moment, kDevices * kStreams> streams;
  std::array<int, kDevices> next_stream{};
  std::array<Memory, kDevices> memory;
  Moment host;
  std::map<char*, Block> blocks;
  std::vector<Freed> freed;
  std::map<char*, size_t> pinned;
  std::vector<Delivery> deliveries;
  std::map<int64_t, std::shared_ptr<Gate>> gates;
  int64_t next_gate = 0;
  std::set<std::string> names;
  std::string fault;
  std::map<std::thread::id, int64_t> pins;
  std::set<std::thread::id> computing;
  int64_t* counters = shared_counters();
  bool forbids_waits = false;
};

inline Simulation& simulation() {
  static auto* only = new Simulation;
  return *only;
}
using Lock = std::unique_lock<std::mutex>;

inline thread_local int inside = 0;  // within a kernel, whose copies are its own
struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};
inline thread_local std::array<c10::StreamId, kDevices> current_streams{};

inline int number_of(c10::Stream stream) { return int(stream.device_index()) * kStreams + int(stream.id()); }
inline int current_stream(int device) { return device * kStreams + int(current_streams[device]); }
inline std::string stream_name(int number) {
  return "stream " + std::to_string(number % kStreams) + " of fake:" + std::to_string(number / kStreams);
}

inline void count(Counter what, int64_t times = 1) {
  __atomic_fetch_add(simulation().counters + what, times, __ATOMIC_RELAXED);
}

// A wait of the host, which a test may forbid.
inline void count_wait(Counter what, const std::string& name) {
  count(what);
  TORCH_CHECK(!simulation().forbids_waits, "simulated: ", name, " waits for the device, where a test forbids waits");
}

inline void note_fault(Simulation& all, const std::string& said) {
  count(kFaults);
  if (all.fault.empty()) all.fault = said;
}

// Raises what was found where nothing could be raised.
inline void raise_fault(Simulation& all) {
  if (all.fault.empty()) return;
  auto said = std::exchange(all.fault, "");
  TORCH_CHECK(false, said);
}

// Ends deliveries: brings what is done to the host's memory, and looks whether it has left alone what was copied.
template <typename Ends>
void deliver(Simulation& all, Ends ends) {
  for (auto& one : all.deliveries) {
    if (!ends(one)) continue;
    c10::NoGradGuard guard;
    auto there = at::from_blob(one.host, one.sizes, one.strides, one.content.options());
    if (one.to_host) {
      there.copy_(one.content);
    } else if (auto now = there.contiguous(); std::memcmp(now.data_ptr(), one.content.data_ptr(), now.nbytes()) != 0) {
      note_fault(all, "simulated: pinned memory was changed before its copy to the device was done: wait for an event");
    }
  }
  all.deliveries.erase(std::remove_if(all.deliveries.begin(), all.deliveries.end(), ends), all.deliveries.end());
}
inline void deliver(Simulation& all) {
  deliver(all, [&](const Delivery& one) { return all.host.done[one.stream] >= one.number; });
}
// The device itself writes to pinned memory after it has read it.
inline void end_reads(Simulation& all, const Moment& at, const char* first, const char* last) {
  deliver(all, [&](const Delivery& one) {
    bool apart = one.host + one.content.nbytes() <= first || last <= one.host;
    return !one.to_host && !apart && at.done[one.stream] >= one.number;
  });
}

// A copy from pinned memory finds what copies to it have brought that are ordered before.
inline void end_writes(Simulation& all, const Moment& at, const char* first, const char* last) {
  deliver(all, [&](const Delivery& one) {
    bool apart = one.host + one.content.nbytes() <= first || last <= one.host;
    return one.to_host && !apart && at.done[one.stream] >= one.number;
  });
}

// The host waits until all up to a moment is done.
inline void arrive(Simulation& all, Lock& lock, const Moment& at) {
  Gates gates = at.gates;
  all.opened.wait(lock, [&] { return all_open(gates); });
  all.host.join(at);
  deliver(all);
}

inline std::pair<char*, char*> bytes_of(const at::Tensor& tensor) {
  char* first = real(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return {first, first + (last + 1) * int64_t(tensor.itemsize())};
}

inline Block* block_of(Simulation& all, char* address) {
  auto found = all.blocks.upper_bound(address);
  if (found == all.blocks.begin()) return nullptr;
  --found;
  return address < found->first + found->second.bytes ? &found->second : nullptr;
}

// An operation that begins on a stream.
class Launch {
 public:
  Launch(const std::string& name, int stream, bool gated = true)
      : all_(simulation()), lock_(all_.lock), stream_(stream), active_(!inside) {
    if (!active_) {
      lock_.unlock();
      return;
    }
    raise_fault(all_);
    name_ = &*all_.names.insert(name).first;
    auto& own = all_.streams[stream];
    own.join(all_.host);
    if (gated) {
      Gates gates = own.gates;
      all_.opened.wait(lock_, [&] { return all_open(gates); });
    }
    number_ = ++own.done[stream];
  }
  void use(const at::Tensor& tensor, bool writes) {
    if (!active_ || !tensor.defined() || tensor.device().type() != kFake || !tensor.numel()) return;
    auto [first, last] = bytes_of(tensor);
    Block* block = block_of(all_, first);
    if (!block) return;
    auto& done = all_.streams[stream_].done;
    auto& known = block->accesses;
    for (const auto& other : known) {
      bool apart = other.last <= first || last <= other.first || !(writes || other.writes);
      if (apart || other.stream == stream_ || done[other.stream] >= other.number) continue;
      count(kFaults);
      TORCH_CHECK(
          false, "simulated: ", *name_, " on ", stream_name(stream_), (writes ? " writes " : " reads "), last - first,
          " bytes that ", *other.name, " on ", stream_name(other.stream), (other.writes ? " has written" : " reads"),
          ", and no event orders them: wait for that stream first");
    }
    known.erase(
        std::remove_if(
            known.begin(), known.end(),
            [&, first = first, last = last](const Access& other) {
              bool same = other.stream == stream_ && !other.writes;
              return first <= other.first && other.last <= last && (writes || same);
            }),
        known.end());
    known.push_back({first, last, stream_, number_, writes, name_});
  }
  Simulation& all() { return all_; }
  Lock& lock() { return lock_; }
  bool active() const { return active_; }
  uint64_t number() const { return number_; }
  int stream() const { return stream_; }

 private:
  Simulation& all_;
  Lock lock_;
  int stream_;
  bool active_;
  const std::string* name_ = nullptr;
  uint64_t number_ = 0;
};

// Whether a stream knows that another's operation is done.
inline bool knows(Simulation& all, int stream, const Access& other) {
  auto done = std::max(all.streams[stream].done[other.stream], all.host.done[other.stream]);
  return other.stream == stream || done >= other.number;
}

// Raises where memory may be what was freed before its last use was done: that is known by now, or may go wrong.
inline void require_free(Simulation& all, int stream, size_t bytes) {
  auto known = [&](Freed& one) {
    auto& left = one.accesses;
    auto done = [&](const Access& other) { return knows(all, stream, other); };
    if (one.stream == stream) left.erase(std::remove_if(left.begin(), left.end(), done), left.end());
    return left.empty();
  };
  all.freed.erase(std::remove_if(all.freed.begin(), all.freed.end(), known), all.freed.end());
  for (const auto& one : all.freed) {
    if (one.stream != stream || one.bytes < bytes) continue;
    Access other = one.accesses.front();
    all.freed.clear();
    count(kFaults);
    TORCH_CHECK(
        false, "simulated: memory of ", stream_name(stream), " was freed and is given out again while ", *other.name,
        " on ", stream_name(other.stream), " may still use it: call record_stream, or wait for that stream");
  }
}

inline void* allocate(size_t bytes, int device) {
  auto& all = simulation();
  int64_t rounded = int64_t(bytes + 511) / 512 * 512;
  Lock lock(all.lock);
  auto& memory = all.memory[device];
  TORCH_CHECK_WITH(
      OutOfMemoryError, memory.current + rounded <= memory.most, "fake out of memory. Tried to allocate ", rounded,
      " bytes. fake:", device, " has a total capacity of ", memory.most, " bytes of which ",
      memory.most - memory.current, " bytes are free.");
  int stream = current_stream(device);
  require_free(all, stream, bytes);
  char* there = static_cast<char*>(std::malloc(bytes));
  memory.current += rounded;
  memory.peak = std::max(memory.peak, memory.current);
  static const std::string name = "the allocation";
  auto& own = all.streams[stream];
  own.join(all.host);
  Block block{bytes, device, stream, {}, {}};
  block.accesses.push_back({there, there + bytes, stream, own.done[stream], true, &name});
  all.blocks[there] = std::move(block);
  return away(there);
}

inline void release(void* there) {
  if (!there) return;
  auto& all = simulation();
  Lock lock(all.lock);
  auto found = all.blocks.find(real(there));
  auto& block = found->second;
  all.memory[block.device].current -= int64_t(block.bytes + 511) / 512 * 512;
  Freed freed{block.stream, block.bytes, {}};
  for (const auto& one : block.accesses) {
    if (!knows(all, block.stream, one) && !block.recorded.count(one.stream)) freed.accesses.push_back(one);
  }
  if (!freed.accesses.empty()) all.freed.push_back(std::move(freed));
  std::free(real(there));
  all.blocks.erase(found);
}

inline void record_use(const void* there, int stream) {
  auto& all = simulation();
  Lock lock(all.lock);
  if (Block* block = block_of(all, real(there))) block->recorded.insert(stream);
}

inline void* pin(size_t bytes) {
  char* there = static_cast<char*>(std::malloc(std::max<size_t>(bytes, 1)));
  auto& all = simulation();
  Lock lock(all.lock);
  all.pinned[there] = bytes;
  count(kPins);
  ++all.pins[std::this_thread::get_id()];
  return there;
}

inline void unpin(void* there) {
  auto& all = simulation();
  Lock lock(all.lock);
  auto found = all.pinned.find(static_cast<char*>(there));
  char *first = found->first, *last = first + found->second;
  auto within = [&](const Delivery& one) { return first <= one.host && one.host < last; };
  all.deliveries.erase(std::remove_if(all.deliveries.begin(), all.deliveries.end(), within), all.deliveries.end());
  all.pinned.erase(found);
  std::free(there);
}

inline bool is_pinned(const void* there) {
  auto& all = simulation();
  Lock lock(all.lock);
  auto* address = static_cast<char*>(const_cast<void*>(there));
  auto found = all.pinned.upper_bound(address);
  return found != all.pinned.begin() && address < std::prev(found)->first + std::prev(found)->second;
}

}  // namespace simulated
