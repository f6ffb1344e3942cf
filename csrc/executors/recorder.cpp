#include "executors/recorder.h"

#include <algorithm>
#include <array>
#include <bit>

namespace ldc {

namespace {

using Counts = std::array<int64_t, sizeof(Stats) / sizeof(int64_t)>;

/// `left` plus `sign` times `right`, counter by counter.
Stats sum(const Stats& left, const Stats& right, int64_t sign) {
  auto total = std::bit_cast<Counts>(left);
  const auto other = std::bit_cast<Counts>(right);
  for (size_t i = 0; i < total.size(); ++i) total[i] += sign * other[i];
  return std::bit_cast<Stats>(total);
}

}  // namespace

void Recorder::begin() {
  gathers_.leave_to_graphs(true);
  registry_.keep_grads(true);
}

void Recorder::prepare() {
  reductions_.drain();
  if (!gathers_.is_recorded()) gathers_.invalidate();  // it lies where no later run would find it
  gathers_.forget_kept();
  gathers_.arena().free_unused();
  reductions_.arena().free_unused();
  for (const int64_t id : registry_.ids()) {
    if (const Param& param = registry_.at(id); param.grad.defined()) registry_.allocate_grad(param);
  }
  recording_ = std::make_shared<Recording>();
  recording_->before = edge();
  recording_->counted = stats_;
  recording_->addresses = registry_.addresses();
}

void Recorder::fork() {
  gathers_.fork();
  reductions_.fork();
}

std::shared_ptr<Recording> Recorder::join() {
  reductions_.join();
  gathers_.join();
  recording_->after = edge();
  const Stats before = recording_->counted;
  recording_->counted = sum(stats_, before, -1);
  stats_ = before;  // it has not run yet
  return std::exchange(recording_, nullptr);
}

void Recorder::cancel() {
  reductions_.cancel();
  gathers_.cancel();
  if (const auto recording = std::exchange(recording_, nullptr)) {
    restore(recording->before);
    stats_ = recording->counted;
  }
}

bool Recorder::fits(const Recording& recording) const {
  const Recording::Edge& before = recording.before;
  if (recording.addresses != registry_.addresses() || before.boundary != boundary_) return false;
  if (!gathers_.has(before.gathered) || reductions_.ids_with_grad() != before.with_grad) return false;
  const auto same = [](const auto& left, const auto& right) {
    return left.first == right.first && left.second.value.is_same(right.second.value);
  };
  const WholeGradients::Sums& held = reductions_.held();
  return std::equal(held.begin(), held.end(), before.held.begin(), before.held.end(), same);
}

void Recorder::replayed(const Recording& recording) {
  restore(recording.after);
  stats_ = sum(stats_, recording.counted, 1);
}

void Recorder::forget() {
  gathers_.leave_to_graphs(false);
  registry_.keep_grads(false);
}

Recording::Edge Recorder::edge() const { return {gathers_.left(), reductions_.held(), reductions_.ids_with_grad(), boundary_}; }

void Recorder::restore(const Recording::Edge& edge) {
  gathers_.restore(edge.gathered);
  reductions_.restore(edge.held);
  for (const int64_t id : registry_.ids()) registry_.at(id).has_grad = false;
  for (const int64_t id : edge.with_grad) registry_.at(id).has_grad = true;
}

}  // namespace ldc
