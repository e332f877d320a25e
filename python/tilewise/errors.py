"""Exceptions. Each is a `tilewise.Error` and the built-in exception whose meaning it has."""


class Error(RuntimeError):
    """Base of every error that the library reports. The text names the argument, the value got and what is allowed."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong."""


class Unsupported(Error, NotImplementedError):
    """A valid request that no kernel takes on this machine, or that the Python package does not offer."""


class OutOfMemory(Error, MemoryError):
    """An allocation failed."""


class DeviceError(Error):
    """The CUDA runtime or driver reported an error."""


class InternalError(Error):
    """A fault of the library itself."""


BY_STATUS = {1: InvalidArgument, 2: Unsupported, 3: OutOfMemory, 4: DeviceError, 5: InternalError}
