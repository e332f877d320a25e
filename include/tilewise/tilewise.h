/* Tilewise: exact attention, tile by tile, in linear memory.
 *
 * This header is a tour, simplest call first:
 *
 *   1. Version and errors
 *   2. Tensors
 *   3. The problem: shapes and options, as one value with a text form
 *   4. One call: tw_forward, tw_backward
 *   5. Plan once, run often: tw_plan_create, tw_run
 *   6. Threads: lend the library your own pool
 *   7. Softmax on its own, and merging partial results
 *   8. Introspection: which kernels exist, which one runs, and why
 *   9. Memory: what a problem takes, what fits, without running it
 *
 * The function (docs/semantics.md is the whole contract). For every batch entry and query head
 *
 *   s_ij = softmax_scale * (q_i . k_j)          s = softcap * tanh(s / softcap)      if softcap > 0
 *   s   += -slope * |i + sk - sq - j| + bias    p = softmax over the visible keys (and the sink)
 *   o_i  = sum_j dropout(p)_ij v_j              lse_i = log(sum_j exp(s_ij) + exp(sink))
 *
 * computed in blocks with the online softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), so
 * that no n x n matrix exists. The backward pass recomputes p from q, k and lse.
 *
 * Rules that hold everywhere: the library never prints, never aborts, lets no exception out, and writes nothing
 * when it returns an error. Every function is thread-safe. The caller owns all memory. A `*_destroy(NULL)` is fine.
 */
#ifndef TILEWISE_H
#define TILEWISE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define TW_API
#else
#define TW_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- 1. Version and errors -------------------------------------------------------------------------------- */

#define TW_VERSION_MAJOR 0
#define TW_VERSION_MINOR 1
#define TW_VERSION_PATCH 0

/* "0.1.0" */
TW_API const char* tw_version(void);

/* Status of every call. The numbers never change. */
typedef enum tw_status {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1, /* an argument is wrong: tw_last_error() names it, its value and what is allowed */
  TW_UNSUPPORTED = 2,      /* valid, but no kernel on this target takes it: tw_last_error() holds each refusal */
  TW_OUT_OF_MEMORY = 3,
  TW_DEVICE_ERROR = 4,     /* the CUDA runtime or driver reported an error */
  TW_INTERNAL = 5
} tw_status;

/* "TW_OK", ...; never NULL. */
TW_API const char* tw_status_name(tw_status status);

/* Text of this thread's last failed call; "" if none failed. Valid until this thread's next call. */
TW_API const char* tw_last_error(void);

/* sizeof of a public struct by name ("tw_problem"), 0 if there is none: for bindings to check themselves against. */
TW_API size_t tw_struct_size(const char* name);

/* ---- 2. Tensors ------------------------------------------------------------------------------------------- */

typedef enum tw_dtype {
  TW_FLOAT32 = 0,
  TW_FLOAT16 = 1,
  TW_BFLOAT16 = 2,
  TW_FLOAT64 = 3, /* q, k, v in float64 run on the reference backend only */
  TW_INT32 = 4,
  TW_INT64 = 5,
  TW_BOOL = 6 /* one byte, 0 or 1 */
} tw_dtype;

typedef enum tw_device { TW_CPU = 0, TW_CUDA = 1 } tw_device;

#define TW_MAX_DIMS 4

/* A view of memory that the caller owns. Strides count elements, may be 0 (broadcast) for inputs, and the last
 * dimension must have stride 1 in q, k, v, o and their gradients. The layout of this struct is frozen. */
typedef struct tw_tensor {
  void* data;
  int32_t dtype;        /* tw_dtype */
  int32_t device;       /* tw_device */
  int32_t device_index; /* 0 on the CPU */
  int32_t ndim;         /* 1 .. TW_MAX_DIMS */
  int64_t shape[TW_MAX_DIMS];
  int64_t stride[TW_MAX_DIMS];
} tw_tensor;

/* A contiguous CPU tensor of ndim dimensions (the last `4 - ndim` arguments are ignored). */
TW_API tw_tensor tw_tensor_contiguous(void* data, tw_dtype dtype, int32_t ndim, int64_t n0, int64_t n1, int64_t n2, int64_t n3);

/* A view of a DLPack tensor (pass a DLTensor*). Refuses dtypes, devices and dimensions that Tilewise lacks. */
TW_API tw_status tw_tensor_from_dlpack(const void* dl_tensor, tw_tensor* out);

