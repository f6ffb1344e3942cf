// The Python side of the runtime: lifecycle calls. What programs execute are the operators in ops.cpp.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/build_info.h"
#include "bindings/runtime.h"
#include "executors/gradient_merge.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace {

using ldc::Runtime;
using NoGil = py::call_guard<py::gil_scoped_release>;  // every method may wait for a peer or for the device

/// Python's ProcessGroup holds its object by a holder type that torch keeps to itself; go through the plain pointer.
ldc::Group share(c10d::ProcessGroup& group) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(&group);
}

std::shared_ptr<Runtime> make_runtime(c10d::ProcessGroup& gather_group, c10d::ProcessGroup& reduce_group,
                                      c10d::ProcessGroup* replica_group, at::Device device,
                                      const ldc::RuntimeOptions& options) {
  auto runtime = Runtime::create(share(gather_group), share(reduce_group),
                                 replica_group == nullptr ? ldc::Group() : share(*replica_group), device, options);
  // Python drops the last reference with its lock held; the end of a runtime may wait for the device, so let go of it.
  Runtime* address = runtime.get();
  return {address, [runtime = std::move(runtime)](Runtime*) mutable {
            if (runtime->is_copy()) {
              static_cast<void>(new std::shared_ptr<Runtime>(std::move(runtime)));  // kept until the process ends
              return;
            }
            if (!PyGILState_Check()) return runtime.reset();
            const py::gil_scoped_release no_gil;
            runtime.reset();
          }};
}

/// A field of RuntimeOptions, which is a keyword of the same name in Python.
template <auto Field>
struct Option {
  using Type = std::decay_t<decltype(std::declval<ldc::RuntimeOptions>().*Field)>;
  const char* name;
};
#define LDC_OPTION(field) Option<&ldc::RuntimeOptions::field>{#field}

template <typename Class, auto... Fields>
void bind_constructor(Class& runtime, Option<Fields>... options) {
  const ldc::RuntimeOptions defaults;
  runtime.def(py::init([](c10d::ProcessGroup& gather_group, c10d::ProcessGroup& reduce_group, at::Device device,
                          c10d::ProcessGroup* replica_group, typename Option<Fields>::Type... values) {
                ldc::RuntimeOptions wanted;
                ((wanted.*Fields = std::move(values)), ...);
                return make_runtime(gather_group, reduce_group, replica_group, device, wanted);
              }),
              "gather_group"_a, "reduce_group"_a, "device"_a, py::kw_only(), "replica_group"_a = py::none(),
              (py::arg(options.name) = defaults.*Fields)..., NoGil());
}

