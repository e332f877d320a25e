/* Attention from C: one call, then forward and backward with plans that are made once and run often. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tilewise/tilewise.h"

enum { B = 2, S = 256, H = 4, D = 64, N = B * S * H * D };

static float q[N], k[N], v[N], o[N], lse[B * H * S], dout[N], dq[N], dk[N], dv[N];

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, tw_last_error());
  return 1;
}

static float uniform(uint32_t* state) { /* in [-1, 1) */
  *state = *state * 1664525u + 1013904223u;
  return (float)(int32_t)*state * 0x1p-31f;
}

/* The README's example: o = softmax(q k^T / sqrt(D)) v, causal. */
static int forward_in_one_call(void) {
  tw_tensor tq = tw_tensor_contiguous(q, TW_FLOAT32, 4, B, S, H, D);
  tw_tensor tk = tw_tensor_contiguous(k, TW_FLOAT32, 4, B, S, H, D);
  tw_tensor tv = tw_tensor_contiguous(v, TW_FLOAT32, 4, B, S, H, D);
  tw_tensor to = tw_tensor_contiguous(o, TW_FLOAT32, 4, B, S, H, D);
  tw_tensors t = {.struct_size = sizeof t};
  tw_problem p;
  t.q = &tq, t.k = &tk, t.v = &tv, t.o = &to;
  tw_problem_init(&p);
  p.causal = 1;
  return tw_forward(&p, &t, NULL, NULL) == TW_OK ? 0 : failed("tw_forward");
}

/* One plan and one workspace, run `times` times. */
static int run_plan(const tw_problem* options, const tw_tensors* t, int times) {
  tw_problem problem;
  tw_plan* plan = NULL;
  tw_plan_info info;
  char *memory, *workspace;
  int n, status = 0;
  if (tw_describe(options, t, &problem) != TW_OK) return failed("tw_describe");
  if (tw_plan_create(&problem, NULL, &plan) != TW_OK) return failed("tw_plan_create");
  info.struct_size = sizeof info;
  if (tw_plan_get_info(plan, &info) != TW_OK) return failed("tw_plan_get_info");
  memory = malloc((size_t)info.workspace_bytes + 64);
  if (memory == NULL) return 1;
  workspace = memory + (64 - (uintptr_t)memory % 64); /* aligned to 64 bytes */
  for (n = 0; n < times && status == 0; ++n)
    if (tw_run(plan, t, workspace, (size_t)info.workspace_bytes, NULL) != TW_OK) status = failed("tw_run");
  printf("%-18s workspace %lld bytes; standard attention: %lld\n", info.kernel, (long long)info.workspace_bytes,
         (long long)info.standard_bytes);
  tw_plan_destroy(plan);
  free(memory);
  return status;
}

static int forward_and_backward(void) {
  tw_tensor tq = tw_tensor_contiguous(q, TW_FLOAT32, 4, B, S, H, D), tk = tq, tv = tq, to = tq, tdo = tq, tdq = tq,
            tdk = tq, tdv = tq;
  tw_tensor tlse = tw_tensor_contiguous(lse, TW_FLOAT32, 3, B, H, S, 0);
  tw_tensors t = {.struct_size = sizeof t};
  tw_problem p;
  tk.data = k, tv.data = v, to.data = o, tdo.data = dout, tdq.data = dq, tdk.data = dk, tdv.data = dv;
  t.q = &tq, t.k = &tk, t.v = &tv, t.o = &to, t.lse = &tlse;
  tw_problem_init(&p);
  p.causal = 1;
  if (run_plan(&p, &t, 3)) return 1;
  t.dout = &tdo, t.dq = &tdq, t.dk = &tdk, t.dv = &tdv; /* o and lse are inputs now */
  p.pass = TW_BACKWARD;
  return run_plan(&p, &t, 3);
}

/* Row 0 sees key 0 alone, so o[0] must be v[0]; and sum_i dq_i . q_i = sum_j dk_j . k_j, since both are the derivative
 * of the loss along a common scale of the scores. */
static int results_are_right(void) {
  double along_q = 0, along_k = 0;
  int n;
  for (n = 0; n < H * D; ++n)
    if (fabsf(o[n] - v[n]) > 1e-6f) return fprintf(stderr, "o[%d] is %g, must be %g\n", n, o[n], v[n]), 0;
  for (n = 0; n < N; ++n) along_q += (double)dq[n] * q[n], along_k += (double)dk[n] * k[n];
  if (fabs(along_q) < 1e-3 || fabs(along_q - along_k) > 1e-3 * fabs(along_q))
    return fprintf(stderr, "dq.q is %g, dk.k is %g: must be equal, and not 0\n", along_q, along_k), 0;
  return 1;
}

int main(void) {
  uint32_t state = 1;
  int n;
  for (n = 0; n < N; ++n)
    q[n] = uniform(&state), k[n] = uniform(&state), v[n] = uniform(&state), dout[n] = uniform(&state);
  if (forward_in_one_call() || !(fabsf(o[0] - v[0]) <= 1e-6f)) return 1;
  if (forward_and_backward() || !results_are_right()) return 1;
  printf("tilewise %s: forward and backward are right\n", tw_version());
  return 0;
}
