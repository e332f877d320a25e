"""What attention takes in memory, standard and tiled, and what fits: the library's model (docs/memory.md) on problems, models
and Hugging Face configurations."""

import collections
import ctypes
import json
import re

from . import _abi, _call, planning
from ._library import check, lib, text
from .errors import InvalidArgument

# Bytes on one device and of one layer, above the inputs; `total` is for the inputs and every layer too.
Use = collections.namedtuple(
    "Use", "outputs saved gradients workspace_forward workspace_backward peak_forward peak_backward total"
)
Model = collections.namedtuple(
    "Model", "name hidden_size layers num_heads_q num_heads_k head_dim head_dim_v window layers_full softcap sink"
)
GPU = collections.namedtuple(
    "GPU", "name capability multiprocessors memory_bytes l2_bytes memory_bytes_per_second tensor_flops vector_flops"
)

_UNITS = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_KEYS = {"sq": b"sq", "seqlen": b"sq", "b": b"b", "batch": b"b", "hq": b"hq", "heads": b"hq"}


def _rows(count, at, layout):
    for index in range(count()):
        row = ctypes.create_string_buffer(layout.pack(layout.size, 0, b"", *[0] * (len(layout.unpack(bytes(layout.size))) - 3)))
        check(at(index, ctypes.addressof(row)))
        yield layout.unpack_from(row)


def models():
    """Attention of well-known models, by name: a dict of `Model`.

    >>> import tilewise
    >>> tilewise.models()["llama3-8b"].num_heads_k
    8
    """
    found = {}
    for _, sink, name, *numbers in _rows(lib.tw_model_count, lib.tw_model_at, _abi.MODEL):
        found[_abi.text(name)] = Model(_abi.text(name), *numbers, bool(sink))
    return found


def gpus():
    """GPUs by their data sheets, by name: a dict of `GPU`."""
    found = {}
    for _, capability, name, *numbers in _rows(lib.tw_gpu_count, lib.tw_gpu_at, _abi.GPU):
        found[_abi.text(name)] = GPU(_abi.text(name), capability, *numbers)
    return found


