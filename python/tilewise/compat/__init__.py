"""Modules with the function names, argument orders, defaults and results of flash-attn, computed by Tilewise.

`tilewise.compat.flash_attn` follows flash-attn 2, `tilewise.compat.flash_attn_3` its version 3. Import them by these names,
or call `install()` to put them under the names that existing code imports. Nothing is installed on import.
"""

import sys

from ..errors import Error

_ALIASES = {
    "flash_attn": (
        ("flash_attn", ""),
        ("flash_attn.flash_attn_interface", ".flash_attn_interface"),
        ("flash_attn.bert_padding", ".bert_padding"),
        ("flash_attn.layers", ".layers"),
        ("flash_attn.layers.rotary", ".layers.rotary"),
    ),
    "flash_attn_3": (("flash_attn_interface", ""), ("flash_attn_3", ""), ("flash_attn_3.flash_attn_interface", "")),
}


def install(*, flash_attn=True, flash_attn_3=True, force=False):
    """Makes `import flash_attn` (and `flash_attn.bert_padding`, ..) and `import flash_attn_interface` find Tilewise.

    Process-wide, undone by `uninstall()`. A module of such a name that is imported already, from the real distribution, is
    replaced only with force=True; otherwise `Error` is raised and nothing changes. Package metadata is not touched: tools
    that ask importlib.metadata for a distribution called flash-attn still find none.
    """
    import importlib

    chosen = [name for name, wanted in (("flash_attn", flash_attn), ("flash_attn_3", flash_attn_3)) if wanted]
    for name in chosen:
        for alias, _ in _ALIASES[name]:
            present = sys.modules.get(alias)
            if present is not None and not present.__name__.startswith(__name__) and not force:
                raise Error("install: a module %r is imported already (%s); pass force=True to replace it"
                            % (alias, getattr(present, "__file__", "?")))  # fmt: skip
    for name in chosen:
        for alias, suffix in _ALIASES[name]:
            sys.modules[alias] = importlib.import_module("%s.%s%s" % (__name__, name, suffix))


def uninstall():
    """Removes what `install` put in place."""
    for aliases in _ALIASES.values():
        for alias, _ in aliases:
            present = sys.modules.get(alias)
            if present is not None and present.__name__.startswith(__name__):
                del sys.modules[alias]
