"""The C ABI as data: constants and struct layouts of include/tilewise/tilewise.h.

Layouts are `struct.Struct` formats, because packing into a reused buffer costs a quarter of building a ctypes.Structure.
`_library` compares every size with the loaded library's at import, so drift fails loudly.
"""

import struct

# tw_status
OK, INVALID_ARGUMENT, UNSUPPORTED, OUT_OF_MEMORY, DEVICE_ERROR, INTERNAL = range(6)
# tw_dtype
FLOAT32, FLOAT16, BFLOAT16, FLOAT64, INT32, INT64, BOOL = range(7)
DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "bool")
DTYPE_SIZES = (4, 2, 2, 8, 4, 8, 1)
# tw_device
CPU, CUDA = 0, 1
# tw_pass
FORWARD, BACKWARD = 0, 1
# tw_backend
BACKENDS = {None: 0, "auto": 0, "cpu": 1, "cuda": 2, "reference": 3}
BACKEND_NAMES = ("auto", "cpu", "cuda", "reference")

MAX_DIMS = 4

# data, dtype, device, device_index, ndim, shape[4], stride[4]
TENSOR = struct.Struct("@P4i4q4q")

# Members of tw_tensors in order, after {struct_size, reserved}.
TENSOR_FIELDS = (
    "q", "k", "v", "o", "lse", "max_logit",
    "bias", "alibi_slopes", "sink", "rng_state", "dropout_mask",
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
    "page_table", "cache_batch_idx", "leftpad_k", "k_new", "v_new", "rotary_cos", "rotary_sin", "rotary_seqlens",
    "dout", "dlse", "dq", "dk", "dv", "dbias", "dalibi", "dsink",
)  # fmt: skip
SLOT = {name: index for index, name in enumerate(TENSOR_FIELDS)}
TENSORS = struct.Struct("@II%dP" % len(TENSOR_FIELDS))

# struct_size, pass, causal, device, window_left, window_right, softmax_scale, softcap, dropout_p, dropout_seed,
# dropout_offset, rotary_interleaved, deterministic, batch_invariant, num_splits, sm_margin | dtype, q_layout, k_layout,
# batch .. rotary_dim, features, bias_dtype, bias_dims, alibi_dims
PROBLEM = struct.Struct("@I3i2q3d2Q5i3i14qI3i")
PROBLEM_FIELDS = (
    "struct_size", "pass", "causal", "device", "window_left", "window_right", "softmax_scale", "softcap", "dropout_p",
    "dropout_seed", "dropout_offset", "rotary_interleaved", "deterministic", "batch_invariant", "num_splits",
    "sm_margin", "dtype", "q_layout", "k_layout", "batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_k",
    "head_dim", "head_dim_v", "total_q", "total_k", "page_size", "num_pages", "cache_batch", "seqlen_new",
    "rotary_dim", "features", "bias_dtype", "bias_dims", "alibi_dims",
)  # fmt: skip
# tw_feature, as far as Python looks at it
HAS_LSE, HAS_DQ, HAS_DK, HAS_DV = 1 << 0, 1 << 13, 1 << 14, 1 << 15
# The caller's part of it, and the two shapes a caller may give (the longest sequences of a packed batch).
OPTIONS = struct.Struct("@I3i2q3d2Q5i")
SEQLENS = struct.Struct("@2q")
SEQLENS_OFFSET = struct.calcsize("@I3i2q3d2Q5i3i1q")  # of seqlen_q

# struct_size, backend, device_index, num_threads, kernel, executor, config
TARGET = struct.Struct("@I3iPPP")

# struct_size, backend, kernel[64], config[128], num_splits, num_tasks, workspace_bytes, standard_bytes, flops, bytes_moved
PLAN_INFO = struct.Struct("@Ii64s128s4q2d")
# struct_size, backend, pass, available, name[64], isa[32], summary[192]
KERNEL_INFO = struct.Struct("@I3i64s32s192s")

# struct_size, checkpointing, layers, hidden_size, tensor_parallel, context_parallel, window_layers, window
MEMORY_OPTIONS = struct.Struct("@Ii6q")
# struct_size, planned, inputs, layer_input, tw_memory_use standard and tiled (8 each), flops, bytes moved by both
MEMORY_USE = struct.Struct("@8q")
MEMORY_INFO = struct.Struct("@Ii18q3d")
# struct_size, sink, name[32], hidden_size .. layers_full, softcap
MODEL = struct.Struct("@Ii32s8qd")
# struct_size, capability, name[32], multiprocessors, memory_bytes, l2_bytes, memory_bytes_per_second, tensor_flops, vector_flops
GPU = struct.Struct("@Ii32s3q3d")

SIZES = {
    "tw_tensor": TENSOR.size,
    "tw_tensors": TENSORS.size,
    "tw_problem": PROBLEM.size,
    "tw_target": TARGET.size,
    "tw_plan_info": PLAN_INFO.size,
    "tw_kernel_info": KERNEL_INFO.size,
    "tw_memory_options": MEMORY_OPTIONS.size,
    "tw_memory_use": MEMORY_USE.size,
    "tw_memory_info": MEMORY_INFO.size,
    "tw_model": MODEL.size,
    "tw_gpu": GPU.size,
}


def text(raw):
    """A char[] member as str."""
    return raw.split(b"\0", 1)[0].decode()
