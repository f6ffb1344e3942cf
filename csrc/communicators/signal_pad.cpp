#include "communicators/signal_pad.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "base/common.h"

namespace ldc {
namespace {

constexpr uint32_t kBeyond = 1u << 30;  // less than half of the numbers: devices compare cyclically

class File {
 public:
  explicit File(int number) : number_(number) {}
  ~File() {
    if (number_ >= 0) ::close(number_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int number() const { return number_; }

 private:
  int number_;
};

}  // namespace

size_t SignalPad::bytes() const {
  const auto words = static_cast<int64_t>(spare() - rank_) + world_size_;
  return static_cast<size_t>(align_up(words * static_cast<int64_t>(sizeof(uint32_t)), sysconf(_SC_PAGESIZE)));
}

void SignalPad::create() {
  std::random_device random;
  name_ = c10::str("/lightning_deepcompile-", getpid(), "-", random());
  const File file(shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600));
  LDC_CHECK(file.number() >= 0, "shm_open of ", name_, ": ", std::strerror(errno));
  linked_ = true;
  // Allocates: without it, a full /dev/shm would end the process at the first access.
  const int error = posix_fallocate(file.number(), 0, static_cast<off_t>(bytes()));
  LDC_CHECK(error == 0, "posix_fallocate of ", bytes(), " bytes in /dev/shm: ", std::strerror(error));
  map(file.number());
}

void SignalPad::open(const std::string& name) {
  const File file(shm_open(name.c_str(), O_RDWR, 0));
  LDC_CHECK(file.number() >= 0, "shm_open of rank 0's ", name, ": ", std::strerror(errno),
            " (all ranks must be on one host and see one /dev/shm)");
  struct stat status {};
  LDC_CHECK(fstat(file.number(), &status) == 0 && static_cast<size_t>(status.st_size) == bytes(), name, " has ",
            status.st_size, " bytes instead of ", bytes());
  map(file.number());
}

void SignalPad::map(int file) {
  void* address = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  LDC_CHECK(address != MAP_FAILED, "mmap of ", bytes(), " shared bytes: ", std::strerror(errno));
  words_ = static_cast<uint32_t*>(address);
}

void SignalPad::unlink() {
  if (std::exchange(linked_, false)) shm_unlink(name_.c_str());
}

void SignalPad::unmap() {
  unlink();
  if (words_ != nullptr) munmap(std::exchange(words_, nullptr), bytes());
}

uint32_t SignalPad::load(size_t index) const {
  return std::atomic_ref<uint32_t>(words_[index]).load(std::memory_order_acquire);
}

void SignalPad::store(size_t index, uint32_t value) {
  std::atomic_ref<uint32_t>(words_[index]).store(value, std::memory_order_release);
}

void SignalPad::leave() { store(left(rank_), 1); }

bool SignalPad::all_left() const {
  for (int64_t rank = 0; rank < world_size_; ++rank) {
    if (load(left(rank)) == 0) return false;
  }
  return true;
}

void SignalPad::release(uint32_t number) {
  for (uint32_t slot = 0; slot < kRing; ++slot) {
    for (int64_t from = 0; from < world_size_; ++from) store(index(slot, rank_, from), number + kBeyond);
  }
}

std::vector<int64_t> SignalPad::behind() const {
  std::vector<uint32_t> last(static_cast<size_t>(world_size_), 0);
  for (uint32_t slot = 0; slot < kRing; ++slot) {
    for (int64_t from = 0; from < world_size_; ++from) {
      uint32_t& latest = last[static_cast<size_t>(from)];
      const uint32_t seen = load(index(slot, rank_, from));
      if (static_cast<int32_t>(seen - latest) > 0) latest = seen;
    }
  }
  std::vector<int64_t> ranks;
  for (int64_t from = 0; from < world_size_; ++from) {
    if (static_cast<int32_t>(last[static_cast<size_t>(from)] - last[static_cast<size_t>(rank_)]) < 0) {
      ranks.push_back(from);
    }
  }
  return ranks;
}

}  // namespace ldc
