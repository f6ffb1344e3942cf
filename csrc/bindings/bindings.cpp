// The Python side of the runtime: its faces (faces.h). What programs execute are the operators in ops.cpp.
#include <ATen/ops/empty.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "base/build_info.h"
#include "bindings/runtime.h"
#include "communicators/make_communicators.h"
#include "executors/gradient_merge.h"
#include "memory/host_shards.h"

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

/// A face of a runtime, which it keeps alive.
template <auto Member>
auto face() {
  return [](const std::shared_ptr<Runtime>& runtime) {
    auto* const member = &((*runtime).*Member);
    return std::shared_ptr<std::remove_pointer_t<decltype(member)>>(runtime, member);
  };
}

template <typename Class>
using FaceClass = py::class_<Class, std::shared_ptr<Class>>;

void bind_setup(py::module_& m) {
  FaceClass<ldc::Setup>(m, "Setup", "Before the first step: what there is.")
      .def("register_param", &ldc::Setup::register_param, "ds_id"_a, "name"_a, "shape"_a, "shard"_a,
           "grad"_a = py::none(), "reduce_dtype"_a = py::none(), "persistent"_a = false, NoGil(),
           "Register a parameter: its shard, and its gradient shard with memory (whose size is remembered) or None.")
      .def(
          "register_graph",
          [](ldc::Setup& self, int64_t graph_id, const ldc::Ids& ds_ids, int64_t stage,
             const std::optional<std::string>& reduce) {
            self.register_graph(graph_id, ds_ids, stage, reduce.value_or(""));
          },
          "graph_id"_a, "ds_ids"_a, py::kw_only(), "stage"_a = 3, "reduce"_a = py::none(), NoGil(),
          "Register a graph and the parameters it uses, under a ZeRO stage. `reduce`: 'every' micro-batch, or at the "
          "'boundary' (by default stage 1 alone). The same id again replaces it.")
      .def("validate", &ldc::Setup::validate, NoGil(),
           "Raise on every rank if ranks registered different parameters or graphs. Collective.")
      .def("share_shards", &ldc::Setup::share_shards, NoGil(),
           "On one rank: parameters that are gathered as they are stored are their shards, and cost nothing.");
}

void bind_parameters(py::module_& m) {
  FaceClass<ldc::Parameters>(m, "Parameters", "Gathered parameters between graphs.")
      .def("set_persistent", &ldc::Parameters::set_persistent, "ds_id"_a, "persistent"_a = true, NoGil(),
           "Keep a parameter gathered from its next use until the weights change.")
      .def("invalidate", &ldc::Parameters::invalidate, "ds_id"_a = py::none(), NoGil(),
           "The weights changed: no gathered parameter is up to date, or the one with this id is not.")
      .def("refetch", &ldc::Parameters::refetch, NoGil(),
           "Start gathering what invalidate() took from parameters that stay whole, in the order of their first use.")
      .def("order_gathers", &ldc::Parameters::order_gathers, NoGil(),
           "Gathers launched from now on read what the current stream has written by then; those under way stay.");
}

void bind_gradients(py::module_& m) {
  FaceClass<ldc::Gradients>(m, "Gradients", "Gradient shards, and backward passes that the caller brackets.")
      .def("start_backward", &ldc::Gradients::start_backward, "reset_ids"_a, "update"_a = true, NoGil(),
           "Open a backward pass: `reset_ids` start a new accumulation (their next reduction overwrites, later ones "
           "add). Without `update`, graphs that reduce at the boundary hold their gradients back.")
      .def("finish_backward", &ldc::Gradients::finish_backward, NoGil(),
           "Order the current stream behind all reductions (CPU: complete them). Raises their failures.")
      .def("ids", &ldc::Gradients::ids, NoGil(), "Parameters whose gradient shard is valid, ascending.")
      .def("replace", &ldc::Gradients::replace, "ds_id"_a, "grad"_a, NoGil(),
           "Give a parameter another gradient buffer; the old one keeps its values.")
      .def("free", &ldc::Gradients::free, "ids"_a, NoGil(),
           "Forget accumulations; storages without any are resized to 0 bytes until the next reduction.");
}

void bind_passes(py::module_& m) {
  FaceClass<ldc::Passes>(m, "Passes", "The passes of the `dc` functions.")
      .def("start_forward", &ldc::Passes::start_forward, NoGil())
      .def("end_forward", &ldc::Passes::end_forward, NoGil())
      .def("start_backward", &ldc::Passes::start_backward, "update"_a, NoGil(),
           "Open a backward pass whose graphs end it, each by end_backward(graph_id).")
      .def("end_backward", &ldc::Passes::end_backward, "graph_id"_a, NoGil())
      .def("enable_profiling", &ldc::Passes::enable_profiling, "enable"_a, NoGil())
      .def_property_readonly("profiling", &ldc::Passes::is_profiling);
}

