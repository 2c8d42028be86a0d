"""Every error that jaxinfer raises on purpose.

    JaxinferError
    ├── InvalidRequestError (ValueError)   the caller's request is wrong; HTTP 400
    │   ├── UnknownModelError              the named model is not served here; HTTP 404
    │   └── ChatTemplateError              the chat template cannot render the messages; HTTP 400
    ├── ConfigError (ValueError)           no engine can be built from these settings; exit code 2
    ├── ModelError (ValueError)            checkpoint and model do not fit together; exit code 2
    ├── SnapshotError (ValueError)         a snapshot is damaged, or of another model or config
    ├── QueueFullError (RuntimeError)      too many requests wait; HTTP 503 with Retry-After
    └── EngineDeadError (RuntimeError)     an invariant or the device broke; HTTP 503 for good
        ├── ReplicaDeadError               one of several replicas broke; HTTP 503, others serve on
        └── HostLostError                  a host that shares the model is gone or hangs

The `checkpoints` package has its own tree under `checkpoints.CheckpointError`, because it knows no
jaxinfer.
"""


class JaxinferError(Exception):
    """Base of every error raised on purpose."""


class InvalidRequestError(JaxinferError, ValueError):
    """A request that can never be served as asked.

    Attributes:
        param: Name of the offending field, as the caller spelled it, or None.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class UnknownModelError(InvalidRequestError):
    """The named model is not served here; HTTP 404."""


class ChatTemplateError(InvalidRequestError):
    """Messages that the model's chat template cannot turn into a prompt; `param` is "messages"."""

    def __init__(self, message: str, param: str | None = "messages"):
        super().__init__(message, param)


class ConfigError(JaxinferError, ValueError):
    """Settings from which no engine can be built."""


class ModelError(JaxinferError, ValueError):
    """A checkpoint that does not fit the model: all its faults are listed at once."""


class SnapshotError(JaxinferError, ValueError):
    """A snapshot that this engine cannot go on from; the message names what differs."""


class QueueFullError(JaxinferError, RuntimeError):
    """The waiting queue is at its limit; the same request may succeed later."""


class EngineDeadError(JaxinferError, RuntimeError):
    """The engine has stopped for good; the message tells what broke."""


class ReplicaDeadError(EngineDeadError):
    """The replica that ran a request has stopped for good; another may answer the same request."""


class HostLostError(EngineDeadError):
    """A host that holds a part of the model ended or hangs; all hosts have to be started again."""


def quoted(value: object) -> str:
    """Return a value as an error message quotes it: short, whatever it is."""
    try:
        return f"{value!r:.40}"
    except ValueError:  # an integer of more digits than Python is willing to print
        return f"a huge {type(value).__name__}"
