"""The public functions: documented here, carried out by the front end of the arrays' kind."""

import sys

from . import planning
from .errors import InvalidArgument

_by_type = {}


def frontend(x):
    """The module that handles arrays of x's type."""
    found = _by_type.get(type(x))
    return found if found is not None else _find(x)


def _find(x):
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(x, torch.Tensor):
        from . import torch as found
    elif numpy is not None and isinstance(x, numpy.ndarray):
        from . import numpy as found
    elif hasattr(x, "__dlpack__"):
        from . import _dlpack as found
    else:
        raise InvalidArgument(
            "an argument of type %s, must be a NumPy array, a torch tensor or an array with __dlpack__" % type(x).__name__
        )
    _by_type[type(x)] = found
    return found


def attention(q, k, v, **options):
    """Exact attention: softmax(softmax_scale * q k^T + ...) v, in memory linear in the sequence length.

    Args:
        q: [b, sq, hq, d], float32, float16, bfloat16, or float64 (reference kernel only). d from 1 to 256.
        k: [b, sk, hk, d], dtype of q. hq must be a multiple of hk (hk < hq: grouped-query attention; k and v are never
            repeated in memory).
        v: [b, sk, hk, dv], dtype of q. dv from 1 to 256.
            q, k and v may have any strides >= 0, 0 included (expanded tensors); an array whose last dimension is not
            contiguous is copied first.
        causal: False. True: row i sees key j iff j <= i + sk - sq (the last query sees the last key).
        window: None, or (left, right): row i sees i + sk - sq - left <= j <= i + sk - sq + right; -1 or None = unbounded.
        softmax_scale: None = 1 / sqrt(d). Any finite number.
        softcap: 0.0 = off. Else scores become softcap * tanh(score / softcap).
        bias: None, or an array that broadcasts to [b, hq, sq, sk] (1 to 4 dimensions). Float dtypes are added to the
            scores; bool is a mask, True = visible.
        alibi_slopes: None, or float32 [hq] or [b, hq]: adds -slope * |i + sk - sq - j|.
        sinks: None, or float32 [hq]: a logit per head that enters the softmax's denominator only.
        dropout_p: 0.0 <= p < 1. Kept probabilities scale by 1 / (1 - p).
        dropout_seed, dropout_offset: integers in [0, 2**64) that determine the mask. NumPy needs a seed; torch draws one
            from its generator, so that torch.manual_seed governs it.
        rng_state: None, or int64 [2] {seed, offset}, read when the call runs; in place of the two above.
        seqused_q, seqused_k: None, or int32 [b]: the rows and keys in use; rows beyond give 0 (lse -inf).
        deterministic: False. True: bit-identical gradients from run to run (always so on the CPU).
        batch_invariant: False. True: a row's result does not depend on what else is in the batch.
        num_splits: partitions of the keys in the forward pass; 0 = the plan decides.
        sm_margin: multiprocessors left free (CUDA).
        return_lse: False. True: return the log-sum-exp too.
        return_max_logit: False. True: return float32 [b, hq], the largest visible score of each head (-inf if none).
        return_dropout_mask: False. True: return bool [b, hq, sq, sk], True = kept (needs dropout_p > 0).
        out: None, or an array for the result (no gradient then).
        backend: None = by device, "cpu", "cuda" or "reference" (float64 arithmetic).
        kernel: None = best, or a name of `tilewise.kernels()`, refused by name if it cannot take the call.
        num_threads: CPU threads; 0 = TILEWISE_NUM_THREADS, else torch.get_num_threads() for torch tensors, else
            OMP_NUM_THREADS, else the cores this process may use.

    Returns:
        o [b, sq, hq, dv], contiguous, dtype of q; or a tuple (o, lse, max_logit, dropout_mask) of what was asked for. lse
        is float32 [b, hq, sq], natural logarithm. A row that sees no key gives o = 0 and lse = -inf (with a sink: lse =
        sink). For torch tensors o and lse carry gradients to q, k, v, bias, alibi_slopes and sinks.

    Raises:
        InvalidArgument (a ValueError): an argument is wrong; the text names it, its value and what is allowed.
        Unsupported (a NotImplementedError): no kernel takes the call; the text holds every kernel's reason.

    >>> import numpy as np, tilewise
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 5, 4, 16), dtype=np.float32)
    >>> k, v = rng.standard_normal((2, 2, 7, 2, 16), dtype=np.float32)
    >>> o, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    >>> o.shape, lse.shape
    ((2, 5, 4, 16), (2, 4, 5))
    >>> s = q[0, 4, 0] @ k[0, :, 0].T / 4  # the last query sees every key
    >>> np.allclose(o[0, 4, 0], np.exp(s - lse[0, 0, 4]) @ v[0, :, 0], atol=1e-5)
    True
    >>> tilewise.attention(q[..., :8], k, v)
    Traceback (most recent call last):
    ...
    tilewise.errors.InvalidArgument: k: shape [2, 7, 2, 16]: must be [2, 7, 2, 8] ([batch, seqlen_k, num_heads_k, head_dim])
    """
    return frontend(q).attention(q, k, v, **options)