void bind_states(py::module_& m) {
  FaceClass<ldc::States>(m, "States", "Optimizer states in host memory.")
      .def("reserve", &ldc::States::reserve, "sizes"_a, NoGil(),
           "Take host memory for states of such sizes now, and keep it until the next call or memory.free_unused().")
      .def("host_buffer", &ldc::States::host_buffer, "like"_a, NoGil(),
           "A host tensor (pinned where the device has streams) in which a state waits; uninitialised.")
      .def("expect", &ldc::States::expect, "chunks"_a, "slots"_a, NoGil(),
           "Say what dc.reload_states fetches, chunk by chunk: host buffers that only stow() writes to, and out of "
           "which slots.")
      .def("take", &ldc::States::take, NoGil(),
           "What dc.reload_states fetched: chunk k's tensors are in slot -1 - k, to be used after wait().")
      .def("forget_fetched", &ldc::States::forget_fetched, NoGil(),
           "Forget what dc.reload_states fetched and nobody took.")
      .def("begin", &ldc::States::begin, "slot_bytes"_a, NoGil(),
           "Start a step of an optimizer whose states come in chunks; most of them take at most so many bytes.")
      .def("fetch", &ldc::States::fetch, "slot"_a, "host_buffers"_a, NoGil(),
           "Start copying a chunk to the buffer `slot`, from 0; returns its tensors, to be used after wait().")
      .def("wait", &ldc::States::wait, "slot"_a, NoGil(),
           "The current stream may use what fetch() returned for a slot.")
      .def("stow", &ldc::States::stow, "slot"_a, "sources"_a, "host_buffers"_a, NoGil(),
           "Start copying a chunk to the host.")
      .def("settle", &ldc::States::settle, NoGil(),
           "Order the current stream behind the copies of states, and free their buffers on the device.")
      .def("release", &ldc::States::release, NoGil(),
           "Free the buffers of states on the device when the copies out of them are done.")
      .def("synchronize", &ldc::States::synchronize, NoGil(),
           "Wait until host memory holds what was stowed, and free what nobody uses of it.");
}

void bind_graphs(py::module_& m) {
  py::class_<ldc::Recording, std::shared_ptr<ldc::Recording>>(m, "Recording",
                                                              "What the runtime knew around a recorded program.");
  FaceClass<ldc::Graphs>(m, "Graphs", "Programs that device graphs record and replay.")
      .def("begin", &ldc::Graphs::begin, NoGil(),
           "From now on nothing is gathered ahead of programs, and gradients keep their memory. On all ranks alike.")
      .def("prepare", &ldc::Graphs::prepare, NoGil(),
           "Before a recording, behind begin(): nothing is in flight, and gradients have their memory.")
      .def("fork", &ldc::Graphs::fork, NoGil(), "The current stream records: the runtime's streams do, too.")
      .def("join", &ldc::Graphs::join, NoGil(),
           "The program was issued: everything is behind the current stream again. Returns the recording.")
      .def("cancel", &ldc::Graphs::cancel, NoGil(), "The recording has failed, and its program has not run.")
      .def("fits", &ldc::Graphs::fits, "recording"_a, NoGil(),
           "Whether a replay would find everything as the recording did.")
      .def("replayed", &ldc::Graphs::replayed, "recording"_a, "program"_a, NoGil(),
           "A replay was queued on the current stream.")
      .def("forget", &ldc::Graphs::forget, NoGil(), "There are no recordings any more.");
}

void bind_memory(py::module_& m) {
  FaceClass<ldc::Memory>(m, "Memory", "Device and host memory.")
      .def("host_shard", &ldc::Memory::host_shard, "numel"_a, "dtype"_a, NoGil(),
           "A 1-D tensor of the device that lies in pinned host memory, for the shards of parameters; uninitialised. "
           "Gathers copy such shards to the device.")
      .def_static("host_of", &ldc::host_of, "tensor"_a, NoGil(),
                  "The memory of what host_shard() returned, or of a view of it, as a host tensor; None for others.")
      .def("free_tensors", &ldc::Memory::free_tensors, "tensors"_a, NoGil(),
           "Turn tensors of at least `free_activation_threshold` elements into empty ones.")
      .def("free_unused", &ldc::Memory::free_unused, NoGil(), "Free device and host memory that nobody uses.")
      .def("give_back", &ldc::Memory::give_back, NoGil(),
           "The device is short of memory: give some back without a word to other ranks. Returns the bytes, or 0.")
      .def("free_buffers", &ldc::Memory::free_buffers, NoGil(),
           "Give up what windows() counts, and buffers of reductions, where they hold nothing. All ranks call it "
           "between the same two gathers.")
      .def("windows", &ldc::Memory::windows, NoGil(),
           "Bytes of memory into which other ranks gather, which torch does not count; of the smallest group that is "
           "gathered so, or 0; and a digest of all uses so far, the same on all ranks.");
}

