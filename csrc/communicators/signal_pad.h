// Words in host memory that all ranks of a host share: where they say how far they are.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace ldc {

/// One counter for each pair of ranks, and a ring of them: word (n, to, from) becomes n when rank `from` has come to
/// barrier n, which `to` waits for. Devices write and poll the words; the host reads them, and stores them to let its
/// own device go on, without the device's help. Also says which ranks have left.
///
/// Why a ring: a rank that gives up stores into all words of its row, and a peer that is merely late must not take that
/// back. It writes word n only after this rank's own barrier n - 1, so while fewer than `kRing` barriers are
/// outstanding it never writes to a word that somebody waits for with another number.
class SignalPad {
 public:
  static constexpr uint32_t kRing = 1024;

  SignalPad(int64_t rank, int64_t world_size) : rank_(rank), world_size_(world_size) {}
  ~SignalPad() { unlink(); }  // no unmap(): a device may still use the words
  SignalPad(const SignalPad&) = delete;
  SignalPad& operator=(const SignalPad&) = delete;

  /// A new pad under a name of its own, all zero. Errors name the call and what the system says.
  void create();
  /// The pad that another rank has created.
  void open(const std::string& name);
  /// Nobody else can open it any more, and nothing is left behind when the processes end.
  void unlink();
  void unmap();

  const std::string& name() const { return name_; }
  bool mapped() const { return words_ != nullptr; }
  void* data() const { return words_; }
  size_t bytes() const;

  /// Index of a word, for the device.
  size_t index(uint32_t number, int64_t to, int64_t from) const {
    return ((number % kRing) * static_cast<size_t>(world_size_) + static_cast<size_t>(to)) *
               static_cast<size_t>(world_size_) + static_cast<size_t>(from);
  }
  /// A word of this rank that nobody else uses.
  size_t spare() const { return index(kRing - 1, world_size_ - 1, world_size_ - 1) + 1 + world_size_ + rank_; }
  uint32_t load(size_t index) const;
  void store(size_t index, uint32_t value);

  void leave();
  bool all_left() const;
  /// Stores a number beyond `number` into all words of this rank's row.
  void release(uint32_t number);
  /// The ranks whose last barrier, as this rank's row shows it, is before this rank's own.
  std::vector<int64_t> behind() const;

 private:
  size_t left(int64_t rank) const { return index(kRing - 1, world_size_ - 1, world_size_ - 1) + 1 + rank; }
  void map(int file);

  int64_t rank_, world_size_;
  std::string name_;
  bool linked_ = false;
  uint32_t* words_ = nullptr;
};

}  // namespace ldc
