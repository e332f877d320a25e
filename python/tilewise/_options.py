"""Arguments that every front end takes, brought to one form."""

import operator

from .errors import InvalidArgument

NO_WINDOW = (-1, -1)


def window_of(window):
    """(left, right) from None, a pair (integers or None, as tuple, list or array of two integers)."""
    if window is None or window is NO_WINDOW:
        return NO_WINDOW
    try:
        left, right = window
        left = -1 if left is None else operator.index(left)
        right = -1 if right is None else operator.index(right)
    except (TypeError, ValueError):
        raise InvalidArgument("window %r, must be None or a pair (left, right) of integers >= -1" % (window,)) from None
    return left, right


def integer(value, name):
    """An int from an integer or a one-element array."""
    try:
        return operator.index(value)
    except TypeError:
        try:
            return operator.index(value.item())
        except (AttributeError, TypeError, ValueError, RuntimeError):
            raise InvalidArgument("%s %r, must be an integer" % (name, value)) from None


def number(value, name):
    """A float from a number or a one-element array."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument("%s %r, must be a number" % (name, value)) from None


def require(condition, message, *values):
    if not condition:
        raise InvalidArgument(message % values if values else message)


def same(**lengths):
    """Refuses arguments of which only some are given."""
    given = [name for name, value in lengths.items() if value is not None]
    if given and len(given) != len(lengths):
        missing = [name for name in lengths if name not in given]
        raise InvalidArgument("%s given without %s" % (", ".join(given), ", ".join(missing)))
