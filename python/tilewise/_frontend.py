"""The public functions for arrays without autograd, written once for every kind of array (see `_build`).

`tilewise.numpy` and `_dlpack` are instances; `tilewise.torch` adds autograd and uses this for the rest. Arguments are
documented in `tilewise._api`.
"""

from . import _abi, _build, _call
from ._options import integer, require, same, window_of
from .errors import InvalidArgument, Unsupported


def seed_and_offset(dropout_p, dropout_seed, dropout_offset):
    if dropout_seed is None:
        if dropout_p:
            raise InvalidArgument("dropout_seed None, must be an integer in [0, 2**64) when dropout_p > 0")
        return 0, 0
    return integer(dropout_seed, "dropout_seed"), integer(dropout_offset, "dropout_offset")


def results(o, lse, max_logit, dropout_mask, return_lse, return_max_logit, return_dropout_mask):
    out = (o,)
    if return_lse:
        out += (lse,)
    if return_max_logit:
        out += (max_logit,)
    if return_dropout_mask:
        out += (dropout_mask,)
    return out if len(out) > 1 else o


def seqlens_of(cu_seqlens, max_seqlen, name):
    """0 is C's "not given", which a GPU refuses; 1 is as good a bound of sequences that are all empty."""
    return 0 if max_seqlen is None else integer(max_seqlen, name) or 1