void bind_runtime(py::class_<Runtime, std::shared_ptr<Runtime>>& runtime) {
  bind_constructor(runtime, LDC_OPTION(communicator), LDC_OPTION(reduce_window), LDC_OPTION(reduce_bucket_size),
                   LDC_OPTION(symmetric_threshold), LDC_OPTION(timeout), LDC_OPTION(free_activation_threshold),
                   LDC_OPTION(host_limit), LDC_OPTION(sync_before_reduce), LDC_OPTION(sync_after_reduce),
                   LDC_OPTION(sync_before_allgather), LDC_OPTION(sync_after_allgather), LDC_OPTION(serial));
  runtime.def_property_readonly("serial", &Runtime::serial, "Upper 32 bits of every parameter and graph id.")
      .def_property_readonly("world_size", &Runtime::world_size)
      .def_property_readonly("rank", &Runtime::rank)
      .def_property_readonly("communicator", &Runtime::communicator, "'nccl' or 'process_group'.")
      .def_property_readonly("setup", face<&Runtime::setup>())
      .def_property_readonly("parameters", face<&Runtime::parameters>())
      .def_property_readonly("gradients", face<&Runtime::gradients>())
      .def_property_readonly("passes", face<&Runtime::passes>())
      .def_property_readonly("states", face<&Runtime::states>())
      .def_property_readonly("graphs", face<&Runtime::graphs>())
      .def_property_readonly("memory", face<&Runtime::memory>())
      .def("stats", &Runtime::stats, NoGil(), "Counters since the last reset_stats().")
      .def("history",
           [](const Runtime& self) {
             py::dict result;
             for (const auto& [name, operations] : self.history()) {
               py::list rows;
               for (const ldc::Operation& one : operations) {
                 rows.append(py::dict("kind"_a = one.kind, "first"_a = one.first, "others"_a = one.others,
                                      "number"_a = one.number, "sent"_a = one.sent, "received"_a = one.received,
                                      "created"_a = one.created, "finished"_a = one.finished));
               }
               result[py::str(name)] = rows;
             }
             return result;
           },
           "The last operations by the set of ranks that they are over, also of a runtime that has failed.")
      .def("reset_stats", &Runtime::reset_stats, NoGil())
      .def("reset", &Runtime::reset, NoGil(), "Forget all graphs and what a step has left; parameters stay.")
      .def("abort", &Runtime::abort, NoGil(),
           "Fail pending and later operations instead of waiting for peers.")
      .def(
          "close",
          [](Runtime& self, std::optional<double> wait_seconds) {
            wait_seconds ? self.close(*wait_seconds) : self.close();
          },
          "wait_seconds"_a = py::none(), NoGil(),
          "End the runtime together with its peers. With `wait_seconds`: once the device is idle, wait for peers, "
          "which end it whenever they get to it, for so long at most. Idempotent.");
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() = "C++ runtime of lightning_deepcompile: gathers, reductions and their buffers.";
  m.def("build_info", &ldc::build_info, "How this extension was built: mode, reason, nccl, compiler, torch.");
  m.def("found_nccl", &ldc::found_nccl, "The version of NCCL that is used; empty if built without, or none is found.");

  m.def(
      "like_gathered",
      [](int64_t id, ldc::Dtype dtype) {
        const auto owner = Runtime::of(id);
        const ldc::Turn turn = owner->enter();
        const ldc::Param& param = turn->registry.at(id);
        const auto options = param.shard.options().dtype(dtype.value_or(param.shard.scalar_type()));
        return at::empty(param.shape, options.device(c10::kMeta));
      },
      "ds_id"_a, "dtype"_a = py::none(), NoGil(), "A meta tensor like the gathered parameter.");

  m.def(
      "device_of", [](int64_t id) { return Runtime::of(id)->device(); }, "graph_id"_a, NoGil(),
      "The device of the runtime that a graph belongs to.");

  py::class_<ldc::GradientMerge>(m, "GradientMerge",
                                 "How reduced gradients go into gradient shards; runtimes have their own.")
      .def(py::init(&ldc::make_gradient_merge), "device"_a, "blocks"_a = 0)
      .def(
          "merge",
          [](ldc::GradientMerge& self, const ldc::Tensor& grad, const ldc::Tensor& sum, bool add) {
            self.merge({{grad, sum, add}});
          },
          "grad"_a, "sum"_a, "add"_a, NoGil(),
          "Queue grad = sum, or grad += sum. Both are contiguous and have as many elements.");

  bind_setup(m);
  bind_parameters(m);
  bind_gradients(m);
  bind_passes(m);
  bind_states(m);
  bind_graphs(m);
  bind_memory(m);
  py::class_<Runtime, std::shared_ptr<Runtime>> runtime(
      m, "Runtime",
      "Communicators, streams, buffers and executors of one strategy. Creating one is collective over its groups.");
  bind_runtime(runtime);
}