def model_of_config(config):
    """A `Model` from a Hugging Face configuration: the path of a config.json, a dict, or an object with to_dict()."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif not isinstance(config, dict):
        with open(config) as file:
            config = json.load(file)
    config = config.get("text_config") or config  # of models that also see or hear

    def value(*names, absent=None):
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if absent is None:
            raise InvalidArgument("config: lacks %s" % names[0])
        return absent

    hidden, layers = value("hidden_size", "n_embd"), value("num_hidden_layers", "n_layer")
    heads = value("num_attention_heads", "n_head")
    heads_k, d = value("num_key_value_heads", absent=heads), value("head_dim", absent=hidden // heads)
    dv = d
    if "qk_nope_head_dim" in config:  # multi-head latent attention, as it runs in prefill and training
        d, heads_k = config["qk_nope_head_dim"] + value("qk_rope_head_dim", absent=0), heads
        dv = value("v_head_dim", absent=d)
    window = value("sliding_window", absent=0) if config.get("use_sliding_window", True) else 0
    kind = config.get("model_type", "config")
    full = layers if window == 0 else _full_layers(config, kind, layers, value)
    cap = float(value("attn_logit_softcapping", absent=0))
    return Model(kind, hidden, layers, heads, heads_k, d, dv, window, full, cap, kind == "gpt_oss")


def _full_layers(config, kind, layers, value):
    """Which layers of a model with a window see everything: said layer by layer, else every n-th, else from one layer on."""
    if isinstance(config.get("layer_types"), (list, tuple)):
        return list(config["layer_types"]).count("full_attention")
    usual = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6}.get(kind, 0)  # their configurations leave it out
    pattern = value("_sliding_window_pattern", "sliding_window_pattern", absent=usual)
    return layers // pattern if pattern else min(value("max_window_layers", absent=0), layers)  # the first ones, of Qwen 2 and 3


def problem_of_model(model, batch=1, seqlen=4096, dtype="bf16", backward=True, decode=False, device="cuda", extra=""):
    """The problem text of a layer of a `Model`, one without a window if there is one."""
    words = ["fwd" if decode or not backward else "bwd", dtype]
    words += ["cuda"] * (device == "cuda") + ["b=%d" % batch, "hq=%d" % model.num_heads_q]
    words += ["hk=%d" % model.num_heads_k] * (model.num_heads_k != model.num_heads_q)
    words += ["sq=1", "sk=%d" % seqlen] if decode else ["sq=%d" % seqlen]
    words += ["d=%d" % model.head_dim] + ["dv=%d" % model.head_dim_v] * (model.head_dim_v != model.head_dim) + ["causal"]
    words += ["window=%d,0" % (model.window - 1)] * (model.window > 0 and model.layers_full == 0)
    words += ["softcap=%g" % model.softcap] * (model.softcap > 0) + ["sink"] * model.sink + ["seqused_k"] * decode
    return " ".join(words + [extra] * bool(extra))


def bytes_of(size):
    """24GiB, 80GB or a number of bytes, as a number of bytes."""
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z]*)\s*", size)
    try:
        return int(float(match.group(1)) * _UNITS[match.group(2) or "B"])
    except (AttributeError, KeyError, ValueError):
        raise InvalidArgument("size %r: must be a size as in 24GiB, 80GB or 1e9" % size) from None


def _text(size):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024 or unit == "PiB":
            return "%.0f B" % size if unit == "B" else "%.1f %s" % (size, unit)
        size /= 1024


class Memory:
    """What a problem takes in memory. Made by `tilewise.memory`; `str(memory)` is a table.

    Attributes: problem (one line of text), inputs (bytes of q, k, v and the options' tensors), standard and tiled (`Use`:
    outputs, saved, gradients, workspace_forward, workspace_backward, peak_forward, peak_backward, total), planned (whether
    Tilewise's workspaces are those of plans that this machine makes), layer_input, flops, standard_bytes_moved,
    tiled_bytes_moved, ratio (of the peaks).
    """

    def __init__(self, problem, options, target):
        self._problem = ctypes.create_string_buffer(problem, _abi.PROBLEM.size)
        self._options = ctypes.create_string_buffer(options, _abi.MEMORY_OPTIONS.size)
        self._target = target
        self.problem = planning.problem_text(problem)
        info = ctypes.create_string_buffer(_abi.MEMORY_INFO.size)
        _abi.MEMORY_INFO.pack_into(info, 0, _abi.MEMORY_INFO.size, 0, *[0] * 18, 0.0, 0.0, 0.0)
        check(lib.tw_memory(*self._where(), ctypes.addressof(info)))
        fields = _abi.MEMORY_INFO.unpack_from(info)
        self.planned, self.inputs, self.layer_input = bool(fields[1]), fields[2], fields[3]
        self.standard, self.tiled = Use(*fields[4:12]), Use(*fields[12:20])
        self.flops, self.standard_bytes_moved, self.tiled_bytes_moved = fields[20:]

    def _where(self):
        backend, kernel, num_threads = self._target
        return (ctypes.addressof(self._problem), ctypes.addressof(self._options), _call.target(backend, kernel, num_threads))

    @property
    def ratio(self):
        return max(self.standard.peak_forward, self.standard.peak_backward) / max(self.tiled.peak_forward, self.tiled.peak_backward, 1)

    def largest(self, budget, key="seqlen", standard=False):
        """The largest "seqlen", "batch" or "heads" whose total fits the budget ("24GiB" or bytes); 0 if none does."""
        if key not in _KEYS:
            raise InvalidArgument("key %r: must be seqlen, batch or heads" % (key,))
        most = ctypes.c_int64()
        check(lib.tw_memory_largest(*self._where(), bytes_of(budget), _KEYS[key], int(standard), ctypes.addressof(most)))
        return most.value

    def explain(self, gpu=None):
        """The formulas with the numbers in them, tiles and traffic; with a name of `gpus()` also what bounds the time."""
        if gpu is not None and gpu not in gpus():
            raise InvalidArgument("gpu %r: must be one of %s" % (gpu, ", ".join(gpus())))
        return text(lambda *rest: lib.tw_memory_explain(*self._where(), gpu.encode() if gpu else None, *rest))

    def verify(self):
        """Runs the problem on the GPU and measures it with torch's allocator, standard attention and Tilewise: a list of tuples
        (problem, what, direction, predicted, measured, error, ok), two for a forward problem and four for a training step; ok
        is within 1 % and 2 MiB. Of dense problems with causal, window, softcap and dropout, one layer on one device; refuses
        others, and machines without a GPU, by name. On the CPU `tilewise memory --verify` does this."""
        from .torch import _verify

        return _verify.verify(self.problem, self._problem.raw, self)

    def __str__(self):
        lines = ["problem  %s" % self.problem, "inputs   %s" % _text(self.inputs), ""]
        lines.append("         " + "".join("%20s" % name.replace("_", " ") for name in Use._fields))
        for name, use in (("standard", self.standard), ("Tilewise", self.tiled)):
            lines.append("%-9s" % name + "".join("%20s" % _text(value) for value in use))
        return "\n".join(lines)

    def __repr__(self):
        return "<tilewise.Memory %r: standard %s, tiled %s in all>" % (self.problem, _text(self.standard.total), _text(self.tiled.total))


def memory(
    problem=None, *arrays, model=None, config=None, batch=1, seqlen=4096, dtype="bf16", backward=True, decode=False,
    device="cuda", extra="", layers=1, hidden_size=0, checkpointing=False, tensor_parallel=1, context_parallel=1,
    backend=None, kernel=None, num_threads=0, **options
):  # fmt: skip
    """What attention takes in memory, standard and tiled, without running it.

    Args:
        problem: a problem's text, or q; then `arrays` are k and v and `options` those of `attention`.
        model: a name of `models()`, or a `Model`; config: a config.json's path, a dict or a transformers configuration.
            Either stands for a problem together with batch, seqlen, dtype ("f32", "f16", "bf16"), backward (training, else
            inference), decode (one query against a cache of seqlen keys), device, and extra ("dropout=0.1", ...).
        layers: how many run one after another; "all" = the model's. Of a model's windowed layers the cache keeps the window.
        hidden_size: of a layer's input, for checkpointing.
        checkpointing: between the passes a layer keeps its input alone.
        tensor_parallel, context_parallel: devices that share heads, and rows.
        backend, kernel, num_threads: as in `attention`.

    Returns:
        A `Memory`, whose `largest("24GiB")` says what fits.

    >>> import tilewise
    >>> m = tilewise.memory("bwd bf16 cuda b=1 hq=16 sq=16384 d=64")
    >>> m.standard.peak_backward // 2**20
    65696
    >>> tilewise.memory(model="llama3-8b").largest("24GiB") > 5 * tilewise.memory(model="llama3-8b").largest("24GiB", standard=True)
    True
    """
    if sum(x is not None for x in (problem, model, config)) != 1:
        raise InvalidArgument("give one of problem, model and config")
    windows = (0, 0)  # layers whose cache keeps a window, and its tokens
    if problem is None:
        if isinstance(model, str):
            if model not in models():
                raise InvalidArgument("model %r: must be one of %s" % (model, ", ".join(models())))
            model = models()[model]
        model = model or model_of_config(config)
        problem = problem_of_model(model, batch, seqlen, dtype, backward, decode, device, extra)
        hidden_size = hidden_size or model.hidden_size
        layers = model.layers if layers == "all" else layers
        if model.window and isinstance(layers, int):
            windows = (layers * (model.layers - model.layers_full) // model.layers, model.window)
    if not isinstance(layers, int):
        raise InvalidArgument("layers %r: must be an integer, or \"all\" with a model" % (layers,))
    packed = _abi.MEMORY_OPTIONS.pack(
        _abi.MEMORY_OPTIONS.size, int(checkpointing), layers, hidden_size, tensor_parallel, context_parallel, *windows
    )
    return Memory(planning.problem_of(problem, arrays, options), packed, (backend, kernel, num_threads))