/* Every tensor of a call; NULL = absent. Unset members of a zero-initialised struct are absent, so
 * `tw_tensors t = {sizeof t}; t.q = &q; ...` is all it takes.
 *
 * The query side is dense or packed, the key side dense, packed or paged, independently:
 *   dense   q [b, sq, hq, d]   k [b, sk, hk, d]   v [b, sk, hk, dv]   o [b, sq, hq, dv]   lse [b, hq, sq]
 *   packed  q [total_q, hq, d] with cu_seqlens_q; o [total_q, hq, dv], lse [hq, total_q]; k [total_k, hk, d] with cu_seqlens_k
 *   paged   k [num_pages, page_size, hk, d] with page_table
 * A dense k may be a KV cache [b_cache, s_max, hk, d] with seqused_k and, if b_cache != b, cache_batch_idx. */
typedef struct tw_tensors {
  uint32_t struct_size; /* sizeof(tw_tensors) */
  uint32_t reserved;    /* 0 */

  /* forward: inputs, then outputs */
  const tw_tensor* q;
  tw_tensor* k; /* written only where k_new is appended */
  tw_tensor* v; /* written only where v_new is appended */
  tw_tensor* o;         /* same dtype as q (float32 also allowed) */
  tw_tensor* lse;       /* optional in the forward pass. float32, natural logarithm; -inf for a row that sees no key */
  tw_tensor* max_logit; /* optional. float32 [b, hq]: largest visible s_ij (before the sink), -inf if none */

  /* options that are tensors */
  const tw_tensor* bias;         /* [b|1, hq|1, sq|1, sk|1]; float dtypes: added to s; TW_BOOL: true = visible */
  const tw_tensor* alibi_slopes; /* float32 [hq] or [b, hq] */
  const tw_tensor* sink;         /* float32 [hq]: a logit that only enters the denominator */
  const tw_tensor* rng_state;    /* int64 [2]: {seed, offset} read when the call runs; overrides the problem's */
  tw_tensor* dropout_mask;       /* TW_BOOL [b, hq, sq, sk], output: 1 = kept */

  /* lengths; all int32 */
  const tw_tensor* cu_seqlens_q; /* [b + 1], starts at 0, not decreasing; rows past the last are zeroed in the outputs */
  const tw_tensor* cu_seqlens_k; /* [b + 1] */
  const tw_tensor* seqused_q;    /* [b]: rows of the sequence in use; the others are holes */
  const tw_tensor* seqused_k;    /* [b]: keys in use (in the cache: before k_new is appended) */

  /* KV cache; the index tensors are int32 */
  const tw_tensor* page_table;      /* [b, max_pages] page numbers */
  const tw_tensor* cache_batch_idx; /* [b]: which row of the cache (dense) */
  const tw_tensor* leftpad_k;       /* [b]: keys before it do not exist; j counts from it */
  const tw_tensor* k_new;           /* [b, s_new, hk, d], appended in place at seqused_k */
  const tw_tensor* v_new;           /* [b, s_new, hk, dv] */
  const tw_tensor* rotary_cos;      /* [positions, rotary_dim / 2], dtype of q or float32; rotates q and k_new */
  const tw_tensor* rotary_sin;
  const tw_tensor* rotary_seqlens;  /* [b]: first position, default seqused_k. q_i at +i if causal or windowed, else at +0 */

  /* backward: inputs (with q, k, v, o, lse and the options above), then outputs; an absent output is not computed */
  const tw_tensor* dout; /* like o; on CUDA with q's dtype */
  const tw_tensor* dlse; /* like lse: gradient that arrives through lse */
  tw_tensor* dq;         /* like q; dtype of q, or float32 */
  tw_tensor* dk;
  tw_tensor* dv;
  tw_tensor* dbias;  /* like bias (float), summed over its broadcast dimensions; dtype of bias, or float32 */
  tw_tensor* dalibi; /* like alibi_slopes */
  tw_tensor* dsink;  /* like sink */
} tw_tensors;

/* ---- 3. The problem --------------------------------------------------------------------------------------- */

typedef enum tw_pass { TW_FORWARD = 0, TW_BACKWARD = 1 } tw_pass;
typedef enum tw_layout { TW_DENSE = 0, TW_PACKED = 1, TW_PAGED = 2 } tw_layout;

