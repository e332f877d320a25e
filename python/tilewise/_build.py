"""From arrays and options to the tuples that `_call` packs, for every kind of array alike.

A *kind* is a small object with `view(array, name)` -> view tuple, `rows(array, name)` -> (array, view) with the last
dimension contiguous (copying only if it is not), `empty(shape, dtype, like)` and `forward`/`backward` that call the ABI;
`attention_dense` may do the commonest call, dense tensors with options alone, with less Python, and gives None if it does
not take it.
"""

from . import _abi
from ._options import InvalidArgument, require, same

SLOT = _abi.SLOT
_Q, _K, _V, _O, _LSE, _MAX, _MASK = (SLOT[n] for n in ("q", "k", "v", "o", "lse", "max_logit", "dropout_mask"))

# Optional inputs that are passed on as they are; the kernels check shapes and dtypes.
EXTRA = (
    "bias", "alibi_slopes", "sink", "rng_state", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k",
    "page_table", "cache_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "rotary_seqlens",
)  # fmt: skip

# Names in the Python API where they differ from the ABI's.
ARGUMENT = {
    "sink": "sinks", "seqused_k": "seqused_k", "leftpad_k": "cache_leftpad",
}  # fmt: skip


def check_ranks(q, k, v, packed_q, packed_k, k_name="k", v_name="v"):
    """The ranks decide the layout, so they are checked here; everything else is the library's to check."""
    for name, x, packed in (("q", q, packed_q), (k_name, k, packed_k), (v_name, v, packed_k)):
        want = 3 if packed else 4
        if x.ndim != want:
            axes = {"q": "total_q, num_heads_q, head_dim" if packed else "batch, seqlen_q, num_heads_q, head_dim"}.get(
                name,
                "total_k, num_heads_k, head_dim" if packed else "batch, seqlen_k, num_heads_k, head_dim",
            )
            raise InvalidArgument("%s has shape %s, must have %d dimensions [%s]" % (name, tuple(x.shape), want, axes))


def bias_4d(bias):
    """[..] -> [1, .., 1, sq, sk]: leading dimensions that broadcast."""
    if bias is None or bias.ndim == 4:
        return bias
    require(1 <= bias.ndim <= 4, "bias has shape %s, must have 1 to 4 dimensions", tuple(bias.shape))
    return bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)) if bias.ndim else bias


def lse_shape(q, packed_q):
    return (q.shape[1], q.shape[0]) if packed_q else (q.shape[0], q.shape[2], q.shape[1])


def forward(kind, q, k, v, extra, options, seqlens, target, *, packed_q=False, want_lse=False, want_max_logit=False,
            want_dropout_mask=False, batch=None, out=None, new=None, seqlen_k=None):  # fmt: skip
    """Allocates the outputs and runs the forward pass. -> (o, lse, max_logit, dropout_mask), None where not wanted."""
    kept = []  # temporaries that must outlive the call
    q, q_view = kind.rows(q, "q")
    if new is None:
        k, k_view = kind.rows(k, "k")
        v, v_view = kind.rows(v, "v")
    else:  # written in place: no copy allowed
        k_view, v_view = kind.view(k, "k_cache"), kind.view(v, "v_cache")
    if out is None:
        out = kind.empty(tuple(q.shape[:-1]) + (v.shape[-1],), q_view[1], q)
    else:
        check_out(out, tuple(q.shape[:-1]) + (v.shape[-1],))
    views = [(_Q, q_view), (_K, k_view), (_V, v_view), (_O, kind.view(out, "out"))]
    lse = max_logit = mask = None
    if want_lse:
        lse = kind.empty(lse_shape(q, packed_q), _abi.FLOAT32, q)
        views.append((_LSE, kind.view(lse, "lse")))
    if want_max_logit:
        max_logit = kind.empty((batch, q.shape[-2]), _abi.FLOAT32, q)
        views.append((_MAX, kind.view(max_logit, "max_logit")))
    if want_dropout_mask:
        mask = kind.empty((batch, q.shape[-2], seqlens[0] or q.shape[1], seqlen_k), _abi.BOOL, q)
        views.append((_MASK, kind.view(mask, "dropout_mask")))
    for name, x in extra:
        views.append((SLOT[name], kind.view(x, ARGUMENT.get(name, name))))
    if new is not None:
        for slot, x, name in zip((SLOT["k_new"], SLOT["v_new"]), new, ("k_new", "v_new")):
            x, x_view = kind.rows(x, name)
            kept.append(x)
            views.append((slot, x_view))
    kind.forward(options, views, seqlens, target)
    return out, lse, max_logit, mask


def check_out(out, shape):
    require(tuple(out.shape) == tuple(shape), "out has shape %s, must have %s", tuple(out.shape), tuple(shape))


GRADS = ("dq", "dk", "dv", "dbias", "dalibi", "dsink")
_LIKE = {"dbias": "bias", "dalibi": "alibi_slopes", "dsink": "sink"}


def backward(kind, dout, dlse, q, k, v, o, lse, extra, wanted, options, seqlens, target):
    """Allocates the gradients in `wanted` and runs the backward pass. -> tuple in the order of `wanted`."""
    q, q_view = kind.rows(q, "q")
    k, k_view = kind.rows(k, "k")
    v, v_view = kind.rows(v, "v")
    o, o_view = kind.rows(o, "o")
    dout, dout_view = kind.rows(dout, "dout")
    views = [(_Q, q_view), (_K, k_view), (_V, v_view), (_O, o_view), (_LSE, kind.view(lse, "lse"))]
    views.append((SLOT["dout"], dout_view))
    if dlse is not None:
        views.append((SLOT["dlse"], kind.view(dlse, "dlse")))
    likes = {"dq": (q, q_view), "dk": (k, k_view), "dv": (v, v_view)}
    for name, x in extra:
        view = kind.view(x, ARGUMENT.get(name, name))
        views.append((SLOT[name], view))
        likes[name] = (x, view)
    grads = []
    for name in wanted:
        like, view = likes[_LIKE.get(name, name)]
        grad = kind.empty(tuple(like.shape), view[1], like)
        grads.append(grad)
        views.append((SLOT[name], kind.view(grad, name)))
    kind.backward(options, views, seqlens, target)
    return tuple(grads)


def kv_pair(k_new, v_new):
    same(k_new=k_new, v_new=v_new)
    return None if k_new is None else (k_new, v_new)