template <typename Class>
void bind_lifecycle(Class& runtime) {
  runtime
      .def("start_backward", py::overload_cast<const ldc::Ids&, bool>(&Runtime::start_backward), "reset_ids"_a,
           "update"_a = true, NoGil(),
           "Open a backward pass: `reset_ids` start a new accumulation (their next reduction overwrites, later ones "
           "add). Without `update`, graphs that reduce at the boundary hold their gradients back.")
      .def("finish_backward", &Runtime::finish_backward, NoGil(),
           "Order the current stream behind all reductions (CPU: complete them). Raises their failures.")
      .def("ids_with_grad", &Runtime::ids_with_grad, NoGil(), "Parameters whose gradient shard is valid, ascending.")
      .def("free_grads", &Runtime::free_grads, "ids"_a, NoGil(),
           "Forget accumulations; storages without any are resized to 0 bytes until the next reduction.")
      .def("invalidate", &Runtime::invalidate, NoGil(), "The weights changed: forget all gathered parameters.")
      .def("order_gathers", &Runtime::order_gathers, NoGil(),
           "Gathers launched from now on read what the current stream has written by then; those under way stay.")
      .def("communicates", &Runtime::communicates, NoGil(),
           "Whether a collective was launched that the compute stream has not been ordered behind.")
      .def("refetch", &Runtime::refetch, NoGil(),
           "Start gathering what invalidate() took from parameters that stay whole, in the order of their first use.")
      .def("start_forward", &Runtime::start_forward, NoGil())
      .def("end_forward", &Runtime::end_forward, NoGil())
      .def("start_pass", py::overload_cast<bool>(&Runtime::start_backward), "update"_a, NoGil(),
           "Open a backward pass whose graphs end it, each by end_backward(graph_id).")
      .def("end_backward", &Runtime::end_backward, "graph_id"_a, NoGil())
      .def("invalidate_gathered_param", &Runtime::invalidate_gathered_param, "ds_id"_a, NoGil())
      .def("clear_all_gathered_params", &Runtime::clear_all_gathered_params, NoGil())
      .def("enable_profiling", &Runtime::enable_profiling, "enable"_a, NoGil())
      .def_property_readonly("profiling", &Runtime::is_profiling)
      .def("free_tensors", &Runtime::free_tensors, "tensors"_a, NoGil(),
           "Turn tensors of at least `free_activation_threshold` elements into empty ones.")
      .def("reserve_states", &Runtime::reserve_states, "sizes"_a, NoGil(),
           "Take host memory for optimizer states of such sizes now, and keep it until the next call or clear_arena().")
      .def("host_shard", &Runtime::host_shard, "numel"_a, "dtype"_a, NoGil(),
           "A 1-D tensor of the device that lies in pinned host memory, for the shards of parameters; uninitialised. "
           "Gathers copy such shards to the device.")
      .def_static("host_of", &ldc::HostShards::host_of, "tensor"_a, NoGil(),
                  "The memory of what host_shard() returned, or of a view of it, as a host tensor; None for others.")
      .def("state_home", &Runtime::state_home, "like"_a, NoGil(),
           "A place in host memory (pinned where the device has streams) for an optimizer state; uninitialised.")
      .def("expect_states", &Runtime::expect_states, "chunks"_a, "slots"_a, NoGil(),
           "Say what dc.reload_states fetches, chunk by chunk: homes that only stow_states writes to, and out of which slots.")
      .def("take_states", &Runtime::take_states, NoGil(),
           "What dc.reload_states fetched: chunk k's tensors are in slot -1 - k, to be used after await_states.")
      .def("drop_states", &Runtime::drop_states, NoGil(), "Forget what dc.reload_states fetched and nobody took.")
      .def("begin_states", &Runtime::begin_states, "slot_bytes"_a, NoGil(),
           "Start a step of an optimizer whose offloaded states come in chunks; most of them take at most so many bytes.")
      .def("fetch_states", &Runtime::fetch_states, "slot"_a, "homes"_a, NoGil(),
           "Start copying a chunk to the buffer `slot`, from 0; returns its tensors, to be used after await_states.")
      .def("await_states", &Runtime::await_states, "slot"_a, NoGil())
      .def("stow_states", &Runtime::stow_states, "slot"_a, "sources"_a, "homes"_a, NoGil(),
           "Start copying a chunk to the host.")
      .def("settle_states", &Runtime::settle_states, NoGil(),
           "Order the current stream behind the copies of states and give their buffers back.")
      .def("release_states", &Runtime::release_states, NoGil(),
           "Give the buffers of states back, while copies out of them go on.")
      .def("synchronize_states", &Runtime::synchronize_states, NoGil(),
           "Wait until host memory holds what was stowed, and free what nobody uses of it.")
      .def("reset", &Runtime::reset, NoGil(), "Forget all graphs and what a step has left; parameters stay.")
      .def("relieve", &Runtime::relieve, NoGil(),
           "The device is short of memory: give some back without a word to other ranks. Returns the bytes, or 0.")
      .def("clear_arena", &Runtime::clear_arena, NoGil(), "Give free buffers back to torch's allocator.")
      .def("stats", &Runtime::stats, NoGil(), "Counters since the last reset_stats().")
      .def("reset_stats", &Runtime::reset_stats, NoGil())
      .def("abort", &Runtime::abort, NoGil(), "Fail pending and later operations instead of waiting for peers.")
      .def("close", &Runtime::close, NoGil(), "End the runtime together with its peers. Idempotent.")
      .def("retire", &Runtime::retire, "wait_seconds"_a = 0.0, NoGil(),
           "As close(), but once the device is idle waits for peers, which end it whenever they get to it, for so long "
           "at most.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "C++ runtime of lightning_deepcompile: gathers, reductions and their buffers.";
  m.def("build_info", &ldc::build_info, "How this extension was built: mode, reason, nccl, compiler, torch.");

  m.def(
      "like_gathered", [](int64_t id, ldc::Dtype dtype) { return Runtime::of(id)->like_gathered(id, dtype); }, "ds_id"_a,
      "dtype"_a = py::none(), NoGil(), "A meta tensor like the gathered parameter.");

  m.def(
      "device_of", [](int64_t id) { return Runtime::of(id)->device(); }, "graph_id"_a, NoGil(),
      "The device of the runtime that a graph belongs to.");

  py::class_<ldc::GradientMerge>(m, "GradientMerge",
                                 "How reduced gradients go into gradient shards; runtimes have their own.")
      .def(py::init(&ldc::make_gradient_merge), "device"_a, "blocks"_a = 0)
      .def("merge", &ldc::GradientMerge::merge, "grad"_a, "sum"_a, "add"_a, NoGil(),
           "Queue grad = sum, or grad += sum. Both are contiguous and have as many elements.");

  m.def(
      "numa_refusal",
      [](int64_t node, std::vector<int64_t> cpus) {
        return ldc::near_node({.node = node, .cpus = std::move(cpus)}, [] {});
      },
      "node"_a, "cpus"_a, "Why host memory may come from any NUMA node; empty where `node` is preferred.");

  py::class_<Runtime, std::shared_ptr<Runtime>> runtime(
      m, "Runtime",
      "Communicators, streams, buffers and executors of one strategy. Creating one is collective over its groups.");
  bind_constructor(runtime, LDC_OPTION(communicator), LDC_OPTION(reduce_window), LDC_OPTION(reduce_bucket_size),
                   LDC_OPTION(max_ctas), LDC_OPTION(cta_cluster), LDC_OPTION(symmetric_threshold), LDC_OPTION(timeout),
                   LDC_OPTION(free_activation_threshold), LDC_OPTION(host_limit), LDC_OPTION(numa_node),
                   LDC_OPTION(numa_cpus), LDC_OPTION(sync_before_reduce), LDC_OPTION(sync_after_reduce),
                   LDC_OPTION(sync_before_allgather), LDC_OPTION(sync_after_allgather), LDC_OPTION(serial));
  runtime
      .def_property_readonly("serial", &Runtime::serial, "Upper 32 bits of every parameter and graph id.")
      .def_property_readonly("world_size", &Runtime::world_size)
      .def_property_readonly("rank", &Runtime::rank)
      .def_property_readonly("communicator", &Runtime::communicator, "'nccl' or 'process_group'.")
      .def("share_shards", &Runtime::share_shards, NoGil(),
           "On one rank: parameters that are gathered as they are stored are their shards, and cost nothing.")
      .def("register_param", &Runtime::register_param, "ds_id"_a, "name"_a, "shape"_a, "shard"_a,
           "grad"_a = py::none(), "reduce_dtype"_a = py::none(), "persistent"_a = false, NoGil(),
           "Register a parameter: its shard, and its gradient shard with memory (whose size is remembered) or None.")
      .def("update_param_grad_buffer", &Runtime::update_param_grad_buffer, "ds_id"_a, "grad"_a, NoGil(),
           "Give a parameter another gradient buffer; the old one keeps its values.")
      .def("set_persistent", &Runtime::set_persistent, "ds_id"_a, "persistent"_a = true, NoGil(),
           "Keep a parameter gathered from its next use until the weights change.")
      .def(
          "register_graph",
          [](Runtime& self, int64_t graph_id, const ldc::Ids& ds_ids, int64_t stage,
             const std::optional<std::string>& reduce) {
            self.register_graph(graph_id, ds_ids, stage, reduce.value_or(""));
          },
          "graph_id"_a, "ds_ids"_a, py::kw_only(), "stage"_a = 3, "reduce"_a = py::none(), NoGil(),
          "Register a graph and the parameters it uses, under a ZeRO stage. `reduce`: 'every' micro-batch, or at the "
          "'boundary' (by default stage 1 alone). The same id again replaces it.")
      .def("validate_registration", &Runtime::validate_registration, NoGil(),
           "Raise on every rank if ranks registered different parameters or graphs. Collective.");
  bind_lifecycle(runtime);
}