/* Which optional tensors take part (tw_problem.features). */
typedef enum tw_feature {
  TW_HAS_LSE = 1 << 0,
  TW_HAS_MAX_LOGIT = 1 << 1,
  TW_HAS_BIAS = 1 << 2,
  TW_HAS_ALIBI = 1 << 3,
  TW_HAS_SINK = 1 << 4,
  TW_HAS_RNG_STATE = 1 << 5,
  TW_HAS_DROPOUT_MASK = 1 << 6,
  TW_HAS_SEQUSED_Q = 1 << 7,
  TW_HAS_SEQUSED_K = 1 << 8,
  TW_HAS_CACHE_BATCH_IDX = 1 << 9,
  TW_HAS_LEFTPAD_K = 1 << 10,
  TW_HAS_ROTARY_SEQLENS = 1 << 11,
  TW_HAS_DLSE = 1 << 12,
  TW_HAS_DQ = 1 << 13,
  TW_HAS_DK = 1 << 14,
  TW_HAS_DV = 1 << 15,
  TW_HAS_DBIAS = 1 << 16,
  TW_HAS_DALIBI = 1 << 17,
  TW_HAS_DSINK = 1 << 18
} tw_feature;

/* Dimensions in which bias or alibi_slopes have their full size (tw_problem.bias_dims, alibi_dims). */
typedef enum tw_dim { TW_DIM_B = 1, TW_DIM_H = 2, TW_DIM_Q = 4, TW_DIM_K = 8 } tw_dim;

/* Shapes and options: everything about a call except its pointers. Its text form is one spelling for logs, tests,
 * benchmarks, command line and errors: "fwd bf16 b=2 hq=32 hk=8 sq=1024 sk=1024 d=128 causal". */
typedef struct tw_problem {
  uint32_t struct_size; /* sizeof(tw_problem); set by tw_problem_init */
  int32_t pass;         /* tw_pass */

  /* Options: the caller's. */
  int32_t causal;       /* 0 or 1; bottom-right aligned: key j visible to row i iff j <= i + sk - sq */
  int32_t device;       /* tw_device of the tensors (filled in by tw_describe) */
  int64_t window_left;  /* -1 = unbounded. Visible iff i + sk - sq - window_left <= j <= i + sk - sq + window_right */
  int64_t window_right; /* -1 = unbounded; causal makes it 0 */
  double softmax_scale; /* NaN = 1 / sqrt(head_dim); any finite value, 0 and negative included */
  double softcap;       /* 0 = off */
  double dropout_p;     /* 0 <= p < 1 */
  uint64_t dropout_seed;
  uint64_t dropout_offset;   /* advance it by 1 per call to draw a new mask */
  int32_t rotary_interleaved; /* 1: pairs (0,1),(2,3),..; 0: halves */
  int32_t deterministic;      /* bit-identical gradients from run to run. Always true on the CPU */
  int32_t batch_invariant;    /* a sequence's result does not depend on what else is in the batch */
  int32_t num_splits;         /* partitions of the keys, merged by their lse; 0 = the plan decides */
  int32_t sm_margin;          /* CUDA: multiprocessors left free, by rows whose blocks stay on one (not the _sm80 ones) */

  /* Shapes: filled in by tw_describe from the tensors; 0 = not given. */
  int32_t dtype;    /* tw_dtype of q, k, v */
  int32_t q_layout; /* tw_layout */
  int32_t k_layout;
  int64_t batch;
  int64_t seqlen_q;   /* packed: the longest sequence (max_seqlen_q) */
  int64_t seqlen_k;   /* packed: the longest; cache: its capacity */
  int64_t num_heads_q;
  int64_t num_heads_k;
  int64_t head_dim;
  int64_t head_dim_v;
  int64_t total_q;     /* packed, else 0 */
  int64_t total_k;
  int64_t page_size;   /* paged, else 0 */
  int64_t num_pages;
  int64_t cache_batch; /* rows of a dense k, if not b */
  int64_t seqlen_new;  /* keys appended */
  int64_t rotary_dim;
  uint32_t features;   /* or of tw_feature */
  int32_t bias_dtype;  /* tw_dtype; TW_BOOL for a mask */
  int32_t bias_dims;   /* or of tw_dim */
  int32_t alibi_dims;
} tw_problem;

/* A forward problem with every option off. */
TW_API void tw_problem_init(tw_problem* problem);

/* Checks options and tensors against each other and fills in the shapes. `options` may carry shapes already: they
 * must agree. For packed tensors seqlen_q and seqlen_k (the longest sequences) may be given, else they are computed
 * from cu_seqlens (CPU only). */
TW_API tw_status tw_describe(const tw_problem* options, const tw_tensors* tensors, tw_problem* out);

