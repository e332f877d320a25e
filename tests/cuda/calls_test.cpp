// What must hold between calls of the CUDA rows: 200 repeats equal bit for bit, capture into a graph and replay, two
// streams at once, and a failed launch that is reported once and then forgotten. Skips where there is no GPU.
#include <cuda_runtime.h>

#include <cstdio>

#include "session.h"

namespace tilewise {
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
    "fwd DTYPE b=2 hq=8 hk=2 sq=2 sk=4000 d=256 causal",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 causal deterministic",
    "bwd DTYPE b=1 hq=4 hk=4 sq=1000 sk=1025 d=128 deterministic",
    "bwd DTYPE b=1 hq=2 sq=257 sk=511 d=256 causal deterministic",
    "bwd DTYPE b=2 hq=4 sq=1000 sk=1025 d=256 deterministic",
    "bwd DTYPE b=2 hq=4 hk=2 sq=1000 sk=1025 d=256 deterministic",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=128 dropout=0.2 rng_state deterministic",
    "bwd DTYPE b=2 hq=4 hk=2 sq=300 sk=333 d=64 softcap=20 alibi=bh bias=f32:bhqk sink dbias dalibi dsink dlse deterministic",
    "bwd DTYPE b=7 hq=4 hk=1 sq=200 sk=210 d=64 packed_q=900 packed_k=800 causal deterministic",
};

std::vector<Session::Case> all_cases() {
  std::vector<Session::Case> cases;
  for (const char* dtype : {"bf16", "f16", "f32"})
    for (std::string text : kProblems) {
      text.replace(text.find("DTYPE"), 5, dtype);
      for (const Session::Case& c : Session::cases(text)) cases.push_back(c);
    }
  return cases;
}

void must_run(const Session& session, cudaStream_t stream) {
  const tw_status status = session.run(stream);
  if (status != TW_OK) expect(false, session.name() + ": " + tw_last_error());
}

void repeats(const std::vector<Session::Case>& cases) {
  for (const Session::Case& c : cases) {
    Session session(c);
    const int differ = session.differing_repeats(200, [](int) {});
    expect(differ == 0, session.name() + ": " + std::to_string(differ) + " of 199 repeats differ from the first, or failed");
    expect(session.guard_intact(), session.name() + ": wrote behind its workspace");
  }
}

// In the strictest capture mode: an allocation or a synchronisation inside run() would be an error.
void graphs(const std::vector<Session::Case>& cases) {
  cudaStream_t stream;
  check_cuda(cudaStreamCreate(&stream), "stream");
  for (const Session::Case& c : cases) {
    Session session(c);
    must_run(session, stream);  // modules load at the first launch
    check_cuda(cudaStreamSynchronize(stream), "first run");
    const auto want = session.results();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    const tw_status status = session.run(stream);
    const std::string words = status == TW_OK ? "" : tw_last_error();
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    expect(status == TW_OK && ended == cudaSuccess, session.name() + ": capture: " + words + " " + cudaGetErrorName(ended));
    if (status != TW_OK || ended != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    check_cuda(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    for (int n = 0; n < 3; ++n) {
      session.poison();
      check_cuda(cudaGraphLaunch(executable, stream), "replay");
      check_cuda(cudaStreamSynchronize(stream), "replay");
      expect(session.results() == want, session.name() + ": replay " + std::to_string(n) + " differs from the direct call");
    }
    if (Buffer& rng = session.inputs().rng_state; rng.exists()) {  // new state in device memory: the same graph draws another mask
      rng.set(1, rng.get(1) + 1);
      session.poison();
      check_cuda(cudaGraphLaunch(executable, stream), "replay");
      check_cuda(cudaStreamSynchronize(stream), "replay");
      const auto other = session.results();
      expect(other != want, session.name() + ": new rng_state, the same results");
      session.poison();
      must_run(session, stream);
      check_cuda(cudaStreamSynchronize(stream), "direct");
      expect(session.results() == other, session.name() + ": replay with new rng_state differs from the direct call");
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

// Every case on two streams, together with the next one on the other; each with its own workspace.
void streams(const std::vector<Session::Case>& cases) {
  cudaStream_t stream[2];
  for (auto& s : stream) check_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "stream");
  for (size_t n = 0; n + 1 < cases.size(); ++n) {
    Session a(cases[n], 3), b(cases[n + 1], 4);
    must_run(a, stream[0]);
    check_cuda(cudaStreamSynchronize(stream[0]), "alone");
    must_run(b, stream[0]);
    check_cuda(cudaStreamSynchronize(stream[0]), "alone");
    const auto want_a = a.results(), want_b = b.results();
    a.poison(), b.poison();
    for (int repeat = 0; repeat < 20; ++repeat) must_run(a, stream[0]), must_run(b, stream[1]);
    for (auto& s : stream) check_cuda(cudaStreamSynchronize(s), "together");
    expect(a.results() == want_a, a.name() + ": differs beside another stream");
    expect(b.results() == want_b, b.name() + ": differs beside another stream");
  }
  for (auto& s : stream) cudaStreamDestroy(s);
}

// A capture that a synchronisation has broken refuses every launch on its stream.
void launch_errors(const std::vector<Session::Case>& cases) {
  for (const Session::Case& c : cases) {
    Session session(c);
    must_run(session, nullptr);
    check_cuda(cudaDeviceSynchronize(), "first run");
    const auto want = session.results();
    cudaStream_t stream;
    check_cuda(cudaStreamCreate(&stream), "stream");
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "capture");
    cudaStreamSynchronize(stream);  // not allowed: the capture is invalid from here on
    cudaGetLastError();
    const tw_status status = session.run(stream);
    const std::string words = tw_last_error();
    expect(status == TW_DEVICE_ERROR && words.find("cudaErrorStreamCapture") != std::string::npos,
           session.name() + ": a failed launch gave \"" + words + "\"");
    cudaGraph_t graph = nullptr;
    cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    cudaStreamDestroy(stream);
    session.poison();
    expect(session.run(nullptr) == TW_OK, session.name() + ": does not run after a failed launch");
    check_cuda(cudaDeviceSynchronize(), "after");
    expect(session.results() == want, session.name() + ": differs after a failed launch");
  }
  Session::Case elsewhere = cases[0];
  elsewhere.device_index = 99;
  const Session session(elsewhere);
  const tw_status status = session.run(nullptr);
  const std::string words = tw_last_error();
  expect(status == TW_DEVICE_ERROR && words.find("cudaErrorInvalidDevice") != std::string::npos, "device 99: \"" + words + "\"");
}

int run_all() {
  if (const std::string missing = gpu_missing(); !missing.empty()) {
    std::printf("SKIPPED: no GPU: %s\n", missing.c_str());
    return 0;
  }
  const std::vector<Session::Case> cases = all_cases();
  repeats(cases);
  graphs(cases);
  streams(cases);
  launch_errors(cases);
  std::printf("%zu cases, %d checks, %d failed\n", cases.size(), checks, failures);
  return failures != 0;
}

}  // namespace
}  // namespace tilewise

int main() { return tilewise::run_all(); }
