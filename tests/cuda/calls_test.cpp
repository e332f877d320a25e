// What must hold between calls of the CUDA rows: 200 repeats equal bit for bit, capture into a graph and replay, two
// streams at once, and a failed launch that is reported once and then forgotten. Skips where there is no GPU.
#include <cuda_runtime.h>

#include <memory>

#include "cuda/backend.h"
#include "row_run.h"

namespace tilewise::cuda_test {
namespace {

int failures = 0, checks = 0;

void expect(bool ok, const std::string& what) {
  ++checks;
  if (ok) return;
  ++failures;
  std::printf("FAIL %s\n", what.c_str());
}

// Deterministic problems that between them reach every kernel of a row: plain, dropout, every option, few rows, splits.
const char* const kProblems[] = {
    "fwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 causal",
    "fwd DTYPE b=2 hq=4 hk=2 sq=1000 sk=1025 d=128",
    "fwd DTYPE b=1 hq=2 sq=257 sk=511 d=256 causal",
    "fwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=128 dropout=0.2 rng_state",
    "fwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 softcap=20 alibi=bh bias=f32:hqk sink maxlogit causal",
    "fwd DTYPE b=3 hq=8 hk=2 sq=1 sk=1500 d=128 splits=5 seqused_k sink",
    "fwd DTYPE b=7 hq=4 hk=1 sq=200 sk=210 d=64 packed_q=900 packed_k=800 causal",
    "fwd DTYPE b=7 hq=4 hk=1 sq=3 sk=210 d=64 pages=80x16 seqused_k causal",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 causal deterministic",
    "bwd DTYPE b=1 hq=4 hk=4 sq=1000 sk=1025 d=128 deterministic",
    "bwd DTYPE b=1 hq=2 sq=257 sk=511 d=256 causal deterministic",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=128 dropout=0.2 rng_state deterministic",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 softcap=20 alibi=bh bias=f32:bhqk sink dbias dalibi dsink dlse deterministic",
    "bwd DTYPE b=7 hq=4 hk=1 sq=200 sk=210 d=64 packed_q=900 packed_k=800 causal deterministic",
};

struct Case {
  const KernelRow* row;
  tw_problem problem;
  std::string name;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const KernelRow& row : cuda_kernels())
    for (const char* dtype : {"bf16", "f16", "f32"})
      for (std::string text : kProblems) {
        text.replace(text.find("DTYPE"), 5, dtype);
        tw_problem p;
        if (Status s = parse(text, &p); !s.ok()) {
          expect(false, s.message());
          continue;
        }
        if (row.pass == p.pass && row.available() && row.refusal(p).empty()) cases.push_back({&row, p, std::string(row.name) + " \"" + text + "\""});
      }
  return cases;
}

// Inputs on the device, and the results of a run as bytes.
struct Session {
  Inputs in;
  Plan plan;
  std::unique_ptr<Workspace> workspace;

  explicit Session(const Case& c, unsigned seed = 1) : in(c.problem, LayoutKind::kContiguous, seed, 1, false) {
    if (c.problem.pass == TW_BACKWARD) {  // o and lse: any values of the right size do
      for (int64_t n = 0; n < in.o.count(); ++n) in.o.set(n, 0.01 * static_cast<double>(n % 7));
      for (int64_t n = 0; n < in.lse.count(); ++n) in.lse.set(n, 5);
    }
    in.upload();
    if (Status s = plan_row(*c.row, c.problem, &plan); !s.ok()) std::printf("%s\n", s.message().c_str()), std::exit(1);
    workspace = std::make_unique<Workspace>(plan.workspace_bytes);
  }
  std::vector<Mirror*> outputs() {
    std::vector<Mirror*> found;
    if (plan.problem.pass == TW_BACKWARD)
      found = {&in.dq, &in.dk, &in.dv, &in.dbias, &in.dalibi, &in.dsink};
    else
      found = {&in.o, &in.lse, &in.max_logit, &in.mask_out};
    std::erase_if(found, [](const Mirror* m) { return !m->exists; });
    return found;
  }
  Status run(cudaStream_t stream) { return plan.row->run(plan, in.tensors(true), workspace->data(), stream); }
  void must_run(cudaStream_t stream) {
    if (Status s = run(stream); !s.ok()) expect(false, concat(plan.row->name, " ", format(plan.problem), ": ", s.message()));
  }
  std::vector<std::vector<uint8_t>> results() {
    std::vector<std::vector<uint8_t>> bytes;
    for (const Mirror* m : outputs()) bytes.push_back(m->download());
    return bytes;
  }
  void poison() {
    for (Mirror* m : outputs()) check_cuda(cudaMemset(m->device + m->begin, 0xee, static_cast<size_t>(m->count() * dtype_size(m->tensor.dtype))), "poison");
  }
};

void repeats(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    Session session(c);
    std::vector<std::vector<uint8_t>> first;
    int differ = 0;
    for (int n = 0; n < 200; ++n) {
      session.poison();
      const Status s = session.run(nullptr);
      if (!s.ok()) {
        expect(false, c.name + ": " + s.message());
        break;
      }
      auto bytes = session.results();
      if (n == 0)
        first = std::move(bytes);
      else
        differ += bytes != first;
    }
    expect(differ == 0, c.name + ": " + std::to_string(differ) + " of 199 repeats differ from the first");
    expect(session.workspace->guard_intact(), c.name + ": wrote behind its workspace");
  }
}