/* Text to problem and back. The text functions return the length without the final 0 and write at most `capacity`
 * bytes, 0 included; call with (NULL, 0) to ask for the length. */
TW_API tw_status tw_problem_parse(const char* text, tw_problem* out);
TW_API size_t tw_problem_text(const tw_problem* problem, char* buffer, size_t capacity);

/* ---- 4. One call ------------------------------------------------------------------------------------------ */

typedef enum tw_backend { TW_BACKEND_AUTO = 0, TW_BACKEND_CPU = 1, TW_BACKEND_CUDA = 2, TW_BACKEND_REFERENCE = 3 } tw_backend;

typedef struct tw_executor tw_executor;

/* Where to run; NULL stands for all defaults. */
typedef struct tw_target {
  uint32_t struct_size;        /* sizeof(tw_target) */
  int32_t backend;             /* tw_backend; AUTO follows the problem's device */
  int32_t device_index;        /* CUDA */
  int32_t num_threads;         /* CPU; 0 = TILEWISE_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may use */
  const char* kernel;          /* NULL = best; else a row of tw_kernel_at, refused by name if it cannot take the problem */
  const tw_executor* executor; /* NULL = the library's pool */
  const char* config;          /* NULL = the plan decides; else how its row cuts: "block_m=48 block_n=128 splits=2" */
} tw_target;

/* o (and lse, max_logit) from q, k, v. Allocates its workspace, and for CUDA waits for nothing but the launch.
 *
 *   tw_tensor q = tw_tensor_contiguous(q_data, TW_FLOAT32, 4, b, sq, hq, d);   // k, v, o alike
 *   tw_tensors t = {sizeof t};  t.q = &q;  t.k = &k;  t.v = &v;  t.o = &o;
 *   tw_problem p;  tw_problem_init(&p);  p.causal = 1;
 *   if (tw_forward(&p, &t, NULL, NULL) != TW_OK) fprintf(stderr, "%s\n", tw_last_error());
 */
TW_API tw_status tw_forward(const tw_problem* options, const tw_tensors* tensors, const tw_target* target, void* stream);

/* dq, dk, dv, ... from q, k, v, o, lse, dout. */
TW_API tw_status tw_backward(const tw_problem* options, const tw_tensors* tensors, const tw_target* target, void* stream);

/* ---- 5. Plan once, run often ------------------------------------------------------------------------------ */

typedef struct tw_plan tw_plan;

typedef struct tw_plan_info {
  uint32_t struct_size;
  int32_t backend;
  char kernel[64];
  char config[128];        /* tile sizes and the like, as text */
  int64_t num_splits;
  int64_t num_tasks;       /* independent pieces of work in the main phase */
  int64_t workspace_bytes; /* memory above inputs and outputs */
  int64_t standard_bytes;  /* what standard attention would need above inputs and outputs; tw_memory has the details */
  double flops;            /* 4 b hq sq sk d forward (half when causal), 2.5 times that backward */
  double bytes_moved;      /* inputs read once and outputs written once */
} tw_plan_info;

/* A pure function of problem and target; `problem` comes from tw_describe or tw_problem_parse. Where the environment
 * variable TILEWISE_TUNING names a file of `tilewise tune`, that is part of the target; it is read once. */
TW_API tw_status tw_plan_create(const tw_problem* problem, const tw_target* target, tw_plan** out);
TW_API void tw_plan_destroy(tw_plan* plan);
TW_API tw_status tw_plan_get_info(const tw_plan* plan, tw_plan_info* out); /* set out->struct_size first */
TW_API size_t tw_plan_text(const tw_plan* plan, char* buffer, size_t capacity);

/* Checks the tensors against the plan's problem, then runs. Allocates nothing, and on CUDA never synchronises.
 * `workspace` is on the plan's device, 64-byte aligned, of at least workspace_bytes; `stream` is a cudaStream_t. */
TW_API tw_status tw_run(const tw_plan* plan, const tw_tensors* tensors, void* workspace, size_t workspace_bytes, void* stream);

/* ---- 6. Threads ------------------------------------------------------------------------------------------- */

/* A pool that runs `task(context, index, worker)` for every index in [0, num_tasks), each once, and returns when all
 * are done. `worker` is in [0, num_workers), and no two tasks run with the same worker at once. Results do not depend
 * on the number of workers or the order, bit for bit. */
