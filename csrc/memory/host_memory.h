// Where pools and slabs get host memory: pinned where the device has streams, within one limit.
//
// The host may have less memory than the limit: because of a container's limit, the driver's own, or other processes.
// Then unused memory is given back first, and if that does not suffice, the error says how much is missing. `ulimit -l`
// does not matter: CUDA's driver does not count pinned memory against it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/common.h"

namespace ldc {

class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  using Allocate = std::function<Tensor(int64_t bytes)>;

  /// Memory that counts against the limit for as long as the block lives.
  class Block {
   public:
    Block(Tensor memory, std::shared_ptr<HostMemory> owner) : memory_(std::move(memory)), owner_(std::move(owner)) {
      owner_->held_ += bytes();
    }
    ~Block() { owner_->held_ -= bytes(); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    void* data() const { return memory_.mutable_data_ptr(); }
    int64_t bytes() const { return memory_.numel(); }

   private:
    Tensor memory_;  // uint8
    std::shared_ptr<HostMemory> owner_;
  };

  /// `limit`: most bytes held at a time; 0: half of the host's memory. `allocate` is torch's allocator unless a test has
  /// another. Make it shared: its blocks keep it alive.
  HostMemory(Device device, int64_t limit, Allocate allocate = {});

  /// What to ask for instead of `bytes`, at least as much: torch's allocator of pinned memory rounds up to powers of two
  /// anyway, and so the limit counts what is really held.
  static int64_t round_up(int64_t bytes);

  /// Uninitialised memory. Raises OutOfMemoryError with what was asked, held and allowed, and what to do.
  std::unique_ptr<Block> take(int64_t bytes, std::string_view purpose);
  /// The same; returns null and the error's text in `shortage` where there is none.
  std::unique_ptr<Block> try_take(int64_t bytes, std::string_view purpose, std::string& shortage);
  /// Makes torch's allocator free the pinned memory that it caches.
  void free_cached() const;
  /// Called where memory is missing: gives back what is held and not used.
  void make_room_with(std::function<void()> make_room) { make_room_ = std::move(make_room); }

  /// Whether the limit allows so much more, after making room if it must.
  bool can_allow(int64_t bytes) const;
  int64_t held() const { return held_; }

 private:
  bool allows(int64_t bytes) const { return held_ + bytes <= limit_; }
  void make_room() const;

  const Device device_;
  const int64_t limit_;
  Allocate allocate_;
  std::function<void()> make_room_;
  std::atomic<int64_t> held_ = 0;  // bytes of all blocks
};

}  // namespace ldc
