/* The header in plain C99: compiles with -pedantic, sizes and numbers are pinned, and a call works. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tilewise/tilewise.h"

#define PIN(name, condition) typedef char name[(condition) ? 1 : -1]

/* Layouts that other languages have written down. A change here breaks every binding. */
PIN(tensor_size, sizeof(tw_tensor) == 8 + 16 + 32 + 32);
PIN(tensor_shape_offset, offsetof(tw_tensor, shape) == 24);
PIN(tensor_stride_offset, offsetof(tw_tensor, stride) == 56);
PIN(status_ok, TW_OK == 0);
PIN(status_invalid, TW_INVALID_ARGUMENT == 1);
PIN(status_unsupported, TW_UNSUPPORTED == 2);
PIN(status_memory, TW_OUT_OF_MEMORY == 3);
PIN(status_device, TW_DEVICE_ERROR == 4);
PIN(status_internal, TW_INTERNAL == 5);
PIN(dtype_numbers, TW_FLOAT32 == 0 && TW_FLOAT16 == 1 && TW_BFLOAT16 == 2 && TW_FLOAT64 == 3 && TW_INT32 == 4 &&
                       TW_INT64 == 5 && TW_BOOL == 6);

PIN(memory_use_size, sizeof(tw_memory_use) == 8 * 8);
PIN(memory_info_size, sizeof(tw_memory_info) == 8 + 2 * 8 + 2 * 64 + 3 * 8);
PIN(memory_options_size, sizeof(tw_memory_options) == 8 + 6 * 8);
PIN(model_size, sizeof(tw_model) == 8 + 32 + 9 * 8);
PIN(gpu_size, sizeof(tw_gpu) == 8 + 32 + 6 * 8);

static int failures = 0;
static void expect(int condition, const char* what) {
  if (condition) return;
  printf("failed: %s (last error: %s)\n", what, tw_last_error());
  ++failures;
}

int main(void) {
  float q_data[2 * 4], k_data[3 * 4], v_data[3 * 4], o_data[2 * 4], lse_data[2];
  tw_tensor q, k, v, o, lse;
  tw_tensors tensors;
  tw_problem problem, described;
  char text[256];
  size_t length;
  int n;

  memset(&tensors, 0, sizeof tensors);
  tensors.struct_size = sizeof tensors;
  for (n = 0; n < 8; ++n) q_data[n] = 0.25f * (float)n;
  for (n = 0; n < 12; ++n) k_data[n] = 0.0f, v_data[n] = (float)(n / 4); /* equal logits: o is the mean of the visible v */
  q = tw_tensor_contiguous(q_data, TW_FLOAT32, 4, 1, 2, 1, 4);
  k = tw_tensor_contiguous(k_data, TW_FLOAT32, 4, 1, 3, 1, 4);
  v = tw_tensor_contiguous(v_data, TW_FLOAT32, 4, 1, 3, 1, 4);
  o = tw_tensor_contiguous(o_data, TW_FLOAT32, 4, 1, 2, 1, 4);
  lse = tw_tensor_contiguous(lse_data, TW_FLOAT32, 3, 1, 1, 2, 0);
  tensors.q = &q;
  tensors.k = &k;
  tensors.v = &v;
  tensors.o = &o;
  tensors.lse = &lse;
  tw_problem_init(&problem);
  problem.causal = 1;
  expect(tw_forward(&problem, &tensors, NULL, NULL) == TW_OK, "tw_forward");
  expect(fabsf(o_data[0] - 0.5f) < 1e-6f && fabsf(o_data[4] - 1.0f) < 1e-6f, "row 0 sees keys 0 and 1, row 1 all three");
  expect(fabsf(lse_data[0] - logf(2.0f)) < 1e-6f && fabsf(lse_data[1] - logf(3.0f)) < 1e-6f, "lse");

  expect(tw_describe(&problem, &tensors, &described) == TW_OK, "tw_describe");
  length = tw_problem_text(&described, text, sizeof text);
  expect(strcmp(text, "fwd f32 b=1 hq=1 sq=2 sk=3 d=4 causal") == 0 && length == strlen(text), text);
  expect(tw_problem_text(&described, NULL, 0) == length, "length without a buffer");
  memset(text, 'x', sizeof text);
  expect(tw_problem_text(&described, text, 8) == length && strcmp(text, "fwd f32") == 0 && text[8] == 'x', "cut text ends in 0");

  {
    tw_memory_info memory;
    tw_memory_options options;
    tw_model model;
    tw_gpu gpu;
    int64_t most = -1;
    memory.struct_size = sizeof memory;
    expect(tw_memory(&described, NULL, NULL, &memory) == TW_OK && memory.inputs == 4 * (2 + 3 + 3) * 4, "tw_memory");
    expect(memory.tiled.peak_forward > 0 && memory.tiled.peak_backward == 0 && memory.tiled.saved == 0, "a forward problem keeps nothing");
    tw_memory_options_init(&options);
    options.layers = 0;
    expect(tw_memory(&described, &options, NULL, &memory) == TW_INVALID_ARGUMENT && strncmp(tw_last_error(), "layers 0", 8) == 0, "layers 0");
    options.struct_size = 1;
    expect(tw_memory(&described, &options, NULL, &memory) == TW_INVALID_ARGUMENT, "options of another version");
    memory.struct_size = 1;
    expect(tw_memory(&described, NULL, NULL, &memory) == TW_INVALID_ARGUMENT, "out of another version");
    expect(tw_memory_largest(&described, NULL, NULL, 1 << 20, "b", 0, &most) == TW_OK && most > 1, "tw_memory_largest");
    expect(tw_memory_largest(&described, NULL, NULL, 1 << 20, "x", 0, &most) == TW_INVALID_ARGUMENT, "key x");
    expect(tw_memory_explain(&described, NULL, NULL, "H200", text, sizeof text) > 200, "tw_memory_explain");
    tw_memory_explain(&described, NULL, NULL, "H999", text, sizeof text);
    expect(strncmp(text, "gpu \"H999\": not in the table", 28) == 0, text);
    model.struct_size = sizeof model;
    gpu.struct_size = sizeof gpu;
    expect(tw_model_count() > 0 && tw_model_at(0, &model) == TW_OK && model.layers > 0, "tw_model_at");
    expect(tw_model_at(tw_model_count(), &model) == TW_INVALID_ARGUMENT, "past the last model");
    expect(tw_gpu_count() > 0 && tw_gpu_at(0, &gpu) == TW_OK && gpu.multiprocessors > 0, "tw_gpu_at");
    expect(tw_gpu_at(-1, &gpu) == TW_INVALID_ARGUMENT, "before the first GPU");
  }

  tensors.v = NULL;
  expect(tw_forward(&problem, &tensors, NULL, NULL) == TW_INVALID_ARGUMENT, "v is NULL");
  expect(strncmp(tw_last_error(), "v:", 2) == 0, "the error names v");
  expect(strcmp(tw_status_name(TW_INVALID_ARGUMENT), "TW_INVALID_ARGUMENT") == 0, "status name");
  expect(strcmp(tw_version(), "0.1.0") == 0 || TW_VERSION_MAJOR != 0 || TW_VERSION_MINOR != 1, "version");
  tw_plan_destroy(NULL);
  tw_accumulator_destroy(NULL);
  if (failures == 0) printf("ok\n");
  return failures != 0;
}