typedef void (*tw_task)(void* context, int64_t index, int32_t worker);
struct tw_executor {
  uint32_t struct_size; /* sizeof(tw_executor) */
  int32_t num_workers;
  void* pool; /* handed to parallel_for */
  void (*parallel_for)(void* pool, int64_t num_tasks, tw_task task, void* context);
};

/* Workers that a target with num_threads = 0 uses. */
TW_API int32_t tw_default_num_threads(void);

/* ---- 7. Softmax on its own, and merging partial results --------------------------------------------------- */

/* y = softmax(x) over the last dimension, in the online form: x is read once for maximum and sum together, y written
 * once. x and y: the same shape, 1 to 4 dimensions, any float dtypes, may be the same memory. lse (optional): float32,
 * x's shape without its last dimension. A row of -inf gives zeros and lse -inf. CPU or CUDA, on the stream. */
TW_API tw_status tw_softmax(const tw_tensor* x, tw_tensor* y, tw_tensor* lse, const tw_target* target, void* stream);

/* The online softmax as an object, for scores that do not fit in memory or do not exist yet. It keeps, per row, a
 * running maximum, a running sum and (value_dim > 0) a running weighted sum of value vectors. CPU; sums in float64. */
typedef struct tw_accumulator tw_accumulator;
TW_API tw_status tw_accumulator_create(int64_t num_rows, int64_t value_dim, tw_accumulator** out);
TW_API void tw_accumulator_destroy(tw_accumulator* accumulator);
/* scores [num_rows, n]; values [n, value_dim] or, per row, [num_rows, n, value_dim]; NULL iff value_dim = 0. */
TW_API tw_status tw_accumulator_push(tw_accumulator* accumulator, const tw_tensor* scores, const tw_tensor* values);
TW_API tw_status tw_accumulator_merge(tw_accumulator* into, const tw_accumulator* from);
TW_API tw_status tw_accumulator_lse(const tw_accumulator* accumulator, tw_tensor* lse);       /* [num_rows] */
TW_API tw_status tw_accumulator_result(const tw_accumulator* accumulator, tw_tensor* result); /* [num_rows, value_dim] */
/* probabilities = exp(scores - lse) for a chunk pushed before: the second pass of a softmax over a stream. */
TW_API tw_status tw_accumulator_probabilities(const tw_accumulator* accumulator, const tw_tensor* scores, tw_tensor* probabilities);

/* Merges two attention results over disjoint keys into the first (split-KV, ring attention):
 * lse = log(exp(lse) + exp(lse_other)), o weighted alike. o, o_other [b, sq, hq, dv] with lse [b, hq, sq], or
 * [total, hq, dv] with [hq, total]. Two empty parts stay (0, -inf); one empty part leaves the other unchanged.
 * CPU or CUDA, on the stream (cudaStream_t; CPU: ignored). */
TW_API tw_status tw_merge_states(tw_tensor* o, tw_tensor* lse, const tw_tensor* o_other, const tw_tensor* lse_other, void* stream);

/* The dropout decision itself: 1 = kept. A pure function, the same on every backend (docs/adr/0004-dropout-draws.md); not
 * for secrets. */
TW_API int32_t tw_dropout_keep(double dropout_p, uint64_t seed, uint64_t offset, int64_t batch_head, int64_t i, int64_t j);

/* ---- 8. Introspection ------------------------------------------------------------------------------------- */

typedef struct tw_kernel_info {
  uint32_t struct_size;
  int32_t backend;   /* tw_backend */
  int32_t pass;      /* tw_pass; -1 = both */
  int32_t available; /* 1 if this machine can run it */
  char name[64];
  char isa[32];      /* "avx512", "sm_80", ... */
  char summary[192]; /* what it takes */
} tw_kernel_info;

/* The table of kernels, best first. Returns TW_INVALID_ARGUMENT past the end. */
TW_API int32_t tw_kernel_count(void);
TW_API tw_status tw_kernel_at(int32_t index, tw_kernel_info* out); /* set out->struct_size first */

/* Why this plan: every kernel's refusal in words, then the plan. */
TW_API size_t tw_explain(const tw_problem* problem, const tw_target* target, char* buffer, size_t capacity);

/* The machine as the library sees it: CPU instruction sets (and their cap), caches, threads, GPUs. */
TW_API size_t tw_machine_text(char* buffer, size_t capacity);

/* ---- 9. Memory, before it is taken ------------------------------------------------------------------------ */

/* Whose memory: of a forward problem (inference), or of a backward one, which stands for a training step (both passes).
 * With several layers only attention is counted; weights and the rest of the model are the caller's. */