def attention_varlen(q, k, v, **options):
    """`attention` over sequences of different lengths, packed one after the other.

    Args:
        q: [total_q, hq, d] with cu_seqlens_q; or dense [b, sq, hq, d].
        k, v: [total_k, hk, d] and [total_k, hk, dv] with cu_seqlens_k; or dense; or paged, [num_pages, page_size, hk, ..],
            with page_table and seqused_k.
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], starting at 0, not decreasing: sequence n has the rows [cu[n], cu[n + 1]).
            Lists of integers are taken too.
        max_seqlen_q, max_seqlen_k: the longest sequences; None = computed (on the CPU).
        seqused_q, seqused_k: None, or int32 [b]: rows of each sequence in use; the others are holes.
        page_table: None, or int32 [b, max_pages].
        All other arguments as in `attention`.

    Returns:
        As `attention`, with o [total_q, hq, dv] and lse [hq, total_q]. Rows that belong to no sequence are 0 (lse -inf).

    >>> import numpy as np, tilewise
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 2, 16), dtype=np.float32)
    >>> cu = np.int32([0, 2, 6])
    >>> o = tilewise.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    >>> np.array_equal(o[0], v[0])  # a first row sees itself alone
    True
    """
    return frontend(q).attention_varlen(q, k, v, **options)


def attention_with_kvcache(q, k_cache, v_cache, k_new=None, v_new=None, **options):
    """Attention over a key-value cache, with optional append and rotary embedding. Without gradient.

    Args:
        q: [b, sq, hq, d]; or [total_q, hq, d] with cu_seqlens_q.
        k_cache, v_cache: [b_cache, capacity, hk, d] and [.., dv]; or paged, [num_pages, page_size, hk, ..], with page_table
            (any page size).
        k_new, v_new: None, or [b, s_new, hk, d] and [.., dv]: written in place at positions cache_seqlens of each cache
            row, before attention.
        cache_seqlens: an int, or int32 [b]: keys in the cache before the append; None = the whole capacity.
        page_table: None, or int32 [b, max_pages].
        cache_batch_idx: None, or int32 [b]: the row of the cache for each entry of the batch.
        cache_leftpad: None, or int32 [b]: keys before it do not exist.
        rotary_cos, rotary_sin: None, or [positions, rotary_dim / 2], dtype of q or float32: rotate q and k_new. k_new[n] at
            position cache_seqlens + n; q_i at cache_seqlens + i if causal or windowed, else at cache_seqlens.
        rotary_interleaved: False: halves (NeoX); True: pairs (0, 1), (2, 3), .. (GPT-J).
        rotary_seqlens: None, or int32 [b]: positions start here instead of at cache_seqlens.
        cu_seqlens_q, max_seqlen_q: packed q, as in `attention_varlen`.
        causal, window, softmax_scale, softcap, bias, alibi_slopes, sinks, batch_invariant, num_splits, sm_margin,
        return_lse, return_max_logit, out, backend, kernel, num_threads: as in `attention`.

    Returns:
        As `attention`.

    >>> import numpy as np, tilewise
    >>> rng = np.random.default_rng(0)
    >>> q, k_new, v_new = rng.standard_normal((3, 1, 1, 2, 16), dtype=np.float32)
    >>> k_cache, v_cache = np.zeros((2, 1, 8, 2, 16), np.float32)
    >>> o = tilewise.attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, cache_seqlens=0, causal=True)
    >>> np.array_equal(o, v_new), np.array_equal(k_cache[:, :1], k_new)
    (True, True)
    """
    return frontend(q).attention_with_kvcache(q, k_cache, v_cache, k_new, v_new, **options)