// In the strictest capture mode: an allocation or a synchronisation inside run() would be an error.
void graphs(const std::vector<Case>& cases) {
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream), "stream");
  for (const Case& c : cases) {
    Session session(c);
    session.must_run(stream);  // modules load at the first launch
    check_cuda(cudaStreamSynchronize(stream), "first run");
    const auto want = session.results();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    const Status status = session.run(stream);
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    expect(status.ok() && ended == cudaSuccess, c.name + ": capture: " + status.message() + " " + cudaGetErrorName(ended));
    if (!status.ok() || ended != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (int n = 0; n < 3; ++n) {
      session.poison();
      check_cuda(cudaGraphLaunch(executable, stream), "replay");
      check_cuda(cudaStreamSynchronize(stream), "replay");
      expect(session.results() == want, c.name + ": replay " + std::to_string(n) + " differs from the direct call");
    }
    if (session.in.rng.exists) {  // new state in device memory: the same graph draws another mask
      static_cast<int64_t*>(session.in.rng.tensor.data)[1] += 1;
      session.in.rng.upload();
      check_cuda(cudaGraphLaunch(executable, stream), "replay");
      check_cuda(cudaStreamSynchronize(stream), "replay");
      const auto other = session.results();
      expect(other != want, c.name + ": new rng_state, the same results");
      session.poison();
      session.must_run(stream);
      check_cuda(cudaStreamSynchronize(stream), "direct");
      expect(session.results() == other, c.name + ": replay with new rng_state differs from the direct call");
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

// Every case on two streams, together with the next one on the other; each with its own workspace.
void streams(const std::vector<Case>& cases) {
  cudaStream_t stream[2];
  for (auto& s : stream) check_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
  for (size_t n = 0; n + 1 < cases.size(); ++n) {
    Session a(cases[n], 3), b(cases[n + 1], 4);
    a.must_run(stream[0]);
    check_cuda(cudaStreamSynchronize(stream[0]), "alone");
    b.must_run(stream[0]);
    check_cuda(cudaStreamSynchronize(stream[0]), "alone");
    const auto want_a = a.results(), want_b = b.results();
    a.poison(), b.poison();
    for (int repeat = 0; repeat < 20; ++repeat) a.must_run(stream[0]), b.must_run(stream[1]);
    for (auto& s : stream) check_cuda(cudaStreamSynchronize(s), "together");
    expect(a.results() == want_a, cases[n].name + ": differs beside another stream");
    expect(b.results() == want_b, cases[n + 1].name + ": differs beside another stream");
  }
  for (auto& s : stream) cudaStreamDestroy(s);
}

// A capture that a synchronisation has broken refuses every launch on its stream.
void launch_errors(const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    Session session(c);
    session.must_run(nullptr);
    check_cuda(cudaDeviceSynchronize(), "first run");
    const auto want = session.results();
    cudaStream_t stream;
    check_cuda(cudaStreamCreate(&stream), "stream");
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
    cudaStreamSynchronize(stream);  // not allowed: the capture is invalid from here on
    cudaGetLastError();
    const Status status = session.run(stream);
    expect(status.code() == TW_DEVICE_ERROR && status.message().find("cudaErrorStreamCapture") != std::string::npos,
           c.name + ": a failed launch gave \"" + status.message() + "\"");
    expect(cudaGetLastError() == cudaSuccess, c.name + ": left its launch error behind");
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    cudaStreamDestroy(stream);
    session.poison();
    expect(session.run(nullptr).ok(), c.name + ": does not run after a failed launch");
    check_cuda(cudaDeviceSynchronize(), "after");
    expect(session.results() == want, c.name + ": differs after a failed launch");
  }
  Session session(cases[0]);
  session.plan.target.device_index = 99;
  const Status status = session.run(nullptr);
  expect(status.code() == TW_DEVICE_ERROR && status.message().find("cudaErrorInvalidDevice") != std::string::npos,
         "device 99: \"" + status.message() + "\"");
  expect(cudaGetLastError() == cudaSuccess, "device 99: left its error behind");
}

int run_all() {
  const std::vector<Case> cases = all_cases();
  if (cases.empty()) {
    std::printf("SKIPPED: no GPU of compute capability 8.0 or more\n");
    return failures != 0;
  }
  repeats(cases);
  graphs(cases);
  streams(cases);
  launch_errors(cases);
  std::printf("%zu cases, %d checks, %d failed\n", cases.size(), checks, failures);
  return failures != 0;
}

}  // namespace
}  // namespace tilewise::cuda_test

int main() { return tilewise::cuda_test::run_all(); }
