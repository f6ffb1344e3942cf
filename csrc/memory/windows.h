// Windows: device memory into which the other ranks' copy engines write what this rank gathers.
//
// A rank that gathers writes its part into the memory of every peer, at the same offset as in its own. So all ranks must
// gather a group to the same window. They do: the choice of a window depends only on the requested sizes and on the
// windows in use at that time. It does not depend on the progress of a device, nor on the free memory of a rank.
// Therefore a window stays until all ranks free it together, and ranks compare their `digest`.
#pragma once

#include <functional>
#include <memory>

#include "base/common.h"

namespace ldc {

class Windows : public std::enable_shared_from_this<Windows> {
 public:
  /// Makes memory of so many bytes on all ranks, collectively. Undefined, on all of them alike, if one has none.
  using Make = std::function<Tensor(int64_t bytes)>;
  using Drop = std::function<void(const Tensor&)>;

  Windows(Device device, int64_t threshold, Make make, Drop drop)
      : device_(device), threshold_(threshold), make_(std::move(make)), drop_(std::move(drop)) {}

  /// A window in use. Without release(), what was queued so far may still read it: its next user waits for the device.
  class Use {
   public:
    Use(std::shared_ptr<Windows> owner, size_t place) : owner_(std::move(owner)), place_(place) {}
    ~Use() { owner_->all_[place_].taken = false; }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    const Tensor& bytes() const { return owner_->all_[place_].bytes; }
    /// Everything queued on `last_user` so far still sees its contents.
    void release(const Stream& last_user);

   private:
    std::shared_ptr<Windows> owner_;
    size_t place_;
  };

  /// A window of at least `need` bytes, into which `user` may write at once; empty below the threshold, and where no
  /// windows can be made. The smallest that is free and wastes at most a quarter (and 1 MiB), the first made of these;
  /// else a new one.
  std::unique_ptr<Use> take(int64_t need, const Stream& user);

  /// Frees unused windows; waits for the device. All ranks must call it between the same two gathers.
  void free_unused();

  int64_t bytes() const { return bytes_; }
  int64_t threshold() const { return threshold_; }
  /// A digest of all windows taken so far, in order: the same on all ranks if they took the same windows.
  int32_t digest() const { return static_cast<int32_t>(digest_ & 0x7fffffff); }

 private:
  struct Window {
    Tensor bytes;  // undefined: given up
    Event released;
    bool taken = false;
    bool ordered = true;  // whether `released` is behind its last user
  };

  Device device_;
  int64_t threshold_;
  Make make_;
  Drop drop_;
  bool refused_ = false;
  std::vector<Window> all_;  // in the order in which they were made
  int64_t bytes_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace ldc
