#include "communicators/process_group_communicator.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>

#include "base/range.h"
#include "memory/views.h"

namespace ldc {

namespace {

bool is_unsupported(const std::exception& error) {
  return std::string_view(error.what()).find("does not support") != std::string_view::npos;
}

/// 1-D, and real: a complex number is reduced as its two parts.
Tensor wire_form(const Tensor& tensor) { return flat(tensor.is_complex() ? at::view_as_real(tensor) : tensor); }

}  // namespace

ProcessGroupCommunicator::ProcessGroupCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, Device device,
                                                   std::chrono::milliseconds timeout)
    : Communicator(group->getRank(), group->getSize()), group_(std::move(group)) {
  if (timeout.count() > 0) gather_options_.timeout = reduce_options_.timeout = all_reduce_options_.timeout = timeout;
  try {
    backend_ = group_->getBackend(device.type());
    // Gloo's worker threads write the name of the operation that they finished into one string, without a lock. Two
    // that finish together free a name twice that is too long to lie within the string, as ALLGATHER_COALESCED is.
    coalesced_gather_ = backend_->getBackendName() != "gloo";
  } catch (const std::exception& error) {
    LDC_CHECK_ARG(false, "the process group has no backend for ", device, " tensors (", message_of(error),
                  "). Create it with one, for example backend='gloo' for CPU.");
  }
}

template <typename Together, typename Single>
ProcessGroupCommunicator::Works ProcessGroupCommunicator::start(bool& coalesced, size_t count, Together together,
                                                                Single single) {
  const Unrecorded unrecorded;
  if (coalesced && count > 1) {
    try {
      return {together()};
    } catch (const std::exception& error) {
      // A backend without the operation says so before anything is sent.
      if (!is_unsupported(error)) throw;
      coalesced = false;
    }
  }
  Works works;
  works.reserve(count);
  for (size_t i = 0; i < count; ++i) works.push_back(single(i));
  return works;
}

template <typename Action>
void ProcessGroupCommunicator::explained(std::string_view operation, const std::string& what, Action action) const {
  try {
    action();
  } catch (const std::exception& error) {
    LDC_CHECK_WIRE(false, operation, " of ", what, " failed on rank ", rank(), " of ", world_size(), " (",
                   backend_->getBackendName(), "): ", message_of(error));
  }
}

Completion ProcessGroupCommunicator::all_gather(const std::vector<Transfer>& group) {
  // Gathers move bytes, so one coalesced call can carry parameters of different dtypes.
  std::vector<Tensor> outs, ins;
  for (const Transfer& transfer : group) {
    if (transfer.in.numel() == 0) continue;
    outs.push_back(as_bytes(transfer.out));
    ins.push_back(as_bytes(transfer.in));
  }
  if (ins.empty()) return {};
  const int64_t number = history_.begin("gather", group).number;
  Works works;
  explained("gather", names(group), [&] {
    works = start(
        coalesced_gather_, ins.size(), [&] { return backend_->allgather_into_tensor_coalesced(outs, ins, gather_options_); },
        [&](size_t i) { return backend_->_allgather_base(outs[i], ins[i], gather_options_); });
  });
  return Completion([this, number, works = std::move(works), outs = std::move(outs), ins = std::move(ins),
                     what = names(group)]() mutable {
    explained("gather", what, [&] {
      for (const auto& work : works) work->wait();
    });
    history_.finish(number);
  });
}

Completion ProcessGroupCommunicator::reduce_scatter_mean(const std::vector<Transfer>& group) {
  std::vector<Tensor> outs, ins, results;
  for (const Transfer& transfer : group) {
    if (transfer.in.numel() == 0) continue;
    const bool widen = transfer.in.scalar_type() == c10::kHalf;
    results.push_back(wire_form(transfer.out));
    ins.push_back(widen ? flat(transfer.in).to(c10::kFloat) : wire_form(transfer.in));
    outs.push_back(widen ? at::empty_like(results.back(), c10::kFloat) : results.back());
  }
  if (ins.empty()) return {};
  const int64_t number = history_.begin("reduction", group).number;
  Works works;
  explained("reduction", names(group), [&] {
    works = start(
        coalesced_reduce_, ins.size(), [&] { return backend_->reduce_scatter_tensor_coalesced(outs, ins, reduce_options_); },
        [&](size_t i) { return backend_->_reduce_scatter_base(outs[i], ins[i], reduce_options_); });
  });
  return means(number, names(group), std::move(works), std::move(outs), std::move(ins), std::move(results));
}

Completion ProcessGroupCommunicator::all_reduce_mean(const std::vector<Transfer>& group) {
  std::vector<Tensor> sums, results;
  for (const Transfer& transfer : group) {
    if (transfer.in.numel() == 0) continue;
    const bool widen = transfer.in.scalar_type() == c10::kHalf;
    results.push_back(wire_form(transfer.out));
    if (!transfer.out.is_same(transfer.in)) results.back().copy_(wire_form(transfer.in));
    sums.push_back(widen ? results.back().to(c10::kFloat) : results.back());
  }
  if (sums.empty()) return {};
  const int64_t number = history_.begin("reduction over replicas", group).number;
  Works works;
  explained("reduction over replicas", names(group), [&] {
    const Unrecorded unrecorded;
    for (const Tensor& sum : sums) {
      std::vector<Tensor> one = {sum};
      works.push_back(backend_->allreduce(one, all_reduce_options_));
    }
  });
  return means(number, names(group), std::move(works), std::move(sums), {}, std::move(results));
}

Completion ProcessGroupCommunicator::means(int64_t number, std::string what, Works works, std::vector<Tensor> outs,
                                           std::vector<Tensor> ins, std::vector<Tensor> results) {
  return Completion([this, number, works = std::move(works), outs = std::move(outs), ins = std::move(ins),
                     results = std::move(results), what = std::move(what)]() mutable {
    explained("reduction", what, [&] {
      for (const auto& work : works) work->wait();
    });
    history_.finish(number);
    for (size_t i = 0; i < outs.size(); ++i) {
      outs[i].div_(world_size());
      if (!outs[i].is_same(results[i])) results[i].copy_(outs[i]);
    }
  });
}

}  // namespace ldc
