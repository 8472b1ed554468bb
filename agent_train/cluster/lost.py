"""The error that a new start of all parts, from the newest checkpoint, can mend."""


class LostError(RuntimeError):
    """A process, a node or a link of the run is gone or hangs. Settings, data and weights are not to blame."""
