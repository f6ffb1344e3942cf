// Records programs as device graphs.
//
// A replay repeats the device work of the recording, on all streams, and runs nothing on the host. So the state of the
// engines must be the same before a replay as before the recording, and after a replay it is set to the state after the
// recording: which parameters are gathered, and where; which gradients are valid; which sums wait. A recording holds
// both states.
//
//   begin()     on all ranks in the same step: no gathers ahead of programs any more; gradients keep their memory
//   prepare()   before the recording: waits for work in flight, allows fresh slots only, allocates gradients
//   fork()      the current stream records: now the engines' streams do, too
//   (the program runs: its work is recorded, and does not reach the device)
//   join()      orders the current stream behind all of it
//   fits(), replayed()   for each replay, the first one included
#pragma once

#include <memory>

#include "executors/gather.h"
#include "executors/reduce.h"

namespace ldc {

class Recording {
 public:
  /// The state of the engines before or after a program.
  struct Edge {
    GatherEngine::Left gathered;
    WholeGradients::Sums held;
    Ids with_grad;
    bool boundary;  // the optimizer steps after this backward
  };

 private:
  friend class Recorder;
  Edge before, after;
  Stats counted;          // by one run
  int64_t addresses = 0;  // Registry::addresses()
};

class Recorder {
 public:
  Recorder(Registry& registry, GatherEngine& gathers, ReduceEngine& reductions, Stats& stats, const bool& boundary)
      : registry_(registry), gathers_(gathers), reductions_(reductions), stats_(stats), boundary_(boundary) {}

  void begin();
  void prepare();
  void fork();
  std::shared_ptr<Recording> join();
  /// The recording has failed, and its program has not run.
  void cancel();
  /// Whether the state is the same as before the recording.
  bool fits(const Recording& recording) const;
  void replayed(const Recording& recording);
  /// There are no recordings any more.
  void forget();

 private:
  Recording::Edge edge() const;
  void restore(const Recording::Edge& edge);

  Registry& registry_;
  GatherEngine& gathers_;
  ReduceEngine& reductions_;
  Stats& stats_;
  const bool& boundary_;
  std::shared_ptr<Recording> recording_;  // the one under way
};

}  // namespace ldc