typedef struct tw_memory_options {
  uint32_t struct_size;     /* sizeof(tw_memory_options); set by tw_memory_options_init */
  int32_t checkpointing;    /* 1: between the passes a layer keeps its input alone; its attention runs once more */
  int64_t layers;           /* 1; they run one after another, training keeps what each saves, inference each one's k and v */
  int64_t hidden_size;      /* columns of a layer's input, for checkpointing; 0 = num_heads_q * head_dim */
  int64_t tensor_parallel;  /* 1; devices that share the heads */
  int64_t context_parallel; /* 1; devices that share the rows of q, k, v; each gathers all keys of the layer at work */
  int64_t window_layers;    /* 0; of the layers, those whose cache keeps `window` keys a sequence. Inference: training keeps all */
  int64_t window;           /* 0; >= 1 where window_layers is */
} tw_memory_options;

TW_API void tw_memory_options_init(tw_memory_options* options);

/* Bytes of one way to compute attention, on one device and for one layer, above inputs_bytes; total_bytes is for all. */
typedef struct tw_memory_use {
  int64_t outputs;            /* o, and lse where it is kept */
  int64_t saved;              /* from the forward for the backward pass, beside q, k, v; Tilewise: o and lse */
  int64_t gradients;          /* dout, dq, dk, dv, and those of the options */
  int64_t workspace_forward;  /* what else is live at the forward pass's worst moment */
  int64_t workspace_backward;
  int64_t peak_forward;       /* above the inputs, at the worst moment */
  int64_t peak_backward;      /* 0 for a forward problem */
  int64_t total;              /* inputs and all layers at the worst moment: what has to fit */
} tw_memory_use;

typedef struct tw_memory_info {
  uint32_t struct_size; /* sizeof(tw_memory_info) */
  int32_t planned;      /* 1: Tilewise's workspace is that of plans; 0: no such GPU or no CUDA kernels here, so by formula */
  int64_t inputs;       /* q, k, v and the tensors of the options */
  int64_t layer_input;  /* what checkpointing keeps of a layer */
  tw_memory_use standard;
  tw_memory_use tiled;
  double flops;                /* of the passes that the problem stands for */
  double standard_bytes_moved; /* between the processor and memory, each matrix once per use */
  double tiled_bytes_moved;    /* inputs once, outputs once */
} tw_memory_info;

TW_API tw_status tw_memory(const tw_problem* problem, const tw_memory_options* options, const tw_target* target,
                           tw_memory_info* out); /* options NULL = defaults; set out->struct_size first */

/* The largest "sq" (sk goes with it if it is equal; alone if sq is 1), "b" or "hq" (hk in proportion) whose total is at
 * most `budget` bytes, for standard attention or for Tilewise; 0 if none is. */
TW_API tw_status tw_memory_largest(const tw_problem* problem, const tw_memory_options* options, const tw_target* target,
                                   int64_t budget, const char* key, int32_t standard, int64_t* out);

/* The formulas with the numbers in them, tiles, traffic; with the name of a GPU of tw_gpu_at also what bounds its time. */
TW_API size_t tw_memory_explain(const tw_problem* problem, const tw_memory_options* options, const tw_target* target,
                                const char* gpu, char* buffer, size_t capacity);

/* Attention of well-known models, and GPUs by their data sheets. */
typedef struct tw_model {
  uint32_t struct_size;
  int32_t sink; /* 1: a learned logit in each denominator */
  char name[32];
  int64_t hidden_size, layers, num_heads_q, num_heads_k, head_dim, head_dim_v;
  int64_t window;      /* tokens that a windowed layer sees; 0 = none */
  int64_t layers_full; /* layers without the window */
  double softcap;
} tw_model;

typedef struct tw_gpu {
  uint32_t struct_size;
  int32_t capability; /* 90 = sm_90 */
  char name[32];
  int64_t multiprocessors, memory_bytes, l2_bytes;
  double memory_bytes_per_second, tensor_flops, vector_flops; /* per second; tensor: bfloat16, dense */
} tw_gpu;

TW_API int32_t tw_model_count(void);
TW_API tw_status tw_model_at(int32_t index, tw_model* out); /* set out->struct_size first; TW_INVALID_ARGUMENT past the end */
TW_API int32_t tw_gpu_count(void);
TW_API tw_status tw_gpu_at(int32_t index, tw_gpu* out);

#ifdef __cplusplus
}
#endif
#endif /* TILEWISE_H */