class Frontend:
    def __init__(self, kind):
        self.kind = kind

    # ---- dense ----

    def attention(self, q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, bias=None,
                  alibi_slopes=None, sinks=None, dropout_p=0.0, dropout_seed=None, dropout_offset=0, rng_state=None,
                  seqused_q=None, seqused_k=None, deterministic=False, batch_invariant=False, num_splits=0,
                  sm_margin=0, return_lse=False, return_max_logit=False, return_dropout_mask=False, out=None,
                  backend=None, kernel=None, num_threads=0):  # fmt: skip
        kind = self.kind
        if (
            bias is None and alibi_slopes is None and sinks is None and dropout_p == 0 and rng_state is None
            and seqused_q is None and seqused_k is None and not return_max_logit and not return_dropout_mask
            and out is None
        ):  # fmt: skip
            key = (causal, window, softmax_scale, softcap, deterministic, batch_invariant, num_splits, sm_margin)
            got = kind.attention_dense(q, k, v, key, return_lse, backend, kernel, num_threads)
            if got is not None:
                return got
        kind.same(q=q, k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, seqused_q=seqused_q,
                  seqused_k=seqused_k, rng_state=rng_state, out=out)  # fmt: skip
        _build.check_ranks(q, k, v, False, False)
        seed, offset = (0, 0) if rng_state is not None else seed_and_offset(dropout_p, dropout_seed, dropout_offset)
        options = _call.options(causal, window_of(window), softmax_scale, softcap, dropout_p, seed, offset, False,
                                deterministic, batch_invariant, num_splits, sm_margin)  # fmt: skip
        extra = kind.extras(bias=_build.bias_4d(bias), alibi_slopes=alibi_slopes, sink=sinks, rng_state=rng_state,
                            seqused_q=seqused_q, seqused_k=seqused_k)  # fmt: skip
        target = _call.target(backend, kernel, num_threads)
        got = _build.forward(kind, q, k, v, extra, options, _call.NO_SEQLENS, target, want_lse=return_lse,
                             want_max_logit=return_max_logit, want_dropout_mask=return_dropout_mask,
                             batch=q.shape[0], seqlen_k=k.shape[1], out=out)  # fmt: skip
        return results(*got, return_lse, return_max_logit, return_dropout_mask)

    # ---- packed ----

    def attention_varlen(self, q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                         seqused_q=None, seqused_k=None, page_table=None, causal=False, window=None,
                         softmax_scale=None, softcap=0.0, bias=None, alibi_slopes=None, sinks=None, dropout_p=0.0,
                         dropout_seed=None, dropout_offset=0, rng_state=None, deterministic=False,
                         batch_invariant=False, num_splits=0, sm_margin=0, return_lse=False, return_max_logit=False,
                         return_dropout_mask=False, out=None, backend=None, kernel=None, num_threads=0):  # fmt: skip
        kind = self.kind
        cu_seqlens_q, cu_seqlens_k = kind.lengths(cu_seqlens_q, q), kind.lengths(cu_seqlens_k, q)
        seqused_q, seqused_k = kind.lengths(seqused_q, q), kind.lengths(seqused_k, q)
        kind.same(q=q, k=k, v=v, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, seqused_q=seqused_q,
                  seqused_k=seqused_k, rng_state=rng_state, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                  page_table=page_table, out=out)  # fmt: skip
        packed_q, packed_k = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
        seed, offset = (0, 0) if rng_state is not None else seed_and_offset(dropout_p, dropout_seed, dropout_offset)
        options = _call.options(causal, window_of(window), softmax_scale, softcap, dropout_p, seed, offset, False,
                                deterministic, batch_invariant, num_splits, sm_margin)  # fmt: skip
        extra = kind.extras(bias=_build.bias_4d(bias), alibi_slopes=alibi_slopes, sink=sinks, rng_state=rng_state,
                            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
                            seqused_k=seqused_k, page_table=page_table)  # fmt: skip
        if return_dropout_mask and (max_seqlen_q is None or max_seqlen_k is None):
            raise InvalidArgument("return_dropout_mask: max_seqlen_q and max_seqlen_k must be given")
        seqlens = (seqlens_of(cu_seqlens_q, max_seqlen_q, "max_seqlen_q") if packed_q else 0,
                   seqlens_of(cu_seqlens_k, max_seqlen_k, "max_seqlen_k") if packed_k else 0)  # fmt: skip
        batch = cu_seqlens_q.shape[0] - 1 if packed_q else q.shape[0]
        target = _call.target(backend, kernel, num_threads)
        got = _build.forward(kind, q, k, v, extra, options, seqlens, target, packed_q=packed_q, want_lse=return_lse,
                             want_max_logit=return_max_logit, want_dropout_mask=return_dropout_mask, batch=batch,
                             seqlen_k=seqlens[1] or k.shape[1], out=out)  # fmt: skip
        return results(*got, return_lse, return_max_logit, return_dropout_mask)

    # ---- KV cache ----

    def attention_with_kvcache(self, q, k_cache, v_cache, k_new=None, v_new=None, *, cache_seqlens=None,
                               page_table=None, cache_batch_idx=None, cache_leftpad=None, rotary_cos=None,
                               rotary_sin=None, rotary_interleaved=False, rotary_seqlens=None, cu_seqlens_q=None,
                               max_seqlen_q=None, causal=False, window=None, softmax_scale=None, softcap=0.0,
                               bias=None, alibi_slopes=None, sinks=None, batch_invariant=False, num_splits=0,
                               sm_margin=0, return_lse=False, return_max_logit=False, out=None, backend=None,
                               kernel=None, num_threads=0):  # fmt: skip
        kind = self.kind
        packed_q = cu_seqlens_q is not None
        cu_seqlens_q = kind.lengths(cu_seqlens_q, q)
        _build.check_ranks(q, k_cache, v_cache, packed_q, False, "k_cache", "v_cache")
        batch = cu_seqlens_q.shape[0] - 1 if packed_q else q.shape[0]
        if cache_seqlens is not None:
            cache_seqlens = kind.filled(cache_seqlens, batch, q, "cache_seqlens")
        cache_batch_idx, cache_leftpad = kind.lengths(cache_batch_idx, q), kind.lengths(cache_leftpad, q)
        rotary_seqlens = kind.lengths(rotary_seqlens, q)
        kind.same(q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, cache_seqlens=cache_seqlens,
                  page_table=page_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
                  rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens, bias=bias,
                  alibi_slopes=alibi_slopes, sinks=sinks, cu_seqlens_q=cu_seqlens_q, out=out)  # fmt: skip
        new = _build.kv_pair(k_new, v_new)
        same(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
        if new is not None:
            kind.writable(k_cache, "k_cache")
            kind.writable(v_cache, "v_cache")
            if cache_seqlens is None:
                raise InvalidArgument("cache_seqlens None, must be given when k_new and v_new are appended")
        options = _call.options(causal, window_of(window), softmax_scale, softcap, 0.0, 0, 0, rotary_interleaved,
                                False, batch_invariant, num_splits, sm_margin)  # fmt: skip
        extra = kind.extras(bias=_build.bias_4d(bias), alibi_slopes=alibi_slopes, sink=sinks, seqused_k=cache_seqlens,
                            page_table=page_table, cache_batch_idx=cache_batch_idx, leftpad_k=cache_leftpad,
                            rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens,
                            cu_seqlens_q=cu_seqlens_q)  # fmt: skip
        seqlens = (seqlens_of(cu_seqlens_q, max_seqlen_q, "max_seqlen_q") if packed_q else 0, 0)
        target = _call.target(backend, kernel, num_threads)
        got = _build.forward(kind, q, k_cache, v_cache, extra, options, seqlens, target, packed_q=packed_q,
                             want_lse=return_lse, want_max_logit=return_max_logit, batch=batch, out=out, new=new)  # fmt: skip
        return results(*got, return_lse, return_max_logit, False)

    # ---- gradients by hand ----

    def attention_backward(self, dout, q, k, v, o, lse, *, dlse=None, causal=False, window=None, softmax_scale=None,
                           softcap=0.0, bias=None, alibi_slopes=None, sinks=None, dropout_p=0.0, dropout_seed=None,
                           dropout_offset=0, rng_state=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                           max_seqlen_k=None, seqused_q=None, seqused_k=None, deterministic=False, sm_margin=0,
                           grads=None, backend=None, kernel=None, num_threads=0):  # fmt: skip
        kind = self.kind
        cu_seqlens_q, cu_seqlens_k = kind.lengths(cu_seqlens_q, q), kind.lengths(cu_seqlens_k, q)
        seqused_q, seqused_k = kind.lengths(seqused_q, q), kind.lengths(seqused_k, q)
        kind.same(dout=dout, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
                  cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
                  rng_state=rng_state)  # fmt: skip
        packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
        _build.check_ranks(q, k, v, packed_q, packed_k)
        if grads is None:
            grads = ("dq", "dk", "dv")
        for name in grads:
            require(name in _build.GRADS, "grads: %r, must be among %s", name, _build.GRADS)
        for name, given in (("dbias", bias), ("dalibi", alibi_slopes), ("dsink", sinks)):
            require(name not in grads or given is not None, "grads: %r, but that argument is not given", name)
        seed, offset = (0, 0) if rng_state is not None else seed_and_offset(dropout_p, dropout_seed, dropout_offset)
        options = _call.options(causal, window_of(window), softmax_scale, softcap, dropout_p, seed, offset, False,
                                deterministic, False, 0, sm_margin, _abi.BACKWARD)  # fmt: skip
        extra = kind.extras(bias=_build.bias_4d(bias), alibi_slopes=alibi_slopes, sink=sinks, rng_state=rng_state,
                            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
                            seqused_k=seqused_k)  # fmt: skip
        seqlens = (seqlens_of(cu_seqlens_q, max_seqlen_q, "max_seqlen_q") if packed_q else 0,
                   seqlens_of(cu_seqlens_k, max_seqlen_k, "max_seqlen_k") if packed_k else 0)  # fmt: skip
        target = _call.target(backend, kernel, num_threads)
        got = _build.backward(kind, dout, dlse, q, k, v, o, lse, extra, grads, options, seqlens, target)
        if "dbias" in grads and bias.ndim != 4:
            got = tuple(g.reshape(tuple(bias.shape)) if name == "dbias" else g for name, g in zip(grads, got))
        return got

    # ---- softmax, merging ----

    def softmax(self, x, *, return_lse=False, num_threads=0):
        kind = self.kind
        x, view, shape = kind.flat_rows(x, "x")
        y = kind.empty(shape, view[1], x)
        y_flat = y if tuple(x.shape) == shape else y.reshape(tuple(x.shape))
        lse = lse_view = None
        if return_lse:
            lse = kind.empty(shape[:-1], _abi.FLOAT32, x)
            lse_view = kind.view(lse.reshape(tuple(x.shape[:-1]) or (1,)), "lse")
        kind.softmax(view, kind.view(y_flat, "y"), lse_view, _call.target(num_threads=num_threads))
        return (y, lse) if return_lse else y

    def merge_states(self, o, lse, o_other, lse_other):
        kind = self.kind
        kind.same(o=o, lse=lse, o_other=o_other, lse_other=lse_other)
        o, lse = kind.copy(o), kind.copy(lse)
        o_other, other_view = kind.rows(o_other, "o_other")
        kind.merge(kind.view(o, "o"), kind.view(lse, "lse"), other_view, kind.view(lse_other, "lse_other"))
        return o, lse

    def describe(self, q, k, v, **options):
        """The problem of a call as bytes, for plan and explain."""
        return describe(self.kind, q, k, v, **options)


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table):
    packed_q, packed_k = cu_seqlens_q is not None, cu_seqlens_k is not None
    if not packed_q and not packed_k:
        raise InvalidArgument("cu_seqlens_q and cu_seqlens_k None, must be given for packed q and packed k")
    if page_table is not None and packed_k:
        raise InvalidArgument("cu_seqlens_k given with page_table: paged keys have their lengths in seqused_k")
    _build.check_ranks(q, k, v, packed_q, packed_k)
    return packed_q, packed_k


