#include "communicators/symmetric_communicator.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <cstring>
#include <thread>

#include "communicators/same_on_all_ranks.h"

namespace ldc {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kGranularity = int64_t{2} << 20;  // the driver's pages
// How long peers may take until they have left the workspace, too; the end of a runtime waits no longer.
constexpr milliseconds kLeaveTogether(10'000), kLeaveAborted(1'000), kLeaveAlone(600'000);

// What travels: whether the rank failed, the length of its text, its text.
constexpr size_t kHeader = 2, kMessage = 512, kLongestText = PeerMemory::kLongestOffer;
static_assert(kLongestText <= 255 && kHeader + kLongestText <= kMessage);

constexpr std::string_view kPrefix = "lightning_deepcompile: ";  // of this library's messages

/// Gives the workspace up as soon as every rank has left it. A peer that has not may still read it, so it is kept for
/// the rest of the process then.
void free_when_left(PeerMemory& memory, milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!memory.all_left()) {
    if (std::chrono::steady_clock::now() > end) {
      TORCH_WARN("lightning_deepcompile: the workspace for symmetric memory stays allocated: another rank has not "
                 "given it up within ", static_cast<double>(limit.count()) / 1000, " s.");
      return;
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  memory.free();
}

/// The end of a runtime goes on, whatever becomes of the memory.
template <typename Action>
void warning_if_it_fails(Action action) {
  try {
    action();
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: could not free the workspace for symmetric memory: ", message_of(error));
  }
}

int64_t padded(const Transfer& transfer) { return align_up(static_cast<int64_t>(transfer.in.nbytes()), kAlignment); }

}  // namespace

SymmetricCommunicator::SymmetricCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<PeerMemory> memory,
                                             std::shared_ptr<InFlight> in_flight, Device device, int64_t threshold,
                                             Stats& stats)
    : Communicator(inner->rank(), inner->world_size()),
      inner_(std::move(inner)),
      memory_(std::move(memory)),
      in_flight_(std::move(in_flight)),
      device_(device),
      threshold_(threshold),
      stats_(stats) {}

Completion SymmetricCommunicator::all_gather(const std::vector<Transfer>& group) {
  int64_t shards = 0, whole = 0;
  for (const Transfer& transfer : group) {
    shards += padded(transfer);
    whole += static_cast<int64_t>(transfer.out.nbytes());
  }
  if (refused_ || whole == 0 || whole < threshold_) return inner_->all_gather(group);
  LDC_CHECK_WIRE(!aborted_, "gather of ", names(group), ": the communicator of rank ", rank(), " was aborted.");
  const Stream stream = current_stream(device_);
  last_.block(stream);  // no wait on the stream that it was recorded on
  if (shards > half_bytes_ && !grow(shards)) return inner_->all_gather(group);

  InFlight::Watched watched(*in_flight_, "gather", group);
  const int64_t half = (gathers_++ % 2) * half_bytes_;
  const auto each = [&](int64_t from, const auto& action) {
    std::byte* source = memory_->of(from) + half;
    for (const Transfer& transfer : group) {
      if (transfer.in.numel() == 0) continue;
      const auto bytes = static_cast<int64_t>(transfer.in.nbytes());
      action(transfer, source, static_cast<std::byte*>(transfer.out.mutable_data_ptr()) + from * bytes, bytes);
      source += padded(transfer);
    }
  };
  // This rank's own part needs no peer, and copy engines are slow within one device.
  copies_.clear();
  each(rank(), [this](const Transfer& transfer, std::byte* source, std::byte* part, int64_t bytes) {
    copies_.push_back({source, transfer.in.const_data_ptr(), bytes});
    if (part != transfer.in.const_data_ptr()) copies_.push_back({part, transfer.in.const_data_ptr(), bytes});
  });
  memory_->copy(copies_, /*local=*/true);
  memory_->barrier();
  copies_.clear();
  for (int64_t step = 1; step < world_size(); ++step) {
    each((rank() + step) % world_size(), [this](const Transfer&, std::byte* source, std::byte* part, int64_t bytes) {
      copies_.push_back({part, source, bytes});
    });
  }
  memory_->copy(copies_, /*local=*/false);
  watched.queued();
  last_.record(stream);
  ++stats_.symmetric_gathers;
  return {};
}

Completion SymmetricCommunicator::reduce_scatter_mean(const std::vector<Transfer>& group) {
  return inner_->reduce_scatter_mean(group);
}

Completion SymmetricCommunicator::all_reduce_mean(const std::vector<Transfer>& group) {
  return inner_->all_reduce_mean(group);
}

std::vector<std::string> SymmetricCommunicator::everybody(const std::function<std::string()>& mine,
                                                          std::string& failure) {
  const PlainTensors plain;
  Tensor message = at::zeros({static_cast<int64_t>(kMessage)}, at::TensorOptions().dtype(c10::kByte));
  auto* bytes = static_cast<uint8_t*>(message.mutable_data_ptr());
  std::string text;
  try {
    text = mine();
    TORCH_CHECK(text.size() <= PeerMemory::kLongestOffer, "an offer of ", text.size(), " bytes");
  } catch (const std::exception& error) {
    bytes[0] = 1;
    text = message_of(error);
    if (text.starts_with(kPrefix)) text.erase(0, kPrefix.size());  // it becomes part of a longer one
  }
  text.resize(std::min(text.size(), kLongestText));
  bytes[1] = static_cast<uint8_t>(text.size());
  std::memcpy(bytes + kHeader, text.data(), text.size());
  const Tensor answers = collect(*inner_, device_, message, "the workspace for symmetric memory");
  // After an abort the exchange ends without having taken place.
  LDC_CHECK_WIRE(!aborted_, "the communicator of rank ", rank(), " was aborted while ranks agreed on symmetric memory.");

  std::vector<std::string> texts;
  for (int64_t from = 0; from < world_size(); ++from) {
    const auto* answer = static_cast<const uint8_t*>(answers.const_data_ptr()) + from * static_cast<int64_t>(kMessage);
    texts.emplace_back(reinterpret_cast<const char*>(answer) + kHeader, answer[1]);
    if (answer[0] != 0 && failure.empty()) failure = c10::str("rank ", from, ": ", texts.back());
  }
  return texts;
}

bool SymmetricCommunicator::grow(int64_t bytes) {
  const int64_t half = align_up(bytes, kGranularity);
  std::string failure;
  if (half_bytes_ > 0) dismantle(failure);
  std::vector<std::string> offers;
  if (failure.empty()) offers = everybody([&] { return memory_->offer(2 * half); }, failure);
  if (failure.empty()) {
    everybody(
        [&] {
          memory_->connect(offers);
          return std::string();
        },
        failure);
    if (failure.empty()) {
      memory_->connected();
      half_bytes_ = half;
      gathers_ = 0;
      return true;
    }
  }
  refused_ = true;
  std::string ignored;  // what cannot be given up stays allocated
  dismantle(ignored);
  if (rank() == 0) {
    TORCH_WARN("lightning_deepcompile: gathers go through NCCL instead of symmetric memory (", failure, ").");
  }
  return false;
}

void SymmetricCommunicator::dismantle(std::string& failure) {
  half_bytes_ = 0;
  // Who gets through this has seen every rank's copies behind it: the exchange is behind them in everybody's stream.
  everybody([] { return std::string(); }, failure);
  everybody(
      [this] {
        memory_->leave();
        return std::string();
      },
      failure);
  if (failure.empty()) everybody([this] { return memory_->free(), std::string(); }, failure);
}

std::string SymmetricCommunicator::diagnose(std::chrono::milliseconds limit) {
  std::string failure = inner_->diagnose(limit);
  if (failure.empty()) return failure;
  const std::vector<int64_t> missing = memory_->behind();
  for (size_t i = 0; i < missing.size(); ++i) failure += c10::str(i == 0 ? " Behind: rank " : ", rank ", missing[i]);
  return missing.empty() ? failure : failure + ".";
}

void SymmetricCommunicator::abort() noexcept {
  aborted_ = true;
  // First: what ends a communicator waits for the device, which may be waiting in a barrier.
  memory_->release();
  inner_->abort();
}

void SymmetricCommunicator::close() {
  if (std::exchange(half_bytes_, 0) > 0) {
    const auto end = std::chrono::steady_clock::now() + kLeaveAborted;
    warning_if_it_fails([&] {
      while (!in_flight_->idle() && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(milliseconds(2));
      }
      // A device that still works on something may be reading; then the process's end gives the memory back.
      if (!in_flight_->idle()) return;
      memory_->leave();
      free_when_left(*memory_, aborted_ ? kLeaveAborted : kLeaveTogether);
    });
  }
  inner_->close();
}

void SymmetricCommunicator::retire(std::vector<std::future<void>>& pending) {
  if (std::exchange(half_bytes_, 0) > 0) {
    warning_if_it_fails([&] {
      memory_->leave();  // the device is idle
      // The others leave when they get to it, which may wait for this thread.
      std::packaged_task<void()> task([memory = memory_] {
        warning_if_it_fails([&] { free_when_left(*memory, kLeaveAlone); });
      });
      pending.push_back(task.get_future());
      std::thread(std::move(task)).detach();
    });
  }
  inner_->retire(pending);
}

}  // namespace ldc