def attention_backward(dout, q, k, v, o, lse, **options):
    """The gradients of `attention` and `attention_varlen` by hand, for arrays without autograd.

    Args:
        dout: gradient of o, its shape and dtype. q, k, v, o, lse: as passed to and returned by the forward call.
        dlse: None, or float32 like lse: a gradient that arrives through lse.
        grads: None = ("dq", "dk", "dv"), or any of these and "dbias", "dalibi", "dsink".
        All other arguments must be those of the forward call (dropout_seed and dropout_offset included).

    Returns:
        The gradients, a tuple in the order of `grads`, each like its tensor.

    >>> import numpy as np, tilewise
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 1, 16), dtype=np.float32)
    >>> o, lse = tilewise.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = tilewise.attention_backward(np.ones_like(o), q, k, v, o, lse)
    >>> np.allclose(dv.sum(), o.size)  # each row's probabilities sum to 1
    True
    """
    return frontend(q).attention_backward(dout, q, k, v, o, lse, **options)


def softmax(x, *, return_lse=False, num_threads=0):
    """softmax over the last dimension in the online form: one read for maximum and sum together, one write.

    Args:
        x: [.., n], float32, float16, bfloat16 or float64.
        return_lse: True: return float32 [..], the log-sum-exp, too.
        num_threads: as in `attention`.

    Returns:
        y like x, or (y, lse). A row of -inf gives zeros and lse -inf. Torch tensors carry gradients through both.

    >>> import numpy as np, tilewise
    >>> tilewise.softmax(np.float32([[0, 0], [-np.inf, 1]]))
    array([[0.5, 0.5],
           [0. , 1. ]], dtype=float32)
    """
    return frontend(x).softmax(x, return_lse=return_lse, num_threads=num_threads)


def merge_states(o, lse, o_other, lse_other):
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        o, o_other: [b, sq, hq, dv] or [total, hq, dv]. lse, lse_other: float32 [b, hq, sq] or [hq, total].

    Returns:
        (o, lse), new arrays: lse = log(exp(lse) + exp(lse_other)), o weighted alike. Two empty parts give (0, -inf); one
        empty part leaves the other unchanged.

    >>> import numpy as np, tilewise
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 16), dtype=np.float32)
    >>> left = tilewise.attention(q, k[:, :2], v[:, :2], return_lse=True)
    >>> right = tilewise.attention(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> o, lse = tilewise.merge_states(*left, *right)
    >>> np.allclose(o, tilewise.attention(q, k, v), atol=1e-5)
    True
    """
    return frontend(o).merge_states(o, lse, o_other, lse_other)


def plan(problem, *arrays, backend=None, kernel=None, num_threads=0, **options):
    """What a call will do, without doing it: kernel, workspace, FLOPs, bytes.

    Args:
        problem: text such as "fwd bf16 b=2 hq=32 hk=8 sq=1024 sk=1024 d=128 causal"; or q, followed by k, v and the
            options of `attention` (and backward=True for the backward pass).
        backend, kernel, num_threads: as in `attention`.

    Returns:
        A `Plan`.

    >>> import tilewise
    >>> p = tilewise.plan("fwd f32 b=1 hq=8 hk=8 sq=1024 sk=1024 d=64 causal")
    >>> p.workspace_bytes < p.standard_bytes
    True
    """
    return planning.plan(problem, *arrays, backend=backend, kernel=kernel, num_threads=num_threads, **options)


def explain(problem, *arrays, backend=None, kernel=None, num_threads=0, **options):
    """Why this plan: every kernel's refusal in words, then the plan, as text. Arguments as in `plan`.

    >>> import tilewise
    >>> "reference" in tilewise.explain("fwd f64 b=1 hq=1 hk=1 sq=8 sk=8 d=16")
    True
    """
    return planning.explain(problem, *arrays, backend=backend, kernel=kernel, num_threads=num_threads, **options)


def kernels():
    """The table of kernels, best first: a list of `Kernel`.

    >>> import tilewise
    >>> "reference" in [kernel.name for kernel in tilewise.kernels()]
    True
    """
    return planning.kernels()


def machine():
    """The machine as the library sees it, as text: instruction sets, threads, GPUs."""
    return planning.machine()