_DESCRIBED = {"sinks": "sink", "cache_seqlens": "seqused_k", "cache_leftpad": "leftpad_k"}


def describe(kind, q, k, v, *, backward=False, causal=False, window=None, softmax_scale=None, softcap=0.0,
             dropout_p=0.0, deterministic=False, batch_invariant=False, num_splits=0, sm_margin=0,
             return_lse=False, max_seqlen_q=None, max_seqlen_k=None, **arrays):  # fmt: skip
    """tw_describe for arrays: the outputs are described by views without memory of their own."""
    extra = {}
    for name, x in arrays.items():
        field = _DESCRIBED.get(name, name)
        if field not in _build.EXTRA:
            raise TypeError("plan: unexpected argument %r" % name)
        if x is not None:
            extra[field] = _build.bias_4d(x) if field == "bias" else x
    packed_q = "cu_seqlens_q" in extra
    _build.check_ranks(q, k, v, packed_q, "cu_seqlens_k" in extra)
    options = _call.options(causal, window_of(window), softmax_scale, softcap, dropout_p, 0, 0, False, deterministic,
                            batch_invariant, num_splits, sm_margin,
                            _abi.BACKWARD if backward else _abi.FORWARD)  # fmt: skip
    views = [(_abi.SLOT[name], kind.view(x, name)) for name, x in (("q", q), ("k", k), ("v", v))]
    views += [(_abi.SLOT[name], kind.view(x, name)) for name, x in extra.items()]
    q_view, k_view, v_view = views[0][1], views[1][1], views[2][1]
    o = contiguous_view(q_view[1], q_view[2], q_view[3], tuple(q.shape[:-1]) + (v.shape[-1],), q_view[0])
    views.append((_abi.SLOT["o"], o))
    lse = contiguous_view(_abi.FLOAT32, q_view[2], q_view[3], _build.lse_shape(q, packed_q), q_view[0])
    if return_lse or backward:
        views.append((_abi.SLOT["lse"], lse))
    if backward:
        for name, view in (("dout", o), ("dq", q_view), ("dk", k_view), ("dv", v_view)):
            views.append((_abi.SLOT[name], view))
    seqlens = (seqlens_of(None, max_seqlen_q, "max_seqlen_q"), seqlens_of(None, max_seqlen_k, "max_seqlen_k"))
    return _call.describe(options, views, seqlens)


def contiguous_view(dtype, device, device_index, shape, data):
    """A view of contiguous memory at `data`."""
    n = len(shape)
    if n > _abi.MAX_DIMS or n == 0:
        raise Unsupported("an array of %d dimensions, must have 1 to %d" % (n, _abi.MAX_DIMS))
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    pad = (0,) * (_abi.MAX_DIMS - n)
    return (data, dtype, device, device_index, n) + tuple(shape) + pad + tuple(reversed(strides)) + pad
